"""Flat choices: the pass of a body that holds both, forward first.

XLA stores some of what the forward pass makes; the rest it computes wherever it is read, the
backward pass included, from what is stored. So a stored value is kept by living on, and one
that is not by what it is computed from living on.

The forward pass is cut where least crosses, between layers: what is repeated in one segment
takes what it reads of segments before as it was kept. So what is repeated lives no longer
than the backward pass of its segment.
"""

from collections.abc import Collection, Sequence

from autoshard.ir.op_traits import DERIVE, KEEP
from autoshard.ir.saved_values import ForwardPass
from autoshard.ir.segments import Life, cut
from autoshard.problem.whole_step.enlarged import Addition, Enlargement
from autoshard.problem.whole_step.pass_choices import PassChoices


class FlatChoices(PassChoices):
    """The choices of a flat body.

    Of its last segment nothing is repeated: the backward pass reads it at once, so that keeping it costs nothing.
    """

    def __init__(self, enlargement: Enlargement, one: ForwardPass) -> None:
        super().__init__(enlargement, one)
        graph, depth = self.graph, len(one.body)
        backward = {reads.path for reads in one.reads}
        mine = [e for e, path in enumerate(graph.paths) if path[:depth] == one.body]
        self._backward = {
            e for e in mine if any(graph.paths[e][:n] in backward for n in range(depth + 1, len(graph.paths[e]) + 1))
        }
        after: set[int] = set()  # values that the backward pass makes, and what is made of them
        for e in mine:
            if e in self._backward or not after.isdisjoint(graph.operands[e]):
                after.update(graph.results[e])
        read = [enlargement.maker(v) for e in self._backward for v in graph.operands[e] if v not in after]
        ahead = [e for e in mine if e <= max(read, default=-1) and after.isdisjoint(graph.results[e])]
        self.loop = min((graph.eqn_loop[e] for e in mine), default=0)
        inside = [e for e in ahead if graph.eqn_loop[e] == self.loop]
        self._forward = {e for e in inside if not graph.eqns[e].traits.link}
        self.trips = max((graph.trips[v] for e in inside for v in graph.results[e]), default=1)
        self._lasting = {v.id for v in one.values if v.free}
        self._segment = self._segments(ahead)
        final = max(self._segment.values(), default=0)
        if final:
            enlargement.final.update(
                enlargement.id_of[v] for e in ahead if self._segment[e] == final for v in graph.results[e]
            )
            self._forward = {e for e in self._forward if self._segment[e] < final}
        self._last: dict[int, int] = {}  # value → the last equation of the forward pass that reads it
        for e in ahead:
            self._last.update((v, e) for v in graph.operands[e])
        self._sources_of: dict[int, tuple[int, ...]] = {}

    def _segments(self, ahead: Sequence[int]) -> dict[int, int]:
        """Equation of the forward pass → its segment."""
        graph, place = self.graph, {e: k for k, e in enumerate(ahead)}
        lives = (
            Life(
                k,
                max((place[u] for u, _ in self.enlargement.consumers.get(v, ()) if u in place), default=k),
                graph.avals[v].nbytes,
            )
            for e, k in place.items()
            for v in graph.results[e]
            if graph.value_loop[v] == self.loop
        )
        return dict(zip(ahead, cut(len(ahead), lives), strict=True))

    def add(self) -> None:
        """Adds the choices of every value that the backward pass reads."""
        graph, added = self.graph, self.enlargement
        if not self._forward or not self._backward:
            return
        read: dict[int, None] = {}
        for e in sorted(self._backward):
            for v in graph.operands[e]:
                maker = added.maker(v)
                if maker >= 0 and self.repeatable(maker) and added.id_of[v] not in self._lasting:
                    read[v] = None
        self.repeat(read)
        self.redirect(read, {v: [u for u in added.consumers[v] if u[0] in self._backward] for v in read})
        first: dict[int, int] = {}
        for e in sorted(self._backward, reverse=True):
            first.update((added.reads.get((e, i), v), e) for i, v in enumerate(graph.operands[e]))
        self.place(first)

    def in_forward(self, e: int) -> bool:
        return e in self._forward

    def worth_keeping(self, value: int, read: Collection[int]) -> bool:
        return bool(self.enlargement.held[value]) or value in read

    def available(self, value: int) -> int | None:
        """The value itself: a result of a loop or an effect lies in memory until it is read for the last time."""
        return value

    def only_kept(self, value: int, e: int) -> bool:
        return self._segment[self.enlargement.maker(value)] != self._segment[e]

    def keep(self, value: int) -> int:
        if value not in self.kept:
            self.kept[value] = self._kept(value)
        return self.kept[value]

    def _kept(self, value: int) -> int:
        graph, added = self.graph, self.enlargement
        if added.id_of[value] in self._lasting:
            return value
        maker = added.maker(value)
        primitive, operands, at = KEEP, [value], max(self._last.get(value, maker), maker) + 1
        if not added.held[value]:
            primitive, operands, at = DERIVE, [self.keep(v) for v in self._sources(value)], min(self._backward)
            if not operands:
                return value
        kept = added.value(graph.avals[value], self.trips, self.loop)
        eqn = added.equation(primitive, operands, kept, graph.eqns[maker].where)
        derived = value if primitive == DERIVE else None
        added.additions.append(
            Addition(at, eqn, tuple(operands), (kept,), self.loop, of=added.id_of[value], derived=derived)
        )
        return kept

    def _sources(self, value: int) -> tuple[int, ...]:
        """The stored values that one which is not stored is computed from, but for those that live on anyway."""
        if value not in self._sources_of:
            added, found = self.enlargement, dict[int, None]()
            for v in self.graph.operands[added.maker(value)]:
                maker = added.maker(v)
                if maker < 0 or added.id_of[v] in self._lasting or not self.repeatable(maker):
                    continue
                found.update(dict.fromkeys([v] if added.held[v] else self._sources(v)))
            self._sources_of[value] = tuple(found)
        return self._sources_of[value]
