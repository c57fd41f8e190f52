"""The parallelism recipes of the literature: which mesh axes split what.

A recipe knows no model; `linear.py`, `mlp.py` and `transformer.py` beside it say what
it means for theirs. Every axis may be a tuple of mesh axes: `dp(("data", "model"))`.
"""

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
      sequence: split the tokens of the residual stream, between the split matmuls.
      model: split hidden units, heads and vocabulary, and the weights that make them.
      parameters: split stored parameters once more; gathered when used.
      moments: split the optimizer's moments once more.
    """

    source: str
    batch: Axes = None
    expert: Axes = None
    sequence: Axes = None
    model: Axes = None
    parameters: Axes = None
    moments: Axes = None


def dp(data: Axes = "data") -> Recipe:
    """Data parallelism: parameters whole everywhere, gradients all-reduced."""
    return Recipe(source="Goyal et al. 2017, arXiv:1706.02677", batch=data)


def zero1(data: Axes = "data") -> Recipe:
    """Data parallelism with split optimizer state; updated parameters are gathered."""
    return Recipe(source="Rajbhandari et al. 2020, arXiv:1910.02054, P_os", batch=data, moments=data)


def fsdp(data: Axes = "data") -> Recipe:
    """Fully sharded data parallelism (ZeRO-3): each weight gathered when it is used."""
    source = "Rajbhandari et al. 2020, arXiv:1910.02054, P_os+g+p; Zhao et al. 2023, arXiv:2304.11277"
    return Recipe(source=source, batch=data, parameters=data, moments=data)


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


def expert(data: Axes = "data", expert: Axes = "expert") -> Recipe:
    """Data parallelism over both, but each expert whole on one slice of `expert`: all-to-all."""
    return Recipe(
        source="Lepikhin et al. 2020, arXiv:2006.16668, section 3.3", batch=joined(data, expert), expert=expert
    )


RECIPES = {
    "dp": dp,
    "zero1": zero1,
    "fsdp": fsdp,
    "megatron": megatron,
    "megatron_sequence": megatron_sequence,
    "dp_megatron": dp_megatron,
    "fsdp_megatron": fsdp_megatron,
    "expert": expert,
}
