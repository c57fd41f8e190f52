"""The hand-written layouts keep every number, and move what their papers say."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import models
from models import layouts

STEPS = 3
TINY = ("linear-tiny", "mlp-tiny", "tiny-gpt2", "tiny-llama", "tiny-mixtral")
ALL_AXES = ("data", "model")


def mesh() -> Mesh:
    """Eight devices, 2 × 4."""
    return Mesh(np.array(jax.devices()).reshape(2, 4), ALL_AXES)


def on_all_devices(name: str, recipe: str) -> layouts.HandLayout:
    """The layout by a recipe, whose axes are the mesh's two, or both for one."""
    names = layouts.axes(recipe)
    over = [ALL_AXES] if len(names) == 1 else list(ALL_AXES)
    if recipe.startswith("megatron") or recipe == "ulysses":
        over = ["model"]  # eight heads, of which four hold keys
    return layouts.find(name, recipe, **dict(zip(names, over, strict=True)))


def tiny(name: str, *, scan: bool = False) -> tuple[Any, Any]:
    """A tiny model, one layer of a transformer and two of the others, or two to scan over; in float32."""
    scanned = {"scan": True, "remat": "full"} if scan else {}
    return models.find(
        name, layers=1 if name.startswith("tiny") and not scan else 2, compute_dtype="float32", **scanned
    )


def fresh(name: str, *, scan: bool = False) -> tuple[Any, Any]:
    module, config = tiny(name, scan=scan)
    return module.init(config, jax.random.key(1)), module.example_batch(config, batch=8)


@cache
def one_device(name: str, *, scan: bool) -> tuple[Any, tuple[float, ...]]:
    """State and losses after `STEPS` steps on a single device."""
    module, config = tiny(name, scan=scan)
    train_step, (state, batch) = jax.jit(module.train_step(config)), fresh(name, scan=scan)
    losses: list[float] = []
    for _ in range(STEPS):
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), tuple(losses)


def collectives(compiled: Any) -> Counter[str]:
    """Collectives of a compiled program by kind; on CPU a reduce-scatter shows as all-reduce."""
    kinds = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
    return Counter(re.findall(kinds, compiled.as_text()))


# Every layout of every model runs, these at once and the others by command.
QUICK = {
    *(("mlp-tiny", recipe, False) for recipe in ("dp", "zero1", "zero2", "fsdp_megatron", "weight_stationary_2d")),
    ("mlp-tiny", "hsdp", True),
    ("tiny-llama", "fsdp_context", False),
}


def cases() -> Iterator[Any]:
    for name in TINY:
        for scan in (False, True) if name != "linear-tiny" else (False,):
            for recipe in layouts.recipes(name):
                marks = () if (name, recipe, scan) in QUICK else pytest.mark.slow
                yield pytest.param(name, recipe, scan, marks=marks, id=f"{name}-{recipe}{'-scan' * scan}")


@pytest.mark.parametrize(("name", "recipe", "scan"), list(cases()))
def test_a_layout_keeps_every_number_and_donates(name: str, recipe: str, *, scan: bool) -> None:
    layout = on_all_devices(name, recipe)
    module, config = tiny(name, scan=scan)
    state, batch = fresh(name, scan=scan)
    train_step = layout.jit(module.train_step(config), state, batch, mesh=mesh())
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), layout.specs(state, batch))
    state, batch = jax.device_put((state, batch), shardings)
    losses: list[float] = []
    for _ in range(STEPS):
        donated = jax.tree.leaves(state)
        state, loss = train_step(state, batch)
        losses.append(float(loss))
        assert all(leaf.is_deleted() for leaf in donated)

    expected, expected_losses = one_device(name, scan=scan)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for (path, leaf), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        if "'bk'" not in where:  # its gradient is zero but for rounding, which Adam scales up
            error = np.linalg.norm(np.asarray(leaf) - want) / max(np.linalg.norm(want), 1e-30)
            assert error < 1e-5, where
    in_place = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), state, shardings[0]
    )
    assert all(jax.tree.leaves(in_place))


