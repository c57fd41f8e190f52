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
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    spec, left, right = (
        NamedSharding(devices.abstract(mesh), one) for one in (P("data", "model"), P("data"), P("data", None, "model"))
    )

    def update(w: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        return w - 1e-3 * jax.lax.with_sharding_constraint(jnp.einsum("btm,btn->mn", x, dy), spec)

    step = jax.jit(update, in_shardings=(spec, left, right), out_shardings=spec)
    traced = step.trace(half((rows, columns)), half((16, 512, rows)), half((16, 512, columns)))
    compiled = compile.compile(traced, topology="tpu-v5e:4x4", mesh=mesh, compiler_options=compile.TPU_PLAIN_OPTIONS)
    (emitted,) = hlo.collectives(hlo.read(compiled.hlo_text), mesh)
    resharder = Resharder(mesh, cost_models.hardware("tpu-v5e:4x4").place(mesh.shape), pinned=False)
    planned = kinds_of(resharder, Aval((rows, columns), np.dtype(jnp.bfloat16)), [SUM, 1], [0, 1])
    assert [name for name, _ in planned if name != "slice"] == [emitted.kind] == [kind]
