"""The commands search, explain, report and diff: what they print, and what they say to type instead."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autoshard import cli
from autoshard.cli.search import prices, varied
from autoshard.cli.written import chip_counts
from autoshard.errors import SpecError

SMALL = ["models:linear_tiny", "--set", "compute_dtype=float32", "--set", "width=8", "--set", "layers=2"]
ON = ["--mesh", "data=2", "--hardware", "cpu:2", "--donate", "0"]
SEARCHED = [*SMALL, "--hardware", "cpu", "--chips", "2", "--axes", "1", "--processes", "1"]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["autoshard", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_search_prints_json_markdown_and_a_page(tmp_path: Path) -> None:
    page = tmp_path / "search.html"
    written = json.loads(run("search", *SEARCHED, "--vary", "batch=8,16", "--json", "--html", str(page)))
    assert [row["choice"]["batch"] for row in written["rows"]] == [16, 8]
    assert written["verdict"] in page.read_text(encoding="utf-8")
    assert run("search", *SEARCHED, "--markdown").startswith("# Search: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--chips", "many"], "write 256, or 8,16,32 for a curve"),
        (["--price", "cheap"], "write 4.2, or h100=2.5,h200=3"),
        (["--tokens", "all"], "write 15T, 300B or 20x (per parameter)"),
        (["--hardware", "tpu-v5"], "tpu-v5"),
        (["--hardware", "tpu-v5p", "--chips", "100"], "write --chips 64 or --chips 128"),
        (["--axes", "9"], "write 1, 2 or 3"),
        (["--vary", "batch"], "write an argument and its values, as in batch=64,128"),
        (["--memory", "1B"], "take more chips"),
        (["--memory", "lots"], "write a number of bytes, as in 64GB or 60GiB"),
        (["--axes", "two"], "Invalid value for '--axes'"),
        (["--chips", "0"], "no slice of cpu has 0 chips; write --chips 1"),
        (["--processes", "0"], "write --processes 1 (processes=1), or leave it out"),
        (["--tokens", "-3T"], "write 15T, 300B or 20x (per parameter)"),
        (["--price", "h100=2"], "a price of h100, which is not searched: there is cpu"),
        (["--donate", "7"], "SpecError: donate_argnums=7: train_step takes 2 positional arguments"),
        (["--set", "bach=3"], "linear-tiny has no 'bach'; there is batch"),
        (["--html", "nowhere/page.html"], "cannot write nowhere/page.html: there is no folder nowhere"),
    ],
)
def test_search_says_what_to_type_instead(
    change: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused("search", *SEARCHED, *change, monkeypatch=monkeypatch, capsys=capsys)


def test_a_name_that_is_nearly_a_model_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(
        "search", "models:llama3_80b", "--hardware", "h100", "--chips", "8", monkeypatch=monkeypatch, capsys=capsys
    )
    assert "near it: llama3_8b" in said
    slices = refused("search", "models:linear_tiny", "--hardware", "h100", monkeypatch=monkeypatch, capsys=capsys)
    assert "--chips 8" in slices
    assert "h100:2x8" in slices


@pytest.mark.parametrize("command", ["search", "explain", "report", "diff", "scale", "serve"])
def test_help_fits_a_screen(command: str) -> None:
    lines = run(command, "--help").splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale", "layers=2", "--hardware", "h100", "--batch", "8"], "add d_model=…,d_ff=…,heads=…,kv_heads=…"),
        (["scale", "layers=2,dmodel=8", "--hardware", "h100", "--batch", "8"], "no dmodel; there is d_model"),
        (["scale", "SHAPE", "--hardware", "h100", "--batch", "8"], "say how many chips, --chips 8"),
        (["serve", "SHAPE", "--hardware", "tpu-v5e"], "say how many chips, --chips 8"),
        (["diff", "no.json", "no.json"], "there is none; `autoshard plan … --out no.json`"),
        (["explain", *SMALL, *ON, "--at", "linear.py"], "lines with decisions: linear.py:"),
    ],
)
def test_the_others_do_so_too(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "layers=2,d_model=64,d_ff=128,heads=4,kv_heads=4,head_dim=16,vocab=64"
    given = [shape if argument == "SHAPE" else argument for argument in arguments]
    assert said in refused(*given, monkeypatch=monkeypatch, capsys=capsys)


def test_explain_and_report_and_diff(tmp_path: Path) -> None:
    explained = json.loads(run("explain", *SMALL, "**.w", *ON, "--json"))
    assert explained["decisions"][0]["choices"] > 1
    page = tmp_path / "report.html"
    assert str(page) in run("report", *SMALL, *ON, "--out", str(page))
    assert page.stat().st_size < 1e6
    shown = json.loads(run("report", *SMALL, *ON, "--json"))
    assert [row["name"] for row in shown["compared"]] == ["data parallel", "fully sharded"]
    assert all(row["step_s"] >= shown["cost"]["step_s"] * (1 - 2e-3) for row in shown["compared"] if row["fits"])
    assert shown["verdict"] in run("report", *SMALL, *ON, "--markdown", "--no-compare")
    plans = [tmp_path / f"{name}.json" for name in ("free", "pinned")]
    run("plan", *SMALL, *ON, "--out", str(plans[0]))
    run("plan", *SMALL, *ON, "--pin", "**.w=data,-", "--out", str(plans[1]))
    assert json.loads(run("diff", str(plans[0]), str(plans[0]), "--json"))["leaves"] == []
    assert "before" in run("diff", str(plans[0]), str(plans[1]))


def test_what_stands_on_a_command_line() -> None:
    assert chip_counts("8,16") == [8, 16]
    assert varied("batch=8,16") == ("batch", [8, 16])
    assert prices("h100=2.5,h200=3") == {"h100": 2.5, "h200": 3.0}
    with pytest.raises(SpecError, match="cannot read --price"):
        prices("h100=cheap")
