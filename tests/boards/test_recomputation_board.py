"""The board of recomputation: its arithmetic, its table, and its own models."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import recomputation, recomputation_models
from benchmarks.recomputation import Run, Subject, line, runs
from benchmarks.recomputation_report import BEGIN, END, OURS, best_rival, board, ratio, write

TINY = Subject(model="tiny-gpt2", hardware="h100:1x8", batch=8, sequence=32)


def stored(policy: str, step_s: float, peak: int = 50, *, budget: int = 60, cell: str = "a") -> dict[str, Any]:
    return {
        "key": f"{cell} {policy}",
        "cell": cell,
        "subject": "a",
        "budget": budget,
        "policy": policy,
        "limit_bytes": 60,
        "date": "2026-11-24",
        "plan_s": 1.0,
        "versions": {"jax": "0.10.2", "autoshard": "abc", "compiler": "jax-cuda12-pjrt 0.10.2"},
        "predicted": {"step_s": step_s, "peak_bytes": 50},
        "compiled": {"step_s": step_s, "peak_bytes": peak, "flops": 1.0, "predicted_flops": 1.0},
    }


def test_the_best_rival_is_the_fastest_that_fits() -> None:
    lines = [stored(OURS, 0.9), stored("none", 0.5, peak=61), stored("dots", 1.0), stored("full", 1.2)]
    rival = best_rival(lines)
    assert rival is not None
    assert rival["policy"] == "dots"
    assert ratio(lines) == pytest.approx(0.9)
    assert ratio([stored(OURS, 0.9, peak=61), stored("dots", 1.0)]) is None
    assert ratio([stored(OURS, 0.9)]) is None


def test_the_table_says_what_was_compared_and_what_fits_alone(tmp_path: Path) -> None:
    lines = [stored(OURS, 0.9), stored("dots", 1.0), stored(OURS, 0.9, cell="b"), stored("none", 0.5, 61, cell="b")]
    text = board(lines, 42)
    assert "2 of 42 cells were run so far, 1 compared" in text
    assert "geometric mean 0.900" in text
    assert "ours alone fits in 1 cells (b); a rival fits and ours does not in 0" in text
    results, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(x) + "\n" for x in lines))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(results, page, 42)
    assert page.read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"


def test_there_are_forty_cells_with_names_of_their_own() -> None:
    names = [run.key for run in runs()]
    assert len(set(names)) == len(names)
    assert len({run.cell for run in runs()}) >= 40


def test_a_rival_that_fits_a_smaller_budget_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "planned", lambda _: pytest.fail("planned again"))
    run = Run(subject=TINY, budget=60, policy="dots")
    before = {**stored("dots", 1.0, budget=100), "subject": TINY.key}
    found = line(run, [before])
    assert (found["as"], found["compiled"], found["limit_bytes"]) == ("a", before["compiled"], run.limit_bytes)
    with pytest.raises(pytest.fail.Exception, match="planned again"):
        line(Run(subject=TINY, budget=100, policy="dots"), [before])


@pytest.mark.parametrize("build", [recomputation_models.vit, recomputation_models.ssm])
def test_models_of_the_board_can_be_traced_with_every_policy(build: Any) -> None:
    for policy in recomputation.POLICIES:
        fn, args = build(layers=2, batch=8, remat=policy)
        state, loss = jax.eval_shape(fn, *args)
        assert loss.shape == ()
        assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, args[0])
