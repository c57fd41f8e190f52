"""Two layouts of `models.mlp` as explicit programs: every collective is written down.

An executor independent of the partitioner: the annotated layouts say how arrays lie,
these write each device's computation and communication, inside `jax.shard_map`. Both take and
return whole arrays, and both can be differentiated. Without scan and remat.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models import mlp
from models.training import Params

Forward = Callable[[Params, jax.Array], jax.Array]
"""`(params, x)` with x [B, D] -> [B, D]."""


def megatron(config: mlp.Config, mesh: Mesh, model: str = "model") -> Forward:
    """Column split, row split, all-reduce (Shoeybi et al. 2019, arXiv:1909.08053, figure 3a)."""

    def block(layer: Params, x: jax.Array) -> jax.Array:
        hidden = _activation(config)(x @ layer["w_up"].astype(x.dtype))
        return jax.lax.psum(hidden @ layer["w_down"].astype(x.dtype), model)

    weights = {"w_up": P(None, model), "w_down": P(model, None)}
    return _stack(config, mesh, block, weights, P())


def weight_stationary_2d(config: mlp.Config, mesh: Mesh, x: str = "x", y: str = "y") -> Forward:
    """w_up [D/x, F/y], and input and output [B, D/xy] (Pope et al. 2022, arXiv:2211.05102, figure 2b)."""

    def block(layer: Params, act: jax.Array) -> jax.Array:
        act = jax.lax.all_gather(act, y, axis=1, tiled=True)  # [B, D/x]
        hidden = act @ layer["w_up"].astype(act.dtype)  # [B, F/y], a part of the sum over x
        hidden = _activation(config)(jax.lax.psum_scatter(hidden, x, scatter_dimension=0, tiled=True))  # [B/x, F/y]
        hidden = jax.lax.all_gather(hidden, x, axis=0, tiled=True)  # [B, F/y]
        out = hidden @ layer["w_down"].astype(act.dtype)  # [B, D/x], a part of the sum over y
        return jax.lax.psum_scatter(out, y, scatter_dimension=1, tiled=True)  # [B, D/xy]

    weights = {"w_up": P(x, y), "w_down": P(y, x)}
    return _stack(config, mesh, block, weights, P(None, (x, y)))


def _activation(config: mlp.Config) -> Callable[[jax.Array], jax.Array]:
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[config.activation]


def _stack(
    config: mlp.Config,
    mesh: Mesh,
    block: Callable[[Params, jax.Array], jax.Array],
    weights: dict[str, P],
    residual: P,
) -> Forward:
    def forward(params: Params, x: jax.Array) -> jax.Array:
        x = x.astype(config.compute_dtype)
        for layer in params["layers"]:
            out = block(layer, x)
            x = x + out if config.residual else out
        return x

    params = {"layers": [weights] * config.layers}
    return jax.shard_map(forward, mesh=mesh, in_specs=(params, residual), out_specs=residual)
