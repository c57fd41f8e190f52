"""Collectives of a compiled program: kind, mesh axes, bytes, trips and source line.

Bytes are logical, per device, of one execution: an all-gather counts its result;
reduce-scatter, all-reduce, all-to-all and collective-permute count their operand.
Compilers combine, fuse and split collectives; these rules undo that, by structure:

- a combined collective (several operands, or one concatenation) is one row per element;
- XLA:TPU's custom fusion of all-reduce and dynamic-slice is a reduce-scatter of the
  fusion's operand (padding inside it does not count), and a permute of its result
  (the halo that undoes padding) belongs to it;
- XLA:TPU's asynchronous fusions repeat one collective in several computations: it
  counts once per channel, where it starts (it may go on in a loop that runs meanwhile);
- a windowed einsum's ring of collective-permutes is the all-gather or
  reduce-scatter that it replaces, together with the permutes before and after the loop;
- XLA:CPU has no reduce-scatter pass: on request, an all-reduce that is only sliced by
  partition id counts as the reduce-scatter that it stands for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autoshard.backends.hlo.dataflow import VIEWS, Dataflow
from autoshard.backends.hlo.groups import Groups, axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from autoshard.backends.hlo.loops import ONCE, UnknownTrips
from autoshard.backends.hlo.rings import PERMUTES, Ring, rings
from autoshard.backends.hlo.slices import Slices, arrival, is_transfer, slices_of, transfer_groups, transfer_kind
from autoshard.backends.hlo.text import Computation, Instruction, Module, Shape
from autoshard.ir.mesh import MeshAxes

Kind = Literal[
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
]
KINDS: tuple[Kind, ...] = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_KIND_OF: Mapping[str, Kind] = {
    **{kind: kind for kind in KINDS},
    **{f"{kind}-start": kind for kind in KINDS},
    "send": "collective-permute",
}


_Channel = tuple[Kind, str]  # kind and channel: the same for all repetitions of one collective


def communicates(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or begins one."""
    return instruction.opcode in _KIND_OF


