"""The command line: what it prints, where, and with which exit code."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console
from typer.testing import CliRunner

import autoshard
import cost_models
from autoshard import cli
from autoshard.backends import compile
from autoshard.cli.written import assignments, byte_count, mesh_axes, pin_of
from autoshard.errors import MeshError, SpecError, TargetError
from autoshard.explore.builder import load_target
from autoshard.planner.stages import Stage, observed
from autoshard.report import progress

ROOT = Path(__file__).parents[1].parent
SMALL = [
    "models:linear_tiny",
    "--set",
    "compute_dtype=float32",
    "--set",
    "batch=8",
    "--set",
    "width=8",
    "--set",
    "layers=2",
]
ON = ["--mesh", "data=2,model=4", "--hardware", "cpu:8", "--donate", "0"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


def refused(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails writes to standard error; nothing stands on standard output."""
    monkeypatch.setattr(sys, "argv", ["autoshard", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    return err


def test_without_a_mesh_the_best_one_is_taken() -> None:
    done = run(
        "plan", *SMALL, "--hardware", "cpu:4", "--donate", "0", "--host-local", "batch", "--hosts", "2", "--json"
    )
    assert done.exit_code == 0, done.output
    fn, args = load_target(SMALL[0], assignments(SMALL[2::2], "--set"))
    same = autoshard.plan(fn, *args, hardware="cpu:4", donate_argnums=0, host_local="batch", hosts=2)
    assert prod(same.record.mesh.sizes) == 4
    assert json.loads(done.stdout)["mesh"] == json.loads(same.record.dumps())["mesh"]


# --- Ctrl-C --------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[None]:
    """A process that hears Ctrl-C: a shell's background jobs do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler  # as it was


def pressed(stage: str) -> Any:
    """Presses Ctrl-C when a stage is done."""

    def press(done: Stage) -> None:
        if done.name == stage:
            signal.raise_signal(signal.SIGINT)

    return observed(press)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_keeps_the_plan_that_was_found(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pressed("solve"):
        done = run("plan", *SMALL, *ON, "--out", str(file))
    assert done.exit_code == 0, done.output
    assert "all constraints are emitted: the call was interrupted" in " ".join(done.stdout.split())
    assert "interrupted: ends with what was found so far" in done.stderr
    assert autoshard.load(file).record.pins.made


@pytest.mark.usefixtures("heard")
def test_ctrl_c_before_there_is_a_plan_ends_it() -> None:
    with pressed("graph"):
        done = run("plan", *SMALL, *ON)
    assert done.exit_code == 130
    assert "before there was any plan" in done.stderr
    assert not done.stdout


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_a_compiler_runs_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    assert run("plan", *SMALL, *ON, "--out", str(file)).exit_code == 0
    monkeypatch.setattr(compile.subprocess, "run", lambda *_, **__: signal.raise_signal(signal.SIGINT))  # the child's
    for given, again in ((["--plan", str(file)], False), (ON, True)):
        done = run("verify", *SMALL, *given, "--compiler", "cpu")
        assert done.exit_code == 130
        assert "interrupted while it compiled: nothing is compared" in done.stderr
        assert ("writes the plan" in done.stderr) is again
        assert not done.stdout


# --- Before any command ----------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--version"], ["diff", "--help"]])
def test_the_package_is_a_command(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "autoshard", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert autoshard.__version__ in done.stdout or "plan files" in done.stdout


TARGETS = """
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: Any
    tx: Any = field(default=None, metadata={"static": True})


def train():
    def step(state, x):
        g = jax.grad(lambda p: ((x @ p) ** 2).mean())(state.params)
        return replace(state, params=state.params - g)

    return step, (State(jnp.ones((64, 64)), tx=object()), jnp.ones((64, 64)))


def broken():
    return {}["nothing"]


def wrong():
    return (lambda x: x @ jnp.ones((3, 3))), (jnp.ones((4, 4)),)
"""


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "own_targets:broken",
            ["TargetError: `own_targets:broken` raised KeyError: 'nothing'", "own_targets.py:", "(broken)"],
        ),
        ("own_targets:wrong", ["TypeError: dot_general requires", "own_targets.py:", "AUTOSHARD_TRACEBACK=1 shows"]),
        ("own_targets.py:train", ["is a file; write its module: own_targets:train"]),
    ],
)
def test_what_a_target_raises_is_said_in_lines_with_its_place(
    target: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    said = refused("plan", target, "--hardware", "cpu:8", monkeypatch=monkeypatch, capsys=capsys)
    assert all(word in said for word in words), said
    assert len(said.splitlines()) <= 3


def test_standard_layouts_are_of_the_state_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A builder's second call returns a state with another optimizer, which is part of its tree."""
    (tmp_path / "own_states.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("report", "own_states:train", *ON, "--json")
    rows = json.loads(result.stdout[result.stdout.index("{") :])["compared"]
    assert [row["name"] for row in rows] == ["data parallel", "fully sharded"]
    assert "is left out" not in result.output


def test_without_a_mesh_the_best_one_is_planned() -> None:
    record = json.loads(run("plan", *SMALL, "--hardware", "cpu:4", "--donate", "0", "--json").stdout)
    assert prod(record["mesh"].values()) == 4


# --- plan ----------------------------------------------------------------------------


def test_plan_prints_the_summary(tmp_path: Path) -> None:
    result = run("plan", *SMALL, *ON, "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 0
    assert result.stdout.startswith("train_step on data=2 × model=4 (cpu:8)\n")
    assert "state.opt_state.0.{mu,nu}" in result.stdout
    assert autoshard.load(tmp_path / "plan.json").record.name == "train_step"


def test_plan_as_json_is_the_plan_file(tmp_path: Path) -> None:
    result = run("plan", *SMALL, *ON, "--json", "--out", str(tmp_path / "plan.json"))
    assert result.stdout == (tmp_path / "plan.json").read_text()
    assert json.loads(result.stdout)["donated"] == list(range(8))


def test_options_reach_the_planner() -> None:
    pins = ["--pin", "**.params.layers.0.w=-,data+model", "--pin", "batch.x=?,-"]
    result = run("plan", *SMALL, *ON, *pins, "--memory", "1MiB", "--gap", "0.5", "--json")
    plan = json.loads(result.stdout)
    specs = {leaf["path"]: leaf["spec"] for leaf in plan["inputs"]}
    assert specs["state.params['layers'][0]['w']"] == [None, ["data", "model"]]
    assert specs["batch['x']"][1:] in ([], [None])
    assert plan["memory"]["limit_bytes"] == 2**20


def test_arguments_are_donated_by_name_too() -> None:
    by_name = run("plan", *SMALL, *ON[:-1], "state", "--json")
    assert by_name.stdout == run("plan", *SMALL, *ON, "--json").stdout


def test_a_plan_is_refined_by_a_compiler() -> None:
    plan = json.loads(run("plan", *SMALL, *ON, "--refine", "cpu", "--candidates", "2", "--json").stdout)
    assert plan["notes"][-1].startswith("refined by cpu: the schedules of 2 plans take ")


def test_a_compiler_leaves_constraints_out() -> None:
    needed = json.loads(run("plan", *SMALL, *ON, "--json").stdout)
    plan = json.loads(run("plan", *SMALL, *ON, "--constraints", "compiled", "--json").stdout)
    assert f"of {len(needed['constraints'])} constraints are left" in plan["notes"][-1]
    assert len(plan["constraints"]) <= len(needed["constraints"])


def test_shardy_has_no_schedule_to_refine_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused("plan", *SMALL, *ON, "--refine", "shardy", monkeypatch=monkeypatch, capsys=capsys)
    assert "refine='shardy': it is one of None, 'gpu', 'tpu', 'cpu'" in " ".join(error.split())


def test_nothing_but_the_plan_is_written() -> None:
    """Neither what plugins say of missing devices nor progress: standard error is no terminal here."""
    command = [sys.executable, "-c", "from autoshard.cli import main; main()", "plan", *SMALL, *ON, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert json.loads(done.stdout)["mesh"] == {"data": 2, "model": 4}


# --- verify --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    run("plan", *SMALL, *ON, "--pin", "**.w=-,model", "--pin", "batch.x=data,-", "--out", str(path))
    return path


def test_verify_a_plan_file(plan_file: Path) -> None:
    result = run("verify", *SMALL, "--plan", str(plan_file), "--compiler", "cpu")
    assert result.stdout.startswith("  verdict   MATCH (")
    assert result.exit_code == 0


def test_verify_as_json() -> None:
    result = run("verify", *SMALL, *ON, "--compiler", "cpu", "--json")
    assert json.loads(result.stdout)["compiler"] == "cpu"
    assert result.exit_code == (0 if json.loads(result.stdout)["ok"] else 1)


def test_verify_by_shardy_with_layouts_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ("--compiler", "shardy", "--layouts", "--trace", str(trace), "--tolerance", "0.01")
    result = run("verify", *SMALL, *ON, *options)
    assert result.exit_code == 0, result.stdout
    assert "within 1%" in result.stdout
    assert "are kept, by Shardy's propagation" in result.stdout
    assert json.loads(trace.read_text())["traceEvents"][0]["args"]["name"] == "predicted by the plan"


def test_a_plan_that_the_compiler_does_not_follow_fails(plan_file: Path, tmp_path: Path) -> None:
    plan = json.loads(plan_file.read_text())
    for promised in plan["collectives"]:
        promised["nbytes"] *= 3
    (tmp_path / "wrong.json").write_text(json.dumps(plan))
    result = run("verify", *SMALL, "--plan", str(tmp_path / "wrong.json"), "--compiler", "cpu")
    assert result.stdout.startswith("  verdict   NO MATCH: collectives (")
    assert result.exit_code == 1


# --- hardware ------------------------------------------------------------------------


def test_hardware_lists_the_catalogue() -> None:
    chips = json.loads(run("hardware", "--json").stdout)
    assert [chip["name"] for chip in chips] == list(cost_models.chips())
    shown = run("hardware").stdout
    assert all(f" {name} " in shown for name in cost_models.chips())


def test_hardware_of_one_chip() -> None:
    assert "peak_bfloat16_flops_per_s" in run("hardware", "h100").stdout
    shown = run("hardware", "h100:2x8").stdout
    assert shown.startswith("h100: NVIDIA H100 SXM 80 GB, 16 devices as 2x8\n")
    assert re.search(r"matmul is compute-bound from +295  tokens per ", shown)
    assert json.loads(run("hardware", "tpu-v5e:2x4", "--json").stdout)["devices"] == 8


def test_hardware_of_a_file(tmp_path: Path) -> None:
    mine = {"schema": "hardware/1", "kind": "chip", "name": "mine", "based_on": "h100", "numbers": {}}
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    assert run("hardware", str(tmp_path / "mine.json")).stdout.startswith("mine: ")


# --- Errors: one block, no traceback, exit code 2 ------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hardware", "h1000"], "UnknownHardwareError: unknown chip `h1000`: did you mean h100 or h800?"),
        (
            ["plan", *SMALL],
            "MeshError: say what to plan for, as in --hardware h100:1x8; the mesh is the best one, or as in --mesh ",
        ),
        (["plan", "models", *ON], "TargetError: cannot read the target `models`: write package.module:builder"),
        (["plan", "nowhere:f", *ON], "TargetError: no module named `nowhere`; it is neither in "),
        (["plan", "models:gpt_2_small", *ON], "TargetError: `models` has no `gpt_2_small`"),
        (["plan", "models:__name__", *ON], "TargetError: `models:__name__` is a str, not a function"),
        (["plan", "models:names", *ON], "TargetError: `models:names` returned a tuple; a builder returns (fn, args)"),
        (["plan", "models:find", *ON], "TargetError: `models:find` cannot be called with no arguments: "),
        (["plan", *SMALL, *ON, "--set", "bach=3"], "cannot be called with compute_dtype, batch, width, layers, bach: "),
        (["plan", *SMALL, *ON, "--pin", "**.nothing=model"], "SpecError: the pin '**.nothing' matches no input"),
        (["plan", *SMALL, *ON, "--memory", "100B"], "InfeasibleError: no plan fits "),
        (["plan", *SMALL, *ON, "--out", "."], "SpecError: cannot write .: it is a folder"),
        (["verify", *SMALL, "--plan", "missing.json"], "PlanFileError: cannot read the plan file missing.json"),
        (["diff", "missing.json", "absent.json"], "PlanFileError: cannot read the plan file missing.json"),
    ],
)
def test_errors(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_a_plan_of_another_program_is_refused(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*SMALL[:-1], "layers=3", "--plan", str(plan_file)]
    says = refused("verify", *other, monkeypatch=monkeypatch, capsys=capsys)
    assert says.startswith("PlanMismatchError: the plan was made for ")


def test_a_target_s_missing_dependency_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TargetError, match=r"^no module named `not_installed_anywhere`; `needs_more` needs it: install it$"
    ):
        load_target("needs_more:f", {})


def test_a_target_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_program.py").write_text("def double(n=1):\n    return (lambda x: 2 * x), (float(n),)\n")
    monkeypatch.chdir(tmp_path)
    fn, args = load_target("my_program:double", {"n": 3})
    assert fn(*args) == 6.0


# --- What options say ----------------------------------------------------------------


def test_mesh_axes_keep_their_order() -> None:
    assert list(mesh_axes("model=4, data=2").items()) == [("model", 4), ("data", 2)]


@pytest.mark.parametrize("written", ["", "data", "data=two", "data=2,data=4", "2=data", "data=2,"])
def test_meshes_that_cannot_be_read(written: str) -> None:
    with pytest.raises(MeshError, match="write each axis once, as in data=2,model=4"):
        mesh_axes(written)


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [("64GB", 64 * 10**9), ("60GiB", 60 * 2**30), ("1.5e9", 1_500_000_000), ("2 mb", 2_000_000), ("17", 17)],
)
def test_byte_counts(written: str, nbytes: int) -> None:
    assert byte_count(written) == nbytes


@pytest.mark.parametrize("written", ["", "GB", "3XB", "-1GB", "1,5GB"])
def test_byte_counts_that_cannot_be_read(written: str) -> None:
    with pytest.raises(SpecError, match="as in 64GB or 60GiB"):
        byte_count(written)


@pytest.mark.parametrize(
    ("written", "pattern", "spec"),
    [
        ("**.embed=model,-", "**.embed", P("model", None)),
        ("x=data+model", "x", P(("data", "model"))),
        ("x=?,data·model", "x", P(P.UNCONSTRAINED, ("data", "model"))),
        ("a=b=-,model", "a=b", P(None, "model")),
        ("x=", "x", P(None)),
    ],
)
def test_pins(written: str, pattern: str, spec: P) -> None:
    assert pin_of(written) == (pattern, spec)


@pytest.mark.parametrize("written", ["x", "=model"])
def test_pins_that_cannot_be_read(written: str) -> None:
    with pytest.raises(SpecError, match="write PATTERN=SPEC"):
        pin_of(written)


def test_assignments_are_literals_or_text() -> None:
    written = ["batch=16", "rate=1e-3", "name=relu", "sizes=[1, 2]", "text=a=b"]
    assert assignments(written, "--set") == {
        "batch": 16,
        "rate": 1e-3,
        "name": "relu",
        "sizes": [1, 2],
        "text": "a=b",
    }
    with pytest.raises(TargetError, match="write key=value"):
        assignments(["16"], "--set")


def test_reference_models_lie_in_the_repository_alone(tmp_path: Path) -> None:
    code = "import sys; sys.modules['models'] = None; from autoshard import cli; cli.main()"  # as if not installed
    command = [sys.executable, "-c", code, "plan", "models:gpt2_small", *ON]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "reference models lie in its repository alone: run this in a clone of it" in " ".join(done.stderr.split())


# --- Progress ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        ([{"stage": "trace"}], "graph …"),
        ([{"stage": "trace"}, {"stage": "graph"}], "strategies …"),
        ([{"stage": "price"}, {"now": "solve: 3 ms"}], "solve: 3 ms"),
        ([{"stage": "solve"}, {"stage": "constraints"}], "constraints …"),
        ([{}], "begin …"),
        ([{"part": "mesh 2 of 3, about 9 s left"}, {"stage": "trace"}], "mesh 2 of 3, about 9 s left: graph …"),
        ([{"part": "mesh 3 of 3"}, {"part": ""}, {"stage": "trace"}], "graph …"),
    ],
)
def test_a_terminal_sees_the_stages(logged: list[dict[str, str]], shown: str) -> None:
    screen = io.StringIO()
    log = logging.getLogger("autoshard")
    with progress.shown(Console(file=screen, force_terminal=True, width=80), "begin"):
        for extra in logged:
            log.debug("", extra=extra)
    last = screen.getvalue().split("\x1b[2K")
    assert any(shown in frame for frame in last[-3:])
    assert log.level == logging.NOTSET
    assert not log.handlers


def test_a_loop_says_which_part_runs_and_how_long_yet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((0.0, 30.0, 400.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now_s))
    with caplog.at_level(logging.DEBUG, logger="autoshard"):
        assert list(progress.counted("abc", "mesh")) == ["a", "b", "c"]
        assert list(progress.counted("a", "mesh")) == ["a"]
    told = [entry.__dict__["part"] for entry in caplog.records]
    assert told == ["mesh 1 of 3", "mesh 2 of 3, about 60 s left", "mesh 3 of 3, about 3 min left", ""]


def test_planning_logs_every_stage(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="autoshard"):
        autoshard.plan(
            lambda w, x: jnp.sum(x @ w),
            jax.ShapeDtypeStruct((8, 8), jnp.float32),
            jax.ShapeDtypeStruct((8, 8), jnp.float32),
            mesh={"data": 8},
            hardware="cpu:8",
            for_grad=False,
        )
    done = [getattr(entry, "stage", None) for entry in caplog.records]
    assert tuple(stage for stage in done if stage is not None) == progress.STAGES


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    page = io.StringIO()
    with progress.shown(Console(file=page), "trace"):
        logging.getLogger("autoshard").debug("done", extra={"stage": "trace"})
    assert page.getvalue() == ""
