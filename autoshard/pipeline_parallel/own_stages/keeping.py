"""Keeping: a chunk's forward pass that keeps what its backward pass reads, and that backward pass.

What a backward pass reads is of three kinds. Arguments of the forward pass are given to it again.
What follows from weights alone (casts of them) is made again, so that it is not kept once per
micro-batch. The rest are activations: results of the forward pass, held until the backward one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import _jax
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.own_stages.chunks import Chunks

_jax.hide_frames(__file__)  # its equations stand where the user wrote them

Leaves = list[Any]
_OWN = Hooks(own=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keeping:
    """A chunk's passes with kept activations. It is not the last chunk, whose passes are one program.

    Attributes:
      counts: how many weights, shared values, leaves of the micro-batch and of the state there are.
      forward_program: from all of these to the state behind the chunk, and what is kept.
      states: how many leaves the state behind the chunk has.
      again_program: from weights and shared values to what is made again.
      sources: of every value that the backward pass reads: an input's place, or what is made again or kept, and which.
      transposed: the structure of the backward pass.
    """

    counts: tuple[int, int, int, int]
    forward_program: Any
    states: int
    again_program: Any
    sources: tuple[tuple[str, int], ...]
    transposed: Any

    @property
    def kept(self) -> list[Any]:
        """What is kept of a micro-batch: abstract values."""
        outs = _jax.open_jaxpr(self.forward_program).outvars[self.states :]
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outs]

    @property
    def held(self) -> list[int]:
        """The places in the incoming state of what the backward pass reads."""
        first = sum(self.counts[:3])
        return sorted({at - first for kind, at in self.sources if kind == "input" and at >= first})

    def forward(self, weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves) -> tuple[Leaves, Leaves]:
        """The state behind the chunk, and what is kept."""
        values = evaluate(self.forward_program, [*weights, *shared, *microbatch, *state], _OWN)
        return values[: self.states], values[self.states :]

    def backward(
        self, weights: Leaves, shared: Leaves, microbatch: Leaves, held: Leaves, kept: Leaves, cotangents: Leaves
    ) -> tuple[Leaves, Leaves, Leaves]:
        """The gradients of trained weights, of shared values, and of the incoming state.

        Args:
          weights: as of `forward`.
          shared: likewise.
          microbatch: likewise.
          held: what `held` says of the incoming state.
          kept: what `forward` kept.
          cotangents: those of the differentiable state behind the chunk.
        """
        state: Leaves = [None] * self.counts[3]
        for place, x in zip(self.held, held, strict=True):
            state[place] = x
        values = {
            "input": [*weights, *shared, *microbatch, *state],
            "again": evaluate(self.again_program, [*weights, *shared], _OWN),
            "kept": kept,
        }
        transposed = jax.tree.unflatten(self.transposed, [values[kind][at] for kind, at in self.sources])
        return transposed(cotangents)


def keeping(chunks: Chunks, chunk: int, arguments: Sequence[Leaves]) -> Keeping:
    """The passes of a chunk with kept activations.

    Args:
      chunks: the loss in chunks.
      chunk: which of them.
      arguments: abstract weights, shared values, leaves of a micro-batch and of the state.
    """
    counts = tuple(map(len, arguments))
    trees: list[Any] = []

    def both(weights: Leaves, shared: Leaves, microbatch: Leaves, state: Leaves) -> list[Any]:
        out, transposed = chunks.linear(chunk, weights, shared, microbatch, state)
        leaves, tree = jax.tree.flatten(transposed)
        trees.append(tree)
        return [*out, *leaves]

    closed = jax.make_jaxpr(both)(*arguments)
    jaxpr = _jax.open_jaxpr(closed)
    states = len(chunks.state)
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    again: dict[Any, int] = {}
    kept: dict[Any, int] = {}
    sources: list[tuple[str, int]] = []
    alone = frozenset(range(counts[0] + counts[1]))
    for atom in jaxpr.outvars[states:]:
        if not _jax.is_literal(atom) and atom in places:
            sources.append(("input", places[atom]))
            continue
        key = id(atom) if _jax.is_literal(atom) else atom
        known, name = (again, "again") if _inputs_of(closed, atom) <= alone else (kept, "kept")
        known.setdefault(key, len(known))
        sources.append((name, known[key]))
    by_key = {id(atom) if _jax.is_literal(atom) else atom: atom for atom in jaxpr.outvars[states:]}
    return Keeping(
        counts=(counts[0], counts[1], counts[2], counts[3]),
        forward_program=_program(closed, [*jaxpr.outvars[:states], *(by_key[key] for key in kept)]),
        states=states,
        again_program=_program(closed, [by_key[key] for key in again], len(alone)),
        sources=tuple(sources),
        transposed=trees[0],
    )


def _program(closed: Any, outvars: Sequence[Any], inputs: int | None = None) -> Any:
    """The program of some results; of its first inputs, where the others are not needed."""
    jaxpr = _jax.open_jaxpr(closed)
    alive = _jax.without_dead(_jax.rewired(closed, eqns=jaxpr.eqns, outvars=outvars))
    opened = _jax.open_jaxpr(alive)
    return _jax.rewired(alive, eqns=opened.eqns, invars=opened.invars[:inputs])


def _inputs_of(closed: Any, atom: Any) -> frozenset[int]:
    """The inputs that a value follows from."""
    eqns = _jax.open_jaxpr(closed).eqns
    return _jax.used_inputs(_jax.rewired(closed, eqns=eqns, outvars=[atom]))
