"""What backward passes keep, decided with the layouts, against our layouts under usual checkpoint policies.

    python -m benchmarks.recomputation run [--match 'llama3-8b 8x4096 h100:1x8'] [--seconds 1500] [--results FILE]
    python -m benchmarks.recomputation table

A cell is a model and batch on a hardware and mesh, under a budget: a part of the memory that JAX can use. Ours is the
program without a word about recomputation, planned with `remat="add"`. The rivals are the same program with a policy
of `jax.checkpoint` in every layer (`models.layers.Remat`), whose layouts are planned under the same budget, with
`remat="written"`. All that fits is compiled for the hardware, without a device; the compiled schedules, priced by
the same model, are compared. "Fits" means that the compiled peak is within the budget.

`run` appends one JSON line per run (a cell and a policy) to `benchmarks/results/recomputation.jsonl`; what is there
already is skipped, so that it can be stopped and started again. `--match` is a regular expression that is searched for
in the names of the runs ("llama3-8b 8x4096 h100:1x8 60% dots"). A rival's plan is also that of a smaller budget, if it
fits there; and a plan that predicts the same as one of a larger budget is not compiled again. `table` prints the
board; `render` writes it into `docs/recomputation.md`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autoshard
import models
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends import compile
from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.verification.collective_match import agrees
from benchmarks import recomputation_models, recomputation_report
from benchmarks.comparison_board import QUICK
from benchmarks.recomputation_report import OURS, Line
from cost_models import hardware as read_hardware
from models.layers import Remat

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recomputation.jsonl"

BUDGETS = (100, 60, 35)  # percent of the usable memory
POLICIES: tuple[Remat, ...] = get_args(Remat)
OF_LAYERS: tuple[Remat, ...] = ("none", "full", "dots", "all_dots")  # that go without names and attention

MESHES: dict[str, dict[str, int]] = {
    "h100:1x8": {"data": 2, "model": 4},
    "h100:2x8": {"data": 4, "model": 4},
    "h100:4x8": {"data": 8, "model": 4},
    "tpu-v5e:4x4": {"data": 4, "model": 4},
    "tpu-v5p:4x4x2": {"data": 8, "model": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its batch and its hardware."""

    model: str
    hardware: str
    batch: int
    sequence: int | None = None
    scan: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        layers = f" {self.fields['layers']}-layers" if "layers" in self.fields else ""
        size = f"{self.batch}" if self.sequence is None else f"{self.batch}x{self.sequence}"
        return f"{self.model}{layers}{'' if self.scan else ' unrolled'} {size} {self.hardware}"

    @property
    def policies(self) -> tuple[Remat, ...]:
        return OF_LAYERS if self.model == "ssm" else POLICIES

    def build(self, remat: Remat) -> Any:
        """The program with a checkpoint policy, and its arguments."""
        sizes = {"batch": self.batch} | ({} if self.sequence is None else {"sequence": self.sequence})
        if self.model in ("vit", "ssm"):
            return getattr(recomputation_models, self.model)(remat=remat, **sizes, **self.fields)
        return models.build(self.model, scan=self.scan, remat=remat, **sizes, **self.fields)


GPT2 = {"vocab": 50_304}  # padded as Megatron pads it: 50,257 is odd

