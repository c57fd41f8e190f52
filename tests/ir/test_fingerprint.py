"""A program's digest is of the program: not of the process, the terminal or the mesh that it is traced in."""

import hashlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import _jax
from autoshard.explain.diff import diff
from autoshard.ir import fingerprint
from autoshard.ir.trace import Traced, trace

ROOT = Path(__file__).parents[2]
MESH, OTHER, GPUS = {"data": 2, "model": 4}, {"data": 4, "model": 2}, "h100:1x8"
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def traced(fn: Callable[..., Any], *args: Any) -> Traced:
    return trace(fn, args or (X,), tuple("xyz"[: len(args or (X,))]))


def digest(fn: Callable[..., Any], *args: Any) -> str:
    return traced(fn, *args).digest


# --- Equal wherever it is traced ---------------------------------------------------------------

# What prints addresses, sets and functions into a jaxpr; prints the digest and, in colours or not, JAX's own text.
PROGRAM = """
import sys, jax, jax.numpy as jnp
from functools import partial
from jax.ad_checkpoint import checkpoint_name
from autoshard.ir.trace import trace

@jax.custom_vjp
def scaled(x):
    return 2 * x
scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

@partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("alpha", "beta", "gamma", "delta"))
def layer(x):
    for name in ("alpha", "beta", "gamma", "delta"):
        x = jnp.tanh(checkpoint_name(x @ x, name))
    return x

def fn(x):
    x = scaled(layer(jax.random.normal(jax.random.key(0), x.shape) + x))
    x = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jax.nn.relu(x).sum()

made = trace(fn, (jax.ShapeDtypeStruct((16, 16), jnp.float32),), ("x",))
print("FOUND", made.digest, "FOUND", chr(27) in str(made.jaxpr))
"""


def started(hash_seed: int, stdout: Any) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(hash_seed), "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE)


def test_a_terminal_and_a_hash_seed_change_no_digest() -> None:
    parent, terminal = pty.openpty()
    here, there = started(1, subprocess.PIPE), started(2, terminal)
    os.close(terminal)
    piped, errors = here.communicate(timeout=120)
    shown = b""
    try:
        while text := os.read(parent, 1024):
            shown += text
    except OSError:  # Linux ends a terminal so
        pass
    finally:
        os.close(parent)
        errors += there.communicate(timeout=120)[1]
    assert b"FOUND" in piped, errors[-2000:].decode()
    assert b"FOUND" in shown, errors[-2000:].decode()
    (one, coloured), (other, in_colours) = (re.findall(r"FOUND (\w+)", t.decode()) for t in (piped, shown))
    assert (coloured, in_colours) == ("False", "True")
    assert one == other


def test_what_has_an_address_counts_by_its_name() -> None:
    class Twice:
        def __call__(self, x: Any) -> Any:
            return np.asarray(x) * 2

    def program(called: Any) -> Callable[[Any], Any]:
        return lambda x: jax.pure_callback(called, X, x) + 1

    for make in (Twice, lambda: partial(Twice(), x=1), lambda: lambda x: x, lambda: Twice().__call__):
        first, second = make(), make()  # both alive: two addresses
        text = fingerprint.text(traced(program(first)).jaxpr)
        assert "0x" not in text
        assert text == fingerprint.text(traced(program(second)).jaxpr)


def test_the_mesh_is_no_part_of_a_program() -> None:
    def program(x: Any) -> Any:
        return jnp.tanh(x @ jnp.broadcast_to(jnp.arange(16.0), (16, 16))) + jax.random.normal(
            jax.random.key(0), (16, 16)
        )

    one, other = (autoshard.plan(program, X, mesh=mesh, hardware=GPUS) for mesh in (MESH, OTHER))
    assert one.record.digest == other.record.digest
    assert "different programs" not in str(diff(one.record, other.record))


def test_a_users_constraint_counts_with_its_spec_alone() -> None:
    def plan(spec: P, mesh: dict[str, int]) -> str:
        def program(x: Any) -> Any:
            return jnp.tanh(jax.lax.with_sharding_constraint(x * 2, spec))

        return autoshard.plan(program, X, mesh=mesh, hardware=GPUS).record.digest

    assert plan(P("data"), MESH) == plan(P("data"), OTHER) != plan(P("model"), MESH)


