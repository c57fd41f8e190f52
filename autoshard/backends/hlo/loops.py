"""Trip counts of HLO loops: read from the text, or worked out from counter and bound.

XLA:GPU and XLA:CPU write `known_trip_count`; XLA:TPU does not, but its conditions
compare a counter with a constant, which may have come a long way through tuples.
"""

import re
from dataclasses import dataclass

from autoshard.backends.hlo.text import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}
_HANDED_ON = frozenset({"bitcast", "convert", "copy", "reshape"})


@dataclass(frozen=True, slots=True)
class UnknownTrips:
    """How often loops run whose text does not say.

    Attributes:
      count: trips of such a loop.
      depth: how many of them inside each other take `count`; deeper ones run once.
    """

    count: int = 1
    depth: int = 3

    def inside(self, around: int) -> int:
        """Trips of such a loop that lies in so many others."""
        return self.count if around < self.depth else 1


ONCE = UnknownTrips()


class Loops:
    """The `while` loops of a module: where each stands, and its trip count.

    Attributes:
      around: by the name of a body or condition, its loop and the computation that the loop stands in.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.around: dict[str, tuple[Computation, Instruction]] = {
            name: (computation, instruction)
            for computation in module
            for instruction in computation
            if instruction.opcode == "while"
            for name in instruction.calls
        }

    def trip_count(self, loop: Instruction) -> int | None:
        """Trips of a `while`, or None if the text does not determine them.

        Read from `known_trip_count`, else from a condition that compares a counter
        with a bound, both traced to constants, the counter stepping by a constant.
        """
        if known := _KNOWN.search(loop.attributes):
            return int(known[1])
        condition = self.condition(loop)
        compare = _comparison(self.module, condition)
        if compare is None:
            return None
        left, right, direction = compare
        if self.constant(condition, right) is None:
            left, right, direction = right, left, _MIRRORED[direction]
        counter, bound = self._element(condition, left), self.constant(condition, right)
        if counter is None or bound is None:
            return None
        start, step = self._initial(loop, counter), self._step(self.body(loop), counter)
        if start is None or not step:
            return None
        # Counting up to a bound, or down: the same with every sign turned.
        if direction in ("GT", "GE"):
            start, step, bound = -start, -step, -bound
        if step < 0:
            return None
        return max(0, -(-(bound - start + (direction in ("LE", "GE"))) // step))

    def body(self, loop: Instruction) -> Computation:
        return self.module[loop.called("body") or ""]

    def condition(self, loop: Instruction) -> Computation:
        return self.module[loop.called("condition") or ""]

    def _element(self, computation: Computation, value: Instruction) -> int | None:
        """Which element of the computation's parameter tuple a value is."""
        value = self._through_copies(computation, value)
        if value.opcode == "get-tuple-element" and computation[value.operands[0]].opcode == "parameter":
            return value.index
        return None

    def constant(self, computation: Computation, value: Instruction) -> int | None:
        """The integer that a value always is."""
        value = self._through_copies(computation, value)
        if value.opcode == "constant":
            return _integer(value.literal)
        if value.opcode != "get-tuple-element":
            return None
        index, owner = value.index, computation[value.operands[0]]
        if owner.opcode == "parameter" and computation.name in self.around:
            outer, loop = self.around[computation.name]
            return self._carried_constant(outer, loop, index)
        if owner.opcode == "while":
            return self._carried_constant(computation, owner, index)
        if owner.opcode == "tuple":
            return self.constant(computation, computation[owner.operands[index]])
        return None

    def _initial(self, loop: Instruction, index: int) -> int | None:
        """The constant with which a loop's element begins."""
        outer, _ = self.around[loop.called("body") or ""]
        start = outer[loop.operands[0]]
        if start.opcode == "tuple":
            return self.constant(outer, outer[start.operands[index]])
        return None

    def _step(self, body: Computation, index: int) -> int | None:
        """The constant that a trip adds to a loop's element."""
        if body.root.opcode != "tuple":
            return None
        new = self._through_copies(body, body[body.root.operands[index]])
        if new.opcode not in ("add", "subtract"):
            return None
        left, right = (body[name] for name in new.operands)
        if new.opcode == "add" and self._element(body, left) != index:
            left, right = right, left
        amount = self.constant(body, right)
        if self._element(body, left) != index or amount is None:
            return None
        return amount if new.opcode == "add" else -amount

    def _carried_constant(self, outer: Computation, loop: Instruction, index: int) -> int | None:
        """The constant that a loop hands from trip to trip unchanged."""
        body = self.body(loop)
        if body.root.opcode != "tuple" or self._element(body, body[body.root.operands[index]]) != index:
            return None
        start = outer[loop.operands[0]]
        return self.constant(outer, outer[start.operands[index]]) if start.opcode == "tuple" else None

    @staticmethod
    def _through_copies(computation: Computation, value: Instruction) -> Instruction:
        while value.opcode in _HANDED_ON:
            value = computation[value.operands[0]]
        return value


def _comparison(module: Module, condition: Computation) -> tuple[Instruction, Instruction, str] | None:
    """Both sides and the direction of the comparison that ends a condition, fused or not."""
    compare, sides = condition.root, condition
    if compare.opcode == "fusion":
        sides = module[compare.calls[0]]
        compare = sides.root
    direction = compare.attribute("direction")
    if compare.opcode != "compare" or direction not in _MIRRORED:
        return None
    left, right = (
        condition[condition.root.operands[int(side.literal)]]
        if side.opcode == "parameter" and sides is not condition
        else side
        for side in (sides[name] for name in compare.operands)
    )
    return left, right, direction


def _integer(literal: str) -> int | None:
    return int(literal) if re.fullmatch(r"-?\d+", literal) else None
