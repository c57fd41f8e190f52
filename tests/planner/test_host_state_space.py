"""Plans with state in the host's memory: when it is chosen, what it costs, how it is said, and that it runs."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
import cost_models
from autoshard.errors import InfeasibleError, PlanMismatchError, SpecError
from autoshard.ir.host_state import HOST_MEMORY
from autoshard.planner.budget import WORTH
from autoshard.problem import bill
from tests.ir.test_host_state import OPTIMIZERS, loss, step_of

OPTIMIZER = OPTIMIZERS["adamw after a clip"]
STEP = step_of(OPTIMIZER)
WIDTH, LAYERS, ROWS = 256, 4, 64
HOST_BYTES_PER_S = cost_models.hardware("h100:1x4").chip.numbers["host_bytes_per_s"].value
OPTIONS: dict[str, Any] = {
    "mesh": {"data": 4},
    "hardware": "h100:1x4",
    "donate_argnums": 0,
    "rel_gap": 1e-2,
    "constraints": "all",
    "cache": False,
    "remat": "written",
}
SHARE = 0.85  # of the smallest peak without


@cache
def arguments() -> tuple[dict[str, Any], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = {
        "layers": [0.05 * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[:LAYERS]],
        "head": 0.05 * jax.random.normal(keys[-1], (WIDTH, WIDTH)),
        "bias": jnp.zeros(WIDTH),
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}, jnp.ones((ROWS, WIDTH))


@cache
def least() -> int:
    """The smallest peak of any plan that keeps all state in the devices' memory."""
    with pytest.raises(InfeasibleError) as caught:
        autoshard.plan(STEP, *arguments(), **OPTIONS, memory=1000)
    assert caught.value.peak_bytes is not None
    assert 'offload="state"' in str(caught.value) or 'offload="auto"' in str(caught.value)
    return caught.value.peak_bytes


@cache
def on_host(share: float = SHARE) -> autoshard.SolvedPlan:
    return autoshard.plan(STEP, *arguments(), **OPTIONS, memory=int(least() * share), offload="state")


def there(plan: autoshard.Plan) -> list[str]:
    return [leaf.path for leaf in plan.record.inputs if leaf.on_host]


def test_state_lies_on_the_host_where_nothing_fits_without() -> None:
    plan = on_host()
    with pytest.raises(InfeasibleError):
        autoshard.plan(STEP, *arguments(), **OPTIONS, memory=int(least() * SHARE))
    assert plan.record.memory.peak_bytes <= int(least() * SHARE)
    assert there(plan)
    assert all(re.search(r"\.(mu|nu)\[", path) for path in there(plan))
    outputs = [leaf.path for leaf in plan.record.outputs if leaf.on_host]
    assert [f"state{path[3:]}" for path in outputs] == there(plan)  # `[0]['opt']…`
    assert not [note for note in plan.record.notes if note.startswith("not priced")]


def test_its_copies_take_their_time_both_ways() -> None:
    plan = on_host()
    record = plan.record
    nbytes = sum(4 * np.prod(leaf.shape) / _parts(plan, leaf.spec) for leaf in record.inputs if leaf.on_host)
    copies = list(bill.host_copies(plan.planned.assignment))
    for to_host in (True, False):
        assert sum(copy.nbytes for copy in copies if copy.to_host == to_host) == nbytes
    waited_s = sum(copy.waited_s for copy in copies)
    assert waited_s == pytest.approx(2 * nbytes / HOST_BYTES_PER_S, rel=1e-3)
    assert record.cost.exposed_s >= waited_s


def _parts(plan: autoshard.Plan, spec: Any) -> int:
    axes = [axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())]
    return int(np.prod([plan.record.mesh.shape[axis] for axis in axes], dtype=int))


def test_it_stays_in_the_devices_memory_where_it_fits() -> None:
    plan = autoshard.plan(STEP, *arguments(), **OPTIONS, offload="state")
    assert not there(plan)
    assert plan.record.cost == autoshard.plan(STEP, *arguments(), **OPTIONS).record.cost
    assert "which state lies in the host's memory" in plan.record.certificate.space


def test_it_is_said() -> None:
    said = " ".join(on_host().summary().split())
    assert re.search(
        r"host state in the host's memory: \d+ leaves of state\.opt\.1\.0\.mu, state\.opt\.1\.0\.nu: ", said
    )
    assert "on the host" in said


