"""The phase diagram of parallelism: batch × width, and which family of layouts the solver found.

    python -m benchmarks.phase_diagram --model linear --hardware h100:1x8
    python -m benchmarks.phase_diagram --model mlp --hardware tpu-v5e:2x4

One letter per plan, from what its collectives move: D moves weights and gradients alone
(data parallelism, FSDP, ZeRO), T moves activations alone (tensor parallelism, Megatron or
2-D), m both. Beside it stand the regions of the closed forms of "How to Scale Your Model"
(training.md), with the intensity α = C/W of the same machine:

    B/N > α          data parallelism is compute-bound: D
    N < F/α          tensor parallelism is compute-bound: T
    B/N > α²/F       the mixture of both is compute-bound: m

Where several are compute-bound (`*`), the closed forms leave the choice open. Where none is,
the least traffic wins: X_opt = √(B·N/F) ways of data parallelism, which is D from N on, T up
to 1, and m between.
"""

import argparse
import os
import sys
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.progress import track

import autoshard
import cost_models
import models
from autoshard import Plan
from cost_models import closed_forms

MESHES = {8: {"data": 2, "model": 4}}
LARGE_BYTES = 2.0**32  # far above every latency: the asymptotic bandwidth


@dataclass(frozen=True, slots=True)
class Cell:
    """One grid point: what the solver found and what the closed forms say."""

    batch: int
    width: int
    found: str
    closed: str
    step_s: float
    gap: float


def intensity(hardware: str, mesh: dict[str, int]) -> float:
    """α = C/W of a machine: FLOP per byte of a large collective over all devices."""
    machine = cost_models.hardware(hardware).place(mesh)
    flops_per_s = float(machine.matmul_flops_per_s(1, 8192, 8192, 8192, "bfloat16"))
    n = machine.group_size(tuple(mesh))
    bytes_per_s = LARGE_BYTES * (n - 1) / n / float(machine.collective_s("all-gather", tuple(mesh), LARGE_BYTES))
    return flops_per_s / bytes_per_s


def closed_form(batch: int, hidden: int, devices: int, alpha: float) -> str:
    """The families that the closed forms allow, as letters."""
    allowed = "D" if batch / devices > closed_forms.critical_tokens_per_device(alpha) else ""
    allowed += "T" if devices < closed_forms.tensor_parallel_limit(hidden, alpha) else ""
    allowed += "m" if batch / devices > closed_forms.mixed_tokens_per_device(alpha, hidden) else ""
    if allowed:
        return allowed
    best = closed_forms.best_fsdp(batch, devices, hidden)
    return "D" if best >= devices else "T" if best <= 1 else "m"


def family(plan: Plan, batch: int) -> str:
    """D, T or m, from the bytes that the plan's collectives move; "." where nothing moves."""
    weights = activations = 0
    for c in plan.record.collectives:
        shape = c.value[c.value.index("[") + 1 : -1].split(",")
        if len(shape) < 2:
            continue  # the loss and other scalars
        moved = c.nbytes * c.trips
        if int(shape[0]) == batch:
            activations += moved
        else:
            weights += moved
    total = weights + activations
    if not total:
        return "."
    return "D" if activations < 0.02 * total else "T" if weights < 0.02 * total else "m"


def cell(model: str, hardware: str, mesh: dict[str, int], batch: int, width: int, alpha: float) -> Cell:
    """Plans one grid point; memory is no limit here, so that the families compare by time alone."""
    fields = {"width": width, "layers": 4} | ({"hidden": 4 * width} if model == "mlp" else {})
    step, (state, data) = models.build(f"{model}-1k", batch=batch, **fields)
    plan = autoshard.plan(
        step, state, data, mesh=mesh, hardware=hardware, donate_argnums=0, memory=10**15, rel_gap=5e-3, time_limit_s=30
    )
    devices = cost_models.hardware(hardware).devices
    hidden = fields.get("hidden", width)
    return Cell(
        batch,
        width,
        family(plan, batch),
        closed_form(batch, hidden, devices, alpha),
        plan.record.cost.step_s,
        plan.record.certificate.gap,
    )


def off_by_more_than_one_step(cells: dict[tuple[int, int], Cell]) -> list[Cell]:
    """Cells whose family the closed forms have neither there nor one grid step away."""
    wrong: list[Cell] = []
    for (i, j), here in cells.items():
        near = [cells.get((i + di, j + dj)) for di in (-1, 0, 1) for dj in (-1, 0, 1)]
        if not any(here.found in other.closed for other in near if other is not None):
            wrong.append(here)
    return wrong


def grid(
    model: str, hardware: str, batches: list[int], widths: list[int], mesh: dict[str, int] | None = None
) -> dict[tuple[int, int], Cell]:
    """All cells, keyed by position (width, batch)."""
    devices = cost_models.hardware(hardware).devices
    mesh = MESHES[devices] if mesh is None else mesh
    alpha = intensity(hardware, mesh)
    points = [(i, j, b, w) for i, w in enumerate(widths) for j, b in enumerate(batches)]
    shown = track(points, f"{model} on {hardware}", console=Console(stderr=True), transient=True)
    return {(i, j): cell(model, hardware, mesh, b, w, alpha) for i, j, b, w in shown}


def main() -> None:
    """Prints both diagrams and every cell that disagrees by more than one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("linear", "mlp"), default="linear")
    parser.add_argument("--hardware", default="h100:1x8")
    parser.add_argument("--batch", nargs=2, type=int, default=(8, 18), metavar=("LOW", "HIGH"), help="powers of two")
    parser.add_argument("--width", nargs=2, type=int, default=(11, 15), metavar=("LOW", "HIGH"), help="powers of two")
    arguments = parser.parse_args()
    # Three times a power of two: a batch is never as long as a width, so that shapes tell them apart.
    batches = [3 * 2**k for k in range(arguments.batch[0], arguments.batch[1] + 1)]
    widths = [2**k for k in range(arguments.width[0], arguments.width[1] + 1)]
    cells = grid(arguments.model, arguments.hardware, batches, widths)
    print(
        f"{arguments.model} on {arguments.hardware}: found | closed forms; "
        f"batch {batches[0]} … {batches[-1]}, ×2 a column"
    )
    for i, width in enumerate(widths):
        found = " ".join(cells[i, j].found for j in range(len(batches)))
        closed = " ".join(c if len(c) == 1 else "*" for c in (cells[i, j].closed for j in range(len(batches))))
        print(f"{width:>7}  {found}  |  {closed}")
    wrong = off_by_more_than_one_step(cells)
    print(f"{len(cells)} cells, {len(wrong)} more than one grid step from a closed-form region of their family")
    for c in wrong:
        print(f"  batch {c.batch}, width {c.width}: found {c.found}, closed form {c.closed}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