def _kind_of(instruction: Instruction) -> Kind | None:
    """The collective that an instruction is, or begins."""
    return transfer_kind(instruction) if is_transfer(instruction) else _KIND_OF.get(instruction.opcode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the program, per device.

    Attributes:
      kind: what it does, after the rules above.
      axes: the mesh axes that its groups span, in mesh order (`model:(1)2` where they
        span a part of one); None where the groups are no product of axes (`groups` shows them).
      group_size: devices that take part together.
      nbytes: logical bytes of one execution.
      dtype: element type.
      trips: executions per step (1 outside loops).
      where: the user's `file:line (function)`.
      op_name: JAX's name stack.
      instruction: the (starting) instruction; elements of one combined collective share it.
      done: the instruction that waits for it; the same one where it is synchronous.
      computation: where the instruction stands (the owner of a fusion, not its body).
      asynchronous: other instructions may run between start and done.
      combined: elements that the compiler launches together with this one, itself included.
      conditional: it stands in a branch, which may not be taken.
      unknown_loops: loops around it whose trip count the text does not give; each counts `unknown_trips`.
      moved_bytes: bytes that one device sends in one execution.
      groups: devices by position in the mesh.
    """

    kind: Kind
    axes: tuple[str, ...] | None
    group_size: int
    nbytes: int
    dtype: str
    trips: int
    where: str
    op_name: str
    instruction: str
    done: str
    computation: str
    asynchronous: bool
    combined: int
    conditional: bool
    unknown_loops: tuple[str, ...]
    moved_bytes: int
    groups: Groups

    @property
    def total_bytes(self) -> int:
        """Logical bytes of a step: `nbytes × trips`."""
        return self.nbytes * self.trips

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in a step."""
        return self.moved_bytes * self.trips

    def __str__(self) -> str:
        axes = "·".join(self.axes) if self.axes is not None else f"groups {self.groups}"
        return f"{self.kind} over {axes}: {self.dtype} {self.nbytes} B × {self.trips} at {self.where}"


@dataclass(frozen=True, slots=True)
class _Context:
    """The place of the walk: how often it is executed, and the loops and branches around it."""

    trips: int = 1
    conditional: bool = False
    unknown_loops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reader:
    module: Module
    mesh: MeshAxes
    fold_slices: bool
    communicating: frozenset[str]
    flow: Dataflow
    unknown_trips: UnknownTrips
    starts: Mapping[_Channel, frozenset[str]]  # of asynchronous fusions: the computations in which one begins
    slices: Slices


def collectives(
    module: Module,
    mesh: MeshAxes,
    *,
    fold_slices: bool = False,
    unknown_trips: UnknownTrips = ONCE,
    slices: int = 1,
) -> tuple[Collective, ...]:
    """Every collective of a program, in program order, loops multiplied out.

    Args:
      module: a partitioned program.
      mesh: the axes of its mesh; ids in the text are positions in `mesh.devices.flat`.
      fold_slices: count an all-reduce that is only sliced by partition id as a
        reduce-scatter: right for XLA:CPU, which never emits one.
      unknown_trips: trips of loops whose text does not give them.
      slices: of a TPU that the mesh's devices are, where the program is that of one.

    Raises:
      HloError: the mesh is not of the program's size, or a group cannot be read.
    """
    found = slices_of(module, mesh, slices)
    communicating = _communicating(module)
    starts = _starts(module, communicating)
    reader = _Reader(
        module,
        mesh,
        fold_slices,
        communicating,
        Dataflow(module),
        unknown_trips,
        starts,
        found,
    )
    return tuple(_walk(reader, module[module.entry], _Context()))


def _walk(reader: _Reader, computation: Computation, context: _Context) -> Iterator[Collective]:
    """Collectives of a computation and of all that it calls, in schedule order."""
    found = rings(reader.flow, computation)
    folded = {name for ring in found.values() for name in ring.permutes} | _halos(reader, computation)
    pairs = {x.operands[0]: x.name for x in computation if x.opcode.endswith("-done") and x.operands}
    seen: set[_Channel] = set()
    for instruction in computation:
        if instruction.name in found:
            yield _ring_row(reader, computation, found[instruction.name], context)
            continue
        kind = _kind_of(instruction)
        if kind is not None and instruction.name not in folded:
            yield from _rows(reader, computation, instruction, kind, context, pairs)
        if not reader.communicating.intersection(instruction.calls):
            continue
        if instruction.opcode == "while":
            yield from _loop(reader, instruction, context)
        elif instruction.opcode == "conditional":
            branch = _Context(context.trips, True, context.unknown_loops)
            for name in instruction.calls:
                yield from _walk(reader, reader.module[name], branch)
        elif instruction.opcode == "fusion":
            yield from _fused_rows(reader, computation, instruction, context, seen)
        else:
            for name in instruction.calls:
                for row in _walk(reader, reader.module[name], context):
                    if instruction.opcode == "async-start":
                        yield _asynchronous(row, computation, instruction, pairs)
                    else:
                        yield row


def _loop(reader: _Reader, loop: Instruction, context: _Context) -> Iterator[Collective]:
    """Body and condition of a loop, times its trips."""
    trips, unknown = reader.flow.loops.trip_count(loop), context.unknown_loops
    if trips is None:
        trips, unknown = reader.unknown_trips.inside(len(unknown)), (*unknown, loop.name)
    inside = _Context(context.trips * trips, context.conditional, unknown)
    for name in loop.calls:
        yield from _walk(reader, reader.module[name], inside)


def _rows(
    reader: _Reader,
    computation: Computation,
    instruction: Instruction,
    kind: Kind,
    context: _Context,
    pairs: Mapping[str, str],
) -> Iterator[Collective]:
    """A collective instruction as one row per element that it moves."""
    groups, axes, size = _span(reader, instruction)
    if size == 1:
        return
    elements = list(_elements(reader, computation, instruction, kind))
    scattered = [False] * len(elements)
    if reader.fold_slices and kind == "all-reduce" and instruction.opcode == "all-reduce":
        scattered = [reader.flow.is_scattered(computation, instruction, i, size) for i in range(len(elements))]
    crosses = is_transfer(instruction)
    synchronous = not (crosses or instruction.opcode.endswith("-start")) or '"is_sync":true' in instruction.attributes
    done = arrival(computation, instruction) if crosses else pairs.get(instruction.name, instruction.name)
    for (nbytes, dtype, source), scatters in zip(elements, scattered, strict=True):
        actual: Kind = "reduce-scatter" if scatters else kind
        logical = nbytes * size if actual == "all-gather" else nbytes
        yield Collective(
            kind=actual,
            axes=axes,
            group_size=size,
            nbytes=logical,
            dtype=dtype,
            trips=context.trips,
            where=reader.flow.where(computation, (source, instruction)),
            op_name=source.op_name or instruction.op_name,
            instruction=instruction.name,
            done=done,
            computation=computation.name,
            asynchronous=not synchronous,
            combined=len(elements),
            conditional=context.conditional,
            unknown_loops=context.unknown_loops,
            moved_bytes=wire_bytes(actual, logical, size),
            groups=groups,
        )


def wire_bytes(kind: str, nbytes: int, size: int) -> int:
    """Bytes that a device sends: ring volumes (Thakur, Rabenseifner and Gropp 2005), the whole operand of a permute."""
    if kind in ("collective-permute", "collective-broadcast"):
        return nbytes
    return (2 if kind == "all-reduce" else 1) * nbytes * (size - 1) // size


def _span(reader: _Reader, instruction: Instruction) -> tuple[Groups, tuple[str, ...] | None, int]:
    """Groups, mesh axes and group size of a collective."""
    mesh, slices, kind = reader.mesh, reader.slices, _kind_of(instruction)
    if is_transfer(instruction):
        groups = transfer_groups(instruction, slices)
    elif kind == "collective-permute":
        text = instruction.attribute("source_target_pairs")
        if text is None:
            found = re.search(r"_xla_send_recv_source_target_pairs=\"?(\{\{.*?\}\})", instruction.attributes)
            text = found[1] if found else "{}"
        groups = slices.everywhere(parse_pairs(text))
    else:
        groups = parse_groups(instruction.attribute("replica_groups") or "{}", slices.devices)
        reduces = kind in ("all-gather", "all-reduce", "reduce-scatter")
        if reduces and instruction.attribute("use_global_device_ids") != "true" and instruction.attribute("channel_id"):
            # Groups of replicas. There is one, so every partition takes part (XLA's kCrossReplicaAndPartition).
            groups = (tuple(range(slices.devices)),)
        groups = slices.everywhere(groups)
    if kind == "collective-permute":
        axes = axes_of_pairs(groups, mesh)
        return groups, axes, int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
    return groups, axes_of_groups(groups, mesh), max(len(group) for group in groups)


def _elements(
    reader: _Reader, computation: Computation, instruction: Instruction, kind: Kind
) -> Iterator[tuple[int, str, Instruction]]:
    """Bytes, element type and source of each array that a collective moves.

    The pieces of an all-to-all of several operands are one array; the pieces that a
    compiler concatenated to launch them together are several (as are those that the
    program itself concatenated: the sum is the same).
    """
    operands = [computation[name] for name in instruction.operands]
    if instruction.opcode == "send":
        operands = operands[:1]  # the other one is a token
    if kind == "all-to-all":
        yield sum(x.nbytes for x in operands), operands[0].shapes[0].dtype, instruction
    elif kind == "ragged-all-to-all" or len(operands) == 1:
        operand = operands[0]
        pieces = _concatenation_parts(reader.module, computation, operand) if kind != "collective-permute" else ()
        if len(pieces) > 1:
            for shape, source in pieces:
                yield shape.nbytes, shape.dtype, source
        else:
            yield operand.nbytes, operand.shapes[0].dtype, instruction
    else:
        for operand in operands:
            yield operand.nbytes, operand.shapes[0].dtype, operand


def _concatenation_parts(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[tuple[Shape, Instruction], ...]:
    """The parts of a concatenation (or of a fusion that is one): their shapes and the instructions outside it."""
    if instruction.opcode == "concatenate":
        sources = [computation[name] for name in instruction.operands]
    elif instruction.opcode == "fusion" and (body := module[instruction.calls[0]]).root.opcode == "concatenate":
        parts = [body[name] for name in body.root.operands]
        if any(part.opcode != "parameter" for part in parts):
            return ()
        sources = [computation[instruction.operands[int(part.literal)]] for part in parts]
    else:
        return ()
    return tuple((source.shapes[0], source) for source in sources)


def _fused_rows(
    reader: _Reader,
    computation: Computation,
    fusion: Instruction,
    context: _Context,
    seen: set[_Channel],
) -> Iterator[Collective]:
    """Collectives inside a fusion, once per channel in the computation that owns the fusion; a row per element."""
    body = reader.module[fusion.calls[0]]
    for instruction in body:
        kind = _kind_of(instruction)
        if kind is None:
            continue
        groups, axes, size = _span(reader, instruction)
        scattered = [
            kind == "all-reduce" and reader.flow.is_scattered(body, instruction, i, size)
            for i in range(len(instruction.operands))
        ]
        channel = _channel(kind, instruction)
        if any(scattered) and "kind=kCustom" in fusion.attributes:
            channel = (kind, fusion.name)  # not asynchronous: nothing repeats it, and they all have one channel
        if channel in seen or computation.name not in reader.starts.get(channel, (computation.name,)):
            continue
        seen.add(channel)
        done = _waiting(reader, computation, channel) or fusion.name
        for name, scatters in zip(instruction.operands, scattered, strict=True):
            # Counts the fusion's own operand: padding before the all-reduce holds no data.
            operand = _strip_padding(body, body[name]) if scatters else body[name]
            actual: Kind = "reduce-scatter" if scatters else kind
            logical = operand.nbytes * (size if kind == "all-gather" else 1)
            yield Collective(
                kind=actual,
                axes=axes,
                group_size=size,
                nbytes=logical,
                dtype=operand.shapes[0].dtype,
                trips=context.trips,
                where=reader.flow.where(computation, (instruction, fusion)),
                op_name=instruction.op_name or fusion.op_name,
                instruction=fusion.name,
                done=done,
                computation=computation.name,
                asynchronous=done != fusion.name,
                combined=len(scattered),
                conditional=context.conditional,
                unknown_loops=context.unknown_loops,
                moved_bytes=wire_bytes(actual, logical, size),
                groups=groups,
            )
    for instruction in body:
        if reader.communicating.intersection(instruction.calls) and instruction.opcode == "fusion":
            yield from _fused_rows(reader, body, instruction, context, seen)


def _channel(kind: Kind, instruction: Instruction) -> _Channel:
    return kind, instruction.attribute("channel_id") or instruction.name


def _starts(module: Module, communicating: frozenset[str]) -> dict[_Channel, frozenset[str]]:
    """The computations in which asynchronous fusions begin a collective."""
    found: dict[_Channel, set[str]] = {}
    for computation in module:
        for _, channel in _find_marked(module, communicating, computation, "AsyncCollectiveStart"):
            found.setdefault(channel, set()).add(computation.name)
    return {channel: frozenset(names) for channel, names in found.items()}


def _waiting(reader: _Reader, computation: Computation, channel: _Channel) -> str | None:
    """The fusion that ends an asynchronous collective."""
    marked = _find_marked(reader.module, reader.communicating, computation, "AsyncCollectiveDone")
    return next((name for name, ended in marked if ended == channel), None)


def _find_marked(
    module: Module, communicating: frozenset[str], computation: Computation, mark: str
) -> Iterator[tuple[str, _Channel]]:
    """Fusions that begin or end a collective, and which: XLA:TPU marks them with a custom call."""
    for instruction in computation:
        if instruction.opcode != "fusion" or not communicating.intersection(instruction.calls):
            continue
        body = module[instruction.calls[0]]
        if f'custom_call_target="{mark}"' in body.root.attributes:
            for x in body:
                if (kind := _kind_of(x)) is not None:
                    yield instruction.name, _channel(kind, x)


def _strip_padding(body: Computation, operand: Instruction) -> Instruction:
    """The value that a padding extends."""
    while operand.opcode in VIEWS | {"pad"}:
        operand = body[operand.operands[0]]
    return operand


def _asynchronous(
    row: Collective, computation: Computation, start: Instruction, pairs: Mapping[str, str]
) -> Collective:
    """A collective inside the computation of an `async-start`, seen from outside."""
    return replace(
        row,
        instruction=start.name,
        done=pairs.get(start.name, start.name),
        computation=computation.name,
        asynchronous='"is_sync":true' not in start.attributes,
    )


def _ring_row(reader: _Reader, computation: Computation, ring: Ring, context: _Context) -> Collective:
    """The collective that a windowed einsum replaces: one block per device of the ring."""
    anchor, groups = computation[ring.anchor], reader.slices.everywhere(ring.groups)
    return Collective(
        kind=ring.kind,
        axes=axes_of_groups(groups, reader.mesh),
        group_size=ring.size,
        nbytes=ring.block.nbytes * ring.size,
        dtype=ring.block.shapes[0].dtype,
        trips=context.trips,
        where=reader.flow.where(computation, (anchor,)),
        op_name=anchor.op_name,
        instruction=ring.anchor,
        done=ring.done,
        computation=computation.name,
        asynchronous=True,
        combined=1,
        conditional=context.conditional,
        unknown_loops=context.unknown_loops if ring.known else (*context.unknown_loops, ring.anchor),
        moved_bytes=ring.moved_bytes,
        groups=groups,
    )


def _halos(reader: _Reader, computation: Computation) -> set[str]:
    """Permutes of a fused reduce-scatter's result: they only undo its padding."""
    scatters = {
        x.name
        for x in computation
        if x.opcode == "fusion"
        and reader.communicating.intersection(x.calls)
        and any(
            y.opcode == "all-reduce" and reader.flow.is_scattered(body, y, 0, _span(reader, y)[2])
            for body in (reader.module[x.calls[0]],)
            for y in body
        )
    }
    if not scatters:
        return set()
    return {
        x.name for x in computation if x.opcode in PERMUTES and scatters & reader.flow.sources(computation, x.operands)
    }


def _communicating(module: Module) -> frozenset[str]:
    """Computations that hold a collective, or call one that does."""
    callers: dict[str, list[str]] = {}
    left: list[str] = []
    for computation in module:
        for instruction in computation:
            if communicates(instruction):
                left.append(computation.name)
            for called in instruction.calls:
                callers.setdefault(called, []).append(computation.name)
    found: set[str] = set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left.extend(callers.get(name, ()))
    return frozenset(found)
