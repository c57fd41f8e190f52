"""Search: hardware and a number of chips → every slice and mesh planned, and ranked.

    found = autoshard.search("models:gpt2_xl", hardware="h100", chips=(8, 16), donate_argnums=0)
    print(found)

Candidates are planned in worker processes; each traces the program once.
An interruption (Ctrl-C) keeps what was found until then.
"""

import itertools
import logging
import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Unpack

from jax.sharding import PartitionSpec

import cost_models
from autoshard.api.options import DonationOptions, Options, SolvingOptions, keywords_of, listing, refuse_unknown
from autoshard.errors import InfeasibleError, SpecError
from autoshard.explore import executors, ranking_report, workers
from autoshard.explore.builder import takes_keyword
from autoshard.explore.candidates import Candidate, Candidates, candidates, slices
from autoshard.explore.ranking import LeftOut, Progress, RankedPlan, Ranking
from autoshard.explore.scheduler import Agenda
from autoshard.explore.trial import SEARCH_REL_GAP, Hints, Task, Trials
from autoshard.explore.workers import Answer
from autoshard.ir.accumulation import AUTO, Steps, accumulate
from autoshard.ir.arguments import as_tuple
from autoshard.ir.recomputation import Offload, Remat
from autoshard.planner import view
from autoshard.planner.planning_result import PlanningResult
from autoshard.problem.formulation import UNIT_S
from autoshard.problem.warm_start import PortableChoice
from autoshard.report import page
from autoshard.report.notebook import Shown
from autoshard.solver.tuning import TUNED

log = logging.getLogger("autoshard")

VALUE_AND_GRAD = "value_and_grad"  # the argument of a builder that takes the place of `jax.value_and_grad`
PARAMETER_MULTIPLE = "x"  # "20x": twenty tokens per parameter


@dataclass(frozen=True, kw_only=True)
class Search(Ranking, Shown):
    """A finished search: a ranking that prints itself, and makes its rows' plans again for more."""

    task: Task
    chosen: Mapping[Candidate, PortableChoice]  # of the rows

    def __str__(self) -> str:
        return ranking_report.text(self)

    def to_json(self) -> dict[str, Any]:
        """Everything, in SI units."""
        return ranking_report.to_json(self)

    def to_markdown(self) -> str:
        """The same as Markdown tables."""
        return ranking_report.markdown(self)

    def planned(self, rank: int = 1) -> PlanningResult:
        """The plan of a rank (1 is the best) with its problem, for explanations."""
        row = self.rows[rank - 1]
        known = (self.chosen[row.candidate],)
        as_it_is = Hints(known=known, record=row.record)  # and any gap will do
        planned = Trials(replace(self.task, rel_gap=inf)).planned(row.candidate, as_it_is)
        solution = replace(planned.solution, bound=round(row.record.certificate.bound_s / UNIT_S))
        return replace(planned, record=row.record, solution=solution)

    def to_html(self) -> str:
        """A page that opens offline: the ranking, and the best plan in detail."""
        best = view.of_plan(self.planned(), cost_models.hardware(self.best.candidate.hardware))
        return page.page(ranking=self.to_json(), plan=best)


class SearchOptions(DonationOptions, SolvingOptions, total=False):
    """Those of `plan` that `search` passes on."""

    pins: Mapping[str, PartitionSpec] | None
    for_grad: bool | int | Sequence[int] | None
    remat: Remat
    offload: Offload


