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

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

INF = 10**18  # IOPDDL's own mark for a forbidden choice


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

    @property
    def nodes(self) -> int:
        return len(self.start) - 1

    @property
    def edges(self) -> int:
        return len(self.edge_nodes)
