"""Propagation: the layouts that the partitioner itself gives the values of an annotated program.

A hand-written layout names a few layouts; Shardy's propagation completes it. The
program is evaluated again with each equation's path in the name stack of its ops. Names do
not change Shardy's decisions, and through them every value is found in the module after
propagation. `planner.nearest` then picks, for every decision, the choice nearest to those
layouts.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from autoshard import _jax
from autoshard.backends import devices
from autoshard.backends.shardy import passes
from autoshard.backends.shardy.passes import ShardyError, ValueLayout
from autoshard.ir import rewrite
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import Aval, Graph, Path
from autoshard.ir.host_state import HOST_MEMORY
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import LOOP_CARRY, LOOP_RESULT, LOOP_SLICE
from autoshard.ir.trace import Traced

SCOPE = re.compile(r"autoshard\.([\d.]+)")  # XLA drops what follows an @ in a name

Ps = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The given layouts of a program: specs of inputs and outputs, constraints inside, donations.

    A position without a spec is left to the partitioner.
    """

    inputs: Mapping[int, PartitionSpec]
    outputs: Mapping[int, PartitionSpec]
    pins: Constraints
    donated: frozenset[int]


def annotated(program: Traced, mesh: MeshAxes, annotations: Annotations, *, keep_unused: bool = False) -> Any:
    """The program, jitted on an abstract mesh with its annotations and traced: `.lower(…)` it.

    Its arguments are the program's flat leaves (without the unused ones, unless they are
    kept); the ops of every equation carry its path.
    """
    on = devices.abstract(mesh)

    def shardings(specs: Mapping[int, PartitionSpec], atoms: Sequence[Any]) -> list[NamedSharding | None]:
        kinds = [HOST_MEMORY if _jax.is_on_host(x.aval) else None for x in atoms]
        return [NamedSharding(on, specs[i], memory_kind=kind) if i in specs else None for i, kind in enumerate(kinds)]

    jaxpr = _jax.open_jaxpr(program.jaxpr)

    def run(*flat: Any) -> list[Any]:
        return rewrite.emit_constraints(program.jaxpr, annotations.pins, on, flat, scope=_scope)

    jitted = jax.jit(
        run,
        in_shardings=tuple(shardings(annotations.inputs, jaxpr.invars)),
        out_shardings=shardings(annotations.outputs, jaxpr.outvars),
        donate_argnums=tuple(sorted(annotations.donated)),
        keep_unused=keep_unused,
    )
    with _jax.auto_mesh(mesh.names, mesh.sizes):
        return jitted.trace(*program.in_avals)


def _scope(path: Path) -> AbstractContextManager[Any]:
    return jax.named_scope("autoshard." + ".".join(map(str, path)))


def propagated(
    program: Traced,
    graph: Graph,
    laid_out: Container[int],
    mesh: MeshAxes,
    annotations: Annotations,
    platform: str,
) -> dict[int, Layout]:
    """Value → layout after Shardy's propagation, for every value that is laid out.

    Args:
      program: the traced program.
      graph: the graph of the program.
      laid_out: the values that have a layout; the others are recomputed for free in any.
      mesh: the logical mesh.
      annotations: the given layouts.
      platform: JAX's name of the platform to lower for.

    Raises:
      ShardyError: propagation fails, or the lowered program lacks a value.
    """
    found = passes.propagate(
        passes.lowered(
            annotated(program, mesh, annotations, keep_unused=True),
            platform,
            [(eqn.primitive, eqn.where) for eqn in graph.eqns],
        )
    )
    lowered = ops_of(graph, found.values)
    layouts = dict(zip(graph.inputs, found.arguments, strict=True))
    rounds = {graph.carry[e]: lowered.get(r[0]) for e, r in enumerate(graph.results) if _is(graph, e, LOOP_RESULT)}
    for e, results in enumerate(graph.results):
        for v in results:
            if v not in laid_out:
                continue
            op = rounds[graph.carry[e]] if _is(graph, e, LOOP_CARRY) else lowered.get(v)
            layout = as_operand(graph, e, v, layouts) if op is None else layout_in(op, graph.avals[v])
            if layout is None:
                eqn = graph.eqns[e]
                raise ShardyError(f"no op of the lowered program is `{eqn.primitive}` at {eqn.where}")
            layouts[v] = layout
    return layouts


