"""The doctor finds what was done to a program: the dearest first, with its line; and nothing in healthy ones."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, devices
from autoshard.cli.doctor import share
from autoshard.diagnosis.doctor import doctor
from autoshard.diagnosis.finding import Diagnosis
from autoshard.errors import SpecError
from autoshard.ir.mesh import MeshAxes
from autoshard.report.tables import columns

ON: Any = devices.abstract(MeshAxes.of({"data": 8}))
ROWS, WIDTH, MICRO = 4096, 256, 4


def aval(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(ON, spec))


def pinned(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(ON, P(*spec)))


def diagnosis(fn: Any, *args: Any, **options: Any) -> Diagnosis:
    return doctor(fn, *args, hardware="cpu:8", compiler="cpu", rel_gap=1e-2, **options)


def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
    def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        return total + rows.T @ jnp.tanh(rows @ w), None

    return jax.lax.scan(add, jnp.zeros_like(w), x)[0]


def test_sums_in_every_trip_are_the_first_finding() -> None:
    found = diagnosis(accumulated, aval(P(), WIDTH, WIDTH), aval(P(None, "data"), MICRO, ROWS, WIDTH))
    first = found.findings[0]
    assert first.kind == "sums in every trip"
    assert "test_doctor.py" in first.where
    assert f"{MICRO} times" in first.cause
    assert found.worst == first.seconds / found.step_s > 0
    told = str(found)
    assert "autoshard.accumulate" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= columns()
    assert found.to_json()["findings"][0]["where"] == first.where


def test_a_gather_before_a_cast_is_found() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) @ pinned(w).astype(jnp.bfloat16)

    def narrow(w: jax.Array, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) @ pinned(pinned(w.astype(jnp.bfloat16), "data"))

    args = aval(P("data"), WIDTH, WIDTH), aval(P("data"), ROWS, WIDTH)
    assert "gathered wide" in {one.kind for one in diagnosis(step, *args).findings}
    assert "gathered wide" not in {one.kind for one in diagnosis(narrow, *args).findings}


def test_a_scatter_in_every_trip_is_found_behind_a_constraint_of_the_sum() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            return pinned(total + rows.T @ jnp.tanh(rows @ w), "data"), None

        return jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    found = diagnosis(step, aval(P(), WIDTH, WIDTH), aval(P(None, "data"), MICRO, ROWS, WIDTH))
    assert "sums in every trip" in {one.kind for one in found.findings}


def test_a_residual_stream_is_no_sum_that_could_wait() -> None:
    """Every layer adds to it, and reads it: its sums over devices are needed in every trip."""

    def step(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + pinned(pinned(jnp.tanh(x @ w[0]), None, "data") @ w[1]), None

        return jax.lax.scan(layer, x, (up, down))[0]

    args = aval(P(None, None, "data"), MICRO, WIDTH, WIDTH), aval(P(None, "data"), MICRO, WIDTH, WIDTH)
    found = diagnosis(step, *args, aval(P(), ROWS, WIDTH))
    assert "sums in every trip" not in {one.kind for one in found.findings}


def test_what_a_shard_map_does_is_asked_for_where_it_is_differentiated_too() -> None:
    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.all_gather(x, "data", axis=1, tiled=True) @ w)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        made = jax.shard_map(body, mesh=ON, in_specs=(P(None, "data"), P(None, "data")), out_specs=P(None, "data"))
        return jnp.sum(made(w, jnp.sin(x)) ** 2)

    args = aval(P(None, "data"), WIDTH, WIDTH), aval(P(None, "data"), ROWS, WIDTH)
    found = diagnosis(jax.grad(loss, argnums=(0, 1)), *args)
    assert found.step.exposed_s > 0
    assert "unasked" not in {one.kind for one in found.findings}


def test_a_collective_of_a_shard_map_that_is_the_whole_program_has_its_line() -> None:
    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        rows = ROWS // 8
        total = jnp.tanh(jax.lax.psum(x @ y, "data"))
        return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("data") * rows, rows)

    specs = P(None, "data"), P("data")
    step = jax.shard_map(body, mesh=ON, in_specs=specs, out_specs=P("data"), check_vma=False)
    found = diagnosis(step, aval(specs[0], ROWS, WIDTH), aval(specs[1], WIDTH, WIDTH))
    first = {one.kind: one for one in found.findings}["summed whole"]
    assert "test_doctor.py" in first.where


def test_arguments_may_have_nothing_in_places() -> None:
    """As a layer of Equinox without a bias has."""

    def step(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w["kernel"])

    found = diagnosis(step, {"bias": None, "kernel": aval(P(), WIDTH, WIDTH)}, aval(P("data"), ROWS, WIDTH))
    assert found.findings == ()


def test_a_gather_that_a_constraint_asks_for_is_not_unasked() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        narrow = jnp.tanh(w).astype(jnp.bfloat16)
        return x.astype(jnp.bfloat16) @ pinned(narrow)

    found = diagnosis(step, aval(P(None, "data"), WIDTH, WIDTH), aval(P("data"), ROWS, WIDTH))
    assert found.step.exposed_s > 0
    assert "unasked" not in {one.kind for one in found.findings}


def test_a_whole_optimizer_state_is_found() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * m, m

    state = aval(P(), WIDTH, WIDTH), aval(P(), WIDTH, WIDTH)
    found = diagnosis(step, state, aval(P("data"), ROWS, WIDTH), donate_argnums=(0,))
    first = {one.kind: one for one in found.findings}["optimizer state whole"]
    assert first.where == "state[1]"
    assert first.bytes == 4 * WIDTH * WIDTH * 7 // 8


def test_a_whole_optimizer_state_is_compiled_split_where_the_cost_model_says_that_it_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that every step reads whole would be gathered for that."""

    def step(state: Any, x: jax.Array, *, read: bool) -> Any:
        w, m = state
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w - pinned(m) if read else w)
        m = 0.9 * m + g
        return w - m, m

    made, compiled = [], compile.compile

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return compiled(*args, **options)

    monkeypatch.setattr(compile, "compile", counted)
    state = aval(P(), WIDTH, WIDTH), aval(P(), WIDTH, WIDTH)
    for read, times in (False, 2), (True, 1):
        made.clear()
        found = diagnosis(partial(step, read=read), state, aval(P("data"), ROWS, WIDTH), donate_argnums=(0,))
        assert len(made) == times
        assert ("optimizer state whole" in {one.kind for one in found.findings}) is not read


