"""What a kernel's block maps prove: every cut that they allow computes what the whole kernel does, on 8 devices.

All other cuts are refused, whatever the registered rule lets pass.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backends import devices
from autoshard.errors import PlanMismatchError
from autoshard.ir import graph, manual_calls
from autoshard.ir.block_maps import walks
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import PALLAS
from autoshard.rules import register_rule, rule_of
from autoshard.rules.rule import kept_whole, unregister

F32 = jnp.float32


def kernel_call(body: Any, out: Any, grid: Any, ins: Any, outs: Any, **more: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in out] if isinstance(out, list) else None
    return pl.pallas_call(
        body,
        out_shape=shapes or jax.ShapeDtypeStruct(out, F32),
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        interpret=True,
        name="case",
        **more,
    )


B = pl.BlockSpec


def scale(x: Any, out: Any) -> None:
    out[...] = x[...] * 2 + 1


def plus(x: Any, y: Any, out: Any) -> None:
    out[...] = x[...] * 2 + y[...]


def rows(index: Any, taken: int = 16, block: int = 4) -> Any:
    """x by rows, added to another operand by rows of the index map."""
    return lambda x, y: kernel_call(
        plus, x.shape, (16,), [B((4, 8), lambda i: (i, 0)), B((block, 8), index)], B((4, 8), lambda i: (i, 0))
    )(x, y)


def attention(q: Any, k: Any, v: Any) -> Any:
    """8 heads of queries on 2 of keys."""

    def body(q: Any, k: Any, v: Any, out: Any) -> None:
        out[...] = jax.nn.softmax(q[...] @ k[...].T, axis=-1) @ v[...]

    own, shared = B((None, 16, 8), lambda h: (h, 0, 0)), B((pl.Squeezed(), 16, 8), lambda h: (h // 4, 0, 0))
    return kernel_call(body, q.shape, (8,), [own, shared, shared], own)(q, k, v)


def numbered(x: Any, out: Any) -> None:
    out[...] = x[...] + pl.program_id(0)


def by_number(x: Any) -> Any:
    return kernel_call(numbered, x.shape, (16,), [B((4, 8), lambda i: (i, 0))], B((4, 8), lambda i: (i, 0)))(x)


def numbered_deep(x: Any, out: Any) -> None:
    out[...] = jax.lax.cond(x[0, 0] > 0, lambda: x[...] + pl.program_id(0), lambda: x[...])


def by_deep_number(x: Any) -> Any:
    return kernel_call(numbered_deep, x.shape, (16,), [B((4, 8), lambda i: (i, 0))], B((4, 8), lambda i: (i, 0)))(x)


def chosen(axis: Any) -> Any:
    """Prefetched scalars choose the rows of the other operand, by one of two grid axes."""

    def run(order: Any, x: Any, y: Any) -> Any:
        def body(order: Any, x: Any, y: Any, out: Any) -> None:
            out[...] = x[...] * 2 + y[...]

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8, 2),
            in_specs=[
                B((8, 4), lambda i, j, order: (i, j)),
                B((8, 4), lambda i, j, order: (order[(i, j)[axis]], (0, j)[axis])),
            ],
            out_specs=B((8, 4), lambda i, j, order: (i, j)),
        )
        shape = jax.ShapeDtypeStruct(x.shape, F32)
        return pl.pallas_call(body, out_shape=shape, grid_spec=spec, interpret=True, name="case")(order, x, y)

    return run


def ragged(x: Any, y: Any) -> Any:
    return kernel_call(
        plus,
        (64, 8),
        (16,),
        [B((4, 8), lambda i: (i, 0)), B((3, 8), lambda i: (i, 0))][::-1],
        B((4, 8), lambda i: (i, 0)),
    )(y, x)


def accumulate(x: Any, out: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += x[...].sum(axis=0, keepdims=True)


def column_sums(x: Any) -> Any:
    """Columns in the outer axis; rows are summed along the inner one."""
    return kernel_call(accumulate, (1, 64), (8, 8), [B((8, 8), lambda j, i: (i, j))], B((1, 8), lambda j, i: (0, j)))(x)


def carried(x: Any, out: Any, moving: Any) -> None:
    out[...] = jnp.where(jnp.isnan(out[...]), 0, out[...]) + x[...]
    moving[...] = x[...] * 2


def two_results(x: Any) -> Any:
    """The second result moves along the axis, the first is written again in each step."""
    fixed, moving = B((4, 8), lambda i: (0, 0)), B((4, 8), lambda i: (i, 0))
    return kernel_call(carried, [(4, 8), (64, 8)], (16,), [moving], [fixed, moving])(x)


def multiply(x: Any, y: Any, out: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += x[...] @ y[...]


MATMUL = ([B((8, 8), lambda i, j, k: (i, k)), B((8, 8), lambda i, j, k: (k, j))], B((8, 8), lambda i, j, k: (i, j)))


def matmul(x: Any, y: Any) -> Any:
    return kernel_call(multiply, (64, 32), (8, 4, 2), *MATMUL)(x, y)


def multiply_in_scratch(x: Any, y: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...] @ y[...]

    @pl.when(pl.program_id(2) == 1)
    def _() -> None:
        out[...] = total[...]


def matmul_in_scratch(kinds: Any) -> Any:
    params = pltpu.CompilerParams(dimension_semantics=kinds) if kinds else None
    return lambda x, y: kernel_call(
        multiply_in_scratch,
        (64, 32),
        (8, 4, 2),
        *MATMUL,
        scratch_shapes=[pltpu.VMEM((8, 8), F32)],
        compiler_params=params,
    )(x, y)


def running_sum(x: Any, out: Any, total: Any) -> None:
    total[...] = jnp.where(jnp.isnan(total[...]), 0, total[...]) + x[...]
    out[...] = total[...]


def running_sums(x: Any) -> Any:
    spec = B((4, 8), lambda i: (i, 0))
    return kernel_call(running_sum, x.shape, (16,), [spec], spec, scratch_shapes=[pltpu.VMEM((4, 8), F32)])(x)


def in_place(operand: Any) -> Any:
    spec = B((4, 8), lambda i: (i, 0))
    return lambda x, y: kernel_call(
        plus, x.shape, (16,), [spec, B((4, 8), operand)], spec, input_output_aliases={1: 0}
    )(x, y)


def window(x: Any, out: Any) -> None:
    out[...] = x[:4] + x[-4:]


def elements(size: int, step: int) -> Any:
    spec = B((pl.Element(size), 8), lambda i: (i * step, 0))
    return lambda x: kernel_call(window, (64, 8), (16,), [spec], B((4, 8), lambda i: (i, 0)))(x)


def diagonal(x: Any) -> Any:
    return kernel_call(scale, (64, 8), (8,), [B((8, 8), lambda i: (i, i))], B((8, 8), lambda i: (i, 0)))(x)


def nested(x: Any) -> Any:
    """Both axes walk over the rows, the second within the first."""
    spec = B((4, 8), lambda i, j: (i * 2 + j, 0))
    return kernel_call(scale, (64, 8), (8, 2), [spec], spec)(x)


def transpose(x: Any, out: Any) -> None:
    out[...] = x[...].T


def transposed(x: Any) -> Any:
    return kernel_call(transpose, (32, 64), (8, 4), [B((8, 8), lambda i, j: (i, j))], B((8, 8), lambda i, j: (j, i)))(x)


def conditional(i: Any) -> Any:
    return jax.lax.cond(i < 8, lambda n: n, lambda n: n - 8, i), 0


def slow_result(x: Any) -> Any:
    """A result's block is written four times, by steps in a row; the last of them counts."""
    return kernel_call(scale, (16, 8), (16,), [B((4, 8), lambda i: (i, 0))], B((4, 8), lambda i: (i // 4, 0)))(x)


@dataclass(frozen=True)
class Case:
    run: Any
    shapes: tuple[tuple[int, ...], ...]
    rule: str
    parts: dict[int, int] = field(default_factory=dict)  # grid axis → parts that are proven
    whole: dict[int, str] = field(default_factory=dict)  # grid axis → a word of why not
    integers: tuple[int, ...] = ()  # operands that are prefetched scalars


X, Y = (64, 8), (64, 8)
TWO = "i _, i _ -> i _"
CASES = {
    "identity": Case(rows(lambda i: (i, 0)), (X, Y), TWO, {0: 16}),
    "shared": Case(rows(lambda i: (0, 0)), (X, (4, 8)), "i _, _ _ -> i _", {0: 16}),
    "grouped": Case(attention, ((8, 16, 8), (2, 16, 8), (2, 16, 8)), "(k g) s d, k s d, k s d -> (k g) s d", {0: 2}),
    "grouped, the rule says nothing of groups": Case(
        attention, ((8, 16, 8), (2, 16, 8), (2, 16, 8)), "h s d, g s d, g s d -> h s d", {0: 2}
    ),
    "slower": Case(rows(lambda i: (i // 4, 0)), (X, (16, 8)), "(i j) _, i _ -> (i j) _", {0: 4}),
    "slower by floats": Case(
        rows(lambda i: (jnp.floor(i / 4).astype(jnp.int32), 0)), (X, (16, 8)), "(i j) _, i _ -> (i j) _", {0: 4}
    ),
    "periodic": Case(rows(lambda i: (i % 4, 0)), (X, (16, 8)), "i _, _ _ -> i _", {0: 4}),
    "next": Case(rows(lambda i: (i + 1, 0)), (X, (68, 8)), TWO.replace(", i _", ", _ _"), {}, {0: "1, 2, 3"}),
    "next, wrapped": Case(rows(lambda i: ((i + 1) % 16, 0)), (X, Y), TWO, {}, {0: "1, 2, 3"}),
    "backwards": Case(rows(lambda i: (15 - i, 0)), (X, Y), TWO, {}, {0: "15, 14"}),
    "in halves": Case(rows(lambda i: (jnp.where(i < 8, i, 15 - i), 0)), (X, Y), TWO, {}, {0: "0, 1, 2"}),
    "in repeated halves": Case(rows(conditional), (X, (32, 8)), "i _, _ _ -> i _", {0: 2}),
    "a condition that holds": Case(rows(lambda i: (jnp.where(i < 16, i, 0), 0)), (X, Y), TWO, {0: 16}),
    "half of an operand": Case(rows(lambda i: (i, 0)), (X, (128, 8)), "i _, _ _ -> i _", {}, {0: "128 in blocks of 4"}),
    "ragged": Case(rows(lambda i: (i, 0)), (X, (62, 8)), "i _, _ _ -> i _", {}, {0: "62 in blocks of 4"}),
    "numbered": Case(by_number, (X,), "i j -> i j", {}, {0: "pl.program_id(0)"}),
    "numbered in a batch": Case(jax.vmap(by_number), ((8, *X),), "b i j -> b i j", {0: 8}, {1: "pl.program_id(0)"}),
    "chosen along": Case(
        chosen(0), ((8,), (64, 8), (64, 8)), "_, i j, i j -> i j", {1: 2}, {0: "prefetched"}, integers=(0,)
    ),
    "chosen across": Case(
        chosen(1), ((2,), (64, 8), (16, 8)), "_, i j, _ j -> i j", {0: 8}, {1: "prefetched"}, integers=(0,)
    ),
    "sums": Case(column_sums, ((64, 64),), "i j -> 1 j", {0: 8}, {1: "pl.program_id(1)"}),
    "a result that stays": Case(two_results, (X,), "i j -> _ j, i j", {}, {0: "result 0 is written again"}),
    "a result that is slower": Case(slow_result, (X,), "(i k) j -> i j", {0: 4}),
    "matmul": Case(matmul, ((64, 16), (16, 32)), "i k, k j -> i j", {0: 8, 1: 4}, {2: "pl.program_id(2)"}),
    "matmul in scratch": Case(
        matmul_in_scratch(None), ((64, 16), (16, 32)), "i k, k j -> i j", {}, {0: "scratch", 1: "scratch"}
    ),
    "matmul in scratch, declared": Case(
        matmul_in_scratch(("parallel", "arbitrary", "arbitrary")),
        ((64, 16), (16, 32)),
        "i k, k j -> i j",
        {0: 8},
        {1: "scratch", 2: "pl.program_id(2)"},
    ),
    "running sums": Case(running_sums, (X,), "i j -> i j", {}, {0: "scratch"}),
    "in place": Case(in_place(lambda i: (i, 0)), (X, Y), TWO, {0: 16}),
    "in place, elsewhere": Case(in_place(lambda i: (0, 0)), (X, Y), TWO, {}, {0: "share their memory"}),
    "elements": Case(elements(4, 4), (X,), "i j -> i j", {0: 16}),
    "elements with a halo": Case(elements(8, 4), ((68, 8),), "_ j -> i j", {}, {0: "0, 4, 8"}),
    "diagonal": Case(diagonal, ((64, 64),), "i _ -> i _", {}, {0: "two dimensions"}),
    "nested axes": Case(nested, (X,), "i j -> i j", {0: 8}, {1: "0, 1 of"}),
    "transposed": Case(transposed, ((64, 32),), "i j -> j i", {0: 8, 1: 4}),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: Any) -> Any:
    register_rule("pallas_call[case]", request.param.rule)
    yield request.param
    unregister("pallas_call[case]")


def values(case: Case) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        random.permutation(shape[0]).astype(np.int32) if i in case.integers else random.normal(size=shape).astype("f4")
        for i, shape in enumerate(case.shapes)
    ]


def equation(closed: Any) -> Any:
    return next(e for e in closed.eqns if e.primitive.name == "pallas_call")


def test_what_is_proven(case: Case) -> None:
    params = equation(jax.make_jaxpr(case.run)(*values(case))).params
    found = walks(params)
    assert {by.axis: by.parts for by in found.driven.values()} == case.parts
    for axis, word in case.whole.items():
        assert word in found.whole[axis]
    assert set(found.whole).isdisjoint(case.parts)


def test_every_proven_cut_computes_what_the_whole_kernel_does(case: Case) -> None:
    args = values(case)
    closed = jax.make_jaxpr(case.run)(*args)
    eqn = equation(closed)
    driven = walks(eqn.params).driven
    want = jax.tree.leaves(case.run(*args))
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    for axis, parts in case.parts.items():
        count = min(parts, 8)
        mesh = jax.make_mesh((count,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = [
            P(*("a" if (by := driven.get((v, d))) and by.axis == axis else None for d in range(aval.ndim)))
            for v, aval in enumerate(avals)
        ]
        got = jax.jit(partial(manual_calls.call, eqn, mesh=mesh, specs=specs))(args)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=f"axis {axis} in {count}")


def test_a_plan_computes_what_the_program_does_and_notes_what_it_keeps_whole(case: Case) -> None:
    """The rows of all that can be split are, on their way in; the rule may let pass what the maps do not."""
    args = values(case)

    def program(*xs: Any) -> Any:
        ys = case.run(*(x if jnp.issubdtype(x.dtype, jnp.integer) else x + 1 for x in xs))
        return jax.tree.map(lambda y: y * 2, ys)

    specs = tuple(P("a") if a.shape[0] % 8 == 0 and i not in case.integers else P() for i, a in enumerate(args))
    plan = autoshard.plan(program, *args, mesh={"a": 8}, hardware="h100:1x8", for_grad=False, in_shardings=specs)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6),
        plan.jit()(*(jax.device_put(a, s) for a, s in zip(args, plan.in_shardings(), strict=True))),
        program(*args),
    )
    eqn = eqn_of(case)
    rule = rule_of(eqn)
    assert {f.size for f in rule.factors if f.kind == "pass" and f.size > 1} <= set(case.parts.values())
    assert [note for note in plan.record.notes if "block maps" in note] == [text for text in [kept_whole(eqn)] if text]
    if not case.parts:
        assert any(word in kept_whole(eqn) for word in case.whole.values())


def eqn_of(case: Case) -> graph.Eqn:
    found = graph.build(jax.make_jaxpr(case.run)(*values(case)), "cpu")
    return next(e for e in found.eqns if e.primitive == PALLAS)


def test_a_number_is_found_in_a_branch() -> None:
    params = equation(jax.make_jaxpr(by_deep_number)(jnp.zeros(X))).params
    assert walks(params).whole == {0: "the kernel asks for `pl.program_id(0)`"}


def test_a_grouped_rule_splits_by_heads_of_keys() -> None:
    case = CASES["grouped"]
    eqn = eqn_of(case)
    with pytest.raises(autoshard.MissingRuleError, match=r'"\(a a4\) _ _, a _ _, a _ _ -> \(a a4\) _ _"'):
        rule_of(eqn)
    register_rule("pallas_call[case]", "(a a4) _ _, a _ _, a _ _ -> (a a4) _ _")
    try:
        assert str(rule_of(eqn)) == (
            "([ij,k,l],[i,m,n],[i,o,p])->([ij,q,r]) "
            "{i=2,j=4,k=16,l=8,m=16,n=8,o=16,p=8,q=16,r=8} replicate={j,k,l,m,n,o,p,q,r}"
        )
        plan = autoshard.plan(
            case.run,
            *values(case),
            mesh={"a": 2},
            hardware="h100:1x2",
            for_grad=False,
            in_shardings=P("a"),
            out_shardings=P("a"),
        )
        assert not plan.record.collectives
    finally:
        unregister("pallas_call[case]")


def test_a_cut_that_is_not_proven_is_refused_when_the_kernel_runs() -> None:
    """A plan file says what it likes."""
    closed = jax.make_jaxpr(by_number)(jnp.zeros(X))
    mesh: Any = devices.abstract(MeshAxes.of({"a": 8}))
    with pytest.raises(PlanMismatchError, match="dimension 0 of operand 0 of a kernel is split in 8"):
        manual_calls.call(equation(closed), [jnp.zeros(X)], mesh, [P("a"), P("a")])
    closed = jax.make_jaxpr(CASES["identity"].run)(jnp.zeros(X), jnp.zeros(Y))
    with pytest.raises(PlanMismatchError, match="dimension 0 of operand 1 of a kernel is not split as the rest"):
        manual_calls.call(equation(closed), [jnp.zeros(X), jnp.zeros(Y)], mesh, [P("a"), P(), P("a")])


def test_a_grid_of_unknown_size_runs_whole() -> None:
    def program(n: Any, x: Any) -> Any:
        return kernel_call(scale, X, (n,), [B((4, 8), lambda i: (i, 0))], B((4, 8), lambda i: (i, 0)))(x)

    closed = jax.make_jaxpr(program)(jnp.int32(16), jnp.zeros(X))
    assert walks(equation(closed).params).whole == {0: "the grid's size is known at run time only"}
