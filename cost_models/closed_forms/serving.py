"""Serving a transformer: one decoding step, one prefill, and the batch that fits.

The closed forms of Austin et al., How to Scale Your Model (2026-06-24),
inference.md, with the hardware's own numbers, and the tensor-parallel
exchanges priced by the `Machine` that the planner asks.
"""

from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.amounts import count
from cost_models.machines.dtypes import itemsize
from cost_models.machines.model import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTime:
    """A model spread over all devices by tensor parallelism.

    Attributes:
        batch: Sequences decoded at once.
        largest_batch: Sequences whose caches fit beside the weights.
        parameter_bytes: Weights, all devices.
        cache_bytes: Of one sequence.
        decode_s: One step: weights and caches stream, or weights multiply; then the exchanges.
        load_s: The part of it that reads the weights.
        exchange_s: The part of it that is communication.
        exchange_2d_s: What the exchanges' bytes would take with weights split two ways at once.
        prefill_s: Of one sequence.
        tokens_per_s: Decoded, all sequences.
        useful_ways: Ways of tensor parallelism up to which decoding is bound by memory, not links.
    """

    batch: int
    largest_batch: int
    parameter_bytes: float
    cache_bytes: float
    decode_s: float
    load_s: float
    exchange_s: float
    exchange_2d_s: float
    prefill_s: float
    tokens_per_s: float
    useful_ways: float

    def requests_per_s(self, generated: int) -> float:
        """Finished requests per second, of so many generated tokens each."""
        return formulas.requests_per_s(self.batch, self.decode_s, generated)

    def prefill_servers(self, generated: int) -> float:
        """Prefill servers that keep this one decoding."""
        return formulas.prefill_servers(self.batch, self.prefill_s, self.decode_s, generated)


def serving_time(
    model: Transformer,
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    dtype: str = "bfloat16",
    weight_dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
) -> ServingTime:
    """Decode and prefill on all devices of `hardware` together.

    Args:
        model: The transformer.
        hardware: Its devices share every weight and cache evenly.
        batch: Sequences decoded at once.
        context: Tokens of each in the cache, and of a prefill.
        dtype: Of the multiplications.
        weight_dtype: Of the weights in memory.
        cache_dtype: Of the cache in memory.

    Raises:
        CostModelError: A size is no whole number from 1 on, or there is no such dtype.
    """
    batch, context = count(batch, "a batch"), count(context, "a context")
    machine = hardware.place({"tensor": hardware.devices})
    unit = machine.matmul_unit(dtype)
    flops_per_s = hardware.devices * unit.peak_flops_per_s * unit.achieved_fraction
    bytes_per_s = hardware.devices / float(machine.hbm_s(1.0))
    parameter_bytes = model.parameters * itemsize(weight_dtype)
    cache_bytes = model.kv_bytes(itemsize(cache_dtype)) * context
    local_s = formulas.decode_s(batch, model.active_parameters, parameter_bytes, cache_bytes, flops_per_s, bytes_per_s)
    stream = batch * model.d_model * itemsize(dtype)
    exchange_s = 2 * model.layers * float(machine.collective_s("all-reduce", ("tensor",), stream))
    link = hardware.number("domain.one_way_bytes_per_s")
    step_s = local_s + exchange_s
    return ServingTime(
        batch=batch,
        largest_batch=formulas.largest_batch(
            hardware.devices * hardware.usable_memory_bytes, parameter_bytes, cache_bytes
        ),
        parameter_bytes=parameter_bytes,
        cache_bytes=cache_bytes,
        decode_s=step_s,
        load_s=float(formulas.stream_s(parameter_bytes, bytes_per_s)),
        exchange_s=exchange_s,
        exchange_2d_s=model.layers * _exchange_2d_s(model, hardware, batch),
        prefill_s=formulas.prefill_s(model.active_parameters, context, flops_per_s),
        tokens_per_s=batch / step_s,
        useful_ways=formulas.decode_tensor_parallel_limit(
            model.d_ff, batch, hardware.number("hbm_bytes_per_s") / formulas.sum_of_axes(link)
        ),
    )


def _exchange_2d_s(model: Transformer, hardware: Hardware, batch: int) -> float:
    """Bandwidth term of one MLP, its weights split over both of their dimensions as best they can."""
    ways = formulas.weight_stationary_2d_best(model.d_model, model.d_ff, hardware.devices)
    rate = formulas.sum_of_axes(hardware.number("domain.one_way_bytes_per_s"))
    return formulas.weight_stationary_2d_s(batch, model.d_model, model.d_ff, ways, hardware.devices, rate)
