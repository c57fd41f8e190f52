"""Shape: elements move, none is computed; dimensions are renamed, split, merged or shifted.

Reshape needs compound factors, as in Shardy: `[B·S] -> [B,S]` has the factors b and s,
and its operand's one dimension is (b, s), major to minor. Where a dimension is cut or
extended (`slice`, `pad`, `split`) shard boundaries of operand and result do
not meet: the largest common factor is a permutation, the rest must be whole.
"""

from math import gcd

from autoshard.ir.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register, shifted

FIRST = (frozenset({0}),)


@register("broadcast_in_dim")
def broadcast_in_dim(eqn: Eqn) -> ShardingRule:
    """New and expanded dimensions belong to the result alone."""
    build = RuleBuilder()
    result = build.dims(eqn.results[0].shape)
    operand = [
        result[out] if size == eqn.results[0].shape[out] else ()
        for size, out in zip(eqn.operands[0].shape, eqn.params["broadcast_dimensions"], strict=True)
    ]
    return build.rule([operand], [result], FIRST)


@register("concatenate")
def concatenate(eqn: Eqn) -> ShardingRule:
    """The joined dimension must be whole (no neighbour exchange joins it), the others pass."""
    axis, (out,) = eqn.params["dimension"], eqn.results
    build = RuleBuilder()
    before, after = build.dims(out.shape[:axis]), build.dims(out.shape[axis + 1 :])
    operands, (result,) = (
        [[*before, *build.dims((aval.shape[axis],), FactorKind.REPLICATE), *after] for aval in side]
        for side in (eqn.operands, eqn.results)
    )
    return build.rule(operands, [result], _all_operands(eqn))


@register("expand_dims", "reshape", "squeeze")
def reshape(eqn: Eqn) -> ShardingRule:
    """The common refinement of both shapes; see `refine`."""
    build = RuleBuilder()
    operand, result = refine(build, eqn.operands[0].shape, eqn.results[0].shape)
    return build.rule([operand], [result], FIRST)


@register("empty", "empty2", "iota", "iota_2x32_shape", "platform_index")
def creation(eqn: Eqn) -> ShardingRule:
    """Each shard makes its own part."""
    build = RuleBuilder()
    dims = build.dims(eqn.results[0].shape)
    return build.rule([], [dims for _ in eqn.results])


@register("pad", "slice")
def cut(eqn: Eqn) -> ShardingRule:
    """Dimensions that keep their elements pass; cut or padded ones are permutations.

    A dimension padded at one end by as much as it is cut at the other hops: its elements move along it.

    The padding value is a scalar that counts once per shard: a padded partial sum is
    right only where that value is itself a partial sum.
    """
    operand, out = eqn.operands[0], eqn.results[0]
    build = RuleBuilder()
    pairs = [
        _same(build, size) if same else [build.hop(size)] * 2 if hops else shifted(build, size, out.shape[d])
        for d, (size, same, hops) in enumerate(zip(operand.shape, _is_untouched(eqn), _hops(eqn), strict=True))
    ]
    scalars: list[list[Dim]] = [[] for _ in eqn.operands[1:]]
    return build.rule([[pair[0] for pair in pairs], *scalars], [[pair[1] for pair in pairs]], _all_operands(eqn))


@register("rev")
def rev(eqn: Eqn) -> ShardingRule:
    """Reversed dimensions are permutations, the others pass."""
    build, reversed_dims = RuleBuilder(), set(eqn.params["dimensions"])
    dims = [
        _same(build, size, FactorKind.PERMUTATION if d in reversed_dims else FactorKind.PASS)[0]
        for d, size in enumerate(eqn.operands[0].shape)
    ]
    return build.rule([dims], [dims], FIRST)


@register("split")
def split(eqn: Eqn) -> ShardingRule:
    """The cut dimension is a permutation, the others pass."""
    axis, (operand,) = eqn.params["axis"], eqn.operands
    build = RuleBuilder()
    dims = [*build.dims(operand.shape[:axis]), (), *build.dims(operand.shape[axis + 1 :])]
    dims[axis], *parts = shifted(build, operand.shape[axis], *(out.shape[axis] for out in eqn.results))
    return build.rule([dims], [[*dims[:axis], part, *dims[axis + 1 :]] for part in parts], FIRST)


