"""Batched rows: lookups and scatters of own rows, in JAX's notation for them (`own_rows`).

XLA's partitioner finds the iota among the indices by itself, but not behind a constraint, nor behind the clipping of
indices in a lookup that clips or fills, as gradients of `x.at[…].add` are: there it moved whole rows. In this notation
nothing is left to find.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from jax import lax

from autoshard import _jax
from autoshard.ir.graph import ALIASES, BODIES, CALLS, INLINED, Path
from autoshard.ir.own_rows import OwnRows, coordinates


def batched_rows(closed: Any) -> Mapping[Path, Mapping[str, Any]]:
    """The parameters, as `own_rows` has them, of every lookup and scatter whose own dimensions' indices count."""
    known, fresh = OwnRows(lambda x: x.val if _jax.is_literal(x) else None), count()
    found: dict[Path, Mapping[str, Any]] = {}

    def walk(closed: Any, args: Sequence[int], path: Path) -> list[int]:
        jaxpr = _jax.open_jaxpr(closed)
        env: dict[Any, int] = dict(zip(jaxpr.invars, args, strict=True))
        for var, array in zip(jaxpr.constvars, _jax.consts_of(closed), strict=True):
            env[var] = next(fresh)
            if not _jax.is_tracer(array):
                known.constant(env[var], array)

        def read(atom: Any) -> int:
            return next(fresh) if _jax.is_literal(atom) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            name, operands = eqn.primitive.name, [read(atom) for atom in eqn.invars]
            results = operands if name in ALIASES else [next(fresh) for _ in eqn.outvars]
            if name in INLINED:
                results = walk(eqn.params[CALLS[name]], operands, (*path, i, 0))
            elif name in BODIES:
                for key, k in BODIES[name]:
                    bodies = eqn.params[key] if k is None else (eqn.params[key],)
                    for j, body in enumerate(bodies):
                        inputs = [next(fresh) for _ in _jax.open_jaxpr(body).invars]
                        walk(body, inputs, (*path, i, j if k is None else k))
            elif (params := known.see(name, eqn, operands, results)) is not eqn.params:
                found[*path, i] = params
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    walk(closed, [next(fresh) for _ in _jax.open_jaxpr(closed).invars], ())
    return found


def batched(eqn: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """A lookup or a scatter with such parameters, and its operands: of the indices, those that do not count."""
    operand, indices, *updates = operands
    left = set(coordinates(eqn.primitive.name, params["dimension_numbers"]))
    kept = [i for i, d in enumerate(coordinates(eqn.primitive.name, eqn.params["dimension_numbers"])) if d in left]
    columns = [lax.slice_in_dim(indices, i, i + 1, axis=indices.ndim - 1) for i in kept]
    return eqn.replace(params=dict(params)), [operand, lax.concatenate(columns, indices.ndim - 1), *updates]
