"""Attribution: why the step of one layout takes longer than another's, entry by entry.

An entry is the time that the step waits for the collectives of one kind, over the same axes,
of one type of value at one source line; or the compute of one operation at one line. The
communication that a window leaves exposed is shared among its hideable collectives in
proportion to their seconds. The entries sum to the difference of the two steps.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import numpy as np

from autoshard.ir.graph import Aval, Graph
from autoshard.ir.op_traits import CONSTRAINT, GATHER
from autoshard.ir.paths import dotted
from autoshard.planner.record import PlanRecord
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.collective import Collective
from autoshard.report.notebook import Shown
from autoshard.report.tables import bytes_text, columns, render, short_aval, short_place, table, time_text

COMPUTE, ROUNDING = "compute", "rounding"
MOST = 3  # entries of a sentence, on either side
LEAST = 0.01  # of the largest part: smaller parts are "other" in a sentence
EQUAL_S = 1e-9  # steps that differ by less are equal
ROWS = 12  # of the table in a terminal

_REDUCES = frozenset({"all-reduce", "reduce-scatter"})

Axes = tuple[tuple[str, int], ...]
_Named = tuple[tuple[str, str], ...]  # end of a path, and all of it
_Key = tuple[str, Axes, str, str, _Named]
_Type = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Seconds of a step that two layouts spend on the same thing.

    Attributes:
      kind: kind of the collective, or "compute"; "rounding" is the rest of sums in picoseconds.
      axes: axes that the collective runs over, with their sizes.
      what: the type of the value, such as `bfloat16[4096,14336]` (a gradient's dimensions are in order
        of size); for compute, the operation.
      where: the source line.
      tensors: the inputs whose value or gradient it is, by the shortest ends of their paths that tell
        them apart; empty if unknown.
      paths: their whole paths, without the numbers of layers: `state.params.layers.w_up`.
      hand_s: seconds of the step of the first layout.
      best_s: seconds of the step of the second.
      hand_bytes: logical bytes per device and step of the first layout; 0 for compute.
      best_bytes: the same of the second.
    """

    kind: str
    axes: Axes
    what: str
    where: str
    tensors: tuple[str, ...]
    paths: tuple[str, ...]
    hand_s: float
    best_s: float
    hand_bytes: int
    best_bytes: int

    @property
    def lost_s(self) -> float:
        """Seconds that the first layout takes longer; negative where it saves."""
        return self.hand_s - self.best_s

    @property
    def subject(self) -> str:
        """`w_up`, `gradient of w_up`, or the type of a value that is no input."""
        names = ", ".join(self.tensors)
        if self.kind in _REDUCES and names:
            return f"gradient of {names}"
        return names or (self.what if self.kind == COMPUTE else short_aval(self.what))

    @property
    def title(self) -> str:
        """`all-gather w_up over data (mlp.py:65)`."""
        over = f" over {'·'.join(name for name, _ in self.axes)}" if self.axes else ""
        line = short_place(self.where).partition(" (")[0]
        return f"{self.kind} {self.subject}{over}" + (f" ({line})" if line else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Shown):
    """The difference of two predicted steps, the largest entries first.

    Attributes:
      hand: the layout in question, as the planner's model sees it.
      best: the layout that it is compared with, of the same program.
      entries: exactly the entries that differ.
    """

    hand: PlanRecord
    best: PlanRecord
    entries: tuple[Entry, ...]

    @property
    def lost_s(self) -> float:
        """Seconds that the step of `hand` takes longer: the sum of the entries."""
        return self.hand.cost.step_s - self.best.cost.step_s

    def sentence(self, most: int = MOST) -> str:
        """`loses 1.8 ms: 1.2 ms all-gather w_down over data (mlp.py:65), …; saves 0.3 ms …`.

        All compute is one part; parts that are small beside the largest are "other".
        """
        items = [(e.lost_s, e.title) for e in self.entries if e.kind not in (COMPUTE, ROUNDING)]
        items.append((fsum(e.lost_s for e in self.entries if e.kind == COMPUTE), COMPUTE))
        items.sort(key=lambda item: -abs(item[0]))
        least = LEAST * abs(items[0][0])
        losses, savings = ([i for i in items if sign * i[0] > least][:most] for sign in (1, -1))
        rest = self.lost_s - fsum(lost_s for lost_s, _ in (*losses, *savings))
        parts = [f"{time_text(lost_s)} {title}" for lost_s, title in losses]
        saved = [f"{time_text(-lost_s)} {title}" for lost_s, title in savings]
        if rest > least:
            parts.append(f"{time_text(rest)} other")
        if rest < -least:
            saved.append(f"{time_text(-rest)} other")
        if not parts and not saved:
            return "takes the same time for everything"
        losing, saving = ", ".join(parts), [f"saves {', '.join(saved)}"] if saved else []
        if abs(self.lost_s) < EQUAL_S:
            return f"takes as long: {'; '.join([*([f'loses {losing}'] if parts else []), *saving])}"
        verb = "loses" if self.lost_s > 0 else "wins"
        return f"{verb} {time_text(abs(self.lost_s))}: {'; '.join([*([losing] if parts else []), *saving])}"

    def of_tensor(self, path: str) -> float | None:
        """Seconds lost on collectives of an input and of its gradient; shared ones in equal parts. None without any."""
        parts = [e.lost_s / len(e.paths) for e in self.entries if path in e.paths]
        return fsum(parts) if parts else None

    def __str__(self) -> str:
        width = columns()
        told = [e for e in self.entries if e.kind != ROUNDING]
        shown, rest = told[:ROWS], told[ROWS:]
        cells = [(signed(e.lost_s), e.title, _arrow(e)) for e in shown]
        if rest:
            cells.append((signed(fsum(e.lost_s for e in rest)), f"{len(rest)} more", ""))
        return render(
            f"step: {time_text(self.hand.cost.step_s)} against {time_text(self.best.cost.step_s)}: "
            f"{signed(self.lost_s)}\n",
            table("", ("lost", "on", "bytes"), cells, right=("lost", "bytes")),
            width=width,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, in SI units."""
        return {
            "hand_step_s": self.hand.cost.step_s,
            "best_step_s": self.best.cost.step_s,
            "lost_s": self.lost_s,
            "entries": [
                {
                    "kind": e.kind,
                    "axes": dict(e.axes),
                    "what": e.what,
                    "where": e.where,
                    "tensors": list(e.paths),
                    "lost_s": e.lost_s,
                    "hand_s": e.hand_s,
                    "best_s": e.best_s,
                    "hand_bytes": e.hand_bytes,
                    "best_bytes": e.best_bytes,
                }
                for e in self.entries
            ],
        }


def signed(seconds: float) -> str:
    """Seconds that are lost (+) or saved (−)."""
    return f"{'+' if seconds >= 0 else '−'}{time_text(abs(seconds))}"


def _arrow(entry: Entry) -> str:
    if entry.kind in (COMPUTE, ROUNDING):
        return ""
    before, after = bytes_text(entry.hand_bytes), bytes_text(entry.best_bytes)
    return before if before == after else f"{before} → {after}"


def ledger(hand: tuple[PlanRecord, Assignment], best: tuple[PlanRecord, Assignment]) -> Attribution:
    """The difference of the steps of two layouts of one program, each given as its record and assignment.

    Their meshes may differ: collectives over other axes are entries of their own. In meshes of
    the same sizes axes correspond by position, not by name; the entries have the names of the
    first.
    """
    alike = hand[0].mesh.sizes == best[0].mesh.sizes
    spent = [_spent(*hand, hand[0].mesh.names), _spent(*best, (hand if alike else best)[0].mesh.names)]
    entries: list[Entry] = []
    for key in dict.fromkeys((*spent[0], *spent[1])):
        (hand_s, hand_bytes), (best_s, best_bytes) = (side.get(key, (0.0, 0)) for side in spent)
        if hand_s != best_s or hand_bytes != best_bytes:
            kind, axes, what, where, named = key
            entries.append(
                Entry(
                    kind=kind,
                    axes=axes,
                    what=what,
                    where=where,
                    tensors=tuple(name for name, _ in named),
                    paths=tuple(path for _, path in named),
                    hand_s=hand_s,
                    best_s=best_s,
                    hand_bytes=hand_bytes,
                    best_bytes=best_bytes,
                )
            )
    return Attribution(hand=hand[0], best=best[0], entries=tuple(sorted(entries, key=lambda e: -abs(e.lost_s))))


@dataclass(slots=True)
class _Sum:
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0


def _spent(record: PlanRecord, assignment: Assignment, names: Sequence[str]) -> dict[_Key, tuple[float, int]]:
    """Seconds and bytes of a step by entry, with these names of mesh axes; the seconds sum to the step."""
    sums: dict[_Key, _Sum] = defaultdict(_Sum)
    for name, where, seconds in _compute(assignment):
        sums[COMPUTE, (), name, where, ()].seconds.append(seconds)
    named, mesh = _Names(record, assignment.decisions.graph), record.mesh
    for row, waited_s in bill.waits(assignment):
        axes = tuple(
            (name, size) for name, own, size in zip(names, mesh.names, mesh.sizes, strict=True) if own in row.axes
        )
        tensors = named.tensors(row)
        transposed = tensors and row.kind in _REDUCES  # a gradient may be reduced before it is transposed
        what = f"{row.dtype}{sorted(_shape(row))}".replace(" ", "") if transposed else row.value
        entry = sums[row.kind, axes, what, named.line(row), tensors]
        entry.seconds.append(waited_s)
        entry.nbytes += row.nbytes * row.trips
        if row.work_s:
            sums[COMPUTE, (), bill.work_name(assignment), row.where, ()].seconds.append(row.work_s * row.trips)
    for copy in bill.host_copies(assignment):
        graph, node = assignment.decisions.graph, assignment.decisions.nodes[copy.node]
        value = str(graph.avals[graph.operands[node.equations[0]][0]])
        sums[copy.name, (), value, node.where, ()].seconds.append(copy.waited_s)
    spent = {key: (fsum(entry.seconds), entry.nbytes) for key, entry in sums.items()}
    rest = record.cost.step_s - fsum(seconds for seconds, _ in spent.values())
    return {**spent, (ROUNDING, (), "", "", ()): (rest, 0)}


def _compute(assignment: Assignment) -> Iterable[tuple[str, str, float]]:
    """Operation, line and seconds of every decision, without the collectives inside."""
    for n, node in enumerate(assignment.decisions.nodes):
        if seconds := bill.node_s(assignment, n):
            yield node.name, node.where, seconds


class _Names:
    """Names the values that collectives move by the program's inputs.

    A weight is an input that some line contracts or looks up, at most cast or taken from a stack
    before, and with no other value of its type beside it. At a line that reads a weight, a value of
    its type is the weight; a reduced value with its dimensions, in any order, is its gradient.
    """

    def __init__(self, record: PlanRecord, graph: Graph) -> None:
        of_input = {v: i for i, v in enumerate(graph.inputs) if i < len(record.inputs)}
        made_by = graph.producers
        root: dict[int, int] = {}  # value → the input that it is
        for v in range(len(graph.avals)):
            at = v
            while at not in of_input and at in made_by and len(graph.operands[made_by[at][0]]) == 1:
                at = graph.operands[made_by[at][0]][0]
            if at in of_input:
                root[v] = of_input[at]
        reads = [eqn.traits.contraction or eqn.primitive == GATHER for eqn in graph.eqns]
        others: set[tuple[str, _Type]] = set()
        read: dict[int, set[tuple[str, _Type]]] = defaultdict(set)  # input → lines and types in which it is read
        for e in np.flatnonzero(reads):
            for v in graph.operands[e]:
                keys = _keys(graph.eqns[e].where, graph.avals[v])
                (read[root[v]] if v in root else others).update(keys)
        weights = {i for i, keys in read.items() if not keys & others}
        patterns: dict[tuple[str, _Type], dict[tuple[str, ...], None]] = {}
        for e, eqn in enumerate(graph.eqns):
            for v in graph.operands[e]:
                if root.get(v) in weights:
                    path = dotted(record.inputs[root[v]].path).split(".")
                    for key in _keys(eqn.where, graph.avals[v]):
                        patterns.setdefault(key, {})[tuple(s for s in path if not s.isdigit())] = None
        short = _shortest({p for found in patterns.values() for p in found})
        self._names: Mapping[tuple[str, _Type], _Named] = {
            key: tuple((short[p], ".".join(p)) for p in found) for key, found in patterns.items() if key not in others
        }

        self._lines: dict[tuple[str, str], set[str]] = defaultdict(set)
        for e, eqn in enumerate(graph.eqns):
            if eqn.primitive == CONSTRAINT:
                v = graph.operands[e][0]
                maker = graph.eqns[made_by[v][0]].where if v in made_by else eqn.where
                self._lines[eqn.where, str(graph.avals[v])].add(maker)

    def line(self, row: Collective) -> str:
        """The source line of a collective; at a constraint, the line of the constrained value."""
        makers = self._lines.get((row.where, row.value), set())
        return next(iter(makers)) if len(makers) == 1 else row.where

    def tensors(self, row: Collective) -> _Named:
        """The weights that a collective moves, or whose gradients it reduces; none if unknown."""
        shape = _shape(row)
        reduced = tuple(sorted(shape)) if row.kind in _REDUCES else shape
        return self._names.get((row.where, (row.dtype, reduced)), ())


def _shape(row: Collective) -> tuple[int, ...]:
    dims = row.value.partition("[")[2].rstrip("]")
    return tuple(int(size) for size in dims.split(",") if size)


def _keys(where: str, aval: Aval) -> set[tuple[str, _Type]]:
    """A line with a type, and with its dimensions in order of size."""
    return {(where, (str(aval.dtype), shape)) for shape in (aval.shape, tuple(sorted(aval.shape)))}


def _shortest(paths: set[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The shortest end of each path that no other path has."""
    short: dict[tuple[str, ...], str] = {}
    for path in paths:
        for n in range(1, len(path) + 1):
            if n == len(path) or sum(other[-n:] == path[-n:] for other in paths) == 1:
                short[path] = ".".join(path[-n:])
                break
    return short
