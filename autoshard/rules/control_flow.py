"""Control flow: primitives with a body have no rule of their own; their body's equations have.

The graph opens calls, loops and branches before any rule is looked up. Their primitives
are refused here, so that a missing-rule error explains itself. Calls of the host have a
rule: the compiler brings their operands together on one device.
"""

from autoshard.ir.graph import Eqn
from autoshard.ir.op_traits import DERIVE, KEEP, PREDICATE, RECALL
from autoshard.rules.rule import FactorKind, RuleBuilder, ShardingRule, refuse, register, whole

BODIES = (
    *("call", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_lin", "custom_vjp_call"),
    *("custom_vmap_call", "eval_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while"),
)

refuse(dict.fromkeys(BODIES, "it has a body, whose equations have the rules, and none of its own"))


@register("shard_map")
def manual(eqn: Eqn) -> ShardingRule:
    """Keeps every dimension whole: its author has given the layouts (`autoshard.ir.manual_calls`)."""
    return whole(eqn)


HOST_CALLS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


@register(*HOST_CALLS)
def host_call(eqn: Eqn) -> ShardingRule:
    """Every dimension must be whole."""
    return whole(eqn)


@register("loop_const", "loop_carry", "loop_result", "branch_join", PREDICATE, KEEP, RECALL)
def carried(eqn: Eqn) -> ShardingRule:
    """Every dimension passes: a value enters or leaves a body unchanged, from one branch or several, or lives on."""
    b = RuleBuilder()
    dims = b.dims(eqn.results[0].shape)
    return b.rule([dims] * len(eqn.operands), [dims])


@register("loop_slice")
def loop_slice(eqn: Eqn) -> ShardingRule:
    """The stacked dimension is whole: if it were split, compilers would gather the whole stack in every trip."""
    b = RuleBuilder()
    stacked = b.dims(eqn.operands[0].shape[:1], FactorKind.REPLICATE)
    rest = b.dims(eqn.results[0].shape)
    return b.rule([[*stacked, *rest]], [rest])


@register("loop_stack")
def loop_stack(eqn: Eqn) -> ShardingRule:
    """The stacked dimension is whole, because it is filled trip by trip."""
    b = RuleBuilder()
    stacked = b.dims(eqn.results[0].shape[:1], FactorKind.REPLICATE)
    rest = b.dims(eqn.operands[0].shape)
    return b.rule([rest], [[*stacked, *rest]])


@register(DERIVE)
def derived(eqn: Eqn) -> ShardingRule:
    """Every dimension passes, of operands of the same shape; from whatever layout of the others."""
    b = RuleBuilder()
    (result,) = eqn.results
    dims = b.dims(result.shape)
    operands = [dims if o.shape == result.shape else b.dims(o.shape, FactorKind.REPLICATE) for o in eqn.operands]
    return b.rule(operands, [dims])
