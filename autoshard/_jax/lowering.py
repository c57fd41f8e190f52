"""Lowering: a traced program as an MLIR module, and what is done with one."""

from collections.abc import Container
from typing import Any

from jax._src import config
from jax.interpreters import mlir
from jaxlib.mlir import ir, passmanager

MLIRError = ir.MLIRError


def lower(traced: Any, platform: str) -> Any:
    """Lowers a traced function for a platform; of an op's traceback, the innermost frame of the user's is enough."""
    with config.traceback_in_locations_limit(1):
        return traced.lower(lowering_platforms=(platform,))


def stablehlo(lowered: Any) -> Any:
    """A private copy of a lowering's StableHLO module operation (its owner keeps the original)."""
    return lowered.compiler_ir("stablehlo").operation.clone()


def bytecode(lowered: Any) -> bytes:
    """A lowering's StableHLO as MLIR bytecode, source locations included."""
    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


def run_passes(module: Any, pipeline: str) -> None:
    """Runs an MLIR pass pipeline, such as Shardy's, on a module operation in place (or raises `MLIRError`).

    The module is not verified again after every pass: that takes as long as the passes do.
    """
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
        manager.enable_verifier(False)
        manager.run(module)


def operations(module: Any, names: Container[str]) -> list[Any]:
    """The operations of these names in a module, at any depth, in order (inner ones before those around them)."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    return found


def parse_attribute(text: str, module: Any) -> Any:
    """An MLIR attribute from its text, in a module's context."""
    return ir.Attribute.parse(text, module.context)


def replace_op(op: Any, name: str) -> None:
    """Puts an op of another name, without attributes, in the place of one: same operands, results and location."""
    types = [result.type for result in op.results]
    new = ir.Operation.create(
        name, results=types, operands=list(op.operands), loc=op.location, ip=ir.InsertionPoint(op)
    )
    for before, after in zip(op.results, new.results, strict=True):
        before.replace_all_uses_with(after)
    op.erase()


def element_bits(kind: Any) -> int:
    """Bits of one element of an MLIR tensor: `i1` takes a byte, a complex number two floats."""
    if isinstance(kind, ir.ComplexType):
        return 2 * element_bits(ir.ComplexType(kind).element_type)
    return max(int(kind.width), 8) if str(kind) == "i1" else int(kind.width)
