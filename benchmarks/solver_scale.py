"""Deep unrolled models with recomputation, of any size: `python -m benchmarks.solver_scale 10000 100000 1000000`.

A layer is a chain of operations with a residual. Per operation there are five nodes: the layout of its result, what is
*kept* of it for the backward pass (a layout, or nothing), what is *repeated* there (a layout, or nothing), which of
the two is *recalled*, and its gradient. Kept values use memory from the forward to the backward pass, and the limit is
half of what it takes to keep everything, however it is laid out. Nodes are numbered in the order of time. Arrays are
written whole, by rule, so that a million nodes take no more memory than their arrays.

Each size is solved in a process of its own, with the clock of its processor time.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem import INF, Problem
from autoshard.problem.network import Int

OPERATIONS = 20  # of a layer
LAYOUTS = 4
OPTIONAL = LAYOUTS + 1  # layouts, or nothing: the last
RECALLED = 2 * LAYOUTS  # layouts of what is kept, then of what is repeated
FORWARD, BACKWARD = 2, 3  # nodes per operation and pass
SHARE = 0.5  # of the peak if all is kept in the layouts of least memory
PASSES = 5  # that are timed
COLUMNS = (
    "nodes", "edges", "cells", "presolve s", "pass s", "ns / cell and pass", "first choice s", "s", "gap", "GB",
    "GB of MIPs",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Edges between two nodes of every operation, or of every operation but the first: positions and tables."""

    left: Int
    right: Int
    tables: Int  # edges, rows, columns


def generate(nodes: int, seed: int) -> Problem:
    """Returns a model of about so many nodes; equal seeds give equal models."""
    rng = np.random.default_rng(seed)
    layers = max(round(nodes / (OPERATIONS * (FORWARD + BACKWARD))), 1)
    count = layers * OPERATIONS
    op = np.arange(count)
    made, keep = FORWARD * op, FORWARD * op + 1
    again = FORWARD * count + BACKWARD * (count - 1 - op)
    recall, gradient = again + 1, again + 2
    sizes = np.empty((FORWARD + BACKWARD) * count, dtype=np.int64)
    for at, size in ((made, LAYOUTS), (keep, OPTIONAL), (again, OPTIONAL), (recall, RECALLED), (gradient, LAYOUTS)):
        sizes[at] = size
    start = np.concatenate([[0], np.cumsum(sizes)])
    cost = np.zeros(start[-1], dtype=np.int64)
    weight = np.tile(2 ** rng.integers(8, 14, OPERATIONS), layers)  # bytes of a result: layers are alike
    shards = np.array([1, 2, 2, 4])
    usage = weight[:, None] // shards
    work = weight[:, None] * rng.integers(1, 8, (count, 1)) // (8 * shards) + rng.integers(0, 64, (count, LAYOUTS))
    for at, factor in ((made, 1), (again, 1), (gradient, 2)):
        cost[start[at][:, None] + np.arange(LAYOUTS)] = factor * work

    before, after = op[:-1], op[1:]
    inner = op[op % OPERATIONS == OPERATIONS - 1]
    move = np.where(np.eye(LAYOUTS, dtype=bool), 0, 1) * rng.integers(1, 16, (LAYOUTS, LAYOUTS))

    def moved(at: Int) -> Int:
        """What resharding between layouts costs, for results of operations."""
        return move * (weight[at] // 16)[:, None, None]

    def optional(table: Int) -> Int:
        return np.pad(table, ((0, 0), (0, 0), (0, 1)))

    def recalls(at: Int, first: int) -> Int:
        table = np.zeros((len(at), OPTIONAL, RECALLED), dtype=np.int64)
        table[:, :LAYOUTS, first : first + LAYOUTS] = moved(at)
        table[:, LAYOUTS, first : first + LAYOUTS] = INF
        return table

    makers: list[Callable[[], Block]] = [
        lambda: Block(left=made[before], right=made[after], tables=moved(before)),
        lambda: Block(left=made[inner - OPERATIONS + 1], right=made[inner], tables=moved(inner)),
        lambda: Block(left=made, right=keep, tables=optional(moved(op))),
        lambda: Block(left=keep, right=recall, tables=recalls(op, 0)),
        lambda: Block(left=again, right=recall, tables=recalls(op, LAYOUTS)),
        lambda: Block(
            left=recall[before], right=again[after], tables=optional(np.concatenate([moved(before)] * 2, axis=1))
        ),
        lambda: Block(left=recall, right=gradient, tables=np.concatenate([moved(op)] * 2, axis=1)),
        lambda: Block(left=gradient[after], right=gradient[before], tables=moved(before)),
    ]
    ends: list[Int] = []
    tables: list[Int] = []
    lengths: list[Int] = []
    for make in makers:
        block = make()
        ends.append(np.stack([block.left, block.right], axis=1))
        tables.append(block.tables.reshape(-1))
        lengths.append(np.full(len(block.left), block.tables[0].size if len(block.left) else 0))
    back = 2 * count - 1 - op
    interval = np.concatenate(
        [np.stack(pair, axis=1) for pair in ((op, op + 1), (op, back + 1), (back - 1, back + 1), (back, back + 1))]
    )
    nothing = np.zeros((count, 1), dtype=np.int64)
    used = [usage, np.append(usage, nothing, axis=1), np.append(usage, nothing, axis=1), usage]
    problem = Problem(
        start=start,
        cost=cost,
        edge_nodes=np.concatenate(ends),
        edge_start=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]),
        edge_cost=np.concatenate(tables),
        use_node=np.concatenate([made, keep, again, gradient]),
        use_interval=interval,
        use_start=np.concatenate([[0], np.cumsum(np.concatenate([np.full(count, u.shape[1]) for u in used]))]),
        usage=np.concatenate([u.reshape(-1) for u in used]),
    )
    return replace(problem, usage_limit=int(SHARE * usage.min(axis=1).sum()))


