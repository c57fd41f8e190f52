"""What a program computes in exact arithmetic, as far as tests need it: the same equations in float64.

Two programs in float32 that sum in different orders are each off; the difference of both says
neither which nor how far. Against float64 each is judged by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from autoshard import _jax
from autoshard.ir.graph import CALLS


def exact(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` with float64 wherever the traced program has float32: arguments, constants, casts and bodies.

    Args:
      fn: a function of pytrees of arrays.
      args: its arguments.

    Returns:
      Its results, numpy arrays; what is not float32 keeps its dtype.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat = [_wide(np.asarray(leaf)) for leaf in jax.tree.leaves(args)]
    with jax.enable_x64(True):
        got = jax.jit(lambda *xs: _evaluate(closed, xs))(*flat)
    return jax.tree.unflatten(jax.tree.structure(shapes), [np.asarray(leaf) for leaf in got])


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = _jax.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_wide, _jax.consts_of(closed)), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return _wide(atom.val) if _jax.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            results = _evaluate(eqn.params[CALLS[eqn.primitive.name]], operands)
        else:
            results = _jax.bind(eqn, {key: _wide(value) for key, value in eqn.params.items()}, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _wide(value: Any) -> Any:
    """An array, a dtype or a body with float64 in float32's place; anything else as it is."""
    if _jax.is_jaxpr(value):
        avals = [v.aval for v in _jax.open_jaxpr(value).invars]
        wide = [jax.ShapeDtypeStruct(a.shape, _wide(a.dtype), weak_type=a.weak_type) for a in avals]
        traced = jax.make_jaxpr(lambda *xs: _evaluate(value, xs))(*wide)
        return traced if isinstance(value, ClosedJaxpr) else _jax.open_jaxpr(traced)
    if type(value) is tuple:
        return tuple(_wide(item) for item in value)
    if isinstance(value, np.dtype | type):
        return np.dtype(np.float64) if value == np.float32 else value
    return np.asarray(value, np.float64) if getattr(value, "dtype", None) == np.float32 else value
