"""Hostile operations that combine elements: reductions, windows, sorts, products, convolutions, linear algebra."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.hostile_draw import MAX_SIZE, Draw, Shape, UnfitError, Value, kind_of, to_int, without_nan

Reducer = Callable[..., Value]


def with_nan(d: Draw, x: Value) -> Value:
    """Now and then NaN in place of one number."""
    return jnp.where(x == 2, jnp.nan, x) if kind_of(x) == "f" and d.coin(0.3) else x


def signs(x: Value) -> Value:
    return jnp.where(x > 0, 1, -1).astype(x.dtype)


def reduce(d: Draw) -> Value:
    x = d.pick("fibc", 1)
    axes = d.some(x.ndim, 1)
    kind = kind_of(x)
    if kind == "b":
        ops: Sequence[Reducer] = (jnp.any, jnp.all, lambda x, axis: lax.reduce_xor(x, axis))
    elif kind == "i":
        ops = (
            *(jnp.sum, jnp.prod, lambda x, axis: lax.reduce_and(x, axis), lambda x, axis: lax.reduce_or(x, axis)),
            *((jnp.max, jnp.min) if all(x.shape) else ()),
            lambda x, axis: lax.reduce_xor(x, axis),
            lambda x, axis: jnp.sum(x, axis=axis, dtype=x.dtype),
        )
    elif kind == "c" and not d.rounded and all(x.shape):
        ops = (jnp.sum, lambda x, axis: lax.reduce_max(x, axis), lambda x, axis: lax.reduce_min(x, axis))
    elif kind == "c" or d.rounded:
        ops = (jnp.sum,)
    else:
        extremes: Sequence[Reducer] = (jnp.max, jnp.min)
        x = with_nan(d, x)
        ops = (
            jnp.sum,
            jnp.sum,
            *(extremes if all(x.shape) else ()),
            lambda x, axis: jnp.prod(signs(x), axis=axis),
        )
    terms = prod(x.shape[a] for a in axes)
    return d.small(d.choice(ops)(x, axis=axes), max(terms, 1))


def extreme_place(d: Draw) -> Value:
    x = d.pick("fi", 1, exact=True, where=lambda v: v.size > 0)
    return d.choice((lax.argmax, lax.argmin))(with_nan(d, x), d.axis(x), d.choice((jnp.int32, jnp.uint8)))


def smooth_reduce(d: Draw) -> Value:
    x = d.pick("f", 1, where=lambda v: v.size > 0)
    axis = d.axis(x)
    d.inexact()
    ops: tuple[Callable[[Value], Value], ...] = (
        lambda x: jax.nn.softmax(x, axis=axis),
        lambda x: jax.nn.logsumexp(x, axis=axis),
        lambda x: jnp.mean(x, axis=axis),
        lambda x: jnp.var(x, axis=axis),
        lambda x: lax.cumlogsumexp(x, axis=axis),
        lambda x: (x - x.mean(axis, keepdims=True)) * lax.rsqrt(x.var(axis, keepdims=True) + 1),
        lambda x: jnp.sqrt(1 + jnp.sum(x * x, axis=axis)),
    )
    return d.choice(ops)(x)


def reduce_by_function(d: Draw) -> Value:
    x = without_nan(d.pick("fi", 1, exact=True))
    axes = d.some(x.ndim, 1)
    if d.coin():
        most = jnp.asarray(-9, x.dtype) if not str(x.dtype).startswith("uint") else jnp.asarray(0, x.dtype)
        place = lax.broadcasted_iota(jnp.int32, x.shape, axes[0])

        def better(left: Any, right: Any) -> Any:
            take = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] <= right[1]))
            return tuple(lax.select(take, a, b) for a, b in zip(left, right, strict=True))

        return lax.reduce((x, place), (most, jnp.int32(99)), better, axes)[d.whole(0, 1)]
    return lax.reduce(x, jnp.asarray(1, x.dtype), lambda a, b: lax.select(a > b, a, b), axes)


def cumulative(d: Draw) -> Value:
    x = d.pick("fi", 1)
    axis, backwards = d.axis(x), d.coin()
    ops: list[Reducer] = [lax.cumsum]
    if not d.rounded:
        ops += [lax.cummax, lax.cummin, lambda x, axis, reverse: lax.cumprod(signs(x), axis=axis, reverse=reverse)]
        x = with_nan(d, x)
    return d.small(d.choice(ops)(x, axis=axis, reverse=backwards), max(x.shape[axis], 1))


def scanned_together(d: Draw) -> Value:
    x = d.pick("fi", 1, where=lambda v: v.size > 0)
    combine = jnp.add if d.rounded or d.coin() else jnp.maximum
    axis = d.axis(x)
    return d.small(lax.associative_scan(combine, x, axis=axis, reverse=d.coin()), x.shape[axis])


def windows(d: Draw, x: Value) -> tuple[Any, ...]:
    """Dimensions, strides and padding, most of them of size 1."""
    size, stride, padding, base, dilation = [], [], [], [], []
    for extent in x.shape:
        plain = d.coin(0.4)
        size.append(1 if plain else d.whole(1, 4))
        stride.append(1 if plain else d.choice((1, 2, 3, size[-1])))
        padding.append((0, 0) if plain or d.coin(0.3) else (d.whole(0, 2), d.whole(0, 2)))
        base.append(1 if plain or d.coin(0.75) else 2)
        dilation.append(1 if plain or d.coin(0.75) else 2)
        reach = (max(extent - 1, 0) * base[-1] + (extent > 0)) + sum(padding[-1])
        if reach < (size[-1] - 1) * dilation[-1] + 1:
            size[-1] = dilation[-1] = 1
    named = d.choice(("SAME", "VALID")) if d.coin(0.3) else padding
    return tuple(size), tuple(stride), named, tuple(base), tuple(dilation)


def window(d: Draw) -> Value:
    x = without_nan(d.pick("fi", 1, most=4))
    size, stride, padding, base, dilation = windows(d, x)
    number = lambda value: jnp.asarray(value, x.dtype)
    least = -jnp.inf if kind_of(x) == "f" else jnp.iinfo(x.dtype).min
    most = jnp.inf if kind_of(x) == "f" else jnp.iinfo(x.dtype).max
    ops: list[tuple[Any, Any]] = [(0, lax.add)]
    if not d.rounded:
        ops += [(least, lax.max), (most, lax.min), (1, lambda a, b: lax.select(a > b, a, b)), (1, lax.mul)]
    start, combine = d.choice(ops)
    if combine is lax.mul:
        x = signs(x)
    made = lax.reduce_window(x, number(start), combine, size, stride, padding, base, dilation)
    made = jnp.where(jnp.isfinite(made), made, 5) if kind_of(x) == "f" and not d.rounded else made
    return d.small(made, prod(size))


def pooled(d: Draw) -> Value:
    """The gradient of a pooling, or its tangent: a choice scattered back, or gathered."""
    x = d.pick("f", 1, exact=True, most=4, where=lambda v: v.size > 0)
    size, stride, padding, _, _ = windows(d, x)
    best, start = d.choice(((lax.max, -jnp.inf), (lax.min, jnp.inf)))

    def pool(x: Value) -> Value:
        return lax.reduce_window(x, start, best, size, stride, padding)

    out = jax.eval_shape(pool, x)
    if 0 in out.shape:
        raise UnfitError
    if d.coin(0.3):
        made = jax.jvp(pool, (x,), (d.like(x, exact=True),))[1]
        return d.small(jnp.where(jnp.isfinite(made), made, 3))
    (made,) = jax.vjp(pool, x)[1](d.operand(out.shape, exact=True))
    return d.small(made, prod(size))


def ordered(d: Draw) -> Value:
    x = d.pick("fi", 1, exact=True)
    axis = d.axis(x)
    x = with_nan(d, x)
    if d.coin(0.4):
        y = d.like(x, exact=True)
        z = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        keys = d.whole(1, 3)
        return d.choice(lax.sort((x, y, z), dimension=axis, is_stable=keys == 1 or d.coin(), num_keys=keys))
    ops: tuple[Callable[[Value], Value], ...] = (
        lambda x: lax.sort(x, dimension=axis, is_stable=d.coin()),
        lambda x: jnp.argsort(x, axis=axis, descending=d.coin()),
        lambda x: jnp.sort(x, axis=axis, descending=True),
        lambda x: jnp.flip(jnp.sort(x, axis=axis), axis),
    )
    return d.choice(ops)(x)


def best(d: Draw) -> Value:
    x = d.pick("fi", 1, exact=True, where=lambda v: v.shape[-1] > 0)
    if d.coin(0.2) and kind_of(x) == "f":
        return d.choice((lax.approx_max_k, lax.approx_min_k))(x, 1)[0]
    axis = d.axis(x)
    if not x.shape[axis]:
        raise UnfitError
    return lax.top_k(x, d.whole(1, x.shape[axis]), axis=axis)[d.whole(0, 1)]


def found(d: Draw) -> Value:
    x = d.pick("f", 1, exact=True)
    y = jnp.sort(d.operand((d.size() or 3,), exact=True))
    return jnp.searchsorted(y, x, side=d.choice(("left", "right")), method=d.choice(("scan", "sort", "compare_all")))


# Products.


def dot(d: Draw) -> Value:
    """Batch, contracted and free dimensions in any order on either side."""
    batch, inner = (d.shape(d.choice((0, 1, 1, 2)), 16) for _ in range(2))
    left, right = (d.shape(d.choice((0, 1, 1, 2)), 16) for _ in range(2))
    if (
        prod(batch) * prod(left) * prod(right) > MAX_SIZE
        or prod(batch) * prod(inner) * max(prod(left), prod(right)) > MAX_SIZE
    ):
        raise UnfitError
    kind = d.choice("fffic")
    dtype = d.dtype(kind)

    def side(free: Shape) -> tuple[Value, tuple[int, ...], tuple[int, ...]]:
        dims = (*batch, *inner, *free)
        order = d.order(len(dims))
        place = [order.index(i) for i in range(len(dims))]
        value = d.operand(tuple(dims[i] for i in order), kind, dtype=dtype)
        return value, tuple(place[len(batch) : len(batch) + len(inner)]), tuple(place[: len(batch)])

    (x, contract_x, batch_x), (y, contract_y, batch_y) = side(left), side(right)
    wide = jnp.int32 if dtype in ("int8", "int16") and d.coin() else None
    made = lax.dot_general(
        x,
        y,
        ((contract_x, contract_y), (batch_x, batch_y)),
        precision=d.choice((None, "highest")),
        preferred_element_type=wide,
    )
    return d.small(made, max(prod(inner), 1) * 8)


def einsum(d: Draw) -> Value:
    text = d.choice(
        (
            "ab,bc->ca",
            "abc,cb->ab",
            "abc,cbd->da",
            "ab,ac,ad->dcb",
            "aab->ba",
            "abc,abc->c",
            "ab,cb,cd->da",
            "abcd,dcba->b",
            "ij,kj,k->ik",
        )
    )
    letters = {letter: d.size() for letter in sorted(set(text) - set(",->"))}
    shapes = [tuple(letters[c] for c in part) for part in text.split("->")[0].split(",")]
    if max(map(prod, [*shapes, tuple(letters[c] for c in text.split("->")[1])])) > MAX_SIZE:
        raise UnfitError
    made = jnp.einsum(text, *(d.operand(shape) for shape in shapes))
    return d.small(made, max(prod(letters.values()), 1) * 8)


def ragged(d: Draw) -> Value:
    groups, rows, inner, out = d.whole(1, 4), d.size(), d.size(), d.size()
    sizes = d.rng.multinomial(rows, [1 / groups] * groups)
    x, y = d.operand((rows, inner)), d.operand((groups, inner, out))
    return d.small(lax.ragged_dot(x, y, jnp.asarray(sizes, jnp.int32)), max(inner, 1) * 8)


def convolution(d: Draw) -> Value:
    """One to three spatial dimensions in any order, strided, dilated, padded, in groups of features or of the batch."""
    rank = d.choice((1, 1, 2, 2, 3))
    groups = d.choice((1, 1, 2, 3, 4))
    by_batch = d.coin(0.4)
    feature_groups, batch_groups = (1, groups) if by_batch else (groups, 1)
    small = lambda: d.choice([s for s in d.sizes if 0 < s <= 8])
    batch = d.whole(1, 2) * batch_groups if d.coin() else small() * batch_groups
    features = d.whole(1, 2) * feature_groups if d.coin(0.7) else small() * feature_groups
    outs = d.choice((1, 2, small())) * groups
    spatial = [d.choice((small(), d.whole(3, 8))) for _ in range(rank)]
    taps = [d.whole(1, 3) for _ in range(rank)]
    strides, inflate, spread = ([1 if d.coin(0.6) else 2 for _ in range(rank)] for _ in range(3))
    padding: Any = [(d.whole(-1, 2), d.whole(-1, 2)) if d.coin(0.6) else (0, 0) for _ in range(rank)]
    for i in range(rank):
        if (spatial[i] - 1) * inflate[i] + 1 + sum(padding[i]) < (taps[i] - 1) * spread[i] + 1:
            padding[i], taps[i] = (1, 1), 1
    if d.coin(0.25):
        padding = d.choice(("SAME", "VALID"))
        taps = [1 if (t - 1) * s >= n else t for t, s, n in zip(taps, spread, spatial, strict=True)]
        inflate = [1] * rank

    def laid(shape: Sequence[int]) -> tuple[Shape, tuple[int, ...]]:
        """A shape in a random order of its dimensions, and where each of them is."""
        order = d.order(rank + 2) if d.coin(0.7) else list(range(rank + 2))
        return tuple(shape[i] for i in order), tuple(order.index(i) for i in range(rank + 2))

    image, image_spec = laid([batch, features, *spatial])
    kernel, kernel_spec = laid([outs, features // feature_groups, *taps])
    _, out_spec = laid([0] * (rank + 2))
    if prod(image) > MAX_SIZE or prod(kernel) > MAX_SIZE:
        raise UnfitError
    kind = d.choice("fffffci") if groups == 1 else "f"
    dtype = {"f": "float32", "c": "complex64", "i": "int32"}[kind]
    made = lax.conv_general_dilated(
        d.operand(image, kind, dtype=dtype),
        d.operand(kernel, kind, dtype=dtype),
        strides,
        padding,
        inflate,
        spread,
        lax.ConvDimensionNumbers(image_spec, kernel_spec, out_spec),
        feature_groups,
        batch_groups,
    )
    return d.small(made, prod(taps) * features * 8)


def transposed_convolution(d: Draw) -> Value:
    rank = d.whole(1, 2)
    letters = "HW"[:rank]
    image = (d.whole(1, 4), *(d.choice((4, 8, 3)) for _ in range(rank)), d.choice((1, 2, 4)))
    kernel = (*(d.whole(1, 3) for _ in range(rank)), image[-1], d.choice((1, 2, 4, 8)))
    made = lax.conv_transpose(
        d.operand(image),
        d.operand(kernel),
        [d.whole(1, 2)] * rank,
        d.choice(("SAME", "VALID")),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )
    return d.small(made, prod(kernel) * 8)


def patches(d: Draw) -> Value:
    x = d.operand((d.whole(1, 4), d.choice((1, 2, 4)), d.choice((4, 8, 5))))
    return lax.conv_general_dilated_patches(x, (d.whole(1, 3),), (d.whole(1, 2),), "SAME")


def library(d: Draw) -> Value:
    """What NumPy's functions make of several operations."""
    x = d.pick("f", 1, exact=True, most=3, where=lambda v: v.size > 0)
    x, y, axis = without_nan(x), without_nan(d.like(x, exact=True)), d.axis(x)
    d.inexact()
    ops: tuple[Callable[[], Any], ...] = (
        lambda: jnp.median(x, axis=axis),
        lambda: jnp.quantile(x, 0.3, axis=axis),
        lambda: jnp.diff(x, axis=axis),
        lambda: jnp.gradient(x.ravel()) if x.size > 1 else x,
        lambda: jnp.convolve(x.ravel()[:9], y.ravel()[:3], mode=d.choice(("full", "same"))) / 8,
        lambda: jnp.interp(x, jnp.arange(-4.0, 5.0), jnp.cos(jnp.arange(9.0))),
        lambda: jnp.outer(x.ravel()[:16], y.ravel()[:16]) / 8,
        lambda: jnp.kron(x.ravel()[:8], y.ravel()[:4]) / 8,
        lambda: jnp.histogram(x, bins=4, range=(-4, 4))[0],
        lambda: jnp.digitize(x, jnp.array([-2.0, 0.0, 3.0])),
        lambda: jnp.select([x > 1, y > 2], [x, y], -1.0),
        lambda: jnp.cov(x.reshape(x.shape[0], -1)) / 8,
        lambda: jax.image.resize(x, tuple(min(2 * s, 9) for s in x.shape), d.choice(("linear", "nearest"))),
        lambda: jnp.nanmax(jnp.where(x > 2, jnp.nan, x), axis=axis, initial=-9.0),
        lambda: jnp.ptp(x, axis=axis),
        lambda: lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x + 1),
        lambda: jnp.bincount(to_int(jnp.abs(x.ravel())), length=4),
        lambda: jnp.tensordot(x, y, axes=x.ndim) / 64,
        lambda: jax.nn.dot_product_attention(*(d.operand((2, 4, 2, 4)) / 4 for _ in range(3)), is_causal=d.coin()),
    )
    return d.choice(ops)()


