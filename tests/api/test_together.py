"""Functions with common state: the joint optimum, one layout for what is shared, room for what others keep."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard import InfeasibleError, SpecError, plan_many
from tests.programs import GPUS, MESH

P = PartitionSpec
S = jax.ShapeDtypeStruct
EIGHT: dict[str, Any] = {"mesh": {"data": 8}, "hardware": GPUS, "rel_gap": 0.0}

STATE = {
    "params": {"up": S((2048, 8192), jnp.float32), "down": S((8192, 2048), jnp.float32)},
    "moment": {"up": S((2048, 8192), jnp.float32), "down": S((8192, 2048), jnp.float32)},
}
MUCH, LITTLE = S((65536, 2048), jnp.bfloat16), S((8, 2048), jnp.bfloat16)


def apply(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def train(state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean(jnp.square(apply(p, x).astype(jnp.float32)))

    value, g = jax.value_and_grad(loss)(state["params"])
    moment = jax.tree.map(lambda m, d: 0.9 * m + d, state["moment"], g)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moment), "moment": moment}, value


TRAIN: Any = (train, (STATE, MUCH), {"donate_argnums": 0})
SERVE: Any = (apply, (STATE["params"], LITTLE))
SHARE = {"train": "state.params", "serve": "p"}


def params_of(plan: autoshard.SolvedPlan) -> dict[str, Any]:
    (first, *_) = plan.specs
    return first.get("params", first)


def test_shared_leaves_have_one_layout_and_weights_decide_which() -> None:
    """Weights too large to be whole: one product wants their columns split, the other their rows."""

    def forward(w: Any, x: Any) -> Any:
        return x @ w

    def backward(w: Any, x: Any) -> Any:
        return x @ w.T

    args = S((4096, 4096), jnp.bfloat16), S((1024, 4096), jnp.bfloat16)
    common: dict[str, Any] = {"memory": 30_000_000, **EIGHT}
    out = {"out_shardings": P(None, "data")}
    functions: Any = {"forward": (forward, args, out), "backward": (backward, args, out)}
    alone = {
        name: autoshard.plan(fn, *args, for_grad=False, **own, **common) for name, (fn, args, own) in functions.items()
    }
    assert alone["forward"].specs[0] == P(None, "data")
    assert alone["backward"].specs[0] == P("data")
    for weight, wins, loses in ((0.5, "forward", "backward"), (2, "backward", "forward")):
        plans = plan_many(functions, share="w", weights={"backward": weight}, **common)
        assert plans[wins].specs[0] == plans[loses].specs[0] == alone[wins].specs[0]
        assert plans[wins].cost == pytest.approx(alone[wins].cost, rel=1e-9)
        assert plans[loses].cost > alone[loses].cost
    (note,) = [note for note in plans["forward"].record.notes if "shared" in note]
    assert note.startswith("1 leaves are shared, in the layouts that are best for 1·forward + 2·backward: optimal")


@pytest.mark.parametrize("weight", [1, 7])
def test_the_weighted_sum_is_the_least_of_all_common_layouts(weight: int) -> None:
    """Against every layout of the shared weight, each function planned alone under it."""

    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def backward(w: Any, y: Any) -> Any:
        return y @ w.T

    w, x, y = S((4096, 1024), jnp.bfloat16), S((256, 4096), jnp.bfloat16), S((64, 1024), jnp.bfloat16)
    own = {"forward": {"pins": {"x": P("data", None)}}, "backward": {"pins": {"y": P(None, "model")}}}
    common: dict[str, Any] = {"mesh": MESH, "hardware": GPUS, "rel_gap": 0.0}
    plans = plan_many(
        {"forward": (forward, (w, x), own["forward"]), "backward": (backward, (w, y), own["backward"])},
        weights={"backward": weight},
        **common,
    )
    entries = (None, "data", "model", ("data", "model"))
    totals: dict[Any, float] = {}
    for rows, columns in product(entries, entries):
        used = [a for e in (rows, columns) if e for a in ((e,) if isinstance(e, str) else e)]
        if len(set(used)) < len(used):
            continue
        costs = [
            autoshard.plan(
                fn, w, data, for_grad=False, pins={"w": P(rows, columns), **own[fn.__name__]["pins"]}, **common
            ).cost
            for fn, data in ((forward, x), (backward, y))
        ]
        totals[rows, columns] = costs[0] + weight * costs[1]
    assert len(set(totals.values())) > 3
    assert plans["forward"].cost + weight * plans["backward"].cost == pytest.approx(min(totals.values()), rel=1e-9)
    assert plans["forward"].specs[0] == plans["backward"].specs[0]


def test_both_run_on_the_same_state_without_a_move() -> None:
    rng = np.random.default_rng(0)
    small = {name: rng.normal(size=(16, 16)).astype(np.float32) for name in ("up", "down")}
    state = {"params": small, "moment": jax.tree.map(np.zeros_like, small)}
    x = rng.normal(size=(32, 16)).astype(np.float32)
    plans = plan_many(
        {"train": (train, (state, x), {"donate_argnums": 0}), "serve": (apply, (small, x[:8]))},
        share=SHARE,
        mesh=MESH,
        hardware=GPUS,
    )
    step, serve = plans["train"].jit(), plans["serve"].jit()
    here = plans["train"].put(state, "state")
    want = state
    for _ in range(2):
        here, _ = step(here, x)
        want, _ = train(want, x)
        shardings = plans["serve"].in_shardings()[0]
        assert jax.tree.all(jax.tree.map(lambda p, s: p.sharding == s, here["params"], shardings))
        np.testing.assert_allclose(serve(here["params"], x[:8]), apply(want["params"], x[:8]), rtol=1e-4, atol=1e-5)


def test_what_one_keeps_is_in_memory_while_the_other_runs() -> None:
    """Serving sees what the moments occupy: in the limit of its own plan, and in what fits at all."""
    plans = plan_many({"train": TRAIN, "serve": SERVE}, share=SHARE, **EIGHT)
    held = sum(
        4 * int(np.prod(leaf.shape)) // (1 if leaf.spec == P() else 8)
        for leaf in plans["train"].record.inputs
        if "moment" in leaf.path
    )
    limits = {name: plan.record.memory.limit_bytes for name, plan in plans.items()}
    assert limits["train"] - limits["serve"] == held
    assert any("of memory are left to what the others keep" in note for note in plans["serve"].record.notes)


def test_too_little_memory_for_both_is_infeasible_though_each_would_fit() -> None:
    def first(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda s: s + 1, state), jnp.sum(x @ state["w"])

    def second(w: Any, cache: Any) -> Any:
        return cache * 2 + w

    w = S((1024, 1024), jnp.float32)
    functions: Any = {
        "first": (
            first,
            ({"w": w, "own": S((8, 1024, 1024), jnp.float32)}, S((8, 1024), jnp.float32)),
            {"donate_argnums": 0},
        ),
        "second": (second, (w, S((8, 1024, 1024), jnp.float32)), {"donate_argnums": 1}),
    }
    share = {"first": "state.w", "second": "w"}

    def fits(memory: int) -> bool:
        for fn, args, options in functions.values():
            autoshard.plan(fn, *args, **options, for_grad=False, memory=memory, **EIGHT)
        return True

    with pytest.raises(
        InfeasibleError,
        match=r"first, second: no common plan fits .* the smallest peak found is .*, in first at .*py:\d+",
    ) as raised:
        plan_many(functions, share=share, memory=1000, **EIGHT)
    least = raised.value.peak_bytes
    assert least is not None
    assert fits(least - 1)
    with pytest.raises(InfeasibleError):
        plan_many(functions, share=share, memory=least - 1, **EIGHT)
    plans = plan_many(functions, share=share, memory=least, **EIGHT)
    assert [p.record.memory.peak_bytes <= p.record.memory.limit_bytes for p in plans.values()] == [True, True]


def test_shares_are_said_by_prefix_or_by_equal_paths() -> None:
    def double(p: Any) -> Any:
        return jax.tree.map(lambda a: 2 * a, p)

    def halve(p: Any, q: Any) -> Any:
        return jax.tree.map(lambda a, b: a / 2 + b, p, q)

    x = {"a": S((64, 64), jnp.float32), "b": S((32,), jnp.float32)}
    pinned = {"pins": {"p.a": P("data", "model")}}

    def layouts(share: Any) -> Any:
        functions: Any = {"double": (double, (x,), pinned), "halve": (halve, (x, x))}
        plans = plan_many(functions, share=share, mesh=MESH, hardware=GPUS)
        return [spec["a"] == P("data", "model") for spec in plans["halve"].specs]

    assert layouts(None)[0]
    assert layouts("p")[0]
    assert layouts("p.a")[0]
    assert layouts([{"double": "p", "halve": "q"}])[1]
    assert layouts([{"double": "p.a", "halve": "p.a"}, {"double": "p.b", "halve": "q.b"}])[0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing shared": ({"share": "batch"}, "train, serve share nothing"),
    "no such function": ({"share": {"train": "state", "test": "p"}}, "no function 'test'; there are: train, serve"),
    "no such path": ({"share": {"train": "state.weights", "serve": "p"}}, "train has no input below 'state.weights'"),
    "other shapes": ({"share": {"train": "state.params.up", "serve": "p.down"}}, "differ in shape"),
    "twice": ({"share": [SHARE, {"train": "state.moment", "serve": "p"}]}, "a leaf is shared twice"),
    "weight of nobody": ({"share": SHARE, "weights": {"test": 1}}, "there is no function 'test'"),
    "negative weight": ({"share": SHARE, "weights": {"train": -1}}, "weights are positive"),
    "tiny weight": ({"share": SHARE, "weights": {"train": 1e-9}}, "less than a thousandth"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str) -> None:
    options, words = WRONG[what]
    with pytest.raises(SpecError, match=words):
        plan_many({"train": TRAIN, "serve": SERVE}, **options, **EIGHT)


def test_pins_that_exclude_each_other_are_infeasible() -> None:
    functions: Any = {
        "train": (*TRAIN[:2], {"donate_argnums": 0, "pins": {"state.params.up": P("data")}}),
        "serve": (*SERVE, {"pins": {"p.up": P(None, "data")}}),
    }
    said = r"the pins exclude each other.*train's .*up.* in P.*'data',.*, serve's .*up.*'data'"
    with pytest.raises(InfeasibleError, match=said):
        plan_many(functions, share=SHARE, **EIGHT)
    with pytest.raises(SpecError, match="serve: 'mesh' is no option of one function"):
        plan_many({"train": TRAIN, "serve": (*SERVE, {"mesh": {}})}, share=SHARE, **EIGHT)


def scanned(layers: Any, x: Any) -> Any:
    """A loss and its gradient, whose loop keeps more than fits."""

    def loss(layers: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) * 2), None), x, layers)[0].sum()

    return jax.value_and_grad(loss)(layers)


def test_functions_that_share_repeat_what_does_not_fit() -> None:
    layers, x = S((4, 64, 64), jnp.float32), S((8192, 64), jnp.float32)
    options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "cpu:4", "rel_gap": 1e-2}
    ample = autoshard.plan(scanned, layers, x, **options, remat="written")
    options["memory"] = int(0.8 * ample.record.memory.peak_bytes)
    functions: dict[str, Any] = {
        "train": (scanned, (layers, x)),
        "norm": (lambda layers: jnp.sqrt(jnp.sum(layers * layers)), (layers,)),
    }
    plans = plan_many(functions, share="layers", **options)
    assert plans["train"].recomputation is not None
    assert plans["norm"].recomputation is None
    assert all(plan.record.memory.peak_bytes <= options["memory"] for plan in plans.values())
    functions["train"] = (*functions["train"], {"remat": "written"})
    with pytest.raises(InfeasibleError):
        plan_many(functions, share="layers", **options)
