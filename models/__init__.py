"""Plain JAX models to plan for, by name: `models.build("llama3-8b", layers=2)`.

No model says a word about sharding; `models.layouts` holds the layouts that experts
would write by hand. Every name is also a zero-argument builder, for command lines:
`models:llama3_8b` returns `(train_step, (state, batch))`, `models:llama3_8b_decode`
returns `(decode, (params, decoding))`.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from models import inference, linear, mlp, moe, transformer
from models.training import ValueAndGrad

_STEPS: dict[Any, Callable[..., Callable[..., Any]]] = {
    module: module.train_step for module in (linear, mlp, transformer, moe)
} | {inference: inference.step}

_MODULES: dict[str, Any] = {name: module for module in _STEPS for name in module.CONFIGS}

SIZES = ("batch", "sequence")  # of the arguments, beside the fields of a configuration

Target = tuple[Callable[..., Any], tuple[Any, ...]]
"""A program and its arguments."""


def names() -> tuple[str, ...]:
    """Every named configuration."""
    return tuple(_MODULES)


def find(name: str, **overrides: Any) -> tuple[Any, Any]:
    """`(module, config)` of a name, with fields of the configuration overridden.

    Raises:
      KeyError: no configuration has this name.
      TypeError: the configuration has no field of an override's name.
    """
    if name not in _MODULES:
        raise KeyError(f"no model named {name!r}; there are: {', '.join(names())}")
    module = _MODULES[name]
    known = [*SIZES, *(field.name for field in fields(module.CONFIGS[name]))]
    for key in overrides:
        if key not in known:
            near = get_close_matches(key, known, n=2, cutoff=0.5) or known
            raise TypeError(f"{name} has no {key!r}; there is {', '.join(near)}")
    return module, replace(module.CONFIGS[name], **overrides)


def build(
    name: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    value_and_grad: ValueAndGrad | None = None,
    **overrides: Any,
) -> Target:
    """`(program, arguments)` of a name, abstract: nothing is allocated.

    The program of a model is `train_step(state, batch)`; of the names that end so it is
    `prefill(params, prompt)`, `decode(params, decoding)` or `generate(params, decoding, end)`.

    Args:
      name: one of `names()`.
      batch: rows (linear, mlp) or sequences; None is the model's own.
      sequence: tokens per sequence, of transformer, moe and prefill; None is the whole context.
      value_and_grad: of a training step; None is `jax.value_and_grad`.
      **overrides: fields of the model's configuration, such as `layers=2`.
    """
    module, config = find(name, **overrides)
    step = _STEPS[module] if value_and_grad is None else partial(_STEPS[module], value_and_grad=value_and_grad)
    sizes = {key: value for key, value in (("batch", batch), ("sequence", sequence)) if value is not None}
    return step(config), module.example_args(config, **sizes)


def __getattr__(attribute: str) -> Callable[[], Target]:
    """`models.gpt2_small` is `build("gpt2-small")`, still to be called."""
    name = attribute.replace("_", "-")
    if name not in _MODULES:
        raise AttributeError(f"module 'models' has no attribute {attribute!r}")
    return partial(build, name)


def __dir__() -> list[str]:
    """The module's names, and every model's name as a builder."""
    return [*globals(), *(name.replace("-", "_") for name in names())]
