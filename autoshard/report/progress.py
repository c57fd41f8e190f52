"""Progress: shows the current stage of planning on a terminal or in a notebook, and how long it takes yet."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from rich.console import Console

from autoshard.report import notebook

STAGES = ("trace", "graph", "strategies", "price", "solve", "constraints")

_LOG = logging.getLogger("autoshard")


_T = TypeVar("_T")


def counted(things: Sequence[_T], what: str) -> Iterator[_T]:
    """The things one by one, while progress shows which one it is, and about how long the rest takes.

    Args:
      things: what a loop goes through; of one alone nothing is shown.
      what: the word for one of them, such as "mesh".
    """
    if len(things) < 2:
        yield from things
        return
    begin_s = time.monotonic()
    try:
        for i, thing in enumerate(things):
            part = f"{what} {i + 1} of {len(things)}"
            if i:
                part += f", about {_span((time.monotonic() - begin_s) / i * (len(things) - i))} left"
            _LOG.debug("%s", part, extra={"part": part})
            yield thing
    finally:
        _LOG.debug("%s done", what, extra={"part": ""})


def _span(seconds: float) -> str:
    """Seconds as people wait for them: `40 s`, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class _Stages(logging.Handler):
    """Follows the log: shows the stage that comes after the last finished one, and the messages of a long stage.

    Before them it shows which part of a loop runs.
    """

    def __init__(self, update: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._update = update
        self._part = ""

    def emit(self, record: logging.LogRecord) -> None:
        now, done, part = (getattr(record, name, None) for name in ("now", "stage", "part"))
        if part is not None:
            self._part = part
            if part:
                self._update(f"{part} …")
            return
        if now is None and done in STAGES[:-1]:
            now = f"{STAGES[STAGES.index(done) + 1]} …"
        if now is not None:
            self._update(f"{self._part}: {now}" if self._part else now)


@contextlib.contextmanager
def progress() -> Generator[None]:
    """Shows what planning does, while it does: a line on standard error if that is a terminal, or in a notebook's cell.

    with autoshard.progress():
        plan = autoshard.plan(train_step, state, batch, mesh=mesh, hardware="h100:4x8")
    """
    with _followed(Console(stderr=True, highlight=False), "trace"):
        yield


@contextlib.contextmanager
def shown(console: Console, first: str) -> Generator[None]:
    """Shows a spinner with the current stage and the time so far, gone at the end; without a terminal, shows nothing.

    Inside of another spinner, that one stays.

    Args:
      console: of standard error, as a rule.
      first: the text until the first stage is done.
    """
    with (
        contextlib.redirect_stdout(sys.stderr),  # standard output is for results: the user's functions print elsewhere
        _followed(console, first),
    ):
        yield


@contextlib.contextmanager
def _followed(console: Console, first: str) -> Generator[None]:
    if any(isinstance(handler, _Stages) for handler in _LOG.handlers):
        yield
        return
    level = _LOG.level
    with contextlib.ExitStack() as stack:
        if notebook.here():
            line = notebook.Line(f"{first} …")
            stack.callback(line.update, "")
            handler = _Stages(line.update)
        elif console.is_terminal:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # seldom needed
            from rich.table import Column

            spinner = stack.enter_context(
                Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False, table_column=Column()),  # over lines, if it is long
                    TimeElapsedColumn(Column(no_wrap=True)),
                    console=console,
                    transient=True,
                )
            )
            task = spinner.add_task(f"{first} …", total=None)
            handler = _Stages(lambda now: spinner.update(task, description=now))
        else:
            yield
            return
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            _LOG.setLevel(level)
            _LOG.removeHandler(handler)
