"""From decisions to a problem and back: nothing is lost, nothing is counted twice."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from autoshard.backends.known_compilers import KNOWN, XLA_CPU, XLA_GPU, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.costs.fusion import fusion_traits
from autoshard.costs.prices import PS_PER_S
from autoshard.costs.resharding import NO_STRIDES
from autoshard.costs.shared_gathers import NEAR
from autoshard.costs.strategies import SUM, decode, layout_of, layouts, shards
from autoshard.ir.graph import build
from autoshard.planner.build_record import program_pins
from autoshard.planner.search_space import SearchSpace
from autoshard.problem import bill, memory_profile, routes
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Chain, Edge, Equation, layout_codes
from autoshard.problem.formulation import Formulation, formulate
from autoshard.problem.network import INF
from autoshard.problem.symmetry import Folding, fold, unfolded
from autoshard.rules import rules_of
from autoshard.solver import evaluate, solve
from tests.assignments import random_choice
from tests.programs import TINY, Program, smallest, space_of

SEEDS = range(5)
QUICK = [pytest.param(seed, marks=pytest.mark.slow) if seed > 2 else seed for seed in SEEDS]


@cache
def setting(name: str, *, step: bool = False, compiler: CompilerModel = XLA_CPU) -> SearchSpace:
    return space_of(smallest(name, step=step), compiler=compiler)[0]


@cache
def formulation(name: str, *, folding: Callable[..., Folding] = fold, compiler: CompilerModel = XLA_CPU) -> Formulation:
    of = setting(name, compiler=compiler)
    return formulate(of.decisions, of.resharder, memory_bytes=None, folding=folding(of.decisions))


def draw(of: SearchSpace, seed: int) -> NDArray[np.int64]:
    return random_choice(of.decisions, of.resharder, np.random.default_rng(seed))


def assigned(of: SearchSpace, choice: NDArray[np.int64]) -> Assignment:
    return Assignment(decisions=of.decisions, resharder=of.resharder, choice=choice)


# --- Pricing ---------------------------------------------------------------------------


def carried_ps(edge: Edge, gather_ps: int, taken: int) -> float:
    """Of one gather, what the contractions before its own carry on."""
    carried = edge.carried
    if carried is None:
        return gather_ps
    reach_s = carried.first_s if taken in carried.beside else carried.reach_s
    if gather_ps > 2 * reach_s * PS_PER_S:
        return 0.0
    return sum(min(gather_ps, each_s * PS_PER_S) for each_s in carried.each_s) / len(carried.each_s)


def price_ps(of: SearchSpace, choice: NDArray[np.int64]) -> float:
    """Decisions + resharding + what the windows leave exposed, in plain Python, edge by edge."""
    total, hideable, cover = 0.0, Counter[int](), Counter[int]()
    windows = of.decisions.windows
    for node, pick in zip(of.decisions.nodes, choice, strict=True):
        total += int(node.cost_ps[pick])
        for window, share in windows.covers[node.window]:
            cover[window] += round(int(node.cover_ps[pick]) * share)
    for edge in of.decisions.edges:
        i, j = choice[edge.u], choice[edge.v]
        if edge.forbidden is not None and edge.forbidden[i, j]:
            return float("inf")
        pair = (edge.source[i : i + 1], edge.target[j : j + 1])
        moved, trips = edge.moved, edge.trips
        if edge.total is not None and edge.finishes(*pair, of.decisions.mesh.ndim)[0, 0]:
            moved, trips = edge.total
        trips *= edge.times
        ps = int(of.resharder.cost_ps(moved, *pair, bucket=edge.bucket, strides=edge.strides)[0, 0])
        if ps >= INF:
            return float("inf")
        work = int(of.resharder.transposes_ps(moved, *pair, bucket=edge.bucket, strides=edge.strides)[0, 0])
        if ps and edge.unfused is not None:
            ends, ndim = pair[0 if edge.unfused.before else 1], edge.moved.ndim
            local = edge.unfused.nbytes / shards(ends, ndim, of.decisions.mesh)[0]
            total += float(of.resharder.machine.hbm_s(local)) * PS_PER_S * edge.trips
        pieces, more = (int(shards(codes, edge.moved.ndim, of.decisions.mesh)[0]) for codes in pair)
        if not ps and edge.cut_bytes is not None and pieces < more and (edge.waived is None or not edge.waived[j]):
            total += float(of.resharder.machine.hbm_s(edge.cut_bytes[j])) * PS_PER_S * trips
        if edge.window is None:
            total += ps * trips
        else:
            hidden = of.resharder.machine.overlap * (ps - work)
            if of.resharder.shares:
                (hidden,) = of.resharder.hidden_ps(moved, *pair, bucket=edge.bucket, strides=edge.strides)[0]
                hidden = carried_ps(edge, int(hidden), int(pair[1][0]))
            hidden = float(hidden) * windows.share(edge.value) * trips
            total += ps * trips - hidden
            for window, share in windows.hides[edge.window]:
                hideable[window] += share * hidden  # pyright: ignore[reportArgumentType]
    return total + sum(max(0.0, hidden - cover[window]) for window, hidden in hideable.items())


@pytest.mark.parametrize("compiler", KNOWN, ids=str)
@pytest.mark.parametrize("seed", QUICK)
@pytest.mark.parametrize("name", TINY)
def test_a_problem_costs_what_its_decisions_cost(name: str, seed: int, compiler: CompilerModel) -> None:
    made, of = formulation(name, folding=unfolded, compiler=compiler), setting(name, compiler=compiler)
    choice = draw(of, seed)
    objective = evaluate(made.problem, choice).objective
    assert objective is not None
    assert abs(objective - price_ps(of, choice)) <= 4 * len(made.decisions.edges)  # each edge rounds, and its parts


@pytest.mark.parametrize("rows", [64, 4096], ids=["waited-for", "carried"])
def test_what_is_gathered_for_two_uses_costs_twice(rows: int) -> None:
    """libtpu gathers once more for a use that is far from the others: in the problem, and in what is waited for.

    Also of what long products carry on.
    """

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.sin(x @ x[:64] if rows > 64 else x) @ w
        for _ in range(NEAR):
            x = jnp.sin(x)
        return x @ w

    arrays = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((rows, 64), jnp.float32))
    of, _ = space_of(Program(fn=program, args=arrays, names=("w", "x")), compiler=XLA_TPU)
    made = formulate(of.decisions, of.resharder, memory_bytes=None, folding=unfolded(of.decisions))
    assert {edge.times for edge in of.decisions.edges if edge.value == of.decisions.graph.inputs[0]} == {1, 2}
    (far,) = (edge for edge in of.decisions.edges if edge.times == 2)
    assert far.carried is not None
    assert [each_s > 0 for each_s in far.carried.each_s] == [rows > 64, True]
    twice = hidden = 0
    for seed in range(20):
        choice = draw(of, seed)
        objective = evaluate(made.problem, choice).objective
        assert objective is not None
        assert abs(objective - price_ps(of, choice)) <= 4 * len(of.decisions.edges)
        assignment = assigned(of, choice)
        waits_s = sum(waited_s for _, waited_s in bill.waits(assignment))
        assert bill.compute_s(assignment) + waits_s == pytest.approx(objective / PS_PER_S, rel=1e-6)
        twice += any(edge.times == 2 for edge, _ in bill.transfers(assignment))
        hidden += waits_s < 0.99 * sum(row.seconds * row.trips for _, row in bill.transfers(assignment))
    assert twice
    assert bool(hidden) == (rows > 64)


def test_what_is_carried_on_has_memory_from_its_carrier_on() -> None:
    def program(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ a) @ b

    arrays = (jnp.ones((64, 64)),) * 3
    begins = []
    for compiler in (XLA_CPU, XLA_TPU):
        of, _ = space_of(Program(fn=program, args=arrays, names=("a", "b", "x")), compiler=compiler)
        d = of.decisions
        copy = d.kept[d.graph.inputs[1]].node
        first, *_, second = [e for e, eqn in enumerate(d.graph.eqns) if eqn.traits.contraction]
        (begin,) = {usage.start for usage in d.usages if usage.node == copy}
        begins.append({first: "first", second: "second"}[begin])
    assert begins == ["second", "first"]


def test_a_weight_that_is_split_as_its_product_is_lies_beside_gathered_activations() -> None:
    def program(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ a) @ b

    arrays = (jnp.ones((64, 64)),) * 3
    of, _ = space_of(Program(fn=program, args=arrays, names=("a", "b", "x")), compiler=XLA_TPU)
    d = of.decisions
    found = [edge for edge in d.edges if edge.value == d.graph.inputs[1] and edge.carried]
    assert found
    for edge in found:
        assert edge.carried is not None
        columns = (decode(edge.target, 2, d.mesh.ndim) == 1).any(axis=1)
        assert set(edge.carried.beside) == set(edge.target[columns].tolist())


def test_what_is_carried_on_has_a_class_of_its_own() -> None:
    """Of two weights in equal places a long product precedes one, and a short one the other."""

    def program(a: jax.Array, b: jax.Array, c: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        return x @ c, x @ a, x @ b

    arrays = (jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.ones((64, 4096)), jnp.ones((4096, 64)))
    alike = []
    for compiler in (XLA_CPU, XLA_TPU):
        of, _ = space_of(Program(fn=program, args=arrays, names=("a", "b", "c", "x")), compiler=compiler)
        one, other = (fold(of.decisions).class_of[of.decisions.inputs[i]] for i in (0, 1))
        alike.append(bool(one == other))
    assert alike == [True, False]


@pytest.mark.parametrize("name", TINY)
def test_what_no_window_hides_is_waited_for(name: str) -> None:
    """Even of a value that elsewhere would hide, on its way to what nothing urgent waits for."""
    of = setting(name, compiler=XLA_GPU)
    windows, elsewhere = of.decisions.windows, 0
    for seed in SEEDS:
        assignment = assigned(of, draw(of, seed))
        for (edge, row), (same, waited_s) in zip(bill.transfers(assignment), bill.waits(assignment), strict=False):
            assert row == same
            if edge.window is None:
                assert waited_s == pytest.approx(row.seconds * row.trips)
                elsewhere += windows.of_value[edge.value] is not None
    assert elsewhere or not windows.beside


@pytest.mark.parametrize("seed", QUICK)
@pytest.mark.parametrize("name", TINY)
def test_what_is_forbidden_is_forbidden_in_the_problem(name: str, seed: int) -> None:
    made, of = formulation(name, folding=unfolded), setting(name)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choice = draw(of, seed)
        node = rng.integers(len(choice))
        choice[node] = rng.integers(len(of.decisions.nodes[node]))
        objective, price = evaluate(made.problem, choice).objective, price_ps(of, choice)
        assert (objective is None) == (price == float("inf"))


@pytest.mark.parametrize("name", TINY)
def test_a_folded_choice_costs_what_its_expansion_costs(name: str) -> None:
    folded, flat = formulation(name), formulation(name, folding=unfolded)
    rng = np.random.default_rng(0)
    sizes = np.diff(folded.problem.start)
    best = solve(folded.problem, time_limit_s=60, rel_gap=0.01).choice
    compared = 0
    for _ in range(200):
        choice = np.where(rng.random(len(sizes)) < 2 / len(sizes), rng.integers(sizes), best)
        objective = evaluate(folded.problem, choice).objective
        expanded = evaluate(flat.problem, folded.read(choice)).objective
        assert (objective is None) == (expanded is None)
        if objective is not None and expanded is not None:
            compared += 1
            assert abs(objective - expanded) <= 2 * len(folded.decisions.edges)
    assert compared > 1


@pytest.mark.parametrize("name", TINY)
def test_folding_keeps_memory(name: str) -> None:
    of = setting(name, step=True)
    foldings = fold(of.decisions), unfolded(of.decisions)
    folded, flat = (formulate(of.decisions, of.resharder, memory_bytes=10**9, folding=f) for f in foldings)
    rng = np.random.default_rng(0)
    for _ in range(5):
        choice = rng.integers(np.diff(folded.problem.start))
        expanded = folded.read(choice)
        peak, at, kinds = memory_profile.peak(of.decisions, expanded)
        assert evaluate(folded.problem, choice).peak_bytes == peak
        assert evaluate(flat.problem, expanded).peak_bytes == peak
        assert sum(kinds.values()) == peak
        assert peak == max(
            sum(int(u.nbytes[expanded[u.node]]) for u in of.decisions.usages if u.start <= t < u.end)
            for t in range(len(of.decisions.graph.eqns) + 2)
        )
        assert 0 <= at <= len(of.decisions.graph.eqns) + 1


# --- Folding ---------------------------------------------------------------------------


def towers(params: dict[str, Any], x: Any, order: Sequence[str]) -> Any:
    out = {name: jnp.tanh(x @ params[name]) @ params[name].T for name in order}
    return jnp.sum(out["p"] + (out["q"] + out["r"]))


def classes(order: str, names: str = "pqr") -> Counter[int]:
    w = {name: jax.ShapeDtypeStruct((16, 32), jnp.float32) for name in names}
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    program = Program(fn=lambda w, x: jax.grad(towers)(w, x, order), args=(w, x), names=("w", "x"))
    return Counter(len(members) for members in fold(space_of(program)[0].decisions).members)


def test_the_order_of_equations_plays_no_part_in_folding() -> None:
    assert classes("pqr") == classes("rqp") == classes("qpr")


def test_equal_places_share_a_variable() -> None:
    """Whatever stands in all three towers; x, and what is made of it alone, is there once."""
    assert classes("pqr") == Counter({3: 15, 1: 2})


# --- Assignments -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", QUICK)
@pytest.mark.parametrize("name", TINY)
def test_routes_lead_from_where_values_are_made_to_where_they_are_taken(name: str, seed: int) -> None:
    of = setting(name, step=True)
    made = assigned(of, draw(of, seed))
    graph, mesh = of.decisions.graph, of.decisions.mesh
    for e, operands in enumerate(graph.operands):
        for i, v in enumerate(operands):
            kept, taken = made.kept(v), made.taken(e, i)
            if kept is None or taken is None:
                continue
            codes = routes.before_taken(made, e, i)
            assert not codes or codes[-1] == taken or not made.reduced(taken, v)
            if not codes and made.reduced(taken, v):
                assert taken == made.left(v)
            for code in codes:
                assert code in layouts(graph.avals[v].shape, mesh, unreduced=False)


@pytest.mark.parametrize("seed", QUICK)
@pytest.mark.parametrize("name", TINY)
def test_a_chain_takes_its_own_values_without_a_collective(name: str, seed: int) -> None:
    """Whatever layout the copy for the others has: that way is not priced."""
    of = setting(name, step=True)
    made = assigned(of, draw(of, seed))
    d = of.decisions
    for e, operands in enumerate(d.graph.operands):
        for i, v in enumerate(operands):
            port, taken = d.made.get(v), made.taken(e, i)
            if port is None or taken is None or port.node != d.node_of[e] or not isinstance(d.nodes[port.node], Chain):
                continue
            left = made.left(v)
            assert left is not None
            steps = of.resharder.path(
                d.graph.avals[v], left, taken, bucket=d.windows.bucket(v), strides=d.strides.get(v, NO_STRIDES)
            )
            assert {step.kind for step in steps} <= {"slice"}


@pytest.mark.parametrize("seed", QUICK)
def test_what_is_cast_for_products_is_not_cut_for_others(seed: int) -> None:
    """By XLA:TPU, that moves float32 as products cast it: who reads it as it was made, reads it from there."""

    def loss(w: jax.Array, b: jax.Array, x: jax.Array) -> Any:
        x = jnp.cos(x) + jnp.tanh(x @ w + b) @ w.T
        return jnp.sum(jnp.cos(x) + jnp.tanh(x @ w + b) @ w.T), x

    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 32), (32,), (64, 16)))
    program = Program(fn=jax.grad(loss, argnums=(0, 1, 2), has_aux=True), args=args, names=("w", "b", "x"))
    of = space_of(program, compiler=XLA_TPU)[0]
    made, graph = assigned(of, draw(of, seed)), of.decisions.graph
    cut = 0
    for v in of.decisions.cast_apart:
        cast, own, kept = of.decisions.lives.multiplied[v], made.made(v), made.kept(v)
        assert own is not None
        for e, i in graph.consumers[v] if own != kept else ():
            cut += 1
            codes, taken = routes.before_taken(made, e, i), made.taken(e, i)
            assert taken is not None
            assert codes[-1:] == ((taken,) if e not in cast.otherwise or taken != own else ())
            assert e not in cast.otherwise or codes == routes.route(made, v, own, taken)
        assert made.left(v) == own
    assert cut
    left, x = len(graph.outputs) - 1, graph.outputs[-1]
    assert routes.before_output(made, left) == routes.route(made, x, made.made(x) or 0, made.output_code(left))
    for edge in of.decisions.edges:
        if edge.value in of.decisions.cast_apart:
            takes, to_copy = of.decisions.nodes[edge.v].equations, edge.v == of.decisions.kept[edge.value].node
            others = not takes or not of.decisions.lives.multiplied[edge.value].otherwise.isdisjoint(takes)
            assert edge.moved.itemsize == (4 if others and not to_copy else 2)


@pytest.mark.parametrize("name", TINY)
def test_a_donated_input_and_its_output_share_a_layout(name: str) -> None:
    of = setting(name, step=True)
    state = len(jax.tree.leaves(smallest(name, step=True).args[0]))
    for seed in SEEDS:
        made = assigned(of, draw(of, seed))
        assert [made.input_code(i) for i in range(state)] == [made.output_code(i) for i in range(state)]


def test_each_kernel_of_a_chain_reads_what_another_wrote() -> None:
    """By a compiler whose kernels end with a reduction: two that wait for one read what was summed, none its own."""

    def program(x: jax.Array) -> Any:
        y = jnp.sin(x)
        z = y / y.sum(axis=1, keepdims=True)
        return y, jnp.cos(y), z, y * z.max(axis=1, keepdims=True)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    of, _ = space_of(Program(fn=program, args=(x,), names=("x",)), compiler=XLA_TPU)
    (chain,) = (node for node in of.decisions.nodes if isinstance(node, Chain) and len(node.equations) > 1)
    whole = (decode(chain.codes, x.ndim, of.decisions.mesh.ndim) < 0).all(axis=1)
    read, written = 1 + 2, 4
    seconds = float(of.resharder.machine.hbm_s((read + written) * 4 * x.size))
    assert chain.cost_ps[whole].tolist() == [pytest.approx(seconds * PS_PER_S, rel=1e-6)]


@pytest.mark.parametrize("name", TINY)
def test_constraints_divide_and_hold_no_pending_sums(name: str) -> None:
    of = setting(name)
    pins = program_pins(assigned(of, draw(of, 0)))
    groups = (pins.made, pins.taken, pins.again, pins.inputs, pins.outputs)
    assert pins.count == sum(len(s) for g in groups for s in g.values())
    assert not pins.taken.keys() & pins.again.keys()
    assert pins.count > 0


@pytest.mark.parametrize("name", TINY)
def test_collectives_are_those_of_the_edges(name: str) -> None:
    """What several consumers share counts once, unless it is moved again; so counted, seconds are the edges'."""
    of = setting(name)
    for seed in SEEDS:
        choice = draw(of, seed)
        graph, node_of = of.decisions.graph, of.decisions.node_of
        again = {(graph.operands[e][i], node_of[e]) for e, i in routes.moved_again(assigned(of, choice))}
        once: dict[tuple[int, int, int, int], float] = {}
        for edge in of.decisions.edges:
            source, target = int(edge.source[choice[edge.u]]), int(edge.target[choice[edge.v]])
            aval = of.decisions.graph.avals[edge.value]
            ps = of.resharder.cost_ps(
                aval, np.array([source]), np.array([target]), bucket=edge.bucket, strides=edge.strides
            )
            by = edge.v if (edge.value, edge.v) in again else -1
            once[edge.value, source, target, by] = float(ps[0, 0]) * 1e-12 * edge.trips
        found = list(bill.collectives(assigned(of, choice)))
        in_op = sum(
            1
            for node, pick in zip(of.decisions.nodes, choice, strict=True)
            if isinstance(node, Equation) and node.strategies.in_op[pick].any()
        )
        seconds = sum(c.seconds * c.trips for c in found)
        assert seconds >= sum(once.values()) * (1 - 1e-6)
        if not in_op:
            assert seconds == pytest.approx(sum(once.values()), rel=1e-5)
        for c in found:
            assert c.kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
            assert set(c.axes) <= set(of.decisions.mesh.names)
            assert c.nbytes >= 0


