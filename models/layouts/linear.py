"""Hand-written layouts of `models.linear`: weights [D, D], activations [B, D].

Megatron's pair is two consecutive layers, the even split by column, the odd by row,
so that one all-reduce serves two layers.
"""

from jax.sharding import PartitionSpec as P

from models.layouts.hand import PinOf, SpecOf
from models.layouts.recipes import Axes, Recipe, joined


def _is_column_split(path: str) -> bool:
    """`layers.0` and `layers.0.w` are, `layers.1` is not."""
    return int(path.split(".")[1]) % 2 == 0


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each weight once more."""
    column, row = P(stored, recipe.model), P(recipe.model, stored)
    return lambda path: column if _is_column_split(path) else row


def activations(recipe: Recipe) -> PinOf:
    """By label: the output of each layer."""
    inside, between = P(recipe.batch, recipe.model), P(joined(recipe.batch, recipe.sequence), None)
    return lambda label: inside if _is_column_split(label) else between
