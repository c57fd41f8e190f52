"""Which sums XLA:TPU scatters: those whose rest lies in whole tiles, the other dimension, too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cost_models
from autoshard.backends import compile, devices, hlo
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import SUM
from autoshard.ir.graph import Aval
from autoshard.ir.mesh import MeshAxes
from tests.costs.test_resharding import kinds_of
from tests.installed import needs_tpu_compiler


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("rows", "columns", "kind"),
    [
        (2560, 6912, "all-reduce"),  # 640 and 1728 are left: five tiles, and no whole ones
        (2560, 7168, "reduce-scatter"),
        (3072, 6912, "reduce-scatter"),
        (1024, 25152, "reduce-scatter"),  # 6288 are left, 3 · 131 tiles of 16: in chunks of 131
        (2048, 25152, "all-reduce"),  # 131 are too large for a chunk, 3 too small
        (2048, 25088, "reduce-scatter"),
    ],
)
def test_a_sum_is_scattered_as_the_plan_says(rows: int, columns: int, kind: str) -> None:
    """A gradient of weights that are split over the columns, summed over `data` along the rows."""
    mesh = MeshAxes(("data", "model"), (4, 4))
    planned, emitted = _sum_of(rows, columns, jnp.bfloat16, mesh, "tpu-v5e:4x4")
    assert planned == emitted == [kind]


# A prime number of tiles is one chunk, or as many: the first of each pair is scattered, the second too large for that.
LARGE = {2: (512, 149, 167), 4: (256, 223, 239), 8: (256, 151, 157), 16: (256, 89, 97)}
# Of chunks of so many tiles beside 4,096 columns the second are too small.
SMALL = {2: (3, 2), 4: (4, 3), 8: (5, 4)}
DTYPES = [jnp.bfloat16, jnp.float32]


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ways", LARGE)
def test_a_chunk_that_is_scattered_is_not_too_large(ways: int, dtype: jax.typing.DTypeLike) -> None:
    left, *counts = LARGE[ways]
    mesh, height = MeshAxes(("data", "model"), (ways, 32 // ways)), 32 // np.dtype(dtype).itemsize
    found = [_sum_of(left * ways, n * height * (32 // ways), dtype, mesh, "tpu-v5p:4x4x2") for n in counts]
    assert found == [(["reduce-scatter"],) * 2, (["all-reduce"],) * 2]


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ways", SMALL)
def test_a_chunk_that_is_scattered_is_not_too_small(ways: int, dtype: jax.typing.DTypeLike) -> None:
    mesh, height = MeshAxes(("data", "model"), (ways, 32 // ways)), 32 // np.dtype(dtype).itemsize
    times = np.dtype(dtype).itemsize // 2  # tiles are half as high, and elements count
    counts = (n * times - (0 if n == max(SMALL[ways]) else times - 1) for n in SMALL[ways])
    found = [_sum_of(4096, n * 503 * height * (32 // ways), dtype, mesh, "tpu-v5p:4x4x2") for n in counts]
    assert found == [(["reduce-scatter"],) * 2, (["all-reduce"],) * 2]


def _sum_of(
    rows: int, columns: int, dtype: jax.typing.DTypeLike, mesh: MeshAxes, hardware: str
) -> tuple[list[str], list[str]]:
    """Kinds planned and emitted: a gradient of weights split over the columns, summed over `data` along the rows."""
    of = partial(jax.ShapeDtypeStruct, dtype=dtype)
    spec, left, right = (
        NamedSharding(devices.abstract(mesh), one) for one in (P("data", "model"), P("data"), P("data", None, "model"))
    )

    def update(w: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        return w - 1e-3 * jax.lax.with_sharding_constraint(jnp.einsum("btm,btn->mn", x, dy), spec)

    step = jax.jit(update, in_shardings=(spec, left, right), out_shardings=spec)
    traced = step.trace(of((rows, columns)), of((16, 512, rows)), of((16, 512, columns)))
    compiled = compile.compile(traced, topology=hardware, mesh=mesh, compiler_options=compile.TPU_PLAIN_OPTIONS)
    emitted = [one.kind for one in hlo.collectives(hlo.read(compiled.hlo_text), mesh)]
    resharder = Resharder(mesh, cost_models.hardware(hardware).place(mesh.shape), pinned=False)
    planned = kinds_of(resharder, Aval((rows, columns), np.dtype(dtype)), [SUM, 1], [0, 1])
    return [name for name, _ in planned if name != "slice"], emitted


@needs_tpu_compiler
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_sum_is_scattered_where_it_is_constrained(split: int, *, transposed: bool) -> None:
    """A gradient of weights is made transposed, and turned; 896, seven tiles, are left of the dimension that is split.

    It is scattered if that is not the last one where it is constrained: in front of the transpose, or behind it.
    """
    mesh = MeshAxes(("data", "model"), (4, 4))
    shape, names = [4096, 4096], ["model", "model"]
    shape[split], names[split] = 3584, "data"
    spec, back = P(*names), P(*reversed(names))
    over = ("model" if name == "model" else None for name in names)
    on = partial(NamedSharding, devices.abstract(mesh))
    left, right = (on(P("data", None, name)) for name in over)

    def update(w: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        gradient = jnp.einsum("btn,btm->nm", dy, x)
        if transposed:
            return w - 1e-3 * jax.lax.with_sharding_constraint(gradient.T, on(spec))
        return w - 1e-3 * jax.lax.with_sharding_constraint(gradient, on(back)).T

    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    step = jax.jit(update, in_shardings=(on(spec), left, right), out_shardings=on(spec))
    traced = step.trace(half(tuple(shape)), *(half((16, 512, size)) for size in shape))
    compiled = compile.compile(traced, topology="tpu-v5e:4x4", mesh=mesh, compiler_options=compile.TPU_PLAIN_OPTIONS)
    (emitted,) = hlo.collectives(hlo.read(compiled.hlo_text), mesh)
    last = split == 1 if transposed else split == 0
    assert emitted.kind == ("all-reduce" if last else "reduce-scatter")
    lies = [0 if name == "data" else 1 for name in (names if transposed else reversed(names))]
    shape = shape if transposed else shape[::-1]
    resharder = Resharder(mesh, cost_models.hardware("tpu-v5e:4x4").place(mesh.shape), pinned=False)
    pending = [SUM, 1 - lies.index(0)]
    planned = kinds_of(
        resharder, Aval(tuple(shape), np.dtype(jnp.bfloat16)), pending, [lies.index(0), 1 - lies.index(0)]
    )
    assert [name for name, _ in planned if name != "slice"] == [emitted.kind]
