"""Evidence: a compiled program, priced, and what else is known of it when findings are sought."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cost_models
from autoshard import _jax
from autoshard.backends import hlo
from autoshard.backends.hlo.dataflow import Dataflow
from autoshard.backends.hlo.repeats import Repeats
from autoshard.backends.hlo.text import UNKNOWN
from autoshard.backends.partitioner_log import Rematerialized, rematerialized
from autoshard.backends.timeline import Timeline, timeline
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import DOT_GENERAL, LOOP_CARRY, LOOP_RESULT, REDUCE_SUM, SCATTER_ADD, SHARD_MAP
from autoshard.planner.record import PlanRecord
from autoshard.problem.assignment import Assignment
from autoshard.verification.asked import Asked
from autoshard.verification.result import Verification
from autoshard.verification.verify import GUESSED_TRIPS, Places, argument_of, path_of

_SUMS = frozenset({DOT_GENERAL, REDUCE_SUM, SCATTER_ADD, SHARD_MAP})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """A program before it was compiled: as a hand has laid it out, and beside it the best plan.

    Attributes:
      hand: the promises of the hand's layouts.
      assignment: the hand's layouts.
      best: the record of the best plan.
      best_assignment: its layouts.
      verification: the compiled program beside the hand's layouts.
      priced_with: prices the program with other specs of some inputs, by position; None leaves the hand's.
      compiled_with: compiles it with further flags.
      compiled_in: compiles it with other specs of some inputs.
    """

    hand: PlanRecord
    assignment: Assignment
    best: PlanRecord
    best_assignment: Assignment
    verification: Verification
    priced_with: Callable[[Sequence[Any]], PlanRecord]
    compiled_with: Callable[[Mapping[str, Any]], Verification]
    compiled_in: Callable[[Sequence[Any]], Verification]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """A compiled program on its machine.

    Attributes:
      module: the program.
      emitted: its collectives.
      timeline: its schedule, priced.
      machine: the cost model, with the mesh placed on it.
      mesh: the axes of the program's mesh.
      limit_bytes: memory of a device.
      log: what the compiler wrote to standard error.
      peak_bytes: of memory, as it was compiled; None where only the text is known.
      source: the program before it was compiled; None where only the compiled text is known.
    """

    module: hlo.Module
    emitted: tuple[hlo.Collective, ...]
    timeline: Timeline
    machine: cost_models.Machine
    mesh: MeshAxes
    limit_bytes: int
    log: str = ""
    peak_bytes: int | None = None
    source: Source | None = None

    @property
    def graph(self) -> Graph | None:
        """The program's equations, where they are known."""
        return None if self.source is None else self.source.assignment.decisions.graph

    @cached_property
    def flow(self) -> Dataflow:
        """Where values come from and go to."""
        return Dataflow(self.module)

    @cached_property
    def asked(self) -> Asked | None:
        """Whether an annotation asks for a collective."""
        return None if self.graph is None else Asked(self.graph)

    @cached_property
    def rematerialized(self) -> tuple[Rematerialized, ...]:
        """The values that the partitioner says it made whole."""
        return rematerialized(self.log, self.mesh)

    def made_whole(self, one: hlo.Collective) -> Rematerialized | None:
        """The value that a gather makes whole, by the partitioner's word: of its own op, or one that its op takes."""
        e = self.equation(one)
        taken = () if self.graph is None or e is None else self.graph.operands[e]
        makers = {None if self.graph is None else self.graph.producers.get(value, (None, 0))[0] for value in taken}
        for value in self.rematerialized:
            maker = self._equations.get(path_of(value.op_name))
            if value.op_name == one.op_name or (maker is not None and maker in makers):
                return value
        return None

    @cached_property
    def _places(self) -> Places:
        return Places(self.graph)

    def where(self, one: hlo.Collective) -> str:
        """The user's source line of a collective; its op's name where the compiler dropped the line."""
        line = self._places(one)[1]
        if line == UNKNOWN:
            line = self._line_in_body(one)
        return one.op_name or line if line == UNKNOWN else line

    def _line_in_body(self, one: hlo.Collective) -> str:
        """The line of a collective that the body of a `shard_map` has, by the first equation of its name."""
        e = self.equation(one)
        if self.graph is None or e is None or self.graph.eqns[e].primitive != SHARD_MAP:
            return UNKNOWN
        name, lines = one.op_name.rpartition("/")[2], _jax.SourceLines()
        body = _jax.equations(self.graph.eqns[e].params["jaxpr"])
        return next((lines(eqn) for eqn in body if eqn.primitive.name.startswith(name)), UNKNOWN)

    def result(self, one: hlo.Collective) -> tuple[hlo.Computation, hlo.Instruction]:
        """The computation of a collective, and the instruction that has its result."""
        computation = self.module[one.computation]
        return computation, computation[one.done]

    @cached_property
    def _equations(self) -> Mapping[Any, int]:
        graph = self.graph
        return {} if graph is None else {spots[0][0]: e for e, spots in enumerate(graph.makes)}

    def equation(self, one: hlo.Collective) -> int | None:
        """The equation that a collective belongs to; of an argument's gather, the first one that takes the argument."""
        graph, e = self.graph, self._equations.get(path_of(one.op_name))
        argument = argument_of(one)
        if graph is None or e is not None or argument is None:
            return e
        uses = [use for value in graph.inputs[argument : argument + 1] for use in graph.consumers.get(value, ())]
        return uses[0][0] if uses else None

    @cached_property
    def added_in_trips(self) -> Mapping[int, int]:
        """The equations between a sum and the addition of it to what a loop carries round, with that loop's trips."""
        return {} if self.graph is None else _added_in_trips(self.graph)

    @cached_property
    def has_room_for_parts(self) -> bool:
        """Whether a device can keep whole what loops scatter in every trip, to be scattered once behind them."""
        more = sum(one.nbytes for one in self.emitted if one.kind == "reduce-scatter" and one.trips > 1)
        return (self.peak_bytes or 0) + more <= self.limit_bytes

    @cached_property
    def _gathered(self) -> Mapping[int, tuple[hlo.Computation, hlo.Instruction]]:
        """Where gathers, by position, have the one value that they gather."""
        found: dict[int, tuple[hlo.Computation, hlo.Instruction]] = {}
        for at, one in enumerate(self.emitted):
            computation = self.module[one.computation]
            start = computation.instructions.get(one.instruction)
            if one.kind != "all-gather" or start is None:
                continue
            if not hlo.communicates(start) and start.opcode != "fusion":  # XLA:TPU begins gathers in fusions
                continue
            if one.combined == len(start.operands) == 1:
                found[at] = computation, computation[start.operands[0]]
        return found

    @cached_property
    def repeated_gathers(self) -> frozenset[int]:
        """Positions of gathers whose value the same computation gathers, too, in a type that is as wide or wider.

        Without those of a backward pass, which gathers again on purpose: the program keeps less.
        """
        groups: dict[tuple[str, str, Any], list[int]] = defaultdict(list)
        for at, (computation, value) in self._gathered.items():
            if _jax.REMATTED in self.emitted[at].op_name:
                continue
            source = self.flow.source(computation, value)
            groups[computation.name, source.name, self.emitted[at].groups].append(at)
        widest = {max(members, key=lambda at: self.emitted[at].nbytes) for members in groups.values()}
        return frozenset(at for members in groups.values() for at in members if at not in widest)

    def was_narrower(self, at: int, width: int) -> bool:
        """Whether what a gather moves was of so few bytes per element before: a compiler widens what it cannot move."""
        place = self._gathered.get(at)
        return place is not None and self.flow.least_width(*place) <= width

    @cached_property
    def unchanged_gathers(self) -> Mapping[int, int]:
        """Positions of gathers of the same values in several trips of a loop, with how many.

        All slices of one stack are kept at once, if the device has room for that; else those gathers alone count of
        which one value is kept; and where there is no room for these, they are gathered again on purpose.
        """
        repeats = Repeats(self.flow)
        options = {at: found for at, place in self._gathered.items() if (found := repeats.of(*place))}
        far = {at: found[-1] for at, found in options.items()}
        near = {at: found[0] for at, found in options.items() if found[0].copies == 1}
        for chosen in (far, near):
            kept: dict[tuple[str, str], int] = {}
            for at, repeat in chosen.items():  # of the forward and the backward pass, once
                kept[repeat.source] = max(repeat.copies * self.emitted[at].nbytes, kept.get(repeat.source, 0))
            if (self.peak_bytes or 0) + sum(kept.values()) <= self.limit_bytes:
                return {at: repeat.trips for at, repeat in chosen.items() if repeat.trips > 1}
        return {}

    def saved_s(self, better: Mapping[int, Sequence[hlo.Collective]]) -> float:
        """How much sooner the compiled schedule ends with other collectives in the places of some."""
        rows = [row for at, one in enumerate(self.emitted) for row in better.get(at, (one,))]
        priced = timeline(self.module, rows, self.machine, self.mesh, unknown_trips=GUESSED_TRIPS)
        return max(0.0, self.timeline.step_s - priced.step_s)


