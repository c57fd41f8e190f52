"""Memory: which values lie in a device's memory, and from when to when.

XLA writes to memory what an equation that does not fuse makes or takes (a contraction,
a gather, a loop's argument), what a reduction returns, and what leaves the program.
Every other value is *recomputed* inside the fusions that read it, from the values that
lie in memory, so these live on until the last such fusion: the f32 scores of a softmax
are never stored, but their bf16 source outlives the forward pass. A value that several
equations read and that is made of more bytes than it has is stored all the same where
that moves fewer bytes (a sum of two residual branches is read, not added up again).

A transpose, a reshape or a constraint is its operand under another name.

A loop holds what it reads for as long as it runs, and what it stacks from its first trip on:
what makes that writes it there, and it lies nowhere else. A contraction on which no other
depends (a weight's gradient) is in no hurry: XLA's GPU scheduler puts it behind all that is,
at the end of a loop's body, and behind the loops that follow it, so its operands live until
then.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs import is_contraction
from autoshard.graph import Graph

# Equations whose result is their operand under another name.
RENAMES = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "sharding_constraint", "loop_const"})

# Links into a loop's body: what they take lies in memory while the loop runs.
_INTO = frozenset({"loop_const", "loop_slice", "loop_carry"})

# Equations that end a fusion: their result is stored, their operands need not be.
ENDS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"})

# What XLA does not compute twice, once for what it stacks and once for who else reads it.
_COSTLY = frozenset(
    {"cbrt", "cos", "div", "erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin"}
    | {"sqrt", "tan", "tanh"}
)

_MOST_SOURCES = 16  # stored values that one expression is recomputed from; XLA bounds a fusion's parameters, too


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """Of every value, the equations [start, end) between which it is alive.

    `stored`: whether it has memory of its own; `named`: whether it is a stored value under
    another name.
    """

    stored: NDArray[np.bool_]
    named: NDArray[np.bool_]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def lives(graph: Graph, fuses: Sequence[bool]) -> Lives:
    """The lives of a graph's values.

    Args:
      graph: the program.
      fuses: per equation, whether XLA fuses it with its neighbours.
    """
    spans = _spans(graph)
    held = _held(graph, fuses)
    named = np.zeros(len(graph.avals), bool)
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive in RENAMES:
            named[graph.results[e][0]] = held[graph.results[e][0]]
    last = _last_uses(graph, fuses, held & ~named, spans)
    start = np.zeros(len(graph.avals), np.int64)
    end = np.zeros(len(graph.avals), np.int64)
    for e, results in enumerate(graph.results):
        begin = e
        if graph.eqns[e].primitive == "loop_stack":
            loop = graph.loop[graph.operands[e][0]]
            begin = spans[loop][0] if loop else e
        start[list(results)] = begin
    end[:] = np.maximum(last, start) + 1
    end[list(graph.outputs)] = len(graph.eqns) + 1
    return Lives(stored=held & ~named, named=named, start=start, end=end)


def _spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """Loop → its first and last equation."""
    spans: dict[int, tuple[int, int]] = {}
    for e, loop in enumerate(graph.loop_of):
        if loop:
            spans[loop] = (spans.get(loop, (e, e))[0], e)
    return spans


def _held(graph: Graph, fuses: Sequence[bool]) -> NDArray[np.bool_]:
    """Which values lie in memory, be it under another's name."""
    held = np.zeros(len(graph.avals), bool)
    made = np.zeros(len(graph.avals), bool)
    costly = np.zeros(len(graph.avals), bool)
    held[list(graph.inputs)] = True
    held[list(graph.outputs)] = True
    readers = np.zeros(len(graph.avals), np.int64)
    for e, eqn in enumerate(graph.eqns):
        operands, results = list(graph.operands[e]), list(graph.results[e])
        made[results] = True
        costly[results] = eqn.primitive in _COSTLY
        readers[operands] += 1
        if eqn.primitive in _INTO:
            held[operands] = True
        elif eqn.primitive in ENDS or eqn.primitive == "loop_stack":
            held[results] = True
        elif not fuses[e] and eqn.primitive not in RENAMES:
            held[operands] = True
            held[results] = True
    for e, eqn in enumerate(graph.eqns):
        if eqn.primitive == "loop_stack":
            v = graph.operands[e][0]
            held[v] |= costly[v] and readers[v] > 1
    for e in range(len(graph.eqns) - 1, -1, -1):
        if graph.eqns[e].primitive in RENAMES and held[graph.results[e][0]]:
            held[graph.operands[e][0]] = True
    sources: dict[int, frozenset[int]] = {}  # of a value that is not held: what it is recomputed from
    for e, eqn in enumerate(graph.eqns):
        result = graph.results[e][0] if graph.results[e] else -1
        if eqn.primitive in RENAMES:
            held[result] |= held[graph.operands[e][0]]
        if result < 0 or held[result] or not (fuses[e] or eqn.primitive in RENAMES or eqn.primitive == "loop_slice"):
            continue
        found = frozenset[int]().union(
            *({v} if held[v] else sources.get(v, frozenset()) for v in graph.operands[e] if held[v] or made[v])
        )
        sources[result] = found
        if eqn.primitive in RENAMES:
            continue
        write, times = graph.avals[result].nbytes, int(readers[result])
        read = write if eqn.primitive == "loop_slice" else sum(graph.avals[s].nbytes for s in found)
        held[result] = times * read > read + write + times * write or len(found) > _MOST_SOURCES
    return held


