"""Otherwise: an equation that is lowered in another form, whose derivatives and batches are bound by its caller, too.

JAX differentiates and batches an equation by rules that bind further equations. `Otherwise` binds in the
place of an equation a primitive that keeps its meaning: JAX's own rule of the equation is traced, and its equations
are handed to `again`, which binds each of them in whatever form it wants.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Form = Callable[
    [Any, Mapping[str, Any], Sequence[Any], int], Any
]  # (primitive, parameters, operands, devices) → result
Again = Callable[[Any, Sequence[Any], int], list[Any]]  # (closed jaxpr, arguments, devices) → results


class Otherwise:
    """A primitive in the place of others that have one result.

    Args:
      name: of the primitive.
      form: what it is lowered to.
      forms: platform → what it is lowered to there instead.
      again: evaluates the traced rules.
    """

    def __init__(self, name: str, form: Form, forms: Mapping[str, Form], again: Again) -> None:
        self._again = again
        self._primitive = Primitive(name)
        self._primitive.def_impl(partial(dispatch.apply_primitive, self._primitive))
        self._primitive.def_abstract_eval(_abstract)
        ad.primitive_jvps[self._primitive] = self._jvp
        ad.primitive_transposes[self._primitive] = self._transposed
        batching.primitive_batchers[self._primitive] = self._batched
        for platform, chosen in {None: form, **forms}.items():
            lowering = mlir.lower_fun(partial(_formed, chosen), multiple_results=False)
            mlir.register_lowering(self._primitive, lowering, platform=platform)

    def bind(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], devices: int) -> Any:
        """The result of an equation of JAX's, in a program on so many devices."""
        return self._primitive.bind(*operands, of=_Equation(primitive, params), devices=devices)

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], *, of: "_Equation", devices: int
    ) -> tuple[Any, Any]:
        live = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def moved(primals: Sequence[Any], directions: Sequence[Any]) -> Any:
            def of_live(*chosen: Any) -> Any:
                given = dict(zip(live, chosen, strict=True))
                return of(*(given.get(i, x) for i, x in enumerate(primals)))

            return jax.jvp(of_live, [primals[i] for i in live], list(directions))

        directions = [ad.instantiate_zeros(tangents[i]) for i in live]
        result, tangent = self._again(jax.make_jaxpr(moved)(primals, directions), [*primals, *directions], devices)
        return result, tangent

    def _transposed(self, cotangent: Any, *operands: Any, of: "_Equation", devices: int) -> list[Any]:
        linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
        found: list[Any] = [None] * len(operands)
        if isinstance(cotangent, ad.Zero):
            for i in linear:
                found[i] = ad.Zero(operands[i].aval)
            return found
        known = [x for x in operands if not ad.is_undefined_primal(x)]

        def moved(cotangent: Any, known: Sequence[Any]) -> Any:
            def of_linear(*chosen: Any) -> Any:
                given, others = dict(zip(linear, chosen, strict=True)), iter(known)
                return of(*(given[i] if i in given else next(others) for i in range(len(operands))))

            return jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))(cotangent)

        results = self._again(jax.make_jaxpr(moved)(cotangent, known), [cotangent, *known], devices)
        for i, result in zip(linear, results, strict=True):
            found[i] = result
        return found

    def _batched(
        self, operands: Sequence[Any], dims: Sequence[Any], *, of: "_Equation", devices: int
    ) -> tuple[Any, int]:
        (result,) = self._again(jax.make_jaxpr(jax.vmap(of, in_axes=tuple(dims)))(*operands), operands, devices)
        return result, 0


class _Equation:
    """A primitive with its parameters; hashable if they are."""

    __slots__ = ("__weakref__", "_key", "params", "primitive")

    def __init__(self, primitive: Any, params: Mapping[str, Any]) -> None:
        self.primitive, self.params = primitive, dict(params)
        self._key = (primitive, tuple(sorted(self.params.items(), key=lambda item: item[0])))

    def __call__(self, *operands: Any) -> Any:
        return self.primitive.bind(*operands, **self.params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return str(self.primitive)


def _abstract(*avals: Any, of: _Equation, devices: int) -> Any:
    del devices
    return of.primitive.abstract_eval(*avals, **of.params)[0]


def _formed(form: Form, *operands: Any, of: _Equation, devices: int) -> Any:
    return form(of.primitive, of.params, operands, devices)
