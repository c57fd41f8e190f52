"""Every plan against the real compilers: the board of predicted and emitted bytes, memory and time.

    python -m benchmarks.verification run [--set scatter|board|all] [--match h100:1x8] [--seconds 3600]
    python -m benchmarks.verification predict [--match h100:1x8]
    python -m benchmarks.verification render

`run` compiles one case at a time, without a device, and appends one JSON line per compile to
`benchmarks/results/verification.jsonl`; a case that is there already is skipped, so that it can be
stopped and started again. `predict` predicts the hand-written layouts of the lines anew: what was
emitted of them does not depend on predictions (a plan does: delete its line, and it is compiled
again). `render` writes `docs/verification.md` and `docs/verification.svg` from it.

The board: gpt2-small (unrolled), llama3-8b (scan, remat) and mixtral-8x7b (2 layers), each as planned
and in four hand-written layouts, for 8 and 32 H100, v5e:4x4 and v5p:4x4x2. The scatter adds smaller
models, more meshes and more layouts on the GPU compiler. On TPU, bytes are compared with windowed
einsum off; the board's schedules are compiled once more with it on (`windowed`).
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
import models
from autoshard.backends import compile, devices
from autoshard.errors import AutoshardError
from autoshard.ir.mesh import MeshAxes
from autoshard.problem import bill
from autoshard.report.tables import short_place
from autoshard.verification import collective_match
from autoshard.verification.result import Verification
from autoshard.verification.verify import MEMORY_TOLERANCE, TOLERANCE, predicted_parts
from benchmarks import verification_report
from models import layouts

RESULTS = Path(__file__).parent / "results" / "verification.jsonl"

PLANNED = "plan"  # beside the hand-written layouts, the planner's own
HAND = ("dp", "fsdp", "dp_megatron", "fsdp_megatron")
MORE_HAND = ("zero1", "megatron_sequence")
ONE_AXIS = frozenset({"dp", "fsdp", "zero1"})  # recipes that take all mesh axes as one
NO_LIMIT_BYTES = 2**40  # hand layouts need not fit; the plan is asked for in the chip's own memory

# Solver and sizes, so that a case takes seconds on a laptop.
REL_GAP = 1e-2
TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One compile: a model as `models.build` makes it, a mesh on hardware, and a layout."""

    group: str
    model: str
    fields: tuple[tuple[str, Any], ...]
    hardware: str
    mesh: tuple[tuple[str, int], ...]
    layout: str
    windowed: bool = False

    @property
    def key(self) -> str:
        parts = (
            self.model,
            ",".join(f"{k}={v}" for k, v in self.fields),
            self.hardware,
            "×".join(f"{n}={s}" for n, s in self.mesh),
            self.layout,
        )
        return " ".join((*parts, "windowed") if self.windowed else parts)


def board() -> Iterator[Case]:
    """The cases of the tables, the cheap compilers first."""
    subjects: tuple[tuple[str, Any], ...] = (
        ("mixtral-8x7b", lambda n: {"layers": 2, "batch": n, "sequence": 1024}),
        ("llama3-8b", lambda n: {"scan": True, "remat": "full", "batch": n, "sequence": 2048}),
        ("gpt2-small", lambda n: {"vocab": 50_304, "batch": 4 * n, "sequence": 1024}),
    )
    places = (
        ("h100:1x8", {"data": 2, "model": 4}, {"data": 2, "model": 4}),
        ("h100:4x8", {"data": 4, "model": 8}, {"data": 8, "model": 4}),
        ("tpu-v5e:4x4", {"data": 4, "model": 4}, {"data": 4, "model": 4}),
        ("tpu-v5p:4x4x2", {"data": 4, "model": 8}, {"data": 8, "model": 4}),
    )
    for hardware, mesh, mesh_of_12_heads in places:
        for model, sizes in subjects:
            axes = mesh_of_12_heads if model == "gpt2-small" else mesh
            fields = tuple(sizes(MeshAxes.of(axes).size).items())
            for layout in (PLANNED, *HAND):
                for windowed in (False, True) if hardware.startswith("tpu") else (False,):
                    yield Case(
                        group="board",
                        model=model,
                        fields=fields,
                        hardware=hardware,
                        mesh=tuple(axes.items()),
                        layout=layout,
                        windowed=windowed,
                    )


