"""What crosses from forward to backward, and programs that keep other values for it."""

import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

import autoshard
import models
from autoshard import _jax
from autoshard.errors import RecomputeError
from autoshard.ir.flops import flops
from autoshard.ir.graph import build
from autoshard.ir.recompute import rewritten
from autoshard.ir.saved_values import ForwardValue, Remat, SavedValues, ValueId, saved_values
from autoshard.ir.segments import Life, cut, segments, valleys
from autoshard.ir.trace import Traced, trace

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def key(i: int) -> Any:
    return jax.random.key(i)


def weights(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(0, 0.3, shape).astype(np.float32)


def layer(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w["up"])
    return x + jax.nn.silu(h) * h @ w["down"]


def stack(layers: int) -> Any:
    return {"up": weights(layers, 6, 10), "down": weights(layers, 10, 6)}


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A train step with a little of an optimizer behind the gradient."""

    def train_step(params: Any, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


def scanned() -> Program:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)

    return step(loss), (stack(3), weights(4, 6))


def unrolled() -> Program:
    def loss(params: Any, x: Any) -> Any:
        for i in range(3):
            x = layer({name: w[i] for name, w in params.items()}, x)
        return jnp.mean(x**2)

    return step(loss), (stack(3), weights(4, 6))


def dropout() -> Program:
    def loss(params: Any, x: Any, key: Any) -> Any:
        def body(x: Any, given: Any) -> Any:
            w, key = given
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), layer(w, x), x), None

        keep = jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, x.shape)
        return jnp.mean(jax.lax.scan(body, jnp.where(keep, x, x * x), (params, jax.random.split(key, 3)))[0] ** 2)

    return step(loss), (stack(3), weights(4, 6), key(0))


def mixture() -> Program:
    def loss(params: Any, x: Any) -> Any:
        for i in range(2):
            scores = jax.nn.softmax(x @ params["router"][i])
            top, expert = jax.lax.top_k(scores, 2)
            sent = jnp.einsum("se,sd->esd", jax.nn.one_hot(expert, 4).sum(1), x)
            mixed = jnp.einsum("esd,edf->esf", sent, params["up"][i])
            x = x + jnp.einsum("esf,efd,s->sd", jnp.tanh(mixed), params["down"][i], top[:, 0])
        return jnp.mean(x**2)

    params = {"router": weights(2, 6, 4), "up": weights(2, 4, 6, 5), "down": weights(2, 4, 5, 6)}
    return step(loss), (params, weights(8, 6))


def accumulated() -> Program:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)

    def train_step(params: Any, batch: Any) -> Any:
        value, gradients = autoshard.accumulate(loss, steps=2, parts=2)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step, (stack(2), weights(8, 6))


def nested() -> Program:
    """Layers in a scan, each with a scan of its own."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            def inner(h: Any, part: Any) -> Any:
                h = jnp.sin(h * part) + jnp.cos(h) @ w["up"] @ w["down"]
                return h, h * 2

            h, parts = jax.lax.scan(inner, x, jnp.linspace(0.1, 0.5, 4))
            return x + h + parts.sum(0) * 0.1, None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    return step(loss), (stack(3), weights(4, 6))


def checkpointed() -> Program:
    def loss(params: Any, x: Any) -> Any:
        own = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x = jax.lax.scan(lambda x, w: (own(w, x), None), x, params)[0]
        for i in range(2):
            x = jax.checkpoint(layer)({name: w[i] for name, w in params.items()}, jnp.sin(x))
        return jnp.mean(x**2)

    return step(loss), (stack(3), weights(4, 6))


def custom_rules() -> Program:
    @jax.custom_vjp
    def squash(x: Any) -> Any:
        return jnp.tanh(x) * x

    def forward(x: Any) -> Any:
        y = jnp.tanh(x)
        return y * x, (x, y)

    def backward(saved: Any, g: Any) -> Any:
        x, y = saved
        return (g * (y + x * (1 - y * y)),)

    squash.defvjp(forward, backward)

    def loss(params: Any, x: Any) -> Any:
        for i in range(2):
            x = squash(checkpoint_name(x @ params["up"][i], "hidden")) @ params["down"][i]
        return jnp.mean(x**2)

    return step(loss), (stack(2), weights(4, 6))


def shared_towers() -> Program:
    """Two loops over the same body; what the first stacks is a result, too."""

    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            x = layer(w, x)
            return x, x * 3

        a, seen = jax.lax.scan(body, x, params)
        b, _ = jax.lax.scan(body, jnp.cos(x), params, reverse=True)
        return jnp.mean(a * b) + jnp.mean(seen**2), seen

    def train_step(params: Any, x: Any) -> Any:
        (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, seen

    return train_step, (stack(3), weights(4, 6))


PROGRAMS = {
    builder.__name__: builder
    for builder in (
        *(scanned, unrolled, dropout, mixture, accumulated),
        *(nested, checkpointed, custom_rules, shared_towers),
    )
}


def traced(program: Program) -> Traced:
    fn, args = program
    return trace(fn, args, [f"a{i}" for i in range(len(args))])


def run(closed: Any, args: Any) -> list[np.ndarray[Any, Any]]:
    options = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    fn = jax.jit(jaxpr_as_fun(closed))
    return [np.asarray(x) for x in fn.lower(*jax.tree.leaves(args)).compile(options)(*jax.tree.leaves(args))]


def enough(values: SavedValues, kept: Any) -> frozenset[ValueId]:
    """What is kept with what else must be, throughout."""
    found = frozenset(kept)
    while missing := values.missing(found):
        found |= set(missing)
    return found


def drawn(values: SavedValues, rng: random.Random) -> frozenset[ValueId]:
    share = rng.random() ** 2
    every = [value.id for one in values.passes for value in one.values]
    chosen = {at for at in every if rng.random() < share}
    return enough(values, values.stacks(enough(values, chosen)) if rng.random() < 0.7 else chosen)


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_choice_computes_the_same(name: str) -> None:
    program = PROGRAMS[name]()
    closed = traced(program).jaxpr
    expected = run(closed, program[1])
    rng = random.Random(name)
    remats: tuple[Remat, ...] = ("add", "free") if name == "checkpointed" else ("add",)
    for remat in remats:
        values = saved_values(closed, remat=remat)
        choices = [values.saved, enough(values, values.stacks(enough(values, []))), drawn(values, rng)]
        for kept in choices:
            got = run(rewritten(values, kept), program[1])
            for a, b in zip(expected, got, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


MODES: tuple[Remat, ...] = ("add", "free")


@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_choice_is_a_program(name: str, remat: Remat) -> None:
    """Well-typed, with the same inputs and results, and with no stack of what is not kept."""
    closed = traced(PROGRAMS[name]()).jaxpr
    values = saved_values(closed, remat=remat)
    rng = random.Random(name)
    for _ in range(10):
        kept = drawn(values, rng)
        new = _jax.open_jaxpr(rewritten(values, kept))
        _jax.check(new)
        old = _jax.open_jaxpr(closed)
        assert [v.aval for v in new.invars] == [v.aval for v in old.invars]
        assert [v.aval for v in new.outvars] == [v.aval for v in old.outvars]


@pytest.mark.parametrize("name", ["scanned", "accumulated", "checkpointed", "shared_towers"])
def test_stacks_in_the_host_s_memory_are_copied_once_each_way(name: str) -> None:
    """In each trip; the device stacks none of them, and what is computed is the same."""
    program = PROGRAMS[name]()
    values = saved_values(traced(program).jaxpr)
    on_host = values.stackable & values.used(values.saved)
    new = rewritten(values, values.saved, on_host)
    _jax.check(_jax.open_jaxpr(new))
    puts = [eqn for eqn in _jax.equations(new) if eqn.primitive.name == "device_put"]
    to_host = [eqn for eqn in puts if _jax.is_on_host(eqn.outvars[0].aval)]
    assert len(to_host) == len(puts) / 2 == len(on_host) > 0
    assert (
        stacked_bytes(new)
        < stacked_bytes(rewritten(values, values.saved)) - sum(values_of(values)[at].nbytes for at in on_host) * 0.99
    )
    for a, b in zip(run(values.closed, program[1]), run(new, program[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def values_of(values: SavedValues) -> dict[ValueId, ForwardValue]:
    return {value.id: value for one in values.passes for value in one.values}


def stacked_bytes(closed: Any) -> int:
    """The bytes that the loops of a program stack in the device's memory."""
    scans = [eqn for eqn in _jax.equations(closed) if eqn.primitive.name == "scan"]
    stacks = [x for eqn in scans for x in eqn.outvars[_jax.scan_arity(eqn)[1] :]]
    return sum(x.aval.size * x.aval.dtype.itemsize for x in stacks if not _jax.is_on_host(x.aval))


def test_what_loops_within_loops_stack_stays_in_the_device_s_memory() -> None:
    values = saved_values(traced(nested()).jaxpr)
    _, layers, inner = values.passes
    assert values.stackable <= {value.id for value in layers.values}
    assert {value.id for value in inner.values}.isdisjoint(values.stackable)


def test_random_bits_come_out_the_same() -> None:
    def loss(x: Any, key: Any) -> Any:
        first = jax.random.bernoulli(key, 0.5, x.shape)
        second = jax.random.bernoulli(jax.random.split(key)[1], 0.5, x.shape)
        return jnp.sum(jnp.sin(jnp.where(first, x, 0.0)) * jnp.where(second, x, 1.0))

    program = jax.grad(loss), (weights(8, 16), key(3))
    values = saved_values(traced(program).jaxpr)
    drawn_again = [step for step in values.repeated([]) if step.primitive == "random_bits"]
    assert len(drawn_again) == 2
    (expected,), (got,) = run(values.closed, program[1]), run(rewritten(values, []), program[1])
    assert np.array_equal(expected == 0, got == 0)
    np.testing.assert_allclose(expected, got, rtol=1e-6)


def called() -> tuple[Program, list[str]]:
    calls: list[str] = []

    def host(x: Any) -> Any:
        calls.append("host")
        return np.cos(x)

    def loss(x: Any) -> Any:
        factor = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        y = jnp.sin(x) * jnp.exp(factor)
        jax.debug.callback(lambda _: calls.append("seen"), y.sum(), ordered=True)
        return jnp.sum(y**2)

    return (jax.grad(loss), (weights(4, 6),)), calls


def test_the_host_is_called_once() -> None:
    program, calls = called()
    values = saved_values(traced(program).jaxpr)
    missing = values.missing([])
    assert [*missing.values()] == ["pure_callback calls the host"]
    with pytest.raises(RecomputeError, match=r"test_recompute\.py.*pure_callback calls the host") as refused:
        rewritten(values, [])
    assert set(refused.value.missing) == {str(at) for at in missing}
    (expected,) = run(values.closed, program[1])
    calls.clear()
    (got,) = run(rewritten(values, frozenset(missing)), program[1])
    jax.effects_barrier()
    assert sorted(calls) == ["host", "seen"]
    np.testing.assert_allclose(expected, got, rtol=1e-6)


def test_what_a_loop_carries_is_kept() -> None:
    values = saved_values(traced(scanned()).jaxpr)
    (_, layers) = values.passes
    missing = values.missing([])
    assert {at.path for at in missing} == {layers.body}
    assert set(missing.values()) == {"carried from trip to trip"}
    assert layers.trips == 3
    assert layers.value[min(missing)].nbytes == 3 * 4 * 6 * 4


def test_ids_are_the_graphs_places() -> None:
    closed = traced(scanned()).jaxpr
    graph = build(closed, "cpu")
    places = {ValueId(*spot) for spots in graph.makes for spot in spots}
    for one in saved_values(closed).passes:
        for value in one.values:
            assert ValueId.parse(str(value.id)) == value.id
            assert value.id.stacked or not value.read or value.id in places or value.id.path == (), value.id
    again = saved_values(traced(scanned()).jaxpr)
    assert again.saved == saved_values(closed).saved


def test_a_flat_gradient_keeps_what_jax_keeps() -> None:
    values = saved_values(traced(unrolled()).jaxpr)
    (one,) = values.passes
    saved = [value for value in one.values if value.id in values.saved]
    assert sum(value.where.startswith(__file__) for value in saved) > len(saved) // 2
    assert all(value.read for value in saved)
    assert not values.repeated(values.saved)
    assert values.used(values.saved) == values.saved


def test_checkpoints_of_the_program() -> None:
    """Left alone, they repeat what they did; undone, a pass keeps what it would without them."""
    with_own = traced(checkpointed()).jaxpr
    written, add, free = (saved_values(with_own, remat=remat) for remat in ("written", "add", "free"))
    assert not written.passes
    assert rewritten(written, []) is with_own

    def remats(closed: Any) -> int:
        return sum("differentiated" in eqn.params for eqn in _jax.equations(closed))

    assert remats(rewritten(add, add.saved)) == remats(with_own) == 3
    assert remats(rewritten(free, free.saved)) == 0
    assert flops(rewritten(free, free.saved)) == flops(with_own)
    assert not free.missing(add.saved)  # the program's own choice is one of those
    assert len(add.saved) < len(free.saved)
    assert free.repeated(add.saved)


def products(closed: Any) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in _jax.equations(closed))


def test_a_scan_in_a_layer_is_repeated_whole() -> None:
    values = saved_values(traced(nested()).jaxpr)
    _, layers, inner = values.passes
    kept = enough(values, values.stacks(values.missing([])))
    own = {at for at in kept if at.path[: len(inner.body)] == inner.body and at.stacked < 2}
    again = enough(values, (kept - {at.stack for at in own}) | own)
    assert [step.primitive for step in values.repeated(again)].count("scan") == 1
    assert layers.value[min(own).stack].nbytes == 3 * 4 * 4 * 6 * 4


def test_what_leaves_the_program_is_not_made_again() -> None:
    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            hidden = jnp.tanh(x @ w["up"])
            return x + hidden @ w["down"], hidden

        x, hidden = jax.lax.scan(body, x, params)
        return jnp.mean(x**2), hidden

    program = jax.grad(loss, has_aux=True), (stack(3), weights(4, 6))
    values = saved_values(traced(program).jaxpr)
    (hidden,) = [v for one in values.passes for v in one.values if v.free.startswith("stacked")]
    assert hidden.read
    kept = enough(values, values.stacks(values.missing([])))
    made = {at for step in values.repeated(kept) for at in step.results}
    assert made
    assert hidden.id not in made
    for expected, got in zip(run(values.closed, program[1]), run(rewritten(values, kept), program[1]), strict=True):
        np.testing.assert_allclose(expected, got, rtol=2e-5, atol=1e-6)


def test_steps_are_needed_by_backward_ones() -> None:
    values = saved_values(traced(scanned()).jaxpr)
    flat, layers = values.passes
    needed = values.needed_before(enough(values, values.stacks(values.missing([]))))
    assert {path[: len(layers.body)] for path in needed} == {layers.body, *(path for path in needed if len(path) == 1)}
    assert all(path[: len(layers.backward)] == layers.backward for step, path in needed.items() if len(step) > 1)
    assert flat.trips == 1


def test_a_plan_takes_it_as_any_program() -> None:
    program = unrolled()
    values = saved_values(traced(program).jaxpr)
    closed = rewritten(values, [])
    leaves = jax.tree.leaves(program[1])
    plan = autoshard.plan(jaxpr_as_fun(closed), *leaves, mesh={"data": 2, "model": 2}, hardware="h100:1x4")
    assert plan.record.memory.peak_bytes > 0
    assert flops(closed) == flops(values.closed)  # useful ones


def test_nothing_is_merged_with_the_forward_pass() -> None:
    """XLA runs as many products as the program has: barriers keep repeated ones apart.

    Some XLA:CPUs take barriers out before they merge for the last time, and merge the one product of arguments alone.
    """
    program = unrolled()
    values = saved_values(traced(program).jaxpr)
    assert products(rewritten(values, [])) == products(values.closed) + 6
    for kept in (values.saved, frozenset[ValueId]()):
        closed = rewritten(values, kept)
        text = jax.jit(jaxpr_as_fun(closed)).lower(*jax.tree.leaves(program[1])).compile().as_text() or ""
        assert products(closed) - text.count(" dot(") in (0, int(not kept))
        again = sum(step.primitive == "dot_general" for step in values.repeated(kept))
        assert len(re.findall(rf" dot\(.*{_jax.REMATTED}", text)) == again


def test_layers_are_cut_where_the_stream_alone_crosses() -> None:
    assert valleys([1, 9, 9, 2, 9, 8, 1, 7]) == [3, 6]
    assert not valleys([4, 5, 4, 5, 4])
    lives = [
        Life(0, 2, 9),
        Life(1, 1, 50),
        Life(1, 3, 1),
        Life(3, 4, 9),
    ]  # what is read where it is made crosses nothing
    assert cut(5, lives) == [0, 0, 0, 1, 1]
    fn, args = models.build("tiny-gpt2", scan=False, layers=3, batch=8, sequence=32)
    (one,) = saved_values(trace(fn, args, ("state", "batch")).jaxpr, remat="add").passes
    assert max(segments(one)) == 2 * 3 + 1  # attention and MLP of each layer, what is before, and the loss


def test_barriers_hold_what_is_narrow_and_of_one_layer() -> None:
    """Neither broadcast sums of the loss, as large as its scores, nor what several layers begin with."""
    rows, vocab, layers = 8 * 32, 4096, 3
    fn, args = models.build("tiny-gpt2", scan=False, layers=layers, batch=8, sequence=32, vocab=vocab)
    program = trace(fn, args, ("state", "batch"))
    values = saved_values(program.jaxpr, remat="add")
    (one,) = values.passes
    residuals = {v.id for v in one.values if v.aval.shape == (8, 32, 64) and v.aval.dtype == "bfloat16"}
    barriers = [
        eqn
        for eqn in _jax.equations(rewritten(values, enough(values, residuals)))
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert len(barriers) >= 2 * layers
    assert all(x.aval.size < rows * vocab for eqn in barriers for x in eqn.invars)