# Of the forward pass of two perceptrons: no weight moves in dp, every weight is
# gathered in fsdp, and each Megatron pair ends in one all-reduce, or, with the
# residual stream split, begins with an all-gather and ends in a reduce-scatter. In two
# dimensions each matmul is one gather over one axis and one reduce-scatter over the other.
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("dp", {}),
        ("zero1", {}),
        ("fsdp", {"all-gather": 4}),
        ("megatron", {"all-reduce": 2}),
        ("dp_megatron", {"all-reduce": 2}),
        ("megatron_sequence", {"all-gather": 2, "all-reduce": 2}),
        ("fsdp_megatron", {"all-gather": 4, "all-reduce": 2}),
        ("weight_stationary_2d", {"all-gather": 4, "all-reduce": 4}),
    ],
)
def test_what_a_forward_pass_moves(recipe: str, expected: dict[str, int]) -> None:
    layout = on_all_devices("mlp-tiny", recipe)
    module, config = tiny("mlp-tiny")
    state, batch = module.example_args(config, batch=1024)
    (state_spec, _), rows = layout.specs(state, batch), layout.activation("residual")

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return module.forward(config, params, x)

    def on_mesh(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs)

    constrained = layouts.constrained(forward, layout.activation, mesh())
    jitted = jax.jit(constrained, in_shardings=on_mesh((state_spec.params, rows)), out_shardings=on_mesh(rows))
    assert collectives(jitted.lower(state.params, batch["x"]).compile()) == expected


@pytest.mark.parametrize(("name", "replicated"), [("gpt2-xl", 0.2), ("llama3-405b", 0.01), ("mixtral-8x22b", 0.01)])
def test_stored_elements_at_full_size(name: str, replicated: float) -> None:
    """Parameters and moments per device on 64 × 8, against the whole; norms and most biases are not split."""
    sizes = {"data": 64, "model": 8}
    overrides: dict[str, Any] = {}
    if name == "gpt2-xl":
        overrides = {"vocab": 50_304, "heads": 32, "kv_heads": 32, "head_dim": 50}
    _, (state, batch) = models.build(name, **overrides)

    def moments(state: Any) -> Any:
        return state.opt_state[0].nu

    def local(recipe: str) -> tuple[int, ...]:
        """Elements of parameters and of one moment on each device; every split divides."""
        spec, _ = layouts.find(name, recipe).specs(state, batch)

        def elements(leaf: jax.ShapeDtypeStruct, spec: P) -> int:
            ways = 1
            for size, entry in zip(leaf.shape, spec, strict=False):
                axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
                split = math.prod(sizes[axis] for axis in axes)
                assert size % split == 0
                ways *= split
            return math.prod(leaf.shape) // ways

        pairs: Any = ((state.params, spec.params), (moments(state), moments(spec)))
        return tuple(sum(jax.tree.leaves(jax.tree.map(elements, leaves, specs))) for leaves, specs in pairs)

    whole = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert local("dp") == (whole, whole)
    assert local("zero1") == pytest.approx((whole, whole / 64), rel=replicated)
    assert local("fsdp") == pytest.approx((whole / 64, whole / 64), rel=replicated)
    assert local("megatron") == pytest.approx((whole / 8, whole / 8), rel=replicated)
    assert local("fsdp_megatron") == pytest.approx((whole / 512, whole / 512), rel=replicated)


def test_specs_of_a_llama_in_the_fsdp_megatron_layout() -> None:
    _, (state, batch) = models.build("tiny-llama", layers=1)
    layout = layouts.find("tiny-llama", "fsdp_megatron", data=("pod", "data"))
    spec, batch_spec = layout.specs(state, batch)
    layer = spec.params["layers"][0]
    assert layer["wq"] == spec.opt_state[0].mu["layers"][0]["wq"] == P(("pod", "data"), "model", None)
    assert layer["wo"] == P("model", None, ("pod", "data"))
    assert spec.params["embed"] == P("model", ("pod", "data"))
    assert spec.opt_state[0].count == spec.step == P()
    assert batch_spec == dict.fromkeys(("tokens", "targets"), P(("pod", "data"), None))
    assert layout.activation("queries") == P(("pod", "data"), None, "model", None)
    assert "EasyLM" in layout.source


