from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends.shardy import passes
from autoshard.backends.shardy.passes import FactorRule, ValueLayout
from autoshard.backends.shardy.propagation import matched
from autoshard.errors import ShardyError
from autoshard.ir.graph import Aval
from autoshard.ir.layout import Layout

BF16 = jnp.bfloat16


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layout(*dims: str | None) -> Layout:
    return Layout(tuple((dim,) if dim else () for dim in dims))


def lower(fn: Any, specs: tuple[P, ...], *avals: Any) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(fn, in_shardings=shardings).lower(*avals)


def find(found: passes.Propagation, op: str) -> list[passes.ValueLayout]:
    return [value for value in found.values if value.op == op]


RULES = [
    ("matmul", jnp.matmul, [(32, 64), (64, 8)], "([i, k], [k, j])->([i, j]) {i=32, j=8, k=64} reduction={k}"),
    ("add", jnp.add, [(4, 6), (4, 6)], "([i, j], [i, j])->([i, j]) {i=4, j=6}"),
    ("reshape", lambda x: x.reshape(2, 3, 8), [(6, 8)], "([ij, k])->([i, j, k]) {i=2, j=3, k=8}"),
    ("slice", lambda x: x[1:3], [(4, 6)], "([i, j])->([i, j]) {i=4, j=6} permutation={i}"),
    ("sort", partial(jnp.sort, axis=1), [(4, 6)], "([i, j])->([i, j]) {i=4, j=6} need_replication={j}"),
    ("reduce", lambda x: jax.lax.reduce_max(x, (0,)), [(4, 6)], "([i, j], [])->([j]) {i=4, j=6} reduction={i}"),
]


