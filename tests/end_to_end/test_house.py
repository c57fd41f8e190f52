"""The house: how far down its imports lead, how long files and signatures are, how many layers and signs it has."""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_CHAIN = 22  # rooms, each of which imports the next
LONGEST_FILE = 600  # lines
MOST_LAYERS = 12
MOST_PARAMETERS = 8
VERBS = {  # public functions, of which each parameter is an option that users name
    "autoshard/api/own_stages.py:in_own_stages",
    "autoshard/api/planning.py:plan",
    "autoshard/explore/search.py:search",
    "autoshard/solver/solver.py:solve",
    "autoshard/testing.py:assert_plan_within",
    "cost_models/closed_forms/operations.py:attention_s",
}


def rooms() -> dict[str, ast.Module]:
    """Every module but the façade, by its name; a package's is that of its `__init__`."""
    found: dict[str, ast.Module] = {}
    for path in ROOT.glob("autoshard/*/**/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    for path in ROOT.glob("autoshard/*.py"):
        if not path.name.startswith("__"):
            found[f"autoshard.{path.stem}"] = ast.parse(path.read_text())
    return found


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a module imports when it is imported itself, or for types: (module, name in it or nothing)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(node)


def arrows() -> dict[str, set[str]]:
    """Room → the rooms that it names."""
    trees = rooms()
    found: dict[str, set[str]] = {}
    for room, tree in trees.items():
        names = (f"{module}.{name}" if f"{module}.{name}" in trees else module for module, name in imported(tree))
        found[room] = {name for name in names if name in trees}
    return found


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    chains: dict[str, list[str]] = {}
    for room in TopologicalSorter(graph).static_order():  # raises where rooms import one another
        chains[room] = [room, *max((chains[below] for below in graph.get(room, ())), key=len, default=[])]
    return max(chains.values(), key=len)


def test_no_chain_of_imports_is_long_and_none_is_a_circle() -> None:
    graph = arrows()
    assert len(graph) > 150
    assert graph["autoshard.api.solved_plan"] >= {"autoshard.api.plan", "autoshard.planner.pipeline"}
    assert "autoshard.problem.iopddl" not in graph["autoshard.problem.network"]  # inside a function
    chain = longest_chain(graph)
    assert len(chain) <= LONGEST_CHAIN, " → ".join(chain)


def test_the_longest_chain_is_found() -> None:
    assert longest_chain({"a": {"b", "d"}, "b": {"c"}, "c": {"d"}}) == ["a", "b", "c", "d"]


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("autoshard", "cost_models", "models", "benchmarks", "examples", "tests")
        for path in ROOT.glob(f"{folder}/**/*.py")
    }
    assert len(lengths) > 400
    assert not {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE}


def test_the_import_contract_has_few_layers_and_is_exhaustive() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (house,) = (c for c in contracts if c.get("containers") == ["autoshard"])
    assert house["exhaustive"]
    assert len(house["layers"]) <= MOST_LAYERS


def parameters(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every function, with how many parameters it has beside a method's own object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.name, len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_signature_is_long_but_those_of_verbs() -> None:
    found: set[str] = set()
    for path in (*ROOT.glob("autoshard/**/*.py"), *ROOT.glob("cost_models/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("autoshard/cli/"):  # parameters are options there
            tree = ast.parse(path.read_text())
            found |= {f"{name}:{function}" for function, count in parameters(tree) if count > MOST_PARAMETERS}
    assert found == VERBS


def test_every_package_says_what_it_knows() -> None:
    packages = [path.parent for path in ROOT.glob("autoshard/*/__init__.py")]
    assert len(packages) > 12
    assert not [package.name for package in packages if "know" not in (package / "README.md").read_text()]
