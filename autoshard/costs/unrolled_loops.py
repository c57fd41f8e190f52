"""Unrolled loops: collectives of several that run in step, trip by trip, and are merged.

A loop that the program asks to be unrolled as a whole is no loop to a compiler: its trips are equations in a row.
Several of them that take one array apart in every trip (the coefficients of Muon's iterations, a loop per weight) are
done in step by XLA:GPU, because fusions with several results take the array apart for all: no loop is ahead of
another, and a trip's all-reduces of all loops are merged as those outside of loops are (jax-cuda12-pjrt 0.10.2 and
0.12.0.1).
"""

from collections.abc import Iterator, Mapping

from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import LOOP_CONST

MERGED_BYTES = 30 << 20  # openxla/xla, the threshold of XLA:GPU's pass that combines all-reduces


def merged_bytes(graph: Graph) -> Mapping[int, int]:
    """Value of an unrolled loop → the bytes of all loops' that are merged with it, if all are whole."""
    found: dict[int, int] = {}
    for loops in _in_step(graph):
        bodies = [[v for v, of in enumerate(graph.value_loop) if of == loop] for loop in loops]
        for values in zip(*bodies, strict=True):
            together = min(sum(graph.avals[v].nbytes for v in values), MERGED_BYTES)
            found.update((v, together) for v in values)
    return found


def _in_step(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Groups of unrolled loops of equal equations that take one array apart, none of which follows another."""
    sharing: dict[tuple[object, ...], dict[int, None]] = {}
    for e, eqn in enumerate(graph.eqns):
        (source, *_), loop = graph.operands[e] or (-1,), graph.eqn_loop[e]
        if eqn.primitive == LOOP_CONST and eqn.operands[0].ndim and loop in graph.unrolled:
            sharing.setdefault((source, *_equations(graph, loop)), {})[loop] = None
    following = _loops_before(graph) if sharing else {}
    for loops in sharing.values():
        alone = tuple(loop for loop in loops if following.get(loop, frozenset[int]()).isdisjoint(loops))
        if len(alone) > 1:
            yield alone


def _equations(graph: Graph, loop: int) -> tuple[str, ...]:
    """The primitives of a loop's body."""
    return tuple(eqn.primitive for eqn, of in zip(graph.eqns, graph.eqn_loop, strict=True) if of == loop)


def _loops_before(graph: Graph) -> Mapping[int, frozenset[int]]:
    """Loop → those of whose results it is computed."""
    made: dict[int, frozenset[int]] = {}
    found: dict[int, frozenset[int]] = {}
    for e, (operands, results) in enumerate(zip(graph.operands, graph.results, strict=True)):
        loops = frozenset[int]().union(*(made.get(v, frozenset[int]()) for v in operands))
        if loop := graph.eqn_loop[e]:
            found[loop] = found.get(loop, frozenset[int]()) | (loops - {loop})
            loops |= {loop}
        made.update(dict.fromkeys(results, loops))
    return found
