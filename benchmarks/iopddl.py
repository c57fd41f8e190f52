"""Solves IOPDDL files and prints what was reached: `python -m benchmarks.iopddl FILE... --time-limit S`.

Seconds count from the start of the process for the first file and from the reading of the file for the others.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

STARTED = time.perf_counter()  # before the imports below, which belong to the time measured

from autoshard.errors import ProblemFileError  # noqa: E402
from autoshard.problem import iopddl  # noqa: E402
from autoshard.solver import Solution, evaluate, solve  # noqa: E402

# The best of 20 teams on eight cores, ASPLOS/EuroSys 2025 contest (github.com/google/iopddl), by the
# letter that ends the file's name.
CONTEST_BEST = {"A": 6_548_641_531, "G": 217_039, "M": 49_928_460_991, "S": 1_534_613_444}
RESERVE_S = 0.5  # of the time limit, for pricing and printing the answer
HEADER = (
    f"{'file':<24}{'objective':>18}{'bound':>18}{'gap %':>10}  {'status':<11}{'s':>7}"
    f"{'GB':>6}{'usage %':>9}{'ratio':>9}"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if any file was refused."""
    parser = argparse.ArgumentParser(description="Solve IOPDDL files (.json, .json.gz).")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds per file, all included")
    parser.add_argument("--rel-gap", type=float, default=0.0, help="stop at this relative gap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results as a list of objects")
    options = parser.parse_args(arguments)

    print(HEADER, flush=True)
    results: list[dict[str, object]] = []
    refused = 0
    begin = STARTED
    for path in options.files:
        try:
            problem = iopddl.read(path)
        except ProblemFileError as error:
            print(error, file=sys.stderr)
            refused = 1
            begin = time.perf_counter()
            continue
        left_s = options.time_limit - RESERVE_S - (time.perf_counter() - begin)
        solution = solve(
            problem,
            time_limit_s=max(left_s, 0.1),
            rel_gap=options.rel_gap,
            seed=options.seed,
            on_progress=live if sys.stderr.isatty() else None,
        )
        usage = "-"
        if len(solution.choice):
            priced = evaluate(problem, solution.choice)
            if priced.feasible and priced.objective != solution.objective:
                raise AssertionError(f"{path}: the answer costs {priced.objective}, not {solution.objective}")
            if problem.usage_limit:
                usage = f"{100 * priced.peak_bytes / problem.usage_limit:.2f}"
        seconds = time.perf_counter() - begin
        print(row(path, solution, seconds, usage), flush=True)
        results.append(
            {
                "file": str(path),
                "objective": solution.objective if solution.found else None,
                "bound": solution.bound,
                "gap": solution.gap if solution.found else None,
                "status": str(solution.status),
                "seconds": seconds,
            }
        )
        begin = time.perf_counter()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return refused


def live(best: int | None, bound: int | None, elapsed_s: float) -> None:
    """Shows the state of the search on one line of the terminal."""
    print(
        f"\r{elapsed_s:7.1f} s  best {best or '-':>16}  bound {bound or '-':>16}", end="\r", file=sys.stderr, flush=True
    )


def row(path: Path, solution: Solution, seconds: float, usage: str) -> str:
    """Returns one line of the table."""
    name = path.name.split(".")[0]
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    known = CONTEST_BEST.get(name.rpartition("-")[2])
    ratio = f"{solution.objective / known:.6f}" if known and solution.found else "-"
    objective = f"{solution.objective:,}" if solution.found else "-"
    gap = f"{100 * solution.gap:.5f}" if solution.found else "-"
    return (
        f"{name:<24}{objective:>18}{solution.bound:>18,}{gap:>10}  {solution.status:<11}{seconds:>7.1f}"
        f"{gigabytes:>6.2f}{usage:>9}{ratio:>9}"
    )


if __name__ == "__main__":
    sys.exit(main())
