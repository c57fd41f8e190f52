"""Compilers as values: each fact has a test, no other room asks for a platform by its name, chips say who compiles."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import autoshard
import cost_models
from autoshard.backends import devices
from autoshard.backends.known_compilers import KNOWN, XLA_CPU, XLA_GPU, XLA_GPU_0_10, XLA_TPU, known, named, of_devices
from autoshard.backends.model import CompilerModel, CompilerName, evidence
from autoshard.errors import MeshError

ROOT = Path(autoshard.__file__).parent
PLATFORMS = frozenset({"cuda", "gpu", "tpu", "cpu", "rocm", "neuron"})
# Files that may compare with a platform's name, and why.
MAY_COMPARE = {
    "backends/toolchain.py": "each compiler's own function reads its chips' names",
    "backends/devices.py": "JAX names no kind of a processor: whichever it is, its chip is `cpu`",
    "backends/measure.py": "other processes slow down a processor, and no other device",
    "_startup.py": "before JAX is imported: which devices this process is to have",
    "ir/graph.py": "`platform_index` is JAX's own, resolved by JAX's names",
}


@pytest.mark.parametrize(("fact", "seen"), evidence().items(), ids=evidence())
def test_every_fact_has_a_test_and_a_source(fact: str, seen: object) -> None:
    found = evidence()[fact]
    file, _, test = found.test.partition("::")
    tree = ast.parse((ROOT.parent / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert re.search(r"\d+\.\d+|openxla", found.source), found.source


def test_every_compiler_is_another_value_of_each_fact() -> None:
    """What is the same of all compilers is no fact about one."""
    for fact in evidence():
        assert len({getattr(model, fact) for model in KNOWN}) > 1, fact
    assert {f.name for f in fields(CompilerModel)} > set(evidence())


def test_a_compiler_is_found_by_platform_version_name_and_device() -> None:
    assert known("cuda", (0, 10, 2)) is XLA_GPU_0_10
    assert known("cuda", (0, 12, 0)) is XLA_GPU
    assert known("tpu", (0, 12, 0)) is XLA_TPU
    assert of_devices("gpu") is named("gpu") is known("cuda")
    assert {model.name for model in KNOWN} == set(get_args(CompilerName))
    with pytest.raises(MeshError, match="no compiler is known for the platform 'metal'; the hardware file may say cpu"):
        known("metal")


def test_every_chip_says_who_compiles_for_it() -> None:
    found = {name: cost_models.hardware(name, 8).chip.platform for name in cost_models.chips()}
    assert {p.value for p in found.values()} == {"cuda", "tpu", "cpu", "rocm", "neuron"}
    assert all(p.source for p in found.values())


@pytest.mark.parametrize("hardware", ["mi300x:1x8", "mi325x:2x8", "mi355x:1x8", "trn2:1*4x4", "trn3:1x16", "l40s:1x8"])
def test_a_chip_without_a_compiler_is_planned_for_and_said_so(hardware: str) -> None:
    devices = cost_models.hardware(hardware).devices
    args = (jax.ShapeDtypeStruct((256, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16))
    plan = autoshard.plan(lambda x, w: jnp.tanh(x @ w).sum(), *args, mesh={"x": devices}, hardware=hardware)
    assert plan.cost > 0
    assert ("compiler does is assumed" in " ".join(plan.record.notes)) == (hardware.partition(":")[0] != "l40s")
    sentence = f"no compiler for '{re.escape(plan.record.hardware)}'.*it can be planned for"
    with pytest.raises(MeshError, match=sentence):
        plan.verify()


@pytest.mark.parametrize(("base", "compiler"), [("tpu-v5e", XLA_TPU), ("cpu", XLA_CPU), ("h100", known("cuda"))])
def test_a_file_of_any_name_has_its_bases_compiler(base: str, compiler: CompilerModel, tmp_path: Path) -> None:
    """Of its own name nothing is guessed."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": "hardware/1", "kind": "chip", "name": "cpu-tpu-mine", "based_on": base}))
    place = devices.place({"x": 8}, cost_models.hardware(path, 8))
    stock = devices.place({"x": 8}, cost_models.hardware(base, 8))
    assert place.compiler == stock.compiler == compiler
    assert devices.compiler_named(place.hardware.name) == compiler
    for fact in ("gathers_ahead", "stores_quotients", "stores_score_gradients", "unscattered_axes"):
        assert getattr(place.machine, fact) == getattr(stock.machine, fact)


def test_a_file_without_a_base_says_who_compiles(tmp_path: Path) -> None:
    document = json.loads((Path(cost_models.__file__).parent / "hardware" / "h100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**document, "name": "mine"}))
    assert devices.place({"x": 8}, cost_models.hardware(path, 8)).compiler == known("cuda")
    path.write_text(json.dumps({k: v for k, v in document.items() if k != "platform"}))
    with pytest.raises(cost_models.CostModelError, match="`platform` is missing: say who compiles for the chip"):
        cost_models.hardware(path, 8)


def test_no_other_room_asks_for_a_platform_by_its_name() -> None:
    packages = (ROOT, Path(cost_models.__file__).parent)
    found = [
        f"{path.relative_to(root)}:{line}: {text}"
        for root in packages
        for path in sorted(root.rglob("*.py"))
        if str(path.relative_to(root)) not in MAY_COMPARE
        for line, text in compared(ast.parse(path.read_text()))
    ]
    assert not found, "make it a field of `CompilerModel`:\n" + "\n".join(found)


def test_a_platform_by_its_name_would_be_found() -> None:
    source = (
        'a = x == "tpu"\nb = x in ("cpu", "cuda")\nc = x.startswith(("tpu", "v5"))\nd = {"gpu": 1}\ndef e(p="cpu"): ...'
    )
    assert [line for line, _ in compared(ast.parse(source))] == [1, 2, 2, 3, 4, 5]


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that compare with a platform's name, choose by one, or have one as a default."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            asked = list(node.args)
        elif isinstance(node, ast.Dict):
            asked = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.arguments):
            asked = [default for default in (*node.defaults, *node.kw_defaults) if default is not None]
        for constant in (c for side in asked for c in ast.walk(side) if isinstance(c, ast.Constant)):
            if constant.value in PLATFORMS:
                yield constant.lineno, ast.unparse(node)[:80]
