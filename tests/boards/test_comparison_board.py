"""The board of ours against hand-written layouts: its arithmetic, its pages, and one cell of it made again."""

import json
import math
from math import prod
from pathlib import Path
from typing import Any

import pytest

import autoshard
import models
from autoshard import evaluate
from autoshard.backends import devices as meshes
from autoshard.cli.compare import of_models
from autoshard.ir.mesh import MeshAxes
from benchmarks import comparison_report
from benchmarks.comparison_board import MODELS, PLACES, RESULTS, cells
from benchmarks.comparison_report import (
    BEGIN,
    END,
    board,
    compiled_floor_s,
    consistent,
    floor_s,
    geometric_mean,
    read,
    remaining,
    rival_s,
    steps,
    write,
)

GAP = 1e-2


def layout(name: str, step_s: float, compute_s: float, *, fits: bool = True) -> dict[str, Any]:
    return {
        "layout": name,
        "mesh": {"data": 4, "model": 2},
        "gap": 0.01,
        "predicted": {"step_s": step_s},
        "compiled": {"step_s": step_s, "compute_s": compute_s},
        "fits": fits,
        "compiler": "jax-cuda12-pjrt 0.10.2",
    }


def line(key: str, ours: list[Any], hands: list[Any], bound_s: float = 1.0) -> dict[str, Any]:
    return {
        "key": key,
        "model": "llama3-8b",
        "hardware": "h100:1x8",
        "fields": {"batch": 8, "sequence": 1024},
        "date": "2026-11-21",
        "versions": {"jax": "0.10.2", "autoshard": "abc"},
        "floor_s": bound_s,
        "ours": ours,
        "hands": hands,
        "scheduled": {"ours": [], "hand": []},
        "predicted": [{"step_s": x["predicted"]["step_s"], "fits": x["fits"]} for x in hands],
        "completed": {"shardy_s": 3.0, "best_s": 2.9, "fits": True, "gap": 0.0},
        "wall_s": 1.0,
    }


WON = line("won", [layout("autoshard", 2.0, 1.5)], [layout("fsdp", 3.0, 1.2), layout("dp", 2.5, 1.2, fits=False)])
LOST = line("lost", [layout("autoshard", 4.0, 2.0), layout("autoshard", 3.0, 2.0)], [layout("fsdp", 3.2, 1.0)], 0.8)


def test_only_what_fits_counts() -> None:
    assert steps(WON) == (2.0, 2.0, 3.0)
    assert steps(LOST) == (4.0, 3.0, 3.2)
    none = line("none", [layout("autoshard", 4.0, 2.0, fits=False)], [layout("fsdp", 3.2, 1.0, fits=False)])
    assert steps(none) == (None, None, None)


def test_the_floor_is_the_lower_of_bound_and_compiled_compute() -> None:
    assert floor_s(WON) == 1.0
    assert floor_s(LOST) == 0.8
    assert floor_s({**WON, "floor_s": 9.0}) == 1.2
    assert remaining(WON, 0) == pytest.approx((2.0 - 1.0) / (3.0 - 1.0))
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_refined_is_the_best_mesh_and_flag_over_a_hand_with_the_same() -> None:
    assert rival_s(WON) == 3.0
    flagged = {**WON, "scheduled": {"ours": [layout("autoshard", 1.8, 1.5)], "hand": [layout("fsdp", 2.4, 1.2)]}}
    assert steps(flagged) == (2.0, 1.8, 3.0)
    assert rival_s(flagged) == 2.4
    assert remaining(flagged, 1) == pytest.approx((1.8 - 1.0) / (2.4 - 1.0))
    assert comparison_report.said(flagged) == "0.667, refined 0.750, in 1 s"


def test_without_a_distance_nothing_is_left_of_it() -> None:
    assert remaining(line("even", [layout("autoshard", 1.5, 1.0)], [layout("fsdp", 1.0, 1.0)]), 0) == math.inf
    none = line("none", [layout("autoshard", 1.5, 1.0)], [layout("fsdp", 1.0, 1.0, fits=False)])
    assert remaining(none, 0) == math.inf
    assert compiled_floor_s(LOST) == 1.0
    assert remaining(LOST, 1, compiled_floor_s) == pytest.approx((3.0 - 1.0) / (3.2 - 1.0))


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"completed": {"shardy_s": 3.0, "best_s": 1.99, "fits": True, "gap": 0.0}}, True),
        ({"completed": {"shardy_s": 3.0, "best_s": 1.97, "fits": True, "gap": 0.0}}, False),
        ({"completed": {"shardy_s": 3.0, "best_s": 1.97, "fits": False, "gap": 0.0}}, True),
        ({"completed": {"shardy_s": 2.8, "best_s": 2.9, "fits": True, "gap": 0.0}}, False),
        ({"predicted": [{"step_s": 1.9, "fits": True}]}, False),
        ({"predicted": [{"step_s": 1.9, "fits": False}]}, True),
    ],
)
def test_the_model_agrees_with_itself_up_to_the_solvers_gap(change: dict[str, Any], holds: bool) -> None:  # noqa: FBT001
    assert consistent({**WON, **change}) == holds