@pytest.mark.slow
def test_ulysses_exchanges_tokens_for_heads_and_back() -> None:
    """Queries, keys, values, and what they mix, in either direction: eight all-to-alls; no key is gathered."""
    module, config = tiny("tiny-llama")
    state, batch = module.example_args(config, batch=1)
    layout = on_all_devices("tiny-llama", "ulysses")
    assert layout.specs(state, batch)[1]["tokens"] == P(None, "model")
    assert layout.activation("queries") == layout.activation("keys") == P(None, None, "model", None)
    compiled = layout.jit(module.train_step(config), state, batch, mesh=mesh()).lower(state, batch).compile()
    assert collectives(compiled)["all-to-all"] >= 8


def test_experts_live_apart_and_tokens_travel_to_them_and_back() -> None:
    module, config = tiny("tiny-mixtral")
    state, batch = module.example_args(config)
    layout = on_all_devices("tiny-mixtral", "expert_dp")
    spec, batch_spec = layout.specs(state, batch)
    assert batch_spec["tokens"] == P(ALL_AXES, None)
    assert spec.params["layers"][0]["w_up"] == P("model", None, None)
    assert spec.params["layers"][0]["wq"] == P(None, None, None)
    compiled = layout.jit(module.train_step(config), state, batch, mesh=mesh()).lower(state, batch).compile()
    assert collectives(compiled)["all-to-all"] == 4  # there and back, forward and backward


def test_constraints_pin_activations_and_their_cotangents() -> None:
    module, config = tiny("mlp-tiny")
    state, batch = fresh("mlp-tiny")
    layout = layouts.find("mlp-tiny", "megatron")

    def loss(params: Any, batch: Any) -> jax.Array:
        return module.loss(config, params, batch)

    def pins(fn: Any) -> int:
        return str(jax.make_jaxpr(fn)(state.params, batch)).count("sharding_constraint")

    constrained = layouts.constrained(loss, layout.activation, mesh())
    assert pins(loss) == 0
    assert pins(constrained) == 5  # the input, then hidden and residual of two layers
    assert pins(jax.grad(constrained)) == 9  # the input has no cotangent
    assert pins(layouts.constrained(jax.grad(loss), layout.activation, mesh())) == 9


def test_every_recipe_names_its_axes_and_its_models() -> None:
    assert layouts.axes("hsdp") == ("replica", "data")
    assert layouts.axes("weight_stationary_2d") == ("x", "y")
    assert layouts.recipes("llama3-8b") == layouts.recipes("gpt2-xl")
    assert set(layouts.recipes("mixtral-8x7b")) - set(layouts.recipes("llama3-8b")) == {
        "expert",
        "expert_dp",
        "expert_fsdp",
        "expert_megatron",
    }
    every = {recipe for model in models.names() for recipe in layouts.recipes(model)}
    assert every == set(layouts.names())


def test_gradients_of_zero2_are_split_as_they_arise() -> None:
    """ZeRO-1 leaves it to the partitioner; ZeRO-2 says where each gradient lies."""
    path = "gradients.layers.0.w_up"
    assert layouts.find("tiny-llama", "zero1").activation(path) is None
    layout = layouts.find("tiny-llama", "zero2")
    assert layout.activation(path) == layout.moment("layers.0.w_up") == P("data", None)
    assert layout.parameter("layers.0.w_up") == P(None, None)
    assert layout.activation("gradients.layers.w_up") == P(None, "data", None)  # stacked


def test_what_cannot_be_laid_out_is_an_error() -> None:
    with pytest.raises(KeyError, match="no recipe named 'magic'; there are: dp"):
        layouts.find("tiny-gpt2", "magic")
    with pytest.raises(KeyError, match="no model named 'gpt5'"):
        layouts.find("gpt5", "dp")
    with pytest.raises(KeyError, match="'expert' has no layout for 'tiny-gpt2'; there are: dp"):
        layouts.find("tiny-gpt2", "expert")
    with pytest.raises(KeyError, match="w_new"):
        layouts.find("tiny-gpt2", "dp").parameter("layers.0.w_new")

    module, config = tiny("tiny-llama")
    state, batch = fresh("tiny-llama")
    layout = layouts.find("tiny-llama", "megatron", model=ALL_AXES)
    train_step = layout.jit(module.train_step(config), state, batch, mesh=mesh())
    with pytest.raises(ValueError, match="divi"):
        train_step.lower(state, batch)
    message = r"'keys' is \(8, 32, 4, 8\), and its dimension 2 does not divide by 8 \(data × model\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layouts.constrained(module.train_step(config), layout.activation, mesh()), state, batch)
