"""What is asked beside the program: options that cannot be meant are refused by name; copies keep what they are."""

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from autoshard import MeshError, SpecError
from autoshard.api import jit
from autoshard.api.options import OPTIONS
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.request import OwnMeshError
from tests.programs import GPUS, MESH

P = PartitionSpec
W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)

plan = partial(autoshard.plan, mesh=MESH, hardware=GPUS, for_grad=False)


def product(w: Any, x: Any) -> Any:
    return x @ w


# Option, value → what is said of it.
WRONG_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    ("mesh", [], MeshError, "mesh=[]: there is none to choose from"),
    ("mesh", "data", MeshError, "mesh='data': name the axes and their sizes"),
    ("mesh", 8, MeshError, "mesh=8: name the axes"),
    ("mesh", {1: 8}, MeshError, "mesh axis 1: XLA and Shardy read names"),
    ("mesh", {"dätä": 8}, MeshError, "mesh axis 'dätä': XLA and Shardy read names"),
    ("mesh", {"data": 2.9}, MeshError, "mesh axis 'data' of size 2.9: a size is a positive whole number"),
    ("mesh", {"data": True}, MeshError, "mesh axis 'data' of size True"),
    ("mesh", [{"data": 8}, "model"], MeshError, "name the axes"),
    ("hardware", 8, SpecError, "hardware=8: write a chip and its topology"),
    ("memory", float("nan"), SpecError, "cannot read memory=nan: write a number of bytes, as in 64GB"),
    ("memory", float("inf"), SpecError, "cannot read memory=inf"),
    ("memory", "1e400", SpecError, "cannot read memory='1e400'"),
    ("memory", 10**400, SpecError, "cannot read memory=1000"),
    ("memory", "much", SpecError, "cannot read memory='much'"),
    ("memory", -1, SpecError, "cannot read memory=-1"),
    ("memory", [1], SpecError, "cannot read memory=[1]"),
    ("pins", {"x": None}, SpecError, "pins['x'] is None: a pin is a PartitionSpec, P() for whole"),
    ("pins", {"x": "data"}, SpecError, "pins['x'] is 'data': a pin is a PartitionSpec"),
    ("pins", {0: P()}, SpecError, "pins: 0 is no path pattern"),
    ("pins", [P()], SpecError, "map path patterns to layouts"),
    ("pins", {"x": P("data", unreduced=frozenset({"model"}))}, SpecError, "where sums are left open is the planner's"),
    ("host_local", ["x"], SpecError, "host_local=['x']: name the inputs of which each host loads its part"),
    ("host_local", {"x": True}, SpecError, "name the inputs of which each host loads its part"),
    ("host_local", "z", SpecError, "host_local: 'z' matches no input"),
    ("host_local", {"x": 2}, SpecError, "host_local: x has 2 dimensions, and no dimension 2"),
    ("hosts", 2, SpecError, "hosts=2 says over how many hosts host_local= is split"),
    ("in_shardings", (P(unreduced=frozenset({"model"})), P()), SpecError, "in_shardings at w"),
    ("constraints", "al", SpecError, "constraints='al': did you mean 'all'?"),
    ("unknown", "whole", SpecError, "unknown='whole': it is one of 'error', 'replicate'"),
    ("refine", "gpus", SpecError, "refine='gpus': did you mean 'gpu'?"),
    ("rel_gap", -1, SpecError, "rel_gap=-1: it is a number of at least 0"),
    ("rel_gap", float("nan"), SpecError, "rel_gap=nan"),
    ("time_limit_s", float("nan"), SpecError, "time_limit_s=nan"),
    ("time_limit_s", "10", SpecError, "time_limit_s='10'"),
    ("candidates", 0, SpecError, "candidates=0: it is a number of at least 1"),
    ("like", "plan.json", SpecError, "like='plan.json': it takes a plan"),
    ("donate_argnums", "x", SpecError, "donate_argnums='x': it takes the positions of arguments"),
    ("static_argnames", 0, SpecError, "static_argnames=0: it takes the names of arguments"),
    ("device", "cpu:0", SpecError, "device=: a plan is over a mesh"),
]


@pytest.mark.parametrize(("option", "value", "kind", "text"), WRONG_OPTIONS)
def test_a_wrong_option_is_named(option: str, value: Any, kind: type[Exception], text: str) -> None:
    if option != "device":
        with pytest.raises(kind) as raised:
            plan(product, W, X, **{option: value})
        assert text in str(raised.value)
    options: dict[str, Any] = {"mesh": MESH, "hardware": GPUS, option: value}
    with pytest.raises(kind) as raised:
        autoshard.jit(product, **options).plan(W, X)
    assert text in str(raised.value)


def test_a_pin_is_no_named_sharding() -> None:
    sharding: Any = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    with pytest.raises(SpecError, match=r"pins\['x'\] is a NamedSharding: a pin is on the plan's mesh; give its spec"):
        plan(product, W, X, pins={"x": sharding})


