"""Train steps on a GPU at hand: what their plans predict, what their schedules are priced at, and what they take.

    python -m benchmarks.measured_steps run FOLDER [--match 'unseen|llama3-8b'] [--plain] [--kernels] [--seconds 400]
    python -m benchmarks.measured_steps steps [FOLDER]
    python -m benchmarks.measured_steps kernels [FOLDER]
    python -m benchmarks.measured_steps far [FOLDER]

A subject is a train step that fits one device: those of `benchmarks.unseen_models`, and models under every policy of
`jax.checkpoint` beside our plan of the program without one. `run` plans each on a mesh of one device, compiles the
plan's program there (with `--plain`, the program under `jax.jit` alone), runs it on random values, and keeps what it
found: one JSON file per subject, and the compiled program. Every subject has a process of its own; they plan beside
each other and run one by one. With `--kernels` it is compiled without command buffers, inside of which the profiler
does not know one kernel from another, and profiled, too.

`steps` and `kernels` print the tables of `docs/measured_steps.md`, `far` the single kernels that are farthest from
their prices. They need no device: they read the folder, and price the kept programs as the cost model is today.
"""

import argparse
import fcntl
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
import models
from autoshard import _jax
from autoshard.backends import hlo
from autoshard.backends.hlo.matmuls import multiplying
from autoshard.backends.known_compilers import of_devices
from autoshard.backends.timeline import Timeline, timeline
from autoshard.ir.mesh import MeshAxes
from benchmarks import recomputation_models
from benchmarks.recomputation_report import OURS
from benchmarks.unseen_models import MODELS
from cost_models import hardware as read_hardware
from cost_models.machines.dtypes import itemsize

RESULTS = Path(__file__).parent / "results" / "h100"
MESH = {"data": 1}
WORKERS = 3  # plan beside each other; they compile and run one by one
GROUPS, GROUP_S = 5, 0.3  # timed groups of steps, and how long each of them lasts at least
PROFILED = 2  # steps under the profiler
HIGHEST_ID = 1000  # of tokens and of classes: less than every vocabulary
USABLE = "0.92"  # of the memory, for JAX's allocator
CLOSE = 0.10
LEAST_S = 1e-4  # of kernels that are listed
FARTHEST = 12  # of each program
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A train step and how it is planned: its state is the first argument, its parameters the first of that."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def subjects() -> Iterator[Subject]:
    """All of them, the most telling first."""
    for name, model in MODELS.items():
        yield Subject(name=f"unseen {name}", build=lambda model=model: model.program(1))
    yield from _policies("gpt2-medium 16x1024", "gpt2-medium", budgets=("13.5GB",), batch=16, sequence=1024)
    yield from _policies("llama3-8b 4-layers 8x2048", "llama3-8b", batch=8, sequence=2048, layers=4)
    yield from _policies("vit 6-layers 256", "vit", unrolled=True, batch=256, layers=6)
    yield from _policies("gpt2-small unrolled 16x1024", "gpt2-small", unrolled=True, batch=16, sequence=1024)
    yield from _policies("ssm 4x1024", "ssm", batch=4, sequence=1024)


def _policies(
    name: str, model: str, *, budgets: Sequence[str] = (), unrolled: bool = False, **sizes: Any
) -> Iterator[Subject]:
    """A model under checkpoint policies, and as we plan it in all memory and in less."""

    def build(remat: Any) -> Any:
        if model in ("vit", "ssm"):
            return getattr(recomputation_models, model)(remat=remat, **sizes)
        return models.build(model, scan=not unrolled, remat=remat, **sizes)

    yield Subject(name=f"{name} | {OURS}", build=lambda: build("none"), options={"remat": "add"})
    for budget in budgets:
        options = {"remat": "add", "memory": budget}
        yield Subject(name=f"{name} | {OURS} in {budget}", build=lambda: build("none"), options=options)
    policies = ("full", "dots", "all_dots") if model == "ssm" else ("full", "dots", "all_dots", "context")
    for policy in policies:
        yield Subject(
            name=f"{name} | {policy}", build=lambda policy=policy: build(policy), options={"remat": "written"}
        )


