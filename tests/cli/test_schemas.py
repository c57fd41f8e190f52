"""What commands print with --json is what their schemas say."""

import copy
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from autoshard import cli

SMALL = ["models:linear_tiny", "--set", "compute_dtype=float32", "--set", "width=8", "--set", "layers=2"]
ON = ["--hardware", "cpu:8", "--set", "batch=8"]
MESH = ["--mesh", "data=2,model=4", "--donate", "0"]
SHAPE = "layers=4,d_model=512,heads=8,kv_heads=8,head_dim=64,d_ff=2048,vocab=1024"
DRAFT = "layers=2,d_model=128,heads=2,kv_heads=2,head_dim=64,d_ff=512,vocab=1024"

PRINTED = {
    "compare": ["compare", *SMALL, *ON, *MESH],
    "explain": ["explain", SMALL[0], "**", *SMALL[1:], *ON, *MESH],
    "hardware": ["hardware", "h100:1x8"],
    "hardware, all": ["hardware"],
    "report": ["report", *SMALL, *ON, *MESH],
    "scale": ["scale", SHAPE, "--hardware", "h100:1x8", "--batch", "16", "--sequence", "512"],
    "search": [
        "search",
        *SMALL,
        "--hardware",
        "cpu",
        "--chips",
        "2,4",
        "--axes",
        "1",
        "--processes",
        "1",
        "--price",
        "1",
    ],
    "serve": ["serve", SHAPE, "--hardware", "h100:1x8", "--draft", DRAFT, "--price", "2", "--context", "512"],
    "verify": ["verify", *SMALL, *ON, *MESH, "--compiler", "shardy", "--layouts"],
}
OWN = {"plan": "plan.schema.json", "doctor": "diagnosis.schema.json"}


def schemas() -> Any:
    return json.loads(resources.files("autoshard").joinpath("output.schema.json").read_text())


def of(command: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{command}", "$defs": schemas()["$defs"]})


def printed(arguments: list[str]) -> Any:
    done = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return json.loads(done.stdout)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(item)


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_what_the_schema_says(name: str) -> None:
    found, schema = printed(PRINTED[name]), of(name.partition(",")[0])
    schema.validate(found)
    other = copy.deepcopy(found)
    first = next(objects(other))
    first["unheard_of"] = first.pop(next(iter(first)))  # another name for the first key
    assert not schema.is_valid(other)


def test_a_difference_of_plans(tmp_path: Path) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, pins in zip(files, ([], ["--pin", "batch.x=data"]), strict=True):
        done = CliRunner().invoke(cli.app, ["plan", *SMALL, *ON, *MESH, *pins, "--out", str(file)])
        assert done.exit_code == 0, done.output
    found = printed(["diff", *map(str, files)])
    of("diff").validate(found)
    assert found["leaves"]
    assert found["traffic"]


HAND = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def step():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(w, x):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "model")))
        return jnp.sum(jnp.tanh(y) @ w.T)

    shape = lambda *spec: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
    return loss, (shape(None, "model"), shape("data"))
"""


def test_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sharded_by_hand.py").write_text(HAND)
    monkeypatch.syspath_prepend(tmp_path)
    found = printed(["audit", "sharded_by_hand:step", "--hardware", "cpu:8", "--compiler", "cpu"])
    of("audit").validate(found)
    assert found["emitted"]


def test_every_command_has_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schemas())
    known = {*schemas()["$defs"], *OWN}
    assert not {command for command in cli.COMMANDS if command not in known}
    assert all(resources.files("autoshard").joinpath(file).is_file() for file in OWN.values())
