"""Text: a plan for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import RenderableType

from autoshard.ir.paths import dotted
from autoshard.planner.backward_passes import repeated_text
from autoshard.planner.leaf_rows import fold
from autoshard.planner.record import (
    ACCUMULATED,
    AFTER_LOOPS,
    FOR_GRADIENT,
    HOST_STATE,
    KEEPS,
    STAGED,
    Leaf,
    PlanRecord,
    sums_in_trips,
)
from autoshard.problem.collective import Collective
from autoshard.problem.repeated import RepeatedWork
from autoshard.report.tables import (
    GAP,
    broken_path,
    bytes_text,
    columns,
    fields,
    flops_text,
    proof_text,
    render,
    short_aval,
    short_place,
    table,
    time_text,
)

MUCH = 0.01  # of a step: sums in every trip that take more are spoken of
ROWS = FOR_GRADIENT, KEEPS, STAGED, ACCUMULATED, AFTER_LOOPS, HOST_STATE  # notes that have rows of their own
LONGEST = 12  # rows of collectives that are shown one by one


def summary(
    record: PlanRecord,
    *,
    seconds: Mapping[str, float] | None = None,
    flops: float | None = None,
    peak_flops_per_s: float | None = None,
    repeated: RepeatedWork | None = None,
    width: int | None = None,
) -> str:
    """The whole plan: step time, memory, proof, layouts, collectives.

    Args:
      record: the plan.
      seconds: wall-clock per stage of planning, if it was planned just now.
      flops: FLOPs of one device in one step.
      peak_flops_per_s: peak of one device for the type that it multiplies.
      repeated: what runs once more for backward passes.
      width: columns; None takes the terminal's.
    """
    width = columns() if width is None else width
    parts = [
        "\n".join((f"{record.name} on {record.mesh} ({record.hardware})", *filter(_of_gradient, record.notes), "")),
        fields([*_verdict(record, flops, peak_flops_per_s, repeated), *_made(record, seconds or {})], width),
        layouts("input", record.inputs, record, width=width),
    ]
    replaced, others = _outputs(record)
    if others:
        parts.append(layouts("output", others, record, width=width))
    if replaced:
        parts.append(f"{replaced} outputs take the place of donated inputs, in the same layout\n")
    parts.append(collectives(record, width=width))
    return render(*parts, width=width)


def _verdict(
    record: PlanRecord, flops: float | None, peak_flops_per_s: float | None, repeated: RepeatedWork | None
) -> list[tuple[str, str]]:
    """What the plan promises, and how well it is proven."""
    cost, memory, proof = record.cost, record.memory, record.certificate
    share = cost.compute_s / cost.step_s if cost.step_s else 1.0
    rows = [
        (
            "step",
            f"{time_text(cost.step_s)} = {time_text(cost.compute_s)} compute ({share:.0%}) + "
            f"{time_text(cost.exposed_s)} exposed communication; hidden behind compute: {time_text(cost.hidden_s)}",
        )
    ]
    if flops is not None:
        text = f"{flops_text(flops)} per device"
        if peak_flops_per_s is not None and cost.step_s:
            text += f", {flops / (peak_flops_per_s * cost.step_s):.1%} of the peak of {flops_text(peak_flops_per_s)}/s"
        rows.append(("matmuls", text))
    decided = [("kept", note) for note in record.notes if note.startswith(KEEPS)]
    if repeated is not None and not decided:
        decided = [("repeated", f"as the program says: {repeated_text(repeated, cost.step_s)}")]
    rows += decided
    rows += [("host", note) for note in record.notes if note.startswith(HOST_STATE)]
    rows += [("stages", note) for note in record.notes if note.startswith(STAGED)]
    rows += [("batch", note) for note in record.notes if note.startswith(ACCUMULATED)]
    rows += [("sums", note) for note in record.notes if note.startswith(AFTER_LOOPS)]
    rows += [("loops", text) for text in _summed_in_every_trip(record)]
    kinds = sorted(memory.kinds.items(), key=lambda item: -item[1])
    return [
        *rows,
        (
            "memory",
            f"{bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)} per device: "
            + " + ".join(f"{bytes_text(n)} {kind}" for kind, n in kinds if n)
            + f", at {short_place(memory.at)}",
        ),
        (
            "proof",
            f"{proof_text(proof.status, proof.objective_s, proof.bound_s)}: nothing takes less than "
            f"{time_text(proof.bound_s)} among {proof.space}",
        ),
        ("solver", proof.solver),
    ]


def _made(record: PlanRecord, seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """How the plan was made, what it emits, and its notes."""
    rows: list[tuple[str, str]] = []
    if seconds:
        stages = ", ".join(f"{stage} {s:.1f}" for stage, s in seconds.items())
        rows.append(("planned", f"in {sum(seconds.values()):.1f} s: {stages}"))
    count = record.pins.count
    rows.append(("emitted", f"{count} sharding constraint{'' if count == 1 else 's'}"))
    return rows + [("note", note) for note in record.notes if not note.startswith(ROWS)]


def _summed_in_every_trip(record: PlanRecord) -> list[str]:
    """What of the sums that a loop finishes in every trip takes longest, in words; nothing if that is not much."""
    found: dict[tuple[str, str, str], list[Collective]] = {}
    for c in sums_in_trips(record):
        found.setdefault((c.kind, c.value, c.where), []).append(c)
    total_s = sum(map(_sum_s, found.values()))
    if total_s <= MUCH * record.cost.step_s:
        return []
    (kind, value, where), longest = max(found.items(), key=lambda item: _sum_s(item[1]))
    return [
        f"finish sums in every trip: {time_text(total_s)} a step if nothing hides; the longest is the {kind} of "
        f"{short_aval(value)}, {sum(c.trips for c in longest):,} times, {time_text(_sum_s(longest))}, "
        f"at {short_place(where)}"
    ]


def _of_gradient(note: str) -> bool:
    """Whether a note says for which gradient a function was planned."""
    return note.startswith(FOR_GRADIENT)


def layouts(title: str, leaves: Sequence[Leaf], record: PlanRecord, *, width: int) -> RenderableType:
    """The layouts of inputs or outputs, equal layers and repeated subtrees folded."""
    rows = fold(leaves, record.mesh)
    cells = [
        ("  " * row.depth + row.path, f"{row.count:,}", short_aval(row.shape), row.layout, bytes_text(row.local_bytes))
        for row in rows
    ]
    head = (title, "leaves", "shape", "layout", "bytes")
    others = sum(max(len(row[i]) for row in (head, *cells)) + GAP for i in range(1, len(head)))
    broken = [(broken_path(path, max(width - others - 2, 20)), *rest) for path, *rest in cells]
    return table("", head, broken, right=("leaves", "bytes"), whole=(title, "shape", "layout"))


def _outputs(record: PlanRecord) -> tuple[int, list[Leaf]]:
    """How many outputs take the place of a donated input in its layout, and the others."""
    donated = {
        (dotted(leaf.path).partition(".")[2], leaf.shape, leaf.dtype, leaf.spec)
        for leaf in (record.inputs[i] for i in record.donated)
    }
    others: list[Leaf] = []
    for leaf in record.outputs:
        path = dotted(leaf.path)
        tails = {path, path.partition(".")[2]} - {""}
        if not any((tail, leaf.shape, leaf.dtype, leaf.spec) in donated for tail in tails):
            others.append(leaf)
    return len(record.outputs) - len(others), others


def collectives(record: PlanRecord, *, width: int) -> RenderableType:
    """The collectives of a step, equal ones together, the longest first, and their sum.

    Where they are shows if there is room for it.
    """
    head = ("collective", "over", "count", "bytes", "time", "hides", "value", "at")
    title = "collectives per step: logical bytes per device, time if nothing hides"
    rows = _collective_rows(record.collectives)
    if sum(max(len(row[i]) for row in (head, *rows)) + GAP for i in range(len(head))) > width:
        head, rows = head[:-1], _collective_rows([replace(c, where="") for c in record.collectives])
        title += "\nno room for their source lines: a wider terminal, or --json, shows them"
    footer = ("sum", "", *_amounts(record.collectives), "", "", "")
    return table(
        title,
        head,
        [row[: len(head)] for row in rows],
        right=("count", "bytes", "time"),
        whole=("collective", "over", "value"),
        footer=footer[: len(head)],
    )


def _collective_rows(promised: Sequence[Collective]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, tuple[str, ...], bool, str, str], list[Collective]] = {}
    for c in promised:
        line = short_place(c.where).partition(" (")[0]
        groups.setdefault((c.kind, c.axes, c.window is not None, c.value, line), []).append(c)
    ranked = sorted(groups.items(), key=lambda item: -_sum_s(item[1]))
    rows = [
        (kind, "·".join(axes), *_amounts(same), "yes" if hides else "no", short_aval(value), line)
        for (kind, axes, hides, value, line), same in ranked[:LONGEST]
    ]
    rest = [c for _, same in ranked[LONGEST:] for c in same]
    if rest:
        rows.append((f"{len(ranked) - LONGEST} smaller", "", *_amounts(rest), "", "", ""))
    return rows


def _sum_s(same: Sequence[Collective]) -> float:
    return sum(c.seconds * c.trips for c in same)


def _amounts(same: Sequence[Collective]) -> tuple[str, str, str]:
    """Count, bytes and seconds of a step."""
    nbytes = sum(c.nbytes * c.trips for c in same)
    return f"{sum(c.trips for c in same):,}", bytes_text(nbytes), time_text(_sum_s(same))
