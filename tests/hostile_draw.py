"""Draw: what the operations of a hostile program are drawn from.

Values are of five kinds: "f" float32, "h" bfloat16 and float16, "i" integers, "b" booleans,
"c" complex64. A value is *exact* as long as it holds small whole numbers that no order of
sums changes; operations that tip over by rounding (comparisons, sorts, casts) take exact
values alone. Nothing here reads a clock or global state: equal seeds draw equal programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Value = jax.Array
Shape = tuple[int, ...]

MAX_SIZE = 512  # elements of a value
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
HALVES = ("bfloat16", "float16")
DTYPES = {"f": ("float32",), "h": HALVES, "i": INTEGERS, "b": ("bool",), "c": ("complex64",)}
ANY = "fhibc"


class UnfitError(Exception):
    """An operation finds no value that it can take."""


def kind_of(x: Value) -> str:
    """The kind of a value."""
    return next(kind for kind, dtypes in DTYPES.items() if str(x.dtype) in dtypes)


@dataclass(kw_only=True)
class Draw:
    """A stream of choices, and the values that there are.

    `fresh` makes a new argument of the program.
    """

    rng: np.random.Generator
    sizes: Sequence[int]
    fresh: Callable[[Shape, str, "Draw"], Value]
    values: list[Value] = field(default_factory=list[Value])
    exact: list[bool] = field(default_factory=list[bool])
    depth: int = 0
    derived: bool = False  # whether what is being made is differentiated
    rounded: bool = False  # whether what is being made is not exact

    # Choices.

    def whole(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def coin(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def choice(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def order(self, count: int) -> list[int]:
        return [int(i) for i in self.rng.permutation(count)]

    def some(self, count: int, least: int = 0) -> tuple[int, ...]:
        """Some of 0 … count − 1, in order."""
        return tuple(sorted(self.order(count)[: self.whole(least, count)])) if count else ()

    def size(self) -> int:
        return int(self.choice(self.sizes))

    def shape(self, rank: int, most: int = MAX_SIZE) -> Shape:
        for _ in range(50):
            found = tuple(self.size() for _ in range(rank))
            if prod(found) <= most:
                return found
        return (1,) * rank

    def dtype(self, kind: str) -> str:
        return self.choice(DTYPES[kind])

    # Values.

    def hold(self, value: Value, *, exact: bool) -> None:
        self.values.append(value)
        self.exact.append(exact)

    def pick(
        self,
        kinds: str = "f",
        least: int = 0,
        *,
        exact: bool = False,
        most: int = 9,
        where: Callable[[Value], bool] | None = None,
    ) -> Value:
        """One of the values of some kinds and ranks, later ones more often.

        Raises:
          UnfitError: there is none.
        """
        fitting = [
            i
            for i, v in enumerate(self.values)
            if kind_of(v) in kinds
            and least <= v.ndim <= most
            and (self.exact[i] or not exact)
            and (where is None or where(v))
        ]
        if not fitting:
            raise UnfitError
        i = fitting[-min(int(self.rng.geometric(0.4)), len(fitting))]
        self.rounded |= not self.exact[i]
        return self.values[i]

    def like(self, x: Value, *, exact: bool = False) -> Value:
        """Another value of the same shape and dtype: one that is there, a new one, or `x` changed."""
        same = [
            i
            for i, v in enumerate(self.values)
            if v.shape == x.shape and v.dtype == x.dtype and v is not x and (self.exact[i] or not exact)
        ]
        if same and self.coin(0.7):
            i = self.choice(same)
            self.rounded |= not self.exact[i]
            return self.values[i]
        if self.coin(0.6) or not x.ndim:
            return self.fresh(x.shape, str(x.dtype), self)
        return lax.rev(x, (self.whole(0, x.ndim - 1),))

    def operand(self, shape: Shape, kind: str = "f", *, exact: bool = False, dtype: str | None = None) -> Value:
        """A value of a shape: one that is there, a new one, or the elements of another, laid out anew."""
        dtype = dtype or self.dtype(kind)

        def fits(v: Value) -> bool:
            return v.shape == shape and str(v.dtype) == dtype

        if self.coin(0.4):
            try:
                return self.pick(kind, exact=exact, where=fits)
            except UnfitError:
                pass
        if self.coin(0.35) and prod(shape):
            try:
                x = self.pick(kind, exact=exact, where=lambda v: v.size > 0 and str(v.dtype) == dtype)
            except UnfitError:
                pass
            else:
                return jnp.resize(x, shape) if x.size != prod(shape) else x.reshape(shape)
        return self.fresh(shape, dtype, self)

    def constant(self, shape: Shape, dtype: str, low: int = -4, high: int = 4) -> Value:
        """Small whole numbers that the program holds."""
        return jnp.asarray(small_numbers(self.rng, shape, dtype, low, high))

    def axis(self, x: Value) -> int:
        return self.whole(0, x.ndim - 1)

    # What is made.

    def inexact(self) -> None:
        """What is being made is rounded from here on."""
        self.rounded = True

    def small(self, x: Value, terms: int = 4) -> Value:
        """Back to small numbers; `terms` bounds by how much they grew."""
        if kind_of(x) == "c":
            return lax.complex(self.small(lax.real(x), terms), self.small(lax.imag(x), terms))
        if kind_of(x) not in "fh":
            return x
        if not self.rounded:
            return lax.rem(x, jnp.asarray(7, x.dtype))
        return x * jnp.asarray(2.0 ** -int(np.ceil(np.log2(max(terms, 2)))), x.dtype)

    def indices(self, shape: Shape, limit: int, *, within: bool = False) -> Value:
        """Positions of a dimension of `limit`: computed, given or constant, many of them out of range."""
        low, high = (0, max(limit - 1, 0)) if within else (-limit - 3, 2 * limit + 3)
        numbers = self.rng.integers(low, high + 1, shape).astype(np.int32)
        if not within and numbers.size and self.coin(0.15):
            numbers.flat[self.whole(0, numbers.size - 1)] = self.choice((2**31 - 1, -(2**31), 10**6))
        if self.coin(0.3):
            return jnp.asarray(numbers)
        try:
            shift = self.pick("f", exact=True, where=lambda v: v.size > 0)
        except UnfitError:
            return jnp.asarray(numbers)
        moved = to_int(shift.ravel()[0])
        if within:
            return (jnp.asarray(numbers) + jnp.abs(moved)) % max(limit, 1)
        return jnp.asarray(numbers) + jnp.where(jnp.abs(jnp.asarray(numbers)) > 10**5, 0, moved)

    def inner(self, seed: int, values: Sequence[Value], exact: Sequence[bool]) -> "Draw":
        """For a body, which may be traced several times: its choices are its own, new arguments are constants."""
        return Draw(
            rng=np.random.default_rng(seed),
            sizes=self.sizes,
            fresh=lambda shape, dtype, draw: draw.constant(shape, dtype),
            values=list(values),
            exact=list(exact),
            depth=self.depth + 1,
            derived=self.derived,
        )


def small_numbers(rng: np.random.Generator, shape: Shape, dtype: str, low: int = -4, high: int = 4) -> np.ndarray:
    """Small whole numbers of any dtype."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == "complex64":
        real, imaginary = (rng.integers(low, high + 1, shape) for _ in range(2))
        return (real + 1j * imaginary).astype(np.complex64)
    if dtype.startswith("uint"):
        low, high = 0, high - low
    return rng.integers(low, high + 1, shape).astype(jnp.dtype(dtype))


def without_nan(x: Value) -> Value:
    """A float value with a number in place of NaN, where what is made of NaN is no number in particular."""
    return jnp.where(jnp.isnan(x), 1, x).astype(x.dtype) if kind_of(x) in "fh" else x


def to_int(x: Value) -> Value:
    """A float value as int32; NaN, whose cast is no number in particular, as 0."""
    return jnp.where(jnp.isfinite(x), x, 0).astype(jnp.int32)
