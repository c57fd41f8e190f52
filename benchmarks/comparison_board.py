"""Our plans against hand-written layouts, by the compilers' schedules: a board of many cells.

    python -m benchmarks.comparison_board run [--match h100:1x8] [--seconds 3600]
    python -m benchmarks.comparison_board render

`run` takes one cell at a time, without a device, and appends one JSON line per cell to
`benchmarks/results/comparison.jsonl`; a cell that is there already is skipped, so that it can be
stopped and started again. `render` writes the board into `docs/comparing.md`.

A cell is a model of four layers, a batch, and 8, 16 or 32 H100, or one of two TPU slices; the first
is small enough to be made again by the tests. Every applicable hand-written layout is priced on
every mesh that it takes; four of those that fit, each on its best mesh, are compiled: by turns the
one with the shortest predicted step, and with the least predicted compute. Ours is compiled on the
mesh that the model chose; where it loses there, on the next best two, too, as `refined`; and the fastest,
as the fastest of the hand-written, with the flags that `refine` tries. The compiled schedules are
priced by the same model. The hand-written layout that is predicted fastest is also completed at
best, as a check of the model with itself.

`--again` runs stored cells again. It does not compile hand-written layouts again if the compiler is
the same: our prices have no part in them, as long as neither `timeline` nor the hardware files change
(`--afresh` if they do).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autoshard
import models
from autoshard.api import compare
from autoshard.api.compare import Template
from autoshard.api.evaluation import Evaluation
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends import compile
from autoshard.backends import devices as meshes
from autoshard.backends.known_compilers import named
from autoshard.cli.compare import of_models
from autoshard.errors import AutoshardError, CompilerFlagError, InfeasibleError
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.formulation import UNIT_S
from benchmarks import comparison_report
from cost_models import hardware as read_hardware

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "comparison.jsonl"

PLACES = ("h100:1x8", "h100:2x8", "h100:4x8")
SLICES = ("tpu-v5e:4x4", "tpu-v5p:4x4x2")  # for llama3-8b
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-xl": {"vocab": 50_304},  # padded as Megatron pads it: 50,257 is odd
    "llama3-8b": {},
    "gemma-7b": {},
    "mixtral-8x7b": {},
}
LAYERS = 4
SIZES = ("medium", "large", "small", "one", "huge")  # in the order in which they are run

TIME_LIMIT_S = 8.0  # of the solver, per mesh
MESHES = 3  # so many of ours are compiled at most, one after the other until one wins; as many as `refine` takes
CLOSE = 1.05  # times our best prediction: which of them
ALIKE = 1e-5  # of it: of equal plans on two meshes (both axes split what one splits elsewhere) one is compiled
# How many hand layouts are compiled, and times the best prediction which: predictions of what a partitioner makes of
# annotations are right for most, and up to 1.5 times too high where XLA hides what the prices take as waited for.
MOST = 4
LIKELY = 1.25
# XLA:GPU generates code faster so; the schedule is made before, and stays the same.
QUICK = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_disable_gpuasm_optimizations": True,
}


Known = Mapping[str, dict[str, Any]]  # layout, mesh and flags → the compiler's result


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model and batch on one place."""

    model: str
    size: str
    hardware: str

    @property
    def key(self) -> str:
        return f"{self.model} {self.size} {self.hardware}"

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences and tokens of each."""
        devices = read_hardware(self.hardware).devices
        return {
            "one": (1, 4096 if self.model != "gpt2-xl" else 1024),
            "small": (devices // 4, 1024),
            "medium": (devices, 1024),
            "large": (4 * devices, 1024),
            "huge": (16 * devices, 512),
        }[self.size]

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of `models.build`."""
        batch, sequence = self.batch
        if self.model == CHECKED.model:
            return {"layers": 2, "batch": batch * sequence}
        return {"layers": LAYERS, "scan": True, "batch": batch, "sequence": sequence, **MODELS[self.model]}


CHECKED = Cell(model="mlp-1k", size="small", hardware="h100:1x8")  # small enough for every run of the tests


