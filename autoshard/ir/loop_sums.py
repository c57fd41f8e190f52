"""Loop sums: what a loop of the program sums over its trips, kept in parts until the loop is over.

A loop that adds to a carried value in every trip (gradients of micro-batches, the gradient of
a weight that every step of time uses) sums twice: over the trips, and in each over a dimension
of what it adds, such as the batch. If that dimension is split over devices, every trip
communicates. Here the carried value has a leading dimension, one entry per part of the dimension,

    carried[p, …] += sum over part p

and the parts are added after the loop. If they lie on different devices, nothing is communicated
before. The program is plain JAX, and nothing in it names a device. A loop inside of a loop gives the
outer one its parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.accumulation import is_own_loop
from autoshard.ir.bodies import REMATS, opened, with_bodies
from autoshard.ir.graph import Path
from autoshard.ir.op_traits import BROADCAST
from autoshard.ir.partial_sums import Finder, Inside, Parted, Way
from autoshard.ir.trace import Traced

NAMED = "in parts until its loop is over: "  # so begins the name of the total in parts; its place follows


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LoopSum:
    """One sum over a loop's trips: the path of the scan with the number of what it carries, and into how many parts."""

    place: str
    parts: int


def loop_sums(traced: Traced, counts: Sequence[int]) -> tuple[LoopSum, ...]:
    """All sums that loops carry round and that split, each into the most parts of those that are to choose from.

    Those of `autoshard.accumulate` are left out: their parts are chosen in another way.
    """
    if not any(eqn.primitive.name == "scan" for eqn in _jax.equations(traced.jaxpr)):
        return ()
    marks = _Marks()
    found = _found(Inside(body=opened(traced.jaxpr)), sorted(counts, reverse=True), marks)
    return tuple(sorted(one for one, _ in found))


def together(traced: Traced, sums: Sequence[LoopSum]) -> tuple[LoopSum, ...]:
    """Those of some sums that can be in so many parts together: two that share a term have as many as each other."""
    wanted = {one.place: one.parts for one in sums}
    return tuple(sorted(one for one, _ in _found(Inside(body=opened(traced.jaxpr)), [], _Marks(), wanted)))


def summed_once(traced: Traced, sums: Sequence[LoopSum]) -> Traced:
    """The program that keeps these sums in parts until their loops are over; its digest stays.

    Raises:
      SpecError: it has no such sums.
    """
    top = Inside(body=opened(traced.jaxpr))
    marks = _Marks()
    wanted = {one.place: one.parts for one in sums}
    chosen = [one for one, _ in _found(top, [], marks, wanted)]
    missing = sorted(set(wanted) - {one.place for one in chosen})
    if missing:
        raise SpecError(f"the program has no sum over a loop's trips at {', '.join(missing[:3])}")
    jaxpr = _jax.without_dead(_Rewriting(marks).rewritten(top))
    return replace(traced, jaxpr=jaxpr, source_digest=traced.digest)


@dataclass(slots=True)
class _Mark:
    """What of a body is in parts: value → its way and the number of parts; results and inputs by position."""

    ways: dict[Any, tuple[Way, int]] = field(default_factory=dict[Any, tuple[Way, int]])
    results: dict[int, int] = field(default_factory=dict[int, int])
    entering: dict[int, int] = field(default_factory=dict[int, int])


