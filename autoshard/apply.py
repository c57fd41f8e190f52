"""Apply: a jaxpr evaluated again with sharding constraints where the plan wants them.

Pins are keyed by the equation's path through the nested jaxprs. Both ends of every
resharding are pinned: the layout in which a value is made, then every layout on its
way to the consumer, so that a cast is pinned before its result is gathered and an
all-to-all is not replaced by a gather. Calls with rules of their own (`remat`,
`custom_jvp`, `custom_vjp`) are bound again with rewritten bodies; source lines stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard import _jax
from autoshard.graph import CALLS, Path
from autoshard.pins import Pins, Specs

Hook = Callable[[Any, Path, int], Any]  # (value, equation path, position) → the value to go on with


def constrained(closed: Any, pins: Pins, mesh: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr on flat arguments, with constraints on `mesh` (Auto axes)."""
    seen: dict[tuple[int, Specs], tuple[Any, Any]] = {}  # keeps the source alive, so that ids stay unique

    def pin(value: Any, specs: Specs) -> Any:
        """The value under each constraint in turn; the same chain on the same value is emitted once."""
        if not specs:
            return value
        key = (id(value), specs)
        if key not in seen:
            pinned = value
            for spec in specs:
                pinned = jax.lax.with_sharding_constraint(pinned, NamedSharding(mesh, spec))
            seen[key] = (value, pinned)
        return seen[key][1]

    inputs = [pin(arg, pins.inputs.get(i, ())) for i, arg in enumerate(args)]
    results = evaluate(
        closed,
        inputs,
        made=lambda value, path, i: pin(value, pins.made.get((path, i), ())),
        taken=lambda value, path, i: pin(value, pins.taken.get((path, i), ())),
    )
    return [pin(result, pins.outputs.get(i, ())) for i, result in enumerate(results)]


def evaluate(closed: Any, args: Sequence[Any], *, made: Hook, taken: Hook, path: Path = ()) -> list[Any]:
    """Evaluates a closed jaxpr as JAX does, with hooks on every operand and result."""
    jaxpr = _jax.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _jax.is_literal(atom) else env[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        here = (*path, index)
        with _jax.as_written(eqn):
            operands = [taken(read(atom), here, i) for i, atom in enumerate(eqn.invars)]
            results = _equation(eqn, operands, made, taken, here)
            env.update(zip(eqn.outvars, [made(result, here, i) for i, result in enumerate(results)], strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Any], made: Hook, taken: Hook, here: Path) -> list[Any]:
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return operands  # the user's own constraint is one of the plan's pins
    if name not in CALLS:
        return _jax.bind(eqn, eqn.params, operands)
    body = eqn.params[CALLS[name]]
    inner: Callable[..., list[Any]] = lambda *xs: evaluate(body, xs, made=made, taken=taken, path=(*here, 0))
    if name in INLINED:
        return inner(*operands)
    return _jax.bind(eqn, {**eqn.params, CALLS[name]: _jax.with_body(body, inner)}, operands)


# Calls without rules of their own: their bodies are evaluated in place.
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
