"""Cost-function networks with knapsacks, against enumeration of what was given."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from autoshard.problem import INF, Knapsack, cost_network
from autoshard.solver import Status, solve

Pair = tuple[int, int]
Tables = dict[Pair, list[list[int]]]


def least(costs: list[list[int]], tables: Tables, knapsacks: Sequence[Knapsack]) -> int | None:
    """Returns the least cost of a choice that fits; None if none does."""
    best: int | None = None
    for choice in itertools.product(*(range(len(own)) for own in costs)):
        parts = [own[i] for own, i in zip(costs, choice, strict=True)]
        parts += [table[choice[u]][choice[v]] for (u, v), table in tables.items()]
        fits = all(sum(row.usage[v][choice[v]] for v in row.usage) <= row.limit for row in knapsacks)
        if fits and max(parts) < INF:
            best = sum(parts) if best is None else min(best, sum(parts))
    return best


def random_network(rng: np.random.Generator) -> tuple[list[list[int]], Tables, list[Knapsack]]:
    sizes = rng.integers(1, 4, rng.integers(1, 6))
    costs = [rng.integers(-9, 20, size).tolist() for size in sizes]
    pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v and rng.random() < 0.3]
    tables: Tables = {}
    for u, v in pairs:
        table = rng.integers(-9, 30, (sizes[u], sizes[v]))
        table[rng.random(table.shape) < 0.1] = INF
        tables[u, v] = table.tolist()
    knapsacks: list[Knapsack] = []
    for _ in range(int(rng.integers(0, 4))):
        nodes = np.flatnonzero(rng.random(len(sizes)) < 0.6).tolist()
        usage = {v: rng.integers(-5, 20, sizes[v]).tolist() for v in nodes}
        if knapsacks and rng.random() < 0.5:
            usage = {**usage, **knapsacks[-1].usage}
        knapsacks.append(Knapsack(usage=usage, limit=int(rng.integers(-5, 40))))
    return costs, tables, knapsacks


def test_optima_are_those_of_enumeration_whatever_limits_each_knapsack_has() -> None:
    infeasible = 0
    for seed in range(150):
        costs, tables, knapsacks = random_network(np.random.default_rng(seed))
        best, solution = least(costs, tables, knapsacks), solve(cost_network(costs, tables, knapsacks))
        if best is None:
            infeasible += 1
            assert solution.status is Status.INFEASIBLE, seed
        else:
            assert (solution.status, solution.objective) == (Status.OPTIMAL, best), seed
    assert 10 < infeasible < 100


def test_a_usage_that_stays_from_row_to_row_is_one_item() -> None:
    rows = [Knapsack(usage={0: [1, 2], 1: [k, 1]}, limit=3) for k in range(4)]
    problem = cost_network([[0, 0], [0, 0]], {}, rows)
    assert problem.use_interval[problem.use_node == 0].tolist() == [[0, 4]]
    assert problem.use_interval[problem.use_node == 1].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(
    ("costs", "tables", "knapsacks", "message"),
    [
        ([[0, 1.5]], {}, [], r"costs\[0\] holds float64"),
        ([[0, 2**70]], {}, [], r"costs\[0\] holds object"),
        ([[[0]]], {}, [], r"costs\[0\] has shape \(1, 1\)"),
        ([[0, 1], [0]], {(0, 1): [[0, 1]]}, [], r"tables\[\(0, 1\)\] has shape \(1, 2\), not \(2, 1\)"),
        ([[0]], {(0, 1): [[0]]}, [], r"tables\[\(0, 1\)\] names node 1, but there are 1 nodes"),
        ([[0, 1]], {}, [Knapsack(usage={0: [1]}, limit=1)], r"knapsacks\[0\].usage\[0\] has shape \(1,\), not \(2,\)"),
        ([[0]], {}, [Knapsack(usage={-1: [1]}, limit=1)], r"knapsacks\[0\].usage names node -1"),
        ([[0]], {}, [Knapsack(usage={}, limit=0.5)], r"knapsacks\[0\].limit holds float64"),  # pyright: ignore[reportArgumentType]
        ([[]], {}, [], "node 0 has no strategy"),
    ],
)
def test_what_is_no_network_is_refused_with_its_place(
    costs: list[list[int]], tables: Tables, knapsacks: list[Knapsack], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cost_network(costs, tables, knapsacks)
