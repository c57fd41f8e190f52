"""Plans that recompute: they compute what the program does, and hold what their files say."""

import json
import logging
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import autoshard
import cost_models
from autoshard import _jax, cli
from autoshard.api.options import Options
from autoshard.api.planning import plan_request, requests_of
from autoshard.errors import AutoshardError, InfeasibleError, PlanFileError, PlanMismatchError
from autoshard.explain.diff import diff, text
from autoshard.ir.recomputation import Recomputation, Remat
from autoshard.ir.recomputed import recomputation_of, savable
from autoshard.ir.saved_values import SavedValues
from autoshard.planner import view
from autoshard.planner.backward_passes import repeated_text
from autoshard.planner.recomputation_space import keeping
from autoshard.planner.record import KEEPS
from autoshard.planner.request import PlanRequest
from autoshard.problem.memory_profile import kept_bytes
from autoshard.problem.ports import KEPT, REPEATED
from autoshard.problem.repeated import repeated_work
from autoshard.report.tables import bytes_text
from tests.ir.test_recompute import PROGRAMS, drawn

Program = tuple[Callable[..., Any], tuple[Any, ...]]

SPLIT = {"data": 2, "model": 2}
PLAIN = {"data": 4}
ROWS = 128  # times as many as in the programs of one page: activations are most of what lies in memory


def wide(program: Program) -> Program:
    fn, (params, x, *rest) = program
    return fn, (params, np.tile(x, (ROWS, 1)), *rest)


def question(program: Program, **options: Any) -> tuple[PlanRequest, Options]:
    given: dict[str, Any] = {"mesh": SPLIT, "hardware": "cpu:4", "rel_gap": 1e-2, **options}
    asked = Options(**given)
    return requests_of(program[0], program[1], {}, asked)[0], asked


def planned(program: Program, chosen: Recomputation | None) -> autoshard.SolvedPlan:
    """The plan of a program that keeps these values."""
    asked, options = question(program)
    return plan_request(asked if chosen is None else keeping(asked, chosen), options)


