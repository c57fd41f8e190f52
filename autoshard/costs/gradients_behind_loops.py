"""Gradients of weights outside of loops: made where a program makes them, or behind the loops that follow.

XLA:GPU schedules from a program's end to its begin, and takes first what most communication comes before
(jax-cuda12-pjrt 0.10.2 to 0.12). Between a head's gradient and the loop of the backward pass, whose place in the
program is behind the other's:

- the loop, if the gradient that enters it is a sum over devices that is reduced first: a vocabulary is split. The
  head's gradient is made right before the loop, beside all that is gathered for it, of scores that die then;
- the head's gradient, if nothing is reduced before the loop (data parallelism, FSDP): it is made behind the loop, and
  the gradient of the scores lives as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.execution_order import behind_loops, feeding, next_loop
from autoshard.ir.graph import Graph
from autoshard.rules.rule import ShardingRule


@dataclass(frozen=True, slots=True, eq=False)
class GradientsBehindLoops:
    """What is made behind loops if nothing is reduced before them.

    Attributes:
      behind: per value, the equation behind which it is made; 0 for all others.
      before: per value, the equation at which it is made if it does not wait; 0 for all others.
      across: value → its dimensions over which what enters the loop is summed up: split along one of them, nothing
        made of it waits. Of these gradients, what is made of them, their operands, and what these are made of; empty
        where a value has no such dimension.
    """

    behind: NDArray[np.int64]
    before: NDArray[np.int64]
    across: Mapping[int, frozenset[int]]


def gradients_behind_loops(
    graph: Graph, rules: Sequence[ShardingRule], spans: Mapping[int, tuple[int, int]]
) -> GradientsBehindLoops:
    """The gradients of weights that no equation outside of loops needs, and all that is made of them.

    Args:
      graph: the program.
      rules: of its equations.
      spans: loop → its first and last equation.
    """
    behind, before, feeds = (*np.zeros((2, len(graph.avals)), np.int64), feeding(graph))
    summed = _summed(graph, rules)
    across: dict[int, frozenset[int]] = {}
    read: set[int] = set()  # by gradients that may wait, element by element
    for e, (eqn, rule) in enumerate(zip(graph.eqns, rules, strict=True)):
        if graph.eqn_loop[e] or eqn.traits.link:
            continue
        operands, results = graph.operands[e], graph.results[e]
        begin = max((int(behind[v]) for v in operands), default=0)
        soonest = max((int(before[v]) for v in operands), default=0)
        inherited = [(dims, across[v]) for v, dims in zip(operands, rule.operands, strict=True) if v in across]
        if eqn.traits.contraction and not any(feeds[v] for v in results) and behind_loops(spans, e) > e:
            begin, soonest = max(begin, behind_loops(spans, e)), max(soonest, next_loop(graph, spans, e))
            inherited = [(dims, summed.get(v, frozenset())) for v, dims in zip(operands, rule.operands, strict=True)]
            read.update(operands)
        elif not begin:
            continue
        factors = {f for dims, split in inherited for d in split for f in dims[d]}
        for v, dims in zip(results, rule.results, strict=True):
            across[v] = frozenset(d for d, of in enumerate(dims) if factors & set(of))
        behind[list(results)], before[list(results)] = begin, soonest
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        if not (graph.eqn_loop[e] or eqn.traits.link or eqn.traits.contraction or read.isdisjoint(graph.results[e])):
            read.update(graph.operands[e])
    return GradientsBehindLoops(behind, before, {v: summed.get(v, frozenset()) for v in read} | across)


def _summed(graph: Graph, rules: Sequence[ShardingRule]) -> Mapping[int, frozenset[int]]:
    """Value → its dimensions over which contractions sum whose results enter a loop by no other contraction."""
    found: dict[int, frozenset[int]] = {}
    entering: set[int] = set()
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn, rule = graph.eqns[e], rules[e]
        if eqn.traits.enters_loop and not graph.value_loop[graph.operands[e][0]]:
            entering.update(graph.operands[e])
        if graph.eqn_loop[e] or eqn.traits.link:
            continue
        results = graph.results[e]
        factors: set[int] = set()
        if any(v in entering for v in results):
            if eqn.traits.contraction:
                factors = {f for f, factor in enumerate(rule.factors) if factor.reduction}
            else:
                entering.update(graph.operands[e])
        if not eqn.traits.contraction:
            factors |= {
                f for v, dims in zip(results, rule.results, strict=True) for d in found.get(v, ()) for f in dims[d]
            }
        for v, dims in zip(graph.operands[e], rule.operands, strict=True) if factors else ():
            split = frozenset(d for d, of in enumerate(dims) if factors & set(of))
            found[v] = found.get(v, frozenset()) | split
    return found
