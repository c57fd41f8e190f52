"""Problems: what an illegal one says, and IOPDDL files there and back."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.errors import ProblemFileError
from autoshard.problem import iopddl
from autoshard.problem.network import INF, Hinge, Problem
from autoshard.solver import solve
from tests.random_problems import random_problem


def plain() -> dict[str, Any]:
    """Returns a document of two nodes and one edge."""
    return {
        "problem": {
            "name": "two",
            "nodes": {
                "intervals": [[0, 4], [3, 3]],
                "costs": [[1, 2], [3, 4, 10**18]],
                "usages": [[5, 6], [7, 8, 9]],
            },
            "edges": {"nodes": [[0, 1]], "costs": [[0, 1, 2, 3, 4, 10**19]]},
            "usage_limit": 100,
        }
    }


def save(document: object, path: Path) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_reads_a_plain_file(tmp_path: Path) -> None:
    problem = iopddl.read(save(plain(), tmp_path / "two.json"))
    assert problem.start.tolist() == [0, 2, 5]
    assert problem.cost.tolist() == [1, 2, 3, 4, INF]
    assert problem.edge_nodes.tolist() == [[0, 1]]
    assert problem.edge_cost.tolist() == [0, 1, 2, 3, 4, INF]  # 10^19 does not fit into 64 bits
    assert problem.use_node.tolist() == [0]  # node 1 is never alive
    assert problem.use_interval.tolist() == [[0, 4]]
    assert problem.usage.tolist() == [5, 6]
    assert problem.usage_limit == 100
    assert solve(problem).objective == 1 + 3 + 0


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_written_problems_read_back_equal(tmp_path: Path, name: str) -> None:
    for seed in range(50):
        problem = random_problem(np.random.default_rng(seed), hinges=seed % 3)
        problem = replace(problem, unit_s=1e-12, names=tuple(f"node {v}" for v in range(problem.nodes)))
        problem.dump(tmp_path / name)
        again = iopddl.read(tmp_path / name)
        for field in ("start", "cost", "edge_nodes", "edge_start", "edge_cost"):
            assert np.array_equal(getattr(problem, field), getattr(again, field)), field
        for field in ("use_node", "use_interval", "use_start", "usage"):
            assert np.array_equal(getattr(problem, field), getattr(again, field)), field
        assert (problem.usage_limit, problem.offset, problem.unit_s, problem.names) == (
            again.usage_limit,
            again.offset,
            again.unit_s,
            again.names,
        )
        assert solve(problem).objective == solve(again).objective


def test_other_readers_see_a_relaxation_exact_but_for_hinges(tmp_path: Path) -> None:
    """Without our own object, the file has the same optimum; with hinges, a lower one at most."""
    followed = 0
    for seed in range(150):
        problem = random_problem(np.random.default_rng(seed), nodes=4, hinges=seed % 2)
        iopddl.write(problem, tmp_path / "p.json")
        document = json.loads((tmp_path / "p.json").read_text())
        document.pop("autoshard", None)
        plain_part = iopddl.read(save(document, tmp_path / "plain.json"))
        followed += plain_part.nodes > problem.nodes
        ours, theirs = solve(problem), solve(plain_part)
        assert ours.status == theirs.status, seed
        if ours.found and problem.hinges:
            assert theirs.objective <= ours.objective, seed
        elif ours.found:
            assert theirs.objective == ours.objective, seed
        else:
            assert theirs.smallest_peak_bytes == ours.smallest_peak_bytes, seed
    assert followed > 50


def edit(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Returns the document with the entry at a dotted path replaced, or removed for None."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    at: Any = document
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("problem", None, r"\$: `problem` is missing"),
        ("problem.nodes", None, "problem: `nodes` is missing"),
        ("problem.nodes.costs", 3, "problem.nodes.costs: expected a list, found int"),
        ("problem.nodes.costs.1", [], r"problem\.nodes\.costs\[1\]: a node needs at least one strategy"),
        ("problem.nodes.costs.1.2", 1.5, r"problem\.nodes\.costs\[1\]\[2\]: 1\.5 is not an integer"),
        ("problem.nodes.costs.1.2", math.nan, r"problem\.nodes\.costs\[1\]\[2\]: nan is not an integer"),
        ("problem.nodes.usages.1.0", math.inf, r"problem\.nodes\.usages\[1\]\[0\]: inf is not an integer"),
        ("problem.edges.costs.0.1", None, r"problem\.edges\.costs\[0\]: 5 entries for 6 pairs of strategies"),
        ("problem.nodes.costs.1.2", "x", r"problem\.nodes\.costs\[1\]\[2\]: 'x' is not an integer"),
        ("problem.nodes.costs.1.2", True, r"problem\.nodes\.costs\[1\]\[2\]: True is not an integer"),
        ("problem.nodes.costs.1", {"a": 1}, r"problem\.nodes\.costs\[1\]: expected a list, found dict"),
        ("problem.nodes.usages.0", [1], r"problem\.nodes\.usages\[0\]: 1 entries for 2 strategies of the node"),
        ("problem.nodes.usages.1.1", -8, r"problem\.nodes\.usages\[1\]\[1\]: negative usage -8"),
        ("problem.nodes.usages", [[1, 2]], "problem.nodes.usages: 1 entries for 2 nodes"),
        ("problem.nodes.intervals.1", [0], r"problem\.nodes\.intervals\[1\]: 1 entries for 2 integers"),
        ("problem.edges.nodes.0", [0, 2], r"problem\.edges\.nodes\[0\]\[1\]: node 2 of 2 does not exist"),
        ("problem.edges.nodes.0", [-1, 1], r"problem\.edges\.nodes\[0\]\[0\]: node -1 of 2 does not exist"),
        ("problem.edges.costs.0", [1, 2, 3], r"problem\.edges\.costs\[0\]: 3 entries for 6 pairs of strategies"),
        ("problem.edges.costs", [], "problem.edges.costs: 0 entries for 1 edges"),
        ("problem.usage_limit", -1, "problem.usage_limit: -1 is not a usage"),
        ("autoshard", {"hinges": []}, "autoshard: KeyError: 'nodes'"),
    ],
)
def test_malformed_files_are_refused_with_the_position(tmp_path: Path, path: str, value: object, message: str) -> None:
    file = save(edit(plain(), path, value), tmp_path / "bad.json")
    with pytest.raises(ProblemFileError, match=message) as caught:
        iopddl.read(file)
    assert str(caught.value).startswith(str(file))


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    with pytest.raises(ProblemFileError, match="cannot be read"):
        iopddl.read(file)
    file.write_text('{"problem": {\n "nodes": ]}')
    with pytest.raises(ProblemFileError, match=r"bad\.json:2:11: not JSON"):
        iopddl.read(file)
    file.write_text("[" * 100_000)
    with pytest.raises(ProblemFileError, match="not a problem"):
        iopddl.read(file)
    file.write_text(json.dumps(plain()).replace("100}", "1" * 5000 + "}"))
    with pytest.raises(ProblemFileError, match="not a problem"):
        iopddl.read(file)
    whole = gzip.compress(json.dumps(plain()).encode() + np.random.default_rng(0).bytes(9000))
    file.write_bytes(whole[:-20])
    with pytest.raises(ProblemFileError, match=rf"damaged gzip at byte {len(whole) - 20} of {len(whole) - 20}: "):
        iopddl.read(file)
    file.write_bytes(whole[:2050] + bytes(2000) + whole[4050:])
    with pytest.raises(ProblemFileError, match=r"damaged gzip at byte \d+ of"):
        iopddl.read(file)
    file.write_bytes(b"{\xff}")
    with pytest.raises(ProblemFileError, match="not"):
        iopddl.read(file)


def two_nodes() -> Problem:
    return Problem(
        start=np.array([0, 2, 4]),
        cost=np.array([1, 2, 3, 4]),
        edge_nodes=np.array([[0, 1]]),
        edge_start=np.array([0, 4]),
        edge_cost=np.array([0, 1, 2, 3]),
        use_node=np.array([0]),
        use_interval=np.array([[0, 1]]),
        use_start=np.array([0, 2]),
        usage=np.array([5, 6]),
        usage_limit=9,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": np.array([0, 2, 3])}, "start ends at 3, but cost has 4 entries"),
        ({"start": np.array([0, 4, 4])}, "node 1 has no strategy"),
        ({"start": np.array([1, 2, 4])}, "start begins at 1, not at 0"),
        ({"cost": np.array([1.0, 2, 3, 4])}, "cost holds float64, not integers"),
        ({"edge_nodes": np.array([[0, 7]])}, "edge 0 joins node 7, but there are 2 nodes"),
        ({"edge_start": np.array([0, 3]), "edge_cost": np.array([0, 1, 2])}, "edge 0 has 3 cells for 2 × 2 strategies"),
        ({"use_node": np.array([2])}, "usage item 0 belongs to node 2, but there are 2 nodes"),
        ({"use_start": np.array([0, 1]), "usage": np.array([5])}, "usage item 0 has 1 usages for 2 strategies"),
        ({"usage": np.array([5, -6])}, "usage item 0 uses -6 bytes"),
        ({"use_interval": np.array([[0, 1, 2]])}, r"use_interval has shape \(1, 3\)"),
        ({"names": ("a",)}, "1 names for 2 nodes"),
    ],
)
def test_illegal_problems_cannot_exist(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(two_nodes(), **change)


def test_hinges_must_point_into_the_problem() -> None:
    one, none = np.array([1]), np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="hinge 0 names strategy 4 of 4"):
        replace(two_nodes(), hinges=(Hinge(strategy=np.array([4]), strategy_coef=one, cell=none, cell_coef=none),))
    with pytest.raises(ValueError, match="hinge 0 names cell -1 of 4"):
        replace(two_nodes(), hinges=(Hinge(strategy=none, strategy_coef=none, cell=np.array([-1]), cell_coef=one),))
    with pytest.raises(ValueError, match="strategy is not sorted"):
        Hinge(strategy=np.array([1, 1]), strategy_coef=np.array([1, 1]), cell=none, cell_coef=none)
    with pytest.raises(ValueError, match="2 cells with 1 coefficients"):
        Hinge(strategy=none, strategy_coef=none, cell=np.array([1, 2]), cell_coef=one)