@pytest.mark.slow  # a minute
def test_more_memory_is_never_slower() -> None:
    found: list[autoshard.SolvedPlan | None] = []
    for share in (1.05, 0.95, SHARE, 0.75, 0.3):
        try:
            found.append(on_host(share))
        except InfeasibleError:
            found.append(None)
    assert None not in found[: len([plan for plan in found if plan])]
    plans = [plan for plan in found if plan is not None]
    assert len({len(there(plan)) for plan in plans}) >= 2
    assert found[-1] is None
    for i, more in enumerate(plans):
        fastest = min(less.cost for less in plans[i:])
        assert more.cost * (1 - 2e-2) * (1 - WORTH) <= fastest


def test_a_file_says_what_lies_there(tmp_path: Path) -> None:
    plan = on_host()
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    kinds = {path: sharding.memory_kind for path, sharding in loaded.in_shardings().items()}
    assert {path for path, kind in kinds.items() if kind == HOST_MEMORY} == set(there(plan))
    options: dict[str, Any] = {**OPTIONS, "memory": plan.record.memory.limit_bytes, "lock": tmp_path / "plan.json"}
    assert autoshard.plan(STEP, *arguments(), **options, offload="state").record == plan.record
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "true")
        with pytest.raises(PlanMismatchError, match="offloading"):
            autoshard.plan(STEP, *arguments(), **options)


def test_steps_compute_the_same_and_state_stays_there(tmp_path: Path) -> None:
    """Placed by `put` and by `init`; of a plan that was read from a file, too."""
    plan = on_host()
    plan.save(tmp_path / "plan.json")
    state, x = jax.tree.map(np.asarray, arguments())
    want, placed = state, plan.put(state, "state")
    assert_there(plan, placed)
    assert_there(plan, plan.init(lambda: arguments()[0], arg="state"))
    step, alone = plan.jit(), jax.jit(STEP)
    for one in (step, autoshard.load(tmp_path / "plan.json").jit(STEP)):
        placed, value = one(placed, plan.put(x, "x"))
        want, expected = alone(want, x)
        assert_there(plan, placed)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(placed), jax.tree.leaves(want), strict=True):
        # AdamW divides by the gradient's size, however small: sums in another order are a hundredth of a step apart.
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-4, atol=1e-4)


def assert_there(plan: autoshard.SolvedPlan, state: Any) -> None:
    leaves = [leaf for leaf in plan.record.inputs if leaf.path.startswith("state")]
    kinds = [x.sharding.memory_kind == HOST_MEMORY for x in jax.tree.leaves(state)]
    assert kinds == [leaf.on_host for leaf in leaves]


@pytest.mark.slow
def test_a_decorated_step_places_what_comes_from_elsewhere() -> None:
    plan = on_host()
    options: dict[str, Any] = {**OPTIONS, "memory": plan.record.memory.limit_bytes, "offload": "state"}
    step = autoshard.jit(STEP, **options)
    state, x = jax.tree.map(np.asarray, arguments())
    first, value = step(state, x)
    assert_there(plan, first)
    copied, same = step(jax.tree.map(jnp.asarray, state), x)
    assert_there(plan, copied)
    assert float(value) == float(same)
    assert_there(plan, step(first, x)[0])
    again = autoshard.jit(STEP, **options)  # as after a restart: the first call has state that lies there
    assert_there(plan, again(plan.put(state, "state"), x)[0])
    with pytest.raises(PlanMismatchError, match=r"outside of jax\.jit"):
        jax.jit(lambda state, x: step(state, x))(jax.tree.map(jnp.asarray, state), x)


def plan_for(**others: Any) -> autoshard.SolvedPlan:
    options: dict[str, Any] = {**OPTIONS, **others}
    return autoshard.plan(STEP, *arguments(), **options, offload="state")


def test_where_no_state_can_lie_there_it_is_refused_with_the_reason() -> None:
    with pytest.raises(SpecError, match="donate the state"):
        plan_for(donate_argnums=None)
    with pytest.raises(SpecError, match="one memory"):
        plan_for(hardware="cpu:4")
    args = arguments()[0]["params"], arguments()[1]
    with pytest.raises(SpecError, match="plan the step that takes the gradient"):
        autoshard.plan(loss, *args, mesh={"data": 4}, hardware="h100:1x4", for_grad=True, offload="state")


@pytest.mark.slow  # a minute
def test_a_plan_that_may_repeat_puts_state_there_too() -> None:
    options: dict[str, Any] = {**OPTIONS, "remat": "add", "memory": int(least() * SHARE)}
    assert there(autoshard.plan(STEP, *arguments(), **options, offload="auto"))
