"""A hand layout's price lies above the plan's, its bytes are those one counts, and the compiler agrees."""

import re
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike, NDArray

import autoshard
import models
from autoshard import AUTO
from autoshard.api.evaluate import evaluate
from autoshard.api.evaluation import Completion, Evaluation
from autoshard.backends import devices
from autoshard.backends.shardy import passes
from autoshard.backends.shardy.propagation import annotated
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import SUM, WHOLE, encode, layout_of
from autoshard.ir import rewrite
from autoshard.ir.graph import Aval
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.nearest import code_near
from autoshard.verification.predicted_timeline import schedule
from models import layouts

MESH = MeshAxes.of({"data": 2, "model": 4})
H100, V5E = "h100:1x8", "tpu-v5e:2x4"
GAP = 1e-2
BATCH, WIDTH, HIDDEN, LAYERS = 512, 1024, 4096, 2  # of mlp-1k as built here
BF16, F32 = 2, 4
PS = 1e-12


@cache
def model(name: str) -> tuple[Any, Any]:
    """`(train_step, (state, batch))`, small."""
    if name == "tiny-llama":
        return models.build(name, layers=1, batch=8)
    return models.build(name, layers=LAYERS, batch=BATCH)


def hand(name: str, recipe: str) -> tuple[Any, Any, Any]:
    """The train step with the expert's constraints, and the specs of its arguments and outputs."""
    axes = {} if "megatron" in recipe else {"data": MESH.names}
    layout = layouts.find(name, recipe, **axes)
    train_step, (state, batch) = model(name)
    specs = layout.specs(state, batch)
    on: Any = devices.abstract(MESH)
    return layouts.constrained(train_step, layout.activation, on), specs, (specs[0], P())


@cache
def evaluated(
    name: str, recipe: str, completion: Completion, hardware: str = H100, memory: int | None = None
) -> Evaluation:
    fn, in_specs, out_specs = hand(name, recipe)
    return evaluate(
        fn,
        *model(name)[1],
        mesh=MESH.shape,
        hardware=hardware,
        in_specs=in_specs,
        out_specs=out_specs,
        completion=completion,
        memory=memory,
        donate_argnums=0,
        rel_gap=GAP,
        time_limit_s=20,
    )


@cache
def planned(name: str, hardware: str = H100) -> autoshard.SolvedPlan:
    train_step, args = model(name)
    return autoshard.plan(
        train_step, *args, mesh=MESH.shape, hardware=hardware, donate_argnums=0, rel_gap=GAP, time_limit_s=20
    )


def moved(evaluation: Evaluation, kind: str, *axes: str) -> int:
    """Bytes of one kind of collective over these mesh axes."""
    found = evaluation.record.collectives
    return sum(c.nbytes * c.trips for c in found if c.kind == kind and c.axes == axes)


RECIPES = ("dp", "fsdp", "megatron", "fsdp_megatron")
CASES = [
    *(("linear-1k", recipe, hardware) for recipe in RECIPES for hardware in (H100, V5E)),
    *(("mlp-1k", recipe, H100) for recipe in RECIPES),
    ("tiny-llama", "dp_megatron", H100),
]


@pytest.mark.parametrize(("name", "recipe", "hardware"), CASES)
def test_planning_beats_completing_beats_propagating(name: str, recipe: str, hardware: str) -> None:
    plan = planned(name, hardware)
    best, by_shardy = (evaluated(name, recipe, c, hardware) for c in ("best", "shardy"))
    assert plan.record.cost.step_s <= best.cost * (1 + GAP)
    assert best.cost <= by_shardy.cost * (1 + GAP)
    assert best.fits
    assert by_shardy.fits
    assert by_shardy.record.certificate.status == "priced"


