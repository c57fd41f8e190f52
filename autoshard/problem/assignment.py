"""Assignment: one choice per decision, read as layouts."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.resharding import NO_STRIDES, Resharder, Step
from autoshard.costs.strategies import SUM, decode
from autoshard.ir.graph import Aval
from autoshard.problem.decisions import Chain, Decisions, Input, consumer_port, cut_ps_of, layout_codes
from autoshard.problem.ports import Port


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Layouts under one choice per decision.

    Codes are those of `autoshard.costs.strategies`. A value is *made* in one layout, *kept* in
    another (its copy's, for several consumers), and *taken* by each consumer.
    """

    decisions: Decisions
    resharder: Resharder
    choice: NDArray[np.int64]
    _ports: dict[tuple[int, int], Port | None] = field(init=False, repr=False, default_factory=dict)
    _cuts: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _moved: dict[int, Aval] = field(init=False, repr=False, default_factory=dict)

    def _code(self, port: Port) -> int:
        return int(port.codes[self.choice[port.node]])

    def made(self, value: int) -> int | None:
        """The code in which a value is made; None for free values."""
        port = self.decisions.made.get(value)
        return None if port is None else self._code(port)

    def kept(self, value: int) -> int | None:
        """The code in which a value is kept for its consumers."""
        port = self.decisions.kept.get(value)
        return self.made(value) if port is None else self._code(port)

    def taken(self, e: int, i: int) -> int | None:
        """The code in which equation e takes its operand i."""
        d = self.decisions
        if (e, i) not in self._ports:
            self._ports[e, i] = consumer_port(d.nodes, d.rules, d.node_of, d.mesh, e, i)
        port = self._ports[e, i]
        return None if port is None else self._code(port)

    def own_ps(self, n: int) -> int:
        """Picoseconds of decision n over all its trips, with what it cuts out of the arrays that it takes."""
        if not self._cuts:
            self._cuts.update(dict.fromkeys(range(len(self.decisions.nodes)), 0))
            for edge in self.decisions.edges:
                self._cuts[edge.v] += cut_ps_of(edge, self.resharder, *self.choice[[edge.u, edge.v]].tolist())
        return int(self.decisions.nodes[n].cost_ps[self.choice[n]]) + self._cuts[n]

    def input_code(self, position: int) -> int:
        return self._end(self.decisions.inputs[position])

    def output_code(self, position: int) -> int:
        return self._end(self.decisions.outputs[position])

    def _end(self, node: int) -> int:
        return int(layout_codes(self.decisions.nodes[node])[self.choice[node]])

    def reduced(self, code: int, value: int) -> bool:
        """Whether a code has no unreduced axes, so that it can be pinned."""
        d = self.decisions
        return not (decode(code, d.graph.avals[value].ndim, d.mesh.ndim) == SUM).any()

    def left(self, value: int, *, takers: bool = True) -> int | None:
        """The code in which a value goes on from where it is made: its copy's, or its own.

        Its own where an equation of the same chain takes it as it was made, and the way back
        from the copy would be a collective; and that of an input which anyone takes as it came
        and could cut from the copy, which need not live as long then. Everyone else moves it for
        himself; and all do what is moved for groups of uses, by a compiler that finds what is near, and
        what is cast for products, and taken as it is by others. A pending sum is finished once.

        Args:
          value: the value.
          takers: whether those that take it can move it for themselves.
        """
        made, kept = self.made(value), self.kept(value)
        if made is None or kept is None or made == kept:
            return made
        if self.moved_in_groups(value):
            return made
        if takers and value in self.decisions.cast_apart:
            return made
        uses = self.decisions.graph.consumers.get(value, ())
        if self.is_input(value):
            as_came = any(self.taken(e, i) == made for e, i in uses)
            return made if as_came and not self.communicates(value, kept, made) else kept
        back = any(self.in_chain(e, value) for e, _ in uses)
        return made if back and self.communicates(value, kept, made) else kept

    def moved_in_groups(self, value: int) -> bool:
        """Whether a value is moved for each group of its uses, to the layout of its copy."""
        made, kept = self.made(value), self.kept(value)
        if made is None or kept is None or made == kept or value not in self.decisions.apart:
            return False
        return self.reduced(made, value) and self.communicates(value, made, kept)

    def is_input(self, value: int) -> bool:
        """Whether a value is an input of the program."""
        return isinstance(self.decisions.nodes[self.decisions.made[value].node], Input)

    def takes_past_copy(self, e: int, value: int) -> bool:
        """Whether equation e moves a value for itself, from where it is made, as the copy is what products cast."""
        d = self.decisions
        return value in d.cast_apart and e in d.lives.multiplied[value].otherwise

    def in_chain(self, e: int, value: int) -> bool:
        """Whether equation e is of the chain that makes a value."""
        node = self.decisions.made[value].node
        return self.decisions.node_of[e] == node and isinstance(self.decisions.nodes[node], Chain)

    def communicates(self, value: int, source: int, target: int) -> bool:
        """Whether a value goes from one code to another by a collective."""
        return any(step.kind != "slice" for step in self.path(value, source, target))

    def path(self, value: int, source: int, target: int) -> tuple[Step, ...]:
        """The path of the moved array, as in `bill.transfers`: the smaller side of the cast that makes the value."""
        d = self.decisions
        if not self._moved:
            self._moved.update((edge.value, edge.moved) for edge in reversed(d.edges))  # a copy's comes first
        aval = self._moved.get(value, d.graph.avals[value])
        bucket, strides = d.windows.bucket(value), d.strides.get(value, NO_STRIDES)
        return self.resharder.path(aval, source, target, bucket=bucket, strides=strides)
