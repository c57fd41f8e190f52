"""The house: what the import contract of pyproject.toml does not say of its walls."""

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("autoshard/**/*.py"), *ROOT.glob("cost_models/**/*.py")])
PACKAGES = sorted(path.parent for path in ROOT.glob("autoshard/*/__init__.py"))
VERBS = {  # public functions, of which each parameter is an option that users name
    "autoshard/api/own_stages.py:in_own_stages",
    "autoshard/api/planning.py:plan",
    "autoshard/explore/search.py:search",
    "autoshard/solver/solver.py:solve",
    "autoshard/testing.py:assert_plan_within",
    "cost_models/closed_forms/operations.py:attention_s",
}


def test_chains_of_modules_are_short():
    """The longest chain of imports of autoshard's modules; those for annotations alone are left out."""
    graph = grimp.build_graph("autoshard", cache_dir=None, exclude_type_checking_imports=True)
    imports = nx.DiGraph([(m, known) for m in graph.modules for known in graph.find_modules_directly_imported_by(m)])
    longest = nx.dag_longest_path(nx.condensation(imports))
    assert len(longest) <= 22, longest


def test_files_and_signatures_are_short():
    long: dict[str, int] = {}
    for path in SOURCES:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        lines = len(text.splitlines())
        long |= {name: lines} if lines > 600 else {}
        if not name.startswith("autoshard/cli/"):  # parameters are options there
            long |= {f"{name}:{f}": count for f, count in parameters(ast.parse(text)) if count > 8}
    assert long.keys() == VERBS, long


def parameters(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every function with how many parameters it has, but for a method's own object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.name, len(names) - (names[:1] in (["self"], ["cls"]))


def test_packages_say_what_they_know():
    silent = [p.name for p in PACKAGES if "know" not in (p / "README.md").read_text()]
    assert PACKAGES
    assert not silent