@pytest.mark.parametrize("recipe", [*RECIPES, "weight_stationary_2d"])
def test_times_are_parts_of_the_step(recipe: str) -> None:
    """Nothing hides, or is waited for, for less than no time, also where several windows leave some of it."""
    layout = layouts.find("mlp-1k", recipe)
    train_step, (state, batch) = model("mlp-1k")
    axes = layouts.axes(recipe)
    place: Any = devices.place(dict(zip(axes, (8,) if len(axes) == 1 else (2, 4), strict=True)), H100)
    specs, on = layout.specs(state, batch), cast(Any, devices.abstract(place.axes))
    found = evaluate(
        layouts.constrained(train_step, layout.activation, on),
        state,
        batch,
        mesh=place.axes.shape,
        hardware=H100,
        in_specs=specs,
        out_specs=(specs[0], P()),
        donate_argnums=0,
    )
    cost, priced = found.record.cost, schedule(found.assignment)
    for one in (cost, priced):
        assert one.exposed_s >= 0
        assert one.hidden_s >= 0
        assert one.compute_s + one.exposed_s == pytest.approx(one.step_s)


def test_no_program_takes_more_than_the_peak_of_what_it_multiplies() -> None:
    """cpu's peak is twice as high in float32 as in bfloat16; the step is priced by the one that is used."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        x = jax.ShapeDtypeStruct((2048, 2048), dtype)
        plan = autoshard.plan(lambda x, y: x @ y, x, x, mesh={"data": 1}, hardware="cpu:1", for_grad=False)
        (share,) = re.findall(r"([\d.]+)% of the peak of", " ".join(plan.summary().split()))
        assert 50 < float(share) <= 100


@pytest.mark.parametrize("completion", ["best", "shardy"])
@pytest.mark.parametrize("name", ["linear-1k", "mlp-1k"])
def test_a_plans_own_layouts_and_pins_cost_what_it_says(name: str, completion: Completion) -> None:
    plan = planned(name)
    traced, record = plan.planned.traced, plan.record

    def pinned(state: Any, batch: Any) -> Any:
        flat = jax.tree.leaves((state, batch))
        outputs = rewrite.emit_constraints(traced.jaxpr, record.pins, devices.abstract(MESH), flat)
        return jax.tree.unflatten(traced.out_tree, outputs)

    found = evaluate(
        pinned,
        *model(name)[1],
        mesh=MESH.shape,
        hardware=H100,
        in_specs=plan.specs,
        out_specs=plan.out_specs,
        completion=completion,
        donate_argnums=0,
        rel_gap=GAP,
    )
    assert found.cost == pytest.approx(record.cost.step_s, rel=GAP)


# What one counts by hand: bfloat16 gradients and activations, and the float32 loss.
WEIGHTS = 2 * LAYERS * WIDTH * HIDDEN
ACTIVATION = BATCH * WIDTH * BF16


def test_data_parallelism_all_reduces_every_gradient() -> None:
    found = evaluated("mlp-1k", "dp", "shardy")
    assert moved(found, "all-reduce", *MESH.names) == WEIGHTS * BF16 + F32
    assert {c.kind for c in found.record.collectives} == {"all-reduce"}


def test_megatron_all_reduces_one_activation_per_layer_each_way() -> None:
    found = evaluated("mlp-1k", "megatron", "shardy")
    backward = LAYERS - 1  # nobody asks for the gradient of the first layer's input
    assert moved(found, "all-reduce", "model") == (LAYERS + backward) * ACTIVATION
    assert len(found.record.collectives) == LAYERS + backward


def test_megatron_by_sequence_gathers_and_scatters_instead() -> None:
    found = evaluated("mlp-1k", "megatron_sequence", "shardy")
    assert moved(found, "reduce-scatter", "model") == (2 * LAYERS - 1) * ACTIVATION
    assert moved(found, "all-gather", "model") == 2 * LAYERS * ACTIVATION


def test_fully_sharded_data_parallelism_gathers_weights_and_scatters_gradients() -> None:
    found = evaluated("mlp-1k", "fsdp", "shardy")
    assert moved(found, "all-gather", *MESH.names) == WEIGHTS * BF16
    assert moved(found, "reduce-scatter", *MESH.names) == WEIGHTS * BF16


def forward(x: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w[0]) @ w[1], None), x, layers)[0]


@pytest.mark.parametrize("remat", [False, True])
def test_scans_of_scans_that_read_constants_are_completed(remat: bool) -> None:  # noqa: FBT001
    """A loop's constant that is a number, or an array of the program's own, lowers to nothing and has no layout."""
    table = np.linspace(0.0, 1.0, 16, dtype=np.float32)

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        def step(h: Any, row: Any) -> tuple[Any, Any]:
            h = 0.9 * h + jnp.exp(-jnp.exp(w["decay"])) * row
            return h, h * table

        gate = jax.nn.softplus(x @ w["gate"])
        made = jax.lax.scan(step, jnp.zeros(x.shape[1:]), x * gate * jax.lax.rsqrt((x**2).mean() + 1e-6))[1]
        return x + made, None

    def loss(p: Any, x: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, p)[0] ** 2).mean()

    def step(p: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, p, jax.grad(loss)(p, x))

    p = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in (("decay", (3, 16)), ("gate", (3, 16, 16)))}
    x = jax.ShapeDtypeStruct((12, 8, 16), jnp.float32)
    found = evaluate(step, p, x, mesh=MESH.shape, hardware=H100, in_specs=(P(), P(None, "data")), donate_argnums=0)
    assert found.completion == "shardy"
    assert found.cost > 0


def test_a_scanned_megatron_all_reduces_once_per_trip() -> None:
    weights = [jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    specs = (P(), [P(None, None, "model"), P(None, "model")])
    found = evaluate(forward, x, weights, mesh=MESH.shape, hardware=H100, in_specs=specs, out_specs=P(), for_grad=False)
    assert [(c.kind, c.axes, c.nbytes, c.trips) for c in found.record.collectives] == [
        ("all-reduce", ("model",), ACTIVATION, LAYERS)
    ]


def two_layers(x: Any, up: Any, down: Any) -> Any:
    return jnp.sum(jnp.square(jnp.tanh(jax.nn.relu(x @ up)) @ down))


SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((BATCH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]


def price(fn: Any, in_specs: Any, completion: Completion = "shardy", **options: Any) -> Evaluation:
    return evaluate(
        fn, *SHAPES, mesh=MESH.shape, hardware=H100, in_specs=in_specs, completion=completion, for_grad=False, **options
    )


def test_a_constraint_that_says_what_holds_anyway_is_free() -> None:
    def constrained(x: Any, up: Any, down: Any) -> Any:
        sharding = NamedSharding(devices.abstract(MESH), P("data", "model"))
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up), sharding)
        return jnp.sum(jnp.square(jnp.tanh(hidden) @ down))

    specs = (P("data"), P(None, "model"), P("model"))
    free = price(two_layers, specs)
    assert price(constrained, specs).cost == pytest.approx(free.cost, rel=1e-6)
    assert {(c.kind, c.axes) for c in free.record.collectives} == {
        ("all-reduce", ("data",)),
        ("all-reduce", ("model",)),
    }


@pytest.mark.parametrize("pointwise", [jax.lax.square, jax.lax.erf, jnp.arcsinh])
def test_layouts_pass_operations_that_the_compiler_expands(pointwise: Any) -> None:
    """They lower to CHLO, whose rules Shardy by itself does not know."""
    found = price(lambda x, up, down: pointwise(x @ up) @ down, (P("data"), P(None, "model"), P("model")))
    assert [(c.kind, c.axes) for c in found.record.collectives] == [("all-reduce", ("model",))]


def test_a_constraint_decides_what_it_pins() -> None:
    def constrained(x: Any, up: Any, down: Any) -> Any:
        sharding = NamedSharding(devices.abstract(MESH), P(P.UNCONSTRAINED, None))
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up), sharding)
        return jnp.sum(jnp.square(jnp.tanh(hidden) @ down))

    found = price(constrained, (P("data"), P(None, "model"), P()))
    assert moved(found, "all-gather", "model") == BATCH // 2 * HIDDEN * F32


def test_open_arguments_lie_where_propagation_puts_them() -> None:
    found = price(two_layers, (P("data"), P(None, "model"), AUTO))
    assert [leaf.spec for leaf in found.record.inputs] == [P("data"), P(None, "model"), P("model")]


def test_constraints_hold_in_the_gradient_of_a_forward_function() -> None:
    def constrained(x: Any, up: Any, down: Any) -> Any:
        sharding = NamedSharding(devices.abstract(MESH), P("data", "model"))
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up), sharding)
        return jnp.sum(jnp.square(jnp.tanh(hidden) @ down))

    options: dict[str, Any] = {"mesh": MESH.shape, "hardware": H100, "in_specs": P(), "for_grad": (1, 2)}
    found = evaluate(constrained, *SHAPES, **options)
    kept = [path for path, specs in found.record.pins.made.items() if specs == (P("data", "model"),)]
    assert len(kept) == 2  # forward, and its cotangent
    assert found.cost != evaluate(two_layers, *SHAPES, **options).cost


@pytest.mark.parametrize("completion", ["best", "shardy"])
def test_a_layout_that_does_not_fit_is_priced_and_says_so(completion: Completion) -> None:
    specs = (P("data"), P(None, "model"), P("model"))
    roomy, tight = price(two_layers, specs, completion), price(two_layers, specs, completion, memory=2**20)
    assert roomy.fits
    assert not tight.fits
    assert tight.record.memory.limit_bytes == 2**20
    assert tight.cost == roomy.cost
    assert "does not fit" in repr(tight)


def test_names_change_nothing_of_what_shardy_decides() -> None:
    found = evaluated("mlp-1k", "fsdp_megatron", "shardy")
    fn, in_specs, out_specs = hand("mlp-1k", "fsdp_megatron")
    shardings = jax.tree.map(lambda spec: NamedSharding(devices.abstract(MESH), spec), (in_specs, out_specs))
    jitted = jax.jit(fn, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=0)
    written = passes.propagate(jitted.trace(*model("mlp-1k")[1]).lower(lowering_platforms=("cuda",)))
    named = passes.propagate(annotated(found.space.priced, MESH, found.annotations).lower(lowering_platforms=("cuda",)))
    assert named.arguments == written.arguments
    assert named.results == written.results
    computed = [[(v.op, v.shape, v.layout) for v in p.values if v.op.startswith("stablehlo")] for p in (named, written)]
    assert computed[0] == computed[1]


@pytest.mark.parametrize(
    ("dims", "shape", "nearest", "exact"),
    [
        ((("data",), ("model",)), (8, 8), "[data,model]", True),
        ((("data", "model"), ()), (8, 8), "[data·model,-]", True),
        ((("data", "model"), ()), (6, 8), "[data,-]", False),
        ((("model", "data"), ()), (8, 8), "[data·model,-]", False),
        ((("model:(1)2",), ("data",)), (8, 8), "[-,data]", False),
        ((("one",), ("data",)), (8, 8), "[-,data]", True),
    ],
)
def test_the_nearest_code_of_a_layout(dims: Any, shape: tuple[int, ...], nearest: str, *, exact: bool) -> None:
    code, found = code_near(Layout(dims), shape, MESH)
    assert str(layout_of(code, len(shape), MESH)) == nearest
    assert found == exact


class DearAllReduce:
    """A machine on which a reduce-scatter and an all-gather together cost less than an all-reduce."""

    overlap, tiled = 1.0, False
    unscattered_axes = slice_axes = frozenset[str]()

    def collective_s(self, kind: str, axes: tuple[str, ...], nbytes: ArrayLike) -> NDArray[np.float64]:
        return np.full(np.shape(nbytes), 10.0 if kind == "all-reduce" else 1.0)

    def hbm_s(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        raise AssertionError(nbytes)


@pytest.mark.parametrize(
    ("target", "pinned", "left"),
    [
        ((WHOLE, WHOLE), ["reduce-scatter", "all-gather"], ["all-reduce"]),
        ((0, WHOLE), ["reduce-scatter", "all-gather"], ["reduce-scatter", "all-reduce"]),
        ((0, 0), ["reduce-scatter"], ["reduce-scatter"]),
    ],
)
def test_the_partitioner_never_scatters_a_sum_to_gather_it_again(
    target: tuple[int, int], pinned: list[str], left: list[str]
) -> None:
    aval = Aval((WIDTH, WIDTH), np.dtype(np.float32))
    pending, wanted = (int(encode(np.array(row, np.int8), 2)) for row in ((SUM, SUM), target))
    for resharder, kinds in (
        (Resharder(MESH, DearAllReduce()), pinned),
        (Resharder(MESH, DearAllReduce(), pinned=False), left),
    ):
        steps = resharder.path(aval, pending, wanted, bucket=0)
        assert [step.kind for step in steps] == kinds
        seconds = sum(10.0 if kind == "all-reduce" else 1.0 for kind in kinds if kind != "slice")
        assert resharder.cost_ps(aval, np.array([pending]), np.array([wanted]), bucket=0) * PS == seconds


def test_the_partitioner_moves_a_value_on_the_smaller_side_of_a_cast() -> None:
    """XLA's collective quantizer: what is moved and then cast to a smaller type is cast first."""
    found = evaluate(
        lambda x: x.astype(jnp.bfloat16),
        jax.ShapeDtypeStruct((256, 512), jnp.float32),
        mesh={"data": 8},
        hardware=H100,
        in_specs=(P("data"),),
        out_specs=P(None, "data"),
    )
    assert [(c.kind, c.nbytes) for c in found.record.collectives] == [("all-to-all", 256 * 512 * BF16 // 8)]


@pytest.mark.parametrize(("hardware", "forward", "backward"), [(H100, 2, 2), ("tpu-v5e:2x4", 2, 4)])
def test_only_the_gpu_compiler_moves_a_value_before_a_cast_that_widens(
    hardware: str, forward: int, backward: int
) -> None:
    """Tokens' vectors are cast and moved; their gradients, on TPU, too (llama3-8b by FSDP, libtpu 0.0.52)."""

    def gradient(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            x = jax.lax.with_sharding_constraint(table[tokens].astype(jnp.bfloat16), P("data"))
            return jnp.sum(jnp.sin(x).astype(jnp.float32))

        return jax.grad(loss)(table)

    found = evaluate(
        gradient,
        jax.ShapeDtypeStruct((4096, 512), jnp.float32),
        jax.ShapeDtypeStruct((64, 32), jnp.int32),
        mesh={"data": 8},
        hardware=hardware,
        in_specs=(P(None, "data"), P("data")),
        out_specs=P(None, "data"),
    )
    moved = sorted(c.nbytes for c in found.record.collectives if c.kind == "all-to-all")
    assert moved == [64 * 32 * 512 * itemsize // 8 for itemsize in (forward, backward)]


def test_the_partitioner_may_do_what_no_plan_asks_for() -> None:
    """A sum over two axes that is no contraction's ends split along one of them: no plan has that, hand layouts do."""
    found = evaluate(
        lambda x: x.sum(0).reshape(1024, 64),
        jax.ShapeDtypeStruct((8, 1024, 8, 8), jnp.float32),
        mesh={"replica": 2, "data": 4},
        hardware=H100,
        in_specs=(P(("replica", "data")),),
        out_specs=P(None, "data"),
    )
    kinds = {c.kind for c in found.record.collectives}
    assert kinds <= {"all-reduce", "reduce-scatter"}
    assert kinds


def test_the_partitioner_casts_again_for_every_use() -> None:
    """Of what a cast widens, the narrow side is moved to a use that lies elsewhere, and cast there."""

    def used_twice(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return 2 * wide, wide

    found = evaluate(
        used_twice,
        jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),
        mesh={"data": 8},
        hardware=H100,
        in_specs=(P("data"),),
        out_specs=(P("data"), P(None, "data")),
    )
    assert [(c.kind, c.nbytes) for c in found.record.collectives] == [("all-to-all", 256 * 512 * BF16 // 8)]
