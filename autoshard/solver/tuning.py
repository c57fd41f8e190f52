"""Tuning: every number that trades time for quality, one frozen value per engine, with what it was tuned on.

None of them changes what is proven: bounds stay bounds, and every answer is priced exactly. Numbers that an
algorithm needs to be right (sentinels, bits, tolerances of HiGHS) stay in its room, and so does the unit in
which work is counted (`clock`).

`solve(problem, tuning=SolverTuning(dual=DualTuning(moving_passes=80)))` changes one; `knobs` lists all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")

NOT_TUNED = "not tuned"
CONTEST = "python -m benchmarks.iopddl A.json.gz G.json.gz M.json.gz S.json.gz --time-limit 120"
CLIMBS = (
    "python -m benchmarks.iopddl S.json.gz decoder.json.gz --processor-time"  # docs/solver.md, how multipliers climb
)
SETTLING = "python -m benchmarks.settling"


@dataclass(frozen=True, slots=True)
class Knob:
    """What a number says about itself: "40 passes of a cycle after each of which …" is its value, unit and meaning."""

    unit: str
    meaning: str
    tuned_on: str  # a command of benchmarks/, or `NOT_TUNED`


def knob(value: T, unit: str, meaning: str, tuned_on: str = NOT_TUNED) -> T:
    """Returns a field of a tuning: its default, its unit, what it means and the benchmark that it was tuned on."""
    return field(default=value, metadata={"knob": Knob(unit, meaning, tuned_on)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """Which engine takes which problem, and for how long (`solver`)."""

    hinged_cells: int = knob(5_000, "cells", "problems with hinges and fewer cells are solved directly")
    direct_cells: int = knob(400_000, "cells", "problems with more cells go to the search at once")
    direct_nodes: int = knob(20_000, "nodes", "problems with more nodes go to the search at once")
    closing_rounds: int = knob(2, "rounds", "of the search after an engine that left a gap of rounding errors")
    patience_s: float = knob(10.0, "s", "the longest that the MIP of a small problem may take")
    patience: float = knob(0.3, "of the time limit", "the longest that the MIP of a small problem may take")
    reason_s: float = knob(5.0, "s", "at least, for a choice of small usage where nothing fits")
    reason_gap: float = knob(0.1, "relative gap", "at which a choice of small usage is good enough")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingTuning:
    """When a solve has done enough (`incumbent`)."""

    settled_gaps: int = knob(10, "times the gap asked for", "that will do once a solve has settled or is beaten")
    work: float = knob(
        0.2, "of the time limit", "of work ends a solve that settles, whatever its gap: slow machines need the rest"
    )
    mip_slack: int = knob(
        8, "times the estimate", "that a MIP may take, and so many seconds at least, where work decides", SETTLING
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PresolveTuning:
    """Exact reductions (`presolve/`)."""

    elimination_cells: int = knob(2_000_000, "cells", "the largest table from which one node is minimised out")
    nodes_at_once: int = knob(500, "nodes", "looked at for dominance between looks at the clock")


@dataclass(frozen=True, slots=True, kw_only=True)
class DualTuning:
    """Message passing and the multipliers of memory rows and hinges (`dual/`).

    Steps are in units of bound / limit for a memory row, and of one for a hinge.
    """

    moving_passes: int = knob(40, "passes", "of a cycle after each of which the multipliers move", CLIMBS)
    resting_passes: int = knob(10, "passes", "of a cycle that rest at the average of the multipliers", CLIMBS)
    past_weight: float = knob(0.9, "1", "of the past in the averaged usage that steers the multipliers", CLIMBS)
    first_step: float = knob(0.003, "bound / limit", "the first step of a multiplier", CLIMBS)
    largest_step: float = knob(0.03, "bound / limit", "the longest step of a multiplier, at first", CLIMBS)
    smallest_step: float = knob(1e-7, "bound / limit", "the shortest step of a multiplier", CLIMBS)
    faster: float = knob(1.1, "1", "factor on a step while the slope keeps its sign (Rprop)", CLIMBS)
    slower: float = knob(0.6, "1", "factor on a step when the slope turns (Rprop)", CLIMBS)
    shorter: float = knob(0.9, "1", "factor on the longest step after every cycle", CLIMBS)
    steepness: float = knob(10.0, "1", "relative violations above 1 / steepness take a whole step", CLIMBS)
    rows_every: int = knob(10, "passes", "between looks for memory rows to add")
    rows_at_once: int = knob(4, "rows", "added at one look, at most")
    tolerated: float = knob(1.0005, "of the limit", "averaged usage above it makes a memory row")
    nearly_full: float = knob(0.97, "of the limit", "averaged usage above it makes a memory row matter to a MIP")
    most_cycles: int = knob(6, "cycles", "of a network without memory rows")
    flat_gain: float = knob(1e-6, "of the bound", "a gain that counts as none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearchTuning:
    """Moves of blocks while prices steer memory (`primal/local_search`)."""

    visits: float = knob(1.2, "visits per node", "by the moves of a turn, on average")
    polish_visits: float = knob(4.0, "visits per node", "by the moves of a polish, at each of its factors")
    polish_factors: tuple[float, ...] = knob(
        (0.0, 0.5, 0.9, 0.0), "1", "on prices in a polish: low ones spend memory, high ones win it back"
    )
    portions: int = knob(5, "parts", "of a visit to every node, between looks at the clock")
    peaks: int = knob(16, "rows", "that become dearer at once")
    dearer: float = knob(3.0, "value / limit", "by which a price rises per relative overflow")
    least_dearer: float = knob(0.01, "value / limit", "by which a price rises at least")
    cheaper: float = knob(0.9, "1", "factor on the added prices after a turn that fits")
    level_factor: float = knob(0.95, "1", "factor on the dual's prices after a turn that fits")
    lowest_level: float = knob(0.2, "1", "the smallest factor on the dual's prices")
    patience: int = knob(15, "turns", "without success before the next perturbation")
    noises: tuple[float, ...] = knob((0.1, 0.3, 1.0, 3.0), "value / nodes", "of perturbations, drawn evenly")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTuning:
    """The smallest peak of what nothing satisfies (`primal/smallest_peak`)."""

    rounds: int = knob(30, "rounds", "in which the weights of time points change")
    passes: int = knob(20, "passes", "of messages at one vector of weights")
    eagerness: float = knob(4.0, "1", "exponent of a time point's excess over the mean")
    near: float = knob(0.98, "of the peak", "time points above it get a weight")
    points_at_once: int = knob(4, "time points", "that get a weight in a round, at most")
    turns: int = knob(25, "turns", "of the local search at one limit")
    lowerings: int = knob(4, "limits", "in a row, each half as ambitious, that may fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTuning:
    """Elimination by tables (`exact/bucket_elimination`, `exact/label_elimination`)."""

    bucket_cells: int = knob(4_000_000, "cells", "of the largest table")
    bucket_work: int = knob(60_000_000, "cells", "of all tables together")
    labels: int = knob(400_000, "labels", "in one table, before dominated ones go")
    label_hinges: int = knob(4, "hinges", "that a table may leave open; dominance looks at 2^hinges corners")


@dataclass(frozen=True, slots=True, kw_only=True)
class HingeTuning:
    """Problems with hinges (`exact/hinges`)."""

    steps: int = knob(60, "steps", "of Kelley's method")
    passes: int = knob(10, "passes", "of messages over a plain network, between looks at what they prove")
    looks: int = knob(30, "looks", "at what messages prove")
    rested_looks: int = knob(3, "looks", "in a row that gained nothing, after which nothing more is expected")
    spare: float = knob(0.5, "of the work", "that is left to the search, where work decides")
    elimination_work: int = knob(4_000_000, "cells", "of an elimination that is tried where messages leave a gap")
    first_distance: float = knob(2e-4, "of the bound", "from the bound to the first target")
    growth: int = knob(5, "1", "factor on that distance from target to target")
    targets: int = knob(8, "targets", "that are tried, one above the other")
    narrowings: int = knob(3, "rounds", "of message passing and removal per target")
    mip_cells: int = knob(60_000, "finite cells", "more are left to the search")
    new_rows: int = knob(8, "rows", "of memory added to a MIP at once")
    priced_rows: int = knob(8, "rows", "of memory with multipliers, at most")
    rows_per_step: int = knob(2, "rows", "of memory that a step gives multipliers to")
    row_cost: float = knob(4.0, "bounds", "that usage of twice the limit costs at a multiplier of one")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallProblemTuning:
    """Problems that are reduced and then solved by elimination or one MIP (`exact/small_problems`)."""

    new_rows: int = knob(8, "rows", "of memory added per round, at most: the worst of each stretch that overflows")
    float_gap: float = knob(1e-9, "relative gap", "that a MIP in floats leaves, and the search would rarely close")
    mip_cells: int = knob(80_000, "finite cells", "more are left to the search")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingGapTuning:
    """The last gap, one of rounding errors (`exact/rounding_gap`)."""

    nodes: int = knob(100, "nodes", "of a network that is tried, at most")
    row_rounds: int = knob(6, "eliminations", "in a row that add memory rows")
    new_rows: int = knob(8, "rows", "of memory that each adds")


@dataclass(frozen=True, slots=True, kw_only=True)
class MipProcessTuning:
    """The process in which MIPs are solved (`exact/mip_process`)."""

    overrun: float = knob(1.5, "times the limit", "that a request may take, and `overrun_s`, before the kill")
    overrun_s: float = knob(1.0, "s", "that a request may take beyond its limit before the kill")
    ending_s: float = knob(5.0, "s", "from the end of a process's output to its own end")
    look_s: float = knob(0.1, "s", "between looks at whether an answer is still wanted")
    margin: float = knob(
        0.1, "of the time left", "for an engine that overruns to say what it has before it is killed", CONTEST
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTuning:
    """The anytime search: how it divides time among dual, local search and MIPs (`search`)."""

    first_passes: int = knob(25, "passes", "of messages before all else", CONTEST)
    first_cycles: int = knob(8, "cycles", "of the dual before the first MIP", CONTEST)
    first_fit: int = knob(25, "turns", "of the local search before memory comes first")
    turns: int = knob(8, "turns", "of the local search between cycles of the dual, where work decides")
    run: int = knob(8, "turns", "from one rounding of the dual, at least")
    longest_rest: int = knob(16, "works", "in a row without a cycle, where cycles gain nothing")
    worthwhile: float = knob(0.01, "of the gap", "that a cycle must gain, and an incumbent to fix again")
    whole_cells: int = knob(40_000, "finite cells", "at most, of a network that is solved whole")
    whole_share: float = knob(0.6, "of the time left", "for a MIP of the whole network")
    first_cells: int = knob(20_000, "finite cells", "of the first restricted MIP")
    first_cells_of_work: int = knob(3_000, "finite cells", "of the first restricted MIP, where work decides")
    least_cells: int = knob(500, "finite cells", "that a MIP must have room for, where work decides")
    most_cells: int = knob(600_000, "finite cells", "of any MIP: HiGHS needs gigabytes for more", CONTEST)
    growth: float = knob(1.6, "1", "factor on the next MIP's cells after one that finished, or its inverse")
    mip_share: float = knob(0.15, "of the time limit", "the longest that a restricted MIP may take", CONTEST)
    mip_cells_per_s: float = knob(
        8_000, "finite cells per s left", "of a MIP: HiGHS finds anything only so fast", CONTEST
    )
    far: float = knob(0.05, "relative gap", "of an incumbent whose strategies are not worth a place in a part's MIP")
    first_tolerance: float = knob(2e-4, "of the bound", "gap at which a part's MIP may stop")
    tolerance: float = knob(0.05, "of the gap", "gap at which a part's MIP may stop")
    row_rounds: int = knob(6, "MIPs", "in a row that add memory rows")
    new_rows: int = knob(8, "rows", "of memory that each adds")
    dearer: tuple[float, ...] = knob((1.1, 1.3, 2.0, 4.0), "1", "factors on the multipliers while nothing fits")
    nap_s: float = knob(0.05, "s", "between looks at the process when there is nothing else to do")


@dataclass(frozen=True, slots=True, kw_only=True)
class TieTuning:
    """Ties broken for fewer reshardings and less memory (`second_objective`)."""

    worth: float = knob(
        1e-6, "of the objective", "that a resharding must save to stay: a hundred are a hundredth of a %"
    )
    sweeps: int = knob(8, "sweeps", "over all nodes and edges")
    alike: float = knob(5e-6, "of the objective", "that a group of nodes may cost in the choices of its like")
    all_alike: float = knob(1e-4, "of the objective", "that all such groups may cost")
    groups: int = knob(300, "groups", "that are tried, at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverTuning:
    """All of the solver's tuning, by engine."""

    engines: EngineTuning = EngineTuning()
    stopping: StoppingTuning = StoppingTuning()
    presolve: PresolveTuning = PresolveTuning()
    dual: DualTuning = DualTuning()
    local_search: LocalSearchTuning = LocalSearchTuning()
    peak: PeakTuning = PeakTuning()
    tables: TableTuning = TableTuning()
    hinges: HingeTuning = HingeTuning()
    small_problems: SmallProblemTuning = SmallProblemTuning()
    rounding_gap: RoundingGapTuning = RoundingGapTuning()
    mip_process: MipProcessTuning = MipProcessTuning()
    search: SearchTuning = SearchTuning()
    ties: TieTuning = TieTuning()


TUNED = SolverTuning()


def knobs(tuning: SolverTuning = TUNED) -> Iterator[tuple[str, Any, Knob]]:
    """Yields (engine.field, its value, what it says about itself) of every field."""
    for engine in fields(tuning):
        group = getattr(tuning, engine.name)
        for own in fields(group):
            yield f"{engine.name}.{own.name}", getattr(group, own.name), own.metadata["knob"]
