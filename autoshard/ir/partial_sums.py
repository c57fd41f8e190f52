"""Partial sums: values of a body that are the sum of so many parts, and how each part is computed.

A sum over a dimension splits into parts: a product contracts, a reduction adds, a scatter
collects a stretch of the dimension for each. What is linear in a value in parts is in parts
itself: every equation is done part by part. Whatever is added besides is in the first part alone.
A value in parts exists nowhere as a whole, so all that reads it must be linear, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from autoshard import _jax
from autoshard.ir.bodies import REMATS, Body, opened
from autoshard.ir.graph import BODIES
from autoshard.ir.op_traits import CAST, DIV, DOT_GENERAL, MUL, REDUCE_SUM, SCATTER_ADD

# Linear in their first operand; others, if there are any, are the same for every part.
UNARY = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "neg", "copy", "copy_p", "slice", "rev"}
    | {"dynamic_slice", "name", REDUCE_SUM}
)
PRODUCTS = (MUL, DOT_GENERAL)  # linear in either operand
ADDITIONS = frozenset({"add", "add_any", "sub", "concatenate"})  # linear in all operands together
SELECT = "select_n"  # likewise, but for its first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """A body with its steps' own bodies, opened once: variables stay the same ones."""

    body: Body
    _within: dict[tuple[int, int], "Inside"] = field(default_factory=dict[tuple[int, int], "Inside"])

    def within(self, k: int) -> Mapping[int, "Inside"]:
        """The bodies of step k, by their numbers; none of a call with rules of its own."""
        eqn, path = self.body.steps[k].eqn, self.body.steps[k].path
        if eqn.primitive.name not in {"scan", "while", "cond", *REMATS}:
            return {}
        for key, number in BODIES[eqn.primitive.name]:
            bodies = enumerate(eqn.params[key]) if number is None else [(number, eqn.params[key])]
            for j, closed in bodies:
                if (k, j) not in self._within:
                    self._within[k, j] = Inside(body=opened(closed, (*path, j)))
        found = {j: inside for (at, j), inside in self._within.items() if at == k}
        return {} if eqn.primitive.name in REMATS and found[0].body.consts else found  # it may hold none


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a value is had in parts: from equation `step` of its body.

    Attributes:
      step: the position of the step that makes it.
      parted: positions of operands that are in parts themselves.
      spread: positions of operands that are put in the first part.
      split: operand → its dimension that is split into parts.
      inner: of a loop or a checkpoint: the same in its body.
    """

    step: int
    parted: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()
    split: Mapping[int, int] = field(default_factory=dict[int, int])
    inner: "Parted | None" = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parted:
    """One result of a body in parts: the ways of all values that have to be.

    `entering` is the input that carries it round, if any.
    """

    inside: Inside
    result: int
    entering: int | None
    ways: Mapping[Any, Way]


class Finder:
    """Finds the ways of a body's values in so many parts.

    Args:
      inside: the body.
      count: the parts.
      entering: the position of the input that is in parts; None: none is.
    """

    def __init__(self, inside: Inside, count: int, entering: int | None = None) -> None:
        self.inside, self.count, self.entering = inside, count, entering
        body = inside.body
        self.given = None if entering is None else body.invars[entering]
        self.failed: set[Any] = set()

    @cached_property
    def makers(self) -> Mapping[Any, tuple[int, int]]:
        steps = self.inside.body.steps
        return {var: (k, j) for k, step in enumerate(steps) for j, var in enumerate(step.eqn.outvars)}

    def parted(self, result: int) -> Parted | None:
        """One result of the body; None if it cannot be had in parts, or has nothing that is split."""
        var = self.inside.body.outvars[result]
        ways: dict[Any, Way] = {}
        if _jax.is_literal(var) or not self.find(var, ways):
            return None
        if not any(way.split or way.inner for way in ways.values()) or not self._read_in_parts(result, ways):
            return None
        return Parted(inside=self.inside, result=result, entering=self.entering, ways=ways)

    def find(self, atom: Any, ways: dict[Any, Way]) -> bool:
        """Whether a value can be had in parts; adds its way, and those of all that it needs."""
        if _jax.is_literal(atom) or atom in self.failed:
            return False
        if atom is self.given or atom in ways:
            return True
        tried = dict(ways)
        way = self._way(atom, tried) if atom in self.makers else None
        if way is None:
            self.failed.add(atom)
            return False
        ways.update(tried)
        ways[atom] = way
        return True

    def _way(self, var: Any, ways: dict[Any, Way]) -> Way | None:
        k, j = self.makers[var]
        eqn = self.inside.body.steps[k].eqn
        name = eqn.primitive.name
        if eqn.effects:
            return None
        if split := _split(eqn, self.count):
            return Way(step=k, split=split, spread=frozenset({0}) if name == SCATTER_ADD else frozenset())
        if name in UNARY or (name == DIV and _is_inexact(eqn)) or (name == CAST and _is_exact(eqn)):
            return Way(step=k, parted=frozenset({0})) if self.find(eqn.invars[0], ways) else None
        if name in PRODUCTS:
            taken = next((i for i in (0, 1) if self.find(eqn.invars[i], ways)), None)
            return None if taken is None else Way(step=k, parted=frozenset({taken}))
        if name in ADDITIONS or name == SELECT:
            first = int(name == SELECT)
            terms = range(first, len(eqn.invars))
            parted = frozenset(i for i in terms if self.find(eqn.invars[i], ways))
            return Way(step=k, parted=parted, spread=frozenset(terms) - parted) if parted else None
        if name == "scan":
            return self._of_scan(k, j, ways)
        if name in REMATS:
            within = self.inside.within(k)
            inner = Finder(within[0], self.count).parted(j) if within else None
            return None if inner is None else Way(step=k, inner=inner)
        return None

    def _of_scan(self, k: int, j: int, ways: dict[Any, Way]) -> Way | None:
        """A stacked result of a scan, or one that it carries round."""
        eqn = self.inside.body.steps[k].eqn
        consts, carries = _jax.scan_arity(eqn)
        entering = consts + j if j < carries else None
        inner = Finder(self.inside.within(k)[0], self.count, entering).parted(j)
        if inner is None:
            return None
        if entering is None:
            return Way(step=k, inner=inner)
        begins = frozenset({entering})
        if self.find(eqn.invars[entering], ways):
            return Way(step=k, inner=inner, parted=begins)
        return Way(step=k, inner=inner, spread=begins)

    def _read_in_parts(self, result: int, ways: Mapping[Any, Way]) -> bool:
        """Whether all that reads a value in parts takes it so, and the body returns none but one; whether it is a sum.

        A sum over the trips reads what it was before.
        """
        body = self.inside.body
        parted = {id(var) for var in ways} | ({id(self.given)} if self.given is not None else set())
        if any(id(var) in parted and i != result for i, var in enumerate(body.outvars)):
            return False
        carried = self.given is None
        for step in body.steps:
            of_step = [ways[var] for var in step.eqn.outvars if var in ways]
            for i, atom in enumerate(step.eqn.invars):
                if id(atom) not in parted:
                    continue
                if not any(i in way.parted for way in of_step):
                    return False
                carried |= atom is self.given
        return carried and body.outvars[result] is not self.given


def _is_inexact(eqn: Any) -> bool:
    """Whether an equation is of real or complex numbers: a quotient of integers is rounded, and not linear."""
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)


def _is_exact(eqn: Any) -> bool:
    """Whether the cast of a sum is the sum of casts: to a wider type of real or complex numbers.

    A sum of integers may wrap around in the narrow type, and does not in the wide one.
    """
    here, there = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    alike = any(
        jnp.issubdtype(here, kind) and jnp.issubdtype(there, kind) for kind in (jnp.floating, jnp.complexfloating)
    )
    return alike and jnp.promote_types(here, there) == there


def _split(eqn: Any, count: int) -> dict[int, int]:
    """Operand → the dimension by which an equation's sum splits into so many parts: the first that divides; or none."""
    name = eqn.primitive.name
    if any(_jax.is_literal(x) for x in eqn.invars):
        return {}
    shapes = [x.aval.shape for x in eqn.invars]
    if name == REDUCE_SUM:
        return next(({0: d} for d in sorted(eqn.params["axes"]) if _divides(shapes[0][d], count)), {})
    if name == DOT_GENERAL:
        pairs = sorted(zip(*eqn.params["dimension_numbers"][0], strict=True))
        return next(({0: left, 1: right} for left, right in pairs if _divides(shapes[0][left], count)), {})
    if name == SCATTER_ADD:
        numbers = eqn.params["dimension_numbers"]
        batched = set(numbers.scatter_indices_batching_dims)
        windows = set(numbers.update_window_dims)
        updates = [d for d in range(len(shapes[2])) if d not in windows]
        pairs = [(i, d) for i, d in enumerate(updates) if i not in batched]
        return next(({1: i, 2: d} for i, d in pairs if _divides(shapes[1][i], count)), {})
    return {}


def _divides(size: int, count: int) -> bool:
    return size >= count and size % count == 0