@listing(SearchOptions, rel_gap=SEARCH_REL_GAP)
def search(
    target: str | Callable[..., Any],
    *args: Any,
    hardware: str | Sequence[str],
    chips: int | Sequence[int] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    keywords: Mapping[str, Any] | None = None,
    axes: int = 3,
    twins: bool = False,
    microbatches: Steps | None = None,
    tokens_per_step: int | None = None,
    budget_tokens: float | str = 0,
    prices: float | Mapping[str, float] | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[SearchOptions],
) -> Search:
    """Plans every mesh on every slice of so many chips, and ranks them by time per token.

    Args:
      target: a function, with its arguments in `args`; or a builder of both, as text
        (`"package.module:builder"`), which returns `(fn, args)`.
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      hardware: chips, `"tpu-v5p"` or several; with a topology (`"h100:2x8"`) that one alone.
      chips: how many, or several numbers for a scaling curve.
      vary: argument of the builder → its values, such as `{"batch": (64, 128)}`; every
        combination is planned.
      keywords: further arguments of the builder.
      axes: the most mesh axes.
      twins: whether meshes that no link tells apart are planned, too (see `candidates`).
      microbatches: how many a training step takes, or "auto" to choose them with each mesh's layouts: of a builder
        that takes `value_and_grad=`, which then accumulates, or of accumulations with `steps="auto"` (see
        `accumulate`). None leaves the program as it is; what it leaves open is chosen.
      tokens_per_step: None takes the elements of the largest integer input.
      budget_tokens: of the whole training, as a number or text (`"15T"`, `"20x"`: per parameter).
      prices: dollars per chip and hour, of every chip or by chip name.
      processes: None takes one per core. With an executor: how many candidates it is given at a time.
      executor: plans the candidates instead of processes of this machine: any `concurrent.futures.Executor`, or the
        address of a running cluster, `"dask://host:8786"` or `"ray://host:10001"`; None for processes of our own.
      on_progress: called when it begins, and after every candidate.
      **options: of `autoshard.plan`: pins, memory, unknown, for_grad, remat, offload; donate_argnums and
        donate_argnames, which, if neither is given, are the arguments that outputs replace leaf
        by leaf, as a training step's state (`()` donates none); time_limit_s, per candidate, and
        rel_gap, 0.002 if none is given.

    Raises:
      MeshError: no slice has that many chips.
      TargetError: the target is no builder.
      MissingRuleError: a primitive without a rule.
      InfeasibleError: no candidate fits; the message gives the smallest peak.
      SpecError: an argument that says nothing, such as no processes.
      SearchError: a planning process died, or no cluster answers.
      KeyboardInterrupt: it is interrupted before the first plan is made.
    """
    begin = time.perf_counter()
    refuse_unknown(options, keywords_of(search), "search")
    given: SearchOptions = {"rel_gap": SEARCH_REL_GAP, **options}
    asked = Options(**given)
    if processes is not None and processes < 1:
        raise SpecError(f"{processes} processes plan nothing: write --processes 1 (processes=1), or leave it out")
    if not isinstance(target, str) and vary:
        raise SpecError("vary= needs a builder: pass the target as text, such as 'models:gpt2_xl'")
    names = [hardware] if isinstance(hardware, str) else list(hardware)
    numbers = [chips] if isinstance(chips, int) else list(chips)
    _check_count(microbatches)
    token_count(budget_tokens, 1)  # refused now, not after the search
    places = [place for name in names for place in slices(name, numbers)]
    choices = [dict(zip(vary or {}, values, strict=True)) for values in itertools.product(*(vary or {}).values())]
    if isinstance(prices, Mapping):
        kinds = sorted({place.spec.partition(":")[0] for place in places})
        if strange := sorted(set(prices) - set(kinds)):
            raise SpecError(f"a price of {', '.join(strange)}, which is not searched: there is {', '.join(kinds)}")
    every = candidates(places, axes=axes, choices=choices, twins=twins)
    builder = isinstance(target, str)
    accumulating = builder and microbatches is not None and takes_keyword(target, VALUE_AND_GRAD)
    further = {VALUE_AND_GRAD: partial(accumulate, steps=AUTO)} if accumulating else {}
    task = Task(
        target=target if builder else None,
        keywords={**(keywords or {}), **further},
        fn=None if builder else target,
        args=args,
        pins=asked.pins or {},
        donate=None
        if asked.donate_argnums is None and asked.donate_argnames is None
        else (*as_tuple(asked.donate_argnums), *as_tuple(asked.donate_argnames)),
        for_grad=asked.for_grad,
        memory=asked.memory_bytes,
        tokens=tokens_per_step,
        unknown=asked.unknown,
        microbatches=microbatches,
        remat=asked.remat,
        offload=asked.offload,
        time_limit_s=asked.solver_limit_s,
        rel_gap=asked.rel_gap,
    )
    notes: list[str] = []
    answers: list[Answer] = []

    def tell(progress: Progress) -> None:
        log.debug("%s", progress, extra={"now": f"{progress} …"})
        if on_progress is not None:
            on_progress(progress)

    agenda = Agenda(every)
    try:
        tell(Progress(done=0, total=len(every), answer=None, best=None))
        with _answers(task, agenda, processes, executor, notes) as found:
            for answer in itertools.islice(found, len(every)):
                answers.append(answer)
                rows = [a for a in answers if isinstance(a, RankedPlan)]
                best = min(rows, key=lambda row: row.order, default=None)
                tell(Progress(done=len(answers), total=len(every), answer=answer, best=best))
    except KeyboardInterrupt:
        if not answers:
            raise
        notes.append(f"interrupted: {len(answers)} of {len(every)} candidates were planned")
    wall_s = time.perf_counter() - begin
    return _ranked(answers, every, budget_tokens, prices, wall_s, notes, task, agenda.chosen)


def _check_count(microbatches: Any) -> None:
    """Raises a SpecError if this is no number of micro-batches."""
    number = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches > 0
    if not (microbatches is None or microbatches == AUTO or number):
        raise SpecError(f'microbatches={microbatches!r}: write a number of at least one, or "auto"')


