"""Same plans: digests of every output before and after a change of the code.

    python -m benchmarks.same_plans write before.json [--match llama]
    python -m benchmarks.same_plans write after.json
    python -m benchmarks.same_plans compare before.json after.json

`write` plans the subjects one after the other, without a device, and takes the SHA-256 of their outputs:
the plan file, the summary, explanations, the problem as IOPDDL JSON, the JSON of `autoshard.evaluate` of a
hand-written layout, and the command line's output of searches, serving, pipelines and comparisons. Wall-clock
times and the folder of the sources are left out. `compare` names the differences, and ends with status 1 if
there are any. Only public names are
used, so that the same file runs before and after rooms move. Source lines are part of what plans say: where
`models/` changed between two commits, check out the older one's beside the newer code (`git checkout OLD -- models`).

Measured on 2026-11-24: the code before its rooms were rebuilt (d0dc8ac) and after (05cb4af), with the older `models/`.

    subjects                                  subjects  digests  equal
    plans, five hardwares                           26       99     86
    many functions                                   4       32     32
    prefill, decode                                  8       29     28
    losses for their gradient                        4       16     14
    pinned inputs                                    4       16     16
    tight memory                                     4       13     12
    evaluations                                      4        8      8
    searches, serving, pipelines, comparisons        8       24     24
    all                                             62      237    220

Every problem was equal. Of the 17 others nine are of `cpu:8`, where memory is short and the newer code recomputes or
says what was tried of it. Eight are of three plans whose search the clock ended, and there the older code differs from
itself, run twice; since then counted work ends it (docs/solver.md). The other subjects on h100:4x8 were not compared.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax.sharding import PartitionSpec as P

import autoshard
import models

ROOT = str(Path(__file__).parents[1])  # source lines name files of this copy
Said = dict[str, str]  # what is said → its text

PLACES = (
    ("h100:1x8", {"data": 2, "model": 4}),
    ("h100:4x8", {"data": 4, "model": 8}),
    ("tpu-v5e:4x4", {"data": 4, "model": 4}),
    ("tpu-v5p:2x2x2", {"data": 2, "model": 4}),
    ("cpu:8", {"x": 8}),
)
MODELS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mlp-1k", {"layers": 2}),
    ("tiny-llama", {}),
    ("gpt2-small", {"layers": 2, "batch": 16}),
    ("llama3-8b", {"layers": 2, "batch": 16, "sequence": 1024}),
    ("llama3-8b", {"layers": 4, "batch": 16, "sequence": 1024, "scan": True, "remat": "full"}),
    ("mixtral-8x7b", {"layers": 1, "batch": 16, "sequence": 512}),
)
COMMANDS = (
    "search models:mlp_1k --set layers=2 --hardware h100 --chips 8 --json",
    "search models:tiny_llama --hardware tpu-v5e --chips 4,8 --json",
    "serve models:tiny_llama --hardware h100:1x8 --batches 8,32 --json",
    "scale models:llama3_8b --set layers=4 --hardware h100:2x8 --json",
    "compare models:mlp_1k --set layers=2 --mesh data=2,model=4 --hardware h100:1x8 --donate 0 --json",
    "explain models:mlp_1k --set layers=2 --mesh data=2,model=4 --hardware h100:1x8 --donate 0 --flips",
    "hardware h100",
    "hardware tpu-v5e",
)
CLOCKS = re.compile(
    r"^ *planned +in .*$|\"(seconds|planned_s|elapsed_s|solve_s|trace_s|wall_s)\": *[^,}\n]*",
    re.MULTILINE,
)


def subjects() -> Iterator[tuple[str, Callable[[], Said]]]:
    """Every subject by its name, still to be asked."""
    for hardware, mesh in PLACES:
        for name, fields in MODELS:
            key = " ".join([name, *(f"{k}={v}" for k, v in fields.items()), hardware])
            yield f"plan {key}", lambda n=name, f=fields, h=hardware, m=mesh: _plan(n, f, h, m)
        yield f"gradient {hardware}", lambda h=hardware, m=mesh: _gradient(h, m)
        yield f"pinned {hardware}", lambda h=hardware, m=mesh: _pinned(h, m)
        yield f"tight {hardware}", lambda h=hardware, m=mesh: _tight(h, m)
        yield f"evaluate {hardware}", lambda h=hardware, m=mesh: _evaluated(h, m)
        for step in ("prefill", "decode"):
            yield f"{step} {hardware}", lambda s=step, h=hardware, m=mesh: _inference(s, h, m)
        yield f"many {hardware}", lambda h=hardware, m=mesh: _many(h, m)
    for command in COMMANDS:
        yield f"autoshard {command}", lambda c=command: _command(c)


def _of_plan(plan: autoshard.SolvedPlan) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        saved, problem = Path(folder) / "plan.json", Path(folder) / "problem.json.gz"
        plan.save(saved)
        plan.problem.dump(problem)
        return {
            "file": saved.read_text(encoding="utf-8"),
            "problem": gzip.decompress(problem.read_bytes()).decode(),
            "summary": plan.summary(),
            "explanation": plan.explain("**"),
        }


def _plan(name: str, fields: Mapping[str, Any], hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build(name, **fields)
    return _of_plan(autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0))


def _gradient(hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build("llama3-8b-prefill", layers=2, batch=16, sequence=512)
    return _of_plan(autoshard.plan(step, *args, mesh=mesh, hardware=hardware, for_grad=True))


def _pinned(hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build("gpt2-small", layers=1, batch=16)
    pins = {"**.embed*": P(), "batch.**": P(next(iter(mesh)))}
    return _of_plan(autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0, pins=pins))


def _tight(hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build("mlp-1k", layers=3)
    free = autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0)
    limit = int(0.8 * free.record.memory.peak_bytes)
    try:
        return _of_plan(autoshard.plan(step, *args, mesh=mesh, hardware=hardware, donate_argnums=0, memory=limit))
    except autoshard.InfeasibleError as error:
        return {"error": str(error)}


def _evaluated(hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build("gpt2-small", layers=1, batch=64)
    said: Said = {}
    for completion in ("shardy", "best"):
        made = autoshard.evaluate(
            step,
            *args,
            mesh=mesh,
            hardware=hardware,
            donate_argnums=0,
            in_specs=(autoshard.AUTO, P(tuple(mesh))),
            completion=completion,
        )
        said[completion] = str(made.record.dumps())
    return said


def _inference(step_name: str, hardware: str, mesh: Mapping[str, int]) -> Said:
    step, args = models.build(f"llama3-8b-{step_name}", layers=2, batch=16)
    return _of_plan(autoshard.plan(step, *args, mesh=mesh, hardware=hardware, for_grad=False))


def _many(hardware: str, mesh: Mapping[str, int]) -> Said:
    train = models.build("mlp-1k", layers=2)
    smaller = models.build("mlp-1k", layers=2, batch=64)
    plans = autoshard.plan_many(
        {"train": (*train, {"donate_argnums": 0}), "small": (*smaller, {"donate_argnums": 0})},
        mesh=mesh,
        hardware=hardware,
    )
    return {f"{name} {what}": text for name, plan in plans.items() for what, text in _of_plan(plan).items()}


def _command(command: str) -> Said:
    run = [sys.executable, "-c", "from autoshard.cli import main; main()", *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    return {"output": done.stdout, "status": str(done.returncode), "errors": done.stderr if done.returncode else ""}


def write(path: Path, match: str) -> None:
    """Digests of every subject whose name contains a pattern; a line each while they are made."""
    found: dict[str, str] = {}
    for name, ask in subjects():
        if not re.search(match, name):
            continue
        try:
            said = ask()
        except autoshard.InfeasibleError as error:
            said = {"refused": str(error)}
        for what, text in said.items():
            found[f"{name} · {what}"] = hashlib.sha256(CLOCKS.sub("", text.replace(ROOT, "")).encode()).hexdigest()
        print(f"{name}: {', '.join(said)}", flush=True)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{len(found)} digests")


def compare(before: Path, after: Path) -> int:
    """Prints the differences; returns the exit status."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    differs = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    print(*(f"differs: {key}" for key in differs), sep="\n")
    print(f"{len(old)} digests before, {len(new)} after, {len(differs)} differ")
    return 1 if differs else 0


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--match", default="", help="a regular expression that the subjects' names contain")
    options = parser.parse_args()
    if options.verb == "write":
        write(options.paths[0], options.match)
    else:
        sys.exit(compare(*options.paths))


if __name__ == "__main__":
    main()
