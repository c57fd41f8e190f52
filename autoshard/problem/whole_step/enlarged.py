"""Enlarged: a graph with further equations in it, some of which a plan may leave out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.op_traits import DEVICE_PUT, LOOP_RESULT, PREDICATE
from autoshard.ir.saved_values import ValueId

_NOWHERE = -1  # the first number of the path of an equation that no program has


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A graph in which a plan chooses what the backward passes read.

    Attributes:
      graph: with its `optional` equations.
      recalls: a recall → the value of the program that it reads.
      keeps: a keep, a derive or a stack → the value of the program that it keeps.
      offloads: the stacks in the host's memory among these.
      held: the values that lie in memory where the program runs as it is written; others are computed where they are
        read.
      final: the values of a flat pass that its backward pass reads at once: they are kept.
    """

    graph: Graph
    recalls: Mapping[int, ValueId]
    keeps: Mapping[int, ValueId]
    offloads: frozenset[int]
    held: frozenset[ValueId]
    final: frozenset[ValueId] = frozenset()


@dataclass(slots=True)
class Addition:
    """An equation to be added.

    Attributes:
      at: before which equation of the graph; −1 while that is not known.
      eqn: the equation.
      operands: values.
      results: values.
      loop: the loop body that it is in.
      optional: whether a plan may leave it out.
      of: the value of the program that it keeps or recalls.
      derived: the value of the forward pass that it is, if it computes one that is not stored.
    """

    at: int
    eqn: Eqn
    operands: tuple[int, ...]
    results: tuple[int, ...]
    loop: int
    optional: bool = True
    of: ValueId | None = None
    derived: int | None = None


