"""Progress: shows the current stage of planning on a terminal."""

import contextlib
import logging
import sys
from collections.abc import Generator

from rich.console import Console
from rich.status import Status

STAGES = ("trace", "graph", "strategies", "price", "solve", "constraints")

_LOG = logging.getLogger("autoshard")


class _Stages(logging.Handler):
    """Follows the log: shows the stage that comes after the last finished one, and the messages of a long stage."""

    def __init__(self, status: Status) -> None:
        super().__init__(logging.DEBUG)
        self._status = status

    def emit(self, record: logging.LogRecord) -> None:
        now, done = getattr(record, "now", None), getattr(record, "stage", None)
        if now is not None:
            self._status.update(now)
        elif done in STAGES[:-1]:
            self._status.update(f"{STAGES[STAGES.index(done) + 1]} …")


@contextlib.contextmanager
def shown(console: Console, first: str) -> Generator[None]:
    """Shows a spinner with the current stage and removes it at the end; without a terminal, shows nothing.

    Inside of another spinner, that one stays.

    Args:
      console: of standard error, as a rule.
      first: the text until the first stage is done.
    """
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results: the user's functions print elsewhere
        yield from _shown(console, first)


def _shown(console: Console, first: str) -> Generator[None]:
    if not console.is_terminal or any(isinstance(handler, _Stages) for handler in _LOG.handlers):
        yield
        return
    level = _LOG.level
    with console.status(f"{first} …") as status:
        handler = _Stages(status)
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            _LOG.setLevel(level)
            _LOG.removeHandler(handler)
