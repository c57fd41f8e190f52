"""Probe: the layouts and collectives that Shardy gives a program with only some of its constraints.

The program is lowered once, with every constraint in a scope that names the value which
it constrains. Each question removes the constraints of some values from a copy, lets Shardy
propagate layouts and write every resharding out as collectives, all in-process. Equal
gathers of one value count once, since the compilers merge them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.backends import devices
from autoshard.backends.shardy import collectives
from autoshard.backends.shardy.passes import Lowering, Reading, ValueLayout, lowered
from autoshard.backends.shardy.propagation import (
    SCOPE,
    Annotations,
    as_operand,
    by_path,
    layout_in,
    matched,
    path_in,
    results_of,
)
from autoshard.ir import rewrite
from autoshard.ir.graph import Graph, Path
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.trace import Traced

Moved = tuple[str, tuple[str, ...], str]  # kind, axes and element type of collectives
Cast = tuple[str, Layout, Layout]  # type of a cast's result, the layouts of operand and result

_OF_VALUE = re.compile(r"autoshard-of\.(\d+)")
_VALUE = "autoshard.value"
_CONSTRAINT = "sdy.sharding_constraint"


class Answer:
    """The collectives, casts and layouts that Shardy gives a program, in bytes per device and step.

    Attributes:
      casts: of which the result has another layout than the operand: XLA moves the operand before it casts.
      layouts: of every value.
    """

    def __init__(
        self,
        layouts: Mapping[int, Layout],
        casts: Callable[[], Mapping[Cast, int]],
        collectives: Callable[[], Iterable[tuple[Path, Moved, int]]],
    ) -> None:
        """Takes the layouts, and what counts the casts and writes out the collectives when they are first asked for."""
        self.layouts, self._casts, self._collectives = layouts, casts, collectives

    @cached_property
    def casts(self) -> Mapping[Cast, int]:
        """How many casts of a kind there are whose result has another layout than the operand."""
        return self._casts()

    @cached_property
    def at(self) -> Mapping[tuple[Path, Moved], int]:
        """The bytes of all collectives of a kind by the equation from which they come.

        Raises:
          ShardyError: a pass fails.
        """
        _ = self.casts  # before collectives are written out, which changes the module
        at: Counter[tuple[Path, Moved]] = Counter()
        for path, moved, nbytes in self._collectives():
            at[path, moved] += nbytes
        return at

    @cached_property
    def moved(self) -> Mapping[Moved, int]:
        """The bytes of all collectives of a kind.

        Raises:
          ShardyError: a pass fails.
        """
        totals: Counter[Moved] = Counter()
        for (_, moved), nbytes in self.at.items():
            totals[moved] += nbytes
        return totals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where the results of equations are among the op results of a module, but for those of constraints.

    Attributes:
      at: value → the position of its op result.
      ops: the op results in the scope of every equation, each with its position.
      short: the equations that have a result without an op.
    """

    at: Mapping[int, int]
    ops: Mapping[Path, Sequence[tuple[int, ValueLayout]]]
    short: frozenset[Path]


