"""Call shardings: turns shardings at the edges of inner calls into constraints of their own.

The shardings of an inner `jax.jit`, and of a `device_put`, ask for layouts just as a
`with_sharding_constraint` does; the calls themselves are opened.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard import _jax

_EDGES = {"jit": ("in_shardings", "out_shardings"), "pjit": ("in_shardings", "out_shardings")}


def explicit(closed: Any) -> Any:
    """A closed jaxpr in which shardings of inner `jax.jit`s and of `device_put` are constraints of their own."""
    if not any(any(_edges(eqn)) for eqn in _jax.equations(closed)):
        return closed
    return _explicit_in(closed)


def _edges(eqn: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The shardings that an equation gives its operands and its results: position → NamedSharding."""
    names = _EDGES.get(eqn.primitive.name)
    if names is not None:
        given = tuple(eqn.params[name] for name in names)
    elif eqn.primitive.name == "device_put":
        given = (), [d if getattr(d, "memory_kind", None) in (None, "device") else None for d in eqn.params["devices"]]
    else:
        return {}, {}
    takes, makes = ({i: s for i, s in enumerate(ss) if isinstance(s, NamedSharding)} for ss in given)
    return {i: s for i, s in takes.items() if not _jax.is_literal(eqn.invars[i])}, makes


def _explicit(jaxpr: Any) -> Any:
    """As `explicit`, of an open jaxpr."""
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        takes, makes = _edges(eqn)
        before, after = [], []
        invars, outvars = list(eqn.invars), list(eqn.outvars)
        for i, sharding in takes.items():
            constraint = _constraint(invars[i].aval, sharding, eqn)
            before.append(constraint.replace(invars=[invars[i]]))
            invars[i] = constraint.outvars[0]
        for i, sharding in makes.items():
            constraint = _constraint(outvars[i].aval, sharding, eqn)
            after.append(constraint.replace(outvars=[outvars[i]]))
            outvars[i] = constraint.invars[0]
        params = {k: _explicit_in(v) for k, v in eqn.params.items()}
        for name in _EDGES.get(eqn.primitive.name, ()):
            params[name] = tuple(_jax.ANYWHERE if isinstance(s, NamedSharding) else s for s in params[name])
        if eqn.primitive.name == "device_put":
            params["devices"] = tuple(None if i in makes else d for i, d in enumerate(params["devices"]))
        eqns += [*before, eqn.replace(invars=invars, outvars=outvars, params=params), *after]
    return jaxpr.replace(eqns=eqns)


def _explicit_in(param: Any) -> Any:
    if isinstance(param, tuple):
        return tuple(_explicit_in(item) for item in param)
    if not _jax.is_jaxpr(param):
        return param
    inner = _explicit(_jax.open_jaxpr(param))
    return param.replace(jaxpr=inner) if isinstance(param, ClosedJaxpr) else inner


def _constraint(aval: Any, sharding: Any, eqn: Any) -> Any:
    """An equation that constrains a value to a sharding, at an equation's line, from a variable to another one."""
    if isinstance(sharding.mesh, Mesh):
        auto = (AxisType.Auto,) * len(sharding.mesh.axis_names)
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names, axis_types=auto)
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    shaped = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    made = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(shaped)
    (constraint,) = _jax.open_jaxpr(made).eqns
    return constraint.replace(source_info=eqn.source_info)
