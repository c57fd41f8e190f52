"""Notebooks: shows results as tables of columns, and the current stage in a line that changes."""

import html
import importlib
import sys
from functools import cache
from typing import Any

_STYLE = "font-family: monospace; line-height: 1.25; font-size: 12px; overflow-x: auto; white-space: pre"


class Shown:
    """What a notebook shows as its text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}  # IPython's console prints the first


class Text(str, Shown):
    """A text that a notebook shows as it is printed."""

    __slots__ = ()


def preformatted(text: str) -> str:
    """Text as HTML that keeps its columns, and scrolls where the page is narrow."""
    return f'<pre style="{_STYLE}">{html.escape(text)}</pre>'


class Line:
    """A line of a notebook's output that is written anew; of use inside IPython alone."""

    def __init__(self, text: str) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._handle = display({"text/plain": text}, raw=True, display_id=True)

    def update(self, text: str) -> None:
        """Replaces the line."""
        self._handle.update({"text/plain": text}, raw=True)


def here() -> bool:
    """Whether a notebook's kernel runs this program."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    return kernel is not None and kernel.ZMQInteractiveShell.initialized()


@cache
def cell_of(path: str) -> str:
    """The name of a cell's code, such as `In[3]`, by the file that the kernel says it is in; empty if it is no cell."""
    if "ipykernel_" not in path:
        return ""
    shell = sys.modules["IPython"].get_ipython() if here() else None
    named = None if shell is None else shell.compile.format_code_name(path)
    return named[1] if named else "cell"
