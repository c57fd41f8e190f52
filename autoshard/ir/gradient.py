"""Gradient: the program that a forward function is planned for.

Programs rarely run a loss alone; they run its gradient. `gradient_program` traces the
function's value and its `jax.vjp`. Every value of the forward program carries a name, by
which its layout is found again: the plan's constraints go into the forward function, and
JAX's own rules carry them over to the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoshard import _jax
from autoshard.errors import AutoshardError, GradientError, SpecError
from autoshard.ir import manual_calls
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import CALLS, INLINED, Path
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.rewrite import Hooks, emit_constraints, evaluate
from autoshard.ir.trace import Traced, trace

_PREFIX = "autoshard:"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProgram:
    """The traced program (outputs, gradients), whose inputs begin with the function's own.

    `gradient_of[k]` is the input leaf whose gradient output `first_gradient + k` is.
    """

    traced: Traced
    first_gradient: int
    gradient_of: tuple[int, ...]


def gradient_arguments(traced: Traced, *, for_grad: bool | int | Sequence[int] | None) -> tuple[int, ...]:
    """The argument positions to differentiate for; empty to plan the program as it is.

    Args:
      traced: the program.
      for_grad: which arguments (True: the first); False and None: none.

    Raises:
      SpecError: there is no such argument, or nothing to differentiate.
    """
    if for_grad is False or for_grad is None:
        return ()
    chosen = (0,) if for_grad is True else (for_grad,) if isinstance(for_grad, int) else tuple(for_grad)
    arguments = len(traced.names)
    if any(not 0 <= i < arguments for i in chosen):
        raise SpecError(f"for_grad={for_grad}: the function has {arguments} dynamic arguments")
    differentiable = {
        p for p, a in zip(traced.argument_of, traced.in_avals, strict=True) if jnp.issubdtype(a.dtype, jnp.inexact)
    }
    found = tuple(i for i in chosen if i in differentiable)
    returned = any(jnp.issubdtype(a.dtype, jnp.inexact) for a in traced.out_avals)
    if chosen and not (found and returned):
        what = "its results hold no floats" if found else "these arguments hold no floats"
        raise SpecError(
            f"for_grad={for_grad}: there is no gradient, as {what}; for_grad=False plans the function itself"
        )
    return found


def gradient_program(traced: Traced, argnums: Sequence[int], mesh: MeshAxes) -> GradientProgram:
    """The gradient program of a traced function, with respect to the float leaves of `argnums`.

    Outputs that are not a scalar get their cotangents as further inputs.

    Raises:
      GradientError: JAX cannot differentiate the function.
    """
    leaves = [
        i
        for i, (aval, position) in enumerate(zip(traced.in_avals, traced.argument_of, strict=True))
        if position in argnums and jnp.issubdtype(aval.dtype, jnp.inexact)
    ]
    floats = [i for i, aval in enumerate(traced.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    seeds = [i for i in floats if traced.out_avals[i].shape]

    def marked(args: Sequence[Any]) -> list[Any]:
        return evaluate(traced.jaxpr, args, Hooks(made=_mark, own=True, rule=_marked_rule))

    program = _value_and_gradient(traced, leaves, marked)
    cotangents = [traced.out_avals[i] for i in seeds]
    try:
        gradient = trace(program, (list(traced.in_avals), cotangents), ("", "cotangents"), mesh)
    except AutoshardError:
        raise
    except Exception as error:  # JAX's own errors, or any that a user's rule raises
        with _jax.auto_mesh(mesh.names, mesh.sizes):
            raise GradientError(_culprit(traced.jaxpr, error), str(error)) from error
    return GradientProgram(traced=gradient, first_gradient=len(traced.out_avals), gradient_of=tuple(leaves))


def _culprit(closed: Any, error: Exception) -> str:
    """The source line of the equation that by itself fails with the same error; empty if none does."""
    lines = _jax.SourceLines()
    for eqn in _jax.open_jaxpr(closed).eqns:
        inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
        if eqn.primitive.name in INLINED and (where := _culprit(inner, error)):
            return where
        avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        variables = [i for i, atom in enumerate(eqn.invars) if not _jax.is_literal(atom)]
        floats = [i for i in variables if jnp.issubdtype(avals[i].dtype, jnp.inexact)]

        def alone(*operands: Any, eqn: Any = eqn, floats: Sequence[int] = floats) -> Any:
            def of_floats(*chosen: Any) -> Any:
                given = dict(zip(floats, chosen, strict=True))
                results = _jax.bind(eqn, eqn.params, [given.get(i, x) for i, x in enumerate(operands)])
                return [r for r in results if jnp.issubdtype(r.dtype, jnp.inexact)]

            results, pull = jax.vjp(of_floats, *[operands[i] for i in floats])
            return pull(results)

        try:
            jax.eval_shape(alone, *avals)
        except Exception as same:  # noqa: BLE001  (any error, as above)
            if str(same).splitlines()[:1] == str(error).splitlines()[:1]:
                return lines(eqn)
    return ""


def emitted(traced: Traced, gradient: GradientProgram, pins: Constraints, mesh: Any) -> Callable[..., list[Any]]:
    """The program as it runs: the constrained forward function, differentiated; flat inputs to flat outputs."""
    program = _value_and_gradient(
        traced, gradient.gradient_of, lambda args: emit_constraints(traced.jaxpr, pins, mesh, args)
    )
    count = len(traced.in_avals)

    def run(*flat: Any) -> list[Any]:
        outputs, gradients = program(list(flat[:count]), list(flat[count:]))
        return [*outputs, *gradients]

    return run


def _value_and_gradient(
    traced: Traced, leaves: Sequence[int], forward: Callable[[Sequence[Any]], list[Any]]
) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """(flat inputs, cotangents of the outputs that are no scalars) → (outputs, gradients of the leaves)."""
    floats = [i for i, aval in enumerate(traced.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    seeds = [i for i in floats if traced.out_avals[i].shape]

    def program(flat: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        def of_leaves(chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            args = list(flat)
            for i, leaf in zip(leaves, chosen, strict=True):
                args[i] = leaf
            outputs = forward(args)
            return [outputs[i] for i in floats], outputs

        values, pull, outputs = jax.vjp(of_leaves, [flat[i] for i in leaves], has_aux=True)
        given = dict(zip(seeds, cotangents, strict=True))
        seed = [given[i] if i in given else jnp.ones((), v.dtype) for i, v in zip(floats, values, strict=True)]
        return outputs, pull(seed)[0]

    return program


def _mark(value: Any, path: Path, i: int) -> Any:
    if not getattr(value, "shape", ()):
        return value
    return checkpoint_name(value, _PREFIX + ".".join(map(str, path)) + f"/{i}")


def _marked_rule(closed: Any, args: Sequence[Any], path: Path) -> list[Any]:
    """A rule of a custom derivative with the results of its kernels marked: only they are laid out by the plan."""

    def bind(eqn: Any, operands: list[Any], path: Path) -> list[Any]:
        results = _jax.bind(eqn, eqn.params, operands)
        if not manual_calls.is_opaque(eqn.primitive.name, eqn.params):
            return results
        return [_mark(result, path, i) for i, result in enumerate(results)]

    return evaluate(closed, args, Hooks(own=True, bind=bind), path=path)


def marks(named: Mapping[str, int]) -> dict[tuple[Path, int], int]:
    """(equation path, result) of the forward program → value of the gradient program."""
    found: dict[tuple[Path, int], int] = {}
    for name, value in named.items():
        if name.startswith(_PREFIX):
            path, _, i = name.removeprefix(_PREFIX).rpartition("/")
            found[tuple(int(p) for p in path.split(".")), int(i)] = value
    return found
