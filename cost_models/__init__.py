"""Hardware and its costs in seconds: chips, links, collectives, matmuls, with a source for each number.

    >>> import cost_models
    >>> machine = cost_models.hardware("h100:2x4").place({"data": 2, "model": 4})
    >>> machine.collective_s("all-gather", ("model",), 2**28)

It knows bytes, FLOPs and links; no programs.
"""

from cost_models.alpha_beta import KINDS, Kind
from cost_models.catalogue import chips
from cost_models.errors import (
    CostModelError,
    HardwareFileError,
    MeshFitError,
    TopologyError,
    UnknownHardwareError,
    UnknownNumberError,
)
from cost_models.machine import Machine
from cost_models.model import Hardware, hardware

__all__ = [
    "KINDS",
    "CostModelError",
    "Hardware",
    "HardwareFileError",
    "Kind",
    "Machine",
    "MeshFitError",
    "TopologyError",
    "UnknownHardwareError",
    "UnknownNumberError",
    "chips",
    "hardware",
]
