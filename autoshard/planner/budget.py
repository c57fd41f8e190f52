"""Budget: how far a problem is solved, and the defaults of every verb."""

from dataclasses import dataclass

from autoshard.solver.incumbent import Cutoff, no_cutoff

# The defaults of every verb; who takes others says why.
TIME_LIMIT_S = 20.0
REL_GAP = 1e-3  # proven optimal to a tenth of a percent: far more exact than any cost model
WORTH = 5e-3  # of the step that is saved, at least, where a program repeats what it is not written to repeat

# Of counted work, about: then ten times the gap that was asked for will do; nobody waits a minute for the last percent.
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far a problem is solved.

    Attributes:
      time_limit_s: the solver's limit.
      rel_gap: proven optimal to this fraction is enough.
      cutoff_s: a step of so many seconds or more is of no use, and is not improved for long.
    """

    time_limit_s: float = TIME_LIMIT_S
    rel_gap: float = REL_GAP
    cutoff_s: Cutoff = no_cutoff


USUAL_BUDGET = Budget()