class _Marks:
    """The marks of all bodies."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def of(self, inside: Inside) -> _Mark:
        return self._marks.setdefault(id(inside), _Mark())

    def add(self, found: Parted, count: int) -> bool:
        """Marks what is to be in parts; False, and nothing, where some of it is, into another number of them."""
        every = list(_walk(found))
        for one in every:
            mark = self.of(one.inside)
            if any(mark.ways[var][1] != count for var in one.ways if var in mark.ways):
                return False
            if mark.results.get(one.result, count) != count:
                return False
        for one in every:
            mark = self.of(one.inside)
            mark.ways.update((var, (way, count)) for var, way in one.ways.items())
            mark.results[one.result] = count
            if one.entering is not None:
                mark.entering[one.entering] = count
        return True

    def any_in(self, inside: Inside) -> bool:
        """Whether something of a body, or of the bodies in it, is in parts."""
        mark = self._marks.get(id(inside))
        if mark is not None and mark.results:
            return True
        steps = range(len(inside.body.steps))
        return any(self.any_in(one) for k in steps for one in inside.within(k).values())


def _walk(found: Parted) -> Iterator[Parted]:
    yield found
    for way in found.ways.values():
        if way.inner is not None:
            yield from _walk(way.inner)


def _found(
    inside: Inside, counts: Sequence[int], marks: _Marks, wanted: Mapping[str, int] | None = None
) -> Iterator[tuple[LoopSum, Parted]]:
    """The sums of a body's loops and of the loops in them, outer ones first; marks them.

    Args:
      inside: the body.
      counts: the numbers of parts to choose from, the largest first.
      marks: what was found before: what is in parts for an outer loop is no sum of its own.
      wanted: place → parts; None: all.
    """
    for k, step in enumerate(inside.body.steps):
        within = inside.within(k)
        if step.primitive == "scan" and (wanted is not None or not is_own_loop(_jax.code_of(step.eqn))):
            consts, carries = _jax.scan_arity(step.eqn)
            for i in range(carries):
                if _jax.is_unnamed(step.eqn.outvars[i]) or i in marks.of(within[0]).results:
                    continue
                place = place_of(step.path, i)
                for count in counts if wanted is None else [wanted[place]] if place in wanted else []:
                    found = Finder(within[0], count, consts + i).parted(i)
                    if found is not None and marks.add(found, count):
                        yield LoopSum(place=place, parts=count), found
                        break
        for one in within.values():
            yield from _found(one, counts, marks, wanted)


def place_of(path: Path, carry: int) -> str:
    """The place of what a scan carries, as text."""
    return f"{'.'.join(map(str, path))}:{carry}"


class _Rewriting:
    """A program written again with its marks."""

    def __init__(self, marks: _Marks) -> None:
        self.marks = marks

    def rewritten(self, inside: Inside) -> Any:
        """The closed jaxpr of a body; as it is, if nothing of it is in parts."""
        if not self.marks.any_in(inside):
            return inside.body.closed
        return _Writing(self, inside).written()


class _Writing:
    """One body that is written again.

    `present` has the parts of every value that is in parts, `zeros` the values that are zero everywhere.
    """

    def __init__(self, program: _Rewriting, inside: Inside) -> None:
        self.program, self.inside = program, inside
        self.mark = program.marks.of(inside)
        self.present: dict[Any, Any] = {}
        self.zeros: set[Any] = set()
        self.eqns: list[Any] = []

    def written(self) -> Any:
        """The closed jaxpr."""
        body, mark = self.inside.body, self.mark
        invars = list(body.invars)
        for i, count in mark.entering.items():
            invars[i] = self.present[body.invars[i]] = _jax.variable(_jax.stacked(body.invars[i].aval, count))
        for k, step in enumerate(body.steps):
            eqn, within = step.eqn, self.inside.within(k)
            if any(map(self.program.marks.any_in, within.values())):
                self.with_bodies(eqn, step.path, within)
            elif eqn.outvars and eqn.outvars[0] in mark.ways:
                self.in_parts(eqn, *mark.ways[eqn.outvars[0]])
            else:
                self.eqns.append(eqn)
                if step.primitive == BROADCAST and _is_zero(eqn.invars[0]):
                    self.zeros.add(eqn.outvars[0])
        outvars = [self.present[var] if i in mark.results else var for i, var in enumerate(body.outvars)]
        return body.with_steps(self.eqns, invars=invars, outvars=outvars)

    def in_parts(self, eqn: Any, way: Way, count: int) -> None:
        """Adds an equation part by part."""
        axes: list[int | None] = [None] * len(eqn.invars)
        operands = list(eqn.invars)
        for i in way.parted:
            operands[i], axes[i] = self.present[operands[i]], 0
        for i in way.spread:
            operands[i], axes[i] = self.spread(eqn, operands[i], count), 0
        for i, dim in way.split.items():
            axes[i] = int(dim)  # JAX writes NumPy's integers, too

        def parts(*xs: Any) -> Any:
            split = [_in_stretches(x, way.split[i], count) if i in way.split else x for i, x in enumerate(xs)]
            return jax.vmap(lambda *xs: _jax.bind(eqn, eqn.params, xs)[0], tuple(axes))(*split)

        self.present[eqn.outvars[0]] = self.add(eqn, parts, operands)

    def with_bodies(self, eqn: Any, path: Path, within: Mapping[int, Inside]) -> None:
        """Adds a loop, a checkpoint or branches with bodies in which something is in parts."""
        name = eqn.primitive.name
        bodies = {j: self.program.rewritten(one) for j, one in within.items()}
        params = with_bodies(eqn, bodies).params
        if name in REMATS:
            params = {**params, "jaxpr": _jax.open_jaxpr(params["jaxpr"])}
        mark = self.program.marks.of(within[0])
        invars, outvars = list(eqn.invars), list(eqn.outvars)
        carries = _jax.scan_arity(eqn)[1] if name == "scan" else 0
        for at, count in mark.entering.items():
            way, _ = self.mark.ways.get(eqn.outvars[at - _jax.scan_arity(eqn)[0]], (None, count))
            parted = way is not None and at in way.parted
            invars[at] = self.present[invars[at]] if parted else self.spread(eqn, invars[at], count)
        for j, count in mark.results.items():
            of_trip = _jax.stacked(within[0].body.outvars[j].aval, count)
            stacked = name == "scan" and j >= carries
            outvars[j] = _jax.variable(_jax.stacked(of_trip, eqn.params["length"]) if stacked else of_trip)
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        for j in mark.results:
            result = eqn.outvars[j]
            if result not in self.mark.ways:
                named = partial(checkpoint_name, name=NAMED + place_of(path, j))
                total = self.add(eqn, named, [outvars[j]])
                self.add(eqn, lambda x: jax.lax.reduce_sum(x, (0,)), [total], result)
            elif j >= carries and name == "scan":
                self.present[result] = self.add(eqn, lambda x: jnp.moveaxis(x, 1, 0), [outvars[j]])
            else:
                self.present[result] = outvars[j]

    def spread(self, near: Any, atom: Any, count: int) -> Any:
        """A value in the first of so many parts; the others are zero."""
        shape = (count, *atom.aval.shape)

        def first(x: Any) -> Any:
            here = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0
            return jnp.where(here, x[None], jnp.zeros(shape, x.dtype))

        if _is_zero(atom) or (not _jax.is_literal(atom) and atom in self.zeros):
            return self.add(near, lambda: jnp.zeros(shape, atom.aval.dtype), [])
        return self.add(near, lambda x: first(jnp.asarray(x, atom.aval.dtype)), [atom])

    def add(self, near: Any, fn: Callable[..., Any], operands: Sequence[Any], result: Any = None) -> Any:
        """Adds the equations of a function at the source line of another one; the variable of its result."""
        eqns, var = _jax.traced_at(near, fn, operands, result)
        self.eqns += eqns
        return var


def _in_stretches(x: Any, dim: int, count: int) -> Any:
    """A dimension as so many consecutive stretches: (…, count, size / count, …)."""
    return x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])


def _is_zero(atom: Any) -> bool:
    return bool(_jax.is_literal(atom) and not np.any(_jax.literal(atom)))
