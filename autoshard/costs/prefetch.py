"""Prefetch: the equation before which XLA:GPU begins to gather each weight of a forward pass.

The scheduler begins a gather as late as possible so that no equation waits for it; gathers run one at a time. If
gathers take longer than the compute that hides them, some would have to begin before the program. Those are gathered
at its beginning, and lie in memory until their use: all weights of a forward pass with few tokens. Weights that are
gathered only for the backward pass, behind the barriers of `jax.checkpoint`, are not prefetched.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.costs.execution_order import feeding
from autoshard.ir.graph import Graph


def fetchable(graph: Graph) -> dict[int, int]:
    """Values that no contraction precedes and that contractions of the forward pass take: value → the first of these.

    The forward pass ends at the first contraction whose result no other contraction is computed from: its last
    value, or the first gradient of weights. Programs with loops have none.
    """
    if graph.loops:
        return {}
    feeds = feeding(graph)
    after: set[int] = set()  # has a contraction among its ancestors
    found: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        contracts = eqn.traits.contraction
        if contracts or not after.isdisjoint(graph.operands[e]):
            after.update(graph.results[e])
        for v in graph.operands[e] if contracts and not graph.again_of[e] else ():
            if v not in after and graph.avals[v].ndim:
                found.setdefault(v, e)
        if contracts and found and not any(feeds[v] for v in graph.results[e]):
            break
    return found


def begins(first_uses: Mapping[int, int], gather_s: Mapping[int, float], equation_s: Sequence[float]) -> dict[int, int]:
    """Value → the equation before which its gather begins.

    Args:
      first_uses: value → the first equation that takes it.
      gather_s: seconds that gathering it takes.
      equation_s: seconds of every equation of the program.
    """
    ready_s = np.concatenate([[0.0], np.cumsum(equation_s)])
    found: dict[int, int] = {}
    next_s = float("inf")
    for value in sorted(first_uses, key=lambda v: -first_uses[v]):
        next_s = min(next_s, float(ready_s[first_uses[value]])) - gather_s[value]
        latest = int(np.searchsorted(ready_s, next_s, side="right")) - 1
        found[value] = min(max(0, latest), first_uses[value])
    return found
