"""Every code block of the site runs, in the order of its page, in an empty folder."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.code_blocks import blocks, program

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if any(b.kind in {"python", "console"} for b in blocks(page.read_text()))
]
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
WITH_AUTOSHARD = {"autoshard", "cost_models", *(re.split(r"\W", name)[0] for name in PROJECT["dependencies"])}
NEEDS = {"hugging_face": "transformers.models.llama.modeling_flax_llama"}  # of version 4, which is no dev extra


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem], reason=f"{page.name} needs a package of its own")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in {"XLA_FLAGS", "JAX_PLATFORMS"}},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{DOCS.parent}",
        "COLUMNS": "100",
    }
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text()))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


# Package as it is imported → as it is installed, where that is another name.
INSTALLED_AS = {"haiku": "dm-haiku", "orbax": "orbax-checkpoint"}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_a_page_says_what_is_to_be_installed(page: Path) -> None:
    text = page.read_text()
    own = {Path(block.title).stem for block in blocks(text) if block.title is not None}
    code = "\n".join(block.body for block in blocks(text) if block.kind == "python")
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)) - own - sys.stdlib_module_names
    needed = {INSTALLED_AS.get(name, name) for name in imported} - WITH_AUTOSHARD
    if "models" in needed:
        assert "in a clone" in text.replace("\n", " ")  # the reference models are not installed
    named = {word for line in re.findall(r"pip install ([^`\n]+)", text) for word in re.findall(r"[\w-]+", line)}
    assert needed - {"models"} <= named
