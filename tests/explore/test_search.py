"""Search: what is planned is ranked, what does not fit is named, interruptions keep what was found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import models
from autoshard.errors import InfeasibleError, SpecError, TargetError
from autoshard.explore import ranking_report
from autoshard.explore.candidates import Candidate
from autoshard.explore.ranking import Progress, RankedPlan, Ranking
from autoshard.explore.search import Search, search, token_count, unproven
from autoshard.explore.trial import Task, Trials
from autoshard.ir import flops
from autoshard.problem import memory_profile
from autoshard.problem.formulation import UNIT_S

SMALL: dict[str, Any] = {"compute_dtype": "float32", "width": 8, "layers": 2}


@pytest.fixture(scope="module")
def found() -> Search:
    return search(
        "models:linear_tiny",
        hardware="cpu",
        chips=(4, 8),
        keywords=SMALL,
        vary={"batch": (8, 16)},
        axes=2,
        processes=1,
        prices=2.0,
    )


def test_every_candidate_is_planned_and_ranked(found: Search) -> None:
    # cpu:4: {4}, {2,2}; cpu:8: {8}, {4,2} (its twin {2,4} left out); two batches each
    assert len(found.rows) == 8
    assert found.twins == 2
    assert [row.order for row in found.rows] == sorted(row.order for row in found.rows)


def test_a_chip_of_a_file_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    source = "half of an H100"
    numbers = {"hbm_bytes_per_s": {"value": 1.6e12, "source": source}}
    text = {"schema": "hardware/1", "kind": "chip", "name": "half", "based_on": "h100", "numbers": numbers}
    path.write_text(json.dumps(text))
    whole, half = (
        search("models:linear_tiny", hardware=chip, chips=4, keywords=SMALL, axes=1, processes=1, prices={chip: 2.0})
        for chip in ("h100", str(path))
    )
    assert not half.left_out
    assert half.best.candidate.hardware == f"{path}:1x4"
    assert half.best.step_s > whole.best.step_s


def test_a_row_is_what_plan_gives(found: Search) -> None:
    best = found.best
    fn, args = models.build("linear-tiny", **SMALL, **dict(best.candidate.choice))
    plan = autoshard.plan(
        fn, *args, mesh=best.candidate.shape, hardware=best.candidate.hardware, donate_argnums=0, constraints="all"
    )
    assert plan.cost == pytest.approx(best.step_s, rel=1e-2)


def test_a_row_s_plan_is_made_again_as_it_is(found: Search) -> None:
    for rank, row in enumerate(found.rows, start=1):
        planned = found.planned(rank)
        assert planned.record is row.record
        assert planned.solution.objective * UNIT_S == pytest.approx(row.record.certificate.objective_s)
        assert planned.solution.gap == pytest.approx(row.record.certificate.gap, abs=1e-9)
        assert (
            memory_profile.peak(planned.assignment.decisions, planned.assignment.choice)[0]
            == row.record.memory.peak_bytes
        )


def test_the_front_holds_the_fastest_and_nothing_that_is_beaten(found: Search) -> None:
    assert 0 in found.pareto
    front = [found.rows[i] for i in found.pareto]
    for row in front:
        assert not any(
            other.order[0] < row.order[0]
            and other.record.memory.peak_bytes < row.record.memory.peak_bytes
            and other.candidate.chips < row.candidate.chips
            for other in found.rows
        )


def test_the_page_s_json_is_json_and_markdown_has_every_row(found: Search) -> None:
    written = json.loads(json.dumps(found.to_json()))
    assert [row["step_s"] for row in written["rows"]] == [row.step_s for row in found.rows]
    assert found.to_markdown().count("| cpu:") == len(found.rows)
    assert written["verdict"] in found.to_markdown()
    assert "linear" in str(found) or "train_step" in str(found)


def test_the_verdict_names_the_cheapest_where_it_is_another(found: Search) -> None:
    cheapest = min(range(len(found.rows)), key=lambda i: (found.dollars(found.rows[i]), i))
    named = f"cheapest is {found.rows[cheapest].candidate} (rank {cheapest + 1})"
    assert (named in ranking_report.verdict(found)) == (cheapest != 0)
    one = replace(found, rows=found.rows[:1])
    assert "cheapest" not in ranking_report.verdict(one)


def test_rows_with_a_gap_say_whether_they_can_be_the_best(found: Search) -> None:
    best = found.best

    def noted(bound_s: float, gap: float) -> list[str]:
        proof = replace(best.record.certificate, bound_s=bound_s, gap=gap)
        return list(unproven([best, replace(best, record=replace(best.record, certificate=proof))], gap=0.02))

    assert noted(0.99 * best.step_s, 0.01) == []
    assert noted(best.step_s, 0.1) == [
        "1 of 2 rows are proven slower than the best, and were not searched further: "
        "their steps may be up to 10.0% shorter"
    ]
    assert noted(0.9 * best.step_s, 0.1) == ["1 of 2 rows ran out of time: their steps may be up to 10.0% shorter"]


def test_text_fits_a_terminal_and_says_what_has_no_room(found: Search) -> None:
    text = ranking_report.text(found, width=80)
    assert all(len(line) <= 80 for line in text.splitlines()[2:])
    assert "no room" not in ranking_report.text(found, width=200)
    assert "no room" in ranking_report.text(found, width=50)


def test_dollars_without_a_token_budget_are_of_a_million_steps(found: Search) -> None:
    best = found.best
    priced = replace(found, prices={best.candidate.hardware.partition(":")[0]: 2.0}, budget_tokens=0.0)
    assert priced.days(best) is None
    text = ranking_report.text(priced, width=120)
    assert "$/1M steps" in text
    row = next(line for line in text.splitlines() if line.split()[:1] in (["1"], ["1*"]))
    assert float(row.split()[-1].replace(",", "")) == pytest.approx(
        2.0 * best.candidate.chips * best.step_s / 3600 * 1e6, rel=0.01
    )


def test_processes_answer_as_one_does(found: Search) -> None:
    told: list[Progress] = []
    other = search(
        "models:linear_tiny",
        hardware="cpu:8",
        keywords={**SMALL, "batch": 16},
        axes=1,
        twins=True,
        processes=2,
        on_progress=told.append,
    )
    (row,) = other.rows
    same = next(
        r for r in found.rows if r.candidate.shape == row.candidate.shape and dict(r.candidate.choice) == {"batch": 16}
    )
    assert row.record.inputs == same.record.inputs
    assert [p.done for p in told] == [0, 1]
    assert [p.total for p in told] == [1, 1]


def test_an_interruption_keeps_what_was_found() -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    kept = search("models:linear_tiny", hardware="cpu:8", keywords=SMALL, axes=2, processes=1, on_progress=stop)
    assert len(kept.rows) == 1
    assert kept.missing == 1
    assert "interrupted: 1 of 2" in str(kept)


def test_an_interruption_before_the_first_plan_is_one() -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search("models:linear_tiny", hardware="cpu:8", keywords=SMALL, axes=1, processes=1, on_progress=stop)


def test_what_does_not_fit_is_an_error_that_names_the_reason() -> None:
    with pytest.raises(InfeasibleError, match="no candidate of 1 has a plan: the donated arguments alone are"):
        search("models:linear_tiny", hardware="cpu:8", keywords=SMALL, axes=1, processes=1, memory=1)


def test_an_error_of_the_task_reaches_the_caller_from_another_process() -> None:
    with pytest.raises(TargetError, match="has no `linear_tine`"):
        search("models:linear_tine", hardware="cpu:8", axes=2, processes=2)


def test_a_function_is_searched_in_one_process() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x @ x

    one = search(double, jax.ShapeDtypeStruct((8, 8), jnp.float32), hardware="cpu:8", axes=1, for_grad=False)
    assert one.best.flops == 2 * 8**3


def test_vary_needs_a_builder_and_chips_a_number() -> None:
    with pytest.raises(SpecError, match="vary= needs a builder"):
        search(lambda x: x, hardware="cpu:8", vary={"batch": (1,)})
    with pytest.raises(SpecError, match="say how many chips, --chips 8"):
        search("models:linear_tiny", hardware="cpu")


def test_state_is_donated_where_outputs_replace_it() -> None:
    trials = Trials(Task(target="models:linear_tiny", keywords=SMALL))
    request = trials.request(Candidate(hardware="cpu:8", chips=8, mesh=(("data", 8),)))
    assert {request.traced.argument_of[i] for i in request.shardings.donated} == {0}
    assert trials.workload(request).parameters == 2 * 8 * 8


@pytest.mark.parametrize(
    ("written", "count"), [("15T", 15e12), ("300B", 3e11), ("20x", 20 * 7.0), (5e9, 5e9), ("12", 12.0)]
)
def test_token_budgets(written: float | str, count: float) -> None:
    assert token_count(written, 7) == count


def test_token_budgets_that_cannot_be_read() -> None:
    with pytest.raises(SpecError, match="write 15T, 300B or 20x"):
        token_count("many", 7)
    with pytest.raises(SpecError, match="need leaves below `params`"):
        token_count("20x", 0)


def _scaled(found: Search, rates: dict[int, float]) -> Ranking:
    """A ranking of one kind of chip whose steps per second are given."""
    row = found.best
    rows: list[RankedPlan] = []
    for chips, rate in rates.items():
        record = replace(row.record, cost=replace(row.record.cost, step_s=1 / rate))
        rows.append(replace(row, candidate=replace(row.candidate, chips=chips, choice=()), record=record, tokens=0))
    return replace(found, rows=tuple(sorted(rows, key=lambda r: r.order)))


def test_the_knee_is_where_doubling_stops_to_give_half() -> None:
    found = search("models:linear_tiny", hardware="cpu:8", keywords=SMALL, axes=1, processes=1)
    (curve,) = _scaled(found, {8: 1.0, 16: 1.9, 32: 3.4, 64: 4.0}).scaling
    assert curve.knee == 32  # log2(3.4/1.9) = 0.84, log2(4/3.4) = 0.23
    (perfect,) = _scaled(found, {8: 1.0, 16: 2.0}).scaling
    assert perfect.knee == 16


def test_money_follows_from_days_and_chips(found: Search) -> None:
    budgeted = replace(found, budget_tokens=86_400.0 * 2, rows=(replace(found.best, tokens=1),))
    row = budgeted.rows[0]
    days = 2 * row.step_s
    assert budgeted.days(row) == pytest.approx(days)
    assert budgeted.dollars(row) == pytest.approx(2.0 * row.candidate.chips * 24 * days)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("scan", [False, True])
def test_useful_flops_leave_recomputation_out(remat: str, scan: bool) -> None:  # noqa: FBT001  (a parameter of the test)
    fn, args = models.build("tiny-llama", scan=scan, remat=remat)
    config = models.find("tiny-llama")[1]
    tokens = args[1]["tokens"].size
    layer = 2 * config.width * config.head_dim * (config.heads + config.kv_heads) + 3 * config.width * config.hidden
    matmuls = config.layers * layer + config.vocab * config.width
    scores = 4 * config.layers * config.heads * config.head_dim * config.context
    # forward 2 per parameter and token, backward twice that; attention in full, mask included
    assert flops.flops(jax.make_jaxpr(fn)(*args)) == 3 * tokens * (2 * matmuls + scores)


def scanned(layers: Any, x: Any) -> Any:
    """A loss and its gradient, whose loop keeps more than fits."""

    def loss(layers: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) * 2), None), x, layers)[0].sum()

    return jax.value_and_grad(loss)(layers)


def test_candidates_repeat_what_does_not_fit() -> None:
    layers, x = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    written = autoshard.plan(scanned, layers, x, mesh={"x": 4}, hardware="cpu:4", rel_gap=1e-2, remat="written")
    options: dict[str, Any] = {
        "hardware": "cpu:4",
        "axes": 1,
        "processes": 1,
        "rel_gap": 1e-2,
        "memory": int(0.8 * written.record.memory.peak_bytes),
    }
    with pytest.raises(InfeasibleError):
        search(scanned, layers, x, **options, remat="written")
    found = search(scanned, layers, x, **options)
    assert found.best.record.recomputation is not None
    assert found.best.record.memory.peak_bytes <= options["memory"]
    again = found.planned()
    assert again.record == found.best.record
    assert again.solution.objective * UNIT_S == pytest.approx(found.best.step_s)
