"""What commands print with --json is what their schemas say."""

import ast
import copy
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import models.mlp
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
    "plan": ["plan", *SMALL, *ON, *MESH],
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
    "search, micro-batches": [
        "search",
        *SMALL,
        "--hardware",
        "cpu",
        "--chips",
        "2",
        "--axes",
        "1",
        "--processes",
        "1",
        "--microbatches",
        "auto",
    ],
    "serve": ["serve", SHAPE, "--hardware", "h100:1x8", "--draft", DRAFT, "--price", "2", "--context", "512"],
    "verify": ["verify", *SMALL, *ON, *MESH, "--compiler", "shardy", "--layouts"],
}
OWN = {"plan": "plan.schema.json", "doctor": "diagnosis.schema.json"}


def read(file: str) -> Any:
    return json.loads(resources.files("autoshard").joinpath(file).read_text())


def schemas() -> Any:
    return read("output.schema.json")


def of(command: str) -> Any:
    if command in OWN:
        return jsonschema.Draft202012Validator(read(OWN[command]))
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


def test_why_a_value_is_kept_for_the_backward_pass() -> None:
    lines = Path(models.mlp.__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "hidden = name(" in text]
    found = printed(["explain", "models:mlp_tiny", *SMALL[1:-1], "layers=1", *ON, *MESH, "--at", f"mlp.py:{line}"])
    of("explain").validate(found)
    assert found["recalls"]


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


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sharded_by_hand.py").write_text(HAND)
    monkeypatch.syspath_prepend(tmp_path)
    return "sharded_by_hand:step"


def test_an_audit(by_hand: str) -> None:
    found = printed(["audit", by_hand, "--hardware", "cpu:8", "--compiler", "cpu"])
    of("audit").validate(found)
    assert found["emitted"]


def test_a_diagnosis_and_what_changed_since(by_hand: str, tmp_path: Path) -> None:
    found = printed(["doctor", by_hand, "--hardware", "cpu:8", "--compiler", "cpu"])
    of("doctor").validate(found)
    (tmp_path / "before.json").write_text(json.dumps(found))
    (tmp_path / "program.txt").write_text(compiled_text())
    later = printed(
        [
            "doctor",
            "--hlo",
            str(tmp_path / "program.txt"),
            "--hardware",
            "cpu:8",
            "--against",
            f"{tmp_path}/before.json",
        ]
    )
    of("doctor").validate(later)
    assert later["against"]["step_s"] == found["step"]["step_s"]
    assert later["against"]["changes"]
    assert not of("doctor").is_valid({**later, "against": {**later["against"], "unheard_of": 1}})


def compiled_text() -> str:
    """A program's HLO with an all-gather that the doctor knows a remedy for, in each of four trips."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            return total + rows.T @ jnp.tanh(rows @ w), None

        return jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    shapes = (((256, 256), P()), ((4, 4096, 256), P(None, "data")))
    avals = [jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(mesh, spec)) for n, spec in shapes]
    return jax.jit(accumulated).lower(*avals).compile().as_text() or ""


def test_a_plan_that_repeats_and_offloads(tmp_path: Path) -> None:
    """All that a plan file may hold is in its schema, and in that of what two of them differ in."""
    data = printed(PRINTED["plan"])
    data |= {
        "schema": 2,
        "microbatches": 2,
        "recomputation": {"remat": "add", "kept": ["0:0", "1:0"], "offloaded": ["1:0"]},
    }
    data["inputs"][0]["memory"] = "host"
    of("plan").validate(data)
    (tmp_path / "repeats.json").write_text(json.dumps(data))
    found = printed(["diff", str(tmp_path / "repeats.json"), str(tmp_path / "repeats.json")])
    of("diff").validate(found)
    assert found["recomputation"]["before"]["offloaded"] == ["1:0"]


def test_every_command_has_a_schema_and_a_test() -> None:
    jsonschema.Draft202012Validator.check_schema(schemas())
    for file in OWN.values():
        jsonschema.Draft202012Validator.check_schema(read(file))
    assert not {command for command in cli.COMMANDS if command not in {*schemas()["$defs"], *OWN}}
    calls = [node for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Call)]
    checked = {
        call.args[0].value
        for call in calls
        if ast.unparse(call.func) == "of" and isinstance(call.args[0], ast.Constant)
    }
    assert {*cli.COMMANDS} == {*(name.partition(",")[0] for name in PRINTED), *checked}
