"""Hand-written layouts of `models.mlp`: w_up [D, F], w_down [F, D], activations [B, ·]."""

from jax.sharding import PartitionSpec as P

from models.layouts.hand import PinOf, SpecOf
from models.layouts.recipes import Axes, Recipe, joined


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each weight once more, along D."""
    model = recipe.model
    table = {"w_up": P(stored, model), "w_down": P(model, stored)}
    return lambda path: table[path.rpartition(".")[2]]


def activations(recipe: Recipe) -> PinOf:
    """By label; rows are tokens here, so that `sequence` splits them once more."""
    batch, model, stationary = recipe.batch, recipe.model, recipe.stationary
    width = joined(stationary, model) if stationary else None
    entering = {"branch": P(batch, stationary), "contracted": P(batch, model)}
    return {
        "residual": P(joined(batch, recipe.sequence), width),
        "hidden": P(joined(batch, stationary), model),
        **(entering if stationary else dict.fromkeys(entering)),
    }.__getitem__
