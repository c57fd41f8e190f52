"""Numbers of textbooks and papers against `cost_models`: `python -m benchmarks.cost_oracles [rows.json]`.

Rows: tests/data/cost_oracles.json, transcribed from Austin et al., How to Scale
Your Model (jax-ml/scaling-book e5de31b), and the other sources that `ref` names.
An entry below gives a row's inputs to a library function; it holds no formula
of its own beyond unit conversion and the row's given inputs.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, SupportsFloat

from cost_models import hardware
from cost_models.closed_forms import formulas
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.alpha_beta import Ring, switch_gather_s, torus_broadcast_s, torus_gather_s, wire_bytes
from cost_models.machines.roofline import arithmetic_intensity, elementwise_bytes, matmul_bytes, roofline_s

ROWS = {
    row["id"]: row
    for row in json.loads((Path(__file__).parent.parent / "tests" / "data" / "cost_oracles.json").read_text())
}

V4, V5E, V5P, V6E = (
    hardware(spec).number for spec in ("tpu-v4:4x4x4", "tpu-v5e:4x4", "tpu-v5p:16x16x16", "tpu-v6e:16x16")
)
H100, B200, GB200 = (hardware(spec).number for spec in ("h100:32x8", "b200:1x8", "gb200:1x72"))
BF16, INT8 = "peak_bfloat16_flops_per_s", "peak_int8_flops_per_s"
HBM, PCIE, LINK, HOP = "hbm_bytes_per_s", "host_bytes_per_s", "domain.one_way_bytes_per_s", "domain.hop_s"
NIC = "scale_out.one_way_bytes_per_s"

NS, US, MS, DAY, YEAR = 1e9, 1e6, 1e3, 86400, 365.25 * 86400


def gated(d: int, f: int, layers: int, heads: int, kv: int, head_dim: int, vocab: int) -> Transformer:
    """A dense decoder with a gated MLP."""
    return Transformer(layers=layers, d_model=d, d_ff=f, heads=heads, kv_heads=kv, head_dim=head_dim, vocab=vocab)


LLAMA_8B = gated(4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_70B = gated(8192, 28672, 80, 64, 8, 128, 128256)
LLAMA_405B = gated(16384, 53248, 126, 128, 8, 128, 128256)
LLAMA2_13B = gated(5120, 13824, 40, 40, 40, 128, 32000)
BOOK_TR = gated(4096, 4 * 4096, 64, 32, 32, 128, 32000)
BOOK_IN = replace(gated(4096, 16384, 64, 32, 8, 256, 32128), tied=True)
BOOK_MOE = replace(BOOK_IN, experts=16, active_experts=2)
GEMMA_7B = gated(3072, 24576, 28, 16, 16, 256, 256000)

WRAPPED_V5P = formulas.intensity(V5P(BF16), formulas.sum_of_axes(V5P(LINK)))
NODE_H100 = 8 * H100(NIC)
V5E_ROUNDED = 240  # FLOPs per HBM byte; the book goes on from its rounded 240.2


def two_d_beats_one_d() -> float:
    """Devices from which a 2-D split MLP of F = 4D moves less than a 1-D one over three axes, 4/3·B·D ÷ W."""
    return next(
        n
        for n in range(1, 1000)
        if formulas.weight_stationary_2d_s(1, 1, 4, formulas.weight_stationary_2d_best(1, 4, n), n, 1.0) <= 4 / 3
    )


def decode_13b(batch: int, cache: float) -> float:
    """LLaMA-2-13B in bfloat16 on eight v5e, milliseconds per step."""
    return formulas.decode_s(batch, 13e9, 26e9, cache, 8 * V5E(BF16), 8 * V5E(HBM)) * MS


COMPUTED: dict[str, Callable[[], SupportsFloat]] = {
    # roofline.md
    "RL1": lambda: roofline_s(1e12, 0, 9.1e14, inf) * MS,
    "RL2": lambda: roofline_s(1e12, 0, H100(BF16), inf) * MS,
    "RL4": lambda: arithmetic_intensity(2e9, matmul_bytes(1, 1, 1, 1e9, 2, 2)),
    "RL5": lambda: 2 / formulas.contraction_split_limit(1, formulas.intensity(V5E(BF16), V5E(LINK)), passes=1),
    "RL7": lambda: formulas.critical_batch(V5E(BF16), V5E(HBM), weight_itemsize=1),
    "RL10": lambda: arithmetic_intensity(2 * 8192 * 8192, matmul_bytes(1, 1, 8192, 8192, 1, 1)),
    "RL11": lambda: formulas.critical_batch(H100(BF16), H100(HBM)),
    # tpus.md
    "TP1": lambda: formulas.stream_s(2 * 200e9, V4(HBM), devices=32) * MS,
    "TP7": lambda: 8960 * V5P(BF16),
    "TP10": lambda: formulas.exact_critical_batch(
        4096, 16384, V5E(INT8), V5E(HBM), weight_itemsize=1, activation_itemsize=1
    ),
    "TP13": lambda: torus_broadcast_s(2 * 8 * 128 * 8192, [Ring(4, wraps=False), Ring(4, wraps=False)], V5E(LINK)) * US,
    "TP16": lambda: torus_broadcast_s(15e9, [Ring(4, wraps=False), Ring(4, wraps=False)], V5E(LINK)) * MS,
    "TP3": lambda: hardware("tpu-v5e:16x16").devices * V5E(BF16),
    "TP9": lambda: formulas.critical_batch(V6E(BF16), 1.6e10),
    "TP11": lambda: formulas.exact_critical_batch(
        4096, 16384, V5E(INT8), V5E("vmem_bytes_per_s"), weight_itemsize=1, activation_itemsize=1
    ),
    "TP12": lambda: sum(r.hops for r in (Ring(4, wraps=False), Ring(4, wraps=False))) * V5E(HOP) * US,
    "TP14": lambda: (
        torus_broadcast_s(2 * 8 * 128 * 8192, [Ring(4, wraps=False), Ring(4, wraps=False)], V5E(LINK)) * US
        + float(COMPUTED["TP12"]())
    ),
    "TP15": lambda: formulas.stream_s(16e9, V5E(PCIE), devices=16) * MS,
    "TP17": lambda: formulas.stream_s(16e9, V5E(HBM)) * MS,
    "TP18": lambda: roofline_s(2 * 8 * 131072 * 131072, 0, V5E(BF16), inf) * MS,
    "TP20": lambda: V5P("vector_flops_per_s") / V5P("cores_count"),
    # sharding.md
    "SH1": lambda: formulas.array_bytes((1024, 4096), 4, ways=16),
    "SH2": lambda: formulas.stream_s(formulas.array_bytes((1024, 4096), 4, ways=16), 3.4e12) * NS,
    "SH3": lambda: formulas.array_bytes((128, 2048), 1, ways=16),
    "SH4": lambda: 32 * formulas.array_bytes((128, 2048), 1, ways=16),
    "SH5": lambda: formulas.gather_s(2 * 2048 * 8192, formulas.sum_of_axes(V5E(LINK))) * US,
    "SH11": lambda: 2 * formulas.gather_s(2 * 1024 * 4096 / 16, formulas.sum_of_axes(V4(LINK))) * US,
    "SH14": lambda: 1 / formulas.contraction_split_limit(1, WRAPPED_V5P),
    "SH6": lambda: torus_gather_s(2 * 2048 * 8192, [Ring(4, wraps=False)], V5E(LINK)) * US,
    "SH9": lambda: formulas.gather_s(2 * 1024 * 4096 / 4, formulas.sum_of_axes(V4(LINK))) * US,
    "SH10": lambda: formulas.gather_s(2 * 1024 * 4096, formulas.sum_of_axes(V4(LINK), 2)) * US,
    "SH12": lambda: Ring(4, wraps=True).hops * V4(HOP) * US,
    "SH13": lambda: formulas.contraction_split_limit(8192, WRAPPED_V5P),
    "SH15": lambda: formulas.array_bytes((8192, 32768), 2) / 1e6,
    "SH16": lambda: formulas.array_bytes((128, 8192), 2) / 1e6,
    "SH21": lambda: formulas.latency_bound_bytes(V5E(LINK), V5E(HOP)) / 1e3,
    # transformers.md
    "TR2": lambda: (
        BOOK_TR.attention_layer_parameters * BOOK_TR.layers / (BOOK_TR.parameters - BOOK_TR.embedding_parameters)
    ),
    "TR8": lambda: 100 * formulas.train_s(37e9, 14.8e12, 1, 1.513e15) / (2.79e6 * 3600),
    "TR11": lambda: formulas.activation_bytes(4e6, 64, 8192) / 1e12,
    "TR1": lambda: BOOK_TR.parameters / 1e9,
    "TR3": lambda: BOOK_TR.kv_bytes(1) / 1024,
    "TR5": lambda: gated(4096, 0, 1, 32, 32, 128, 1).parity_sequence,
    "TR6": lambda: gated(8192, 4 * 8192, 1, 64, 64, 128, 1).parity_sequence,
    "TR7": lambda: gated(4608, 4 * 4608, 1, 36, 36, 128, 1).parity_sequence,
    "TR9": lambda: formulas.critical_batch(V5E_ROUNDED, 1, weight_itemsize=1, experts=256, active_experts=8),
    "TR10": lambda: formulas.activation_bytes(4e6, 64, 8192, saved=20) / 1e12,
    "TR12": lambda: gated(8192, 4 * 8192, 64, 64, 64, 128, 1).kv_bytes(1) * 8192 / 2**30,
    "TR13": lambda: arithmetic_intensity(2 * 8 * 1e9 * 128, matmul_bytes(1, 8, 1e9, 128, 2, 0)),
    # training.md
    "TN4": lambda: 8960 * formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3) / 1e6,
    "TN7": lambda: formulas.train_s(70e9, 15e12, 18823, V5P(BF16), 0.5) / DAY,
    "TN10": lambda: formulas.tensor_parallel_limit(49152, WRAPPED_V5P),
    "TN13": lambda: formulas.mixed_tokens_per_device(WRAPPED_V5P, 32768, fsdp_axes=2),
    "TN16": lambda: formulas.most_devices(2e6, formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3)),
    "TN22": lambda: LLAMA2_13B.embedding_parameters / 1e9,
    "TN28": lambda: formulas.mixed_tokens_per_device(WRAPPED_V5P, 13824, fsdp_axes=2),
    "TN1": lambda: 96 / formulas.state_bytes(1),
    "TN2": lambda: formulas.critical_tokens_per_device(WRAPPED_V5P),
    "TN3": lambda: formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3),
    "TN5": lambda: formulas.most_devices(40e6, formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3)),
    "TN6": lambda: formulas.most_devices(16e6, formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3)),
    "TN8": lambda: formulas.tensor_parallel_limit(30000, WRAPPED_V5P),
    "TN9": lambda: 8 / formulas.tensor_parallel_limit(1, WRAPPED_V5P),
    "TN11": lambda: formulas.intensity(V5P(INT8), formulas.sum_of_axes(V5P(LINK))),
    "TN12": lambda: formulas.best_fsdp(48000, 64, 32768, fsdp_axes=2),
    "TN14": lambda: 4096 * formulas.mixed_tokens_per_device(WRAPPED_V5P, 4 * 8192, fsdp_axes=2),
    "TN15": lambda: formulas.intensity(V5P(BF16), V5P(NIC)),
    "TN17": lambda: formulas.mixed_tokens_per_device(WRAPPED_V5P, 30000, fsdp_axes=2),
    "TN18": lambda: formulas.most_devices(2e6, formulas.mixed_tokens_per_device(WRAPPED_V5P, 30000, fsdp_axes=2)),
    "TN20": lambda: LLAMA2_13B.mlp_parameters / 1e9,
    "TN21": lambda: LLAMA2_13B.layers * LLAMA2_13B.attention_layer_parameters / 1e9,
    "TN23": lambda: formulas.state_bytes(13e9) / 1e9,
    "TN24": lambda: formulas.activation_bytes(16e6, 40, 5120 + 2 * 13824) / 1e12,
    "TN26": lambda: formulas.activation_bytes(3e6, 40, 5120 + 2 * 13824) / 1e12,
    "TN27": lambda: 4096 * formulas.critical_tokens_per_device(WRAPPED_V5P, axes=3) / 1e6,
    "TN29": lambda: formulas.best_fsdp(3e6, 4096, 13824, fsdp_axes=2),
    "TN30": lambda: formulas.train_s(13e9, 3e6, 4096, V5P(BF16), 0.4) * MS,
    # applied-training.md
    "AT1": lambda: LLAMA_70B.mlp_parameters / 1e9,
    "AT2": lambda: LLAMA_70B.embedding_parameters / 1e9,
    "AT4": lambda: LLAMA_70B.parameters / 1e9,
    "AT5": lambda: formulas.train_s(70e9, 1, 1, 1.0),
    "AT7": lambda: formulas.train_s(70e9, 15e12, 1, 1.0),
    "AT8": lambda: formulas.train_s(70e9, 15e12, 1, V5P(BF16)) / YEAR,
    "AT10": lambda: formulas.activation_bytes(4e6, 80, 8192, saved=4) / 1e12,
    "AT11": lambda: formulas.devices_to_hold(21.6e12, 96e9),
    "AT16": lambda: formulas.best_fsdp(4.19e6, 8960, 28672, fsdp_axes=2),
    # inference.md
    "IN2": lambda: formulas.decode_s(256, 30e9, 30e9, 100e3 * 8192, 16 * V5E(BF16), 16 * V5E(HBM)) * MS,
    "IN7": lambda: BOOK_IN.parameters / 1e9,
    "IN10": lambda: formulas.largest_batch(16 * 16e9, BOOK_IN.parameters, BOOK_IN.kv_bytes(1) * 128e3),
    "IN13": lambda: BOOK_MOE.parameters / 1e9,
    "IN16": lambda: two_d_beats_one_d(),
    "IN1": lambda: formulas.decode_s(4, 30e9, 30e9, 100e3 * 8192, 16 * V5E(BF16), 16 * V5E(HBM)) * MS,
    "IN3": lambda: LLAMA2_13B.kv_bytes() * 8192 / 1e9,
    **{f"IN4.{b}": lambda b=b: decode_13b(b, 6.7e9) for b in (1, 8, 16, 32, 64, 240)},
    **{f"IN5.{b}": lambda b=b: decode_13b(b, 1.34e9) for b in (1, 8, 16, 32, 64, 240)},
    "IN6": lambda: formulas.decode_tensor_parallel_limit(16384, 32, 8),
    "IN8": lambda: BOOK_IN.kv_bytes(1) / 1e3,
    "IN9": lambda: BOOK_IN.kv_bytes(1) * 128e3 / 1e9,
    "IN11": lambda: formulas.largest_batch(16 * 16e9, 18.4e9, 33.5e9 / 8),
    "IN12": lambda: formulas.stream_s(BOOK_IN.parameters, V5E(HBM), devices=16) * MS,
    "IN14": lambda: BOOK_MOE.active_parameters / 1e9,
    "IN15": lambda: formulas.critical_batch(V5E_ROUNDED, 1, experts=16, active_experts=2),
    "IN17": lambda: formulas.weight_stationary_2d_s(1, 1, 4, formulas.weight_stationary_2d_best(1, 4, 64), 64, 1.0),
    "IN18": lambda: formulas.latency_bound_bytes(V5E(LINK), V5E(HOP), 8) / 1e3,
    "IN19": lambda: formulas.array_bytes((16, 8192), 1) / 1e3,
    "IN20": lambda: formulas.stream_s(2 * 600e6, V5E(HBM), devices=4) * US,
    # applied-inference.md
    "AI2": lambda: LLAMA_70B.kv_bytes(1) * 32768 / 1e9,
    "AI5": lambda: formulas.devices_to_hold(41.9e9 + 70e9, 16e9),
    "AI8": lambda: formulas.stream_s(112e9, V5E(HBM), devices=16) * MS,
    "AI11": lambda: formulas.largest_batch(16 * 16e9, 140e9, 324e3 * 8192),
    "AI14": lambda: formulas.requests_per_s(43, 0.019, 512, devices=8),
    "AI17": lambda: formulas.requests_per_s(140, 0.019, 512, devices=32),
    "AI20": lambda: formulas.stream_s(2 * 8192 * 28672, V5E(HBM), devices=32) * US,
    "AI1": lambda: LLAMA_70B.kv_bytes(1) / 1e3,
    "AI3": lambda: formulas.devices_to_hold(70e9 + 1.3e12, 16e9),
    "AI6": lambda: formulas.stream_s(112e9, V5E(HBM), devices=8) * MS,
    "AI9": lambda: formulas.tensor_parallel_limit(
        28672, formulas.intensity(V5E(BF16), formulas.sum_of_axes(V5E(LINK))), axes=2
    ),
    "AI12": lambda: formulas.stream_s(16e9, V5E(HBM)) * MS,
    "AI13": lambda: formulas.requests_per_s(43, 0.019, 512, devices=16),
    "AI15": lambda: formulas.requests_per_s(43, 0.019, 512, devices=4),
    "AI16": lambda: formulas.largest_batch(32 * 16e9, 140e9, 324e3 * 8192),
    "AI18": lambda: formulas.decode_tensor_parallel_limit(28672, 64, 8),
    "AI19": lambda: formulas.gather_s(2 * 64 * 8192, formulas.sum_of_axes(V5E(LINK))) * US,
    "AI21": lambda: roofline_s(2 * 64 * 8192 * 28672, 0, 32 * V5E(BF16), inf) * US,
    "AI22": lambda: formulas.prefill_s(70e9, 8192, 16 * V5E(BF16), 0.4),
    "AI24": lambda: formulas.prefill_servers(32, 0.91, 0.019, 512),
    # gpus.md
    "GP5": lambda: formulas.critical_batch(B200(BF16), 8e12),
    "GP11": lambda: formulas.stream_s(elementwise_bytes(65536, 2, 1, 4), H100(HBM)) * US,
    "GP14": lambda: formulas.gather_s(2 * 1024 * 16384, H100(LINK)) * US,
    "GP17": lambda: 1 / switch_gather_s(1, 32, NODE_H100) / 1e9,
    "GP23": lambda: formulas.critical_tokens_per_device(formulas.intensity(990e12, H100(LINK))),
    "GP26": lambda: formulas.critical_tokens_per_device(formulas.intensity(990e12, 300e9)),
    "GP29": lambda: formulas.tensor_parallel_limit(28000, formulas.intensity(990e12, NODE_H100)),
    "GP32": lambda: formulas.critical_tokens_per_device(formulas.intensity(B200(BF16), 8 * B200(NIC))),
    "GP36": lambda: formulas.state_bytes(70e9, ways=8) / 1e9,
    "GP38": lambda: formulas.critical_tokens_per_device(formulas.intensity(990e12, NODE_H100), spans=8),
    "GP6": lambda: roofline_s(0, matmul_bytes(1, 64, 8192, 4096, 2, 2), 1.0, 8e12) * US,
    "GP7": lambda: roofline_s(2 * 512 * 4096 * 8192, 0, 2.3e15, inf) * US,
    "GP10": lambda: formulas.stream_s(elementwise_bytes(2**30, 2, 1, 4), H100(HBM)) * MS,
    "GP13": lambda: switch_gather_s(2 * 4096 * 65536, 8, H100(LINK)) * MS,
    "GP15": lambda: switch_gather_s(2 * 1024 * 16384, 8, H100(LINK)) * US,
    "GP16": lambda: 1 / switch_gather_s(1, 8, H100(LINK)) / 1e9,
    "GP18": lambda: 1 / switch_gather_s(1, 4, 32 * NODE_H100) / 1e12,
    "GP22": lambda: 1 / max(switch_gather_s(1, 8, H100(LINK)), switch_gather_s(1, 2, NODE_H100)) / 1e9,
    "GP24": lambda: formulas.critical_tokens_per_device(formulas.intensity(990e12, NODE_H100)),
    "GP25": lambda: 16000 * formulas.critical_tokens_per_device(formulas.intensity(990e12, NODE_H100)) / 1e6,
    "GP27": lambda: formulas.critical_tokens_per_device(
        formulas.intensity(990e12, NODE_H100), experts=128, active_experts=4
    ),
    "GP28": lambda: formulas.critical_tokens_per_device(formulas.intensity(990e12, NODE_H100), groups=2),
    "GP30": lambda: formulas.tensor_parallel_limit(28000, formulas.intensity(990e12, NODE_H100), hidden=8),
    "GP31": lambda: 1 / formulas.tensor_parallel_limit(1, formulas.intensity(B200(BF16), B200(LINK))),
    "GP33": lambda: formulas.devices_to_hold(formulas.state_bytes(70e9), 80e9),
    "GP34": lambda: formulas.train_s(70e9, 15e12, 4096, 990e12, 0.45) / DAY,
    "GP43": lambda: hardware("gb200:1x72").devices * GB200(NIC) / 1e9,
    # profiling.md
    "PR1": lambda: roofline_s(2 * 32 * 1024 * 8192 * 32768, 0, 8 * 23e12, inf) * MS,
    "PR2": lambda: formulas.gather_s(2 * 8 * 1024 * 8192, 1.2e11) * MS,
    # HighPerfLLMs2024
    "HP1": lambda: formulas.critical_batch(V4(BF16), V4(HBM)),
    "HP2": lambda: formulas.intensity(V4(BF16), formulas.sum_of_axes(V4(LINK), 3)),
    "HP4": lambda: formulas.intensity(V4(BF16), V4(NIC)),
    "HP5": lambda: GEMMA_7B.kv_bytes() * 2048 / 1e6,
    "HP7": lambda: formulas.model_flops_utilization(189e12, V4(BF16)) * 100,
    "HP10": lambda: formulas.prefill_s(70e9, 1e6, V4(BF16)) / 10,
    "HP11": lambda: formulas.devices_to_hold(140e9, 32e9),
    "HP13": lambda: formulas.critical_tokens_per_device(formulas.intensity(V4(BF16), 100e9)),
    "HP14": lambda: (
        100 * elementwise_bytes(1, 1, 1, 2) / (matmul_bytes(1, 1, 1, 1, 2, 2) + elementwise_bytes(1, 1, 1, 2))
    ),
    # FLOP accounting of published logs
    "FL1": lambda: LLAMA_70B.train_flops(8192, causal=False) / 1e11,
    "FL4": lambda: LLAMA_405B.train_flops(8192, causal=False) / 1e12,
    "FL2": lambda: LLAMA_70B.train_flops(8192) / 1e11,
    "FL3": lambda: LLAMA_8B.train_flops(8192, causal=False) / 1e10,
    "FL5": lambda: LLAMA_405B.train_flops(8192) / 1e12,
    # nccl-tests
    "NC2": lambda: wire_bytes("all-gather", 8, 1.0),
    "NC1": lambda: wire_bytes("all-reduce", 8, 1.0),
}

SIZES = "a count of tokens or copies: no cost model is asked"
PARTS = "counts hosts, cores, lanes or ports of a chip, which no price depends on"
SPEED_OF_LIGHT = "XLA's own speed-of-light estimate of NCCL, which no planner or report of ours calls"
GIVEN = "a product or quotient of numbers that the row itself states"
SHARP = "in-network reduction of the spine, which no cloud topology here has"
SKIPPED = {
    **dict.fromkeys(("SH8",), SIZES),
    **dict.fromkeys(("AT14", "GP37", "GP39", "GP40", "GP41", "GP42", "FL6", "TN19", "AI23"), SIZES),
    **dict.fromkeys(("TP2", "TP5", "TP6", "GP1", "GP2", "GP3", "GP4", "GP8", "GP9", "GP12"), PARTS),
    **dict.fromkeys((row for row in ROWS if row.startswith("XL")), SPEED_OF_LIGHT),
    **dict.fromkeys(("TP4", "TP8", "AI4", "AI7", "HP8", "AT13", "TN25"), GIVEN),
    "GP21": SHARP,
}


def is_close(row: dict[str, Any], value: float) -> bool:
    """Whether a computed value is within a row's tolerance of the published one."""
    return abs(value - row["expected"]) <= max(row["tol"], 1e-9) * abs(row["expected"])


def main() -> None:
    """Print every computed row beside the published value, and the skipped rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=Path, help="JSON list of rows; those of tests/data by default")
    path = parser.parse_args().rows
    rows = {row["id"]: row for row in json.loads(path.read_text())} if path else ROWS
    right = computed = 0
    for name, row in rows.items():
        if name not in COMPUTED:
            print(f"{name:7s} skipped: {SKIPPED.get(name, 'not known here')}")
            continue
        value = float(COMPUTED[name]())
        close = is_close(row, value)
        computed, right = computed + 1, right + close
        verdict = "ok   " if close else "WRONG"
        print(f"{name:7s} {verdict} {value:12.6g}  published {row['expected']:g} {row['unit']}  ({row['inputs']})")
    print(f"{right} of {computed} computed rows within tolerance, {len(rows) - computed} skipped")


if __name__ == "__main__":
    main()
