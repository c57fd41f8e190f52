"""The closed forms of parallelism: when is a strategy compute-bound, what fits, how long it takes.

One function per rule of thumb, with the chapter of Austin et al., How to Scale
Your Model (jax-ml/scaling-book, 2026-06-24) that derives it. `intensity` is
always peak FLOP/s ÷ bytes/s of the link in question (the book's α = C/W). W is the
rate of a device in both directions of one torus axis, or of a GPU one way through
its switch. These forms drop the (n-1)/n and the latency that `Machine.collective_s`
charges: they give thresholds, not seconds of a step.
"""

from collections.abc import Sequence
from math import ceil, floor, inf, prod, sqrt

import numpy as np
from numpy.typing import ArrayLike

from cost_models.machines.alpha_beta import Floats


def intensity(flops_per_s: float, bytes_per_s: float) -> float:
    """FLOPs that a device can do per byte that the memory or link delivers. roofline.md."""
    return flops_per_s / bytes_per_s


def sum_of_axes(link_bytes_per_s: float, axes: float = 1) -> float:
    """Bytes/s of a collective on wrapped torus axes, two links each; a line counts half. sharding.md:320-364."""
    return 2 * link_bytes_per_s * axes


def gather_s(nbytes: ArrayLike, bytes_per_s: float) -> Floats:
    """All-gather or reduce-scatter of V bytes on many devices: V/W. sharding.md:320-361."""
    return np.asarray(nbytes, float) / bytes_per_s


def stream_s(nbytes: ArrayLike, bytes_per_s: float, devices: int = 1) -> Floats:
    """Reading an array that is spread over devices, each at its own rate. tpus.md:220."""
    return np.asarray(nbytes, float) / (devices * bytes_per_s)


def latency_bound_bytes(link_bytes_per_s: float, hop_s: float, devices: int = 1) -> float:
    """Array size below which a ring of shards waits for hops, not bytes. sharding.md:346, inference.md:661."""
    return devices * link_bytes_per_s * hop_s


# Critical batch sizes, in tokens -------------------------------------------------


def critical_batch(
    flops_per_s: float, bytes_per_s: float, *, weight_itemsize: float = 2, experts: int = 1, active_experts: int = 1
) -> float:
    """Tokens from which a matmul with streamed weights is compute-bound. roofline.md:150-207, transformers.md:390.

    2·B·D·F·k/E FLOPs of weights that were read ÷ weight bytes·D·F. The general
    form for experts: a token computes on k of E parameters that are all read.
    """
    return flops_per_s / bytes_per_s * weight_itemsize / 2 * experts / active_experts


def exact_critical_batch(
    d: int,
    f: int,
    flops_per_s: float,
    bytes_per_s: float,
    *,
    weight_itemsize: float,
    activation_itemsize: float,
) -> float:
    """Tokens from which `[B,D]@[D,F]` is compute-bound, activations counted; inf if never. tpus.md:254 Q4."""
    spare = 2 * d * f * bytes_per_s / flops_per_s - activation_itemsize * (d + f)
    return ceil(weight_itemsize * d * f / spare) if spare > 0 else inf


def critical_tokens_per_device(
    intensity: float, *, axes: int = 1, groups: int = 0, experts: int = 1, active_experts: int = 1, spans: int = 1
) -> float:
    """Tokens per device from which data parallelism or FSDP is compute-bound. training.md:235, gpus.md:629-767.

    Args:
        intensity: C/W of one torus axis, or of a node's egress per GPU.
        axes: Torus axes that the collective uses.
        groups: Members of a small group, whose (X-1)/X matters; 0: many.
        experts: Routed experts; their weights move, whether visited or not.
        active_experts: Experts that a token visits.
        spans: Nodes over which one replica is spread: their egress adds up.
    """
    small = (groups - 1) / groups if groups else 1.0
    return intensity / axes * small * experts / active_experts / spans


def most_devices(batch_tokens: float, tokens_per_device: float) -> float:
    """Devices at which a batch is down to so many tokens each. training.md:301."""
    return batch_tokens / tokens_per_device


