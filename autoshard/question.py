"""Question: a program, where it shall run, what is asked of its layouts."""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

import cost_models
from autoshard import accumulation, meshes, planner
from autoshard import binding as bindings
from autoshard import trace as traces
from autoshard.errors import SpecError
from autoshard.gradient import gradient_arguments
from autoshard.meshes import MeshLike, Place
from autoshard.planner import Setting, Wanted
from autoshard.wanted import wanted

log = logging.getLogger("autoshard")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is planned or priced: `setting` holds the program's decisions on `place`."""

    name: str
    place: Place
    wanted: Wanted
    setting: Setting
    memory_bytes: int


def ask(
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
) -> Question:
    """Binds, traces and enumerates; arguments and errors as of `autoshard.plan`."""
    bound = bindings.bind(
        fn,
        args,
        kwargs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    place = meshes.place(mesh, hardware)
    begin = time.perf_counter()
    traced = traces.trace(bound.fn, bound.values, bound.names, place.axes)
    trace_s = time.perf_counter() - begin
    asked = wanted(traced, in_shardings, out_shardings, pins or {}, bound.donated)
    setting = planner.prepare(
        traced,
        place.axes,
        place.machine,
        asked,
        gradient_of=gradient_arguments(traced, for_grad=for_grad),
        unknown=unknown,
        platform=meshes.platform(place.hardware.name),
        trace_s=trace_s,
    )
    return Question(
        name=getattr(fn, "__name__", type(fn).__name__),
        place=place,
        wanted=asked,
        setting=setting,
        memory_bytes=place.hardware.usable_memory_bytes if memory is None else int(memory),
    )


def variants(asked: Callable[[], Question]) -> Generator[Question]:
    """The question, or one for each number of parts that an `autoshard.accumulate` leaves open."""
    with accumulation.tried_parts(1):
        first = asked()
    yield first
    if not accumulation.is_open(first.setting.traced.jaxpr):
        return
    for parts in accumulation.choices(first.place.axes)[1:]:
        try:
            with accumulation.tried_parts(parts):
                other = asked()
        except SpecError as error:  # the batch does not split into so many
            log.debug("accumulation in %d parts: %s", parts, error)
        else:
            yield other
