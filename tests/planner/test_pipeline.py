"""One way from a call to its plan: a program is traced once, stages are told, what they made can be written."""

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import garbage
from autoshard.api.options import Options
from autoshard.api.planning import plan_request
from autoshard.backends import devices
from autoshard.backends.devices import Target
from autoshard.ir.mesh import MeshAxes
from autoshard.planner import dump
from autoshard.planner.program import bind
from autoshard.planner.request import RequestOptions, request_of, requests_of
from autoshard.planner.search_space import build_search_space
from autoshard.planner.stages import DUMP, Stage, observed
from autoshard.problem import iopddl
from autoshard.problem.formulation import formulate
from autoshard.solver.evaluate import evaluate
from tests.programs import GPUS

W, X = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
MESHES: list[Any] = [{"data": 8}, {"data": 2, "model": 4}, {"data": 4, "model": 2}]
plan = partial(autoshard.plan, hardware=GPUS, constraints="all")


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.count = fn, 0

    def __call__(self, w: Any, x: Any) -> Any:
        self.count += 1
        return self.fn(w, x)


def test_a_function_is_traced_once_for_all_meshes() -> None:
    fn = Counted(loss)
    several = plan(fn, W, X, mesh=MESHES)
    assert fn.count == 1
    alone = [plan(loss, W, X, mesh=mesh) for mesh in MESHES]
    assert several.cost == min(one.cost for one in alone)
    assert several.record.digest == alone[0].record.digest


@pytest.mark.parametrize("own", [(700, 10, 10), (10**6, 10, 10), (0, 10, 10)])
def test_garbage_is_collected_rarely_and_the_callers_thresholds_come_back(own: tuple[int, int, int]) -> None:
    met: set[tuple[int, int, int]] = set()

    def looking(w: Any, x: Any) -> Any:
        met.add(gc.get_threshold())
        return loss(w, x)

    before = gc.get_threshold()
    try:
        gc.set_threshold(*own)
        with observed(lambda stage: met.add(gc.get_threshold())):
            plan(looking, W, X, mesh=MESHES[0])
            with pytest.raises(autoshard.SpecError):
                plan(loss, W, X, mesh=MESHES[0], unknown="guess")
        assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)
    assert met == {garbage.RARE if own[0] == 700 else own}


