"""Accumulation: value and gradients of a batch taken in micro-batches, reduced once, in float32, after the loop.

In a plain accumulation scan the compiler chooses when to sum the gradients over the
devices. With a sharded accumulator every trip reduce-scatters, and XLA:GPU reduces in
bfloat16 if the gradients are bfloat16. Here every trip's gradients keep a leading
*partial axis*, one entry per part of the batch,

    accumulator[p, …] += gradient of the examples of part p        (float32)

and only the final accumulator is summed over p. If the parts lie on different devices,
the loop communicates no gradient, and the sum is one float32 reduce-scatter or
all-reduce. The program is plain JAX; nothing in it names a device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, gcd, lcm, prod
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple, SupportsInt

import jax
import jax.numpy as jnp

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.mesh import MeshAxes

Parts = int | str | Sequence[str] | None
Steps = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"

# The number of parts, and of micro-batches, that `autoshard.plan` tries, and the mesh axis over which it tries stages
# ("" for one stage); part of JAX's tracing cache key.
tried_parts = jax.make_user_context(None)
tried_steps = jax.make_user_context(None)
tried_stages = jax.make_user_context(None)

# The names of the calls that mark, in a jaxpr, an accumulation whose parts, micro-batches or stages the planner is to
# choose. The second ends in the number of examples in a part of the batch, which is to be divided, and the stages.
_OPEN = "accumulated_in_parts_to_choose"
_OPEN_STEPS = "accumulated_in_steps_to_choose_of_"
_OPEN_STAGES = "stages_to_choose"

MOST_COUNTS = 12  # numbers of micro-batches that are tried

_JAX = str(Path(jax.__file__).parent)

_jax.hide_frames(__file__)  # its equations stand where the user calls it


def accumulate(
    loss: Callable[..., Any], *, steps: Steps, parts: Parts = None, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad(loss)` over a batch split into `steps` micro-batches.

    The result is used in a train step, planned or not:

        value_and_grad = autoshard.accumulate(loss, steps=8)

        def train_step(state, batch):
            value, gradients = value_and_grad(state.params, batch)
            …

    `loss(params, batch, *rest)` is the mean over the batch's leading dimension; the value
    and the gradients are the means over the micro-batches. Gradients are summed in float32
    and returned in the dtypes of `params`. Micro-batch j holds the examples j, j + steps, …,
    so a batch that is split over devices is not moved.

    Args:
      loss: `(params, batch, *rest) → scalar`, or `(scalar, aux)`; differentiated with respect
        to `params`. `rest` is passed whole to every micro-batch.
      steps: micro-batches; must divide the batch. "auto" lets `autoshard.plan` choose, one number for every such
        accumulation of a program, together with layouts and recomputation: more of them take less memory, and gather
        split weights more often. Elsewhere "auto" is 1.
      parts: into how many parts of the batch gradients are kept apart until the loop is over:
        a number, or the mesh axes over which the batch is split (of the mesh in context; 1
        without one). None lets `autoshard.plan` choose: it plans the program for every
        product of mesh axes and keeps the fastest. Elsewhere None is 1.
      has_aux: as in `jax.value_and_grad`; leaves of aux get a leading dimension of
        steps × parts. With steps="auto" no result of the program may have it.

    Raises:
      SpecError: when called, if steps × parts does not divide the batch.
    """
    check_numbers(steps, parts)

    def value_and_gradients(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        def run(steps: int, parts: int) -> Any:
            return _accumulate(loss, params, batch, rest, steps=steps, parts=parts, has_aux=has_aux)

        return in_microbatches(run, batch, steps=steps, parts=parts)

    return value_and_gradients


def check_numbers(steps: object, parts: object) -> None:
    """Refuses what is no number of micro-batches or of parts.

    Raises:
      SpecError: `steps` is neither a number nor "auto", or one of the two is below one.
    """
    if steps != AUTO and not isinstance(steps, SupportsInt):
        raise SpecError(f'steps={steps!r}: write a number of micro-batches, or "auto" to let the plan choose it')
    for name, count in (("steps", steps), ("parts", parts)):
        if isinstance(count, SupportsInt) and (isinstance(count, bool) or count != int(count) or int(count) < 1):
            raise SpecError(f"{name}={count}: a batch is split into at least one")


def in_microbatches(
    run: Callable[[int, int], Any],
    batch: Any,
    *,
    steps: Steps,
    parts: Parts,
    by_mesh: bool = False,
    stages: int = 1,
    open_stages: bool = False,
    multiple: int = 1,
) -> Any:
    """Runs a program of micro-batches, in such numbers of them and of parts as the user says or the planner tries.

    Args:
      run: (micro-batches, parts) → results.
      batch: what is divided.
      steps: as in `accumulate`.
      parts: as in `accumulate`.
      by_mesh: whether the program depends on the mesh in context, whatever the parts.
      stages: how many micro-batches are worked on at once.
      open_stages: whether the planner may choose another number of these.
      multiple: what divides the number of micro-batches, where it is not the user's.
    """
    chosen = tried_parts.value if parts is None else None
    tried = tried_steps.value if steps == AUTO else None
    count = _count(parts) if chosen is None else chosen
    number = max(1 if tried is None else tried, multiple) if steps == AUTO else steps

    def accumulated() -> Any:
        return run(number, count)

    by_axes = by_mesh or not (parts is None or isinstance(parts, int))
    fn = partial(_by_mesh_axes, accumulated) if by_axes else accumulated
    fn = fn if chosen is None else _called(_OPEN, fn)
    open_ = _OpenSteps(_examples(batch) // count, stages, multiple)
    fn = fn if tried is None else _called(f"{_OPEN_STEPS}{open_}", fn)
    fn = _called(_OPEN_STAGES, fn) if open_stages and tried_stages.value is not None else fn
    return fn()


class _OpenSteps(NamedTuple):
    """The micro-batches of an accumulation that are to be chosen.

    Attributes:
      examples: in a part of the batch; they divide it.
      stages: how many are worked on at once.
      multiple: divides them.
    """

    examples: int
    stages: int = 1
    multiple: int = 1

    def __str__(self) -> str:
        return "_".join(map(str, self if (self.stages, self.multiple) != (1, 1) else self[:1]))


def choices(mesh: MeshAxes) -> list[int]:
    """The numbers of parts that a mesh suggests: every product of its axes, rising."""
    products = {1}
    for size in mesh.sizes:
        products |= {p * size for p in products}
    return sorted(products)


def is_open(jaxpr: Any) -> bool:
    """Whether a program holds an accumulation whose parts are to be chosen."""
    return any(name == _OPEN for name in _names(jaxpr))


def has_open_stages(jaxpr: Any) -> bool:
    """Whether a program holds layers whose stages are to be chosen."""
    return any(name == _OPEN_STAGES for name in _names(jaxpr))


def counts(jaxpr: Any) -> tuple[int, ...]:
    """The numbers of micro-batches to choose among, rising; none where a program leaves none open.

    They are the divisors of what every part of every open batch has; of many, the smallest and some of the others. Of
    micro-batches that are worked on in stages there are at least as many as stages, if there can be.
    """
    found = _open_steps(jaxpr)
    examples, multiple = gcd(*(one.examples for one in found)), lcm(*(one.multiple for one in found))
    stages = max((one.stages for one in found), default=1)
    divisors = [n for n in range(1, examples + 1) if examples % n == 0 and n % multiple == 0]
    divisors = [n for n in divisors if n >= stages] or divisors[-1:]
    small, large = divisors[: MOST_COUNTS // 2], divisors[MOST_COUNTS // 2 :]
    stride = ceil(len(large) / (MOST_COUNTS - MOST_COUNTS // 2)) or 1
    return (*small, *large[::-1][::stride][::-1])


def are_staged(jaxpr: Any) -> bool:
    """Whether micro-batches that are to be chosen are worked on in stages: the more, the less a stage waits."""
    return any(one.stages > 1 for one in _open_steps(jaxpr))


def _open_steps(jaxpr: Any) -> list[_OpenSteps]:
    names = [name for name in _names(jaxpr) if name.startswith(_OPEN_STEPS)]
    return [_OpenSteps(*map(int, name.removeprefix(_OPEN_STEPS).split("_"))) for name in names]


def _names(jaxpr: Any) -> Iterator[str]:
    """The names of all calls in a program."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        name = eqn.params.get("name")
        if isinstance(name, str):
            yield name
        for body in _jax.sub_jaxprs(eqn.params):
            yield from _names(body)


def is_by_mesh_axes(codes: Iterable[CodeType]) -> bool:
    """Whether one of the functions that made an equation is an program that depends on the sizes of mesh axes."""
    return _by_mesh_axes.__code__ in codes


def is_own_loop(codes: Iterable[CodeType]) -> bool:
    """Whether an equation, made by these functions, is an accumulation's loop: it has the parts that were asked for."""
    others = (code for code in codes if not code.co_filename.startswith(_JAX))
    return next(others, None) is _accumulate.__code__


def _by_mesh_axes(accumulated: Callable[[], Any]) -> Any:
    """Calls it. Equations that are made here are known by it, in traces that JAX has cached, too."""
    return accumulated()


def _called(name: str, fn: Callable[[], Any]) -> Callable[[], Any]:
    """The function in a call of this name."""

    def named() -> Any:
        return fn()

    named.__name__ = name
    return jax.jit(named)


def _examples(batch: Any) -> int:
    """The leading dimension of a batch; of several the number that divides all."""
    return gcd(*(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.shape(x)))


def _count(parts: Parts, said: str = "parts") -> int:
    return count_of(parts, dict(jax.sharding.get_abstract_mesh().shape), said)


def count_of(parts: Parts, sizes: Mapping[str, int], said: str = "parts") -> int:
    """How many parts a number, or mesh axes, stand for; 1 where none are said, or there is no mesh.

    Args:
      parts: as in `accumulate`.
      sizes: of the mesh's axes; empty without a mesh.
      said: the argument that names them.

    Raises:
      SpecError: the mesh has no such axis.
    """
    if parts is None:
        return 1
    if isinstance(parts, SupportsInt):
        return int(parts)
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    missing = [name for name in names if name not in sizes]
    if sizes and missing:
        raise SpecError(f"{said}={parts!r}: the mesh has no axis {missing[0]!r}; it has {', '.join(sizes)}")
    return prod(sizes.get(name, 1) for name in names)


def axis_size(axis: str, said: str) -> int:
    """The size of an axis of the mesh in context; `said` is the argument that names it.

    Raises:
      SpecError: there is no mesh, or it has no such axis.
    """
    if jax.sharding.get_abstract_mesh().empty:
        raise SpecError(f"{axis!r} is an axis of the mesh in context, and there is none: plan it, or give the number")
    return _count(axis, said)


def _accumulate(
    loss: Callable[..., Any], params: Any, batch: Any, rest: tuple[Any, ...], *, steps: int, parts: int, has_aux: bool
) -> tuple[Any, Any]:
    chunks = jax.tree.map(lambda x: split_batch(x, steps, parts), batch)
    of_part = jax.vmap(jax.value_and_grad(loss, has_aux=has_aux), (None, 0, *(None for _ in rest)))

    def add(total: Any, chunk: Any) -> Any:
        values, gradients = of_part(params, chunk, *rest)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients), values

    zero = jax.tree.map(lambda p: jnp.zeros((parts, *p.shape), jnp.promote_types(p.dtype, jnp.float32)), params)
    total, values = jax.lax.scan(add, zero, chunks)
    scale = 1 / (steps * parts)
    gradients = jax.tree.map(lambda t, p: (t.sum(0) * scale).astype(p.dtype), total, params)
    if not has_aux:
        return values.mean(), gradients
    values, aux = values
    return (values.mean(), jax.tree.map(lambda x: x.reshape(steps * parts, *x.shape[2:]), aux)), gradients


def split_batch(x: Any, steps: int, parts: int) -> Any:
    """(batch, …) → (steps, parts, batch / (steps · parts), …), each part a consecutive stretch of the batch."""
    shape = jnp.shape(x)
    if not shape:
        raise SpecError(f"the batch holds a scalar, {x}, which does not split; pass it after the batch, in *rest")
    size = shape[0]
    if not size or size % (steps * parts):
        raise SpecError(
            f"a batch of {size} does not split into {steps} micro-batches of {parts} parts: "
            f"{steps * parts} must divide it"
        )
    return jnp.moveaxis(jnp.asarray(x).reshape(parts, size // (steps * parts), steps, *x.shape[1:]), 2, 0)
