"""Verify: compiles a planned program, and compares it with the plan, row by row."""

import importlib.metadata
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

import cost_models
from autoshard import _jax
from autoshard.backends import compile, hlo
from autoshard.backends import devices as meshes
from autoshard.backends.hlo.text import UNKNOWN
from autoshard.backends.known_compilers import named, of_devices
from autoshard.backends.shardy import collectives
from autoshard.backends.shardy.propagation import SCOPE
from autoshard.backends.timeline import timeline
from autoshard.errors import AutoshardError, HloError, VerifyError
from autoshard.ir.graph import WHILE_DEPTH, WHILE_TRIPS, Graph, Path
from autoshard.ir.layout import Layout
from autoshard.pipeline_parallel.hand_overs import Pipeline
from autoshard.planner.record import Leaf, PlanRecord
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.verification.collective_match import Origin, attribute, compare, hand_overs
from autoshard.verification.kept_match import both_ways, offloaded_bytes, repeated_matmuls, together
from autoshard.verification.predicted_timeline import schedule
from autoshard.verification.result import ComputeComparison, MemoryComparison, Parts, Verification

TOLERANCE = 0.05  # of bytes, in total and per row
MEMORY_TOLERANCE = 0.10  # of the peak: a device that runs out of memory a little later does so all the same
GUESSED_TRIPS = hlo.UnknownTrips(WHILE_TRIPS, WHILE_DEPTH)  # as plans count them

WITHOUT_RINGS = " without windowed einsum"

_PACKAGE = re.compile(r"/autoshard/[\w/]+\.py:\d+")
_ARGUMENT = re.compile(r"flat\[(\d+)\]")  # in programs compiled here, the leaves are `*flat`


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a plan beside its record.

    Attributes:
      machine: the cost model with the plan's mesh placed on it; None reads the plan's hardware from the catalogue.
      graph: of the planned program, if its ops carry their equations' paths (`propagation.annotated`).
      assignment: the plan's choices, if it was made in this process.
      pipelines: those in the planned program, if it is known.
    """

    machine: cost_models.Machine | None = None
    graph: Graph | None = None
    assignment: Assignment | None = None
    pipelines: tuple[Pipeline, ...] = ()


NOTHING_KNOWN = Known()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A program as a compiler made it: its text, who made it for what, its memory, and how long that took."""

    text: str
    compiler: str
    version: str
    topology: str
    memory: Parts | None = None
    memory_is_bound: bool = False  # its peak is no more than one
    wall_s: float = 0.0
    log: str = ""


