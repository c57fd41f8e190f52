"""Progress: shows the current stage of planning on a terminal or in a notebook."""

import contextlib
import logging
import sys
from collections.abc import Callable, Generator

from rich.console import Console

from autoshard.report import notebook

STAGES = ("trace", "graph", "strategies", "price", "solve", "constraints")

_LOG = logging.getLogger("autoshard")


class _Stages(logging.Handler):
    """Follows the log: shows the stage that comes after the last finished one, and the messages of a long stage."""

    def __init__(self, update: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._update = update

    def emit(self, record: logging.LogRecord) -> None:
        now, done = getattr(record, "now", None), getattr(record, "stage", None)
        if now is not None:
            self._update(now)
        elif done in STAGES[:-1]:
            self._update(f"{STAGES[STAGES.index(done) + 1]} …")


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
    """Shows a spinner with the current stage and removes it at the end; without a terminal, shows nothing.

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
            handler = _Stages(stack.enter_context(console.status(f"{first} …")).update)
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
