"""Writes made-up IOPDDL instances with the traits of real families: `python -m benchmarks.iopddl_families DIR`.

A program is made layer by layer, forward and backward; every tensor is a node whose strategies are
its layouts on a two-axis mesh, edges cost the resharding between layouts, a contraction costs the
reduction of its partial sums, and a tensor lives from its making to its last use. The limit is 1.1
times the smallest peak that the solver finds, as in the public instances (A, G, M and S: 1.10).
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from autoshard.problem import iopddl
from autoshard.problem.network import INF, Int, Problem
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.primal.smallest_peak import approximate_peak

SLACK = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The shape of a family's programs."""

    mesh: tuple[int, int]
    layers: int
    ops: int  # of a layer
    dims: tuple[int, ...]  # ranks of tensors, drawn evenly
    skip: float  # chance that an operation also reads an earlier layer
    aliased: float  # chance that an operation must have its operand's layout
    training: bool  # a backward pass that reads what the forward pass made
    fan: int = 0  # operations that read one shared tensor (a hub), per layer
    free_edges: float = 0.0  # chance that resharding costs nothing
    scale: int = 1  # factor on every cost
    slack: float = SLACK  # limit over smallest peak


FAMILIES = {
    "graph-network": Family(mesh=(2, 16), layers=40, ops=60, dims=(1, 2, 2, 3), skip=0.3, aliased=0.2, training=True),
    "message-passing": Family(
        mesh=(4, 8), layers=80, ops=30, dims=(2, 3), skip=0.1, aliased=0.0, training=False, fan=6
    ),
    "diffusion": Family(mesh=(4, 8), layers=120, ops=120, dims=(2, 3, 4), skip=0.2, aliased=0.1, training=True),
    "u-net": Family(mesh=(4, 8), layers=30, ops=60, dims=(3, 4, 4), skip=0.4, aliased=0.3, training=True),
    "decoder": Family(mesh=(8, 8), layers=60, ops=80, dims=(1, 2, 3), skip=0.05, aliased=0.5, training=True, fan=8),
    "inference": Family(mesh=(2, 16), layers=12, ops=60, dims=(2, 3), skip=0.1, aliased=0.4, training=False),
    "tight": Family(mesh=(2, 16), layers=30, ops=60, dims=(2, 3), skip=0.3, aliased=0.2, training=True, slack=1.01),
    "free-edges": Family(
        mesh=(4, 8), layers=30, ops=60, dims=(2, 3), skip=0.3, aliased=0.1, training=True, free_edges=0.7
    ),
    "huge-costs": Family(
        mesh=(2, 16), layers=10, ops=60, dims=(2, 3), skip=0.2, aliased=0.2, training=True, scale=10**6
    ),
    "large": Family(mesh=(4, 8), layers=450, ops=120, dims=(1, 2, 2), skip=0.05, aliased=0.5, training=True),
}


@cache
def layouts(rank: int, mesh: tuple[int, int]) -> tuple[tuple[tuple[int, int], ...], Int]:
    """Returns the dimension that each mesh axis splits (−1: none), and the shards of each layout."""
    found = tuple(itertools.product(range(-1, rank), repeat=2))
    shards = np.array([(mesh[0] if a >= 0 else 1) * (mesh[1] if b >= 0 else 1) for a, b in found])
    return found, shards


