"""Reads scheduled HLO text: what a compiler emitted, as frozen values.

The text is XLA's own (`jax.stages.Compiled.as_text()`, or a pass dump); see
`HloInstruction::ToString` and `HloModule::ToString` in openxla/xla. One pass over
the lines splits each instruction into name, type, opcode, operands and the rest;
attributes are searched only on demand, so that 10 MB take a second.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autoshard.errors import HloError

# Bits per element of XLA's primitive types (xla_data.proto); tokens and opaque values take no memory.
_BITS: Mapping[str, int] = {
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    **{f"f8{kind}": 8 for kind in ("e3m4", "e4m3", "e4m3fn", "e4m3b11fnuz", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "token": 0,
    "opaque": 0,
}

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (.*?) ([a-z][\w\-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .*)?\{$")
_NAME = re.compile(r"%([^\s,(){}=]+)")
_BARE_NAME = re.compile(r"[^\s,(){}]+")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(%?[^\s,{}]+|\{[^}]*\})"
)
_TABLE = re.compile(r"\d+ .*")
_FIELD = re.compile(r"(\w+)=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'source_file="([^"]*)"')
_SOURCE_LINE = re.compile(r"source_line=(\d+)")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")

UNKNOWN = "<unknown>"


@dataclass(frozen=True, slots=True)
class Shape:
    """One array's element type and dimensions, per device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Logical bytes: no tile padding; types of less than a byte are packed."""
        return (self.size * _BITS[self.dtype] + 7) // 8

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; of types of less than a byte, one."""
        return (_BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@lru_cache(maxsize=65536)
def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of an HLO type, tuples flattened: `(f32[2,4]{1,0}, s32[])` is two.

    Raises:
      HloError: an element type is unknown.
    """
    shapes: list[Shape] = []
    for dtype, dims in _SHAPE.findall(text):
        if dtype not in _BITS:
            raise HloError(f"unknown element type `{dtype}` in {text!r}")
        shapes.append(Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)))
    return tuple(shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`.

    `attributes` is the rest of the line as text, `literal` the text between the
    parentheses (a constant's value, a parameter's number).
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Its result's arrays, tuples flattened."""
        return parse_shapes(self.type)

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def calls(self) -> tuple[str, ...]:
        """Computations it calls, in the order of the text."""
        return tuple(name for _, names in self.calls_by_role for name in names)

    @property
    def calls_by_role(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Called computations with their attribute: `("body", ("region_0",))`."""
        return tuple(
            (role, tuple(name.lstrip("%") for name in _BARE_NAME.findall(names)))
            for role, names in _CALLED.findall(self._own)
        )

    def called(self, role: str) -> str | None:
        """The computation called as `body`, `condition`, `calls` or `to_apply`."""
        return next((names[0] for found, names in self.calls_by_role if found == role), None)

    @property
    def index(self) -> int:
        """The element that a `get-tuple-element` takes."""
        return int(self.attribute("index") or 0)

    def attribute(self, key: str) -> str | None:
        """The text of an attribute up to the next comma outside brackets: `channel_id`, `index`, `replica_groups`."""
        text = self._own
        start = text.find(f" {key}=")
        if start < 0:
            return None
        start += len(key) + 2
        depth = 0
        for end in range(start, len(text)):
            if text[end] in "([{":
                depth += 1
            elif text[end] in ")]}":
                depth -= 1
            elif text[end] == "," and depth == 0:
                # `mesh[…], device_ids=(…) {…}` is one value with a comma in it.
                if text.startswith(", device_ids=", end):
                    continue
                return text[start:end]
        return text[start:]

    @property
    def op_name(self) -> str:
        """JAX's name stack, as `jit(step)/while/body/dot_general`; empty where the compiler dropped it."""
        found = _OP_NAME.search(self.metadata)
        return found[1] if found else ""

    @property
    def metadata(self) -> str:
        """The text of `metadata={…}`; empty when there is none."""
        start = self.attributes.find(" metadata={")
        if start < 0:
            return ""
        end = self.attributes.find(" backend_config=", start)
        return self.attributes[start : end if end >= 0 else None]

    @property
    def _own(self) -> str:
        """Attributes before metadata and backend_config, whose free text could hold anything."""
        text = self.attributes
        ends = [end for key in (", metadata={", ", backend_config=") if (end := text.find(key)) >= 0]
        return text[: min(ends)] if ends else text


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in schedule order (operands come before users)."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns (the last, where none is marked)."""
        if not self.instructions:
            raise HloError(f"computation {self.name} is empty")
        instructions = list(self)
        return next((x for x in reversed(instructions) if x.root), instructions[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(x.literal): x for x in self if x.opcode == "parameter"}

    @property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """Instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return {name: tuple(users) for name, users in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A program for one device: computations by name, the entry, and source frames by number."""

    name: str
    entry: str
    computations: Mapping[str, Computation]
    num_partitions: int
    frames: Mapping[int, str]

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())

    def where(self, instruction: Instruction) -> str:
        """The user's `file:line (function)`, or `<unknown>` where the compiler dropped it."""
        metadata = instruction.metadata
        if frame := _FRAME.search(metadata):
            return self.frames.get(int(frame[1]), UNKNOWN)
        file, line = _SOURCE_FILE.search(metadata), _SOURCE_LINE.search(metadata)
        return f"{file[1]}:{line[1]}" if file and line else UNKNOWN


def read(text: str) -> Module:
    """Reads the text of one HLO module.

    Raises:
      HloError: the text is not an HLO module, or a line of it cannot be read.
    """
    lines = iter(text.split("\n"))
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    if header is None:
        raise HloError(f"not HLO text: it begins with {text[:60]!r}")
    tables: dict[str, dict[int, str]] = {}
    computations: dict[str, Computation] = {}
    entry = ""
    for line in lines:
        if line.startswith("HloModule "):
            raise HloError("the text holds more than one HLO module; read each alone")
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            tables[line] = _table(lines)
        elif (opened := _HEADER.match(line)) is not None:
            computations[opened[2]] = Computation(opened[2], _instructions(opened[2], lines))
            entry = opened[2] if opened[1] else entry
        elif line.strip():
            raise HloError(f"cannot read this line of HLO: {line[:200]!r}")
    if not computations:
        raise HloError("the HLO module has no computation")
    partitions = _PARTITIONS.search(header)
    return Module(
        name=header.split()[1].rstrip(","),
        # The entry is marked, except in a module of one computation.
        entry=entry or next(reversed(computations)),
        computations=computations,
        num_partitions=int(partitions[1]) if partitions else 1,
        frames=_frames(tables),
    )


def _instructions(computation: str, lines: Iterable[str]) -> dict[str, Instruction]:
    """Instructions up to the closing brace."""
    found: dict[str, Instruction] = {}
    for line in lines:
        if line.startswith("}"):
            return found
        matched = _INSTRUCTION.match(line)
        if matched is None and not line:
            break
        if matched is None:
            raise HloError(f"cannot read this line of HLO, in {computation}: {line[:200]!r}")
        root, name, kind, opcode = matched.groups()
        end = _closing(line, matched.end())
        literal = line[matched.end() : end]
        if opcode in ("constant", "parameter"):
            operands: tuple[str, ...] = ()
        else:
            operands = tuple(_NAME.findall(literal)) or tuple(_BARE_NAME.findall(_COMMENT.sub("", literal)))
        found[name] = Instruction(
            name=name,
            opcode=opcode,
            type=kind,
            operands=operands,
            literal=literal,
            attributes=line[end + 1 :],
            root=root is not None,
        )
    raise HloError(f"computation {computation} has no closing brace")


def _closing(line: str, start: int) -> int:
    """Position of the parenthesis that closes the one before `start`."""
    end = line.find(")", start)
    opened = line.find("(", start)
    if end >= 0 and not start <= opened < end:
        return end
    depth = 1
    for end in range(start, len(line)):
        depth += (line[end] == "(") - (line[end] == ")")
        if depth == 0:
            return end
    raise HloError(f"parentheses do not match: {line[:200]!r}")


def _table(lines: Iterator[str]) -> dict[int, str]:
    """Numbered lines up to the first empty one."""
    found: dict[int, str] = {}
    for line in lines:
        if not _TABLE.fullmatch(line):
            break
        number, _, rest = line.partition(" ")
        found[int(number)] = rest
    return found


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
    """`file:line (function)` of each stack frame: its innermost location, which is the user's."""
    files, functions = ({n: text.strip('"') for n, text in tables.get(t, {}).items()} for t in _NAME_TABLES)
    locations: dict[int, str] = {}
    for number, text in tables.get("FileLocations", {}).items():
        fields = dict(_FIELD.findall(text))
        function = functions.get(int(fields["function_name_id"]), "?")
        locations[number] = f"{files.get(int(fields['file_name_id']), '?')}:{fields['line']} ({function})"
    return {
        number: locations.get(int(dict(_FIELD.findall(text))["file_location_id"]), UNKNOWN)
        for number, text in tables.get("StackFrames", {}).items()
    }


_NAME_TABLES = ("FileNames", "FunctionNames")
