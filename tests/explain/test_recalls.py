"""Why values are kept for backward passes, or repeated in them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.explain import text
from autoshard.explain.explanation import Recall
from autoshard.explain.recalls import recalls

WEIGHTS = (jax.ShapeDtypeStruct((4, 256, 1024), jnp.float32), jax.ShapeDtypeStruct((4, 1024, 256), jnp.float32))
ROWS = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
LINE = "test_recalls.py:23"


def loss(ws: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    return jnp.square(jax.lax.scan(layer, x, ws)[0]).mean()


@cache
def planned(part: float, remat: Any = "add") -> autoshard.SolvedPlan:
    """In a part of the memory that the program takes as it is written."""
    limit = None if part == 1 else int(part * planned(1, "written").record.memory.peak_bytes)
    options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": "cpu:4", "in_shardings": (None, P("data"))}
    return autoshard.plan(jax.grad(loss), WEIGHTS, ROWS, **options, remat=remat, memory=limit)


def tanh(found: tuple[Recall, ...]) -> Recall:
    return next(one for one in found if one.what.startswith("tanh at "))


def test_what_is_repeated_is_kept_in_more_memory() -> None:
    plan = planned(0.4)
    one = tanh(recalls(plan.planned, LINE))
    assert not one.kept
    assert one.more_s is None
    assert one.nbytes == 4 * 2048 * 1024 * 4  # four trips of one device's rows
    assert one.kept_from_bytes is not None
    assert plan.record.memory.limit_bytes < one.kept_from_bytes
    assert one.kept_from_bytes < 1.1 * planned(1, "written").record.memory.peak_bytes
    said = " ".join(plan.explain(at=LINE).split())
    assert "keeping it takes 33.6 MB per device; kept from about" in said


def test_what_is_kept_costs_time_to_repeat() -> None:
    one = tanh(recalls(planned(1).planned, LINE))
    assert one.kept
    assert one.more_s is not None
    assert 0 < one.more_s < planned(1).cost
    assert one.kept_from_bytes is None


def test_a_plan_that_did_not_decide_it_says_nothing() -> None:
    assert recalls(planned(1, "written").planned, LINE) == ()
    assert "backward pass" not in planned(1, "written").explain(at=LINE)


@pytest.mark.parametrize(
    ("kept", "nbytes", "more_s", "since", "said"),
    [
        (False, 2_100_000_000, None, 71_000_000_000, "keeping it takes 2.1 GB per device; kept from about 71 GB of"),
        (False, None, None, None, "keeping it takes memory and is no faster, whatever the limit"),
        (True, None, 3.1e-3, None, "repeating it costs 3.1 ms"),
        (True, 1000, None, None, "keeping it takes 1 kB per device; nothing that repeats it was found to fit"),
    ],
)
def test_the_reason_is_one_line(
    kept: bool,  # noqa: FBT001
    nbytes: int | None,
    more_s: float | None,
    since: int | None,
    said: str,
) -> None:
    one = Recall(
        what="tanh at model.py:61",
        value="bfloat16[8,128]",
        trips=32,
        kept=kept,
        nbytes=nbytes,
        more_s=more_s,
        kept_from_bytes=since,
    )
    shown = text.text((), (), (), (one,), width=200)
    assert f"{'kept' if kept else 'repeated'}  tanh at model.py:61: bf16[8,128], 32 times; {said}" in " ".join(
        shown.replace("  ", "\0").split()
    ).replace("\0", "  ")
    assert text.to_json((), (), (), (one,))["recalls"][0]["kept_from_bytes"] == since
