"""Request: a program on a target, with the shardings that are asked for."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

import cost_models
from autoshard.backends import devices
from autoshard.backends.devices import MeshLike, Target
from autoshard.errors import SpecError
from autoshard.ir import trace
from autoshard.ir.gradient import gradient_arguments
from autoshard.ir.loop_sums import LoopSum
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputation import (
    ADD,
    FREE,
    NO_OFFLOAD,
    STATE,
    WRITTEN,
    Offload,
    Recomputation,
    Remat,
    offloads_state,
)
from autoshard.ir.trace import Traced
from autoshard.planner import named_shardings
from autoshard.planner.host_parts import HostPatterns, read_host_parts
from autoshard.planner.program import Call, Program
from autoshard.planner.record import AFTER_LOOPS, FOR_GRADIENT, PlanRecord
from autoshard.planner.requested_shardings import AUTO, RequestedShardings, is_sharding, kept, read_shardings

# AdamW's two moments in float32: the optimizer's bytes per parameter, where the
# program itself does not show it (Kingma & Ba 2015).
OPTIMIZER_BYTES = 8


class OwnMeshError(SpecError):
    """A `shard_map` in the function is over `mesh`, and not over the plan's."""

    def __init__(self, name: str, mesh: Any, planned: MeshAxes) -> None:
        self.name, self.mesh, self.planned = name, mesh, planned
        own = MeshAxes.of(dict(mesh.shape))
        super().__init__(
            f"{name}: a `shard_map` in it is over the mesh {own}, the plan over {planned}: "
            "plan on that mesh (mesh= the Mesh that the shard_map has)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        rebuilt, (kind, args, facts) = super().__reduce__()
        abstract = getattr(self.mesh, "abstract_mesh", self.mesh)  # devices stay where they are
        return rebuilt, (kind, args, {**facts, "mesh": abstract})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of a call's plan, named as in `autoshard.plan`; the limit in bytes, `like` as a record."""

    in_shardings: Any = AUTO
    out_shardings: Any = AUTO
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])
    memory_bytes: int | None = None
    for_grad: bool | int | Sequence[int] | None = None
    unknown: str = "error"
    like: PlanRecord | None = None
    remat: Remat = WRITTEN
    host_local: HostPatterns | None = None
    hosts: int | None = None
    offload: Offload = NO_OFFLOAD

    def target(self, mesh: MeshLike, hardware: str | cost_models.Hardware | None) -> Target:
        """The mesh on the hardware; where no mesh is given, that of the shardings.

        Raises:
          MeshError: mesh, hardware and devices do not fit each other.
          SpecError: a sharding is over another mesh.
        """
        return devices.place(named_shardings.on_mesh(mesh, self.in_shardings, self.out_shardings), hardware)


NOTHING_ASKED = RequestOptions()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """A program on a target with requested layouts, to be planned or priced.

    Attributes:
      program: the traced program.
      target: the mesh on hardware.
      shardings: the requested specs and donations, leaf by leaf.
      memory_bytes: the limit per device.
      gradient_of: argument positions to differentiate for; empty to plan the program as it is.
      unknown: "error", or "replicate" to keep equations without a sharding rule whole.
      kept: the input positions that another plan's layouts were taken for.
      remat: whether backward passes may repeat more than the program says; see `ir.saved_values.Remat`.
      offload: whether the host's memory may hold what loops stack for backward passes.
      recomputation: what `program` keeps for its backward passes, where that was decided already.
      microbatches: how many `program` takes, where that was left open and is decided already.
      loop_sums: the sums that `program` finishes after its loops, where that was decided already.
      host_state: the inputs that `program` takes from the host's memory, where that was decided already.
    """

    program: Program
    target: Target
    shardings: RequestedShardings
    memory_bytes: int
    gradient_of: tuple[int, ...] = ()
    unknown: str = "error"
    kept: tuple[int, ...] = ()
    remat: Remat = WRITTEN
    offload: Offload = NO_OFFLOAD
    recomputation: Recomputation | None = None
    microbatches: int | None = None
    loop_sums: tuple[LoopSum, ...] = ()
    host_state: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The function's name."""
        return self.program.name

    @property
    def traced(self) -> Traced:
        return self.program.traced

    @property
    def digest(self) -> str:
        """The traced program's hash."""
        return self.program.traced.digest

    @property
    def title(self) -> str:
        """The program, its variant, its mesh and hardware, in words."""
        variant = f", {self.program.variant}," if self.program.variant else ""
        return f"{self.name}{variant} on {self.target.axes} ({self.target.hardware.name})"

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions made for the user."""
        traced = self.traced
        if not self.gradient_of:
            idle = () if traced.out_avals else (f"{self.name} returns no array, so that nothing of it is computed",)
            return (*idle, *self._after_loops, *self.target.notes)
        names = {n: re.split(r"[.\[]", p)[0] for n, p in zip(traced.argument_of, traced.in_paths, strict=True)}
        told = " and ".join(names[i] for i in self.gradient_of)
        assumed = f"optimizer state of {OPTIMIZER_BYTES} bytes per parameter assumed"
        return (f"{FOR_GRADIENT} {told}; {assumed}", *self.target.notes)

    @property
    def _after_loops(self) -> tuple[str, ...]:
        """What is said of sums that are finished after their loops."""
        if not self.loop_sums:
            return ()
        parts = " or ".join(map(str, sorted({one.parts for one in self.loop_sums})))
        return (f"{AFTER_LOOPS} {len(self.loop_sums)} sums over loops' trips, kept in {parts} parts until then",)

    @property
    def asked(self) -> str:
        """A hash of all that is asked beside program, mesh, hardware and memory limit."""
        text = (
            sorted((i, str(s)) for i, s in self.shardings.inputs.items()),
            sorted((o, str(s)) for o, s in self.shardings.outputs.items()),
            sorted(self.shardings.donated),
            self.gradient_of,
            self.unknown,
            *(() if self.shardings.host_parts is None else (self.shardings.host_parts.digest,)),
        )
        return hashlib.sha256(repr(text).encode()).hexdigest()[:32]

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of micro-batches to choose among; none where there is nothing to choose."""
        open_ = self.program.open_count
        return () if open_ is None or self.gradient_of or self.microbatches is not None else open_.counts

    def in_microbatches(self, count: int) -> "PlanRequest":
        """The request for the program in so many micro-batches.

        Raises:
          SpecError: it leaves no such number open.
        """
        open_ = self.program.open_count
        if open_ is None or count not in open_.counts:
            raise SpecError(
                f"{self.name} cannot be planned in {count} micro-batches: "
                + (f"it takes one of {', '.join(map(str, open_.counts))}" if open_ else "it leaves no number open")
            )
        return replace(self, program=open_.program(count), microbatches=count)

    def asking(self, inputs: Mapping[int, PartitionSpec]) -> "PlanRequest":
        """The same request with these specs of inputs alone."""
        return replace(self, shardings=replace(self.shardings, inputs=inputs))


