"""Random calls of decorated functions, beside `jax.jit`: signatures, keywords, statics, donation, pytrees, settings.

A sequence is one function with random parameters and options, and calls of it with values
from a small pool, so that old keys come back. Everything follows from the seed.
"""

import contextlib
import dataclasses
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.ir import arguments

MESH = {"a": 2}


class Pair(NamedTuple):
    """A pytree of two."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    """A pytree whose structure holds a value."""

    x: Any
    tag: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    rate: float


def weight(name: str) -> int:
    """A small number that tells names apart."""
    return zlib.crc32(name.encode()) % 7 + 1


def body(given: Mapping[str, Any], statics: frozenset[str], kept: frozenset[str]) -> Any:
    """What every function computes: each argument by its own weight, statics by type and value.

    The arrays of `kept` come back in their own shapes, so that their buffers can be taken.
    """
    factor, total, back = 0, jnp.zeros(()), {}
    for name in sorted(given):
        value = given[name]
        if name in statics:
            factor += weight(name) * zlib.crc32(f"{type(value).__name__}{value!r}".encode()) % 11
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            key = name + jax.tree_util.keystr(path)
            x = jnp.asarray(leaf)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                total += weight(key) * jax.random.uniform(x, (8,)).sum()
                continue
            total = total + weight(key) * jnp.abs(x.astype(jnp.complex64)).mean() * (1 + leaf_tag(value))
            if name in kept:
                back[key] = leaf * 2 + x  # Python scalars and weak types keep their dtypes
                if x.ndim == 2:
                    back[key + "@"] = jnp.sin((x.astype(jnp.float32) / 50) @ jnp.ones((x.shape[1], 4)))
    return {"total": total * (1 + factor), **back}


def leaf_tag(value: Any) -> int:
    return weight(repr(value.tag)) if isinstance(value, Tagged) else 0


# --- Functions -------------------------------------------------------------------------

NAMES: tuple[str, ...] = ("x", "y", "z", "params", "batch", "mode", "n", "scale", "config", "rest", "more")


@dataclasses.dataclass
class Written:
    """A random function, and its options in `jax.jit`'s words."""

    fn: Callable[..., Any]
    text: str
    positional: list[str]  # that may be given by position
    only: list[str]  # by position alone
    keywords: list[str]  # by keyword alone
    defaults: list[str]
    rest: bool
    more: bool
    statics: frozenset[str]
    options: dict[str, Any]
    method: bool


def written(rng: random.Random) -> Written:
    names = rng.sample(NAMES[:9], rng.randint(1, 5))
    cut = rng.randint(0, len(names))
    positional, keywords = names[:cut], names[cut:]
    only = positional[: rng.choice((0, 0, 0, 1))]
    first_default = rng.randint(0, len(positional))
    defaults = {*positional[first_default:], *(k for k in keywords if rng.random() < 0.5)}
    rest, more = rng.random() < 0.15, rng.random() < 0.25
    statics = frozenset(n for n in names if n in ("mode", "n", "config") or rng.random() < 0.1)
    kept = frozenset(n for n in (*names, "more", "rest") if rng.random() < 0.7)
    donated = [n for n in names if n not in statics and rng.random() < 0.4]
    method = rng.random() < 0.1 and not only

    def parameter(name: str) -> str:
        default = f"={rng.choice(STATICS)!r}" if name in statics else f"={rng.choice(('None', '2.0', '3'))}"
        return name + (default if name in defaults else "")

    parts = [parameter(n) for n in positional]
    if only:
        parts.insert(len(only), "/")
    if rest:
        parts.append("*rest")
    elif keywords:
        parts.append("*")
    parts += [parameter(n) for n in keywords]
    if more:
        parts.append("**more")
    text = f"def f({', '.join([*(['self'] if method else []), *parts])}):\n    return body("
    text += "{" + ", ".join(f"'{n}': {n}" for n in (*names, *(["rest"] if rest else []), *(["more"] if more else [])))
    text += "}, statics, kept)"
    scope: dict[str, Any] = {"body": body, "statics": statics, "kept": kept, "Config": Config}
    exec(text, scope)

    shift = 1 if method else 0
    options: dict[str, Any] = {}

    def roles(what: str, chosen: list[str]) -> None:
        """By number, by name, or by both."""
        numbers = [positional.index(n) + shift for n in chosen if n in positional]
        if what == "static" and method:
            numbers.insert(0, 0)
        names = [*(["self"] if what == "static" and method else []), *(n for n in chosen if n not in only)]
        way = rng.random()
        if way < 0.4 or any(n in keywords for n in chosen):
            options[f"{what}_argnames"] = names
            if way < 0.1 or len(names) < len(chosen):
                options[f"{what}_argnums"] = numbers
        elif numbers:
            options[f"{what}_argnums"] = numbers[0] if len(numbers) == 1 else tuple(numbers)

    if statics or method:
        roles("static", sorted(statics))
    if donated:
        roles("donate", donated)
    return Written(
        scope["f"], text, positional, only, keywords, sorted(defaults), rest, more, statics, options, method
    )  # fmt: skip


