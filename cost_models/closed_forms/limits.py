"""Rules of thumb for a machine and a model: when a strategy is compute-bound, and which sizes fit.

The closed forms, evaluated with a hardware's own numbers, each with the chapter
that derives it. `autoshard hardware` prints them below the numbers, and a report
quotes them as the reason why a layout was not chosen.
"""

from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.amounts import positive
from cost_models.machines.dtypes import itemsize
from cost_models.machines.model import Hardware
from cost_models.machines.roofline import arithmetic_intensity, matmul_bytes, roofline_s

DTYPE = "bfloat16"
SQUARE = 8192  # a common width, for thresholds that depend on one


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold.

    Attributes:
        name: The quantity that it bounds.
        value: The threshold.
        unit: The unit of the value.
        source: Chapter of the derivation.
    """

    name: str
    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value:,.4g} {self.unit} ({self.source})"


def hardware_limits(hardware: Hardware) -> tuple[Limit, ...]:
    """Thresholds that depend on the hardware alone."""
    number = hardware.number
    flops_per_s, hbm = number(f"peak_{DTYPE}_flops_per_s"), number("hbm_bytes_per_s")
    link = number("domain.one_way_bytes_per_s")
    found = [
        Limit(
            "matmul is compute-bound from",
            formulas.critical_batch(flops_per_s, hbm),
            "tokens per device",
            "roofline.md",
        ),
        Limit(
            "with int8 weights from",
            formulas.critical_batch(flops_per_s, hbm, weight_itemsize=1),
            "tokens per device",
            "roofline.md Q2",
        ),
        Limit(
            f"an [n, {SQUARE}] @ [{SQUARE}, {SQUARE}] matmul, its operands and result counted, from",
            formulas.exact_critical_batch(
                SQUARE, SQUARE, flops_per_s, hbm, weight_itemsize=itemsize(DTYPE), activation_itemsize=itemsize(DTYPE)
            ),
            "tokens per device",
            "tpus.md Q4",
        ),
        Limit(
            "weights streamed from the host hide from",
            formulas.critical_batch(flops_per_s, number("host_bytes_per_s")),
            "tokens per device",
            "tpus.md",
        ),
        Limit(
            "a shard waits for hops below",
            formulas.latency_bound_bytes(link, number("domain.hop_s")),
            "bytes per device",
            "sharding.md",
        ),
    ]
    for axes in range(1, len(_axis_links(hardware)) + 1):
        tokens = formulas.critical_tokens_per_device(domain_intensity(hardware, axes))
        over = f" over {axes} torus axes" if axes > 1 else ""
        found.append(
            Limit(f"data parallelism and FSDP are compute-bound{over} from", tokens, "tokens per device", "training.md")
        )
    found += [
        Limit(
            "tensor parallelism is compute-bound up to one way per",
            1 / formulas.tensor_parallel_limit(1.0, domain_intensity(hardware)),
            "elements of the split width",
            "training.md",
        ),
        Limit(
            "a split contraction is compute-bound up to one way per",
            1 / formulas.contraction_split_limit(1.0, domain_intensity(hardware)),
            "contracted elements",
            "sharding.md Q4",
        ),
    ]
    if "scale_out" in hardware.chip.links:
        per_group = formulas.intensity(flops_per_s, number("scale_out.one_way_bytes_per_s"))
        found.append(
            Limit(
                "replicas over the network are compute-bound from",
                formulas.critical_tokens_per_device(per_group),
                "tokens per NIC's share of a replica",
                "training.md, gpus.md",
            )
        )
    return tuple(found)


def model_limits(model: Transformer, hardware: Hardware, tokens: float) -> tuple[Limit, ...]:
    """Thresholds for training this model with a batch of so many tokens; raises `CostModelError` if that is none."""
    tokens = positive(tokens, "tokens")
    number, axes = hardware.number, len(_axis_links(hardware))
    one_axis, all_axes = domain_intensity(hardware), domain_intensity(hardware, axes)
    flops_per_s, width_bytes = number(f"peak_{DTYPE}_flops_per_s"), itemsize(DTYPE)
    width = model.expert_width if model.experts > 1 else model.d_ff
    experts = {"experts": model.experts, "active_experts": model.active_experts}
    sharded = formulas.critical_tokens_per_device(all_axes, **experts)
    mixed_axes = {"fsdp_axes": max(1, axes - 1), "tensor_axes": 1}
    state_bytes = formulas.state_bytes(model.parameters)
    local = tokens / hardware.devices
    block = (model.parameters - model.embedding_parameters) / model.layers
    multiplied = (model.active_parameters - model.embedding_parameters) / model.layers
    mlp_bytes = matmul_bytes(1, local, width, model.d_model, width_bytes, width_bytes)
    return (
        Limit("FSDP alone is compute-bound up to", formulas.most_devices(tokens, sharded), "devices", "training.md"),
        Limit(
            "FSDP with tensor parallelism up to",
            formulas.most_devices(tokens, formulas.mixed_tokens_per_device(one_axis, width, **mixed_axes)),
            "devices",
            "training.md",
        ),
        Limit(
            "weight and activation traffic balance at",
            formulas.best_fsdp(tokens, hardware.devices, width, **mixed_axes),
            "ways of FSDP",
            "training.md, X_opt",
        ),
        Limit("tensor parallelism pays up to", formulas.tensor_parallel_limit(width, one_axis), "ways", "training.md"),
        Limit(
            "FSDP gathers one block's weights in",
            float(formulas.gather_s(block * width_bytes, flops_per_s / all_axes)),
            "s",
            "sharding.md",
        ),
        Limit(
            "beside its forward matmuls, which take",
            float(roofline_s(2 * multiplied * local, block * width_bytes, flops_per_s, number("hbm_bytes_per_s"))),
            "s",
            "training.md, FSDP",
        ),
        Limit(
            "an MLP matmul of one device's tokens does",
            float(arithmetic_intensity(2.0 * local * width * model.d_model, mlp_bytes)),
            "FLOPs per byte",
            "roofline.md",
        ),
        Limit(
            "gradients of one block hide behind its compute up to",
            formulas.largest_hidden_group(
                local,
                flops_per_s,
                number("domain.one_way_bytes_per_s") / width_bytes,
                number("domain.hop_s"),
                model.parameters / model.layers,
                flops_per_parameter=4.0,
            ),
            "replicas",
            "α·log p ≤ (B·S/C - 1/β)·n",
        ),
        Limit(
            "parameters and Adam alone need",
            formulas.devices_to_hold(state_bytes, hardware.usable_memory_bytes),
            "devices",
            "training.md",
        ),
        Limit(
            "attention costs as much as the matmuls from",
            model.parity_sequence,
            "tokens per sequence",
            "transformers.md",
        ),
        Limit(
            "a step of this batch at 40% MFU takes",
            formulas.train_s(model.active_parameters, tokens, hardware.devices, flops_per_s, 0.4),
            "s per step",
            "applied-training.md",
        ),
    )


def domain_intensity(hardware: Hardware, axes: int = 1) -> float:
    """FLOPs per byte of so many torus axes together, the best first, or of a GPU's way into its switch.

    An axis that closes into a ring has two links that carry a collective, a line one. sharding.md:364.
    """
    links = sum(_axis_links(hardware)[:axes])
    per_s = formulas.sum_of_axes(hardware.number("domain.one_way_bytes_per_s"), links / 2)
    return formulas.intensity(hardware.number(f"peak_{DTYPE}_flops_per_s"), per_s)


def _axis_links(hardware: Hardware) -> list[int]:
    """Links that carry a collective over each torus axis longer than one, most first; one link behind a switch."""
    tori = [d for d in hardware.topology.dimensions if d.medium == "torus" and d.size > 1]
    return sorted((2 if d.wraps else 1 for d in tori), reverse=True) or [1]