def test_losses_are_shown() -> None:
    text = board([WON, LOST, {"key": "failed", "error": "InfeasibleError: no plan\nat 3"}], 60)
    assert "3 of 60 cells were run so far, 2 compared, 1 failed" in text
    assert "in 1 of 2 cells" in text
    assert "worst 1.250" in text
    assert "in the other 0 the hand-written layout is the plan" in text
    assert "ours ≤ all others, in 1 of 2" in text
    assert "| **1.250** | 0.938 |" in text
    assert "| 0.667 | 0.667 | 50% |" in text
    assert "| failed | InfeasibleError: no plan |" in text
    assert board([], 60) == "No cell was compared yet."


def test_the_page_keeps_what_stands_around_the_board(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    results.write_text("\n".join(json.dumps(x) for x in (LOST, {**LOST, "ours": WON["ours"]})))
    assert len(read(results)) == 1  # the last of each cell
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(results, page, 60)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n1 of 60 cells")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no place for a board"):
        write(results, page, 60)


def test_the_board_is_whole() -> None:
    every = list(cells())
    assert len({cell.key for cell in every}) == len(every) >= 61
    assert {(cell.model, cell.hardware) for cell in every} >= {(m, p) for m in MODELS for p in PLACES}
    assert {x["key"] for x in read(RESULTS)} <= {cell.key for cell in every}


# --- Consistency -------------------------------------------------------------------

# A recipe and a mesh that the model can have. By construction, not by merit: the space of the planner holds
# what a hand annotates, and what the partitioner makes of it is one of its completions.
CONSISTENT = [
    pytest.param("tiny-mixtral", "h100:1x8", "expert_fsdp", (2, 4), id="tiny"),
    pytest.param("llama3-8b", "h100:1x8", "fsdp_megatron_sequence", (2, 4), id="llama", marks=pytest.mark.slow),
    pytest.param("mixtral-8x7b", "h100:1x8", "expert_fsdp", (2, 4), id="mixtral", marks=pytest.mark.slow),
    pytest.param("gpt2-xl", "h100:2x8", "fsdp", (16,), id="gpt2", marks=pytest.mark.slow),
    pytest.param("gemma-7b", "h100:2x8", "megatron_sequence", (16,), id="gemma", marks=pytest.mark.slow),
    pytest.param("llama3-8b", "h100:4x8", "hsdp", (4, 8), id="llama-32", marks=pytest.mark.slow),
    pytest.param("mixtral-8x7b", "h100:4x8", "fsdp", (32,), id="mixtral-32", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "hardware", "recipe", "sizes"), CONSISTENT)
def test_a_plan_is_not_dearer_than_a_hand_completed_at_best_nor_that_than_by_shardy(
    model: str, hardware: str, recipe: str, sizes: tuple[int, ...]
) -> None:
    """`plan.cost ≤ evaluate(hand, "best") ≤ evaluate(hand, "shardy")`, up to the solver's gap: a consistency check."""
    devices = prod(sizes)
    sequence = 32 if model.startswith("tiny") else 512
    fn, args = models.build(model, layers=2, scan=True, batch=devices, sequence=sequence, **MODELS.get(model, {}))
    template = of_models(f"models:{model.replace('-', '_')}", fn, args)[recipe]
    mesh = dict(zip(template.axes, sizes, strict=True))
    hand = template.write(meshes.abstract(MeshAxes.of(mesh)))
    on: dict[str, Any] = {"mesh": mesh, "hardware": hardware, "donate_argnums": 0, "memory": 10**12}
    specs: dict[str, Any] = {"in_specs": hand.in_specs, "out_specs": hand.out_specs}
    planned = autoshard.plan(fn, *args, constraints="all", rel_gap=GAP, **on)
    best = evaluate(hand.fn or fn, *args, completion="best", rel_gap=GAP, **specs, **on)
    by_shardy = evaluate(hand.fn or fn, *args, completion="shardy", **specs, **on)
    slack = 1 + planned.record.certificate.gap + GAP
    assert planned.cost <= best.cost * slack
    assert best.cost <= by_shardy.cost * (1 + best.record.certificate.gap + GAP)
