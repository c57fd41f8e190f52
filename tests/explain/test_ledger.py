"""The entries of a ledger sum to the difference of two steps, and name what the difference is."""

from dataclasses import replace
from functools import cache
from math import fsum
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.api.evaluate import evaluate
from autoshard.api.evaluation import Evaluation
from autoshard.explain.attribution import COMPUTE, ROUNDING, Attribution, ledger

H100 = "h100:1x8"
DATA, BOTH = {"data": 8}, {"data": 2, "model": 4}
ROWS, WIDTH, HIDDEN, OUT = 1024, 512, 2048, 256
F32 = 4
TINY_S = 1e-9  # of picoseconds, many


def forward(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w_up"]) @ params["w_down"]


def step(params: Any, x: jax.Array) -> Any:
    """One step of gradient descent."""
    gradients = jax.grad(lambda p: (forward(p, x) ** 2).mean())(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


def arguments() -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct
    weights = {"w_up": shape((WIDTH, HIDDEN), jnp.float32), "w_down": shape((HIDDEN, OUT), jnp.float32)}
    return weights, shape((ROWS, WIDTH), jnp.float32)


LAYOUTS: dict[str, tuple[Any, Any]] = {
    "dp": ({"w_up": P(), "w_down": P()}, P("data")),
    "fsdp": ({"w_up": P("data"), "w_down": P("data")}, P("data")),
    "megatron": ({"w_up": P(None, "model"), "w_down": P("model")}, P("data")),
}


@cache
def by_hand(name: str, *mesh: tuple[str, int]) -> Evaluation:
    specs = LAYOUTS[name]
    return evaluate(
        step, *arguments(), mesh=dict(mesh), hardware=H100, in_specs=specs, out_specs=specs[0], donate_argnums=0
    )


@cache
def planned(*mesh: tuple[str, int]) -> autoshard.SolvedPlan:
    return autoshard.plan(step, *arguments(), mesh=dict(mesh), hardware=H100, donate_argnums=0, rel_gap=1e-2)


def side(made: Any) -> Any:
    led = made.planned if isinstance(made, autoshard.SolvedPlan) else made
    assert led is not None
    return made.record, led.assignment


def between(hand: Any, best: Any) -> Attribution:
    return ledger(side(hand), side(best))


def assert_adds_up(found: Attribution) -> None:
    assert fsum(e.lost_s for e in found.entries) == pytest.approx(found.lost_s, rel=1e-9, abs=1e-18)
    rounding = [e for e in found.entries if e.kind == ROUNDING]
    assert all(abs(e.hand_s) < TINY_S and abs(e.best_s) < TINY_S for e in rounding)


@pytest.mark.parametrize("name", ["dp", "fsdp", "megatron"])
def test_the_entries_sum_to_the_difference(name: str) -> None:
    mesh = tuple((BOTH if name == "megatron" else DATA).items())
    found = between(by_hand(name, *mesh), planned(*mesh))
    assert found.entries
    assert_adds_up(found)


def test_they_do_so_across_meshes() -> None:
    found = between(by_hand("megatron", *BOTH.items()), by_hand("dp", *DATA.items()))
    assert_adds_up(found)
    assert {size for e in found.entries for _, size in e.axes} >= {4, 8}


def test_maxima_that_an_operation_finishes_itself_count_once() -> None:
    """They are compute to the planner, and collectives to the ledger."""

    def fn(x: jax.Array) -> jax.Array:
        return x.max(axis=0)

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def laid(spec: P) -> Evaluation:
        return evaluate(fn, x, mesh=DATA, hardware=H100, in_specs=(spec,), out_specs=P(), for_grad=False)

    found = between(laid(P("data", None)), laid(P()))
    assert_adds_up(found)
    assert [e.kind for e in found.entries if e.hand_bytes] == ["all-reduce"]
    (compute,) = (e for e in found.entries if e.kind == COMPUTE)
    assert compute.hand_s < compute.best_s  # an eighth is read


def test_fsdp_gathers_weights_that_dp_has() -> None:
    """Every weight is gathered once or twice; its gradient is scattered, not reduced everywhere."""
    found = between(by_hand("fsdp", *DATA.items()), by_hand("dp", *DATA.items()))
    for name, nbytes in (("w_up", WIDTH * HIDDEN * F32), ("w_down", HIDDEN * OUT * F32)):
        of = {e.kind: e for e in found.entries if e.tensors == (name,)}
        assert of["all-gather"].hand_bytes in (nbytes, 2 * nbytes)
        assert of["all-gather"].best_bytes == 0
        assert (of["reduce-scatter"].hand_bytes, of["all-reduce"].best_bytes) == (nbytes, nbytes)
        assert of["all-reduce"].lost_s < 0
        assert of["all-reduce"].subject == f"gradient of {name}"
        assert "test_ledger.py:" in of["all-gather"].title


def test_a_loop_counts_every_trip_and_knows_its_stacked_weights() -> None:
    layers, width = 4, 512
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)

    def looped(weights: jax.Array, x: jax.Array) -> Any:
        def loss(weights: jax.Array) -> jax.Array:
            return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2).mean()

        return weights - 0.1 * jax.grad(loss)(weights)

    def laid(spec: P) -> Evaluation:
        specs = (spec, P("data"))
        return evaluate(looped, weights, x, mesh=DATA, hardware=H100, in_specs=specs, out_specs=spec, donate_argnums=0)

    found = between(laid(P(None, "data")), laid(P()))
    assert_adds_up(found)
    nbytes = layers * width * width * F32
    of = {e.kind: e for e in found.entries if e.tensors == ("weights",)}
    assert of["all-gather"].hand_bytes == 2 * nbytes  # forward and backward
    assert of["all-reduce"].best_bytes == nbytes


def test_a_layout_loses_nothing_against_itself() -> None:
    found = between(by_hand("dp", *DATA.items()), by_hand("dp", *DATA.items()))
    assert found.entries == ()
    assert found.sentence() == "takes the same time for everything"


def test_axes_correspond_by_position_where_sizes_are_equal() -> None:
    """Whatever they are called, and in the words of the layout in question."""
    specs: Any = ({"w_up": P(), "w_down": P()}, P("rows"))
    renamed = evaluate(
        step, *arguments(), mesh={"rows": 8}, hardware=H100, in_specs=specs, out_specs=specs[0], donate_argnums=0
    )
    assert between(renamed, by_hand("dp", *DATA.items())).entries == ()
    found = between(renamed, by_hand("fsdp", *DATA.items()))
    assert {name for e in found.entries for name, _ in e.axes} == {"rows"}


def test_the_sentence_says_what_is_lost_and_saved() -> None:
    found = between(by_hand("dp", *DATA.items()), by_hand("fsdp", *DATA.items()))
    told = found.sentence()
    assert told.startswith("loses " if found.lost_s >= 0 else "wins ")
    assert "all-reduce gradient of w_" in told
    assert "saves" in told
    equal = replace(found, hand=replace(found.hand, cost=found.best.cost))
    assert equal.sentence().startswith("takes as long: loses ")
    assert "; saves " in equal.sentence()


def test_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(between(by_hand("dp", *DATA.items()), planned(*DATA.items())))
    assert max(map(len, text.splitlines())) <= 80
    assert "gradient of w_up" in text


def test_json_holds_every_entry() -> None:
    found = between(by_hand("dp", *DATA.items()), by_hand("fsdp", *DATA.items()))
    told = found.to_json()
    assert fsum(e["lost_s"] for e in told["entries"]) == pytest.approx(told["lost_s"], rel=1e-9)
