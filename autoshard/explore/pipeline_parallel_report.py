"""Pipeline report: ranked layouts of a training step, in closed form and planned, for terminals and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoshard.explore.pipeline_parallel import STAGE_AXIS, Staged
from autoshard.planner.leaf_rows import fold
from autoshard.planner.record import PlanRecord
from autoshard.planner.view import collectives
from autoshard.report.tables import bytes_text, columns, fields, paragraph, render, table, time_text
from cost_models.closed_forms.layout_search import LayoutRanking, Priced, describe
from cost_models.closed_forms.training_layout import TrainingLayout

WAITED_FOR = 6  # collectives of the best planned stage that are named

EXECUTABLE = (
    "data, FSDP, tensor, context and expert axes are those of the mesh that is given; stages are an axis of it: "
    "`autoshard.in_own_stages` runs the row's schedule, a program per stage, and reduces gradients once a step or "
    "every microbatch (`parts`); `autoshard.in_stages` is one program with the same bubble, and the activations of "
    "all microbatches"
)

_HEAD = ("", "layout", "step", "tokens/s", "MFU", "memory", "runs by")


def text(
    found: LayoutRanking,
    planned: Sequence[Staged] = (),
    *,
    layers: int,
    sequences: int,
    sequence: int,
    width: int | None = None,
) -> str:
    """The ranking, the parts of the best step, the worth of each parallelism, and the planned stages."""
    width = columns() if width is None else width
    best = found.ranked[0]
    rows = [
        (
            str(i + 1),
            describe(p.layout),
            time_text(p.step.seconds),
            f"{sequences * sequence / p.step.seconds:,.0f}",
            f"{p.step.mfu:.1%}",
            bytes_text(p.step.peak_bytes),
            _cell(runs_by(p.layout, layers=layers, sequences=sequences)),
        )
        for i, p in enumerate(found.ranked)
    ]
    spent = [
        (part.name, time_text(part.seconds), f"{part.seconds / best.step.seconds:.1%}", part.reason)
        for part in sorted(best.step.parts, key=lambda part: -part.seconds)
        if part.seconds > 0
    ]
    notes = [*_reasons(found), ("tried", f"{found.tried:,} layouts, {found.too_large:,} of them too large")]
    return render(
        paragraph(verdict(found, planned), width),
        *_stages(planned, width),
        table("in closed form" if planned else "", _HEAD, rows, right=("", "step", "tokens/s", "MFU", "memory")),
        table("where the best step goes", ("part", "time", "share", "why"), spent, right=("time", "share")),
        fields([*notes, ("runs", EXECUTABLE)], width),
        width=width,
    )


def runs_by(layout: TrainingLayout, *, layers: int, sequences: int) -> str:
    """The call that executes a layout's schedule, on a mesh with its axes; or why there is none."""
    steps, stages, repeats = int(layout.microbatches(sequences)), layout.pipeline, layout.virtual_stages
    if stages == 1:
        return f"accumulate(steps={steps})" if steps > 1 else "plan"
    if layers < stages * repeats:
        return f"none: {layers} layers in {stages * repeats} chunks"
    if repeats > 1 and steps % stages:
        return f"none: {steps} microbatches in groups of {stages}"
    schedule = f', schedule="interleaved", repeats={repeats}' if repeats > 1 else ""
    return f'in_own_stages(stages="{STAGE_AXIS}", steps={steps}{schedule})'


def _cell(call: str) -> str:
    """A call as a table's cell: a line may end after its bracket, so that the column takes less room."""
    return call.replace("(stages=", "(\nstages=")


def verdict(found: LayoutRanking, planned: Sequence[Staged] = ()) -> str:
    """The best layout in one line."""
    if planned:
        best = planned[0]
        slower = best.priced.step.seconds / best.step_s - 1
        return (
            f"{staged_text(best)}: {time_text(best.step_s)} a step with planned stages, {best.mfu:.1%} MFU "
            f"(Megatron's own layouts, in closed form: {slower:+.1%})"
        )
    first = found.ranked[0]
    return f"{describe(first.layout)}: {time_text(first.step.seconds)} a step, {first.step.mfu:.1%} MFU"


def staged_text(staged: Staged) -> str:
    """`TP 8 · CP 2 · PP 16 · data 64, interleaved in 8 chunks, 32 microbatches of 1, remat dots`."""
    layout = staged.priced.layout
    ways = (
        ("TP", layout.tensor),
        ("CP", layout.context),
        ("EP", layout.expert),
        ("PP", layout.pipeline),
        ("data", layout.data * layout.fsdp),
    )
    said = " · ".join(f"{name} {n}" for name, n in ways if n > 1) or "one device"
    if staged.schedule == "interleaved":
        said += f", interleaved in {staged.chunks} chunks"
    elif staged.stages > 1:
        said += f", {staged.schedule}"
    said += f", {staged.microbatches} microbatches of {layout.microbatch}"
    return said + (f", remat {staged.remat}" if staged.remat != "none" else "")


