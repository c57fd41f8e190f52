"""How many constraints a plan has: those that Shardy does not reach, and those that the compiler needs.

    python -m benchmarks.constraints [--match h100:1x8]

Takes the plans of the verification board that scan their layers (llama3-8b), leaves out every
constraint without which the hardware's compiler emits the same (`constraints="compiled"`: a compile
per question, minutes on GPU, the better part of an hour on TPU), and keeps one line per plan in
`benchmarks/results/constraints.jsonl`; a plan that is there already is skipped. The table is in
`docs/verification.md` (`python -m benchmarks.verification render`).
"""

import argparse
import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.api.compiler_minimal_constraints import compiler_minimal
from autoshard.api.solved_plan import SolvedPlan
from benchmarks import verification, verification_report

RESULTS = Path(__file__).parent / "results" / verification_report.CONSTRAINTS
MODEL = "llama3-8b"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="a regular expression that the cases' keys contain")
    run(parser.parse_args().match)


def run(match: str) -> None:
    """Thins the plans that are not there yet."""
    done = {line["key"] for line in verification_report.read(RESULTS)}
    for case in verification.board():
        if case.model != MODEL or case.layout != verification.PLANNED or case.windowed:
            continue
        if case.key in done or not re.search(match, case.key):
            continue
        plan: SolvedPlan = verification.subject(case)
        graph = plan.planned.assignment.decisions.graph
        begun = time.perf_counter()
        few = compiler_minimal(plan)
        line = {
            "key": case.key,
            "hardware": case.hardware,
            "mesh": dict(case.mesh),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": dict(plan.record.versions),
            "contractions": sum(eqn.traits.contraction for eqn in graph.eqns),
            "values": len(graph.avals),
            "thinned_s": time.perf_counter() - begun,
            "note": few.record.notes[-1],
            "needed": emitted(plan),
            "compiled": emitted(few),
        }
        with RESULTS.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(case.key, line["note"], flush=True)


def emitted(plan: SolvedPlan) -> dict[str, Any]:
    """The constraints of a plan, and the program that its hardware's compiler makes of them."""
    found = plan.verify(compiler_options={})
    assert found.memory.compiled is not None
    assert found.timeline is not None
    return {
        "constraints": plan.record.pins.count,
        "bytes": sum(row.emitted_bytes for row in found.rows),
        "peak": found.memory.compiled.peak,
        "step_s": found.timeline.step_s,
    }


if __name__ == "__main__":
    main()
