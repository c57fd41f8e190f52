"""Cost-function networks with knapsack rows, of whatever nodes, as problems.

A problem has one limit for all time points. Knapsack row r becomes time point r, and what its limit is below the
largest one is used there by every choice; usages below 0 are raised to 0 together with the limit. Neither changes
which choices fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from autoshard.problem.network import Int, Problem

Pair = tuple[int, int]
Item = tuple[int, int, int, Int]  # node, first row, row after the last, usage per strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """A row: the usages of the chosen strategies, one list per node that has any, add up to at most `limit`."""

    usage: Mapping[int, Sequence[int]]
    limit: int


def cost_network(
    costs: Sequence[Sequence[int]],
    tables: Mapping[Pair, ArrayLike],
    knapsacks: Sequence[Knapsack] = (),
    *,
    names: Sequence[str] = (),
) -> Problem:
    """Returns the problem of choosing one strategy per node at the least total cost, within every knapsack.

    All numbers are integers, of which sums are exact; scale what is not. A cost of `INF` forbids a choice.

    Args:
      costs: for each node the cost of each of its strategies.
      tables: for pairs of nodes (u, v) the cost of each strategy of u (rows) beside each of v (columns).
      knapsacks: limits on sums of usages. A solution's `peak_at` is the position of one of them.
      names: one per node, for messages.

    Raises:
      ValueError: a number is no integer, or a shape does not fit; the message says where.
    """
    own = [_integers(row, f"costs[{v}]", None) for v, row in enumerate(costs)]
    sizes = [len(row) for row in own]
    for pair in tables:
        _known(pair, sizes, f"tables[{pair}]")
    cells = [
        _integers(table, f"tables[{(u, v)}]", (sizes[u], sizes[v])).reshape(-1) for (u, v), table in tables.items()
    ]
    rows = [_nonnegative(row, sizes, f"knapsacks[{r}]") for r, row in enumerate(knapsacks)]
    limit = max([0, *(most for _, most in rows)]) if rows else None
    items = _items(rows, sizes, limit or 0)
    return Problem(
        start=_starts(sizes),
        cost=_joined(own),
        edge_nodes=np.array(list(tables), dtype=np.int64).reshape(-1, 2),
        edge_start=_starts([len(cell) for cell in cells]),
        edge_cost=_joined(cells),
        use_node=np.array([item[0] for item in items], dtype=np.int64),
        use_interval=np.array([item[1:3] for item in items], dtype=np.int64).reshape(-1, 2),
        use_start=_starts([len(item[3]) for item in items]),
        usage=_joined([item[3] for item in items]),
        usage_limit=limit,
        names=tuple(names),
    )


def _items(rows: Sequence[tuple[dict[int, Int], int]], sizes: Sequence[int], limit: int) -> list[Item]:
    """Returns the usage items of rows; one goes on over rows that follow each other and use the same."""
    items: list[Item] = []
    open_items: dict[int, int] = {}  # node → position in `items`
    for r, (usage, most) in enumerate(rows):
        for v, used in usage.items():
            at = open_items.get(v)
            if at is not None and items[at][2] == r and np.array_equal(items[at][3], used):
                items[at] = (v, items[at][1], r + 1, used)
                continue
            open_items[v] = len(items)
            items.append((v, r, r + 1, used))
        if most < limit:
            if not sizes:
                raise ValueError(f"knapsacks[{r}] has a limit of {most}, and there are no nodes")
            items.append((0, r, r + 1, np.full(sizes[0], limit - most, dtype=np.int64)))
    return items


def _nonnegative(row: Knapsack, sizes: Sequence[int], where: str) -> tuple[dict[int, Int], int]:
    """Returns a row's usages, none below 0, and the limit that belongs to them."""
    limit, raised = int(_integers(row.limit, f"{where}.limit", ())), dict[int, Int]()
    for v, usage in row.usage.items():
        _known((v,), sizes, f"{where}.usage")
        values = _integers(usage, f"{where}.usage[{v}]", (sizes[v],))
        least = min(int(values.min()), 0)
        raised[v], limit = values - least, limit - least
    return raised, limit


def _known(nodes: Sequence[int], sizes: Sequence[int], where: str) -> None:
    """Refuses nodes that do not exist."""
    for v in nodes:
        if not 0 <= v < len(sizes):
            raise ValueError(f"{where} names node {v}, but there are {len(sizes)} nodes")


def _integers(values: Any, where: str, shape: tuple[int, ...] | None) -> Int:
    """Returns values as an array of integers, refused unless they are some, of a shape if one is given."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where} holds {array.dtype}, not integers of 64 bits; scale and round what is not whole")
    if shape is None and array.ndim != 1:
        raise ValueError(f"{where} has shape {array.shape}, not one number per strategy")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{where} has shape {array.shape}, not {shape}: one number per strategy")
    return array.astype(np.int64)


def _starts(lengths: Sequence[int]) -> Int:
    """Returns where each of several arrays begins in all of them in a row, and the end."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)


def _joined(arrays: Sequence[Int]) -> Int:
    """Returns arrays in a row."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
