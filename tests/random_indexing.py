"""Random gathers, scatters and dynamic slices of every form that JAX takes, by indices that are often out of range."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

Rng = np.random.Generator
Drawn = tuple[str, Callable[..., Any], tuple[Any, ...]]  # a name, a function of one equation, its operands

SIZES = (1, 2, 3, 4, 6, 8)
INDEX_TYPES = ("int8", "int16", "int32", "int32", "int32", "uint8", "uint32")
MODES = ("clip", "fill", "promise_in_bounds")
SCATTERS = (lax.scatter, lax.scatter_add, lax.scatter_max, lax.scatter_min, lax.scatter_mul)
LARGE = 304  # rows that int8 and uint8 do not count


def some_of(rng: Rng, size: int) -> int:
    """One, all, or some of a dimension."""
    return (1, size, int(rng.integers(1, size + 1)))[rng.integers(3)]


def positions(rng: Rng, shape: tuple[int, ...], dtype: str, size: int) -> np.ndarray:
    """Indices into a dimension of a size, half of them at its edges, out of range or at the type's ends."""
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, -size - 1, -size, -1, 0, 1, size - 2, size - 1, size, size + 3, 2 * size]
    edges = np.array([edge for edge in edges if limits.min <= edge <= limits.max])
    inside = rng.integers(0, min(size, limits.max + 1), shape)
    return np.where(rng.random(shape) < 0.5, rng.choice(edges, shape), inside).astype(dtype)


def dynamic(rng: Rng) -> Drawn:
    """A `dynamic_slice` or a `dynamic_update_slice`."""
    shape = [int(rng.choice(SIZES)) for _ in range(rng.integers(1, 4))]
    if rng.random() < 0.2:
        shape[0] = LARGE
    window = tuple(some_of(rng, size) for size in shape)
    dtype = str(rng.choice(INDEX_TYPES))
    x = rng.integers(-9, 10, shape).astype(np.float32)
    starts = tuple(positions(rng, (), dtype, size) for size in shape)
    if rng.random() < 0.5:
        return "dynamic_slice", lambda x, *i: lax.dynamic_slice_p.bind(x, *i, slice_sizes=window), (x, *starts)
    return (
        "dynamic_update_slice",
        lax.dynamic_update_slice_p.bind,
        (x, rng.integers(-9, 10, window).astype(np.float32), *starts),
    )


def indexed(rng: Rng) -> Drawn:
    """A gather, or a scatter of the same form."""
    rank = int(rng.integers(1, 4))
    shape = [int(rng.choice(SIZES)) for _ in range(rank)]
    if rng.random() < 0.1:
        shape[-1] = LARGE
    batch = [int(rng.choice(SIZES)) for _ in range(rng.integers(0, 3))]
    order = [int(d) for d in rng.permutation(rank)]
    paired = int(rng.integers(0, min(rank, len(batch)) + 1)) if rng.random() < 0.4 else 0
    batching, rest = sorted(order[:paired]), order[paired:]
    pairs = sorted(int(d) for d in rng.permutation(len(batch))[:paired])
    pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    for d, b in zip(batching, pairs, strict=True):
        batch[b] = shape[d]
    mapped = rest[: rng.integers(0, len(rest) + 1)]
    sizes = [1 if d in batching else some_of(rng, size) for d, size in enumerate(shape)]
    collapsed = sorted(d for d in rest if sizes[d] == 1 and rng.random() < 0.6)
    windows = [sizes[d] for d in range(rank) if d not in collapsed and d not in batching]
    ndim = len(batch) + len(windows)
    offset = sorted(int(d) for d in rng.permutation(ndim)[: len(windows)])
    out, left, inner = [0] * ndim, iter(batch), iter(windows)
    for d in range(ndim):
        out[d] = next(inner) if d in offset else next(left)
    dtype, mode = str(rng.choice(INDEX_TYPES)), str(rng.choice(MODES))
    columns = [positions(rng, tuple(batch), dtype, shape[d]) for d in mapped]
    indices = np.stack(columns, -1) if columns else np.zeros((*batch, 0), dtype)
    x = rng.integers(-9, 10, shape).astype(np.float32)
    if rng.random() < 0.5:
        numbers = lax.GatherDimensionNumbers(
            tuple(offset), tuple(collapsed), tuple(mapped), tuple(batching), tuple(pairs)
        )
        return (
            f"gather {mode} {dtype} {numbers} {sizes}",
            lambda x, i: lax.gather(x, i, numbers, tuple(sizes), mode=mode),
            (x, indices),
        )
    scatter = SCATTERS[int(rng.integers(len(SCATTERS)))]
    numbers = lax.ScatterDimensionNumbers(tuple(offset), tuple(collapsed), tuple(mapped), tuple(batching), tuple(pairs))
    updates = rng.integers(-2, 3, out).astype(np.float32)
    if scatter is lax.scatter:  # of two updates of one place, which one stays is not defined
        updates = np.full(out, 7, np.float32)
    return (
        f"{scatter.__name__} {mode} {dtype} {numbers}",
        lambda x, i, u: scatter(x, i, u, numbers, mode=mode),
        (x, indices, updates),
    )


def drawn(seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    name, fn, operands = (dynamic if rng.random() < 0.3 else indexed)(rng)
    return f"{seed} {name}", fn, operands
