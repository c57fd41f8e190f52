"""Random small problems against enumeration of every choice: `python -m benchmarks.solver_enumeration`.

Problem i of seed s is drawn from the generator of (s, i); its index also says which kind it is, which engine
solves it, and whether it begins with choices drawn at random. An answer is wrong unless it is proven optimal at the
enumerated optimum, with a choice that costs it, before ties are broken and after, or proven infeasible with the
smallest peak that there is. `--problem I` prints one and solves it again.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.problem import Problem
from autoshard.problem.network import Int
from autoshard.solver import Solution, solve
from autoshard.solver.second_objective import break_ties
from autoshard.solver.tuning import TUNED, EngineTuning, SolverTuning
from tests.random_problems import Truth, brute_force, fault, random_knapsacks, random_problem, side_by_side
from tests.random_whole_steps import random_whole_step

KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {
    "network": lambda rng: random_problem(rng, nodes=5),
    "network, one hinge": lambda rng: random_problem(rng, nodes=5, hinges=1),
    "network, two hinges": lambda rng: random_problem(rng, nodes=5, hinges=2),
    "network, knapsacks": lambda rng: random_knapsacks(rng, nodes=5),
    "two networks": lambda rng: side_by_side(random_problem(rng, nodes=3), random_problem(rng, nodes=3)),
    "whole step": lambda rng: random_whole_step(rng, links=0),
    "whole step, links": lambda rng: random_whole_step(rng, links=int(rng.integers(1, 4))),
    "whole step, links, hinges": lambda rng: random_whole_step(rng, links=1, hinges=2),
}
SHARES = (20, 4, 2, 6, 4, 2, 1, 1)  # of forty problems: those that need several MIPs take thirty times as long
TURNS = tuple(kind for kind, share in zip(KINDS, SHARES, strict=True) for _ in range(share))
SEARCHED = 8  # of every eight rounds of forty one goes to the search, the engine of large problems
BEGUN = 3  # of every three problems one begins with choices
SEARCH = SolverTuning(engines=EngineTuning(direct_cells=-1))


def draw(seed: int, index: int) -> tuple[str, str, Problem]:
    """Returns the kind, the engine and the problem of an index."""
    kind = TURNS[index % len(TURNS)]
    engine = "search" if index // len(TURNS) % SEARCHED == 0 else "default"
    return kind, engine, KINDS[kind](np.random.default_rng((seed, index)))


def solved(problem: Problem, engine: str, known: Sequence[Int] = ()) -> Solution:
    """Solves a problem by the engines of its size, or by the search."""
    return solve(problem, tuning=SEARCH if engine == "search" else TUNED, known=known)


def beginning(seed: int, index: int, problem: Problem) -> list[Int]:
    """Returns the choices with which the solve of an index begins: most often none."""
    rng, sizes = np.random.default_rng((seed, index, 1)), np.diff(problem.start)
    return [rng.integers(0, sizes) for _ in range(3 if index % BEGUN == 0 else 0)]


def check(seed: int, index: int) -> tuple[str, str, Truth, str | None]:
    """Solves the problem of an index; returns its kind, its engine, the truth, and what is wrong, if anything."""
    kind, engine, problem = draw(seed, index)
    truth = brute_force(problem)
    solution = solved(problem, engine, beginning(seed, index, problem))
    why = fault(problem, truth, solution)
    if why is None and truth.objective is not None:
        why = fault(problem, truth, replace(solution, choice=break_ties(problem, solution.choice)))
    return kind, engine, truth, why


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(description="Compare the solver with enumeration.")
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="I", help="goes on from this one")
    parser.add_argument("--problem", type=int, metavar="I", help="this one alone, and print it")
    options = parser.parse_args(arguments)
    indices = range(options.first, options.problems) if options.problem is None else [options.problem]
    seen: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    begin = time.process_time()
    for index in indices:
        if options.problem is not None:
            print(draw(options.seed, index)[2])
        kind, engine, truth, why = check(options.seed, index)
        column = "wrong" if why else "infeasible" if truth.objective is None else "optimal"
        seen[kind, column] += 1
        seen[kind, "by search"] += engine == "search"
        if why:
            wrong.append(f"problem {index} of seed {options.seed} ({kind}, {engine}): {why}")
            print(wrong[-1], file=sys.stderr, flush=True)
    print(table(seen))
    print(f"\n{len(indices):,} problems, {len(wrong)} wrong, {time.process_time() - begin:.0f} s of processor time")
    return bool(wrong)


def table(seen: Counter[tuple[str, str]]) -> str:
    """Returns the counts by kind as a Markdown table."""
    columns = ("optimal", "infeasible", "wrong", "by search")
    lines = [f"| kind | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [f"| {kind} | {' | '.join(f'{seen[kind, column]:,}' for column in columns)} |" for kind in KINDS]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
