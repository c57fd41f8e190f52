"""Question: a program, where it shall run, what is asked of its layouts."""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

import cost_models
from autoshard.backends import devices
from autoshard.backends.devices import MeshLike, Target
from autoshard.errors import SpecError
from autoshard.ir import accumulation, arguments, trace
from autoshard.ir.gradient import gradient_arguments
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.trace import Traced
from autoshard.planner import named_shardings
from autoshard.planner.record import FOR_GRADIENT, PlanRecord
from autoshard.planner.requested_shardings import RequestedShardings, is_sharding, kept, read_shardings
from autoshard.planner.search_space import OPTIMIZER_BYTES, SearchSpace, build_search_space

log = logging.getLogger("autoshard")


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


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: what is costly is found when first asked for
class PlanRequest:
    """What is planned or priced: a traced program on a place, with what is wanted of it.

    `kept` are the input positions that another plan's layouts were taken for.
    """

    name: str
    place: Target
    traced: Traced
    wanted: RequestedShardings
    kept: tuple[int, ...]
    gradient_of: tuple[int, ...]
    unknown: str
    memory_bytes: int
    trace_s: float

    @cached_property
    def setting(self) -> SearchSpace:
        """The program's decisions.

        Raises:
          MissingRuleError: a primitive without a rule, with its source line.
          SpecError: a pin or sharding that cannot be kept.
        """
        place = self.place
        return build_search_space(
            self.traced,
            place.axes,
            place.machine,
            self.wanted,
            gradient_of=self.gradient_of,
            unknown=self.unknown,
            compiler=place.compiler,
            trace_s=self.trace_s,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed for the user."""
        if not self.gradient_of:
            return self.place.notes
        traced = self.traced
        names = {n: re.split(r"[.\[]", p)[0] for n, p in zip(traced.argument_of, traced.in_paths, strict=True)}
        told = " and ".join(names[i] for i in self.gradient_of)
        assumed = f"optimizer state of {OPTIMIZER_BYTES} bytes per parameter assumed"
        return (f"{FOR_GRADIENT} {told}; {assumed}", *self.place.notes)

    @cached_property
    def digest(self) -> str:
        """The traced program's hash."""
        return self.traced.digest

    @cached_property
    def asked(self) -> str:
        """A hash of all that is asked beside program, mesh, hardware and memory limit."""
        text = (
            sorted((i, str(s)) for i, s in self.wanted.inputs.items()),
            sorted((o, str(s)) for o, s in self.wanted.outputs.items()),
            sorted(self.wanted.donated),
            self.gradient_of,
            self.unknown,
        )
        return hashlib.sha256(repr(text).encode()).hexdigest()[:32]


def request_of_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: MeshLike,
    hardware: str | cost_models.Hardware | None,
    in_shardings: Any,
    out_shardings: Any,
    pins: Mapping[str, PartitionSpec] | None = None,
    memory: int | None,
    donate_argnums: int | Sequence[int] | None,
    donate_argnames: str | Sequence[str] | None,
    static_argnums: int | Sequence[int] | None,
    static_argnames: str | Sequence[str] | None,
    for_grad: bool | int | Sequence[int] | None,
    unknown: str,
    like: PlanRecord | None = None,
) -> PlanRequest:
    """Binds and traces; arguments and errors as of `autoshard.plan`, `like` as a record."""
    bound = arguments.bind(
        fn,
        args,
        kwargs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    for keyword in kwargs if _by_position(in_shardings) else ():
        if keyword not in arguments.as_tuple(static_argnames):
            raise SpecError(
                f"in_shardings go by position, as in `jax.jit`; {keyword!r} is given by keyword: "
                f"give it by position, or pin it by name, pins={{{keyword!r}: …}}"
            )
    place = devices.place(named_shardings.on_mesh(mesh, in_shardings, out_shardings), hardware)
    named_shardings.check(place, in_shardings, "in_shardings")
    named_shardings.check(place, out_shardings, "out_shardings")
    named_shardings.check_arguments(bound.values, bound.names)
    begin = time.perf_counter()
    traced = trace.trace(bound.fn, bound.values, bound.names, place.axes)
    trace_s = time.perf_counter() - begin
    own = trace.own_mesh(traced.jaxpr, place.axes)
    if own is not None:
        raise OwnMeshError(bound.fn.__name__, own, place.axes)
    named_shardings.check_program(traced, place)
    asked = read_shardings(traced, in_shardings, out_shardings, pins or {}, bound.donated)
    same = {} if like is None else kept(traced, like)
    return PlanRequest(
        name=getattr(fn, "__name__", type(fn).__name__),
        place=place,
        traced=traced,
        wanted=replace(asked, inputs={**same, **asked.inputs}),
        kept=tuple(same),
        gradient_of=gradient_arguments(traced, for_grad=for_grad),
        unknown=unknown,
        memory_bytes=place.hardware.usable_memory_bytes if memory is None else int(memory),
        trace_s=trace_s,
    )


def _by_position(shardings: Any) -> bool:
    """Whether shardings differ by argument."""
    return shardings is not None and not is_sharding(shardings)


def variants(asked: Callable[[], PlanRequest]) -> Generator[PlanRequest]:
    """The question, or one for each number of parts that an `autoshard.accumulate` leaves open."""
    with accumulation.tried_parts(1):
        first = asked()
    yield first
    if not accumulation.is_open(first.traced.jaxpr):
        return
    for parts in accumulation.choices(first.place.axes)[1:]:
        try:
            with accumulation.tried_parts(parts):
                other = asked()
        except SpecError as error:  # the batch does not split into so many
            log.debug("accumulation in %d parts: %s", parts, error)
        else:
            yield other
