"""Devices: the user's mesh and hardware → mesh axes, hardware, and real devices if there are any."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from numpy.typing import NDArray

import cost_models
from autoshard import _jax, _startup
from autoshard.backends.known_compilers import known
from autoshard.backends.model import CompilerModel
from autoshard.errors import MeshError
from autoshard.ir.mesh import MeshAxes
from cost_models.machines import catalogue

MeshLike = Mesh | AbstractMesh | Mapping[str, int] | None

# JAX's names of chips that the catalogue names otherwise (jax/_src/pallas/mosaic/tpu_info.py).
_TPU_NAMES = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU7x": "TPU v7x"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A logical mesh on hardware.

    Attributes:
      axes: the mesh.
      hardware: its devices.
      machine: the cost model with the mesh placed on them.
      compiler: who compiles for them.
      own: the caller's Mesh, if they gave or set one.
      notes: what was assumed.
    """

    axes: MeshAxes
    hardware: cost_models.Hardware
    machine: cost_models.Machine
    compiler: CompilerModel
    own: Mesh | None = None
    notes: tuple[str, ...] = ()

    @property
    def device_order(self) -> tuple[int, ...]:
        """The physical device at each mesh position, row-major.

        A stage is planned on a part of the machine's axes. It has the order of the first part, in ranks.
        """
        order = np.asarray(self.machine.device_order)
        placed = self.machine.placement.axes
        first = order[tuple(slice(None) if name in self.axes.names else 0 for name in placed)].ravel()
        return (
            tuple(int(i) for i in np.argsort(np.argsort(first))) if first.size < order.size else tuple(map(int, first))
        )

    def device_mesh(self) -> Mesh:
        """A Mesh with Auto axes over real devices, in the order that was priced.

        Raises:
          MeshError: this process does not have that many devices.
        """
        if self.own is not None:
            return auto_twin(self.own)
        return over_devices(self.axes, np.asarray(self.machine.device_order))


def place(mesh: MeshLike, hardware: str | cost_models.Hardware | None) -> Target:
    """Resolves mesh and hardware.

    Args:
      mesh: a Mesh, an AbstractMesh, `{"data": 2, "model": 4}`, or None for the mesh in context.
      hardware: `"h100:4x8"`, a bare chip name, a Hardware, or None to detect it from the devices.

    Raises:
      MeshError: no mesh is given or set, or the hardware cannot hold it.
    """
    if mesh is None:
        mesh = _jax.context_mesh()
    if mesh is None:
        raise MeshError('no mesh: pass mesh={"data": 2, "model": 4} or a Mesh, or call inside `jax.set_mesh(mesh)`')
    own = mesh if isinstance(mesh, Mesh) else None
    axes = MeshAxes.of(dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape))
    notes: list[str] = []
    if hardware is None:
        hardware = detect(
            own.devices.ravel().tolist() if own is not None else _startup.devices()[: axes.size], axes.size
        )
        notes.append(f"hardware detected: {hardware}")
    try:
        found = hardware if isinstance(hardware, cost_models.Hardware) else _read(hardware, axes.size)
        machine = found.place(axes.shape)
    except cost_models.CostModelError as error:
        raise MeshError(str(error)) from error
    if found.note:
        notes.append(found.note)
    compiler = compiler_of(found)
    if compiler.assumed:
        notes.append(f"what {found.chip.name}'s compiler does is assumed: {compiler.assumed}")
    notes += [
        f"axis {axis} lies inside of slices and between them: its collectives are priced as if they were one, and the "
        "compiler makes several; an axis of its own for the slices is priced as it is compiled"
        for axis in sorted(machine.partly_sliced_axes)
    ]
    return Target(
        axes=axes,
        hardware=found,
        machine=machine,
        compiler=compiler,
        own=own,
        notes=tuple(notes),
    )


# GPUs of one server; domains of more (NVL72, UltraServers) join several hosts, as their hardware files say.
_MOST_OF_A_HOST = 8


def hosts_of(target: Target, count: int | None) -> NDArray[np.int64]:
    """The host of each device, in the shape of the mesh: the rank of its process, or where it lies in the hardware.

    Args:
      target: the mesh on hardware.
      count: how many hosts; None: the devices' processes, else the hardware's nodes.

    Raises:
      MeshError: it is not known, or cannot be.
    """
    own, hardware = target.own, target.hardware
    if own is None and _jax.process_store() is not None and len(_startup.devices()) == target.axes.size:
        own = target.device_mesh()
    owners = [] if own is None else [device.process_index for device in own.devices.flat]
    ranks = sorted(set(owners))
    if len(ranks) > 1 and count in (None, len(ranks)):
        return np.array([ranks.index(owner) for owner in owners]).reshape(target.axes.sizes)
    of_files = hardware.chip.links["domain"]
    network = [d.size for d in hardware.topology.dimensions if d.level == "scale_out"]
    if of_files.torus is not None and count != 1:
        raise MeshError(
            f"which chips of {hardware.name} belong to one host is not known without the devices: plan where they are, "
            'or pin the input to the axes between hosts, as in pins={"batch.**": P("data")}'
        )
    several = of_files.numbers["max_devices_count"].value > _MOST_OF_A_HOST and "scale_out" in hardware.chip.links
    if count is None and several:
        raise MeshError(
            f"a domain of {of_files.name} has several hosts: say over how many the input is split (hosts=, --hosts)"
        )
    count = prod(network) if count is None else count
    if hardware.devices % count:
        raise MeshError(f"{hardware.devices} devices of {hardware.name} are not those of {count} hosts of equal size")
    return np.asarray(target.machine.device_order, np.int64) // (hardware.devices // count)