# `jax.jit` does not tell (1,) from (1.0,): whichever came first runs.
STATICS = (2, 2.0, True, "a", ("a", 1), ("a", 2.5), None, Config(2, 1.0), Config(2, 2.0), -1, 0, False, 1, 1.0)


# --- Values ----------------------------------------------------------------------------


def array(rng: random.Random) -> Any:
    shape = rng.choice(((8,), (4, 8), (8, 4), (2, 2), (), (3,), (0,), (8, 1)))
    data = np.random.default_rng(rng.randint(0, 3)).integers(-4, 5, size=shape)
    kind = rng.random()
    if kind < 0.45:
        return jnp.asarray(data, rng.choice((jnp.float32, jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16)))
    if kind < 0.6:
        return data.astype(rng.choice((np.float32, np.float64, np.int64, np.int8, np.uint32, np.float16)))
    if kind < 0.85:
        return rng.choice((2, 3, 2.0, True, 1.5, 1j, np.float32(2), np.int64(3), np.bool_(True)))
    if kind < 0.95:
        return jnp.asarray(rng.choice((2, 2.0)))  # of weak type
    return jax.random.key(rng.randint(0, 2))


def dynamic(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return array(rng)
    inner = [dynamic(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    return rng.choice(
        (
            None,
            tuple(inner),
            inner,
            {f"k{i}": v for i, v in enumerate(inner)},
            Pair(array(rng), array(rng)),
            Tagged(array(rng), rng.choice((1, 1.0, "t", 2))),
        )
    )


def called(rng: random.Random, w: Written, pool: dict[str, list[Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one call, now and then wrong ones."""

    def value(name: str) -> Any:
        known = pool.setdefault(name, [])
        if not known or rng.random() < 0.25:
            known.append(rng.choice(STATICS) if name in w.statics else dynamic(rng))
        return rng.choice(known)

    def wrong() -> bool:
        return rng.random() < 0.01

    count = rng.randint(len(w.only), len(w.positional))
    args = [value(n) for n in w.positional[:count]]
    named = [n for n in (*w.positional[count:], *w.keywords) if n not in w.defaults or rng.random() < 0.5]
    if w.rest and count == len(w.positional):
        args += [dynamic(rng, 1) for _ in range(rng.randint(0, 2))]
    if w.more:
        named += rng.sample(("p", "q", "beta"), rng.randint(0, 2))
    rng.shuffle(named)
    kwargs = {n: value(n) for n in named}
    if wrong():
        kwargs["unknown"] = 1
    if wrong() and kwargs:
        kwargs.pop(next(iter(kwargs)))
    if wrong() and args:
        args[rng.randrange(len(args))] = rng.choice(("text", [1], object(), {1, 2}, 2**70))
    return tuple(args), kwargs


def again(
    rng: random.Random, w: Written, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An earlier call: with keywords in another order, positions named, names given a position, values exchanged."""
    args, kwargs = list(call[0]), dict(call[1])
    if rng.random() < 0.2 and len(args) <= len(w.positional):
        while len(args) > len(w.only) and rng.random() < 0.5:
            kwargs[w.positional[len(args) - 1]] = args.pop()
        while len(args) < len(w.positional) and w.positional[len(args)] in kwargs and rng.random() < 0.5:
            args.append(kwargs.pop(w.positional[len(args)]))
    dynamic = [n for n in kwargs if n not in w.statics]
    if len(dynamic) > 1 and rng.random() < 0.3:
        one, other = rng.sample(dynamic, 2)
        kwargs[one], kwargs[other] = kwargs[other], kwargs[one]
    static = [n for n in kwargs if n in w.statics]
    if static and rng.random() < 0.2:
        kwargs[rng.choice(static)] = rng.choice(STATICS)
    if len(kwargs) > 1 and w.more and rng.random() < 0.2:
        kwargs.pop(rng.choice(list(kwargs)))
    names = list(kwargs)
    rng.shuffle(names)
    return tuple(args), {n: kwargs[n] for n in names}


SETTINGS: tuple[Callable[[], contextlib.AbstractContextManager[Any]], ...] = (
    lambda: jax.enable_x64(True),
    lambda: jax.default_matmul_precision("float32"),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.threefry_partitionable(False),
)


# --- Beside `jax.jit` ------------------------------------------------------------------


@dataclasses.dataclass
class Compared:
    """One call of both, and in what they differ."""

    way: str
    planned: bool
    raised: bool
    differ: list[str]
    text: str


def fresh(tree: Any) -> Any:
    """The same values in buffers of their own, for a call that may take them."""

    return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, tree)


def outcome(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001  whether there is one is what is compared
        return None, f"{type(error).__name__}: {str(error)[:150]}"


def differences(got: Any, want: Any) -> list[str]:
    if jax.tree.structure(got) != jax.tree.structure(want):
        return [f"structure {jax.tree.structure(got)} instead of {jax.tree.structure(want)}"]
    found: list[str] = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if (a.shape, a.dtype, a.weak_type) != (b.shape, b.dtype, b.weak_type):
            found.append(f"type of {jax.tree_util.keystr(path)}: {a.aval} instead of {b.aval}")
            continue
        x, y = (np.asarray(v).astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (a, b))
        loose = 2e-2 if a.dtype.itemsize == 2 else 2e-5
        if not np.allclose(x, y, rtol=loose, atol=loose, equal_nan=True):
            found.append(f"value of {jax.tree_util.keystr(path)}: {x.ravel()[:3]} instead of {y.ravel()[:3]}")
    return found


def renamed(w: Any, bound: tuple[Any, ...], *, shapes_only: bool) -> Callable[..., Any]:
    """The function under `jax.jit`, with its dynamic arguments in a tuple and a dictionary: none has a name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        nums, names = (w.options.get(f"static_arg{kind}", ()) for kind in ("nums", "names"))
        nums, names = ((given,) if isinstance(given, int | str) else tuple(given or ()) for given in (nums, names))
        moving = {i: x for i, x in enumerate(args) if i not in nums}

        def fn(moving: dict[int, Any], named: dict[str, Any]) -> Any:
            still = {k: v for k, v in kwargs.items() if k in names}
            return w.fn(*bound, *(moving.get(i, x) for i, x in enumerate(args)), **still, **named)

        named = {k: v for k, v in kwargs.items() if k not in names}
        return jax.eval_shape(fn, moving, named) if shapes_only else jax.jit(fn)(moving, named)

    return run


def sequence(seed: int, calls: int) -> Iterator[Compared]:
    """The calls of one function, compared."""
    rng = random.Random(seed)
    w = written(rng)
    planning = partial(autoshard.jit, mesh=MESH, hardware="cpu:2", for_grad=False, rel_gap=0.01)
    (ours, failed), (theirs, refused) = (outcome(jit, (w.fn,), w.options) for jit in (planning, jax.jit))
    if failed or refused:
        wrong = [] if failed and refused else [f"{failed or 'no error'} instead of {refused or 'no error'}"]
        yield Compared("jit", False, refused is not None, wrong, f"seed {seed}: {w.text} {w.options}")
        return
    holder: Any = type("Holder", (), {"ours": ours, "theirs": theirs})()
    pool: dict[str, list[Any]] = {}
    past: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in range(calls):
        args, kwargs = again(rng, w, rng.choice(past)) if past and rng.random() < 0.7 else called(rng, w, pool)
        past.append((args, kwargs))
        setting = rng.choice(SETTINGS) if rng.random() < 0.15 else contextlib.nullcontext
        way = rng.choice(("call",) * 8 + ("lower", "shape"))
        one, other = fresh((args, kwargs)), fresh((args, kwargs))
        f, g = (holder.ours, holder.theirs) if w.method else (ours, theirs)
        before = len(ours._entries)
        bound = (holder,) if w.method else ()
        if way == "lower":
            f, g = lowered(ours, w, bound), lowered(theirs, w, bound)
        elif way == "shape":
            f, g = shapes(ours, bound), shapes(theirs, bound)
        with setting():
            got, failed = outcome(f, *one)
            want, refused = outcome(g, *other)
            died = failed is None and (refused or "").startswith("AssertionError: (") and "DebugInfo" in str(refused)
            if died:  # JAX counts the names of arguments wrongly where a keyword has a positional-only one's name
                want, refused = outcome(renamed(w, bound, shapes_only=way == "shape"), *fresh((args, kwargs)))
            differ: list[str] = []
            if (failed is None) != (refused is None):
                differ.append(f"{failed or 'no error'} instead of {refused or 'no error'}")
            elif failed is None:
                differ += differences(got, want)
        gone = [[isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(given)] for given in (one, other)]
        if (
            gone[0] != gone[1] and way != "lower" and not died
        ):  # the compiler alone decides there, by the parts on a device
            differ.append(f"deleted {gone[0]} instead of {gone[1]}")
        text = f"seed {seed}: {w.text.splitlines()[0]} {w.options} ({way}): {args}, {kwargs}"
        yield Compared(way, len(ours._entries) > before, refused is not None, differ, text)


def lowered(f: Any, w: Written, bound: tuple[Any, ...]) -> Callable[..., Any]:
    """A call through `lower` and `compile`, which takes the dynamic arguments alone."""
    roles = arguments.roles(w.fn, **w.options)

    def call(*args: Any, **kwargs: Any) -> Any:
        compiled = f.lower(*bound, *args, **kwargs).compile()
        rest = [x for i, x in enumerate((*bound, *args)) if i not in roles.static_argnums]
        return compiled(*rest, **{k: v for k, v in kwargs.items() if k not in roles.static_argnames})

    return call


def shapes(f: Any, bound: tuple[Any, ...]) -> Callable[..., Any]:
    """Zeros of the results' shapes."""
    return lambda *a, **k: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), f.eval_shape(*bound, *a, **k))
