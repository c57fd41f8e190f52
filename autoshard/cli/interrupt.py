"""Interrupt: Ctrl-C ends what runs, and keeps what it has found; a second one leaves at once."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import typer

from autoshard import deadline
from autoshard.cli.app import errors
from autoshard.errors import StoppedError


class _Asked:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.once = False

    def __call__(self) -> bool:
        return self.once

    def press(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal.

        Raises:
          KeyboardInterrupt: it is the second.
        """
        if self.once:
            signal.default_int_handler(number, frame)
        self.once = True
        errors().print("interrupted: ends with what was found so far; once more, and it ends at once", soft_wrap=True)


@contextmanager
def kept() -> Generator[None]:
    """A context that Ctrl-C ends early: with the results so far, or with exit code 130 if there are none."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a shell's background jobs
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = _Asked()
    before = signal.signal(signal.SIGINT, asked.press)
    try:
        with deadline.until(asked):
            yield
    except StoppedError as error:
        errors().print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(128 + signal.SIGINT) from error
    finally:
        signal.signal(signal.SIGINT, before)
