"""Matmuls of a compiled program: shapes of every dot, convolution and library call that multiplies.

Calls of cuBLAS name their contraction in the backend's configuration, those of cuDNN's convolutions as
convolutions do; their scales, biases and additions are not counted. Other libraries and kernels multiply, too, but
their text does not say how much: `uncounted` names them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from autoshard.backends.hlo.text import Computation, Instruction, Module, Shape
from autoshard.errors import HloError
from cost_models.machines.roofline import taps_on_data

# Names of XLA's element types that cost models know by JAX's.
_DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "int8",
    **{f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
}
_INTEGERS = re.compile(r"\d+")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GEMM = re.compile(r"__cublas\$(lt\$)?(gemm|matmul)(\$f8|\$mx)?|__cublas\$\w*gemm\w*")
_CONVOLUTION = re.compile(
    r"__cudnn\$conv(?P<what>Forward|BiasActivationForward|ForwardGraph|BackwardInput|BackwardFilter)"
)
# Libraries and kernels that multiply; the text does not say how much.
_OPAQUE = re.compile(
    r"__cu(blas|dnn)|__onednn|cutlass|triton|mosaic|tpu_custom_call|te_\w*(gemm|attn)|gpu_kernel|__ck\b|__gpu\$xla\.gpu"
)

Matmul = tuple[int, int, int, int, str]  # batch, m, n, k, dtype


def matmuls(module: Module, computation: Computation, instruction: Instruction) -> list[Matmul]:
    """`(batch, m, n, k, dtype)` of every matmul in an instruction and in what it fuses."""
    return [matmul for _, matmul in multiplying(module, computation, instruction)]


def multiplying(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, Matmul]]:
    """The instructions that multiply, each with its matmul: the instruction itself, or some that it fuses."""
    if instruction.opcode in ("fusion", "fusion-start"):
        for name in instruction.calls:
            ragged = _is_ragged(instruction) and not any(map(_is_ragged, module[name]))
            for inner in module[name]:
                for by, matmul in multiplying(module, module[name], inner):
                    yield by, _in_groups(instruction, matmul) if ragged else matmul
    elif (matmul := _matmul(computation, instruction)) is not None:
        yield instruction, matmul


def _is_ragged(instruction: Instruction) -> bool:
    """Whether XLA:TPU makes a ragged product of what a fusion multiplies, or the fusion in it."""
    return '"is_ragged_dot":true' in instruction.attributes


def _in_groups(fusion: Instruction, matmul: Matmul) -> Matmul:
    """What XLA:TPU multiplies of a ragged product, whose text has all groups with all rows: each row once."""
    groups, m, n, k, dtype = matmul
    if fusion.shapes[0].size >= groups * m * n:  # a product per group, over its rows
        return groups, m, n, max(1, k // groups), dtype
    return groups, max(1, m // groups), n, k, dtype


def _matmul(computation: Computation, instruction: Instruction) -> Matmul | None:
    """What an instruction multiplies by itself; None: nothing that its text says."""
    target = target_of(instruction)
    if instruction.opcode not in ("dot", "convolution") and not _GEMM.fullmatch(target):
        library = _CONVOLUTION.fullmatch(target)
        return _library_convolution(computation, instruction, library["what"]) if library else None
    left, right = (computation[name].shapes[0] for name in instruction.operands[:2])
    if instruction.opcode == "convolution":
        return _convolution(instruction, left.dims, right.dims, instruction.shapes[0].dims, _dtype(left, right))
    if instruction.opcode == "dot":
        dims = [_dims(instruction, key) for key in ("lhs_batch_dims", "lhs_contracting_dims")]
    else:
        dims = _read_configuration(instruction)
    batch, k = (prod(left.dims[i] for i in some) for some in dims)
    m, n = (side.size // (batch * k or 1) for side in (left, right))
    return batch, m, n, k, _dtype(left, right)


def uncounted(module: Module, instruction: Instruction) -> Iterator[str]:
    """Library calls and kernels in an instruction, and in what it fuses, that multiply an unknown amount."""
    if instruction.opcode in ("fusion", "fusion-start"):
        for name in instruction.calls:
            for inner in module[name]:
                yield from uncounted(module, inner)
    target = target_of(instruction)
    if _OPAQUE.search(target) and not _GEMM.fullmatch(target) and not _CONVOLUTION.fullmatch(target):
        yield target


def target_of(instruction: Instruction) -> str:
    """The target of a custom call; empty for other instructions."""
    if not instruction.opcode.startswith("custom-call"):
        return ""
    found = _TARGET.search(instruction.attributes)
    return found[1] if found else ""


def _dtype(left: Shape, right: Shape) -> str:
    """The element type that is multiplied, by its name in cost models."""
    wider = right.dtype if left.dtype == "pred" else left.dtype  # a mask times values: XLA:TPU fuses its conversion
    return _DTYPES.get(wider, "bfloat16" if wider.startswith("f8") else wider)


def _read_configuration(call: Instruction) -> list[list[int]]:
    """The left operand's batch and contracting dimensions, as a cuBLAS call has them in its configuration."""
    start = call.attributes.find(" backend_config=")
    config: Any = {}
    if start >= 0:
        text = call.attributes[start + len(" backend_config=") :]
        config, _ = json.JSONDecoder().raw_decode(text) if text.startswith("{") else (None, 0)
    numbers = _found(config, "dot_dimension_numbers")
    if numbers is None:
        raise HloError(f"{call.name} multiplies ({target_of(call)}), but says no dot_dimension_numbers")
    return [[int(x) for x in numbers.get(f"lhs_{what}_dimensions", ())] for what in ("batch", "contracting")]


