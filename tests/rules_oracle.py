"""Two oracles for sharding rules that know nothing of any primitive.

`collectives` jits one equation with the layouts of a strategy on fake devices and lists
the collectives that XLA's partitioner inserts. `check_passes` and `check_reduces` execute
the equation once per shard with everything outside the shard replaced: by other data for
a factor that passes (no result of the shard may change), by the operation's identity for
a factor that reduces (the combined results must be the unsharded ones). No shape
parameter needs adjusting, so any equation will do.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.ir import manual_calls
from autoshard.ir.graph import CALLS, Aval, Eqn
from autoshard.rules import FactorKind, ShardingRule
from autoshard.rules.control_flow import BODIES
from autoshard.rules.rule import Dims

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Traced:
    """One equation: the view that rules see, and a function that executes it."""

    eqn: Eqn
    run: Callable[..., tuple[Any, ...]]

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.eqn.operands]


def equations(fn: Callable[..., Any], *args: Any) -> Iterator[Traced]:
    """Every equation of a function, calls and loop bodies opened; `args` may be abstract."""
    yield from _walk(jax.make_jaxpr(fn)(*args))


def executions(fn: Callable[..., Any], *args: Any) -> Iterator[tuple[Traced, list[Any]]]:
    """Every equation outside of loops with the values of its operands, while the function runs."""
    closed = jax.make_jaxpr(fn)(*args)
    yield from _execute(closed, list(jax.tree.leaves(args)))


def _walk(jaxpr: Any) -> Iterator[Traced]:
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in BODIES:
            for body in _jax.sub_jaxprs(eqn.params):
                yield from _walk(body)
        else:
            yield Traced(_view(eqn), _runner(eqn))


def _execute(closed: Any, args: list[Any]) -> Generator[tuple[Traced, list[Any]], None, list[Any]]:
    jaxpr = _jax.open_jaxpr(closed)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*_jax.consts_of(closed), *args], strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if _jax.is_literal(atom) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            results = yield from _execute(eqn.params[CALLS[eqn.primitive.name]], operands)
        else:
            traced = Traced(_view(eqn), _runner(eqn))
            if eqn.primitive.name not in BODIES:
                yield traced, operands
            results = traced.run(*operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _view(eqn: Any) -> Eqn:
    operands, results = (
        tuple(Aval(tuple(var.aval.shape), var.aval.dtype) for var in side) for side in (eqn.invars, eqn.outvars)
    )
    return Eqn(primitive=eqn.primitive.name, operands=operands, results=results, params=eqn.params)


def _runner(eqn: Any) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        out = eqn.primitive.bind(*operands, **eqn.params)
        return tuple(out) if eqn.primitive.multiple_results else (out,)

    return run


def splits(rule: ShardingRule) -> Iterator[tuple[int, int]]:
    """(factor, number of shards) for every factor that can be split evenly in 2 or 3."""
    for f, factor in enumerate(rule.factors):
        shards = next((n for n in (2, 3) if factor.size and factor.size % n == 0), None)
        if shards and factor.kind is not FactorKind.REPLICATE:
            yield f, shards


def collectives(traced: Traced, rule: ShardingRule, shards: Mapping[int, int]) -> list[str] | None:
    """Kinds of the collectives in the compiled program, results of reductions asked whole.

    Each factor in `shards` is split over a mesh axis of that size, and before it the
    factors major of it, fully; None if that takes more devices than there are.
    """
    before = [f for factor in shards for f in majors(rule, factor) if f not in shards]
    sizes = {**{f: rule.factors[f].size for f in before}, **shards}
    if prod(sizes.values()) > jax.device_count():
        return None
    mesh = Mesh(
        np.array(jax.devices()[: prod(sizes.values())]).reshape(tuple(sizes.values())), tuple(f"f{f}" for f in sizes)
    )
    kept = [f for f in sizes if rule.factors[f].kind is not FactorKind.REDUCTION]

    def sharding(dims: Dims, split: Collection[int]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[tuple(f"f{f}" for f in dim if f in split) or None for dim in dims]))

    operands = tuple(sharding(dims, sizes) for dims in rule.operands)
    results = tuple(sharding(dims, kept) for dims in rule.results)
    compiled = jax.jit(
        emitted(traced, operands, results),
        in_shardings=operands,
        out_shardings=results,
        keep_unused=True,
    )
    return COLLECTIVE.findall(compiled.lower(*traced.abstract()).compile().as_text() or "")


def emitted(
    traced: Traced, operands: Sequence[NamedSharding], results: Sequence[NamedSharding]
) -> Callable[..., tuple[Any, ...]]:
    """The equation as a plan runs it at these layouts: as it is, or what is opaque on each device's part."""
    if not manual_calls.is_opaque(traced.eqn.primitive, traced.eqn.params):
        return traced.run
    (eqn,) = jax.make_jaxpr(traced.run)(*traced.abstract()).eqns
    specs = [sharding.spec for sharding in (*operands, *results)]
    return lambda *values: tuple(manual_calls.call(eqn, values, operands[0].mesh, specs))