def cells() -> Iterator[Cell]:
    """The board, every model and place once before the next size."""
    yield CHECKED
    for size in SIZES:
        for hardware in PLACES:
            for model in MODELS:
                yield Cell(model=model, size=size, hardware=hardware)
    for size in SIZES[:3]:
        for hardware in SLICES:
            yield Cell(model="llama3-8b", size=size, hardware=hardware)


def line(cell: Cell, known: Known | None = None) -> dict[str, Any]:
    """The stored line of a cell."""
    known = known or {}
    begin, begin_cpu = time.perf_counter(), _cpu_s()
    fn, args = models.build(cell.model, **cell.fields)
    common: dict[str, Any] = {"hardware": cell.hardware, "donate_argnums": 0}
    plans: list[SolvedPlan] = []
    ours: list[dict[str, Any]] = []
    templates = of_models(f"models:{cell.model.replace('-', '_')}", fn, args)
    hands, left_out = _hands(cell, fn, args, templates, common)
    if not hands:
        raise AutoshardError("no hand-written layout applies: " + "; ".join(f"{k}: {v}" for k, v in left_out.items()))
    chosen, floor_s = _chosen(fn, args, common)
    compiled = _compiled(hands, known)
    best_s = min((x["compiled"]["step_s"] for x in compiled if x["fits"]), default=inf)
    for mesh in chosen:
        plans.append(_planned(fn, args, mesh, common))
        ours.append(_told("autoshard", plans[-1]))
        if ours[-1]["fits"] and ours[-1]["compiled"]["step_s"] <= best_s:
            break
    of_hands = {(name, made.record.mesh): made for name, made in hands}
    return {
        "key": cell.key,
        "model": cell.model,
        "size": cell.size,
        "hardware": cell.hardware,
        "fields": cell.fields,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"jax": jax.__version__, "autoshard": _commit()},
        "limit_bytes": read_hardware(cell.hardware).usable_memory_bytes,
        "floor_s": floor_s,
        "ours": ours,
        "hands": compiled,
        "predicted": [
            {"layout": name, "mesh": made.record.mesh.shape, "step_s": made.cost, "fits": made.fits}
            for name, made in hands
        ],
        "scheduled": {
            "ours": _scheduled([*zip(ours, plans, strict=True)]),
            "hand": _scheduled([(x, of_hands[x["layout"], MeshAxes.of(x["mesh"])]) for x in compiled], known),
        },
        "completed": _completed(fn, args, templates, hands, common),
        "left_out": left_out,
        "wall_s": time.perf_counter() - begin,
        "cpu_s": _cpu_s() - begin_cpu,
    }


def _chosen(fn: Any, args: Sequence[Any], common: dict[str, Any]) -> tuple[list[dict[str, int]], float]:
    """Our best meshes, as far as they are close; and a bound of every layout's compute, in seconds."""
    found: list[tuple[float, dict[str, int]]] = []
    floors: list[float] = []
    last: InfeasibleError | None = None
    for mesh in meshes.candidates(read_hardware(common["hardware"]).devices):
        try:
            made = autoshard.plan(fn, *args, mesh=mesh, constraints="all", time_limit_s=TIME_LIMIT_S, **common)
        except InfeasibleError as error:
            last = error
            continue
        floors.append(sum(int(node.cost_ps.min()) for node in made.planned.assignment.decisions.nodes) * UNIT_S)
        found.append((made.cost, mesh))
    if last is not None and not found:
        raise last
    best_s = min(cost for cost, _ in found)
    found.sort(key=lambda item: meshes.order(item[0], len(item[1]), best_s))
    chosen = found[:1]
    for cost, mesh in found[1:]:
        if cost <= CLOSE * best_s and all(abs(cost - other) > ALIKE * other for other, _ in chosen):
            chosen.append((cost, mesh))
    return [mesh for _, mesh in chosen[:MESHES]], min(floors)


