"""What XLA:TPU holds, by the chip that it compiles for: the plan's usages, and the compiled program."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.api.evaluate import evaluate
from autoshard.backends import compile
from autoshard.backends import devices as meshes
from autoshard.costs.execution_order import late_gradients, loop_spans
from autoshard.costs.heap import occupied
from autoshard.costs.shared_gathers import NEAR
from autoshard.errors import InfeasibleError
from autoshard.ir.mesh import MeshAxes
from autoshard.problem import memory_profile
from tests.installed import needs_tpu_compiler

ROWS, WIDTH, VOCABULARY, LAYERS = 2048, 1024, 32_768, 4
ROWS_SPLIT = P("data")
SPECS = ((P(None, "data"), P(None, "data")), P("data"))


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def train_step(params: Any, x: jax.Array, labels: jax.Array) -> Any:
    """Layers in a loop, computed again for the backward pass; then a head, whose gradient is the largest array."""

    def loss(params: Any) -> jax.Array:
        layers, head = params
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None)), x, layers)
        scores = jax.nn.log_softmax((h @ head).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


def arguments() -> tuple[Any, ...]:
    layers = bf16(LAYERS, WIDTH, 4 * WIDTH), bf16(LAYERS, 4 * WIDTH, WIDTH)
    return (layers, bf16(WIDTH, VOCABULARY)), bf16(ROWS, WIDTH), jax.ShapeDtypeStruct((ROWS,), jnp.int32)


@pytest.mark.parametrize(
    ("hardware", "devices", "late"),
    [pytest.param("tpu-v5p:2x2x2", 8, True, marks=pytest.mark.slow), ("tpu-v5e:4x4", 16, False)],
)
def test_where_nothing_runs_beside_compute_a_whole_gradient_is_made_behind_the_loop(
    hardware: str, devices: int, *, late: bool
) -> None:
    """By FSDP, where libtpu scatters no sum over all devices: the head's gradient is 64 MiB on every device."""
    found = evaluate(
        train_step,
        *arguments(),
        mesh={"data": devices},
        hardware=hardware,
        in_specs=(SPECS, P("data"), P("data")),
        out_specs=(SPECS, P()),
        donate_argnums=0,
    )
    decisions, choice = found.assignment.decisions, found.assignment.choice
    whole = [u for u in decisions.usages if u.kind == "gradients" and u.nbytes[choice[u.node]] == gradient_bytes()]
    backward = max(stop for _, stop in loop_spans(decisions.graph).values())
    assert [u.start > backward for u in whole] == [late]
    assert meshes.place({"data": devices}, hardware).machine.gathers_ahead != late
    if compile.available("tpu"):
        text = compiled(hardware, devices)
        assert ("async-collective-start" in text) != late
        lines = text[text.index("\nENTRY") :].splitlines()
        shape = f"= bf16[{WIDTH},{VOCABULARY}]"
        (made,) = (i for i, x in enumerate(lines) if shape in x and "/dot_general" in x and " fusion(" in x)
        assert (made > max(i for i, x in enumerate(lines) if " while(" in x)) == late


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["its own part", "a sum"])
def test_beside_communication_a_gradient_that_nothing_reduces_is_made_behind_the_loop(*, split: bool) -> None:
    """The head's on v5e: split along the vocabulary it is each device's own; split along the width it is a sum."""
    head, rows = (P(None, "data"), P()) if split else (P("data"), P("data"))
    specs = (SPECS[0], head)
    found = evaluate(
        train_step,
        *arguments(),
        mesh={"data": 16},
        hardware="tpu-v5e:4x4",
        in_specs=(specs, rows, rows),
        out_specs=(specs, P()),
        donate_argnums=0,
    )
    decisions, choice = found.assignment.decisions, found.assignment.choice
    graph = decisions.graph
    (late,) = late_gradients(graph)
    node, end = decisions.node_of[late], len(graph.eqns)
    held = sum(int(u.nbytes[choice[node]]) for u in decisions.usages if u.node == node and u.end == end)
    assert held == (2 * ROWS * VOCABULARY // 16 + 2 * ROWS * WIDTH if split else 0)
    if compile.available("tpu"):
        text = compiled("tpu-v5e:4x4", 16, specs, rows)
        lines = text[text.index("\nENTRY") :].splitlines()
        loop = max(i for i, x in enumerate(lines) if " while(" in x)
        width = (WIDTH, VOCABULARY // 16) if split else (WIDTH, VOCABULARY)
        shape = f"bf16[{width[0]},{width[1]}]"
        made = [i for i, x in enumerate(lines) if shape in x.split(" fusion(")[0] and " fusion(" in x]
        assert (max(made) > loop) == split


def narrowed(x: jax.Array, weights: Any) -> jax.Array:
    """Wide scores, what is made of them, and wider scores of that."""
    first, small, last, back = weights
    kept = jax.nn.softmax(x @ first) @ small
    return jax.nn.softmax(kept @ last) @ back + kept


NARROWED = (
    bf16(4 * 131_072, WIDTH),
    [bf16(WIDTH, 4 * WIDTH), bf16(4 * WIDTH, WIDTH), bf16(WIDTH, 5 * WIDTH), bf16(5 * WIDTH, WIDTH)],
)


@pytest.mark.parametrize("hardware", ["tpu-v5e:2x2", "h100:1x4"])
def test_the_gaps_of_a_heap_are_part_of_a_peak_and_have_to_fit(hardware: str) -> None:
    def planned(memory: int | None) -> autoshard.SolvedPlan:
        return autoshard.plan(
            narrowed,
            *NARROWED,
            mesh={"data": 4},
            hardware=hardware,
            memory=memory,
            in_shardings=(P("data"), P()),
            out_shardings=P("data"),
        )

    plan = planned(None)
    found = plan.planned
    held = memory_profile.over_time(found.assignment.decisions, found.assignment.choice)
    total = np.sum([*held.values()], axis=0)
    memory = plan.record.memory
    assert total.max() == memory.peak_bytes == sum(memory.kinds.values())
    live = memory_profile.live_peak(found.assignment.decisions, found.assignment.choice)
    if hardware == "h100:1x4":
        assert live == memory.peak_bytes
        assert "gaps" not in {*held, *memory.kinds}
        return
    assert memory.kinds["gaps"] == memory.peak_bytes - live > 2**27
    with pytest.raises(InfeasibleError, match="with the gaps that the compiler leaves between buffers"):
        planned((live + memory.peak_bytes) // 2)
    if compile.available("tpu"):
        compiled_memory = plan.verify().memory.compiled
        assert compiled_memory is not None
        assert compiled_memory.peak == pytest.approx(memory.peak_bytes, rel=0.01)


@needs_tpu_compiler
def test_libtpu_lays_out_its_heap_in_the_order_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laid out again from libtpu's own live ranges its heap is as large, where what lives at once is less.

    The widest scores come last, and do not fit where the first were, below what was made of these and lives on.
    """

    found: list[tuple[str, str]] = []
    run = compile._run_child

    def dumping(folder: Path, *args: Any) -> str:
        request = json.loads((folder / "request.json").read_text())
        request["options"] |= {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True}
        (folder / "request.json").write_text(json.dumps(request))
        log = run(folder, *args)
        ranges, heap = (next((folder / "dump").glob(f"*{x}.txt")) for x in ("live-range", "buffer-assignment"))
        found.append((ranges.read_text(), heap.read_text()))
        return log

    monkeypatch.setattr(compile, "_run_child", dumping)
    mesh = MeshAxes.of({"data": 4})
    on = meshes.abstract(mesh)
    split, whole = NamedSharding(on, P("data")), NamedSharding(on, P())
    traced = jax.jit(narrowed, in_shardings=(split, whole)).trace(*NARROWED)
    compile.compile(traced, topology="tpu-v5e:2x2", mesh=mesh)
    ((ranges, heap),) = found
    lives = {x: (int(a), int(b) + 1) for x, a, b in re.findall(r"^ +(\S+\{[\d,]*\}):(\d+)-(\d+)$", ranges, re.M)}
    of_heap = max((x for x in heap.split("\nallocation ") if "preallocated-temp" in x[:100]), key=len)
    (size,) = map(int, re.findall(r"size (\d+), page", of_heap[:100]))
    laid_out = re.findall(r"value: <\d+ (\S+) @\d+> \(size=(\d+),", of_heap)
    buffers = [(*lives[x if "{" in x else f"{x}{{}}"], int(nbytes)) for x, nbytes in laid_out]
    start, end, nbytes = np.array(buffers, np.int64).T
    length = int(end.max()) + 1
    live = max(int(nbytes[(start <= t) & (t < end)].sum()) for t in range(length))
    assert live < 0.8 * size
    assert occupied(start, end, nbytes, length).max() == pytest.approx(size, rel=1e-3)  # of it 16 KiB per small buffer


@pytest.mark.parametrize("scores", [3 * WIDTH, 8 * WIDTH])
def test_a_whole_gradient_is_made_before_as_much_is_gathered_again(scores: int) -> None:
    """The head's, where the layers are unrolled: smaller than a layer's weights, and larger than all of them."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            layers, head = params
            h = x
            for up, down in layers:
                h = h + jnp.tanh(h @ up) @ down
            return jnp.mean((h @ head).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    layers = 20
    specs = [(P("data"), P("data"))] * layers, P("data")
    found = evaluate(
        step,
        ([(bf16(WIDTH, 4 * WIDTH), bf16(4 * WIDTH, WIDTH))] * layers, bf16(WIDTH, scores)),
        bf16(ROWS, WIDTH),
        mesh={"data": 8},
        hardware="tpu-v5p:2x2x2",
        in_specs=(specs, P("data")),
        out_specs=specs,
        donate_argnums=0,
    )
    decisions, choice = found.assignment.decisions, found.assignment.choice
    graph = decisions.graph
    whole = [u for u in decisions.usages if u.kind == "gradients" and u.nbytes[choice[u.node]] == 2 * WIDTH * scores]
    (made,) = {u.start for u in whole}
    if scores > 4 * WIDTH:
        assert made == len(graph.eqns) - 1
    else:
        users = graph.consumers
        uses = [sorted(e for e, _ in users.get(v, ())) for v in graph.inputs]
        far = [e for first, *later in filter(None, uses) for e in later if e - first > NEAR]
        assert made < max(e for e in far if graph.eqns[e].primitive in ("dot_general", "transpose"))


def gradient_bytes() -> int:
    return 2 * WIDTH * VOCABULARY


def compiled(hardware: str, devices: int, split: Any = SPECS, rows: P = ROWS_SPLIT) -> str:
    """The program's text, scheduled; `split`, `rows`: the specs of parameters, and of what comes in."""
    mesh = MeshAxes.of({"data": devices})
    on = meshes.abstract(mesh)

    def sharding(spec: P) -> NamedSharding:
        return NamedSharding(on, spec)

    specs = jax.tree.map(sharding, split, is_leaf=lambda x: isinstance(x, P))
    traced = jax.jit(
        train_step,
        in_shardings=(specs, sharding(rows), sharding(rows)),
        out_shardings=(specs, sharding(P())),
        donate_argnums=0,
    ).trace(*arguments())
    options = compile.TPU_PLAIN_OPTIONS
    return compile.compile(traced, topology=hardware, mesh=mesh, compiler_options=options).hlo_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequences", "order", "itemsize"),
    [(1, "bksgt", 2), (2, "bksgt", 4), (2, "bkgst", 2)],
    ids=["one-sequence", "as-multiplied", "transposed"],
)
def test_scores_are_kept_as_their_product_leaves_them_or_exponentiated(
    sequences: int, order: str, itemsize: int
) -> None:
    """In bf16 those of a device's only sequence, and those that are transposed; others in f32, exponentiated."""
    devices, layers, length, heads, size = 8, 3, 2048, 16, 128
    width = heads * size

    def attention(x: jax.Array, w: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, m) for m in w[:3])
        q = q.reshape(*q.shape[:2], 4, heads // 4, size)
        scores = jnp.einsum(f"bskgh,btkh->{order}", q, k).astype(jnp.float32)
        place = jnp.arange(length)
        seen = place[:, None, None] >= place if order == "bksgt" else place[:, None] >= place
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum(f"{order},btkh->bskgh", weights, v).reshape(*x.shape[:2], heads, size)
        return x + jnp.einsum("bsnh,nhd->bsd", mixed, w[3])

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        *layers, scale = weights
        x = x * scale
        for w in layers:
            x = attention(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    grouped = bf16(width, 4, size)
    layer = (bf16(width, heads, size), grouped, grouped, bf16(heads, size, width))
    weights, specs = [*[layer] * layers, bf16(width)], [*[(P(),) * 4] * layers, P()]
    found = evaluate(
        jax.grad(loss),
        weights,
        bf16(sequences * devices, length, width),
        mesh={"data": devices},
        hardware="tpu-v5e:2x4",
        in_specs=(specs, P("data")),
        out_specs=specs,
    )
    held = [int(u.nbytes[found.assignment.choice[u.node]]) for u in found.assignment.decisions.usages]
    assert max(held) == sequences * heads * length**2 * itemsize
    if compile.available("tpu"):
        memory = found.verify(compiler_options=compile.TPU_PLAIN_OPTIONS).memory
        assert memory.compiled is not None
        assert memory.compiled.peak == pytest.approx(memory.predicted.peak, rel=0.1)


@needs_tpu_compiler
@pytest.mark.parametrize(("hardware", "sequences"), [("tpu-v5e:2x4", 2), ("tpu-v5p:2x2x2", 1)])
def test_transposed_scores_take_the_time_of_their_product(hardware: str, sequences: int) -> None:
    """Nothing writes numerators, and what is computed from them reads bf16: a third less than for float32."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bskgh,btkh->bkgst", q, k).astype(jnp.float32))
        return jnp.einsum("bkgst,btkh->bskgh", weights.astype(q.dtype), v)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.vjp(attention, q, k, v)[1](q)

    batch, specs = 8 * sequences, (P("data"),) * 3
    args = bf16(batch, 2048, 4, 4, 128), bf16(batch, 2048, 4, 128), bf16(batch, 2048, 4, 128)
    found = evaluate(gradients, *args, mesh={"data": 8}, hardware=hardware, in_specs=specs, out_specs=specs)
    compute = found.verify().compute
    assert compute is not None
    assert compute.predicted_s == pytest.approx(compute.compiled_s, rel=0.1)


@needs_tpu_compiler
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_state_that_is_gathered_after_its_update_is_copied_twice(dtype: Any) -> None:
    """Weights are whole, what updates them is split (ZeRO-1): they are copied before the step, and behind it."""
    layers, width, features = 3, 2048, 4096

    def step(weights: Any, moments: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for up, down in weights:
                h = h + jnp.tanh(h @ up.astype(h.dtype)) @ down.astype(h.dtype)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        moments = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), moments, jax.grad(loss)(weights))
        return jax.tree.map(lambda w, m: (w - 1e-3 * m).astype(w.dtype), weights, moments), moments

    def pairs(dtype: Any) -> Any:
        return [
            (jax.ShapeDtypeStruct((width, features), dtype), jax.ShapeDtypeStruct((features, width), dtype))
        ] * layers

    whole, split = [(P(), P())] * layers, [(P("x"), P("x"))] * layers
    plan = autoshard.plan(
        step,
        pairs(dtype),
        pairs(jnp.float32),
        bf16(16_384, width),
        mesh={"x": 8},
        hardware="tpu-v5e:2x4",
        in_shardings=(whole, split, P("x")),
        out_shardings=(whole, split),
        donate_argnums=(0, 1),
    )
    found = plan.verify(compiler_options=compile.TPU_PLAIN_OPTIONS)
    weights_bytes = 2 * layers * width * features * jnp.dtype(dtype).itemsize
    assert found.timeline is not None
    copied_s = sum(e.duration_s for e in found.timeline.events if e.stream == "compute" and "copy" in e.name)
    once_s = float(meshes.place({"x": 8}, "tpu-v5e:2x4").machine.hbm_s(2 * weights_bytes))
    assert 0.9 * once_s < copied_s < 4 * once_s
    planned_s = sum(row.work_s for row in plan.record.collectives if row.kind == "all-gather")
    assert planned_s == pytest.approx(2 * once_s)
    assert found.memory.compiled is not None
    assert weights_bytes < found.memory.predicted.peak
    assert found.memory.compiled.peak == pytest.approx(found.memory.predicted.peak, rel=0.15)


def biased(table: jax.Array, places: jax.Array, x: jax.Array) -> jax.Array:
    """A bias of heads for every pair of positions, as of T5."""
    return jnp.einsum("nrk,nrk->nk", x, jnp.tanh(jnp.moveaxis(table[places], -1, 0)))


def learned(table: jax.Array, places: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda table: jnp.sum(x * jnp.moveaxis(table[places], -1, 0) ** 2))(table)


@needs_tpu_compiler
@pytest.mark.parametrize("program", [biased, learned])
@pytest.mark.parametrize(
    ("hardware", "row"),
    [
        ("tpu-v5e:2x4", jax.ShapeDtypeStruct((8,), jnp.float32)),
        ("tpu-v5p:2x2x2", jax.ShapeDtypeStruct((16,), jnp.bfloat16)),
    ],
    ids=["v5e-8", "v5p-16"],
)
def test_narrow_rows_are_gathered_in_whole_lanes(program: Any, hardware: str, row: jax.ShapeDtypeStruct) -> None:
    """And so they are added to a table: at most 16 times their own bytes here."""
    args = jax.ShapeDtypeStruct((64, *row.shape), row.dtype), jax.ShapeDtypeStruct((2048, 1024), jnp.int32)
    x = jax.ShapeDtypeStruct((*row.shape, 2048, 1024), row.dtype)
    specs = (P(), P("data"), P(None, "data"))
    found = evaluate(program, *args, x, mesh={"data": 8}, hardware=hardware, in_specs=specs, out_specs=P())
    memory = found.verify().memory
    assert memory.compiled is not None
    assert memory.predicted.peak == pytest.approx(memory.compiled.peak, rel=0.1)
