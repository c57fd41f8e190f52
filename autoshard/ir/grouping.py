"""Grouping: a program that keeps, of every layer's input, that of every k-th layer alone.

Layers in a scan keep what the loop carries at every trip, whatever else they repeat: for deep stacks that is most of
what they keep. In groups of k the forward pass keeps the carry of each group, and the backward pass runs a group's k
trips again before it goes back through them (Chen et al. 2016, arXiv:1604.06174, section 4.1):

    scan(layer, L)           →  scan(scan(layer, k), L / k)                    keeps the carries of L / k groups
    scan(backward layer, L)  →  scan(scan(layer, k), scan(backward layer, k))  keeps k trips' residuals for one group

What the layers keep for their backward pass stays what it was, but lives as long as its group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.bodies import why_once, with_bodies
from autoshard.ir.passes import Pair, Pass, passes


def grouped(closed: Any, group: int) -> Any:
    """A program whose pairs of forward and backward scans run in groups of so many trips.

    Numbers, inputs and results are the same. A pair stays as it is if the group does not divide its trips, or if
    something in it must not run twice.

    Raises:
      SpecError: so it is for every pair.
    """
    program = passes(closed, remats=False)
    if not any(_may_group(one, pair, group) for one in program.walk() for pair in one.pairs):
        raise SpecError(f"no scan of the program, and its backward one, has groups of {group} trips that may run again")
    return _jax.without_dead(_flat(program, group))


def lengths(closed: Any) -> tuple[int, ...]:
    """The trips of every pair of scans whose groups may run again."""
    program = passes(closed, remats=False)
    flat = [one for one in program.walk() if one.is_flat]
    return tuple(pair.inside.length for one in flat for pair in one.pairs if _runs_again(one, pair))


def _runs_again(one: Pass, pair: Pair) -> bool:
    return one.is_flat and not why_once(one.forward.steps[pair.forward].eqn)


def _may_group(one: Pass, pair: Pair, group: int) -> bool:
    length = pair.inside.length
    return 1 < group < length and not length % group and _runs_again(one, pair)


def _flat(one: Pass, group: int) -> Any:
    """A flat pass's body in groups, and what is nested in it."""
    eqns = {k: [step.eqn] for k, step in enumerate(one.forward.steps)}
    for k, bodies in one.nested.items():
        eqns[k] = [with_bodies(eqns[k][0], {i: _flat(inside, group) for i, inside in bodies.items()})]
    for pair in one.pairs:
        if _may_group(one, pair, group):
            eqns[pair.forward], eqns[pair.backward] = _Groups(one, pair, group).rewritten()
    return one.forward.with_steps([eqn for k in sorted(eqns) for eqn in eqns[k]])


class _Scan(NamedTuple):
    """A scan's operands and results by their parts."""

    eqn: Any
    consts: Sequence[Any]
    carries: Sequence[Any]
    slices: Sequence[Any]
    finals: Sequence[Any]
    stacks: Sequence[Any]

    @classmethod
    def of(cls, eqn: Any) -> "_Scan":
        consts, carries = _jax.scan_arity(eqn)
        both = consts + carries
        return cls(eqn, eqn.invars[:consts], eqn.invars[consts:both], eqn.invars[both:], *_parted(eqn.outvars, carries))


