"""The notebooks of the site run from top to bottom, and show what they show.

A real kernel runs them, too, slowly: `python -m pytest -m slow tests/end_to_end/test_notebooks.py`. With
`NOTEBOOKS=write` that test writes the outputs into the notebooks.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def last_value(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell in the namespace; the value of its last line if that is an expression, else None."""
    tree = ast.parse(source)
    last = tree.body.pop()
    if isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(source, "cell", "exec"), names)
    return None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_shows_what_the_stored_one_does(notebook: Path) -> None:
    names: dict[str, Any] = {}
    for cell in cells(notebook):
        value: Any = last_value("".join(cell["source"]), names)
        stored = [set(output["data"]) for output in cell["outputs"] if output["output_type"] == "execute_result"]
        to_html = getattr(value, "_repr_html_", None)
        shows = {"text/plain"} if to_html is None else {"text/plain", "text/html"}
        assert stored == ([] if value is None else [shows])
        assert to_html is None or to_html().count("\n") > 3


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_runs_it_and_shows_its_progress(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient: Any = pytest.importorskip("nbclient", reason="nbclient is one of the dev extras")
    nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is one of the dev extras")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    found = nbformat.read(notebook, 4)
    client = nbclient.NotebookClient(found, timeout=600, kernel_name="python3", record_timing=False)
    stages: list[str] = []

    seen = client.process_message

    def process(message: dict[str, Any], cell: dict[str, Any], index: int) -> Any:
        if message["msg_type"] in {"display_data", "update_display_data"}:
            stages.append(message["content"]["data"].get("text/plain", ""))
        return seen(message, cell, index)

    client.process_message = process
    client.execute()
    assert {"trace …", "solve …"} <= set(stages)
    assert not [o for cell in found.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
    if os.environ.get("NOTEBOOKS") == "write":
        for cell in found.cells:
            cell.metadata.clear()
            if cell.cell_type == "code":
                cell.outputs = [o for o in cell.outputs if o.output_type != "display_data"]  # the line of progress
        found.metadata.pop("widgets", None)
        nbformat.write(found, notebook)