def _ranked(
    answers: Sequence[Answer],
    every: Candidates,
    budget: float | str,
    prices: float | Mapping[str, float] | None,
    wall_s: float,
    notes: Sequence[str],
    task: Task,
    chosen: Mapping[Candidate, PortableChoice],
) -> Search:
    rows = sorted((a for a in answers if isinstance(a, RankedPlan)), key=lambda row: row.order)
    left_out = tuple(a for a in answers if isinstance(a, LeftOut))
    if not rows:
        raise InfeasibleError(
            f"no candidate of {len(answers)} has a plan: {left_out[0].reason}\n"
            "  take more chips, a smaller batch (--set batch=…), or chips with more memory"
        )
    notes = [*notes, *unproven(rows, TUNED.stopping.settled_gaps * task.rel_gap)]
    by_chip: dict[str, float] = {}
    if prices is not None:
        chips = {row.candidate.hardware.partition(":")[0] for row in rows}
        by_chip = dict(prices) if isinstance(prices, Mapping) else dict.fromkeys(chips, float(prices))
    return Search(
        name=rows[0].record.name,
        rows=tuple(rows),
        left_out=left_out,
        twins=every.twins,
        missing=len(every) - len(answers),
        budget_tokens=token_count(budget, rows[0].parameters),
        prices=by_chip,
        wall_s=wall_s,
        notes=tuple(notes),
        task=task,
        chosen=chosen,
    )


def unproven(rows: Sequence[RankedPlan], gap: float) -> Iterator[str]:
    """Notes on rows, the best first, whose step may be shorter by more than `gap`."""
    least_s: dict[object, float] = {}
    beaten: list[float] = []
    open_: list[float] = []
    for row in rows:
        best_s, proof = least_s.setdefault(row.candidate.contest, row.step_s), row.record.certificate
        if proof.gap > gap:
            (beaten if proof.bound_s >= best_s else open_).append(proof.gap)
    if beaten:
        yield (
            f"{len(beaten)} of {len(rows)} rows are proven slower than the best, and were not searched further: "
            f"their steps may be up to {max(beaten):.1%} shorter"
        )
    if open_:
        yield f"{len(open_)} of {len(rows)} rows ran out of time: their steps may be up to {max(open_):.1%} shorter"


def token_count(written: float | str, parameters: int) -> float:
    """`15e12`, `"15T"`, `"300B"`, or `"20x"`: so many per parameter.

    Raises:
      SpecError: it is none of these, or "20x" of a program whose parameters are unknown.
    """
    if not isinstance(written, str):
        return float(written)
    units = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12, PARAMETER_MULTIPLE: float(parameters)}
    number, unit = (written[:-1], written[-1]) if written[-1:].isalpha() else (written, "")
    try:
        amount, each = float(number), units[unit]
        if amount <= 0:
            raise ValueError(amount)
    except (KeyError, ValueError):
        raise SpecError(f"cannot read the tokens {written}: write 15T, 300B or 20x (per parameter)") from None
    if unit == PARAMETER_MULTIPLE and not parameters:
        raise SpecError("tokens per parameter need leaves below `params`, which there are none of: write 15T or 300B")
    return amount * each


@contextmanager
def _answers(
    task: Task, agenda: Agenda, processes: int | None, executor: Executor | str | None, notes: list[str]
) -> Generator[Iterator[Answer]]:
    """Answers as they come: from an executor, from processes of our own, or from this one, with a note why."""
    if executor is not None:
        places = processes or (0 if isinstance(executor, str) else os.cpu_count() or 1)
        with executors.opened(executor, places) as engine, executors.answers(task, agenda, engine) as found:
            yield found
        return
    count = min(os.cpu_count() or 1 if processes is None else processes, agenda.count)
    if count > 1 and not _sendable(task):
        notes.append("planned in one process: the function is a closure; pass 'package.module:builder' to use more")
        count = 1
    with _here(task, agenda) if count == 1 else workers.answers(task, agenda, count) as found:
        yield found


@contextmanager
def _here(task: Task, agenda: Agenda) -> Generator[Iterator[Answer]]:
    yield _tried(Trials(task), agenda)


def _tried(trials: Trials, agenda: Agenda) -> Iterator[Answer]:
    while (taken := agenda.take()) is not None:
        candidate, known = taken
        tried = trials.run(candidate, Hints(cutoff_s=lambda c=candidate: agenda.least_s(c), known=known))
        agenda.learn(candidate, tried)
        yield tried.answer


def _sendable(task: Task) -> bool:
    """Whether another process can have the task: builders can, functions if they have a module."""
    if getattr(task.fn, "__module__", None) == "__main__":
        return False
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
