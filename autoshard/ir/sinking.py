"""Sinking: what every trip of a loop is given and that is made of constants alone is made in the loop instead.

JAX takes masks and fill values out of the scan that it traces, as they are the same in every
trip. XLA keeps what a loop is given in memory, at full size, and each trip reads it there;
made inside, it is part of the fusions that read it and lies nowhere.
"""

from collections.abc import Mapping
from typing import Any

from autoshard import _jax
from autoshard.ir.bodies import Body, opened

# Element by element, from positions and literals, for less than reading the result takes.
CHEAP = frozenset(
    {"iota", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "add", "sub", "mul", "neg", "select_n", "copy"}
)


def sunk(closed: Any) -> Any:
    """Returns a program whose scans make cheap constants themselves; numbers, inputs and results are the same."""
    return _sunk(opened(closed))


def _sunk(body: Body) -> Any:
    makers: dict[Any, Any] = {}  # variable → the equation that makes it of constants
    eqns: list[Any] = []
    for step in body.steps:
        eqn = step.eqn
        cheap = step.primitive in CHEAP and not eqn.effects and len(eqn.outvars) == 1
        if cheap and all(_jax.is_literal(x) or x in makers for x in eqn.invars):
            makers[eqn.outvars[0]] = eqn
        eqns.append(_with_constants(eqn, makers) if step.primitive == "scan" else eqn)
    return _jax.without_dead(body.with_steps(eqns))


def _with_constants(eqn: Any, makers: Mapping[Any, Any]) -> Any:
    """A scan that makes the constants among what it is given."""
    inner = opened(eqn.params["jaxpr"])
    consts, carries = _jax.scan_arity(eqn)
    given = list(zip(eqn.invars[:consts], inner.invars[:consts], strict=True))
    taken = [(x, var) for x, var in given if not _jax.is_literal(x) and x in makers and x.aval.shape]
    if not taken:
        return eqn
    made: dict[Any, Any] = {}
    first: list[Any] = []

    def make(x: Any, result: Any) -> None:
        maker = makers[x]
        for operand in maker.invars:
            if not _jax.is_literal(operand) and operand not in made:
                made[operand] = _jax.variable(operand.aval)
                make(operand, made[operand])
        first.append(
            maker.replace(invars=[x if _jax.is_literal(x) else made[x] for x in maker.invars], outvars=[result])
        )

    for x, var in taken:
        make(x, var)
    left = [(x, var) for x, var in given if not any(var is sunk for _, sunk in taken)]
    rest = eqn.invars[consts:]
    body = inner.with_steps(
        [*first, *(step.eqn for step in inner.steps)], invars=[*(var for _, var in left), *inner.invars[consts:]]
    )
    return _jax.scan_again(eqn, body, [x for x, _ in left], rest[:carries], rest[carries:])