def test_partial_sums_flow_through_additions_alone() -> None:
    """A sum of two products may stay pending; scaled or subtracted it is finished first."""

    def program(a: Any, b: Any, c: Any) -> Any:
        return a @ b + a @ c, 2 * (a @ b), (a @ b) - (a @ c)

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    of, _ = space_of(Program(fn=program, args=(square,) * 3, names=("a", "b", "c")))
    d = of.decisions
    pending: dict[str, bool] = {}
    for e, eqn in enumerate(d.graph.eqns):
        port = d.made.get(d.graph.results[e][0])
        if port is not None:
            pending[eqn.primitive] = bool((decode(port.codes, 2, d.mesh.ndim) == SUM).any())
    assert pending == {"dot_general": True, "add": True, "mul": False, "sub": False}
    assert str(layout_of(int(layout_codes(d.nodes[0])[0]), 2, d.mesh)) == "[-,-]"


@pytest.mark.parametrize("compiler", [XLA_GPU, XLA_TPU], ids=str)
def test_the_sums_of_an_addition_are_finished_together(compiler: CompilerModel) -> None:
    """XLA adds first, and reduces once: two terms that are pending are never finished one by one."""

    def added(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sin(x @ w + y @ v)

    program = Program(fn=added, args=(jnp.ones((8, 8)),) * 4, names=("x", "w", "y", "v"))
    decisions = space_of(program, compiler=compiler)[0].decisions
    graph = decisions.graph
    add = next(n for n, node in enumerate(decisions.nodes) if node.name == "add")
    terms = [edge for edge in decisions.edges if edge.v == add]
    assert len(terms) == 2
    finished = [np.zeros(len(decisions.nodes[add]), bool) for _ in terms]  # by any choice of the term's maker
    for edge, found in zip(terms, finished, strict=True):
        assert edge.forbidden is not None
        pending = (decode(edge.source, graph.avals[edge.value].ndim, decisions.mesh.ndim) == SUM).any(axis=1)
        reduced = (decode(edge.target, graph.avals[edge.value].ndim, decisions.mesh.ndim) != SUM).all(axis=1)
        found |= (~edge.forbidden[pending]).any(axis=0) & reduced
    assert not (finished[0] & finished[1]).any()
    assert finished[0].sum() == finished[1].sum() > 0


@pytest.mark.parametrize("compiler", [XLA_GPU, XLA_TPU], ids=str)
def test_one_of_each_row_is_taken_back_into_zeros_that_are_written_or_compared(compiler: CompilerModel) -> None:
    """XLA:TPU marks the label's place in the kernel that reads it; XLA:GPU writes a table of zeros, and scatters."""

    def gradient(scores: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.grad(lambda s: jnp.take_along_axis(jnp.sin(s), labels, axis=1).sum())(scores)

    table = jnp.ones((1024, 4096))
    program = Program(fn=gradient, args=(table, jnp.zeros((1024, 1), jnp.int32)), names=("scores", "labels"))
    space, _ = space_of(program, compiler=compiler)
    (node,) = (node for node in space.decisions.nodes if node.name == "scatter-add")
    writes_ps = float(space.resharder.machine.hbm_s(table.nbytes // space.decisions.mesh.size)) * PS_PER_S
    assert (node.cost_ps.min() < writes_ps / 100) == compiler.compares_positions_for_scatters


def test_each_device_compares_the_positions_that_it_makes() -> None:
    """Whole marks cost each device all comparisons, in both kernels that read them; split ones hide behind memory."""

    def gradient(scores: jax.Array, labels: jax.Array) -> jax.Array:
        def loss(s: jax.Array) -> jax.Array:
            return jnp.take_along_axis(jax.nn.log_softmax(jnp.sin(s)), labels, axis=1).sum()

        return jax.grad(loss)(scores)

    table = jnp.ones((1024, 4096))
    program = Program(fn=gradient, args=(table, jnp.zeros((1024, 1), jnp.int32)), names=("scores", "labels"))
    space, target = space_of(program, compiler=XLA_TPU)
    decisions, machine = space.decisions, target.machine
    (node,) = (node for node in decisions.nodes if node.name == "scatter-add")
    assert isinstance(node, Equation)
    (value,) = decisions.graph.results[node.equation]
    parts = shards(node.strategies.results[0], 2, decisions.mesh)
    readers = len(decisions.graph.consumers[value])
    labels_ps = float(machine.hbm_s(4 * 1024)) * PS_PER_S
    comparing_ps = readers * np.asarray(machine.vector_s(2 * table.size / parts)) * PS_PER_S
    assert (readers, parts.min(), parts.max()) == (2, 1, 8)
    assert node.cost_ps == pytest.approx(comparing_ps - comparing_ps.min(), abs=2 * labels_ps)
    assert node.cost_ps.max() > 100 * labels_ps


def test_what_is_moved_is_moved_on_the_smaller_side_of_a_cast() -> None:
    """Element-wise chains end after a cast to a smaller type, and before one to a larger."""

    def program(a: Any, b: Any) -> Any:
        narrow = (a + b) * a
        wide = jnp.exp(narrow.astype(jnp.float32) * 2)
        return (wide.astype(jnp.bfloat16) - a) * b

    half = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    of, _ = space_of(Program(fn=program, args=(half, half), names=("a", "b")))
    d = of.decisions
    chains = [[d.graph.eqns[e].primitive for e in node.equations] for node in d.nodes if isinstance(node, Chain)]
    assert sorted(chains) == [
        ["add", "mul"],
        ["convert_element_type", "mul", "exp", "convert_element_type"],
        ["sub", "mul"],
    ]


@pytest.mark.parametrize("compiler", [XLA_GPU, XLA_TPU], ids=str)
def test_a_pending_sum_is_renamed_where_it_is_added_alone_on_tpu(compiler: CompilerModel) -> None:
    """XLA:TPU scatters along what its tiles let it, by the order in which the product has its dimensions."""

    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        alone = jnp.einsum("bs,bt->st", x, y).transpose(1, 0)
        return alone, jnp.einsum("bs,bt->ts", x, y) + jnp.einsum("bt,bs->st", y, x).transpose(1, 0)

    x, y = (jax.ShapeDtypeStruct((64, n), jnp.float32) for n in (16, 32))
    graph = build(jax.make_jaxpr(program)(x, y), "cpu")
    found = fusion_traits(graph, rules_of(graph.eqns, unknown="error"), (), compiler)
    renamed = [flows for eqn, flows in zip(graph.eqns, found.flows, strict=True) if eqn.primitive == "transpose"]
    assert renamed[0] == (compiler is XLA_GPU)
    assert renamed[-1]


def test_what_is_cast_is_pinned_on_the_way_that_is_promised() -> None:
    """The narrow side is moved: gathered and cut, where the wide one would be sent all to all first."""

    def program(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.einsum("bsd,de->bse", x, w).astype(jnp.float32)
        return y.sum(0), y * v

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 512, 768), (768, 768)))
    v = jax.ShapeDtypeStruct((16, 512, 768), jnp.float32)
    mesh = {"data": 4, "model": 4}
    made = Program(fn=program, args=(x, w, v), names=("x", "w", "v"))
    of, _ = space_of(made, mesh=mesh, hardware="h100:2x8", compiler=XLA_GPU)
    differ = 0
    for seed in range(200):
        assignment = assigned(of, draw(of, seed))
        for edge, _ in bill.transfers(assignment):
            source, target = int(edge.source[assignment.choice[edge.u]]), int(edge.target[assignment.choice[edge.v]])
            if not assignment.reduced(source, edge.value):
                continue
            promised = of.resharder.path(edge.moved, source, target, bucket=edge.bucket, strides=edge.strides)
            assert {step.after for step in promised if step.kind != "slice"} <= set(
                routes.route(assignment, edge.value, source, target)
            )
            wide = of.decisions.graph.avals[edge.value]
            other = of.resharder.path(wide, source, target, bucket=edge.bucket, strides=edge.strides)
            differ += [step.kind for step in promised] != [step.kind for step in other]
    assert differ


def test_slices_in_a_row_are_pinned_once() -> None:
    def program(x: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x) + v

    mesh, args = {"data": 4, "model": 2}, [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2
    of, _ = space_of(Program(fn=program, args=tuple(args), names=("x", "v")), mesh=mesh, hardware="h100:1x8")
    (x, *_) = of.decisions.graph.inputs
    whole, both = (
        int(code)
        for layout in (P(), P("data", "model"))
        for code in layouts((16, 16), of.decisions.mesh, unreduced=False)
        if layout_of(int(code), 2, of.decisions.mesh).spec() == layout
    )
    assert [s.kind for s in of.resharder.path(of.decisions.graph.avals[x], whole, both, bucket=0)] == ["slice"] * 2
    assert routes.route(assigned(of, draw(of, 0)), x, whole, both) == (both,)
