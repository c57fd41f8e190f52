"""Damages files of every kind that is read, reads them, and uses those that can still be read.

    python -m benchmarks.damaged_files --count 5000 [--seed 0] [--kind plan]

Plan files (of today, of a plan that recomputes, and without what was added since the first), cache entries,
lock files, hardware files, IOPDDL problems and HLO texts are damaged in the ways of `damage`: cut, flipped,
with values of other types, sizes and depths. Each is read and, if that succeeds, used: printed, compared,
bound to its function and lowered, priced with, solved. Whatever is raised has to be an `AutoshardError` or a
`CostModelError`, within the seconds of `LIMIT_S`. Prints what was raised otherwise, with the seed
that makes it again, and how many there were; exit code 1 if any.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
import cost_models
from autoshard.api.planning import Options, plan_request, requests_of
from autoshard.errors import AutoshardError
from autoshard.explain.diff import diff
from autoshard.ir.recomputed import recomputation_of, savable
from autoshard.planner import exports, store
from autoshard.planner.recomputation_space import keeping
from autoshard.planner.record import PlanRecord, read_plan_file
from autoshard.problem import iopddl
from autoshard.solver import solve

LIMIT_S = 20  # a file of a few kilobytes
ROWS = 64
MESH = {"data": 2, "model": 4}
SPECIAL = "\N{INVISIBLE TIMES}raw:"  # what follows is written as it is, without quotes


class Hang(BaseException):
    """A file that took longer than LIMIT_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A damaged file that was not refused by an error of ours."""

    kind: str
    seed: int
    error: str
    at: str


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(KINDS))
    options = parser.parse_args()
    logging.getLogger("autoshard").setLevel(logging.ERROR)
    begin = time.perf_counter()
    kinds = [options.kind] if options.kind else list(KINDS)
    told, wrong = Counter[str](), list[Wrong]()
    for seed in range(options.seed, options.seed + options.count):
        kind = kinds[seed % len(kinds)]
        found = tried(kind, seed)
        told[f"{kind}: {found if isinstance(found, str) else 'WRONG'}"] += 1
        if not isinstance(found, str):
            wrong.append(found)
            print(f"{found.kind} --seed {found.seed}: {found.error} at {found.at}", flush=True)
    for what, count in sorted(told.items()):
        print(f"{count:>6}  {what}")
    print(f"{options.count} files, {len(wrong)} foreign exceptions or hangs, {time.perf_counter() - begin:.0f} s")
    sys.exit(bool(wrong))


def tried(kind: str, seed: int) -> str | Wrong:
    """The outcome of one damaged file: "used", or the name of the error; `Wrong` if it is none of ours."""
    draw = random.Random(seed)
    kind_of = KINDS[kind]
    good = kind_of.good()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{kind_of.suffix}"
        path.write_bytes(damage(good, draw, is_json=kind_of.suffix == ".json"))
        try:
            with limit(LIMIT_S):
                kind_of.use(path, draw)
        except (AutoshardError, cost_models.CostModelError) as error:
            str(error)
            return type(error).__name__
        except (Exception, Hang) as error:  # noqa: BLE001  (that is what is looked for)
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if "autoshard" in f.filename or "cost_models" in f.filename]
            at = (ours or frames)[-1]
            return Wrong(kind=kind, seed=seed, error=repr(error)[:300], at=f"{Path(at.filename).name}:{at.lineno}")
    return "used"


@contextlib.contextmanager
def limit(seconds: int) -> Generator[None]:
    """Raises `Hang` in what takes longer."""

    def stop(*_: Any) -> None:
        raise Hang(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- Damage ------------------------------------------------------------------------------


def damage(good: bytes, draw: random.Random, *, is_json: bool) -> bytes:
    """One or two damages: of the bytes, or of the values where it is JSON."""
    if not is_json or draw.random() < 0.3:
        for _ in range(draw.choice((1, 1, 2))):
            good = draw.choice(BYTES)(good, draw)
        return good
    document = json.loads(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        document = replaced(document, draw)
    text = json.dumps(document, indent=1)
    for mark in range(text.count(f'"{json.dumps(SPECIAL)[1:-1]}')):
        del mark
        begin = text.index(f'"{json.dumps(SPECIAL)[1:-1]}')
        end = text.index('"', begin + 1)
        text = text[:begin] + RAW[int(text[begin:end].rpartition(":")[2])] + text[end + 1 :]
    return text.encode()


def cut(good: bytes, draw: random.Random) -> bytes:
    """Truncated, anywhere or to nothing."""
    return good[: draw.choice((0, draw.randrange(len(good) + 1)))] if good else good


def flipped(good: bytes, draw: random.Random) -> bytes:
    """One to eight bytes changed."""
    changed = bytearray(good)
    for _ in range(draw.randint(1, 8) if changed else 0):
        changed[draw.randrange(len(changed))] = draw.randrange(256 if draw.random() < 0.2 else 128)
    return bytes(changed)


def spliced(good: bytes, draw: random.Random) -> bytes:
    """A span left out, doubled or put elsewhere."""
    if len(good) < 3:
        return good
    a, b = sorted(draw.sample(range(len(good)), 2))
    at = draw.randrange(len(good))
    return draw.choice((good[:a] + good[b:], good[:b] + good[a:], good[:at] + good[a:b] + good[at:]))


def digits(good: bytes, draw: random.Random) -> bytes:
    """A digit made into many, or into none."""
    found = [i for i, c in enumerate(good) if 48 <= c < 58]
    if not found:
        return good
    at = draw.choice(found)
    return good[:at] + draw.choice((b"9" * 30, b"9" * 5000, b"", b"-1", b"1e999", b"0x1", b"NaN")) + good[at + 1 :]


BYTES = (cut, flipped, spliced, digits)

RAW = ("[" * 100000, "9" * 5000, "NaN", "Infinity", "1e999", "-1e999", '{"a": 1, "a": 2}', "[" * 400 + "]" * 400)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1.0, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(10**30), 1e300, 1e-320),
    *("", "?", "data", "model", "float32", "int4", "O", "key<fry>", "x" * 400, "../../x", "\0", "\ud800", "a\nb", "💥"),
    *("h100:1x8", "tpu-v5e:2x4", "cpu:8", "<img src=x>", "{digest}", "@DATA@", "3f4", "M8[ns]"),
    *([], [[]], [None], [0], [-1], [1, 2, 3], ["data"], ["data", "model"], [["data"]], {}, {"": 0}, {"a": {"b": []}}),
    *(f"{SPECIAL}{i}" for i in range(len(RAW))),
)


def replaced(document: Any, draw: random.Random) -> Any:
    """One value of a document changed, left out, doubled, or exchanged for another of its values."""
    at = draw.choice(list(places(document)))
    if not at:
        return draw.choice(VALUES)
    *above, key = at
    parent = value_at(document, above)
    way = draw.random()
    if way < 0.15:
        del parent[key]
    elif way < 0.25 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif way < 0.25:
        parent[draw.choice(("x", "", "schema", "based_on", "?"))] = parent[key]
    elif way < 0.55:
        others = [value for place in places(document) for value in (value_at(document, place),)]
        alike = [value for value in others if type(value) is type(parent[key])]
        parent[key] = json.loads(json.dumps(draw.choice(alike if draw.random() < 0.8 else others)))
    elif way < 0.75 and isinstance(parent[key], int | float):
        parent[key] = draw.choice(
            (parent[key] + 1, -parent[key], parent[key] * 2, parent[key] * 10**9, str(parent[key]))
        )
    else:
        parent[key] = draw.choice(VALUES)
    return document


def value_at(document: Any, at: Iterable[Any]) -> Any:
    """The value at a place."""
    for step in at:
        document = document[step]
    return document


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value."""
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in items:
        yield from places(value, (*at, key))


