"""Split: a backward pass in two programs, cotangents of the state first, gradients of weights when there is time.

Every equation is in one of the two: in the first what the wanted results follow from, in the second
the rest. A scan whose stacked results only the second one needs is two scans: the first hands what
the second reads from trip to trip, the second has no carry. What goes from one program to the other
is the *stash*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.ir.bodies import Body, opened
from autoshard.ir.op_traits import SCAN
from autoshard.pipeline_parallel.cut import named


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Two programs that compute together what one did.

    Attributes:
      first: from all inputs to the first results, then the stash.
      second: from some inputs, then the stash, to the other results.
      inputs: the places of those inputs.
      results: how many first results there are.
    """

    first: Any
    second: Any
    inputs: tuple[int, ...]
    results: int

    @property
    def stash(self) -> list[Any]:
        """The variables between the programs."""
        return list(_jax.open_jaxpr(self.first).outvars[self.results :])


def split(closed: Any, first: Sequence[bool]) -> Split:
    """Splits a program by its results.

    Args:
      closed: the program.
      first: which results are wanted first.
    """
    body = opened(closed, remats=True)
    halves = _halves(body, first)
    inputs = tuple(i for i, v in enumerate(body.invars) if v in halves.taken)
    given = [body.invars[i] for i in inputs]
    wanted = [atom for atom, own in zip(body.outvars, first, strict=True) if own]
    others = [atom for atom, own in zip(body.outvars, first, strict=True) if not own]
    return Split(
        first=body.with_steps(halves.first, outvars=[*wanted, *halves.stash]),
        second=body.with_steps(halves.second, invars=[*given, *halves.stash], outvars=others),
        inputs=inputs,
        results=len(wanted),
    )


@dataclass(frozen=True, slots=True)
class _Halves:
    """The equations of both programs; what the second one takes; what of it the first one makes."""

    first: list[Any]
    second: list[Any]
    taken: set[Any]
    stash: list[Any]


def _halves(body: Body, first: Sequence[bool]) -> _Halves:
    wanted = {atom for atom, own in zip(body.outvars, first, strict=True) if own and not _jax.is_literal(atom)}
    taken = {atom for atom, own in zip(body.outvars, first, strict=True) if not own and not _jax.is_literal(atom)}
    ahead: list[Any] = []
    later: list[Any] = []
    for step in reversed(body.steps):
        eqn = step.eqn
        now = [v in wanted for v in eqn.outvars]
        if not any(now):
            if any(v in taken for v in eqn.outvars):
                later.append(eqn)
                taken |= named(eqn.invars)
            continue
        pair = _two_scans(eqn, now, taken) if step.primitive == SCAN else (eqn, None)
        ahead.append(pair[0])
        wanted |= named(pair[0].invars)
        if pair[1] is not None:
            later.append(pair[1])
            taken |= named(pair[1].invars)
    ahead.reverse()
    later.reverse()
    made = {v for eqn in later for v in eqn.outvars}
    stash = [v for eqn in ahead for v in eqn.outvars if v in taken and v not in made]
    return _Halves(ahead, later, taken, stash)


def _two_scans(eqn: Any, now: Sequence[bool], taken: set[Any]) -> tuple[Any, Any]:
    """A scan of what is wanted now and of its carry, and one of the other stacked results; None without the latter."""
    consts, carries = _jax.scan_arity(eqn)
    stacks = eqn.outvars[carries:]
    late = [v in taken and not own for v, own in zip(stacks, now[carries:], strict=True)]
    if not any(late):
        return eqn, None
    inner = opened(eqn.params["jaxpr"], remats=True)
    early = [True] * carries + [not own for own in late]
    halves = _halves(inner, early)
    own_consts, own_carry = inner.invars[:consts], inner.invars[consts : consts + carries]
    own_slices = inner.invars[consts + carries :]
    handed = [*halves.stash, *(v for v in own_carry if v in halves.taken)]
    results = [atom for atom, own in zip(inner.outvars, early, strict=True) if own]
    left = [atom for atom, own in zip(inner.outvars, early, strict=True) if not own]
    stacked = [_jax.variable(_jax.stacked(v.aval, eqn.params["length"])) for v in handed]
    outvars = [*eqn.outvars[:carries], *(v for v, own in zip(stacks, late, strict=True) if not own), *stacked]
    first = _jax.scan_again(
        eqn.replace(outvars=outvars),
        inner.with_steps(halves.first, outvars=[*results, *handed]),
        eqn.invars[:consts],
        eqn.invars[consts : consts + carries],
        eqn.invars[consts + carries :],
    )
    again = [k for k, v in enumerate(own_consts) if v in halves.taken]
    slices = [k for k, v in enumerate(own_slices) if v in halves.taken]
    second = _jax.scan_again(
        eqn.replace(outvars=[v for v, own in zip(stacks, late, strict=True) if own]),
        inner.with_steps(
            halves.second,
            invars=[*(own_consts[k] for k in again), *(own_slices[k] for k in slices), *handed],
            outvars=left,
        ),
        [eqn.invars[k] for k in again],
        [],
        [*(eqn.invars[consts + carries + k] for k in slices), *stacked],
    )
    return first, second
