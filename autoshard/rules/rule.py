"""ShardingRule: which dimensions of an equation may be split, and the consequences of splitting them.

A rule names the loop indices (*factors*) of an equation, in Shardy's terms. Every
dimension of every operand and result is a product of factors, major to minor:

    dot_general   ([i,j],[j,k])->([i,k]) {i=8,j=16,k=32} reduction={j}
    reshape       ([ij])->([i,j]) {i=4,j=8}

The kind of a factor says what happens when it is split over a mesh axis: *pass-through*
costs nothing, *reduction* leaves the results unreduced over that axis,
*permutation* needs a halo or a permute, *replicate* is not possible. Values without
the factor are whole over the axis. A permutation is split only where it *hops*, one element
per shard. A factor that is minor of others in some dimension
can be split only when these are split fully. A rule never sees a mesh, a cost or a
tracer.

Rules describe XLA's SPMD partitioner, which is the same for CPU, GPU and TPU. If the
partitioner communicates where the mathematics need not, the rule says *replicate*. Kernels
that run on each device's part are the exception (`autoshard.ir.manual_calls`).
"""

import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd, prod
from typing import Any

from autoshard import _jax
from autoshard.errors import MissingRuleError, RuleError
from autoshard.ir.block_maps import DimRef, named, walks
from autoshard.ir.graph import Eqn
from autoshard.ir.op_traits import PALLAS


class FactorKind(StrEnum):
    """The effect of splitting a factor over a mesh axis."""

    PASS = "pass"  # each shard computes its part
    REDUCTION = "reduction"  # results are unreduced over the axis
    PERMUTATION = "permutation"  # a halo or a permute is needed
    REPLICATE = "replicate"  # the dimension must be whole


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop index: its size, its kind, and for reductions the operation.

    A permutation that `hops` moves every element by as many places as there are between two
    shards of one element each: split to the last element, it is one collective-permute.
    """

    size: int
    kind: FactorKind = FactorKind.PASS
    reduction: str = ""  # "sum", "max", "min", "prod", "and", "or", "xor", "argmax", "argmin"
    hops: bool = False

    def __post_init__(self) -> None:
        if (self.kind is FactorKind.REDUCTION) != bool(self.reduction):
            raise RuleError(f"a reduction factor names its operation, others do not: {self}")


Dim = tuple[int, ...]  # factor indices, major to minor; () for a dimension of size 1
Dims = tuple[Dim, ...]  # one value's dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """The factors of one equation, and where each lies in operands and results.

    `linear` lists sets of operands through which partial sums may flow: if every
    operand of one set is unreduced over an axis and the other operands are whole
    on it, the results are unreduced over it too. `add` has one set of two,
    `transpose` one set of one, `dot_general` two sets of one.

    Invariant: each dimension's size is the product of its factors' sizes.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[int], ...] = ()

    def check(self, eqn: Eqn) -> None:
        """Raises RuleError unless the rule covers every dimension of `eqn`."""
        for what, dims_of, avals in (
            ("operand", self.operands, eqn.operands),
            ("result", self.results, eqn.results),
        ):
            if len(dims_of) != len(avals):
                raise RuleError(f"{eqn.primitive}: {len(dims_of)} {what}s in the rule, {len(avals)} in the equation")
            for position, (dims, aval) in enumerate(zip(dims_of, avals, strict=True)):
                sizes = tuple(prod(self.factors[f].size for f in dim) for dim in dims)
                if sizes != aval.shape:
                    raise RuleError(
                        f"{eqn.primitive}: {what} {position} has shape {aval.shape}, the rule says {sizes}: {self}"
                    )

    def __str__(self) -> str:
        names = _factor_names(len(self.factors))

        def side(values: tuple[Dims, ...]) -> str:
            return ",".join(
                "[" + ",".join("".join(names[f] for f in dim) or "1" for dim in dims) + "]" for dims in values
            )

        sizes = ",".join(f"{n}={f.size}" for n, f in zip(names, self.factors, strict=True))
        text = f"({side(self.operands)})->({side(self.results)}) {{{sizes}}}"
        for kind in (FactorKind.REDUCTION, FactorKind.PERMUTATION, FactorKind.REPLICATE):
            members = [
                n + (f":{f.reduction}" if f.reduction not in ("", "sum") else "")
                for n, f in zip(names, self.factors, strict=True)
                if f.kind is kind
            ]
            if members:
                text += f" {kind}={{{','.join(members)}}}"
        return text


