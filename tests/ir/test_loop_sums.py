"""Loop sums: sums over a loop's trips are in parts until the loop is over, and nothing that is no sum is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.loop_sums import LoopSum, loop_sums, summed_once
from autoshard.ir.trace import Traced, trace
from tests import random_loop_sums as drawn

PARTS = 8
X, Y, W, MASK = drawn.inputs(0)
FEW, MANY = 20, 200


def traced(fn: Callable[..., Any], *args: Any) -> Traced:
    return trace(fn, args, [f"argument{i}" for i in range(len(args))])


def carried(closed: Any) -> list[tuple[int, ...]]:
    """The shapes that the scans of a program carry round, outer ones first."""
    scans = [eqn for eqn in _jax.equations(closed) if eqn.primitive.name == "scan"]
    return [var.aval.shape for scan in scans for var in scan.outvars[: _jax.scan_arity(scan)[1]]]


def added(step: drawn.Step) -> Callable[..., Any]:
    """A loop with one carried value."""

    def run(x: Any, y: Any, w: Any, mask: Any) -> Any:
        def trip(c: Any, one: Any) -> Any:
            return step(c, one[0], one[1], w, one[2]), None

        return jax.lax.scan(trip, jnp.zeros_like(w), (x, y, mask))[0]

    return run


def check_same(program: Traced, sums: tuple[LoopSum, ...], args: list[Any], tolerance: float = 0.0) -> Traced:
    new = summed_once(program, sums)
    _jax.check(_jax.open_jaxpr(new.jaxpr))
    assert new.digest == program.digest
    want, got = jax.jit(lambda *args: [jaxpr_as_fun(p.jaxpr)(*args) for p in (program, new)])(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    return new


@pytest.mark.parametrize("term", drawn.TERMS)
def test_what_is_linear_in_a_sum_over_rows_is_in_parts(term: Any) -> None:
    program = traced(added(lambda c, x, y, w, m: c + term(x, y)), X, Y, W, MASK)
    sums = loop_sums(program, (2, 4, PARTS))
    assert [one.parts for one in sums] == [PARTS]
    new = check_same(program, sums, [X, Y, W, MASK])
    assert carried(new.jaxpr)[0] == (PARTS, drawn.WIDTH, drawn.OTHER)


@pytest.mark.parametrize("step", drawn.ADDED)
def test_masks_other_terms_and_scales_stay_right(step: drawn.Step) -> None:
    program = traced(added(step), X, Y, W, MASK)
    sums = loop_sums(program, (PARTS,))
    assert len(sums) == 1
    check_same(program, sums, [X, Y, W, MASK])


@pytest.mark.parametrize("step", drawn.NONLINEAR)
def test_what_is_not_linear_stays_as_it_is(step: drawn.Step) -> None:
    assert loop_sums(traced(added(step), X, Y, W, MASK), (PARTS,)) == ()


def test_what_a_loop_returns_in_every_trip_stays_as_it_is() -> None:
    def run(x: Any, y: Any) -> Any:
        def trip(c: Any, one: Any) -> Any:
            c = c + drawn.TERMS[0](*one)
            return c, c

        return jax.lax.scan(trip, jnp.zeros((drawn.WIDTH, drawn.OTHER)), (x, y))

    assert loop_sums(traced(run, X, Y), (PARTS,)) == ()


def test_the_largest_number_of_parts_that_divides_is_taken() -> None:
    program = traced(added(drawn.ADDED[0]), X[:, :12], Y[:, :12], W, MASK)
    assert [one.parts for one in loop_sums(program, (2, 4, 8))] == [4]
    assert loop_sums(program, (5,)) == ()


def test_a_sum_that_begins_with_something_begins_with_it_once() -> None:
    def run(x: Any, y: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, one: (c + drawn.TERMS[0](*one), None), w, (x, y))[0]

    program = traced(run, X, Y, W)
    check_same(program, loop_sums(program, (PARTS,)), [X, Y, W])


def test_a_loop_in_a_loop_gives_the_outer_one_its_parts() -> None:
    program = traced(added(lambda c, x, y, w, m: c + drawn.TERMS[8](x, y)), X, Y, W, MASK)
    sums = loop_sums(program, (PARTS,))
    assert len(sums) == 1  # not the inner one for itself
    new = check_same(program, sums, [X, Y, W, MASK])
    assert carried(new.jaxpr) == [(PARTS, drawn.WIDTH, drawn.OTHER), (PARTS, drawn.OTHER)]


def test_the_gradient_of_a_weight_that_all_steps_of_time_share() -> None:
    """As `A` of a state-space model: in a checkpoint, of a loop over time, one for each layer of a loop over layers."""
    rng = np.random.default_rng(0)
    a, x = rng.normal(size=(3, 4, 2)).astype(np.float32), rng.normal(size=(8, 5, 4)).astype(np.float32)

    @partial(jax.checkpoint, prevent_cse=False)
    def layer(x: Any, a: Any) -> Any:
        def step(h: Any, u: Any) -> Any:
            h = jnp.exp(-jnp.exp(a) * jnp.abs(u)[..., None]) * h + u[..., None]
            return h, h.sum(-1)

        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((8, 4, 2)), jnp.moveaxis(x, 1, 0))[1], 0, 1)

    def loss(a: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, a: (layer(x, a), None), x, a)[0] ** 2)

    program = traced(jax.grad(loss), a, x)
    sums = loop_sums(program, (2, PARTS))
    assert [one.parts for one in sums] == [PARTS]
    new = check_same(program, sums, [a, x], tolerance=1e-4)
    assert (PARTS, 4, 2) in carried(new.jaxpr)


def test_sums_of_another_program_are_refused() -> None:
    program = traced(added(drawn.ADDED[0]), X, Y, W, MASK)
    with pytest.raises(SpecError, match="no sum over a loop's trips at 7:0"):
        summed_once(program, [LoopSum(place="7:0", parts=PARTS)])
    with pytest.raises(SpecError, match="no sum over a loop's trips"):
        summed_once(program, [LoopSum(place=loop_sums(program, (PARTS,))[0].place, parts=3)])


def check_random(seeds: range) -> int:
    found = 0
    for seed in seeds:
        program = traced(drawn.program(seed), *drawn.inputs(seed))
        sums = loop_sums(program, (2, 4, PARTS))
        found += len(sums)
        if sums:
            check_same(program, sums, drawn.inputs(seed))
    return found


def test_random_loops_compute_the_same() -> None:
    assert check_random(range(FEW)) >= FEW // 2


@pytest.mark.slow
def test_many_random_loops_compute_the_same() -> None:
    assert check_random(range(FEW, FEW + MANY)) >= MANY // 2


@pytest.mark.parametrize(
    "term",
    [
        lambda x: jax.lax.div(jnp.sum(x, 0), jnp.full(x.shape[1:], 3, x.dtype)),
        lambda x: jax.lax.reduce_sum(x.astype(jnp.int8), (0,)).astype(jnp.int32),
    ],
    ids=["quotients of integers", "sums that wrap around before they are widened"],
)
def test_integers_that_are_rounded_or_wrap_stay_whole(term: Callable[[Any], Any]) -> None:
    x = np.random.default_rng(0).integers(-100, 100, (4, 8, 5)).astype(np.int32)

    def run(x: Any) -> Any:
        return jax.lax.scan(lambda c, one: (c + term(one), None), jnp.zeros(x.shape[2:], jnp.int32), x)[0]

    program = traced(run, x)
    sums = loop_sums(program, (PARTS,))
    if sums:
        check_same(program, sums, [x])
    assert not sums
