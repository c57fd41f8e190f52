"""Equal layers: those of a program that are written, or unrolled, one after the other.

A layer is a stretch of the equations that follow from the batch. Layers are equal if their equations are, one by one:
primitive, parameters, types, and where every operand comes from. That is one of four:

    within    an equation at the same place in its own layer
    carry     an equation at the same place in the layer before; for the first layer, what enters
    constant  one value for all layers, or the same computation in each
    slice     a value of its own that does not follow from the batch: a weight

So the layers are one function of (constants, carry, slices), applied as often as there are layers. Casts and reshapes
of a weight that every layer makes of its own are part of it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from autoshard import _jax
from autoshard.ir.bodies import Body, Step
from autoshard.ir.fingerprint import Writer
from autoshard.ir.op_traits import traits_of
from autoshard.pipeline_parallel.cut import is_in

MOST_STRETCHES = 16  # stretches of equal equations that are read as layers, the longest first


class Carry(NamedTuple):
    """What a layer hands to the next: the value that enters, its variable in the layer, the layer's result of it."""

    first: Any
    inside: Any
    result: Any
    last: Any  # the result of the last layer


class Slice(NamedTuple):
    """What each layer has of its own: the variable in the layer, and every layer's atom."""

    inside: Any
    atoms: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualLayers:
    """Equal layers as one.

    Attributes:
      at: the positions of their equations in the body, layer by layer.
      eqns: the equations of one layer, over the variables of the first.
      carries: what they hand on.
      slices: what each has of its own.
      constants: variables around them that the equations take.
    """

    at: tuple[tuple[int, ...], ...]
    eqns: tuple[Any, ...]
    carries: tuple[Carry, ...]
    slices: tuple[Slice, ...]
    constants: tuple[Any, ...]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self.at)

    @property
    def weights(self) -> int:
        """The elements of what the layers have of their own."""
        return sum(_size(one.inside.aval) * self.count for one in self.slices)

    @property
    def carried(self) -> int:
        """The elements of what a layer hands on."""
        return sum(_size(one.inside.aval) for one in self.carries)


def equal_layers(body: Body, of_batch: set[Any]) -> EqualLayers | None:
    """The equal layers of a body that have the most equations; None if there are none.

    Args:
      body: of the loss, its calls opened.
      of_batch: its variables that follow from the batch.
    """
    own = [k for k, step in enumerate(body.steps) if any(is_in(v, of_batch) for v in step.eqn.invars)]
    signs = signatures([body.steps[k] for k in own])
    numbers = _value_numbers(body, of_batch)
    for stretch in _stretches(signs):
        found: list[EqualLayers] = []
        for start in range(stretch.start, stretch.stop - stretch.layers * stretch.period + 1):
            layers = [
                tuple(own[start + j * stretch.period : start + (j + 1) * stretch.period]) for j in range(stretch.layers)
            ]
            reading = _Reading(body, of_batch, numbers, layers)
            if reading.succeeds():
                found.append(reading.result())
        if found:
            return min(found, key=lambda one: one.carried)
    return None


def signatures(steps: Sequence[Step]) -> np.ndarray:
    """A number per equation, equal for equations that do the same with values of the same types."""
    writer, known = _Closely(), dict[tuple[Any, ...], int]()

    def number(step: Step) -> int:
        eqn = step.eqn
        key = writer.operation(eqn), *(_type(v)[:2] for v in (*eqn.invars, *eqn.outvars))
        return known.setdefault(key, len(known))

    return np.array([number(step) for step in steps], np.int64)


class _Closely(Writer):
    """Functions count by their code and what they close over: the rules of custom derivatives may differ by layer."""

    def _callable(self, value: Any) -> str:
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        code = getattr(value, "__code__", value)
        return f"{super()._callable(value)}@{id(code)}({' '.join(map(self.value, cells))})"


class _Stretch(NamedTuple):
    """Equations from `start` to `stop` that repeat with a period, for so many whole layers."""

    start: int
    stop: int
    period: int
    layers: int


