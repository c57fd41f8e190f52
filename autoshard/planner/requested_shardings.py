"""Wanted: the user's shardings and path patterns → a spec per input and output leaf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import SpecError
from autoshard.ir.paths import matches
from autoshard.ir.trace import Traced
from autoshard.planner.host_parts import HostParts
from autoshard.planner.record import PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedShardings:
    """The layouts that the user requests, leaf by leaf: specs of inputs and outputs to keep.

    `host_parts`: the inputs of which each host loads its part, and is to keep it; None where there are none.
    """

    inputs: Mapping[int, PartitionSpec]
    outputs: Mapping[int, PartitionSpec]
    donated: frozenset[int]
    host_parts: HostParts | None = None


class Auto:
    """The type of `autoshard.AUTO`: the planner chooses."""

    def __repr__(self) -> str:
        return "AUTO"

    def __reduce__(self) -> str:
        return "AUTO"  # copies and unpickled values are the same object


AUTO: Final = Auto()


def refuse_unreduced(what: str, spec: PartitionSpec) -> None:
    """Raises if a spec says more than how dimensions are split.

    Raises:
      SpecError: it names unreduced or reduced axes.
    """
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise SpecError(f"{what} is {spec}: where sums are left open is the planner's; name the split dimensions alone")


def read_shardings(
    traced: Traced, in_shardings: Any, out_shardings: Any, pins: Mapping[str, PartitionSpec], donated: frozenset[int]
) -> RequestedShardings:
    """Reads `in_shardings`, `out_shardings` (prefixes, as in `jax.jit`) and `pins` (by path pattern).

    Raises:
      SpecError: a pattern matches no input, a pin contradicts a sharding, or something is no sharding.
    """
    inputs = _by_leaf(in_shardings, traced.in_tree, traced.in_paths, "in_shardings")
    outputs = _by_leaf(out_shardings, traced.out_tree, traced.out_paths, "out_shardings")
    taken: set[int] = set()
    for pattern, spec in pins.items():
        found = [i for i, path in enumerate(traced.in_paths) if matches(pattern, path)]
        if not found:
            near = get_close_matches(pattern.lstrip("*."), traced.in_paths, n=3, cutoff=0.2)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise SpecError(f"the pin {pattern!r} matches no input{hint}")
        for i in found:
            if i in taken:
                continue
            taken.add(i)
            if i in inputs and inputs[i] != spec:
                raise SpecError(f"{traced.in_paths[i]}: the pin {pattern!r} says {spec}, in_shardings says {inputs[i]}")
            inputs[i] = spec
    positions = frozenset(i for i, argument in enumerate(traced.argument_of) if argument in donated)
    return RequestedShardings(inputs=inputs, outputs=outputs, donated=positions)


def kept(traced: Traced, record: PlanRecord) -> dict[int, PartitionSpec]:
    """The layouts in another plan of the arguments whose leaves all have their paths, shapes and dtypes there."""
    known = {(leaf.path, leaf.shape, leaf.dtype): leaf.spec for leaf in record.inputs}
    leaves = [(p, a.shape, str(a.dtype)) for p, a in zip(traced.in_paths, traced.in_avals, strict=True)]
    changed = {argument for argument, leaf in zip(traced.argument_of, leaves, strict=True) if leaf not in known}
    return {i: known[leaf] for i, leaf in enumerate(leaves) if traced.argument_of[i] not in changed}


def _by_leaf(shardings: Any, tree: Any, paths: Sequence[str], what: str) -> dict[int, PartitionSpec]:
    if shardings is None or shardings is AUTO:
        return {}
    full = jax.tree.unflatten(tree, list(range(len(paths))))
    try:
        spread = jax.tree.broadcast(shardings, full, is_leaf=is_sharding)
    except ValueError as error:
        raise SpecError(
            f"{what} is no prefix of the {'arguments' if what == 'in_shardings' else 'outputs'}: {error}"
        ) from error
    leaves = jax.tree.structure(full).flatten_up_to(spread)  # a None where there is no leaf is none
    found: dict[int, PartitionSpec] = {}
    for i, leaf in enumerate(leaves):
        if leaf is None or leaf is AUTO:
            continue
        if isinstance(leaf, PartitionSpec | NamedSharding):
            refuse_unreduced(f"{what} at {paths[i]}", leaf if isinstance(leaf, PartitionSpec) else leaf.spec)
        if isinstance(leaf, NamedSharding):
            found[i] = leaf.spec
        elif isinstance(leaf, PartitionSpec):
            found[i] = leaf
        else:
            raise SpecError(f"{what} at {paths[i]}: {leaf!r} is neither a PartitionSpec, a NamedSharding nor AUTO")
    return found


def is_sharding(x: Any) -> bool:
    """Whether something stands for one leaf's sharding, or leaves it open."""
    return x is None or x is AUTO or isinstance(x, NamedSharding | PartitionSpec)
