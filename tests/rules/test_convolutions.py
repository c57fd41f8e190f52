"""Convolutions in every order of dimensions, in groups or not: each split that the rule allows, compiled, is right.

What XLA's partitioner makes of a convolution in groups depends on the order of its dimensions and
on whether as many parts are made as there are groups; so these run on each device's part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autoshard
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONVOLUTION
from tests.programs import relative_error
from tests.rules_compiled import Split, splits_of, wrong
from tests.rules_oracle import Traced, equations

MESHES = tuple(map(MeshAxes.of, ({"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 8}, {"a": 2}, {"a": 3, "b": 2})))
GROUPS = ("none", "feature", "batch", "depth", "depth of batch")
SEEDS, SPLITS = 5, 3  # drawn convolutions per mesh, splits of each of their equations
SLOW_SEEDS = 100
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A convolution, and the shapes of image and kernel; whole numbers make its sums exact."""

    params: dict[str, Any]
    image: tuple[int, ...]
    kernel: tuple[int, ...]

    def __call__(self, image: Any, kernel: Any) -> jax.Array:
        return lax.conv_general_dilated(image, kernel, **self.params)

    def gradients(self, image: Any, kernel: Any, cotangent: Any) -> tuple[Any, ...]:
        return jax.vjp(self, image, kernel)[1](cotangent)


def drawn(seed: int) -> Drawn:
    """One or two spatial dimensions, everything in any order, with stride, dilation and padding of either sign."""
    rng = np.random.default_rng(seed)

    def one(choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    space = "HW"[: int(rng.integers(1, 3))]
    kind = GROUPS[seed % len(GROUPS)]
    groups = one((2, 3, 4, 6, 8))
    inputs = 1 if kind == "depth" else one((1, 2, 4))
    features = groups * inputs if kind in ("feature", "depth") else inputs
    batch = groups * one((1, 2)) if kind == "batch" else groups if kind == "depth of batch" else one((2, 6, 8))
    outputs = one((2, 6, 8)) if kind == "none" else groups * one((1, 2, 4))
    sizes = {"N": batch, "C": features, "O": outputs, "I": inputs}
    images, taps = ({axis: one(choices) for axis in space} for choices in ((4, 5, 8), (1, 1, 2, 3)))

    def order(letters: str) -> str:
        return "".join(one(list(permutations(letters + space))))

    numbers = (order("NC"), order("OI"), order("NC"))
    params = {
        "window_strides": [one((1, 1, 2)) for _ in space],
        "padding": [(one((0, 0, 1, 2)), one((0, 0, 1, 2, -1))) for _ in space],
        "lhs_dilation": [one((1, 1, 2)) for _ in space],
        "rhs_dilation": [one((1, 1, 2)) for _ in space],
        "dimension_numbers": numbers,
        "feature_group_count": groups if kind in ("feature", "depth") else 1,
        "batch_group_count": groups if kind in ("batch", "depth of batch") else 1,
    }
    image, kernel = (
        tuple({**sizes, **spatial}[letter] for letter in letters)
        for letters, spatial in ((numbers[0], images), (numbers[1], taps))
    )
    return Drawn(params=params, image=image, kernel=kernel)


def convolutions(conv: Drawn) -> Iterator[Traced]:
    """The convolution itself, then those of its two gradients."""
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (conv.image, conv.kernel))
    out = jax.eval_shape(conv, image, kernel)
    if out.size:
        found = [*equations(conv, image, kernel), *equations(conv.gradients, image, kernel, out)]
        yield from [one for one in found if one.eqn.primitive == CONVOLUTION]


def splits(seed: int, mesh: MeshAxes, most: int) -> Iterator[Split]:
    rng = np.random.default_rng((seed, 1))
    for which, one in enumerate(convolutions(drawn(seed))):
        values = [rng.integers(-3, 4, aval.shape).astype(np.float32) for aval in one.eqn.operands]
        yield from splits_of(f"seed {seed}, convolution {which}", one, values, mesh, rng, most)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_every_split_of_drawn_convolutions_is_right(mesh: MeshAxes) -> None:
    found = [split for seed in range(SEEDS) for split in splits(seed, mesh, SPLITS)]
    assert len(found) > 5
    assert wrong(found, mesh) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SLOW_SEEDS, 10))
def test_every_split_of_many_convolutions_is_right(first: int, mesh: MeshAxes) -> None:
    for seed in range(first, first + 10):
        found = list(splits(seed, mesh, 24))
        assert not found or wrong(found, mesh) == []


