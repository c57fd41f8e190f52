"""Layers: the equal layers of an unrolled program, and the same program with fewer of them.

JAX writes an unrolled stack as the same equations again and again: the forward pass layer by
layer, the backward pass in reverse, an optimizer leaf by leaf. A *run* is such a stretch: so many
equal blocks, one after the other. A block of one run belongs to the layer of another run's block
that makes its operands, or takes its results. Where blocks begin does not matter: they begin
somewhere in a layer, at the same place in every one.

Without some layers in a row, what is left reads the values of a neighbour's where it read those of
a layer that is gone: behind them the last layer before, in front of them the first one after. A
chain that visits layers in another order, as a sum over all gradients does, goes on from its last
block that is left.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard import _jax
from autoshard.ir.bodies import Body, opened
from autoshard.ir.fingerprint import Writer
from autoshard.ir.graph import Path

LEAST = 4  # layers, of which some could be left out
PERIODS = 64  # that are tried, the most frequent distances of equal equations first

Place = tuple[int, int, int]  # of a step: its run, its place in the block, its layer
End = tuple[int, int, int, int]  # of an input or output: run and place of a step, its operand or result, the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Equal layers of a program.

    `place` says where a step is (by its position in the body); the steps of no layer are not there. `inputs` are the
    program's inputs that one layer alone takes, by the operand that takes them first, and `outputs` its results that a
    layer makes. Layers are numbered in the order in which the longest chain runs through them. `period` is the number
    of steps of a run's blocks.
    """

    body: Body
    count: int
    period: Mapping[int, int]
    place: Mapping[int, Place]
    inputs: Mapping[int, End]
    outputs: Mapping[int, End]

    def steps_at(self) -> Mapping[Place, int]:
        """The step at every place."""
        return {at: k for k, at in self.place.items()}