@cache
def moved(source: int, target: int, mesh: tuple[int, int]) -> Int:
    """Returns, in thousandths of the whole, the share of a tensor that resharding sends per device."""
    (left, _), (right, shards) = layouts(source, mesh), layouts(target, mesh)
    low = min(source, target)
    out = np.zeros((len(left), len(right)), dtype=np.int64)
    for i, j in itertools.product(range(len(left)), range(len(right))):
        kept = 1
        for axis, size in enumerate(mesh):
            if left[i][axis] == right[j][axis] and left[i][axis] < low:
                kept *= size
        gathered = 1000 // kept - 1000 // int(shards[j]) if kept < shards[j] else 1000 // kept - 1000 // max(kept, 1)
        differs = any(a != b and a >= 0 for a, b in zip(left[i], right[j], strict=True))
        out[i, j] = gathered + (1000 // int(shards[j]) if differs else 0)
    return out


def generate(family: Family, seed: int) -> Problem:
    """Returns a made-up instance; equal seeds give equal instances."""
    rng = np.random.default_rng(seed)
    rank: list[int] = []
    size: list[int] = []  # bytes
    edges: list[tuple[int, int, bool]] = []  # operand, result, whether aliased
    forward: list[int] = []

    def op(operands: list[int], width: int) -> int:
        v = len(rank)
        first = operands[0] if operands else None
        aliased = first is not None and rng.random() < family.aliased
        rank.append(rank[first] if first is not None and aliased else int(rng.choice(family.dims)))
        size.append(size[first] if first is not None and aliased else width)
        edges.extend((u, v, aliased and u == first) for u in dict.fromkeys(operands))
        return v

    before = [op([], 2**24)]
    for _ in range(family.layers):
        width = int(2 ** rng.integers(18, 27))
        hub = op([before[-1]], width)
        weights = [op([], int(2 ** rng.integers(16, 24))) for _ in range(max(family.ops // 10, 1))]
        layer = [hub]
        for k in range(family.ops):
            operands = [hub] if k < family.fan else [layer[-1 - int(rng.integers(min(3, len(layer))))]]
            if rng.random() < 0.3:
                operands.append(weights[int(rng.integers(len(weights)))])
            if rng.random() < 0.2:
                operands.append(layer[int(rng.integers(len(layer)))])
            if rng.random() < family.skip / 5:
                operands.append(before[int(rng.integers(len(before)))])
            layer.append(op(operands, max(width >> int(rng.integers(0, 5)), 4096)))
        before = [*before[-3:], layer[-1]]
        forward.extend(layer)
    if family.training:
        gradient = forward[-1]
        for v in reversed(forward):
            gradient = op([gradient, v], size[v])

    n = len(rank)
    last = np.arange(n)
    for u, v, _ in edges:
        last[u] = max(last[u], v)
    counts = [len(layouts(r, family.mesh)[0]) for r in rank]
    start = np.concatenate([[0], np.cumsum(counts)])
    cost = np.zeros(start[-1], dtype=np.int64)
    usage = np.zeros(start[-1], dtype=np.int64)
    contracts = rng.random(n) < 0.4
    for v in range(n):
        found, shards = layouts(rank[v], family.mesh)
        at = slice(int(start[v]), int(start[v + 1]))
        usage[at] = size[v] // shards
        if contracts[v]:
            # partial sums over an axis that splits nothing are reduced; computing is the dearer, the fewer shards
            idle = np.array([a < 0 or b < 0 for a, b in found])
            cost[at] = family.scale * (size[v] // shards // 64 * idle + size[v] // shards // 16)
        if rng.random() < 0.05:
            cost[at][rng.random(len(found)) < 0.3] = INF
            cost[start[v]] = 0
    tables: list[Int] = []
    for u, v, aliased in edges:
        table = moved(rank[u], rank[v], family.mesh) * (size[u] // 1024) * family.scale
        if rng.random() < family.free_edges:
            table = np.zeros_like(table)
        if aliased:
            table = np.where(np.eye(len(table), dtype=bool), 0, INF)
            cost[start[v] : start[v + 1]] = np.where(
                cost[start[v] : start[v + 1]] >= INF, 0, cost[start[v] : start[v + 1]]
            )
            cost[start[u] : start[u + 1]] = np.where(
                cost[start[u] : start[u + 1]] >= INF, 0, cost[start[u] : start[u + 1]]
            )
        tables.append(table.reshape(-1))
    problem = Problem(
        start=start,
        cost=cost,
        edge_nodes=np.array([(u, v) for u, v, _ in edges]),
        edge_start=np.concatenate([[0], np.cumsum([len(table) for table in tables])]),
        edge_cost=np.concatenate(tables),
        use_node=np.arange(n),
        use_interval=np.stack([np.arange(n), last + 1], axis=1),
        use_start=start,
        usage=usage,
        usage_limit=0,
    )
    peak = approximate_peak(Incumbent(problem=problem, time_limit_s=60.0))
    assert peak is not None
    return replace(problem, usage_limit=int(family.slack * peak.peak_bytes))


def main() -> None:
    """Writes the instances of every family, or of those named."""
    parser = argparse.ArgumentParser(description="Write made-up IOPDDL instances.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.family or FAMILIES:
        problem = generate(FAMILIES[name], options.seed)
        path = options.folder / f"{name}.json.gz"
        iopddl.write(problem, path, name=name)
        print(f"{path}: {problem.nodes:,} nodes, {problem.edges:,} edges, {len(problem.edge_cost):,} cells")


if __name__ == "__main__":
    main()
