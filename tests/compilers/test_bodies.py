"""Bodies that their author has split: what XLA:GPU makes of a data-parallel step."""

from typing import Any

import jax.numpy as jnp
import pytest

from autoshard.problem import bill
from tests.installed import needs_gpu_compiler
from tests.problem.test_bodies import data_parallel, data_parallel_by_hand, plan_of, shaped


@needs_gpu_compiler
@pytest.mark.parametrize("step", [data_parallel, data_parallel_by_hand], ids=["by its gradient", "by hand"])
def test_a_data_parallel_step_takes_what_the_compiled_one_does(step: Any) -> None:
    weights = [shaped(4096, 4096, dtype=jnp.bfloat16)] * 4
    args = (weights, shaped(65536, 4096, dtype=jnp.bfloat16))
    plan = plan_of(step, *args, hardware="h100:1x8", donate_argnums=0)
    found = plan.verify("gpu")
    assert found.timeline is not None
    assert sum(row.predicted_bytes for row in found.rows) == pytest.approx(
        sum(row.emitted_bytes for row in found.rows), rel=0.02
    ), str(found)
    assert bill.flops(plan.planned.assignment) == found.timeline.flops
    assert plan.cost == pytest.approx(found.timeline.step_s, rel=0.2), str(found)
