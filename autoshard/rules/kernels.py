"""Kernels: attention by Pallas kernels that ship with JAX, and by cuDNN.

A rule for a Pallas kernel lists the dimensions along which the kernel works on each position
independently. Its grid must agree: `rule_of` keeps a dimension whole unless the grid walks over
it block by block.
"""

from autoshard.ir.graph import Eqn
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


# jax.nn.dot_product_attention(implementation="cudnn"): the operands and results of its primitives, by position.
CUDNN_OPERANDS = ("q", "kv", "kv", "bias", *("lengths",) * 6)
CUDNN_FORWARD, CUDNN_BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"


@register(CUDNN_FORWARD, CUDNN_BACKWARD)
def cudnn_attention(eqn: Eqn) -> ShardingRule:
    """Batch and heads pass, positions and features must be whole, as cuDNN's partitioning in JAX has it.

    With G query heads per head of keys, the query heads are (heads, G). The gradient of a
    bias is summed over the dimensions that the bias lacks: then nothing is split.
    """
    query, keys = eqn.operands[:2]
    heads_first = eqn.params["layout"] == 1  # BNTH, else BTNH
    at = 1 if heads_first else 2
    build = RuleBuilder()
    summed = eqn.primitive == CUDNN_BACKWARD and len(eqn.results) > 3
    kind = FactorKind.REPLICATE if summed else FactorKind.PASS
    batch, heads = build.dims((query.shape[0], keys.shape[at]), kind)
    groups = build.dims((query.shape[at] // keys.shape[at],), FactorKind.REPLICATE)[0]
    of_queries: Dim = (*heads, *groups)

    def dims(role: str, shape: tuple[int, ...]) -> list[Dim]:
        rest = build.dims(shape, FactorKind.REPLICATE)
        if role in ("q", "kv"):
            rest[0], rest[at] = batch, of_queries if role == "q" else heads
        elif role in ("lse", "bias"):
            split = len(shape) > 1
            rest[:2] = [
                batch if split and shape[0] == query.shape[0] else rest[0],
                *([of_queries if shape[1] == query.shape[at] else rest[1]] if split else []),
            ]
        elif shape[0] == query.shape[0]:
            rest[0] = batch
        return rest

    forward = eqn.primitive == CUDNN_FORWARD
    takes = CUDNN_OPERANDS if forward else (*CUDNN_OPERANDS, "lse", "q", "q")
    makes = ("q", "lse") if forward else ("q", "kv", "kv", "bias")
    return build.rule(
        [dims(role, a.shape) for role, a in zip(takes, eqn.operands, strict=True)],
        [dims(role, a.shape) for role, a in zip(makes, eqn.results, strict=False)],
    )
