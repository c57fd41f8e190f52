"""Routes: the codes to pin on every value's way, from where it is made to its copy and to all that take it."""

from itertools import zip_longest

import numpy as np

from autoshard.costs.strategies import SUM, WHOLE, Rows, decode, encode
from autoshard.ir.op_traits import GATHER, SCATTER_ADD
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Equation


def after_made(assignment: Assignment, value: int, *, takers: bool = True) -> tuple[int, ...]:
    """Codes to pin, in order, where a value is made: its own, then on to where it is left.

    Args:
      assignment: the layouts.
      value: the value.
      takers: whether codes are pinned where it is taken, too.
    """
    made, left = assignment.made(value), assignment.left(value, takers=takers)
    if made is None or left is None:
        return ()
    if made == left and _stays_apart(assignment, made, value):
        return (_whole(assignment, made, value),)
    own = (made,) if assignment.reduced(made, value) else ()
    return own + route(assignment, value, made, left)


def before_taken(assignment: Assignment, e: int, i: int) -> tuple[int, ...]:
    """Codes to pin, in order, where equation e takes operand i."""
    value = assignment.decisions.graph.operands[e][i]
    kept, taken = assignment.kept(value), assignment.taken(e, i)
    if kept is None or taken is None or _as_made(assignment, e, i):
        return ()
    made = assignment.made(value)
    if made is not None and assignment.takes_past_copy(e, value):
        return route(assignment, value, made, taken)
    return _to_copy(assignment, value) + route(assignment, value, kept, taken)


def before_output(assignment: Assignment, position: int) -> tuple[int, ...]:
    """Codes to pin, in order, before a program output."""
    d, target = assignment.decisions, assignment.output_code(position)
    value = d.graph.outputs[position]
    kept = assignment.kept(value)
    if kept is None:
        return ()
    made = assignment.made(value)
    if made is not None and value in d.cast_apart:  # past its copy, which is what products cast
        return route(assignment, value, made, target)
    return _to_copy(assignment, value) + route(assignment, value, kept, target)


