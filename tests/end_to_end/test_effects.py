"""Programs that call the host run under a plan, and call it exactly as often as under `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import autoshard
from autoshard.errors import CompileError

ON: dict[str, Any] = {"mesh": {"data": 2, "model": 4}, "hardware": "h100:1x8"}
X = np.linspace(-0.5, 0.5, 64, dtype=np.float32).reshape(8, 8)
CALLS: list[float] = []


def note(value: Any) -> None:
    CALLS.append(float(np.sum(value)))


def product(x: Any) -> Any:
    return jnp.tanh(x @ x)


def inner(x: Any, log: Callable[[Any], None]) -> Any:
    def called(y: Any) -> Any:
        log(y.sum())
        return product(y)

    return jax.jit(called)(x)


def scanned(x: Any, log: Callable[[Any], None]) -> Any:
    def body(c: Any, i: Any) -> tuple[Any, None]:
        log(c.sum() + i)
        return product(c), None

    return lax.scan(body, x, jnp.arange(3.0))[0]


def looped(x: Any, log: Callable[[Any], None]) -> Any:
    def body(c: tuple[Any, Any]) -> tuple[Any, Any]:
        log(c[0].sum())
        return product(c[0]), c[1] + 1

    return lax.while_loop(lambda c: c[1] < 3, body, (x, 0))[0]


def branched(x: Any, log: Callable[[Any], None]) -> Any:
    def yes(y: Any) -> Any:
        log(y.sum())
        return product(y)

    return lax.cond(x[0, 0] < 0, yes, lambda y: y, x)


def trained(x: Any, log: Callable[[Any], None]) -> Any:
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(product(w)))(x)
    log(value)
    return x - gradient


def straight(x: Any, log: Callable[[Any], None]) -> Any:
    log(x)
    return product(x)


PROGRAMS = {f.__name__: f for f in (straight, inner, scanned, looped, branched, trained)}
LOGS: dict[str, Callable[[Any], None]] = {
    "io_callback": lambda v: io_callback(note, None, v),
    "ordered io_callback": lambda v: io_callback(note, None, v, ordered=True),
    "debug.callback": lambda v: jax.debug.callback(note, v),
    "ordered debug.callback": lambda v: jax.debug.callback(note, v, ordered=True),
}


def called(fn: Callable[[Any], Any]) -> tuple[Any, list[float]]:
    CALLS.clear()
    outs = [fn(X) for _ in range(2)]
    jax.block_until_ready(outs)
    jax.effects_barrier()
    return outs[-1], list(CALLS)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_callbacks_without_a_result_run_as_often_as_under_jax_jit(program: str, log: str) -> None:
    def fn(x: Any) -> Any:
        return PROGRAMS[program](x, LOGS[log])

    want, calls = called(jax.jit(fn))
    got, planned_calls = called(autoshard.jit(fn, **ON))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if log.startswith("ordered"):
        np.testing.assert_allclose(planned_calls, calls, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sorted(planned_calls), sorted(calls), rtol=1e-4, atol=1e-5)


def test_prints_come_once_and_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        for i in range(3):
            jax.debug.print("line {} {:.3f}", i, x[0, 0], ordered=True)
            x = product(x)
        jax.debug.print("any {:.3f}", x.sum())
        return x

    texts: list[list[str]] = []
    for jitted in (jax.jit(fn), autoshard.jit(fn, **ON)):
        jax.block_until_ready(jitted(X))
        jax.effects_barrier()
        texts.append([line for line in capfd.readouterr().out.splitlines() if line.startswith(("line", "any"))])
    assert texts[0] == texts[1]
    assert len(texts[1]) == 4


def test_a_function_that_only_logs_is_planned() -> None:
    _, calls = called(autoshard.jit(lambda x: io_callback(note, None, x.sum()), **ON))
    assert len(calls) == 2


def test_checks_throw_what_they_throw_under_jax_jit() -> None:
    def fn(x: Any) -> Any:
        checkify.check(x.sum() > 0, "the sum is {s}", s=x.sum())
        return jnp.log(x @ x)

    checked = checkify.checkify(fn, errors=checkify.user_checks | checkify.float_checks)
    for value in (X, X + 1):
        want, got = (jitted(value)[0].get() for jitted in (jax.jit(checked), autoshard.jit(checked, **ON)))
        assert (want is None) == (got is None)
        assert str(want).split(".")[0] == str(got).split(".")[0]


def test_what_needs_real_devices_says_so() -> None:
    """Propagation and compilers without devices cannot take a call of the host; the best completion can."""

    def fn(x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(X.shape, jnp.float32), x) @ x

    assert autoshard.evaluate(fn, X, **ON, completion="best").cost > 0
    with pytest.raises(CompileError, match="calls the host"):
        autoshard.evaluate(fn, X, **ON)
    with pytest.raises(CompileError, match="calls the host"):
        autoshard.plan(fn, X, **ON).honoured()