def tensor_parallel_limit(f: float, intensity: float, *, axes: int = 1, hidden: int = 0) -> float:
    """Ways of Megatron tensor parallelism up to which it is compute-bound: M·F/α. training.md:379, gpus.md:674.

    Args:
        f: Width that is split.
        intensity: C/W of the slowest link on the way.
        axes: Torus axes used.
        hidden: Devices of the group whose exchange is free beside it (a node, when
            the intensity is that between nodes).
    """
    return axes * f / intensity + hidden


def contraction_split_limit(d: float, intensity: float, *, passes: int = 2) -> float:
    """Ways to split a contraction up to which summing the outputs stays hidden. sharding.md:610 Q4, roofline.md:171.

    Args:
        d: Contracted size.
        intensity: C/W.
        passes: 2 for an all-reduce, 1 for a single exchange of partial sums.
    """
    return d / (passes * intensity)


def mixed_tokens_per_device(intensity: float, f: float, *, fsdp_axes: int = 1, tensor_axes: int = 1) -> float:
    """Tokens per device from which FSDP × tensor parallelism is compute-bound: α²/(M_X·M_Y·F). training.md:430-484."""
    return intensity**2 / (fsdp_axes * tensor_axes * f)


def best_fsdp(batch_tokens: float, devices: float, f: float, *, fsdp_axes: int = 1, tensor_axes: int = 1) -> float:
    """FSDP ways at which weight and activation traffic balance: X_opt. training.md:456."""
    return sqrt(batch_tokens / f * fsdp_axes / tensor_axes * devices)


def largest_hidden_group(
    tokens: float,
    flops_per_s: float,
    bytes_per_s: float,
    alpha_s: float,
    parameters: float,
    flops_per_parameter: float = 1.0,
) -> float:
    """Largest p with α·log₂ p ≤ (B·S/C - 1/β)·n: the group whose all-reduce compute hides.

    A tree all-reduce of n parameters takes α·log₂ p + n/β, β in parameters per
    second; the compute beside it B·S·n/C. inf if latency is free; 1 if the
    bandwidth term alone is already longer than the compute.

    Args:
        tokens: B·S, tokens of one device.
        flops_per_s: C.
        bytes_per_s: β, in units of parameters per second.
        alpha_s: Latency of one step of the tree.
        parameters: n.
        flops_per_parameter: FLOPs per token and parameter; 1 as the formula is written.
    """
    slack_s = (tokens * flops_per_parameter / flops_per_s - 1 / bytes_per_s) * parameters
    if slack_s <= 0:
        return 1.0
    if alpha_s == 0 or slack_s / alpha_s > 1000:
        return inf
    return 2.0 ** (slack_s / alpha_s)


# Pipelines -----------------------------------------------------------------------


def pipeline_bubble(stages: int, microbatches: float, *, repeats: int = 1) -> float:
    """Idle share of a pipeline: (p-1)/(p+k-1), k times repeats if interleaved. MaxText, sharding.md."""
    return (stages - 1) / (stages - 1 + repeats * microbatches)


def pipeline_bubble_rough(stages: int, microbatches: float) -> float:
    """The rough form p/(p+k), for many stages. gpus.md:696."""
    return stages / (stages + microbatches)


# Memory --------------------------------------------------------------------------


def array_bytes(shape: Sequence[float], itemsize: float, *, ways: int = 1) -> float:
    """One device's part of an array that is split so many ways. sharding.md:110-146."""
    return prod(shape) * itemsize / ways


def state_bytes(parameters: float, *, bytes_per_parameter: float = 10.0, ways: int = 1) -> float:
    """Parameters and optimizer: 10 bytes each for bf16 weights and fp32 Adam moments. training.md:200."""
    return parameters * bytes_per_parameter / ways


def activation_bytes(tokens: float, layers: int, width: float, *, itemsize: float = 2.0, saved: float = 1.0) -> float:
    """Bytes kept for backward: `saved` values per layer and token. transformers.md:266-274.

    Args:
        tokens: Tokens that are kept at once.
        layers: Blocks.
        width: Elements per saved value: D for a block's input, D+2F for the matmuls of an MLP.
        itemsize: Bytes per element.
        saved: Values per block: 1 with full remat, about 7 keeping matmuls, about 20 without remat.
    """
    return tokens * layers * width * itemsize * saved


