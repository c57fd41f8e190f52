"""Saved values: what a backward pass reads of its forward one, and what each of it is made from.

Every value of a forward body may be kept for the backward pass, not only what is kept
today. What is read and not kept is repeated: the step that makes it, from operands that
are kept, that the backward pass has anyway, or that are repeated themselves; each step
at most once. So one yes or no per value says all:

    repeated(v)  ⇒  every operand of v's step is free, kept or repeated

and `SavedValues.missing` names what that reaches and cannot be repeated: what a loop
carries from trip to trip, effects, calls to the host.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard import _jax
from autoshard.ir.bodies import Step, why_once
from autoshard.ir.graph import Aval, Path
from autoshard.ir.passes import Pass, passes
from autoshard.ir.recomputation import Remat as Remat

INPUT = "an input"
CONSTANT = "made of constants"
RESULT = "a result of the program"
LOOP_INPUT = "given to every trip"
ELSEWHERE = "stacked as a result of the program"

CARRIED = "carried from trip to trip"


@dataclass(frozen=True, slots=True, order=True)
class ValueId:
    """A value by its place in the program as it was traced, the same in every trace.

    `path` and `i` are as in `ir/graph.py`: an equation's result i, or a body's input i. `stacked` counts the
    innermost scans around it over which the value is stacked; 0 is the value of one trip.
    """

    path: Path
    i: int
    stacked: int = 0

    def __str__(self) -> str:
        text = f"{'.'.join(map(str, self.path))}:{self.i}"
        return f"{text}^{self.stacked}" if self.stacked else text

    @classmethod
    def parse(cls, text: str) -> "ValueId":
        """Reads an id from its text."""
        spot, _, stacked = text.partition("^")
        path, _, i = spot.rpartition(":")
        return cls(tuple(int(p) for p in path.split(".") if p), int(i), int(stacked or 0))

    @property
    def stack(self) -> "ValueId":
        """The id of the same value, stacked over one more scan."""
        return replace(self, stacked=self.stacked + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStep:
    """An equation of a forward body, the `position`-th; of a literal or a constant operand, None.

    `unrepeatable` says why it runs only once; it is empty if it may run again.
    """

    position: int
    path: Path
    primitive: str
    operands: tuple[ValueId | None, ...]
    results: tuple[ValueId, ...]
    where: str
    unrepeatable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardValue:
    """A value of a forward body, and what may become of it.

    Attributes:
      id: its place.
      aval: of one trip.
      trips: how many of them are in memory at once, if it is kept.
      where: the user's line.
      step: which step of the pass makes it; None for an input.
      read: the backward equations that read it today, in order.
      free: why the backward pass has it without keeping it; empty if it does not.
      must_keep: why it is not repeated; empty if it may be.
    """

    id: ValueId
    aval: Aval
    trips: int
    where: str
    step: int | None
    read: tuple[Path, ...]
    free: str
    must_keep: str

    @property
    def nbytes(self) -> int:
        """The bytes of the kept value, of all trips together, on all devices together."""
        return self.aval.nbytes * self.trips


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The values of the forward body around it that a backward step reads."""

    position: int
    path: Path
    ids: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The consequences of a choice of kept values in one pass.

    `wired` are the values that the backward body reads from outside of itself: kept ones and loop inputs.
    `first` maps a step that is repeated to the backward step that needs it first. `missing` maps what would
    have to be kept to why.
    """

    wired: frozenset[ValueId]
    first: Mapping[int, int]
    missing: Mapping[ValueId, str]
    inside: tuple["Demand", ...] = ()


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from the fields is found when first asked for
class ForwardPass:
    """The values and steps of a forward body, and what its backward body reads.

    `inside[n]` is the pass of the n-th pair of scans; `given[n]` maps the inputs that every trip of it has to
    the values of this body.
    """

    source: Pass
    trips: int
    steps: tuple[ForwardStep, ...]
    values: tuple[ForwardValue, ...]
    reads: tuple[Reads, ...]
    variables: Mapping[Any, ValueId] = field(repr=False)
    inside: tuple["ForwardPass", ...] = ()
    given: tuple[Mapping[ValueId, ValueId | None], ...] = ()

    @property
    def body(self) -> Path:
        return self.source.forward.path

    @property
    def backward(self) -> Path:
        return self.source.backward.path

    @cached_property
    def value(self) -> Mapping[ValueId, ForwardValue]:
        return {value.id: value for value in self.values}

    def demand(self, kept: Collection[ValueId]) -> Demand:
        """The values that the backward body reads, and the steps that it repeats, if these values are kept."""
        inside = tuple(one.demand(kept) for one in self.inside)
        wanted = {pair.backward: n for n, pair in enumerate(self.source.pairs)}
        wired: set[ValueId] = set()
        missing: dict[ValueId, str] = {}
        first: dict[int, int] = {}
        for reads in self.reads:
            ids: list[ValueId] = list(reads.ids)
            if reads.position in wanted:
                n = wanted[reads.position]
                outer = [self.given[n].get(v, v.stack) for v in sorted(inside[n].wired)]
                ids += [v for v in outer if v is not None]
            while ids:
                value = self.value[ids.pop()]
                if value.free == LOOP_INPUT or value.id in kept or value.free == ELSEWHERE:
                    wired.add(value.id)
                elif value.free:
                    continue
                elif value.must_keep or value.step is None:
                    missing[value.id] = value.must_keep
                elif value.step not in first:
                    first[value.step] = reads.position
                    ids += [v for v in self.steps[value.step].operands if v is not None]
        return Demand(wired=frozenset(wired), first=first, missing=missing, inside=inside)

    def each(self, demand: Demand) -> Iterable[tuple["ForwardPass", Demand]]:
        """This pass and those inside of it, with their parts of a demand."""
        yield self, demand
        for one, part in zip(self.inside, demand.inside, strict=True):
            yield from one.each(part)


@dataclass(frozen=True, kw_only=True)
class SavedValues:
    """Every pass of a program: flat ones, each with those inside of it behind it."""

    closed: Any = field(repr=False)
    program: Pass = field(repr=False)
    passes: tuple[ForwardPass, ...]
    flat: tuple[ForwardPass, ...] = field(repr=False)

    @cached_property
    def saved(self) -> frozenset[ValueId]:
        """The values that the program keeps as it is written: with them it is rewritten to itself."""
        found: set[ValueId] = set()
        for one in self.passes:
            found |= {value.id for value in one.values if value.read and not value.free}
        return self.stacks(found)

    @cached_property
    def stackable(self) -> frozenset[ValueId]:
        """The values that one scan could stack in the host's memory for another one.

        Of the scans of a flat pass: what those within them stack is stacked once more.
        """
        inside = (one for flat in self.flat for one in flat.inside)
        return frozenset(
            v.id
            for one in inside
            for v in one.values
            if not v.id.stacked and v.free not in (LOOP_INPUT, ELSEWHERE) and v.aval.size > 1
        )

    def missing(self, kept: Collection[ValueId]) -> Mapping[ValueId, str]:
        """Further values that must be kept, with the reason: steps that would be repeated, and must not run twice."""
        found: dict[ValueId, str] = {}
        for _, demand in self._demands(kept):
            found |= demand.missing
        return found

    def repeated(self, kept: Collection[ValueId]) -> tuple[ForwardStep, ...]:
        """The steps that the backward passes repeat, each once, in program order."""
        found = [one.steps[k] for one, demand in self._demands(kept) for k in demand.first]
        return tuple(sorted(found, key=lambda step: step.path))

    def needed_before(self, kept: Collection[ValueId]) -> Mapping[Path, Path]:
        """The path of every step that is repeated → that of the backward equation (or body) which needs it first."""
        found: dict[Path, Path] = {}
        for one, demand in self._demands(kept):
            at = {reads.position: reads.path for reads in one.reads}
            found |= {one.steps[k].path: at[position] for k, position in demand.first.items()}
        return found

    def used(self, kept: Collection[ValueId]) -> frozenset[ValueId]:
        """The kept values that a backward pass reads; the others are not kept, and cost nothing."""
        found: set[ValueId] = set()
        for _, demand in self._demands(kept):
            found |= demand.wired
        return frozenset(found & set(kept))

    def stacks(self, kept: Iterable[ValueId]) -> frozenset[ValueId]:
        """The values with their stacks in every pass around theirs: kept throughout."""
        found = set(kept)
        for one in reversed(self.passes):  # inner ones first
            found |= {v.id for v in one.values if v.id.stacked and replace(v.id, stacked=v.id.stacked - 1) in found}
        return frozenset(found)

    def _demands(self, kept: Collection[ValueId]) -> Iterable[tuple[ForwardPass, Demand]]:
        kept = kept if isinstance(kept, frozenset | set) else frozenset(kept)
        for one in self.flat:
            yield from one.each(one.demand(kept))


def saved_values(closed: Any, *, remat: Remat = "add") -> SavedValues:
    """Finds what crosses from forward to backward in a traced program.

    Args:
      closed: the program.
      remat: what becomes of its own `jax.checkpoint`s; with "written" there is nothing to choose.
    """
    program = passes(closed, remats=remat == "free")
    flat = [] if remat == "written" else [one for one in program.walk() if one.is_flat and one.transposed]
    lines = _jax.SourceLines()
    described = tuple(_described(one, 1, lines) for one in flat)
    return SavedValues(
        closed=closed, program=program, passes=tuple(p for one in described for p in _all(one)), flat=described
    )


def _all(one: ForwardPass) -> Iterable[ForwardPass]:
    yield one
    for inside in one.inside:
        yield from _all(inside)


def _described(one: Pass, trips: int, lines: _jax.SourceLines) -> ForwardPass:
    inside = tuple(_described(pair.inside, trips * (pair.inside.length), lines) for pair in one.pairs)
    return _Describer(one, trips, lines, inside).described()


class _Describer:
    """Numbers the values of one pass."""

    def __init__(self, one: Pass, trips: int, lines: _jax.SourceLines, inside: tuple[ForwardPass, ...]) -> None:
        self.one, self.trips, self.lines, self.inside = one, trips, lines, inside
        self.pair_of = {pair.forward: n for n, pair in enumerate(one.pairs)}
        self.ids: dict[Any, ValueId] = {}
        self.steps: list[ForwardStep] = []
        self.values: dict[ValueId, ForwardValue] = {}
        self.constant: set[Any] = {var for var, _ in one.forward.consts}
        self.read: dict[ValueId, list[Path]] = {}

    def described(self) -> ForwardPass:
        self.inputs()
        steps = [(k, s) for k, s in enumerate(self.one.forward.steps) if not self.is_backward(k)]
        for k, step in steps:
            self.step(k, step)
        reads = tuple(self.reads())
        self.outcomes()
        values = [replace(v, read=tuple(self.read.get(v.id, ()))) for v in self.values.values()]
        given = tuple(self.given(pair.forward, self.inside[n]) for n, pair in enumerate(self.one.pairs))
        return ForwardPass(
            source=self.one,
            trips=self.trips,
            steps=tuple(self.steps),
            values=tuple(values),
            reads=reads,
            variables=self.ids,
            inside=tuple(self.with_results(one) for one in self.inside),
            given=given,
        )

    def is_backward(self, k: int) -> bool:
        return self.one.is_flat and k in self.one.transposed

    def add(self, var: Any, at: ValueId, where: str, *, step: int | None, free: str = "", must_keep: str = "") -> None:
        """A value; one that is known by another variable already stays what it is."""
        if not _jax.is_unnamed(var):
            self.ids.setdefault(var, at)
        aval = Aval(tuple(getattr(var.aval, "shape", ())), getattr(var.aval, "dtype", None))
        self.values.setdefault(
            at,
            ForwardValue(
                id=at, aval=aval, trips=self.trips, where=where, step=step, read=(), free=free, must_keep=must_keep
            ),
        )

    def inputs(self) -> None:
        body = self.one.forward
        consts, carries = (len(body.invars), 0) if self.one.is_flat else self.one.arity
        for i, var in enumerate(body.invars):
            carried = consts <= i < consts + carries
            free = "" if carried else INPUT if self.one.is_flat else LOOP_INPUT
            self.add(var, ValueId(body.path, i), "", step=None, free=free, must_keep=CARRIED if carried else "")

    def step(self, k: int, step: Step) -> None:
        eqn, where = step.eqn, self.lines(step.eqn)
        unrepeatable = why_once(eqn)
        if not unrepeatable and all(_jax.is_literal(x) or x in self.constant for x in eqn.invars):
            self.constant.update(eqn.outvars)
        position = len(self.steps)
        results: list[ValueId] = []
        for i, var in enumerate(eqn.outvars):
            at = self.stack_of(k, i) or ValueId(step.path, i)
            free = CONSTANT if self.one.is_flat and var in self.constant else ""
            self.add(var, at, where, step=position, free=free, must_keep=unrepeatable)
            results.append(at)
        for at, value in self.further_stacks(k, results):
            stack = replace(value, id=at, where=value.where or where, step=position, free="", must_keep=unrepeatable)
            aval = Aval((self.inside[self.pair_of[k]].source.length, *value.aval.shape), value.aval.dtype)
            self.values[at] = replace(stack, aval=aval, trips=self.trips, read=())
            results.append(at)
        self.steps.append(
            ForwardStep(
                position=k,
                path=step.path,
                primitive=step.primitive,
                operands=tuple(None if _jax.is_literal(x) else self.ids.get(x) for x in eqn.invars),
                results=tuple(results),
                where=where,
                unrepeatable=unrepeatable,
            )
        )

    def stack_of(self, k: int, i: int) -> ValueId | None:
        """The id of a result of a paired scan that stacks a value of its body."""
        if k not in self.pair_of:
            return None
        carries = _jax.scan_arity(self.one.forward.steps[k].eqn)[1]
        inside = self.inside[self.pair_of[k]]
        atom = inside.source.forward.outvars[i]
        if i < carries or _jax.is_literal(atom) or atom not in inside.variables:
            return None
        return inside.variables[atom].stack

    def further_stacks(self, k: int, known: Sequence[ValueId]) -> Iterable[tuple[ValueId, ForwardValue]]:
        """Further values that a paired scan could stack."""
        if k not in self.pair_of:
            return []
        inside = self.inside[self.pair_of[k]]
        stacks = [(v.id.stack, v) for v in inside.values if v.free != LOOP_INPUT]
        return [(at, v) for at, v in stacks if at not in known]

    def reads(self) -> Iterable[Reads]:
        """The values that each backward step reads; of a paired scan, those that its pass does not account for."""
        inside = {pair.backward: pair.inside for pair in self.one.pairs}
        steps = self.one.backward.steps
        for k in sorted(self.one.transposed):
            step, accounted = steps[k], set[int]()
            if k in inside:
                back = inside[k].backward.invars
                accounted = {i for i, var in enumerate(back) if var in inside[k].same}
            ids: list[ValueId] = []
            for i, atom in enumerate(step.eqn.invars):
                var = self.one.read(atom)
                if var in self.ids:
                    self.read.setdefault(self.ids[var], []).append(step.path)
                    if i not in accounted:
                        ids.append(self.ids[var])
            yield Reads(position=k, path=step.path, ids=tuple(dict.fromkeys(ids)))
        if not self.one.is_flat:
            ids = [self.ids[var] for atom in self.one.backward.outvars if (var := self.one.read(atom)) in self.ids]
            for at in ids:
                self.read.setdefault(at, []).append(self.one.backward.path)
            yield Reads(position=len(steps), path=self.one.backward.path, ids=tuple(dict.fromkeys(ids)))

    def outcomes(self) -> None:
        """A flat body's results are in memory until its end."""
        if self.one.is_flat:
            for atom in self.one.forward.outvars:
                at = None if _jax.is_literal(atom) else self.ids.get(atom)
                if at is not None and not self.values[at].free:
                    self.values[at] = replace(self.values[at], free=RESULT)

    def with_results(self, inside: ForwardPass) -> ForwardPass:
        """The pass of a pair of scans. Stacks that are results of the program are free in it."""
        values = [
            replace(v, free=ELSEWHERE)
            if not v.free and v.id.stack in self.values and self.values[v.id.stack].free == RESULT
            else v
            for v in inside.values
        ]
        return replace(inside, values=tuple(values))

    def given(self, forward: int, inside: ForwardPass) -> Mapping[ValueId, ValueId | None]:
        """Variables that every trip of a paired scan has, by the operands of the scan."""
        eqn = self.one.forward.steps[forward].eqn
        return {
            inside.variables[var]: None if _jax.is_literal(atom) else self.ids.get(atom)
            for atom, var in zip(eqn.invars, inside.source.forward.invars, strict=True)
            if inside.value[inside.variables[var]].free == LOOP_INPUT
        }
