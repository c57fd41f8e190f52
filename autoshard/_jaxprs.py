"""Jaxprs taken apart and put together: with `_jax`, the only room that may reach past the public API."""

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax.extend import core as jex_core

from autoshard import _jax

# How later JAX names the kinds of a loop's inputs; JAX 0.10 has their numbers.
flattree: Any = importlib.util.find_spec("jax._src.flattree") and importlib.import_module("jax._src.flattree")


def equations_within(eqn: Any) -> Iterable[Any]:
    """All equations of the bodies in an equation's parameters."""
    for body in _jax.sub_jaxprs(eqn.params):
        yield from _jax.equations(body)


def is_transposed(eqn: Any) -> bool:
    """Whether reverse-mode differentiation made an equation: of the derivatives in its name stack, by the outermost."""
    for scope in eqn.source_info.name_stack.stack:
        if isinstance(scope, source_info_util.Transform) and scope.name in ("jvp", "transpose"):
            return scope.name == "transpose"
    return False


def within(call: Any, eqn: Any) -> Any:
    """An equation of a call's body in the place of the call: its name stack under the call's."""
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def repeated(eqn: Any, invars: Sequence[Any], outvars: Sequence[Any], scope: str) -> Any:
    """A copy of an equation over other variables, its name stack one scope deeper."""
    source = eqn.source_info.replace(name_stack=eqn.source_info.name_stack.extend(scope))
    return eqn.replace(invars=list(invars), outvars=list(outvars), source_info=source)


def variable(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def is_unnamed(var: Any) -> bool:
    """Whether a variable stands for a result that nobody takes."""
    return isinstance(var, core.DropVar)


def stacked(aval: Any, length: int) -> Any:
    """The abstract value of a scan's stack of so many."""
    return core.unmapped_aval(length, 0, aval)


def barrier(near: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An `optimization_barrier` equation with the source line of another one."""
    return core.new_jaxpr_eqn(list(invars), list(outvars), _BARRIER, {}, core.no_effects, near.source_info, near.ctx)


_BARRIER = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


def scan_again(eqn: Any, body: Any, consts: Sequence[Any], carries: Sequence[Any], slices: Sequence[Any]) -> Any:
    """A scan with another body, other constants and slices.

    Args:
      eqn: the scan, its results named.
      body: a closed jaxpr; its results are the carries, then the stacked outputs.
      consts: variables around the scan, for its constants.
      carries: variables for its carries.
      slices: variables for its sliced inputs.
    """
    stacks = len(_jax.open_jaxpr(body).outvars) - len(carries)
    if "num_consts" in eqn.params:
        arity: dict[str, Any] = {"num_consts": len(consts), "num_carry": len(carries)}
    else:
        nones, pack = flattree.nones, flattree.pack
        arity = {
            "ft_in": pack((nones(len(consts)), nones(len(carries)), nones(len(slices)))),
            "ft_out": pack((nones(len(carries)), nones(stacks))),
        }
    return eqn.replace(invars=[*consts, *carries, *slices], params={**eqn.params, **arity, "jaxpr": body})


def rewired(closed: Any, *, eqns: Sequence[Any], invars: Any = None, outvars: Any = None, consts: Any = None) -> Any:
    """A closed jaxpr with other equations, and other inputs, results or constants where they are given.

    Args:
      closed: the jaxpr.
      eqns: its equations.
      invars: variables; None leaves them.
      outvars: variables and literals; None leaves them.
      consts: (variable, value) of every constant; None leaves them.
    """
    jaxpr = _jax.open_jaxpr(closed)
    named = list(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True)) if consts is None else list(consts)
    new = jaxpr.replace(
        constvars=[var for var, _ in named],
        invars=jaxpr.invars if invars is None else list(invars),
        outvars=jaxpr.outvars if outvars is None else list(outvars),
        eqns=list(eqns),
    )
    return jex_core.ClosedJaxpr(new, [value for _, value in named])


def without_dead(closed: Any) -> Any:
    """A closed jaxpr without the equations, stacks and slices that nothing depends on; its inputs stay."""
    jaxpr = _jax.open_jaxpr(closed)
    alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return alive if _jax.consts_of(alive) else jex_core.ClosedJaxpr(alive, list(_jax.consts_of(closed)))


def check(jaxpr: Any) -> None:
    """Raises JAX's own error if an open jaxpr is not well-formed."""
    core.check_jaxpr(jaxpr)