def scatter() -> Iterator[Case]:
    """Small variants on the GPU compiler, and a few on TPU."""
    subjects: tuple[tuple[str, Any], ...] = (
        ("mlp-8k", lambda n: {"layers": 4, "batch": 128 * n}),
        ("linear-8k", lambda n: {"layers": 4, "batch": 128 * n}),
        ("llama3-8b", lambda n: {"layers": 2, "scan": True, "remat": "full", "batch": n, "sequence": 512}),
        ("mixtral-8x7b", lambda n: {"layers": 1, "batch": n, "sequence": 256}),
        ("gpt2-small", lambda n: {"layers": 2, "vocab": 50_304, "batch": n, "sequence": 512}),
        ("llama3-8b", lambda n: {"layers": 1, "batch": 2 * n, "sequence": 1024}),
        ("mlp-8k", lambda n: {"layers": 4, "batch": 4096 * n}),
    )
    gpu = (
        ("h100:1x8", {"data": 2, "model": 4}),
        ("h100:2x8", {"data": 4, "model": 4}),
        ("h100:4x8", {"data": 8, "model": 4}),
        ("h100:1x8", {"data": 4, "model": 2}),
    )
    for model, sizes in subjects:
        for hardware, mesh in gpu:
            for layout in (PLANNED, *HAND, *MORE_HAND):
                yield _case("scatter", model, sizes, hardware, mesh, layout)
    for model, sizes in (subjects[0], subjects[2], subjects[3]):
        for layout in (PLANNED, *HAND):
            yield _case("scatter", model, sizes, "tpu-v5e:2x4", {"data": 2, "model": 4}, layout)


def _case(group: str, model: str, sizes: Any, hardware: str, mesh: Mapping[str, int], layout: str) -> Case:
    fields = tuple(sizes(MeshAxes.of(mesh).size).items())
    return Case(group=group, model=model, fields=fields, hardware=hardware, mesh=tuple(mesh.items()), layout=layout)


def subject(case: Case) -> Any:
    """The plan or the evaluation of a case: both have `record` and `verify`."""
    step, (state, batch) = models.build(case.model, **dict(case.fields))
    mesh = dict(case.mesh)
    if case.layout == PLANNED:
        return autoshard.plan(
            step,
            state,
            batch,
            mesh=mesh,
            hardware=case.hardware,
            donate_argnums=0,
            rel_gap=REL_GAP,
            time_limit_s=TIME_LIMIT_S,
        )
    axes = {"data": tuple(mesh)} if case.layout in ONE_AXIS else {}
    hand = layouts.find(case.model, case.layout, **axes)
    specs = _specs(hand, state, batch)
    on: Any = devices.abstract(MeshAxes.of(mesh))
    return autoshard.evaluate(
        layouts.constrained(step, hand.activation, on),
        state,
        batch,
        mesh=mesh,
        hardware=case.hardware,
        in_specs=specs,
        out_specs=(specs[0], P()),
        memory=NO_LIMIT_BYTES,
        donate_argnums=0,
    )


def _specs(hand: layouts.HandLayout, state: Any, batch: Any) -> tuple[Any, Any]:
    """The layout's specs; of layers that are stacked, each weight's leading dimension stays whole."""
    layers = state.params.get("layers") if isinstance(state.params, dict) else None
    if not isinstance(layers, dict):
        return hand.specs(state, batch)
    ranks = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.ndim
        for path, leaf in jax.tree.leaves_with_path(state.params)
    }

    def stacked(spec_of: Any) -> Any:
        def spec(path: str) -> P:
            own = spec_of(path)
            return P(None, *own) if path.startswith("layers.") and len(own) < ranks[path] else own

        return spec

    return replace(hand, parameter=stacked(hand.parameter), moment=stacked(hand.moment)).specs(state, batch)


def line(case: Case) -> dict[str, Any]:
    """The stored line of a case: everything that the tables and the scatter need."""
    begin = time.perf_counter()
    told: dict[str, Any] = {
        "key": case.key,
        "group": case.group,
        "model": case.model,
        "fields": dict(case.fields),
        "hardware": case.hardware,
        "mesh": dict(case.mesh),
        "layout": case.layout,
        "windowed": case.windowed,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"jax": jax.__version__},
        "memory_bytes": cost_models.hardware(case.hardware).usable_memory_bytes,
    }
    try:
        made = subject(case)
        planned_s = time.perf_counter() - begin
        told["predicted_peak_bytes"] = made.record.memory.peak_bytes
        plain = case.hardware.startswith("tpu") and not case.windowed
        found = made.verify(compiler_options=compile.TPU_PLAIN_OPTIONS if plain else {})
    except AutoshardError as error:
        return {**told, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**told, **_found(found), "planned_s": planned_s, "memory_by_kind": dict(made.record.memory.kinds)}


