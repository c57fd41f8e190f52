"""Other people's models, unmodified: planned, run sharded, and compiled by XLA:GPU.

    python -m benchmarks.model_zoo                 # every subject, each in its own process
    python -m benchmarks.model_zoo hf-gpt2 gnn     # these alone; the others' rows are kept
    python -m benchmarks.model_zoo --part plan     # only this part: plan (and compile), or numerics
    python -m benchmarks.model_zoo --write         # docs/models.md from the rows that there are

The subjects are `benchmarks.zoo.subjects`, a list that was fixed before the first run; each
is tried three ways on a mesh {data: 2, model: 4} of one node with 8 H100:

- planned at a size where layouts matter (`LARGE`); seconds are of the whole planning, on one core;
- run at a small size on 8 CPU devices, under the optimum of a memory limit that
  forbids full copies and under two random emittable plans, and compared leaf by leaf with
  the unsharded step;
- the large plan compiled by XLA:GPU without a device, and its collectives compared.

Needs: flax, equinox, dm-haiku, "transformers<5", optax, jax-cuda12-plugin, jax-cuda12-pjrt.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.zoo.subjects import SUBJECTS, Subject

MESH = {"data": 2, "model": 4}
HARDWARE = "h100:1x8"
REL_GAP = 1e-2
TIME_LIMIT_S = 120.0
CHILD_LIMIT_S = 1800
# A leaf may differ from the unsharded step's by so much of its largest entry, or by twenty
# times what the unsharded step itself differs by after a change in the last bit of its inputs;
# if it computes in fewer bits than float32, nine in ten of its entries (Adam's first step is
# the sign of a gradient, which rounding turns near zero) by so much that they are no more than
# three times as far from float32 as the unsharded step's, the bound of FlashAttention's own tests.
TOLERANCE, NOISE_FACTOR, ROUNDING_FACTOR, ENTRIES = 1e-4, 20.0, 3.0 + 1.0, 0.9
ROWS = Path(__file__).with_name("model_zoo.json")
BOARD = Path(__file__).parents[1] / "docs" / "models.md"
VERSIONS = ("jax", "flax", "equinox", "dm-haiku", "transformers", "optax", "jax-cuda12-pjrt")


def build(subject: Subject, size: Any) -> Any:
    """The subject's program at a size."""
    module, _, function = subject.builder.partition(":")
    return getattr(importlib.import_module(f"benchmarks.zoo.{module}"), function)(size)


def planned(subject: Subject) -> dict[str, Any]:
    """Plans the large program, abstractly, and compiles the plan for 8 H100."""
    import jax

    import autoshard
    from benchmarks.zoo.program import LARGE

    program = build(subject, LARGE)
    arguments = jax.eval_shape(program.arguments)
    begin, cpu = time.perf_counter(), time.process_time()
    plan = autoshard.plan(
        program.step,
        *arguments,
        mesh=MESH,
        hardware=HARDWARE,
        donate_argnums=program.donate,
        for_grad=False,
        rel_gap=REL_GAP,
        time_limit_s=TIME_LIMIT_S,
    )
    row: dict[str, Any] = {
        "plan_cpu_s": time.process_time() - cpu,
        "plan_wall_s": time.perf_counter() - begin,
        "equations": len(plan.planned.formulation.decisions.graph.eqns),
        "gap": plan.record.certificate.gap,
        "stages": plan.planned.seconds,
    }
    row["gpu"] = attempt(lambda: compared(plan))
    if "error" in row["gpu"]:
        alone = attempt(lambda: compiled_alone(program.step, arguments))
        row["gpu"]["unsharded"] = alone.get("error")
    return row


def compiled_alone(step: Any, arguments: Any) -> dict[str, Any]:
    """Compiles the unsharded step for one GPU: a compiler that fails here fails without a plan."""
    import jax

    from autoshard.backends import compile
    from autoshard.ir.mesh import MeshAxes

    found = compile.compile(jax.jit(step).trace(*arguments), topology="h100:1x1", mesh=MeshAxes(("one",), (1,)))
    return {"compile_s": found.wall_s}


