"""Stacking: a loss with equal layers, one after the other, as the same loss with a scan over stacked weights.

The numbers stay what they are, and so do inputs and results: the weights are stacked in the program. Rows of one array
that are taken in order are that array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.errors import StageError
from autoshard.ir.bodies import Body, Step, opened
from autoshard.ir.op_traits import SLICE, traits_of
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.cut import following, loops_over_layers
from autoshard.pipeline_parallel.equal_layers import EqualLayers, equal_layers, lines_of, lines_of_layers, signatures

_jax.hide_frames(__file__)  # its equations stand where the user calls it

_OWN = Hooks(own=True)
WAY_OUT = (
    "make the layers equal, or plan without stages; layers that differ on purpose go around a `jax.lax.scan` over "
    "those that are equal"
)


def stacked(closed: Any, batch: Sequence[bool]) -> Any:
    """A loss whose equal layers are a scan; the same loss if it has none, or a scan over more weights.

    Args:
      closed: the loss of one micro-batch.
      batch: which of its inputs are the micro-batch.

    Raises:
      StageError: some of its layers are equal, and others are not.
    """
    body = opened(closed, remats=None)
    of_batch = following({var for var, own in zip(body.invars, batch, strict=True) if own}, body.steps)
    loops = loops_over_layers(body, of_batch)
    most = max((loop.weights for loop in loops if not loop.refused), default=0)
    layers = equal_layers(body, of_batch)
    if layers is None:
        if not loops:
            _refuse_repeated_lines(body, of_batch, frozenset(), 2)
        return closed
    if layers.weights <= most:
        return closed
    _refuse_others(body, of_batch, layers)
    _refuse_repeated_lines(body, of_batch, frozenset(n for layer in layers.at for n in layer), layers.count)
    return _in_a_scan(body, layers)


def _in_a_scan(body: Body, layers: EqualLayers) -> Any:
    inside = {n for layer in layers.at for n in layer}
    last = layers.at[-1][-1]
    ahead = [step for n, step in enumerate(body.steps) if n < last and n not in inside]
    behind = [step for n, step in enumerate(body.steps) if n > last]
    begin = [one.first for one in layers.carries]
    sources = [_Rows.of(one.atoms, ahead) for one in layers.slices]
    needed = _named([*begin, *layers.constants, *(atom for source in sources for atom in source.atoms)])
    left = _named([v for step in behind for v in step.eqn.invars] + list(body.outvars))
    made = {v for step in ahead for v in step.eqn.outvars} | set(body.invars)
    kept = [v for v in left if v in made]
    given = list(dict.fromkeys([*needed, *kept]))
    before = body.with_steps([step.eqn for step in ahead], outvars=given)
    layer = body.with_steps(
        layers.eqns,
        invars=[*layers.constants, *(one.inside for one in layers.carries), *(one.inside for one in layers.slices)],
        outvars=[one.result for one in layers.carries],
    )
    ends = [one.last for one in layers.carries]
    after = body.with_steps([step.eqn for step in behind], invars=[*kept, *ends])
    near = body.steps[layers.at[0][0]].eqn

    def program(*inputs: Any) -> list[Any]:
        values = dict(zip(given, evaluate(before, inputs, _OWN), strict=True))

        def read(atom: Any) -> Any:
            return _jax.literal(atom) if _jax.is_literal(atom) else values[atom]

        constants = [values[v] for v in layers.constants]
        with _jax.as_written(near):
            stacks = [source.stacked([read(atom) for atom in source.atoms]) for source in sources]

            def layer_of(carry: list[Any], own: list[Any]) -> tuple[list[Any], None]:
                return evaluate(layer, [*constants, *carry, *own], _OWN), None

            first = [jnp.asarray(read(one.first), one.inside.aval.dtype) for one in layers.carries]
            carried, _ = jax.lax.scan(layer_of, first, stacks, length=layers.count)
        return evaluate(after, [*(values[v] for v in kept), *carried], _OWN)

    return _jax.without_dead(_jax.with_body(body.closed, program))


class _Rows:
    """Where a stack of every layer's own value comes from: these values, or rows of one array in order."""

    def __init__(self, atoms: Sequence[Any], first: int | None, shape: tuple[int, ...]) -> None:
        self.atoms, self.first, self.shape = tuple(atoms), first, shape

    @classmethod
    def of(cls, atoms: Sequence[Any], steps: Sequence[Step]) -> "_Rows":
        shape = (len(atoms), *atoms[0].aval.shape)
        makers = {step.eqn.outvars[0]: step.eqn for step in steps if traits_of(step.primitive).cuts}
        eqns = [None if _jax.is_literal(atom) else makers.get(atom) for atom in atoms]
        arrays = {eqn.invars[0] for eqn in eqns if eqn is not None and eqn.primitive.name == SLICE}
        if len(arrays) == 1 and None not in eqns:
            (array,) = arrays
            begins = [eqn.params["start_indices"] for eqn in eqns if eqn is not None]
            first, whole = begins[0][0], (1, *array.aval.shape[1:])
            if shape[1:] == whole and [b[0] for b in begins] == list(range(first, first + len(atoms))):
                return cls([array], first, shape)
        return cls(atoms, None, shape)

    def stacked(self, values: Sequence[Any]) -> Any:
        if self.first is None:
            return jnp.stack(values)
        rows = values[0]
        if rows.shape[0] != self.shape[0]:
            rows = jax.lax.slice_in_dim(rows, self.first, self.first + self.shape[0])
        return rows.reshape(self.shape)