# --- `jax.jit`'s own options ---------------------------------------------------------------


@pytest.mark.parametrize("parentheses", [True, False])
def test_the_options_of_jax_jit(parentheses: bool) -> None:  # noqa: FBT001
    options: dict[str, Any] = {
        "mesh": MESH,
        "hardware": "cpu:8",
        "keep_unused": True,
        "inline": True,
        "backend": "cpu",
        "device": None,
        "compiler_options": {"xla_cpu_enable_fast_math": False},
    }

    def first(x: Any, unused: Any) -> Any:
        return x * 2

    f = autoshard.jit(**options)(first) if parentheses else autoshard.jit(first, **options)
    x = np.ones((8, 8), np.float32)
    np.testing.assert_array_equal(f(x, x), 2 * x)
    kept = f.lower(x, x).as_text().count("%arg1")
    options["keep_unused"] = False
    assert kept > autoshard.jit(first, **options).lower(x, x).as_text().count("%arg1")
    with pytest.raises(Exception, match="no_such_flag"):  # they reach the compiler
        autoshard.jit(first, mesh=MESH, compiler_options={"no_such_flag": True})(x, x)


def test_a_decorator_with_and_without_parentheses() -> None:
    @autoshard.jit
    def bare(x: Any) -> Any:
        return x + 1

    @autoshard.jit(mesh=MESH, hardware=GPUS)
    def given(x: Any) -> Any:
        return x + 1

    @autoshard.jit()
    def empty(x: Any) -> Any:
        return x + 1

    for f, name in ((bare, "bare"), (given, "given"), (empty, "empty")):
        assert f.__name__ == name
        np.testing.assert_array_equal(f(np.zeros(8)), np.ones(8))


def test_the_typed_options_are_all_there_are() -> None:
    assert {*jit.JitOptions.__annotations__} == {*OPTIONS, *jit._OWN}
    parameters = inspect.signature(autoshard.plan).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {*OPTIONS}
    jaxs = {p for p in inspect.signature(jax.jit).parameters if p != "fun"}
    assert jaxs <= {*jit.JitOptions.__annotations__}


@pytest.mark.parametrize("limit", ["64GB", "60 GiB", 6.4e10, 64_000_000_000, np.int64(64_000_000_000)])
def test_memory_is_read_as_on_the_command_line(limit: Any) -> None:
    want = 60 * 2**30 if limit == "60 GiB" else 64_000_000_000
    assert plan(product, W, X, memory=limit).record.memory.limit_bytes == want


def test_a_batch_that_does_not_split() -> None:
    ways: list[dict[str, Any]] = [{"parts": 0}, {"parts": -1}, {"parts": 1.5}, {"steps": 0}]
    for options in ways:
        asked: dict[str, Any] = {"steps": 2, **options}
        with pytest.raises(SpecError, match=rf"{next(iter(options))}=.*: a batch is split into at least one"):
            autoshard.accumulate(product, **asked)
    value_and_grad = autoshard.accumulate(lambda w, batch: jnp.mean(w * batch["x"]), steps=2)
    with pytest.raises(SpecError, match=r"the batch holds a scalar, 0\.5, which does not split; pass it after"):
        value_and_grad(1.0, {"x": np.ones((4, 2)), "rate": 0.5})


# --- Copies ----------------------------------------------------------------------------


def test_auto_is_one_thing() -> None:
    for same in (
        copy.copy(autoshard.AUTO),
        copy.deepcopy([autoshard.AUTO])[0],
        pickle.loads(pickle.dumps(autoshard.AUTO)),
    ):
        assert same is autoshard.AUTO


def test_errors_are_pickled_with_their_facts() -> None:
    def fails(**options: Any) -> autoshard.AutoshardError:
        with pytest.raises(autoshard.AutoshardError) as caught:
            plan(product, W, X, **options)
        return caught.value

    missing = autoshard.MissingRuleError("mystery", "model.py:3", "unknown", "register one")
    own = OwnMeshError("f", jax.make_mesh((8,), ("d",)), MeshAxes(("a",), (2,)))
    for error in (missing, own, fails(memory=1), fails(pins={"y": P()}), fails(mesh=8)):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), {*vars(again)}) == (type(error), str(error), {*vars(error)})
    assert pickle.loads(pickle.dumps(missing)).primitive == "mystery"
    assert copy.copy(missing).where == "model.py:3"
    memory = fails(memory=1)
    assert vars(pickle.loads(pickle.dumps(memory))) == vars(memory)


def test_a_pickled_plan_is_as_a_loaded_one() -> None:
    made = plan(product, W, X)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert again.record == made.record
        np.testing.assert_allclose(again.jit(product)(np.ones(W.shape), np.ones(X.shape)), 16.0, rtol=1e-5)
