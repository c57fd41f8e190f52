"""The board of unseen steps: its programs trace, and its verdict counts what is far off."""

import jax
import pytest

from benchmarks.unseen_answers import ANSWERS, CONTINUED
from benchmarks.unseen_models import MODELS
from benchmarks.unseen_steps import STEPS, Found, Pair, verdict

DEVICES = 8


@pytest.mark.parametrize("name", [name for name in STEPS if name not in ANSWERS])
def test_a_step_returns_its_state_in_the_shapes_it_took(name: str) -> None:
    step, (state, *batch) = STEPS[name](DEVICES)

    after, loss = jax.eval_shape(step, state, *batch)

    assert loss.shape == ()
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (after, state)]
    assert shapes[0] == shapes[1]
    if name in MODELS:
        assert batch[0].size == MODELS[name].tokens * DEVICES


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_a_loss_or_a_token_and_caches_stay_as_large(name: str) -> None:
    program, arguments = STEPS[name](DEVICES)

    found = jax.eval_shape(program, *arguments)

    caches, answer = found if name in CONTINUED else ((), found)
    assert jax.tree.leaves(caches) == jax.tree.leaves(arguments[0] if name in CONTINUED else ())
    assert answer.shape in ((), (arguments[-2].shape[0],), (arguments[-2].shape[0], 1))


def one(step: float, peak: float) -> Found:
    """A plan that is so many times what was compiled."""
    equal = Pair(predicted=1.0, compiled=1.0)
    return Found(
        model="any",
        step=Pair(predicted=step, compiled=1.0),
        compute=equal,
        peak=Pair(predicted=peak, compiled=1.0),
        agrees=True,
    )


def test_the_verdict_counts_steps_and_peaks_that_are_far_off() -> None:
    text = verdict([one(0.88, 1.2), one(1.02, 0.8), one(1.04, 1.0)])

    assert "4.0% off (median), -2.0% on average; 2 of 3 within 10%" in text
    assert "1 of 3 within 10%; compiled ones 10% above the plan: 1" in text
