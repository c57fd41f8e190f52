"""Solves IOPDDL files and prints the objectives: `python -m benchmarks.iopddl FILE... --time-limit S`.

Every file is solved in a process of its own; seconds count from its start, imports included. With
`--out docs/solver.md` the table also replaces the one in that page. `--processor-time` counts the
seconds of the process's own work, for machines that others keep busy.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()  # before the imports below, which belong to the time measured

from autoshard.errors import ProblemFileError  # noqa: E402
from autoshard.problem import iopddl  # noqa: E402
from autoshard.problem.network import Problem  # noqa: E402
from autoshard.solver import Solution, evaluate, solve, users_at  # noqa: E402

# The best of 20 teams on eight cores, ASPLOS/EuroSys 2025 contest (github.com/google/iopddl), by the
# letter that ends the file's name.
CONTEST_BEST = {"A": 6_548_641_531, "G": 217_039, "M": 49_928_460_991, "S": 1_534_613_444}
RESERVE_S = 0.5  # of the time limit, for pricing and printing the answer
SHOWN_USERS = 5  # nodes named at the time point of a peak that does not fit
HEADER = (
    f"{'file':<24}{'objective':>20}{'bound':>20}{'gap %':>10}  {'status':<11}{'s':>7}"
    f"{'GB':>6}{'usage %':>9}{'ratio':>10}"
)
BEGIN, END = "<!-- board: python -m benchmarks.iopddl -->", "<!-- end of board -->"


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if any file was refused."""
    parser = argparse.ArgumentParser(description="Solve IOPDDL files (.json, .json.gz).")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds per file, all included")
    parser.add_argument("--rel-gap", type=float, default=0.0, help="stop at this relative gap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processor-time", action="store_true", help="count this process's work, not the wall clock")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results as a list of objects")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="replace the table in this Markdown page")
    options = parser.parse_args(arguments)
    if len(options.files) > 1:
        results, refused = each_alone(options)
    else:
        print(HEADER, flush=True)
        try:
            results, refused = [run(options.files[0], options)], 0
        except ProblemFileError as error:
            print(error, file=sys.stderr)
            results, refused = [], 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.out is not None:
        page = options.out.read_text()
        before, rest = page.split(BEGIN)
        options.out.write_text(f"{before}{BEGIN}\n{board(results, options)}\n{END}{rest.split(END)[1]}")
    return refused


