"""Explain: the runner-up is the best plan without the choice; flips, divisibility, remedies, diff."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.cli.explain import sizes
from autoshard.errors import PlanMismatchError, SpecError
from autoshard.explain import text
from autoshard.explain.asked import choice_text
from autoshard.explain.diff import diff
from autoshard.explain.runner_up import blocked, explain, unexplained
from autoshard.explain.sensitivity import UnprovenError, flip, lies
from autoshard.explore.remedies import remedies
from autoshard.explore.trial import Task
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import Leaf
from autoshard.solver import Status


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def doubled(x: jax.Array) -> jax.Array:
    return x + x


ARGS = (jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((256, 512), jnp.float32))
ON = {"mesh": {"data": 2, "model": 2}, "hardware": "h100:1x4"}


def made(**options: object) -> PlanningResult:
    plan = autoshard.plan(step, *ARGS, for_grad=False, constraints="all", rel_gap=0.0, **{**ON, **options})  # pyright: ignore[reportArgumentType]
    return plan.planned


@pytest.fixture(scope="module")
def planned() -> PlanningResult:
    return made()


def test_the_runner_up_is_the_best_of_all_other_pins(planned: PlanningResult) -> None:
    (found,) = explain(planned, "w")
    assert found.runner_up is not None
    mine = planned.record.inputs[0].spec
    every = [P(), P("data"), P("model"), P(("data", "model")), P(None, "data"), P(None, "model")]
    every += [P(None, ("data", "model")), P("data", "model"), P("model", "data")]
    others = [made(pins={"w": spec}).record.cost.step_s for spec in every if spec != mine]
    assert found.runner_up.step_s == pytest.approx(min(others), rel=1e-6)
    assert found.step_s <= found.runner_up.step_s
    assert found.choices == len(every)


def test_a_line_is_explained_by_its_equation(planned: PlanningResult) -> None:
    line = step.__code__.co_firstlineno + 1
    found = explain(planned, at=f"test_explain.py:{line}")
    assert found[0].kind == "equation"
    assert "->" in found[0].layout


def test_what_is_not_there_is_named(planned: PlanningResult) -> None:
    with pytest.raises(SpecError, match=r"no input matches '\*\*.wq'; there are \*\*.NAME of: w, x"):
        explain(planned, "**.wq")
    with pytest.raises(SpecError, match=r"lines with decisions: test_explain\.py"):
        explain(planned, at="nowhere.py:1")
    with pytest.raises(SpecError, match="say what to explain"):
        explain(planned)


def test_text_says_how_it_is_read_and_what_it_leaves_out(planned: PlanningResult) -> None:
    line = step.__code__.co_firstlineno + 1
    found = explain(planned, at=f"test_explain.py:{line}")
    written = text.text(found, unexplained=unexplained(planned, at=f"test_explain.py:{line}"))
    assert written.startswith(f"dot_general at test_explain.py:{line} (step)")
    assert "a -> b" in written
    assert "more decisions" not in written
    assert "3 more decisions there" in text.text(found, unexplained=3)
    assert "a -> b" not in text.text(explain(planned, "x")[:0])


def test_more_decisions_than_are_explained_are_counted() -> None:
    def chain(w: list[jax.Array], x: jax.Array) -> jax.Array:
        return x @ w[0] @ w[1] @ w[2] @ w[3] @ w[4] @ w[5]

    widths = (8, 16, 24, 32, 40, 48, 56)
    args = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise(widths)], jax.ShapeDtypeStruct((16, 8), "f4")
    plan = autoshard.plan(chain, *args, mesh={"data": 2}, hardware="cpu:2", for_grad=False, constraints="all")
    line = f"test_explain.py:{chain.__code__.co_firstlineno + 1}"
    assert len(explain(plan.planned, at=line)) == 4
    assert unexplained(plan.planned, at=line) == 2
    assert "2 more decisions there" in plan.explain(at=line)


def test_text_and_json_say_the_same(planned: PlanningResult) -> None:
    found = explain(planned, "x")
    written = text.to_json(found)["decisions"][0]
    assert written["layout"] in text.text(found)
    assert written["runner_up"]["layout"] in text.text(found)


@pytest.mark.parametrize(("turn", "above"), [(30.0, True), (3.0, False)])
def test_a_flip_is_found_within_a_few_percent(turn: float, *, above: bool) -> None:
    found = flip("x", 10.0, "a", lambda v: "b" if (v > turn) == above and v != 10.0 else "a", (10 / 16, 160.0))
    assert found.at == pytest.approx(turn, rel=0.05)
    assert found.layout == "b"


def test_what_never_turns_has_no_flip() -> None:
    found = flip("x", 10.0, "a", lambda _: "a", (5.0, 20.0))
    assert found.at is None


def test_sizes_turn_at_whole_numbers_and_end_where_there_is_no_program() -> None:
    tried: list[float] = []

    def layout_at(size: float) -> str:
        tried.append(size)
        if size > 300:
            raise SpecError("longer than the context")
        return "b" if size > 100 else "a"

    found = flip("batch", 32, "a", layout_at, (4, 512), whole=8)
    assert found.at == 104
    assert all(size == int(size) for size in tried)
    none = flip("batch", 32, "a", lambda size: "a" if size <= 64 else layout_at(301), (4, 512), whole=8)
    assert (none.at, none.range) == (None, (4, 64))


def test_a_layout_that_ties_is_no_turn() -> None:
    plan = autoshard.plan(
        doubled, ARGS[1], for_grad=False, constraints="all", rel_gap=0.0, mesh={"data": 2}, hardware="h100:1x2"
    )
    planned = plan.planned
    assert planned is not None
    (mine,) = explain(planned, "x")
    assert mine.runner_up is not None
    assert mine.runner_up.step_s == pytest.approx(mine.step_s)
    node = planned.assignment.decisions.inputs[0]
    size = len(planned.assignment.decisions.nodes[node])
    layouts = {choice_text(planned.assignment, node, k) for k in range(size)}
    assert {mine.layout, mine.runner_up.layout} <= layouts
    for layout in (mine.layout, mine.runner_up.layout):
        assert lies(lambda: planned, "x", None, layout) == layout


def test_a_layout_that_cannot_be_kept_is_a_turn() -> None:
    pinned = made(pins={"w": P(("data", "model"))})
    assert lies(lambda: pinned, "w", None, "[-,-]") == "[data·model,-]"
    assert lies(lambda: pinned, "w", None, "[data·model,-]") == "[data·model,-]"


def test_what_is_not_proven_is_no_turn_and_ends_the_range() -> None:
    pinned = made(pins={"w": P(("data", "model"))})
    solution = replace(pinned.solution, status=Status.FEASIBLE, bound=pinned.solution.objective // 2)
    with pytest.raises(UnprovenError, match=r"within 50\.0% of its bound"):
        lies(lambda: replace(pinned, solution=solution), "w", None, "[-,-]")

    def layout_at(value: float) -> str:
        if value > 100:
            raise UnprovenError("too far from its bound")
        return "a"

    found = flip("rate", 32.0, "a", layout_at, (8.0, 512.0))
    assert (found.at, found.range) == (None, (8.0, 64.0))


def test_a_plan_looks_for_sizes_that_somebody_plans() -> None:
    def plan_at(batch: int) -> autoshard.SolvedPlan:
        x = jax.ShapeDtypeStruct((batch, 512), jnp.float32)
        return autoshard.plan(
            step, ARGS[0], x, for_grad=False, constraints="all", mesh={"model": 2}, hardware="h100:1x2"
        )

    said = plan_at(256).explain("w", vary={"batch": (256, plan_at)})
    (row,) = (line for line in said.splitlines() if line.split()[:1] == ["batch"])
    assert "256" in row


def test_builders_say_which_sizes_they_take() -> None:
    fn, args = models.build("tiny-llama", batch=16)
    planned = autoshard.plan(fn, *args, mesh={"data": 2}, hardware="h100:1x2", constraints="all").planned
    assert planned is not None
    asked: list[str] = []

    def plan_at(assignment: str) -> PlanningResult:
        asked.append(assignment)
        raise ValueError("a sequence of 64 is longer than the context of 32")

    found = sizes("models:tiny_llama", {"batch": 16}, planned, plan_at)
    assert {name: now for name, (now, _) in found.items()} == {"batch": 16, "sequence": 32}
    with pytest.raises(SpecError, match="longer than the context"):
        found["sequence"][1](64)
    assert asked == ["sequence=64"]


def test_undivided_dimensions_and_their_ways_out() -> None:
    leaf = Leaf(path="params['wk']", shape=(64, 6, 8), dtype="float32", spec=P())
    (found,) = blocked([leaf], MeshAxes.of({"data": 2, "model": 4}))
    assert (found.dim, found.size, found.axis, found.padded, found.divides) == (1, 6, "model", 8, 2)


def test_remedies_fit() -> None:
    task = Task(
        target="models:linear_tiny",
        keywords={"compute_dtype": "float32", "width": 64, "layers": 2, "batch": 4096},
        memory=700_000,
    )
    found = remedies(task, {"data": 2}, "cpu:2")
    assert found
    assert all(way.peak_bytes <= 700_000 for way in found)
    assert any(way.change.startswith("--set batch=") for way in found)


def test_diff_of_a_plan_with_itself_is_empty(planned: PlanningResult) -> None:
    found = diff(planned.record, planned.record)
    assert not found.leaves
    assert not found.traffic
    assert "alike" in str(found)


def test_diff_names_what_moved(planned: PlanningResult) -> None:
    mine = planned.record.inputs[0].spec
    other = made(pins={"w": P("data", "model") if mine != P("data", "model") else P()}).record
    found = diff(planned.record, other)
    (change,) = [leaf for leaf in found.leaves if leaf.path == "w"]
    assert change.before != change.after
    total = sum(t.after_bytes - t.before_bytes for t in found.traffic)
    mine_bytes, other_bytes = (sum(c.nbytes * c.trips for c in r.collectives) for r in (planned.record, other))
    assert total == other_bytes - mine_bytes
    assert np.sign(other.cost.step_s - planned.record.cost.step_s) >= 0
    assert found.to_json()["after"]["step_s"] == other.cost.step_s
    heads = next(line for line in str(found).splitlines() if line.split()[:1] == ["collective"])
    assert heads.split()[2:] == ["before", "after"] * 2  # below: bytes bytes time time


def test_diff_says_how_many_paths_it_leaves_out(planned: PlanningResult) -> None:
    (leaf, *_), record = planned.record.inputs, planned.record
    more = replace(record, inputs=(*record.inputs, *(replace(leaf, path=f"more{i}") for i in range(11))))
    assert "3 more have: --json shows all" in str(diff(record, more))
    assert "more have" not in str(diff(record, replace(more, inputs=more.inputs[:-3])))


def test_diff_of_two_programs_says_so(planned: PlanningResult) -> None:
    elsewhere = replace(planned.record, mesh=MeshAxes.of({"data": 4, "model": 2}), device_order=tuple(range(8)))
    assert "the program is the same, on another mesh" in str(diff(planned.record, elsewhere))
    assert "different programs" in str(diff(planned.record, replace(planned.record, digest="another")))


def test_a_plan_explains_itself_and_a_file_cannot(tmp_path: Path) -> None:
    plan = autoshard.plan(step, *ARGS, for_grad=False, constraints="all", **ON)  # pyright: ignore[reportArgumentType]
    assert "otherwise" in plan.explain("w")
    assert plan.record.hardware in plan.to_html()
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="a plan file holds no alternatives: plan again"):
        autoshard.load(tmp_path / "plan.json").explain("w")  # pyright: ignore[reportAttributeAccessIssue]


def test_flips_of_a_plan_name_links_and_memory() -> None:
    plan = autoshard.plan(step, *ARGS, for_grad=False, constraints="all", mesh={"model": 2}, hardware="h100:1x2")
    said = plan.explain("w", flips=True)
    assert "domain.one_way_bytes_per_s" in said
    assert "memory_bytes" in said
