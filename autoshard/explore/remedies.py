"""Remedies: the nearest changes that make a plan fit, each planned and not guessed."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cost_models
from autoshard.errors import AutoshardError, MeshError
from autoshard.explore.builder import load_builder
from autoshard.explore.candidates import Candidate, slices
from autoshard.explore.ranking import RankedPlan
from autoshard.explore.trial import Task, Trials
from autoshard.ir.mesh import MeshAxes

HALVINGS = 4  # of the batch, until it fits
DOUBLINGS = 3  # of the chips


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that makes the program fit: the option to type, and the resulting plan."""

    change: str
    step_s: float
    peak_bytes: int
    limit_bytes: int


def remedies(task: Task, mesh: Mapping[str, int], hardware: str) -> tuple[Remedy, ...]:
    """Tries smaller batches, more chips, and chips with more memory; keeps the changes that fit.

    Args:
      task: a builder, as text, that does not fit on the mesh.
      mesh: the requested mesh.
      hardware: the slice of the mesh.
    """
    found: list[Remedy] = []
    for attempts in (
        _smaller_batches(task, mesh, hardware),
        _more_chips(task, mesh, hardware),
        _more_memory(task, mesh, hardware),
    ):
        for change, attempt in attempts:
            row = attempt()
            if row is not None:
                memory = row.record.memory
                found.append(
                    Remedy(
                        change=change, step_s=row.step_s, peak_bytes=memory.peak_bytes, limit_bytes=memory.limit_bytes
                    )
                )
                break  # the nearest of its kind
    return tuple(found)


Attempt = tuple[str, Callable[[], RankedPlan | None]]


def _planned(task: Task, mesh: Mapping[str, int], hardware: str, choice: Mapping[str, Any]) -> RankedPlan | None:
    chips = cost_models.hardware(hardware).devices
    candidate = Candidate(hardware=hardware, chips=chips, mesh=tuple(mesh.items()), choice=tuple(choice.items()))
    try:
        answer = Trials(task).run(candidate).answer
    except AutoshardError:
        return None  # a smaller batch that the program cannot be built with
    return answer if isinstance(answer, RankedPlan) else None


def _smaller_batches(task: Task, mesh: Mapping[str, int], hardware: str) -> Iterator[Attempt]:
    if not isinstance(task.target, str):
        return
    default: Any = inspect.signature(load_builder(task.target)).parameters.get("batch")
    batch = task.keywords.get("batch", None if default is None else default.default)
    for _ in range(HALVINGS):
        if not isinstance(batch, int) or batch < 2:
            return
        batch //= 2
        yield f"--set batch={batch}", lambda batch=batch: _planned(task, mesh, hardware, {"batch": batch})


def _more_chips(task: Task, mesh: Mapping[str, int], hardware: str) -> Iterator[Attempt]:
    chip = hardware.partition(":")[0]
    first, ways = next(iter(mesh.items()))
    for doubling in range(1, DOUBLINGS + 1):
        wider = {**mesh, first: ways << doubling}
        try:
            place = slices(chip, [MeshAxes.of(wider).size])[0]
        except (MeshError, cost_models.CostModelError):
            continue
        written = ",".join(f"{name}={size}" for name, size in wider.items())
        yield (
            f"--mesh {written} --hardware {place.spec}",
            lambda wider=wider, place=place: _planned(task, wider, place.spec, {}),
        )


def _more_memory(task: Task, mesh: Mapping[str, int], hardware: str) -> Iterator[Attempt]:
    now = cost_models.hardware(hardware)
    for name in cost_models.chips():
        try:
            other = cost_models.hardware(f"{name}:{now.topology.name}")
        except cost_models.CostModelError:
            continue
        same = other.chip.platform.value == now.chip.platform.value
        if same and other.usable_memory_bytes > now.usable_memory_bytes:
            yield f"--hardware {other.name}", lambda other=other: _planned(task, mesh, other.name, {})
