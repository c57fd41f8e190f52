"""Candidates: the slices of a chip that exist, and the logical meshes that lie on each.

A mesh is an ordered factorization of the number of devices; its last axis lies
innermost, on the fastest links. Meshes of the same axes in another order are *twins*
where no link tells them apart: every group of axes crosses the same links. Twins
differ in the order of axes within one dimension alone, and one of them stands for all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import cost_models
from autoshard.errors import MeshError, SpecError
from cost_models import Hardware, Machine
from cost_models.machines.topology import counts, examples, topologies

AXES = ("data", "fsdp", "model")  # outermost first; two axes take the first and the last
MOST_AXES = len(AXES)

Choice = Mapping[str, Any]  # arguments of a builder


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run: devices, the mesh on them, and the builder's arguments that are varied."""

    hardware: str  # "tpu-v5p:4x8x8", "my-chip.json:1x8"
    chips: int
    mesh: tuple[tuple[str, int], ...]
    choice: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> dict[str, int]:
        """Mesh axis → size, outermost first."""
        return dict(self.mesh)

    @property
    def contest(self) -> tuple[object, ...]:
        """The group in which it is compared: meshes of as many chips of a kind, for the same program."""
        return (self.hardware.partition(":")[0], self.chips, self.choice)

    @property
    def mesh_text(self) -> str:
        return "×".join(f"{name}={size}" for name, size in self.mesh)

    def __str__(self) -> str:
        varied = "".join(f", {key}={value}" for key, value in self.choice)
        return f"{self.mesh_text} on {self.hardware}{varied}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates to plan, and the number of equivalent meshes that they stand for."""

    every: tuple[Candidate, ...]
    twins: int

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.every)


def slices(hardware: str, chips: Sequence[int]) -> list[Hardware]:
    """The physical slices of so many chips; a topology after the colon is taken as it is.

    Raises:
      MeshError: no slice has that many chips; names the numbers next to it.
      SpecError: neither a number of chips nor a topology is given.
    """
    if ":" in hardware:
        return [cost_models.hardware(hardware)]
    found: list[Hardware] = []
    chip = cost_models.hardware(hardware, 1).chip
    if not chips:
        raise SpecError(f"say how many chips, --chips 8 (chips=8), or name the slice, {examples(chip)}")
    per_chip = int(chip.numbers["devices_per_chip_count"].value) if "devices_per_chip_count" in chip.numbers else 1
    for count in chips:
        names = topologies(chip, count * per_chip)
        if not names:
            known = [n // per_chip for n in counts(chip)]
            below = max((n for n in known if n < count), default=None)
            above = min((n for n in known if n > count), default=None)
            near = " or ".join(f"--chips {n}" for n in (below, above) if n is not None)
            raise MeshError(f"no slice of {chip.name} has {count} chips; write {near}, or a topology after a colon")
        found += [cost_models.hardware(f"{hardware}:{name}") for name in names]
    return found


def candidates(hardware: Sequence[Hardware], *, axes: int, choices: Sequence[Choice], twins: bool) -> Candidates:
    """Every mesh of up to `axes` axes on every slice, few axes first, times the choices.

    Args:
      hardware: the slices.
      axes: the most mesh axes, 1 to 3.
      choices: arguments of the builder; at least one, which may be empty.
      twins: whether twins are candidates, too.

    Raises:
      MeshError: `axes` is none of 1, 2, 3.
    """
    if not 1 <= axes <= MOST_AXES:
        raise MeshError(f"meshes of {axes} axes are not searched: write 1, 2 or 3")
    found: list[Candidate] = []
    left_out = 0
    for count in range(1, axes + 1):
        for place in hardware:
            seen: set[tuple[object, ...]] = set()
            for sizes in _factorizations(place.devices, count):
                mesh = dict(zip(_names(count), sizes, strict=True))
                likeness = _likeness(place.place(mesh))
                if not twins and likeness in seen:
                    left_out += len(choices)
                    continue
                seen.add(likeness)
                found += [
                    Candidate(
                        hardware=place.spec,
                        chips=_chips(place),
                        mesh=tuple(mesh.items()),
                        choice=tuple(choice.items()),
                    )
                    for choice in choices
                ]
    return Candidates(every=tuple(found), twins=left_out)


def _names(count: int) -> tuple[str, ...]:
    return (*AXES[: count - 1], AXES[-1]) if count > 1 else AXES[:1]


def _chips(hardware: Hardware) -> int:
    numbers = hardware.chip.numbers
    per_chip = int(numbers["devices_per_chip_count"].value) if "devices_per_chip_count" in numbers else 1
    return hardware.devices // per_chip


def _factorizations(devices: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations into `count` factors above 1, the outermost largest first."""
    if count == 1:
        if devices > 1 or count == 1:
            yield (devices,)
        return
    for outer in (d for d in range(devices // 2, 1, -1) if devices % d == 0):
        for inner in _factorizations(devices // outer, count - 1):
            if min(inner) > 1:
                yield (outer, *inner)


def _likeness(machine: Machine) -> tuple[object, ...]:
    """Equal for machines whose axes can be renamed into each other, their links and sizes with them."""
    axes = tuple(machine.mesh)
    groups = [group for n in range(1, len(axes) + 1) for group in combinations(range(len(axes)), n)]
    return min(
        (
            tuple((machine.mesh[axes[i]]) for i in order)
            + tuple(repr(machine.crossings(sorted(axes[order[i]] for i in group))) for group in groups)
            for order in permutations(range(len(axes)))
        ),
        key=repr,
    )