def _named(atoms: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(v for v in atoms if not _jax.is_literal(v)))


def _refuse_others(body: Body, of_batch: set[Any], layers: EqualLayers) -> None:
    """Raises if equations around the layers were written where the layers' were: then these are layers, too.

    Layers that one line calls in a loop share all of their lines: one contraction more from there is another layer.
    Layers that are called one by one share those of a function: it was called again if all of its contractions were.
    """
    places = list(lines_of_layers(body, layers))
    contracts = [k for k, n in enumerate(layers.at[0]) if traits_of(body.steps[n].primitive).contraction]
    wanted = {places[k] for k in contracts if places[k]}
    in_a_loop = all(places[k] == lines_of(body, layers.at[0][k]) for k in contracts)
    inside = {n for layer in layers.at for n in layer}
    around = [n for n, step in enumerate(body.steps) if n not in inside and traits_of(step.primitive).contraction]
    others = {n: place for n in around for place in wanted if lines_of(body, n)[: len(place)] == place}
    again = others if in_a_loop else others if len(contracts) > 1 and set(others.values()) == wanted else {}
    if again:
        raise _unequal(body, of_batch, layers, min(again))


def _unequal(body: Body, of_batch: set[Any], layers: EqualLayers, other: int) -> StageError:
    """The error that names the first equation in which a further layer is not like the others."""
    own = [
        n for n, step in enumerate(body.steps) if any(not _jax.is_literal(v) and v in of_batch for v in step.eqn.invars)
    ]
    first, last = own.index(layers.at[0][0]), own.index(layers.at[-1][-1])
    ahead = other < layers.at[0][0]
    near = own[max(first - len(layers.at[0]), 0) : first] if ahead else own[last + 1 : last + 1 + len(layers.at[0])]
    model = list(layers.at[-1])[-len(near) :] if ahead else list(layers.at[0])[: len(near)]
    pairs = list(zip(near, model, strict=False))
    for n, m in reversed(pairs) if ahead else pairs:
        one, two = signatures([body.steps[n], body.steps[m]])
        if one != two:
            return _differs(body, n, m, f"of its layers only {layers.count}, one after the other, are equal")
    return _differs(body, other, other, f"of its layers only {layers.count}, one after the other, are equal")


def _refuse_repeated_lines(body: Body, of_batch: set[Any], layers: frozenset[int], times: int) -> None:
    """Raises if, outside of equal layers, a line contracts what follows from the batch so many times."""
    known: dict[tuple[str, ...], list[int]] = {}
    for n, step in enumerate(body.steps):
        follows = any(not _jax.is_literal(v) and v in of_batch for v in step.eqn.invars)
        if n not in layers and follows and traits_of(step.primitive).contraction:
            known.setdefault(lines_of(body, n), []).append(n)
    for first, *others in known.values():
        if len(others) + 1 >= times:
            raise _differs(body, others[0], first, "no two of its layers, one after the other, are equal")


def _differs(body: Body, n: int, model: int, what: str) -> StageError:
    """The error of a layer that does something else, at its line."""
    lines, one, two = _jax.SourceLines(), body.steps[n].eqn, body.steps[model].eqn
    here, there = _said(one), _said(two)
    why = f"here another has {here}" + (f" where they have {there}" if here != there else "")
    return StageError(lines(one), f"{what}: {why}", WAY_OUT)


def _said(eqn: Any) -> str:
    """An equation's primitive and the types of its operands, in words."""
    shapes = [f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]" for v in eqn.invars if hasattr(v.aval, "shape")]
    return f"`{eqn.primitive.name}` of {' and '.join(shapes)}"