def each_alone(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Runs every file in a process of its own; returns all results and whether any was refused."""
    results: list[dict[str, Any]] = []
    refused = 0
    print(HEADER, flush=True)
    for path in options.files:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "results.json")
            command = [sys.executable, "-m", "benchmarks.iopddl", str(path), "--json", str(out)]
            command += ["--time-limit", str(options.time_limit), "--rel-gap", str(options.rel_gap)]
            command += ["--seed", str(options.seed), *["--processor-time"] * options.processor_time]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                child.stdout.readline()  # its header
                for line in child.stdout:
                    print(line, end="", flush=True)
            refused |= child.returncode
            if out.exists():
                results += json.loads(out.read_text())
    return results, refused


def run(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Solves one file, prints its line, and returns its result."""
    clock, started = (time.process_time, 0.0) if options.processor_time else (time.perf_counter, STARTED)
    problem = iopddl.read(path)
    left_s = options.time_limit - RESERVE_S - (clock() - started)
    solution = solve(
        problem,
        time_limit_s=max(left_s, 0.1),
        rel_gap=options.rel_gap,
        seed=options.seed,
        on_progress=live if sys.stderr.isatty() else None,
        clock=clock,
    )
    usage = "-"
    if len(solution.choice):
        priced = evaluate(problem, solution.choice)
        if priced.feasible and priced.objective != solution.objective:
            raise AssertionError(f"{path}: the answer costs {priced.objective}, not {solution.objective}")
        if problem.usage_limit:
            usage = f"{100 * priced.peak_bytes / problem.usage_limit:.2f}"
    seconds = clock() - started
    kilobytes = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result: dict[str, Any] = {
        "file": str(path),
        "objective": solution.objective if solution.found else None,
        "bound": solution.bound,
        "gap": solution.gap if solution.found else None,
        "status": str(solution.status),
        "seconds": seconds,
        "gigabytes": kilobytes * 1024 / 1e9,
    }
    print(row(path, solution, result, usage), flush=True)
    if not solution.found and solution.smallest_peak_bytes is not None:
        result |= {"smallest_peak": solution.smallest_peak_bytes, "peak_bound": solution.peak_bound_bytes}
        result |= {"peak_at": solution.peak_at}
        print(shortage(problem, solution), flush=True)
    return result


def live(best: int | None, bound: int | None, elapsed_s: float) -> None:
    """Shows the state of the search on one line of the terminal."""
    shown = [f"{'-':>20}" if value is None else f"{value:>20,}" for value in (best, bound)]
    print(f"\r{elapsed_s:7.1f} s  best {shown[0]}  bound {shown[1]}", end="\r", file=sys.stderr, flush=True)


def row(path: Path, solution: Solution, result: dict[str, Any], usage: str) -> str:
    """Returns one line of the table."""
    name = path.name.split(".")[0]
    ratio = ratio_of(str(path), result["objective"])
    objective = f"{solution.objective:,}" if solution.found else "-"
    gap = f"{100 * solution.gap:.5f}" if solution.found else "-"
    bound = f"{solution.bound:,}" if solution.found else "-"
    return (
        f"{name:<24}{objective:>20}{bound:>20}{gap:>10}  {solution.status:<11}{result['seconds']:>7.1f}"
        f"{result['gigabytes']:>6.2f}{usage:>9}{ratio:>10}"
    )


def ratio_of(file: str, objective: int | None) -> str:
    """Returns the objective over the best that the contest's teams reached, where that is known."""
    known = CONTEST_BEST.get(Path(file).name.split(".")[0].rpartition("-")[2])
    return f"{objective / known:.6f}" if known and objective is not None else "-"


def shortage(problem: Problem, solution: Solution) -> str:
    """Returns why nothing fits: the smallest peak, a bound on any, when it is, and who uses it."""
    assert solution.peak_at is not None
    users = users_at(problem, solution.choice, solution.peak_at)
    names = problem.names or [f"node {v}" for v in range(problem.nodes)]
    shown = ", ".join(f"{names[v]} {used:,}" for v, used in users[:SHOWN_USERS])
    more = f" and {len(users) - SHOWN_USERS} more" if len(users) > SHOWN_USERS else ""
    return (
        f"  limit {problem.usage_limit:,}; smallest peak found {solution.smallest_peak_bytes:,}, none below "
        f"{solution.peak_bound_bytes or 0:,}; at time {solution.peak_at}: {shown}{more}"
    )


def board(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Returns the results as a Markdown table, with date, versions and machine."""
    versions = ", ".join(f"{package} {version(package)}" for package in ("ortools", "numba", "numpy"))
    limit = f"{options.time_limit:g} s{' of processor time' if options.processor_time else ''}"
    lines = [
        f"{date.today().isoformat()}, time limit {limit} a file, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}. Load when done: {os.getloadavg()[1]:.1f} (mean of 5 minutes).",
        "",
        "| file | objective | bound | gap | status | seconds | GB | objective / contest's best |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for result in results:
        found = result["objective"] is not None
        objective = f"{result['objective']:,}" if found else "-"
        gap = f"{100 * result['gap']:.4f} %" if found else "-"
        lines.append(
            f"| {Path(result['file']).name} | {objective} | {result['bound']:,} | {gap} | {result['status']} "
            f"| {result['seconds']:.1f} | {result['gigabytes']:.2f} | {ratio_of(result['file'], result['objective'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
