"""Prices of other people's models: plans beside the schedules that compilers make of them.

    python -m benchmarks.zoo_steps run [--targets h100:1x8,h100:4x8] [--subjects hf-gpt2,linen-vit]
    python -m benchmarks.zoo_steps render      # docs/models_steps.md, from the rows that there are

The subjects are those of `benchmarks.model_zoo`, at its large size; each is planned and compiled without a
device, in a process of its own. A row is of one subject, target and release of JAX, and replaces the row
before it. *Step* and *peak* are as `benchmarks.unseen_steps` has them.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import autoshard
from benchmarks.unseen_steps import MESHES, REL_GAP, TIME_LIMIT_S, Found, Pair, judged, verdict
from benchmarks.zoo.subjects import SUBJECTS, Subject

TARGETS = ("h100:1x8", "h100:4x8", "tpu-v5e:4x4", "tpu-v5p:4x4x2")
CHILD_LIMIT_S = 900
ROWS = Path(__file__).with_name("results") / "zoo_steps.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "models_steps.md"
HEAD = """\
# Steps of other people's models

Made by `python -m benchmarks.zoo_steps run` and `… render`.

The programs of [other people's models](models.md) at the same size, two layers of width 2,048 and 32 × 1,024 tokens:
the plan's own cost and peak of memory beside the compiled schedule, priced by the same cost model, and the compiler's
peak (`×0.98`: predicted ÷ compiled). A case *agrees* if every byte that it sends is as planned and the peak no more
than a tenth above the plan. Failures stay in the list; what the verdict counts is all of it.

Known, and not priced: convolutions with few channels, and recurrent steps of which XLA:GPU makes other kernels than
one per product, or hides a sum behind more than its own trip's last product (equinox-gru on 8 H100); a function of two
reductions' operands that is computed in both of them (int8's activations). And a small collective that is alone of its
kind is priced at its share of a full bucket: where no plan that loses little moves less (`planner/latencies.py`), the
step of a small program, or of a recurrent one, waits longer (haiku-mlp and linen-lstm on 8 H100, ensemble on 32).
"""


def planned(subject: Subject, target: str) -> autoshard.SolvedPlan:
    """The plan of a subject's large program."""
    from benchmarks.model_zoo import build
    from benchmarks.zoo.program import LARGE

    program = build(subject, LARGE)
    return autoshard.plan(
        program.step,
        *jax.eval_shape(program.arguments),
        mesh=MESHES[target],
        hardware=target,
        donate_argnums=program.donate,
        for_grad=False,
        rel_gap=REL_GAP,
        time_limit_s=TIME_LIMIT_S,
    )


def child(name: str, targets: Sequence[str]) -> None:
    """The rows of one subject from this process, a line of JSON each."""
    subject = next(subject for subject in SUBJECTS if subject.name == name)
    for target in targets:
        begin = time.perf_counter()
        row: dict[str, Any] = {"subject": name, "target": target, "jax": jax.__version__}
        try:
            row |= asdict(judged(name, planned(subject, target)))
        except Exception as error:  # noqa: BLE001 - a row says what its program ended in
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        row |= {"seconds": round(time.perf_counter() - begin, 1), "date": datetime.now(UTC).date().isoformat()}
        print(f"ROW {json.dumps(row)}", flush=True)
        jax.clear_caches()


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a row is of."""
    return row["subject"], row["target"], row["jax"]


def rows_of(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of a file, by what they are of."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key(row): row for row in map(json.loads, lines)}


def run(subjects: Iterable[str], targets: Sequence[str], path: Path) -> None:
    """Rows of subjects, written as each subject is done."""
    for name in subjects:
        command = [sys.executable, "-m", "benchmarks.zoo_steps", "child", "--subjects", name]
        try:
            done = subprocess.run(
                [*command, "--targets", ",".join(targets)],
                capture_output=True,
                text=True,
                timeout=CHILD_LIMIT_S,
                check=False,
            )
            said = done.stdout
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        rows = rows_of(path)
        for line in said.splitlines():
            if line.startswith("ROW "):
                row = json.loads(line.removeprefix("ROW "))
                rows[key(row)] = row
                print(f"{row['target']:14s} {cells(row)} {row['seconds']:.0f} s", flush=True)
        path.write_text("".join(f"{json.dumps(rows[key])}\n" for key in sorted(rows)))


def cells(row: Mapping[str, Any]) -> str:
    """One line of the page."""
    if "error" in row:
        return f"| {row['subject']} | {row['error']} | | | |"
    one = of_row(row)
    return (
        f"| {one.model} | {one.step.text(1e-3)} | {one.compute.text(1e-3)} | {one.peak.text(1e9)} | "
        f"{'yes' if one.agrees else 'no'} |"
    )


def of_row(row: Mapping[str, Any]) -> Found:
    """What was found, from its row."""
    pairs = {name: Pair(**row[name]) for name in ("step", "compute", "peak")}
    return Found(model=row["model"], agrees=row["agrees"], **pairs)


def page(rows: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> str:
    """The page, a section per target and release of JAX."""
    parts = [HEAD]
    order = {subject.name: index for index, subject in enumerate(SUBJECTS)}
    for target in TARGETS:
        for version in sorted({jax_ for _, place, jax_ in rows if place == target}):
            mine = sorted(
                (row for row in rows.values() if (row["target"], row["jax"]) == (target, version)),
                key=lambda row: order[row["subject"]],
            )
            axes = " × ".join(f"{name}={size}" for name, size in MESHES[target].items())
            dates = sorted({row["date"] for row in mine})
            parts += [
                f"## {target} ({axes}), JAX {version}, {', '.join(dates)}",
                "\n".join(
                    [
                        "| program | step, ms: predicted → compiled | compute, ms | peak, GB | agrees |",
                        "| --- | --- | --- | --- | --- |",
                        *map(cells, mine),
                    ]
                ),
            ]
            if compiled := [of_row(row) for row in mine if "error" not in row]:
                parts.append(verdict(compiled))
            if left := [name for name in order if name not in {row["subject"] for row in mine}]:
                parts.append(f"Not run: {', '.join(left)}.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "render", "child"))
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(MESHES)}")
    parser.add_argument("--subjects", default=",".join(subject.name for subject in SUBJECTS), help="by name")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    asked = parser.parse_args()
    subjects, targets = asked.subjects.split(","), asked.targets.split(",")
    names = [subject.name for subject in SUBJECTS]
    for name, known in (*((t, MESHES) for t in targets), *((s, names) for s in subjects)):
        if name not in known:
            parser.error(f"{name} is not one of {', '.join(known)}")
    if asked.what == "child":
        child(subjects[0], targets)
    elif asked.what == "run":
        run(subjects, targets, asked.rows)
    else:
        PAGE.write_text(page(rows_of(asked.rows)))


if __name__ == "__main__":
    main()
