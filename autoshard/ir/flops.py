"""FLOPs of a program's contractions, without those that rematerialization repeats."""

from math import prod
from typing import Any

from autoshard import _jax
from autoshard.ir.graph import WHILE_TRIPS
from autoshard.ir.op_traits import traits_of_dot


def flops(jaxpr: Any) -> float:
    """FLOPs of every contraction; a loop counts per trip, a conditional by its largest branch.

    The arithmetic of the program as written: a masked half of attention counts.
    """
    return sum(_of(eqn) for eqn in _jax.open_jaxpr(jaxpr).eqns)


def _of(eqn: Any) -> float:
    if _jax.is_repeated(eqn):
        return 0.0
    name = eqn.primitive.name
    if name == "dot_general":
        left, right = (var.aval.shape for var in eqn.invars)
        (contracted, _), _ = numbers = eqn.params["dimension_numbers"]
        if not traits_of_dot(left, right, numbers).contraction:
            return 0.0
        return 2.0 * prod(eqn.outvars[0].aval.shape) * prod(left[d] for d in contracted)
    if name == "ragged_dot_general":
        left, right = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        return 2.0 * prod(left) * right[-1]
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        return 2.0 * prod(eqn.outvars[0].aval.shape) * prod(kernel[d] for d in numbers.rhs_spec[1:])
    inner = [flops(body) for body in _jax.sub_jaxprs(eqn.params)]
    if name == "scan":
        return eqn.params["length"] * sum(inner)
    if name == "while":
        return WHILE_TRIPS * sum(inner)
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner)