def _found(config: Any, key: str) -> Any:
    """A value of nested objects; None where there is none."""
    if not isinstance(config, dict):
        return None
    values: Mapping[str, Any] = config
    return (
        values[key] if key in values else next((x for v in values.values() if (x := _found(v, key)) is not None), None)
    )


def _library_convolution(computation: Computation, call: Instruction, what: str) -> Matmul:
    """A convolution of cuDNN, whose window and labels are the forward one's, also where it makes a gradient."""
    made, (first, second) = call.shapes[0], [computation[name].shapes[0] for name in call.operands[:2]]
    if what == "BackwardInput":
        batch, m, n, k, dtype = _convolution(call, made.dims, second.dims, first.dims, _dtype(first, second))
        return batch, m, k, n, dtype
    if what == "BackwardFilter":
        batch, m, n, k, dtype = _convolution(call, first.dims, made.dims, second.dims, _dtype(first, second))
        return batch, k, n, m, dtype
    return _convolution(call, first.dims, second.dims, made.dims, _dtype(first, second))


def _convolution(
    instruction: Instruction, image: tuple[int, ...], kernel: tuple[int, ...], result: tuple[int, ...], dtype: str
) -> Matmul:
    """A convolution as a matmul: XLA:TPU writes every dot as one.

    Only taps that fall on data count. A spatial dimension in which each output has one of them is a
    batch dimension, or the kernel's own where the image has but one point, to which the result's columns belong;
    all others are rows. The mean of the taps per output is rounded down, which only padded windows of several
    taps notice.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        raise HloError(f"convolution {instruction.name} has no dim_labels")
    window = dict(re.findall(r"(\w+)=([\w\-]+)", instruction.attribute("window") or ""))
    rank = sum(label.isdigit() for label in labels[1])
    strides, image_steps, kernel_steps = (
        [int(x) for x in window[key].split("x")] if key in window else [1] * rank
        for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    pads = [int(x.split("_")[0]) for x in window["pad"].split("x")] if "pad" in window else [0] * rank
    taps, outputs, batch = 1, 1, 1
    m, n = result[labels[3].index("b")], kernel[labels[2].index("o")]
    for i in range(rank):
        size, points, width = (
            dims[label.index(str(i))]
            for dims, label in zip((result, image, kernel), (labels[3], labels[1], labels[2]), strict=True)
        )
        on_data = taps_on_data(
            size,
            width,
            points,
            stride=strides[i],
            pad=pads[i],
            image_step=image_steps[i],
            kernel_step=kernel_steps[i],
        )
        taps *= on_data
        outputs *= size
        if on_data == size == width and points == 1:
            n *= size
        elif on_data == size == width == points:
            batch *= size
        else:
            m *= size
    return batch, m, n, max(1, kernel[labels[2].index("i")] * taps // outputs), dtype


def _dims(instruction: Instruction, key: str) -> list[int]:
    return [int(x) for x in _INTEGERS.findall(instruction.attribute(key) or "")]
