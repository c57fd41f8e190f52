"""Separable: a proof that a loss over a batch is the mean, or the sum, of its micro-batches' losses.

The loss is traced twice, for a micro-batch and for a batch of `times` as many examples, and
both programs are walked together. Every value has a role:

    same     the same in both programs
    each     one entry per example: the rule's factors say that no equation mixes examples
    total    a sum over the examples, times `weight`
    count    a number that is `weight` times as large for the larger batch

Of a mean, a sum over the examples is divided by a count: its weight is one micro-batch's
share. Whatever is none of these (a statistic of the batch that an example is normalized
by, the quotient of two sums, a random mask for the whole batch) is refused at its line.
The rules of custom derivatives are taken on trust.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _jax
from autoshard.errors import MissingRuleError, StageError
from autoshard.ir.graph import ALIASES, CALLS, Aval, Eqn
from autoshard.ir.op_traits import (
    BROADCAST,
    CAST,
    COND,
    DIV,
    DOT_GENERAL,
    IOTA,
    MUL,
    REDUCE_SUM,
    SCAN,
    SELECT,
    WHILE,
    traits_of,
)
from autoshard.rules import FactorKind, ShardingRule, rule_of
from autoshard.rules.rule import Dims

WAY_OUT = "write it for each example by itself, take a mean or a sum over the batch, or plan without stages"

# A sum over the batch; a gather over it would mix examples.
_ADDING = frozenset({DOT_GENERAL, REDUCE_SUM})


class Kind(StrEnum):
    """The roles."""

    SAME = "same"
    EACH = "each"
    TOTAL = "total"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Role:
    """How a value of the larger batch's program goes back to those of the smaller ones.

    `dim` is the dimension of the examples, `major` the size of what is major of them in it. `data`: whether it
    follows from the batch, not from its size alone. `zero`: it is zeros.
    """

    kind: Kind
    weight: Fraction = Fraction(1)
    dim: int = 0
    major: int = 1
    data: bool = False
    zero: bool = False


SAME = Role(Kind.SAME)
_ZERO = Role(Kind.SAME, zero=True)


def weight_of(small: Any, large: Any, batch: Sequence[bool], *, examples: int, times: int) -> Fraction:
    """By what the sum of the micro-batches' losses is multiplied: 1 if the loss is a sum, 1/times if a mean.

    Args:
      small: the closed jaxpr of the loss of a micro-batch; its first result is the loss.
      large: the same, of `times` as many examples.
      batch: which inputs are the batch; their leading dimensions are the examples.
      examples: of the larger batch.
      times: micro-batches in it.

    Raises:
      StageError: the loss is not shown to be a sum or a mean.
    """
    walk = _Walk(examples, times)
    roles = [Role(Kind.EACH, data=True) if own else SAME for own in batch]
    outs = walk.program(small, large, roles)
    loss = outs[0]
    if loss.kind is Kind.SAME:
        return Fraction(1, times)
    if loss.kind is not Kind.TOTAL or loss.weight not in (1, Fraction(1, times)):
        what = f"{loss.weight} times the sum" if loss.kind is Kind.TOTAL else "no sum"
        raise StageError("", f"it is neither the mean nor the sum of its examples' losses, but {what}", WAY_OUT)
    return loss.weight


class _Walk:
    """Both programs, equation by equation."""

    def __init__(self, examples: int, times: int) -> None:
        self.examples, self.times = examples, times
        self.lines = _jax.SourceLines()
        self.calls: list[str] = []  # the lines of the calls that the walk is in

    def program(self, small: Any, large: Any, roles: Sequence[Role]) -> list[Role]:
        """The roles of a program's results, by those of its inputs."""
        own, other = _jax.open_jaxpr(large), _jax.open_jaxpr(small)
        known: dict[Any, Role] = dict(zip(own.invars, roles, strict=True))
        pairs = zip(own.constvars, _jax.consts_of(large), _jax.consts_of(small), strict=True)
        known |= {var: _of_values(value, before) for var, value, before in pairs}
        if len(own.eqns) != len(other.eqns):
            raise StageError("", "it is another program for a batch of another size", WAY_OUT)
        for eqn, before in zip(own.eqns, other.eqns, strict=True):
            if eqn.primitive is not before.primitive:
                raise self.refused(eqn, "is another operation for a batch of another size")
            given = [self.read(known, a, b) for a, b in zip(eqn.invars, before.invars, strict=True)]
            known.update(zip(eqn.outvars, self.equation(before, eqn, given), strict=True))
        return [self.read(known, a, b) for a, b in zip(own.outvars, other.outvars, strict=True)]

    @staticmethod
    def read(known: Mapping[Any, Role], atom: Any, before: Any) -> Role:
        if not _jax.is_literal(atom):
            return known[atom]
        return _of_values(_jax.literal(atom), _jax.literal(before) if _jax.is_literal(before) else None)

    def refused(self, eqn: Any, why: str) -> StageError:
        lines = [*self.calls, self.lines(eqn)]
        known = [line for line in lines if line != _jax.NO_LINE]
        return StageError((known or lines)[-1], f"`{eqn.primitive.name}` {why}", WAY_OUT)

    def equation(self, small: Any, eqn: Any, given: list[Role]) -> list[Role]:
        name = eqn.primitive.name
        if name in ALIASES:
            return given
        if name in CALLS:
            self.calls.append(self.lines(eqn))
            outs = self.program(small.params[CALLS[name]], eqn.params[CALLS[name]], given)
            self.calls.pop()
            return outs
        if name == SCAN:
            return self.scan(small, eqn, given)
        if name in (WHILE, COND):
            return self.branches(small, eqn, given)
        shapes = [v.aval.shape for v in eqn.outvars]
        grows = any(v.aval.shape != shape for v, shape in zip(small.outvars, shapes, strict=True))
        if all(role.kind is Kind.SAME for role in given):
            if grows:
                return [self.created(small, eqn)]
            zero = traits_of(name).linear and all(role.zero for role in given)
            return [_ZERO if zero else SAME for _ in shapes]
        if any(role.kind in (Kind.TOTAL, Kind.COUNT) for role in given):
            return [self.of_sums(eqn, given) for _ in shapes]
        return self.of_examples(eqn, given)

    def created(self, small: Any, eqn: Any) -> Role:
        """A value that follows from the size of the batch: the same for every example, or refused."""
        name = eqn.primitive.name
        out, before = eqn.outvars[0].aval.shape, small.outvars[0].aval.shape
        dims = [d for d, (size, other) in enumerate(zip(out, before, strict=True)) if size != other]
        uniform = name == BROADCAST and not set(dims) & set(eqn.params["broadcast_dimensions"])
        uniform |= name == IOTA and eqn.params["dimension"] not in dims
        if traits_of(name).draws:
            raise self.refused(eqn, "draws random numbers for the whole batch: micro-batches would draw others")
        if len(dims) != 1 or not uniform or out[dims[0]] != before[dims[0]] * self.times:
            raise self.refused(eqn, "makes a value that depends on an example's place in the batch")
        return Role(Kind.EACH, dim=dims[0])

    def of_sums(self, eqn: Any, given: list[Role]) -> Role:
        """The result of an equation that takes a sum over the batch, or a number that its size determines."""
        name = eqn.primitive.name
        sums = [role for role in given if role.kind is Kind.TOTAL]
        counts = prod((role.weight for role in given if role.kind is Kind.COUNT), start=Fraction(1))
        each = [role for role in given if role.kind is Kind.EACH]
        if _rounds(eqn):
            raise self.refused(eqn, "makes of a sum over the batch what is no multiple of it, but rounded")
        if name == DIV and len(given) == 2 and given[1].kind in (Kind.SAME, Kind.COUNT):
            weight = given[1].weight if given[1].kind is Kind.COUNT else Fraction(1)
            top = given[0] if given[0].kind is not Kind.SAME else Role(Kind.COUNT)
            return replace(top, weight=top.weight / weight)
        if name == MUL and len(sums) + len(each) <= 1:
            whole = (sums or each or [Role(Kind.COUNT)])[0]
            return replace(whole, weight=whole.weight * counts)
        if not sums and not each and traits_of(name).linear:
            return replace(given[0])
        if each:
            if sums:
                raise self.refused(eqn, "brings a sum over the batch to its examples: each would see the others")
            raise self.refused(eqn, "brings the size of the batch to its examples")
        if traits_of(name).linear:
            return sums[0]
        if name == DOT_GENERAL and len(sums) == 1 and counts == 1:
            return sums[0]
        if traits_of(name).combines and counts == 1:
            rest = [role for role in given[name == SELECT :] if role.kind is not Kind.TOTAL and not role.zero]
            mean = all(role.weight == Fraction(1, self.times) for role in sums)
            if len({role.weight for role in sums}) == 1 and (mean or not rest):
                return sums[0]
        if name == DIV and len(sums) == 2:
            raise self.refused(eqn, "divides by a sum over the batch: the mean of quotients is another number")
        raise self.refused(eqn, "makes of a sum over the batch what is no multiple of it")

    def of_examples(self, eqn: Any, given: list[Role]) -> list[Role]:
        """The results of an equation that takes values of each example."""
        name = eqn.primitive.name
        try:
            rule = rule_of(_eqn(eqn, self.lines))
        except MissingRuleError as error:
            raise self.refused(eqn, f"has no rule that says what it does with examples ({error.reason})") from error
        examples = [(i, role) for i, role in enumerate(given) if role.kind is Kind.EACH]
        found = {self.factors(eqn, rule, rule.operands[i], role) for i, role in examples}
        if len(found) > 1:
            raise self.refused(eqn, "brings examples together with other examples")
        factors = found.pop()
        kinds = {(rule.factors[f].kind, rule.factors[f].reduction) for f in factors}
        data = any(role.data for _, role in examples)
        weight = self.weight(eqn, given)
        if kinds == {(FactorKind.REDUCTION, "sum")} and name in _ADDING:
            if not data:
                return [Role(Kind.COUNT, weight * self.times) for _ in eqn.outvars]
            return [Role(Kind.TOTAL, weight, data=True) for _ in eqn.outvars]
        if {kind for kind, _ in kinds} - {FactorKind.PASS}:
            extremum = any(kind is FactorKind.REDUCTION and reduction != "sum" for kind, reduction in kinds)
            does = "takes a maximum or the like over" if extremum else "mixes"
            raise self.refused(eqn, f"{does} examples of the batch")
        outs: list[Role] = []
        for dims in rule.results:
            place = _place(rule, dims, factors)
            if place is None:
                raise self.refused(eqn, "mixes examples of the batch")
            outs.append(Role(Kind.EACH, weight, *place, data=data))
        return outs

    def factors(self, eqn: Any, rule: ShardingRule, dims: Dims, role: Role) -> tuple[int, ...]:
        """The factors of an operand's examples."""
        major, at = 1, 0
        dim = dims[role.dim]
        while at < len(dim) and major < role.major:
            major, at = major * rule.factors[dim[at]].size, at + 1
        size = prod(rule.factors[f].size for f in dim)
        for end in range(at, len(dim) + 1):
            inside = prod(rule.factors[f].size for f in dim[at:end])
            if major == role.major and inside == self.examples:
                return dim[at:end]
        raise self.refused(eqn, f"cuts or joins the batch in a dimension of {size}")

    def weight(self, eqn: Any, given: Sequence[Role]) -> Fraction:
        """The weight of a result, if the equation is linear in what has one."""
        name = eqn.primitive.name
        weights = [role.weight for role in given if role.kind is Kind.EACH]
        if all(weight == 1 for weight in weights):
            return Fraction(1)
        if name in (MUL, DOT_GENERAL):
            return prod(weights, start=Fraction(1))
        if _rounds(eqn):
            raise self.refused(eqn, "makes of an example's share in a mean what is no multiple of it, but rounded")
        alike = len(set(weights)) == 1 and all(role.kind is Kind.EACH or role.zero for role in given)
        if traits_of(name).linear or (traits_of(name).combines and alike) or (name == DIV and given[1].weight == 1):
            return weights[0]
        raise self.refused(eqn, "makes of an example's share in a mean what is no multiple of it")

    def scan(self, small: Any, eqn: Any, given: list[Role]) -> list[Role]:
        consts, carries = _jax.scan_arity(eqn)
        carry = given[consts : consts + carries]
        slices: list[Role] = []
        for role in given[consts + carries :]:
            if role.kind is Kind.EACH and role.dim == 0:
                raise self.refused(eqn, "loops over the examples of the batch")
            slices.append(replace(role, dim=role.dim - 1) if role.kind is Kind.EACH else role)
        while True:  # a role changes once at most, from that of equal numbers
            outs = self.program(small.params["jaxpr"], eqn.params["jaxpr"], [*given[:consts], *carry, *slices])
            joined = [self.join(eqn, a, b) for a, b in zip(carry, outs, strict=False)]
            if joined == carry:
                break
            carry = joined
        stacks = [replace(role, dim=role.dim + 1) if role.kind is Kind.EACH else role for role in outs[carries:]]
        return [*carry, *stacks]

    def branches(self, small: Any, eqn: Any, given: list[Role]) -> list[Role]:
        """Loops and branches whose course depends on no example; of a `while`, on the same values throughout."""
        if eqn.primitive.name == WHILE:
            if any(role.kind is not Kind.SAME for role in given):
                raise self.refused(eqn, "may run longer for some examples than for others")
            return [SAME for _ in eqn.outvars]
        if given[0].kind is not Kind.SAME:
            raise self.refused(eqn, "takes a branch that depends on the batch")
        pairs = zip(small.params["branches"], eqn.params["branches"], strict=True)
        outs = [self.program(a, b, given[1:]) for a, b in pairs]
        found = outs[0]
        for more in outs[1:]:
            found = [self.join(eqn, a, b) for a, b in zip(found, more, strict=True)]
        return found

    def join(self, eqn: Any, one: Role, other: Role) -> Role:
        """The role of a value that is one or the other."""
        if one == other or one.zero:
            return other
        if other.zero:
            return one
        a, b = replace(one, data=False), replace(other, data=False)
        if a == b:
            return replace(one, data=one.data or other.data)
        for same, total in ((one, other), (other, one)):  # a mean of equal numbers is that number
            if same.kind is Kind.SAME and total.kind is Kind.TOTAL and total.weight == Fraction(1, self.times):
                return total
        raise self.refused(eqn, "carries a value that depends on the batch in several ways")