SUBJECTS = (
    Subject(model="llama3-8b", hardware="h100:1x8", batch=8, sequence=4096),
    Subject(model="gpt2-small", hardware="h100:1x8", batch=256, sequence=1024, scan=False, fields=GPT2),
    Subject(model="llama3-8b", hardware="h100:4x8", batch=64, sequence=2048),
    Subject(model="llama3-8b", hardware="tpu-v5e:4x4", batch=16, sequence=2048, fields={"layers": 16}),
    Subject(model="gpt2-xl", hardware="h100:1x8", batch=64, sequence=1024, fields=GPT2),
    Subject(model="gemma-7b", hardware="h100:1x8", batch=8, sequence=2048),
    Subject(model="mixtral-8x7b", hardware="h100:1x8", batch=16, sequence=2048, fields={"layers": 4}),
    Subject(model="vit", hardware="h100:1x8", batch=1024, scan=False),
    Subject(model="ssm", hardware="h100:1x8", batch=64, sequence=1024),
    Subject(model="llama3-8b", hardware="h100:2x8", batch=16, sequence=4096),
    Subject(model="llama3-8b", hardware="tpu-v5p:4x4x2", batch=64, sequence=2048),
    Subject(model="gpt2-xl", hardware="h100:1x8", batch=64, sequence=1024, scan=False, fields={**GPT2, "layers": 12}),
    Subject(model="gpt2-xl", hardware="h100:2x8", batch=128, sequence=1024, scan=False, fields=GPT2),
    Subject(model="gemma-7b", hardware="h100:4x8", batch=64, sequence=2048),
    Subject(model="mixtral-8x7b", hardware="tpu-v5p:4x4x2", batch=32, sequence=2048, fields={"layers": 4}),
    Subject(model="gpt2-medium", hardware="tpu-v5e:4x4", batch=128, sequence=1024, fields=GPT2),
    Subject(model="gpt2-small", hardware="h100:1x8", batch=256, sequence=1024, fields=GPT2),
    Subject(model="gpt2-small", hardware="h100:4x8", batch=1024, sequence=1024, fields=GPT2),
    Subject(model="vit", hardware="h100:1x8", batch=4096, scan=False, fields={"layers": 6}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A cell, and a policy or `OURS`."""

    subject: Subject
    budget: int
    policy: str

    @property
    def cell(self) -> str:
        return f"{self.subject.key} {self.budget}%"

    @property
    def key(self) -> str:
        return f"{self.cell} {self.policy}"

    @property
    def limit_bytes(self) -> int:
        return read_hardware(self.subject.hardware).usable_memory_bytes * self.budget // 100


def runs() -> Iterator[Run]:
    """The board: subject by subject, ours first in each cell."""
    for subject in SUBJECTS:
        for budget in BUDGETS:
            for policy in (OURS, *subject.policies):
                yield Run(subject=subject, budget=budget, policy=policy)


def line(run: Run, done: Sequence[Line]) -> Line:
    """The stored line of a run. `done` are lines of the same commit or another; their plans and schedules may serve."""
    told: Line = {
        "key": run.key,
        "cell": run.cell,
        "subject": run.subject.key,
        "budget": run.budget,
        "policy": run.policy,
        "limit_bytes": run.limit_bytes,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"jax": jax.__version__, "autoshard": _commit(), "compiler": compile.version(_compiler(run))},
    }
    larger = [x for x in done if _serves(x, run)]
    if run.policy != OURS:
        for x in larger:
            if x.get("infeasible") or x["predicted"]["peak_bytes"] <= run.limit_bytes:
                said = {k: x[k] for k in ("infeasible", "predicted", "compiled", "plan_s") if k in x}
                return {**told, **said, "as": x["cell"]}
    begin = time.perf_counter()
    try:
        plan = planned(run)
    except InfeasibleError as error:
        said = {"infeasible": str(error).partition("\n")[0], "smallest_peak_bytes": error.peak_bytes}
        return {**told, **said, "plan_s": time.perf_counter() - begin}
    told["plan_s"] = time.perf_counter() - begin
    record = plan.record
    told["predicted"] = {
        "step_s": record.cost.step_s,
        "compute_s": record.cost.compute_s,
        "exposed_s": record.cost.exposed_s,
        "peak_bytes": record.memory.peak_bytes,
        "gap": record.certificate.gap,
    }
    told["notes"] = [note for note in record.notes if "backward passes" in note]
    same = [x for x in larger if x.get("predicted") == told["predicted"] and "compiled" in x]
    if same:
        return {**told, "compiled": same[0]["compiled"], "as": same[0]["cell"]}
    return {**told, "compiled": compiled(plan, run)}


def planned(run: Run) -> SolvedPlan:
    """The plan of a run.

    Raises:
      InfeasibleError: nothing fits its budget.
    """
    ours = run.policy == OURS
    policies: dict[str, Remat] = {policy: policy for policy in POLICIES}
    fn, args = run.subject.build("none" if ours else policies[run.policy])
    return autoshard.plan(
        fn,
        *args,
        mesh=MESHES[run.subject.hardware],
        hardware=run.subject.hardware,
        memory=run.limit_bytes,
        donate_argnums=0,
        cache=False,
        remat="add" if ours else "written",
    )


def compiled(plan: SolvedPlan, run: Run) -> Line:
    """What the hardware's compiler makes of a plan: its schedule, priced by the same model, its peak and its FLOPs."""
    found = plan.verify(compiler_options=QUICK if _compiler(run) == "gpu" else None)
    timeline, memory, compute = found.timeline, found.memory.compiled, found.compute
    assert timeline is not None  # a compiler's program has a schedule
    assert memory is not None
    assert compute is not None
    return {
        "step_s": timeline.step_s,
        "compute_s": timeline.compute_s,
        "exposed_s": timeline.exposed_s,
        "peak_bytes": memory.peak,
        "bytes_match": agrees(found.rows, found.tolerance),
        "flops": compute.compiled_flops,
        "predicted_flops": compute.predicted_flops,
        "compile_s": found.wall_s,
    }


def _serves(x: Line, run: Run) -> bool:
    """Whether a line is of the same subject and policy, under a larger budget, and not of a failure."""
    same = x["subject"] == run.subject.key and x["policy"] == run.policy
    return same and x["budget"] > run.budget and "error" not in x


def _compiler(run: Run) -> Literal["gpu", "tpu"]:
    return "gpu" if run.subject.hardware.startswith("h100") else "tpu"


def _commit() -> str:
    """The short commit of this checkout; empty outside of one."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def take(left: Sequence[Run], results: Path, seconds: float) -> None:
    """Takes the runs that are not in the results yet, until the time is over."""
    end = time.monotonic() + seconds
    done = recomputation_report.read(results)
    known = {x["key"] for x in done}
    left = [run for run in left if run.key not in known]
    results.parent.mkdir(exist_ok=True)
    for i, run in enumerate(left):
        if time.monotonic() > end:
            break
        try:
            told = line(run, done)
        except AutoshardError as error:
            names = {"key": run.key, "cell": run.cell, "subject": run.subject.key, "budget": run.budget}
            told = {**names, "policy": run.policy, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        done = [*done, told]
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        sys.stderr.write(f"{i + 1}/{len(left)} {run.key}: {recomputation_report.said(told)}\n")
        jax.clear_caches()


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table", "render", "list"))
    parser.add_argument("--match", default="", help="a regular expression: only runs in whose name it is found")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    chosen = [run for run in runs() if re.search(asked.match, run.key)]
    total = len({run.cell for run in runs()})
    if asked.verb == "list":
        sys.stdout.writelines(f"{run.key}\n" for run in chosen)
    elif asked.verb == "render":
        recomputation_report.write(asked.results, ROOT / "docs" / "recomputation.md", total)
    else:
        if asked.verb == "run":
            take(chosen, asked.results, asked.seconds)
        cells = {run.cell for run in chosen}
        lines = [x for x in recomputation_report.read(asked.results) if x["cell"] in cells]
        sys.stdout.write(recomputation_report.board(lines, total) + "\n")


if __name__ == "__main__":
    main()
