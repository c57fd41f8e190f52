"""Latencies: a plan does not wait for what a little more at its own prices saves."""

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.backends.known_compilers import XLA_GPU
from autoshard.planner.latencies import MOST_LOST, UNPAID
from autoshard.problem import bill
from autoshard.problem.filled_buckets import unpaid_s
from autoshard.problem.formulation import UNIT_S
from tests.programs import Program, planned_of

MESH = {"data": 4, "model": 8}


def test_a_small_program_does_not_split_its_vectors_for_a_latency_that_nobody_shares() -> None:
    """Two layers with momentum: biases in parts save nothing, and are gathered by two collectives of their own."""

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(x**2)

    def step(params: Any, momentum: Any, x: Any) -> Any:
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    state = [(jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1024,), jnp.float32))] * 2
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    program = Program(fn=step, args=(state, state, x), names=("params", "momentum", "x"), donated=frozenset({0, 1}))
    best, near = (
        planned_of(program, mesh=MESH, hardware="h100:4x8", compiler=XLA_GPU, rel_gap=gap) for gap in (0.0, 1e-3)
    )
    waits_s = [planned.solution.objective * UNIT_S + unpaid_s(planned.assignment) for planned in (best, near)]
    assert waits_s[1] < 0.5 * waits_s[0]
    assert unpaid_s(near.assignment) <= UNPAID * near.solution.objective * UNIT_S
    assert best.solution.objective < near.solution.objective <= (1 + MOST_LOST) * best.solution.objective
    assert near.solution.bound <= best.solution.objective
    assert not [row for _, row in bill.transfers(near.assignment) if row.nbytes <= 4096]
