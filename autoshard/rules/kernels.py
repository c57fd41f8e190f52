"""Kernels: Pallas kernels that ship with JAX, by the names of their functions.

A rule for a kernel says which dimensions it treats each on its own; the grid must agree
(`rule_of` keeps whole what the grid does not walk over block by block).
"""

from autoshard.graph import Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register

# jax.experimental.pallas.ops.tpu.flash_attention: the forward kernel, and two for the gradients.
FLASH = ("_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel")


@register(*(f"pallas_call[{name}]" for name in FLASH))
def flash_attention(eqn: Eqn) -> ShardingRule:
    """Batch and heads pass, wherever a value has them; positions and features must be whole."""
    build = RuleBuilder()
    batch, heads = build.dims(eqn.operands[0].shape[:2])

    def dims(shape: tuple[int, ...]) -> list[Dim]:
        leading = [batch, heads] if len(shape) == 4 else [batch]  # segment ids have no heads
        return [*leading, *build.dims(shape[len(leading) :], FactorKind.REPLICATE)]

    return build.rule([dims(a.shape) for a in eqn.operands], [dims(a.shape) for a in eqn.results])
