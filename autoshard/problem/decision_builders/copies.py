"""Copies: the layout in which a value is kept for several consumers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.strategies import SUM, WHOLE, Codes, decode, reduced
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decisions import Copy, or_off, priced_by_edges
from autoshard.problem.memory_usage import local_bytes
from autoshard.problem.ports import Port

Added = tuple[Port, NDArray[np.bool_] | None]


def add_copy(draft: Draft, value: int, port: Port, takers: Sequence[Port], *, lent: bool) -> Added:
    """Adds the copy of a value for its consumers.

    If the value's memory belongs to another value (an input, a stored value under another
    name), its copy either *is* that value (same layout, no memory) or lies beside it: each
    code appears as both, the aliases first.

    Args:
      draft: the decisions so far: the value and its consumers.
      value: the value.
      port: the place where it is made.
      takers: its consumers.
      lent: whether its memory is another's.

    Returns:
      The copy, and the pairs of choices that no program could have.
    """
    facts = draft.facts
    ndim = facts.graph.avals[value].ndim
    wanted = np.unique(np.concatenate(_taken(takers) or [reduced(port.codes, ndim, facts.mesh)]))
    finished = ~(decode(wanted, ndim, facts.mesh.ndim) == SUM).any(axis=1)
    made = np.unique(port.codes)
    codes = np.unique(
        np.concatenate([wanted[finished], np.intersect1d(wanted[~finished], made), reduced(made, ndim, facts.mesh)])
    )
    forbidden = None
    if lent:
        alias = codes[np.isin(codes, port.codes)]
        forbidden = np.zeros((len(port.codes), len(alias) + len(codes)), bool)
        forbidden[:, : len(alias)] = port.codes[:, None] != alias[None, :]
        codes = np.concatenate([alias, codes])
    off = None
    if all(t.off is not None and t.off.any() for t in takers):
        codes, off = or_off(codes)
        forbidden = None if forbidden is None else np.pad(forbidden, ((0, 0), (0, 1)))
    return _add(draft, value, port, codes, off), forbidden


def _taken(takers: Sequence[Port]) -> list[Codes]:
    """The codes under which consumers take a value; those that take it as it is ask for none."""
    return [t.codes if t.off is None else t.codes[~t.off] for t in takers if not t.loose]


def add_arrival(draft: Draft, value: int, port: Port, taker: Port) -> Added:
    """Adds the copy of a new state that is gathered after its update: in its input's place, or beside it first.

    XLA:TPU copies the state before the step, which lies there until it is gathered, and then once more into its place.

    XLA:GPU gathers only along the major dimension. A state that moves along another
    dimension is made in memory of its own, beside its piece, and then transposed into its place;
    the moves of all outputs run at once. Each code appears as both, in its place first.

    Args:
      draft: the decisions so far: the value and its input.
      value: the new state.
      port: the place where it is made.
      taker: the input that it replaces.

    Returns:
      As `add_copy`.
    """
    facts, aval = draft.facts, draft.facts.graph.avals[value]
    codes = np.unique(taker.codes)
    source = decode(port.codes, aval.ndim, facts.mesh.ndim)[:, None, :]
    there = decode(codes, aval.ndim, facts.mesh.ndim)[None, :, :]
    copied = facts.compiler.copies_gathered_state
    placed = np.zeros(there.shape[1:], bool) if copied else (source == 0) & (there == WHOLE)
    beside = ((source != there) & ~placed).any(axis=2)
    arrival = _add(draft, value, port, np.concatenate([codes, codes]))
    nbytes = local_bytes(aval, arrival.codes, facts.mesh) + (0 if copied else aval.nbytes // facts.mesh.size)
    nbytes[: len(codes)] = 0
    begin, end = 0 if copied else int(facts.lives.start[value]), len(facts.graph.eqns) + 1
    draft.usages.add(arrival.node, begin, end, nbytes, "copies")
    return arrival, np.concatenate([beside, ~beside], axis=1)


def _add(draft: Draft, value: int, port: Port, codes: Codes, off: NDArray[np.bool_] | None = None) -> Port:
    """Adds the decision of a value's copy."""
    made = draft.nodes[port.node]
    node = draft.add(priced_by_edges(Copy, f"copy of {made.name}", made.where, codes, off=off))
    draft.kept[value] = Port(node, codes, off)
    return draft.kept[value]
