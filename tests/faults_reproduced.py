"""XLA's faults in plain JAX: one function per row of `autoshard.ir.partitioner_faults`, true where XLA is wrong.

None of them uses autoshard: what they show is what a compiler does with shardings that are legal.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FOUR: Mapping[str, int] = {"a": 4}


def wrong(
    fn: Callable[..., Any], args: Sequence[Any], ins: Sequence[Any], out: Any, sizes: Mapping[str, int] = FOUR
) -> bool:
    """Whether a function gives other numbers on four devices, with these layouts, than op by op on one."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(tuple(sizes.values())), tuple(sizes))
    layouts = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in ins]
    split = jax.jit(fn, in_shardings=tuple(layouts), out_shardings=NamedSharding(mesh, PartitionSpec(*out)))
    with jax.disable_jit():
        want = fn(*map(jnp.asarray, args))
    got = split(*args)
    return not np.allclose(np.asarray(got), np.asarray(want), equal_nan=True)


def dropped_update() -> bool:
    """A token past the end of a cache that is split along the sequence."""
    cache, row = np.zeros((8, 3), np.float32), np.ones((1, 3), np.float32)
    return wrong(
        lambda cache, row, i: lax.dynamic_update_slice(cache, row, (i, 0)),
        (cache, row, np.int32(8)),
        (("a",), (), ()),
        ("a",),
    )


def merged_slices() -> bool:
    """A window that ends past the end, its result split."""
    x = np.arange(16.0, dtype=np.float32)
    return wrong(lambda x, i: lax.dynamic_slice(x, (i,), (8,)), (x, np.int32(20)), ((), ()), ("a",))


def merged_scatter() -> bool:
    """One row overwritten in shards that are cut from a whole array."""

    def fn(x: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("a"))).at[6].set(-1.0)

    return wrong(fn, (np.arange(8.0, dtype=np.float32),), ((),), ("a",))


def repeated_initial_value() -> bool:
    """A sum from three over a split dimension."""
    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    return wrong(lambda x: lax.reduce(x, np.int32(3), lambda a, b: a + b, (1,)), (x,), ((None, "a"),), ())


def lost_nan() -> bool:
    """The largest of numbers that are split, one of them NaN; updates of a largest number, split."""
    x = np.array([1.0, np.nan, 3.0, 4.0], np.float32)
    largest = wrong(lambda x: x.max(), (x,), (("a",),), ())
    i = np.zeros(4, np.int32)
    return largest and wrong(lambda i, x: jnp.zeros(2).at[i].max(x), (i, x), (("a",), ("a",)), ())


def narrow_indices() -> bool:
    """A scatter by int8 indices into 304 rows, and a gather by int8 indices in a process of its own."""
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    rows, indices = np.ones((304, 2), np.float32), np.array([[24], [100]], np.int8)
    scatter = wrong(
        lambda x, i, u: lax.scatter_add(x, i, u, dims, mode="clip"),
        (rows, indices, np.ones((2, 2), np.float32)),
        (("a",), (), ()),
        ("a",),
    )
    gather = subprocess.run([sys.executable, "-c", _GATHER], capture_output=True, text=True, check=False)
    return scatter and "Unsupported indices type" in gather.stderr


_GATHER = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))
dims = lax.GatherDimensionNumbers((1,), (0,), (0,))
split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
fn = jax.jit(lambda x, i: lax.gather(x, i, dims, (1, 2), mode="clip"), in_shardings=(split, whole), out_shardings=whole)
fn(np.ones((304, 2), np.float32), np.array([[100]], np.int8))
"""


def convolution_in_groups() -> bool:
    """Depthwise, of images that come channels first and leave channels last."""
    ramp = np.arange(8 * 8 * 8, dtype=np.float32)

    def fn(x: Any, w: Any) -> Any:
        numbers = ("NCHW", "OIHW", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)

    image, kernel = ramp[:256].reshape(1, 4, 8, 8), ramp[:36].reshape(4, 1, 3, 3)
    return wrong(fn, (image, kernel), ((None, "a"), ("a",)), (None, None, None, "a"))


def dilated_tap() -> bool:
    """One tap over eight places, split in two, for four features, split in two."""
    ramp = np.arange(64, dtype=np.float32)

    def fn(x: Any, w: Any) -> Any:
        numbers = ("NCH", "HIO", "HNC")
        return lax.conv_general_dilated(x, w, (1,), [(0, 0)], rhs_dilation=(2,), dimension_numbers=numbers)

    image, kernel = ramp.reshape(4, 2, 8), ramp[:8].reshape(1, 2, 4)
    return wrong(fn, (image, kernel), ((None, None, "a"), (None, None, "b")), ("a", None, "b"), sizes={"a": 2, "b": 2})


def split_transform() -> bool:
    """Four elements to transform, each on a device of its own."""
    ran = subprocess.run([sys.executable, "-c", _TRANSFORM], capture_output=True, text=True, check=False)
    return "size_per_partition % num_partitions" in ran.stderr


_TRANSFORM = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))
split = NamedSharding(mesh, P("a"))
whole = NamedSharding(mesh, P())
jax.jit(lambda x: jax.numpy.fft.fft(x, axis=0), in_shardings=whole, out_shardings=split)(np.ones((4, 8, 16), "f"))
"""


def high_product() -> bool:
    """The upper halves of products of whole numbers, split."""
    x = np.arange(8, dtype=np.int32) << 24
    try:
        return wrong(lax.mulhi, (x, x), (("a",), ("a",)), ("a",))
    except jax.errors.JaxRuntimeError as error:
        return "Unable to convert MHLO to StableHLO" in str(error)


def reduced_bits() -> bool:
    """Whole numbers, split, to their parity bit by bit, and to the bits of any and of all."""
    numbers = np.arange(8, dtype=np.int32)
    return all(_is_unsupported(reduce, numbers) for reduce in (lax.reduce_xor, lax.reduce_or, lax.reduce_and))


def complex_order() -> bool:
    """The largest of complex numbers that are split."""
    return all(_is_unsupported(reduce, np.arange(8) * 1j) for reduce in (lax.reduce_max, lax.reduce_min))


def _is_unsupported(reduce: Callable[..., Any], x: Any) -> bool:
    try:
        return wrong(lambda x: reduce(x, (0,)), (x,), (("a",),), ())
    except jax.errors.JaxRuntimeError as error:
        return "Unsupported reduction computation" in str(error)
