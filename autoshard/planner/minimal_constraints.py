"""Minimal constraints: leaves out the constraints that the partitioner reaches by itself.

Constraints block fusions and clutter a program, but a missing one can cost more than many (a
residual pinned alone made XLA gather weights). So no constraint is left out without a probe:
Shardy runs in-process on the program with fewer constraints, and must reach the same result as
with all of them: the same collectives but for `SMALL` differences, every contraction and every cast
in the same layout, and no value larger on a device. Where compilers are known to differ from Shardy
(`doubtful_constraints`), all constraints stay. Of many equal layers a few are probed (`fewer_layers`).

The search starts with those, once with and once without those of all other values that move, and
the fewest constraints are kept. It adds the constraints of one value at a time (with those of
all values in equal places) if that brings the program nearer; wrong contractions and values near
a wrong collective come first. A moved value has constraints at both ends, which are added
together: one alone would change the other side. If no single value helps, the constraints of all
moved values are added, then, in waves, those of values that are wrong although all their operands
are right. At the end, superfluous constraints are removed again, in halves.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoshard import deadline
from autoshard.backends.model import CompilerModel
from autoshard.backends.shardy.probe import Answer, Probe, values_at
from autoshard.backends.shardy.propagation import Annotations
from autoshard.ir.constraints import Constraints
from autoshard.ir.graph import Graph, Path, build
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.rewrite import ConstraintSite
from autoshard.ir.trace import Traced
from autoshard.planner import doubtful_constraints, fewer_layers
from autoshard.planner.fewer_layers import Probed
from autoshard.problem.decisions import Decisions
from autoshard.problem.symmetry import Folding

log = logging.getLogger("autoshard")

# A probe takes about 55 µs per op result. A looped transformer's step has about 1,600 of
# them and is probed until nothing is superfluous; one of 12 unrolled layers has 14,000.
PROBED_RESULTS = 80_000
LEAST, MOST = 6, 32  # probes of a search
SMALL = 1e-5  # of all bytes that are moved: what may differ, and the size of values that may
PATIENCE = 3  # values in a row that did not help, until all that are moved are added


def minimal_constraints(
    program: Traced,
    decisions: Decisions,
    folding: Folding,
    mesh: MeshAxes,
    annotations: Annotations,
    compiler: CompilerModel,
    *,
    unscattered: Set[str] = frozenset(),
) -> Constraints:
    """The constraints of `annotations.pins` without those that make no difference.

    Args:
      program: the traced program.
      decisions: the decisions of the program.
      folding: classes of decisions in equal places.
      mesh: the mesh of the annotations.
      annotations: every input's and output's spec, and all constraints.
      compiler: the compiler of the program.
      unscattered: the axes over all of which its compiler all-reduces a sum, which is then cut, whether it is pinned
        whole in between or not.

    Raises:
      ShardyError: propagation fails.
    """
    whole, graph = values_at(decisions.graph), decisions.graph
    once = frozenset[int]()
    if compiler.regathers_far_uses:
        once = doubtful_constraints.gathered_once(graph, decisions.apart.keys())
    merging = replace(annotations, pins=replace(annotations.pins, regathered={}))  # barriers change no layout
    probed = fewer_layers.probed(program, merging)
    if probed.traced is not program:
        graph = build(probed.traced.jaxpr, compiler.platform)
    probe = Probe(probed.traced, graph, mesh, probed.annotations, compiler.platform, unscattered=unscattered)
    whole_of = {probe.of[here]: whole[there] for here, there in probed.origin.items() if there in whole}
    classes = {
        v: (int(folding.class_of[decisions.made[u].node]), decisions.graph.avals[u]) for v, u in whole_of.items()
    }
    pins = probed.annotations.pins
    cut = _cut_sums(probe, pins, graph, unscattered) if unscattered else {}
    once = frozenset(v for v, u in whole_of.items() if u in once)
    doubts = doubtful_constraints.doubtful(graph, probed.annotations, once, mesh, compiler)
    search = _Search(probe, graph, classes, mesh, probed.annotations, doubts, cut)
    kept = {whole_of[v] for v in search.fewest()}
    log.debug("constraints of %d of %d values are needed, after %d probes", len(kept), len(probe.values), search.probes)
    return chosen(annotations.pins, whole, kept | _standing(probed, whole, kept, annotations.pins))


def _standing(probed: Probed, whole: Mapping[ConstraintSite, int], kept: Set[int], pins: Constraints) -> frozenset[int]:
    """The values without a probe of their own whose constraints are needed: those that nothing stands for, too."""
    there = set(probed.origin.values())
    found: set[int] = set()
    for site in fewer_layers.sites_of(pins):
        other = site
        while other in probed.like:
            other = probed.like[other]
        if site in whole and (other not in there or whole.get(other) in kept):
            found.add(whole[site])
    return frozenset(found)


def chosen(pins: Constraints, of: Mapping[ConstraintSite, int], kept: Set[int]) -> Constraints:
    """The constraints of some values, and those that are of none; `of` says which value is at a place."""

    def stays(name: str, key: object) -> bool:
        value = of.get((name, key))
        return value is None or value in kept

    taken = {k: s for k, s in pins.taken.items() if stays("taken", k)}
    return replace(
        pins,
        made={k: s for k, s in pins.made.items() if stays("made", k)},
        taken=taken,
        regathered={k: group for k, group in pins.regathered.items() if k in taken},
        inputs={k: s for k, s in pins.inputs.items() if stays("input", k)},
        outputs={k: s for k, s in pins.outputs.items() if stays("output", k)},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gap:
    """The difference from the program with all constraints if only those of `kept` are there.

    `wrong` values have neither the layout in which they are made nor the one in which they are kept.
    `cost` sums bytes: of missing or extra collectives, of wrong contractions, of values that became
    larger; plus one for every other wrong value, and for every cast whose operand is moved before it.
    `near` has, per equation, the bytes of the collectives that differ.
    """

    kept: frozenset[int]
    cost: int
    wrong: frozenset[int]
    near: Counter[Path]


class _Search:
    def __init__(
        self,
        probe: Probe,
        graph: Graph,
        classes: Mapping[int, object],
        mesh: MeshAxes,
        annotations: Annotations,
        doubts: tuple[Set[int], Set[int]],
        cut: Mapping[int, Layout],
    ) -> None:
        self._cut = cut
        self._probe, self._mesh, self._graph = probe, mesh, graph
        pins = annotations.pins
        self._maker = {v: e for e, values in enumerate(graph.results) for v in values}
        self._contracted = frozenset(v for v, e in self._maker.items() if graph.eqns[e].traits.contraction)
        self._count = _counts(probe, pins)
        self._moved = frozenset(v for v, count in self._count.items() if count > 1)  # at both ends of where they move
        self._planned = {
            probe.of["made", spot]: frozenset(
                Layout.from_spec(s, graph.avals[probe.of["made", spot]].ndim) for s in specs
            )
            for spot, specs in pins.made.items()
            if ("made", spot) in probe.of
        }
        self._equal: dict[int, frozenset[int]] = _in_equal_places(probe.values, classes)
        self._around: dict[int, list[Path]] = {}  # value → the equations that make and take it
        paths = graph.paths
        for e, path in enumerate(paths):
            before = [paths[self._maker[u]] for u in graph.operands[e] if u in self._maker]
            for v in graph.results[e]:
                self._around.setdefault(v, []).extend((path, *before))
            for v in graph.operands[e]:
                self._around.setdefault(v, []).append(path)
        self._most = min(MOST, max(LEAST, PROBED_RESULTS // max(probe.size, 1)))
        self.probes = 1  # counts questions, also those whose answers are known
        self._known: dict[frozenset[int], _Gap] = {}
        self._too_few: set[frozenset[int]] = set()
        self._goal = self._ask(probe.values)
        self._least = SMALL * sum(self._goal.moved.values())
        doubtful, self._moving = doubts
        wrong = doubtful_constraints.wrong_without(graph, pins, annotations.inputs)
        self._staying = frozenset(v for v in doubtful if v in wrong or not self._is_small(v))

    def _ask(self, kept: Set[int]) -> Answer:
        deadline.check("leaving out constraints")
        return self._probe.ask(kept)

    def gap(self, kept: Set[int]) -> _Gap:
        """The difference if only the constraints of these values are there."""
        self.probes += 1
        key = frozenset(kept)
        if key not in self._known:
            self._known[key] = self._gap(key, self._ask(key))
        return self._known[key]

    def suffice(self, kept: Set[int]) -> bool:
        """Whether the constraints of these values are enough: what is moved is asked only if no value is wrong."""
        key = frozenset(kept)
        if key not in self._known and key not in self._too_few:
            found = self._ask(key)
            if self._wrong(self._other(found)):
                self._too_few.add(key)
            else:
                self._known[key] = self._gap(key, found)
        self.probes += 1
        return key in self._known and not self._known[key].cost

    def _other(self, found: Answer) -> dict[int, Layout]:
        """The values whose layout is not that of the program with all constraints → their layout."""
        goal = self._goal.layouts
        return {v: layout for v, layout in found.layouts.items() if goal.get(v, layout) != layout}

    def _wrong(self, other: Mapping[int, Layout]) -> frozenset[int]:
        return frozenset(v for v, layout in other.items() if self._is_wrong(v, layout) and not self._is_small(v))

    def _gap(self, kept: frozenset[int], found: Answer) -> _Gap:
        goal, graph = self._goal, self._graph
        kinds = {k for k in found.moved.keys() | goal.moved.keys() if found.moved.get(k, 0) != goal.moved.get(k, 0)}
        near: Counter[Path] = Counter()
        for path, kind in found.at.keys() | goal.at.keys():
            if kind in kinds:
                near[path] += abs(found.at.get((path, kind), 0) - goal.at.get((path, kind), 0))
        other = self._other(found)
        wrong = self._wrong(other)
        cost = sum(abs(found.moved.get(k, 0) - goal.moved.get(k, 0)) for k in kinds)
        cost += sum(count for cast, count in found.casts.items() if count > goal.casts.get(cast, 0))
        for v, layout in other.items():
            planned = self._local(v, goal.layouts[v])
            cost += max(0, self._local(v, layout) - planned)
            if v in wrong:
                cost += planned * graph.trips[v] if v in self._contracted else 1
        cost = 0 if cost <= self._least and not wrong else cost
        return _Gap(kept=kept, cost=cost, wrong=wrong, near=+near)

    def _is_wrong(self, v: int, layout: Layout) -> bool:
        """Whether a layout that is not a value's own is neither the one in which it is made nor where it is kept."""
        if v in self._contracted and self._cut.get(v) != layout:
            return True
        return layout not in self._planned.get(v, (layout,))

    def _is_small(self, v: int) -> bool:
        """Whether a value is so small that nothing of its own matters."""
        return self._graph.avals[v].nbytes * self._graph.trips[v] <= self._least

    def _local(self, v: int, layout: Layout) -> int:
        """Bytes of a value on one device (Shardy may split part of an axis)."""
        nbytes = self._graph.avals[v].nbytes
        for axis in (axis for dim in layout.dims for axis in dim):
            nbytes //= int(axis.rpartition(")")[2]) if ":" in axis else self._mesh.shape[axis]
        return nbytes

    def fewest(self) -> frozenset[int]:
        """The values whose constraints do: the fewer of what is found from two beginnings."""
        every = self.thinned(self.forward(self._staying | self._moving))
        if self._moving <= self._staying or self.probes > self._most // 2:
            return every
        few = self.thinned(self.forward(self._staying))
        return min(every, few, key=lambda kept: sum(self._count[v] for v in kept))

    def forward(self, first: Set[int]) -> _Gap:
        """From a few constraints to enough of them."""
        last = self.probes + self._most // 2
        best, tried = self.gap(first), set[int]()
        while best.cost and len(tried) < PATIENCE and self.probes < last:
            seeds = self._seeds(best, tried)
            if not seeds:
                break
            tried |= seeds
            now = self.gap(best.kept.union(*map(self._with_ends, seeds)))
            if now.cost < best.cost:
                best, tried = now, set[int]()
        return best if not best.cost else self._waves(best)

    def _seeds(self, gap: _Gap, tried: Set[int]) -> Set[int]:
        """The values whose constraints are added next: one, or where none stands out all the first wrong ones."""
        graph = self._graph
        open_ = [v for v in self._probe.values - gap.kept - tried if v in gap.wrong or v in self._moved]
        likely = [v for v in open_ if v in self._contracted & gap.wrong or self._near(gap, v)]
        if not likely:
            return _frontier(graph, gap.wrong.intersection(open_), self._probe.values - gap.wrong)

        def rank(v: int) -> tuple[bool, bool, int, int, int]:
            near, moved = self._near(gap, v), not self._with_ends(v).isdisjoint(self._moved)
            size = graph.avals[v].nbytes * graph.trips[v]
            return v in gap.wrong and v in self._contracted, moved and near > 0, near, size, -v

        return {max(likely, key=rank)}

    def _near(self, gap: _Gap, v: int) -> int:
        """Bytes of the differing collectives at the equations that make and take a value, and at those before."""
        return sum(gap.near[path] for path in self._around[v])

    def _with_ends(self, v: int) -> frozenset[int]:
        """A value, the operands that are moved on the way to its equation, and all in equal places."""
        operands = self._graph.operands[self._maker[v]] if v in self._maker else ()
        ends = (self._equal[u] for u in operands if u in self._moved)
        return self._equal[v].union(*ends)

    def _waves(self, gap: _Gap) -> _Gap:
        """All values that are moved, then wave by wave the first wrong ones, until nothing is wrong."""
        gap = self.gap(gap.kept | self._moved)
        while gap.cost:
            open_ = self._probe.values - gap.kept
            first = _frontier(self._graph, gap.wrong & open_, self._probe.values - gap.wrong)
            if not first:
                first = self._beside(gap) & open_ or open_
            gap = self.gap(gap.kept.union(*(self._equal[v] for v in first)))
        return gap

    def _beside(self, gap: _Gap) -> set[int]:
        """The values of the equations that have to do with a wrong value, or with a collective that differs."""
        at = {path for v in gap.wrong for path in self._around[v]} | gap.near.keys()
        return {v for v in self._probe.values if not at.isdisjoint(self._around[v])}

    def thinned(self, gap: _Gap) -> frozenset[int]:
        """Removes constraints that make no difference: in halves, the smallest values first."""
        graph, kept = self._graph, gap.kept
        classes = sorted(
            {frozenset(self._equal[v] & kept) for v in kept - self._staying},
            key=lambda c: (max(graph.avals[v].nbytes * graph.trips[v] for v in c), -min(c)),
        )
        size = len(classes) // 2  # all of them cannot go: forward has tried
        while size and self.probes < self._most:
            for chunk in _chunks(classes, size):
                if self.probes >= self._most:
                    break
                left = kept.difference(*chunk)
                if self.suffice(left):
                    kept, classes = left, [c for c in classes if c not in chunk]
            size //= 2
        return kept


