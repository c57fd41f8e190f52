"""A program sharded by hand: what it emits that nobody asked for, and how far it is from the optimum."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.api.audit import Asked, Audit, audit
from autoshard.backends import devices
from autoshard.errors import MeshError
from autoshard.ir.graph import build
from autoshard.ir.mesh import MeshAxes
from autoshard.verification.verify import Places

ON: Any = devices.abstract(MeshAxes.of({"data": 2, "model": 4}))
ROWS, WIDTH, HIDDEN = 512, 256, 1024
F32 = 4


def aval(shape: tuple[int, ...], spec: P | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(ON, spec))


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ up) @ down


def audited(fn: Any, x: P | None, up: P | None, down: P | None) -> Audit:
    avals = [aval(s, p) for s, p in (((ROWS, WIDTH), x), ((WIDTH, HIDDEN), up), ((HIDDEN, WIDTH), down))]
    return audit(fn, *avals, hardware="cpu:8", compiler="cpu", rel_gap=1e-2)


def test_megatron_emits_what_it_asks_for() -> None:
    found = audited(mlp, P("data"), P(None, "model"), P("model"))
    assert found.unasked_bytes == 0
    assert [(x.line.kind, x.line.axes, x.line.emitted_bytes) for x in found.emitted] == [
        ("all-reduce", ("model",), ROWS // 2 * WIDTH * F32)
    ]
    assert found.emitted[0].line.where.partition(":")[0].endswith("test_audit.py")
    assert found.gap >= -1e-2


def test_the_text_fits_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(mlp, P("data"), P(None, "model"), P("model"))
    (one,) = found.emitted
    line = replace(one.line, kind="reduce-scatter", axes=("data", "model"), primitive="sharding_constraint")
    found = replace(found, emitted=(replace(one, line=line),))
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        text = str(found)
        assert max(map(len, text.splitlines())) <= width
        for part in (
            "262 kB",
            "data·model",
            "yes",
            "test_audit.",
            "py:",
            "reduce-",
            "scatter",
            "sharding_",
            "constraint",
        ):
            assert part in text


def test_stored_weights_are_gathered_as_asked() -> None:
    found = audited(mlp, P(("data", "model")), P(("data", "model")), P(("data", "model")))
    assert {x.line.kind for x in found.emitted} == {"all-gather"}
    assert found.unasked_bytes == 0


def test_a_gather_by_an_arguments_name_is_of_the_equation_that_takes_it() -> None:
    """So XLA:CPU of JAX 0.12 names gathers of arguments."""

    def cast(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.astype(jnp.bfloat16)

    graph = build(jax.make_jaxpr(cast)(jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 4))), "cpu")
    found = audited(mlp, P(("data", "model")), P(("data", "model")), P(("data", "model"))).verification.emitted[0]
    where = Places(graph)
    for argument in range(2):
        assert where(replace(found, op_name=f"flat[{argument}]"))[0] == "dot_general"
    assert Asked(graph)(replace(found, op_name="flat[1]"))
    assert not Asked(graph)(replace(found, op_name="flat[1]", kind="all-to-all"))
    assert where(replace(found, op_name="flat[2]"))[0] == "flat[2]"
    assert where(replace(found, op_name="jit(run)/tanh"))[0] == "tanh"


def test_layouts_that_meet_by_accident_are_told() -> None:
    """The second product contracts the columns of its activation with a weight that is split by column, too."""

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up), NamedSharding(ON, P(None, ("data", "model"))))
        return jax.lax.with_sharding_constraint(jnp.tanh(hidden) @ down, NamedSharding(ON, P(("data", "model"))))

    found = audited(step, P(("data", "model")), P(), P())
    told = str(found)
    assert found.unasked_bytes > 0, told
    assert "NO" in told
    assert found.gap > 0


def test_the_annotations_of_jit_count() -> None:
    shardings = tuple(NamedSharding(ON, spec) for spec in (P("data"), P(None, "model"), P("model")))
    jitted = jax.jit(mlp, in_shardings=shardings, out_shardings=NamedSharding(ON, P("data")), donate_argnums=0)
    found = audited(jitted, None, None, None)
    assert [leaf.spec for leaf in found.hand.record.inputs] == [P("data"), P(None, "model"), P("model")]
    assert found.hand.record.donated == (0,)
    assert found.unasked_bytes == 0


def test_a_program_without_annotations_has_no_mesh() -> None:
    with pytest.raises(MeshError, match="names a mesh"):
        audited(mlp, None, None, None)