class Enlargement:
    """Collects what is added to a graph, and which of its equations read other values than before.

    `held`: of every value of the graph, whether it lies in memory where the program runs as it is written.
    """

    def __init__(self, graph: Graph, held: NDArray[np.bool_]) -> None:
        self.graph, self.held = graph, held
        self.made_by, self.consumers = graph.producers, graph.consumers
        self.id_of = {
            v: ValueId(*spot)
            for e, values in enumerate(graph.results)
            for spot, v in zip(graph.makes[e], values, strict=True)
        }
        self.additions: list[Addition] = []
        self.optional: set[int] = set()  # of the graph's own equations
        self.repeatable: set[int] = set()  # the same, those that a backward pass may run again
        self.final: set[ValueId] = set()  # what is read at once, and not repeated
        self.keeps: dict[int, ValueId] = {}  # the same
        self.on_host = set(graph.on_host)
        self.reads: dict[tuple[int, int], int] = {}  # (equation, operand) → what it reads now
        self._avals, self._trips, self._loops = list(graph.avals), list(graph.trips), list(graph.value_loop)

    def maker(self, value: int) -> int:
        """The equation that makes a value; −1 for none."""
        return self.made_by.get(value, (-1, 0))[0]

    def value(self, aval: Aval, trips: int, loop: int) -> int:
        """A new value."""
        self._avals.append(aval)
        self._trips.append(trips)
        self._loops.append(loop)
        return len(self._avals) - 1

    def equation(self, primitive: str, operands: Sequence[int], result: int, where: str) -> Eqn:
        """An equation with one result and no parameters."""
        avals = tuple(self._avals[v] for v in operands)
        return Eqn(primitive=primitive, operands=avals, results=(self._avals[result],), params={}, where=where)

    def finish(self) -> WholeStep:
        """The graph with all that was added, without what nothing reads."""
        graph = self.graph
        rows: list[tuple[Addition | None, int]] = []  # what is added, or an equation of the graph
        waiting = sorted((a for a in self.additions if a.at >= 0), key=lambda a: a.at)[::-1]
        for e in range(len(graph.eqns) + 1):
            while waiting and waiting[-1].at <= e:
                rows.append((waiting.pop(), -1))
            if e < len(graph.eqns):
                rows.append((None, e))
        live = set(graph.outputs)
        kept: list[tuple[Addition | None, int]] = []
        for added, e in reversed(rows):
            results = graph.results[e] if added is None else added.results
            untaken = added is None and graph.eqns[e].primitive in (LOOP_RESULT, PREDICATE)
            if untaken or not live.isdisjoint(results):
                kept.append((added, e))
                live.update(self._operands(e) if added is None else added.operands)
                live.update(() if added is None or added.derived is None else (added.derived,))
        kept.reverse()
        self._leave_out_unread(kept)
        return self._numbered(kept)

    def _leave_out_unread(self, rows: Sequence[tuple[Addition | None, int]]) -> None:
        """Makes optional what the forward pass computes for optional equations alone, as what it only keeps."""
        needed = set(self.graph.outputs)
        for added, e in reversed(rows):
            optional = e in self.optional if added is None else added.optional
            if added is None and e in self.repeatable and needed.isdisjoint(self.graph.results[e]):
                self.optional.add(e)
            elif not optional:
                needed.update(self._operands(e) if added is None else added.operands)

    def _operands(self, e: int) -> tuple[int, ...]:
        return tuple(self.reads.get((e, i), v) for i, v in enumerate(self.graph.operands[e]))

    def _numbered(self, rows: Sequence[tuple[Addition | None, int]]) -> WholeStep:
        graph = self.graph
        eqns: list[Eqn] = []
        operands: list[tuple[int, ...]] = []
        results: list[tuple[int, ...]] = []
        carry: dict[int, tuple[int, int]] = {}
        recalls: dict[int, ValueId] = {}
        keeps: dict[int, ValueId] = {}
        for now, (added, e) in enumerate(rows):
            eqns.append(graph.eqns[e] if added is None else added.eqn)
            operands.append(self._operands(e) if added is None else added.operands)
            results.append(graph.results[e] if added is None else added.results)
            if added is None and e in graph.carry:
                carry[now] = graph.carry[e]
            of = self.keeps.get(e) if added is None else added.of
            if of is not None:
                (recalls if eqns[-1].traits.renames and added is not None else keeps)[now] = of
        nowhere = [(_NOWHERE, now) for now in range(len(rows))]
        found = replace(
            graph,
            on_host=frozenset(self.on_host),
            eqns=tuple(eqns),
            operands=tuple(operands),
            results=tuple(results),
            takes=tuple(
                graph.takes[e] if added is None else tuple((nowhere[now], i) for i in range(len(added.operands)))
                for now, (added, e) in enumerate(rows)
            ),
            makes=tuple(
                graph.makes[e] if added is None else tuple((nowhere[now], i) for i in range(len(added.results)))
                for now, (added, e) in enumerate(rows)
            ),
            eqn_loop=tuple(graph.eqn_loop[e] if added is None else added.loop for added, e in rows),
            again_of=tuple(graph.again_of[e] if added is None else 0 for added, e in rows),
            carry=carry,
            repeated=_marked(rows, graph.repeated),
            backward=_marked(rows, graph.backward),
            derived={now: a.derived for now, (a, _) in enumerate(rows) if a is not None and a.derived is not None},
            avals=tuple(self._avals),
            trips=tuple(self._trips),
            value_loop=tuple(self._loops),
            optional=frozenset(
                now for now, (a, e) in enumerate(rows) if (e in self.optional if a is None else a.optional)
            ),
        )
        held = frozenset(at for v, at in self.id_of.items() if self.held[v])
        return WholeStep(
            graph=found,
            recalls=recalls,
            keeps=keeps,
            offloads=frozenset(e for e in keeps if not self.on_host.isdisjoint(results[e])),
            held=held,
            final=frozenset(self.final),
        )


def _marked(rows: Sequence[tuple[Addition | None, int]], own: Collection[int]) -> frozenset[int]:
    """Of what is added or of the graph: what runs once more, and the graph's own equations among these."""

    def repeats(added: Addition) -> bool:
        return added.of is None and not added.eqn.traits.link and added.eqn.primitive != DEVICE_PUT

    return frozenset(now for now, (added, e) in enumerate(rows) if (e in own if added is None else repeats(added)))