def request_of(call: Call, target: Target, options: RequestOptions = NOTHING_ASKED) -> PlanRequest:
    """The request for a call's program as the function says it.

    Raises:
      SpecError: a sharding or pin that cannot be kept; there is no gradient.
      OwnMeshError: a `shard_map` in the program is over another mesh.
    """
    _check(call, target, options)
    return _request(call.program(target.axes), call, target, options)


def requests_of(
    call: Call, target: Target, options: RequestOptions = NOTHING_ASKED, *, in_parts: bool = True
) -> Iterator[PlanRequest]:
    """A request for each of a call's programs (`Call.variants`): the one whose plan is the fastest counts.

    Raises:
      SpecError: as of `request_of`.
    """
    _check(call, target, options)
    for program in call.variants(target.axes, in_parts=in_parts):
        yield _request(program, call, target, options)


def _check(call: Call, target: Target, options: RequestOptions) -> None:
    """Raises if an option cannot be kept on the target, whatever the program."""
    shardings = options.in_shardings
    by_position = shardings is not None and not is_sharding(shardings)  # they differ by argument
    for keyword in call.bound.keywords if by_position else ():
        raise SpecError(
            f"in_shardings go by position, as in `jax.jit`; {keyword!r} is given by keyword: "
            f"give it by position, or pin it by name, pins={{{keyword!r}: …}}"
        )
    named_shardings.check(target, options.in_shardings, "in_shardings")
    named_shardings.check(target, options.out_shardings, "out_shardings")
    if not offloads_state(options.offload):
        named_shardings.check_arguments(call.bound.values, call.bound.names)


def _request(program: Program, call: Call, target: Target, options: RequestOptions) -> PlanRequest:
    traced = program.traced
    own = trace.own_mesh(traced.jaxpr, target.axes)
    if own is not None:
        raise OwnMeshError(call.bound.fn.__name__, own, target.axes)
    named_shardings.check_program(traced, target)
    asked = read_shardings(traced, options.in_shardings, options.out_shardings, options.pins, call.bound.donated)
    if options.host_local is not None:
        hosts = devices.hosts_of(target, options.hosts)
        asked = replace(asked, host_parts=read_host_parts(traced, options.host_local, target.axes, hosts))
    same = {} if options.like is None else kept(traced, options.like)
    memory_bytes = options.memory_bytes
    gradient_of = gradient_arguments(traced, for_grad=options.for_grad)
    if gradient_of and options.remat == FREE:
        raise SpecError(
            f"remat={FREE!r} says what becomes of a program's own jax.checkpoints, but {call.bound.fn.__name__} is "
            "planned for a gradient that is taken outside of it, where JAX keeps what they say\n"
            "  what helps: plan the step that takes the gradient; or leave remat out"
        )
    if options.offload != NO_OFFLOAD:
        _check_offload(target, options, differentiated_outside=bool(gradient_of))
    return PlanRequest(
        program=program,
        target=target,
        shardings=replace(asked, inputs={**same, **asked.inputs}),
        memory_bytes=target.hardware.usable_memory_bytes if memory_bytes is None else int(memory_bytes),
        gradient_of=gradient_of,
        unknown=options.unknown,
        kept=tuple(same),
        remat=options.remat,
        offload=options.offload,
    )


def _check_offload(target: Target, options: RequestOptions, *, differentiated_outside: bool) -> None:
    """Raises a SpecError where nothing could be offloaded."""
    asked, compiler = f"offload={options.offload!r}", target.compiler
    if not compiler.keeps_host_values_apart:
        raise SpecError(
            f"{asked}: XLA for {compiler.platform} has one memory for the host's values and the device's, or none was "
            "seen to have two: nothing would be saved\n"
            "  what helps: leave offload out; a smaller batch, or more devices"
        )
    if differentiated_outside:
        raise SpecError(
            f"{asked} decides about a whole train step, but the gradient is taken outside of what "
            "is planned\n  what helps: plan the step that takes the gradient; or leave offload out"
        )
    if options.remat == WRITTEN and options.offload != STATE:
        raise SpecError(
            f"{asked} is decided together with what is kept, and remat={WRITTEN!r} leaves that to the program\n"
            f"  what helps: remat={ADD!r}; offload={STATE!r}, which leaves that to the program, too; or "
            "jax.checkpoint_policies.save_and_offload_only_these_names in the program"
        )
