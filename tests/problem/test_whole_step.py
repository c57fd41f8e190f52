"""The graph in which a plan chooses what is kept: it prices what the program then costs."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
import models
from autoshard.api.options import Options
from autoshard.api.planning import requests_of
from autoshard.costs.carriers import carriers
from autoshard.costs.strategies import WHOLE, decode
from autoshard.ir.op_traits import PREDICATE, RECALL
from autoshard.planner.pipeline import Budget, PlanningResult, solve_space
from autoshard.planner.recomputation_space import RecomputationSpace, keeping
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import build_search_space
from autoshard.problem import memory_profile
from autoshard.problem.decisions import Decision, Equation, reshard_ps
from autoshard.problem.formulation import formulate
from autoshard.problem.whole_step import kept_values
from autoshard.solver import Solution, solve
from tests.end_to_end.test_recomputing import wide
from tests.ir.test_recompute import PROGRAMS
from tests.planner.test_offload import ROWS, WIDTH, program

SIZES: dict[str, Any] = {
    "layers": 2,
    "width": 256,
    "heads": 4,
    "hidden": 512,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 512,
}
SCORES = 16 * SIZES["heads"] * 256**2  # of a layer
PLENTY = 10**12
GAP = 5e-3


def request(hardware: str, *, scan: bool) -> PlanRequest:
    step, args = models.build("tiny-llama", batch=16, sequence=256, context=256, scan=scan, **SIZES)
    options = Options(mesh={"data": 4}, hardware=hardware, remat="add", memory=PLENTY, donate_argnums=0)
    return requests_of(step, args, {}, options)[0]


def planned(asked: PlanRequest) -> PlanningResult:
    return solve_space(build_search_space(asked), Budget(rel_gap=GAP), constraints="all")


def best(space: RecomputationSpace, memory_bytes: int = PLENTY) -> tuple[Solution, Any]:
    """The whole step's solution, and its choice per decision."""
    formulation = formulate(space.decisions, space.resharder, memory_bytes=memory_bytes)
    solution = solve(formulation.problem, time_limit_s=20.0, rel_gap=GAP, settle_s=3.0)
    return solution, formulation.read(solution.choice)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("hardware", "scan"),
    [
        ("h100:1x4", True),
        pytest.param("cpu:4", True, marks=SLOW),
        pytest.param("tpu-v5e:2x2", True, marks=SLOW),
        pytest.param("h100:1x4", False, marks=SLOW),
        pytest.param("cpu:4", False, marks=SLOW),
        ("tpu-v5e:2x2", False),
    ],
)
def test_the_program_that_is_chosen_costs_what_the_whole_step_says(hardware: str, *, scan: bool) -> None:
    asked = request(hardware, scan=scan)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space)
    chosen = space.read(choice)
    assert set(chosen.kept) <= {str(value.id) for one in space.saved.passes for value in one.values}
    program = planned(keeping(asked, chosen))
    assert program.solution.objective == pytest.approx(solution.objective, rel=0.03)


@pytest.mark.parametrize(
    ("model", "scan", "hardware", "mesh", "batch", "sequence", "memory"),
    [
        ("gpt2-medium", True, "tpu-v5e:4x4", {"data": 4, "model": 4}, 128, 1024, 6 * 10**9),
        ("llama3-8b", False, "tpu-v5e:4x4", {"data": 4, "model": 4}, 16, 2048, 10**10),
        ("gpt2-small", True, "h100:1x8", {"data": 2, "model": 4}, 256, 1024, 2 * 10**10),
        ("gpt2-small", False, "h100:1x8", {"data": 2, "model": 4}, 256, 1024, 2 * 10**10),
        pytest.param("llama3-8b", True, "h100:1x8", {"data": 2, "model": 4}, 8, 4096, 2 * 10**10, marks=SLOW),
    ],
)
def test_of_large_models_it_says_it_to_a_hundredth(
    model: str, hardware: str, mesh: dict[str, int], batch: int, sequence: int, memory: int, *, scan: bool
) -> None:
    """With softmaxes in kernels of their own or of products, statistics that are kept, gathers that are repeated.

    Unrolled, backward passes compute norms again from what is kept.
    """
    step, args = models.build(model, batch=batch, sequence=sequence, layers=2, scan=scan)
    options = Options(mesh=mesh, hardware=hardware, remat="add", memory=memory, donate_argnums=0)
    (asked,) = requests_of(step, args, {}, options)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space, memory)
    program = planned(keeping(asked, space.read(choice)))
    assert program.solution.objective == pytest.approx(solution.objective, rel=0.01)


