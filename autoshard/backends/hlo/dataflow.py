"""Dataflow of a module: where a value comes from, and where it is used."""

from autoshard.backends.hlo.loops import Loops
from autoshard.backends.hlo.text import UNKNOWN, Computation, Instruction, Module

# Opcodes that hand on (part of) their operand unchanged but for its shape or type.
VIEWS = frozenset({"bitcast", "bitcast-convert", "convert", "copy", "get-tuple-element", "reshape", "transpose"})
# These also leave the data unchanged.
_SLICES = VIEWS | {"slice", "collective-permute-done", "copy-start", "copy-done"}
_GATHERS = frozenset({"all-gather", "all-gather-start", "all-gather-done"})
_SOURCE_SEARCH_DEPTH = 8
_SOURCE_SEARCH_WIDTH = 64


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
        return self._is_sliced(computation, reduce, element, -(-reduce.shapes[element].size // size), frozenset())

    def is_cut_again(self, computation: Computation, gathered: Instruction, element: int) -> bool:
        """Whether one result of a gather is only ever sliced by partition id, perhaps after more such gathers."""
        return self._is_sliced(computation, gathered, element, 0, _GATHERS)

    def _is_sliced(
        self, computation: Computation, made: Instruction, element: int, least: int, through: frozenset[str]
    ) -> bool:
        """Whether one result is only sliced by partition id, to `least` elements or more; `through`: further views."""

        def only_sliced(inside: Computation, value: str, outside: tuple[Computation, Instruction] | None) -> bool:
            """Whether every use of a value is such a slice; `outside` is the fusion around it."""
            users = self.users_in(inside)[value]
            if inside.root.name == value:
                return outside is not None and not users and only_sliced(outside[0], outside[1].name, None)
            return bool(users) and all(sliced(inside, user, value, outside) for user in users)

        def sliced(
            inside: Computation, user: Instruction, value: str, outside: tuple[Computation, Instruction] | None
        ) -> bool:
            if user.opcode == "dynamic-slice":
                by_id = self._reads_partition_id(inside, user, outside)
                return user.operands[0] == value and user.shapes[0].size >= least and by_id
            if user.opcode == "get-tuple-element" and value == made.name:
                return user.index != element or only_sliced(inside, user.name, outside)
            if user.opcode in VIEWS or user.opcode in through:
                return only_sliced(inside, user.name, outside)
            if user.opcode == "fusion" and outside is None:
                body = self.module[user.calls[0]]
                return only_sliced(body, body.parameters[user.operands.index(value)].name, (inside, user))
            return False

        return only_sliced(computation, made.name, None)

    def adds(self, instruction: Instruction) -> bool:
        """Whether an instruction, or what a fusion ends with, is an addition."""
        last = self.module[instruction.calls[0]].root if instruction.opcode == "fusion" else instruction
        return last.opcode == "add"

    def narrowest(self, computation: Computation, value: Instruction) -> int | None:
        """Bytes per element of the widest type to which readers convert a value first; None if one of them does not."""
        widest = 0
        for user in self.users_in(computation)[value.name]:
            if user.opcode == "convert":
                size: int | None = user.shapes[0].element_bytes
            elif user.opcode in VIEWS:
                size = self.narrowest(computation, user)
            elif user.opcode == "fusion":
                body = self.module[user.calls[0]]
                inner = [body.parameters[i] for i, name in enumerate(user.operands) if name == value.name]
                sizes = [self.narrowest(body, x) for x in inner]
                size = None if None in sizes else max(x for x in sizes if x is not None)
            else:
                size = None
            if size is None:
                return None
            widest = max(widest, size)
        return widest or None

    def source(self, computation: Computation, value: Instruction) -> Instruction:
        """The value that another one is a view of, or of which it is a conversion alone."""
        while True:
            if value.opcode in VIEWS - {"get-tuple-element"} or (
                value.opcode == "fusion" and len(value.operands) == 1 and self._converts(value)
            ):
                value = computation[value.operands[0]]
            else:
                return value

    def _converts(self, fusion: Instruction) -> bool:
        return all(x.opcode == "parameter" or x.opcode in VIEWS for x in self.module[fusion.calls[0]])

    def _reads_partition_id(
        self, computation: Computation, slice_: Instruction, outside: tuple[Computation, Instruction] | None
    ) -> bool:
        """Whether a slice's position depends on the device's partition id.

        Looks back through integers: out of the fusion around it, and out of loops
        that carry the position unchanged.
        """
        left = [(computation, name) for name in slice_.operands[1:]]
        seen: set[tuple[str, str]] = set()
        while left:
            inside, name = left.pop()
            if (inside.name, name) in seen:
                continue
            seen.add((inside.name, name))
            found = inside[name]
            if found.opcode == "partition-id":
                return True
            if found.opcode == "parameter" and outside is not None and inside is computation:
                left.append((outside[0], outside[1].operands[int(found.literal)]))
            elif found.opcode == "get-tuple-element" and inside[found.operands[0]].opcode == "parameter":
                if inside.name in self.loops.around:
                    around, loop = self.loops.around[inside.name]
                    start = around[loop.operands[0]]
                    if start.opcode == "tuple":
                        left.append((around, start.operands[found.index]))
            elif found.shapes and found.shapes[0].dtype[0] in "su":
                left.extend((inside, operand) for operand in found.operands)
                left.extend((body, body.root.name) for body in map(self.module.__getitem__, found.calls))
        return False
