"""Dataflow of a module: where a value comes from, and where it is used."""

from collections.abc import Iterator
from typing import NamedTuple

from autoshard.backends.hlo.loops import Loops
from autoshard.backends.hlo.text import UNKNOWN, Computation, Instruction, Module

# Opcodes that hand on (part of) their operand unchanged but for its shape or type.
VIEWS = frozenset({"bitcast", "bitcast-convert", "convert", "copy", "get-tuple-element", "reshape", "transpose"})
# XLA:GPU of JAX 0.12 starts some fusions asynchronously; what such a start makes is the result of its done.
FUSIONS = frozenset({"fusion", "fusion-start"})
FUSION_DONE = "fusion-done"
# Each element of the result is computed from the elements of the operands at the same place.
ELEMENTWISE = frozenset(
    {
        *("abs", "add", "convert", "cosine", "divide", "exponential", "log", "logistic", "maximum", "minimum"),
        *("multiply", "negate", "power", "rsqrt", "select", "sine", "sqrt", "subtract", "tanh"),
    }
)
# These also leave the data unchanged.
_SLICES = VIEWS | {"slice", "collective-permute-done", "copy-start", "copy-done"}
_GATHERS = frozenset({"all-gather", "all-gather-start", "all-gather-done"})
# A prefetch into faster memory, which is no change either; a part that a loop takes in a trip, or writes in one.
_PARTS = (VIEWS - {"convert"}) | {"copy-start", "copy-done", "dynamic-slice", "dynamic-update-slice", "slice"}
_FEW = 0.01  # of the elements of a value: sums of so few cost next to nothing
_SOURCE_SEARCH_DEPTH = 8
_SOURCE_SEARCH_WIDTH = 64


class _Around(NamedTuple):
    """A fusion around a computation, where that stands, and what is around it in turn."""

    computation: Computation
    fusion: Instruction
    around: "_Around | None"


class Use(NamedTuple):
    """A use of a value: the instruction, the name by which it reads it, where it stands, and the fusion around that."""

    computation: Computation
    user: Instruction
    operand: str
    around: _Around | None

    @property
    def share(self) -> float:
        """Elements that the user makes of each one that it reads."""
        read = self.computation[self.operand].shapes[0].size
        return sum(shape.size for shape in self.user.shapes) / max(1, read)

    @property
    def sums_to_few(self) -> bool:
        """Whether the user only sums the value up, to far fewer elements."""
        return self.user.opcode == "reduce" and self.share <= _FEW


