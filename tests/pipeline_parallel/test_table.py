"""Schedule tables: every task once, none before what it waits for; their bubbles and what they hold."""

import random
from itertools import pairwise
from typing import Any, cast

import pytest

from autoshard import SpecError
from autoshard.pipeline_parallel.own_stages.schedules import SCHEDULES, table
from autoshard.pipeline_parallel.own_stages.table import Table, Task, Work
from autoshard.pipeline_parallel.own_stages.timeline import simulate

F, B = Work.FORWARD, Work.BACKWARD
FORWARD_S, BACKWARD_S = 1.0, 2.0


W = Work.WEIGHTS


def seconds(task: Task) -> float:
    return FORWARD_S if task.work is F else BACKWARD_S


def drawn(rng: random.Random) -> Table:
    schedule, stages = rng.choice(list(SCHEDULES)), rng.randint(1, 8)
    if schedule == "interleaved":
        return table(schedule, stages=stages, repeats=rng.randint(1, 4), steps=stages * rng.randint(1, 4))
    return table(schedule, stages=stages, repeats=1, steps=rng.randint(1, 20))


@pytest.mark.parametrize("seed", range(100))
def test_random_tables_run_in_every_order_that_their_stages_allow(seed: int) -> None:
    """Durations are drawn, too: whatever tasks take, none begins before those that it waits for have ended."""
    rng = random.Random(seed)
    made = drawn(rng)
    order = made.in_order()
    assert sorted(map(str, order)) == sorted(str(task) for tasks in made.orders for task in tasks)
    took = {task: rng.random() for task in order}
    found = simulate(made, took.__getitem__, hop_s=rng.random())
    for task in order:
        assert all(found.ends[need] <= found.begins[task] for need in made.needs(task))
    for tasks in made.orders:
        assert all(found.ends[one] <= found.begins[other] for one, other in pairwise(tasks))
    least = max(sum(took[task] for task in tasks) for tasks in made.orders)
    assert found.step_s >= least - 1e-9
    assert -1e-9 <= found.bubble < 1


@pytest.mark.parametrize(
    ("stages", "repeats", "steps"), [(2, 1, 2), (4, 1, 8), (4, 2, 8), (3, 4, 6), (8, 3, 16), (1, 1, 5)]
)
def test_the_bubble_is_that_of_the_literature(stages: int, repeats: int, steps: int) -> None:
    """(S − 1) / R of M + (S − 1) / R times as long as one micro-batch (Narayanan et al. 2021, section 2)."""
    names = ["interleaved"] if repeats > 1 else ["GPipe", "1F1B", "interleaved"]
    for name in names:
        if name == "interleaved" and steps % stages:
            continue
        made = table(name, stages=stages, repeats=repeats, steps=steps)
        found = simulate(made, lambda task: seconds(task) / repeats)
        idle = (stages - 1) / repeats
        assert found.step_s == pytest.approx((steps + idle) * (FORWARD_S + BACKWARD_S))
        assert found.bubble == pytest.approx(idle / (steps + idle))


@pytest.mark.parametrize(("stages", "steps"), [(2, 8), (4, 8), (4, 3), (8, 32)])
def test_one_forward_one_backward_holds_stages_and_gpipe_microbatches(stages: int, steps: int) -> None:
    alternating, all_forward = (table(name, stages=stages, repeats=1, steps=steps) for name in ("1F1B", "GPipe"))
    assert [alternating.held(s) for s in range(stages)] == [min(stages - s, steps) for s in range(stages)]
    assert [all_forward.held(s) for s in range(stages)] == [steps] * stages


@pytest.mark.parametrize(("stages", "repeats"), [(4, 2), (4, 4), (2, 3)])
def test_interleaving_holds_what_its_authors_say(stages: int, repeats: int) -> None:
    """Chunks of the first stage: R · S + S − 1 (Korthikanti et al. 2022, section 4.2.3)."""
    made = table("interleaved", stages=stages, repeats=repeats, steps=4 * stages)
    assert made.held(0) == repeats * stages + stages - 1


@pytest.mark.parametrize(("stages", "steps"), [(2, 4), (4, 8), (4, 3), (8, 32)])
def test_gradients_of_weights_fill_the_bubble_and_hold_no_more_than_stages(stages: int, steps: int) -> None:
    """As long as one of the three: (S − 1) · 3 of a bubble are left as S − 1 at best (Qi et al. 2024, table 1)."""
    alternating, filled = (table(name, stages=stages, repeats=1, steps=steps) for name in ("1F1B", "zero-bubble"))
    took = {F: 1.0, B: 1.0, W: 1.0}
    step_s = simulate(filled, lambda task: took[task.work]).step_s
    assert 3 * steps + stages - 1 <= step_s < simulate(alternating, seconds).step_s
    assert max(map(filled.held, range(stages))) == min(stages, steps)


def test_a_hop_is_waited_for_once_per_stage_and_direction() -> None:
    made = table("GPipe", stages=4, repeats=1, steps=1)
    assert simulate(made, seconds, hop_s=0.5).step_s == 4 * (FORWARD_S + BACKWARD_S) + 2 * 3 * 0.5


def test_a_table_reads_as_text() -> None:
    assert (
        str(table("1F1B", stages=2, repeats=1, steps=2)) == "stage 0: F0.0 F0.1 B0.0 B0.1\nstage 1: F1.0 B1.0 F1.1 B1.1"
    )


def of_orders(*orders: tuple[Task, ...]) -> Table:
    return Table(name="mine", stages=2, repeats=1, steps=1, orders=orders)


def test_tables_that_never_end_or_leave_tasks_out_do_not_exist() -> None:
    first, last = (Task(F, 0, 0), Task(B, 0, 0)), (Task(F, 1, 0), Task(B, 1, 0))
    assert of_orders(first, last).chunks == 2
    with pytest.raises(
        SpecError, match=r"mine never ends: stage 0 waits with B0\.0 for F0\.0; stage 1 waits with F1\.0 for F0\.0"
    ):
        of_orders(first[::-1], last)
    with pytest.raises(SpecError, match=r"stage 1 leaves out B1\.0"):
        of_orders(first, last[:1])
    with pytest.raises(SpecError, match=r"F1\.0 is no task of stage 0"):
        of_orders((*first, last[0]), last)
    with pytest.raises(SpecError, match="stage 0 does a task twice"):
        of_orders((*first, first[0]), last)
    with pytest.raises(SpecError, match="1 stages have tasks, and there are 2"):
        of_orders(first)
    with pytest.raises(SpecError, match="steps=0: there is at least one"):
        table("1F1B", stages=2, repeats=1, steps=0)
    with pytest.raises(SpecError, match="steps='auto': write a whole number"):
        table("1F1B", stages=2, repeats=1, steps=cast(Any, "auto"))


def test_what_a_schedule_cannot_do_is_an_error() -> None:
    with pytest.raises(SpecError, match="'1F1B'"):
        table("1f1b", stages=2, repeats=1, steps=2)
    with pytest.raises(SpecError, match="in 1F1B every stage has one chunk; take schedule='interleaved'"):
        table("1F1B", stages=2, repeats=2, steps=2)
    with pytest.raises(SpecError, match="make steps a multiple of stages"):
        table("interleaved", stages=4, repeats=2, steps=6)
