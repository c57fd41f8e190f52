"""Hand-written layouts of `models.transformer`.

Column split: heads, hidden units and vocabulary over the model axis; row split: the
matrices that contract them. The stored split is along D everywhere. Norms, and biases that no
column split touches, are whole: they are small.

The model axis must divide the key/value heads, and the vocabulary: Megatron pads
GPT-2's 50,257 to a multiple of 128 times the axis; build with `vocab=` to match.
"""

from jax.sharding import PartitionSpec as P

from models.layouts.hand import PinOf, SpecOf
from models.layouts.recipes import Axes, Recipe, joined


def parameters(recipe: Recipe, stored: Axes) -> SpecOf:
    """By path; `stored` splits each matrix once more, along D."""
    model = recipe.model
    table = {
        "embed": P(model, stored),  # [V, D]
        "pos_embed": P(None, stored),  # [C, D]
        "lm_head": P(stored, model),  # [D, V]
        "wq": P(stored, model, None),  # [D, N, H]
        "wk": P(stored, model, None),  # [D, K, H]
        "wv": P(stored, model, None),
        "wo": P(model, None, stored),  # [N, H, D]
        "bq": P(model, None),  # [N, H]
        "bk": P(model, None),  # [K, H]
        "bv": P(model, None),
        "bo": P(None),  # [D]
        "w_gate": P(stored, model),  # [D, F]
        "w_up": P(stored, model),
        "w_down": P(model, stored),  # [F, D]
        "b_gate": P(model),  # [F]
        "b_up": P(model),
        "b_down": P(None),  # [D]
        "scale": P(None),  # [D]
        "bias": P(None),
    }
    return lambda path: table[path.rpartition(".")[2]]


def activations(recipe: Recipe) -> PinOf:
    """Specs by label; between stationary weights, width and inner batch of the residual are split over both.

    If weights move or have only one split, the operand of a matmul is left free: a pin there
    would sum its cotangent whole before it is split.
    """
    batch, context, model, stationary = recipe.batch, recipe.context, recipe.model, recipe.stationary
    apart, heads = joined(batch, stationary), None if recipe.cached else model or recipe.heads
    attended = None if recipe.heads else context
    width = joined(stationary, model) if stationary else None
    entering = {
        "branch": P(batch, context, stationary),  # [B, S, D]
        "mixed": P(batch, context, model, None),  # [B, S, N, H]
        "contracted": P(batch, context, model),  # [B, S, F]
    }
    return {
        "residual": P(batch, joined(context, recipe.sequence), width),  # [B, S, D]
        "queries": P(apart, attended, heads, None),  # [B, S, N, H]
        "keys": P(apart, None, heads, None),  # [B, S, K, H]
        "hidden": P(apart, context, model),  # [B, S, F]
        "logits": P(apart, context, model),  # [B, S, V]
        **(entering if stationary else dict.fromkeys(entering)),
        **({"mixed": entering["mixed"]} if recipe.heads else {}),
    }.__getitem__