def verify(
    lowerable: Any,
    record: PlanRecord,
    *,
    compiler: str | None = None,
    topology: str | None = None,
    tolerance: float = TOLERANCE,
    known: Known = NOTHING_KNOWN,
    compiler_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Compiles a planned program and compares it with the plan.

    Args:
      lowerable: the planned function, traced on abstract arguments with an abstract mesh.
      record: the plan.
      compiler: "gpu", "tpu", "cpu", or None for the hardware's own; "shardy" for the collectives
        that Shardy names, in-process, without a compiler's schedule or memory.
      topology: hardware to compile for; None takes the plan's own (for "cpu": as many devices).
      tolerance: relative difference in bytes that still counts as a match.
      known: what led to the plan, if it was made in this process.
      compiler_options: flags over the plan's own; None for those of the program whose collectives are priced
        (`compared_by`), {} for the compiler's own.

    Raises:
      CompilerMissingError: the compiler is not installed.
      MeshError: topology and mesh do not fit each other.
      CompileError: the compiler refuses or crashes.
    """
    if compiler == "shardy":
        return _by_shardy(lowerable, record, tolerance, known.graph, known.assignment)
    if topology is None:
        topology = compile.topology(record.hardware, record.mesh.size, compiler)
    if compiler_options is None:
        compiler_options = compared_by(record, topology, known.machine)
    compiled = compile.compile(
        lowerable,
        topology=topology,
        mesh=record.mesh,
        compiler=compiler,  # pyright: ignore[reportArgumentType]
        device_order=record.device_order,
        compiler_options={**compile.flags_of_plan(record.compiler_options, compiler), **(compiler_options or {})},
    )
    without_rings = WITHOUT_RINGS if compiled.flags.items() >= compile.TPU_PLAIN_OPTIONS.items() else ""
    made = Compiled(
        text=compiled.hlo_text,
        compiler=compiled.compiler,
        version=compiled.version + without_rings,
        topology=topology,
        memory=_compiled_parts(compiled.memory, compiled.peak_bytes),
        memory_is_bound=compiled.memory.uses_host,
        wall_s=compiled.wall_s,
        log=compiled.log,
    )
    return judge(record, made, tolerance, known)


def compared_by(record: PlanRecord, topology: str, machine: cost_models.Machine | None) -> Mapping[str, Any]:
    """The flags, over a plan's own, of the program whose collectives are priced.

    By default XLA:TPU turns most gathers and scatters of matmuls into rings of permutes. A ring
    scatters a sum over any devices. Without rings, XLA:TPU all-reduces and slices a sum over the whole
    torus where `Machine.unscattered_axes` says so, and the plan prices that. Between slices it makes rings of
    sends, which are not read as what they replace: there, too, the program without rings is compared.
    """
    rings = {} if topology != record.hardware else meshes.compiler_named(topology).ring_free_flags
    if not rings:
        return {}
    placed = meshes.place(record.mesh.shape, record.hardware).machine if machine is None else machine
    return rings if placed.unscattered_axes or placed.slices > 1 else {}


def _by_shardy(
    lowerable: Any, record: PlanRecord, tolerance: float, graph: Graph | None, assignment: Assignment | None
) -> Verification:
    """The plan against the collectives that Shardy itself names."""
    begin = time.perf_counter()
    lowered = lowerable.lower(lowering_platforms=(meshes.compiler_named(record.hardware).platform,))
    emitted = collectives.collectives(lowered, record.mesh)
    return Verification(
        compiler="shardy",
        version=f"jaxlib {importlib.metadata.version('jaxlib')}",
        topology=str(record.mesh),
        rows=compare(record.collectives, emitted, record.mesh, tolerance),
        lines=attribute(record.collectives, emitted, record.mesh, tolerance, Places(graph)),
        memory=MemoryComparison(
            predicted=predicted_parts(record),
            compiled=None,
            meaning="unknown to Shardy",
            bound=False,
            tolerance=MEMORY_TOLERANCE,
        ),
        compute=None,
        cost=record.cost,
        predicted=None if assignment is None else schedule(assignment),
        timeline=None,
        emitted=emitted,
        wall_s=time.perf_counter() - begin,
        tolerance=tolerance,
    )


def check(
    compiled: Any,
    record: PlanRecord,
    *,
    compiler: str | None = None,
    tolerance: float = TOLERANCE,
    known: Known = NOTHING_KNOWN,
) -> Verification:
    """Compares a plan with an executable, or its HLO text, that somebody else compiled.

    Args:
      compiled: the result of `jax.jit(…).lower(…).compile()`, or HLO text after
        scheduling (`compiled.as_text()`, an XLA dump of the module after optimizations).
      record: the plan.
      compiler: who compiled it: "gpu", "tpu" or "cpu"; None takes the executable's
        platform, or for text that of the plan's hardware.
      tolerance: as in `verify`.
      known: as in `verify`; no graph: its ops carry no paths of the plan's.

    Raises:
      VerifyError: `compiled` is neither, or the executable has no text.
      HloError: the text is no HLO module, or of another number of devices than the plan.
    """
    if isinstance(compiled, str):
        platform = compiler or compile.CompileTarget.parse(record.hardware).compiler
        try:
            made = Compiled(text=compiled, compiler=platform, version="as given", topology=record.hardware)
            return judge(record, made, tolerance, known)
        except AutoshardError:
            raise
        except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            # No compiler wrote this text: an instruction names something that is missing, or of another kind.
            raise HloError(f"the HLO text contradicts itself: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(compiled, jax.stages.Compiled):
        raise VerifyError(
            f"cannot check a {type(compiled).__name__}: pass an executable, "
            "jax.jit(f).lower(*args).compile(), or its HLO text"
        )
    text = compiled.as_text()
    if not text:
        raise VerifyError("this executable does not give its HLO text; pass the text of an XLA dump instead")
    devices = {d for s in jax.tree.leaves(compiled.input_shardings) for d in s.device_set}
    platform = next((d.platform for d in devices), jax.default_backend())
    built_by = of_devices(platform)
    kind = next((d.device_kind for d in devices), "")
    stats: Any = compiled.memory_analysis()
    memory = compile.MemoryStats(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        reported_peak_bytes=stats.peak_memory_in_bytes,
    )
    made = Compiled(
        text=text,
        compiler=compiler or built_by.name,
        version=f"jaxlib {importlib.metadata.version('jaxlib')}",
        topology=f"{len(devices)} × {kind}",
        memory=_compiled_parts(memory, memory.peak_bytes(built_by)),
        memory_is_bound=memory.uses_host,
    )
    return judge(record, made, tolerance, known)


def judge(record: PlanRecord, compiled: Compiled, tolerance: float, known: Known) -> Verification:
    """Compares a plan with a compiled program."""
    machine, assignment = known.machine, known.assignment
    machine = meshes.place(record.mesh.shape, record.hardware).machine if machine is None else machine
    module = hlo.read(compiled.text)
    model = named(compiled.compiler)
    emitted = hlo.collectives(
        module,
        record.mesh,
        fold_slices=model.scatters_by_slices,
        unknown_trips=GUESSED_TRIPS,
        slices=machine.slices,
    )
    priced = timeline(module, emitted, machine, record.mesh, unknown_trips=GUESSED_TRIPS)
    predicted = None if assignment is None else schedule(assignment)
    place = Places(known.graph)
    by_line = attribute(record.collectives, emitted, record.mesh, tolerance, place)
    repeated = repeated_matmuls(predicted, priced, place.line_of)
    offloaded = offloaded_bytes(predicted, priced, place.line_of)
    return Verification(
        compiler=compiled.compiler,
        version=compiled.version,
        topology=compiled.topology,
        rows=compare(record.collectives, emitted, record.mesh, tolerance),
        lines=by_line,
        memory=MemoryComparison(
            predicted=predicted_parts(record),
            compiled=compiled.memory,
            meaning=model.peak_meaning,
            bound=not model.reports_peak or compiled.memory_is_bound,
            tolerance=MEMORY_TOLERANCE,
        ),
        compute=ComputeComparison(
            predicted_s=record.cost.compute_s,
            predicted_flops=None if assignment is None else bill.flops(assignment),
            compiled_s=priced.compute_s,
            compiled_flops=priced.flops,
            estimated_s=hlo.estimated_s(module, record.hardware),
        ),
        repeated=together(repeated),
        repeated_lines=repeated,
        offloaded=both_ways(offloaded),
        offloaded_lines=offloaded,
        pipelines=hand_overs(by_line, known.pipelines, tolerance),
        cost=record.cost,
        predicted=predicted,
        timeline=priced,
        emitted=emitted,
        wall_s=compiled.wall_s,
        tolerance=tolerance,
        module=module,
        log=compiled.log,
    )


def predicted_parts(record: PlanRecord) -> Parts:
    """The bytes that a plan promises on one device; temporaries are the rest of its peak beyond the arguments."""
    arguments = sum(local_bytes(leaf, record) for leaf in record.inputs)
    aliases = sum(local_bytes(record.inputs[i], record) for i in record.donated)
    return Parts(
        arguments=arguments,
        outputs=sum(local_bytes(leaf, record) for leaf in record.outputs),
        aliases=aliases,
        temporaries=record.memory.peak_bytes - arguments,
        peak=record.memory.peak_bytes,
    )


def local_bytes(leaf: Leaf, record: PlanRecord) -> int:
    """Bytes of one input or output in one device's memory."""
    if leaf.on_host:
        return 0
    local = Layout.from_spec(leaf.spec, len(leaf.shape)).local_shape(leaf.shape, record.mesh)
    return prod(local) * _jax.itemsize_of(leaf.dtype)


def _compiled_parts(memory: compile.MemoryStats, peak_bytes: int) -> Parts:
    return Parts(
        arguments=memory.argument_bytes,
        outputs=memory.output_bytes,
        aliases=memory.alias_bytes,
        temporaries=memory.temp_bytes,
        peak=peak_bytes,
    )


def path_of(op_name: str) -> Path:
    """The path of the equation that an op comes from, where its name carries one; else ()."""
    scopes = SCOPE.findall(op_name)
    return tuple(int(step) for step in scopes[-1].split(".")) if scopes else ()


def argument_of(found: hlo.Collective) -> int | None:
    """The position of the argument whose name an op has, in programs that are compiled here; None for other names."""
    argument = _ARGUMENT.fullmatch(found.op_name)
    return int(argument[1]) if argument else None


class Places:
    """The equation and source line of a compiled collective, from its op's metadata.

    The path that `propagation.annotated` writes into names gives the equation exactly. An op with an
    argument's name (in JAX 0.12 its gathers have it) belongs to the first equation that takes the argument,
    casts left out. For other ops, the innermost name of JAX's name stack is the primitive.
    """

    def __init__(self, graph: Graph | None) -> None:
        self._equations: dict[Path, Origin] = {}
        self._inputs: list[Origin | None] = []
        if graph is not None:
            for eqn, spots in zip(graph.eqns, graph.makes, strict=True):
                self._equations[spots[0][0]] = (eqn.primitive, eqn.where)
            uses = graph.consumers
            for value in graph.inputs:
                taken = uses.get(value)
                while taken and graph.eqns[taken[0][0]].traits.cast:
                    taken = uses.get(graph.results[taken[0][0]][0])
                eqn = graph.eqns[taken[0][0]] if taken else None
                self._inputs.append((eqn.primitive, eqn.where) if eqn else None)

    def __call__(self, found: hlo.Collective) -> Origin:
        path = path_of(found.op_name)
        if path in self._equations:
            return self._equations[path]
        i = argument_of(found)
        taker = self._inputs[i] if i is not None and i < len(self._inputs) else None
        if taker is not None:
            return taker
        where = "" if _PACKAGE.search(found.where) else found.where
        return found.op_name.rpartition("/")[2], where or UNKNOWN

    def line_of(self, op_name: str, where: str) -> str:
        """The source line of an op, whose metadata says `where`."""
        path = path_of(op_name)
        if path in self._equations:
            return self._equations[path][1]
        return UNKNOWN if _PACKAGE.search(where) else where
