"""Tables: columns, units and wrapping that fit a terminal of 60 columns or more."""

import io
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autoshard.report import notebook

GAP = 2  # blanks between columns
LEFT = 5e-5  # gap of a plan that is as good as optimal: in percent no digit of it shows
NARROWEST = 6  # columns of text that is broken over lines
NARROW, WIDE = 60, 120  # the least and the most columns that reports use

# JAX's own short names of dtypes, as jaxprs print them.
_SHORT_DTYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))

CYCLE_S = 1e-11  # less than a cycle of any chip

# Where a word that is longer than its column is broken, if anywhere in it: behind these.
_JOINTS = "_.-/:·="

_BEFORE_UNIT = r"(?<=\d) (?=[kMGT]?B\b|[mµn]?s\b|[MGTPE]FLOP)"


def columns() -> int:
    """The width of this terminal in columns, within the limits of reports; 100 without a terminal."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, NARROW), WIDE)


def render(*parts: RenderableType, width: int) -> str:
    """Tables and lines as plain text, one blank line between them."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=False,
        force_jupyter=False,  # which would show it at once, instead of writing it
        color_system=None,
        highlight=False,
        emoji=False,
        markup=False,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), crop=False)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    spare: Sequence[str] = (),
    footer: Sequence[str] = (),
) -> RenderableType:
    """A table without lines between its columns.

    Args:
      title: stands above it, if it is not empty.
      head: the columns' names.
      rows: cells, one per column.
      right: names of columns aligned to the right: numbers, which are never broken nor cut.
      whole: names of further columns that are broken over lines only where there is no room otherwise.
      spare: names of columns that are left out, with a line that says so, where there is no room for all; the first
        of them first.
      footer: cells below a rule.
    """
    made = _Fitting(
        title=title,
        head=tuple(head),
        rows=tuple(map(tuple, rows)),
        right=right,
        whole=whole,
        spare=tuple(spare),
        footer=tuple(footer),
    )
    return Group(Text(title), made) if title else made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """A table that knows its width when it is printed."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: Sequence[str]
    whole: Sequence[str]
    spare: tuple[str, ...]
    footer: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = self, list[str]()
        while (widths := shown._widths(options.max_width)) is not None and shown.spare:
            left_out.append(shown.spare[0].replace("\n", " "))
            shown = shown._without(shown.spare[0])
        if widths is None:
            yield _table(shown, None)
        else:
            needed = sum(widths) + GAP * len(widths)
            yield from console.render(_table(shown, widths), options.update(width=max(needed, options.max_width)))
        if left_out:
            yield Text(f"no room for {', '.join(left_out)}: a wider terminal, or --json, shows them\n")

    def _without(self, column: str) -> "_Fitting":
        """The table less one of its spare columns."""
        kept = [i for i, name in enumerate(self.head) if name != column]
        return replace(
            self,
            head=tuple(self.head[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            spare=tuple(name for name in self.spare if name != column),
            footer=tuple(self.footer[i] for i in kept) if self.footer else (),
        )

    def _widths(self, room: int) -> list[int] | None:
        """The width of every column where not all are as wide as they would be; None where they are.

        Words are broken only where there is no room otherwise, and text that is kept whole before them.
        """
        kept = [name in self.right or name in self.whole for name in self.head]
        full = [self._longest(i, str.splitlines) for i in range(len(self.head))]
        room -= GAP * len(full)
        if sum(full) <= room:
            return None
        widths = [full[i] if kept[i] else self._longest(i, str.split) for i in range(len(full))]
        while sum(widths) < room:
            widths[max(range(len(full)), key=lambda i: full[i] - widths[i])] += 1
        broken = [i for i, name in enumerate(self.head) if name not in self.right]
        while broken and sum(widths) > room:
            widest = max(broken, key=lambda i: widths[i])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
        return widths

    def _longest(self, i: int, parts: Callable[[str], list[str]]) -> int:
        """The length of the longest of the parts, lines or words, of a column's cells."""
        cells = (row[i] for row in (self.head, *self.rows, *([self.footer] if self.footer else [])))
        return max((len(part) for cell in cells for part in parts(cell)), default=0)