def conv(x: Any, w: Any, numbers: tuple[str, str, str], groups: int = 1, stride: int = 1) -> jax.Array:
    strides = (stride,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups)


def cnn(params: dict[str, Any], x: Any, y: Any) -> jax.Array:
    """Whole, depthwise with a change of order, in two groups with another, one tap: a network's loss."""
    h = jax.nn.relu(conv(x, params["whole"], ("NHWC", "HWIO", "NHWC")))
    h = jax.nn.relu(conv(h, params["depth"], ("NHWC", "HWIO", "NCHW"), groups=8))
    h = jax.nn.relu(conv(h, params["two"], ("NCHW", "OIHW", "NHWC"), groups=2))
    h = conv(h, params["tap"], ("NHWC", "HWIO", "NHWC"), stride=2).mean((1, 2))
    return ((h - y) ** 2).mean()


def scanned(params: dict[str, Any], x: Any, y: Any) -> jax.Array:
    """Layers with a short convolution along time for each channel, as in Mamba."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        mixed = conv(h @ w["in"], w["taps"], ("NWC", "WIO", "NWC"), groups=16)
        return h + jax.nn.silu(mixed) @ w["out"], None

    h, _ = lax.scan(jax.checkpoint(layer), x, params)
    return ((h - y) ** 2).mean()


def normal(seed: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cnn": (
        cnn,
        (
            normal(0, whole=(3, 3, 4, 8), depth=(3, 3, 1, 16), two=(16, 8, 3, 3), tap=(1, 1, 16, 8)),
            *normal(1, x=(16, 8, 8, 4), y=(16, 8)).values(),
        ),
    ),
    "scanned": (
        scanned,
        (
            normal(2, **{"in": (2, 8, 16), "taps": (2, 4, 1, 16), "out": (2, 16, 8)}),
            *normal(3, x=(16, 32, 8), y=(16, 32, 8)).values(),
        ),
    ),
}


def step_of(loss: Any) -> Any:
    def step(params: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), value

    return step


def assert_equal(got: Any, want: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(one, other) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "hardware", "mesh"),
    [("cnn", "cpu:8", {"a": 8}), pytest.param("scanned", "h100:1x8", {"a": 2, "b": 4}, marks=pytest.mark.slow)],
)
def test_an_optimal_step_is_the_unsharded_one(name: str, hardware: str, mesh: dict[str, int]) -> None:
    """The batch lies split over all devices, and stays so through the convolutions of the step."""
    loss, args = PROGRAMS[name]
    f = autoshard.jit(step_of(loss), mesh=mesh, hardware=hardware, pins={"x": PartitionSpec(tuple(mesh))})
    assert_equal(f(*args), jax.jit(step_of(loss))(*args))
    if hardware == "cpu:8":
        layouts = [spec for (spec,) in f.plan(*args).record.pins.kernels.values()]
        assert PartitionSpec("a") in layouts
        assert not any(row.kind == "all-gather" and row.nbytes > 2048 for row in f.plan(*args).record.collectives)


def test_a_planned_loss_is_differentiated_on_each_devices_part() -> None:
    """The convolutions of the backward pass are those of the forward function's parts."""
    loss, args = PROGRAMS["cnn"]
    f = autoshard.jit(loss, mesh={"a": 2, "b": 4}, hardware="tpu-v5e:2x4", pins={"x": PartitionSpec(("a", "b"))})
    assert_equal(jax.jit(jax.value_and_grad(f))(*args), jax.jit(jax.value_and_grad(loss))(*args))
    assert str(jax.make_jaxpr(f)(*args)).count("shard_map") == 2


@pytest.mark.parametrize("empty", ["N", "C", "O", "H", "result"])
def test_a_convolution_without_work_is_planned_and_run(empty: str) -> None:
    """An empty batch, image, result, or no features: no work, which is priced as none."""
    sizes = {letter: 0 if letter == empty else size for letter, size in {"N": 4, "C": 4, "O": 8, "H": 8}.items()}
    x = jnp.ones((sizes["N"], sizes["H"], sizes["C"]))
    w = jnp.ones((9 if empty == "result" else 1, sizes["C"], sizes["O"]))

    def program(x: Any, w: Any) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")) + 1

    f = autoshard.jit(program, mesh={"a": 4}, hardware="h100:1x4", for_grad=False)
    np.testing.assert_array_equal(f(x, w), program(x, w))