# Matrices and transforms.


def matrix(d: Draw, size: int, batch: Shape) -> Value:
    """Well-conditioned matrices: a large diagonal and small numbers beside it."""
    x = d.operand((*batch, size, size))
    return x / 8 + (2 + size) * jnp.eye(size)


def linear(d: Draw) -> Value:
    size, batch = d.whole(1, 5), d.shape(d.whole(0, 2), 8)
    a = matrix(d, size, batch)
    symmetric = a + jnp.swapaxes(a, -1, -2)
    right = d.operand((*batch, size, d.whole(1, 3)))
    d.inexact()
    side = d.coin()
    ops: tuple[Callable[[], Value], ...] = (
        lambda: lax.linalg.cholesky(symmetric, symmetrize_input=d.coin()),
        lambda: lax.linalg.triangular_solve(
            a,
            right if side else jnp.swapaxes(right, -1, -2),
            left_side=side,
            lower=d.coin(),
            transpose_a=d.coin(),
            unit_diagonal=False,
        ),
        lambda: jnp.abs(lax.linalg.qr(a, full_matrices=d.coin())[d.whole(0, 1)]),
        lambda: lax.linalg.lu(a)[0],
        lambda: jnp.linalg.solve(a, right),
        lambda: jnp.linalg.inv(a),
        lambda: jnp.linalg.eigvalsh(symmetric),
        lambda: jnp.linalg.svd(a, compute_uv=False),
        lambda: jnp.linalg.det(a) / (3 + size) ** size,
        lambda: lax.linalg.lu(a)[d.whole(1, 2)],
        lambda: lax.linalg.symmetric_product(a, symmetric) / 64,
        lambda: jax.scipy.linalg.expm(a / 64),
    )
    return d.choice(ops)()