def _is(graph: Graph, e: int, primitive: str) -> bool:
    return graph.eqns[e].primitive == primitive


def as_operand(graph: Graph, e: int, v: int, layouts: Mapping[int, Layout]) -> Layout | None:
    """The layout of a result whose equation lowers to nothing: that of an operand, or of the operand's slices.

    Constants have no layout: a loop that slices them reads them whole.
    """
    dropped = int(_is(graph, e, LOOP_SLICE))
    like = [u for u in graph.operands[e] if graph.avals[u].shape[dropped:] == graph.avals[v].shape]
    known = next((Layout(layouts[u].dims[dropped:]) for u in like if u in layouts), None)
    if known is None and like and graph.eqns[e].traits.link:
        return Layout(((),) * graph.avals[v].ndim)
    return known


def layout_in(op: ValueLayout, aval: Aval) -> Layout:
    """A value's layout in the op result that it lowers to (keys lower to more dimensions)."""
    return Layout(op.layout.dims[: aval.ndim])


Results = Mapping[Path, Mapping[Aval, Sequence[int]]]  # the results of an equation by their types, in order


def results_of(graph: Graph) -> Results:
    """The results of every equation."""
    equal: dict[Path, dict[Aval, dict[int, int]]] = {}
    for makes, results in zip(graph.makes, graph.results, strict=True):
        for (path, i), v in zip(makes, results, strict=True):
            equal.setdefault(path, {}).setdefault(graph.avals[v], {})[i] = v
    return {
        path: {aval: [members[i] for i in sorted(members)] for aval, members in types.items()}
        for path, types in equal.items()
    }


def ops_of(graph: Graph, values: Sequence[ValueLayout]) -> dict[int, ValueLayout]:
    """Value → the op result that it lowers to."""
    return matched(results_of(graph), by_path(values))


def by_path(values: Iterable[ValueLayout]) -> dict[Path, list[ValueLayout]]:
    """The op results in the scope of every equation, in order."""
    ops: dict[Path, list[ValueLayout]] = {}
    for value in values:
        path = path_in(value.name)
        if path is not None:
            ops.setdefault(path, []).append(value)
    return ops


def matched(results: Results, ops: Mapping[Path, Sequence[ValueLayout]]) -> dict[int, ValueLayout]:
    """Value → the op result that it lowers to.

    An equation's results are the last op results in its scope; of those of equal shape,
    in order. Shardy's op for a constraint stands for the constraint's operand only if nothing
    else in the scope does.
    """
    found: dict[int, ValueLayout] = {}
    for path, types in results.items():
        for aval, members in types.items():
            found.update(zip(reversed(members), _last_fitting(ops.get(path, ()), aval, len(members)), strict=False))
    return found


def _last_fitting(ops: Sequence[ValueLayout], aval: Aval, count: int) -> list[ValueLayout]:
    """The last op results that can be a value, the last first; those that Shardy made only where others are too few."""
    fitting: list[ValueLayout] = []
    written: list[ValueLayout] = []
    for op in reversed(ops):
        if len(written) == count:
            break
        if _fits(op.shape, aval):
            fitting.append(op)
            if op.number is not None:
                written.append(op)
    return written if len(written) == count else fitting


@lru_cache(maxsize=2**16)
def path_in(name: str) -> Path | None:
    """The path of the innermost equation that a name stack names."""
    scopes = SCOPE.findall(name)
    return tuple(int(step) for step in scopes[-1].split(".")) if scopes else None


def _fits(shape: tuple[int, ...], aval: Aval) -> bool:
    """Whether an op result can be a value (keys lower to more dimensions)."""
    return shape == aval.shape or (shape[: aval.ndim] == aval.shape and _is_key(aval.dtype))


@lru_cache
def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))