def _factor_names(count: int) -> list[str]:
    letters = string.ascii_lowercase[8:] + string.ascii_lowercase[:8]  # i, j, k, … as Shardy
    return [letters[i % 26] + ("" if i < 26 else f"_{i // 26}") for i in range(count)]


class RuleBuilder:
    """Collects factors while a rule function walks an equation's dimensions."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, kind: FactorKind = FactorKind.PASS, reduction: str = "") -> int:
        """Adds a factor and returns its index."""
        self.factors.append(Factor(size, kind, reduction))
        return len(self.factors) - 1

    def hop(self, size: int) -> Dim:
        """One new factor whose elements move along it, all by as many places; size 1 has none."""
        if size == 1:
            return ()
        self.factors.append(Factor(size, FactorKind.PERMUTATION, hops=True))
        return (len(self.factors) - 1,)

    def dims(self, shape: tuple[int, ...], kind: FactorKind = FactorKind.PASS, reduction: str = "") -> list[Dim]:
        """One new factor per dimension; dimensions of size 1 have none."""
        return [(self.new(size, kind, reduction),) if size != 1 else () for size in shape]

    def rule(
        self,
        operands: list[list[Dim]],
        results: list[list[Dim]],
        linear: tuple[frozenset[int], ...] = (),
    ) -> ShardingRule:
        """The rule, its factors numbered in order of appearance: equal rules are equal values."""
        number: dict[int, int] = {}
        sides = tuple(
            tuple(tuple(tuple(number.setdefault(f, len(number)) for f in dim) for dim in dims) for dims in side)
            for side in (operands, results)
        )
        return ShardingRule(
            factors=tuple(self.factors[f] for f in number),
            operands=sides[0],
            results=sides[1],
            linear=linear,
        )


def shifted(build: RuleBuilder, *sizes: int) -> list[Dim]:
    """One dimension of several values whose elements shift against each other.

    The greatest common divisor of the sizes is one permutation factor of all of them;
    the rest of each size must be whole.
    """
    common = gcd(*sizes)
    if common == 0:
        return [build.dims((size,), FactorKind.REPLICATE)[0] for size in sizes]
    major = build.dims((common,), FactorKind.PERMUTATION)[0]
    return [(*major, *build.dims((size // common,), FactorKind.REPLICATE)[0]) for size in sizes]


def whole(eqn: Eqn, linear: tuple[frozenset[int], ...] = ()) -> ShardingRule:
    """The rule of an equation that cannot be split at all."""
    build = RuleBuilder()
    operands, results = (
        [build.dims(aval.shape, FactorKind.REPLICATE) for aval in side] for side in (eqn.operands, eqn.results)
    )
    return build.rule(operands, results, linear)


RuleFn = Callable[[Eqn], ShardingRule]
_REGISTRY: dict[str, RuleFn] = {}
_REFUSED: dict[str, str] = {}


def register(*primitives: str) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule function under primitive names; twice is an error."""

    def add(fn: RuleFn) -> RuleFn:
        for name in primitives:
            _claim(name)
            _REGISTRY[name] = fn
        return fn

    return add


def refuse(reasons: Mapping[str, str]) -> None:
    """Declares primitives that are not sharded, each with its reason."""
    for name, reason in reasons.items():
        _claim(name)
        _REFUSED[name] = reason


def unregister(primitive: str) -> None:
    """Forgets a primitive's rule or refusal, if it has one."""
    _REGISTRY.pop(primitive, None)
    _REFUSED.pop(primitive, None)


def registered() -> frozenset[str]:
    """Names of all primitives that have a rule."""
    return frozenset(_REGISTRY)


def refusals() -> Mapping[str, str]:
    """Primitives that are declared as not sharded, with the reason of each."""
    return dict(_REFUSED)


