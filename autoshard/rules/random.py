"""Random: bits from keys; a counter-based generator makes any part of them in place.

With `jax_threefry_partitionable` (the default since JAX 0.5) the bits of a result
element depend on the key and the element's position alone, so every shard makes its
own. XLA's `RngBitGenerator` does not: its result must be whole.
"""

from autoshard.ir.graph import Eqn
from autoshard.rules.rule import FactorKind, RuleBuilder, ShardingRule, register, whole


@register("random_bits", "random_split")
def from_keys(eqn: Eqn) -> ShardingRule:
    """The keys' dimensions come first and pass; the new ones belong to the result."""
    (keys,), (out,) = eqn.operands, eqn.results
    kind = FactorKind.PASS if "fry" in str(keys.dtype) else FactorKind.REPLICATE
    build = RuleBuilder()
    batch = build.dims(keys.shape)
    return build.rule([batch], [batch + build.dims(out.shape[keys.ndim :], kind)])


@register("random_clone", "random_fold_in", "random_gamma", "random_seed")
def per_key(eqn: Eqn) -> ShardingRule:
    """Pointwise over keys; a scalar message is whole."""
    build = RuleBuilder()
    dims = build.dims(eqn.results[0].shape)
    return build.rule([list(dims) if operand.ndim else [] for operand in eqn.operands], [dims])


@register("random_wrap", "random_unwrap")
def wrapping(eqn: Eqn) -> ShardingRule:
    """The words of a key are one element: their dimensions must be whole."""
    (source,), (target,) = eqn.operands, eqn.results
    build = RuleBuilder()
    short = build.dims(min(source.shape, target.shape, key=len))
    words = max(source.shape, target.shape, key=len)[len(short) :]
    long = short + build.dims(words, FactorKind.REPLICATE)
    return build.rule([long if source.ndim > target.ndim else short], [long if target.ndim > source.ndim else short])


@register("rng_bit_generator", "rng_uniform")
def stateful(eqn: Eqn) -> ShardingRule:
    """The bits depend on the shape of the whole result: every dimension must be whole."""
    return whole(eqn)
