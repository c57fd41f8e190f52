"""Random small problems, and their optimum by enumeration of every choice at once."""

from dataclasses import dataclass

import numpy as np

from autoshard.problem.cost_network import Knapsack, cost_network
from autoshard.problem.network import INF, Hinge, Int, Problem
from autoshard.solver import Solution, Status, evaluate
from autoshard.solver.program import Program


@dataclass(frozen=True, slots=True)
class Truth:
    """The optimum of a problem; None where no choice is finite, or none fits."""

    objective: int | None
    smallest_peak: int | None  # over finite choices


def random_problem(rng: np.random.Generator, *, nodes: int = 6, strategies: int = 4, hinges: int = 0) -> Problem:
    """Returns a network of few nodes; about a third of the edges join nodes functionally."""
    n = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, strategies + 1, n)
    start = np.concatenate([[0], np.cumsum(sizes)])
    cost = rng.integers(0, 30, start[-1])
    cost[rng.random(len(cost)) < 0.04] = INF
    pairs = [(u, v) for u in range(n) for v in range(n) if u != v and rng.random() < rng.choice([0.15, 0.35])]
    cells: list[Int] = []
    for u, v in pairs:
        table = rng.integers(0, 40, (sizes[u], sizes[v]))
        kind = rng.random()
        if kind < 0.3:
            follows = rng.integers(0, sizes[v], sizes[u])
            table[np.arange(sizes[v])[None, :] != follows[:, None]] = INF
        elif kind < 0.5:
            table = rng.integers(0, 9, (sizes[u], 1)) + rng.integers(0, 9, (1, sizes[v]))
        elif kind < 0.8:
            table[rng.random(table.shape) < 0.25] = INF
        cells.append(table.reshape(-1))
    edge_cost = np.concatenate([*cells, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    edge_start = np.concatenate([[0], np.cumsum([len(c) for c in cells])]).astype(np.int64)
    use_node = rng.integers(0, n, rng.integers(0, 2 * n + 1))
    begin = rng.integers(0, 6, len(use_node))
    usage = [rng.integers(0, 20, sizes[v]) for v in use_node]
    made: list[Hinge] = []
    for _ in range(hinges):
        strategy = np.flatnonzero(rng.random(len(cost)) < 0.4)
        cell = np.flatnonzero(rng.random(len(edge_cost)) < 0.2)
        made.append(
            Hinge(
                strategy=strategy,
                strategy_coef=rng.integers(-25, 26, len(strategy)),
                cell=cell,
                cell_coef=rng.integers(-25, 26, len(cell)),
                constant=int(rng.integers(-20, 21)),
            )
        )
    return Problem(
        start=start,
        cost=cost,
        edge_nodes=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        edge_start=edge_start,
        edge_cost=edge_cost,
        use_node=use_node,
        use_interval=np.stack([begin, begin + rng.integers(0, 4, len(begin))], axis=1),
        use_start=np.concatenate([[0], np.cumsum([len(u) for u in usage])]).astype(np.int64),
        usage=np.concatenate([*usage, np.zeros(0, dtype=np.int64)]).astype(np.int64),
        usage_limit=int(rng.integers(5, 60)),
        hinges=tuple(made),
        offset=int(rng.integers(-5, 6)),
    )


def random_knapsacks(rng: np.random.Generator, *, nodes: int) -> Problem:
    """Returns a network with rows of limits of their own, whose costs and usages may be below 0; some have no row."""
    plain = random_problem(rng, nodes=nodes)
    sizes = np.diff(plain.start)
    rows = [
        Knapsack(
            usage={v: rng.integers(-10, 20, sizes[v]).tolist() for v in range(len(sizes)) if rng.random() < 0.6},
            limit=int(rng.integers(-5, 40)),
        )
        for _ in range(int(rng.integers(0, 5)))
    ]
    costs = np.split(np.where(plain.cost < INF, plain.cost - 15, INF), plain.start[1:-1])
    tables: dict[tuple[int, int], Int] = {}
    for e, (u, v) in enumerate(plain.edge_nodes.tolist()):
        cells = plain.edge_cost[plain.edge_start[e] : plain.edge_start[e + 1]]
        tables[u, v] = np.where(cells < INF, cells - 20, INF).reshape(sizes[u], sizes[v])
    return cost_network([cost.tolist() for cost in costs], tables, rows)


def side_by_side(left: Problem, right: Problem) -> Problem:
    """Returns two problems as one that falls apart: the second lives after the first, within the same limit."""
    later = right.use_interval + int(left.use_interval.max(initial=0))
    return Problem(
        start=np.concatenate([left.start, right.start[1:] + left.start[-1]]),
        cost=np.concatenate([left.cost, right.cost]),
        edge_nodes=np.concatenate([left.edge_nodes, right.edge_nodes + left.nodes]),
        edge_start=np.concatenate([left.edge_start, right.edge_start[1:] + left.edge_start[-1]]),
        edge_cost=np.concatenate([left.edge_cost, right.edge_cost]),
        use_node=np.concatenate([left.use_node, right.use_node + left.nodes]),
        use_interval=np.concatenate([left.use_interval, later]),
        use_start=np.concatenate([left.use_start, right.use_start[1:] + left.use_start[-1]]),
        usage=np.concatenate([left.usage, right.usage]),
        usage_limit=left.usage_limit,
        offset=left.offset + right.offset,
    )


def brute_force(problem: Problem) -> Truth:
    """Prices every choice at once; for problems of a few thousand choices."""
    sizes = np.diff(problem.start)
    choice = np.stack(np.unravel_index(np.arange(np.prod(sizes)), tuple(sizes)))  # node × choice
    strategy = problem.start[:-1, None] + choice
    total = problem.cost[strategy].sum(axis=0) + problem.offset
    bad = (problem.cost[strategy] >= INF).any(axis=0)
    u, v = problem.edge_nodes.T
    cell = problem.edge_start[:-1, None] + choice[u] * sizes[v][:, None] + choice[v]
    total += problem.edge_cost[cell].sum(axis=0)
    bad |= (problem.edge_cost[cell] >= INF).any(axis=0)
    for hinge in problem.hinges:
        of_strategy = np.zeros(len(problem.cost), dtype=np.int64)
        of_strategy[hinge.strategy] = hinge.strategy_coef
        of_cell = np.zeros(len(problem.edge_cost), dtype=np.int64)
        of_cell[hinge.cell] = hinge.cell_coef
        value = of_strategy[strategy].sum(axis=0) + of_cell[cell].sum(axis=0) + hinge.constant
        total += np.maximum(0, value)
    chosen = problem.usage[problem.use_start[:-1, None] + choice[problem.use_node]]
    peak = np.zeros(choice.shape[1], dtype=np.int64)
    for t in range(int(problem.use_interval.max(initial=0))):
        alive = (problem.use_interval[:, 0] <= t) & (t < problem.use_interval[:, 1])
        peak = np.maximum(peak, chosen[alive].sum(axis=0))
    finite = ~bad
    fits = finite & (peak <= problem.usage_limit if problem.usage_limit is not None else True)
    return Truth(
        objective=int(total[fits].min()) if fits.any() else None,
        smallest_peak=int(peak[finite].min()) if finite.any() else None,
    )


def problem_of(program: Program) -> Problem:
    """Returns a program as a problem: memory row r is time point r, hinges come from the layers."""
    network = program.network
    start, cells = network.start, network.edge_cost.shape[1]
    first = int(network.sizes[0]) if network.nodes else 0
    rows = len(program.usage)
    use_node = np.concatenate([np.tile(np.arange(network.nodes), rows), np.zeros(rows, dtype=np.int64)])
    time = np.concatenate([np.repeat(np.arange(rows), network.nodes), np.arange(rows)])
    usage = np.concatenate([program.usage.reshape(-1), np.repeat(program.base, first)])
    return Problem(
        start=start,
        cost=network.cost[0],
        edge_nodes=network.edge_nodes,
        edge_start=network.edge_start,
        edge_cost=network.edge_cost[0],
        use_node=use_node,
        use_interval=np.stack([time, time + 1], axis=1),
        use_start=np.concatenate([[0], np.cumsum(network.sizes[use_node])]).astype(np.int64),
        usage=usage,
        usage_limit=program.limit,
        hinges=tuple(
            Hinge(
                strategy=np.arange(start[-1]),
                strategy_coef=network.cost[h],
                cell=np.arange(cells),
                cell_coef=network.edge_cost[h],
                constant=constant,
            )
            for h, constant in enumerate(program.hinge_constant, start=1)
        ),
        offset=network.offset,
    )


def fault(problem: Problem, truth: Truth, solution: Solution) -> str | None:
    """Returns what is wrong with a solution that was to be proven; None if nothing is."""
    if truth.objective is None:
        if solution.status is not Status.INFEASIBLE:
            return f"{solution.status}, and nothing fits"
        if solution.smallest_peak_bytes != truth.smallest_peak:
            return f"a smallest peak of {solution.smallest_peak_bytes}, not {truth.smallest_peak}"
        return None
    if solution.status is not Status.OPTIMAL or solution.objective != truth.objective:
        return f"{solution.status} at {solution.objective}, and the optimum is {truth.objective}"
    if solution.bound != truth.objective:
        return f"a bound of {solution.bound} at the optimum {truth.objective}"
    priced = evaluate(problem, solution.choice)
    if not priced.feasible or priced.objective != truth.objective:
        return f"a choice of {priced.objective}, feasible: {priced.feasible}, told as {truth.objective}"
    return None
