"""The engine for hinges against enumeration, and on networks of the planner's kind."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem.network import INF, Hinge, Int, Problem
from autoshard.solver import Status, evaluate, solve
from autoshard.solver.exact.hinges import product, solve_hinged
from autoshard.solver.exact.mip import highest_point
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.tuning import TUNED, SolverTuning
from tests.random_problems import brute_force, random_problem


def solved(problem: Problem, rel_gap: float = 0.0, tuning: SolverTuning = TUNED) -> tuple[Incumbent, str | None]:
    incumbent = Incumbent(problem=problem, time_limit_s=60.0, rel_gap=rel_gap, tuning=tuning)
    return incumbent, solve_hinged(incumbent, patience_s=60.0)


@pytest.mark.parametrize("limited", [False, True])
def test_small_problems_match_enumeration(*, limited: bool) -> None:
    seen: Counter[str | None] = Counter()
    for seed in range(250):
        problem = random_problem(np.random.default_rng(seed), nodes=5, hinges=1 + seed % 6)
        if not limited:
            problem = replace(problem, usage_limit=None)
        truth = brute_force(problem)
        incumbent, solver = solved(problem)
        seen[solver] += 1
        if truth.objective is None:
            assert incumbent.objective is None, seed
            continue
        assert incumbent.bound <= truth.objective, seed
        assert not incumbent.infeasible, seed
        if incumbent.objective is not None:
            assert incumbent.choice is not None
            assert evaluate(problem, incumbent.choice).objective == incumbent.objective >= truth.objective, seed
        if solver is not None:
            assert incumbent.objective == incumbent.bound == truth.objective, seed
    assert seen["multipliers"] > 25
    assert seen["multipliers and labels"] > 25
    assert seen[None] < 60 if limited else seen[None] == 0


def windows(seed: int, *, edges: int, nodes: int = 9) -> Problem:
    """Returns a chain with a hinge for every so many edges in a row, about as often positive as not."""
    rng = np.random.default_rng(seed)
    start, cells = np.arange(0, 3 * nodes + 1, 3), 9 * (nodes - 1)
    hinges: list[Hinge] = []
    for e in range(nodes - edges):
        coefficients = rng.integers(-50, 51, 9 * edges)
        hinges.append(
            Hinge(
                strategy=np.arange(3 * e, 3 * e + 3),
                strategy_coef=rng.integers(-20, 21, 3),
                cell=np.arange(9 * e, 9 * (e + edges)),
                cell_coef=coefficients,
                constant=-edges * int(np.median(coefficients)),
            )
        )
    none = np.zeros(0, dtype=np.int64)
    return Problem(
        start=start,
        cost=rng.integers(0, 30, 3 * nodes),
        edge_nodes=np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1),
        edge_start=np.arange(0, cells + 1, 9),
        edge_cost=rng.integers(0, 30, cells),
        use_node=none,
        use_interval=none.reshape(0, 2),
        use_start=np.zeros(1, dtype=np.int64),
        usage=none,
        usage_limit=None,
        hinges=tuple(hinges),
    )


@pytest.mark.parametrize("edges", [1, 3])
def test_hinges_are_closed_one_after_the_other(edges: int) -> None:
    """However many there are, labels tell apart what one leaves open: here those that cross its two ends."""
    seen: Counter[tuple[int, str | None]] = Counter()
    for seed in range(20):
        problem = windows(seed, edges=edges)
        for most in (0, 2 * edges):
            tables, mips = replace(TUNED.tables, label_hinges=most), replace(TUNED.hinges, mip_cells=-1)
            incumbent, solver = solved(problem, tuning=replace(TUNED, tables=tables, hinges=mips))
            seen[most, solver] += 1
        assert incumbent.objective == incumbent.bound == brute_force(problem).objective, seed
    assert seen[0, "multipliers and labels"] < seen[0, None]
    assert seen[2 * edges, "multipliers and labels"] >= seen[0, None]
    assert not seen[2 * edges, None]


def layered(layers: int, seed: int, *, usage_limit: int | None = None) -> Problem:
    """Returns a planner-like network: a ladder of choices, hideable edges, compute that covers."""
    rng = np.random.default_rng(seed)
    nodes = 3 * layers
    sizes = rng.integers(3, 9, nodes)
    start = np.concatenate([[0], np.cumsum(sizes)])
    pairs = [(v - step, v) for v in range(nodes) for step in (1, 3) if v >= step]
    tables: list[Int] = []
    hide: list[Int] = []
    for u, v in pairs:
        table = rng.integers(10**6, 10**9, (sizes[u], sizes[v])) * (rng.random((sizes[u], sizes[v])) < 0.8)
        table[rng.random(table.shape) < 0.05] = INF
        table[0, 0] = 10**9
        hidden = np.where((table < INF) & (rng.random() < 0.5), table * 7 // 8, 0)
        tables.append(np.where(table < INF, table - hidden, INF))
        hide.append(hidden.reshape(-1))
    cells = np.concatenate(hide)
    hinges: list[Hinge] = []
    compute = rng.integers(10**7, 10**9, start[-1])
    for half in range(2):
        strategy = np.flatnonzero(np.arange(start[-1]) % 2 == half)
        cell = np.flatnonzero((cells > 0) & (np.arange(len(cells)) % 2 == half))
        hinges.append(Hinge(strategy=strategy, strategy_coef=-compute[strategy] // 3, cell=cell, cell_coef=cells[cell]))
    return Problem(
        start=start,
        cost=compute,
        edge_nodes=np.array(pairs),
        edge_start=np.concatenate([[0], np.cumsum([t.size for t in tables])]),
        edge_cost=np.concatenate([t.reshape(-1) for t in tables]),
        use_node=np.arange(nodes),
        use_interval=np.tile([0, 1], (nodes, 1)),
        use_start=start,
        usage=rng.integers(1, 1000, start[-1]),
        usage_limit=usage_limit,
        hinges=tuple(hinges),
    )


@pytest.mark.parametrize("seed", range(4))
def test_layered_networks_reach_the_gap(seed: int) -> None:
    problem = layered(7, seed + 1)
    tight, solver = solved(problem, rel_gap=1e-6)
    loose, _ = solved(problem, rel_gap=1e-2)
    assert solver is not None
    assert tight.objective is not None
    assert tight.gap() <= 1e-6
    assert loose.gap() <= 1e-2
    assert loose.bound <= tight.objective


def test_memory_that_binds_is_respected() -> None:
    free = solve(layered(5, 0), rel_gap=1e-6)
    peak = evaluate(layered(5, 0), free.choice).peak_bytes
    bound = solve(layered(5, 0, usage_limit=peak * 9 // 10), rel_gap=1e-6, time_limit_s=120.0)
    assert bound.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert evaluate(layered(5, 0), bound.choice).peak_bytes <= peak * 9 // 10
    assert bound.objective >= free.bound
    assert bound.gap <= 1e-6


def test_equal_problems_give_equal_answers() -> None:
    first, _ = solved(layered(7, 7), rel_gap=1e-3)
    second, _ = solved(layered(7, 7), rel_gap=1e-3)
    assert first.choice is not None
    assert second.choice is not None
    np.testing.assert_array_equal(first.choice, second.choice)
    assert first.bound == second.bound


def test_product_rounds_down_exactly() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**55), 2**55, 1000)
    for multiplier in (0, 1, 123_457, 2**20 - 1, 2**20):
        expected = [(multiplier * int(value)) >> 20 for value in values]
        assert product(multiplier, values).tolist() == expected


@pytest.mark.parametrize(
    ("planes", "top", "place"),
    [
        ([[0.0, 2.0], [1.0, -1.0]], 2 / 3, [1 / 3]),
        ([[-3.0, 1.0]], -2.0, [1.0]),
        ([[1e15, 0.0, -1e13], [1e15 + 1e12, 3e12, -13.0]], 1e15, [0.0, 0.0]),
    ],
)
def test_highest_point_of_planes(planes: list[list[float]], top: float, place: list[float]) -> None:
    found = highest_point(np.array(planes))
    assert found is not None
    assert found[0] == pytest.approx(top, rel=1e-9)
    if len(place) == 1:  # the third has several
        assert found[1].tolist() == pytest.approx(place)