# --- Uses --------------------------------------------------------------------------------


def program(state: Any, x: jax.Array) -> Any:
    """A step with a loop, a checkpoint, a branch and donated state: constraints on every level."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w), None

    def loss(state: Any) -> jax.Array:
        h, _ = jax.lax.scan(layer, x, state["layers"])
        h = jax.lax.cond(h[0, 0] > 0, lambda h: h * 2, lambda h: h, h)
        return jnp.mean((h @ state["out"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, state, gradients), value


def arguments() -> tuple[Any, ...]:
    """The arguments of the program, as shapes."""
    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return {"layers": shaped((3, ROWS, ROWS)), "out": shaped((ROWS, ROWS))}, shaped((ROWS, ROWS))


@cache
def planned(constraints: Any = "all") -> autoshard.SolvedPlan:
    """The plan whose file is damaged."""
    return autoshard.plan(
        program, *arguments(), mesh=MESH, hardware="cpu:8", donate_argnums=0, constraints=constraints, cache=False
    )


@cache
def recomputing() -> autoshard.SolvedPlan:
    """The plan of the same program that repeats its layers' products."""
    question, _ = asked()
    options = Options(mesh=MESH, hardware="cpu:8", donate_argnums=0, constraints="all")
    saved = savable(question.traced, "free")
    kept = {*saved.saved}
    products = {at for step in saved.repeated([]) if step.primitive == "dot_general" for at in step.results}
    kept -= saved.stacks(products)
    kept |= {*saved.missing(kept)}
    return plan_request(keeping(question, recomputation_of(saved, kept, "free")), options)


