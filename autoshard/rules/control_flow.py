"""Control flow: primitives with a body have no rule of their own; their body's equations have.

Calls are seen through when the graph is built, loops and branches are nodes with a body.
Declared here so that one which arrives at a rule is reported as what it is. Calls of the
host have a rule: the compiler brings their operands together on one device.
"""

from autoshard.ir.graph import Eqn
from autoshard.rules.rule import FactorKind, RuleBuilder, ShardingRule, refuse, register, whole

BODIES = (
    *("call", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_lin", "custom_vjp_call"),
    *("custom_vmap_call", "eval_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while"),
)

refuse(dict.fromkeys(BODIES, "it has a body, whose equations have the rules, and none of its own"))


@register("shard_map")
def manual(eqn: Eqn) -> ShardingRule:
    """Nothing to choose: its author has given the layouts (`autoshard.ir.manual_calls`)."""
    return whole(eqn)


HOST_CALLS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


@register(*HOST_CALLS)
def host_call(eqn: Eqn) -> ShardingRule:
    """Every dimension must be whole."""
    return whole(eqn)


@register("loop_const", "loop_carry", "loop_result", "branch_join")
def carried(eqn: Eqn) -> ShardingRule:
    """A value that enters or leaves a body as it is, from one branch or several."""
    b = RuleBuilder()
    dims = b.dims(eqn.results[0].shape)
    return b.rule([dims] * len(eqn.operands), [dims])


@register("loop_slice")
def loop_slice(eqn: Eqn) -> ShardingRule:
    """The stacked dimension is whole: split, the compilers would gather the whole stack in every trip."""
    b = RuleBuilder()
    stacked = b.dims(eqn.operands[0].shape[:1], FactorKind.REPLICATE)
    rest = b.dims(eqn.results[0].shape)
    return b.rule([[*stacked, *rest]], [rest])


@register("loop_stack")
def loop_stack(eqn: Eqn) -> ShardingRule:
    """The stacked dimension is whole, as it is filled trip by trip."""
    b = RuleBuilder()
    stacked = b.dims(eqn.results[0].shape[:1], FactorKind.REPLICATE)
    rest = b.dims(eqn.operands[0].shape)
    return b.rule([rest], [[*stacked, *rest]])