class Probe:
    """A program lowered with all constraints of a plan, which answers for any part of them."""

    def __init__(
        self,
        program: Traced,
        graph: Graph,
        mesh: MeshAxes,
        annotations: Annotations,
        platform: str,
        *,
        unscattered: Set[str] = frozenset(),
    ) -> None:
        """Lowers the program.

        Args:
          program: the traced program.
          graph: the graph of the program.
          mesh: the mesh of the annotations.
          annotations: a spec for every input and output, and all constraints.
          platform: the platform to lower for.
          unscattered: the axes over all of which its compiler all-reduces a sum that is cut then.
        """
        self._graph, self._mesh, self._unscattered = graph, mesh, unscattered
        self.of = values_at(graph)
        self.values = frozenset(self.of.get(key, -1) for key in _keys(annotations)) - {-1}
        self._inputs = {
            v: Layout.from_spec(annotations.inputs[i], graph.avals[v].ndim) for i, v in enumerate(graph.inputs)
        }
        self._lowering = Lowering(
            lowered(self._trace(program, annotations), platform, [(eqn.primitive, eqn.where) for eqn in graph.eqns])
        )
        self._lowering.edit(_mark)
        self._constraints = self._lowering.numbers_of(_CONSTRAINT)
        self._results = results_of(graph)
        self._members = {
            path: frozenset(v for members in types.values() for v in members) for path, types in self._results.items()
        }
        self._places: dict[tuple[int, ...], _Places] = {}  # by the numbers of op results

    @property
    def size(self) -> int:
        """The number of op results in the lowered program."""
        return self._lowering.count

    def _trace(self, program: Traced, annotations: Annotations) -> Any:
        """The annotated program, each constraint in the scope of its value."""
        on = devices.abstract(self._mesh)

        def run(*flat: Any) -> list[Any]:
            return rewrite.emit_constraints(program.jaxpr, annotations.pins, on, flat, scope=_scope, label=self._label)

        def shardings(specs: Mapping[int, PartitionSpec]) -> list[NamedSharding]:
            return [NamedSharding(on, specs[i]) for i in sorted(specs)]

        jitted = jax.jit(
            run, in_shardings=tuple(shardings(annotations.inputs)), out_shardings=shardings(annotations.outputs)
        )
        with _jax.auto_mesh(self._mesh.names, self._mesh.sizes):
            return jitted.trace(*program.in_avals)

    def _label(self, place: rewrite.ConstraintSite) -> str:
        return f"autoshard-of.{self.of[place]}" if place in self.of else "autoshard-fixed"

    def ask(self, kept: Set[int]) -> Answer:
        """What Shardy does if only the constraints of these values are emitted.

        Raises:
          ShardyError: propagation fails.
        """
        module = self._lowering.propagated(lambda module: _drop(module, kept))
        reading = self._lowering.read(module, self._constraints)
        if reading.numbers not in self._places:
            self._places[reading.numbers] = self._placed(module)
        layouts = self._layouts(reading, self._places[reading.numbers])
        return Answer(layouts, lambda: self._casts(module), lambda: self._collectives(module))

    def _placed(self, module: Any) -> _Places:
        """Where the equations' results are in a module."""
        read = (value for value in self._lowering.values(module) if value.number is not None)
        values = [value for value in read if value.number not in self._constraints]
        position = {id(value): n for n, value in enumerate(values)}
        ops = by_path(values)
        found = matched(self._results, ops)
        return _Places(
            at={v: position[id(value)] for v, value in found.items()},
            ops={path: [(position[id(value)], value) for value in there] for path, there in ops.items()},
            short=frozenset(path for path, members in self._members.items() if not members <= found.keys()),
        )

    def _layouts(self, reading: Reading, places: _Places) -> dict[int, Layout]:
        """Value → its layout; that of the operand where an equation lowers to nothing."""
        graph, layouts, at, read = self._graph, dict(self._inputs), places.at, reading.layouts
        beside, found = self._beside(reading, places)
        for e, results in enumerate(graph.results):
            for v in results:
                layout: Layout | None = None
                if v in found:
                    layout = layout_in(found[v], graph.avals[v])
                elif v in at and v not in beside:
                    layout = _cut(read[at[v]], graph.avals[v].ndim)
                elif not graph.eqns[e].traits.link:
                    layout = as_operand(graph, e, v, layouts)
                if layout is not None:
                    layouts[v] = layout
        return layouts

    def _beside(self, reading: Reading, places: _Places) -> tuple[Set[int], Mapping[int, ValueLayout]]:
        """The results in whose scope there are constraints or ops that Shardy made, or no op; and their op results."""
        others: dict[Path, list[tuple[int, int, ValueLayout]]] = {path: [] for path in places.short}
        for n, (before, value) in enumerate(reading.others):
            path = path_in(value.name)
            if path is not None and path in self._results:
                others.setdefault(path, []).append((before, n, value))
        there: dict[Path, list[ValueLayout]] = {}
        for path, made in others.items():
            for n, value in places.ops.get(path, ()):
                layout = reading.layouts[n]
                layout = Layout.replicated(len(value.shape)) if layout is None else layout
                made.append((n, len(reading.others), replace(value, layout=layout)))
            there[path] = [value for _, _, value in sorted(made, key=lambda entry: entry[:2])]
        beside = frozenset[int]().union(*(self._members[path] for path in there))
        return beside, matched({path: self._results[path] for path in there}, there)

    def _collectives(self, module: Any) -> Iterator[tuple[Path, Moved, int]]:
        """(equation, kind, bytes) of every collective of a propagated module, equal ones of one operand once."""
        collectives.write_out(module)
        met: set[tuple[Any, str]] = set()
        for op, around in collectives.operations(module):
            same = (op.operands[0], collectives.text(op))
            if same in met:
                continue
            met.add(same)
            scopes = SCOPE.findall(str(op.location))
            path = tuple(int(step) for step in scopes[-1].split(".")) if scopes else ()
            for kind, axes, nbytes, trips in collectives.parts(op, around, self._mesh):
                whole = kind == "reduce-scatter" and self._unscattered and self._unscattered <= set(axes)
                done = "all-reduce" if whole else kind
                yield path, (done, tuple(sorted(axes)), str(op.results[0].type.element_type)), nbytes * trips

    def _casts(self, module: Any) -> Counter[Cast]:
        """Casts in a propagated module whose layout differs from that of their operand."""
        found: Counter[Cast] = Counter()
        for op in _jax.operations(module, {"stablehlo.convert"}):
            before = op.operands[0].owner
            results = getattr(before, "results", ())  # a block's argument has no op
            if len(results) != 1:
                continue
            source, target = self._lowering.layouts_of(before), self._lowering.layouts_of(op)
            if source is target:
                continue
            kind = op.results[0].type
            whole = (_replicated(len(kind.shape)),)
            (source,), (target,) = source or whole, target or whole
            if source != target:
                found[str(kind), source, target] += 1
        return found


