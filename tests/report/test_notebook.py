"""What a notebook shows: results as text that keeps its columns, and the current stage in one line."""

import io
import logging
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autoshard
from autoshard.report import notebook, progress
from autoshard.report.tables import short_place, time_text


def tiny() -> autoshard.SolvedPlan:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return autoshard.plan(lambda w, x: jnp.sum(x @ w), x, x, mesh={"data": 8}, hardware="cpu:8")


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a fake kernel's cell showed."""
    shown: list[str] = []

    class Handle:
        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(bundle["text/plain"])

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(bundle["text/plain"])
        return Handle()

    kernel: Any = ModuleType("ipykernel.zmqshell")
    kernel.ZMQInteractiveShell = SimpleNamespace(initialized=lambda: True)
    names = {"/tmp/ipykernel_7/123.py": ("Cell", "In[3]")}
    python: Any = ModuleType("IPython")
    python.get_ipython = lambda: SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    front: Any = ModuleType("IPython.display")
    front.display = display
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", kernel)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", front)
    return shown


def test_a_cell_sees_the_stages_and_is_empty_afterwards(cell: list[str]) -> None:
    log = logging.getLogger("autoshard")
    with autoshard.progress():
        log.debug("", extra={"stage": "price"})
    assert cell == ["trace …", "solve …", ""]
    assert not log.handlers


@pytest.mark.usefixtures("cell")
def test_a_source_line_of_a_cell_has_the_cell_s_name() -> None:
    notebook.cell_of.cache_clear()
    assert short_place("dot_general at /tmp/ipykernel_7/123.py:20 (loss)") == "dot_general at In[3]:20 (loss)"
    assert short_place("dot_general at /home/me/model.py:20 (loss)") == "dot_general at model.py:20 (loss)"
    assert short_place("/tmp/ipykernel_7/456.py:20") == "cell:20"
    notebook.cell_of.cache_clear()


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with autoshard.progress():
        logging.getLogger("autoshard").debug("", extra={"stage": "price"})
    assert capsys.readouterr() == ("", "")


def test_a_plan_is_shown_as_its_summary() -> None:
    plan = tiny()
    shown = plan._repr_html_()
    assert shown.startswith("<pre")
    assert "&lt;lambda&gt; on data=8 (cpu:8)" in shown
    assert "<lambda>" not in shown


def test_text_is_written_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    plan = tiny()
    assert "data=8" in plan._repr_html_()
    assert "data=8" in plan.summary()
    explained: Any = plan.explain("x")
    assert "lies" in explained._repr_html_()


def test_an_evaluation_and_a_diff_are_shown() -> None:
    plan, x = tiny(), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    hand = autoshard.evaluate(lambda w, x: jnp.sum(x @ w), x, x, mesh={"data": 8}, hardware="cpu:8")
    assert "on data=8 (cpu:8)" in hand._repr_html_()
    assert "lambda" in plan.diff(plan)._repr_html_()


def test_what_is_printed_is_shown() -> None:
    class Result(notebook.Shown):
        def __str__(self) -> str:
            return "a < b"

    assert "a &lt; b</pre>" in Result()._repr_html_()
    assert Result()._repr_mimebundle_()["text/plain"] == "a < b"


@pytest.mark.parametrize(("seconds", "text"), [(4e-22, "0 µs"), (0.0, "0 µs"), (1e-9, "0.001 µs"), (2e-3, "2 ms")])
def test_times_below_a_cycle_are_none(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_long_stage_leaves_room_for_the_time() -> None:
    out = io.StringIO()
    with progress.shown(Console(file=out, force_terminal=True, width=60), "trace"):
        long = "standard layout 2 of 2, about 34 s left: solve: 0.58 ms, within 0.4% of the optimum"
        logging.getLogger("autoshard").debug("now", extra={"now": long})
    text = re.sub(r"\x1b\[[\d;?]*\w", "", out.getvalue())
    assert "0:00:00" in text.split("layout 2 of 2")[-1]
    assert "…" not in text.split("layout 2 of 2")[-1]
    assert "the optimum" in " ".join(text.split())
