"""What a hand-written layout is: PartitionSpecs by parameter and by activation.

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
from models.training import Batch, State, TrainStep

SpecOf = Callable[[str], P]
"""The spec of a name; KeyError for a name that it does not know."""

Args = ParamSpec("Args")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandLayout:
    """One layout of one model family, and where it is from.

    Attributes:
      source: paper or code base.
      batch: of every array of the batch.
      parameter: by path, such as `layers.0.wq`; gradients end as their parameters lie.
      moment: by the path of the parameter whose AdamW moments these are.
      activation: by the label that the model gives it, such as `residual`.
    """

    source: str
    batch: P
    parameter: SpecOf
    moment: SpecOf
    activation: SpecOf

    def specs(self, state: State, batch: Batch) -> tuple[Any, dict[str, P]]:
        """PartitionSpecs in the shape of `(state, batch)`; counters are replicated.

        Whatever part of the optimizer's state is shaped like the parameters holds
        moments.
        """
        structure = jax.tree.structure(state.params)

        def by_path(spec: SpecOf) -> Any:
            return jax.tree.map_with_path(
                lambda path, _: spec(jax.tree_util.keystr(path, simple=True, separator=".")), state.params
            )

        def is_moments(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        moments = by_path(self.moment)
        opt_state = jax.tree.map(lambda node: moments if is_moments(node) else P(), state.opt_state, is_leaf=is_moments)
        state_specs = state._replace(params=by_path(self.parameter), opt_state=opt_state, step=P())
        return state_specs, dict.fromkeys(batch, self.batch)

    def jit(self, train_step: TrainStep, state: State, batch: Batch, mesh: Mesh) -> Any:
        """`jax.jit` of the train step in this layout; the state is donated.

        Args:
          train_step: `(state, batch) -> (state, loss)` of a model of this family.
          state: arrays or ShapeDtypeStructs.
          batch: arrays or ShapeDtypeStructs.
          mesh: has the axes that this layout names, of type Auto.
        """
        state_shardings, batch_shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs(state, batch)
        )
        return jax.jit(
            constrained(train_step, self.activation, mesh),
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        )


def constrained(fn: Callable[Args, Out], spec: SpecOf, mesh: Mesh) -> Callable[Args, Out]:
    """`fn` with `with_sharding_constraint(x, spec(label))` at every named activation.

    Raises (while it is traced):
      ValueError: an activation's dimension does not divide by its mesh axes. The
        partitioner would pad it silently, which no expert means.
    """

    def pin(x: jax.Array, label: str) -> jax.Array:
        for dim, entry in enumerate(spec(label)):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            ways = prod(mesh.shape[axis] for axis in axes)
            if x.shape[dim] % ways:
                raise ValueError(
                    f"{label!r} is {x.shape}, and its dimension {dim} does not divide by {ways} "
                    f"({' × '.join(axes)}): take a smaller axis, or pad the model"
                )
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(label)))

    @wraps(fn)
    def with_constraints(*args: Args.args, **kwargs: Args.kwargs) -> Out:
        with hooked(pin):
            return fn(*args, **kwargs)

    return with_constraints