def rule_of(eqn: Eqn) -> ShardingRule:
    """The checked sharding rule of an equation.

    Raises:
      MissingRuleError: the primitive has no rule, or is refused; the message names
        the user's source line and the one-line way to register a rule.
      RuleError: the rule does not cover the equation's dimensions.
    """
    name = registry_name(eqn)
    fn = _REGISTRY.get(name) or _REGISTRY.get(eqn.primitive)
    if fn is None:
        reason = _REFUSED.get(eqn.primitive, "autoshard does not know this primitive")
        shapes = ", ".join(str(list(aval.shape)) for aval in eqn.operands)
        text = _rule_of_walks(eqn) if eqn.primitive == PALLAS else "b i k, b k j -> b i j"
        raise MissingRuleError(
            eqn.primitive,
            eqn.where,
            f"{reason} (operands {shapes})",
            f'register one: autoshard.register_rule("{name}", "{text}"), or plan with unknown="replicate"',
        )
    rule = fn(eqn)
    rule.check(eqn)
    rule = _unsplit_where_empty(eqn, rule)
    return _restrict_to_walks(eqn, rule) if eqn.primitive == PALLAS else rule


def _unsplit_where_empty(eqn: Eqn, rule: ShardingRule) -> ShardingRule:
    """The rule with every factor of a value without elements whole: JAX cannot read such a value when it is split."""
    values = zip((*rule.operands, *rule.results), (*eqn.operands, *eqn.results), strict=True)
    whole = {f for dims, aval in values if 0 in aval.shape for dim in dims for f in dim}
    if not whole:
        return rule
    factors = [
        Factor(factor.size, FactorKind.REPLICATE) if f in whole else factor for f, factor in enumerate(rule.factors)
    ]
    return replace(rule, factors=tuple(factors))


def _rule_of_walks(eqn: Eqn) -> str:
    """The rule that a kernel's grid proves: dimensions that one grid axis walks over share a letter.

    If it walks more slowly over one of them (the heads of grouped keys), that letter is the major part
    of the others.
    """
    driven = walks(eqn.params).driven
    values = (*eqn.operands, *eqn.results)
    least: dict[int, int] = {}
    for (value, d), by in driven.items():
        size = values[value].shape[d]
        least[by.axis] = min(size, least.get(by.axis, size))

    def name(value: int, d: int, size: int) -> str:
        by = driven.get((value, d))
        if by is None or size % least[by.axis]:
            return "1" if size == 1 else "_"
        letter, minor = string.ascii_lowercase[by.axis], size // least[by.axis]
        return letter if minor == 1 else f"({letter} {letter}{minor})"

    sides = (eqn.operands, eqn.results)
    starts = (0, len(eqn.operands))
    return " -> ".join(
        ", ".join(
            " ".join(name(start + i, d, size) for d, size in enumerate(aval.shape)) for i, aval in enumerate(side)
        )
        for side, start in zip(sides, starts, strict=True)
    )


