"""What XLA:TPU puts off until loops are over: sums of gradients, and the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.backends.known_compilers import XLA_TPU
from autoshard.costs.execution_order import loop_spans
from tests.programs import Program, space_of


@pytest.mark.parametrize(("hardware", "behind"), [("tpu-v6e:2x4", True), ("tpu-v5e:2x4", False)])
def test_a_gradient_beside_loops_is_reduced_behind_them(hardware: str, *, behind: bool) -> None:
    """XLA:TPU puts off the head's gradient, or its sum, until the layers' backward pass is over; on v5e no sum."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            hidden = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w["layers"])[0]
            return jnp.sum(jnp.tanh(hidden @ w["head"]))

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    w = {"layers": jnp.ones((4, 32, 32)), "head": jnp.ones((32, 64))}
    program = Program(fn=step, args=(w, jnp.ones((128, 32))), names=("w", "x"))
    d = space_of(program, hardware=hardware, compiler=XLA_TPU)[0].decisions
    backward = max(e for e, loop in enumerate(d.graph.eqn_loop) if loop)
    (head,) = (
        e
        for e, eqn in enumerate(d.graph.eqns)
        if eqn.primitive == "dot_general" and eqn.results[0].shape in ((32, 64), (64, 32)) and not d.graph.eqn_loop[e]
    )
    if behind:
        assert max(u.end for u in d.usages if u.node == d.node_of[head]) == backward
    else:
        assert max(u.end for u in d.usages if u.node == d.node_of[head] and u.kind == "gradients") < backward


def tied_step(w: Any, ids: jax.Array, labels: jax.Array) -> Any:
    """A lookup, layers in a loop, and the same table as a head, from whose logarithms labels take theirs."""

    def loss(w: Any) -> jax.Array:
        hidden = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), w["table"][ids], w["layers"])[0]
        scores = jax.nn.log_softmax(hidden @ w["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), value


@pytest.mark.parametrize(("hardware", "at_once"), [("tpu-v6e:2x4", False), ("tpu-v5e:2x4", True)])
def test_where_communication_runs_beside_compute_sums_and_the_loss_wait_for_no_loop(
    hardware: str, *, at_once: bool
) -> None:
    """The head's gradient is reduced before the layers' backward pass, under whatever name it waits; so is the loss."""
    w = {"layers": jnp.ones((4, 32, 32)), "table": jnp.ones((64, 32))}
    rows = jnp.zeros(128, jnp.int32)
    program = Program(fn=tied_step, args=(w, rows, rows), names=("w", "ids", "labels"))
    d = space_of(program, hardware=hardware, compiler=XLA_TPU)[0].decisions
    graph = d.graph
    first, last = max(loop_spans(graph).values())
    (late,) = (e for e, eqn in enumerate(graph.eqns) if eqn.results[0].shape == (64, 32) and eqn.traits.contraction)
    assert late < first
    whole = 64 * 32 * 4
    waiting = [u for u in d.usages if u.kind == "gradients" and u.start <= last <= u.end and u.nbytes.max() == whole]
    makers = {d.nodes[u.node].equations[0] for u in waiting} & set(range(late, first))
    assert bool(makers) != at_once
    (scores,) = (
        graph.results[e][0]
        for e, eqn in enumerate(graph.eqns)
        if eqn.results[0].shape == (128, 64) and eqn.traits.contraction
    )
    assert (d.lives.end[scores] <= first) == at_once
