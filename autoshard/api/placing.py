"""Placing: pytrees, or each process's part of them → arrays in the layouts of a plan's argument.

Paths, shapes and dtypes are compared with the planned ones.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.errors import PlanMismatchError
from autoshard.ir.paths import dotted
from autoshard.planner.record import Leaf


def checked(value: Any, arg: str, planned: Sequence[Leaf], *, shapes: bool = True) -> tuple[list[Any], Any]:
    """The leaves and the tree of a value that is to be argument `arg`.

    Args:
      value: a pytree of arrays, scalars or their shapes.
      arg: the argument's name.
      planned: its leaves in the plan.
      shapes: whether shapes are compared, too.

    Raises:
      PlanMismatchError: a path, dtype or shape is not the plan's.
    """
    found = jax.tree_util.tree_leaves_with_path(value)
    have = [dotted(arg + jax.tree_util.keystr(path)) for path, _ in found]
    want = [dotted(leaf.path) for leaf in planned]
    if have != want:
        lacks = [path for path in want if path not in set(have)]
        besides = [path for path in have if path not in set(want)]
        text = f"{len(have)} leaves given; the plan's {arg!r} has {len(want)}"
        text += f"; it has {lacks[0]}, which was not given" if lacks else ""
        text += f"; {besides[0]} was given, which it does not have" if besides else ""
        raise PlanMismatchError(text if lacks or besides else f"{text}, in another order")
    for (_, leaf), plan in zip(found, planned, strict=True):
        aval = _jax.shaped(leaf)
        if str(aval.dtype) != plan.dtype or (shapes and aval.shape != plan.shape):
            raise PlanMismatchError(
                f"{dotted(plan.path)} is {plan.dtype}{list(plan.shape)} in the plan, "
                f"got {aval.dtype}{list(aval.shape)}: give that, or plan again"
            )
    return [leaf for _, leaf in found], jax.tree.structure(value)


def put(value: Any, arg: str, planned: Sequence[Leaf], mesh: Mesh) -> Any:
    """A pytree in the layout of argument `arg`."""
    _, tree = checked(value, arg, planned)
    return jax.device_put(value, jax.tree.unflatten(tree, [leaf.sharding(mesh) for leaf in planned]))


def born(init: Callable[..., Any], args: Sequence[Any], arg: str, planned: Sequence[Leaf], mesh: Mesh) -> Any:
    """`init(*args)`, computed in the layout of argument `arg`."""
    _, tree = checked(jax.eval_shape(init, *args), arg, planned)
    shardings = jax.tree.unflatten(tree, [leaf.sharding(mesh) for leaf in planned])
    return jax.jit(init, out_shardings=shardings)(*args)


def put_local(value: Any, arg: str, planned: Sequence[Leaf], mesh: Mesh) -> Any:
    """Like `put`, but each process gives all of a leaf, or its equal part along one dimension.

    The parts follow one another in the order of the processes, whatever the layout. If a process needs
    another's part, the parts are put together over the processes.

    Raises:
      PlanMismatchError: a leaf is neither, or a whole leaf differs between processes.
    """
    owners = sorted({device.process_index for device in mesh.devices.flat})
    if len(owners) == 1:
        return put(value, arg, planned, mesh)
    leaves, tree = checked(value, arg, planned, shapes=False)
    along = [_split_dimension(leaf, plan, len(owners)) for leaf, plan in zip(leaves, planned, strict=True)]
    _compare([leaf for leaf, d in zip(leaves, along, strict=True) if d is None], arg, owners)
    placed = [_assembled(leaf, plan, d, mesh, owners) for leaf, plan, d in zip(leaves, planned, along, strict=True)]
    return jax.tree.unflatten(tree, placed)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _split_dimension(leaf: Any, plan: Leaf, processes: int) -> int | None:
    """The dimension along which each process has its part; None if it has the whole leaf."""
    shape = _jax.shaped(leaf).shape
    if shape == plan.shape:
        return None
    differs = [d for d, (mine, whole) in enumerate(zip(shape, plan.shape, strict=False)) if mine != whole]
    if len(shape) != len(plan.shape) or len(differs) != 1 or shape[differs[0]] * processes != plan.shape[differs[0]]:
        raise PlanMismatchError(
            f"{dotted(plan.path)} is {plan.dtype}{list(plan.shape)} in the plan, got {list(shape)} of it here: each of "
            f"{processes} processes gives all of it, or an equal part along one dimension; plan for the shapes of all "
            "processes together"
        )
    return differs[0]


def _compare(whole: Sequence[Any], arg: str, owners: Sequence[int]) -> None:
    """Raises PlanMismatchError, in every process, unless all have the same values."""
    own = checksums(whole)
    if not own:
        return
    every = np.asarray(multihost_utils.process_allgather(np.array(own, np.uint32))).reshape(len(owners), -1)
    if (every != every[0]).any():
        raise PlanMismatchError(
            f"each process gives all of {arg!r}, in the planned shapes, but not the same values: it was planned for "
            "one process's part; plan for the shapes of all processes together, such as "
            f"jax.ShapeDtypeStruct(({len(owners)} * part, …), dtype)"
        )


def checksums(leaves: Sequence[Any]) -> list[int]:
    """Of the leaves that this process has whole."""
    return [zlib.crc32(np.ascontiguousarray(_data(leaf)).tobytes()) for leaf in leaves if not _is_global(leaf)]


def put_whole(leaf: Any, sharding: NamedSharding) -> Any:
    """A leaf in a layout: an array of all devices, or values of which every process has all, and has the same."""
    extended = jax.numpy.issubdtype(_jax.shaped(leaf).dtype, jax.dtypes.extended)
    if _is_global(leaf) or sharding.is_fully_addressable or extended:
        return jax.device_put(leaf, sharding)
    data = _data(leaf)
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def _data(leaf: Any) -> Any:
    """A leaf's values on the host (a key's data)."""
    dtype = _jax.shaped(leaf).dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, dtype)


def _assembled(leaf: Any, plan: Leaf, along: int | None, mesh: Mesh, owners: Sequence[int]) -> Any:
    """A global array from the whole leaf, or from each process's part along one dimension."""
    sharding = plan.sharding(mesh)
    if along is None:
        return put_whole(leaf, sharding)
    data = _data(leaf)
    size = data.shape[along]
    start = owners.index(jax.process_index()) * size

    def piece(index: Any) -> Any:
        low, high, _ = index[along].indices(plan.shape[along])
        return data[(*index[:along], slice(low - start, high - start), *index[along + 1 :])]

    if all(
        owners.index(device.process_index) * size <= low and high <= (owners.index(device.process_index) + 1) * size
        for device, index in sharding.devices_indices_map(plan.shape).items()
        for low, high, _ in [index[along].indices(plan.shape[along])]
    ):
        return jax.make_array_from_callback(plan.shape, sharding, piece)
    devices = sorted(mesh.devices.flat, key=lambda device: owners.index(device.process_index))
    by_process = Mesh(np.array(devices).reshape(len(owners), -1), ("process", "device"))
    parts = NamedSharding(by_process, PartitionSpec(*(None,) * along, "process"))
    return jax.device_put(jax.make_array_from_callback(plan.shape, parts, piece), sharding)
