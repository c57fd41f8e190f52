"""What people read when something is wrong: what, where, why and the way out."""

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoshard
import models
from autoshard import (
    CompilerMissingError,
    InfeasibleError,
    MeshError,
    MissingRuleError,
    PlanFileError,
    PlanMismatchError,
    SpecError,
)
from autoshard.backends import compile
from autoshard.errors import ArgumentError, DeletedError
from tests.programs import GPUS, MESH

P = PartitionSpec
W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)

plan = partial(autoshard.plan, mesh=MESH, hardware=GPUS, for_grad=False)

mystery_p = Primitive("mystery")
mystery_p.def_impl(lambda x: 2 * x)
mystery_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(mystery_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))


def product(w: Any, x: Any) -> Any:
    return x @ w


def mysterious(w: Any, x: Any) -> Any:
    return jnp.sum(mystery_p.bind(x @ w))


def said(call: Callable[[], Any], error: type[Exception]) -> str:
    """The whole text of the error that a call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --- Primitives ------------------------------------------------------------------------


def test_an_unknown_primitive() -> None:
    line = mysterious.__code__.co_firstlineno + 1
    assert said(lambda: plan(mysterious, W, X), MissingRuleError) == (
        f"no sharding rule for `mystery` at {__file__}:{line} (mysterious): "
        "autoshard does not know this primitive (operands [32, 32])\n"
        '  register one: autoshard.register_rule("mystery", "b i k, b k j -> b i j"), '
        'or plan with unknown="replicate"'
    )


def test_an_unknown_primitive_may_be_kept_whole() -> None:
    f = autoshard.jit(mysterious, mesh=MESH, hardware=GPUS, unknown="replicate", for_grad=False)
    w, x = np.ones(W.shape, np.float32), np.ones(X.shape, np.float32)
    np.testing.assert_allclose(f(w, x), mysterious(w, x))


# --- Pins, shardings, constraints ------------------------------------------------------

WRONG_PINS: dict[str, tuple[dict[str, Any], str]] = {
    "matches nothing": ({"pins": {"**.emb": P("data")}}, "the pin '**.emb' matches no input"),
    "near a name": ({"pins": {"ww": P("data")}}, "the pin 'ww' matches no input; near it: w"),
    "missing axis": ({"pins": {"w": P("tensor")}}, "w: P('tensor',) names the axis `tensor`; the mesh has data, model"),
    "does not divide": (
        {"pins": {"w": P(None, ("data", "model"))}, "mesh": {"data": 3, "model": 4}, "hardware": "cpu:12"},
        "w: a dimension of 32 does not divide into 12 (data·model) in P(None, ('data', 'model'))",
    ),
    "axis twice": ({"pins": {"w": P("data", "data")}}, "a mesh axis is used twice in one layout: [data,data]"),
    "too long": ({"pins": {"w": P(None, None, "data")}}, "P(None, None, 'data') has 3 entries for 2 dimensions"),
    "another order": (
        {"pins": {"w": P(("model", "data"))}},
        "w: P(('model', 'data'),) puts axes in another order than the mesh (data, model)",
    ),
    "against in_shardings": (
        {"pins": {"w": P("data")}, "in_shardings": (P("model"), autoshard.AUTO)},
        "w: the pin 'w' says P('data',), in_shardings says P('model',)",
    ),
    "no sharding": (
        {"in_shardings": ("data", None)},
        "in_shardings at w: 'data' is neither a PartitionSpec, a NamedSharding nor AUTO",
    ),
    "output axis": (
        {"out_shardings": P("tensor")},
        "output : P('tensor',) names the axis `tensor`; the mesh has data, model",
    ),
}


@pytest.mark.parametrize("name", WRONG_PINS)
def test_a_pin_that_cannot_be_kept(name: str) -> None:
    options, text = WRONG_PINS[name]
    got = said(lambda: plan(product, W, X, **options), SpecError)
    assert got.replace("PartitionSpec(", "P(").replace(",)", ")") == text.replace(",)", ")")


def test_in_shardings_of_another_structure() -> None:
    text = said(lambda: plan(product, W, X, in_shardings=(P(), P(), P())), SpecError)
    assert text.startswith("in_shardings is no prefix of the arguments: ")


def test_pins_that_exclude_each_other() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrained(w: Any) -> Any:
        return jax.lax.with_sharding_constraint(w * 2, NamedSharding(mesh, P("data")))

    out = said(
        lambda: plan(constrained, W, mesh=mesh, donate_argnums=0, pins={"w": P()}, out_shardings=P("data")), SpecError
    )
    assert (
        out.replace("PartitionSpec", "P").replace(",)", ")")
        == "w: asked for in P(), but the output that replaces it in P('data')"
    )


def test_a_constraint_over_a_missing_axis() -> None:
    mesh = jax.make_mesh((8,), ("other",), axis_types=(AxisType.Auto,))

    def constrained(w: Any) -> Any:
        return jax.lax.with_sharding_constraint(w * 2, NamedSharding(mesh, P("other")))

    line = constrained.__code__.co_firstlineno + 1
    text = said(lambda: plan(constrained, W), SpecError)
    assert text.startswith(f"with_sharding_constraint at {__file__}:{line} (")
    assert "is over the mesh other=8 of devices" in text
    assert text.endswith(
        "the plan over data=2 × model=4: pass that mesh as mesh=, or constrain to a layout over the plan's"
    )


# --- Meshes, hardware, memory ----------------------------------------------------------


def test_a_mesh_that_the_hardware_does_not_have() -> None:
    assert "8" in said(lambda: plan(product, W, X, mesh={"data": 3}), MeshError)
    assert said(lambda: plan(product, W, X, mesh={"data": 0}), MeshError) == (
        "mesh axis 'data' of size 0: a size is a positive whole number"
    )
    assert said(lambda: plan(product, W, X, mesh={"data": 16}, hardware=None), MeshError) == (
        'the mesh has 16 devices, this process sees 8: say which hardware to plan for (hardware="h100:1x8")'
    )


def test_unknown_hardware_names_what_there_is() -> None:
    text = said(lambda: plan(product, W, X, hardware="h1000:1x8"), MeshError)
    assert "h1000" in text
    assert "h100" in re.sub("h1000", "", text)


def test_no_mesh_at_all() -> None:
    text = said(lambda: autoshard.evaluate(product, W, X, hardware=GPUS), MeshError)
    assert text == 'no mesh: pass mesh={"data": 2, "model": 4} or a Mesh, or call inside `jax.set_mesh(mesh)`'
    text = said(lambda: autoshard.plan(product, W, X, hardware="h100"), MeshError)
    assert text.startswith("no mesh, and 'h100' does not say how many devices: pass mesh=")
    text = said(lambda: autoshard.plan(product, W, X, hardware="tpu-v5p-64"), MeshError)
    assert "counts TensorCores: it is 32 chips; write tpu-v5p:2x4x4" in text


def test_memory_that_nothing_fits() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(product, W, X, memory=700)
    error, lines = caught.value, str(caught.value).splitlines()
    assert error.limit_bytes == 700
    assert error.peak_bytes is not None
    # one operand over two devices, the other over four, and the result over all eight: each as it is multiplied
    assert error.peak_bytes == 4 * (16 * 32 // 2 + 32 * 16 // 4 + 32 * 32 // 8)
    assert lines[0] == "no plan fits 700 B per device on data=2 × model=4; the smallest peak found is 2.05 kB"
    assert re.fullmatch(
        r"  at dot_general at \S+test_errors.py:\d+ \(product\): arguments 1.54 kB \+ activations 512 B", lines[1]
    )
    assert lines[2] == (
        "  what helps: donate the state (donate_argnums=), so that the new one takes its place; "
        "more devices, or mesh axes that divide more dimensions; or raise memory="
    )
    assert error.where is not None
    assert error.where in lines[1]
    assert sum(error.kinds.values()) == error.peak_bytes
    assert plan(product, W, X, memory=error.peak_bytes).record.memory.peak_bytes <= error.peak_bytes


def test_memory_that_nothing_fits_is_no_matter_of_pins() -> None:
    """Of a deep model message passing finds no choice of small peak that is allowed; nothing is pinned here."""
    build: Any = models.gpt2_small
    fn, args = build(layers=2, batch=16)
    with pytest.raises(
        InfeasibleError, match=r"no plan fits 500 MB per device .* the smallest peak found is"
    ) as caught:
        autoshard.plan(fn, *args, donate_argnums=0, mesh=MESH, hardware=GPUS, memory=5 * 10**8, remat="written")
    error = caught.value
    assert error.peak_bytes is not None
    assert error.bound_bytes is not None
    assert 5 * 10**8 < error.bound_bytes <= error.peak_bytes
    assert "transformer.py:" in (error.where or "")


def test_a_loop_that_costs_more_than_can_be_counted_is_no_matter_of_pins() -> None:
    def long(w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), w, None, length=2**40)[0]

    with pytest.raises(InfeasibleError, match=r"every layout costs more than can be counted .* days a step"):
        plan(long, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))


# --- Arguments -------------------------------------------------------------------------

WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "static number": ({"static_argnums": 5}, "static_argnums=5: product takes 2 positional arguments (w, x)"),
    "donated name": ({"donate_argnames": "state"}, "donate_argnames='state': product has no such argument (w, x)"),
    "both": (
        {"donate_argnums": 0, "static_argnums": 0},
        "product: w: an argument cannot be both static and donated",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_that_do_not_exist(name: str) -> None:
    options, text = WRONG_ARGUMENTS[name]
    assert said(lambda: plan(product, W, X, **options), SpecError) == text


def test_an_option_that_does_not_exist() -> None:
    wrong: dict[str, Any] = {"memry": 3}
    assert said(lambda: autoshard.jit(product, mesh=MESH, **wrong), TypeError) == (
        "jit has no option 'memry': did you mean memory?"
    )
    wrong = {"donate_argnum": 0}
    assert said(lambda: autoshard.jit(product, **wrong), autoshard.AutoshardError) == (
        "jit has no option 'donate_argnum': did you mean donate_argnums?"
    )
    assert said(lambda: plan(product, W, X, hardwrae="h100:1x8"), autoshard.AutoshardError) == (
        "plan: product takes no argument 'hardwrae'; did you mean the option hardware?"
    )
    assert said(lambda: plan(product, W, X, in_specs=None), autoshard.AutoshardError) == (
        "plan: product takes no argument 'in_specs'; did you mean the option in_shardings?"
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'quite_another'"):
        plan(product, W, X, quite_another=X)


# --- Plan files ------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan(product, W, X).save(path)
    return path


def test_a_plan_for_other_shapes(file: Path) -> None:
    loaded = autoshard.load(file)
    text = said(
        lambda: loaded.jit(product)(np.ones((16, 64), np.float32), np.ones((32, 16), np.float32)), PlanMismatchError
    )
    assert text == "the plan was made for w: float32[16, 32], got w: float32[16, 64]; plan again"
    text = said(lambda: loaded.bind(lambda w: w, W), PlanMismatchError)
    assert text == "the plan was made for 2 input leaves, got 1; plan again"


def test_a_plan_for_another_function(file: Path) -> None:
    text = said(lambda: autoshard.load(file).bind(lambda w, x: x @ w + 1, W, X), PlanMismatchError)
    assert re.fullmatch(
        r"the plan was made for another program \(product\): its digest is \w{32}, "
        r"this function's is \w{32}; plan again",
        text,
    )


def test_a_plan_for_another_mesh(file: Path) -> None:
    loaded = autoshard.load(file)
    text = said(lambda: loaded.mesh(jax.devices()[:4]), MeshError)
    assert text.startswith("the mesh data=2 × model=4 needs 8 devices; this process sees 4\n")
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    text = said(lambda: loaded.in_shardings(other), PlanMismatchError)
    assert text == "the plan was made for the mesh data=2 × model=4, got data=4 × model=2; plan again"


def test_a_loaded_plan_without_its_function(file: Path) -> None:
    loaded: Any = autoshard.load(file)  # a checker does not see what it has not
    assert said(loaded.jit, PlanMismatchError) == (
        "a loaded plan does not hold its function: pass it, plan.jit(train_step)"
    )
    bind = "bind the loaded plan to its function first: plan.bind(train_step, state, batch)"
    assert said(loaded.verify, PlanMismatchError) == bind
    assert said(lambda: loaded.put(W, "w"), PlanMismatchError) == bind


class Explosive:
    """Unpickles to a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_files_that_are_no_plans(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = file.read_text()

    def after(content: str | bytes) -> str:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return said(lambda: autoshard.load(file), PlanFileError)

    assert after(text[: len(text) // 2]).startswith(f"{file} is truncated or not JSON: ")
    assert after("").startswith(f"{file} is empty: ")
    assert after("import os").startswith(f"{file} is truncated or not JSON: ")
    assert after(pickle.dumps(Explosive())).startswith(f"cannot read the plan file {file}: ")
    assert capsys.readouterr().out == ""
    newer = {**json.loads(text), "schema": 99}
    assert after(json.dumps(newer)) == f"{file} has schema 99; this autoshard reads up to 2: upgrade autoshard"
    assert after("[]").startswith(f"{file} is not a plan file: at the top: ")
    missing = {k: v for k, v in json.loads(text).items() if k != "inputs"}
    assert after(json.dumps(missing)) == f"{file} is not a plan file: at the top: 'inputs' is a required property"
    file.unlink()
    assert said(lambda: autoshard.load(file), PlanFileError).startswith(f"cannot read the plan file {file}: ")


MUTATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a repeated axis": lambda d: d["inputs"][0].update(spec=["data", "data"]),
    "too many entries": lambda d: d["inputs"][0].update(spec=[None, None, "data"]),
    "an axis that is not there": lambda d: d["inputs"][0].update(spec=["tensor"]),
    "a specification of code": lambda d: d["inputs"][0].update(spec=["__import__('os').system('true')"]),
    "a negative axis size": lambda d: d["mesh"].update(data=-2),
    "devices that are not there": lambda d: d.update(device_order=[0] * 8),
    "an unknown constraint": lambda d: d.update(
        constraints=[{"at": "nowhere", "equation": [], "position": 0, "specs": []}]
    ),
    "another type": lambda d: d.update(cost="cheap"),
    "an unknown field": lambda d: d.update(code="print(1)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_plan_file_with(name: str, file: Path) -> None:
    data = json.loads(file.read_text())
    MUTATIONS[name](data)
    file.write_text(json.dumps(data))
    assert said(lambda: autoshard.load(file), PlanFileError).startswith(f"{file} is not a plan file: ")


# --- Compilers -------------------------------------------------------------------------


def test_a_compiler_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(product, W, X)
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: None)
    text = said(lambda: made.verify("gpu"), CompilerMissingError)
    assert "pip install" in text


# --- Calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, None])
def test_an_array_that_is_gone(taken: int | None) -> None:
    """jaxlib 0.10.2 itself ends the process, on several CPU devices."""
    jitted = autoshard.jit(lambda w, x: (w + 1, x.sum()), mesh=MESH, donate_argnums=taken)
    w = jitted.plan(W, X).put(np.ones(W.shape, np.float32), "w")
    x = np.ones(X.shape, np.float32)
    jitted(w, x)
    if taken is None:
        w.delete()
    text = said(lambda: jitted(w, x), DeletedError)
    assert text.startswith("<lambda>: the array w is gone: it was deleted, or donated to an earlier call; go on with")


def test_what_is_no_array_is_named_before_it_is_planned() -> None:
    def step(state: Any, mode: str) -> Any:
        return state["w"] if mode == "eval" else state

    assert said(lambda: plan(step, {"w": W}, "eval"), ArgumentError) == (
        "step: the argument mode is no array: 'eval' (str); if the program depends on its value, mark it static: "
        "static_argnames='mode'"
    )
    text = said(lambda: plan(step, {"w": W, "name": "a"}, X), ArgumentError)
    assert "state['name'] is no array: 'a' (str); if the program depends on its value, keep it apart" in text


def test_a_number_that_was_meant_to_be_static() -> None:
    def step(w: Any, train: bool) -> Any:  # noqa: FBT001
        return w + 1 if train else w

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        plan(step, W, True)
    assert "train=True is traced: if the program depends on it, static_argnames='train'" in caught.value.__notes__


def test_a_step_that_returns_nothing_says_so() -> None:
    def step(w: Any) -> None:
        w.sum()

    assert plan(step, W).record.notes == ("step returns no array, so that nothing of it is computed",)


def test_fewer_devices_than_the_plan_has() -> None:
    text = said(plan(product, W, X, mesh={"data": 16}, hardware="h100:2x8").mesh, MeshError)
    assert text.startswith("the mesh data=16 needs 16 devices; this process sees 8\n  run it where they are")
