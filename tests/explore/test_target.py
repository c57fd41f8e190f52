"""Targets and what stands on the command line: found by name, run with their prints aside, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.cli.written import assignments, byte_count, mesh_axes
from autoshard.errors import MeshError, SpecError, TargetError
from autoshard.explore.builder import load_target

BUILDER = """
import jax, jax.numpy as jnp
print("imported")

def build(width=8):
    print("built")
    def step(w, x):
        print("traced")
        return (x @ w).sum()
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, (shaped(width, width), shaped(width, width))

def wrong(width=8):
    return len(width)

def refused(width=8):
    raise KeyError("no such model")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "builders_of_a_test.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", ["../good:build", "a/b:build", ":x", "x:", "x", "", ".:x", ".a:b", "a b:c"])
def test_a_path_is_no_target(target: str) -> None:
    with pytest.raises(TargetError, match=r"write (package\.module:builder|its module)"):
        load_target(target, {})


@pytest.mark.usefixtures("here")
def test_what_a_builder_raises_is_told_as_its_own() -> None:
    with pytest.raises(
        TargetError, match=r"raised TypeError: object of type 'int' has no len.*\n.*builders_of_a_test.py:14"
    ):
        load_target("builders_of_a_test:wrong", {})
    with pytest.raises(TargetError, match=r"raised KeyError: 'no such model'"):
        load_target("builders_of_a_test:refused", {})
    with pytest.raises(TargetError, match=r"cannot be called with depth: build\(\) got an unexpected keyword"):
        load_target("builders_of_a_test:build", {"depth": 3})


@pytest.mark.usefixtures("here")
def test_what_a_builder_prints_is_no_result() -> None:
    given = ["plan", "builders_of_a_test:build", "--mesh", "data=8", "--hardware", "cpu:8", "--forward", "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["name"] == "step"
    assert "built" in done.stderr
    assert "traced" in done.stderr


@pytest.mark.parametrize("written", ["1e400", "9" * 400 + "GB", "²", "1e30TB", "-1", "nan"])
def test_what_is_no_number_of_bytes(written: str) -> None:
    with pytest.raises(SpecError, match="--memory"):
        byte_count(written)


@pytest.mark.parametrize("written", ["data=²", "data=" + "9" * 5000, "data=", "=2", "data=2,data=2"])
def test_what_is_no_mesh(written: str) -> None:
    with pytest.raises(MeshError, match="--mesh"):
        mesh_axes(written)


@pytest.mark.parametrize("value", ["[" * 10**5, "9" * 5000, "{[]: 1}", "\0"])
def test_what_is_no_literal_is_text(value: str) -> None:
    found: dict[str, Any] = assignments([f"x={value}"], "--set")
    assert found == {"x": value}
    assert P("x") != found["x"]


def test_a_mesh_of_more_devices_than_this_machine_has_names_the_way_out(here: Path) -> None:
    (here / "meshes_of_a_test.py").write_text(
        "import jax, numpy\n\n\ndef build():\n    return jax.make_mesh((64, 64), ('data', 'model'))\n\n\n"
        "def by_hand():\n    return numpy.array([0]).reshape(2, 4)\n"
    )
    for name in ("build", "by_hand"):
        with pytest.raises(TargetError, match=r"AbstractMesh of that shape; or set\n  JAX_PLATFORMS=cpu and JAX_NUM_"):
            load_target(f"meshes_of_a_test:{name}", {})