def _stages(planned: Sequence[Staged], width: int) -> list[Any]:
    """The ranking of planned stages with the parts of their steps, and the best one's layout of parameters."""
    if not planned:
        return []
    parts = tuple(planned[0].parts)
    rows = [
        (
            str(i + 1),
            staged_text(staged),
            time_text(staged.step_s),
            *(time_text(staged.parts[part]) for part in parts),
            time_text(staged.priced.step.seconds),
            bytes_text(staged.peak_bytes),
        )
        for i, staged in enumerate(planned)
    ]
    head = ("", "layout", "step", *parts, "closed form", "memory")
    best = planned[0].record
    lies = "; ".join(f"{name} {layout}" for name, layout in _parameters(best))
    moved = "; ".join(
        f"{row['kind']} over {row['axes']} {time_text(row['seconds'])}{' (hides)' if row['hides'] else ''}"
        for row in collectives(best)[:WAITED_FOR]
    )
    notes = [
        ("planned", f"the best layouts of the closed form, each stage by the planner on {best.mesh}, for the first"),
        ("lies", lies),
        ("moves", moved),
        ("ends", "embedding and logits beside the last stage's layers; nothing where a layer less makes room for them"),
        ("once", "gradients summed between replicas and the optimizer, after the last microbatch"),
    ]
    return [table("with planned stages", head, rows, right=head[2:]), fields(notes, width), ""]


def _parameters(record: PlanRecord) -> list[tuple[str, str]]:
    """Name and layout of the parameters with the most bytes."""
    inputs = [leaf for leaf in record.inputs if "params" in leaf.path and len(leaf.shape) > 1]
    return [(row.path.strip().rpartition(".")[2], row.layout) for row in fold(inputs, record.mesh) if row.local_bytes]


def to_json(
    found: LayoutRanking, planned: Sequence[Staged] = (), *, layers: int, sequences: int, sequence: int
) -> dict[str, Any]:
    """The same in SI units."""

    def row(priced: Priced) -> dict[str, Any]:
        return _row(priced, sequences * sequence) | {
            "runs_by": runs_by(priced.layout, layers=layers, sequences=sequences)
        }

    return {
        "verdict": verdict(found, planned),
        "planned": [
            {
                "described": staged_text(staged),
                "layout": asdict(staged.priced.layout),
                "schedule": staged.schedule,
                "chunks": staged.chunks,
                "microbatches": staged.microbatches,
                "remat": staged.remat,
                "step_s": staged.step_s,
                "tokens_per_s": sequences * sequence / staged.step_s,
                "mfu": staged.mfu,
                "peak_bytes": staged.peak_bytes,
                "parts": dict(staged.parts),
                "closed_form_s": staged.priced.step.seconds,
                "collectives": collectives(staged.record),
                "parameters": dict(_parameters(staged.record)),
            }
            for staged in planned
        ],
        "rows": [row(p) for p in found.ranked],
        "worth": [
            {
                "parallelism": worth.parallelism,
                "ways": worth.ways,
                "without": None if worth.without is None else row(worth.without),
            }
            for worth in found.worth
        ],
        "tried": found.tried,
        "too_large": found.too_large,
        "executable": EXECUTABLE,
    }


def _row(priced: Priced, tokens: int) -> dict[str, Any]:
    return {
        "layout": asdict(priced.layout),
        "described": describe(priced.layout),
        "step_s": priced.step.seconds,
        "tokens_per_s": tokens / priced.step.seconds,
        "mfu": priced.step.mfu,
        "peak_bytes": priced.step.peak_bytes,
        "parts": {part.name: part.seconds for part in priced.step.parts},
    }


def _reasons(found: LayoutRanking) -> list[tuple[str, str]]:
    """One line per parallelism of the best layout: the loss without it."""
    best = found.ranked[0].step.seconds
    said: list[tuple[str, str]] = []
    for worth in found.worth:
        name = f"{worth.parallelism.replace('_', ' ')} {worth.ways}"
        if worth.without is None:
            said.append((name, "nothing fits without it"))
        else:
            slower = worth.without.step.seconds / best - 1
            said.append((name, f"without it {slower:+.1%}: {describe(worth.without.layout)}"))
    return said
