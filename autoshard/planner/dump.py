"""Dump: writes the result of each stage of planning as files to read, in one folder per program, mesh and hardware.

1-program.txt       the jaxpr
2-graph.txt         equations over numbered values, with their source lines
3-decisions.txt     the decisions, with the number and the prices of their choices
4-problem.json.gz   the integer program, as IOPDDL JSON
5-solution.json     the solver's choice, and its proof
6-plan.json         the plan's file
"""

import json
import re
from pathlib import Path
from typing import Any

from autoshard import files
from autoshard.costs.prices import PS_PER_S
from autoshard.ir.graph import Graph
from autoshard.ir.trace import Traced
from autoshard.planner.record import PlanRecord
from autoshard.problem import iopddl
from autoshard.problem.decisions import Decisions
from autoshard.problem.formulation import UNIT_S, Formulation
from autoshard.report.tables import time_text
from autoshard.solver.solution import Solution


def dump(directory: str | Path, of: str, made: Any) -> None:
    """Writes the result of a stage of `of` into the folder of that name below `directory`, if it is one of these.

    Raises:
      OSError: it cannot be written.
    """
    folder = Path(directory).expanduser() / re.sub(r"[^\w=.,×-]+", "-", of).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(made, Formulation):
        return iopddl.write(made.problem, folder / "4-problem.json.gz", name=of)
    for kind, name, text in (
        (Traced, "1-program.txt", lambda: str(made.jaxpr)),
        (Graph, "2-graph.txt", lambda: _equations(made)),
        (Decisions, "3-decisions.txt", lambda: _decisions(made)),
        (Solution, "5-solution.json", lambda: _solution(made)),
        (PlanRecord, "6-plan.json", lambda: made.dumps()),
    ):
        if isinstance(made, kind):
            files.write_whole(folder / name, text())
    return None


def _equations(graph: Graph) -> str:
    def values(numbers: tuple[int, ...]) -> str:
        return " ".join(f"%{v}:{graph.avals[v]}" for v in numbers)

    lines = [f"inputs {values(graph.inputs)}"]
    for e, eqn in enumerate(graph.eqns):
        takes, makes = values(graph.operands[e]), values(graph.results[e])
        lines.append(f"{e:5} {makes} = {eqn.primitive} {takes}    {eqn.where}")
    return "\n".join((*lines, f"outputs {values(graph.outputs)}", ""))


def _decisions(decisions: Decisions) -> str:
    lines = [f"{len(decisions.nodes)} decisions, {len(decisions.edges)} edges", ""]
    for n, node in enumerate(decisions.nodes):
        least, most = (time_text(ps / PS_PER_S) for ps in (int(node.cost_ps.min()), int(node.cost_ps.max())))
        lines.append(f"{n:5} {node.kind:9} {len(node):5} choices, {least} to {most}    {node.name} {node.where}")
    return "\n".join((*lines, ""))


def _solution(solution: Solution) -> str:
    said = {
        "status": str(solution.status),
        "objective_s": solution.objective * UNIT_S,
        "bound_s": solution.bound * UNIT_S,
        "solver": solution.solver,
        "choice": solution.choice.tolist(),
    }
    return json.dumps(said, indent=1) + "\n"
