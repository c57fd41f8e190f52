"""The parallelism recipes of the literature: the mesh axes and the dimensions that they split.

A recipe knows no model; `linear.py`, `mlp.py`, `transformer.py`, `moe.py` and
`inference.py` beside it apply it to theirs. Every axis may be a tuple of mesh
axes: `dp(("data", "model"))`.
"""

from collections.abc import Callable
from dataclasses import dataclass

Axes = str | tuple[str, ...] | None
"""Mesh axes that split one dimension, major to minor; None leaves it whole."""


def _names(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def joined(*axes: Axes) -> Axes:
    """One dimension split over several axes, major to minor."""
    return tuple(name for entry in axes for name in _names(entry)) or None


def without(axes: Axes, removed: Axes) -> Axes:
    """The axes that are not among the removed."""
    return tuple(name for name in _names(axes) if name not in _names(removed)) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Mesh axes per purpose, and where the recipe is from.

    Attributes:
      source: paper or code base.
      batch: split the rows of the batch and of every activation.
      expert: those of `batch` that split experts, where a model has them, rather than rows.
      context: split the tokens of every activation, save the keys and values of attention.
      heads: split the heads of attention in place of its tokens.
      sequence: split the tokens of the residual stream, between the split matmuls.
      model: split hidden units, heads and vocabulary, and the weights that make them.
      stationary: split the other dimension of those weights, which stay where they are:
        activations are gathered over `model` and summed over these.
      parameters: split stored parameters once more; gathered when used.
      gradients: split gradients where their parameters are whole.
      moments: split the optimizer's moments once more.
      cached: split the positions of the KV cache rather than its heads.
    """

    source: str
    batch: Axes = None
    expert: Axes = None
    context: Axes = None
    heads: Axes = None
    sequence: Axes = None
    model: Axes = None
    stationary: Axes = None
    parameters: Axes = None
    gradients: Axes = None
    moments: Axes = None
    cached: Axes = None


def dp(data: Axes = "data") -> Recipe:
    """Data parallelism: parameters whole everywhere, gradients all-reduced."""
    return Recipe(source="Goyal et al. 2017, arXiv:1706.02677", batch=data)


def zero1(data: Axes = "data") -> Recipe:
    """Data parallelism with split optimizer state; updated parameters are gathered."""
    return Recipe(source="Rajbhandari et al. 2020, arXiv:1910.02054, P_os", batch=data, moments=data)


def zero2(data: Axes = "data") -> Recipe:
    """ZeRO-1 whose gradients are reduce-scattered, so that none is whole."""
    source = "Rajbhandari et al. 2020, arXiv:1910.02054, P_os+g"
    return Recipe(source=source, batch=data, gradients=data, moments=data)


def fsdp(data: Axes = "data") -> Recipe:
    """Fully sharded data parallelism (ZeRO-3): each weight gathered when it is used."""
    source = "Rajbhandari et al. 2020, arXiv:1910.02054, P_os+g+p; Zhao et al. 2023, arXiv:2304.11277"
    return Recipe(source=source, batch=data, parameters=data, moments=data)


def hsdp(replica: Axes = "replica", data: Axes = "data") -> Recipe:
    """FSDP within a replica (a node), data parallelism across them."""
    source = "Zhao et al. 2023, arXiv:2304.11277, section 3.2.2, hybrid sharding"
    return Recipe(source=source, batch=joined(replica, data), parameters=data, moments=data)


def megatron(model: Axes = "model") -> Recipe:
    """Tensor parallelism: a column split, then a row split, then one all-reduce."""
    return Recipe(source="Shoeybi et al. 2019, arXiv:1909.08053, section 3", model=model)


def megatron_sequence(model: Axes = "model") -> Recipe:
    """Megatron with the residual stream split by tokens: reduce-scatter, all-gather."""
    return Recipe(source="Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2", model=model, sequence=model)


def dp_megatron(data: Axes = "data", model: Axes = "model") -> Recipe:
    """Replicas (`data`) of a model split by Megatron (`model`)."""
    return Recipe(source="Narayanan et al. 2021, arXiv:2104.04473", batch=data, model=model)


def fsdp_megatron(data: Axes = "data", model: Axes = "model") -> Recipe:
    """Megatron over `model`, and every part of a weight stored split over `data`."""
    source = "Geng 2023, EasyLM, models/llama/llama_model.py, get_partition_rules"
    return Recipe(source=source, batch=data, model=model, parameters=data, moments=data)


def fsdp_megatron_sequence(data: Axes = "data", model: Axes = "model") -> Recipe:
    """The same, with the residual stream split by tokens over `model`."""
    source = "Liang et al. 2024, TorchTitan, arXiv:2410.06511, section 2.1"
    return Recipe(source=source, batch=data, model=model, sequence=model, parameters=data, moments=data)


def weight_stationary_2d(x: Axes = "x", y: Axes = "y") -> Recipe:
    """Weights split over both, and never moved; activations split over both in between.

    Per matmul one gather and one reduce-scatter, over one of the axes each; hidden units
    and heads lie over `y`, their batch over `x`.
    """
    source = "Pope et al. 2022, arXiv:2211.05102, sections 3.2.2 and 3.3"
    return Recipe(source=source, model=y, stationary=x, parameters=x, moments=x)


def fsdp_context(data: Axes = "data", context: Axes = "context") -> Recipe:
    """Sequences split too: each device has a piece of each, and gathers keys and values."""
    source = "Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2, all-gather based context parallelism"
    stored = joined(data, context)
    return Recipe(source=source, batch=data, context=context, parameters=stored, moments=stored)


def context(context: Axes = "context") -> Recipe:
    """The same for one sequence, which no batch goes with."""
    return fsdp_context(None, context)


def ulysses(context: Axes = "context") -> Recipe:
    """Sequences split, but in attention its heads: an all-to-all before and after it."""
    source = "Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3.1, with ZeRO-3 as in 3.2"
    return Recipe(source=source, context=context, heads=context, parameters=context, moments=context)


def expert(expert: Axes = "expert") -> Recipe:
    """Data parallelism, but each expert whole on one device: all-to-all."""
    return Recipe(source="Lepikhin et al. 2020, arXiv:2006.16668, section 3.3", batch=expert, expert=expert)


def expert_dp(data: Axes = "data", expert: Axes = "expert") -> Recipe:
    """Replicas (`data`) of that."""
    source = "Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv:2201.05596, section 5.2"
    return Recipe(source=source, batch=joined(data, expert), expert=expert)


def expert_fsdp(data: Axes = "data", expert: Axes = "expert") -> Recipe:
    """Experts over `expert`; every weight stored split over `data`, and gathered when it is used."""
    source = "MaxText, configs/base.yml, logical_axis_rules, ici_fsdp_parallelism with ici_expert_parallelism"
    return Recipe(source=source, batch=joined(data, expert), expert=expert, parameters=data, moments=data)


def expert_megatron(expert: Axes = "expert", model: Axes = "model") -> Recipe:
    """Experts over `expert`, the hidden units of each, and attention's heads, over `model`."""
    source = "Singh et al. 2023, DeepSpeed-TED, arXiv:2303.06318, section 3"
    return Recipe(source=source, batch=expert, expert=expert, model=model)


def tp(data: Axes = "data", model: Axes = "model") -> Recipe:
    """Megatron's split for serving, the cache by sequences (`data`) and heads (`model`)."""
    source = "Pope et al. 2022, arXiv:2211.05102, sections 3.2.1 and 3.3; vLLM, tensor_parallel_size"
    return Recipe(source=source, batch=data, model=model)


def tp_cached_positions(data: Axes = "data", model: Axes = "model") -> Recipe:
    """The same with the cache by positions over `model`, where there are fewer heads than devices."""
    source = "Dao et al. 2023, Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html, across devices"
    return Recipe(source=source, batch=data, model=model, cached=model)


def weight_gathered(data: Axes = "data") -> Recipe:
    """Weights stored split, and gathered to where the sequences are: for long prompts in large batches."""
    return Recipe(source="Pope et al. 2022, arXiv:2211.05102, section 3.2.3", batch=data, parameters=data)


Recipes = dict[str, Callable[..., Recipe]]

ANY: Recipes = {
    "dp": dp,
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "megatron": megatron,
    "megatron_sequence": megatron_sequence,
    "dp_megatron": dp_megatron,
    "fsdp_megatron": fsdp_megatron,
    "fsdp_megatron_sequence": fsdp_megatron_sequence,
}
TWO_DIMENSIONAL: Recipes = {"weight_stationary_2d": weight_stationary_2d}
SEQUENCES: Recipes = {"fsdp_context": fsdp_context, "context": context, "ulysses": ulysses}
EXPERTS: Recipes = {
    "expert": expert,
    "expert_dp": expert_dp,
    "expert_fsdp": expert_fsdp,
    "expert_megatron": expert_megatron,
}
SERVING: Recipes = {
    "tp": tp,
    "tp_cached_positions": tp_cached_positions,
    "weight_gathered": weight_gathered,
    "weight_stationary_2d": weight_stationary_2d,
}
RECIPES = ANY | TWO_DIMENSIONAL | SEQUENCES | EXPERTS | SERVING