def _added_in_trips(graph: Graph) -> dict[int, int]:
    carried = {graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_CARRY}
    returned = {
        v: graph.trips[graph.results[e][0]]
        for e, eqn in enumerate(graph.eqns)
        if eqn.primitive == LOOP_RESULT
        for v in graph.operands[e]
    }
    for e in reversed(range(len(graph.eqns))):
        if graph.eqns[e].traits.same_values and graph.results[e][0] in returned:  # such as a constraint of the carry
            returned |= dict.fromkeys(graph.operands[e], returned[graph.results[e][0]])
    found: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        terms = set(graph.operands[e])
        if not eqn.traits.addition or not terms & carried or graph.results[e][0] not in returned:
            continue
        if not all(_is_only_added(graph, value, e) for value in terms & carried):
            continue  # such as the residual stream of layers, which every trip reads
        left = list(terms - carried)
        trips = graph.trips[graph.results[e][0]] // max(1, returned[graph.results[e][0]])
        found[e] = trips
        while left:
            maker, _ = graph.producers.get(left.pop(), (-1, 0))
            if maker < 0 or maker in found:
                continue
            traits = graph.eqns[maker].traits
            if graph.eqns[maker].primitive in _SUMS or traits.addition:
                found[maker] = trips
            handed_on = traits.same_values or traits.reshapes or traits.copy or traits.leaves_loop
            if handed_on or traits.addition or traits.scale:
                found[maker] = trips
                left += graph.operands[maker]
            elif graph.eqns[maker].primitive == REDUCE_SUM:
                left += graph.operands[maker]
    return found


def _is_only_added(graph: Graph, value: int, addition: int) -> bool:
    """Whether nothing but one addition takes a value."""
    left = [value]
    while left:
        for use, _ in graph.consumers.get(left.pop(), ()):
            if use != addition and not graph.eqns[use].traits.same_values:
                return False
            left += graph.results[use] if use != addition else ()
    return True