def devices_to_hold(nbytes: float, memory_bytes: float) -> float:
    """Devices whose memory together holds so many bytes. applied-training.md:142."""
    return nbytes / memory_bytes


def largest_batch(memory_bytes: float, parameter_bytes: float, bytes_per_sequence: float) -> int:
    """Sequences whose caches fit beside the parameters. inference.md:526 Q2, applied-inference.md:165."""
    return max(0, floor((memory_bytes - parameter_bytes) / bytes_per_sequence))


# Time ----------------------------------------------------------------------------


def train_s(parameters: float, tokens: float, devices: float, flops_per_s: float, mfu: float = 1.0) -> float:
    """Training time: 6·P·T at a given utilization. applied-training.md:118-126."""
    return 6.0 * parameters * tokens / (devices * flops_per_s * mfu)


def model_flops_utilization(flops_per_s: float, peak_flops_per_s: float) -> float:
    """Share of the peak that a measured rate is. Chowdhery et al., PaLM (arXiv:2204.02311), appendix B."""
    return flops_per_s / peak_flops_per_s


def decode_s(
    batch: float, parameters: float, parameter_bytes: float, cache_bytes: float, flops_per_s: float, bytes_per_s: float
) -> float:
    """One decoding step: caches stream, then weights stream or multiply. inference.md:226-311.

    Args:
        batch: Sequences.
        parameters: Active parameters.
        parameter_bytes: Weights that are read.
        cache_bytes: Bytes of one sequence's cache.
        flops_per_s: FLOP/s of all devices.
        bytes_per_s: HBM bytes/s of all devices.
    """
    multiply_s, load_s = 2 * batch * parameters / flops_per_s, parameter_bytes / bytes_per_s
    return batch * cache_bytes / bytes_per_s + max(multiply_s, load_s)


def prefill_s(parameters: float, tokens: float, flops_per_s: float, mfu: float = 1.0) -> float:
    """Prefill of so many tokens: 2·P each. applied-inference.md:255."""
    return 2.0 * parameters * tokens / (flops_per_s * mfu)


def decode_tensor_parallel_limit(f: float, batch: float, memory_over_link: float) -> float:
    """Ways up to which decoding is bound by HBM, not by links: F/(B·β). inference.md:378.

    Args:
        f: Width that is split.
        batch: Sequences.
        memory_over_link: β = HBM bytes/s ÷ link bytes/s.
    """
    return f / (batch * memory_over_link)


def weight_stationary_2d_s(batch: float, d: float, f: float, x: float, devices: float, bytes_per_s: float) -> float:
    """Activation traffic of a 2-D split MLP in decoding: 2BD/(X·W) + 4BF·X/(N·W). inference.md:574 Q7."""
    return (2 * batch * d / x + 4 * batch * f * x / devices) / bytes_per_s


def weight_stationary_2d_best(d: float, f: float, devices: float) -> float:
    """The X that minimises `weight_stationary_2d_s`. inference.md:574 Q7."""
    return sqrt(d * devices / (2 * f))


def requests_per_s(batch: float, decode_step_s: float, decode_steps: float, devices: float = 1) -> float:
    """Finished requests per second and device. applied-inference.md:193."""
    return batch / (decode_step_s * decode_steps) / devices


def prefill_servers(batch: float, prefill_request_s: float, decode_step_s: float, decode_steps: float) -> float:
    """Prefill servers that keep one decoding server busy. applied-inference.md:263."""
    return batch * prefill_request_s / (decode_step_s * decode_steps)


def tokens_per_round(acceptance: float, drafted: int) -> float:
    """Tokens that a round of speculative decoding gives: the accepted of those drafted, and one of the target's own.

    `acceptance` is the chance that a drafted token is kept, each on its own. Source:
    Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), equation 1.
    """
    return sum(acceptance**i for i in range(drafted + 1))
