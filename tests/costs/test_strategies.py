"""Layouts, their codes and specs, and the enumeration of strategies."""

from itertools import product
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from autoshard.costs.strategies import (
    SUM,
    WHOLE,
    Strategies,
    code_of,
    decode,
    encode,
    enumerate_strategies,
    layout_of,
    layouts,
    matching,
    parted,
    shards,
)
from autoshard.errors import MeshError, MissingRuleError, SpecError
from autoshard.ir.graph import Eqn
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.rules import ShardingRule, rule_of
from tests.rules_cases import CASES, Case
from tests.rules_oracle import equations

P = PartitionSpec
MESH = MeshAxes(("data", "model"), (2, 4))

meshes = st.lists(st.sampled_from([2, 3, 4]), max_size=3).map(
    lambda sizes: MeshAxes(tuple("xyz"[: len(sizes)]), tuple(sizes))
)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12]), max_size=3).map(tuple)


# --- Mesh and layout -------------------------------------------------------------------


def test_text_of_meshes_and_layouts() -> None:
    assert str(MESH) == "data=2 × model=4"
    assert str(Layout((("data",), (), ("model",)))) == "[data,-,model]"
    assert str(Layout((("data", "model"), ()), ("x",))) == "[data·model,-] Σ{x}"
    assert str(Layout(())) == "[]"


def test_what_no_mesh_and_no_layout_can_be() -> None:
    with pytest.raises(MeshError, match="repeat"):
        MeshAxes(("x", "x"), (2, 2))
    with pytest.raises(MeshError, match="2 axis names, 1 sizes"):
        MeshAxes(("x", "y"), (2,))
    with pytest.raises(SpecError, match="used twice"):
        Layout((("x",), ("x",)))
    with pytest.raises(SpecError, match="used twice"):
        Layout((("x",),), ("x",))
    with pytest.raises(SpecError, match="does not divide"):
        Layout((("data", "model"),)).local_shape((12,), MESH)
    with pytest.raises(SpecError, match="cannot read"):
        Layout.from_spec(P(P.UNCONSTRAINED), 1)


@pytest.mark.parametrize(
    "spec",
    [P(), P("data"), P(None, "model"), P(("data", "model")), P("model", None, "data"), P(None, ("data", "model"))],
)
def test_specs_and_layouts_are_the_same(spec: PartitionSpec) -> None:
    assert Layout.from_spec(spec, 3).spec() == spec


@settings(deadline=None)
@given(meshes, shapes)
def test_codes_layouts_and_specs_round_trip(mesh: MeshAxes, shape: tuple[int, ...]) -> None:
    codes = layouts(shape, mesh, unreduced=True)
    assert len(set(codes.tolist())) == len(codes)
    for code in codes.tolist():
        layout = layout_of(code, len(shape), mesh)
        assert code_of(layout, mesh) == code
        assert encode(decode(code, len(shape), mesh.ndim), len(shape)) == code
        reduced = Layout(layout.dims)
        assert Layout.from_spec(reduced.spec(), len(shape)) == reduced
        assert prod(shape) == prod(layout.local_shape(shape, mesh)) * int(shards(np.array(code), len(shape), mesh))


@settings(deadline=None)
@given(meshes, shapes)
def test_every_dividing_layout_is_enumerated(mesh: MeshAxes, shape: tuple[int, ...]) -> None:
    """By brute force: each axis splits a dimension, or nothing, or is pending."""
    count = 0
    for row in product([WHOLE, SUM, *(() if 0 in shape else range(len(shape)))], repeat=mesh.ndim):
        pieces = [prod(s for s, d in zip(mesh.sizes, row, strict=True) if d == dim) for dim in range(len(shape))]
        count += all(size % n == 0 for size, n in zip(shape, pieces, strict=True))
    codes = layouts(shape, mesh, unreduced=True)
    assert len(codes) == count
    assert layout_of(int(codes[0]), len(shape), mesh) == Layout.replicated(len(shape))


@settings(deadline=None)
@given(st.data(), meshes, shapes)
def test_matching_keeps_what_is_said_and_frees_the_rest(
    data: st.DataObject, mesh: MeshAxes, shape: tuple[int, ...]
) -> None:
    codes = layouts(shape, mesh, unreduced=False).tolist()
    layout = layout_of(data.draw(st.sampled_from(codes)), len(shape), mesh)
    free = frozenset(d for d in range(len(shape)) if data.draw(st.booleans()) and not layout.dims[d])
    found = [layout_of(c, len(shape), mesh) for c in matching(shape, mesh, layout, free).tolist()]
    want = [
        other
        for other in (layout_of(c, len(shape), mesh) for c in codes)
        if all(d in free or other.dims[d] == layout.dims[d] for d in range(len(shape)))
    ]
    assert found == want


