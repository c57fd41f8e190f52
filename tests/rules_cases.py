"""The case table: one row per behaviour of a rule.

A row feeds all oracles: the rule's text is compared with `rule`, XLA's partitioner with
the kinds of its factors, and per-shard execution with the unsharded result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument: its shape and dtype, and below what its integers lie."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 9

    def abstract(self) -> Any:
        if self.dtype == "key":
            return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.shape))
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def draw(self, rng: np.random.Generator) -> Any:
        """Asymmetric data with alternating signs: no sum cancels, no two blocks are equal."""
        if self.dtype == "key":
            return jax.random.split(jax.random.key(int(rng.integers(1 << 30))), self.shape)
        if self.dtype == "bool":
            return rng.integers(0, 2, self.shape).astype(bool)
        if self.dtype != "float32":
            return rng.integers(0, self.high, self.shape).astype(self.dtype)
        size = int(np.prod(self.shape))
        ramp = (-1.0) ** np.arange(size) * np.linspace(0.5, 1.5, size)
        return (ramp.reshape(self.shape) + 0.25 * rng.normal(size=self.shape)).astype(np.float32)


def f32(*shape: int) -> Arg:
    return Arg(shape)


def i32(*shape: int, high: int = 9) -> Arg:
    return Arg(shape, "int32", high)


@dataclass(frozen=True, slots=True)
class Case:
    """A function, the primitive of interest in it, and the rule of its first such equation."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Arg, ...]
    rule: str

    @property
    def primitive(self) -> str:
        return self.name.split(":")[0]


def _conv(groups: int = 1, batch_groups: int = 1, stride: int = 1) -> Callable[..., Any]:
    def fn(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            k,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
            batch_group_count=batch_groups,
        )

    return fn


def _take(dims: lax.GatherDimensionNumbers, sizes: tuple[int, ...], mode: str = "clip") -> Callable[..., Any]:
    return lambda x, i: lax.gather(x, i, dims, sizes, mode=mode)


def _max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