@cache
def asked() -> tuple[store.PlanRequest, Mapping[str, Any]]:
    """The question that the plan answers, and its key."""
    options = Options(mesh=MESH, hardware="cpu:8", donate_argnums=0, constraints="all")
    (question,) = requests_of(program, arguments(), {}, options)
    key = store.key_of(question, constraints="all", rel_gap=options.rel_gap, time_limit_s=options.time_limit_s)
    return question, key


def good_plan() -> bytes:
    """A plan file of today."""
    return planned().record.dumps().encode()


def good_recomputing_plan() -> bytes:
    """A plan file with the values that are kept."""
    return recomputing().record.dumps().encode()


def good_old_plan() -> bytes:
    """A plan file without the keys that were added later."""
    document = json.loads(good_plan())
    del document["asked"], document["gradient_of"]
    for row in document["collectives"]:
        row.pop("work_s", None)
    return json.dumps(document).encode()


def use_plan(path: Path, draw: random.Random) -> None:
    """Reads a plan file and does everything with it that needs no compiler."""
    plan = autoshard.load(path)
    str((plan.summary(), plan, plan.specs, plan.out_specs, plan.record.dumps()))
    exports.partition_specs(plan.record)
    for a, b in ((plan.record, planned().record), (planned().record, plan.record)):
        found = diff(a, b)
        str((found, json.dumps(found.to_json())))
    copy = path.with_name("copy.json")
    plan.save(copy)
    assert read_plan_file(copy) == plan.record, "what is saved is not what was read"
    lowered(plan, draw)


def lowered(plan: autoshard.LoadedPlan, draw: random.Random) -> None:
    """Binds a plan to its function and lowers it; sometimes compares it with Shardy's layouts."""
    bound = plan.bind(program, *arguments())
    str((bound.in_shardings(), bound.out_shardings()))
    bound.jit().lower(*arguments())
    if draw.random() < 0.05:
        str(bound.verify("shardy"))


def good_entry() -> bytes:
    """A cache's file."""
    _, key = asked()
    return json.dumps({"key": key, "plan": planned().record.dumps()}).encode()


def _found(record: PlanRecord, q: store.PlanRequest) -> autoshard.SolvedPlan:
    """A plan that was found in a file."""
    q = q if record.recomputation is None else keeping(q, record.recomputation)
    return autoshard.SolvedPlan(record, place=q.target, traced=q.traced, planned=lambda: planned().planned)


def use_entry(path: Path, draw: random.Random) -> None:
    """Finds a damaged file in a cache under the right name, and under a neighbour's."""
    question, key = asked()
    cache = store.Cache(path.parent)
    if draw.random() < 0.3:
        path.rename(path.parent / f"{question.name}-{'0' * 32}.json")
        assert cache.find(question, key) is None
        return
    cache.write(question.name, key, planned().record)
    (entry,) = [p for p in path.parent.iterdir() if p != path]
    entry.write_bytes(path.read_bytes())
    record = cache.find(question, key)
    if record is not None:
        plan = _found(record, question)
        plan.summary()
        plan.jit().lower(*arguments())
        store.Lock(path.parent / "{digest}.json").write(record)


def use_lock(path: Path, draw: random.Random) -> None:
    """Finds a plan behind a damaged lock."""
    question, _ = asked()
    found = store.Lock(path).find([question, replace(question, remat="free")], "all")
    if found is not None:
        plan = _found(*found)
        plan.summary()
        plan.jit().lower(*arguments())