def test_matching_refuses_another_axis_order() -> None:
    assert not len(matching((8,), MESH, Layout((("model", "data"),)), frozenset()))


# --- Strategies ------------------------------------------------------------------------


@pytest.mark.parametrize("sums_flow", [False, True])
@pytest.mark.parametrize("mesh", [MESH, MeshAxes(("a", "b", "c"), (2, 2, 2)), MeshAxes((), ())], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strategies_divide_and_say_what_their_factors_say(case: Case, mesh: MeshAxes, sums_flow: bool) -> None:  # noqa: FBT001
    for traced in equations(case.fn, *(arg.abstract() for arg in case.args)):
        try:
            rule = rule_of(traced.eqn)
        except MissingRuleError:
            continue
        check(rule, traced.eqn, mesh, enumerate_strategies(rule, mesh, sums_flow=sums_flow))


def check(rule: ShardingRule, eqn: Eqn, mesh: MeshAxes, strategies: Strategies) -> None:
    """Every operand's and result's layout divides, and an axis splits what its factor splits."""
    assert (strategies.factor[0] == WHOLE).all()
    assert len({row.tobytes() for row in strategies.factor}) == len(strategies)
    sums = [f for f, factor in enumerate(rule.factors) if factor.reduction == "sum"]
    operands = list(zip(rule.operands, eqn.operands, strategies.operands, strict=True))
    results = list(zip(rule.results, eqn.results, strategies.results, strict=True))
    for n, (dims, aval, codes) in enumerate(operands + results):
        assert np.isin(codes, layouts(aval.shape, mesh, unreduced=True)).all()
        rows = decode(codes, aval.ndim, mesh.ndim)
        for (strategy, axis), f in np.ndenumerate(strategies.factor):
            at = int(rows[strategy, axis])
            where = next((d for d, dim in enumerate(dims) if f in dim), None)
            if f == SUM:
                assert at in (SUM, WHOLE)
            elif where is not None:
                assert at == where
            else:
                assert at == (SUM if n >= len(operands) and f in sums else WHOLE)
    for f, factor in enumerate(rule.factors):
        pieces = np.where(strategies.factor == f, np.array(mesh.sizes, np.int64), 1).prod(axis=1)
        assert (strategies.local_sizes(rule, mesh)[:, f] * pieces == factor.size).all()


def test_a_matrix_product_has_one_strategy_per_factor_and_axis() -> None:
    rule = rule_of(next(iter(equations(jnp.matmul, np.zeros((8, 4)), np.zeros((4, 6))))).eqn)
    strategies = enumerate_strategies(rule, MESH)
    texts = {
        tuple(str(layout_of(int(codes[s]), 2, MESH)) for codes in (*strategies.operands, *strategies.results))
        for s in range(len(strategies))
    }
    assert len(strategies) == 11  # of 4² = 16, four split 6 over `model` and one splits 4 over both: they do not divide
    assert strategies.pruned == 5
    assert ("[data,model]", "[model,-]", "[data,-] Σ{model}") in texts
    assert ("[model,data]", "[data,-]", "[model,-] Σ{data}") in texts
    assert ("[data·model,-]", "[-,-]", "[data·model,-]") in texts


def test_a_sum_is_parted_where_its_axes_end_differently() -> None:
    source = encode(np.array([[SUM, SUM], [SUM, WHOLE], [WHOLE, 1]], np.int8), 2)
    target = encode(np.array([[WHOLE, WHOLE], [1, 1], [0, 1], [WHOLE, 1], [SUM, SUM]], np.int8), 2)
    assert parted(source, target, 2, 2).tolist() == [
        [False, False, True, True, False],
        [False, False, False, False, False],
        [False, False, False, False, False],
    ]


def test_elements_hop_between_shards_of_one_element_alone() -> None:
    """A shift along a dimension of four: whole, or on an axis of four, by one permute of what a device holds."""
    (case,) = (case for case in CASES if case.name == "pad:shift")
    (one,) = (one for one in equations(case.fn, *(arg.abstract() for arg in case.args)) if one.eqn.primitive == "pad")
    found = enumerate_strategies(rule_of(one.eqn), MESH)
    rows = decode(found.results[0], 2, 2)
    assert {tuple(row) for row in rows if 0 in row} == {(WHOLE, 0), (1, 0)}
    assert (found.operands[0] == found.results[0]).all()
    assert (found.in_op == (rows == 0)).all()
    assert found.in_op_kind == "collective-permute"