def compared(plan: Any) -> dict[str, Any]:
    """Bytes per kind and axes, promised and emitted, and the peaks of memory."""
    from autoshard.verification.collective_match import agrees

    found = plan.verify("gpu")
    rows = [
        {
            "kind": r.kind,
            "axes": r.axes,
            "predicted": r.predicted_bytes,
            "emitted": r.emitted_bytes,
            "status": str(r.status),
        }
        for r in found.rows
    ]
    kinds = [{"kind": r.kind, "status": str(r.status), "ratio": r.ratio} for r in found.by_kind()]
    return {
        "ok": agrees(found.rows, found.tolerance),
        "memory_ok": found.memory.ok,
        "peak_ratio": found.memory.compiled.peak / found.memory.predicted.peak,
        "rows": rows,
        "kinds": kinds,
        "compile_s": found.wall_s,
    }


def numerics(subject: Subject) -> dict[str, Any]:
    """Runs the small program unsharded and sharded; per way of sharding the worst leaf's error over its tolerance."""
    import jax
    import numpy as np

    import autoshard
    from autoshard.backends import devices
    from autoshard.planner.program import bind
    from autoshard.planner.request import request_of
    from autoshard.planner.search_space import build_search_space
    from benchmarks.zoo.program import TINY
    from tests.assignments import random_choice, run

    program = build(subject, TINY)
    arguments = jax.jit(program.arguments)()
    plain = jax.jit(program.step)
    want = leaves_of(plain(*arguments))
    entries = 1.0 if program.exact is None else ENTRIES

    def apart(other: Any) -> list[float]:
        pairs = zip(leaves_of(other), want, strict=True)
        return [float(np.quantile(np.abs(a - b), entries)) if a.size else 0.0 for a, b in pairs]

    noise = [NOISE_FACTOR * n for n in apart(plain(*nudged(arguments)))]
    if program.exact is not None:
        noise = [ROUNDING_FACTOR * n for n in apart(jax.jit(program.exact)(*arguments))]
    row: dict[str, Any] = {}

    def worst(got: Any) -> float:
        return max(
            (
                off / max(TOLERANCE * np.abs(w).max(initial=1e-30), n)
                for off, w, n in zip(apart(got), want, noise, strict=True)
                if np.isfinite(w).all()
            ),
            default=0.0,
        )

    call = bind(program.step, arguments, {}, donate_argnums=program.donate)
    space = build_search_space(request_of(call, devices.place(MESH, HARDWARE)))
    flat = jax.tree.leaves(arguments)
    for seed in range(2):
        choice = random_choice(space.decisions, space.resharder, np.random.default_rng(seed))
        row[f"random {seed}"] = worst(run(space, choice, flat))
    total = sum(leaf.nbytes for leaf in flat)
    options: dict[str, Any] = {"mesh": MESH, "hardware": HARDWARE, "for_grad": False, "rel_gap": 0.05}
    try:
        plan = autoshard.plan(program.step, *arguments, memory=total // 2, **options)
    except autoshard.InfeasibleError:
        plan = autoshard.plan(program.step, *arguments, **options)
    placed = [plan.put(value, name) for value, name in zip(arguments, argument_names(plan), strict=True)]
    row["optimum"] = worst(plan.jit()(*placed))
    return row


def argument_names(plan: Any) -> list[str]:
    """The names of a plan's arguments, in order."""
    from autoshard.ir.paths import dotted

    return list(dict.fromkeys(dotted(leaf.path).split(".")[0] for leaf in plan.record.inputs))


def leaves_of(tree: Any) -> list[Any]:
    """Every leaf as a float64 array; keys as their words."""
    import jax
    import numpy as np

    def array(leaf: Any) -> Any:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).astype(np.float64)

    return [array(leaf) for leaf in jax.tree.leaves(tree)]


def nudged(arguments: Any) -> Any:
    """Every float of the arguments changed in its last bit."""
    import jax
    import jax.numpy as jnp

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 4:
            return leaf
        return jnp.where(leaf == 0, leaf, jnp.nextafter(leaf, jnp.inf))

    return jax.tree.map(one, arguments)


def attempt(what: Any) -> dict[str, Any]:
    """Its row, or the error that it ended in."""
    try:
        return what()
    except Exception as error:  # noqa: BLE001
        last = [f for f in traceback.extract_tb(error.__traceback__) if "/autoshard/" in f.filename][-1:]
        at = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
        if os.environ.get("ZOO_TRACE"):
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{at}"[:300]}


PARTS = {"plan": planned, "numerics": numerics}


def child(name: str, parts: list[str]) -> None:
    """Parts of one subject in this process, as JSON on the last line."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    subject = next(s for s in SUBJECTS if s.name == name)
    print(json.dumps({part: attempt(partial(PARTS[part], subject)) for part in parts}))


def measured(name: str, parts: list[str]) -> dict[str, Any]:
    """Parts of one subject in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.model_zoo", "--child", name, "--part", *parts]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {part: {"error": f"longer than {CHILD_LIMIT_S} s"} for part in parts}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        text = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
        return {part: {"error": text[:300]} for part in parts}


