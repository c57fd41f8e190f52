"""Hand-written layouts of `models.inference`: the transformer's, and its cache's.

Weights in int8 lie as they do in the compute dtype, and a scale as the output channels
of its weight, whole along D.
"""

from jax.sharding import PartitionSpec as P

from models.layouts import transformer
from models.layouts.hand import PinOf, SpecOf
from models.layouts.recipes import Axes, Recipe, joined


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each matrix once more, along D."""
    model = recipe.model
    scales = {
        "wq_scale": P(model, None),  # [N, H]
        "wk_scale": P(model, None),  # [K, H]
        "wv_scale": P(model, None),
        "wo_scale": P(None),  # [D]
        "w_gate_scale": P(model),  # [F]
        "w_up_scale": P(model),
        "w_down_scale": P(None),  # [D]
    }
    others = transformer.parameters(recipe, stored)

    def spec(path: str) -> P:
        weight = path.rpartition(".")[2]
        return scales[weight] if weight in scales else others(path)

    return spec


def cache(recipe: Recipe) -> SpecOf:
    """By path: the parts of a layer's cache."""
    rows = joined(recipe.batch, recipe.stationary), recipe.cached, None if recipe.cached else recipe.model
    whole, scales = P(*rows, None), P(*rows)  # [B, T, K, H], [B, T, K]
    table = {"k": whole, "v": whole, "k_scale": scales, "v_scale": scales}
    return lambda path: table[path.rpartition(".")[2]]


def activations(recipe: Recipe) -> PinOf:
    """By label; the parts of the cache are `cache.k` and so on."""
    of_cache, others = cache(recipe), transformer.activations(recipe)
    return lambda label: of_cache(label) if label.startswith("cache.") else others(label)