def tridiagonal(d: Draw) -> Value:
    size = d.whole(3, 6)
    low, high = (d.operand((size,)) / 8 for _ in range(2))
    d.inexact()
    low, high = low.at[0].set(0), high.at[-1].set(0)
    return lax.linalg.tridiagonal_solve(low, jnp.full((size,), 5.0), high, d.operand((size, d.whole(1, 3))))


def fourier(d: Draw) -> Value:
    axes = d.whole(1, 2)
    shape = (*d.shape(d.whole(0, 2), 16), *(d.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(axes)))
    d.inexact()
    where, size = tuple(range(-axes, 0)), prod(shape[-axes:])
    ops: tuple[Callable[[], Value], ...] = (
        lambda: jnp.fft.fftn(d.operand(shape, "c"), axes=where) / size,
        lambda: jnp.fft.ifftn(d.operand(shape, "c"), axes=where),
        lambda: jnp.fft.rfftn(d.operand(shape), axes=where) / size,
        lambda: jnp.fft.irfftn(d.operand(shape, "c"), axes=where),
        lambda: jnp.fft.fft(d.operand(shape, "c"), axis=d.whole(0, len(shape) - 1)) / size,
    )
    return d.choice(ops)()


CHEAP = (
    *(reduce, reduce, reduce, extreme_place, extreme_place, smooth_reduce, reduce_by_function, cumulative, cumulative),
    *(window, window, pooled, dot, dot, dot, einsum, convolution, convolution, transposed_convolution, patches),
)
DEAR = (library, library, scanned_together, ordered, ordered, best, found, ragged, linear, linear, tridiagonal, fourier)
