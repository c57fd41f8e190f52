"""Measure: times the devices at hand and says so in the cost models' terms.

Every kernel runs on all devices at once, as the programs do that are planned with
these numbers: devices that share memory, power or cores get their share. It repeats
inside one compiled program, each run on the result of the one before, so often that
starting the program does not count; the median over several such programs is taken.

Run as a script, this is the process that `autoshard hardware measure` starts: jax
must not have started on other devices before.
"""

import argparse
import datetime
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from autoshard import _startup  # first: it imports jax quietly

# isort: split

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autoshard import files
from autoshard.backends import devices as meshes
from autoshard.errors import AutoshardError, MeasureError
from cost_models import CostModelError, Kind
from cost_models.machines import catalogue
from cost_models.machines.hardware_file import Chip
from cost_models.machines.measured import CollectiveSample, MatmulSample, Measurement, StreamSample, document
from cost_models.machines.topology import smallest_topology

DTYPES = ("bfloat16", "float32")
COLLECTIVES: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_MOST_TIMES = 100_000  # a kernel in one program
_LARGEST_MATMUL_S, _WIDEST = 0.02, 8192  # at the catalogue's peak
_SMALLEST_MESSAGE, _LARGEST_MESSAGE = 2**12, 2**28

Step = Callable[..., jax.Array]
"""One run of a kernel on one device, or `Case.runs` of it: `(carried, *constants) -> carried`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long is measured.

    Attributes:
      program_s: seconds that one program of repeated kernels should last.
      repeats: programs per kernel, of whose times the median counts.
      scale: largest sizes as a share of the usual ones; below 1 for a quick look.
    """

    program_s: float = 0.05
    repeats: int = 7
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.program_s > 0 and self.repeats >= 1 and 0 < self.scale <= 1):
            raise MeasureError(f"{self}: seconds and repeats must be positive, the scale between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time.

    Attributes:
      what: text for progress, such as `float32 256×1024×1024`.
      step: the kernel.
      shapes: shapes of the carried array, then of the constants, on one device.
      dtype: the element type of all of them.
      group: devices that communicate; 1 for a local kernel.
      runs: how often the step runs the kernel.
      sample: seconds of one run → the sample to keep.
    """

    what: str
    step: Step
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    group: int = 1
    runs: int = 1
    sample: Callable[[float], MatmulSample | StreamSample | CollectiveSample]


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of one run, and half the range of the middle half of the repeats, relative to it."""

    seconds: float
    spread: float


Progressed = Callable[[int, int, str], None]
"""Called before each case: how many are done, of how many, and what is next."""


def measure(
    devices: Sequence[Any],
    *,
    name: str | None = None,
    based_on: str | None = None,
    dtypes: Sequence[str] = DTYPES,
    effort: Effort | None = None,
    progressed: Progressed | None = None,
) -> Measurement:
    """Times matmuls, memory and collectives of the devices of one host.

    Args:
      devices: devices of one kind.
      name: the name of the hardware file; None: the catalogue's chip and `-measured`.
      based_on: the catalogue's chip with the numbers that are not measured; None recognises it.
      dtypes: element types of the matmuls.
      effort: how long to measure.
      progressed: called with the text of each case before it is timed.

    Raises:
      MeasureError: the devices are of several kinds or processes, or a kernel's time
        does not last.
      MeshError: the kind of device is not in the catalogue, and `based_on` is not given.
    """
    kinds = sorted({str(d.device_kind) for d in devices})
    if len(kinds) != 1:
        raise MeasureError(f"the devices are of {len(kinds)} kinds ({', '.join(kinds)}): measure one kind at a time")
    if len({d.process_index for d in devices}) > 1:
        raise MeasureError("the devices belong to several processes: measure those of one host, `jax.local_devices()`")
    chip = catalogue.chip(based_on or meshes.detect(list(devices), len(devices)).partition(":")[0])
    effort = effort or Effort()
    busy = _busy() if devices[0].platform == "cpu" else ""
    plan = list(cases(chip, len(devices), dtypes, effort.scale))
    samples: list[tuple[str, MatmulSample | StreamSample | CollectiveSample]] = []
    spreads: list[float] = []
    for done, case in enumerate(plan):
        if progressed is not None:
            progressed(done, len(plan), case.what)
        timed = time_case(case, devices, effort)
        spreads.append(timed.spread)
        samples.append((case.dtype, case.sample(timed.seconds)))
    return Measurement(
        name=name or f"{chip.name}-measured",
        based_on=chip.name,
        topology=smallest_topology(chip, len(devices)),
        matmuls={d: [s for of, s in samples if of == d and isinstance(s, MatmulSample)] for d in dtypes},
        streams=[s for _, s in samples if isinstance(s, StreamSample)],
        collectives=[s for _, s in samples if isinstance(s, CollectiveSample)],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device_kind=kinds[0],
        versions=f"jax {jax.__version__}, Python {platform.python_version()}",
        method=(
            f"every kernel on all {len(devices)} devices at once, repeated in one program for {effort.program_s:g} s, "
            f"median of {effort.repeats} programs; half of them lie within ±{float(np.median(spreads)):.0%} of it{busy}"
        ),
    )


def _busy() -> str:
    """The load of other programs on the timed cores; "" if there is almost none."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"; the {cores} cores were busy with {load:.0f} other threads" if load >= cores / 4 else ""


def cases(chip: Chip, devices: int, dtypes: Sequence[str], scale: float) -> Iterator[Case]:
    """The cases to time on a number of devices of a chip, with sizes by its memory and peak."""
    memory = scale * chip.numbers["hbm_bytes"].value
    for dtype in dtypes:
        yield from _matmuls(chip, dtype, scale)
    largest = _power_of_2(memory / 32)
    for nbytes in (largest // 16, largest // 4, largest):
        yield _stream("copy", _copy, nbytes, 2 * nbytes)
        yield _stream("reduce", _sum, nbytes, nbytes)
    last = min(_power_of_2(memory / 256), _LARGEST_MESSAGE)
    for group in (g for g in _powers_of_2(2, devices) if devices % g == 0):
        for kind in COLLECTIVES:
            for nbytes in _powers_of_2(_SMALLEST_MESSAGE, max(last, 4 * _SMALLEST_MESSAGE), 4):
                yield _collective(kind, group, nbytes)


def time_case(case: Case, devices: Sequence[Any], effort: Effort) -> Timed:
    """Times one case on all devices.

    Raises:
      MeasureError: the compiled program lasts no longer if it repeats the kernel more often.
    """
    mesh = Mesh(np.array(devices).reshape(-1, case.group), ("apart", "group"))
    spec = P(("apart", "group"))
    arguments = [_fill(shape, case.dtype, len(devices), mesh, spec) for shape in case.shapes]

    def program(times: int) -> Callable[[], float]:
        def repeated(carried: jax.Array, *constants: jax.Array) -> jax.Array:
            return lax.fori_loop(0, times, lambda _, x: case.step(x, *constants), carried)

        mapped = jax.shard_map(
            repeated, mesh=mesh, in_specs=(spec,) * len(case.shapes), out_specs=spec, check_vma=False
        )
        compiled = jax.jit(mapped).lower(*arguments).compile()

        def run() -> float:
            start = perf_counter()
            jax.block_until_ready(compiled(*arguments))
            return perf_counter() - start

        run()
        return run

    times, run = 1, program(1)
    while (once := min(run(), run())) < effort.program_s / 2:
        if times == _MOST_TIMES:
            raise MeasureError(
                f"{case.what}: {times} runs of it take {once:.2g} s together, too short to be work; "
                "the compiler has removed it, or the clock is wrong"
            )
        times = int(min(max(2 * times, times * min(effort.program_s / max(once, 1e-9), 100)), _MOST_TIMES))
        run = program(times)
    seconds = np.array([run() for _ in range(effort.repeats)]) / (times * case.runs)
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timed(float(median), float((high - low) / 2 / median))


def _fill(shape: tuple[int, ...], dtype: str, devices: int, mesh: Mesh, spec: P) -> jax.Array:
    """Normal values of deviation 1 ÷ √(last dimension), so that repeated products neither grow nor vanish."""
    whole = (devices * shape[0], *shape[1:])

    def values() -> jax.Array:
        return (jax.random.normal(jax.random.key(0), whole, jnp.float32) / shape[-1] ** 0.5).astype(dtype)

    return jax.block_until_ready(jax.jit(values, out_shardings=NamedSharding(mesh, spec))())


def _matmuls(chip: Chip, dtype: str, scale: float) -> Iterator[Case]:
    """Squares of four widths; thin ones, as decoding has; a batch of small ones, as attention has."""
    peak = chip.numbers.get(f"peak_{dtype}_flops_per_s", chip.numbers["peak_float32_flops_per_s"]).value
    width = min(_power_of_2((scale * _LARGEST_MATMUL_S * peak / 2) ** (1 / 3)), _WIDEST)
    squares = [(1, w, w) for w in (width // 8, width // 4, width // 2, width)]
    thin = [(1, rows, width) for rows in (width // 64, width // 16)]
    for batch, m, k in (*squares, *thin, (16, width // 4, width // 4)):
        if m:
            yield Case(
                what=f"{dtype} matmul {f'{batch}×' if batch > 1 else ''}{m}×{k}×{k}",
                step=_multiply_twice,
                shapes=((batch, m, k), (batch, k, k)),
                dtype=dtype,
                runs=2,
                sample=lambda seconds, b=batch, m=m, k=k: MatmulSample(b, m, k, k, seconds),
            )


def _stream(what: str, step: Step, nbytes: int, touched: int) -> Case:
    return Case(
        what=f"{what} of {nbytes >> 20} MiB",
        step=step,
        shapes=((nbytes // 4,),),
        dtype="float32",
        sample=lambda seconds: StreamSample(what, touched, seconds),
    )


def _collective(kind: Kind, group: int, nbytes: int) -> Case:
    elements = nbytes // 4
    carried = elements // group if kind == "all-gather" else elements
    return Case(
        what=f"{kind} of {nbytes >> 10} KiB among {group}",
        step=partial(_STEPS[kind], group),
        shapes=((carried,),),
        dtype="float32",
        group=group,
        sample=lambda seconds: CollectiveSample(kind, group, nbytes, seconds),
    )


def _multiply_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two products: a loop would copy a single one, which cannot take the place of what it is made of."""
    return lax.batch_matmul(lax.batch_matmul(x, w), w)


def _copy(x: jax.Array) -> jax.Array:
    """Reads and writes every byte."""
    return x + 1


def _sum(x: jax.Array) -> jax.Array:
    """Reads every byte: the next sum needs this one, in a single element."""
    return x.at[0].set(jnp.sum(x) * 1e-3)


def _gather(group: int, x: jax.Array) -> jax.Array:
    every = lax.optimization_barrier(lax.all_gather(x, "group", tiled=True))
    return lax.dynamic_slice(every, (x.size * (1 % group),), x.shape)


def _scatter(group: int, x: jax.Array) -> jax.Array:
    part = lax.psum_scatter(x, "group", tiled=True) / group
    return lax.dynamic_update_slice(x, part, (0,))


def _reduce(group: int, x: jax.Array) -> jax.Array:
    return lax.psum(x, "group") / group


def _exchange(group: int, x: jax.Array) -> jax.Array:
    del group
    return lax.all_to_all(x, "group", 0, 0, tiled=True)


def _pass_on(group: int, x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "group", [(i, (i + 1) % group) for i in range(group)])


_STEPS: dict[str, Callable[..., jax.Array]] = {
    "all-gather": _gather,
    "reduce-scatter": _scatter,
    "all-reduce": _reduce,
    "all-to-all": _exchange,
    "collective-permute": _pass_on,
}


def _power_of_2(most: float) -> int:
    """The largest power of 2 that is no larger."""
    return 1 << max(0, int(np.log2(max(most, 1))))


def _powers_of_2(first: int, last: int, factor: int = 2) -> Iterator[int]:
    while first <= last:
        yield first
        first *= factor


def started() -> list[Any]:
    """The devices that jax starts on; plugins of devices that are not here are not heard.

    Raises:
      MeasureError: jax finds none of the platform that was asked for.
    """
    log = logging.getLogger("jax")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with _startup.without_driver_notices():
            return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin fails, JAX 0.10
        asked = os.environ.get("JAX_PLATFORMS", "any")
        raise MeasureError(f"jax finds no {asked} devices here{f': {error}' if str(error) else ''}") from error
    finally:
        log.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the devices of this process; the hardware file goes to `--out`, or to standard output."""
    parser = argparse.ArgumentParser(prog="autoshard hardware measure", description="Times the devices at hand.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--based-on")
    parser.add_argument("--cpu-devices", type=int, default=8)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--program-s", type=float, default=0.05)
    given = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        effort = Effort(program_s=given.program_s, repeats=given.repeats, scale=given.scale)
        jax.config.update("jax_num_cpu_devices", given.cpu_devices)
        devices = started()
        console.print(f"timing {len(devices)} devices: {devices[0].device_kind}")
        columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=None)
            found = measure(
                devices,
                name=given.name,
                based_on=given.based_on,
                dtypes=tuple(given.dtype or DTYPES),
                effort=effort,
                progressed=lambda done, of, what: bar.update(task, completed=done, total=of, description=what),
            )
            text = json.dumps(document(found), indent=1, ensure_ascii=False) + "\n"
        if given.out is not None:
            files.write_whole(given.out, text)
    except (AutoshardError, CostModelError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    if given.out is None:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
