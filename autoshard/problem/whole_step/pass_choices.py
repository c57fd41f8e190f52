"""Pass choices: what is added to a graph for one pass, in loops and in flat bodies alike."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping

from autoshard.ir.graph import Eqn
from autoshard.ir.op_traits import RECALL
from autoshard.ir.saved_values import ForwardPass
from autoshard.problem.whole_step.enlarged import Addition, Enlargement


class PassChoices(ABC):
    """The choices of one pass.

    `loop` is the body in which the backward pass runs, `trips` how often. `stands` maps a value of the forward body
    to what a repeated equation takes for it, `kept` to its kept copy.
    """

    loop: int
    trips: int

    def __init__(self, enlargement: Enlargement, one: ForwardPass) -> None:
        self.enlargement, self.graph = enlargement, enlargement.graph
        self.stands: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        ids = {v.id for v in one.values if v.must_keep}
        self._once = {v for v, at in enlargement.id_of.items() if at in ids}
        self._pending: list[Addition] = []

    @abstractmethod
    def in_forward(self, e: int) -> bool:
        """Whether an equation is of the forward body itself."""

    @abstractmethod
    def worth_keeping(self, value: int, read: Collection[int]) -> bool:
        """Whether a value may be kept; `read` are those that the backward pass reads today."""

    @abstractmethod
    def keep(self, value: int) -> int:
        """The value by which the backward pass has a kept one; the value itself if it lives that long anyway."""

    @abstractmethod
    def available(self, value: int) -> int | None:
        """The same for a value that no repeatable equation makes; None if it would have to be kept for that."""

    def kept_elsewhere(self, value: int) -> tuple[int, ...]:
        """The values by which the backward pass has one that is kept in another memory."""
        return ()

    def once(self, value: int) -> int:
        """The value by which the backward pass has one that has to be kept."""
        return self.keep(value)

    def only_kept(self, value: int, e: int) -> bool:
        """Whether a repeated equation e takes a value only as it was kept."""
        return False

    def repeatable(self, e: int) -> bool:
        """Whether an equation may run again."""
        return self.in_forward(e) and self._once.isdisjoint(self.graph.results[e])

    def repeat(self, read: Collection[int]) -> None:
        """Adds the equations that make some values again, and what chooses between each of these and what is kept.

        They have no place yet: see `place`.
        """
        graph, added = self.graph, self.enlargement
        needed = self._needed(read)
        for e, eqn in enumerate(graph.eqns):
            if needed.isdisjoint(graph.results[e]) or not self.repeatable(e):
                continue
            added.repeatable.add(e)
            operands = tuple(self._operand(v, e) for v in graph.operands[e])
            results = tuple(added.value(graph.avals[v], self.trips, self.loop) for v in graph.results[e])
            self._pending.append(Addition(-1, eqn, operands, results, self.loop))
            for v, again in zip(graph.results[e], results, strict=True):
                self.stands[v] = again
                if v in needed and self.worth_keeping(v, read):
                    self._choose(v, again, eqn, forced=v in read)

    def _choose(self, value: int, again: int, like: Eqn, *, forced: bool) -> None:
        """Adds the choice between a kept value and the repeated one; `forced` if the program itself reads it."""
        kept = self.keep(value)
        self.stands[value] = value
        if kept == value:
            return
        self.stands[value] = self.recall(value, (kept, *self.kept_elsewhere(value), again), like.where, forced=forced)

    def recall(self, value: int, sources: tuple[int, ...], where: str, *, forced: bool) -> int:
        """Adds the choice of what the backward pass reads for a value; returns what it reads."""
        added = self.enlargement
        result = added.value(self.graph.avals[value], self.trips, self.loop)
        eqn = added.equation(RECALL, sources, result, where)
        self._pending.append(Addition(-1, eqn, sources, (result,), self.loop, not forced, added.id_of[value]))
        return result

    def place(self, first: Mapping[int, int]) -> None:
        """Places what is pending right before what reads it first.

        Args:
          first: value → the first equation of the graph that reads it.
        """
        reader = dict(first)
        for new in reversed(self._pending):
            new.at = min((reader[v] for v in new.results if v in reader), default=-1)
            for v in new.operands if new.at >= 0 else ():
                reader[v] = min(reader.get(v, new.at), new.at)
        self.enlargement.additions += self._pending

    def redirect(self, read: Iterable[int], readers: Mapping[int, Iterable[tuple[int, int]]]) -> None:
        """Lets readers read what stands for a value; `readers` are (equation, operand)s."""
        for v in read:
            self.enlargement.reads.update(dict.fromkeys(readers[v], self.stands[v]))

    def _needed(self, read: Iterable[int]) -> set[int]:
        """The values from which some are made again, and these."""
        needed, todo = set[int](), list(read)
        while todo:
            v = todo.pop()
            if v not in needed:
                needed.add(v)
                e = self.enlargement.maker(v)
                todo += self.graph.operands[e] if e >= 0 and self.repeatable(e) else ()
        return needed

    def _operand(self, value: int, e: int) -> int:
        """The value that a repeated equation e takes for one of the forward body."""
        maker = self.enlargement.maker(value)
        if maker < 0:
            return value
        if self.repeatable(maker):
            return self.keep(value) if self.only_kept(value, e) else self.stands[value]
        held = self.available(value)
        return self.once(value) if held is None else held