@pytest.mark.parametrize(
    "hardware", ["tpu-v5e:2x2", pytest.param("h100:1x4", marks=SLOW), pytest.param("cpu:4", marks=SLOW)]
)
def test_with_all_kept_the_whole_step_costs_what_the_program_does(hardware: str) -> None:
    """An unrolled program that has all the memory repeats no product."""
    asked = request(hardware, scan=False)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space)
    texts = set(space.read(choice).kept)
    kept = [value.id for one in space.saved.passes for value in one.values if str(value.id) in texts]
    assert "dot_general" not in {step.primitive for step in space.saved.repeated(kept)}
    assert solution.objective == pytest.approx(planned(asked).solution.objective, rel=0.01)


def test_scores_whose_kernel_makes_a_softmax_are_written_only_where_they_are_kept() -> None:
    """To keep them costs what it takes to write them; all else that is kept is written anyway."""
    asked = request("tpu-v5e:2x2", scan=False)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    graph, costs = space.decisions.graph, dict[int, int]()
    for node in space.decisions.nodes:
        if isinstance(node, Equation) and node.name == "keep":
            (value,) = graph.operands[node.equations[0]]
            costs[value] = int(node.cost_ps[0])  # of one that is kept whole
            assert node.off is not None
            assert not node.cost_ps[node.off].any()
    written = {value: cost for value, cost in costs.items() if cost}
    assert len(written) == SIZES["layers"] < len(costs)
    assert {graph.eqns[graph.producers[value][0]].primitive for value in written} == {"dot_general"}
    write_s = float(asked.target.machine.hbm_s(2 * SCORES))
    assert list(written.values()) == [pytest.approx(1e12 * write_s, rel=1e-3)] * len(written)


def test_what_is_kept_or_repeated_of_a_weight_is_that_weight() -> None:
    """For what carries it on: the backward pass waits for its gather where the forward pass does."""
    space = RecomputationSpace.of(build_search_space(request("tpu-v5e:2x2", scan=False)))
    assert space is not None
    assert space is not None
    graph = space.decisions.graph
    first = carriers(graph).first
    read = [e for e, eqn in enumerate(graph.eqns) if eqn.primitive == RECALL]
    assert read
    assert [first[graph.results[e][0]] for e in read] == [first[graph.operands[e][0]] for e in read]


@pytest.mark.slow
def test_a_stricter_limit_keeps_less() -> None:
    asked = request("cpu:4", scan=True)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space)
    peak, _, _ = memory_profile.peak(space.decisions, choice)
    tight, less = best(space, int(0.8 * peak))
    assert memory_profile.peak(space.decisions, less)[0] <= 0.8 * peak
    assert tight.objective >= solution.bound
    assert space.read(less) != space.read(choice)


def test_what_only_the_backward_pass_reads_is_not_computed_ahead_where_it_is_repeated() -> None:
    """The cosine of a layer that adds a sine: where it is repeated, the forward pass does not make it."""
    step, args = program(WIDTH, ROWS)
    options = Options(mesh={"data": 4}, hardware="h100:1x4", in_shardings=(P(), P("data")), remat="add", memory=PLENTY)
    (asked,) = requests_of(step, args, {}, options)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space)
    chosen = planned(keeping(asked, space.read(choice)))
    assert "cos" in {
        chosen.assignment.decisions.graph.eqns[e].primitive for e in chosen.assignment.decisions.graph.repeated
    }
    assert solution.objective == pytest.approx(chosen.solution.objective, rel=1e-6)
    assert solution.objective < planned(asked).solution.objective * 0.98


@jax.custom_jvp
def squashed(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@squashed.defjvp
def _(given: Any, moved: Any) -> Any:
    y = squashed(*given)
    return y, (1 - y * y) * moved[0]


def written_out(x: jax.Array) -> jax.Array:
    """A gelu whose backward pass takes 1 − tanh², and no tanh."""
    return 0.5 * x * (1 + squashed(0.8 * (x + 0.04 * x**3)))


@pytest.mark.parametrize("activation", [jax.nn.gelu, written_out])
def test_what_is_repeated_is_read_by_the_kernels_that_read_it_in_the_program(activation: Any) -> None:
    """A tanh that its kernel writes, too, and that is read also where steps of a gelu are computed in between."""

    def step(params: Any, x: jax.Array) -> Any:
        def layer(h: jax.Array, pair: Any) -> Any:
            up, down = (w.astype(h.dtype) for w in pair)
            return h + activation(h @ up) @ down, None

        def loss(params: Any) -> jax.Array:
            return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, jax.grad(loss)(params))

    params = tuple(jax.ShapeDtypeStruct((8, *sides), jnp.float32) for sides in ((1024, 4096), (4096, 1024)))
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    options = Options(mesh={"data": 4}, hardware="h100:1x4", in_shardings=(P(), P("data")), remat="add", memory=PLENTY)
    (asked,) = requests_of(step, (params, x), {}, options)
    space = RecomputationSpace.of(build_search_space(asked))
    assert space is not None
    solution, choice = best(space)
    chosen = planned(keeping(asked, space.read(choice)))
    graph = chosen.assignment.decisions.graph
    assert "tanh" in {graph.eqns[e].primitive for e in graph.repeated}
    assert solution.objective == pytest.approx(chosen.solution.objective, rel=1e-6)