def measured(nodes: int, seed: int, time_limit_s: float) -> dict[str, float]:
    """Generates, reduces and solves one model; returns its row."""
    from autoshard.solver import solve
    from autoshard.solver.dual.dual import plain_dual, shifted
    from autoshard.solver.presolve.reduction import reduced
    from autoshard.solver.tuning import TUNED

    solve(generate(500, seed), time_limit_s=2.0)  # compiles and loads
    problem = generate(nodes, seed)
    begin = time.process_time()
    network = reduced(problem, TUNED.presolve, lambda: 1.0)
    assert network is not None
    presolve_s = time.process_time() - begin
    network, _, shift = shifted(network, ())
    dual = plain_dual(network, shift, TUNED.dual)
    dual.improve(1)
    begin = time.process_time()
    dual.improve(PASSES)
    pass_s = (time.process_time() - begin) / PASSES
    cells = network.edge_cost.size
    del network, dual
    first: list[float] = []

    def tell(best: int | None, _bound: int | None, elapsed_s: float) -> None:
        if best is not None:
            first.append(elapsed_s)

    solution = solve(problem, time_limit_s=time_limit_s, on_progress=tell, clock=time.process_time)
    kilobytes = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "nodes": problem.nodes,
        "edges": problem.edges,
        "cells": cells,
        "presolve s": presolve_s,
        "pass s": pass_s,
        "ns / cell and pass": 1e9 * pass_s / cells,
        "first choice s": first[0] if first else float("nan"),
        "s": solution.wall_s,
        "gap": solution.gap,
        "GB": kilobytes[0] * 1024 / 1e9,
        "GB of MIPs": kilobytes[1] * 1024 / 1e9,
    }


def line(row: dict[str, float]) -> str:
    """Returns a row as a line of a Markdown table."""
    shown = [f"{row[column]:,.0f}" for column in COLUMNS[:3]] + [f"{row[column]:.3g}" for column in COLUMNS[3:8]]
    shown += [f"{row['gap']:.2%}", *(f"{row[column]:.2f}" for column in COLUMNS[9:])]
    return f"| {' | '.join(shown)} |"


def main(arguments: list[str] | None = None) -> None:
    """Prints a row per size, each measured in a process of its own."""
    parser = argparse.ArgumentParser(description="Solve deep unrolled models of any size.")
    parser.add_argument("nodes", nargs="+", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=100.0, metavar="S", help="processor time per model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measured(options.nodes[0], options.seed, options.time_limit)))
        return
    print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}", flush=True)
    for nodes in options.nodes:
        command = [sys.executable, "-m", "benchmarks.solver_scale", str(nodes), "--child"]
        command += ["--seed", str(options.seed), "--time-limit", str(options.time_limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(line(json.loads(done.stdout)), flush=True)


if __name__ == "__main__":
    main()