def moved_again(assignment: Assignment) -> dict[tuple[int, int], tuple[int, ...]]:
    """Operands (equation, position) that are moved by collectives of their own, and the codes on the way.

    A value that is kept in one layout and taken by several equations in another is moved for each of
    them: otherwise the compiler would merge the moves, and hold the moved value from the first use to
    the last. The first move is already accounted for; only the repeats are returned.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    d = assignment.decisions
    uses = d.graph.consumers
    for value in d.kept:
        kept = assignment.kept(value)
        assert kept is not None  # copies have codes
        seen: set[int] = set()
        for e, i in uses.get(value, ()):
            taken = assignment.taken(e, i)
            if assignment.takes_past_copy(e, value):
                continue
            if taken is None or taken == kept or not assignment.communicates(value, kept, taken):
                continue
            if taken in seen and isinstance(d.nodes[d.node_of[e]], Equation) and assignment.reduced(kept, value):
                found[e, i] = (kept, *route(assignment, value, kept, taken))
            seen.add(taken)
    return found


def regathered(assignment: Assignment) -> dict[tuple[int, int], int]:
    """Operands (equation, position) of values that are moved once more for far uses → the group of these, from 1.

    Gathers alone: what else moves XLA:TPU moves once. Those of the first group are left out, and those in another call
    of `jax.checkpoint` than it: what a call takes is behind a barrier as it is.
    """
    graph, found = assignment.decisions.graph, dict[tuple[int, int], int]()
    for value, groups in assignment.decisions.apart.items():
        if not (assignment.moved_in_groups(value) and _is_gathered(assignment, value)):
            continue
        first = graph.again_of[groups[0][0]]
        for number, group in enumerate(groups[1:], 1):
            for e in group if graph.again_of[group[0]] == first else ():
                found |= {(e, i): number for i, v in enumerate(graph.operands[e]) if v == value}
    return found


def _is_gathered(assignment: Assignment, value: int) -> bool:
    """Whether nothing but gathers lies between where a value is made and its copy."""
    made, kept = assignment.made(value), assignment.kept(value)
    assert made is not None  # what is moved in groups has both
    assert kept is not None
    return all(step.kind == "all-gather" for step in assignment.path(value, made, kept))


def route(assignment: Assignment, value: int, source: int, target: int) -> tuple[int, ...]:
    """The pinnable codes that a value passes through from source to target.

    Three kinds of scattered sums are whole in between: onto a dimension of the contraction's batch that
    is already split, onto a second dimension, and a lookup's. Otherwise XLA all-reduces and then moves
    them; an all-reduce that is cut right after becomes a reduce-scatter. Only the last of several
    slices in a row is listed.
    """
    codes: list[int] = []
    here = source
    steps = assignment.path(value, source, target)
    for step, following in zip_longest(steps, steps[1:]):
        if step.kind == "reduce-scatter" and (here != source or _detours(assignment, value, here, step.after)):
            codes.append(_whole(assignment, here, value))
        if not (step.kind == "slice" and following is not None and following.kind == "slice"):
            codes.append(step.after)
        here = step.after
    return tuple(code for code in codes if assignment.reduced(code, value))


def _stays_apart(assignment: Assignment, code: int, value: int) -> bool:
    """Whether a value is a scatter's pending sum that is added to something before it is finished.

    Without a pin XLA scatters onto the other term, before it splits the program, and finishes both by themselves; with
    one that finishes it, it finishes what is added (jax-cuda12-pjrt 0.10.2, libtpu 0.0.52).
    """
    graph = assignment.decisions.graph
    maker, _ = graph.producers.get(value, (-1, 0))
    scattered = maker >= 0 and graph.eqns[maker].primitive == SCATTER_ADD
    added = scattered and any(graph.eqns[e].traits.addition for e, _ in graph.consumers.get(value, ()))
    return added and not assignment.reduced(code, value)


def _as_made(assignment: Assignment, e: int, i: int) -> bool:
    """Whether equation e takes its operand i from where it is made, past its copy."""
    value = assignment.decisions.graph.operands[e][i]
    if assignment.taken(e, i) != assignment.left(value):
        return False
    return assignment.is_input(value) or assignment.in_chain(e, value) or assignment.takes_past_copy(e, value)


def _to_copy(assignment: Assignment, value: int) -> tuple[int, ...]:
    """The codes to pin on the way to a value's copy, from where it is left."""
    left, kept = assignment.left(value), assignment.kept(value)
    return () if left is None or kept is None else route(assignment, value, left, kept)


def _whole(assignment: Assignment, code: int, value: int) -> int:
    """A code with its sums finished."""
    row = _row(assignment, code, value)
    return int(encode(np.where(row == SUM, WHOLE, row), assignment.decisions.graph.avals[value].ndim))


def _detours(assignment: Assignment, value: int, source: int, target: int) -> bool:
    """Whether XLA scatters a sum only behind a pin: a lookup's sum, or one onto a batch that is already split."""
    if _lookup(assignment, value):
        return True
    before, after = _row(assignment, source, value), _row(assignment, target, value)
    onto = set(after[(before == SUM) & (after != SUM)].tolist()) & set(before.tolist())
    return bool(onto) and not onto.isdisjoint(_batch(assignment, value))


def _lookup(assignment: Assignment, value: int) -> bool:
    e, _ = assignment.decisions.graph.producers[value]
    return assignment.decisions.graph.eqns[e].primitive == GATHER


def _batch(assignment: Assignment, value: int) -> set[int]:
    """The dimensions of a pending sum that all operands of its contraction have."""
    d = assignment.decisions
    e, position = d.graph.producers[value]
    rule = d.rules[e]
    decision = d.nodes[d.node_of[e]]
    if isinstance(decision, Equation) and decision.body is not None:
        return set()
    if any(factor.reduction for factor in rule.factors):
        shared = set.intersection(*({f for dim in dims for f in dim} for dims in rule.operands))
    else:  # sums flow through
        operands = zip(d.graph.operands[e], rule.operands, strict=True)
        shared = {f for operand, dims in operands for n in _batch(assignment, operand) for f in dims[n]}
    return {n for n, dim in enumerate(rule.results[position]) if shared & set(dim)}


def _row(assignment: Assignment, code: int, value: int) -> Rows:
    return decode(code, assignment.decisions.graph.avals[value].ndim, assignment.decisions.mesh.ndim)
