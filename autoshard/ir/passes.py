"""Passes: forward bodies and the backward bodies that read them.

A traced gradient is one program: JAX appends the transposed equations to those of the
function. A *pass* is a forward body with its backward one. In a flat body both are the
same list of steps, told apart by their name stacks (`transpose(jvp(…))`). Inside of it a
scan whose stacks a transposed scan slices is a pass of its own, trip by trip; so are
scans inside of those. Bodies of other loops (an accumulation over micro-batches, a loop
of train steps) that hold a gradient are flat passes again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.ir.bodies import Body, opened
from autoshard.ir.graph import BODIES, Path
from autoshard.ir.remats import Constants, undone, undone_in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A forward scan and the transposed one that slices its stacks: positions of steps, and the pass inside."""

    forward: int
    backward: int
    inside: "Pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward body and a backward one.

    `transposed` are the positions of the backward body's steps that read the forward body. `same` maps a
    variable of the backward body to the variable of the forward one that holds the same value; where both
    bodies are one (`is_flat`), forward variables are read as they are. `length` is how often the bodies run,
    `arity` the constants and carries of the forward scan; 1 and none of a flat pass. `nested[k]` are the flat
    passes in the bodies of step k.
    """

    forward: Body
    backward: Body
    transposed: frozenset[int]
    same: Mapping[Any, Any]
    is_flat: bool
    length: int
    arity: tuple[int, int]
    pairs: tuple[Pair, ...]
    nested: Mapping[int, Mapping[int, "Pass"]]

    def read(self, atom: Any) -> Any:
        """The forward variable whose value a backward step reads; None if it reads none."""
        if _jax.is_literal(atom):
            return None
        return atom if self.is_flat else self.same.get(atom)

    def walk(self) -> Iterator["Pass"]:
        """This pass and all inside of it, outer ones first."""
        yield self
        for pair in self.pairs:
            yield from pair.inside.walk()
        for bodies in self.nested.values():
            for inside in bodies.values():
                yield from inside.walk()


def passes(closed: Any, *, remats: bool) -> Pass:
    """The flat pass of a program: without transposed steps if it holds no gradient, or only ones in loops.

    Args:
      closed: the program.
      remats: whether its own `jax.checkpoint`s are undone: what they compute again is taken from the forward pass.
    """
    return _flat(opened(closed, remats=remats), remats=remats)


def _flat(body: Body, *, remats: bool) -> Pass:
    transposed = frozenset(k for k, step in enumerate(body.steps) if _jax.is_transposed(step.eqn))
    constants: Constants = {}
    if remats and transposed:
        body, transposed, constants = undone_in_place(body, transposed)
    pairs = _pairs(body, body, transposed, {}, constants, remats=remats) if transposed else ()
    taken = {pair.forward for pair in pairs} | transposed
    nested = {k: _nested(step.eqn, step.path, remats=remats) for k, step in enumerate(body.steps) if k not in taken}
    return Pass(
        forward=body,
        backward=body,
        transposed=transposed,
        same={},
        is_flat=True,
        length=1,
        arity=(0, 0),
        pairs=pairs,
        nested={k: bodies for k, bodies in nested.items() if bodies},
    )


def _nested(eqn: Any, path: Path, *, remats: bool) -> dict[int, Pass]:
    """The flat passes in the bodies of a loop or of branches, by the number of the body."""
    if eqn.primitive.name not in ("scan", "while", "cond"):
        return {}
    if not any(map(_jax.is_transposed, _jax.equations_within(eqn))):
        return {}
    found: dict[int, Pass] = {}
    for key, k in BODIES[eqn.primitive.name]:
        bodies = enumerate(eqn.params[key]) if k is None else [(k, eqn.params[key])]
        found |= {i: _flat(opened(body, (*path, i), remats=remats), remats=remats) for i, body in bodies}
    return found


def _pairs(
    forward: Body,
    backward: Body,
    transposed: frozenset[int],
    same: Mapping[Any, Any],
    constants: Constants,
    *,
    remats: bool,
) -> tuple[Pair, ...]:
    """The scans of a forward body whose stacks scans of the backward one slice; each in one pair."""
    stacks: dict[Any, int] = {}
    for k, step in enumerate(forward.steps):
        if step.primitive == "scan" and not (forward is backward and k in transposed):
            carries = _jax.scan_arity(step.eqn)[1]
            stacks.update((var, k) for var in step.eqn.outvars[carries:] if not _jax.is_unnamed(var))
    found: list[Pair] = []
    for k in sorted(transposed):
        step = backward.steps[k]
        if step.primitive != "scan":
            continue
        first = sum(_jax.scan_arity(step.eqn))
        sliced = [same.get(x, x) for x in step.eqn.invars[first:] if not _jax.is_literal(x)]
        weight: dict[int, int] = {}
        for var in sliced:
            if var in stacks:
                weight[stacks[var]] = weight.get(stacks[var], 0) + var.aval.size
        taken = {pair.forward for pair in found}
        partners = [p for p in weight if p not in taken]
        if partners:
            partner = max(partners, key=lambda p: (weight[p], -p))
            inside = _pair(forward, partner, backward, k, same, constants, remats=remats)
            found.append(Pair(forward=partner, backward=k, inside=inside))
    return tuple(found)


def _pair(
    forward: Body, partner: int, backward: Body, k: int, same: Mapping[Any, Any], constants: Constants, *, remats: bool
) -> Pass:
    there, here = forward.steps[partner], backward.steps[k]
    ahead = opened(there.eqn.params["jaxpr"], (*there.path, 0), remats=remats)
    back = opened(here.eqn.params["jaxpr"], (*here.path, 0), remats=remats)
    consts, carries = _jax.scan_arity(there.eqn)
    given = [None if _jax.is_literal(x) else x for x in there.eqn.invars]
    constant = dict(zip(given[:consts], ahead.invars[:consts], strict=True))
    sliced: dict[Any, Any] = dict(zip(there.eqn.outvars[carries:], ahead.outvars[carries:], strict=True))
    sliced |= dict(zip(given[consts + carries :], ahead.invars[consts + carries :], strict=True))
    own_consts, own_carries = _jax.scan_arity(here.eqn)
    inside: dict[Any, Any] = {}
    for i, (atom, var) in enumerate(zip(here.eqn.invars, back.invars, strict=True)):
        if _jax.is_literal(atom) or own_consts <= i < own_consts + own_carries:
            continue
        held = (constant if i < own_consts else sliced).get(same.get(atom, atom))
        if held is not None and not _jax.is_literal(held):
            inside[var] = held
    if remats:
        every = {inner: constants[outer] for outer, inner in constant.items() if outer in constants}
        ahead, back, inside, constants = undone(ahead, back, inside, every)
    whole = frozenset(range(len(back.steps)))
    return Pass(
        forward=ahead,
        backward=back,
        transposed=whole,
        same=inside,
        is_flat=False,
        length=here.eqn.params["length"],
        arity=(consts, carries),
        pairs=_pairs(ahead, back, whole, inside, constants, remats=remats),
        nested={},
    )