def _rounds(eqn: Any) -> bool:
    """Whether an equation makes whole numbers of quotients or of others: a division of integers, a cast to them."""
    here, there = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    if jnp.issubdtype(there, jnp.inexact):
        return False
    if eqn.primitive.name == CAST:  # of integers that may have wrapped around, too
        return jnp.issubdtype(here, jnp.inexact) or jnp.promote_types(here, there) != here
    return eqn.primitive.name == DIV


def _of_values(value: Any, before: Any) -> Role:
    """The role of a number or a constant, by its values in both programs."""
    if _jax.is_tracer(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        if value is before:
            return SAME
    elif before is not None and np.shape(value) == np.shape(before):
        here, there = np.asarray(value), np.asarray(before)
        if np.array_equal(here, there):
            return SAME if here.any() else _ZERO
        if here.ndim == 0 and there:
            return Role(Kind.COUNT, _ratio(float(here), float(there)))
    raise StageError("", "it holds a constant that depends on the size of the batch", WAY_OUT)


def _ratio(here: float, there: float) -> Fraction:
    """How many times as large a number is, or as small, in whole numbers where rounding leaves it open."""
    ratio = abs(here / there)
    whole = Fraction(round(ratio)) if ratio > 1 else Fraction(1, round(1 / ratio))
    return whole if abs(float(whole) / ratio - 1) < 1e-6 and here * there > 0 else Fraction(here) / Fraction(there)


def _eqn(eqn: Any, lines: _jax.SourceLines) -> Eqn:
    def avals(atoms: Sequence[Any]) -> tuple[Aval, ...]:
        return tuple(Aval(tuple(getattr(v.aval, "shape", ())), v.aval.dtype) for v in atoms)

    return Eqn(
        primitive=eqn.primitive.name,
        operands=avals(eqn.invars),
        results=avals(eqn.outvars),
        params=eqn.params,
        where=lines(eqn),
    )


def _place(rule: ShardingRule, dims: Dims, factors: tuple[int, ...]) -> tuple[int, int] | None:
    """The dimension in which factors lie side by side, and the size of what is major of them."""
    for d, dim in enumerate(dims):
        for at in range(len(dim)):
            if dim[at : at + len(factors)] == factors:
                return d, prod(rule.factors[f].size for f in dim[:at])
    return None
