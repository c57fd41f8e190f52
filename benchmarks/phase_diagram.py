"""The phase diagram of parallelism: batch × width, and which family of layouts the solver found.

    python -m benchmarks.phase_diagram --model linear --hardware h100:1x8
    python -m benchmarks.phase_diagram --model mlp --hardware tpu-v5e:2x4 --picture phase.svg --html phase.html

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
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from rich.console import Console
from rich.progress import track

import autoshard
import cost_models
import models
from autoshard import SolvedPlan
from autoshard.report.page import page
from cost_models.closed_forms import formulas

MESHES = {8: {"data": 2, "model": 4}}
LARGE_BYTES = 2.0**32  # far above every latency: the asymptotic bandwidth


@dataclass(frozen=True, slots=True)
class Cell:
    """One grid point: the solver's family, and that of the closed forms."""

    batch: int
    width: int
    found: str
    closed: str
    step_s: float
    hidden_s: float  # communication that runs beside compute
    exposed_s: float
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
    allowed = "D" if batch / devices > formulas.critical_tokens_per_device(alpha) else ""
    allowed += "T" if devices < formulas.tensor_parallel_limit(hidden, alpha) else ""
    allowed += "m" if batch / devices > formulas.mixed_tokens_per_device(alpha, hidden) else ""
    if allowed:
        return allowed
    best = formulas.best_fsdp(batch, devices, hidden)
    return "D" if best >= devices else "T" if best <= 1 else "m"


def family(plan: SolvedPlan, batch: int) -> str:
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
        plan.record.cost.hidden_s,
        plan.record.cost.exposed_s,
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


FAMILIES = {"D": "data parallel, FSDP", "m": "mixed", "T": "tensor parallel", ".": "nothing moves"}
COLOURS = {"D": "#3b7ddd", "m": "#e0a800", "T": "#19a979", ".": "#c4c8cd"}


def diagram(cells: dict[tuple[int, int], Cell], model: str, hardware: str, alpha: float, devices: int) -> Any:
    """The diagram as plain values: cells and the closed forms' lines, batch per device against split width."""
    factor = 4 if model == "mlp" else 1
    hidden = sorted({factor * c.width for c in cells.values()})
    each = sorted({c.batch / devices for c in cells.values()})
    curve = [(alpha**2 / f, f) for f in (hidden[0] * 2 ** (k / 4) for k in range(4 * len(hidden)))]
    return {
        "name": f"{model} on {hardware}",
        "families": FAMILIES,
        "cells": [
            {
                "per_device": c.batch / devices,
                "width": factor * c.width,
                "found": c.found,
                "closed": c.closed,
                "step_s": c.step_s,
            }
            for c in cells.values()
        ],
        "lines": [
            {"name": "B/N = α", "points": [(alpha, hidden[0] / 2), (alpha, 2 * hidden[-1])]},
            {"name": "F = αN", "points": [(each[0] / 2, alpha * devices), (2 * each[-1], alpha * devices)]},
            {"name": "B/N = α²/F", "points": [(x, y) for x, y in curve if each[0] / 2 <= x <= 2 * each[-1]]},
        ],
    }


def picture(shown: Any, file: Path) -> None:
    """Draws the diagram, as SVG or PNG by the file's name."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "autoshard"  # equal input, equal file
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    columns = sorted({c["per_device"] for c in shown["cells"]})
    rows = sorted({c["width"] for c in shown["cells"]})
    found = {(c["per_device"], c["width"]): c["found"] for c in shown["cells"]}
    letters = [name for name in FAMILIES if name in set(found.values())]
    grid_ = [[letters.index(found[x, y]) for x in columns] for y in rows]
    edges = [[v[0] / 2**0.5, *(x * 2**0.5 for x in v)] for v in (columns, rows)]
    colours = ListedColormap([COLOURS[name] for name in letters])
    axes.pcolormesh(*edges, grid_, cmap=colours, vmin=-0.5, vmax=len(letters) - 0.5, edgecolors="white", linewidth=0.5)
    for line, style in zip(shown["lines"], ("-", "--", ":"), strict=True):
        axes.plot(*zip(*line["points"], strict=True), style, color="black", label=line["name"])
    for name in letters:
        axes.plot([], [], "s", color=COLOURS[name], label=FAMILIES[name])
    axes.set(xscale="log", yscale="log", xlim=(edges[0][0], edges[0][-1]), ylim=(edges[1][0], edges[1][-1]))
    axes.set(xlabel="rows of the batch per device", ylabel="split width F", title=shown["name"])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Prints both diagrams and every cell that disagrees by more than one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("linear", "mlp"), default="linear")
    parser.add_argument("--hardware", default="h100:1x8")
    parser.add_argument("--batch", nargs=2, type=int, default=(8, 18), metavar=("LOW", "HIGH"), help="powers of two")
    parser.add_argument("--width", nargs=2, type=int, default=(11, 15), metavar=("LOW", "HIGH"), help="powers of two")
    parser.add_argument("--picture", type=Path, help="draw it here, .svg or .png")
    parser.add_argument("--html", type=Path, help="write a page that opens offline here")
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
    place = cost_models.hardware(arguments.hardware)
    alpha = intensity(arguments.hardware, MESHES[place.devices])
    shown = diagram(cells, arguments.model, arguments.hardware, alpha, place.devices)
    if arguments.picture is not None:
        picture(shown, arguments.picture)
    if arguments.html is not None:
        arguments.html.write_text(page(phase=shown), encoding="utf-8")
    wrong = off_by_more_than_one_step(cells)
    print(f"{len(cells)} cells, {len(wrong)} more than one grid step from a closed-form region of their family")
    for c in wrong:
        print(
            f"  batch {c.batch}, width {c.width}: found {c.found}, closed form {c.closed}; no plan is more than "
            f"{c.gap:.2%} faster: of its {1e6 * (c.hidden_s + c.exposed_s):.0f} µs of communication "
            f"{1e6 * c.exposed_s:.0f} do not hide, and the closed form counts all"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
