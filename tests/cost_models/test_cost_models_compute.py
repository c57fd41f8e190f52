"""Seconds of local operations: against measured matmuls, and the laws of a roofline."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cost_models
from cost_models.closed_forms.operations import attention_s, elementwise_s, lookup_s, optimizer_s
from cost_models.machines.dtypes import itemsize, matmul_rates
from cost_models.machines.machine import Machine
from cost_models.machines.roofline import taps_on_data

CHIPS = cost_models.chips()
SIZES = st.integers(1, 20000)


def machine_of(chip: str) -> Machine:
    hardware = cost_models.hardware(chip, devices=8)
    return hardware.place({"x": hardware.devices})


@pytest.mark.parametrize(
    ("chip", "m", "nk", "tflops_per_s"),
    [
        ("h100", 256, 4096, 418),
        ("h100", 512, 4096, 662),
        ("h100", 1024, 1024, 253),
        ("h100", 2048, 2048, 641),
        ("h100", 4096, 4096, 780),
        ("h100", 256, 256, 6.7),
        ("b200", 256, 4096, 651),
        ("b200", 512, 4096, 990),
        ("b200", 1024, 4096, 1214),
        ("b200", 4096, 1024, 716),
        ("b200", 2048, 2048, 986),
        ("b200", 4096, 4096, 1417),
        ("tpu-v7x", 1024, 1024, 350),
        ("tpu-v7x", 2048, 2048, 679),
        ("tpu-v7x", 4096, 4096, 893),
        ("tpu-v7x", 16384, 16384, 950),
        ("tpu-v6e", 8192, 8192, 827),
        ("tpu-v4", 16384, 16384, 244),
    ],
)
def test_measured_matmuls(chip: str, m: int, nk: int, tflops_per_s: float):
    """[m, nk] @ [nk, nk], bfloat16: XLA's default_matmul_perf_table.txtpb, tpu-recipes, HighPerfLLMs2024."""
    predicted = machine_of(chip).matmul_flops_per_s(1, m, nk, nk, "bfloat16")
    assert float(predicted) / 1e12 == pytest.approx(tflops_per_s, rel=0.2)


def test_a_decoding_matmul_takes_as_long_as_reading_its_weights():
    machine = machine_of("h100")
    one, eight = (float(machine.matmul_s(1, m, 8192, 8192, "bfloat16")) for m in (1, 8))
    weights_s = 2 * 8192**2 / (3.35232e12 * 0.9)
    assert one == pytest.approx(weights_s, rel=0.1)
    assert eight == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("chip", CHIPS)
@settings(deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES, more=st.integers(0, 20000))
def test_larger_matmuls_never_cost_less(chip: str, m: int, n: int, k: int, more: int):
    machine = machine_of(chip)
    grown = machine.matmul_s(
        [1, 1, 1, 1, 1 + more], [m, m + more, m, m, m], [n, n, n + more, n, n], [k, k, k, k + more, k], "bfloat16"
    )
    assert np.all(grown >= grown[0])


@pytest.mark.parametrize("chip", CHIPS)
@settings(deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_matmul_beats_the_peak_or_the_memory(chip: str, m: int, n: int, k: int):
    machine = machine_of(chip)
    seconds = float(machine.matmul_s(1, m, n, k, "bfloat16"))
    assert 2.0 * m * n * k / seconds <= machine.peak_flops_per_s("bfloat16")
    assert seconds >= float(machine.hbm_s(2 * (m * k + k * n + m * n)))


@settings(deadline=None)
@given(st.sampled_from(CHIPS), SIZES, SIZES, SIZES)
def test_rows_and_columns_may_swap(chip: str, m: int, n: int, k: int):
    machine = machine_of(chip)
    assert float(machine.matmul_s(1, m, n, k, "bfloat16")) == pytest.approx(
        float(machine.matmul_s(1, n, m, k, "bfloat16"))
    )


def test_thin_matmuls_achieve_less():
    machine = machine_of("tpu-v5e")
    fat, thin = (float(machine.matmul_flops_per_s(1, 65536, n, 4096, "bfloat16")) for n in (4096, 32))
    assert thin < fat / 3


def test_an_empty_matmul_costs_nothing():
    assert machine_of("h100").matmul_s(0, 1, 1, 1, "bfloat16") == 0


@pytest.mark.parametrize(
    ("chip", "dtype", "same_as"),
    [
        ("h100", "float8_e4m3fn", "float8_e5m2"),
        ("tpu-v5e", "float32", "bfloat16"),  # JAX's default precision: one bfloat16 pass
        ("a100", "float8_e4m3fn", "bfloat16"),  # no fp8 units
        ("h100", "int4", "int8"),
    ],
)
def test_which_units_serve_a_dtype(chip: str, dtype: str, same_as: str):
    machine = machine_of(chip)
    assert machine.peak_flops_per_s(dtype) == machine.peak_flops_per_s(same_as)


def test_float32_runs_as_tf32_on_gpus_and_integers_on_the_vector_units():
    machine = machine_of("h100")
    assert machine.peak_flops_per_s("float32") == machine.peak_flops_per_s("bfloat16") / 2
    assert machine.peak_flops_per_s("int32") == machine.chip.numbers["vector_flops_per_s"].value


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", 2),
        ("float32", 4),
        ("int8", 1),
        ("float8_e4m3fn", 1),
        ("float4_e2m1fn", 0.5),
        ("int4", 0.5),
        ("bool", 1),
    ],
)
def test_itemsize(dtype: str, size: float):
    assert itemsize(dtype) == size
    assert matmul_rates(dtype)


