"""Binding: a call's arguments as named pytrees, and the function of the dynamic ones alone."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """The dynamic arguments of one call, by name, and `fn` as a function of them, positionally.

    `statics` identifies the static arguments (hashable).
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    fn: Callable[..., Any]
    statics: tuple[tuple[str, Any], ...]
    donated: frozenset[int]  # positions among the dynamic arguments


def as_tuple(value: int | str | Sequence[Any] | None) -> tuple[Any, ...]:
    """One item, several or none, as jax.jit's `…_argnums` and `…_argnames` take them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


def bind(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
) -> Binding:
    """Binds a call, as `jax.jit` would read its argument numbers and names.

    Raises:
      SpecError: a static or donated argument does not exist, or is both.
    """
    slots = _slots(fn, args, kwargs)
    static = _chosen(fn, slots, len(args), as_tuple(static_argnums), as_tuple(static_argnames), "static")
    donated = _chosen(fn, slots, len(args), as_tuple(donate_argnums), as_tuple(donate_argnames), "donate")
    if static & donated:
        both = ", ".join(slots[i][0] for i in sorted(static & donated))
        raise SpecError(f"{_name(fn)}: {both}: an argument cannot be both static and donated")
    dynamic = [i for i in range(len(slots)) if i not in static]

    def call(*values: Any) -> Any:
        given = dict(zip(dynamic, values, strict=True))
        filled = [given.get(i, value) for i, (_, value, _) in enumerate(slots)]
        positional = [v for v, (_, _, keyword) in zip(filled, slots, strict=True) if keyword is None]
        named = {keyword: v for v, (_, _, keyword) in zip(filled, slots, strict=True) if keyword is not None}
        return fn(*positional, **named)

    call.__name__ = _name(fn)
    return Binding(
        names=tuple(slots[i][0] for i in dynamic),
        values=tuple(slots[i][1] for i in dynamic),
        fn=call,
        statics=tuple((slots[i][0], slots[i][1]) for i in sorted(static)),
        donated=frozenset(dynamic.index(i) for i in donated),
    )


def _slots(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, str | None]]:
    """(name, value, keyword or None for positional), in call order."""
    names = _positional_names(fn, len(args))
    slots: list[tuple[str, Any, str | None]] = [(n, v, None) for n, v in zip(names, args, strict=True)]
    slots += [(key, kwargs[key], key) for key in kwargs]
    return slots


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [f"arg{i}" for i in range(count)]
    names: list[str] = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}{i}" for i in range(count - len(names))]
    if len(names) < count:
        raise TypeError(f"{_name(fn)} takes {len(names)} positional arguments, {count} were given")
    return names[:count]


def _chosen(
    fn: Callable[..., Any],
    slots: Sequence[tuple[str, Any, str | None]],
    positional: int,
    numbers: tuple[int, ...],
    names: tuple[str, ...],
    what: str,
) -> frozenset[int]:
    chosen: set[int] = set()
    given = [name for name, _, _ in slots]
    parameters = _parameter_names(fn)
    for number in numbers:
        if not -positional <= number < positional:
            if number < len(parameters) and parameters[number] in given:
                chosen.add(given.index(parameters[number]))
                continue
            raise SpecError(f"{what}_argnums={number}: {_name(fn)} was called with {positional} positional arguments")
        chosen.add(number % positional)
    for name in names:
        if name in given:
            chosen.add(given.index(name))
        elif name not in parameters:
            raise SpecError(f"{what}_argnames={name!r}: {_name(fn)} has no such argument ({', '.join(parameters)})")
    return frozenset(chosen)


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