CASES: tuple[Case, ...] = (
    # pointwise
    Case("add", jnp.add, (f32(4, 6), f32(4, 6)), "([i,j],[i,j])->([i,j]) {i=4,j=6}"),
    Case("add:broadcast", lambda x, y: x + y, (f32(4, 6), f32(4, 1)), "([i,j],[i,1])->([i,j]) {i=4,j=6}"),
    Case(
        "add_any",
        lambda x: jax.vjp(lambda y: (y, y), x)[1]((x, x))[0],
        (f32(4, 6),),
        "([i,j],[i,j])->([i,j]) {i=4,j=6}",
    ),
    Case(
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        (f32(4, 6),),
        "([i,j])->([i,j]) {i=4,j=6}",
    ),
    Case(
        "bitcast_convert_type:narrower",
        lambda x: lax.bitcast_convert_type(x, jnp.int8),
        (f32(4, 6),),
        "([i,j])->([i,j,k]) {i=4,j=6,k=4} replicate={k}",
    ),
    Case("clamp", lambda x: lax.clamp(-1.0, x, 1.0), (f32(4, 6),), "([],[i,j],[])->([i,j]) {i=4,j=6}"),
    Case(
        "convert_element_type",
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        (f32(4, 6),),
        "([i,j])->([i,j]) {i=4,j=6}",
    ),
    Case("copy", lambda x: lax.copy_p.bind(x), (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6}"),
    Case("div", lambda x, y: x / y, (f32(4, 6), f32(4, 6)), "([i,j],[i,j])->([i,j]) {i=4,j=6}"),
    Case("exp", jnp.exp, (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6}"),
    Case("integer_pow", lambda x: x**3, (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6}"),
    Case("mul:scalar", lambda x: 2.0 * x, (f32(4, 6),), "([],[i,j])->([i,j]) {i=4,j=6}"),
    Case("neg", lambda x: -x, (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6}"),
    Case(
        "optimization_barrier",
        lambda x, y: lax.optimization_barrier((x, y)),
        (f32(4, 6), f32(8)),
        "([i,j],[k])->([i,j],[k]) {i=4,j=6,k=8}",
    ),
    Case(
        "select_n",
        lambda p, x, y: lax.select_n(p, x, y),
        (Arg((4, 6), "bool"), f32(4, 6), f32(4, 6)),
        "([i,j],[i,j],[i,j])->([i,j]) {i=4,j=6}",
    ),
    Case(
        "select_n:scalar",
        lambda p, x, y: lax.select_n(p, x, y),
        (Arg((), "bool"), f32(4, 6), f32(4, 6)),
        "([],[i,j],[i,j])->([i,j]) {i=4,j=6}",
    ),
    Case("sub", lambda x, y: x - y, (f32(4, 6), f32(4, 6)), "([i,j],[i,j])->([i,j]) {i=4,j=6}"),
    # shape
    Case(
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)),
        (f32(4, 1),),
        "([i,1])->([j,i,k]) {i=4,j=2,k=6}",
    ),
    Case(
        "concatenate",
        lambda x, y: lax.concatenate([x, y], 1),
        (f32(4, 6), f32(4, 2)),
        "([i,j],[i,k])->([i,l]) {i=4,j=6,k=2,l=8} replicate={j,k,l}",
    ),
    Case("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), "()->([i,j]) {i=4,j=6}"),
    Case("platform_index", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (f32(4),), "()->([]) {}"),
    Case(
        "pad",
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (6, 6, 0))),
        (f32(4, 6),),
        "([i,j],[])->([i,jk]) {i=4,j=6,k=3} permutation={j} replicate={k}",
    ),
    Case(
        "pad:shift",
        lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
        (f32(4, 6),),
        "([i,j],[])->([i,j]) {i=4,j=6} permutation={i}",
    ),
    Case("reshape:merge", lambda x: x.reshape(8, 6), (f32(4, 2, 6),), "([i,j,k])->([ij,k]) {i=4,j=2,k=6}"),
    Case("reshape:split heads", lambda x: x.reshape(4, 2, 6), (f32(4, 12),), "([i,jk])->([i,j,k]) {i=4,j=2,k=6}"),
    Case("reshape:regroup", lambda x: x.reshape(2, 12), (f32(4, 6),), "([ij,k])->([i,jk]) {i=2,j=2,k=6}"),
    Case(
        "reshape:unrelated",
        lambda x: x.reshape(6, 2, 4),
        (f32(4, 3, 4),),
        "([ij,k,l])->([im,n,l]) {i=2,j=2,k=3,l=4,m=3,n=2} replicate={j,k,m,n}",
    ),
    Case("reshape:ones", lambda x: x.reshape(1, 6, 1, 4), (f32(1, 6, 4),), "([1,i,j])->([1,i,1,j]) {i=6,j=4}"),
    Case("rev", lambda x: lax.rev(x, (1,)), (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6} permutation={j}"),
    Case("slice", lambda x: x[:, 4:], (f32(4, 8),), "([i,jk])->([i,j]) {i=4,j=4,k=2} permutation={j} replicate={k}"),
    Case("slice:odd", lambda x: x[1:], (f32(4, 8),), "([i,j])->([k,j]) {i=4,j=8,k=3} replicate={i,k}"),
    Case(
        "slice:strided",
        lambda x: x[:, ::2],
        (f32(4, 8),),
        "([i,jk])->([i,j]) {i=4,j=4,k=2} permutation={j} replicate={k}",
    ),
    Case(
        "split",
        lambda x: lax.split(x, (2, 4), 1),
        (f32(4, 6),),
        "([i,jk])->([i,j],[i,jl]) {i=4,j=2,k=3,l=2} permutation={j} replicate={k,l}",
    ),
    Case("squeeze", lambda x: lax.squeeze(x, (1,)), (f32(4, 1, 6),), "([i,1,j])->([i,j]) {i=4,j=6}"),
    Case("tile", lambda x: lax.tile(x, (3, 1)), (f32(4, 6),), "([i,j])->([ki,j]) {i=4,j=6,k=3}"),
    Case("transpose", lambda x: x.transpose(2, 0, 1), (f32(4, 2, 6),), "([i,j,k])->([k,i,j]) {i=4,j=2,k=6}"),
    # reduction
    Case(
        "argmax", lambda x: lax.argmax(x, 1, jnp.int32), (f32(4, 6),), "([i,j])->([i]) {i=4,j=6} reduction={j:argmax}"
    ),
    Case("cumsum", lambda x: lax.cumsum(x, 1), (f32(4, 6),), "([i,j])->([i,j]) {i=4,j=6} replicate={j}"),
    Case("reduce_and", lambda x: x.all(0), (Arg((4, 6), "bool"),), "([i,j])->([j]) {i=4,j=6} reduction={i:and}"),
    Case("reduce_max", lambda x: x.max(1), (f32(4, 6),), "([i,j])->([i]) {i=4,j=6} reduction={j:max}"),
    Case("reduce_min", lambda x: x.min(1), (f32(4, 6),), "([i,j])->([i]) {i=4,j=6} reduction={j:min}"),
    Case("reduce_or", lambda x: x.any(0), (Arg((4, 6), "bool"),), "([i,j])->([j]) {i=4,j=6} reduction={i:or}"),
    Case("reduce_prod", lambda x: x.prod(0), (f32(4, 6),), "([i,j])->([j]) {i=4,j=6} reduction={i:prod}"),
    Case("reduce_sum", lambda x: x.sum((0, 2)), (f32(4, 6, 2),), "([i,j,k])->([j]) {i=4,j=6,k=2} reduction={i,k}"),
    Case(
        "reduce_window_max:pool",
        _max_pool,
        (f32(2, 8, 8, 4),),
        "([i,jk,lm,n])->([i,j,l,n]) {i=2,j=4,k=2,l=4,m=2,n=4} replicate={k,m}",
    ),
    Case(
        "reduce_window_sum:overlap",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
        (f32(4, 8),),
        "([i,j])->([i,j]) {i=4,j=8} permutation={j}",
    ),
    Case(
        "select_and_scatter_add",
        lambda x, ct: jax.vjp(_max_pool, x)[1](ct),
        (f32(2, 8, 8, 4), f32(2, 4, 4, 4)),
        "([i,j,k,l],[i,jm,kn,l])->([i,jm,kn,l]) {i=2,j=4,k=4,l=4,m=2,n=2} replicate={m,n}",
    ),
    # contraction
    Case("dot_general", jnp.matmul, (f32(4, 6), f32(6, 8)), "([i,j],[j,k])->([i,k]) {i=4,j=6,k=8} reduction={j}"),
    Case(
        "dot_general:attention",
        lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k),
        (f32(2, 4, 2, 6),) * 2,
        "([i,j,k,l],[i,m,k,l])->([i,k,j,m]) {i=2,j=4,k=2,l=6,m=4} reduction={l}",
    ),
    Case(
        "dot_general:weight gradient",
        lambda x, g: jnp.einsum("bsd,bsf->df", x, g),
        (f32(2, 4, 6), f32(2, 4, 8)),
        "([i,j,k],[i,j,l])->([k,l]) {i=2,j=4,k=6,l=8} reduction={i,j}",
    ),
    Case(
        "conv_general_dilated",
        _conv(),
        (f32(2, 8, 8, 4), f32(3, 3, 4, 6)),
        "([i,j,k,l],[m,n,l,o])->([i,j,k,o])"
        " {i=2,j=8,k=8,l=4,m=3,n=3,o=6} reduction={l} permutation={j,k} replicate={m,n}",
    ),
    Case(
        "conv_general_dilated:pointwise",
        _conv(),
        (f32(2, 8, 8, 4), f32(1, 1, 4, 6)),
        "([i,j,k,l],[1,1,l,m])->([i,j,k,m]) {i=2,j=8,k=8,l=4,m=6} reduction={l}",
    ),
    Case(
        "conv_general_dilated:depthwise",
        _conv(groups=4),
        (f32(2, 8, 8, 4), f32(3, 3, 1, 4)),
        "([i,j,k,l],[m,n,1,l])->([i,j,k,l]) {i=2,j=8,k=8,l=4,m=3,n=3} permutation={j,k} replicate={m,n}",
    ),
    Case(
        "conv_general_dilated:grouped",
        _conv(groups=2),
        (f32(2, 8, 8, 4), f32(3, 3, 2, 8)),
        "([i,j,k,lm],[n,o,m,lp])->([i,j,k,lp])"
        " {i=2,j=8,k=8,l=2,m=2,n=3,o=3,p=4} reduction={m} permutation={j,k} replicate={n,o,p}",
    ),
    Case(
        "conv_general_dilated:batch groups",
        _conv(batch_groups=2),
        (f32(4, 8, 8, 4), f32(3, 3, 4, 8)),
        "([ij,k,l,m],[n,o,m,ip])->([j,k,l,ip])"
        " {i=2,j=2,k=8,l=8,m=4,n=3,o=3,p=4} reduction={m} permutation={k,l} replicate={j,n,o,p}",
    ),
    Case(
        "conv_general_dilated:stride",
        _conv(stride=2),
        (f32(2, 8, 8, 4), f32(3, 3, 4, 6)),
        "([i,jk,lm,n],[o,p,n,q])->([i,j,l,q])"
        " {i=2,j=4,k=2,l=4,m=2,n=4,o=3,p=3,q=6} reduction={n} permutation={j,l} replicate={k,m,o,p}",
    ),
    Case(
        "ragged_dot_general",
        lax.ragged_dot,
        (f32(8, 6), f32(2, 6, 4), i32(2, high=4)),
        "([i,j],[k,j,l],[k])->([i,l]) {i=8,j=6,k=2,l=4} reduction={j} replicate={i,k}",
    ),
    # indexing
    Case(
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)),
        (f32(4, 6), i32()),
        "([i,j],[],[])->([k,j]) {i=4,j=6,k=2} replicate={i,k}",
    ),
    Case(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (f32(4, 6), f32(2, 6), i32(high=3)),
        "([i,j],[k,j],[],[])->([i,j]) {i=4,j=6,k=2} replicate={i,k}",
    ),
    Case(
        "dynamic_update_slice:one row",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)),
        (f32(4, 8, 6), f32(4, 1, 6), i32(high=8)),
        "([i,j,k],[i,1,k],[],[],[])->([i,j,k]) {i=4,j=8,k=6}",
    ),
    Case(
        "gather:embedding",
        lambda t, i: t[i],
        (f32(8, 6), i32(2, 4, high=8)),
        "([i,j],[k,l,1])->([k,l,j]) {i=8,j=6,k=2,l=4} reduction={i}",
    ),
    Case(
        "gather:take_along_axis",
        lambda x, i: jnp.take_along_axis(x, i, -1),
        (f32(2, 4, 8), i32(2, 4, 1, high=8)),
        "([i,j,k],[i,j,1,1])->([i,j,1]) {i=2,j=4,k=8} reduction={k}",
    ),
    Case(
        "gather:window",
        _take(lax.GatherDimensionNumbers((1, 2), (), (0,)), (3, 6)),
        (f32(8, 6), i32(4, 1, high=6)),
        "([i,j],[k,1])->([k,l,j]) {i=8,j=6,k=4,l=3} replicate={i,l}",
    ),
    Case(
        "gather:two indices",
        lambda x, i, j: x.at[i, j].get(mode="clip"),
        (f32(4, 6, 2), i32(8, high=4), i32(8)),
        "([i,j,k],[l,m])->([l,k]) {i=4,j=6,k=2,l=8,m=2} reduction={i,j} replicate={m}",
    ),
    Case(
        "scatter:overwrite",
        lambda x, i, u: x.at[i].set(u),
        (f32(8, 6), i32(4, high=8), f32(4, 6)),
        "([i,j],[k,1],[k,j])->([i,j]) {i=8,j=6,k=4} replicate={k}",
    ),
    Case(
        "scatter-add:embedding gradient",
        lambda x, i, u: x.at[i].add(u),
        (f32(8, 6), i32(2, 4, high=8), f32(2, 4, 6)),
        "([i,j],[k,l,1],[k,l,j])->([i,j]) {i=8,j=6,k=2,l=4} reduction={k,l}",
    ),
    Case(
        "scatter-add:take_along_axis gradient",
        lambda x, i, ct: jax.vjp(lambda y: jnp.take_along_axis(y, i, -1), x)[1](ct),
        (f32(2, 4, 8), i32(2, 4, 1, high=8), f32(2, 4, 1)),
        "([i,j,k],[i,j,1,1],[i,j,1])->([i,j,k]) {i=2,j=4,k=8}",
    ),
    Case(
        "scatter-add:window",
        lambda x, i, u: lax.scatter_add(x, i, u, lax.ScatterDimensionNumbers((1, 2), (), (0,)), mode="clip"),
        (f32(8, 6), i32(4, 1, high=6), f32(4, 3, 6)),
        "([i,j],[k,1],[k,l,j])->([i,j]) {i=8,j=6,k=4,l=3} reduction={k} replicate={i,l}",
    ),
    Case(
        "scatter-max",
        lambda x, i, u: x.at[i].max(u),
        (f32(8, 6), i32(4, high=8), f32(4, 6)),
        "([i,j],[k,1],[k,j])->([i,j]) {i=8,j=6,k=4} reduction={k:max}",
    ),
    Case(
        "scatter-min",
        lambda x, i, u: x.at[i].min(u),
        (f32(8, 6), i32(4, high=8), f32(4, 6)),
        "([i,j],[k,1],[k,j])->([i,j]) {i=8,j=6,k=4} reduction={k:min}",
    ),
    Case(
        "scatter-mul",
        lambda x, i, u: x.at[i].mul(u),
        (f32(8, 6), i32(4, high=8), f32(4, 6)),
        "([i,j],[k,1],[k,j])->([i,j]) {i=8,j=6,k=4} reduction={k:prod}",
    ),
    Case(
        "sort",
        lambda x, y: lax.sort((x, y), dimension=0),
        (f32(4, 6), i32(4, 6)),
        "([i,j],[i,j])->([i,j],[i,j]) {i=4,j=6} replicate={i}",
    ),
    Case("top_k", lambda x: lax.top_k(x, 2), (f32(4, 6),), "([i,j])->([i,k],[i,k]) {i=4,j=6,k=2} replicate={j,k}"),
    # linear algebra
    Case(
        "cholesky",
        lambda x: lax.linalg.cholesky(x),
        (f32(2, 4, 4),),
        "([i,j,k])->([i,l,m]) {i=2,j=4,k=4,l=4,m=4} replicate={j,k,l,m}",
    ),
    Case("fft", jnp.fft.fft, (f32(2, 4),), "([i,j])->([i,k]) {i=2,j=4,k=4} replicate={j,k}"),
    Case(
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, unit_diagonal=True),
        (f32(2, 4, 4), f32(2, 4, 6)),
        "([i,j,k],[i,l,m])->([i,n,o]) {i=2,j=4,k=4,l=4,m=6,n=4,o=6} replicate={j,k,l,m,n,o}",
    ),
    # random
    Case("random_bits", lambda k: jax.random.bits(k, (4, 6)), (Arg((), "key"),), "([])->([i,j]) {i=4,j=6}"),
    Case("random_clone", jax.random.clone, (Arg((4,), "key"),), "([i])->([i]) {i=4}"),
    Case(
        "random_fold_in",
        lambda k, i: jax.vmap(jax.random.fold_in)(k, i),
        (Arg((4,), "key"), i32(4)),
        "([i],[i])->([i]) {i=4}",
    ),
    Case("random_split", lambda k: jax.random.split(k, 4), (Arg((), "key"),), "([])->([i]) {i=4}"),
    Case("random_unwrap", jax.random.key_data, (Arg((4,), "key"),), "([i])->([i,j]) {i=4,j=2} replicate={j}"),
)
