"""Measurements become hardware files that price what was measured."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cost_models
from cost_models import KINDS
from cost_models.errors import CostModelError
from cost_models.machines import catalogue
from cost_models.machines.measured import (
    CollectiveSample,
    MatmulSample,
    Measurement,
    StreamSample,
    document,
    fit_line,
    write,
)

SHIPPED = Path(cost_models.__file__).parent / "hardware" / "cpu-measured.json"


def measurement(based_on: str = "cpu", topology: str = "8", flops_per_s: float = 4e10, **changes: Any) -> Measurement:
    """A machine whose laws are known: 5 µs and 40 GFLOP/s, 6 GB/s of memory, 30 µs and 2 GB/s of links."""
    shapes = [(1, 64 * 2**i, 512, 512) for i in range(8)]
    fields: dict[str, Any] = {
        "name": "this-machine",
        "based_on": based_on,
        "topology": topology,
        "matmuls": {
            "float32": [MatmulSample(b, m, n, k, 5e-6 + 2 * b * m * n * k / flops_per_s) for b, m, n, k in shapes]
        },
        "streams": [StreamSample("copy", size, size / 6e9) for size in (1e6, 1e7, 1e8)],
        "collectives": [CollectiveSample("all-gather", 8, size, 3e-5 + size * 7 / 8 / 2e9) for size in (1e4, 1e6, 1e8)],
        "date": "2026-11-21",
        "device_kind": "cpu",
        "versions": "jax 0.10.2",
        "method": "median of 10",
    }
    return Measurement(**(fields | changes))


def test_a_written_file_prices_what_was_measured(tmp_path: Path):
    write(measurement(), tmp_path / "m.json")
    hardware = cost_models.hardware(tmp_path / "m.json")
    machine = hardware.place({"x": 8})
    assert hardware.name == "cpu/this-machine:8"
    assert float(machine.matmul_s(1, 4096, 512, 512, "float32")) == pytest.approx(
        5e-6 + 2 * 4096 * 512**2 / 4e10, rel=0.01
    )
    assert float(machine.hbm_s(5e7)) == pytest.approx(5e7 / 6e9, rel=0.01)
    assert float(machine.collective_s("all-gather", ("x",), 1e6)) == pytest.approx(3e-5 + 1e6 * 7 / 8 / 2e9)
    assert "measured 2026-11-21 on cpu, jax 0.10.2: median of 10" in hardware.provenance["peak_float32_flops_per_s"]
    assert hardware.chip.measured["device_kind"] == "cpu"
    assert hardware.provenance["hbm_bytes"].startswith("assumed")  # what was not measured keeps its source


def test_the_peak_of_a_data_sheet_is_kept():
    found = document(measurement("h100", "1x8", flops_per_s=4e14, matmuls={
        "bfloat16": [MatmulSample(1, s, s, s, 2.0 * s**3 / 6e14) for s in (4224, 8448)]
    }))["numbers"]  # fmt: skip
    assert "peak_bfloat16_flops_per_s" not in found
    assert found["matmul_achieved_fraction"]["value"] == pytest.approx(6e14 / 9.89e14, rel=0.05)
    assert found["hbm_achieved_fraction"]["value"] == pytest.approx(6e9 / 3.35232e12)


def test_repeated_sizes_count_once_with_their_best_time():
    twice = [CollectiveSample("all-gather", 8, 1e6, 2.0), CollectiveSample("all-gather", 8, 1e6, 1.0)]
    (table,) = document(measurement(collectives=[*twice, CollectiveSample("all-gather", 8, 1e7, 9.0)]))["tables"]
    assert table["bytes"] == [1e6, 1e7]
    assert table["seconds"] == [1.0, 9.0]


def test_the_file_is_plain_json(tmp_path: Path):
    write(measurement(), tmp_path / "m.json")
    read = json.loads((tmp_path / "m.json").read_text())
    assert read["schema"] == "hardware/1"
    assert read["measured"] == {
        "date": "2026-11-21",
        "device_kind": "cpu",
        "versions": "jax 0.10.2",
        "method": "median of 10",
    }


def test_the_shipped_measurement_prices_what_it_measured():
    chip = catalogue.chip("cpu-measured")
    assert chip.measured["date"] == "2026-11-21"
    assert {"peak_float32_flops_per_s", "hbm_bytes_per_s"} <= {
        key for key, number in chip.numbers.items() if number.source.startswith("measured 2026-11-21 on cpu, jax ")
    }
    assert {(t.kind, t.devices) for t in chip.links["domain"].tables} == set(
        product(set(KINDS) - {"broadcast"}, (2, 4, 8))
    )
    machine = cost_models.hardware("cpu-measured:8").place({"x": 8})
    for table in (t for t in chip.links["domain"].tables if t.devices == 8):
        assert float(machine.collective_s(table.kind, ("x",), table.nbytes[-1])) == pytest.approx(table.seconds[-1])
    samples = json.loads(SHIPPED.read_text())["samples"]
    largest = max(s["nbytes"] for s in samples["streams"])
    for s in samples["streams"]:
        if 2 * s["nbytes"] >= largest:
            assert float(machine.hbm_s(s["nbytes"])) == pytest.approx(s["seconds"], rel=0.5)
    for s in samples["matmuls"]:
        if s["batch"] * s["m"] * s["n"] * s["k"] >= 256**3:  # smaller ones lie in caches, which no price knows
            priced = float(machine.matmul_s(s["batch"], s["m"], s["n"], s["k"], s["dtype"]))
            assert 0.5 < priced / s["seconds"] < 2


@settings(deadline=None)
@given(st.floats(0, 1e-3), st.floats(1e6, 1e15))
def test_a_line_is_found_again(fixed_s: float, rate: float):
    work = np.geomspace(1e-4, 1e2, 7) * rate
    found_fixed_s, found_rate = fit_line(work.tolist(), (fixed_s + work / rate).tolist())
    assert found_fixed_s == pytest.approx(fixed_s, abs=1e-9)
    assert found_rate == pytest.approx(rate, rel=1e-6)


def test_a_line_never_starts_below_zero():
    assert fit_line([1.0, 2.0, 4.0], [1.0, 3.0, 9.0]) == (0.0, 0.5)


def test_memory_is_as_fast_as_what_no_cache_holds():
    streams = [StreamSample("copy", 1e6, 1e6 / 30e9), StreamSample("copy", 1e8, 0.2), StreamSample("reduce", 6e7, 0.12)]
    assert document(measurement(streams=streams))["numbers"]["hbm_bytes_per_s"]["value"] == pytest.approx(5e8)


@pytest.mark.parametrize(
    "samples",
    [
        lambda: fit_line([1.0], [1.0]),
        lambda: fit_line([1.0, 1.0], [1.0, 2.0]),
        lambda: fit_line([1.0, 2.0], [1.0, -1.0]),
    ],
)
def test_too_few_samples(samples: Callable[[], object]):
    with pytest.raises(CostModelError, match="a fit needs positive times of two sizes or more"):
        samples()
