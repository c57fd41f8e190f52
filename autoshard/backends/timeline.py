"""An HLO timeline: a compiled schedule priced by a cost model, on two streams.

The compiled text holds no prices, so this is our own pricing of the compiler's
schedule, not a measurement. One compute stream runs the instructions in order; one
communication stream runs the collectives. An asynchronous collective runs from its
start, and the compute stream waits at its `done` instruction; a synchronous one stops
the compute stream. A loop's body is walked once and takes that time every trip; a
conditional takes the time of its longest branch. A windowed einsum's ring runs beside its loop.

Matmuls cost the model's price of their shapes (HBM traffic of operands and results
included), or the traffic of the whole fusion if that takes longer. Other instructions cost
the HBM bytes that they read and write; a slice reads only its part, also of what is computed for it.
Prefetches into faster memory are free. Copies to the host's memory and back run on a link of their own
each way, from their beginning on; the compute stream waits at their end.

What runs once more for a backward pass has `rematted_computation` in its name; what a compiler repeats on its own
(XLA's own rematerialization) is an instruction whose name says `.remat`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from autoshard import _jax
from autoshard.backends.hlo import Collective, Computation, Instruction, Module, communicates
from autoshard.backends.hlo.dataflow import ELEMENTWISE, VIEWS
from autoshard.backends.hlo.loops import ONCE, Loops, UnknownTrips
from autoshard.backends.hlo.matmuls import Matmul, multiplying, uncounted
from autoshard.ir.mesh import MeshAxes
from cost_models.machines.dtypes import itemsize
from cost_models.machines.roofline import matmul_bytes

Stream = Literal["compute", "communication"]

_KINDS: Mapping[str, str] = {"collective-broadcast": "broadcast", "ragged-all-to-all": "all-to-all"}
REPEATED = "repeated"  # the category of trace events that run once more for a backward pass
_REMAT = re.compile(r"\.remat\b")  # in the names of instructions that XLA repeats on its own
_FREE = frozenset(
    {
        "after-all",
        "add-dependency",
        "async-update",  # what has begun goes on
        "bitcast",
        "constant",
        "copy-done",
        "copy-start",
        "dynamic-slice-start",
        "dynamic-update-slice-start",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "slice-done",
        "slice-start",
        "tuple",
    }
)
_MINOR_TO_MAJOR = re.compile(r"\]\{([\d,]+)")  # in an array's type
_NAMING = 'custom_call_target="ConcatBitcast"'  # slices that came beside each other into a TPU's own memory, as one
_HOST_SPACE = "S(5)"  # in the layouts of arrays in the host's memory
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})
_NO_TRAFFIC = -1e18  # bytes that a matmul does not read and write: more than any does
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand is written into the first, in place


class Machine(Protocol):
    """The parts of a cost model that a timeline uses."""

    def matmul_s(self, batch: int, m: int, n: int, k: int, dtype: str, *, beside_bytes: float = 0.0) -> Any: ...

    def hbm_s(self, nbytes: int) -> Any: ...

    @property
    def host_bytes_per_s(self) -> float: ...

    def collective_s(self, kind: Any, axes: Sequence[str], nbytes: int) -> Any: ...


class Multiplication(NamedTuple):
    """A matmul of an event, once: the name of its operation, its source line, its FLOPs."""

    name: str
    where: str
    flops: float


class HostMove(NamedTuple):
    """A copy between a device's memory and its host's, once: the name of its operation, its bytes, which way."""

    name: str
    nbytes: int
    to_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction on one stream; in a loop, its first trip.

    Attributes:
      name: what it does.
      stream: where it runs.
      start_s: when it begins.
      duration_s: how long it takes once.
      trips: how often a step executes it.
      where: the user's source line.
      repeated: whether it runs once more for a backward pass, or a part of it does.
      repeats: the matmuls among what runs once more.
      moves: what it copies to the host's memory or back.
      instruction: its name in the compiled program.
    """

    name: str
    stream: Stream
    start_s: float
    duration_s: float
    trips: int
    where: str
    repeated: bool = False
    repeats: tuple[Multiplication, ...] = ()
    moves: HostMove | None = None
    instruction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step of a compiled program: seconds per stream, and the exposed communication.

    Attributes:
      step_s: end of the last instruction.
      compute_s: time in which the compute stream works.
      communication_s: time in which the communication stream works.
      exposed_s: time in which the compute stream waits for a collective.
      flops: FLOPs of the matmuls.
      events: instructions with begin and end, first trips only.
      uncounted: library calls and kernels that multiply an unknown amount: not in `flops`, and in the seconds
        only by their traffic.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    flops: float
    events: tuple[Event, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def repeated_flops(self) -> float:
        """FLOPs of the matmuls that run once more for a backward pass."""
        return sum((x.flops * event.trips for event in self.events for x in event.repeats), 0.0)

    @property
    def repeated_s(self) -> float:
        """Seconds of compute that runs once more for a backward pass."""
        return sum((e.duration_s * e.trips for e in self.events if e.repeated and e.stream == "compute"), 0.0)

    @property
    def hidden_s(self) -> float:
        """Communication that runs beside compute."""
        return max(0.0, self.communication_s - self.exposed_s)  # sums of floats, in different orders

    def trace(self) -> dict[str, Any]:
        """Chrome trace events (JSON), as Perfetto reads them; times in µs."""
        return side_by_side({"priced": self})


def side_by_side(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Several timelines as one Chrome trace (JSON, as Perfetto reads it): a process each, a thread per stream."""
    streams: tuple[Stream, ...] = ("compute", "communication")
    rows: list[dict[str, Any]] = []
    for pid, (name, one) in enumerate(timelines.items()):
        rows.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        rows += [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": i, "args": {"name": f"{stream} (priced)"}}
            for i, stream in enumerate(streams)
        ]
        rows += [
            {
                "name": event.name,
                "ph": "X",
                "pid": pid,
                "tid": streams.index(event.stream),
                "ts": event.start_s * 1e6,
                "dur": event.duration_s * 1e6,
                "args": {"where": event.where, "trips": event.trips} | ({"repeated": True} if event.repeated else {}),
                **({"cat": REPEATED, "cname": "terrible"} if event.repeated else {}),
            }
            for event in one.events
        ]
    return {"traceEvents": rows}


def timeline(
    module: Module,
    collectives: Sequence[Collective],
    machine: Machine,
    mesh: MeshAxes,
    *,
    unknown_trips: UnknownTrips = ONCE,
) -> Timeline:
    """Prices a compiled schedule.

    Args:
      module: the program.
      collectives: its collectives, from `hlo.collectives`.
      machine: a cost model with the mesh placed on it.
      mesh: the mesh axes; a collective over a part of an axis is priced as over all
        of it, one over groups that are no axes as over the whole mesh.
      unknown_trips: trips of loops whose text does not give them, as `hlo.collectives` took them.
    """
    launches: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for row in collectives:
        launches[row.computation, row.instruction].append(row)
    walk = _Walk(module, launches, machine, mesh, Loops(module), unknown_trips)
    walk.run(module[module.entry], 1)
    return Timeline(
        step_s=max(walk.now_s, walk.free_s, *walk.host_free_s),
        compute_s=walk.compute_s,
        communication_s=walk.communication_s,
        exposed_s=walk.exposed_s,
        flops=walk.flops,
        events=tuple(walk.events),
        uncounted=tuple(sorted(walk.uncounted)),
    )


@dataclass(slots=True)
class _Walk:
    """Both streams' clocks, and those of both ways to the host's memory, on the way through the schedule."""

    module: Module
    launches: Mapping[tuple[str, str], list[Collective]]
    machine: Machine
    mesh: MeshAxes
    loops: Loops
    unknown_trips: UnknownTrips
    unknown_around: int = 0  # loops around the walk whose trips are not known
    now_s: float = 0.0
    free_s: float = 0.0
    host_free_s: tuple[float, float] = (0.0, 0.0)  # from the host, to the host
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    events: list[Event] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)

    def run(self, computation: Computation, trips: int) -> None:
        """Walks one computation; `trips` is how often the step executes it."""
        pending: dict[str, float] = {}
        for instruction in computation:
            rows = self.launches.get((computation.name, instruction.name))
            if rows:
                end_s = self._launch(instruction, rows, trips)
                if rows[0].done == instruction.name and instruction.opcode != "while":
                    self._wait(end_s)
                    continue
                pending[rows[0].done] = end_s
            copied = _host_copy(computation, instruction)
            if copied is not None:
                pending[copied.done] = self._copy(instruction, copied, trips)
            elif instruction.opcode == "while":
                self._loop(instruction, trips)
            elif instruction.opcode == "conditional":
                self._branch(instruction, trips)
            elif not rows and (instruction.opcode in ("call", "async-start") or self._wraps(computation, instruction)):
                for name in instruction.calls:
                    self.run(self.module[name], trips)
            elif not rows and instruction.name not in pending:
                self._compute(computation, instruction, trips)
            if instruction.name in pending:
                self._wait(pending.pop(instruction.name))

    def _wraps(self, computation: Computation, call: Instruction) -> bool:
        """Whether a custom call only runs a computation on its operands, as XLA:TPU's do for a SparseCore."""
        if call.opcode != "custom-call" or len(call.calls) != 1:
            return False
        parameters = self.module[call.calls[0]].parameters
        return len(parameters) == len(call.operands) and all(
            parameters[i].shapes == computation[name].shapes for i, name in enumerate(call.operands)
        )

    def _launch(self, instruction: Instruction, rows: Sequence[Collective], trips: int) -> float:
        """Puts a collective on the communication stream; elements of a kind launched together pay one latency."""
        row = rows[0]
        moved: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        for x in rows:
            over = self.mesh.names if x.axes is None else tuple(dict.fromkeys(y.partition(":")[0] for y in x.axes))
            moved[_KINDS.get(x.kind, x.kind), over] += x.nbytes
        duration_s = sum(float(self.machine.collective_s(*kind, nbytes)) for kind, nbytes in moved.items())
        axes = next(iter(moved))[1]
        start_s = max(self.now_s, self.free_s)
        self.free_s = start_s + duration_s
        self.communication_s += duration_s
        name, repeated = f"{row.kind} {'·'.join(axes)}", _jax.REMATTED in row.op_name
        more: dict[str, Any] = {"repeated": repeated, "instruction": instruction.name}
        self._record(name, "communication", start_s, duration_s, trips, row.where, **more)
        return self.free_s

    def _copy(self, instruction: Instruction, copied: "_HostCopy", trips: int) -> float:
        """Puts a copy on the link to the host's memory, or on that back."""
        duration_s = copied.nbytes / self.machine.host_bytes_per_s
        start_s = max(self.now_s, self.host_free_s[copied.to_host])
        ends = list(self.host_free_s)
        ends[copied.to_host] = start_s + duration_s
        self.host_free_s = ends[0], ends[1]
        self.communication_s += duration_s
        name, where = host_copy_name(to_host=copied.to_host), self.module.where(instruction)
        moves = HostMove(instruction.op_name, copied.nbytes, copied.to_host)
        more: dict[str, Any] = {"moves": moves, "instruction": instruction.name}
        self._record(name, "communication", start_s, duration_s, trips, where, **more)
        return start_s + duration_s

    def _wait(self, end_s: float) -> None:
        waited_s = max(0.0, end_s - self.now_s)
        self.exposed_s += waited_s
        self.now_s += waited_s

    def _compute(self, computation: Computation, instruction: Instruction, trips: int) -> None:
        duration_s = self._price(computation, instruction)
        if duration_s:
            name = instruction.op_name.rpartition("/")[2] or instruction.name
            multiplies = [*multiplying(self.module, computation, instruction)]
            repeats = tuple(self._repeats(instruction, multiplies))
            repeated = bool(repeats) if multiplies else _is_repeated(instruction, instruction)
            where = self.module.where(instruction)
            more: dict[str, Any] = {"repeated": repeated, "repeats": repeats, "instruction": instruction.name}
            self._record(name, "compute", self.now_s, duration_s, trips, where, **more)
        self.compute_s += duration_s
        self.now_s += duration_s

    def _loop(self, loop: Instruction, trips: int) -> None:
        """Walks the body once, and again if the first trip waits for a collective from before the loop.

        The last walk stands for every other trip.
        """
        count = self.loops.trip_count(loop)
        more = self.unknown_trips.inside(self.unknown_around) if count is None else count
        if more == 0:
            return
        self.unknown_around += count is None
        late = max(self.free_s, *self.host_free_s) > self.now_s
        before = self._one_trip(loop, trips * more)
        more -= 1
        if late and more:
            events = self.events
            self.events = []
            before = self._one_trip(loop, trips * (more + 1))
            self.events = events
            more -= 1
        self.compute_s += more * (self.compute_s - before.compute_s)
        self.communication_s += more * (self.communication_s - before.communication_s)
        self.exposed_s += more * (self.exposed_s - before.exposed_s)
        self.flops += more * (self.flops - before.flops)
        shift_s = more * (self.now_s - before.now_s)
        if self.free_s > before.free_s:
            self.free_s += shift_s
        from_s, to_s = (
            now + shift_s if now > then else now for now, then in zip(self.host_free_s, before.host_free_s, strict=True)
        )
        self.host_free_s = from_s, to_s
        self.now_s += shift_s
        self.unknown_around -= count is None

    def _one_trip(self, loop: Instruction, trips: int) -> "_Walk":
        """Walks the body of a loop; returns the clocks as they were before."""
        before = replace(self)
        self.run(self.loops.body(loop), trips)
        return before

    def _branch(self, conditional: Instruction, trips: int) -> None:
        """Takes the branch that ends last."""
        ends: list[_Walk] = []
        for name in conditional.calls:
            branch = replace(self, events=list(self.events))
            branch.run(self.module[name], trips)
            ends.append(branch)
        longest = max(ends, key=lambda branch: branch.now_s)
        self.now_s, self.free_s, self.events = longest.now_s, longest.free_s, longest.events
        self.host_free_s = longest.host_free_s
        self.compute_s, self.communication_s = longest.compute_s, longest.communication_s
        self.exposed_s, self.flops = longest.exposed_s, longest.flops

    def _record(
        self, name: str, stream: Stream, start_s: float, duration_s: float, trips: int, where: str, **more: Any
    ) -> None:
        self.events.append(
            Event(name=name, stream=stream, start_s=start_s, duration_s=duration_s, trips=trips, where=where, **more)
        )

    def _repeats(
        self, instruction: Instruction, multiplies: Sequence[tuple[Instruction, Matmul]]
    ) -> Iterator[Multiplication]:
        """The matmuls of an instruction that run once more for a backward pass."""
        for inner, (batch, m, n, k, _) in multiplies:
            named = inner if inner.op_name else instruction
            if _is_repeated(instruction, named):
                yield Multiplication(named.op_name, self.module.where(named), 2.0 * batch * m * n * k)

    def _price(self, computation: Computation, instruction: Instruction) -> float:
        """Seconds of an instruction by itself."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done") or not instruction.shapes:
            return 0.0
        if communicates(instruction):
            return 0.0  # a ring's permutes, which are priced with it, or a collective of one device
        found = [matmul for _, matmul in multiplying(self.module, computation, instruction)]
        if found:
            self.flops += sum(2.0 * batch * m * n * k for batch, m, n, k, _ in found)
            if not instruction.opcode.startswith("fusion"):
                return sum(float(self.machine.matmul_s(*matmul)) for matmul in found)
            # What is fused with a matmul reads and writes, too: XLA:TPU fuses whole optimizer updates into one. And it
            # may read less than the operands, or write less than the product: one that is cast. That counts once.
            (batch, m, n, k, dtype), *_ = found
            beside = _traffic_bytes(self.module, computation, instruction)
            beside -= int(matmul_bytes(batch, m, n, k, itemsize(dtype), itemsize(dtype)))
            matmul_s = sum(float(self.machine.matmul_s(*matmul, beside_bytes=_NO_TRAFFIC)) for matmul in found)
            return max(matmul_s, float(self.machine.matmul_s(*found[0], beside_bytes=beside)))
        self.uncounted.update(uncounted(self.module, instruction))
        if opcode == "custom-call" and (not instruction.operands or _NAMING in instruction.attributes):
            return 0.0  # a buffer is allocated, nothing moves
        return self._traffic_s(computation, instruction)

    def _traffic_s(self, computation: Computation, instruction: Instruction) -> float:
        return float(self.machine.hbm_s(_traffic_bytes(self.module, computation, instruction)))


def host_copy_name(*, to_host: bool) -> str:
    """The event of a copy between a device's memory and its host's, predicted or compiled."""
    return f"copy {'to' if to_host else 'from'} the host's memory"


class _HostCopy(NamedTuple):
    """A copy between a device's memory and its host's: which instruction ends it, how much it moves, and which way."""

    done: str
    nbytes: int
    to_host: bool


def _host_copy(computation: Computation, instruction: Instruction) -> _HostCopy | None:
    """The copy that an instruction begins; of a stack a slice is moved, the smallest array that it names."""
    if not instruction.opcode.endswith("-start") or _HOST_SPACE not in instruction.type:
        return None
    ends = [user for user in computation.users[instruction.name] if user.opcode.endswith("-done")]
    arrays = [shape.nbytes for shape in instruction.shapes if shape.dims]
    if not ends or not arrays:
        return None
    return _HostCopy(ends[0].name, min(arrays), _HOST_SPACE in ends[0].type)


def _is_repeated(instruction: Instruction, named: Instruction) -> bool:
    """Whether an instruction, or the one that is named for it, runs once more for a backward pass."""
    return _jax.REMATTED in named.op_name or bool(_REMAT.search(instruction.name))


def _traffic_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """HBM bytes that an instruction reads and writes; a slice reads its part, an update writes its part.

    Values that a fusion passes on unchanged, or that a collective in it moves, do not count: XLA:TPU lets
    asynchronous collectives go on in fusions that compute something else.
    """
    operands = [computation[name] for name in instruction.operands]
    if instruction.opcode in _SLICES:
        return 2 * instruction.nbytes
    if instruction.opcode in _UPDATES:
        return 2 * operands[_UPDATES[instruction.opcode]].nbytes
    if instruction.opcode not in ("fusion", "fusion-start"):
        return instruction.nbytes + sum(x.nbytes for x in operands)
    body = module[instruction.calls[0]]
    read = 0
    for number, parameter in body.parameters.items():
        drawn = _drawn(module, body, parameter.name)
        if drawn is not None:
            read += drawn * parameter.shapes[0].element_bytes
        elif not all(
            x.opcode in _UPDATES and first and (home is not body or _is_in_place(body, x))
            for home, x, first in _readers(module, body, parameter.name)
        ):
            read += operands[number].nbytes
    made = [x for x in _results(body) if x.opcode != "parameter" and not communicates(x)]
    updates = [x for x in body if x.opcode in _UPDATES]
    placed = [body[x.operands[_UPDATES[x.opcode]]] for x in updates if _is_in_place(body, x)]
    if len(placed) < len(updates):  # the others are written as a whole
        made = [x for x in made if not _is_in_place(body, _seen_through(body, x))]
        return read + sum(x.nbytes for x in (*placed, *made))
    return read + sum(x.nbytes for x in placed or made)


def _results(body: Computation) -> list[Instruction]:
    """What a fusion returns."""
    return [body[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]


def _seen_through(body: Computation, instruction: Instruction) -> Instruction:
    """What an instruction is a view of; what lies in another order is none."""
    while instruction.opcode in VIEWS and not _turns(body, instruction):
        instruction = body[instruction.operands[0]]
    return instruction


def _renamed(body: Computation, instruction: Instruction) -> str:
    """The name of what an instruction gives another shape, or its own."""
    while instruction.opcode == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction.name


def _turns(body: Computation, instruction: Instruction) -> bool:
    """Whether an instruction is a transpose after which elements lie in another order."""
    if instruction.opcode != "transpose":
        return False
    operand = body[instruction.operands[0]]
    (shape,), permutation = operand.shapes, instruction.attribute("dimensions") or ""
    from_dim = [int(d) for d in permutation.strip("{}").split(",")]
    before = [d for d in _order(operand) if shape.dims[d] > 1]
    return before != [from_dim[d] for d in _order(instruction) if shape.dims[from_dim[d]] > 1]


def _order(instruction: Instruction) -> list[int]:
    """The dimensions of an array as they lie in memory, the minor ones first."""
    found = _MINOR_TO_MAJOR.search(instruction.type)
    return [int(d) for d in found[1].split(",")] if found else list(range(len(instruction.shapes[0].dims)))[::-1]


def _is_in_place(body: Computation, instruction: Instruction) -> bool:
    """Whether a fusion writes a part of a value where that lies: it is given the value, and returns it updated."""
    if instruction.opcode not in _UPDATES:
        return False
    given = _seen_through(body, body[instruction.operands[0]]).opcode == "parameter"
    return given and any(_seen_through(body, x) is instruction for x in _results(body))


def _drawn(module: Module, body: Computation, name: str) -> int | None:
    """Elements of a value that a fusion reads, where slices and gathers take a part of it; None where it reads all.

    Of what is computed from the value element by element, or cut out of it, no more is computed than is taken of that.
    """
    total = 0
    for home, user, first in _readers(module, body, name):
        is_result = user.root or (home.root.opcode == "tuple" and user.name in home.root.operands)
        part = None if is_result else _drawn(module, home, user.name)
        if user.opcode in _SLICES and first:
            size = sum(shape.size for shape in user.shapes)
            total += size if part is None else min(part, size)
        elif user.opcode in ELEMENTWISE and part is not None:
            total += part
        else:
            return None
    return total or None


def _readers(module: Module, body: Computation, name: str) -> list[tuple[Computation, Instruction, bool]]:
    """The readers of a value, or of another shape of its bytes: where they are, and whether it is their first operand.

    For a fusion inside the fusion, its inner readers count, or those of its result if that is the value in another
    shape. Collectives and the result's tuple only pass it on.
    """
    names, found = [name], list[tuple[Computation, Instruction, bool]]()
    for known in names:
        for user in body.users[known]:
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode == "fusion":
                inner = module[user.calls[0]]
                for parameter in (inner.parameters[n].name for n, name in enumerate(user.operands) if name == known):
                    if _renamed(inner, inner.root) == parameter:
                        names.append(user.name)
                    else:
                        found += _readers(module, inner, parameter)
            elif user.opcode != "tuple" and not communicates(user):
                found.append((body, user, user.operands[0] == known))
    return found
