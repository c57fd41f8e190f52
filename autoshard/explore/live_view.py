"""Searching: a live view of a search, on a terminal, while it lasts."""

import contextlib
from collections.abc import Callable, Generator

from rich import progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autoshard.explore.ranking import Progress
from autoshard.report.tables import time_text


@contextlib.contextmanager
def shown(console: Console) -> Generator[Callable[[Progress], None] | None]:
    """A bar with the best plan so far, gone at the end; None where `console` is no terminal."""
    if not console.is_terminal:
        yield None
        return
    bar = progress.Progress(
        TextColumn("plan"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.fields[best]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("plan", total=None, best="")

        def tell(now: Progress) -> None:
            best = "" if now.best is None else f"best {time_text(now.best.step_s)}: {now.best.candidate}"
            bar.update(task, completed=now.done, total=now.total, best=best)

        yield tell