def _planned(fn: Any, args: Sequence[Any], mesh: dict[str, int], common: dict[str, Any]) -> SolvedPlan:
    return autoshard.plan(fn, *args, mesh=mesh, time_limit_s=TIME_LIMIT_S, **common)


def _hands(
    cell: Cell, fn: Any, args: Sequence[Any], templates: Mapping[str, Template], common: dict[str, Any]
) -> tuple[list[tuple[str, Evaluation]], dict[str, str]]:
    """Every applicable layout on its own best mesh, those that fit first, the fastest first; why others are none."""
    devices = read_hardware(cell.hardware).devices
    hands: list[tuple[str, Evaluation]] = []
    left_out: dict[str, str] = {}
    for name, template in templates.items():
        try:
            shapes = list(compare.mesh_shapes(template.axes, devices))
            hands.append((name, compare.evaluations(fn, args, template, shapes, **common)[0]))
        except (AutoshardError, ValueError) as error:
            left_out[name] = str(error).partition("\n")[0]
    return sorted(hands, key=lambda item: (not item[1].fits, item[1].cost)), left_out


def _completed(
    fn: Any,
    args: Sequence[Any],
    templates: Mapping[str, Template],
    hands: Sequence[tuple[str, Evaluation]],
    common: dict[str, Any],
) -> dict[str, Any]:
    """The layout that is predicted fastest: as the partitioner completes it, at best, and the solver's gap."""
    name, by_shardy = hands[0]
    best = compare.evaluations(
        fn,
        args,
        templates[name],
        [by_shardy.record.mesh.shape],
        completion="best",
        time_limit_s=TIME_LIMIT_S,
        **common,
    )[0]
    return {
        "layout": name,
        "shardy_s": by_shardy.cost,
        "best_s": best.cost,
        "fits": best.fits,
        "gap": best.record.certificate.gap,
    }


def _compiled(hands: Sequence[tuple[str, Evaluation]], known: Known) -> list[dict[str, Any]]:
    """The layouts that may be the best of those predicted to fit, the fastest predicted first."""
    fitting = [(name, made) for name, made in hands if made.fits]
    told: list[dict[str, Any]] = []
    seen: set[str] = set()
    for name, made in _likely(fitting):
        alike = f"{made.cost:.4g} {made.record.memory.peak_bytes:.4g}"
        if alike not in seen:  # ZeRO-2 is ZeRO-1 where XLA reduces gradients into parts anyway
            told.append(_told(name, made, known=known))
            seen.add(alike)
        if sum(bool(x["fits"]) for x in told) == MOST:
            break
    return sorted(told, key=lambda x: x["predicted"]["step_s"])


def _likely(fitting: Sequence[tuple[str, Evaluation]]) -> Iterator[tuple[str, Evaluation]]:
    """By turns the next in the order of predicted steps, as far as they are near, and of predicted compute."""
    near = [item for item in fitting if item[1].cost <= LIKELY * fitting[0][1].cost]
    quick = sorted(fitting, key=lambda item: item[1].record.cost.compute_s)
    turns = [item for pair in zip_longest(near, quick) for item in pair if item is not None]
    yield from dict.fromkeys(turns)


def _scheduled(
    layouts: Sequence[tuple[dict[str, Any], SolvedPlan | Evaluation]], known: Known | None = None
) -> list[dict[str, Any]]:
    """The fastest that fits, compiled with the flags that `refine` tries and this compiler has."""
    fitting = [(told, made) for told, made in layouts if told["fits"]]
    if not fitting or not _on_gpus(fitting[0][1]):
        return []
    told, made = min(fitting, key=lambda item: item[0]["compiled"]["step_s"])
    found: list[dict[str, Any]] = []
    for flags in named("gpu").scheduling_flags:
        with suppress(CompilerFlagError):
            found.append(_told(told["layout"], made, flags, known or {}))
    return found


def _on_gpus(made: SolvedPlan | Evaluation) -> bool:
    """Whether a layout is for GPUs, the only ones among the places that have such flags."""
    return made.record.hardware.startswith("h100")


