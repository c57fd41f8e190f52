"""Opaque: calls whose inside no partitioner splits, run on each device's part of their operands.

The body of a `shard_map` is such a part already, at the layouts that its author gives.

A `pallas_call` walks a grid: the index map of each operand and result says which block
a grid point reads or writes. Where a grid axis alone walks over a dimension, block by block, a
device can walk a part of that axis over a part of the dimension: the same kernel with a
shorter grid. Such a dimension is *driven* by the axis. What else the kernel does with its
position (`pl.program_id`) is not visible here; that is what its registered rule answers for.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.graph import Eqn
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes

PALLAS, MANUAL = "pallas_call", "shard_map"

Place = tuple[int, int]  # (operands then results of the call, dimension)


@dataclasses.dataclass(frozen=True, slots=True)
class Driven:
    """A dimension that one axis of the grid walks over in blocks."""

    axis: int
    blocks: int
    block_size: int


def driven(params: Mapping[str, Any]) -> dict[Place, Driven]:
    """The driven dimensions of a `pallas_call`, by place; none if its grid is only known at run time."""
    grid = params["grid_mapping"]
    if not all(isinstance(size, int) for size in grid.grid):
        return {}
    found: dict[Place, Driven] = {}
    for position, mapping in enumerate(grid.block_mappings):
        index_map = _jax.open_jaxpr(mapping.index_map_jaxpr)
        for d, (block, index) in enumerate(zip(mapping.block_shape, index_map.outvars, strict=True)):
            axis = next((g for g, v in enumerate(index_map.invars[: len(grid.grid)]) if v is index), None)
            size = _block_size(block)
            if axis is not None and size and size * grid.grid[axis] == mapping.array_aval.shape[d]:
                found[position + grid.num_index_operands, d] = Driven(axis, grid.grid[axis], size)
    return found


def _block_size(block: Any) -> int:
    """Elements per block; 0 for the kinds of block that are not indexed by whole blocks."""
    if isinstance(block, int):
        return block
    kind = type(block).__name__
    return int(block.block_size) if kind == "Blocked" else 1 if kind in ("Squeezed", "Mapped") else 0


def axes_of_all(params: Mapping[str, Any]) -> dict[int, list[Place]]:
    """Grid axis → where it drives a dimension, for the axes that do in every operand and result.

    Only these can be split without a reduction; scalar-prefetch operands do not count.
    """
    grid = params["grid_mapping"]
    places: dict[int, list[Place]] = {}
    for place, dimension in driven(params).items():
        places.setdefault(dimension.axis, []).append(place)
    every = len(grid.block_mappings)
    return {axis: found for axis, found in places.items() if len({value for value, _ in found}) == every}


def localized(params: Mapping[str, Any], pieces: Mapping[Place, int]) -> dict[str, Any]:
    """The parameters of a `pallas_call` for operands and results of which each is a piece.

    Args:
      params: of the whole call.
      pieces: driven place → into how many pieces it is split, all places of one grid axis alike.
    """
    grid = params["grid_mapping"]
    places = driven(params)
    split = {places[place].axis: count for place, count in pieces.items() if count > 1}
    mappings: list[Any] = []
    for position, mapping in enumerate(grid.block_mappings):
        at = position + grid.num_index_operands
        shape = tuple(size // pieces.get((at, d), 1) for d, size in enumerate(mapping.array_aval.shape))
        mappings.append(dataclasses.replace(mapping, array_aval=mapping.array_aval.update(shape=shape)))
    local = dataclasses.replace(
        grid,
        grid=tuple(size // split.get(axis, 1) for axis, size in enumerate(grid.grid)),
        block_mappings=tuple(mappings),
    )
    outs = tuple(
        aval.update(shape=mapping.array_aval.shape)
        for aval, mapping in zip(params["out_avals"], mappings[grid.num_inputs :], strict=True)
    )
    changed = {**params, "grid_mapping": local, "out_avals": outs}
    estimate = params.get("cost_estimate")
    if estimate is not None:
        parts = prod(split.values())
        counts = ("flops", "transcendentals", "bytes_accessed")
        changed["cost_estimate"] = dataclasses.replace(estimate, **{c: getattr(estimate, c) // parts for c in counts})
    return changed


def manual_layouts(eqn: Eqn, mesh: MeshAxes) -> list[Layout]:
    """The layouts of a `shard_map`'s operands, then results, on a mesh without axes of size 1.

    Raises:
      SpecError: it is over another mesh, or splits a dimension over axes in another order than the mesh's.
    """
    own = MeshAxes.of({name: size for name, size in dict(eqn.params["mesh"].shape).items() if size > 1})
    if own != mesh:
        raise SpecError(f"shard_map at {eqn.where} is over the mesh {own}, the plan over {mesh}: plan on the same mesh")
    found: list[Layout] = []
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    for spec, aval in zip(specs, (*eqn.operands, *eqn.results), strict=True):
        dims = [tuple(axis for axis in dim if axis in mesh.names) for dim in Layout.from_spec(spec, aval.ndim).dims]
        if any(list(dim) != sorted(dim, key=mesh.names.index) for dim in dims):
            raise SpecError(f"shard_map at {eqn.where}: {spec} puts axes in another order than the mesh ({mesh})")
        found.append(Layout(tuple(dims)))
    return found


def call(eqn: Any, operands: Sequence[Any], mesh: Any, specs: Sequence[PartitionSpec]) -> list[Any]:
    """A kernel inside `shard_map`: each device on its part of the operands.

    Args:
      eqn: JAX's equation.
      operands: whole values.
      mesh: with Auto axes.
      specs: one per operand, then one per result.
    """
    sizes = dict(mesh.shape)
    pieces = {
        (value, d): prod(sizes[axis] for axis in ((entry,) if isinstance(entry, str) else entry))
        for value, spec in enumerate(specs)
        for d, entry in enumerate(spec)
        if entry is not None
    }
    params = localized(eqn.params, pieces)

    def local(*parts: Any) -> list[Any]:
        if params["interpret"]:  # the interpreter binds the kernel's own equations
            return _jax.bind(eqn, {**params, "jaxpr": _jax.on_present_mesh(params["jaxpr"])}, parts)
        return _jax.bind(eqn, params, parts)

    count = len(operands)
    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs[:count]), out_specs=list(specs[count:]), check_vma=False)
    return list(run(*operands))
