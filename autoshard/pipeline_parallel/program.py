"""Program: value and gradients of a loss whose layers run in stages, all stages at once.

The layers' weights [L, …] become [S, L/S, …], and a buffer [S, micro-batch, …] holds what
each stage works on. At every trip all stages apply their layers (a `vmap` over S), and the
buffer moves on by one stage. Where a mesh axis splits S, that is one collective-permute
per trip, and each device applies the layers of its own stage. The program is plain JAX:
nothing in it names a device unless the caller does.

The head runs behind the stages, S micro-batches at a time, one per stage: its value and
its gradient in the same pass, so that one micro-batch's logits are alive. What leaves the
last stage is taken by a sum over S of which one term counts, a reduce-scatter.

The bubble computes on real data (copies of the first and the last micro-batch) whose
results are not taken: their gradients are zeros, not NaNs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.ir.rewrite import Hooks, evaluate
from autoshard.pipeline_parallel.cut import Cut, made, named, used
from autoshard.pipeline_parallel.hand_overs import HANDS_OVER
from autoshard.pipeline_parallel.schedule import Schedule

_jax.hide_frames(__file__)  # its equations stand where the user calls it

Leaves = list[Any]
_OWN = Hooks(own=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A loss in stages.

    Attributes:
      cut: the loss of one micro-batch, in parts.
      schedule: the trips.
      batch: which inputs of the loss are the micro-batch.
      axis: the mesh axis that the stages are pinned to; empty if the planner chooses.
    """

    cut: Cut
    schedule: Schedule
    batch: tuple[bool, ...]
    axis: str = ""

    def __call__(self, inputs: Leaves) -> tuple[Any, Leaves]:
        """The mean of the micro-batches' losses, and their other results, stacked.

        Args:
          inputs: of the loss; those of the batch with a leading dimension of micro-batches.
        """
        cut, variables = self.cut, self.cut.body.invars
        chunk = {v: x for v, x, own in zip(variables, inputs, self.batch, strict=True) if own}
        whole = {v: x for v, x, own in zip(variables, inputs, self.batch, strict=True) if not own}
        taken = used(cut.before) | used(cut.after) | named(cut.layers.invars) | named(cut.body.outvars)
        shared = cut.ordered(taken & (made(cut.once) | set(whole) | cut.constants))
        once = cut.program(cut.once, list(whole), shared)
        values = dict(zip(shared, evaluate(once, list(whole.values()), _OWN), strict=True))

        handed = [v for v in cut.consts if not _jax.is_literal(v) and v in cut.of_batch]
        later = cut.ordered(made(cut.before) & (used(cut.after) | named(cut.body.outvars)))
        first = [*cut.carry, *handed, *later]
        names = [v for v in shared if v in used(cut.before) or v in named(first)]
        before = cut.program(cut.before, [*chunk, *names], first)
        fixed = [values[v] for v in names]
        entered = jax.vmap(lambda own: evaluate(before, [*own, *fixed], _OWN))(list(chunk.values()))
        carry, buffers, kept = _divided(entered, len(cut.carry), len(handed))

        constants = {v: values[v] for v in named(cut.consts) if v in values}
        last = self._layers(carry, dict(zip(handed, buffers, strict=True)), constants, [values[v] for v in cut.slices])

        ends = [v for v in cut.carried if not _jax.is_unnamed(v)]
        given = {**dict(zip(later, kept, strict=True)), **dict(zip(cut.carried, last, strict=True)), **chunk}
        of_each = [v for v in (*ends, *later, *chunk) if v in used(cut.after) or v in named(cut.body.outvars)]
        names = [v for v in shared if v in used(cut.after) or v in named(cut.body.outvars)]
        after = cut.program(cut.after, [*names, *of_each], cut.body.outvars)
        return _mean_of(after, [values[v] for v in names], [given[v] for v in of_each], self._at_once)

    @property
    def _at_once(self) -> int:
        """For how many micro-batches the head runs at once."""
        return 1 if self.schedule.steps % self.schedule.stages else self.schedule.stages

    def _layers(self, carry: Leaves, handed: dict[Any, Any], constants: dict[Any, Any], slices: Leaves) -> Leaves:
        """The last carry of every micro-batch.

        Args:
          carry: the first one of every micro-batch.
          handed: constants of the layers that follow from the batch, of every micro-batch.
          constants: their other constants.
          slices: the stacked weights.
        """
        plan, eqn, count = self.schedule, self.cut.layers, len(carry)
        S, R = plan.stages, plan.repeats
        layers = self.cut.length // (S * R)
        narrow = [x.dtype for x in slices]
        weights = [self._by_stage(_wide(x)) for x in slices]
        fixed, kinds = {v: _wide(x) for v, x in constants.items()}, {v: x.dtype for v, x in constants.items()}

        def stage(repeat: Any, of_stage: Leaves, state: Leaves) -> Leaves:
            with _jax.as_written(eqn):
                own = [x[0] if R == 1 else jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False) for x in of_stage]
                own = [x.astype(dtype) for x, dtype in zip(own, narrow, strict=True)]
                given = {v: x.astype(kinds[v]) for v, x in fixed.items()}
                given |= dict(zip(handed, state[count:], strict=True))
                consts = [_jax.literal(v) if _jax.is_literal(v) else given[v] for v in self.cut.consts]
                results = _jax.bind(eqn, {**eqn.params, "length": layers}, [*consts, *state[:count], *own])
            return [*results[:count], *state[count:]]

        def trip(state: Leaves, at: Any) -> tuple[Leaves, Leaves]:
            starts, repeats, entering = at
            with _jax.as_written(eqn):
                moved = [self._move(x, new, starts) for x, new in zip(state, entering, strict=True)]
            out = jax.vmap(stage)(repeats, weights, moved)
            return out, out[:count]

        entering = [self._feed(x) for x in (*carry, *handed.values())]
        begin = [self._pinned(jnp.broadcast_to(x[0], (S, *x.shape[1:]))) for x in (*carry, *handed.values())]
        trips = range(plan.trips)
        starts = np.array([plan.starts(t) for t in trips])
        repeats = np.array([[plan.repeat(t, s) for s in range(S)] for t in trips], np.int32)
        _, outs = jax.lax.scan(trip, begin, (starts, repeats, entering))
        return [self._left(x) for x in outs]

    def _by_stage(self, x: Any) -> Any:
        """Stacked weights (L, …) → (S, R, L/(S·R), …): a stage's layers of every time round."""
        plan = self.schedule
        S, R = plan.stages, plan.repeats
        layers = len(x) // (S * R)
        if R == 1:  # they lie in this order
            return x.reshape(S, R, layers, *x.shape[1:])
        return x.reshape(R, S, layers, *x.shape[1:]).swapaxes(0, 1)

    def _feed(self, x: Any) -> Any:
        """What enters stage 0 at every trip: (M, …) → (trips, …); where nothing new does, anything."""
        plan = self.schedule
        S, R, M = plan.stages, plan.repeats, plan.steps
        if R > 1:
            x = jnp.broadcast_to(x.reshape(M // S, 1, S, *x.shape[1:]), (M // S, R, S, *x.shape[1:]))
            x = x.reshape(M * R, *x.shape[3:])
        if S == 1:
            return x
        return jnp.concatenate([x, jnp.broadcast_to(x[-1], (S - 1, *x.shape[1:]))])

    def _move(self, x: Any, new: Any, starts: Any) -> Any:
        """Every stage's result in the next stage; in stage 0 what enters."""
        S = self.schedule.stages
        if S == 1:
            return self._pinned(jnp.where(starts, new[None], x))
        first = jnp.arange(S).reshape(S, *(1 for _ in x.shape[1:])) == 0
        if self.schedule.repeats > 1:
            new = jnp.where(starts, new[None], _shift(x, 1 - S))
        return self._pinned(jnp.where(first, new, _shift(x, 1)))

    def _left(self, x: Any) -> Any:
        """What left the last stage, (trips, S, …) → (M, …), in the order of the micro-batches."""
        plan = self.schedule
        S, R, M = plan.stages, plan.repeats, plan.steps
        x = x[S - 1 :]
        if R > 1:
            x = x.reshape(M // S, R, S, *x.shape[1:])[:, -1]
            x = x.reshape(M, *x.shape[2:])
        last = jnp.arange(S).reshape(1, S, *(1 for _ in x.shape[2:])) == S - 1
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return jnp.where(last, x, False).any(1)
        return jnp.where(last, x, jnp.zeros((), x.dtype)).sum(1, dtype=x.dtype)

    def _pinned(self, x: Any) -> Any:
        if not self.axis:
            return x
        spec = PartitionSpec(self.axis, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:]))
        return jax.lax.with_sharding_constraint(x, spec)


def _shift(x: Any, by: int) -> Any:
    """The elements of the leading dimension moved up; zeros come in."""
    with jax.named_scope(HANDS_OVER):
        return jax.lax.pad(x, jnp.zeros((), x.dtype), [(by, -by, 0), *((0, 0, 0) for _ in x.shape[1:])])


def _mean_of(after: Any, whole: Leaves, of_each: Leaves, at_once: int) -> tuple[Any, Leaves]:
    """The mean over the micro-batches of a program's first result, and its other results, stacked.

    Args:
      after: the program, from the values of all micro-batches and those of one to a scalar and others.
      whole: the former.
      of_each: the latter, each with a leading dimension of micro-batches.
      at_once: for how many micro-batches it runs at once.
    """
    steps = of_each[0].shape[0]

    def alone(whole: Leaves, own: Leaves) -> tuple[Any, Leaves]:
        value, *others = evaluate(after, [*whole, *own], _OWN)
        return value, others

    def forward(whole: Leaves, of_each: Leaves) -> tuple[Any, Any]:
        chosen, chosen_own = _floats(whole), _floats(of_each)

        def of_floats(floats: Leaves, own_floats: Leaves, own: Leaves) -> tuple[Any, Leaves]:
            return alone(_put(whole, chosen, floats), _put(own, chosen_own, own_floats))

        one = jax.value_and_grad(of_floats, argnums=(0, 1), has_aux=True)
        several = jax.vmap(one, (None, 0, 0))

        def trip(total: Leaves, own: Leaves) -> tuple[Leaves, Any]:
            found, (grads, own_grads) = several([whole[i] for i in chosen], [own[i] for i in chosen_own], own)
            return [t + g.astype(t.dtype) for t, g in zip(total, grads, strict=True)], (found, own_grads)

        zero = [jnp.zeros((at_once, *x.shape), jnp.promote_types(x.dtype, jnp.float32)) for x in _at(whole, chosen)]
        groups = [x.reshape(steps // at_once, at_once, *x.shape[1:]) for x in of_each]
        total, (found, own_grads) = jax.lax.scan(trip, zero, groups)
        values, others = jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), found)
        own_grads = [x.reshape(steps, *x.shape[2:]) for x in own_grads]
        grads = [t.sum(0) for t in total]
        return (values.mean(), others), (grads, own_grads)

    def backward(kept: Any, cotangents: Any) -> tuple[Leaves, Leaves]:
        grads, own_grads = kept
        scale = cotangents[0] / steps

        def scaled(like: Leaves, grads: Leaves) -> Leaves:
            by_place = dict(zip(_floats(like), grads, strict=True))
            return [(by_place[i] * scale).astype(x.dtype) if i in by_place else None for i, x in enumerate(like)]

        return scaled(whole, grads), scaled(of_each, own_grads)

    mean = jax.custom_vjp(lambda whole, of_each: forward(whole, of_each)[0])
    mean.defvjp(forward, backward)
    return mean(whole, of_each)


def _floats(values: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _at(values: Leaves, places: Sequence[int]) -> Leaves:
    return [values[i] for i in places]


def _put(values: Leaves, places: Sequence[int], new: Leaves) -> Leaves:
    found = dict(zip(places, new, strict=True))
    return [found.get(i, x) for i, x in enumerate(values)]


def _wide(x: Any) -> Any:
    """Floats in float32 at least: the gradients of every trip are added up in that dtype."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _divided(values: Leaves, first: int, second: int) -> tuple[Leaves, Leaves, Leaves]:
    return values[:first], values[first : first + second], values[first + second :]