def assert_same(got: Any, expected: Any, rel: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= rel * np.abs(b).max()


def random_kept(saved: SavedValues, remat: Remat, seed: str) -> Recomputation:
    """Some values are kept, and some of these in the host's memory."""
    rng = random.Random(seed)
    kept = drawn(saved, rng)
    return recomputation_of(saved, kept, remat, {at for at in saved.stackable if rng.random() < 0.5})


CASES: list[tuple[str, Remat]] = [*((name, "add") for name in PROGRAMS), ("checkpointed", "free")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
@pytest.mark.parametrize(("name", "remat"), CASES)
def test_plans_of_random_kept_values_compute_the_same(name: str, remat: Remat, seed: int) -> None:
    program = PROGRAMS[name]()
    asked, _ = question(program)
    chosen = random_kept(savable(asked.traced, remat), remat, f"{name} {remat} {seed}")
    plan = planned(program, chosen)
    assert plan.record.recomputation == chosen
    assert_same(plan.jit()(*program[1]), jax.jit(program[0])(*program[1]))


@pytest.mark.parametrize("name", ["scanned", "accumulated"])
def test_plans_under_tight_memory_compute_the_same(name: str) -> None:
    program, options = tight(name)
    plan = autoshard.plan(program[0], *program[1], **options)
    assert plan.record.recomputation is not None
    assert plan.record.memory.peak_bytes <= options["memory"]
    assert_same(plan.jit()(*program[1]), jax.jit(program[0])(*program[1]))


@cache
def tight(name: str = "scanned") -> tuple[Program, dict[str, Any]]:
    """A program, and options under which it fits in memory only if it recomputes."""
    program = wide(PROGRAMS[name]())
    options: dict[str, Any] = {"mesh": PLAIN, "hardware": "cpu:4", "rel_gap": 1e-2}
    written = autoshard.plan(program[0], *program[1], **options, remat="written")
    return program, {**options, "memory": int(0.7 * written.record.memory.peak_bytes)}


@cache
def recomputing() -> autoshard.SolvedPlan:
    program, options = tight()
    return autoshard.plan(program[0], *program[1], **options)


def primitives(jitted: Any, args: Any) -> Counter[str]:
    """How many equations of each primitive a function has."""
    return Counter(eqn.primitive.name for eqn in _jax.equations(jitted.trace(*args).jaxpr))


def test_a_saved_plan_runs() -> None:
    (fn, args), _ = tight()
    plan = recomputing()
    again = pickle.loads(pickle.dumps(plan))
    assert again.record == plan.record
    repeating = primitives(plan.jit(), args)
    assert primitives(again.bind(fn, *args).jit(), args) == repeating != primitives(jax.jit(fn), args)
    assert_same(again.jit(fn)(*args), jax.jit(fn)(*args))


def test_only_plans_that_recompute_have_the_new_schema(tmp_path: Path) -> None:
    (fn, args), options = tight()
    more: dict[str, Any] = {**options, "memory": None, "remat": "written"}
    written = autoshard.plan(fn, *args, **more)
    assert written.record.recomputation is None
    for plan, schema in ((recomputing(), 2), (written, 1)):
        plan.save(tmp_path / "plan.json")
        document = json.loads((tmp_path / "plan.json").read_text())
        assert document["schema"] == schema
        assert ("recomputation" in document) == (schema == 2)
        assert autoshard.load(tmp_path / "plan.json").record == plan.record


def test_a_locked_plan_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fn, args), options = tight()
    lock = tmp_path / "plan.json"
    made = autoshard.plan(fn, *args, **options, lock=lock)
    monkeypatch.setenv("CI", "1")
    again = autoshard.plan(fn, *args, **options, lock=lock)
    assert again.record == made.record
    assert primitives(again.jit(), args) == primitives(made.jit(), args) != primitives(jax.jit(fn), args)
    assert_same(again.jit()(*args), jax.jit(fn)(*args))
    with pytest.raises(PlanMismatchError, match="recomputing"):
        autoshard.plan(fn, *args, **options, lock=lock, remat="written")


def test_a_lock_of_an_unrolled_program_has_the_places_of_what_it_runs(tmp_path: Path) -> None:
    """Its constraints are at equations behind those that are repeated."""
    program = wide(PROGRAMS["unrolled"]())
    options: dict[str, Any] = {"mesh": SPLIT, "hardware": "cpu:4", "constraints": "all", "remat": "add"}
    asked, how = question(program, **options)
    saved = savable(asked.traced, "add")
    plan = plan_request(keeping(asked, recomputation_of(saved, [], "add")), how)
    lock = tmp_path / "plan.json"
    plan.save(lock)
    found = autoshard.plan(program[0], *program[1], **options, rel_gap=1e-2, lock=lock)
    assert found.record == plan.record
    assert_same(found.jit()(*program[1]), jax.jit(program[0])(*program[1]))


def test_a_cached_plan_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (fn, args), options = tight()
    with caplog.at_level(logging.INFO, "autoshard"):
        made = autoshard.plan(fn, *args, **options, cache=tmp_path)
        caplog.clear()
        again = autoshard.plan(fn, *args, **options, cache=tmp_path)
    assert any("plan from" in message for message in caplog.messages)
    assert again.record == made.record
    assert primitives(again.jit(), args) == primitives(made.jit(), args) != primitives(jax.jit(fn), args)
    assert_same(again.jit()(*args), jax.jit(fn)(*args))
    assert again.planned.record.pins == made.record.pins


def test_decorated_functions_recompute() -> None:
    (fn, args), options = tight()
    decorated = autoshard.jit(fn, **options, remat="add")
    assert_same(decorated(*args), jax.jit(fn)(*args))
    assert decorated.plan(*args).record.recomputation is not None


def test_what_is_kept_is_said(tmp_path: Path) -> None:
    (fn, args), _ = tight()
    plan = recomputing()
    assert plan.recomputation is not None
    assert {value.place for value in plan.kept} == {text for text in plan.recomputation.kept if "^" not in text}
    for value in plan.kept:
        assert value.nbytes == value.trips * np.prod(value.shape) * np.dtype(value.dtype).itemsize
    assert any(value.where.startswith(str(Path(__file__).parents[1])) for value in plan.kept)
    assert "each kept or repeated" in plan.record.certificate.space
    (note,) = [note for note in plan.record.notes if note.startswith(KEEPS)]
    assert " ".join(note.split()) in " ".join(plan.summary().split())
    assignment = plan.planned.assignment
    held, work = kept_bytes(assignment.decisions, assignment.choice), repeated_work(assignment)
    assert work is not None
    assert 0 < held <= plan.record.memory.peak_bytes
    assert f"{len(plan.kept)} values kept ({bytes_text(held)} per device)" in note
    assert note.endswith(f"repeat {repeated_text(work, plan.cost)}")
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded.recomputation == plan.recomputation
    assert loaded.bind(fn, *args).kept == plan.kept
    with pytest.raises(PlanMismatchError, match="bind"):
        getattr(loaded, "kept")  # noqa: B009  (type checkers know that it has none)


def test_what_a_program_s_own_checkpoints_repeat_is_said() -> None:
    fn, args = wide(PROGRAMS["checkpointed"]())
    plan = autoshard.plan(fn, *args, mesh=PLAIN, hardware="cpu:4", rel_gap=1e-2, remat="written")
    (row,) = [line for line in plan.summary().splitlines() if line.split()[:1] == ["repeated"]]
    assert "as the program says" in row
    assert not any("repeat" in note for note in plan.record.notes)  # the file is as it was


def test_the_page_tells_what_is_kept_from_what_is_repeated() -> None:
    plan = recomputing()
    shown = view.of_plan(plan.planned, cost_models.hardware("cpu:4"))
    kinds = shown["memory"]["kinds"]
    assert max(kinds[KEPT]) > 0 < max(kinds[REPEATED])
    assert max(map(sum, zip(*kinds.values(), strict=True))) == plan.record.memory.peak_bytes
    assert shown["backward"]["kept_bytes"] >= max(kinds[KEPT])
    assert {type(bar["repeated"]) for bar in shown["timeline"]} == {bool}
    assert f"| {REPEATED} |" in view.markdown(shown)
    html = plan.to_html()
    assert "--kept" in html
    assert "--again" in html


def test_a_diff_says_that_one_plan_recomputes() -> None:
    (fn, args), options = tight()
    more: dict[str, Any] = {**options, "memory": None, "remat": "written"}
    written = autoshard.plan(fn, *args, **more).record
    found = diff(written, recomputing().record)
    said = " ".join(text(found, width=100).split())
    assert "before keep what the program says for backward passes; after backward passes find" in said
    chosen = recomputing().record.recomputation
    assert chosen is not None
    told = found.to_json()["recomputation"]
    assert (told["before"], told["after"]["kept"]) == (None, list(chosen.kept))
    other = replace(recomputing().record, recomputation=replace(chosen, kept=chosen.kept[1:]))
    assert "1 value is kept in one of them only" in " ".join(text(diff(recomputing().record, other)).split())
    assert "recomput" not in text(diff(written, written))


def built() -> Program:
    """What the command line plans."""
    return tight()[0]


def test_the_command_line_decides_as_asked(tmp_path: Path) -> None:
    file, options = tmp_path / "plan.json", tight()[1]
    asked = [
        "plan",
        f"{__name__}:built",
        "--mesh",
        "data=4",
        "--hardware",
        "cpu:4",
        "--gap",
        "0.01",
        "--out",
        str(file),
    ]
    asked += ["--memory", str(options["memory"])]
    run = CliRunner()
    assert isinstance(run.invoke(cli.app, [*asked, "--remat", "written"]).exception, InfeasibleError)
    assert "\n  kept " in run.invoke(cli.app, asked).stdout
    assert autoshard.load(file).recomputation == recomputing().recomputation
    assert run.invoke(cli.app, [*asked, "--remat", "free"]).exit_code == 0
    assert getattr(autoshard.load(file).recomputation, "remat", "") == "free"
    assert run.invoke(cli.app, [*asked, "--remat", "less"]).exit_code == 2


def test_what_gains_nothing_stays_as_written() -> None:
    """To keep a value costs nothing while memory has room for it: the plan is that of the program as written."""
    fn, args = wide(PROGRAMS["unrolled"]())
    options: dict[str, Any] = {"mesh": PLAIN, "hardware": "cpu:4", "rel_gap": 1e-2}
    plan = autoshard.plan(fn, *args, **options)
    assert plan.recomputation is None
    assert not plan.kept
    written = autoshard.plan(fn, *args, **options, remat="written")
    certificate = plan.record.certificate
    assert "nothing is repeated" in certificate.space
    assert replace(plan.record, certificate=written.record.certificate) == written.record
    assert replace(certificate, space=written.record.certificate.space) == written.record.certificate


def test_what_repeating_gains_too_little_for_stays_as_written() -> None:
    """Where it is searched, the certificate says how much repeating could save at most."""
    fn, args = wide(PROGRAMS["unrolled"]())
    options: dict[str, Any] = {"mesh": PLAIN, "hardware": "cpu:4", "rel_gap": 1e-2}
    plan = autoshard.plan(fn, *args, **options, remat="free")
    written = autoshard.plan(fn, *args, **options, remat="written")
    assert plan.recomputation is None
    assert "of which none saves more than" in plan.record.certificate.space
    assert replace(plan.record, certificate=written.record.certificate) == written.record


def test_infeasible_plans_say_that_recomputation_was_tried() -> None:
    (fn, args), options = tight()
    with pytest.raises(InfeasibleError) as written:
        autoshard.plan(fn, *args, **options, remat="written")
    assert 'remat="add"' in str(written.value)
    less: dict[str, Any] = {**options, "memory": 20_000}
    for remat in ("add", "free"):
        with pytest.raises(
            InfeasibleError, match="as far as was tried of what backward passes keep or repeat"
        ) as tried:
            autoshard.plan(fn, *args, **less, remat=remat)
        assert "jax.checkpoint" not in str(tried.value)
        assert "remat=" not in str(tried.value)
        assert "the smallest peak found is" in str(tried.value)


def damaged() -> dict[str, Any]:
    """What a file may say of what is kept, by what is wrong with it."""
    good = recomputing().record.recomputation
    assert good is not None
    kept = list(good.kept)
    return {
        "null": None,
        "a list": [],
        "written": {"remat": "written", "kept": kept},
        "no values": {"remat": good.remat},
        "nothing kept": {"remat": good.remat, "kept": []},
        "no such value": {"remat": good.remat, "kept": [*kept, "999:0"]},
        "no place": {"remat": good.remat, "kept": [*kept, "💥"]},
        "a long number": {"remat": good.remat, "kept": [*kept, "1:" + "9" * 5000]},
        "a number": {"remat": good.remat, "kept": [*kept, 7]},
        "twice": {"remat": good.remat, "kept": [kept[0], *kept]},
        "more": {"remat": good.remat, "kept": kept, "more": 1},
    }


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (fn, args), options = tight()
    document = json.loads(recomputing().record.dumps())
    document["emitted"] = "needed"
    path = tmp_path / "plan.json"
    for recomputation in damaged().values():
        path.write_text(json.dumps({**document, "recomputation": recomputation}))
        with pytest.raises(PlanFileError):
            autoshard.load(path).bind(fn, *args)
        with pytest.raises(PlanFileError):
            autoshard.plan(fn, *args, **options, lock=path)


def test_any_kept_values_are_refused_or_run(tmp_path: Path) -> None:
    (fn, args), _ = tight()
    document = json.loads(recomputing().record.dumps())
    saved = savable(recomputing().planned.space.request.traced, "add")
    every = sorted({str(value.id) for one in saved.passes for value in one.values})
    draw = random.Random(0)
    outcomes: set[str] = set()
    for _ in range(30):
        share = draw.random()
        document["recomputation"]["kept"] = [text for text in every if draw.random() < share]
        (tmp_path / "plan.json").write_text(json.dumps(document))
        try:
            autoshard.load(tmp_path / "plan.json").bind(fn, *args).jit().lower(*args)
            outcomes.add("runs")
        except AutoshardError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"runs", "PlanFileError"}


PROGRAM = """
from tests import conftest
from tests.end_to_end.test_recomputing import recomputing
print(recomputing().record.dumps(), end="")
"""


def test_the_same_input_gives_the_same_file() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == recomputing().record.dumps()
