"""Control flow: primitives with a body have no rule of their own; their body's equations have.

Calls are seen through when the graph is built, loops and branches are nodes with a body.
Declared here so that one which arrives at a rule is reported as what it is. Calls of the
host have a rule: the compiler brings their operands together on one device.
"""

from autoshard.graph import Eqn
from autoshard.rules.rule import ShardingRule, refuse, register, whole

BODIES = (
    *("call", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_lin", "custom_vjp_call"),
    *("eval_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "shard_map", "while"),
)

refuse(dict.fromkeys(BODIES, "it has a body, whose equations have the rules, and none of its own"))


@register("debug_callback", "debug_print", "io_callback", "pure_callback")
def host_call(eqn: Eqn) -> ShardingRule:
    """Every dimension must be whole."""
    return whole(eqn)
