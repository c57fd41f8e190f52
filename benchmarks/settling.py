"""Whether plans depend on how fast the machine is, and how well counted work tells about seconds.

    python -m benchmarks.settling [--match h100] [--faster 4]

Plans the cases of the verification board twice, the second time with a clock that runs so many times
as fast for the solver, as on a slow or busy machine. Prints per plan the seconds
that solving took, those that were counted (`autoshard.solver.clock.Effort`), the gap, and whether
both plan files are equal, byte for byte.
"""

import argparse
import os
import re
import time
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.api.solved_plan import SolvedPlan
from autoshard.solver import clock
from benchmarks import verification


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="a regular expression that the cases' keys contain")
    parser.add_argument("--faster", type=float, default=4.0, help="how many times as fast the second clock runs")
    options = parser.parse_args()
    print(f"{'plan':<84} {'solved':>7} {'counted':>8} {'gap':>7}  equal")
    for case in verification.board():
        if case.layout == verification.PLANNED and not case.windowed and re.search(options.match, case.key):
            print(compared(case, options.faster), flush=True)


def compared(case: verification.Case, faster: float) -> str:
    """One line about one case."""
    before_s = clock.effort.spent_s
    first = planned(case, 1.0)
    counted_s = clock.effort.spent_s - before_s
    second = planned(case, faster)
    equal = first.record.dumps() == second.record.dumps()
    gap, solved_s = first.record.certificate.gap, first.planned.seconds["solve"]
    return f"{case.key:<84} {solved_s:>5.2f} s {counted_s:>6.2f} s {gap:>7.3%}  {'yes' if equal else 'NO'}"


def planned(case: verification.Case, faster: float) -> SolvedPlan:
    """Plans a case by a clock of another speed."""
    clock.time = SimpleNamespace(perf_counter=lambda: faster * time.perf_counter())
    try:
        return verification.subject(case)
    finally:
        clock.time = time


if __name__ == "__main__":
    main()
