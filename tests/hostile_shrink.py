"""Shrinks a hostile program that fails: what is left of it still fails in the same way.

The program is taken as its traced equations, calls seen through. A value on the way becomes the one
result, then values become arguments, as long as the rest fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _jax
from autoshard.ir.graph import CALLS, INLINED
from tests import hostile_oracle
from tests.hostile_oracle import FOREIGN, REFUSED, WRONG
from tests.hostile_programs import Hostility, Program

ATTEMPTS = 3  # of settings that draw layouts by the seed


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Some equations with the values that they start from: as much of `Program` as the oracle asks for."""

    seed: int
    setting: Hostility
    eqns: tuple[Any, ...]
    given: dict[Any, Any]  # variable → its value
    outs: tuple[Any, ...]
    gradient: bool = False

    @property
    def used(self) -> list[Any]:
        """The variables that the results need and no equation makes."""
        needed, eqns = {v for v in self.outs if not _jax.is_literal(v)}, self.live
        needed |= {v for eqn in eqns for v in eqn.invars if not _jax.is_literal(v)}
        made = {v for eqn in eqns for v in eqn.outvars}
        return [v for v in self.given if v in needed and v not in made]

    @property
    def live(self) -> list[Any]:
        """The equations that the results need."""
        needed = {v for v in self.outs if not _jax.is_literal(v)}
        kept: list[Any] = []
        for eqn in reversed(self.eqns):
            if any(v in needed and v not in self.given for v in eqn.outvars):
                kept.append(eqn)
                needed |= {v for v in eqn.invars if not _jax.is_literal(v)}
        return kept[::-1]

    @property
    def arguments(self) -> list[Any]:
        return [self.given[v] for v in self.used]

    @property
    def exact(self) -> tuple[bool, ...]:
        """Nothing is known of its results: float64 tells."""
        return (False,) * len(self.outs)

    def __call__(self, values: Sequence[Any], mesh: Any = None) -> list[Any]:
        env = dict(zip(self.used, values, strict=True))
        for eqn in self.live:
            operands = [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in eqn.invars]
            if eqn.primitive.name == "sharding_constraint" and mesh is None:
                results = operands
            else:
                results = _jax.bind(eqn, eqn.params, operands)
            env.update((v, r) for v, r in zip(eqn.outvars, results, strict=True) if v not in env)
        return [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in self.outs]


def shrunk(seed: int) -> tuple[Piece, str]:
    """The smallest piece of a program that still fails, and how; the whole, if it does not fail as equations."""
    program = Program(seed)
    whole = piece_of(program)
    how = fails(whole, (WRONG, FOREIGN, REFUSED))
    if not how:
        return whole, ""
    kinds = (how.partition(":")[0],)
    values = everything(whole)

    def smaller(now: Piece, candidates: Sequence[Piece]) -> tuple[Piece, bool]:
        nonlocal how
        for candidate in candidates:
            found = fails(candidate, kinds) if candidate.live else ""
            if found:
                how = found
                return candidate, True
        return now, False

    best, _ = smaller(whole, [replace(whole, outs=(v,)) for eqn in whole.live for v in eqn.outvars])
    going = True
    while going:
        made = [v for eqn in reversed(best.live) for v in eqn.outvars if v in values]
        cuts = [v for v in made if v not in best.outs and v not in best.given]  # of several results some may be given
        best, going = smaller(best, [replace(best, given={**best.given, v: values[v]}) for v in cuts])
    return best, how


def fails(piece: Piece, kinds: Sequence[str]) -> str:
    """How a piece fails: "wrong: …"; "" if it does not."""
    drawn = piece.setting.mode in ("specs", "assignment")
    for attempt in range(ATTEMPTS if drawn else 1):
        again: Any = replace(piece, seed=piece.seed + 1_000_003 * attempt)
        for verdict in hostile_oracle.verdicts_on([again]):
            if verdict.kind in kinds:
                return f"{verdict.kind}: {verdict.why}"
    return ""


def piece_of(program: Program) -> Piece:
    """The equations of a program, calls inlined."""
    mesh = hostile_oracle.user_mesh(program.setting) if program.setting.mode == "inside" else None

    def evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = _jax.open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in eqn.invars]
            if eqn.primitive.name in INLINED:
                results = evaluated(eqn.params[CALLS[eqn.primitive.name]], operands)
            else:
                results = _jax.bind(eqn, eqn.params, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in jaxpr.outvars]

    once = jax.make_jaxpr(lambda xs: program(xs, mesh))(program.arguments)
    closed = jax.make_jaxpr(lambda xs: evaluated(once, jax.tree.leaves(xs)))(program.arguments)
    jaxpr = _jax.open_jaxpr(closed)
    given = dict(zip(jaxpr.invars, program.arguments, strict=True))
    given |= {v: np.asarray(c) for v, c in zip(jaxpr.constvars, _jax.consts_of(closed), strict=True)}
    return Piece(
        seed=program.seed, setting=program.setting, eqns=tuple(jaxpr.eqns), given=given, outs=tuple(jaxpr.outvars)
    )


def everything(piece: Piece) -> dict[Any, Any]:
    """The value of every variable that numpy can hold, on one device."""
    made = [v for eqn in piece.live for v in eqn.outvars if isinstance(getattr(v.aval, "dtype", None), np.dtype)]
    full = replace(piece, outs=tuple(made))
    results = jax.jit(lambda xs: full(xs))([jnp.asarray(a) for a in full.arguments])
    return dict(zip(made, (np.asarray(r) for r in results), strict=True))


def text(piece: Piece) -> str:
    """A piece as equations, with its arguments' values where they are few."""
    jaxpr = jax.make_jaxpr(lambda xs: piece(xs, hostile_oracle.user_mesh(piece.setting)))(piece.arguments)
    small = [np.array2string(np.asarray(a), separator=",").replace("\n", "") for a in piece.arguments if a.size <= 16]
    return f"{jaxpr}\nsmall arguments: {small}"
