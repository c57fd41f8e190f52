"""The compiler in the loop: other plans are found, compiled and compared; the shortest schedule wins."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard import Evaluation, LoadedPlan, Plan, SolvedPlan
from autoshard.api.compiler_minimal_constraints import classes
from autoshard.api.options import Options
from autoshard.api.planning import requests_of
from autoshard.api.refine import Candidate, Entered, adopted, alternatives, describe_refinement, refined
from autoshard.backends import devices
from autoshard.backends.known_compilers import named
from autoshard.errors import CompileError, CompilerFlagError, PlanMismatchError, SpecError
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.request import PlanRequest
from autoshard.planner.store import misfits
from autoshard.verification.result import Verification
from models import layouts

OPTIONS: dict[str, Any] = {
    "mesh": {"data": 2, "model": 4},
    "hardware": "cpu:8",
    "donate_argnums": 0,
    "rel_gap": 1e-2,
    "constraints": "all",
}


SIZES: dict[str, Any] = {"layers": 2, "width": 256, "hidden": 512, "batch": 128, "compute_dtype": "float32"}


def planned(**more: Any) -> SolvedPlan:
    step, args = models.build("mlp-1k", **SIZES)
    return autoshard.plan(step, *args, **{**OPTIONS, **more})


@pytest.fixture(scope="module")
def plan() -> SolvedPlan:
    return planned()


@pytest.fixture(scope="module")
def by_hand() -> Evaluation:
    """Megatron's layout, whose constraints stand in the program."""
    step, args = models.build("mlp-1k", **SIZES)
    layout = layouts.find("mlp-1k", "dp_megatron")
    on: Any = devices.abstract(MeshAxes.of(OPTIONS["mesh"]))
    state = layout.specs(args[0])[0]
    return autoshard.evaluate(
        layouts.constrained(step, layout.activation, on),
        *args,
        in_specs=layout.specs(*args),
        out_specs=(state, P()),
        mesh=OPTIONS["mesh"],
        hardware=OPTIONS["hardware"],
        donate_argnums=0,
    )


@pytest.fixture(scope="module")
def found(plan: SolvedPlan) -> Verification:
    return plan.verify("cpu")


@pytest.fixture(scope="module")
def chosen() -> SolvedPlan:
    return planned(refine="cpu", candidates=3)


def test_alternatives_are_other_plans_none_better_than_the_optimum(plan: SolvedPlan) -> None:
    found = [inputs for _, inputs in alternatives(plan.planned, 2)]
    own = {i: leaf.spec for i, leaf in enumerate(plan.record.inputs)}
    assert len(found) == 2
    assert own not in found
    assert found[0] != found[1]


def test_the_shortest_schedule_wins_and_says_so(plan: SolvedPlan, found: Verification, chosen: SolvedPlan) -> None:
    note = chosen.record.notes[-1]
    assert note.startswith("refined by cpu: the schedules of 3 plans take ")
    assert note.count("predicted") >= 3
    first, best = found.timeline, chosen.verify("cpu").timeline
    assert first is not None
    assert best is not None
    assert best.step_s <= first.step_s
    assert ("the predicted optimum stays" in note) == (chosen.record.inputs == plan.record.inputs)
    assert chosen.record.asked == plan.record.asked


def test_a_refined_plan_runs(chosen: SolvedPlan) -> None:
    step, args = models.build("mlp-1k", **SIZES)
    values = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), args)
    expected = jax.tree.leaves(jax.jit(step)(*values))
    found = jax.tree.leaves(chosen.jit()(*jax.tree.map(jnp.copy, values)))
    for a, b in zip(expected, found, strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("compiler", "shortest"), [("gpu", 1), ("tpu", 0)])
