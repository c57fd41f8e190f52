"""Named shardings: a user's NamedShardings also name a mesh and a memory: both are kept, or refused.

A plan lays everything over one mesh, in the devices' own memory. The mesh of a given
sharding becomes the plan's, unless the user has named another. Values elsewhere (in the
host's memory, on other devices, over a mesh of another shape) are refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from autoshard import _jax
from autoshard.backends.devices import MeshLike, Target
from autoshard.errors import MeshError, SpecError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, DEVICE_PUT
from autoshard.ir.trace import Traced
from autoshard.planner.requested_shardings import is_sharding

_DEVICE = "device"


class OtherMeshError(SpecError):
    """A sharding is over `mesh`, and not over the plan's mesh."""

    def __init__(self, what: str, mesh: Mesh | AbstractMesh, planned: str) -> None:
        self.what, self.mesh, self.planned = what, mesh, planned
        super().__init__(
            f"{what} is over the mesh {_text(mesh)}, the plan over {planned}: "
            "pass that mesh as mesh=, or constrain to a layout over the plan's"
        )

    def __reduce__(self) -> tuple[type, tuple[str, Mesh | AbstractMesh, str]]:
        return type(self), (self.what, self.mesh, self.planned)


def mesh_of(*shardings: Any) -> Mesh | None:
    """The mesh that NamedShardings in these pytrees are over; None if there is none.

    Raises:
      SpecError: there are several.
    """
    found = [s.mesh for s in _named(shardings) if isinstance(s.mesh, Mesh)]
    for other in found[1:]:
        if not _same(other, found[0]):
            raise SpecError(
                f"the shardings are over several meshes, {_text(found[0])} and {_text(other)}: a plan has one mesh"
            )
    return found[0] if found else None


def on_mesh(mesh: MeshLike, *shardings: Any) -> MeshLike:
    """The mesh to plan on: the shardings' own where the user names none, or its shape alone."""
    own = mesh_of(*shardings)
    if own is None:
        return mesh
    asked = _jax.context_mesh() if mesh is None else mesh
    if asked is None:
        return own
    if isinstance(asked, Mesh):
        if not _same(asked, own):
            raise OtherMeshError("a sharding", own, _text(asked))
        return mesh
    shape = dict(asked) if not isinstance(asked, AbstractMesh) else dict(asked.shape)
    if list(shape.items()) != list(own.shape.items()):
        raise OtherMeshError("a sharding", own, str(MeshAxes.of(shape)))
    return own


def check(place: Target, shardings: Any, what: str) -> None:
    """Raises a SpecError where a sharding in a pytree cannot be kept on a place."""
    for sharding in _named([shardings]):
        _check(sharding, place, what)


def check_program(traced: Traced, place: Target) -> None:
    """Raises a SpecError where a sharding in the program cannot be kept on a place, or a result is not on devices."""
    lines = _jax.SourceLines()
    for eqn in _jax.equations(traced.jaxpr):
        constraint = eqn.primitive.name == CONSTRAINT
        if not constraint and eqn.primitive.name != DEVICE_PUT:
            continue
        name = "with_sharding_constraint" if constraint else "device_put"
        for wish in [eqn.params["sharding"]] if constraint else eqn.params["devices"]:
            if isinstance(wish, NamedSharding):
                _check(wish, place, f"{name} at {lines(eqn)}")
            elif isinstance(wish, Sharding | jax.Device):
                raise SpecError(f"{name} at {lines(eqn)}: {wish} is no layout over the mesh {place.axes}")
    for atom, path in zip(_jax.open_jaxpr(traced.jaxpr).outvars, traced.out_paths, strict=True):
        if _in_host(atom.aval):
            raise SpecError(
                f"the result{path and ' '}{path} lies in the host's memory; a plan lays everything in the devices': "
                "return it from there, and move it with jax.device_put outside"
            )


def check_arguments(values: Sequence[Any], names: Sequence[str]) -> None:
    """Raises a SpecError for an argument in the host's memory."""
    for value, name in zip(values, names, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
            if kind is not None and kind.endswith("_host") and not _is_default(kind, leaf.sharding):
                raise SpecError(
                    f"{name}{jax.tree_util.keystr(path)} lies in memory of the kind {kind!r}; a plan lays everything "
                    "in the devices' own: move it with jax.device_put(…, jax.memory.Space.Device) first"
                )


def _check(sharding: NamedSharding, place: Target, what: str) -> None:
    mesh, kind = sharding.mesh, sharding.memory_kind
    if kind not in (None, _DEVICE) and not _is_default(kind, sharding):
        raise SpecError(
            f"{what}: {sharding.spec} in memory of the kind {kind!r}; a plan lays everything in devices' own"
        )
    if mesh.empty:
        return
    if list(mesh.shape.items()) != list(place.axes.shape.items()):
        raise OtherMeshError(what, mesh, str(place.axes))
    if isinstance(mesh, Mesh):
        try:
            planned = place.device_mesh()
        except MeshError:  # planned for devices that are not here
            return
        if not np.array_equal(planned.devices, mesh.devices):
            raise OtherMeshError(what, mesh, _text(planned))


def _is_default(kind: str, sharding: Any) -> bool:
    """Whether it is the memory that a sharding's devices use by themselves."""
    devices = (
        getattr(sharding, "device_set", None) if not isinstance(getattr(sharding, "mesh", None), AbstractMesh) else None
    )
    return bool(devices) and next(iter(devices)).default_memory().kind == kind


def _in_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _same(a: Mesh, b: Mesh) -> bool:
    """Whether two meshes have the same axes over the same devices; types of axes do not count."""
    return list(a.shape.items()) == list(b.shape.items()) and np.array_equal(a.devices, b.devices)


def _text(mesh: Mesh | AbstractMesh) -> str:
    shape = str(MeshAxes.of(dict(mesh.shape)))
    return shape if isinstance(mesh, AbstractMesh) else f"{shape} of devices {[d.id for d in mesh.devices.flat]}"


def _named(shardings: Iterable[Any]) -> list[NamedSharding]:
    return [s for s in jax.tree.leaves(list(shardings), is_leaf=is_sharding) if isinstance(s, NamedSharding)]
