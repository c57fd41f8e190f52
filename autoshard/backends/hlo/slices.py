"""Slices: programs for several TPU slices, and what is moved between them.

XLA:TPU (libtpu 0.0.52) compiles the program of one slice: its replica groups count that slice's partitions, and hold in
every slice. What moves between slices is a send to the runtime and a receive from it (`_xla_megascale_…`), whose
attributes say which collective it is, and between which devices: `100004` is the device 4 of the first slice.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.backends.hlo.groups import Groups
from autoshard.backends.hlo.text import Computation, Instruction, Module
from autoshard.errors import HloError
from autoshard.ir.mesh import MeshAxes

_MARK = "_xla_megascale_transfer_type"
_TYPE = re.compile(rf'{_MARK}="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
_SLICE = 100_000  # of a device's id, the slice counted from one

TransferKind = Literal["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]
_KINDS: dict[str, TransferKind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a program: their number, and the devices (partitions) of each.

    Devices lie slice after slice in the mesh.
    """

    count: int
    devices: int

    def everywhere(self, groups: Groups) -> Groups:
        """Groups of one slice's partitions, in every slice."""
        offsets = range(0, self.count * self.devices, self.devices)
        return tuple(tuple(start + device for device in group) for start in offsets for group in groups)


def slices_of(module: Module, mesh: MeshAxes, known: int) -> Slices:
    """The slices of a program's mesh: one, as many as are known, or what its own transfers say.

    Raises:
      HloError: the program is for another number of devices.
    """
    count, rest = divmod(mesh.size, module.num_partitions)
    if rest or (count not in (1, known) and not any(is_transfer(x) for body in module for x in body)):
        raise HloError(f"the program is for {module.num_partitions} devices; the mesh {mesh} has {mesh.size}")
    return Slices(count, module.num_partitions)


def is_transfer(instruction: Instruction) -> bool:
    """Whether an instruction sends to other slices."""
    return instruction.opcode == "send" and _MARK in instruction.attributes


def transfer_kind(send: Instruction) -> TransferKind:
    """The collective that a send to other slices is a part of.

    Raises:
      HloError: it is unknown.
    """
    found = _TYPE.search(send.attributes)
    if found is None or found[1] not in _KINDS:
        raise HloError(f"{send.name} is a transfer between slices of a kind that is not known")
    return _KINDS[found[1]]


def arrival(computation: Computation, send: Instruction) -> str:
    """The instruction that waits for what other slices send in return; the send itself, if none does."""
    meeting = _meeting(send)
    receives = {x.name for x in computation if x.opcode == "recv" and meeting and _meeting(x) == meeting}
    return next((x.name for x in computation if x.opcode == "recv-done" and x.operands[0] in receives), send.name)


def _meeting(instruction: Instruction) -> str:
    """The name under which a send and a receive are one transfer."""
    found = _MEETING.search(instruction.attributes)
    return "" if found is None else found[1]


def transfer_groups(send: Instruction, slices: Slices) -> Groups:
    """The devices between which a transfer moves data, by position in the mesh; of a permute (source, target).

    Raises:
      HloError: they cannot be read.
    """
    target = _TARGET.search(send.attributes)
    if target is None:
        raise HloError(f"{send.name} is a transfer between slices that does not say which")
    return _groups(target[1].strip('"'), slices)


@lru_cache(maxsize=4096)
def _groups(text: str, slices: Slices) -> Groups:
    if product := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", text):
        of_slices, of_devices = (_numbers(part) for part in product.groups())
        return tuple(tuple((s - 1) * slices.devices + device for s in of_slices) for device in of_devices)
    groups = [re.split(r",|->", group) for group in re.findall(r"\{([\d,>-]+)\}", text)]
    return tuple(tuple(_position(int(device), slices) for device in group) for group in groups)


def _numbers(text: str) -> list[int]:
    """`1,2` or `0:7`, which includes both ends."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


def _position(device: int, slices: Slices) -> int:
    of_slice, inside = divmod(device, _SLICE)
    return (of_slice - 1) * slices.devices + inside
