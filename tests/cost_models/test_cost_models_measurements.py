"""Prices against single measurements that others published; nothing but the numbers a file names was fitted to them."""

import pytest

import cost_models
from cost_models import Kind

XLA_MATMULS = "openxla/xla bdd11ba, default_matmul_perf_table.txtpb"


def algorithm_rate(spec: str, mesh: dict[str, int], kind: Kind, axes: tuple[str, ...], nbytes: float) -> float:
    """Bytes of the collective over its seconds, in GB/s."""
    return nbytes / float(cost_models.hardware(spec).place(mesh).collective_s(kind, axes, nbytes)) / 1e9


@pytest.mark.parametrize(
    ("nbytes", "rate"), [(131e3, 8.7), (524e3, 27), (4.2e6, 72), (17e6, 86), (134e6, 90), (1e9, 90)]
)
def test_a_ring_of_16_v5e(nbytes: float, rate: float):
    """Austin et al., How to Scale Your Model, sharding.md:350, plot of 8x16, read off to 5%."""
    assert algorithm_rate("tpu-v5e:8x16", {"y": 8, "x": 16}, "all-gather", ("x",), nbytes) == pytest.approx(
        rate, rel=0.08
    )


@pytest.mark.parametrize(("nbytes", "rate"), [(134e6, 102), (8.6e9, 108.5)])
def test_an_all_reduce_over_one_axis_of_v5p(nbytes: float, rate: float):
    """The same, plot of 4x4x4; at 4 MB it shows three times our seconds, at 17 MB a fifth more."""
    mesh = {"z": 4, "y": 4, "x": 4}
    assert algorithm_rate("tpu-v5p:4x4x4", mesh, "all-reduce", ("x",), nbytes) == pytest.approx(rate, rel=0.08)


def test_a_line_of_4_v5e_takes_between_what_is_calculated_and_what_was_measured():
    """The same, sharding.md:364: 560 µs by hand, 680 µs measured, 377 µs were it a ring."""
    seconds = cost_models.hardware("tpu-v5e:4x8").place({"y": 4, "x": 8}).collective_s("all-gather", ("y",), 2**25)
    assert 560e-6 < float(seconds) < 680e-6


@pytest.mark.parametrize(
    ("received", "rate"), [(1.57e6, 71.8), (6.29e6, 129.2), (25.2e6, 161.9), (100.7e6, 174.8), (402.7e6, 178.8)]
)
def test_both_dies_of_4_ironwood_chips_share_the_links_of_each(received: float, rate: float):
    """AI-Hypercomputer/tpu-recipes c8cfe2f, microbenchmarks/ironwood, all-gather on 2x2x1, by what a chip receives."""
    mesh = {"chip": 4, "die": 2}
    rated = algorithm_rate("tpu-v7x:2x2x1", mesh, "all-gather", ("chip", "die"), received * 4 / 3)
    assert rated * 3 / 4 == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "microseconds"),
    [
        ("h100:1x8", {2**16: 39.7, 2**20: 51.9, 2**24: 145, 2**26: 380, 2**28: 1262, 2**30: 4721}),
        ("b200:1x8", {2**16: 45.0, 2**20: 49.1, 2**24: 131, 2**26: 314, 2**28: 843, 2**30: 3115}),
        ("gb200:1x8", {2**24: 108, 2**26: 281, 2**28: 719, 2**30: 2592}),
        ("gb200:1x64", {2**22: 76.9, 2**24: 151, 2**26: 342, 2**28: 932, 2**30: 2820}),
        ("gb300:1x64", {2**22: 75.8, 2**24: 148, 2**26: 334, 2**28: 914, 2**30: 2816}),
    ],
)
def test_all_reduces_of_nccl(spec: str, microseconds: dict[int, float]):
    """openxla/xla bdd11ba, default_collective_perf_table.txtpb, which the catalogue has in part."""
    devices = cost_models.hardware(spec).devices
    for nbytes, measured in microseconds.items():
        seconds = nbytes / algorithm_rate(spec, {"x": devices}, "all-reduce", ("x",), nbytes) / 1e9
        assert seconds * 1e6 == pytest.approx(measured, rel=0.3), nbytes


@pytest.mark.parametrize(
    ("spec", "shape", "teraflops", "source"),
    [
        ("h100:1x8", (256, 4096, 4096), 418, XLA_MATMULS),
        ("h100:1x8", (512, 4096, 4096), 662, XLA_MATMULS),
        ("h100:1x8", (1024, 1024, 1024), 253, XLA_MATMULS),
        ("h100:1x8", (2048, 2048, 2048), 641, XLA_MATMULS),
        ("h100:1x8", (4096, 4096, 4096), 780, XLA_MATMULS),
        ("h100:1x8", (256, 256, 256), 6.7, XLA_MATMULS),
        ("b200:1x8", (256, 4096, 4096), 651, XLA_MATMULS),
        ("b200:1x8", (512, 4096, 4096), 990, XLA_MATMULS),
        ("b200:1x8", (1024, 4096, 4096), 1214, XLA_MATMULS),
        ("b200:1x8", (4096, 1024, 1024), 716, XLA_MATMULS),
        ("b200:1x8", (2048, 2048, 2048), 986, XLA_MATMULS),
        ("b200:1x8", (4096, 4096, 4096), 1417, XLA_MATMULS),
        ("tpu-v7x:2x2x1", (1024, 1024, 1024), 350, "tpu-recipes c8cfe2f, microbenchmarks/ironwood"),
        ("tpu-v7x:2x2x1", (2048, 2048, 2048), 679, "tpu-recipes c8cfe2f, microbenchmarks/ironwood"),
        ("tpu-v7x:2x2x1", (4096, 4096, 4096), 893, "tpu-recipes c8cfe2f, microbenchmarks/ironwood"),
        ("tpu-v7x:2x2x1", (32768, 32768, 32768), 956, "tpu-recipes c8cfe2f, microbenchmarks/ironwood"),
        ("tpu-v6e:2x2", (8192, 8192, 8192), 827, "tpu-recipes c8cfe2f, microbenchmarks/README.md:46-72"),
        ("a100:1x8", (8192, 8192, 8192), 271, "Bekman, Machine Learning Engineering 744d01e, MAMF"),
        ("gb200:1x8", (16384, 16384, 16384), 1822, "Bekman, Machine Learning Engineering 744d01e, MAMF"),
    ],
)
def test_matmuls_large_small_and_thin(spec: str, shape: tuple[int, int, int], teraflops: float, source: str):
    hardware = cost_models.hardware(spec)
    rate = hardware.place({"x": hardware.devices}).matmul_flops_per_s(1, *shape, "bfloat16")
    assert float(rate) / 1e12 == pytest.approx(teraflops, rel=0.2), source


@pytest.mark.parametrize(
    ("spec", "wraps"),
    [
        ("tpu-v5p:2x2x4", [False, False, False]),
        ("tpu-v5p:2x4x4", [False, False, False]),
        ("tpu-v5p:4x4x4", [True, True, True]),
        ("tpu-v5p:8x8x12", [True, True, True]),
        ("tpu-v4:4x4x8", [True, True, True]),
        ("tpu-v5e:8x16", [False, True]),
        ("tpu-v5e:16x16", [True, True]),
        ("tpu-v6e:8x8", [False, False]),
    ],
)
def test_which_slices_close_into_rings(spec: str, wraps: list[bool]):
    """AI-Hypercomputer/maxtext e591f30, src/maxtext/utils/accelerator_to_spec_map.py."""
    dimensions = cost_models.hardware(spec).topology.dimensions
    assert [d.wraps for d in dimensions if d.medium == "torus"] == wraps
