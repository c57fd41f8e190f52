"""Hardware and its costs in seconds: chips, links, collectives, matmuls, with a source for each number.

    >>> import cost_models
    >>> machine = cost_models.hardware("h100:2x4").place({"data": 2, "model": 4})
    >>> machine.collective_s("all-gather", ("model",), 2**28)

It knows bytes, FLOPs and links; no programs. A hardware's numbers are data files
(`hardware_file`), its links a topology (`topology`), a mesh on them a placement
(`placement`); a collective's price is a law of bytes (`collective_law`), a local
operation's a roofline (`roofline`, `operations`). Whole transformers: `step_time`,
`serving_time`; rules of thumb: `hardware_limits`, `model_limits`.
"""

from cost_models.closed_forms.framework import JAX, MEGATRON, Framework
from cost_models.closed_forms.limits import Limit, hardware_limits, model_limits
from cost_models.closed_forms.serving import ServingTime, serving_time
from cost_models.closed_forms.training_layout import TrainingLayout
from cost_models.closed_forms.training_step import Part, StepTime, step_time
from cost_models.closed_forms.transformer import Transformer
from cost_models.errors import (
    CostModelError,
    HardwareFileError,
    MeshFitError,
    TopologyError,
    UnknownHardwareError,
    UnknownNumberError,
)
from cost_models.machines.alpha_beta import KINDS, Kind
from cost_models.machines.catalogue import chips
from cost_models.machines.machine import Machine
from cost_models.machines.model import Hardware, hardware

__all__ = [
    "JAX",
    "KINDS",
    "MEGATRON",
    "CostModelError",
    "Framework",
    "Hardware",
    "HardwareFileError",
    "Kind",
    "Limit",
    "Machine",
    "MeshFitError",
    "Part",
    "ServingTime",
    "StepTime",
    "TopologyError",
    "TrainingLayout",
    "Transformer",
    "UnknownHardwareError",
    "UnknownNumberError",
    "chips",
    "hardware",
    "hardware_limits",
    "model_limits",
    "serving_time",
    "step_time",
]