def good_hardware(draw_from: int = 0) -> bytes:
    """A user's hardware file: of a chip, or of one that another is the base of."""
    document: dict[str, Any] = {
        "schema": "hardware/1",
        "kind": "chip",
        "name": "mine",
        "based_on": "h100",
        "topology": "1x8",
        "measured": {"date": "2026-01-01", "device_kind": "x", "versions": "y", "method": "z"},
        "numbers": {
            "hbm_bytes": {"value": 8e10, "source": "me"},
            "matmul_units_count": {"value": 132, "source": "me"},
            "overlap_fraction": {"value": 0.5, "source": "me"},
            "domain.one_way_bytes_per_s": {"value": 2.5e11, "source": "me"},
            "scale_out.hop_s": {"value": 1e-6, "source": "me"},
        },
        "tables": [
            {
                "collective": "all-gather",
                "devices": 8,
                "source": "me",
                "bytes": [1024, 1048576, 1073741824],
                "seconds": [1e-5, 2e-5, 1e-2],
            }
        ],
    }
    if draw_from:
        folder = Path(cost_models.__file__).parent / "hardware"
        document = json.loads((folder / "tpu-v5e.json").read_text())
        document |= {"domain": json.loads((folder / "ici-v5e.json").read_text()), "topology": "2x4"}
    return json.dumps(document).encode()


def use_hardware(path: Path, draw: random.Random) -> None:
    """Reads a hardware file and prices with it."""
    found = cost_models.hardware(path)
    json.dumps([found.name, found.digest, list(found.numbers), found.provenance, found.memory_terms])
    for limit_ in cost_models.hardware_limits(found):
        str(limit_)
    machine = found.place({"data": found.devices})
    sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
    for kind in cost_models.KINDS:
        seconds = machine.collective_s(kind, ("data",), sizes)
        assert rises(seconds), (kind, seconds)
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
        seconds = machine.matmul_s(1, sizes, 128, 128, dtype)
        assert rises(seconds), (dtype, seconds)
    assert rises(machine.hbm_s(sizes))


def rises(seconds: np.ndarray) -> bool:
    """Whether every price is finite, and none is less than that of less."""
    return bool(np.isfinite(seconds).all() and (np.diff(seconds) >= 0).all())


@cache
def good_problem() -> bytes:
    """A small problem as IOPDDL writes it, with what autoshard adds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        plan = autoshard.plan(lambda w, x: jnp.tanh(x @ w) @ w, w, w, mesh={"data": 2}, hardware="cpu:2", cache=False)
        iopddl.write(plan.problem, path)
        return path.read_bytes()


def use_problem(path: Path, draw: random.Random) -> None:
    """Reads a problem and solves it."""
    problem = iopddl.read(path)
    solve(problem, time_limit_s=2.0, rel_gap=0.01)


@cache
def good_hlo() -> bytes:
    """A compiled program's text."""
    lowered_ = planned().jit().lower(*arguments())
    return lowered_.compile().as_text().encode()


def use_hlo(path: Path, draw: random.Random) -> None:
    """Compares a plan with a text that is said to be its program's."""
    str(planned().check(path.read_text(encoding="utf-8", errors="replace")))


@dataclass(frozen=True, slots=True)
class Kind:
    """A good file, the end of its name, and the use of a damaged one."""

    good: Callable[[], bytes]
    use: Callable[[Path, random.Random], None]
    suffix: str = ".json"


KINDS: dict[str, Kind] = {
    "plan": Kind(good_plan, use_plan),
    "recomputing plan": Kind(good_recomputing_plan, use_plan),
    "old plan": Kind(good_old_plan, use_plan),
    "cache": Kind(good_entry, use_entry),
    "lock": Kind(good_plan, use_lock),
    "recomputing lock": Kind(good_recomputing_plan, use_lock),
    "hardware": Kind(good_hardware, use_hardware),
    "chip": Kind(partial(good_hardware, 1), use_hardware),
    "problem": Kind(good_problem, use_problem),
    "hlo": Kind(good_hlo, use_hlo, ".txt"),
}


if __name__ == "__main__":
    main()
