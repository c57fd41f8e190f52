"""What documents name exists: files, rooms, functions and types of docs/design.md, CONTRIBUTING.md and the READMEs."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("autoshard", "cost_models", "models", "benchmarks", "tests")
DOCUMENTS = [
    ROOT / "docs" / "design.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "autoshard").glob("*/README.md")),
]

QUOTED = re.compile(r"`([^`\n]+)`")
# `ir/graph.py`, `ir/graph.py: build`, `rules/`, `hardware/<chip>.json`
FILE = re.compile(r"(?P<path>[\w./-]*[\w-]+\.(?:py|md|json|toml|svg|js)|(?:[\w.-]+/)+)(?:: (?P<name>[\w.]+))?")
DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")  # `autoshard.plan`, `ir.graph.Eqn`
CLASS = re.compile(r"(?:[A-Z][a-z0-9]+){1,}(?:\.\w+)?")  # `Graph`, `Machine.unscattered_axes`
FOREIGN = {"PartitionSpec", "ShapeDtypeStruct", "Mesh", "GpuTargetConfigProto"}  # JAX's and XLA's


def quoted(document: Path) -> list[str]:
    """Every quoted text of a document, code blocks left out."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return QUOTED.findall(text)


@cache
def classes() -> dict[str, set[str]]:
    """Every class → the names in its body, those of its bases' included."""
    found: dict[str, set[str]] = {}
    for package in ("autoshard", "cost_models", "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(names_in(node.body))
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found.setdefault(node.targets[0].id, set())  # an alias of a type
    return found


def names_in(body: list[ast.stmt]) -> set[str]:
    """Names that statements define."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def places(document: Path) -> list[Path]:
    """Folders that a document's paths may start from."""
    return [document.parent, ROOT, ROOT / "autoshard", ROOT / "cost_models", ROOT / "docs"]


def missing(text: str, document: Path) -> str | None:
    """Why a quoted text is no name of ours; None if it is, or is no name at all."""
    if match := FILE.fullmatch(text):
        found = [folder / match["path"] for folder in places(document) if (folder / match["path"]).exists()]
        if not found:
            return "no such file"
        if match["name"] is None:
            return None
        first, *rest = match["name"].split(".")
        tree = ast.parse(found[0].read_text())
        if first not in names_in(tree.body):
            return f"{found[0].relative_to(ROOT)} defines no {first}"
        return None if not rest or rest[0] in classes().get(first, set()) else f"{first} has no {rest[0]}"
    if DOTTED.fullmatch(text):
        return None if resolves(text) else "nothing of that name can be imported"
    if CLASS.fullmatch(text):
        first, _, attribute = text.partition(".")
        if first in FOREIGN:
            return None
        if first not in classes():
            return "no such class"
        return None if not attribute or attribute in classes()[first] else f"{first} has no {attribute}"
    return None


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module or an attribute of one, from the root or from inside autoshard on."""
    for whole in (dotted, f"autoshard.{dotted}"):
        parts = whole.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found: object = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            if all((found := getattr(found, name, None)) is not None for name in parts[cut:]):
                return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_name_exists(document: Path) -> None:
    wrong = {text: why for text in quoted(document) if (why := missing(text, document)) is not None}
    assert not wrong, "\n".join(f"`{text}`: {why}" for text, why in wrong.items())


PACKAGE_READMES = [path for path in DOCUMENTS if path.name == "README.md" and "per file" not in path.read_text()]


@pytest.mark.parametrize("readme", PACKAGE_READMES, ids=[path.parent.name for path in PACKAGE_READMES])
def test_a_readme_lists_every_room(readme: Path) -> None:
    """A room that its package's README does not name cannot be found by reading."""
    rooms = {path.stem for path in readme.parent.iterdir() if path.suffix == ".py"} - {"__init__"}
    named = {part for text in quoted(readme) for part in re.split(r"[/., ]", text)}
    assert rooms <= named, f"{readme.relative_to(ROOT)} does not name {', '.join(sorted(rooms - named))}"


def test_names_that_do_not_exist_are_found() -> None:
    document = ROOT / "docs" / "design.md"
    for text in ("ir/nowhere.py", "ir/graph.py: nothing", "ir.graph.Nothing", "NoSuchClass", "Graph.nothing"):
        assert missing(text, document) is not None, text
    for text in ("ir/graph.py", "ir/graph.py: build", "ir.graph.Eqn", "Graph", "Graph.trips", "autoshard.plan", "x"):
        assert missing(text, document) is None, text