def _last_uses(
    graph: Graph, fuses: Sequence[bool], stored: NDArray[np.bool_], spans: dict[int, tuple[int, int]]
) -> NDArray[np.int64]:
    """The last equation by which each value is read, if need be through values that are not stored."""
    last = np.full(len(graph.avals), -1, np.int64)
    feeds = feeding(graph)
    following: dict[int, int] = {}  # loop → its next contraction in program order
    for e in range(len(graph.eqns) - 1, -1, -1):
        when, loop = e, graph.loop_of[e]
        if graph.eqns[e].primitive in ("loop_const", "loop_slice"):
            when = spans[loop][1]
        elif is_contraction(graph.eqns[e]):
            when, following[loop] = following.get(loop, e), e
            if not any(feeds[v] for v in graph.results[e]):
                when = spans[loop][1] if loop else max((stop for begin, stop in spans.values() if begin > e), default=e)
        when = max(when, *(int(last[v]) for v in graph.results[e] if not stored[v]), e)
        operands = list(graph.operands[e])
        last[operands] = np.maximum(last[operands], when)
    return last


def feeding(graph: Graph) -> NDArray[np.bool_]:
    """Values on which, in their own scope, a contraction, a loop, or the next trip depends."""
    feeds = np.zeros(len(graph.avals), bool)
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        onward = eqn.primitive != "loop_stack" and any(feeds[v] for v in graph.results[e])
        if onward or eqn.primitive in _INTO or eqn.primitive == "loop_result" or is_contraction(eqn):
            feeds[list(graph.operands[e])] = True
    return feeds


def in_place(graph: Graph, lasting: Container[int]) -> frozenset[int]:
    """Equations whose first operand may be overwritten: it is read no more, nor is what it is another name of.

    Args:
      graph: the program.
      lasting: values that must not be overwritten: inputs that are not donated, and outputs.
    """
    made_by, consumers = graph.producers(), graph.consumers()
    found: set[int] = set()
    for e, operands in enumerate(graph.operands):
        value = operands[0] if operands else None
        while value is not None and value not in lasting and consumers[value][-1][0] <= e:
            maker = made_by.get(value, (-1, 0))[0]
            if maker < 0 or graph.eqns[maker].primitive not in RENAMES:
                found.add(e)
                break
            value = graph.operands[maker][0]
    return frozenset(found)
