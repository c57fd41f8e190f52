"""The fixtures' programs, compiled by what is installed here."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autoshard.backends import compile, hlo
from tests.backends.test_hlo import ITEMSIZE, MESH, PROGRAMS
from tests.installed import GPU, TPU


@pytest.mark.parametrize("program", ["sequence_parallel", "experts"])
@pytest.mark.parametrize(
    "compiler", ["cpu", pytest.param("gpu", marks=GPU), pytest.param("tpu", marks=TPU)], ids=["cpu", "gpu", "tpu"]
)
def test_what_is_installed_here_emits_it_too(compiler: compile.CompilerName, program: str) -> None:
    found = hlo.read(maker().compiled(getattr(maker(), program), compiler).hlo_text)
    emitted = hlo.collectives(found, MESH, fold_slices=compiler == "cpu")
    summary = [(c.kind, c.axes, c.nbytes // ITEMSIZE[c.dtype], c.trips) for c in emitted]
    assert sorted(summary) == sorted(PROGRAMS[program])


@cache
def maker() -> Any:
    """The script that makes the fixtures."""
    spec = importlib.util.spec_from_file_location("make", Path(__file__).parents[1] / "data" / "hlo" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
