"""Compiled HLO: the text read, and the collectives in it."""

from autoshard.hlo.communication import KINDS, Collective, Kind, collectives, wire_bytes
from autoshard.hlo.cycles import estimated_cycles, estimated_s
from autoshard.hlo.text import Computation, Instruction, Module, Shape, read

__all__ = [
    "KINDS",
    "Collective",
    "Computation",
    "Instruction",
    "Kind",
    "Module",
    "Shape",
    "collectives",
    "estimated_cycles",
    "estimated_s",
    "read",
    "wire_bytes",
]
