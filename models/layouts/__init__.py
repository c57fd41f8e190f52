"""The layouts that experts write by hand for the models, as points of comparison.

`find("llama3-8b", "fsdp_megatron")` is a `HandLayout`: PartitionSpecs for state and
batch, and constraints on activations. Plain JAX, nothing of autoshard.
"""

from jax.sharding import PartitionSpec as P

import models
from models.layouts import linear, mlp, moe, transformer
from models.layouts.hand import HandLayout, constrained
from models.layouts.recipes import RECIPES, Axes

__all__ = ["HandLayout", "constrained", "find", "names"]

_FAMILIES = {models.linear: linear, models.mlp: mlp, models.transformer: transformer, models.moe: moe}


def names() -> tuple[str, ...]:
    """Every recipe; each has a layout for every model."""
    return tuple(RECIPES)


def find(model: str, recipe: str, /, **axes: Axes) -> HandLayout:
    """The layout of a model by a recipe.

    Args:
      model: a name of `models.names()`.
      recipe: a name of `names()`.
      **axes: `data=`, `model=`, `expert=`, where the recipe has them: the mesh axes to
        use in place of the axes of these names.

    Raises:
      KeyError: there is no such model or recipe.
    """
    if recipe not in RECIPES:
        raise KeyError(f"no recipe named {recipe!r}; there are: {', '.join(names())}")
    module, _ = models.find(model)
    family, split = _FAMILIES[module], RECIPES[recipe](**axes)
    return HandLayout(
        source=split.source,
        batch=P(split.batch),
        parameter=family.parameters(split, split.parameters),
        moment=family.parameters(split, split.moments),
        activation=family.activations(split),
    )
