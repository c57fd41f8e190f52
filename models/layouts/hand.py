"""A hand-written layout: PartitionSpecs by parameter and by activation.

An expert lays out a model by saying how each parameter is stored, how the batch
arrives, and how a few activations lie; the partitioner fills in the rest. The
activations are the ones that a model names with `models.annotate.name`, and the
constraint is put there while the model is traced, as if `with_sharding_constraint`
stood in its source: inside `jax.grad` it also pins the cotangent.

Source of the style: t5x (Roberts et al. 2022, arXiv:2203.17189) and MaxText, which
write layouts as tables, apart from the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.annotate import hooked
from models.inference import Decoding
from models.training import State

SpecOf = Callable[[str], P]
"""The spec of a name; KeyError for a name that it does not know."""

PinOf = Callable[[str], P | None]
"""The spec of an activation by its label, None where it is free; KeyError likewise."""

Args = ParamSpec("Args")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandLayout:
    """One layout of one model family, and where it is from.

    Attributes:
      source: paper or code base.
      rows: of every array of the batch, as far as it has dimensions.
      parameter: by path, such as `layers.0.wq`; gradients end as their parameters lie.
      moment: by the path of the parameter whose AdamW moments these are.
      cache: by the path of a part of the KV cache, such as `0.k`.
      activation: by the label that the model gives it, such as `residual`; None is free.
    """

    source: str
    rows: P
    parameter: SpecOf
    moment: SpecOf
    cache: SpecOf
    activation: PinOf

    def specs(self, *values: Any) -> tuple[Any, ...]:
        """PartitionSpecs in the shape of a program's arguments, or of its results."""
        return tuple(self._specs(value) for value in values)

    def _specs(self, value: Any) -> Any:
        match value:
            case State():
                return self._state(value)
            case Decoding():
                rest = value._replace(cache=None)
                return jax.tree.map(self._rows, rest)._replace(cache=_by_path(self.cache, value.cache))
            case {"layers": _}:
                return _by_path(self.parameter, value)
            case _:
                return jax.tree.map(self._rows, value)

    def _rows(self, leaf: Any) -> P:
        return P(*self.rows[: leaf.ndim])

    def _state(self, state: State) -> Any:
        """The specs of the optimizer's state: each part shaped like the parameters holds moments."""
        structure = jax.tree.structure(state.params)

        def is_moments(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        moments = _by_path(self.moment, state.params)
        opt_state = jax.tree.map(lambda node: moments if is_moments(node) else P(), state.opt_state, is_leaf=is_moments)
        return state._replace(params=_by_path(self.parameter, state.params), opt_state=opt_state, step=P())

    def jit(self, fn: Callable[..., Any], *args: Any, mesh: Mesh) -> Any:
        """`jax.jit` of a program in this layout; its carried state (or cache) is donated.

        Args:
          fn: a train step, prefill, decode or generate of a model of this family.
          *args: arguments of `fn`, arrays or ShapeDtypeStructs.
          mesh: a mesh with the axes that this layout names, of type Auto.
        """

        def on_mesh(specs: Any) -> Any:
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

        return jax.jit(
            constrained(fn, self.activation, mesh),
            in_shardings=on_mesh(self.specs(*args)),
            out_shardings=on_mesh(self.specs(*jax.eval_shape(fn, *args))),
            donate_argnums=tuple(i for i, arg in enumerate(args) if isinstance(arg, (State, Decoding))),
        )


def _by_path(spec: SpecOf, tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: spec(jax.tree_util.keystr(path, simple=True, separator=".")), tree)


def stacked(spec: SpecOf) -> SpecOf:
    """The same for layers on a leading dimension too, which no layout splits.

    A layer of a list has its number in its path: `layers.0.wq`, or `0.k` of a cache;
    layers that are stacked have none: `layers.wq`, `k`.
    """

    def of_path(path: str) -> P:
        parts = path.split(".")
        in_layers = parts[0] == "layers" or parts[-1] in ("k", "v", "k_scale", "v_scale")
        numbered = any(part.isdigit() for part in parts)
        return P(None, *spec(path)) if in_layers and not numbered else spec(path)

    return of_path


def constrained(fn: Callable[Args, Out], spec: PinOf, mesh: Mesh) -> Callable[Args, Out]:
    """`fn` with `with_sharding_constraint(x, spec(label))` at every named activation that has a spec.

    Raises (while it is traced):
      ValueError: an activation's dimension does not divide by its mesh axes. The
        partitioner would pad it silently, which no expert means.
    """

    def pin(x: jax.Array, label: str) -> jax.Array:
        entries = spec(label)
        if entries is None:
            return x
        for dim, entry in enumerate(entries):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            ways = prod(mesh.shape[axis] for axis in axes)
            if x.shape[dim] % ways:
                raise ValueError(
                    f"{label!r} is {x.shape}, and its dimension {dim} does not divide by {ways} "
                    f"({' × '.join(axes)}): take a smaller axis, or pad the model"
                )
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, entries))

    @wraps(fn)
    def with_constraints(*args: Args.args, **kwargs: Args.kwargs) -> Out:
        with hooked(pin):
            return fn(*args, **kwargs)

    return with_constraints
