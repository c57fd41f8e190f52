"""Hand-written layouts of `models.mlp`: w_up [D, F], w_down [F, D], activations [B, ·]."""

from jax.sharding import PartitionSpec as P

from models.layouts.hand import SpecOf
from models.layouts.recipes import Axes, Recipe, joined


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each weight once more, along D."""
    model = recipe.model
    table = {"w_up": P(stored, model), "w_down": P(model, stored)}
    return lambda path: table[path.rpartition(".")[2]]


def activations(recipe: Recipe) -> SpecOf:
    """By label; rows are tokens here, so that `sequence` splits them once more."""
    width = joined(recipe.stationary, recipe.model) if recipe.stationary else None
    return {
        "residual": P(joined(recipe.batch, recipe.sequence), width),
        "branch": P(recipe.batch, recipe.stationary),  # as it enters w_up
        "hidden": P(recipe.batch, joined(recipe.model, recipe.stationary)),
        "contracted": P(recipe.batch, recipe.model),  # as it enters w_down
    }.__getitem__
