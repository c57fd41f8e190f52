"""Chunks: a loss of one micro-batch as programs of chunks of its layers, forward and backward.

What goes from chunk to chunk is the *state*: the layers' carry, constants of the layers that
follow from the micro-batch, and what the head needs of the embedding. The first chunk makes
it from the micro-batch, the last one makes the loss of it. A chunk's backward pass repeats
its forward pass from the state that came in, so that this is all that a chunk holds of a
micro-batch.

What follows from no micro-batch is made once, by a program of all devices (`Chunks.enter`):
the stacked weights, of which every chunk has its part, and what chunks share. Gradients of
both go back through the transpose of that program (`Chunks.leave`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.cut import Cut, following, is_in, made, named, used

_jax.hide_frames(__file__)  # its equations stand where the user wrote them

Leaves = list[Any]
_OWN = Hooks(own=True)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A loss of one micro-batch in chunks.

    Attributes:
      cut: the loss in parts.
      params: which of its inputs are parameters.
      batch: which of its inputs are the micro-batch.
      layers: how many layers each chunk has; the first and the last one may have none.
      scale: by what a micro-batch's loss is multiplied in the batch's.
    """

    cut: Cut
    params: tuple[bool, ...]
    batch: tuple[bool, ...]
    layers: tuple[int, ...]
    scale: float

    # The variables.

    @cached_property
    def whole(self) -> list[Any]:
        """The inputs that are not the micro-batch's."""
        return [v for v, own in zip(self.cut.body.invars, self.batch, strict=True) if not own]

    @cached_property
    def of_microbatch(self) -> list[Any]:
        """The inputs that are the micro-batch's."""
        return [v for v, own in zip(self.cut.body.invars, self.batch, strict=True) if own]

    @cached_property
    def slices(self) -> list[Any]:
        """The stacked weights."""
        return list(self.cut.slices)

    @cached_property
    def shared(self) -> list[Any]:
        """The other values that chunks take and that follow from no micro-batch."""
        taken = used(self.cut.before) | used(self.cut.after) | named((*self.cut.consts, *self._first, *self._results))
        return self.cut.ordered(taken & (made(self.cut.once) | set(self.whole) | self.cut.constants))

    @cached_property
    def state(self) -> list[Any]:
        """What goes from chunk to chunk: abstract values."""
        return [_abstract(atom) for atom in self._first]

    @cached_property
    def differentiable(self) -> list[int]:
        """The places in the state of what has a gradient with respect to parameters."""
        carries = len(self.cut.carry)
        varying = self._of_params
        carried = any(is_in(v, varying) for v in (*self.cut.carry, *self.cut.consts, *self.cut.slices))
        return [
            i
            for i, atom in enumerate(self._first)
            if jnp.issubdtype(self.state[i].dtype, jnp.inexact) and (carried if i < carries else is_in(atom, varying))
        ]

    @cached_property
    def others(self) -> list[Any]:
        """The results of a micro-batch beside its loss: abstract values."""
        return [_abstract(atom) for atom in self._results[1:]]

    @cached_property
    def value(self) -> Any:
        """The loss: an abstract value."""
        return _abstract(self._results[0])

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.layers)

    @property
    def layered(self) -> int:
        """The last chunk that has layers."""
        return max(c for c, count in enumerate(self.layers) if count)

    def slices_of(self, chunk: int) -> list[Any]:
        """The stacked weights of which a chunk has its part: all of them, or none without layers."""
        return self.slices if self.layers[chunk] else []

    def shared_of(self, chunk: int) -> list[int]:
        """The places in `shared` of what a chunk takes."""
        taken = named(self.cut.consts) if self.layers[chunk] else set[Any]()
        if chunk == 0:
            taken |= used(self.cut.before) | named(self._first)
        if chunk == self.count - 1:
            taken |= used(self.cut.after) | named(self._results)
        return [i for i, v in enumerate(self.shared) if v in taken]

    def microbatch_of(self, chunk: int) -> list[int]:
        """The places in `of_microbatch` of what a chunk takes."""
        taken: set[Any] = set()
        if chunk == 0:
            taken |= used(self.cut.before) | named(self._first)
        if chunk == self.count - 1:
            taken |= used(self.cut.after) | named(self._results)
        return [i for i, v in enumerate(self.of_microbatch) if v in taken]

    def trained(self, variables: Sequence[Any]) -> list[int]:
        """The places of those variables that have a gradient with respect to parameters."""
        return [
            i for i, v in enumerate(variables) if v in self._of_params and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        ]

    # The programs.

    @cached_property
    def direct(self) -> Mapping[int, int]:
        """The places in `slices` of parameters that are nothing else, and their places in `whole`."""
        elsewhere = used(self.cut.once) | set(self.shared)
        places = {v: i for i, v in enumerate(self.whole) if v in self._parameters and v not in elsewhere}
        trained = self.trained(self.slices)
        return {
            k: places[v]
            for k, v in enumerate(self.slices)
            if k in trained and is_in(v, set(places)) and self.slices.count(v) == 1
        }

    def enter(self, whole: Leaves, slices: Sequence[int]) -> tuple[Leaves, Leaves]:
        """Some of the stacked weights, and the shared values.

        Args:
          whole: the inputs that are no micro-batch's; those that nothing asked for follows from may be None.
          slices: the places of the weights that are asked for.
        """
        program = self.cut.program(self.cut.once, self.whole, [*_at(self.slices, slices), *self.shared])
        values = evaluate(program, whole, _OWN)
        return values[: len(slices)], values[len(slices) :]

    def leave(self, whole: Leaves, slices: Mapping[int, Any], shared: Leaves, wanted: Sequence[int]) -> Leaves:
        """The gradients of parameters.

        Args:
          whole: as of `enter`.
          slices: gradients of stacked weights, by their places.
          shared: gradients of the trained shared values.
          wanted: the places in `whole` of the parameters.
        """

        def trained(params: Leaves) -> Leaves:
            weights, values = self.enter(_put(whole, wanted, params), list(slices))
            return [*weights, *_at(values, self.trained(self.shared))]

        _, transposed = jax.vjp(trained, _at(whole, wanted))
        return transposed([*slices.values(), *shared])[0]

    def forward(self, chunk: int, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves) -> Leaves:
        """The state behind a chunk; behind the last one the loss and the other results.

        Args:
          chunk: its number.
          weights: its part of the stacked weights.
          shared: what it takes of the shared values (`shared_of`).
          microbatch: what it takes of the micro-batch (`microbatch_of`).
          state: what comes in; nothing into the first one.
        """
        cut, last = self.cut, self.count - 1
        given = {self.shared[i]: x for i, x in zip(self.shared_of(chunk), shared, strict=True)}
        given |= {self.of_microbatch[i]: x for i, x in zip(self.microbatch_of(chunk), microbatch, strict=True)}
        if chunk == 0:
            state = evaluate(cut.program(cut.before, list(given), self._first), list(given.values()), _OWN)
        carries = len(cut.carry)
        results = list(state[:carries])
        if self.layers[chunk]:
            inside = given | {v: x for v, x in zip(self._first, state, strict=True) if not _jax.is_literal(v)}
            consts = [_jax.literal(v) if _jax.is_literal(v) else inside[v] for v in cut.consts]
            operands = [*consts, *results, *weights]
            with _jax.as_written(cut.layers):
                results = _jax.bind(cut.layers, {**cut.layers.params, "length": self.layers[chunk]}, operands)
        state = [*results[:carries], *state[carries:]]
        if chunk < last:
            return state
        ends = {v: x for v, x in zip(cut.carried, results, strict=False) if not _jax.is_unnamed(v)}
        later = {v: x for v, x in zip(self._first[carries:], state[carries:], strict=True) if not _jax.is_literal(v)}
        given = later | ends | given
        return evaluate(cut.program(cut.after, list(given), self._results), list(given.values()), _OWN)

    def backward(
        self, chunk: int, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves, cotangents: Leaves
    ) -> tuple[Leaves, Leaves, Leaves, Leaves]:
        """The gradients of a chunk's trained weights, shared values and incoming state; of the last one its results.

        Args:
          chunk: its number.
          weights: as of `forward`.
          shared: likewise.
          microbatch: likewise.
          state: likewise.
          cotangents: those of the differentiable state behind the chunk; none of the last one.
        """
        out, transposed = self.linear(chunk, weights, shared, microbatch, state)
        if chunk < self.count - 1:
            return (*transposed(cotangents), [])
        return (*transposed([jnp.full((), self.scale, out[0].dtype)]), out)

    def linear(
        self, chunk: int, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves
    ) -> tuple[Leaves, Callable[[Leaves], tuple[Leaves, Leaves, Leaves]]]:
        """What `forward` returns, and the function from cotangents to those of weights, shared values and state."""
        of_weights = self.trained(self.slices_of(chunk))
        of_shared = self.trained([self.shared[i] for i in self.shared_of(chunk)])
        of_state = self.differentiable if chunk else []

        def pure(own: Leaves, others: Leaves, before: Leaves) -> tuple[Leaves, Leaves]:
            found = self.forward(
                chunk,
                _put(weights, of_weights, own),
                _put(shared, of_shared, others),
                microbatch,
                _put(state, of_state, before),
            )
            return _at(found, [0] if chunk == self.count - 1 else self.differentiable), found

        given = _at(weights, of_weights), _at(shared, of_shared), _at(state, of_state)
        _, transposed, found = jax.vjp(pure, *given, has_aux=True)
        return found, transposed

    # Helpers.

    @cached_property
    def _first(self) -> list[Any]:
        """The atoms of the state as the first chunk makes it."""
        cut = self.cut
        handed = [v for v in cut.consts if not _jax.is_literal(v) and v in cut.of_batch]
        later = self.cut.ordered(made(cut.before) & (used(cut.after) | named(cut.body.outvars)))
        return [*cut.carry, *dict.fromkeys((*handed, *later))]

    @cached_property
    def _results(self) -> list[Any]:
        return list(self.cut.body.outvars)

    @cached_property
    def _parameters(self) -> set[Any]:
        return {v for v, own in zip(self.cut.body.invars, self.params, strict=True) if own}

    @cached_property
    def _of_params(self) -> set[Any]:
        """What follows from parameters, before the layers."""
        return following(self._parameters, (*self.cut.once, *self.cut.before))


def _abstract(atom: Any) -> Any:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _at(values: Leaves, places: Sequence[int]) -> Leaves:
    return [values[i] for i in places]


def _put(values: Leaves, places: Sequence[int], new: Leaves) -> Leaves:
    found = dict(zip(places, new, strict=True))
    return [found.get(i, x) for i, x in enumerate(values)]