def _keys(annotations: Annotations) -> Iterator[rewrite.ConstraintSite]:
    """The places of all constraints that can be left out."""
    pins = annotations.pins
    for name, group in (("made", pins.made), ("taken", pins.taken), ("input", pins.inputs), ("output", pins.outputs)):
        yield from ((name, key) for key in group)


def values_at(graph: Graph) -> dict[rewrite.ConstraintSite, int]:
    """Place in the rewritten program → the value constrained there."""
    found: dict[rewrite.ConstraintSite, int] = {}
    for name, spots, values in (("made", graph.makes, graph.results), ("taken", graph.takes, graph.operands)):
        for places, met in zip(spots, values, strict=True):
            found.update(((name, spot), v) for spot, v in zip(places, met, strict=True))
    found.update((("input", i), v) for i, v in enumerate(graph.inputs))
    found.update((("output", i), v) for i, v in enumerate(graph.outputs))
    return found


def _scope(path: Path) -> AbstractContextManager[Any]:
    return jax.named_scope("autoshard." + ".".join(map(str, path)))


def _mark(module: Any) -> None:
    """Notes at every constraint its value, so that its location need not be read again."""
    for op in _jax.operations(module, {_CONSTRAINT}):
        found = _OF_VALUE.findall(str(op.location))
        if found:
            op.attributes[_VALUE] = _jax.parse_attribute(f"{found[-1]} : i64", module)


def _drop(module: Any, kept: Set[int]) -> None:
    """Removes the constraints of all other values."""
    for op in _jax.operations(module, {_CONSTRAINT}):
        if _VALUE in op.attributes and int(op.attributes[_VALUE].value) not in kept:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def _cut(layout: Layout | None, ndim: int) -> Layout:
    """A value's layout in that of its op result (keys lower to more dimensions)."""
    if layout is None:
        return _replicated(ndim)
    return layout if len(layout.dims) == ndim and not layout.unreduced else Layout(layout.dims[:ndim])


@lru_cache
def _replicated(ndim: int) -> Layout:
    return Layout.replicated(ndim)
