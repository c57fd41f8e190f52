"""XLA:TPU's own estimate of compute: `estimated_cycles`, an attribute that it writes on fusions.

Collectives carry none, nor does the text of XLA:GPU or XLA:CPU.
"""

import re
from collections.abc import Mapping

from autoshard.backends.hlo.loops import Loops
from autoshard.backends.hlo.text import Computation, Module

# Clock of a TensorCore: peak FLOP/s over FLOPs per cycle of its MXUs (Austin et al. 2025, "How to Scale Your Model",
# chapter 2: v5e 4 MXUs of 128 × 128, 197e12 FLOP/s; v5p 8 of them, 459e12; v6e 4 of 256 × 256, 918e12; v4 8, 275e12).
CLOCK_HZ: Mapping[str, float] = {"tpu-v4": 1.05e9, "tpu-v5e": 1.5e9, "tpu-v5p": 1.75e9, "tpu-v6e": 1.75e9}

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: Module) -> int:
    """Cycles of a step on one device, loops multiplied out, the longest branch taken.

    Args:
      module: a program that XLA:TPU compiled; 0 for another compiler's. Loops whose trips it does not tell count once.
    """
    loops = Loops(module)

    def total(computation: Computation) -> int:
        cycles = 0
        for instruction in computation:
            if instruction.opcode == "while":
                trips = loops.trip_count(instruction)
                cycles += (1 if trips is None else trips) * total(loops.body(instruction))
            elif instruction.opcode == "conditional":
                cycles += max(total(module[name]) for name in instruction.calls)
            elif instruction.opcode == "call":
                cycles += sum(total(module[name]) for name in instruction.calls)
            elif found := _CYCLES.search(instruction.attributes):
                cycles += int(found[1])
        return cycles

    return total(module[module.entry])


def estimated_s(module: Module, hardware: str) -> float | None:
    """Seconds of those cycles; None where the compiler estimates nothing, or the chip's clock is not known.

    Args:
      module: a compiled program.
      hardware: such as `tpu-v5e:4x4`.
    """
    cycles, clock_hz = estimated_cycles(module), CLOCK_HZ.get(hardware.partition(":")[0])
    return cycles / clock_hz if cycles and clock_hz else None
