"""Hardware: a chip's numbers with their sources, and the topology that joins its devices."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import TypeAlias

from cost_models.errors import MeshFitError, TopologyError, UnknownHardwareError, UnknownNumberError
from cost_models.machines import catalogue
from cost_models.machines.alpha_beta import Kind
from cost_models.machines.amounts import count
from cost_models.machines.hardware_file import COMPILER_FACTS, Chip, Number, parse_chip
from cost_models.machines.machine import Machine
from cost_models.machines.placement import place
from cost_models.machines.topology import Topology, examples, explain_core_count, parse_topology, smallest_topology

MOST_NESTED = 7  # axes whose every order is tried

Exchanged: TypeAlias = tuple[Kind, tuple[str, ...], float, float]
"""One collective of a step: kind, mesh axes, logical bytes per device, how often."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices of one kind and the links between them.

    Attributes:
        chip: Numbers of one device and of its interconnects.
        topology: Which devices there are, and how they are linked.
        note: What was assumed for the user, or "".
        order: Mesh axes from outermost to innermost, where they are not to lie as the
            mesh lists them; see `nested`.
        file: The path of the user's file that the chip was read from, or "".
    """

    chip: Chip
    topology: Topology
    note: str = ""
    order: tuple[str, ...] = ()
    file: str = ""

    @property
    def name(self) -> str:
        """Canonical spelling: `"h100:2x4"`; a user's file after what it is based on: `"h100/my-h100:2x4"`."""
        base = f"{self.chip.based_on}/" if self.chip.based_on else ""
        return f"{base}{self.chip.name}:{self.topology.name}"

    @property
    def spec(self) -> str:
        """What `hardware` reads as this: `"h100:2x4"`, `"my-h100.json:2x4"`."""
        return f"{self.file or self.chip.name}:{self.topology.name}"

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.topology.devices

    @property
    def numbers(self) -> dict[str, Number]:
        """Every number by name; those of interconnects as `domain.hop_s`."""
        found = dict(self.chip.numbers)
        for role, link in self.chip.links.items():
            found |= {f"{role}.{key}": number for key, number in link.numbers.items()}
        return found

    def number(self, key: str) -> float:
        """One number, SI units.

        Raises:
            UnknownNumberError: This hardware's file does not state it.
        """
        numbers = self.numbers
        if key not in numbers:
            raise UnknownNumberError(key, self.name, tuple(numbers))
        return numbers[key].value

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.number("hbm_bytes"))

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes that a program may fill, after the runtime's own share."""
        return int(self.number("hbm_bytes") * self.number("usable_memory_fraction"))

    @property
    def memory_terms(self) -> tuple[tuple[str, int], ...]:
        """The sum behind `usable_memory_bytes`, as (what, bytes) rows."""
        kept = self.usable_memory_bytes - self.memory_bytes
        return (
            ("memory of one device", self.memory_bytes),
            (self.chip.numbers["usable_memory_fraction"].source, kept),
            ("usable", self.usable_memory_bytes),
        )

    @property
    def provenance(self) -> dict[str, str]:
        """Number → who says so."""
        return {key: number.source for key, number in self.numbers.items()}

    @property
    def digest(self) -> str:
        """Hash of every number and table and of the topology: equal digests price equally."""
        tables = {
            role: [(t.kind, t.devices, t.nbytes.tolist(), t.seconds.tolist()) for t in link.tables]
            for role, link in self.chip.links.items()
        }
        links = {role: link.medium for role, link in self.chip.links.items()}
        dims = [(d.size, d.level, d.medium, d.wraps) for d in self.topology.dimensions]
        values = {key: number.value for key, number in self.numbers.items()}
        unusual = {name: self.chip.fact(name).value for name in COMPILER_FACTS if name in self.chip.compiler}
        usual = replace(self.chip, compiler={})
        unusual = {name: value for name, value in unusual.items() if value != usual.fact(name).value}
        more = [x for x in (self.order, unusual) if x]
        text = json.dumps([values, tables, links, dims, *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replaced(self, source: str, **values: float) -> "Hardware":
        """The same hardware with other numbers; `domain__hop_s=…` reaches an interconnect.

        Args:
            source: Why these values; becomes their provenance.
            values: Number name → value in SI units, `__` for the dot.

        Raises:
            HardwareFileError: A number does not exist or is out of range.
        """
        stated = {key.replace("__", "."): {"value": value, "source": source} for key, value in values.items()}
        document = {
            "schema": "hardware/1",
            "kind": "chip",
            "name": self.chip.name,
            "based_on": self.chip.name,
            "numbers": stated,
        }
        changed = parse_chip(document, f"{self.chip.name}, replaced", lambda _: self.chip, catalogue.interconnect)
        return replace(self, chip=replace(changed, based_on=self.chip.based_on))

    def place(self, mesh: Mapping[str, int], order: Sequence[str] | None = None) -> Machine:
        """Lay a mesh (axis name → size, major to minor) on this hardware.

        By default the last axis lies innermost, on the fastest links; `order`, or this
        hardware's own, names the axes from outermost to innermost instead. See `placement`.

        Raises:
            MeshFitError: The mesh does not fill the topology exactly.
        """
        return Machine(self.chip, place(self.topology, mesh, order or self.order or None))

    def nested(self, order: Sequence[str]) -> "Hardware":
        """The same hardware, on which mesh axes lie in this order, outermost to innermost."""
        return replace(self, order=tuple(order))

    def best_order(self, mesh: Mapping[str, int], exchanged: Iterable[Exchanged]) -> tuple[str, ...]:
        """The nesting of mesh axes, outermost to innermost, under which these collectives take the least time.

        Args:
            mesh: Axis name → size, major to minor.
            exchanged: `(kind, axes, logical bytes per device, how often)`.

        Raises:
            MeshFitError: The mesh does not fit, or has more than `MOST_NESTED` axes.
        """
        rows = tuple(exchanged)
        if len(mesh) > MOST_NESTED:
            raise MeshFitError(f"a mesh of {len(mesh)} axes has too many orders to compare: {MOST_NESTED} is the most")

        def seconds(machine: Machine) -> float:
            return sum(times * float(machine.collective_s(kind, axes, nbytes)) for kind, axes, nbytes, times in rows)

        return min(self.placements(mesh), key=seconds).placement.order

    def placements(self, mesh: Mapping[str, int]) -> Iterator[Machine]:
        """Every distinct way to nest the mesh axes, the mesh's own first."""
        seen: set[tuple[int, ...]] = set()
        for inner_first in permutations(reversed(tuple(mesh))):
            machine = self.place(mesh, tuple(reversed(inner_first)))
            key = tuple(machine.device_order.ravel().tolist())
            if key not in seen:
                seen.add(key)
                yield machine


def hardware(spec: str | Path, devices: int | None = None) -> Hardware:
    """Hardware by name (`"h100:2x4"`, `"tpu-v5p:4x4x8"`, `"cpu:8"`), or from a JSON file.

    Args:
        spec: Chip and topology; a bare chip with `devices`; or the path of a file,
            with or without a topology after the colon.
        devices: For a bare chip: take the smallest usual topology that holds them;
            `.note` then says which. With a topology: checked against it.

    Raises:
        UnknownHardwareError: No such chip; the nearest names are listed.
        TopologyError: No such topology, or it has another number of devices.
        HardwareFileError: The file is malformed.
    """
    if devices is not None:
        devices = count(devices, "a number of devices")
    text = str(spec).strip()
    path, _, topology = text.partition(".json")
    file = f"{path}.json" if text.endswith(".json") or topology.startswith(":") else ""
    if file:
        chip = catalogue.read(file)
        topology = topology.removeprefix(":") or chip.topology
    else:
        name, _, topology = text.partition(":")
        chip = chip_named(name)
    if topology:
        found = Hardware(chip, parse_topology(chip, topology), file=file)
        if devices is not None and devices != found.devices:
            raise TopologyError(f"{found.name} has {found.devices} devices, {devices} were asked for")
        return found
    if devices is None:
        raise TopologyError(f"`{text}` names no topology; write {examples(chip)}, or give the number of devices")
    smallest = parse_topology(chip, smallest_topology(chip, devices))
    note = f"{chip.name}:{smallest.name} is the smallest usual topology of {chip.name} that holds {devices} devices"
    return Hardware(chip, smallest, note, file=file)


def chip_named(name: str) -> Chip:
    """The chip of that name, without a topology: one of the catalogue, or a user's JSON file.

    Raises:
        UnknownHardwareError: No such chip; the nearest names are listed.
        TopologyError: The name is that of a slice, such as `v5p-256`.
        HardwareFileError: The file is malformed.
    """
    if name.endswith(".json"):
        return catalogue.read(name)
    try:
        return catalogue.chip(name)
    except UnknownHardwareError:
        counted = re.fullmatch(r"((?:tpu-?)?v?[0-9]+\w{0,9}?)-([0-9]{1,9})", name.lower().strip())
        if counted is None:
            raise
        chip = catalogue.chip(counted[1])
        raise TopologyError(f"`{name}`: {explain_core_count(chip, int(counted[2]))}") from None
