"""Recomputation space: layouts, and what is kept for backward passes, as one problem."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.resharding import Resharder
from autoshard.ir.recomputation import Recomputation
from autoshard.ir.recomputed import recomputation_of, recomputed, savable
from autoshard.ir.saved_values import SavedValues
from autoshard.planner.backward_passes import decided_text
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.program import Program
from autoshard.planner.request import PlanRequest
from autoshard.planner.search_space import build_search_space, decide_anew
from autoshard.problem.decisions import Decisions
from autoshard.problem.whole_step import WholeStep, kept_values, whole_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputationSpace:
    """A program's decisions with those of what its backward passes find kept."""

    request: PlanRequest
    saved: SavedValues
    whole: WholeStep
    decisions: Decisions
    resharder: Resharder

    @classmethod
    def of(cls, request: PlanRequest) -> "RecomputationSpace | None":
        """The space of a request; None for a program without a backward pass that reads a forward one."""
        saved = savable(request.traced, request.remat)
        if not saved.saved:
            return None
        traced = replace(request.traced, jaxpr=saved.closed, source_digest=request.digest)
        space = build_search_space(replace(request, program=Program(name=request.name, traced=traced)))
        lives = space.decisions.lives
        whole = whole_step(space.decisions.graph, saved, lives.stored | lives.named)
        decisions = decide_anew(space, whole.graph)
        return cls(request=request, saved=saved, whole=whole, decisions=decisions, resharder=space.resharder)

    def read(self, choice: NDArray[np.int64]) -> Recomputation:
        """What a choice per decision keeps."""
        kept = kept_values(self.whole, self.saved, self.decisions, choice)
        return recomputation_of(self.saved, {*kept, *self.saved.missing(kept)}, self.request.remat)

    @property
    def said(self) -> str:
        """The space, in words."""
        return (
            f"with {len(self.whole.recalls)} values that backward passes read, each kept or repeated from others, "
            "priced on one graph that has both"
        )

    def summary(self, found: PlanningResult) -> str:
        """What a plan of the program that keeps what was chosen keeps and repeats, in words."""
        chosen = found.record.recomputation
        texts = () if chosen is None else chosen.kept
        own = sum("^" not in text for text in texts)
        return decided_text(found.assignment, found.record.cost.step_s, own)


def keeping(request: PlanRequest, chosen: Recomputation) -> PlanRequest:
    """The request for the program that keeps these values for its backward passes.

    Raises:
      SpecError: they do not fit the program.
    """
    program = request.program
    again = Program(
        name=program.name,
        traced=recomputed(program.traced, chosen),
        trace_s=program.trace_s,
        variant=", ".join(filter(None, (program.variant, "recomputing"))),
    )
    return replace(request, program=again, recomputation=chosen)
