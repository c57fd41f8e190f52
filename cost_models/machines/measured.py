"""Measured hardware: timings of one machine → a hardware file in the catalogue's schema.

This room does not time: it takes samples and fits the few numbers that prices
need. A matmul takes `fixed + work ÷ rate`; fixed and rate are fitted
to the *relative* errors, so that small and large samples count alike. Memory is
as fast as the largest streams, which no cache holds. Collectives are kept as tables.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.errors import CostModelError
from cost_models.machines import catalogue
from cost_models.machines.alpha_beta import Floats, Kind
from cost_models.machines.collective_law import link_bytes
from cost_models.machines.dtypes import itemsize, matmul_rates
from cost_models.machines.hardware_file import CHIP_NUMBERS, SCHEMA, Chip
from cost_models.machines.placement import place
from cost_models.machines.roofline import MatmulUnit, matmul_bytes
from cost_models.machines.topology import parse_topology

# A rate above this multiple of a data sheet's is no measurement.
MOST_OF_PEAK = 1.2


@dataclass(frozen=True, slots=True)
class MatmulSample:
    """One timed `[batch, m, k] @ [batch, k, n]`."""

    batch: int
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamSample:
    """One timed pass over so many bytes of memory, read and written together."""

    operation: str
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One timed collective of `nbytes` logical bytes per device on all `devices`."""

    kind: Kind
    devices: int
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The timings of one machine, with their date, software and method.

    Attributes:
        name: Name of the resulting file.
        based_on: The catalogue's chip, which states the numbers that were not measured.
        topology: As written after the colon: `"8"`, `"1x8"`.
        matmuls: By dtype.
        streams: Of one device's memory.
        collectives: Within one node or host; may be empty.
        date: ISO date.
        device_kind: As the runtime names it.
        versions: Of the software that ran.
        method: How it was timed, in a few words.
    """

    name: str
    based_on: str
    topology: str
    matmuls: Mapping[str, Sequence[MatmulSample]]
    streams: Sequence[StreamSample]
    collectives: Sequence[CollectiveSample]
    date: str
    device_kind: str
    versions: str
    method: str


def fit_line(work: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """`(fixed_s, rate)` such that seconds ≈ fixed + work ÷ rate, least squares of relative errors.

    Where times grow faster than the work, as they do once a cache is too small, the rate
    is that of the largest sizes, within a factor of two.

    Raises:
        CostModelError: Fewer than two sizes, or times that do not grow with the work.
    """
    w, t = np.asarray(work, float), np.asarray(seconds, float)
    if len(set(w.tolist())) < 2 or np.any(t <= 0):
        raise CostModelError(f"a fit needs positive times of two sizes or more, got {len(w)} samples")
    scaled = np.stack([1 / t, w / t], axis=1)
    fixed, slope = np.linalg.lstsq(scaled, np.ones_like(t), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, 1 / _rate_of_the_largest(w, t)
    if slope <= 0:
        raise CostModelError("the measured times do not grow with the work; time larger sizes")
    return float(fixed), float(1 / slope)


def _rate_of_the_largest(work: Floats, seconds: Floats) -> float:
    """The rate of all samples within a factor of two of the largest, taken together."""
    largest = 2 * work >= work.max()
    return float(np.sum(work[largest]) / np.sum(seconds[largest]))


def document(measurement: Measurement) -> dict[str, Any]:
    """The hardware file of a measurement, ready for JSON.

    Raises:
        CostModelError: There are too few samples of something, or a rate exceeds the
            data sheet's by more than `MOST_OF_PEAK`.
    """
    base = catalogue.chip(measurement.based_on)
    source = f"measured {measurement.date} on {measurement.device_kind}, {measurement.versions}: {measurement.method}"
    numbers: dict[str, float] = {}
    stream_rate = 0.0
    if measurement.streams:
        touched, seconds = np.array([(s.nbytes, s.seconds) for s in measurement.streams], float).T
        stream_rate = _rate_of_the_largest(touched, seconds)  # smaller ones may lie in a cache
        numbers |= _split(base, "hbm_bytes_per_s", "hbm_achieved_fraction", stream_rate)
    launches: list[float] = []
    for dtype, samples in measurement.matmuls.items():
        launch_s, rate = _fit_matmuls(base, _by_arithmetic(samples, itemsize(dtype), stream_rate))
        launches.append(launch_s)
        key = next(key for key in matmul_rates(dtype) if key in CHIP_NUMBERS)
        short = key.removeprefix("peak_").removesuffix("_flops_per_s")
        fraction = f"matmul_achieved_{short}_fraction"
        numbers |= _split(base, key, fraction if fraction in CHIP_NUMBERS else "matmul_achieved_fraction", rate)
    if launches:
        numbers["matmul_launch_s"] = float(np.median(launches))
    if any(s.kind == "all-gather" for s in measurement.collectives):
        launch_s, rate = _fit_links(base, measurement)
        numbers |= {"domain.one_way_bytes_per_s": rate, "domain.achieved_fraction": 1.0}
        numbers |= {"domain.launch_s": launch_s, "domain.hop_s": 0.0}
    return {
        "schema": SCHEMA,
        "kind": "chip",
        "name": measurement.name,
        "description": f"{base.description}, measured",
        "based_on": measurement.based_on,
        "topology": measurement.topology,
        "measured": {
            "date": measurement.date,
            "device_kind": measurement.device_kind,
            "versions": measurement.versions,
            "method": measurement.method,
        },
        "numbers": {key: {"value": value, "source": source} for key, value in numbers.items()},
        "tables": _tables(measurement, source),
        "samples": {
            "matmuls": [{"dtype": d, **asdict(s)} for d, samples in measurement.matmuls.items() for s in samples],
            "streams": [asdict(s) for s in measurement.streams],
        },
    }


def write(measurement: Measurement, path: str | Path) -> None:
    """Write the hardware file of a measurement; `cost_models.hardware(path)` reads it."""
    Path(path).write_text(json.dumps(document(measurement), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _by_arithmetic(samples: Sequence[MatmulSample], itemsize: float, stream_rate: float) -> list[MatmulSample]:
    """The samples that did not wait for memory; all of them if too few are left.

    A sample waited for memory if its traffic takes about as long as the sample; traffic
    that would have taken much longer came from a cache.
    """
    if not stream_rate:
        return list(samples)
    bound: list[MatmulSample] = []
    for s in samples:
        touched = float(matmul_bytes(s.batch, s.m, s.n, s.k, itemsize, itemsize))
        if not 0.5 <= touched / stream_rate / s.seconds <= 1.5:
            bound.append(s)
    return bound if len({(s.batch, s.m, s.n, s.k) for s in bound}) > 1 else list(samples)


def _fit_matmuls(base: Chip, samples: Sequence[MatmulSample]) -> tuple[float, float]:
    """Launch and FLOP/s, the FLOPs padded to the tiles of the chip, as prices pad them."""
    unit = MatmulUnit(
        peak_flops_per_s=1.0,
        achieved_fraction=1.0,
        tile_rows=int(base.numbers["matmul_tile_rows_count"].value),
        tile_columns=int(base.numbers["matmul_tile_columns_count"].value),
        tile_depth=int(base.numbers["matmul_tile_depth_count"].value),
        units=int(base.numbers["matmul_units_count"].value),
        launch_s=0.0,
    )
    padded = [float(unit.compute_s(s.batch, s.m, s.n, s.k)) for s in samples]
    return fit_line(padded, [s.seconds for s in samples])


def _fit_links(base: Chip, measurement: Measurement) -> tuple[float, float]:
    """Launch and one-way bytes/s of the domain's links, from all-gathers among neighbours."""
    topology = parse_topology(base, measurement.topology)
    carried: list[float] = []
    seconds: list[float] = []
    for s in measurement.collectives:
        if s.kind == "all-gather" and topology.devices % s.devices == 0:
            placement = place(topology, {"apart": topology.devices // s.devices, "group": s.devices})
            levels = link_bytes(s.kind, placement.crossings(("group",)), base.links, s.nbytes)
            if set(levels) == {"domain"}:
                carried.append(float(levels["domain"]))
                seconds.append(s.seconds)
    return fit_line(carried, seconds)


def _split(base: Chip, peak_key: str, fraction_key: str, rate: float) -> dict[str, float]:
    """A measured rate as peak × achieved fraction: the data sheet's peak, unless it is a guess or was beaten."""
    stated = base.numbers.get(peak_key)
    if stated is None or stated.source.startswith("assumed"):
        return {peak_key: rate, fraction_key: 1.0}
    if rate > MOST_OF_PEAK * stated.value:
        raise CostModelError(
            f"`{peak_key}` was measured at {rate:.3g}, {base.name} has {stated.value:.3g} ({stated.source}): "
            "the timed work was not done, or this is another chip (say which it is `based_on`)"
        )
    if rate > stated.value:
        return {peak_key: rate, fraction_key: 1.0}
    return {fraction_key: rate / stated.value}


def _tables(measurement: Measurement, source: str) -> list[dict[str, Any]]:
    """One table per collective and group size, sizes ascending; the smallest time of equal sizes."""
    by_group: dict[tuple[str, int], dict[float, float]] = {}
    for s in measurement.collectives:
        times = by_group.setdefault((s.kind, s.devices), {})
        times[s.nbytes] = min(s.seconds, times.get(s.nbytes, s.seconds))
    return [
        {
            "collective": kind,
            "devices": devices,
            "source": source,
            "bytes": sorted(times),
            "seconds": [times[size] for size in sorted(times)],
        }
        for (kind, devices), times in by_group.items()
        if len(times) > 1
    ]