def test_a_plan_on_a_mesh_that_was_not_traced_on_runs() -> None:
    def scanned(w: Any, x: Any) -> Any:
        def layer(carry: Any, w: Any) -> tuple[Any, Any]:
            return jax.nn.one_hot(jnp.argmax(carry @ w, 1), w.shape[1]) + carry, carry.sum()

        return jax.lax.scan(layer, x, w)

    w, x = jax.random.normal(jax.random.key(0), (3, 8, 8)), jax.random.normal(jax.random.key(1), (16, 8))
    call = bind(scanned, (w, x), {})
    first, second = (call.program(MeshAxes.of(mesh)) for mesh in MESHES[:2])
    assert first is second
    (request,) = requests_of(call, devices.place(MESHES[0], "cpu:8"))
    (other,) = requests_of(call, devices.place(MESHES[1], "cpu:8"), RequestOptions(pins={"x": P(None, "model")}))
    assert request.program is other.program
    made = plan_request(other, Options())
    for a, b in zip(jax.tree.leaves(made.jit()(w, x)), jax.tree.leaves(scanned(w, x)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)


def constrained(w: Any, x: Any) -> Any:
    return loss(w, jax.lax.with_sharding_constraint(x, P("data")))


def in_manual_part(w: Any, x: Any) -> Any:
    double = jax.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data"))
    return loss(w, double(x))


@pytest.mark.parametrize("fn", [constrained, in_manual_part, autoshard.accumulate(loss, steps=2, parts="data")])
def test_a_function_that_depends_on_the_mesh_is_traced_on_each(fn: Callable[..., Any]) -> None:
    counted = Counted(fn)
    call = bind(counted, (W, X), {})
    programs = [call.program(MeshAxes.of(mesh)) for mesh in (*MESHES, *MESHES)]
    assert programs[:3] == programs[3:]
    assert len(set(programs)) == counted.count == 3


def test_a_function_whose_file_reads_the_mesh_is_traced_on_each(tmp_path: Path) -> None:
    path = tmp_path / "reads.py"
    path.write_text("import jax\ndef fn(w, x): return (x @ w) * len(jax.sharding.get_abstract_mesh().axis_names)\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    call = bind(names["fn"], (W, X), {})
    assert len({call.program(MeshAxes.of(mesh)).traced.digest for mesh in MESHES[:2]}) == 2


def test_each_number_of_parts_of_an_accumulation_is_traced_once() -> None:
    fn = Counted(autoshard.accumulate(loss, steps=2))
    call = bind(fn, (W, X), {})
    titles = [request.title for mesh in MESHES for request in requests_of(call, target(mesh))]
    assert len(titles) == 2 + 4 + 4  # one part; 8 of them; 2, 4 and 8
    assert fn.count == 4
    assert titles[1] == f"{call.name}, accumulated in 8 parts, on data=8 (h100:1x8)"


def target(mesh: Any) -> Target:
    return devices.place(mesh, GPUS)


def test_a_search_traces_its_program_once() -> None:
    fn = Counted(loss)
    found = autoshard.search(fn, W, X, hardware="cpu:8", processes=1)
    assert len(found.rows) > 2
    assert fn.count == 1


def test_stages_are_told_in_order_with_what_they_made() -> None:
    told: list[Stage] = []
    with observed(told.append):
        made = autoshard.plan(loss, W, X, mesh=MESHES[1], hardware=GPUS)
    autoshard.plan(loss, W, X, mesh=MESHES[1], hardware=GPUS)  # out of the context
    names = [stage.name for stage in told]
    assert names == ["trace", "graph", "strategies", "price", "solve", "record", "constraints"]
    assert {stage.of for stage in told} == {"loss on data=2 × model=4 (h100:1x8)"}
    by_name = {stage.name: stage.made for stage in told}
    assert by_name["trace"] is made.traced
    assert by_name["constraints"].pins == made.record.pins
    seconds = {stage.name: stage.seconds for stage in told if stage.name != "record"}
    assert made.planned.seconds == seconds


def test_what_stages_made_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP, str(tmp_path))
    made = plan(loss, W, X, mesh=MESHES[1])
    (folder,) = tmp_path.iterdir()
    assert folder.name == "loss-on-data=2-×-model=4-h100-1x8"
    assert dump.__doc__ is not None
    assert all(path.name in dump.__doc__ for path in folder.iterdir())
    assert len([*folder.iterdir()]) == 6
    assert "dot_general" in (folder / "1-program.txt").read_text()
    assert "dot_general" in (folder / "2-graph.txt").read_text()
    assert "choices" in (folder / "3-decisions.txt").read_text()
    solution = json.loads((folder / "5-solution.json").read_text())
    problem = iopddl.read(folder / "4-problem.json.gz")
    objective = evaluate(problem, jnp.asarray(solution["choice"]).__array__()).objective
    assert objective is not None
    assert objective * problem.unit_s == pytest.approx(solution["objective_s"])
    written = autoshard.load(folder / "6-plan.json").record
    assert (written.inputs, written.cost) == (made.record.inputs, made.record.cost)


def test_a_space_that_is_repriced_is_that_of_a_request_on_the_other_machine() -> None:
    options = RequestOptions(pins={"w": P("model")}, for_grad=True)
    here = build_search_space(request_of(bind(loss, (W, X), {}), target(MESHES[1]), options))
    there = here.request.target.hardware.replaced("varied", domain__one_way_bytes_per_s=1e9)
    machine = there.place(here.request.target.axes.shape)
    again = here.repriced(machine)
    fresh = build_search_space(request_of(bind(loss, (W, X), {}), devices.place(MESHES[1], there), options))
    assert again.decisions.graph is here.decisions.graph
    for one, other in zip(again.decisions.nodes, fresh.decisions.nodes, strict=True):
        assert (one.cost_ps == other.cost_ps).all()
    costs = [formulate(s.decisions, s.resharder, memory_bytes=None).problem.edge_cost for s in (here, again, fresh)]
    assert (costs[1] == costs[2]).all()
    assert (costs[0] != costs[1]).any()


@pytest.mark.parametrize("hardware", ["h100:1x8", "tpu-v5e:2x4"])
def test_a_weight_that_is_used_again_is_reduced_once_over_devices(hardware: str) -> None:
    """The gradients of three uses, in two orders of dimensions, are transposed and added before that."""

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T)) + jnp.mean(jnp.tanh(y @ w))

        return w - 0.1 * jax.grad(loss)(w)

    w, x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1024, 2048), (8192, 1024), (8192, 1024)))
    split = (P("data"), P("data"), P("data"))
    plan = autoshard.plan(step, w, x, y, mesh={"data": 8}, hardware=hardware, in_shardings=split, donate_argnums=0)
    assert [c.kind for c in plan.record.collectives] == ["all-gather", "reduce-scatter"]
