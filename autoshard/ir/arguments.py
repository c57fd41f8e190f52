"""Binding: a call's arguments as named pytrees, and the function of the dynamic ones alone."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.errors import SpecError

_jax.hide_frames(__file__)  # the functions made here only call the user's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """The dynamic arguments of one call, by name, and `fn` as a function of them, positionally.

    Keyword arguments follow the positional ones, sorted by name: their order in a call means nothing.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    fn: Callable[..., Any]
    statics: tuple[tuple[str, Any], ...]
    donated: frozenset[int]  # positions among the dynamic arguments
    keywords: tuple[str, ...]  # the last of the names: given by keyword

    def as_called(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits one value per dynamic argument into the positional and keyword arguments of the call."""
        count = len(values) - len(self.keywords)
        return tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which arguments of a function are static or donated: by position, and by name where given by keyword."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()


def as_tuple(value: int | str | Sequence[Any] | None) -> tuple[Any, ...]:
    """One item, several or none, as jax.jit's `…_argnums` and `…_argnames` take them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


def roles(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
) -> Roles:
    """Reads argument numbers and names as `jax.jit` does: where one of the two is left out, it follows from the other.

    Raises:
      SpecError: a static or donated argument does not exist, or is both.
    """
    static = _both(fn, static_argnums, static_argnames, "static")
    donated = _both(fn, donate_argnums, donate_argnames, "donate")
    both = sorted({*static[0]} & {*donated[0]}) or sorted({*static[1]} & {*donated[1]})
    if both:
        known = [p.name for p in _parameters(fn) or ()]
        named = ", ".join(known[i] if isinstance(i, int) and i < len(known) else str(i) for i in both)
        raise SpecError(f"{_name(fn)}: {named}: an argument cannot be both static and donated")
    return Roles(
        static_argnums=static[0], static_argnames=static[1], donate_argnums=donated[0], donate_argnames=donated[1]
    )


def _both(
    fn: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Sequence[str] | None, what: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    parameters = _parameters(fn)
    nums, given = tuple(int(n) for n in as_tuple(numbers)), tuple(str(n) for n in as_tuple(names))
    if parameters is None:
        return nums, given
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for number in nums:
            if not -len(positional) <= number < len(positional):
                raise SpecError(
                    f"{what}_argnums={number}: {_name(fn)} takes {len(positional)} positional arguments "
                    f"({', '.join(p.name for p in positional)})"
                )
        nums = tuple(n % len(positional) for n in nums)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for name in given:
            if name not in known:
                raise SpecError(f"{what}_argnames={name!r}: {_name(fn)} has no such argument ({', '.join(known)})")
    named = {i: p.name for i, p in enumerate(positional) if p.kind is p.POSITIONAL_OR_KEYWORD}
    if names is None:
        given = tuple(named[n] for n in nums if n in named)
    elif numbers is None:
        nums = tuple(i for i, name in named.items() if name in given)
    return nums, given


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
    role = roles(
        fn,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    slots = _slots(fn, args, kwargs)
    static = _pick_slots(slots, role.static_argnums, role.static_argnames)
    donated = _pick_slots(slots, role.donate_argnums, role.donate_argnames)
    dynamic = [i for i in range(len(slots)) if i not in static]

    def call(*values: Any) -> Any:
        given = dict(zip(dynamic, values, strict=True))
        filled = [given.get(i, value) for i, (_, value, _) in enumerate(slots)]
        positional = [v for v, (_, _, keyword) in zip(filled, slots, strict=True) if keyword is None]
        named = {keyword: v for v, (_, _, keyword) in zip(filled, slots, strict=True) if keyword is not None}
        return fn(*positional, **named)

    names = tuple(slots[i][0] for i in dynamic)
    return Binding(
        names=names,
        values=tuple(slots[i][1] for i in dynamic),
        fn=_in_place_of(fn, call, names),
        statics=tuple((slots[i][0], slots[i][1]) for i in sorted(static)),
        donated=frozenset(dynamic.index(i) for i in donated - static),
        keywords=tuple(slots[i][0] for i in dynamic if slots[i][2] is not None),
    )


def _in_place_of(fn: Callable[..., Any], call: Any, names: Sequence[str]) -> Any:
    """`call` under the name, the file and the argument names of `fn`, by which JAX's errors speak of it."""
    call.__name__ = call.__qualname__ = _name(fn)
    call.__wrapped__ = fn
    only = inspect.Parameter.POSITIONAL_ONLY
    if all(name.isidentifier() for name in names) and len(set(names)) == len(names):
        call.__signature__ = inspect.Signature([inspect.Parameter(name, only) for name in names])
    else:
        call.__signature__ = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
    return call


def _slots(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, str | None]]:
    """(name, value, keyword or None for positional): the positional ones in order, then the keywords by name."""
    names = _positional_names(fn, len(args))
    slots: list[tuple[str, Any, str | None]] = [(n, v, None) for n, v in zip(names, args, strict=True)]
    slots += [(key, kwargs[key], key) for key in sorted(kwargs)]
    return slots


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    parameters = _parameters(fn)
    if parameters is None:
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


def _pick_slots(
    slots: Sequence[tuple[str, Any, str | None]], numbers: tuple[int, ...], names: tuple[str, ...]
) -> frozenset[int]:
    """The slots of these positions, and of these names where given by keyword; a default that is left out is none."""
    positional = sum(keyword is None for _, _, keyword in slots)
    by_number = {n % positional for n in numbers if -positional <= n < positional}
    return frozenset(by_number | {i for i, (_, _, keyword) in enumerate(slots) if keyword in names})


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
