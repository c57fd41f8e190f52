"""Repeats: values that the loops around them make again in later trips, the same as before.

Layers that are scanned inside a loop over micro-batches take their weights so: in each trip of the inner loop another
slice of a stack, and in each trip of the outer loop the same slices.
"""

from collections.abc import Sequence
from typing import NamedTuple

from autoshard.backends.hlo.dataflow import FUSION_DONE, FUSIONS, Dataflow
from autoshard.backends.hlo.text import Computation, Instruction

_PREFETCHES = frozenset({"copy-start", "copy-done"})
# Integers that are the same wherever what they are computed of is: without what depends on the device, or on memory.
_ARITHMETIC = frozenset(
    {
        *("add", "bitcast", "clamp", "compare", "convert", "copy", "divide", "maximum", "minimum", "multiply"),
        *("negate", "remainder", "reshape", "select", "subtract"),
    }
)


class Repeat(NamedTuple):
    """How often loops make the same values.

    Attributes:
      trips: how many trips make the same values.
      copies: how many values one of these makes: slices of one stack.
      source: the computation and the instruction, outside these loops, of the value or of the stack.
    """

    trips: int
    copies: int
    source: tuple[str, str]


class _Fused(NamedTuple):
    """A computation of a fusion, and where the fusion stands."""

    computation: Computation
    fusion: Instruction
    around: "_Fused | None"


_Name = tuple[Computation, str, _Fused | None]  # an instruction by its name


class Repeats:
    """The values that a module's loops repeat."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow, self._loops, self._module = flow, flow.loops, flow.module

    def of(self, computation: Computation, value: Instruction) -> tuple[Repeat, ...]:
        """How often the loops around a computation make the same values; each entry has more copies than the last.

        The first takes in only loops that change nothing; the others the loops around those that take slices, too.
        """
        found: dict[int, Repeat] = {}
        trips = copies = 1
        while computation.name in self._loops.around:
            place = self._carried(computation, value)
            if place is None:
                break
            index, is_slice = place
            computation, loop = self._loops.around[computation.name]
            count, start = self._loops.trip_count(loop) or 1, computation[loop.operands[0]]
            if is_slice:
                copies *= count
            else:
                trips *= count
                source = start.operands[index] if start.opcode == "tuple" else f"{start.name}.{index}"
                found[copies] = Repeat(trips, copies, (computation.name, source))
            if start.opcode != "tuple":
                break
            value = computation[start.operands[index]]
        return tuple(found.values())

    def _carried(self, body: Computation, value: Instruction) -> tuple[int, bool] | None:
        """Which element of those that a loop leaves as they are a value is, or is a slice of; and whether it is one."""
        stack = self._sliced(body, self._through(body, value))
        value = self._through(body, value if stack is None else stack)
        is_carried = value.opcode == "get-tuple-element" and body[value.operands[0]].opcode == "parameter"
        return (value.index, stack is not None) if is_carried and self._stays(body, value.index) else None

    def _through(self, computation: Computation, value: Instruction) -> Instruction:
        """What a value is a view or a prefetch of, also through tuples and through loops that hand it on."""
        while True:
            value = self._flow.source(computation, value)
            if value.opcode in _PREFETCHES:
                value = computation[value.operands[0]]
                continue
            if value.opcode != "get-tuple-element":
                return value
            owner = computation[value.operands[0]]
            if owner.opcode == "while" and self._stays(self._loops.body(owner), value.index):
                owner = computation[owner.operands[0]]
            if owner.opcode != "tuple":
                return value
            value = computation[owner.operands[value.index]]

    def _stays(self, body: Computation, index: int) -> bool:
        """Whether a loop hands an element from trip to trip as it is."""
        if body.root.opcode != "tuple":
            return False
        value = self._through(body, body[body.root.operands[index]])
        return (
            value.opcode == "get-tuple-element"
            and value.index == index
            and body[value.operands[0]].opcode == "parameter"
        )

    def _sliced(self, body: Computation, value: Instruction) -> Instruction | None:
        """The stack of which a value is a slice that depends on the loop's counters alone; None if it is none."""
        inside, around = body, None
        while value.opcode in FUSIONS or value.opcode == FUSION_DONE:
            if value.opcode == FUSION_DONE:
                value = inside[value.operands[0]]
            around = _Fused(inside, value, around)
            inside = self._module[value.calls[0]]
            value = self._flow.source(inside, inside.root)
        if value.opcode != "dynamic-slice" or not self._counted(
            body, [(inside, x, around) for x in value.operands[1:]]
        ):
            return None
        stack = self._flow.source(inside, inside[value.operands[0]])
        while around is not None and stack.opcode == "parameter":
            stack = self._flow.source(
                around.computation, around.computation[around.fusion.operands[int(stack.literal)]]
            )
            around = around.around
        return stack if around is None else None

    def _counted(self, body: Computation, indices: Sequence[_Name]) -> bool:
        """Whether integers take the same values, trip by trip, whenever a loop runs.

        They do if they follow from elements that begin with constants, and follow in turn from such elements.
        """
        outer, loop = self._loops.around[body.name]
        start = outer[loop.operands[0]]
        if start.opcode != "tuple" or body.root.opcode != "tuple":
            return False
        seen: set[int] = set()
        left: Sequence[_Name] = indices
        while left:
            elements = self._elements(left)
            if elements is None:
                return False
            new = elements - seen
            if any(self._loops.constant(outer, outer[start.operands[k]]) is None for k in new):
                return False
            seen |= new
            left = [(body, body.root.operands[k], None) for k in new]
        return True

    def _elements(self, names: Sequence[_Name]) -> set[int] | None:
        """The elements of a loop's tuple that integers are computed of; None if of anything else, too."""
        found: set[int] = set()
        left = list(names)
        while left:
            inside, name, around = left.pop()
            value = inside[name]
            if value.opcode == "parameter" and around is not None:
                left.append((around.computation, around.fusion.operands[int(value.literal)], around.around))
            elif value.opcode == "get-tuple-element" and inside[value.operands[0]].opcode == "parameter":
                found.add(value.index)
            elif value.opcode == FUSION_DONE:
                left.append((inside, value.operands[0], around))
            elif value.opcode in FUSIONS:
                body = self._module[value.calls[0]]
                left.append((body, body.root.name, _Fused(inside, value, around)))
            elif value.opcode in _ARITHMETIC:
                left += [(inside, operand, around) for operand in value.operands]
            elif value.opcode != "constant":
                return None
        return found
