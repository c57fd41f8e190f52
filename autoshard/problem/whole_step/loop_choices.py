"""Loop choices: the pass of two scans, one decision for all trips."""

from collections.abc import Collection

from autoshard.ir.graph import Aval
from autoshard.ir.op_traits import DEVICE_PUT, LOOP_CARRY, LOOP_CONST, LOOP_RESULT, LOOP_SLICE, LOOP_STACK
from autoshard.ir.saved_values import ForwardPass, ValueId
from autoshard.problem.whole_step.enlarged import Addition, Enlargement
from autoshard.problem.whole_step.pass_choices import PassChoices


class LoopChoices(PassChoices):
    """The choices of a pair of scans: a stack and a slice of it keep a value.

    Of the values `stackable`, the stack may also lie in the host's memory.
    """

    def __init__(self, enlargement: Enlargement, one: ForwardPass, stackable: frozenset[ValueId]) -> None:
        super().__init__(enlargement, one)
        graph = self.graph
        self._offloadable = {v for v, at in enlargement.id_of.items() if at in stackable}
        self._carried: dict[int, int] = {}  # value that has to be kept → what the backward body reads
        enters = [e for e, eqn in enumerate(graph.eqns) if eqn.primitive in (LOOP_CONST, LOOP_SLICE, LOOP_CARRY)]
        entries = {graph.makes[e][0][0]: graph.eqn_loop[e] for e in enters}  # path of a body → its loop
        self._ahead, self.loop = entries.get(one.body, -1), entries.get(one.backward, -1)
        inside = [e for e, loop in enumerate(graph.eqn_loop) if loop == self.loop]
        links = {e for e in enters if graph.makes[e][0][0] == one.backward}
        self._first = next((e for e in inside if e not in links), -1)  # behind the links into the backward body
        self._begin = max((e for e in enters if graph.eqn_loop[e] == self._ahead), default=-1) + 1  # of the forward one
        self.trips = max((graph.trips[v] for e in inside for v in graph.results[e]), default=1)
        self._behind = 0  # the equation behind the links out of the forward body
        self._around, self._around_trips, self._length = 0, 1, 0
        self._stacks: dict[int, tuple[int, list[int]]] = {}  # value → what stacks it, and what slices that
        for e, eqn in enumerate(graph.eqns):
            if eqn.primitive in (LOOP_STACK, LOOP_RESULT) and graph.value_loop[graph.operands[e][0]] == self._ahead:
                self._behind, self._around = e + 1, graph.eqn_loop[e]
                self._around_trips = graph.trips[graph.results[e][0]]
                if eqn.primitive == LOOP_STACK:
                    self._note_stack(e)

    def _note_stack(self, e: int) -> None:
        """Notes a stack that the backward scan alone slices."""
        graph, stack = self.graph, self.graph.results[e][0]
        self._length = graph.avals[stack].shape[0]
        users = self.enlargement.consumers.get(stack, [])
        slices = [u for u, _ in users if graph.eqns[u].primitive == LOOP_SLICE and graph.eqn_loop[u] == self.loop]
        if slices and len(slices) == len(users) and stack not in graph.outputs:
            self._stacks[graph.operands[e][0]] = (e, slices)

    def add(self) -> None:
        """Adds the choices of every value that is stacked for the backward scan."""
        graph, added = self.graph, self.enlargement
        if self._ahead < 0 or self._first < 0:
            return
        made = [v for v in self._stacks if added.maker(v) >= 0]
        read = [v for v in made if self.repeatable(added.maker(v))]
        carried = [v for v in made if v not in read and v in self._offloadable]
        for v in carried:
            self.stands[v] = self.once(v)
        self.repeat(read)
        slices = {v: [graph.results[s][0] for s in self._stacks[v][1]] for v in (*read, *carried)}
        self.redirect(slices, {v: [u for s in slices[v] for u in added.consumers.get(s, ())] for v in slices})
        first: dict[int, int] = {}
        for e in range(len(graph.eqns) - 1, -1, -1):
            first.update((added.reads.get((e, i), v), e) for i, v in enumerate(graph.operands[e]))
        self.place(first)

    def in_forward(self, e: int) -> bool:
        return self.graph.eqn_loop[e] == self._ahead and not self.graph.eqns[e].traits.link

    def worth_keeping(self, value: int, read: Collection[int]) -> bool:
        """Values that are stacked today, or that a trip writes to memory anyway; no scalars, and no other names."""
        if value in read:
            return True
        renames = self.graph.eqns[self.enlargement.maker(value)].traits.renames
        return bool(self.enlargement.held[value]) and self.graph.avals[value].size > 1 and not renames

    def available(self, value: int) -> int | None:
        """The backward body's own input: the scan around gives it what it gives to every trip of the forward one."""
        graph, added = self.graph, self.enlargement
        e = added.maker(value)
        eqn = graph.eqns[e]
        if eqn.primitive not in (LOOP_SLICE, LOOP_CONST) or graph.eqn_loop[e] != self._ahead:
            return None
        if value not in self.stands:
            outer = graph.operands[e][0]
            links = [c for c, _ in added.consumers[outer] if graph.eqns[c].primitive == eqn.primitive]
            there = [graph.results[c][0] for c in links if graph.eqn_loop[c] == self.loop]
            self.stands[value] = there[0] if there else self._link(eqn.primitive, outer, value, eqn.where)
        return self.stands[value]

    def once(self, value: int) -> int:
        if value not in self._carried:
            sources = (self.keep(value), *self.kept_elsewhere(value))
            where = self.graph.eqns[self.enlargement.maker(value)].where
            read = value in self._stacks
            self._carried[value] = self.recall(value, sources, where, forced=read) if sources[1:] else sources[0]
        return self._carried[value]

    def kept_elsewhere(self, value: int) -> tuple[int, ...]:
        if value not in self._offloadable:
            return ()
        graph, added = self.graph, self.enlargement
        aval, maker = graph.avals[value], added.maker(value)
        there = added.value(aval, graph.trips[value], self._ahead)
        stack = added.value(Aval((self._length, *aval.shape), aval.dtype), self._around_trips, self._around)
        part = added.value(aval, self.trips, self.loop)
        back = added.value(aval, self.trips, self.loop)
        added.on_host.update((there, stack, part))
        for primitive, at, operand, result, loop in (
            (DEVICE_PUT, max(maker + 1, self._begin), value, there, self._ahead),
            (LOOP_STACK, self._behind, there, stack, self._around),
            (LOOP_SLICE, self._first, stack, part, self.loop),
            (DEVICE_PUT, self._first, part, back, self.loop),
        ):
            eqn = added.equation(primitive, (operand,), result, graph.eqns[maker].where)
            of = added.id_of[value] if primitive == LOOP_STACK else None
            added.additions.append(Addition(at, eqn, (operand,), (result,), loop, of=of))
        return (back,)

    def keep(self, value: int) -> int:
        graph, added = self.graph, self.enlargement
        if value not in self.kept and value in self._stacks:
            e, slices = self._stacks[value]
            added.optional.update((e, *slices))
            added.keeps[e] = added.id_of[value]
            self.kept[value] = graph.results[slices[0]][0]
        elif value not in self.kept:
            aval, where = graph.avals[value], graph.eqns[added.maker(value)].where
            stack = added.value(Aval((self._length, *aval.shape), aval.dtype), self._around_trips, self._around)
            eqn = added.equation(LOOP_STACK, (value,), stack, where)
            added.additions.append(Addition(self._behind, eqn, (value,), (stack,), self._around, of=added.id_of[value]))
            self.kept[value] = self._link(LOOP_SLICE, stack, value, where)
        return self.kept[value]

    def _link(self, primitive: str, outer: int, value: int, where: str) -> int:
        """Adds a link into the backward body; what has it there, of the value's type."""
        inner = self.enlargement.value(self.graph.avals[value], self.trips, self.loop)
        eqn = self.enlargement.equation(primitive, (outer,), inner, where)
        self.enlargement.additions.append(Addition(self._first, eqn, (outer,), (inner,), self.loop))
        return inner
