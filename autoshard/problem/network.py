r"""Problem: a cost-function network with memory rows and hinges, as integer arrays.

Choose one strategy $x_v$ per node to minimise

$$\sum_v c_v(x_v) + \sum_{(u,v)} C_{uv}(x_u, x_v) + \sum_w \max(0, h_w(x))$$

such that at every time point $t$ the usage of the items alive at $t$ is at most
the limit: $\sum_{i: t \in [s_i, e_i)} m_i(x_{v(i)}) \le M$. Each hinge $h_w$ is linear in
the strategies and the edge cells: communication that could hide, less the
compute behind which it hides.

Costs are integers (`unit_s` seconds each), so that sums are exact and equal inputs
give equal plans. A cost of `INF` or more is a forbidden choice.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

INF = 10**18  # IOPDDL's own mark for a forbidden choice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """How many values each strategy of a problem reshards inside its class, and each cell of an edge between two."""

    own: Int
    cells: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge:
    """One term max(0, Σ coefficient·chosen): positive entries hide, negative cover.

    `strategy` indexes `Problem.cost`, `cell` indexes `Problem.edge_cost`; both are
    sorted and without repeats.
    """

    strategy: Int
    strategy_coef: Int
    cell: Int
    cell_coef: Int
    constant: int = 0

    def __post_init__(self) -> None:
        for name, at, coef in (
            ("strategy", self.strategy, self.strategy_coef),
            ("cell", self.cell, self.cell_coef),
        ):
            if len(at) != len(coef):
                raise ValueError(f"a hinge has {len(at)} {name}s with {len(coef)} coefficients")
            if (np.diff(at) <= 0).any():
                raise ValueError(f"a hinge's {name} is not sorted, or has repeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The arrays. Node v's strategies are `cost[start[v]:start[v + 1]]`.

    Edge e joins `edge_nodes[e] = (u, v)`; its costs are row-major over u's and v's
    strategies at `edge_cost[edge_start[e]:edge_start[e + 1]]`. Usage item i belongs to
    node `use_node[i]`, is alive over the half-open `use_interval[i]`, and has one usage
    per strategy of that node at `usage[use_start[i]:use_start[i + 1]]`.
    """

    start: Int  # n + 1
    cost: Int  # one per strategy
    edge_nodes: Int  # m, 2
    edge_start: Int  # m + 1
    edge_cost: Int  # cells
    use_node: Int  # items
    use_interval: Int  # items, 2
    use_start: Int  # items + 1
    usage: Int  # bytes
    usage_limit: int | None = None
    hinges: tuple[Hinge, ...] = ()
    offset: int = 0  # part of the objective that no choice changes
    unit_s: float = 1.0
    names: tuple[str, ...] = field(default=())  # optional, one per node, for messages

    def __post_init__(self) -> None:
        self._check_types()
        _check_starts("start", self.start, "cost", self.cost)
        _check_starts("edge_start", self.edge_start, "edge_cost", self.edge_cost)
        _check_starts("use_start", self.use_start, "usage", self.usage)
        sizes = np.diff(self.start)
        for v in np.flatnonzero(sizes == 0):
            raise ValueError(f"node {v} has no strategy")
        for e, side in np.argwhere((self.edge_nodes < 0) | (self.edge_nodes >= self.nodes)):
            raise ValueError(f"edge {e} joins node {self.edge_nodes[e, side]}, but there are {self.nodes} nodes")
        rows, columns = sizes[self.edge_nodes].T
        cells = np.diff(self.edge_start)
        for e in np.flatnonzero(cells != rows * columns):
            raise ValueError(f"edge {e} has {cells[e]} cells for {rows[e]} × {columns[e]} strategies")
        for i in np.flatnonzero((self.use_node < 0) | (self.use_node >= self.nodes)):
            raise ValueError(f"usage item {i} belongs to node {self.use_node[i]}, but there are {self.nodes} nodes")
        usages = np.diff(self.use_start)
        for i in np.flatnonzero(usages != sizes[self.use_node]):
            raise ValueError(f"usage item {i} has {usages[i]} usages for {sizes[self.use_node[i]]} strategies")
        for at in np.flatnonzero(self.usage < 0):
            i = int(np.searchsorted(self.use_start, at, side="right")) - 1
            raise ValueError(f"usage item {i} uses {self.usage[at]} bytes")
        for h, hinge in enumerate(self.hinges):
            for name, at, most in (
                ("strategy", hinge.strategy, len(self.cost)),
                ("cell", hinge.cell, len(self.edge_cost)),
            ):
                for bad in at[(at < 0) | (at >= most)]:
                    raise ValueError(f"hinge {h} names {name} {bad} of {most}")
        if self.names and len(self.names) != self.nodes:
            raise ValueError(f"{len(self.names)} names for {self.nodes} nodes")

    def dump(self, path: str | Path) -> None:
        """Writes the problem as IOPDDL JSON (`.json`, `.json.gz`), which `problem.iopddl` describes and reads."""
        from autoshard.problem import iopddl

        iopddl.write(self, path)

    def _check_types(self) -> None:
        shapes = {"edge_nodes": (self.edges, 2), "use_interval": (len(self.use_node), 2)}
        for name in (
            "start", "cost", "edge_nodes", "edge_start", "edge_cost", "use_node", "use_interval", "use_start", "usage",
        ):  # fmt: skip
            array: NDArray = getattr(self, name)
            if array.dtype.kind != "i":
                raise ValueError(f"{name} holds {array.dtype}, not integers")
            if name in shapes and array.shape != shapes[name]:
                raise ValueError(f"{name} has shape {array.shape}, not {shapes[name]}")
        if (
            len(self.start) < 1
            or len(self.edge_start) != self.edges + 1
            or len(self.use_start) != len(self.use_node) + 1
        ):
            raise ValueError("start, edge_start and use_start have one entry more than nodes, edges and usage items")

    @property
    def nodes(self) -> int:
        return len(self.start) - 1

    @property
    def edges(self) -> int:
        return len(self.edge_nodes)


def _check_starts(name: str, starts: Int, of: str, values: Int) -> None:
    if starts[0] != 0:
        raise ValueError(f"{name} begins at {starts[0]}, not at 0")
    if starts[-1] != len(values):
        raise ValueError(f"{name} ends at {starts[-1]}, but {of} has {len(values)} entries")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"{name} decreases")


def chosen_cells(problem: Problem, choice: Int, edges: Int | None = None) -> Int:
    """The cell that a choice picks of every edge, or of some."""
    at = slice(None) if edges is None else edges
    u, v = problem.edge_nodes[at].T
    return problem.edge_start[:-1][at] + choice[u] * (problem.start[v + 1] - problem.start[v]) + choice[v]
