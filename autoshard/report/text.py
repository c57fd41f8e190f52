"""Text: a plan as tables that fit a terminal of 80 columns or more."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from autoshard.layout import Layout
from autoshard.plan import Leaf, PlanRecord
from autoshard.problem.assignment import Collective

WIDTH = 100


def render(*parts: Table | str, width: int = WIDTH) -> str:
    """Rich tables and lines as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False, emoji=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return out.getvalue()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """A table; `right` are the columns aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def summary(record: PlanRecord, seconds: Mapping[str, float]) -> str:
    """The whole plan: verdict, layouts, collectives, memory, certificate."""
    cost, memory, proof = record.cost, record.memory, record.certificate
    head = [
        f"{record.name} on {record.mesh} ({record.hardware})",
        f"  step    {time_text(cost.step_s)} = compute {time_text(cost.compute_s)} + exposed communication "
        f"{time_text(cost.exposed_s)}   (hidden {time_text(cost.hidden_s)})",
        f"  memory  {bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)} per device at {short(memory.at)}",
        "          " + " + ".join(f"{kind} {bytes_text(n)}" for kind, n in memory.kinds.items()),
        f"  proof   {proof.status}: objective {time_text(proof.objective_s)}, bound {time_text(proof.bound_s)}, "
        f"gap {proof.gap:.2%} ({proof.solver})",
        f"          over {proof.space}",
    ]
    if seconds:
        head.append("  planned in " + ", ".join(f"{stage} {s:.2f} s" for stage, s in seconds.items()))
    head += [f"  note    {note}" for note in record.notes]
    head.append(f"  constraints emitted: {record.pins.count}")
    return render(
        "\n".join(head) + "\n",
        table("inputs", ("path", "shape", "layout"), layout_rows(record.inputs)),
        table(
            "collectives per step, per device",
            ("kind", "over", "count", "bytes", "time", "hides", "value", "at"),
            collective_rows(record.collectives),
            right=(2, 3, 4),
        ),
    )


def layout_rows(leaves: Sequence[Leaf]) -> list[tuple[str, str, str]]:
    """One row per path pattern: equal layers are folded, `layers[0…11]`."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for leaf in leaves:
        pattern = re.sub(r"\[\d+\]", "[*]", leaf.path)
        shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        layout = str(Layout.from_spec(leaf.spec, len(leaf.shape)))
        groups.setdefault((pattern, shape, layout), []).append(leaf.path)
    rows: list[tuple[str, str, str]] = []
    for (pattern, shape, layout), paths in groups.items():
        name = paths[0] if len(paths) == 1 else f"{pattern} ×{len(paths)}"
        rows.append((name, shape, layout))
    return rows


def collective_rows(collectives: Sequence[Collective], limit: int = 24) -> list[tuple[str, ...]]:
    """The collectives, equal ones together, the longest first."""
    groups: dict[tuple[str, tuple[str, ...], str, str, int | None], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axes, short(c.where), c.value, c.window), []).append(c)
    ranked = sorted(groups.items(), key=lambda item: -sum(c.seconds * c.trips for c in item[1]))
    rows = [
        (
            kind,
            "·".join(axes),
            str(sum(c.trips for c in members)),
            bytes_text(sum(c.nbytes * c.trips for c in members)),
            time_text(sum(c.seconds * c.trips for c in members)),
            "no" if window is None else "yes",
            value,
            where,
        )
        for (kind, axes, where, value, window), members in ranked[:limit]
    ]
    rest = [c for _, members in ranked[limit:] for c in members]
    if rest:
        total = time_text(sum(c.seconds * c.trips for c in rest))
        rows.append(("…", "", str(len(rest)), bytes_text(sum(c.nbytes * c.trips for c in rest)), total, "", "", ""))
    return rows


def short(where: str) -> str:
    """A source line without its folders."""
    return re.sub(r"[^\s(]*/", "", where)


def time_text(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.4g} {unit}"
    raise AssertionError


def bytes_text(nbytes: float) -> str:
    """Bytes in the decimal unit that reads best."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.0f} B"
