"""Transfer: carries the constraints of a hand-written layout over to the program without them.

A user who lays a program out by hand writes `with_sharding_constraint` into it: that is another
program. Apart from those constraints the equations of both are the same, one by one. The
constraints around an equation of the one go around its twin in the other. A constraint on a
value without other uses goes to the place where the value is made; any other constraint goes to
every use of the constrained value.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.constraints import Constraints, Specs
from autoshard.ir.graph import BODIES, CALLS, INLINED, Path

_CONSTRAINTS = ("sharding_constraint", "reshard")

Key = tuple[Path, int]
Keyed = dict[Key, Specs]


def transferred(pins: Constraints, source: Any, target: Any) -> Constraints:
    """Pins of one closed jaxpr for another, which lacks some of its constraints and is the same elsewhere.

    Raises:
      SpecError: the programs differ in more than constraints.
    """
    walk = _Walk(pins)
    count = len(_jax.open_jaxpr(source).invars)
    _put(walk.made, {((), i): pins.inputs.get(i, ()) for i in range(count)})
    outs = walk.body(source, target, (), (), [((), i) for i in range(count)])
    ends = {((), i): (*specs, *pins.outputs.get(i, ())) for i, specs in enumerate(outs)}
    return Constraints(
        made={key: specs for key, specs in walk.made.items() if key[0]},
        taken=walk.taken,
        again=walk.again,
        kernels=walk.kernels,
        inputs={i: specs for (path, i), specs in walk.made.items() if not path},
        outputs={i: specs for (_, i), specs in ends.items() if specs},
    )


class _Walk:
    """The pins of the target, found on the way through both programs; made at the empty path are its inputs."""

    def __init__(self, pins: Constraints) -> None:
        self.pins = pins
        self.made: Keyed = {}
        self.taken: Keyed = {}
        self.again: Keyed = {}
        self.kernels: Keyed = {}

    def body(self, source: Any, target: Any, there: Path, here: Path, entered: Sequence[Key | None]) -> list[Specs]:
        """Walks two jaxprs; the constraints that are pending on each result.

        Args:
          source: the closed jaxpr with the constraints.
          target: the one without.
          there: the source's path.
          here: the target's.
          entered: where each input is made in the target, if constraints can be put there.
        """
        one, other = _jax.open_jaxpr(source), _jax.open_jaxpr(target)
        twins = iter([(i, eqn) for i, eqn in enumerate(other.eqns) if eqn.primitive.name not in _CONSTRAINTS])
        atoms = [*(atom for eqn in one.eqns for atom in eqn.invars), *one.outvars]
        uses = Counter(id(atom) for atom in atoms)
        made: dict[Any, Key | None] = dict(zip(one.invars, entered, strict=True))
        pending: dict[Any, Specs] = {}  # variable of the source → constraints since its value was made

        def chain(atom: Any) -> Specs:
            return () if _jax.is_literal(atom) else pending.get(atom, ())

        for i, eqn in enumerate(one.eqns):
            path = (*there, i)
            if eqn.primitive.name in _CONSTRAINTS:
                (value,), (result,) = eqn.invars, eqn.outvars
                specs = (*self.pins.taken.get((path, 0), ()), *self.pins.made.get((path, 0), ()))
                key = made.get(value)
                if key is not None and uses[id(value)] == 1 and not chain(value):
                    _put(self.made, {key: (*self.made.get(key, ()), *specs)})
                    made[result] = key
                else:
                    pending[result] = (*chain(value), *specs)
                continue
            j, twin = next(twins, (-1, None))
            _check(eqn, twin)
            self._equation(eqn, twin, path, (*here, j), [chain(atom) for atom in eqn.invars])
            made.update((result, ((*here, j), k)) for k, result in enumerate(eqn.outvars))
        _check(None, next(twins, (-1, None))[1])
        return [chain(atom) for atom in one.outvars]

    def _equation(self, eqn: Any, twin: Any, there: Path, here: Path, pending: Sequence[Specs]) -> None:
        """Transfers the constraints around one equation and in its bodies.

        Args:
          eqn: the equation of the source.
          twin: the equation of the target.
          there: the path in the source.
          here: the path in the target.
          pending: constraints on every operand.
        """
        pins = self.pins
        self._take(there, here, pending)
        _put(self.again, {(here, i): pins.again.get((there, i), ()) for i in range(len(pending))})
        count = len(eqn.invars) + len(eqn.outvars)
        _put(self.kernels, {(here, i): pins.kernels.get((there, i), ()) for i in range(count)})
        results: Sequence[Specs] = [()] * len(eqn.outvars)
        if eqn.primitive.name in INLINED:
            body = CALLS[eqn.primitive.name]
            inputs: list[Key | None] = [None] * len(eqn.invars)
            results = self.body(eqn.params[body], twin.params[body], (*there, 0), (*here, 0), inputs)
        for k, source, target in _bodies(eqn, twin):
            within, inside = (*there, k), (*here, k)
            entered = [(inside, i) for i in range(len(_jax.open_jaxpr(source).invars))]
            _put(self.made, {(inside, i): pins.made.get((within, i), ()) for _, i in entered})
            self._take(within, inside, self.body(source, target, within, inside, entered))
        _put(self.made, {(here, i): (*s, *pins.made.get((there, i), ())) for i, s in enumerate(results)})

    def _take(self, there: Path, here: Path, pending: Sequence[Specs]) -> None:
        taken = {(here, i): (*s, *self.pins.taken.get((there, i), ())) for i, s in enumerate(pending)}
        _put(self.taken, taken)


def _put(group: Keyed, entries: Keyed) -> None:
    group.update((key, specs) for key, specs in entries.items() if specs)


def _bodies(eqn: Any, twin: Any) -> Iterator[tuple[int, Any, Any]]:
    """Index, body of the one and of the other, of an equation that is bound again with its bodies."""
    for key, k in BODIES.get(eqn.primitive.name, ()):
        one, other = eqn.params[key], twin.params[key]
        if k is None:
            yield from ((i, a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)))
        else:
            yield k, one, other


def _check(eqn: Any, twin: Any) -> None:
    """Raises a SpecError unless two equations are of one primitive, of the same types, or there are none."""
    if eqn is None and twin is None:
        return
    if eqn is not None and twin is not None and eqn.primitive is twin.primitive and _types(eqn) == _types(twin):
        return
    where = _jax.SourceLines()
    there, here = ("nothing" if x is None else f"{x.primitive.name} at {where(x)}" for x in (eqn, twin))
    raise SpecError(
        f"the layout is of another program: {there} there, {here} here; "
        "beside its sharding constraints it must be the function that is planned"
    )


def _types(eqn: Any) -> list[tuple[Any, Any]]:
    """Shape and dtype of every operand and result; where they lie is no part of it."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    return [(getattr(a, "shape", None), getattr(a, "dtype", None)) for a in avals]