@pytest.mark.parametrize(("fn", "shapes", "text"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_rules_of_lowered_ops(fn: Any, shapes: list[tuple[int, ...]], text: str) -> None:
    rules = passes.factor_rules(fn, *(array(*shape) for shape in shapes))
    assert text in [rule for _, rule in rules]
    for _, rule in rules:
        assert str(FactorRule.parse(rule)) == rule


def test_rules_are_found_inside_loops_and_calls() -> None:
    def scanned(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, w)[0]

    names = [name for name, _ in passes.factor_rules(scanned, array(8, 16), array(3, 16, 16))]
    assert names.count("stablehlo.dot_general") == 1
    assert names.index("stablehlo.dot_general") < names.index("stablehlo.tanh")


def test_a_parsed_rule_names_factors_and_kinds() -> None:
    rule = FactorRule.parse(
        "#sdy.op_sharding_rule<([ij, k], [k, z_1])->([i, j, z_1]) {i=2, j=3, k=4, z_1=5} reduction={k}>"
    )
    assert rule.operands == ((("i", "j"), ("k",)), (("k",), ("z_1",)))
    assert rule.results == ((("i",), ("j",), ("z_1",)),)
    assert rule.sizes == {"i": 2, "j": 3, "k": 4, "z_1": 5}
    assert (rule.reduction, rule.permutation, rule.need_replication) == (("k",), (), ())


@pytest.mark.parametrize(
    "text", ["", "([i])", "([i])->([j]) {i=2}", "([i])->([i]) {i=2} reduction={k}", "([i])->([i]) {i=2, j=3}"]
)
def test_what_is_not_a_rule_is_refused(text: str) -> None:
    with pytest.raises(ShardyError, match="not a sharding rule"):
        FactorRule.parse(text)


FACTORS = [*"ijklmnopqrstuvwxyz", "z_1", "z_2"]


@given(
    st.lists(st.lists(st.lists(st.sampled_from(FACTORS), min_size=1, max_size=3), max_size=3), min_size=2, max_size=4)
)
def test_rules_survive_the_round_trip(tensors: list[list[list[str]]]) -> None:
    *operands, result = [tuple(tuple(dim) for dim in tensor) for tensor in tensors]
    used = sorted({f for tensor in tensors for dim in tensor for f in dim})
    rule = FactorRule(
        operands=tuple(operands),
        results=(result,),
        sizes={f: i + 2 for i, f in enumerate(used)},
        reduction=tuple(used[:1]),
        permutation=tuple(used[1:2]),
    )
    assert FactorRule.parse(str(rule)) == rule


def test_propagation_of_a_megatron_mlp() -> None:
    def mlp(x: Any, w1: Any, w2: Any) -> Any:
        return jax.nn.relu(x @ w1) @ w2

    specs = (P("data"), P(None, "model"), P("model", None))
    found = passes.propagate(lower(mlp, specs, array(8, 16), array(16, 32), array(32, 16)))
    assert found.arguments == (layout("data", None), layout(None, "model"), layout("model", None))
    assert found.results == (layout("data", None),)
    up, down = find(found, "stablehlo.dot_general")
    assert (up.layout, down.layout) == (layout("data", "model"), layout("data", None))
    line = mlp.__code__.co_firstlineno + 1
    assert up.where == down.where == f"{__file__}:{line} ({mlp.__qualname__})"
    assert up.name == "jit(mlp)/dot_general"


def test_propagation_enters_loops_and_calls_in_program_order() -> None:
    def gram(x: Any) -> Any:
        return x @ x.T

    square = jax.jit(gram)

    def twice(x: Any, y: Any) -> Any:
        return square(x), square(y)

    found = passes.propagate(lower(twice, (P("data"), P("model")), array(8, 16), array(8, 16)))
    first, second = find(found, "stablehlo.dot_general")
    assert (first.layout, second.layout) == (layout("data", None), layout("model", None))
    assert first.number == second.number
    assert first.name == "jit(twice)/jit(gram)/dot_general"

    def scanned(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, w)[0]

    found = passes.propagate(lower(scanned, (P("data"), P()), array(8, 16), array(3, 16, 16)))
    (dot,) = find(found, "stablehlo.dot_general")
    assert dot.layout == layout("data", None)
    carries = [loop.layout for loop in find(found, "stablehlo.while") if loop.shape == (8, 16)]
    assert carries == [layout("data", None)]


def test_what_a_scan_stacks_for_its_gradient_lies_as_it_was_made() -> None:
    """Under FSDP (weights split over the batch's axis) XLA keeps residuals split by batch; the weights' gradients,
    whose products read them, would split them by features if the stacking were a broadcast, as it is lowered."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jax.lax.scan(lambda c, w: (hold(jnp.tanh(hold(c) @ w)), None), x, w)[0])

        return w - jax.grad(loss)(w)

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hold = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P("data")))
    weights = NamedSharding(mesh, P(None, "data"))
    jitted = jax.jit(step, in_shardings=(weights, NamedSharding(mesh, P("data"))), out_shardings=weights)
    found = passes.propagate(jitted.lower(array(3, 16, 16), array(8, 16)))
    stacked = [value.layout for value in find(found, "stablehlo.while") if value.shape == (3, 8, 16)]
    assert stacked
    assert set(stacked) == {layout(None, "data", None)}


def test_a_pin_holds_and_spreads_to_what_follows() -> None:
    def chain(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    lowered = lower(chain, (P("data"), P()), array(8, 16), array(16, 16))
    (free,) = find(passes.propagate(lowered), "stablehlo.dot_general")
    assert free.number is not None
    assert free.layout == layout("data", None)
    pinned = passes.propagate(lowered, {free.number: layout(None, "model")})
    assert find(pinned, "stablehlo.dot_general")[0].layout == layout(None, "model")
    assert pinned.results == (layout(None, "model"),)
    assert passes.propagate(lowered).results == (layout("data", None),)


def test_a_pin_equals_a_sharding_constraint() -> None:
    spec = P(None, "model")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def free(x: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(x @ w) @ v

    def constrained(x: Any, w: Any, v: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, spec))
        return jnp.tanh(y) @ v

    avals, specs = (array(8, 16), array(16, 16), array(16, 16)), (P("data"), P(), P())
    want = passes.propagate(lower(constrained, specs, *avals))
    number = find(passes.propagate(lower(free, specs, *avals)), "stablehlo.dot_general")[0].number
    assert number is not None
    got = passes.propagate(lower(free, specs, *avals), {number: Layout.from_spec(spec, 2)})
    for op in ("stablehlo.dot_general", "stablehlo.tanh"):
        assert [v.layout for v in find(got, op)] == [v.layout for v in find(want, op)]


def test_a_split_mesh_axis_keeps_shardys_name() -> None:
    def split(x: Any) -> Any:
        return x.reshape(2, 2, 32, 16)

    found = passes.propagate(lower(split, (P(("model", "data")),), array(128, 16)))
    (reshape,) = find(found, "stablehlo.reshape")
    assert reshape.layout == Layout((("model:(1)2",), ("model:(2)2",), ("data",), ()))


def test_a_pin_on_nothing_is_refused() -> None:
    lowered = lower(jnp.tanh, (P("data"),), array(8, 16))
    with pytest.raises(ShardyError, match=r"pins name op results \[99\]; the module has 1"):
        passes.propagate(lowered, {99: layout("data", None)})


def test_a_pin_without_a_mesh_is_refused() -> None:
    lowered = jax.jit(jnp.tanh).lower(array(8, 16))
    with pytest.raises(ShardyError, match="has no mesh"):
        passes.propagate(lowered, {0: layout("data", None)})


def test_an_equation_s_results_are_the_last_ops_in_its_scope_and_shardy_s_own_stand_in_where_they_lack() -> None:
    """By trying every scope of five ops of two shapes, that are the program's or Shardy's, beside all of each kind."""
    small, large = Aval((2,), jnp.dtype("f4")), Aval((3,), jnp.dtype("f4"))
    kinds = [(aval, own) for aval in (small, large) for own in (False, True)]
    for scope in product(kinds, repeat=5):
        ops = [
            ValueLayout(
                op="op", name="", where="", number=None if own else n, shape=aval.shape, layout=Layout.replicated(1)
            )
            for n, (aval, own) in enumerate(scope)
        ]
        for members in ([7], [7, 8], [7, 8, 9]):
            there = [op for op in ops if op.shape == small.shape]
            written = [op for op in there if op.number is not None]
            last = (written if len(written) >= len(members) else there)[-len(members) :]
            found = matched({(0,): {small: members}}, {(0,): ops})
            assert list(map(id, (found[v] for v in members if v in found))) == list(map(id, last))
