"""Windows: what communication can hide behind which compute.

A collective hides behind contractions that neither precede nor follow it. Outside of
loops there are two windows: EARLY, for values that depend on no contraction (gathers of
weights), and LATE, for values on which no contraction depends (reductions of
gradients). The first hides behind the contractions that precede every late value, the
second behind the others.

The body of a loop is a window of its own: what depends neither on the trip before nor
on a contraction (gathers of this layer's weights), and what feeds neither a contraction
nor the next trip (reductions of this layer's gradients), hides behind the contractions
of the body. XLA:GPU moves nothing into another trip: what the first contraction of a body
waits for is exposed there, and so is the reduction of what its last contraction makes
(the scheduler keeps the largest gradient for last).
"""

from dataclasses import dataclass

from autoshard.costs import is_contraction
from autoshard.graph import LINKS, Graph

EARLY, LATE = 0, 1
OUTSIDE = 2  # windows outside of loops; the body of loop k is window OUTSIDE + k − 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The window in which each value's resharding can hide (or None), and in which each equation's compute counts."""

    of_value: tuple[int | None, ...]
    of_equation: tuple[int, ...]
    count: int


def combined(window: int | None) -> bool:
    """Whether the compilers merge a window's collectives into buckets: they do outside of loops."""
    return window is not None and window < OUTSIDE


def windows(graph: Graph, platform: str = "cpu") -> Windows:
    """The windows of a graph, for a platform as JAX names it."""
    outer = _outside(graph)
    inner = _inside(graph)
    if platform == "cuda":
        inner -= _awaited(graph) | _last(graph, inner)
    of_value: list[int | None] = []
    for v, loop in enumerate(graph.loop):
        if loop:
            of_value.append(OUTSIDE + loop - 1 if v in inner else None)
        else:
            of_value.append(EARLY if v in outer.early else LATE if v in outer.late else None)
    of_equation = tuple(
        OUTSIDE + loop - 1 if loop else (EARLY if outer.forward >> e & 1 else LATE)
        for e, loop in enumerate(graph.loop_of)
    )
    return Windows(of_value=tuple(of_value), of_equation=of_equation, count=OUTSIDE + graph.loops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outside:
    early: frozenset[int]
    late: frozenset[int]
    forward: int  # bit set of the contractions before every late value


def _outside(graph: Graph) -> _Outside:
    before: dict[int, int] = {}  # value → bit set of contractions among its ancestors
    for e, eqn in enumerate(graph.eqns):
        bits = 1 << e if is_contraction(eqn) else 0
        for v in graph.operands[e]:
            bits |= before.get(v, 0)
        for v in graph.results[e]:
            before[v] = bits
    feeds: set[int] = set()  # values on which some contraction depends
    for e in range(len(graph.eqns) - 1, -1, -1):
        if is_contraction(graph.eqns[e]) or any(v in feeds for v in graph.results[e]):
            feeds.update(graph.operands[e])
    late = frozenset(v for v in before if before[v] and v not in feeds)
    common = -1
    for e, eqn in enumerate(graph.eqns):
        if is_contraction(eqn) and any(v in late for v in graph.results[e]):
            common &= before[graph.results[e][0]] & ~(1 << e)
    early = frozenset(v for v in range(len(graph.avals)) if not before.get(v))
    return _Outside(early=early, late=late, forward=common)


def _inside(graph: Graph) -> frozenset[int]:
    """Values of loop bodies whose resharding can hide."""
    carried: set[int] = set()  # depends on the trip before
    after: set[int] = set()  # has a contraction of the body among its ancestors
    for e, eqn in enumerate(graph.eqns):
        entering = eqn.primitive in ("loop_const", "loop_slice", "loop_carry")
        for v in graph.results[e]:
            if eqn.primitive == "loop_carry" or (not entering and any(o in carried for o in graph.operands[e])):
                carried.add(v)
            if is_contraction(eqn) or (not entering and any(o in after for o in graph.operands[e])):
                after.add(v)
    feeds: set[int] = set()  # feeds a contraction of the body, or the next trip
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        leaving = eqn.primitive in LINKS and eqn.primitive != "branch_join"
        onward = not leaving and any(v in feeds for v in graph.results[e])
        if is_contraction(eqn) or eqn.primitive == "loop_result" or onward:
            feeds.update(graph.operands[e])
    return frozenset(
        v
        for v, loop in enumerate(graph.loop)
        if loop and ((v not in carried and v not in after) or (v in after and v not in feeds))
    )


def _last(graph: Graph, inner: frozenset[int]) -> frozenset[int]:
    """Of every loop's body, the largest result of a contraction whose reduction could hide, and what is made of it.

    Of equally large ones the last.
    """
    largest: dict[int, int] = {}
    for e, eqn in enumerate(graph.eqns):
        loop = graph.loop_of[e]
        if not loop or not is_contraction(eqn):
            continue
        for v in graph.results[e]:
            if v in inner and (loop not in largest or graph.avals[v].nbytes >= graph.avals[largest[loop]].nbytes):
                largest[loop] = v
    found = set(largest.values())
    for e, operands in enumerate(graph.operands):
        if not found.isdisjoint(operands):
            found.update(v for v in graph.results[e] if v in inner)
    return frozenset(found)


def _awaited(graph: Graph) -> frozenset[int]:
    """Values of a loop's body that its first contraction is computed from."""
    awaited: set[int] = set()
    seen: set[int] = set()  # loops
    made_by = graph.producers()
    for e, eqn in enumerate(graph.eqns):
        loop = graph.loop_of[e]
        if not loop or loop in seen or not is_contraction(eqn):
            continue
        seen.add(loop)
        left = list(graph.operands[e])
        while left:
            value = left.pop()
            if value in awaited or graph.loop[value] != loop:
                continue
            awaited.add(value)
            left.extend(graph.operands[made_by[value][0]] if value in made_by else ())
    return frozenset(awaited)
