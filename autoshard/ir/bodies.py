"""Bodies: jaxprs with their calls opened, every equation at its path in the program.

A call without rules of its own (`jit`, `closed_call`, …) says where a function was
called and nothing of what is computed: its equations are put in its place, as
`rewrite` does when it evaluates them. Their paths stay those of `ir/graph.py`, so
that an equation here is the same equation there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.ir.graph import BODIES, CALLS, INLINED, Path

REMATS = frozenset({"checkpoint", "remat", "remat2"})

HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "infeed", "outfeed"})
IMPURE = frozenset({"rng_uniform"})  # another result every time that it runs


@dataclass(frozen=True, slots=True)
class Step:
    """An equation of a body, over the body's variables; of a literal operand, the literal."""

    eqn: Any
    path: Path

    @property
    def primitive(self) -> str:
        return self.eqn.primitive.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A closed jaxpr with its calls opened: variables and steps in program order.

    `path` is the body's: its equation's and the index of the sub-jaxpr; empty for the program.
    """

    closed: Any
    path: Path
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    consts: tuple[tuple[Any, Any], ...]
    steps: tuple[Step, ...]

    def with_steps(self, eqns: Sequence[Any], *, invars: Any = None, outvars: Any = None) -> Any:
        """The closed jaxpr of other equations over the body's variables; constants may be its inputs."""
        invars = self.invars if invars is None else invars
        given = set(invars)
        return _jax.rewired(
            self.closed,
            eqns=eqns,
            invars=invars,
            outvars=self.outvars if outvars is None else outvars,
            consts=[(var, value) for var, value in self.consts if var not in given],
        )


def opened(closed: Any, path: Path = (), *, remats: bool | None = False) -> Body:
    """A closed jaxpr as a body.

    Args:
      closed: the program, or what a loop repeats.
      path: of the body.
      remats: which `jax.checkpoint`s are opened: those of forward passes; with True those of backward passes, too;
        with None none at all.
    """
    jaxpr = _jax.open_jaxpr(closed)
    consts = list(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
    env: dict[Any, Any] = {}
    steps = list(_steps(jaxpr, path, env, consts, (), remats=remats))
    outvars = tuple(_read(env, atom) for atom in jaxpr.outvars)
    return Body(
        closed=closed,
        path=path,
        invars=tuple(jaxpr.invars),
        outvars=outvars,
        consts=tuple(consts),
        steps=tuple(steps),
    )


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if _jax.is_literal(atom) else env.get(atom, atom)


def _steps(
    jaxpr: Any,
    path: Path,
    env: dict[Any, Any],
    consts: list[tuple[Any, Any]],
    calls: Sequence[Any],
    *,
    remats: bool | None,
) -> Iterator[Step]:
    """The steps of a jaxpr; `env` renames its variables, and is extended by those of its results."""
    for index, eqn in enumerate(jaxpr.eqns):
        here = (*path, index)
        name = eqn.primitive.name
        operands = [_read(env, atom) for atom in eqn.invars]
        opens = remats is not None and (remats or not eqn.params["differentiated"]) if name in REMATS else False
        if name in INLINED or opens:
            body = eqn.params[CALLS[name]]
            inner = _jax.open_jaxpr(body)
            inside = dict(zip(inner.invars, operands, strict=True))
            for var, value in zip(inner.constvars, _jax.consts_of(body), strict=True):
                inside[var] = _jax.variable(var.aval)
                consts.append((inside[var], value))
            yield from _steps(inner, (*here, 0), inside, consts, (*calls, eqn), remats=remats)
            env.update((var, _read(inside, atom)) for var, atom in zip(eqn.outvars, inner.outvars, strict=True))
            continue
        results = list(eqn.outvars)
        if calls:  # a body that is called twice makes other values each time
            results = [_jax.variable(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, results, strict=True))
        new = eqn.replace(invars=operands, outvars=results)
        for call in reversed(calls):
            new = _jax.within(call, new)
        yield Step(new, here)


def why_once(eqn: Any) -> str:
    """Returns the reason why an equation must not run twice; empty if it may."""
    names = [eqn.primitive.name, *(inner.primitive.name for inner in _jax.equations_within(eqn))]
    for name in names:
        if name in HOST_CALLS:
            return f"{name} calls the host"
        if name in IMPURE:
            return f"{name} gives another result each time"
    if any(_jax.is_on_host(var.aval) for var in (*eqn.invars, *eqn.outvars)):
        return f"{eqn.primitive.name} has a value in the host's memory"
    return f"{eqn.primitive.name} has effects" if eqn.effects else ""


def with_bodies(eqn: Any, bodies: Mapping[int, Any]) -> Any:
    """An equation with other closed jaxprs for some of its bodies, by their numbers (`ir.graph.BODIES`)."""
    params = dict(eqn.params)
    for key, k in BODIES[eqn.primitive.name]:
        if k is None:
            params[key] = tuple(bodies.get(i, body) for i, body in enumerate(params[key]))
        elif k in bodies:
            params[key] = bodies[k]
    return eqn.replace(params=params)
