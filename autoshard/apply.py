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

def evaluate(closed: Any, pins: Pins, mesh: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr on flat arguments, with constraints on `mesh` (Auto axes)."""
    emitter = _Emitter(pins, mesh)
    args = [emitter.pin(arg, pins.inputs.get(i, ())) for i, arg in enumerate(args)]
    results = emitter.run(closed, args, ())
    return [emitter.pin(result, pins.outputs.get(i, ())) for i, result in enumerate(results)]


class _Emitter:
    def __init__(self, pins: Pins, mesh: Any) -> None:
        self.pins, self.mesh = pins, mesh
        self._seen: dict[tuple[int, Specs], tuple[Any, Any]] = {}  # keeps the source alive: ids stay unique

    def pin(self, value: Any, specs: Specs) -> Any:
        """The value under each constraint in turn; the same chain on the same value is emitted once."""
        if not specs:
            return value
        key = (id(value), specs)
        if key not in self._seen:
            pinned = value
            for spec in specs:
                pinned = jax.lax.with_sharding_constraint(pinned, NamedSharding(self.mesh, spec))
            self._seen[key] = (value, pinned)
        return self._seen[key][1]

    def run(self, closed: Any, args: Sequence[Any], path: Path) -> list[Any]:
        jaxpr = _jax.open_jaxpr(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if _jax.is_literal(atom) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            here = (*path, index)
            operands = [self.pin(read(a), self.pins.taken.get((here, i), ())) for i, a in enumerate(eqn.invars)]
            with _jax.as_written(eqn):
                results = self.equation(eqn, operands, here)
            results = [self.pin(r, self.pins.made.get((here, i), ())) for i, r in enumerate(results)]
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[Any], here: Path) -> list[Any]:
        name = eqn.primitive.name
        if name not in CALLS:
            return _jax.bind(eqn, eqn.params, operands)
        body = eqn.params[CALLS[name]]
        inner: Callable[..., list[Any]] = lambda *xs: self.run(body, xs, (*here, 0))
        if name in INLINED:
            return inner(*operands)
        return _jax.bind(eqn, {**eqn.params, CALLS[name]: _jax.with_body(body, inner)}, operands)


# Calls without rules of their own: their bodies are evaluated in place.
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
