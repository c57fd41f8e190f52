"""The layouts that experts write by hand for the models, as points of comparison.

`find("llama3-8b", "fsdp_megatron")` is a `HandLayout`: PartitionSpecs for the program's
arguments, and constraints on activations. Plain JAX, nothing of autoshard.
"""

import inspect
from collections.abc import Callable

from jax.sharding import PartitionSpec as P

import models
from models.layouts import inference, linear, mlp, moe, transformer
from models.layouts.hand import HandLayout, constrained, stacked
from models.layouts.recipes import ANY, EXPERTS, RECIPES, SEQUENCES, SERVING, TWO_DIMENSIONAL, Axes, Recipe

__all__ = ["HandLayout", "axes", "constrained", "find", "names", "recipes"]

_FAMILIES = {
    models.linear: (linear, ANY),
    models.mlp: (mlp, ANY | TWO_DIMENSIONAL),
    models.transformer: (transformer, ANY | TWO_DIMENSIONAL | SEQUENCES),
    models.moe: (moe, ANY | EXPERTS),
    models.inference: (inference, SERVING),
}


def names() -> tuple[str, ...]:
    """Every recipe."""
    return tuple(RECIPES)


def recipes(model: str) -> tuple[str, ...]:
    """The recipes that have a layout for a model.

    Raises:
      KeyError: there is no such model.
    """
    module, _ = models.find(model)
    return tuple(_FAMILIES[module][1])


def axes(recipe: str) -> tuple[str, ...]:
    """The mesh axes that a recipe splits over, by the names that `find` takes; any sizes will do.

    Raises:
      KeyError: there is no such recipe.
    """
    return tuple(inspect.signature(_known(recipe)).parameters)


def find(model: str, recipe: str, /, **axes: Axes) -> HandLayout:
    """The layout of a model by a recipe.

    Args:
      model: a name of `models.names()`.
      recipe: a name of `recipes(model)`.
      **axes: of `axes(recipe)`, the mesh axes to use in place of the axes of these names.

    Raises:
      KeyError: there is no such model or recipe, or no such layout of this model.
    """
    build = _known(recipe)
    module, _ = models.find(model)
    family, known = _FAMILIES[module]
    if recipe not in known:
        raise KeyError(f"{recipe!r} has no layout for {model!r}; there are: {', '.join(known)}")
    split = build(**axes)
    activations = family.activations(split)
    gradients = stacked(family.parameters(split, split.gradients))

    def activation(label: str) -> P | None:
        if label.startswith("gradients."):
            return gradients(label.removeprefix("gradients.")) if split.gradients else None
        return activations(label)

    return HandLayout(
        source=split.source,
        rows=P(split.batch, split.context),
        parameter=stacked(family.parameters(split, split.parameters)),
        moment=stacked(family.parameters(split, split.moments)),
        cache=stacked(inference.cache(split)),
        activation=activation,
    )


def _known(recipe: str) -> Callable[..., Recipe]:
    if recipe not in RECIPES:
        raise KeyError(f"no recipe named {recipe!r}; there are: {', '.join(names())}")
    return RECIPES[recipe]