def majors(rule: ShardingRule, factor: int) -> list[int]:
    """Factors that must be split fully before `factor`, because somewhere they lie major of it."""
    found: list[int] = []
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            for f in dim[: dim.index(factor)] if factor in dim else ():
                found += [g for g in (*majors(rule, f), f) if g not in found]
    return found


def mask(rule: ShardingRule, dims: Dims, factor: int, shards: int, shard: int) -> np.ndarray:
    """Which elements of a value belong to one shard of a factor; all, if it lacks the factor."""
    inside = np.ones([prod(rule.factors[f].size for f in dim) for dim in dims], bool)
    for d, dim in enumerate(dims):
        if factor in dim:
            minor = prod(rule.factors[f].size for f in dim[dim.index(factor) + 1 :])
            size = rule.factors[factor].size
            coordinate = np.arange(inside.shape[d]) // minor % size
            kept = coordinate // (size // shards) == shard
            inside &= kept.reshape([-1 if i == d else 1 for i in range(inside.ndim)])
    return inside


def contains(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


def check_passes(
    traced: Traced, rule: ShardingRule, factor: int, shards: int, args: list[Any], others: list[Any]
) -> None:
    """A shard's results do not change with what the other shards hold."""
    whole = traced.run(*args)
    for shard in range(shards):
        local = [
            jnp.where(mask(rule, dims, factor, shards, shard), mine, other) if contains(dims, factor) else mine
            for dims, mine, other in zip(rule.operands, args, others, strict=True)
        ]
        for dims, got, expected in zip(rule.results, traced.run(*local), whole, strict=True):
            inside = mask(rule, dims, factor, shards, shard)
            close(data(got)[inside], data(expected)[inside])


def check_reduces(traced: Traced, rule: ShardingRule, factor: int, shards: int, args: list[Any]) -> None:
    """The combined partial results of all shards are the unsharded results."""
    operation = rule.factors[factor].reduction
    scatters = traced.eqn.primitive.startswith("scatter")
    partials: list[list[Any]] = []
    for shard in range(shards):
        local: list[Any] = []
        for i, (dims, arg) in enumerate(zip(rule.operands, args, strict=True)):
            kept = mask(rule, dims, factor, shards, shard)
            if scatters and i == 0 and not contains(dims, factor):
                kept[...] = shard == 0  # what a scatter adds to counts once
            if scatters and i == 1:
                kept[...] = True  # indices are no summands
            local.append(np.where(kept, arg, identity(operation, arg.dtype)))
        partials.append([data(out) for out in traced.run(*local)])
    for expected, *parts in zip(traced.run(*args), *partials, strict=True):
        close(reduce(COMBINE[operation], parts), data(expected))


def check_linear(traced: Traced, operands: frozenset[int], args: list[Any], others: list[Any]) -> None:
    """Partial sums flow through a set of operands: f(a) + f(b) = f(a + b)."""
    pairs = list(enumerate(zip(args, others, strict=True)))
    left = traced.run(*[other if i in operands else arg for i, (arg, other) in pairs])
    right = traced.run(*[arg - other if i in operands else arg for i, (arg, other) in pairs])
    for a, b, expected in zip(left, right, traced.run(*args), strict=True):
        close(data(a) + data(b), data(expected))


def close(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal up to the rounding of the type that was computed in; NaN equals NaN."""
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
        return
    tolerance = 2e-2 if expected.dtype.itemsize < 4 else 1e-4
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    got, expected = got.astype(wide), expected.astype(wide)
    largest = np.abs(np.where(np.isfinite(expected), expected, 1.0)).max(initial=1.0)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * float(largest))


def identity(operation: str, dtype: Any) -> np.ndarray:
    """The value that does not change what it is combined with."""
    if operation in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if operation == "prod":
        return np.ones((), dtype)
    if operation == "and":
        return np.array(True) if dtype.kind == "b" else np.array(-1).astype(dtype)
    if dtype.kind == "f":
        return np.array(-np.inf if operation == "max" else np.inf, dtype)
    limits = np.iinfo(dtype)
    return np.array(limits.min if operation == "max" else limits.max, dtype)


def data(value: Any) -> np.ndarray:
    """The value as a numpy array; keys as their words."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)