# --- Different where the program is --------------------------------------------------------------


def test_names_that_a_policy_keeps_count() -> None:
    def program(*names: str) -> Callable[[Any], Any]:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")), policy=policy)

    assert digest(program("a", "b")) == digest(program("b", "a"))
    assert len({digest(program(*names)) for names in (("a", "b"), ("a",), ("c",), ())}) == 4


@pytest.mark.parametrize(
    "inner",
    [
        lambda c: jax.jit(lambda y: y @ c),
        lambda c: jax.checkpoint(lambda y: y @ c),
        lambda c: lambda y: jax.lax.scan(lambda carry, _: (carry @ c, None), y, length=3)[0],
        lambda c: lambda y: jax.lax.cond(y[0, 0] > 0, lambda z: z @ c, lambda z: z, y),
    ],
)
def test_constants_of_inner_calls_count(inner: Any) -> None:
    c = np.arange(256.0, dtype=np.float32).reshape(16, 16)
    one, same, other = (digest(inner(v)) for v in (c, c.copy(), c + (c == 255)))
    assert one == same != other


def test_constants_of_every_kind_are_read() -> None:
    values = [
        jnp.zeros((0, 3)),
        jnp.ones((2, 2), jnp.bfloat16),
        np.ones((2, 2), np.float32)[:, ::-1],
        jnp.array([True, False]),
        jax.random.key(3),
        jax.random.key(4),
        jnp.ones(3, jnp.int4),
        jnp.float32(jnp.nan),
    ]
    assert len({digest(lambda x, v=v: (x, v)) for v in values}) == len(values)


def test_large_constants_are_read_once() -> None:
    """As often as they occur, a constant's bytes are hashed once."""
    big = jnp.ones((1 << 20,))

    def program(x: Any) -> Any:
        for _ in range(200):
            x = jax.jit(lambda y: y + big[0])(x)
        return x

    reads: list[int] = []
    writer = fingerprint.Writer(read=lambda value: reads.append(value.nbytes) or "read")
    writer.body(traced(program).jaxpr)
    assert reads.count(big.nbytes) <= 1


def test_a_value_that_is_traced_counts_by_its_type() -> None:
    found: list[str] = []

    def outer(w: Any) -> Any:
        found.append(fingerprint.fingerprint(jax.make_jaxpr(lambda x: x @ w)(X)))
        return w

    for _ in range(2):
        jax.make_jaxpr(lambda w: outer(w))(X)  # a function of its own: JAX traces each once
    assert found[0] == found[1]


# --- Files of before -------------------------------------------------------------------------------


@pytest.mark.parametrize("color", [False, True])
def test_digests_of_older_files_are_known(*, color: bool, tmp_path: Path) -> None:
    """A plan file of autoshard 0.1.0, made in a terminal or not, still loads and locks."""

    def program(x: Any) -> Any:
        return jnp.tanh(x @ x)

    plan = autoshard.plan(program, X, mesh=MESH, hardware=GPUS)
    made = plan.traced
    assert made is not None
    text = re.sub(r" at 0x[0-9a-f]+", "", made.jaxpr.pretty_print(use_color=color))
    former = hashlib.sha256("\n".join((text, "float32[16, 16]", "x>")).encode()).hexdigest()[:32]
    assert former != made.digest
    path = tmp_path / "plan.json"
    path.write_text(plan.record.dumps().replace(made.digest, former))
    assert autoshard.load(path).bind(program, X).record.digest == former
    lock = tmp_path / "{digest}.json"
    (tmp_path / f"{former[:12]}.json").write_text(path.read_text())
    assert autoshard.plan(program, X, mesh=MESH, hardware=GPUS, lock=lock).record.digest == former


def test_shardings_that_only_note_the_mesh_are_told_from_wishes() -> None:
    auto = jax.NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), P("x"))
    assert _jax.noted_while_tracing("broadcast_in_dim", "sharding", auto)
    assert not _jax.noted_while_tracing("sharding_constraint", "sharding", auto)
