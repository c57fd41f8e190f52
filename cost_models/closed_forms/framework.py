"""How a training program is written: the types that it stores and sends, and its kernels.

The layout says how values are split; the framework says how many bytes each takes in
memory and on the wire. Two are given. `MEGATRON` is the usual form of published training
runs: bfloat16 weights beside a float32 optimizer, flash kernels, float32 sums between
replicas. `JAX` is a plain `jax.jit` of a float32 state with bfloat16 matmuls on XLA.
"""

from dataclasses import dataclass, fields

from cost_models.machines.amounts import amounts, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Bytes per parameter, and which operations are kernels.

    Attributes:
        parameter_bytes: Bytes of a stored parameter.
        gathered_bytes: Bytes of a weight on its way to a matmul; 0: of the matmuls' type.
        gradient_bytes: Bytes of a stored gradient.
        gradient_buffer: Whether gradients have a buffer of their own, filled or not.
        optimizer_bytes: Bytes beside parameter and gradient: moments, and a master copy.
        scattered_bytes: Bytes of a gradient between FSDP shards.
        summed_bytes: Bytes of a gradient between replicas.
        returned_bytes: Bytes of a weight that replicas gather after a split update.
        flash: Whether attention is a flash kernel: scores stay on the chip, and the half
            above the diagonal is not computed.
        looks_up_in_place: Whether an embedding split by width is read where it lies and
            the tokens' vectors are exchanged, as XLA does, rather than gathered.
        expert_capacity: Rows that an expert computes, over an even share of the tokens.
        one_hot_dispatch: Whether tokens reach experts by products with one-hot tensors
            (Lepikhin et al. 2020), every expert's rows of every sequence, rather than sorted.
    """

    parameter_bytes: float = 2.0
    gathered_bytes: float = 0.0
    gradient_bytes: float = 2.0
    gradient_buffer: bool = True
    optimizer_bytes: float = 12.0
    scattered_bytes: float = 2.0
    summed_bytes: float = 4.0
    returned_bytes: float = 2.0
    flash: bool = True
    looks_up_in_place: bool = False
    expert_capacity: float = 1.0
    one_hot_dispatch: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is float:
                amounts(getattr(self, field.name), f"a framework's {field.name}")
        positive(self.expert_capacity, "a framework's expert_capacity")


# Narayanan et al. 2021 (Megatron-LM): bfloat16 weights and gradients, a float32 master copy and
# moments; gradients are summed in float32 between replicas.
MEGATRON = Framework()

# A float32 train state (models/training.py's, or MaxText's default), cast to bfloat16 for matmuls:
# weights are gathered, and their gradients summed, as bfloat16.
JAX = Framework(
    parameter_bytes=4.0,
    gathered_bytes=2.0,
    gradient_buffer=False,
    optimizer_bytes=8.0,
    summed_bytes=2.0,
    returned_bytes=4.0,
    flash=False,
    looks_up_in_place=True,
)
