"""Shared gathers: the uses of a value that XLA serves by one gather.

What `jax.checkpoint` repeats for the backward pass reads its operands from behind a barrier, and is pinned
there: every compiler gathers them once more for a repeated call.

libtpu also keeps two equal gathers if they are far apart, so that the gathered value need not live in
between. They are far apart if the longest paths from their users to the end of the computation
differ by more than a threshold (openxla/xla schedule_aware_collective_ops_cse.cc). In a program
of unrolled layers most weights are gathered once more for the backward pass.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import CONSTRAINT

# In equations of a jaxpr. libtpu 0.0.51 shares a gather between uses that are 76 or 85 apart (weights of
# mlp-8k, and of llama3-8b's backward loop, `benchmarks.verification`), 0.0.52 one between those that are 104
# apart (from one layer of mixtral to its head), and none between uses that are 110 apart (of mixtral's
# last layer). The pass's own tests have 100, in instructions.
NEAR = 107


# Uses that are no farther apart are in one group by any count of instructions: of llama3-8b's backward loop libtpu
# 0.0.52 gathers `wk` (82) once for v5e:4x4 and v5p:4x4x2, `wq` (85) for the first alone.
SURE = 82


def groups(graph: Graph, *, far: bool) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Value → the equations that take it for contractions, in groups that share a gather; of those with several groups.

    Args:
      graph: the program.
      far: whether the compiler gathers once more for a use that is far from the one before.
    """
    if not far and not any(graph.again_of):
        return {}
    found: dict[int, list[tuple[int, ...]]] = {}
    for value, uses in _uses(graph):
        parts: list[list[int]] = [[]] if uses else []
        before = uses[0][1] if uses else 0
        for e, height in uses:
            if far and before - height > NEAR:
                parts.append([])
            if not parts[-1] or e not in graph.optional:
                before = height  # an optional use may be left out: those behind it are as far from those before it
            parts[-1].append(e)
        found.setdefault(value, []).extend(tuple(sorted(part)) for part in parts)
    return {value: tuple(sorted(parts)) for value, parts in found.items() if len(parts) > 1}


def in_groups(parts: Sequence[int], nbytes: Sequence[int]) -> int | None:
    """Which operand of a dot XLA gathers inside of groups of devices; None: neither.

    If free dimensions of both operands are split, XLA groups the devices by those of one: the one for which repeating
    the other operand in every group is less, on a tie the right one. That operand is gathered in each group
    (openxla/xla dot_handler.cc).

    Args:
      parts: into how many parts the free dimensions of each operand are split.
      nbytes: the bytes of each operand on a device, where it lies.
    """
    if min(parts) == 1:
        return None
    return int(parts[0] * nbytes[1] >= parts[1] * nbytes[0])


def doubtful(graph: Graph) -> frozenset[int]:
    """Values with uses in one group that are so far apart that libtpu, by its own instructions, may see two.

    Pinned where they are gathered they are gathered once.
    """
    return frozenset(
        value
        for value, uses in _uses(graph)
        if any(SURE < before - height <= NEAR for (_, before), (_, height) in pairwise(uses))
    )


def _uses(graph: Graph) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Values and the equations that take them for contractions, or give them a name for these.

    By call of `jax.checkpoint`: with their heights, the highest first.
    """
    heights, again = _heights(graph), graph.again_of

    @cache
    def multiplies(e: int) -> bool:
        eqn = graph.eqns[e]
        named = eqn.traits.renames and not eqn.traits.link
        return eqn.traits.contraction or (
            named and any(multiplies(u) for u, _ in graph.consumers.get(graph.results[e][0], ()))
        )

    for value, uses in graph.consumers.items():
        equations = {e for e, _ in uses if multiplies(e)}
        for _, inside in groupby(sorted(equations, key=lambda e: (again[e], -heights[e], e)), key=again.__getitem__):
            yield value, [(e, heights[e]) for e in inside]


def _heights(graph: Graph) -> Sequence[int]:
    """Equation → the length of the longest path from it to the end of its loop's body, or of the program.

    Constraints are no instructions of the partitioned program.
    """
    heights = [0] * len(graph.eqns)
    consumers = graph.consumers
    for e in range(len(graph.eqns) - 1, -1, -1):
        users = {u for v in graph.results[e] for u, _ in consumers.get(v, ()) if graph.eqn_loop[u] == graph.eqn_loop[e]}
        own = graph.eqns[e].primitive != CONSTRAINT
        heights[e] = max((heights[u] for u in users), default=0) + own
    return heights
