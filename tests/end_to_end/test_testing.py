"""Assertions on plans: what passes, and what their messages say."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.api.compare import Hand
from autoshard.api.evaluate import evaluate
from autoshard.errors import PlanFileError
from autoshard.testing import assert_plan_unchanged, assert_plan_within

pytest_plugins = ["pytester"]

ON: dict[str, Any] = {"mesh": {"data": 8}, "hardware": "h100:1x8", "donate_argnums": 0}
DP = ({"w_down": P(), "w_up": P()}, P("data"))


def step(params: Any, x: jax.Array) -> Any:
    """One step of gradient descent."""

    def loss(p: Any) -> jax.Array:
        return ((jnp.tanh(x @ p["w_up"]) @ p["w_down"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def arguments(rows: int = 8192, hidden: int = 16384) -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct
    weights = {"w_up": shape((512, hidden), jnp.float32), "w_down": shape((hidden, 256), jnp.float32)}
    return weights, shape((rows, 512), jnp.float32)


def failure(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_plan_within(*args, **kwargs)
    return str(caught.value)


def test_a_plan_is_within_what_a_hand_writes() -> None:
    found = assert_plan_within(1.001, step, *arguments(), of=DP, **ON)
    assert found.hand.cost.step_s > found.best.cost.step_s
    hand = Hand(in_specs=DP, out_specs=DP[0])
    assert assert_plan_within(1.001, step, *arguments(), of=hand, **ON).lost_s == pytest.approx(found.lost_s)
    priced = evaluate(step, *arguments(), in_specs=DP, **ON)
    assert assert_plan_within(1.001, step, *arguments(), of=priced, **ON).lost_s == pytest.approx(found.lost_s)


def test_the_message_says_which_tensors_differ_and_what_each_costs() -> None:
    told = failure(0.5, step, *arguments(), of=DP, **ON)
    assert "at most 0.5 times was asked" in told
    assert "predicted, the hand-written layout loses " in told
    for name in ("w_up", "w_down"):
        assert re.search(rf"[+−][\d.,]+ [mµ]s  params\.{name}: \[-,-\] → \[.*data.*\]", told)
    assert re.search(r"[+−][\d.,]+ [mµ]s  all-reduce gradient of w_up over data \(test_testing\.py:\d+\)", told)


def test_a_layout_that_does_not_fit_is_no_measure() -> None:
    told = failure(1.0, step, *arguments(), of=DP, memory=1000, **ON)
    assert "is no measure: it needs " in told
    assert "memory=" in told


def test_a_cost_is_told_of_the_weight_and_not_of_its_moments() -> None:
    def with_momentum(state: Any, x: jax.Array) -> Any:
        moved = step(state["weights"], x)
        kept = jax.tree.map(lambda w, n, v: 0.9 * v + n - w, state["weights"], moved, state["velocity"])
        return {"velocity": kept, "weights": moved}

    weights, x = arguments()
    state, by_hand = ({"velocity": each, "weights": each} for each in (weights, DP[0]))
    told = failure(0.1, with_momentum, state, x, of=(by_hand, DP[1]), **ON)
    assert re.search(r"^ +[+−][\d.,]+ [mµ]s  state\.weights\.w_up: ", told, re.MULTILINE)
    assert re.search(r"^ +state\.velocity\.w_up: ", told, re.MULTILINE)


def locked(path: Path, rows: int = 8192, hidden: int = 2048, fn: Any = step, **options: Any) -> None:
    assert_plan_unchanged(path, fn, *arguments(rows, hidden), **{**ON, **options})


def test_an_unchanged_plan_passes(tmp_path: Path) -> None:
    path = tmp_path / "plans" / "step.json"
    locked(path, update=True)
    written = path.read_bytes()
    locked(path)
    assert path.read_bytes() == written


def test_a_change_that_leaves_the_plan_alone_passes(tmp_path: Path) -> None:
    """The program is another one: what is checked is the plan."""

    def renamed(params: Any, x: jax.Array) -> Any:
        return step(params, x)

    path = tmp_path / "step.json"
    locked(path, update=True)
    locked(path, fn=renamed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pins": {"**.w_up": P("data")}}, r"params\.w_up +1 +f32"),  # another layout
        ({"hidden": 4096}, "all-gather|reduce-scatter|all-reduce"),  # as before, but twice the bytes
        ({"mesh": {"data": 2, "model": 4}}, r"data=2"),
    ],
)
def test_a_changed_plan_fails(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "step.json"
    locked(path, update=True)
    with pytest.raises(AssertionError, match=said) as caught:
        locked(path, **change)
    assert "pytest --update-plans" in str(caught.value)


def test_a_missing_or_broken_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with pytest.raises(AssertionError, match=r"there is no plan file .*--update-plans"):
        locked(path)
    path.write_text("{")
    with pytest.raises(PlanFileError):
        locked(path)


def test_the_option_writes_plan_files(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['autoshard.testing']")
    pytester.makepyfile(
        """
        import jax
        import jax.numpy as jnp
        from autoshard.testing import assert_plan_unchanged

        def test_plan():
            x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            assert_plan_unchanged("x.json", jnp.matmul, x, x, mesh={"data": 8}, hardware="h100:1x8", for_grad=False)
        """
    )
    pytester.runpytest_subprocess("--update-plans").assert_outcomes(passed=1)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    path = pytester.path / "x.json"
    assert_plan_unchanged(path, jnp.matmul, x, x, mesh={"data": 8}, hardware="h100:1x8", for_grad=False)
