"""Element types by name: their size, and which of a chip's matmul rates serves them."""

import re

import numpy as np

from cost_models.errors import CostModelError

_BYTES = {"bfloat16": 2.0, "bool": 1.0, "int4": 0.5, "uint4": 0.5, "int2": 0.25, "uint2": 0.25}
_FLOAT_BITS = re.compile(r"float([468])_e\d+m\d+[a-z0-9]*")


def itemsize(dtype: str) -> float:
    """Bytes per element: `itemsize("float8_e4m3fn") == 1`.

    Raises:
        CostModelError: There is no such dtype.
    """
    if dtype in _BYTES:
        return _BYTES[dtype]
    if match := _FLOAT_BITS.fullmatch(str(dtype)):
        return int(match[1]) / 8
    try:
        found = np.dtype(dtype if re.fullmatch(r"[a-z]+[0-9]*", str(dtype)) else "?none")
    except (TypeError, ValueError, SyntaxError) as error:
        raise CostModelError(f"there is no dtype {str(dtype)[:40]!r}; write one as in bfloat16") from error
    if found.kind not in "biufc" or found.name != str(dtype):
        raise CostModelError(f"{str(dtype)[:40]!r} is no dtype of numbers; write one as in bfloat16")
    return float(found.itemsize)


def matmul_rates(dtype: str) -> tuple[str, ...]:
    """Names of the rates that serve a matmul of this dtype, the first that a chip states wins.

    Types without matrix units of their own run on a wider type's (int4 on int8,
    fp4 on fp8); types that no matrix unit takes (int32, complex) run on the vector units.

    Raises:
        CostModelError: There is no such dtype.
    """
    itemsize(dtype)
    if match := _FLOAT_BITS.fullmatch(dtype):
        narrow = f"peak_float{match[1]}_flops_per_s"
        return (narrow, "peak_float8_flops_per_s", "peak_bfloat16_flops_per_s")
    if dtype in ("int4", "uint4", "int2", "uint2"):
        return ("peak_int4_flops_per_s", "peak_int8_flops_per_s")
    if dtype in ("int8", "uint8"):
        return ("peak_int8_flops_per_s",)
    if dtype == "float16":
        return ("peak_float16_flops_per_s", "peak_bfloat16_flops_per_s")
    return (f"peak_{dtype}_flops_per_s", "vector_flops_per_s")
