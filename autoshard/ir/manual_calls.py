"""Manual calls: calls that no partitioner splits inside, run on each device's part of their operands.

The body of a `shard_map` is such a part already, at the layouts that its author gives.

A convolution in groups is another: XLA's partitioner misreads its splits (`ir.partitioner_faults`). On a
part of the groups it is the same convolution with fewer of them; on a part of the input
features it makes a part of a sum. So is a Fourier transform: XLA gathers its
batch, and crashes if its transformed dimensions are split.

A `pallas_call` walks a grid, block by block: where an axis of the grid walks over dimensions in
equal parts (`autoshard.ir.block_maps` proves it), a device can walk one part of it, over its part of those
dimensions: the same kernel with a shorter grid.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import _jax
from autoshard.errors import PlanMismatchError, SpecError
from autoshard.ir.block_maps import DimRef, named, walks
from autoshard.ir.graph import Eqn
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONVOLUTION, FFT, PALLAS


def is_opaque(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an equation runs on each device's part of its operands, at the planned layouts."""
    return primitive in (PALLAS, FFT) or (primitive == CONVOLUTION and in_groups(params))


def in_groups(params: Mapping[str, Any]) -> bool:
    """Whether a convolution has groups of features or of the batch."""
    return params["feature_group_count"] * params["batch_group_count"] > 1


def localized(params: Mapping[str, Any], pieces: Mapping[DimRef, int]) -> dict[str, Any]:
    """The parameters of a `pallas_call` that runs on one piece of each operand and result.

    Args:
      params: the parameters of the whole call.
      pieces: driven place → number of pieces, the same for all places of one grid axis.

    Raises:
      PlanMismatchError: the block maps do not prove that the pieces can be walked each on its own.
    """
    grid = params["grid_mapping"]
    if all(count == 1 for count in pieces.values()):
        return dict(params)
    split = _split(params, pieces)
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


def _split(params: Mapping[str, Any], pieces: Mapping[DimRef, int]) -> dict[int, int]:
    """Into how many parts each axis of the grid is cut."""
    walked = walks(params)
    split: dict[int, int] = {}
    for place, count in pieces.items():
        by = walked.driven.get(place)
        if count > 1 and (by is None or by.parts % count or split.setdefault(by.axis, count) != count):
            raise PlanMismatchError(
                f"{named(params, place)} of a kernel is split in {count}, which its grid does not allow; plan again"
            )
    for place, by in walked.driven.items():
        if pieces.get(place, 1) != split.get(by.axis, 1):
            raise PlanMismatchError(
                f"{named(params, place)} of a kernel is not split as the rest of what axis {by.axis} of its grid "
                "walks over; plan again"
            )
    return split


def estimate(eqn: Eqn) -> Any:
    """A kernel's own `cost_estimate`, with FLOPs; None if it has none."""
    found = eqn.params.get("cost_estimate")
    return found if found is not None and found.flops else None


def manual_layouts(eqn: Eqn, mesh: MeshAxes) -> list[Layout]:
    """The layouts of a `shard_map`'s operands, then results, on a mesh without axes of size 1.

    Raises:
      SpecError: it is over another mesh, or splits a dimension over axes in another order than the mesh's.
    """
    own = MeshAxes.of({name: size for name, size in dict(eqn.params["mesh"].shape).items() if size > 1})
    if own != dataclasses.replace(mesh, groups=None):
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
    """An opaque equation inside `shard_map`: each device on its part of the operands.

    Args:
      eqn: JAX's equation.
      operands: whole values.
      mesh: with Auto axes.
      specs: one per operand, then one per result.
    """
    run = {CONVOLUTION: _convolve, FFT: _transform}.get(eqn.primitive.name, _run_kernel)
    return run(eqn, operands, mesh, specs)


def _run_kernel(eqn: Any, operands: Sequence[Any], mesh: Any, specs: Sequence[PartitionSpec]) -> list[Any]:
    sizes = dict(mesh.shape)
    pieces = {
        (value, d): prod(sizes[axis] for axis in _axes(entry))
        for value, spec in enumerate(specs)
        for d, entry in enumerate(spec)
        if entry is not None
    }
    params = localized(eqn.params, pieces)

    def local(*parts: Any) -> list[Any]:
        if params["interpret"]:  # the interpreter binds the kernel's own equations
            return _jax.bind(eqn, _on_present_mesh(params), parts)
        return _jax.bind(eqn, params, parts)

    count = len(operands)
    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs[:count]), out_specs=list(specs[count:]), check_vma=False)
    return list(run(*operands))


def _on_present_mesh(params: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's parameters whose equations bind on the mesh that is set now, those of its index maps, too."""
    grid = params["grid_mapping"]
    mappings = tuple(
        dataclasses.replace(mapping, index_map_jaxpr=_jax.on_present_mesh(mapping.index_map_jaxpr))
        for mapping in grid.block_mappings
    )
    body = _jax.on_present_mesh(params["jaxpr"])
    return {**params, "jaxpr": body, "grid_mapping": dataclasses.replace(grid, block_mappings=mappings)}


def _convolve(eqn: Any, operands: Sequence[Any], mesh: Any, specs: Sequence[PartitionSpec]) -> list[Any]:
    """A convolution in groups: the parts of a sum are stacked and summed outside, where they may wait as a dot's do."""
    params, (_, kernel, out) = eqn.params, specs
    features = params["dimension_numbers"].rhs_spec[0]
    parts = prod(mesh.shape[axis] for axis in _axes(kernel[features] if features < len(kernel) else None))
    groups = prod(params[key] for key in _GROUPS)
    if groups % parts:
        raise PlanMismatchError(
            f"the plan runs a convolution of {groups} groups in {parts} parts, which do not divide them: plan again"
        )
    split = {axis for spec in specs[:2] for entry in spec for axis in _axes(entry)}
    summed = tuple(axis for axis in mesh.axis_names if axis in split - {a for entry in out for a in _axes(entry)})

    kept = {key: params[key] for key in _OF_CONVOLUTION}
    kept.update((key, params[key] // parts) for key in _GROUPS if params[key] > 1)

    def local(image: Any, kernel: Any) -> Any:
        part = jax.lax.conv_general_dilated(image, kernel, **kept)
        return part[None] if summed else part

    run = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=PartitionSpec(summed, *out) if summed else out
    )
    result = run(*operands)
    return [jax.lax.reduce_sum(result, (0,)) if summed else result]


def _transform(eqn: Any, operands: Sequence[Any], mesh: Any, specs: Sequence[PartitionSpec]) -> list[Any]:
    """A Fourier transform of each device's part of the batch."""
    source, target = specs

    def local(part: Any) -> Any:
        return _jax.bind(eqn, eqn.params, [part])[0]

    return [jax.shard_map(local, mesh=mesh, in_specs=source, out_specs=target)(*operands)]


_GROUPS = ("feature_group_count", "batch_group_count")
_OF_CONVOLUTION = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("precision", "preferred_element_type"),
)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
