"""Ours beside hand-written layouts: each on its best mesh, ranked, and what the tables say."""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from autoshard import cli
from autoshard.api.compare import KINDS, LONGEST, OURS, Compared, Hand, Template, compare
from autoshard.api.evaluate import evaluate
from autoshard.report.tables import time_text

H100 = "h100:1x8"
GAP = 1e-2
ROWS, WIDTH, HIDDEN = 1024, 512, 2048


def step(params: Any, x: jax.Array) -> Any:
    """One step of gradient descent."""

    def loss(p: Any) -> jax.Array:
        return ((jnp.tanh(x @ p["w_up"]) @ p["w_down"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def constrained(params: Any, x: jax.Array, mesh: AbstractMesh, spec: P) -> Any:
    return step(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))


def arguments() -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct
    weights = {"w_up": shape((WIDTH, HIDDEN), jnp.float32), "w_down": shape((HIDDEN, WIDTH), jnp.float32)}
    return weights, shape((ROWS, WIDTH), jnp.float32)


def by_rows(mesh: AbstractMesh) -> Hand:
    whole = {"w_up": P(), "w_down": P()}
    fn = lambda params, x: constrained(params, x, mesh, P("data"))
    return Hand(in_specs=(whole, P("data")), out_specs=whole, fn=fn)


def megatron(mesh: AbstractMesh) -> Hand:
    if mesh.shape["model"] > 4:
        raise ValueError(f"6 heads do not divide by {mesh.shape['model']}")
    split = {"w_up": P(None, "model"), "w_down": P("model", None)}
    return Hand(in_specs=(split, P("data")), out_specs=split)


def refuses(mesh: AbstractMesh) -> Hand:
    raise ValueError(f"nothing divides by {mesh.size}")


LAYOUTS = {
    "dp": Template(axes=("data",), write=by_rows),
    "megatron_with_a_long_name": Template(axes=("data", "model"), write=megatron),
    "refuses": Template(axes=("data",), write=refuses),
}


def compared(**options: Any) -> Compared:
    given: dict[str, Any] = {"hardware": H100, "layouts": LAYOUTS, "donate_argnums": 0, "rel_gap": GAP, **options}
    return compare(step, *arguments(), **given)


@cache
def board() -> Compared:
    return compared()


def test_ours_is_never_slower_in_our_own_model() -> None:
    """By construction: a consistency check."""
    found = board()
    assert {c.name for c in found.contenders} == {OURS, "dp", "megatron_with_a_long_name"}
    for c in found.contenders:
        assert found.ours.record.cost.step_s <= (1 + GAP) * c.record.cost.step_s
    assert found.ratio is not None
    assert found.ratio <= 1 + GAP
    steps = [c.record.cost.step_s for c in found.contenders]
    assert steps == sorted(steps)


def test_a_layout_stands_on_its_best_mesh() -> None:
    """Of those that it takes: here (2, 4) and (4, 2)."""

    def on(data: int, model: int) -> float:
        split = {"w_up": P(None, "model"), "w_down": P("model", None)}
        return evaluate(
            step,
            *arguments(),
            mesh={"data": data, "model": model},
            hardware=H100,
            in_specs=(split, P("data")),
            out_specs=split,
            donate_argnums=0,
        ).cost

    (found,) = (c for c in board().contenders if c.name.startswith("megatron"))
    costs = {(2, 4): on(2, 4), (4, 2): on(4, 2)}
    assert found.record.mesh.sizes == min(costs, key=lambda sizes: costs[sizes])
    assert found.record.cost.step_s == pytest.approx(min(costs.values()))
    assert len(set(costs.values())) == 2


def test_a_given_mesh_is_the_only_one() -> None:
    """A layout of one axis takes all devices; one whose rules exclude the mesh is left out."""
    found = compared(mesh={"data": 4, "model": 2})
    meshes = {c.name: c.record.mesh.shape for c in found.contenders}
    assert meshes == {
        OURS: {"data": 4, "model": 2},
        "dp": {"data": 8},
        "megatron_with_a_long_name": {"data": 4, "model": 2},
    }
    assert "megatron_with_a_long_name" in compared(mesh={"data": 1, "model": 8}).left_out


def test_a_layout_that_can_not_be_is_left_out_with_its_reason() -> None:
    assert board().left_out == {"refuses": "nothing divides by 8"}
    assert "left out: nothing divides by 8" in str(board())


def test_what_does_not_fit_comes_last_and_does_not_count() -> None:
    peaks = {c.name: c.record.memory.peak_bytes for c in board().contenders}
    found = compared(memory=peaks["dp"] - 1, layouts={"dp": LAYOUTS["dp"]})
    assert [(c.name, c.fits) for c in found.contenders] == [(OURS, True), ("dp", False)]
    assert found.ratio is None
    assert "no fit" in str(found)


def test_the_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(board())
    assert max(map(len, text.splitlines())) <= 80
    for words in ("of the best hand-written", "÷ ours", "hidden", "bytes per device", "dp  "):
        assert words in text


def test_the_chart_has_a_bar_per_layout_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a bar are in proportion to compute and waiting; one that is cut says so."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(board()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("step, predicted: █"))
    bars = lines[start + 2 : start + 2 + len(board().contenders)]
    assert bars[0].startswith(" autoshard ")
    steps = [c.record.cost.step_s for c in board().contenders]
    for bar, c in zip(bars, board().contenders, strict=True):
        cost, computes, waits = c.record.cost, bar.count("█"), bar.count("░")
        assert bar.endswith(time_text(cost.step_s))
        if cost.step_s <= LONGEST * min(steps):
            assert computes == pytest.approx(cost.compute_s / cost.step_s * (computes + waits), abs=1)
        else:
            assert "…  " in bar
    hopeless = replace(board().ours.record, memory=replace(board().ours.record.memory, limit_bytes=1))
    none = replace(board(), contenders=(replace(board().ours, record=hopeless),))
    assert "█" not in str(none).partition("communication")[2]


def test_every_kind_of_collective_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = board().ours.record.collectives[:1]
    every = tuple(replace(row, kind=kind) for row in rows for kind in KINDS)
    longest = replace(board().ours, record=replace(board().ours.record, collectives=every))
    text = str(replace(board(), contenders=(longest, *board().contenders)))
    assert max(map(len, text.splitlines())) <= 80
    assert " megatron_with_a_ " in text


def test_bytes_are_those_of_the_closed_form() -> None:
    """Data parallelism reduces every gradient, and the loss that nobody asks for not at all."""
    (dp,) = (c for c in board().contenders if c.name == "dp")
    assert dp.moved == {"all-reduce": 2 * 4 * WIDTH * HIDDEN}


def test_json_has_ledgers_that_add_up() -> None:
    told = json.loads(json.dumps(board().to_json()))
    assert told["left_out"] == {"refuses": "nothing divides by 8"}
    steps = {row["layout"]: row["step_s"] for row in told["layouts"]}
    for row in told["layouts"]:
        assert (row["ledger"] is None) == (row["layout"] == OURS)
        if row["ledger"] is not None:
            assert row["ledger"]["lost_s"] == pytest.approx(steps[row["layout"]] - steps[OURS])


# --- the command -----------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["compare", *arguments])


TARGET = ("models:linear_tiny", "--set", "layers=2", "--set", "batch=64", "--hardware", "cpu:4", "--donate", "0")


def test_the_command_knows_the_layouts_of_the_models() -> None:
    done = run(*TARGET, "--layout", "fsdp", "--layout", "dp_megatron", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    meshes = {row["layout"]: row["mesh"] for row in told["layouts"]}
    assert meshes.pop(OURS)
    assert meshes == {"fsdp": {"data": 4}, "dp_megatron": {"data": 2, "model": 2}}
    assert all(row["fits"] for row in told["layouts"])


def test_the_command_takes_a_users_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layouts_of_ours.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.sharding import PartitionSpec as P\n"
        "from autoshard.api.compare import Hand, Template\n"
        "x = jax.ShapeDtypeStruct((256, 256), jnp.float32)\n"
        "def target():\n    return jnp.matmul, (x, x)\n"
        "def rows():\n"
        "    write = lambda mesh: Hand(in_specs=(P('data'), P()), out_specs=P('data'))\n"
        "    return {'rows': Template(axes=('data',), write=write)}\n"
        "def wrong():\n    return ['rows']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = run("layouts_of_ours:target", "--layouts", "layouts_of_ours:rows", "--hardware", "cpu:4")
    assert done.exit_code == 0, done.output
    assert "rows" in done.stdout
    refused = run("layouts_of_ours:target", "--layouts", "layouts_of_ours:wrong", "--hardware", "cpu:4")
    assert "returned a list" in str(refused.exception)
    unknown = run("layouts_of_ours:target", "--hardware", "cpu:4")
    assert "say --layouts" in str(unknown.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models:linear_tiny",), "say what to compare for"),
        ((*TARGET, "--layout", "zero9"), "no layout named zero9 of `models:linear_tiny`; there are: dp, "),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert said in str(done.exception)
