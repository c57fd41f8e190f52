"""Emit: the program of a plan under `jax.jit`, with the plan's layouts and constraints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.backends.known_compilers import flag_prefixes
from autoshard.ir import rewrite
from autoshard.ir.trace import Traced
from autoshard.planner.record import Leaf, PlanRecord


def jitted(record: PlanRecord, traced: Traced, mesh: Any) -> Any:
    """The program of its dynamic arguments, by position."""
    arguments = max(traced.argument_of, default=-1) + 1
    in_specs = jax.tree.unflatten(traced.in_tree, [leaf.sharding(mesh) for leaf in record.inputs])
    donated = {traced.argument_of[i] for i in record.donated}
    return _jitted(
        record,
        traced,
        mesh,
        in_shardings=in_specs,
        donate_argnums=tuple(i for i in range(arguments) if i in donated),
    )


def flat_jitted(record: PlanRecord, traced: Traced, mesh: Mesh, *, donate: Sequence[int], **how: Any) -> Any:
    """The program of its flat leaves; `donate` are their positions, the rest are options of `jax.jit`."""
    flat = tuple(leaf.sharding(mesh) for leaf in record.inputs)
    return _jitted(record, traced, mesh, in_shardings=flat, donate_argnums=tuple(donate), **how)


def named_jitted(
    record: PlanRecord, traced: Traced, mesh: Mesh, names: Sequence[str], **how: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The program with its last arguments by keyword, and the arguments to lower it for, which carry the layouts.

    `jax.jit` takes no `in_shardings` for keyword arguments.
    """
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=leaf.sharding(mesh))
        for a, leaf in zip(traced.in_avals, record.inputs, strict=True)
    ]
    arguments = jax.tree.unflatten(traced.in_tree, avals)
    count = len(arguments) - len(names)
    donated = {traced.argument_of[i] for i in record.donated}
    program = _jitted(
        record,
        traced,
        mesh,
        donate_argnums=tuple(i for i in range(count) if i in donated),
        donate_argnames=tuple(name for i, name in enumerate(names, count) if i in donated),
        **how,
    )
    return program, arguments[:count], dict(zip(names, arguments[count:], strict=True))


def _jitted(
    record: PlanRecord,
    traced: Traced,
    mesh: Any,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Any:
    """The emitted program under `jax.jit`, of arguments with the plan's leaves in any pytrees."""

    def run(*args: Any, **kwargs: Any) -> Any:

        def emitted(*flat: Any) -> list[Any]:
            return rewrite.emit_constraints(traced.jaxpr, record.pins, mesh, flat)

        outputs = in_auto_mode(emitted, record.outputs)(*jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(traced.out_tree, outputs)

    run.__name__ = record.name
    out_specs = jax.tree.unflatten(traced.out_tree, [leaf.sharding(mesh) for leaf in record.outputs])
    options = {**_taken(record.compiler_options, mesh), **(compiler_options or {})}
    return jax.jit(run, out_shardings=out_specs, compiler_options=options or None, **how)


def in_auto_mode(fn: Callable[..., list[Any]], outputs: Sequence[Leaf]) -> Callable[..., list[Any]]:
    """`fn` under the mesh in context with Auto axes: with Explicit ones, constraints would be assertions."""
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return fn
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))

    def said(spec: PartitionSpec) -> PartitionSpec:
        """The layout in a type: its Explicit axes."""
        dims = ((dim,) if isinstance(dim, str) else dim or () for dim in spec)
        return PartitionSpec(*(tuple(axis for axis in dim if kinds.get(axis) == AxisType.Explicit) for dim in dims))

    auto: Any = jax.sharding.auto_axes(fn, out_sharding=[NamedSharding(around, said(leaf.spec)) for leaf in outputs])
    return auto


def _taken(options: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """The compiler options of a plan that are flags of the compiler of a mesh's devices."""
    if not isinstance(mesh, Mesh):
        return {}
    prefixes = flag_prefixes(mesh.devices.flat[0].platform)
    return {name: value for name, value in options.items() if name.startswith(prefixes)}
