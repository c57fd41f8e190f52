"""Programs with constraints: what XLA's partitioner makes of them."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autoshard.ir.constraints import Constraints
from autoshard.ir.rewrite import emit_constraints

F32 = jnp.float32


def test_what_a_barrier_hands_on_is_constrained_as_before_it() -> None:
    """One reader asks for it in another layout, and is the only one that asks: the product had taken it in that one."""

    def products(x: jax.Array, w: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.optimization_barrier(jnp.tanh(x))
        return jnp.einsum("bd,bh->dh", y, h) + w, y + 1

    x, w, h = (jax.ShapeDtypeStruct(shape, F32) for shape in ((64, 32), (32, 16), (64, 16)))
    closed = jax.make_jaxpr(products)(x, w, h)
    at = {eqn.primitive.name: i for i, eqn in enumerate(closed.jaxpr.eqns)}
    rows, both, product = P("data"), P(("data", "model")), P("data", "model")
    last = max(i for i, eqn in enumerate(closed.jaxpr.eqns) if eqn.primitive.name == "add")
    pins = Constraints(
        made={((at["tanh"],), 0): (both, rows)},
        taken={((last,), 0): (both,)},
        inputs={0: (both,), 1: (product,), 2: (product,)},
        outputs={0: (product,), 1: (both,)},
    )
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    emitted = jax.jit(lambda *args: emit_constraints(closed, pins, mesh, args))
    text = emitted.lower(x, w, h).compile().as_text() or ""
    (dot,) = re.findall(r"%?\S+ = f32\[(\S+?)\]\S* dot\(", text)
    assert dot == "32,4"  # half of all rows on each device, the sum over which is finished then
