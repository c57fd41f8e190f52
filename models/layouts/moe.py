"""Hand-written layouts of `models.moe`: the transformer's, and its experts'.

With an expert axis each device holds some experts whole, and tokens travel to them
and back: two all-to-alls per layer. Without one, an expert is laid out as an MLP is.
Sorted tokens cannot travel so: which go where is known to the data alone.
"""

from jax.sharding import PartitionSpec as P

from models.layouts import transformer
from models.layouts.hand import PinOf, SpecOf
from models.layouts.recipes import Axes, Recipe, without


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each matrix once more, along D."""
    experts = {
        "w_router": P(stored, None),  # [D, E]
        "w_gate": P(recipe.expert, stored, recipe.model),  # [E, D, F]
        "w_up": P(recipe.expert, stored, recipe.model),
        "w_down": P(recipe.expert, recipe.model, stored),  # [E, F, D]
    }
    others = transformer.parameters(recipe, stored)

    def spec(path: str) -> P:
        weight = path.rpartition(".")[2]
        return experts[weight] if weight in experts else others(path)

    return spec


def activations(recipe: Recipe) -> PinOf:
    """By label."""
    rows = without(recipe.batch, recipe.expert)
    experts = {
        "at_source": P(None, recipe.batch, None, None),  # [E, B, C, D]
        "at_expert": P(recipe.expert, rows, None, None),
        "expert_hidden": P(recipe.expert, rows, None, recipe.model),  # [E, B, C, F]
        "sorted": P(recipe.batch, None, None),  # [B, T, D]
        "sorted_hidden": P(recipe.batch, None, recipe.model),  # [B, T, F]
    }
    others = transformer.activations(recipe)
    return lambda label: experts[label] if label in experts else others(label)
