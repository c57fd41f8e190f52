"""Rules of thumb and serving, with the numbers of real hardware: what the textbook derives for them."""

import pytest

import cost_models
from cost_models.closed_forms.limits import Limit, domain_intensity, hardware_limits, model_limits
from cost_models.closed_forms.serving import serving_time
from cost_models.closed_forms.transformer import Transformer

LLAMA_70B = Transformer(layers=80, d_model=8192, d_ff=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256)


def value(limits: tuple[Limit, ...], beginning: str) -> float:
    (found,) = [limit.value for limit in limits if limit.name.startswith(beginning)]
    return found


@pytest.mark.parametrize(
    ("spec", "beginning", "expected"),
    [
        ("tpu-v5e:4x4", "matmul is compute-bound", 240),
        ("tpu-v5e:4x4", "with int8 weights", 120),
        ("h100:1x8", "matmul is compute-bound", 295),
        ("tpu-v5e:4x4", "an [n, 8192]", 256),
        ("tpu-v5p:4x4x4", "data parallelism and FSDP are compute-bound from", 2550),
        ("tpu-v5p:4x4x4", "data parallelism and FSDP are compute-bound over 3", 850),
        ("tpu-v5p:4x4x4", "tensor parallelism", 2550),
        ("tpu-v5p:4x4x4", "a split contraction", 5100),
        ("tpu-v5p:4x4x4", "replicas over the network", 73440),
        ("h100:1x8", "data parallelism and FSDP", 2198),
        ("tpu-v5e:4x4", "a shard waits for hops below", 45e3),
    ],
)
def test_thresholds_that_the_textbook_prints(spec: str, beginning: str, expected: float):
    assert value(hardware_limits(cost_models.hardware(spec)), beginning) == pytest.approx(expected, rel=0.002)


def test_llama_70b_on_a_pod():
    """applied-training.md: 4 Mi tokens on v5p; FSDP alone up to 4.19e6/850 chips, mixed up to 99 tokens each."""
    hardware = cost_models.hardware("tpu-v5p:16x16x24")
    limits = model_limits(LLAMA_70B, hardware, 4.19e6)
    assert value(limits, "FSDP alone") == pytest.approx(4.19e6 / 850, rel=0.01)
    assert value(limits, "FSDP with tensor") == pytest.approx(4.19e6 / (2550**2 / (2 * 28672)), rel=0.01)
    assert value(limits, "weight and activation") == pytest.approx((2 * 4.19e6 * 6144 / 28672) ** 0.5, rel=0.01)
    assert value(limits, "tensor parallelism pays") == pytest.approx(28672 / 2550, rel=0.01)
    assert value(limits, "parameters and Adam") == pytest.approx(705.5e9 / hardware.usable_memory_bytes, rel=0.01)
    assert "devices (training.md)" in str(limits[0])


def test_fsdp_is_compute_bound_where_a_gather_is_shorter_than_the_matmuls_beside_it():
    """training.md: from 850 tokens per device on three wrapped axes, forward."""
    hardware = cost_models.hardware("tpu-v5p:4x4x4")
    for tokens, hidden in ((800 * 64, False), (900 * 64, True)):
        limits = model_limits(LLAMA_70B, hardware, tokens)
        gather_s, beside_s = value(limits, "FSDP gathers"), value(limits, "beside its forward")
        block = 3 * 8192 * 28672 + 2 * 8192 * 72 * 128
        assert gather_s == pytest.approx(2 * block / (6 * 90e9))
        assert beside_s == pytest.approx(2 * block * tokens / 64 / 459e12)
        assert (gather_s < beside_s) == hidden
        assert value(limits, "an MLP matmul") < tokens / 64


@pytest.mark.parametrize(
    ("spec", "axes", "expected"),
    [("tpu-v6e:16x16", 1, 5111), ("tpu-v6e:16x16", 2, 2556), ("tpu-v6e:8x8", 2, 5111), ("tpu-v6e:8x8", 1, 10222)],
)
def test_a_line_has_half_of_the_links_of_a_ring(spec: str, axes: int, expected: float):
    """MaxText, docs/guides/optimization/custom_model.md: 5100 for one ring or two lines, 2550 for two rings."""
    assert domain_intensity(cost_models.hardware(spec), axes) == pytest.approx(expected, rel=1e-3)


def test_larger_batches_hide_gradients_of_more_replicas():
    hardware = cost_models.hardware("h100:4x8")
    few, many = (
        value(model_limits(LLAMA_70B, hardware, tokens), "gradients of one block") for tokens in (32 * 1000, 32 * 10000)
    )
    assert few == 1
    assert many > 32


def test_experts_need_more_tokens():
    hardware = cost_models.hardware("tpu-v5p:4x4x4")
    moe = Transformer(
        layers=2, d_model=4096, d_ff=8192, heads=32, kv_heads=8, head_dim=128, vocab=32000, experts=16, active_experts=2
    )
    dense = Transformer(layers=2, d_model=4096, d_ff=8192, heads=32, kv_heads=8, head_dim=128, vocab=32000)
    ratio = [value(model_limits(m, hardware, 1e6), "FSDP alone") for m in (dense, moe)]
    assert ratio[0] / ratio[1] == pytest.approx(8)


def test_domain_intensity_counts_both_directions_of_a_torus():
    assert domain_intensity(cost_models.hardware("tpu-v5p:4x4x4")) == pytest.approx(459e12 / 180e9)
    assert domain_intensity(cost_models.hardware("h100:1x8")) == pytest.approx(989e12 / 450e9)


def test_llama_70b_on_v5e():
    """applied-inference.md:115: int8 weights, 32 sequences of 8k on 4x2: about 17 ms of memory traffic."""
    hardware = cost_models.hardware("tpu-v5e:2x4")
    found = serving_time(LLAMA_70B, hardware, batch=32, context=8192, weight_dtype="int8", cache_dtype="int8")
    memory_s = (70.6e9 + 32 * 163840 * 8192) / (8 * 8.2e11 * 0.87)
    assert found.decode_s - found.exchange_s == pytest.approx(memory_s, rel=0.01)
    machine = hardware.place({"tensor": 8})
    assert found.exchange_s == pytest.approx(
        160 * float(machine.collective_s("all-reduce", ("tensor",), 32 * 8192 * 2))
    )
    assert found.cache_bytes == 163840 * 8192
    assert found.load_s == pytest.approx(70.6e9 / (8 * 8.2e11 * 0.87), rel=0.01)
    x = (8192 * 8 / (2 * 28672)) ** 0.5
    assert found.exchange_2d_s == pytest.approx(80 * (2 * 32 * 8192 / x + 4 * 32 * 28672 * x / 8) / 9e10)
    assert found.tokens_per_s == pytest.approx(32 / found.decode_s)
    assert found.largest_batch == int((8 * hardware.usable_memory_bytes - found.parameter_bytes) / found.cache_bytes)
    assert found.requests_per_s(512) == pytest.approx(32 / (found.decode_s * 512))
    assert found.prefill_servers(512) == pytest.approx(32 * found.prefill_s / (found.decode_s * 512))
    assert found.useful_ways == pytest.approx(28672 / (32 * 8.2e11 / 9e10))


def test_a_model_that_does_not_fit_serves_nobody():
    found = serving_time(LLAMA_70B, cost_models.hardware("tpu-v5e:1x1"), batch=1, context=1024)
    assert found.largest_batch == 0
    assert found.exchange_s == 0
