"""Profile: predicted beside measured seconds, per class of operation.

The step runs by itself, for its wall-clock seconds, and then under JAX's profiler, compiled so that the profiler
tells its kernels apart. The events that carry an HLO op's name are summed by class: every collective kind over its
mesh axes, matmuls (fusions around them included), and everything else. Measured seconds are the mean over devices and
steps; those of a collective include the time that a device waits for the others in it.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autoshard import _jax
from autoshard.backends import hlo
from autoshard.backends.hlo.matmuls import matmuls
from autoshard.backends.known_compilers import of_devices
from autoshard.errors import VerifyError
from autoshard.planner.record import PlanRecord
from autoshard.problem.assignment import Assignment
from autoshard.report.notebook import Shown
from autoshard.report.tables import columns, fields, render, table, time_text
from autoshard.verification.collective_match import in_order

MATMULS, OTHERS = "matmuls", "other compute"
WARM_UP = 1  # steps before the profiler starts: compiling, and buffers that are placed once
_ENTERED = frozenset({"while", "conditional", "call"})  # the instructions inside have events of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRow:
    """Seconds of one class per step and device; None if the plan does not price it."""

    name: str
    axes: tuple[str, ...]
    predicted_s: float | None
    measured_s: float
    count: float  # events per step and device


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Shown):
    """A profiled step beside its plan.

    Attributes:
      rows: one row per class, the longest measured first.
      predicted_s: seconds of the plan's step.
      measured_s: wall-clock seconds of a step, by the host.
      steps: number of measured steps.
      devices: number of devices that took part.
      hardware: the hardware that the plan was made for.
      device_kind: the devices that it ran on.
    """

    rows: tuple[ProfiledRow, ...]
    predicted_s: float
    measured_s: float
    steps: int
    devices: int
    hardware: str
    device_kind: str

    def __str__(self) -> str:
        """Both columns, for a terminal."""
        said = [
            (
                "step",
                f"predicted {time_text(self.predicted_s)} for {self.hardware}, measured {time_text(self.measured_s)} "
                f"(mean of {self.steps} steps on {self.devices} × {self.device_kind})",
            ),
        ]
        cells = [
            (
                row.name,
                "·".join(row.axes),
                f"{row.count:,.4g}",
                "" if row.predicted_s is None else time_text(row.predicted_s),
                time_text(row.measured_s),
                f"×{row.measured_s / row.predicted_s:.2f}" if row.predicted_s else "",
            )
            for row in self.rows
        ]
        width = columns()
        listed = table(
            "per step and device",
            ("class", "over", "events", "predicted", "measured", "ratio"),
            cells,
            right=("events", "predicted", "measured", "ratio"),
            whole=("class", "over"),
        )
        return render(fields(said, width) + "\n", listed, width=width)


def profile(
    step: Callable[..., Any], args: Sequence[Any], record: PlanRecord, assignment: Assignment | None, *, steps: int
) -> Profile:
    """Runs a planned step, and again under JAX's profiler.

    Args:
      step: the result of `plan.jit()`. An output with the structure, shapes and dtypes of an argument
        (a train step's state) is that argument of the next step.
      args: its arguments, arrays; donated ones are consumed.
      record: the plan.
      assignment: the plan's choices, for the seconds of compute; None where it was read from a file.
      steps: how many to measure, and how many to profile.

    Raises:
      VerifyError: `step` cannot be lowered, or the profiler saw none of its ops.
    """
    if steps < 1 or not hasattr(step, "lower"):
        raise VerifyError("profile takes a jitted step, plan.jit(), and one step or more")
    lowerable: Any = step
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    compiler = of_devices(next((d.platform for x in arrays for d in x.devices()), jax.default_backend()))
    kind = next((d.device_kind for x in arrays for d in x.devices()), "")
    profiled = lowerable.lower(*args).compile(dict(compiler.profiling_flags))
    module = hlo.read(profiled.as_text())
    classes = _classify(module, record, fold_slices=compiler.scatters_by_slices)
    args, _ = _run(step, args, WARM_UP)
    args, measured_s = _run(step, args, steps)
    args, _ = _run(profiled, args, WARM_UP)
    with tempfile.TemporaryDirectory(prefix="autoshard-") as folder:
        with jax.profiler.trace(folder):
            _run(profiled, args, steps)
        (path,) = Path(folder).rglob("*.xplane.pb")
        seconds, counts = _sum_events(str(path), module.name, classes)
    if not seconds:
        raise VerifyError("the profiler saw none of the step's operations on this platform")
    devices = record.mesh.size
    predicted = _sum_predictions(record, assignment)
    rows = [
        ProfiledRow(
            name=name,
            axes=axes,
            predicted_s=predicted.get((name, axes)),
            measured_s=seconds[name, axes] / steps / devices,
            count=counts[name, axes] / steps / devices,
        )
        for name, axes in seconds.keys() | predicted.keys()
    ]
    return Profile(
        rows=tuple(sorted(rows, key=lambda row: (-row.measured_s, row.name, row.axes))),
        predicted_s=record.cost.step_s,
        measured_s=measured_s / steps,
        steps=steps,
        devices=devices,
        hardware=record.hardware,
        device_kind=kind,
    )


def _run(step: Callable[..., Any], args: Sequence[Any], steps: int) -> tuple[Sequence[Any], float]:
    """Runs steps after each other; returns the arguments of the next one, and how many seconds they took together."""
    begin = time.perf_counter()
    for _ in range(steps):
        args = _next(args, step(*args))
    jax.block_until_ready(args)
    return args, time.perf_counter() - begin


_Class = tuple[str, tuple[str, ...]]


def _classify(module: hlo.Module, record: PlanRecord, *, fold_slices: bool) -> dict[str, _Class]:
    """Instruction → its class; names are unique in a scheduled module."""
    found: dict[str, _Class] = {}
    for computation in module:
        for instruction in computation:
            if instruction.opcode not in _ENTERED:
                name = MATMULS if matmuls(module, computation, instruction) else OTHERS
                found[instruction.name] = (name, ())
    for row in hlo.collectives(module, record.mesh, fold_slices=fold_slices):
        for name in (row.instruction, row.done):
            if name in found:
                found[name] = (row.kind, in_order(row.axes, record.mesh))
    return found


def _sum_events(path: str, module: str, classes: Mapping[str, _Class]) -> tuple[dict[_Class, float], dict[_Class, int]]:
    """Seconds and events per class, over all devices and steps."""
    seconds: dict[_Class, float] = defaultdict(float)
    counts: dict[_Class, int] = defaultdict(int)
    for name, duration_ns in _events(path, module):
        if name in classes:
            seconds[classes[name]] += duration_ns * 1e-9
            counts[classes[name]] += 1
    return seconds, counts


def _events(path: str, module: str) -> Iterator[tuple[str, float]]:
    """Every HLO op that ran: its instruction's name and nanoseconds.

    XLA:CPU and XLA:GPU name it in the statistics of an event, XLA:TPU in the event on the line of its ops.
    """
    for line, event, stats, duration_ns in _jax.profiled(path):
        if "hlo_op" in stats and stats.get("hlo_module", module) == module:
            yield str(stats["hlo_op"]), duration_ns
        elif line == "XLA Ops":
            yield event.partition(" = ")[0].lstrip("%"), duration_ns


def _sum_predictions(record: PlanRecord, assignment: Assignment | None) -> dict[_Class, float]:
    """The plan's seconds per class."""
    found: dict[_Class, float] = defaultdict(float)
    for row in record.collectives:
        found[row.kind, in_order(row.axes, record.mesh)] += row.seconds * row.trips
    if assignment is not None:
        for n, (node, pick) in enumerate(zip(assignment.decisions.nodes, assignment.choice, strict=True)):
            found[MATMULS if node.flops[pick] else OTHERS, ()] += assignment.own_ps(n) * 1e-12
    return found


def _next(args: Sequence[Any], result: Any) -> list[Any]:
    """The arguments of the next step: outputs take the place of those that they can replace, each one once."""

    def face(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves]

    left = list(result) if isinstance(result, tuple | list) and not hasattr(result, "_fields") else [result]
    following: list[Any] = []
    for arg in args:
        fitting = next((i for i, out in enumerate(left) if face(out) == face(arg)), None)
        following.append(arg if fitting is None else left.pop(fitting))
    return following
