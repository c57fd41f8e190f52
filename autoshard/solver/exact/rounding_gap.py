"""The rounding gap: what the tolerances of a MIP leave open is closed in integers where few nodes are left.

A MIP in floats proves a bound up to its tolerances. Once an almost optimal choice is known, message passing
often leaves a network so narrow that label elimination solves it, in integers.
"""

from dataclasses import replace

import numpy as np

from autoshard.problem.network import Int
from autoshard.solver.dual.dual import settled_dual
from autoshard.solver.exact.label_elimination import objective_of, solve_by_labels
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import memory_of, peaks_over
from autoshard.solver.program import Network, Program


def close(incumbent: Incumbent, network: Network, hinge_constant: tuple[int, ...], shift: int, events: Int) -> None:
    """Finds the optimum in `incumbent`, or proves that it is there, if tables stay small.

    Args:
      incumbent: has a choice.
      network: contains every better choice, in units of 2^-shift.
      hinge_constant: of each hinge, in the same unit.
      shift: see `dual.shifted`.
      events: the memory rows to begin with.
    """
    objective, tuning = incumbent.objective, incumbent.tuning.rounding_gap
    if network.nodes > tuning.nodes or objective is None:
        return
    memory = memory_of(incumbent.problem, network)
    plain = replace(network, cost=network.cost[:1], edge_cost=network.edge_cost[:1])  # hinges cost at least nothing
    dual = settled_dual(plain, shift, incumbent.tuning.dual, incumbent.left_s)
    target = (objective << shift) - 1 if shift >= 0 else objective >> -shift
    for _ in range(tuning.row_rounds):
        program = Program(
            network=network,
            usage=memory.coefficients(events),
            base=np.zeros(len(events), dtype=np.int64),
            limit=memory.limit,
            hinge_constant=hinge_constant,
        )
        answer = solve_by_labels(program, dual, target - dual.constant, incumbent.tuning.tables, incumbent.left_s)
        if answer is None:
            return
        if answer.choice is None:
            incumbent.raise_bound(objective)
            return
        if incumbent.offer(network.expand(answer.choice)):
            value = objective_of(program, answer.choice)
            incumbent.raise_bound(-((-value) >> shift) if shift >= 0 else value << -shift)
            return
        more = np.union1d(events, peaks_over(memory.profile(answer.choice), memory.limit, tuning.new_rows))
        if len(more) == len(events):
            return
        events = more