class Dataflow:
    """Uses and sources of a module's values; results are cached."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.loops = Loops(module)
        self._users: dict[str, dict[str, tuple[Instruction, ...]]] = {}
        self._lines: dict[str, str] = {}

    def users_in(self, computation: Computation) -> dict[str, tuple[Instruction, ...]]:
        """Instructions of a computation that read each of its instructions."""
        if computation.name not in self._users:
            self._users[computation.name] = computation.users
        return self._users[computation.name]

    def where(self, computation: Computation, sources: tuple[Instruction, ...]) -> str:
        """The first known source line: of the sources, then of their operands, then of their users."""
        users = self.users_in(computation)

        def operands(instruction: Instruction) -> list[Instruction]:
            return [computation[name] for name in instruction.operands]

        def readers(instruction: Instruction) -> list[Instruction]:
            return list(users.get(instruction.name, ()))

        for neighbours in (operands, readers):
            level = list(sources)
            for _ in range(_SOURCE_SEARCH_DEPTH):
                for instruction in level:
                    if instruction.name not in self._lines:
                        self._lines[instruction.name] = self.module.where(instruction)
                    if (found := self._lines[instruction.name]) != UNKNOWN:
                        return found
                level = [x for instruction in level if instruction.name in users for x in neighbours(instruction)]
                level = level[:_SOURCE_SEARCH_WIDTH]
        return UNKNOWN

    def sources(self, computation: Computation, names: tuple[str, ...]) -> set[str]:
        """Instructions that these values are views or slices of, themselves and permutes included."""
        found: set[str] = set()
        left = list(names)
        while left:
            instruction = computation[left.pop()]
            if instruction.name in found:
                continue
            found.add(instruction.name)
            if instruction.opcode in _SLICES:
                left.extend(instruction.operands)
        return found

    def is_scattered(self, computation: Computation, reduce: Instruction, element: int, size: int) -> bool:
        """Whether one result of an all-reduce is only ever sliced, by partition id, to its group's share."""
        least = -(-reduce.shapes[element].size // size)
        cuts = self._cuts(computation, reduce, element if reduce.type.startswith("(") else None, VIEWS)
        return bool(cuts) and all(cut.user.shapes[0].size >= least for cut in cuts)

    def is_cut_again(self, computation: Computation, gathered: Instruction, element: int | None) -> bool:
        """Whether one result of a gather is only ever sliced by partition id, perhaps after more such gathers."""
        return bool(self._cuts(computation, gathered, element, VIEWS | _GATHERS))

    def _cuts(
        self, computation: Computation, made: Instruction, element: int | None, through: frozenset[str]
    ) -> list[Use]:
        """The slices by partition id that alone use a value, perhaps behind the opcodes `through`; else none."""
        cuts: list[Use] = []
        for use in self.uses(computation, made, element, through):
            if use is None or not self._cuts_by_id(use):
                return []
            cuts.append(use)
        return cuts

    def _cuts_by_id(self, use: Use) -> bool:
        """Whether a use takes the part of a value that is the device's own."""
        return (
            use.user.opcode == "dynamic-slice"
            and use.user.operands[0] == use.operand
            and self._reads_partition_id(use.computation, use.user, use.around)
        )

    def adds(self, instruction: Instruction) -> bool:
        """Whether an instruction, or what a fusion ends with, is an addition."""
        last = self.module[instruction.calls[0]].root if instruction.opcode == "fusion" else instruction
        return last.opcode == "add"

    def uses(
        self, computation: Computation, made: Instruction, element: int | None, through: frozenset[str]
    ) -> Iterator[Use | None]:
        """The uses of a value that are not of the opcodes `through`, behind whose results it looks for more.

        It looks into fusions and loops, and behind them; None stands for a use that it does not follow, such as that
        the program returns the value.

        Args:
          computation: of the value.
          made: the instruction that makes it.
          element: the number of the value in what that makes; None where that is no tuple.
          through: opcodes.
        """
        left: list[tuple[Computation, str, int | None, _Around | None]] = [(computation, made.name, element, None)]
        seen: set[tuple[str, str, int | None]] = set()
        while left:
            inside, name, at, around = left.pop()
            if (inside.name, name, at) in seen:
                continue
            seen.add((inside.name, name, at))
            if inside.root.name == name:
                if around is not None:
                    left.append((around.computation, around.fusion.name, at, around.around))
                elif inside.name in self.loops.around and at is not None:
                    outer, loop = self.loops.around[inside.name]
                    left += [(outer, loop.name, at, None), (inside, inside.parameters[0].name, at, None)]
                else:
                    yield None
            for user in self.users_in(inside)[name]:
                if user.opcode == "get-tuple-element" and at is not None:
                    if user.index == at:
                        left.append((inside, user.name, None, around))
                elif user.opcode == "tuple":
                    left += [(inside, user.name, i, around) for i, x in enumerate(user.operands) if x == name]
                elif user.opcode == "while":
                    bodies = [self.module[called] for called in user.calls]
                    left += [(body, body.parameters[0].name, at, None) for body in bodies]
                elif user.opcode in FUSIONS:
                    body, outer = self.module[user.calls[0]], _Around(inside, user, around)
                    taken = [i for i, x in enumerate(user.operands) if x == name]
                    left += [(body, body.parameters[i].name, None, outer) for i in taken]
                elif user.opcode in through:
                    left.append((inside, user.name, None, around))
                elif user.opcode == FUSION_DONE:
                    left.append((inside, user.name, at, around))
                else:
                    yield Use(inside, user, name, around)

    def narrowest(self, computation: Computation, made: Instruction, element: int | None) -> int | None:
        """Bytes per element of the widest type to which a value is converted; None if anything reads it unconverted.

        What is computed of it element by element may be converted in its place, and it may be summed to few elements.
        """
        widest = 0
        for use in self.uses(computation, made, element, _PARTS | ELEMENTWISE - {"convert"}):
            if use is None:
                return None
            if use.user.opcode == "convert":
                widest = max(widest, use.user.shapes[0].element_bytes)
            elif not use.sums_to_few:
                return None
        return widest or None

    def ways_kept(self, computation: Computation, made: Instruction, element: int | None) -> int:
        """Into how many parts a value is cut, of which a device keeps its own alone; 1 if anything reads all of it.

        What is computed of it element by element may be cut in its place, and it may be summed to few elements.
        """
        kept = 0.0  # the largest part
        for use in self.uses(computation, made, element, _PARTS - {"dynamic-slice"} | ELEMENTWISE):
            if use is None:
                return 1
            if self._cuts_by_id(use):
                kept = max(kept, use.share)
            elif not use.sums_to_few:
                return 1
        return int(1 / kept) if kept else 1

    def source(self, computation: Computation, value: Instruction) -> Instruction:
        """The value that another one is a view of, or of which it is a conversion alone."""
        return self._views(computation, value)[-1]

    def least_width(self, computation: Computation, value: Instruction) -> int:
        """Bytes per element of the narrowest type that a value has had on the way from its source."""
        views = self._views(computation, value)
        inside = [x for view in views[:-1] if view.opcode == "fusion" for x in self.module[view.calls[0]]]
        return min(shape.element_bytes for x in (*views, *inside) for shape in x.shapes)

    def _views(self, computation: Computation, value: Instruction) -> list[Instruction]:
        """A value, what it is a view or a conversion of, what that is one of, and so on to the source."""
        found = [value]
        while True:
            if value.opcode in VIEWS - {"get-tuple-element"} or (
                value.opcode == "fusion" and len(value.operands) == 1 and self._converts(value)
            ):
                value = computation[value.operands[0]]
                found.append(value)
            else:
                return found

    def _converts(self, fusion: Instruction) -> bool:
        return all(x.opcode == "parameter" or x.opcode in VIEWS for x in self.module[fusion.calls[0]])

    def _reads_partition_id(self, computation: Computation, slice_: Instruction, around: _Around | None) -> bool:
        """Whether a slice's position depends on the device's partition id.

        Looks back through integers: out of the fusions around it, and out of loops
        that carry the position unchanged.
        """
        left = [(computation, name, around) for name in slice_.operands[1:]]
        seen: set[tuple[str, str]] = set()
        while left:
            inside, name, outside = left.pop()
            if (inside.name, name) in seen:
                continue
            seen.add((inside.name, name))
            found = inside[name]
            if found.opcode == "partition-id":
                return True
            if found.opcode == "parameter" and outside is not None:
                left.append((outside.computation, outside.fusion.operands[int(found.literal)], outside.around))
            elif found.opcode == "get-tuple-element" and inside[found.operands[0]].opcode == "parameter":
                if inside.name in self.loops.around:
                    outer, loop = self.loops.around[inside.name]
                    start = outer[loop.operands[0]]
                    if start.opcode == "tuple":
                        left.append((outer, start.operands[found.index], None))
            elif found.shapes and found.shapes[0].dtype[0] in "su":
                left.extend((inside, operand, outside) for operand in found.operands)
                for called in found.calls:
                    body, step = self.module[called], _Around(inside, found, outside)
                    left.append((body, body.root.name, step if found.opcode in FUSIONS else None))
        return False