def test_a_product_that_every_device_computes_is_found() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(pinned(x) @ w)

    found = diagnosis(step, aval(P(), WIDTH, WIDTH), aval(P("data"), ROWS, WIDTH))
    first = {one.kind: one for one in found.findings}["repeated on devices"]
    assert "up to 8 devices" in first.cause
    assert "test_doctor.py" in first.where


def test_a_healthy_program_has_no_findings() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    found = diagnosis(jax.value_and_grad(loss), aval(P(), WIDTH, WIDTH), aval(P("data"), ROWS, WIDTH))
    assert found.findings == ()
    assert found.worst == 0


def test_the_partitioner_is_heard_whatever_the_caller_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    """People set this variable against the many lines that XLA writes."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    mesh = devices.abstract(MeshAxes.of({"x": 4, "y": 2}))

    def step(a: jax.Array) -> jax.Array:
        value = jax.lax.with_sharding_constraint(jnp.tanh(a), NamedSharding(mesh, P("y", None, "x")))
        return jnp.tanh(jax.lax.with_sharding_constraint(value, NamedSharding(mesh, P(None, ("x", "y")))))

    spec: Any = NamedSharding(mesh, P("y", None, "x"))
    first = diagnosis(step, jax.ShapeDtypeStruct((64, 64, 64), jnp.float32, sharding=spec)).findings[0]
    assert first.kind == "rematerialized"
    assert "constrain it to P(" in first.change


def test_shares_are_read_as_written() -> None:
    assert (share("5%"), share("0.05")) == (0.05, 0.05)
    for wrong in ("five", "5%%", "7", "-1%", ""):
        with pytest.raises(SpecError, match="a share of the step"):
            share(wrong)