def test_the_score_tensor_makes_plain_attention_slower_than_flash():
    machine = machine_of("h100")
    flash, plain = (
        float(attention_s(machine, 4, 32, 8, 8192, 8192, 128, "bfloat16", flash=flash)) for flash in (True, False)
    )
    scores_s = float(machine.hbm_s(4 * 32 * 8192 * 8192 * 4 * 4))
    assert plain > flash + scores_s
    full = float(attention_s(machine, 4, 32, 8, 8192, 8192, 128, "bfloat16", causal=False))
    assert full == pytest.approx(2 * flash, rel=0.01)


def test_memory_bound_operations():
    machine = machine_of("h100")
    rate = 3.35232e12 * 0.9
    assert float(elementwise_s(machine, 1e9, 2, 1, "float32")) == pytest.approx(12e9 / rate)
    assert float(lookup_s(machine, 1000, 4096, "bfloat16")) == pytest.approx(2 * 1000 * 4096 * 2 / rate)
    assert float(optimizer_s(machine, 1e9)) == pytest.approx(28e9 / rate)


def test_overlap_hides_no_more_than_its_share():
    machine = machine_of("h100")
    hidden = machine.overlap
    assert float(machine.exposed_s(1.0, 10.0)) == pytest.approx(1 - hidden)
    assert float(machine.exposed_s(10.0, 1.0)) == pytest.approx(10 - hidden)
    assert float(machine.exposed_s(1.0, 0.0)) == 1


def test_a_long_contraction_of_few_tiles_is_cut_into_sums():
    """XLA:GPU cuts the gradient of a small weight over many tokens into sums that run at once (split-K)."""
    machine = machine_of("h100")
    unit, sizes = machine.matmul_unit("bfloat16"), (1, 256, 256, 65536)
    assert float(machine.matmul_s(*sizes, "bfloat16")) < float(unit.compute_s(*sizes)) / 10
    assert float(machine.matmul_flops_per_s(*sizes, "bfloat16")) < unit.peak_flops_per_s * unit.achieved_fraction


def test_tiny_matmuls_of_a_batch_wait_for_memory_alone():
    machine = machine_of("h100")
    read_and_written_s = float(machine.hbm_s(3 * 4 * 65536 * 4 * 4))
    assert float(machine.matmul_s(65536, 4, 4, 4, "float32")) == pytest.approx(read_and_written_s + 3e-6, rel=0.01)


@given(
    sizes=st.tuples(*[st.integers(1, 12)] * 3),
    stride=st.integers(1, 5),
    pad=st.integers(-8, 12),
    steps=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_taps_on_data_are_those_that_are_counted_one_by_one(
    sizes: tuple[int, int, int], stride: int, pad: int, steps: tuple[int, int]
) -> None:
    (outputs, kernel, image), (image_step, kernel_step) = sizes, steps
    points = [o * stride - pad + k * kernel_step for o in range(outputs) for k in range(kernel)]
    counted = sum(0 <= at <= (image - 1) * image_step and at % image_step == 0 for at in points)
    found = taps_on_data(outputs, kernel, image, stride=stride, pad=pad, image_step=image_step, kernel_step=kernel_step)
    assert found == counted


def test_a_window_as_long_as_a_batch_has_its_taps_counted() -> None:
    """XLA:TPU writes the gradient of a narrow weight so: pairs of 262,144 by 262,144 would fill 512 GiB."""
    assert taps_on_data(1, 2**40 + 1, 2**40 + 1, stride=1, pad=0, image_step=1, kernel_step=1) == 2**40 + 1
    assert taps_on_data(262_144, 262_144, 1, stride=1, pad=262_143, image_step=1, kernel_step=1) == 262_144
