"""Control flow: primitives with a body have no rule of their own; their body's equations have.

Calls are seen through when the graph is built, loops and branches are nodes with a body.
Declared here so that one which arrives at a rule is reported as what it is.
"""

from autoshard.rules.rule import refuse

BODIES = (
    *("call", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_lin", "custom_vjp_call"),
    *("eval_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while"),
)

refuse(dict.fromkeys(BODIES, "its body's equations have rules, it has none of its own; the graph sees into it"))
