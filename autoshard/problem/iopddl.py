"""Problems as IOPDDL JSON files, read and written; malformed files are refused with the position.

The format is that of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism
(github.com/google/iopddl): `problem.nodes.{intervals, costs, usages}`, `problem.edges.{nodes,
costs}` and `problem.usage_limit`. A node has one usage item at most; further items, and an offset,
are written as *followers*: nodes with the strategies of their node, bound to it by an edge that is 0
on the diagonal and forbidden elsewhere. Hinges, names and the unit, which the format lacks, go into a
sibling object, `autoshard`, that other readers ignore; with it the problem reads back as it was. To
other readers a problem with hinges is a relaxation: hinges are at least 0, so that their optimum is a
lower bound, and a choice fits if it fits here.
"""

import gzip
import json
import zlib
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from autoshard.errors import ProblemFileError
from autoshard.problem.network import INF, Hinge, Int, Problem

LARGEST = 2**63 - 1


def read(path: str | Path) -> Problem:
    """Returns the problem in a `.json` or `.json.gz` file.

    Raises:
      ProblemFileError: the file cannot be read, is not JSON, or is not a problem; the message
        gives the position in the file.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ProblemFileError(f"{path}: cannot be read: {error}") from None
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemFileError(f"{path}: damaged gzip at byte {damage(raw)} of {len(raw)}: {error}") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProblemFileError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{path}: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise ProblemFileError(f"{path}: not a problem: {error}") from None
    return parse(document, path)


def damage(raw: bytes) -> int:
    """Returns where in a damaged gzip file decompression stops, to the block of 1024 bytes."""
    stream = zlib.decompressobj(wbits=31)
    for at in range(0, len(raw), 1024):
        try:
            stream.decompress(raw[at : at + 1024])
        except zlib.error:
            return at
    return len(raw)


def refuse(path: Path, where: str, why: str) -> NoReturn:
    """Raises ProblemFileError for the entry `where` of a file."""
    raise ProblemFileError(f"{path}: {where}: {why}")


def parse(document: Any, path: Path) -> Problem:
    """Returns the problem in a parsed document; `path` is for messages."""
    problem = member(document, "problem", dict, path, "$")
    nodes = member(problem, "nodes", dict, path, "problem")
    edges = member(problem, "edges", dict, path, "problem")
    costs = member(nodes, "costs", list, path, "problem.nodes")
    usages = member(nodes, "usages", list, path, "problem.nodes")
    intervals = member(nodes, "intervals", list, path, "problem.nodes")
    ends = member(edges, "nodes", list, path, "problem.edges")
    tables = member(edges, "costs", list, path, "problem.edges")
    for name, rows in (("usages", usages), ("intervals", intervals)):
        if len(rows) != len(costs):
            refuse(path, f"problem.nodes.{name}", f"{len(rows)} entries for {len(costs)} nodes")
    if len(tables) != len(ends):
        refuse(path, "problem.edges.costs", f"{len(tables)} entries for {len(ends)} edges")

    start, cost = rows_of(costs, path, "problem.nodes.costs")
    sizes = np.diff(start)
    if (sizes == 0).any():
        v = int(np.flatnonzero(sizes == 0)[0])
        refuse(path, f"problem.nodes.costs[{v}]", "a node needs at least one strategy")
    use_start, usage = rows_of(usages, path, "problem.nodes.usages")
    expect_lengths(np.diff(use_start), sizes, path, "problem.nodes.usages", "strategies of the node")
    if (usage < 0).any():
        at = int(np.flatnonzero(usage < 0)[0])
        v = int(np.searchsorted(use_start, at, side="right")) - 1
        refuse(path, f"problem.nodes.usages[{v}][{at - use_start[v]}]", f"negative usage {usage[at]}")
    interval = pairs_of(intervals, path, "problem.nodes.intervals")
    edge_nodes = pairs_of(ends, path, "problem.edges.nodes")
    missing = (edge_nodes < 0) | (edge_nodes >= len(sizes))
    if missing.any():
        e, side = (int(x) for x in np.argwhere(missing)[0])
        refuse(path, f"problem.edges.nodes[{e}][{side}]", f"node {edge_nodes[e, side]} of {len(sizes)} does not exist")
    edge_start, edge_cost = rows_of(tables, path, "problem.edges.costs")
    cells = sizes[edge_nodes[:, 0]] * sizes[edge_nodes[:, 1]]
    expect_lengths(np.diff(edge_start), cells, path, "problem.edges.costs", "pairs of strategies")

    limit = problem.get("usage_limit")
    if limit is not None and (type(limit) is not int or not 0 <= limit <= LARGEST):
        refuse(path, "problem.usage_limit", f"{limit!r} is not a usage")
    more = document.get("autoshard", {})
    if more:
        return extend(more, start, cost, edge_nodes, edge_start, edge_cost, limit, path)
    alive = interval[:, 0] < interval[:, 1]
    return Problem(
        start=start,
        cost=cost,
        edge_nodes=edge_nodes,
        edge_start=edge_start,
        edge_cost=edge_cost,
        use_node=np.flatnonzero(alive).astype(np.int64),
        use_interval=interval[alive],
        use_start=np.concatenate([[0], np.cumsum(sizes[alive])]).astype(np.int64),
        usage=usage[np.repeat(alive, sizes)],
        usage_limit=limit,
    )


def extend(
    more: Any, start: Int, cost: Int, edge_nodes: Int, edge_start: Int, edge_cost: Int, limit: int | None, path: Path
) -> Problem:
    """Returns the problem whose usage items, hinges and names are in the `autoshard` object."""
    try:
        nodes, edges = int(more["nodes"]), int(more["edges"])  # the rest are followers
        problem = Problem(
            start=start[: nodes + 1],
            cost=cost[: start[nodes]],
            edge_nodes=edge_nodes[:edges],
            edge_start=edge_start[: edges + 1],
            edge_cost=edge_cost[: edge_start[edges]],
            use_node=np.array(more["use_node"], dtype=np.int64),
            use_interval=np.array(more["use_interval"], dtype=np.int64).reshape(-1, 2),
            use_start=np.array(more["use_start"], dtype=np.int64),
            usage=np.array(more["usage"], dtype=np.int64),
            usage_limit=limit,
            hinges=tuple(
                Hinge(
                    strategy=np.array(h["strategy"], dtype=np.int64),
                    strategy_coef=np.array(h["strategy_coef"], dtype=np.int64),
                    cell=np.array(h["cell"], dtype=np.int64),
                    cell_coef=np.array(h["cell_coef"], dtype=np.int64),
                    constant=int(h["constant"]),
                )
                for h in more["hinges"]
            ),
            offset=int(more["offset"]),
            unit_s=float(more["unit_s"]),
            names=tuple(str(name) for name in more["names"]),
        )
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        refuse(path, "autoshard", f"{type(error).__name__}: {error}")
    return problem


def write(problem: Problem, path: str | Path, *, name: str = "autoshard") -> None:
    """Writes `problem` as IOPDDL JSON, compressed if `path` ends in `.gz`."""
    sizes = np.diff(problem.start)
    intervals: list[list[int]] = [[0, 0]] * problem.nodes
    costs = split(problem.cost, problem.start)
    usages = [[0] * int(size) for size in sizes]
    ends: list[list[int]] = problem.edge_nodes.tolist()
    tables = split(problem.edge_cost, problem.edge_start)
    used: set[int] = set()
    for v, interval, usage in zip(
        problem.use_node.tolist(),
        problem.use_interval.tolist(),
        split(problem.usage, problem.use_start),
        strict=True,
    ):
        if v not in used:
            used.add(v)
            intervals[v], usages[v] = interval, usage
            continue
        ends.append([v, len(costs)])
        tables.append(np.where(np.eye(len(usage), dtype=bool), 0, INF).reshape(-1).tolist())
        costs.append([0] * len(usage))
        intervals.append(interval)
        usages.append(usage)
    if problem.offset:
        costs.append([problem.offset])
        intervals.append([0, 0])
        usages.append([0])
    document: dict[str, Any] = {
        "problem": {
            "name": name,
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": ends, "costs": tables},
        }
    }
    if problem.usage_limit is not None:
        document["problem"]["usage_limit"] = problem.usage_limit
    if len(costs) > problem.nodes or problem.hinges or problem.names or problem.unit_s != 1.0:
        document["autoshard"] = {
            "nodes": problem.nodes,
            "edges": problem.edges,
            "use_node": problem.use_node.tolist(),
            "use_interval": problem.use_interval.tolist(),
            "use_start": problem.use_start.tolist(),
            "usage": problem.usage.tolist(),
            "hinges": [
                {
                    "strategy": h.strategy.tolist(),
                    "strategy_coef": h.strategy_coef.tolist(),
                    "cell": h.cell.tolist(),
                    "cell_coef": h.cell_coef.tolist(),
                    "constant": h.constant,
                }
                for h in problem.hinges
            ],
            "offset": problem.offset,
            "unit_s": problem.unit_s,
            "names": list(problem.names),
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def split(flat: Int, start: Int) -> list[list[int]]:
    """Returns the flat values as one list per start."""
    values = flat.tolist()
    return [values[a:b] for a, b in pairwise(start.tolist())]


def member(parent: Any, key: str, kind: type, path: Path, where: str) -> Any:
    """Returns `parent[key]`, refused unless it is of `kind`."""
    if not isinstance(parent, dict):
        refuse(path, where, f"expected an object, found {type(parent).__name__}")
    if key not in parent:
        refuse(path, where, f"`{key}` is missing")
    value = parent[key]
    if not isinstance(value, kind):
        refuse(path, f"{where}.{key}", f"expected a {kind.__name__}, found {type(value).__name__}")
    return value


def rows_of(rows: list[Any], path: Path, where: str) -> tuple[Int, Int]:
    """Returns the starts and the flat values of a list of lists of integers.

    Integers of `INF` and more, of any length, become `INF` (a forbidden choice in costs).
    """
    for r, row in enumerate(rows):
        if type(row) is not list:
            refuse(path, f"{where}[{r}]", f"expected a list, found {type(row).__name__}")
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=start[1:])
    try:
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(start[-1]))
    except (OverflowError, TypeError, ValueError):
        flat = slow_values(rows, path, where)
    else:
        if {type(x) for x in chain.from_iterable(rows)} - {int}:
            flat = slow_values(rows, path, where)
    return start, flat


def slow_values(rows: list[list[Any]], path: Path, where: str) -> Int:
    """Returns the flat values, or refuses the first that is no integer."""
    values: list[int] = []
    for r, row in enumerate(rows):
        for i, value in enumerate(row):
            if type(value) is float and value.is_integer():
                value = int(value)
            if type(value) is not int:
                refuse(path, f"{where}[{r}][{i}]", f"{value!r} is not an integer")
            if value < -LARGEST:
                refuse(path, f"{where}[{r}][{i}]", f"{value} does not fit into 64 bits")
            values.append(min(value, INF) if value > LARGEST else value)
    return np.array(values, dtype=np.int64)


def pairs_of(rows: list[Any], path: Path, where: str) -> Int:
    """Returns a list of pairs of integers as an array of shape (rows, 2)."""
    start, flat = rows_of(rows, path, where)
    expect_lengths(np.diff(start), np.full(len(rows), 2), path, where, "integers")
    return flat.reshape(-1, 2)


def expect_lengths(found: Int, expected: Int, path: Path, where: str, what: str) -> None:
    """Refuses the first row whose length is not as expected."""
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        r = int(wrong[0])
        refuse(path, f"{where}[{r}]", f"{found[r]} entries for {expected[r]} {what}")