def compiled_before(line: Mapping[str, Any]) -> Known:
    """This compiler's stored results for the hand-written layouts of a cell."""
    told = [] if "error" in line else [*line["hands"], *line["scheduled"]["hand"]]
    now = {compile.version("gpu"), compile.version("tpu")}
    return {_key(x["layout"], x["mesh"], x["flags"]): x["compiled"] for x in told if x["compiler"] in now}


def _key(name: str, mesh: Mapping[str, int], flags: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(mesh), dict(flags)])


def _told(
    name: str, made: SolvedPlan | Evaluation, flags: Mapping[str, Any] | None = None, known: Known | None = None
) -> dict[str, Any]:
    """A layout as predicted and as compiled."""
    record, flags = made.record, flags or {}
    compiled = (known or {}).get(_key(name, record.mesh.shape, flags)) or _compile(made, flags)
    predicted_bytes: dict[str, int] = {}
    for row in record.collectives:
        predicted_bytes[row.kind] = predicted_bytes.get(row.kind, 0) + row.nbytes * row.trips
    return {
        "layout": name,
        "mesh": record.mesh.shape,
        "flags": dict(flags),
        "gap": record.certificate.gap,
        "predicted": {
            "step_s": record.cost.step_s,
            "compute_s": record.cost.compute_s,
            "exposed_s": record.cost.exposed_s,
            "hidden_s": record.cost.hidden_s,
            "peak_bytes": record.memory.peak_bytes,
            "bytes": predicted_bytes,
        },
        "compiled": compiled,
        "fits": compiled["peak_bytes"] <= record.memory.limit_bytes,
        "compiler": compile.version("gpu" if _on_gpus(made) else "tpu"),
    }


def _compile(made: SolvedPlan | Evaluation, flags: Mapping[str, Any]) -> dict[str, Any]:
    found = made.verify(compiler_options={**QUICK, **flags} if _on_gpus(made) else None)
    timeline, memory = found.timeline, found.memory.compiled
    assert timeline is not None  # a compiler's program has a schedule
    assert memory is not None
    return {
        "step_s": timeline.step_s,
        "compute_s": timeline.compute_s,
        "exposed_s": timeline.exposed_s,
        "hidden_s": timeline.hidden_s,
        "peak_bytes": memory.peak,
        "bytes": {row.kind: row.emitted_bytes for row in found.by_kind()},
    }


def _cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _commit() -> str:
    """The short commit of this checkout; empty outside of one."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def run(left: list[Cell], results: Path, seconds: float, *, again: bool = False, afresh: bool = False) -> None:
    """Takes the cells that are not in the results yet, or of this commit, until the time is over."""
    end = time.monotonic() + seconds
    done = {x["key"]: x for x in comparison_report.read(results)}
    if again:
        left = [cell for cell in left if done.get(cell.key, {}).get("versions", {}).get("autoshard") != _commit()]
    else:
        left = [cell for cell in left if cell.key not in done]
    results.parent.mkdir(exist_ok=True)
    for i, cell in enumerate(left):
        if time.monotonic() > end:
            break
        try:
            told = line(cell, compiled_before(done[cell.key]) if cell.key in done and not afresh else {})
        except AutoshardError as error:
            told = {"key": cell.key, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        said = told.get("error") or comparison_report.said(told)
        sys.stderr.write(f"{i + 1}/{len(left)} {cell.key}: {said}\n")
        jax.clear_caches()


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "render"))
    parser.add_argument("--match", default="", help="only cells whose key contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--again", action="store_true", help="also cells that were run at another commit")
    parser.add_argument("--afresh", action="store_true", help="compile hand-written layouts again, too")
    asked = parser.parse_args()
    if asked.verb == "render":
        comparison_report.write(asked.results, ROOT / "docs" / "comparing.md", len(list(cells())))
        return
    chosen = [cell for cell in cells() if asked.match in cell.key]
    run(chosen, asked.results, asked.seconds, again=asked.again, afresh=asked.afresh)


if __name__ == "__main__":
    main()
