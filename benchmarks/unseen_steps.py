"""Prices of train steps and forward passes that nothing was fitted to: plans beside what compilers make of them.

    python -m benchmarks.unseen_steps [--targets h100:1x8,h100:2x8] [--models gated-51k,experts-32k]

Each step of `benchmarks.unseen_models` and of `benchmarks.unseen_programs`, and each forward pass of
`benchmarks.unseen_answers`, is planned and compiled without a device; the table on standard output is Markdown, as
docs/unseen_steps.md keeps it. *Step* is the plan's own cost beside the compiled schedule, priced by the same cost
model; *compute* that of kernels alone; *peak* the memory of a device.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import mean, median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autoshard
from autoshard.errors import AutoshardError
from autoshard.ir.mesh import MeshAxes
from benchmarks.unseen_answers import ANSWERS, CONTINUED
from benchmarks.unseen_models import MODELS
from benchmarks.unseen_programs import PROGRAMS

MESHES: Mapping[str, Mapping[str, int]] = {
    "h100:1x8": {"data": 2, "model": 4},
    "h100:2x8": {"data": 2, "model": 8},
    "h100:4x8": {"data": 4, "model": 8},
    "tpu-v5e:4x4": {"data": 4, "model": 4},
    "tpu-v5p:4x4x2": {"data": 4, "model": 8},
}
STEPS = {**{name: model.program for name, model in MODELS.items()}, **PROGRAMS, **ANSWERS}
REL_GAP = 1e-2
TIME_LIMIT_S = 120.0
CLOSE = 0.10
HEAD = """\
| model | step, ms: predicted → compiled | compute, ms | peak, GB | agrees |
| --- | --- | --- | --- | --- |"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What a plan predicts, and what the compiler made of it."""

    predicted: float
    compiled: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.compiled

    @property
    def close(self) -> bool:
        return abs(self.ratio - 1) <= CLOSE

    def text(self, unit: float) -> str:
        """Both in a unit, and their ratio."""
        return f"{self.predicted / unit:.2f} → {self.compiled / unit:.2f} (×{self.ratio:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan beside its compiled program: seconds and bytes; `agrees` is the verdict of `Plan.verify`."""

    model: str
    step: Pair
    compute: Pair
    peak: Pair
    agrees: bool


def found(model: str, target: str, memory_mb: int | None = None) -> Found:
    """Plans a step, in so much of each device's memory, and compiles it."""
    mesh = MESHES[target]
    step, arguments = STEPS[model](MeshAxes.of(mesh).size)
    plan = autoshard.plan(
        step,
        *arguments,
        mesh=mesh,
        hardware=target,
        donate_argnums=() if model in ANSWERS and model not in CONTINUED else 0,
        memory=None if memory_mb is None else memory_mb * 10**6,
        rel_gap=REL_GAP,
        time_limit_s=TIME_LIMIT_S,
    )
    return judged(model, plan)


def judged(name: str, plan: autoshard.SolvedPlan) -> Found:
    """Compiles a plan, and says what it predicts beside what the compiler made."""
    verified = plan.verify()
    timeline, compute, memory = verified.timeline, verified.compute, verified.memory
    assert timeline is not None  # a compiler's program has a schedule
    assert compute is not None
    assert memory.compiled is not None
    return Found(
        model=name,
        step=Pair(predicted=plan.cost, compiled=timeline.step_s),
        compute=Pair(predicted=compute.predicted_s, compiled=compute.compiled_s),
        peak=Pair(predicted=memory.predicted.peak, compiled=memory.compiled.peak),
        agrees=verified.ok,
    )


def row(one: Found) -> str:
    """A line of the table."""
    cells = one.model, one.step.text(1e-3), one.compute.text(1e-3), one.peak.text(1e9), "yes" if one.agrees else "no"
    return f"| {' | '.join(cells)} |"


def verdict(rows: Sequence[Found]) -> str:
    """How far steps and peaks are off."""
    steps = [one.step for one in rows]
    peaks = [one.peak for one in rows]
    off = median(abs(step.ratio - 1) for step in steps)
    bias = mean(step.ratio - 1 for step in steps)
    close_steps, close_peaks = (sum(pair.close for pair in pairs) for pairs in (steps, peaks))
    over = sum(peak.compiled > (1 + CLOSE) * peak.predicted for peak in peaks)
    return (
        f"Steps: {off:.1%} off (median), {bias:+.1%} on average; {close_steps} of {len(rows)} within {CLOSE:.0%}. "
        f"Peaks: {close_peaks} of {len(rows)} within {CLOSE:.0%}; compiled ones {CLOSE:.0%} above the plan: {over}."
    )


def report(target: str, models: Sequence[str], memory_mb: int | None) -> None:
    """Prints the section of a target, line by line as it is made."""
    axes = " × ".join(f"{name}={size}" for name, size in MESHES[target].items())
    within = "" if memory_mb is None else f", in {memory_mb} MB per device"
    print(f"## {target} ({axes}){within}, JAX {jax.__version__}, {datetime.now(UTC).date().isoformat()}\n")
    print(HEAD)
    rows: list[Found] = []
    refused: list[str] = []
    for model in models:
        begin = time.perf_counter()
        try:
            rows.append(found(model, target, memory_mb))
            print(row(rows[-1]), flush=True)
        except AutoshardError as error:
            refused.append(f"{model}: {type(error).__name__}: {str(error).splitlines()[0]}")
        sys.stderr.write(f"{target} {model}: {time.perf_counter() - begin:.0f} s\n")
        jax.clear_caches()
    if rows:
        print(f"\n{verdict(rows)}")
    for line in refused:
        print(f"\nRefused: {line}")
    print()


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="h100:1x8", help=f"of {', '.join(MESHES)}")
    parser.add_argument("--models", default=",".join(STEPS), help="by name; all by default")
    parser.add_argument("--memory-mb", type=int, help="of each device that plans may take; all of it by default")
    asked = parser.parse_args()
    targets, models = asked.targets.split(","), asked.models.split(",")
    for name, known in (*((t, MESHES) for t in targets), *((m, STEPS) for m in models)):
        if name not in known:
            parser.error(f"{name} is not one of {', '.join(known)}")
    for target in targets:
        report(target, models, asked.memory_mb)


if __name__ == "__main__":
    main()