class Steps:
    """Finds the steps of layers by the paths of equations."""

    def __init__(self, layers: Layers) -> None:
        self._place = layers.place
        self._step = {step.path: k for k, step in enumerate(layers.body.steps)}

    def at(self, path: Path) -> tuple[int, Path]:
        """The step that a path leads to or into, and the path inside of it; -1 if it leads to none."""
        for end in range(1, len(path) + 1, 2):
            if path[:end] in self._step:
                return self._step[path[:end]], path[end:]
        return -1, path

    def layer_of(self, path: Path) -> tuple[int, tuple[int, int, Path]] | None:
        """The layer that a path leads into, and to which place there, equal in every layer; None if into no layer."""
        k, inside = self.at(path)
        if k not in self._place:
            return None
        run, place, layer = self._place[k]
        return layer, (run, place, inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Equal blocks in a row: the position of the first step, the steps of a block, how many blocks.

    `span` are the steps that repeat, the beginning of a further block among them.
    """

    first: int
    period: int
    blocks: int
    span: int

    @property
    def size(self) -> int:
        return self.period * self.blocks

    def step(self, block: int, place: int) -> int:
        return self.first + block * self.period + place


def find_layers(closed: Any) -> Iterator[Layers]:
    """The stacks of equal layers of a program, each with all that belongs to it."""
    body = opened(closed)
    yield from _Finder(body).stacks()


class _Finder:
    """The runs of a body, and which of them belong together."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._runs = list(_runs(_numbers(body)))
        self._maker: dict[Any, tuple[int, int]] = {}  # variable → (step, result)
        self._takers: dict[Any, list[tuple[int, int]]] = {}  # variable → (step, operand)
        for k, step in enumerate(body.steps):
            self._maker.update((var, (k, i)) for i, var in enumerate(step.eqn.outvars))
            for i, atom in enumerate(step.eqn.invars):
                if not _jax.is_literal(atom):
                    self._takers.setdefault(atom, []).append((k, i))
        self._inputs = {var: i for i, var in enumerate(body.invars)}

    def stacks(self) -> Iterator[Layers]:
        left = dict(enumerate(self._runs))
        while True:
            chains = [r for r, run in left.items() if self._is_chain(run)]
            if not chains:
                return
            base = max(chains, key=lambda r: (left[r].size, -r))
            layer_of = {base: list[int | None](range(left[base].blocks))}
            del left[base]
            place = self._places(base, layer_of[base])
            met = True
            while met:
                met = False
                for r in sorted(left, key=lambda r: -left[r].size):
                    layers = self._linked(left[r], place)
                    if layers is not None:
                        layer_of[r], met = layers, True
                        place.update(self._places(r, layers))
                        del left[r]
            yield self._layers(self._runs[base].blocks, place, base)

    def _places(self, r: int, layers: Sequence[int | None]) -> dict[int, Place]:
        run = self._runs[r]
        return {
            run.step(block, place): (r, place, layer)
            for block, layer in enumerate(layers)
            if layer is not None
            for place in range(run.period)
        }

    def _is_chain(self, run: _Run) -> bool:
        """Whether each block takes something of the one before it."""
        return any(self._links(run, block) for block in (1,)) and all(
            self._links(run, block) for block in range(2, run.blocks)
        )

    def _links(self, run: _Run, block: int) -> bool:
        first, steps = run.step(block, 0), self._body.steps
        for k in range(first, first + run.period):
            for atom in steps[k].eqn.invars:
                if not _jax.is_literal(atom) and first - run.period <= self._maker.get(atom, (-1, 0))[0] < first:
                    return True
        return False

    def _linked(self, run: _Run, place: Mapping[int, Place]) -> list[int | None] | None:
        """The layer of every block, by what links the blocks to those that are known; None if nothing does."""
        found: Counter[tuple[int | None, ...]] = Counter()
        for p in range(run.period):
            steps = [self._body.steps[run.step(block, p)].eqn for block in range(run.blocks)]
            for i in range(len(steps[0].invars)):
                found[tuple(self._source(eqn.invars[i], place) for eqn in steps)] += 1
            for i in range(len(steps[0].outvars)):
                found[tuple(self._reader(eqn.outvars[i], place) for eqn in steps)] += 1
        for layers, _ in found.most_common():
            known = [layer for layer in layers if layer is not None]
            if len(known) >= max(LEAST, run.blocks - 2) and len(set(known)) == len(known):
                return list(layers)
        return None

    def _source(self, atom: Any, place: Mapping[int, Place]) -> int | None:
        """The layer that makes an operand, or that takes it, if it is an input."""
        if _jax.is_literal(atom):
            return None
        if atom in self._inputs:
            return self._reader(atom, place)
        maker = place.get(self._maker.get(atom, (-1, 0))[0])
        return None if maker is None else maker[2]

    def _reader(self, var: Any, place: Mapping[int, Place]) -> int | None:
        """The layer of the first known step that takes a value."""
        known = (place[k] for k, _ in self._takers.get(var, ()) if k in place)
        first = next(known, None)
        return None if first is None else first[2]

    def _layers(self, count: int, place: dict[int, Place], base: int) -> Layers:
        inputs: dict[int, End] = {}
        for var, i in self._inputs.items():
            takers = [(place[k], at) for k, at in self._takers.get(var, ()) if k in place]
            ahead = [taker for taker in takers if taker[0][0] == base] or takers
            if ahead and len({layer for (_, _, layer), _ in ahead}) == 1:
                (r, p, layer), at = ahead[0]
                inputs[i] = r, p, at, layer
        outputs: dict[int, End] = {}
        for o, atom in enumerate(self._body.outvars):
            k, i = (-1, 0) if _jax.is_literal(atom) else self._maker.get(atom, (-1, 0))
            if k in place:
                r, p, layer = place[k]
                outputs[o] = r, p, i, layer
        period = {r: run.period for r, run in enumerate(self._runs)}
        return Layers(body=self._body, count=count, period=period, place=place, inputs=inputs, outputs=outputs)


def _numbers(body: Body) -> NDArray[np.int64]:
    """Numbers of the steps' operations with their operands' types; equal ones have equal numbers."""
    writer, known = Writer(), dict[tuple[object, ...], int]()
    found: list[int] = []
    for step in body.steps:
        eqn = step.eqn
        types = tuple(
            (atom.aval.shape, atom.aval.dtype) if hasattr(atom.aval, "shape") else str(atom.aval)
            for atom in (*eqn.invars, *eqn.outvars)
        )
        key = writer.operation(eqn), tuple(map(_jax.is_literal, eqn.invars)), types
        found.append(known.setdefault(key, len(known)))
    return np.array(found, np.int64)


def _runs(numbers: NDArray[np.int64]) -> Iterator[_Run]:
    """Stretches that repeat, the longest first, none over another."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for k, number in enumerate(numbers.tolist()):
        if number in last:
            gaps[k - last[number]] += 1
        last[number] = k
    free = np.ones(len(numbers), np.bool_)
    open_ = [(_rank(run), run) for gap, _ in gaps.most_common(PERIODS) for run in _repeats(numbers, gap, free)]
    heapify(open_)
    while open_:
        _, run = heappop(open_)
        stretch = free[run.first : run.first + run.size]
        if stretch.all():
            stretch[:] = False
            yield run
            continue
        for part in _repeats(numbers, run.period, free, run):
            heappush(open_, (_rank(part), part))


def _rank(run: _Run) -> tuple[int, int, int]:
    """The longest stretch first; of those, the one of the shortest blocks."""
    return -run.span, run.period, run.first


def _repeats(
    numbers: NDArray[np.int64], period: int, free: NDArray[np.bool_], within: _Run | None = None
) -> Iterator[_Run]:
    """The maximal stretches of free steps that repeat after so many."""
    begin, end = (0, len(numbers)) if within is None else (within.first, within.first + within.span)
    part, open_ = numbers[begin:end], free[begin:end]
    same = (part[period:] == part[:-period]) & open_[period:] & open_[:-period]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        blocks = (last - first) // period + 1
        if blocks >= LEAST:
            yield _Run(first=begin + first, period=period, blocks=blocks, span=last - first + period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorter:
    """A program without some of its equal layers, and where its parts are in the whole one.

    `steps`, `inputs` and `outputs` are the positions in the whole program of those that are left. `step_like` says of
    each step that is gone which step stands for it; `input_like` and `output_like` do so for inputs and outputs.
    """

    closed: Any
    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    step_like: Mapping[int, int]
    input_like: Mapping[int, int]
    output_like: Mapping[int, int]


def without(layers: Layers, gone: range, model: int) -> Shorter | None:
    """The program without the layers `gone`, for which the layer `model` stands; None if the rest does not join."""
    body, place, step_at = layers.body, layers.place, layers.steps_at()
    joint = _Joint(layers, gone, step_at)
    steps = [k for k in range(len(body.steps)) if k not in joint.away]
    eqns: list[Any] = []
    for k in steps:
        eqn = body.steps[k].eqn
        operands = [joint.stand_in(atom, k) for atom in eqn.invars]
        if any(operand is None for operand in operands):
            return None
        eqns.append(eqn.replace(invars=operands))
    outputs = [o for o, atom in enumerate(body.outvars) if _jax.is_literal(atom) or atom not in joint.maker]
    outvars = [body.outvars[o] for o in outputs]
    read = {atom for eqn in eqns for atom in eqn.invars if not _jax.is_literal(atom)}
    read |= {atom for atom in outvars if not _jax.is_literal(atom)}
    unread = {i for i, at in layers.inputs.items() if at[3] in gone and body.invars[i] not in read}
    inputs = [i for i in range(len(body.invars)) if i not in unread]
    return Shorter(
        closed=body.with_steps(eqns, invars=[body.invars[i] for i in inputs], outvars=outvars),
        steps=tuple(steps),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        step_like={k: step_at[at] for k in joint.away if (at := (*place[k][:2], model)) in step_at},
        input_like=_like(layers.inputs, gone, model),
        output_like=_like(layers.outputs, gone, model),
    )


def _like(ends: Mapping[int, End], gone: range, model: int) -> dict[int, int]:
    """Input or output of a layer that is gone → that of the layer that stands for it."""
    of_model = {at[:3]: i for i, at in ends.items() if at[3] == model}
    return {i: of_model[at[:3]] for i, at in ends.items() if at[3] in gone and at[:3] in of_model}


class _Joint:
    """What the equations that are left read in place of what is gone."""

    def __init__(self, layers: Layers, gone: range, step_at: Mapping[Place, int]) -> None:
        self._layers, self._gone, self._steps, self._step_at = layers, gone, layers.body.steps, step_at
        self.away = {k for k, (_, _, layer) in layers.place.items() if layer in gone}
        self.maker = {var: (k, i) for k in self.away for i, var in enumerate(self._steps[k].eqn.outvars)}
        self._made = {var: (k, i) for k, step in enumerate(self._steps) for i, var in enumerate(step.eqn.outvars)}
        self._known: dict[Any, Any] = {}

    def stand_in(self, atom: Any, k: int) -> Any:
        """What step k reads for a variable; None if nothing stands for it."""
        if _jax.is_literal(atom) or atom not in self.maker:
            return atom
        maker, i = self.maker[atom]
        r, p, layer = self._layers.place[maker]
        reader = self._layers.place.get(k)
        if reader is not None:
            shift = -len(self._gone) if reader[2] >= self._gone.stop else len(self._gone)
            other = self._step_at.get((r, p, layer + shift), k)
            if other < k and other not in self.away:
                return self._steps[other].eqn.outvars[i]
        if 0 < k - maker <= self._layers.period[r]:  # the stretch goes on from block to block, whatever their layers
            before = range(maker, -1, -self._layers.period[r])
            left = (s for s in before if self._layers.place.get(s, (-1, -1, 0))[:2] == (r, p) and s not in self.away)
            return next((self._steps[s].eqn.outvars[i] for s in left), None)
        return self._before(atom)

    def _before(self, atom: Any) -> Any:
        """The last value of the same place that this one was computed from, and that is left; None if there is none."""
        if atom in self._known:
            return self._known[atom]
        first, i = self.maker[atom]
        same = self._layers.place[first][:2]
        found, met, open_ = -1, {first}, [first]
        while open_:
            for operand in self._steps[open_.pop()].eqn.invars:
                k = -1 if _jax.is_literal(operand) else self._made.get(operand, (-1, 0))[0]
                if k in self.away and k not in met:
                    met.add(k)
                    open_.append(k)
                elif k > found and self._layers.place.get(k, (-1, -1, 0))[:2] == same and k not in self.away:
                    found = k
        self._known[atom] = None if found < 0 else self._steps[found].eqn.outvars[i]
        return self._known[atom]