def _chunks(items: Sequence[frozenset[int]], size: int) -> Iterable[Sequence[frozenset[int]]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _counts(probe: Probe, pins: Constraints) -> Counter[int]:
    """How many constraints every value has."""
    counts: Counter[int] = Counter()
    for name, group in (("made", pins.made), ("taken", pins.taken), ("input", pins.inputs), ("output", pins.outputs)):
        for key, specs in group.items():
            if (name, key) in probe.of:
                counts[probe.of[name, key]] += len(specs)
    return counts


def _cut_sums(probe: Probe, pins: Constraints, graph: Graph, unscattered: Set[str]) -> dict[int, Layout]:
    """Sums over these axes that are pinned whole and cut behind it, and how."""
    found: dict[int, Layout] = {}
    for spot, specs in pins.taken.items():
        v = probe.of.get(("taken", spot))
        if v is not None and len(specs) > 1 and not any(specs[0]):
            layout = Layout.from_spec(specs[-1], graph.avals[v].ndim)
            if unscattered <= {axis for axes in layout.dims for axis in axes}:
                found[v] = layout
    return found


def _in_equal_places(values: Iterable[int], classes: Mapping[int, object]) -> dict[int, frozenset[int]]:
    """Value → the values of its class, with itself."""
    members: dict[object, set[int]] = {}
    for v in values:
        members.setdefault(classes[v], set()).add(v)
    return {v: frozenset(members[classes[v]]) for v in values}


def _frontier(graph: Graph, wrong: Set[int], right: Set[int]) -> set[int]:
    """The wrong values that depend on no other wrong value, but through values that came out right."""
    tainted: set[int] = set()
    first: set[int] = set()
    for operands, results in zip(graph.operands, graph.results, strict=True):
        behind = any(v in tainted for v in operands)
        for v in results:
            if v in wrong and not behind:
                first.add(v)
            if v in wrong or (behind and v not in right):
                tainted.add(v)
    return first