def cells(subject: Subject, row: dict[str, Any]) -> list[str]:
    """One line of the board."""
    plan, numbers = row.get("plan"), row.get("numerics")
    if plan is None:
        first = ["not run", "", "", "not run"]
    elif "error" in plan:
        first = [f"no: {plan['error']}", "", "", "not reached"]
    else:
        gpu = plan["gpu"]
        if gpu.get("unsharded"):
            follows = f"no: XLA:GPU compiles no step, the unsharded one neither: {gpu['unsharded']}"
        elif "error" in gpu:
            follows = f"no: {gpu['error']}"
        elif gpu["ok"]:
            follows = "yes" if gpu.get("memory_ok", True) else f"yes; memory ×{gpu['peak_ratio']:.2f}"
        else:
            follows = "no: " + ", ".join(
                f"{k['kind']} {k['status']}" + (f" ×{k['ratio']:.2f}" if k["status"] == "DIFFERS" else "")
                for k in gpu["kinds"]
                if k["status"] not in ("MATCH", "small")
            )
        first = ["yes", str(plan["equations"]), f"{plan['plan_cpu_s']:.1f}", follows]
    if numbers is None:
        equal = "not run"
    elif "error" in numbers:
        equal = f"no: {numbers['error']}"
    else:
        equal = "yes" if max(numbers.values()) <= 1 else "no: " + ", ".join(f"{k} ×{v:.2g}" for k, v in numbers.items())
    return [subject.name, subject.framework, subject.optimizer, subject.what, *first[:3], equal, first[3]]


def board(rows: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Other people's models",
        "",
        f"Made by `python -m benchmarks.model_zoo` on {rows['date']} with "
        + ", ".join(f"{k} {v}" for k, v in rows["versions"].items())
        + ".",
        "",
        "Whole train steps (or decode steps) as their frameworks' own tutorials write them, unmodified. The list was",
        "fixed before the first run, and failures stay in it. Planned: two layers of width 2,048, 32 × 1,024 tokens,",
        "on the mesh {data: 2, model: 4} of 8 H100, to a proven gap of 1 %; seconds are CPU seconds of the whole",
        "planning, on a shared machine. Equal: the step at width 32 on 8 CPU devices, under the optimum of a memory",
        "limit and under two random plans, leaf by leaf like the unsharded step; a step in bfloat16 is judged by",
        "how far it is from the same step in float32. Followed: XLA:GPU's collectives have the bytes that the plan",
        "promises, and none that it does not know; memory: its peak, where that is more than the plan's by a tenth.",
        "Known of these: the zeros that the gradient of max pooling is added onto lie in memory from the start, and",
        "a table that is whole and cut for a matmul is copied first (linen-decode), which no plan counts so far.",
        "An error that names no file of autoshard's is the framework's own under this JAX: T5 calls",
        "`jnp.clip(a_max=…)`, which JAX 0.10 no longer has, whatever its configuration.",
        "",
        "| program | framework | optimizer | what | planned | equations | seconds | equal | followed by XLA:GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    table = [cells(s, rows["rows"].get(s.name, {})) for s in SUBJECTS]
    lines += ["| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in table]
    counts = [sum(line[i].startswith("yes") for line in table) for i in (4, 7, 8)]
    lines += ["", f"Of {len(table)}: {counts[0]} planned, {counts[1]} equal, {counts[2]} followed by XLA:GPU.", ""]
    return "\n".join(lines)


def main() -> None:
    """Runs subjects and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*")
    parser.add_argument("--write", action="store_true", help="write the board from the rows that there are")
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.subjects[0], arguments.part)
        return
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {"rows": {}}
    if not arguments.write:
        for name in arguments.subjects or [s.name for s in SUBJECTS]:
            rows["rows"].setdefault(name, {}).update(measured(name, arguments.part))
            rows["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            rows["versions"] = {v: importlib.metadata.version(v) for v in VERSIONS}
            ROWS.write_text(json.dumps(rows, indent=1))
            subject = next(s for s in SUBJECTS if s.name == name)
            print(" | ".join(cells(subject, rows["rows"][name])), flush=True)
    BOARD.write_text(board(rows))


if __name__ == "__main__":
    main()
