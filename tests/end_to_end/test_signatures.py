"""No function takes more than eight parameters: what belongs together is a value with a name."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 8

# What users call: every option is a parameter of its own, with its documentation.
VERBS = {
    "autoshard/api/compare.py: compare",
    "autoshard/api/own_stages.py: in_own_stages",
    "autoshard/api/plan_many.py: plan_many",
    "autoshard/api/planning.py: plan",
    "autoshard/explore/search.py: search",
    "autoshard/solver/solver.py: solve",
    "autoshard/testing.py: assert_plan_within",
    "cost_models/closed_forms/operations.py: attention_s",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the packages, by its file and name."""
    for package in ("autoshard", "cost_models"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    yield f"{path.relative_to(ROOT)}: {node.name}", node


def parameters(node: ast.FunctionDef) -> int:
    a = node.args
    names = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_command(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "app.command()" for decorator in node.decorator_list)


def test_no_function_takes_more_than_eight_parameters() -> None:
    found = {name: node for name, node in functions() if parameters(node) > MOST}
    assert {name for name, node in found.items() if not is_command(node)} <= VERBS
    assert len([*functions()]) > 1500


def test_what_is_excepted_has_many() -> None:
    counts = {name: parameters(node) for name, node in functions() if name in VERBS}
    assert counts.keys() == VERBS