@register("stack")
def stack(eqn: Eqn) -> ShardingRule:
    """The new dimension must be whole: its parts come from different operands."""
    axis = eqn.params["axis"]
    build = RuleBuilder()
    kept = build.dims(eqn.operands[0].shape)
    new = build.dims((len(eqn.operands),), FactorKind.REPLICATE)
    result = [*kept[:axis], *new, *kept[axis:]]
    return build.rule([kept for _ in eqn.operands], [result], _all_operands(eqn))


@register("tile")
def tile(eqn: Eqn) -> ShardingRule:
    """A tiled dimension is (repetition, element), major to minor."""
    (operand,), (out,) = eqn.operands, eqn.results
    build = RuleBuilder()
    dims = build.dims(operand.shape)
    times = [out_size // max(size, 1) for size, out_size in zip(operand.shape, out.shape, strict=True)]
    result = [(*new, *dim) for new, dim in zip(build.dims(tuple(times)), dims, strict=True)]
    return build.rule([dims], [result], FIRST)


@register("transpose")
def transpose(eqn: Eqn) -> ShardingRule:
    """Permutes the dimensions."""
    build = RuleBuilder()
    dims = build.dims(eqn.operands[0].shape)
    return build.rule([dims], [[dims[d] for d in eqn.params["permutation"]]], FIRST)


@register("unstack")
def unstack(eqn: Eqn) -> ShardingRule:
    """The dropped dimension must be whole: its parts go to different results."""
    axis, (operand,) = eqn.params["axis"], eqn.operands
    build = RuleBuilder()
    kept = build.dims(eqn.results[0].shape)
    dropped = build.dims((operand.shape[axis],), FactorKind.REPLICATE)
    return build.rule([[*kept[:axis], *dropped, *kept[axis:]]], [kept for _ in eqn.results], FIRST)


def refine(build: RuleBuilder, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[list[Dim], list[Dim]]:
    """Factors of two shapes of equal element count, walked from major to minor.

    The common divisor of the two extents at hand is a factor of both: a block of the source is
    a block of the target. Where they have nothing in common (`[4,3] -> [6,2]`: after the
    common 2, `[2,3]` and `[3,2]` are left) all dimensions up to the next place where both
    sides have walked the same count must be whole.
    """
    if 0 in source or 0 in target:
        return build.dims(source, FactorKind.REPLICATE), build.dims(target, FactorKind.REPLICATE)
    ins: list[Dim] = [()] * len(source)
    outs: list[Dim] = [()] * len(target)
    # Stacks of (dimension, extent still to walk), the major-most on top.
    left = [(d, size) for d, size in enumerate(source) if size > 1][::-1]
    right = [(d, size) for d, size in enumerate(target) if size > 1][::-1]

    def walk_whole(stack: list[tuple[int, int]], dims: list[Dim]) -> int:
        d, size = stack.pop()
        dims[d] += (build.new(size, FactorKind.REPLICATE),)
        return size

    while left:  # both end together
        (d, size), (e, other) = left[-1], right[-1]
        common = gcd(size, other)
        if common > 1:
            factor = (build.new(common),)
            ins[d] += factor
            outs[e] += factor
            for stack, at, rest in ((left, d, size // common), (right, e, other // common)):
                stack[-1:] = [(at, rest)] if rest > 1 else []
        else:
            walked_in, walked_out = walk_whole(left, ins), walk_whole(right, outs)
            while walked_in != walked_out:
                if walked_in < walked_out:
                    walked_in *= walk_whole(left, ins)
                else:
                    walked_out *= walk_whole(right, outs)
    return ins, outs


def _same(build: RuleBuilder, size: int, kind: FactorKind = FactorKind.PASS) -> list[Dim]:
    """One dimension that is the same in operand and result."""
    return [*build.dims((size,), kind)] * 2


def _is_untouched(eqn: Eqn) -> list[bool]:
    """Per dimension of a `pad` or `slice`: whether every element stays in its place."""
    if eqn.primitive == "pad":
        return [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    return [size == out for size, out in zip(eqn.operands[0].shape, eqn.results[0].shape, strict=True)]


def _hops(eqn: Eqn) -> list[bool]:
    """Per dimension of a `pad` or `slice`: whether its elements move along it, and as many leave as enter."""
    if eqn.primitive != "pad":
        return [False for _ in eqn.operands[0].shape]
    return [low == -high and low != 0 and not interior for low, high, interior in eqn.params["padding_config"]]


def _all_operands(eqn: Eqn) -> tuple[frozenset[int], ...]:
    return (frozenset(range(len(eqn.operands))),)