def _found(found: Verification) -> dict[str, Any]:
    timeline, compute, compiled = found.timeline, found.compute, found.memory.compiled
    assert timeline is not None  # a compiler's program has a schedule
    assert compute is not None
    assert compiled is not None
    return {
        "compiler": found.version,
        "compile_s": found.wall_s,
        "ok": found.ok,
        "rows": [_told(row) for row in found.rows],
        "unmatched": [
            {**asdict(x), "axes": list(x.axes), "status": str(x.status), "where": short_place(x.where)}
            for x in found.lines
            if x.status in ("EXTRA", "MISSING")
        ][:12],
        "predicted_memory": asdict(found.memory.predicted),
        "compiled_memory": asdict(compiled),
        "cost": asdict(found.cost),
        "compute": asdict(compute),
        "timeline": {
            "step_s": timeline.step_s,
            "compute_s": timeline.compute_s,
            "communication_s": timeline.communication_s,
            "exposed_s": timeline.exposed_s,
        },
    }


def predicted(case: Case, told: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a hand-written layout, with today's prediction."""
    made, mesh = subject(case), MeshAxes.of(dict(case.mesh))
    record = made.record
    ours = collective_match.compare(record.collectives, (), mesh, TOLERANCE)
    nothing: dict[str, Any] = {"predicted_bytes": 0, "predicted_wire_bytes": 0, "predicted_count": 0}
    theirs: list[collective_match.CollectiveRow] = []
    for row in told["rows"]:
        emitted: dict[str, Any] = {**row, **nothing, "axes": tuple(row["axes"])}
        theirs.append(collective_match.CollectiveRow(**emitted))
    sides: dict[tuple[str, tuple[str, ...]], list[collective_match.CollectiveRow]] = {}
    for row in (*ours, *theirs):
        sides.setdefault((row.kind, row.axes), []).append(row)
    total = max(sum(row.predicted_bytes for row in ours), sum(row.emitted_bytes for row in theirs))
    rows = [
        replace(collective_match.together(kind, both, total, TOLERANCE), axes=axes)
        for (kind, axes), both in sorted(sides.items())
    ]
    compiled = told["compiled_memory"]["peak"]
    fits = compiled <= (1 + MEMORY_TOLERANCE) * record.memory.peak_bytes
    return {
        **told,
        "ok": collective_match.agrees(rows, TOLERANCE) and fits,
        "rows": [_told(row) for row in rows if row.predicted_bytes or row.emitted_bytes],
        "unmatched": [],
        "predicted_peak_bytes": record.memory.peak_bytes,
        "predicted_memory": asdict(predicted_parts(record)),
        "memory_by_kind": dict(record.memory.kinds),
        "cost": asdict(record.cost),
        "compute": {
            **told["compute"],
            "predicted_s": record.cost.compute_s,
            "predicted_flops": bill.flops(made.assignment),
        },
    }


def predict(cases: list[Case]) -> None:
    """Predicts the hand-written layouts of the lines again, in place."""
    known = {case.key: case for case in cases if case.layout != PLANNED}
    lines = verification_report.read(RESULTS)
    for i, told in enumerate(lines):
        if told["key"] in known and "error" not in told:
            lines[i] = predicted(known[told["key"]], told)
            sys.stderr.write(f"{told['key']}: {'ok' if lines[i]['ok'] else 'differs'}\n")
            jax.clear_caches()
            RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _told(row: collective_match.CollectiveRow) -> dict[str, Any]:
    return {**asdict(row), "axes": list(row.axes), "status": str(row.status)}


def run(cases: list[Case], seconds: float) -> None:
    """Compiles the cases that have no result yet, until the time is over."""
    end = time.monotonic() + seconds
    RESULTS.parent.mkdir(exist_ok=True)
    done = {x["key"] for x in verification_report.read(RESULTS)}
    left = [case for case in cases if case.key not in done]
    for i, case in enumerate(left):
        if time.monotonic() > end:
            break
        told = line(case)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        verdict = told.get("error") or ("ok" if told["ok"] else "differs")
        sys.stderr.write(f"{i + 1}/{len(left)} {case.key}: {verdict}\n")
        jax.clear_caches()


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "predict", "render"))
    parser.add_argument("--set", choices=("scatter", "board", "all"), default="all")
    parser.add_argument("--match", default="", help="only cases in whose key this regular expression is found")
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    if asked.verb == "render":
        verification_report.write(RESULTS, Path(__file__).parents[1] / "docs")
        return
    cases = [*(scatter() if asked.set != "board" else ()), *(board() if asked.set != "scatter" else ())]
    cases = [case for case in cases if re.search(asked.match, case.key)]
    if asked.verb == "predict":
        predict(cases)
        return
    run(cases, asked.seconds)


if __name__ == "__main__":
    main()
