"""Shardy's own collectives: known positives of every kind, and whole plans."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.backends import devices
from autoshard.backends.shardy import collectives
from autoshard.ir.mesh import MeshAxes

MESH = MeshAxes.of({"data": 2, "model": 4})
ON: Any = devices.abstract(MESH)
F32 = 4


def found(fn: Any, *spec_and_shape: tuple[P, tuple[int, ...]]) -> list[tuple[str, tuple[str, ...], int, int]]:
    shardings = tuple(NamedSharding(ON, spec) for spec, _ in spec_and_shape)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in spec_and_shape]
    lowered = jax.jit(fn, in_shardings=shardings).trace(*avals).lower(lowering_platforms=("cpu",))
    return [(str(c.kind), c.axes or (), c.nbytes, c.trips) for c in collectives.collectives(lowered, MESH)]


def pinned(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(ON, P(*spec)))


X = (16, 8)
WHOLE = 16 * 8 * F32


@pytest.mark.parametrize(
    ("before", "after", "kind", "axes", "nbytes"),
    [
        (P("data"), (None, None), "all-gather", ("data",), WHOLE),
        (P(("data", "model")), (None, None), "all-gather", ("data", "model"), WHOLE),
        (P("model", "data"), ("model", None), "all-gather", ("data",), WHOLE // 4),
        (P("model", None), (None, "model"), "all-to-all", ("model",), WHOLE // 4),
        (P("data", None), ("model", None), "collective-permute", ("data", "model"), WHOLE // 4),
    ],
    ids=str,
)
def test_a_resharding(before: P, after: Any, kind: str, axes: tuple[str, ...], nbytes: int) -> None:
    rows = found(lambda x: pinned(x, *after), (before, X))
    assert (kind, axes, nbytes, 1) in rows


def test_a_sum_is_reduced_and_a_sliced_sum_scattered() -> None:
    def matmul(*spec: Any) -> Any:
        return lambda a, b: pinned(a @ b, *spec)

    operands = ((P(None, "model"), (16, 32)), (P("model", None), (32, 8)))
    assert found(matmul(None, None), *operands) == [("all-reduce", ("model",), WHOLE, 1)]
    assert found(matmul("model", None), *operands) == [("reduce-scatter", ("model",), WHOLE, 1)]


def test_a_sum_over_two_axes_sliced_over_one_is_scattered_and_reduced() -> None:
    rows = found(
        lambda a, b: pinned(a @ b, "model", None),
        (P(None, ("data", "model")), (16, 32)),
        (P(("data", "model"), None), (32, 8)),
    )
    assert rows == [("reduce-scatter", ("model",), WHOLE, 1), ("all-reduce", ("data",), WHOLE // 4, 1)]


def test_a_loop_is_multiplied_out() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (pinned(h @ pinned(w, None, None), "data", None), None), x, None, length=5)[0]

    assert found(step, (P("data"), (16, 8)), (P("model"), (8, 8))) == [("all-gather", ("model",), 8 * 8 * F32, 5)]


@pytest.mark.parametrize(
    ("name", "fields"),
    [("mlp-1k", {"batch": 65536}), ("tiny-llama", {"layers": 1, "batch": 32, "scan": True, "remat": "full"})],
    ids=str,
)
def test_shardy_names_the_collectives_of_a_plan(name: str, fields: dict[str, Any]) -> None:
    step, (state, batch) = models.build(name, **fields)
    plan = autoshard.plan(
        step, state, batch, mesh=MESH.shape, hardware="tpu-v5e:2x4", donate_argnums=0, rel_gap=1e-2, constraints="all"
    )  # XLA:GPU moves the narrow side of a cast, which Shardy does not
    found = plan.verify("shardy")
    assert found.ok, str(found)
    assert sum(row.emitted_bytes for row in found.rows) > 0
    assert found.memory.compiled is None
    assert found.timeline is None
    assert all(line.where for line in found.lines)