def test_a_program_without_a_backward_pass_has_no_choices() -> None:
    step, args = PROGRAMS["scanned"]()
    options = Options(mesh={"data": 4}, hardware="cpu:4", remat="add")
    (asked,) = requests_of(step, args, {}, options)
    assert RecomputationSpace.of(build_search_space(asked)) is not None
    (asked,) = requests_of(lambda params, x: x @ params["up"][0], args, {}, options)
    assert RecomputationSpace.of(build_search_space(asked)) is None


@pytest.mark.parametrize("hardware", ["h100:1x4", "tpu-v5e:2x2", "cpu:4"])
def test_more_memory_is_never_slower(hardware: str) -> None:
    step, args = wide(PROGRAMS["scanned"]())
    options: dict[str, Any] = {"mesh": {"data": 4}, "hardware": hardware, "rel_gap": GAP}
    peak = autoshard.plan(step, *args, **options, remat="written").record.memory.peak_bytes
    steps_s: list[float] = []
    for share in (2.0, 1.0, 0.6, 0.43, 0.38, 0.33, 0.28, 0.25):
        try:
            plan = autoshard.plan(step, *args, **options, remat="add", memory=int(share * peak))
        except autoshard.InfeasibleError:
            break
        assert plan.record.memory.peak_bytes <= share * peak
        steps_s.append(plan.cost)
    assert len(steps_s) > 5
    for more, less in pairwise(steps_s):
        assert more <= less * (1 + 2 * GAP)


def with_all_there(decision: Decision) -> int:
    """The choice that leaves nothing out, and takes what is repeated where something is kept as well."""
    if isinstance(decision, Equation) and decision.untaken:
        assert decision.off is not None
        return int(np.flatnonzero(decision.untaken[0] & ~decision.off)[0])
    return 0


def test_what_a_choice_has_and_nothing_takes_is_not_kept() -> None:
    space = RecomputationSpace.of(build_search_space(request("h100:1x4", scan=True)))
    assert space is not None
    choice = np.array([with_all_there(decision) for decision in space.decisions.nodes])
    kept = kept_values(space.whole, space.saved, space.decisions, choice)
    inside = {v.id for one in space.saved.passes if not one.source.is_flat for v in one.values}
    repeated = inside & set(space.whole.recalls.values())
    assert len(repeated) > 10
    assert not repeated & kept


def test_what_is_computed_where_it_is_read_does_not_move_for_nothing() -> None:
    """A value that is not stored has the layout of the forward pass: in another one, it moves or is repeated."""
    space = RecomputationSpace.of(build_search_space(request("h100:1x4", scan=False)))
    assert space is not None
    graph, decisions = space.decisions.graph, space.decisions
    forward = {decisions.node_of[e]: v for e, v in graph.derived.items()}
    moves = [edge for edge in decisions.edges if edge.value == forward.get(edge.v)]
    assert {edge.v for edge in moves} == forward.keys() > set()
    for edge in moves:
        ndim = graph.avals[edge.value].ndim
        split = (decode(edge.source, ndim, 1) >= 0).any(axis=1)
        whole = (decode(edge.target, ndim, 1) == WHOLE).all(axis=1) & ~np.asarray(decisions.nodes[edge.v].off)
        assert (reshard_ps(edge, space.resharder)[split][:, whole] > 0).all()


def test_what_decides_is_there_whatever_is_kept() -> None:
    """Whether a gradient is finite, before it is used: nothing takes the answer but a branch."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            return jnp.sum(h**2)

        gradient = jax.grad(loss)(w)
        return lax.cond(jnp.isfinite(gradient).all(), lambda w: w - gradient, lambda w: w, w)

    shapes = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    options = Options(mesh={"data": 4}, hardware="h100:1x4", remat="add", memory=PLENTY)
    space = RecomputationSpace.of(build_search_space(requests_of(step, shapes, {}, options)[0]))
    assert space is not None
    graph = space.decisions.graph
    assert graph.optional
    assert PREDICATE in [eqn.primitive for eqn in graph.eqns]