def _restrict_to_walks(eqn: Eqn, rule: ShardingRule) -> ShardingRule:
    """A kernel's rule, with a factor made whole unless its grid walks over all its places in equal parts.

    Each remaining factor becomes two: the grid's parts and, minor of them, the positions within one part.
    """
    driven = walks(eqn.params).driven
    build = RuleBuilder()
    parts: dict[int, Dim] = {}
    places = _places(rule)
    for f, factor in enumerate(rule.factors):
        found = places[f]
        axes = {driven[place].axis for place in found if place in driven}
        walked = {place for place, by in driven.items() if by.axis in axes}
        major = all((*rule.operands, *rule.results)[value][d][0] == f for value, d in found)
        if factor.kind is FactorKind.PASS and len(axes) == 1 and walked == found and major:
            count = gcd(factor.size, driven[next(iter(found))].parts)
            parts[f] = (*build.dims((count,))[0], *build.dims((factor.size // count,), FactorKind.REPLICATE)[0])
        else:
            parts[f] = build.dims((factor.size,), FactorKind.REPLICATE)[0]
    operands, results = (
        [[tuple(p for f in dim for p in parts[f]) for dim in dims] for dims in side]
        for side in (rule.operands, rule.results)
    )
    return build.rule(operands, results)


def _places(rule: ShardingRule) -> list[set[DimRef]]:
    """Where each factor lies."""
    found: list[set[DimRef]] = [set() for _ in rule.factors]
    for value, dims in enumerate((*rule.operands, *rule.results)):
        for d, dim in enumerate(dims):
            for f in dim:
                found[f].add((value, d))
    return found


def kept_whole(eqn: Eqn) -> str:
    """Factors that a kernel's registered rule lets pass and its block maps do not, with the reasons.

    Factors within one block are left out.
    """
    fn = _REGISTRY.get(registry_name(eqn)) or _REGISTRY.get(eqn.primitive)
    if eqn.primitive != PALLAS or fn is None:
        return ""
    asked, allowed = fn(eqn), rule_of(eqn)
    split = {
        place
        for f, places in enumerate(_places(allowed))
        for place in places
        if allowed.factors[f].kind is FactorKind.PASS and allowed.factors[f].size > 1
    }
    walked = walks(eqn.params)
    found: list[str] = []
    for factor, places in zip(asked.factors, _places(asked), strict=True):
        axes = {axis for place in places for axis in walked.touched.get(place, ())}
        if factor.kind is FactorKind.REPLICATE or factor.size == 1 or not axes or split.intersection(places):
            continue
        others = sorted(place for place, by in walked.driven.items() if by.axis in axes and place not in places)
        reasons = [f"axis {axis} of the grid: {walked.whole[axis]}" for axis in sorted(axes) if axis in walked.whole]
        if not reasons and factor.kind is not FactorKind.PASS:
            reasons = ["what a kernel reduces, permutes or shifts along its grid is not cut"]
        elif not reasons:
            also = f"with {named(eqn.params, others[0])}" if others else "together"
            reasons = [f"the grid walks over it {also}, which the rule would say as {_rule_of_walks(eqn)!r}"]
        found.append(f"{named(eqn.params, min(places))} ({'; '.join(reasons)})")
    if not found:
        return ""
    return f"{registry_name(eqn)} at {eqn.where}: its block maps keep whole what its rule lets pass: {', '.join(found)}"


def rules_of(eqns: Iterable[Eqn], *, unknown: str = "error") -> list[ShardingRule]:
    """The rule of each equation, worked out once for all equations that are alike.

    The layers of a model repeat few distinct equations many times. Equations are alike
    if primitive, avals (the same objects, as a graph shares them) and parameters are.

    Args:
      eqns: the equations of a graph.
      unknown: "error", or "replicate" to keep equations without a rule whole.

    Raises:
      MissingRuleError: an equation has no rule and `unknown` is "error".
    """
    known: dict[Any, ShardingRule] = {}
    rules: list[ShardingRule] = []
    for eqn in eqns:
        key = (eqn.primitive, *map(id, eqn.operands), None, *map(id, eqn.results), *eqn.params.values())
        try:
            rule = known.get(key)
        except TypeError:  # a parameter that cannot be hashed
            key, rule = len(rules), None
        if rule is None:
            try:
                rule = known[key] = rule_of(eqn)
            except MissingRuleError:
                if unknown != "replicate":
                    raise
                rule = known[key] = whole(eqn)
        rules.append(rule)
    return rules


def registry_name(eqn: Eqn) -> str:
    """The most specific name for an equation's rule: `ffi_call[my_kernel]` for a foreign kernel.

    A Pallas kernel has the name that it was given, else that of its function.
    """
    if eqn.primitive == "ffi_call":
        kernel = eqn.params.get("target_name")
    elif eqn.primitive == PALLAS:
        kernel = eqn.params.get("name") or _jax.function_name(eqn.params["jaxpr"])
    else:
        kernel = None
    return f"{eqn.primitive}[{kernel}]" if kernel else eqn.primitive


def _claim(name: str) -> None:
    if name in _REGISTRY or name in _REFUSED:
        raise RuleError(f"`{name}` already has a rule")
