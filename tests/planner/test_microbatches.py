"""`accumulate(loss, steps="auto")`: the number of micro-batches is chosen with the layouts, by planning it in each."""

import functools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import SpecError, accumulate
from autoshard.cli import search as cli_search
from autoshard.errors import InfeasibleError, PlanFileError, PlanMismatchError
from autoshard.ir import accumulation
from autoshard.planner import microbatches
from autoshard.planner.program import bind
from autoshard.planner.record import read_plan_file
from autoshard.planner.request import request_of
from tests.ir.test_accumulation import descent, same
from tests.planner.test_pipeline import Counted, target

MESH = {"data": 2, "model": 4}
AMPLE, TIGHT = None, 300_000  # bytes per device; one micro-batch takes more, whichever JAX traces it
LAYERS, ROWS, WIDTH = 4, 1024, 64

rng = np.random.default_rng(0)
PARAMS = {"w": (rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 8).astype(np.float32)}
BATCH = {"x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32), "length": rng.integers(1, WIDTH, ROWS)}


def loss(params: Any, batch: Any) -> Any:
    """The mean over examples of the mean over what each has: a ragged mask."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch["x"], params["w"])
    mask = jnp.arange(WIDTH) < batch["length"][:, None]
    return jnp.mean(jnp.sum(jnp.square(h) * mask, 1) / jnp.sum(mask, 1))


STEP = descent(accumulate(loss, steps="auto", parts=1))
plan = partial(autoshard.plan, mesh=MESH, hardware="cpu:8", donate_argnums=0, remat="written")


def test_ample_memory_takes_one_and_tight_memory_more() -> None:
    one, more = (plan(STEP, PARAMS, BATCH, memory=memory) for memory in (AMPLE, TIGHT))
    assert one.microbatches == 1
    assert more.microbatches is not None
    assert more.microbatches > 1
    assert more.record.memory.peak_bytes <= TIGHT < one.record.memory.peak_bytes
    assert "accumulated in 1 micro-batch of 1, 2, 4" in one.summary()
    space = more.record.certificate.space
    assert f"accumulated in {more.microbatches} micro-batches of 1, 2, 4" in space
    assert re.search(r"[( ]1(, 2)? did not fit", space)  # whether 2 or 4 is faster differs between JAX's versions


def test_weights_that_are_gathered_before_a_loop_lie_in_memory_while_it_runs() -> None:
    """Also where the step reads them split, too: to update them."""
    pins = {"state.w": P(None, None, ("data", "model"))}
    found = plan(descent(accumulate(loss, steps=4, parts=1)), PARAMS, BATCH, pins=pins)
    whole = PARAMS["w"].nbytes
    assert ("all-gather", whole, 1) in {(c.kind, c.nbytes, c.trips) for c in found.record.collectives}
    assert found.record.memory.kinds["copies"] >= whole
    compiled = found.verify().memory.compiled
    assert compiled is not None
    assert 0.8 < found.record.memory.peak_bytes / compiled.peak < 1.1


def test_it_is_the_best_of_the_plans_in_each_number() -> None:
    chosen = plan(STEP, PARAMS, BATCH, memory=TIGHT)
    costs: dict[int, float] = {}
    for n in accumulation.counts(bind(STEP, (PARAMS, BATCH), {}).program(chosen.record.mesh).traced.jaxpr)[:6]:
        try:
            costs[n] = plan(descent(accumulate(loss, steps=n, parts=1)), PARAMS, BATCH, memory=TIGHT).cost
        except InfeasibleError:
            continue
    assert chosen.cost == pytest.approx(min(costs.values()), rel=2e-3)
    assert chosen.microbatches in costs
    certificate = chosen.record.certificate
    assert certificate.bound_s <= min(costs.values())
    assert certificate.gap == pytest.approx(1 - certificate.bound_s / certificate.objective_s)


@pytest.mark.parametrize("memory", [pytest.param(AMPLE, marks=pytest.mark.slow), TIGHT])
def test_decorated_steps_are_those_of_one_device(memory: int | None) -> None:
    step = autoshard.jit(STEP, mesh=MESH, hardware="cpu:8", donate_argnums=0, memory=memory, remat="written")
    got, want = (jax.tree.map(jnp.asarray, PARAMS) for _ in range(2))
    value = expected = jnp.zeros(())
    for _ in range(3):
        got, value = step(got, BATCH)
        want, expected = jax.jit(descent(jax.value_and_grad(loss)))(want, BATCH)
    same((got, value), (want, expected))
    made = step.plan(got, BATCH)
    assert (made.microbatches == 1) == (memory is AMPLE)
    if memory is TIGHT:
        assert any(e.params["length"] == made.microbatches for e in scans(made.traced.jaxpr))


def scans(jaxpr: Any) -> list[Any]:
    return [e for e in autoshard._jax.equations(jaxpr) if e.primitive.name == "scan"]


@pytest.mark.slow
def test_recomputation_is_chosen_in_each_number() -> None:
    """Where repeating is dear and memory small, both are needed, or one of them: the best is taken."""
    free = plan(STEP, PARAMS, BATCH, memory=TIGHT, remat="add")
    written = plan(STEP, PARAMS, BATCH, memory=TIGHT)
    assert free.cost <= written.cost * (1 + 2e-3)
    assert free.microbatches is not None


def test_each_number_is_traced_once_and_no_more_than_are_needed() -> None:
    fn = Counted(accumulate(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), steps="auto", parts=1))
    w, x = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    meshes = [{"data": 8}, MESH]
    made = autoshard.plan(fn, w, x, mesh=meshes, hardware="cpu:8")
    assert made.microbatches == 1
    assert fn.count == 1
    fn.count = 0
    call = bind(fn, (w, x), {})
    requests = [request_of(call, target(mesh)) for mesh in meshes]
    assert requests[0].counts == (1, 2, 4, 8, 16, 32)
    programs = {(r.in_microbatches(n).program, n) for r in requests for n in (1, 2, 4)}
    assert fn.count == 3
    assert len(programs) == 3
    assert {program.traced.digest for program, _ in programs} == {requests[0].digest}


def test_a_file_a_lock_and_a_cache_answer_it(tmp_path: Path) -> None:
    made = plan(STEP, PARAMS, BATCH, memory=TIGHT, lock=tmp_path / "plan.json", cache=tmp_path / "cache")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["schema"], data["microbatches"]) == (2, made.microbatches)
    traced: list[int] = []

    @functools.wraps(STEP)
    def counted(state: Any, batch: Any) -> Any:
        traced.append(1)
        return STEP(state, batch)

    locked = plan(counted, PARAMS, BATCH, memory=TIGHT, lock=tmp_path / "plan.json")
    assert locked.record == made.record
    assert len(traced) == 2  # to know the program, and in as many micro-batches as the plan has
    cached = plan(STEP, PARAMS, BATCH, memory=TIGHT, cache=tmp_path / "cache")
    assert cached.record.microbatches == made.microbatches
    assert cached.planned.solution.objective == made.planned.solution.objective
    loaded = autoshard.load(tmp_path / "plan.json").bind(STEP, PARAMS, BATCH)
    assert loaded.record == made.record
    same(loaded.jit()(jax.tree.map(jnp.asarray, PARAMS), BATCH), jax.jit(STEP)(PARAMS, BATCH))


def test_a_damaged_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(STEP, PARAMS, BATCH, memory=TIGHT)
    path = tmp_path / "plan.json"
    for number in (3, 2 * ROWS, None):
        data = json.loads(made.record.dumps())
        data["microbatches"] = number
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
        with pytest.raises((PlanFileError, PlanMismatchError)):
            autoshard.load(path).bind(STEP, PARAMS, BATCH)
    path.write_text(made.record.dumps().replace(f'"microbatches": {made.microbatches}', '"microbatches": 3'))
    monkeypatch.setenv("CI", "1")
    with pytest.raises(PlanMismatchError, match=r"micro-batches \(3 → "):
        plan(STEP, PARAMS, BATCH, memory=TIGHT, lock=path)
    path.write_text(made.record.dumps().replace(f'"microbatches": {made.microbatches}', '"microbatches": 0'))
    with pytest.raises(PlanFileError, match="microbatches"):
        read_plan_file(path)
    fixed = descent(accumulate(loss, steps=made.microbatches or 1, parts=1))
    made.save(path)
    with pytest.raises(PlanMismatchError, match="another program"):
        autoshard.load(path).bind(fixed, PARAMS, BATCH)


def test_where_nothing_is_open_nothing_changes() -> None:
    fixed = plan(descent(accumulate(loss, steps=4, parts=1)), PARAMS, BATCH)
    assert fixed.microbatches is None
    assert "microbatches" not in json.loads(fixed.record.dumps())
    assert "micro-batch" not in fixed.summary()
    plain = jax.make_jaxpr(STEP)(PARAMS, BATCH)
    assert accumulation.counts(plain) == ()
    assert str(plain) == str(jax.make_jaxpr(descent(accumulate(loss, steps=1, parts=1)))(PARAMS, BATCH))


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(SpecError, match="steps='Auto': write a number of micro-batches, or \"auto\""):
        accumulate(loss, steps="Auto")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InfeasibleError, match=r"none of 1, 2, .*, 1024 micro-batches fits"):
        plan(STEP, PARAMS, BATCH, memory=20_000)
    both = {"one": (STEP, (PARAMS, BATCH)), "two": (STEP, (PARAMS, BATCH))}
    with pytest.raises(SpecError, match="is chosen for one function alone"):
        autoshard.plan_many(both, share={"one": "state", "two": "state"}, mesh=MESH, hardware="cpu:8")

    def step(params: Any, batch: Any) -> Any:
        return accumulate(lambda p, b: (loss(p, b), b["length"]), steps="auto", parts=1, has_aux=True)(params, batch)

    with pytest.raises(SpecError, match=r"the result \[0\]\[1\] has the shape \(1, 1024\), and in 2 micro-batches"):
        plan(step, PARAMS, BATCH, memory=TIGHT)


def test_the_numbers_divide_the_parts_of_every_batch() -> None:
    def counts(rows: tuple[int, ...], parts: int = 1) -> tuple[int, ...]:
        def all_of_them(p: Any, *batches: Any) -> Any:
            return [accumulate(lambda p, x: jnp.mean(x) * p, steps="auto", parts=parts)(p, b) for b in batches]

        batches = [jax.ShapeDtypeStruct((n, 4), jnp.float32) for n in rows]
        with accumulation.tried_steps(1):
            return accumulation.counts(jax.make_jaxpr(all_of_them)(1.0, *batches))

    assert counts((12,)) == (1, 2, 3, 4, 6, 12)
    assert counts((12,), parts=2) == (1, 2, 3, 6)
    assert counts((12, 8)) == (1, 2, 4)
    many = counts((2**20,))
    assert len(many) <= accumulation.MOST_COUNTS
    assert many[:6] == (1, 2, 4, 8, 16, 32)
    assert many[-1] == 2**20


def test_what_fewer_prove_is_not_tried() -> None:
    made = microbatches._Attempts(unfit={1: 1000, 3: 500})
    assert [made.least_peak(n) for n in (2, 4, 6)] == [500, 250, 250]


def test_the_command_line_reads_a_number_or_auto() -> None:
    assert [cli_search.steps(written) for written in ("auto", "8")] == ["auto", 8]
    with pytest.raises(SpecError, match="cannot read --microbatches many: write a number, as in 8, or auto"):
        cli_search.steps("many")


@pytest.mark.slow
def test_a_search_chooses_in_every_mesh() -> None:
    ask = partial(autoshard.search, "models:mlp_1k", hardware="cpu:8", processes=1, axes=2)
    keywords = {"layers": 2, "batch": 4096}
    ample = ask(keywords=keywords, microbatches="auto")
    assert {row.record.microbatches for row in ample.rows} == {1}
    least = min(row.record.memory.peak_bytes for row in ample.rows)
    tight = ask(keywords=keywords, microbatches="auto", memory=int(0.75 * least))
    assert all((row.record.microbatches or 0) > 1 for row in tight.rows)
    assert "micro-batches" in tight.to_markdown()
    assert tight.planned().record.microbatches == tight.best.record.microbatches
    four = ask(keywords=keywords, microbatches=4)
    assert {row.record.microbatches for row in four.rows} == {4}
    with pytest.raises(SpecError, match="microbatches=0"):
        ask(microbatches=0)
    with pytest.raises(InfeasibleError, match="has no micro-batches to choose"):
        autoshard.search(loss, PARAMS, BATCH, hardware="cpu:8", processes=1, microbatches="auto")