class _Groups:
    """A pair of scans, in groups."""

    def __init__(self, one: Pass, pair: Pair, group: int) -> None:
        steps = one.forward.steps
        self.ahead, self.back = _Scan.of(steps[pair.forward].eqn), _Scan.of(steps[pair.backward].eqn)
        self.group, self.count = group, pair.inside.length // group
        back = self.back
        others = [x for k, step in enumerate(steps) if k != pair.backward for x in step.eqn.invars]
        taken = {x for x in (*others, *one.forward.outvars, *back.consts, *back.carries) if not _jax.is_literal(x)}
        self.residuals = [x for x in self.ahead.stacks if x not in taken and not _jax.is_unnamed(x)]
        self.results = [x for x in self.ahead.stacks if x in taken]
        self.groups_of: dict[Any, Any] = {}  # a stack → the same as a stack of groups
        self.carried = [
            None if _jax.is_literal(x) else _jax.variable(_jax.stacked(x.aval, self.count)) for x in self.ahead.finals
        ]

    def rewritten(self) -> tuple[list[Any], list[Any]]:
        """The equations that take the places of the two scans."""
        return self.forward(), self.backward()

    def forward(self) -> list[Any]:
        """Groups of forward trips; results are the carries, the stacks that others read, and each group's carry."""
        ahead, eqn = self.ahead, self.ahead.eqn
        split, before = self.split(ahead.slices, eqn)
        consts, carries = _fresh(ahead.consts), _fresh(ahead.carries)
        slices = [_jax.variable(_jax.stacked(_element(x), self.group)) for x in ahead.slices]
        finals = _fresh(ahead.finals)
        stacks = {x: _jax.variable(_jax.stacked(_element(x), self.group)) for x in self.results}
        inner = self.trips(ahead, (consts, carries, slices), finals, stacks)
        body = _jax.rewired(
            eqn.params["jaxpr"],
            eqns=[inner],
            invars=[*consts, *carries, *slices],
            outvars=[*finals, *stacks.values(), *carries],
            consts=[],
        )
        wide = [_jax.variable(_jax.stacked(stacks[x].aval, self.count)) for x in self.results]
        outer = eqn.replace(outvars=[*ahead.finals, *wide, *self.carried], params={**eqn.params, "length": self.count})
        outer = _jax.scan_again(outer, body, ahead.consts, ahead.carries, split)
        return [*before, outer, *(_jax.reshaped(eqn, x, y) for x, y in zip(wide, self.results, strict=True))]

    def backward(self) -> list[Any]:
        """Groups of backward trips, each behind its forward trips, which start at the carry that was kept."""
        ahead, back, eqn = self.ahead, self.back, self.back.eqn
        own = [x for x in back.slices if _jax.is_literal(x) or x not in self.residuals]
        split, before = self.split([*own, *ahead.slices], eqn)
        consts, carries = _fresh(back.consts), _fresh(back.carries)
        again = _fresh(ahead.consts), _fresh(ahead.carries)
        slices = [_jax.variable(_jax.stacked(_element(x), self.group)) for x in (*own, *ahead.slices)]
        stacks = {x: _jax.variable(_jax.stacked(_element(x), self.group)) for x in self.residuals}
        repeated = self.trips(ahead, (*again, slices[len(own) :]), _fresh(ahead.finals), stacks)
        repeated = _jax.repeated(repeated, repeated.invars, repeated.outvars)
        ours = iter(slices)
        sliced = [stacks[x] if not _jax.is_literal(x) and x in stacks else next(ours) for x in back.slices]
        finals = _fresh(back.finals)
        results = [_jax.variable(_jax.stacked(_element(x), self.group)) for x in back.stacks]
        inner = self.trips(back, (consts, carries, sliced), finals, dict(zip(back.stacks, results, strict=True)))
        body = _jax.rewired(
            eqn.params["jaxpr"],
            eqns=[repeated, inner],
            invars=[*consts, *again[0], *carries, *slices, *again[1]],
            outvars=[*finals, *results],
            consts=[],
        )
        wide = [_jax.variable(_jax.stacked(x.aval, self.count)) for x in results]
        outer = eqn.replace(outvars=[*back.finals, *wide], params={**eqn.params, "length": self.count})
        outer = _jax.scan_again(outer, body, [*back.consts, *ahead.consts], back.carries, [*split, *self.carried])
        named = [(x, y) for x, y in zip(wide, back.stacks, strict=True) if not _jax.is_unnamed(y)]
        return [*before, outer, *(_jax.reshaped(eqn, x, y) for x, y in named)]

    def trips(
        self, scan: _Scan, operands: tuple[Sequence[Any], ...], finals: Sequence[Any], stacks: Mapping[Any, Any]
    ) -> Any:
        """The trips of one group: a scan of the same body, of whose stacks some are wanted."""
        closed = scan.eqn.params["jaxpr"]
        outvars = _jax.open_jaxpr(closed).outvars
        made = dict(zip(scan.stacks, outvars[len(finals) :], strict=True))
        wanted = list(stacks)
        body = _jax.rewired(
            closed,
            eqns=_jax.open_jaxpr(closed).eqns,
            outvars=[*outvars[: len(finals)], *(made[x] for x in wanted)],
        )
        new = scan.eqn.replace(outvars=[*finals, *stacks.values()], params={**scan.eqn.params, "length": self.group})
        return _jax.scan_again(new, body, *operands)

    def split(self, stacks: Sequence[Any], near: Any) -> tuple[list[Any], list[Any]]:
        """Stacks as stacks of groups: variables, and the equations that make those that were not made before."""
        new = [x for x in dict.fromkeys(stacks) if x not in self.groups_of]
        for x in new:
            self.groups_of[x] = _jax.variable(_jax.stacked(_jax.stacked(_element(x), self.group), self.count))
        return [self.groups_of[x] for x in stacks], [_jax.reshaped(near, x, self.groups_of[x]) for x in new]


def _fresh(atoms: Sequence[Any]) -> list[Any]:
    return [_jax.variable(x.aval) for x in atoms]


def _element(stack: Any) -> Any:
    """The abstract value of one trip's part of a stack."""
    return _jax.element(stack.aval)


def _parted(values: Sequence[Any], at: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return values[:at], values[at:]