@pytest.mark.parametrize(("step_s", "taken"), [(1e-9, True), (9.0, False)])
def test_a_flag_that_shortens_the_schedule_is_the_plans(
    plan: SolvedPlan,
    found: Verification,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    shortest: int,
    step_s: float,
    taken: bool,  # noqa: FBT001
) -> None:
    timeline, tried = found.timeline, named(compiler).scheduling_flags
    assert timeline is not None
    others = [
        replace(found, timeline=replace(timeline, step_s=step_s * (1 + abs(i - shortest)))) for i in range(len(tried))
    ]
    monkeypatch.setattr(
        SolvedPlan,
        "verify",
        lambda self, compiler, compiler_options=None: (
            others[tried.index(compiler_options)] if compiler_options else found
        ),
    )
    entered = Entered(first=plan, again=lambda inputs: plan, elsewhere=[], also={"mine": plan})
    made = refined(entered, compiler=compiler, count=1)
    assert made.compiler_options == ({**plan.compiler_options, **tried[shortest]} if taken else plan.compiler_options)
    assert ("a compiler option of the plan" in made.record.notes[-1]) == taken
    assert "the schedules of 2 plans" in " ".join(made.record.notes)


def test_a_flag_that_the_compiler_does_not_have_is_passed_over(
    plan: SolvedPlan, found: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA:GPU of JAX 0.12 has no pipelined all-gathers."""
    assert found.timeline is not None
    shorter = replace(found, timeline=replace(found.timeline, step_s=1e-9))

    def verify(self: SolvedPlan, compiler: str, compiler_options: Mapping[str, Any] | None = None) -> Verification:
        if compiler_options and len(compiler_options) > 1:
            raise CompilerFlagError("compiling failed: INVALID_ARGUMENT: No such compile option: 'xla_gpu_enable_what'")
        return shorter if compiler_options else found

    monkeypatch.setattr(SolvedPlan, "verify", verify)
    entered = Entered(first=plan, again=lambda inputs: plan, elsewhere=[], also={"mine": plan})
    made = refined(entered, compiler="gpu", count=1)
    assert made.compiler_options == {**plan.compiler_options, **named("gpu").scheduling_flags[0]}

    def broken(self: SolvedPlan, compiler: str, compiler_options: Mapping[str, Any] | None = None) -> Verification:
        if compiler_options:
            raise CompileError("compiling failed: INTERNAL")
        return found

    monkeypatch.setattr(SolvedPlan, "verify", broken)
    with pytest.raises(CompileError, match="INTERNAL"):
        refined(entered, compiler="gpu", count=1)


def test_a_plan_that_the_compiler_cannot_fit_drops_out(plan: SolvedPlan, found: Verification) -> None:
    tight = replace(plan.record, memory=replace(plan.record.memory, limit_bytes=1))
    unfit = Candidate(plan=plan._with(tight), found=found)
    fits = Candidate(plan=plan, found=found)
    assert not unfit.fits
    assert fits.fits
    assert "does not fit: the compiler needs" in describe_refinement([unfit, fits], fits)


def test_the_reason_names_what_grew(plan: SolvedPlan, found: Verification) -> None:
    assert found.timeline is not None
    slow = replace(found, timeline=replace(found.timeline, step_s=9.0, exposed_s=8.0))
    first, other = Candidate(plan=plan, found=slow), Candidate(plan=plan, found=found, name="by hand")
    assert "(predicted " in describe_refinement([first, other], other)
    assert ", by hand)" in describe_refinement([first, other], other)
    assert "the order changed by exposed communication: the predicted optimum has 8 s" in describe_refinement(
        [first, other], other
    )


@pytest.fixture(scope="module")
def question() -> PlanRequest:
    step, args = models.build("mlp-1k", **SIZES)
    asked = {key: OPTIONS[key] for key in ("mesh", "hardware", "donate_argnums")}
    return requests_of(step, args, {}, Options(**asked))[0]


def test_a_hand_written_layout_becomes_a_plan_of_the_program_without_constraints(
    by_hand: Evaluation, question: PlanRequest, tmp_path: Path
) -> None:
    made = adopted("by hand", by_hand, [question])
    one, other = made.verify("cpu"), by_hand.verify("cpu")
    assert one.timeline is not None
    assert other.timeline is not None
    assert one.timeline.step_s == pytest.approx(other.timeline.step_s)
    assert one.by_kind() == other.by_kind()
    assert not misfits(made.record, question)
    made.save(tmp_path / "plan.json")
    step, args = models.build("mlp-1k", **SIZES)
    values = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), args)
    expected = jax.tree.leaves(jax.jit(step)(*values))
    bound = autoshard.load(tmp_path / "plan.json").bind(step, *args)
    for a, b in zip(expected, jax.tree.leaves(bound.jit()(*values)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_hand_written_layout_says_that_it_holds_no_alternatives(by_hand: Evaluation, question: PlanRequest) -> None:
    made = adopted("by hand", by_hand, [question])
    with pytest.raises(
        PlanMismatchError, match=r"the layout also='by hand', which holds no alternatives: plan without"
    ):
        made.explain("**")
    assert made.seconds == {}
    assert [*classes(made)]  # constraints are thinned one by one


def test_other_meshes_and_hand_written_layouts_enter(by_hand: Evaluation) -> None:
    more = {"mesh": [{"data": 2, "model": 4}, {"data": 8}], "refine": "cpu", "candidates": 2}
    note = planned(**more, also={"by hand": by_hand}).record.notes[-1]
    assert note.startswith("refined by cpu: the schedules of 3 plans take ")
    assert re.search(r"\(predicted [^()]*, by hand\)", note)


def test_plans_on_other_meshes_are_candidates_in_the_order_of_their_predictions(plan: SolvedPlan) -> None:
    slow = replace(plan.record, mesh=MeshAxes.of({"data": 8}), cost=replace(plan.record.cost, step_s=9.0))
    fast = replace(plan.record, mesh=MeshAxes.of({"model": 8}), cost=replace(plan.record.cost, step_s=0.0))
    elsewhere = [plan._with(record) for record in (slow, fast)]
    entered = Entered(first=plan, again=lambda inputs: plan, elsewhere=elsewhere, also={"mine": plan})
    names = [name for name, _ in entered.best(30)]
    assert names[:2] == ["", "on model=8"]
    assert names[-2:] == ["on data=8", "mine"]
    assert [name for name, _ in entered.best(2)] == ["", "on model=8", "mine"]


def test_a_layout_that_does_not_answer_the_question_is_refused(by_hand: Evaluation, question: PlanRequest) -> None:
    def refused(layout: Plan | Evaluation, by: PlanRequest) -> str:
        with pytest.raises(SpecError) as caught:
            adopted("mine", layout, [by])
        return str(caught.value)

    elsewhere = replace(question.target, axes=MeshAxes.of({"data": 8}))
    assert "on the mesh data=2 × model=4; planned for is data=8" in refused(
        by_hand, replace(question, target=elsewhere)
    )
    kept = replace(question.shardings, donated=frozenset[int]())
    assert "donating []" in refused(by_hand, replace(question, shardings=kept))
    weights = next(i for i, leaf in enumerate(by_hand.record.inputs) if "w_up" in leaf.path)
    asked = replace(question.shardings, inputs={weights: P("model", None)})
    assert "lays state.params" in refused(by_hand, replace(question, shardings=asked))
    free = replace(question.shardings, inputs={weights: P(P.UNCONSTRAINED, by_hand.record.inputs[weights].spec[1])})
    assert adopted("mine", by_hand, [replace(question, shardings=free)])
    bare = LoadedPlan(by_hand.record)
    assert "not plan files" in refused(bare, question)


@pytest.mark.parametrize(
    ("more", "way_out"),
    [
        ({"refine": "cpu", "candidates": 1}, "compile two plans or more"),
        ({"refine": "xla"}, "refine='xla': it is one of None, 'gpu', 'tpu', 'cpu'"),
    ],
)
def test_what_cannot_be_refined_is_refused(more: dict[str, Any], way_out: str) -> None:
    with pytest.raises(SpecError, match=way_out):
        planned(**more)
