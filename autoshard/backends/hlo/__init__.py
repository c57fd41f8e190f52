"""Compiled HLO: the text read, and the collectives in it."""

from autoshard.backends.hlo.communication import KINDS, Collective, Kind, collectives, communicates, wire_bytes
from autoshard.backends.hlo.cycles import estimated_cycles, estimated_s
from autoshard.backends.hlo.loops import UnknownTrips
from autoshard.backends.hlo.shardings import layout_of, shardings_of
from autoshard.backends.hlo.text import Computation, Instruction, Module, Shape, read

__all__ = [
    "KINDS",
    "Collective",
    "Computation",
    "Instruction",
    "Kind",
    "Module",
    "Shape",
    "UnknownTrips",
    "collectives",
    "communicates",
    "estimated_cycles",
    "estimated_s",
    "layout_of",
    "read",
    "shardings_of",
    "wire_bytes",
]
