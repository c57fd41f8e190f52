"""XLA:TPU's own estimate of compute: `estimated_cycles`, which it writes on fusions and on nothing else.

Collectives carry none, and neither does the text of XLA:GPU or XLA:CPU.
"""

import re
from collections.abc import Mapping

from autoshard.hlo.loops import Loops
from autoshard.hlo.text import Computation, Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: Module, *, trip_counts: Mapping[str, int] | None = None) -> int:
    """Cycles of a step on one device, loops multiplied out, the longest branch taken.

    Args:
      module: a program that XLA:TPU compiled; 0 for another compiler's.
      trip_counts: trips by the name of the `while` instruction, for loops whose text does not tell;
        the others of those count once.
    """
    loops, given = Loops(module), trip_counts or {}

    def total(computation: Computation) -> int:
        cycles = 0
        for instruction in computation:
            if instruction.opcode == "while":
                trips = given.get(instruction.name, loops.trip_count(instruction))
                cycles += (1 if trips is None else trips) * total(loops.body(instruction))
            elif instruction.opcode == "conditional":
                cycles += max(total(module[name]) for name in instruction.calls)
            elif instruction.opcode == "call":
                cycles += sum(total(module[name]) for name in instruction.calls)
            elif found := _CYCLES.search(instruction.attributes):
                cycles += int(found[1])
        return cycles

    return total(module[module.entry])