def candidates(devices: int) -> list[dict[str, int]]:
    """One- and two-dimensional meshes over a number of devices, one-dimensional first."""
    pairs = [(d, devices // d) for d in range(2, devices) if devices % d == 0]
    return [{"data": devices}, *({"data": d, "model": m} for d, m in pairs)]


# Predicted steps so near tell nothing apart. Over fewer axes go fewer and larger collectives, and less is left to a
# compiler's scheduler: two plans of mixtral-8x7b's largest batch on 32 H100 (docs/comparing.md) are predicted at 208.0
# ms (2 × 16) and 208.2 (32), and compiled to 213.3 and 208.3.
ALIKE = 1.001


def order(step_s: float, axes: int, best_s: float) -> tuple[bool, int, float]:
    """The key by which plans over so many mesh axes are sorted: of those as good as the best, fewer axes come first."""
    alike = step_s <= ALIKE * best_s
    return not alike, axes if alike else 0, step_s


def devices_of(hardware: str | cost_models.Hardware) -> int:
    """How many devices a hardware has.

    Raises:
      MeshError: a chip without a topology, or no such hardware.
    """
    if isinstance(hardware, cost_models.Hardware):
        return hardware.devices
    if _is_bare(hardware):
        try:
            catalogue.chip(hardware)
        except cost_models.CostModelError as error:
            try:
                cost_models.hardware(hardware)
            except cost_models.CostModelError as better:  # a chip with a count, as `tpu-v5p-64`: which topology that is
                raise MeshError(str(better)) from error
        raise MeshError(
            f'no mesh, and {hardware!r} does not say how many devices: pass mesh={{"data": 2, "model": 4}}, '
            'or a topology, hardware="h100:1x8"'
        )
    try:
        return cost_models.hardware(hardware).devices
    except cost_models.CostModelError as error:
        raise MeshError(str(error)) from error


def _read(spec: str, devices: int) -> cost_models.Hardware:
    return cost_models.hardware(spec, devices if _is_bare(spec) else None)


def _is_bare(spec: str) -> bool:
    """Whether it names a chip alone."""
    return ":" not in spec and not spec.endswith(".json")


def detect(devices: list[Any], count: int) -> str:
    """The catalogue's name for real devices.

    Raises:
      MeshError: there are too few, or their kind is not in the catalogue.
    """
    if len(devices) < count:
        raise MeshError(
            f"the mesh has {count} devices, this process sees {len(devices)}: say which hardware to plan for "
            '(hardware="h100:1x8")'
        )
    if devices[0].platform == "cpu":
        return f"cpu:{count}"
    kind = str(devices[0].device_kind)
    words = re.findall(r"[a-z0-9]+", _TPU_NAMES.get(kind, kind).lower())
    known = [
        chip
        for chip in cost_models.chips()
        if all(any(word in (part, f"{part}gb") for word in words) for part in chip.split("-"))
    ]
    if not known:
        raise MeshError(f"no hardware file for {kind!r}: pass hardware=; known: {', '.join(cost_models.chips())}")
    return max(known, key=len)


def auto_twin(mesh: Mesh) -> Mesh:
    """The same devices and names with Auto axes; moving arrays between the two copies nothing."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def over_devices(axes: MeshAxes, order: np.ndarray, devices: list[Any] | None = None) -> Mesh:
    """A Mesh with Auto axes over real devices in the given physical order."""
    have = _startup.devices() if devices is None else devices
    if len(have) < prod(axes.sizes):
        raise MeshError(
            f"the mesh {axes} needs {axes.size} devices; this process sees {len(have)}\n"
            f"  run it where they are, or plan again for a mesh of {len(have)}; a CPU has more by "
            f'jax.config.update("jax_num_cpu_devices", {axes.size})'
        )
    grid = np.empty(axes.size, object)
    grid[:] = [have[int(i)] for i in order.ravel()]
    return Mesh(grid.reshape(axes.sizes), axes.names, axis_types=(AxisType.Auto,) * axes.ndim)


def abstract(axes: MeshAxes) -> AbstractMesh:
    """An AbstractMesh with Auto axes, for lowering without devices."""
    return AbstractMesh(axes.sizes, axes.names, axis_types=(AxisType.Auto,) * axes.ndim)


def compiler_of(hardware: cost_models.Hardware) -> CompilerModel:
    """Who compiles for a hardware."""
    return known(hardware.chip.platform.value)


def compiler_named(hardware: str) -> CompilerModel:
    """Who compiles for a hardware by its name, as plans have it: that of a user's file after the chip it is based on.

    Raises:
      MeshError: the chip is not of the catalogue.
    """
    name = hardware.partition(":")[0].partition("/")[0]
    try:
        return known(catalogue.chip(name).platform.value)
    except cost_models.CostModelError as error:
        raise MeshError(f"who compiles for {hardware} is not known, for {error}") from error