def _table(of: _Fitting, widths: Sequence[int] | None) -> Table:
    """A table of columns as wide as they need to be, or of these widths."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_footer=bool(of.footer),
    )
    for i, (column, below) in enumerate(zip(of.head, of.footer or ("",) * len(of.head), strict=True)):
        made.add_column(
            column,
            below,
            justify="right" if column in of.right else "left",
            no_wrap=column in of.right or (column in of.whole and widths is None),
            overflow="fold",
            width=None if widths is None else widths[i],
        )
    broken = [None if widths is None or name in of.right else widths[i] for i, name in enumerate(of.head)]
    for row in of.rows:
        made.add_row(
            *(cell if width is None else _folded(cell, width) for cell, width in zip(row, broken, strict=True))
        )
    return made


def _folded(cell: str, width: int) -> str:
    """A cell of lines no longer than that: words are kept, and those that are too long are broken at their joints."""
    return "\n".join(part for line in cell.split("\n") for part in _lines(line, width))


def _lines(line: str, width: int) -> Iterator[str]:
    while len(line) > width:
        last = line.rfind(" ", 0, width + 1)
        if last > 0 and line[:last].strip():
            yield line[:last].rstrip()
            line = line[last + 1 :]
        else:  # its first word alone is too long
            joint = max(line.rfind(joint, 0, width) for joint in _JOINTS) + 1
            cut = joint if line[:joint].strip(_JOINTS + " ") else width
            yield line[:cut]
            line = line[cut:].lstrip()
    yield line


def paragraph(text: str, width: int) -> str:
    """Sentences over as many lines as they need. A unit stays with its number."""
    kept = re.sub(_BEFORE_UNIT, "\N{NO-BREAK SPACE}", text)
    return textwrap.fill(kept, width, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ") + "\n"


def fields(rows: Iterable[tuple[str, str]], width: int) -> str:
    """`name  text` lines; long texts go on below their beginning. A unit stays with its number."""
    pairs = list(rows)
    margin = max((len(name) for name, _ in pairs), default=0) + 4
    lines: list[str] = []
    for name, text in pairs:
        kept = re.sub(_BEFORE_UNIT, "\N{NO-BREAK SPACE}", text)
        lead = f"  {name}".ljust(margin)
        lines += textwrap.wrap(kept, width, initial_indent=lead, subsequent_indent=" " * margin, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def broken_path(path: str, width: int) -> str:
    """A path of dots over several lines, broken at its dots, indented below its beginning."""
    indent = " " * (len(path) - len(path.lstrip()) + 4)
    lines = [""]
    for i, segment in enumerate(path.split(".")):
        piece = segment if i == 0 else f".{segment}"
        if lines[-1].strip() and len(lines[-1]) + len(piece) > width:
            lines.append(indent)
        lines[-1] += piece
    return "\n".join(lines)


def short_place(where: str) -> str:
    """A source line without its folders: `dot_general at transformer.py:61 (mlp)`; of a notebook's cell, its name."""
    named = re.sub(r"[^\s(]*/[^\s(:]*", lambda path: notebook.cell_of(path[0]) or path[0], where)
    return re.sub(r"[^\s(]*/", "", named)


def short_aval(text: str) -> str:
    """`bfloat16[8,128]` as jaxprs print it: `bf16[8,128]`."""
    for name, short in _SHORT_DTYPES:
        if text.startswith(name):
            return short + text.removeprefix(name)
    return text


def time_text(seconds: float) -> str:
    """Seconds in the unit that reads best; rounding errors of sums are no time."""
    return _scale(0.0 if abs(seconds) < CYCLE_S else seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def proof_text(status: str, objective_s: float, bound_s: float) -> str:
    """The proof of a plan: status and gap, or its distance from the bound if the gap is too small to show."""
    left_s = objective_s - bound_s
    if status == "feasible" and left_s < LEFT * objective_s:
        return f"optimal to {ceil(left_s * 1e9)} ns" if left_s < 1e-6 else f"optimal to {time_text(left_s)}"
    return f"{status}, gap {left_s / objective_s if objective_s else 0.0:.2%}"


def bytes_text(nbytes: float) -> str:
    """Bytes in the decimal unit that reads best."""
    return _scale(nbytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def count_text(count: float) -> str:
    """An estimated count: `3,150`, `2.5`."""
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def flops_text(flops: float) -> str:
    """Floating-point operations in the unit that reads best."""
    return _scale(
        flops, (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("FLOP", 1.0))
    )


def _scale(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Three digits and a unit: the largest that leaves at least 1, else the last."""
    unit, scale = next(((u, s) for u, s in units if abs(value) >= 0.9995 * s), units[-1])
    scaled = value / scale
    return f"{scaled:,.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"
