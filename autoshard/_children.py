"""Children: Python processes of our own find the modules that this one finds, the standard library's first.

A file of the working directory, such as a `string.py`, stands in the way of no module of
Python's own: a child that died of it would be missed by nobody but the plan.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

_STANDARD = Path(os.__file__).parent
_FOLDERS = frozenset({_STANDARD, _STANDARD / "lib-dynload", _STANDARD.parent / "DLLs"})


def command(module: str, paths: Iterable[str] | None = None) -> list[str]:
    """The command line that runs `main` of a module in a new process, with this process's or other import paths."""
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"
    return [sys.executable, "-P", "-c", code, *standard_first(sys.path if paths is None else paths)]


def standard_first(paths: Iterable[str]) -> list[str]:
    """Paths for modules in their order, those of the standard library ahead; the working directory by its name."""
    named = list(dict.fromkeys(path or str(Path.cwd()) for path in paths))
    return sorted(named, key=lambda path: not _is_standard(path))


def _is_standard(path: str) -> bool:
    return Path(path) in _FOLDERS or (path.endswith(".zip") and Path(path).parent == _STANDARD.parent)