def _stretches(signs: np.ndarray) -> list[_Stretch]:
    """The stretches that repeat at least once, those first whose whole layers have the most equations."""
    found: list[_Stretch] = []
    for period in range(1, len(signs) // 2 + 1):
        same = np.concatenate([[False], signs[:-period] == signs[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - begin >= period:
                found.append(_Stretch(begin, end + period, period, (end - begin) // period + 1))
    return sorted(found, key=lambda one: (-one.layers * one.period, one.period))[:MOST_STRETCHES]


def _value_numbers(body: Body, of_batch: set[Any]) -> dict[Any, int]:
    """A number per variable that does not follow from the batch, equal for equal computations."""
    numbers: dict[Any, int] = {}
    known: dict[tuple[Any, ...], int] = {}
    writer, new = _Closely(), itertools.count()

    def number(atom: Any) -> object:
        if _jax.is_literal(atom):
            return writer.value(_jax.literal(atom)), _type(atom)
        return numbers.setdefault(atom, next(new))

    for var, value in body.consts:
        if not _jax.is_tracer(value):
            numbers[var] = known.setdefault((writer.value(value), _type(var)), next(new))
    for step in body.steps:
        eqn = step.eqn
        if any(is_in(v, of_batch) for v in eqn.invars):
            continue
        operation = writer.operation(eqn), tuple(number(v) for v in eqn.invars)
        for i, var in enumerate(eqn.outvars):
            numbers[var] = known.setdefault((*operation, i, _type(var)), next(new))
    return numbers


@dataclass(slots=True)
class _Reading:
    """Stretches of equations read as equal layers."""

    body: Body
    of_batch: set[Any]
    numbers: Mapping[Any, int]
    at: Sequence[tuple[int, ...]]
    eqns: list[Any] = field(default_factory=list[Any])
    carries: dict[tuple[Any, ...], Carry] = field(default_factory=dict[tuple[Any, ...], Carry])
    inside: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])
    slices: list[Slice] = field(default_factory=list[Slice])
    made: list[dict[Any, tuple[int, int]]] = field(default_factory=list[dict[Any, tuple[int, int]]])
    makers: dict[Any, tuple[Any, int]] = field(default_factory=dict[Any, tuple[Any, int]])

    def succeeds(self) -> bool:
        """Whether the stretches are equal layers, each a function of the one before."""
        steps = self.body.steps
        self.made = [
            {v: (k, i) for k, n in enumerate(layer) for i, v in enumerate(steps[n].eqn.outvars)} for layer in self.at
        ]
        self.makers = {v: (step.eqn, i) for step in steps for i, v in enumerate(step.eqn.outvars)}
        layer: list[Any] = []
        for k, n in enumerate(self.at[0]):
            columns = zip(*(steps[layer[k]].eqn.invars for layer in self.at), strict=True)
            atoms = [self.atom(column) for column in columns]
            if any(atom is None for atom in atoms):
                return False
            layer.append(steps[n].eqn.replace(invars=atoms))
        self.eqns += layer
        return bool(self.slices and self.carries) and self.leaves_by_the_carry()

    def result(self) -> EqualLayers:
        carries = tuple(self.carries.values())
        named = {v for eqn in self.eqns for v in eqn.invars if not _jax.is_literal(v)}
        own = {v for eqn in self.eqns for v in eqn.outvars} | {one.inside for one in (*carries, *self.slices)}
        order = {v: i for i, v in enumerate((*self.body.invars, *self.makers))}
        constants = sorted(named - own, key=lambda v: order.get(v, -1))
        return EqualLayers(
            at=tuple(self.at),
            eqns=tuple(self.eqns),
            carries=carries,
            slices=tuple(self.slices),
            constants=tuple(constants),
        )

    def atom(self, column: tuple[Any, ...]) -> Any:
        """What one layer reads where the layers read these atoms; None if they are not equal layers."""
        if not any(is_in(v, self.of_batch) for v in column):
            return self.unified(column)
        first, *rest = column
        if any(map(_jax.is_literal, rest)):
            return None
        place = None if _jax.is_literal(first) else self.made[0].get(first)
        if place is not None:
            within = all(made.get(v) == place for made, v in zip(self.made, column, strict=True))
            return first if within else None
        if all(v is first for v in rest):
            return first
        place = self.made[0].get(rest[0])
        if place is None or any(made.get(v) != place for made, v in zip(self.made, rest, strict=False)):
            return None
        if _type(first)[:2] != _type(rest[0])[:2]:
            return None
        key = place, _text(first) if _jax.is_literal(first) else first
        return self.carries.setdefault(key, Carry(first, _jax.variable(rest[0].aval), *self.at_ends(place))).inside

    def at_ends(self, place: tuple[int, int]) -> tuple[Any, Any]:
        """The first layer's and the last layer's result at a place."""
        k, i = place
        first, last = (self.body.steps[layer[k]].eqn.outvars[i] for layer in (self.at[0], self.at[-1]))
        return first, last

    def unified(self, column: tuple[Any, ...]) -> Any:
        """As `atom`, of values that do not follow from the batch."""
        key = tuple(_text(v) if _jax.is_literal(v) else v for v in column)
        if key in self.inside:
            return self.inside[key]
        if any(map(_jax.is_literal, column)):
            found = column[0] if len(set(key)) == 1 else self.sliced(column)
        elif len({self.numbers.get(v, v) for v in column}) == 1:
            found = column[0]
        else:
            found = self.computed(column) or self.sliced(column)
        self.inside[key] = found
        return found

    def computed(self, column: tuple[Any, ...]) -> Any:
        """What every layer makes of a value of its own, by a cast or in another shape; made in the layer."""
        if any(v not in self.makers for v in column):
            return None
        made = [self.makers[v] for v in column]
        eqn, index = made[0]
        if not traits_of(eqn.primitive.name).same_values or len({i for _, i in made}) > 1:
            return None
        writer = _Closely()
        if len({(one.primitive.name, writer.operation(one), *map(_type, one.invars)) for one, _ in made}) > 1:
            return None
        operands = [self.unified(inner) for inner in zip(*(one.invars for one, _ in made), strict=True)]
        results = [_jax.variable(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=operands, outvars=results))
        return results[index]

    def sliced(self, column: tuple[Any, ...]) -> Any:
        """A value of each layer's own."""
        if len({_type(v) for v in column}) > 1:
            return None
        inside = _jax.variable(column[0].aval)
        self.slices.append(Slice(inside, column))
        return inside

    def leaves_by_the_carry(self) -> bool:
        """Whether the equations around the layers read nothing of them but the last layer's carry."""
        inside = {n for layer in self.at for n in layer}
        results = {v for made in self.made for v in made}
        last = {one.last for one in self.carries.values()}
        around = (step.eqn.invars for n, step in enumerate(self.body.steps) if n not in inside)
        read = {v for atoms in (*around, self.body.outvars) for v in atoms if not _jax.is_literal(v)}
        return not (read & results) - last


def lines_of_layers(body: Body, layers: EqualLayers) -> Iterator[tuple[str, ...]]:
    """Where each equation of a layer was written: the lines that the first two layers share, the innermost first."""
    for one, other in zip(*layers.at[:2], strict=True):
        pairs = zip(lines_of(body, one), lines_of(body, other), strict=False)
        yield tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def lines_of(body: Body, at: int) -> tuple[str, ...]:
    """The lines of the call that an equation was made in, the innermost first."""
    top = _jax.open_jaxpr(body.closed).eqns[body.steps[at].path[len(body.path)]]
    return _jax.user_lines(top)


def _type(atom: Any) -> tuple[Any, ...]:
    aval = atom.aval
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", aval)), bool(getattr(aval, "weak_type", False))


def _size(aval: Any) -> int:
    return int(np.prod(aval.shape))


def _text(literal: Any) -> str:
    return f"{_type(literal)}{np.asarray(_jax.literal(literal)).tobytes()}"