def concrete(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays for a step's abstract arguments: small random parameters, an optimizer's first state, random examples."""
    state = args[0]
    leaves, structure = jax.tree.flatten(args)
    parameters, states = len(jax.tree.leaves(state[0])), len(jax.tree.leaves(state))

    def fill() -> list[jax.Array]:
        return [
            jnp.zeros(x.shape, x.dtype) if parameters <= i < states else _scattered(i, x) for i, x in enumerate(leaves)
        ]

    return jax.block_until_ready(jax.tree.unflatten(structure, jax.jit(fill)()))


def _scattered(seed: int, x: Any) -> jax.Array:
    """Values over the range of parameters, or of ids, by a hash of their places; ones for vectors, as norms have."""
    if jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) < 2:
        return jnp.ones(x.shape, x.dtype)
    bits = jax.lax.iota(jnp.uint32, max(1, int(np.prod(x.shape)))) + jnp.uint32(seed * 7919)
    for factor in (0x7FEB352D, 0x846CA68B):  # Wellons' lowbias32
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    bits = (bits ^ (bits >> 15)).reshape(x.shape)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (bits % HIGHEST_ID).astype(x.dtype)
    return (0.035 * (2 * (bits >> 8).astype(jnp.float32) / 2**24 - 1)).astype(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How subjects are run: for which hardware they are planned, or not planned at all; whether kernels have names."""

    hardware: str
    plain: bool
    kernels: bool


def measured(subject: Subject, how: How, folder: Path) -> None:
    """Plans, compiles and runs a subject; its files go to the folder."""
    step, args = subject.build()
    found: dict[str, Any] = {"name": subject.name}
    if how.plain:
        program = jax.jit(step, donate_argnums=0)
    else:
        plan = autoshard.plan(step, *args, mesh=MESH, hardware=how.hardware, donate_argnums=0, **subject.options)
        found |= {"predicted_s": plan.cost, "predicted_peak": plan.record.memory.peak_bytes}
        program = plan.jit()
    with (folder / "device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        arrays = concrete(args)
        device = jax.local_devices()[0]
        flags = of_devices(device.platform).profiling_flags if how.kernels else {}
        compiled = program.lower(*arrays).compile(dict(flags))
        text = str(compiled.as_text())
        held: Any = compiled.memory_analysis()
        made = held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes
        seconds, spread, arrays = _timed(compiled, arrays)
        found |= {
            "compiled_peak": held.argument_size_in_bytes + made,
            "measured_s": seconds,
            "spread": spread,
            "measured_peak": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
            "device": device.device_kind,
            "jax": jax.__version__,
            "date": datetime.now(UTC).date().isoformat(),
        }
        if how.kernels:
            found["kernels"] = _profiled(compiled, arrays, hlo.read(text).name)
        (folder / f"{_stem(subject.name)}.hlo.gz").write_bytes(gzip.compress(text.encode()))
        (folder / f"{_stem(subject.name)}.json").write_text(json.dumps(found, indent=1))


def _stem(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name)


def _timed(compiled: Any, arrays: tuple[Any, ...]) -> tuple[float, float, tuple[Any, ...]]:
    """Seconds of a step among others, median of groups; half the groups' range, relative; the next arguments."""
    state, *examples = arrays

    def group(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(steps):
            state, _ = compiled(state, *examples)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / steps

    group(2)
    steps = max(2, int(GROUP_S / group(2)))
    seconds = [group(steps) for _ in range(GROUPS)]
    middle = median(seconds)
    return middle, (max(seconds) - min(seconds)) / 2 / middle, (state, *examples)


def _profiled(compiled: Any, arrays: tuple[Any, ...], module: str) -> dict[str, float]:
    """Seconds per step of every instruction of a module."""
    state, *examples = arrays
    with tempfile.TemporaryDirectory(prefix="autoshard-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                state, _ = compiled(state, *examples)
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = _jax.profiled(str(path))
    found: dict[str, float] = defaultdict(float)
    for _, _, stats, duration_ns in events:
        if "hlo_op" in stats and stats.get("hlo_module", module) == module:
            found[str(stats["hlo_op"])] += duration_ns * 1e-9 / PROFILED
    return found


def run(folder: Path, match: str, how: How, seconds: float) -> None:
    """Measures the subjects whose names match, each in a process of its own, as far as the time goes."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    waiting = [
        x.name for x in subjects() if re.search(match, x.name) and not (folder / f"{_stem(x.name)}.json").exists()
    ]
    running: dict[str, subprocess.Popen[bytes]] = {}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": USABLE}
    options = ["--hardware", how.hardware, *["--plain"] * how.plain, *["--kernels"] * how.kernels]
    while waiting or running:
        late = time.perf_counter() - begin > seconds
        while waiting and len(running) < WORKERS and not late:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.measured_steps", "one", str(folder), "--match", name, *options]
            running[name] = subprocess.Popen(command, env=environment)
        for name, process in list(running.items()):
            if process.poll() is None and late:
                process.kill()
            if process.poll() is not None:
                sys.stderr.write(f"{time.perf_counter() - begin:5.0f} s  {name}: {running.pop(name).returncode}\n")
        if late:
            waiting.clear()
        time.sleep(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `run` found of a subject; and its compiled schedule, priced as the cost model is today."""

    found: Mapping[str, Any]
    module: hlo.Module
    schedule: Timeline

    @property
    def name(self) -> str:
        return str(self.found["name"])


def read(folder: Path, hardware: str) -> list[Measured]:
    """What a folder keeps, in the order of the subjects."""
    order = {subject.name: place for place, subject in enumerate(subjects())}
    machine = read_hardware(hardware).place(MESH)
    mesh = MeshAxes.of(MESH)
    rows: list[Measured] = []
    for path in folder.glob("*.json"):
        module = hlo.read(gzip.decompress(path.with_suffix(".hlo.gz").read_bytes()).decode())
        schedule = timeline(module, (), machine, mesh)
        rows.append(Measured(found=json.loads(path.read_text()), module=module, schedule=schedule))
    return sorted(rows, key=lambda row: order[row.name])


def steps(rows: Sequence[Measured]) -> Iterator[str]:
    """A table of steps, and how far predictions are off."""
    first = rows[0].found
    yield f"{first['device']}, JAX {first['jax']}, {first['date']}\n"
    yield "| step | plan, ms | schedule, ms | measured, ms | plan ÷ measured | schedule ÷ measured | peak, GB |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        plan_s, schedule_s, real_s = row.found["predicted_s"], row.schedule.step_s, row.found["measured_s"]
        peaks = " → ".join(f"{row.found[x] / 1e9:.2f}" for x in ("predicted_peak", "compiled_peak", "measured_peak"))
        yield (
            f"| {row.name.replace('|', '·')} | {plan_s * 1e3:.2f} | {schedule_s * 1e3:.2f} | {real_s * 1e3:.2f} "
            f"| {plan_s / real_s:.2f} | {schedule_s / real_s:.2f} | {peaks} |"
        )
    for what, of in (("Plans", lambda x: x.found["predicted_s"]), ("Compiled schedules", lambda x: x.schedule.step_s)):
        ratios = [of(row) / row.found["measured_s"] for row in rows]
        close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
        off = median(abs(ratio - 1) for ratio in ratios)
        within = f"{close} of {len(rows)} within {CLOSE:.0%}"
        yield f"\n{what}: {off:.1%} off (median), {mean(ratios) - 1:+.1%} on average; {within}."
    peaks = [row.found["measured_peak"] / row.found["predicted_peak"] for row in rows]
    close = sum(abs(ratio - 1) <= CLOSE for ratio in peaks)
    span = f"{min(peaks):.2f} to {max(peaks):.2f}"
    yield f"\nPeaks: {span} of the plan's; {close} of {len(rows)} within {CLOSE:.0%}."


def kernels(rows: Sequence[Measured]) -> Iterator[str]:
    """A table of classes of kernels over all programs: their prices, and what they take."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        kinds = {
            instruction.name: _kind(row.module, computation, instruction)
            for computation in row.module
            for instruction in computation
        }
        for event in row.schedule.events:
            if event.instruction in row.found["kernels"]:
                priced_s, real_s = event.duration_s * event.trips, row.found["kernels"][event.instruction]
                found[kinds[event.instruction]].append((priced_s, real_s))
    sums = {kind: (len(x), sum(a for a, _ in x), sum(b for _, b in x)) for kind, x in found.items()}
    yield f"Of {', '.join(row.name.replace('|', '·') for row in rows)}:\n"
    yield "| kernels | of them | priced, ms | measured, ms | priced ÷ measured |"
    yield "| --- | --- | --- | --- | --- |"
    for kind, (count, priced_s, real_s) in sorted(sums.items(), key=lambda item: -item[1][2]):
        if real_s >= LEAST_S:
            yield f"| {kind} | {count} | {priced_s * 1e3:.2f} | {real_s * 1e3:.2f} | {priced_s / real_s:.2f} |"


def far(rows: Sequence[Measured]) -> Iterator[str]:
    """Tables of the kernels of each program whose prices are farthest from what they take, and of its copies."""
    for row in rows:
        took: Mapping[str, float] = row.found["kernels"]
        priced: dict[str, tuple[float, str]] = {}
        for event in row.schedule.events:
            priced[event.instruction] = event.duration_s * event.trips, f"{event.name}, {event.where.split('/')[-1]}"
        whole_ms, step_ms = 1e3 * sum(took.values()), 1e3 * row.found["measured_s"]
        yield f"\n{row.name.replace('|', '·')}: {whole_ms:.2f} ms of kernels in a step of {step_ms:.2f} ms\n"
        yield "| kernel | what | priced, ms | measured, ms |"
        yield "| --- | --- | --- | --- |"
        known = {name: priced.get(name, (0.0, "beside compute, or free")) for name in took}
        for name in sorted(known, key=lambda name: -abs(known[name][0] - took[name]))[:FARTHEST]:
            priced_s, what = known[name]
            yield f"| {name} | {what} | {priced_s * 1e3:.2f} | {took[name] * 1e3:.2f} |"


def _kind(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> str:
    """A class of kernels that should be priced alike."""
    products = [product for _, product in multiplying(module, computation, instruction)]
    if products:
        batch, m, n, k, dtype = products[0]
        odd = any(size > 1 and size * itemsize(dtype) % ALIGNED_BYTES for size in (m, n, k))
        return f"products{' of each head' if batch > 1 else ''}, {dtype}{', rows of no whole 16 bytes' if odd else ''}"
    if "__triton" in instruction.attributes:
        return "fusions that Triton compiles (softmax, norms)"
    return re.sub(r"[.\d]+$", "", instruction.name)


TABLES: Mapping[str, Callable[[Sequence[Measured]], Iterator[str]]] = {"steps": steps, "kernels": kernels, "far": far}


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "one", *TABLES))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--match", default="", help="a regular expression that is searched for in the names")
    parser.add_argument("--hardware", default="h100:1x1")
    parser.add_argument("--plain", action="store_true", help="the program under jax.jit, without a plan")
    parser.add_argument("--kernels", action="store_true", help="profiled; compiled without command buffers")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing more is begun")
    asked = parser.parse_args()
    how = How(hardware=asked.hardware, plain=asked.plain, kernels=asked.kernels)
    folder = asked.folder or RESULTS / ("steps" if asked.command == "steps" else "kernels")
    if asked.command == "run":
        run(folder, asked.match, how, asked.seconds)
    elif asked.command == "one":
        measured(next(x for x in subjects() if x.name == asked.match), how, folder)
    else:
        print("\n".join(TABLES[asked.command](read(folder, asked.hardware))))


if __name__ == "__main__":
    main()
