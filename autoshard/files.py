"""Files: reads texts, and writes them whole or not at all; every failure is a `PlanFileError`.

A write never replaces a device, a pipe or a link by a file: it writes into the device or pipe, and
through the link. A new file has the mode that the umask gives, an old one keeps its mode.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Any

from autoshard.errors import PlanFileError, SpecError
from cost_models import strict_json

LARGEST_BYTES = 2**30  # the largest file that is read; plans are far smaller
_STALE_S = 3600.0  # a write takes a moment: an older temporary file of another host is abandoned
_HOST = re.sub(r"[^\w-]", "_", socket.gethostname())[:40]
_TEMPORARY = re.compile(r"\.autoshard-(?P<host>.*)-(?P<process>\d+)-[0-9a-f]{12}\.tmp")


def path_of(value: Any, what: str) -> Path:
    """A path that an option gives.

    Raises:
      SpecError: it is none, or none that a file system takes.
    """
    if not isinstance(value, str | os.PathLike) or "\0" in (written := str(os.fspath(value))) or not written:
        raise SpecError(f"{what}={value!r} is no path: write one, such as {what}='plans'")
    return Path(written)


def exists(path: Path) -> bool:
    """Whether there is something at a path.

    Raises:
      PlanFileError: the file system does not say: a name too long, a folder closed.
    """
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot look for {path}: {_reason(error)}") from error


def read_text(path: Path, what: str) -> str:
    """A file's text.

    Args:
      path: the path of the file; a pipe is read to its end.
      what: its name in errors, such as "the plan file".

    Raises:
      PlanFileError: it cannot be read, is no UTF-8, or is larger than any such file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
        if len(raw) > LARGEST_BYTES:
            raise PlanFileError(f"cannot read {what} {path}: it has more than {LARGEST_BYTES} bytes")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFileError(f"cannot read {what} {path}: byte {error.start} is not UTF-8") from error
    except (OSError, ValueError, MemoryError) as error:
        raise PlanFileError(f"cannot read {what} {path}: {_reason(error)}") from error


def read_json(text: str, source: object) -> Any:
    """The JSON in a text, if every reader of JSON would see the same in it.

    Raises:
      PlanFileError: it is no JSON, nested too deeply, has a key twice, or a number that is
        not finite or does not fit into 64 bits; the message names the source.
    """
    try:
        return strict_json.loads(text)
    except json.JSONDecodeError as error:
        what = "truncated or not JSON" if text.strip() else "empty"
        raise PlanFileError(f"{source} is {what}: {error}") from error
    except ValueError as error:
        raise PlanFileError(f"{source} is damaged: {error}") from error


def write_whole(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Replaces a file's text by another: a concurrent reader sees the old text or the new.

    A path to no regular file (a terminal, `/dev/null`, a pipe) is written to in place.

    Raises:
      PlanFileError: it cannot be written; the old text is still there.
    """
    try:
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        target = _behind_links(Path(path))
        if target is None:
            with open(path, "wb") as file:
                file.write(data)
        else:
            _replace(target, data)
    except UnicodeEncodeError as error:
        raise PlanFileError(
            f"cannot write {path}: a name in it is no text: {error.object[error.start :][:20]!r}"
        ) from error
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot write {path}: {_reason(error)}") from error


def _behind_links(path: Path) -> Path | None:
    """The regular file that a path names or shall name; None if it is written to in place.

    Raises:
      OSError: a folder is there, or links lead in a circle.
    """
    try:
        mode = path.stat().st_mode  # through links
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "it is a folder")
    if not stat.S_ISREG(mode):
        return None
    for _ in range(40):
        if path.parent.resolve().parts[1:2] == ("proc",):
            return None  # an open file under another name, such as /dev/stdout
        if not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(None, "its links lead in a circle")


def _replace(target: Path, data: bytes) -> None:
    folder, there = target.parent, None
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if not os.access(target, os.W_OK):
            raise PermissionError(None, "it may not be written to")
    _sweep(folder)
    temporary = folder / f".autoshard-{_HOST}-{os.getpid()}-{secrets.token_hex(6)}.tmp"
    file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the bits of the umask
    try:
        with os.fdopen(file, "wb") as out:
            if there is not None:
                os.fchmod(out.fileno(), stat.S_IMODE(there.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(out.fileno(), there.st_uid, there.st_gid)
            out.write(data)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    """Removes the temporary files of writers that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _TEMPORARY.fullmatch(name)
            if match is None:
                continue
            with contextlib.suppress(OSError):
                alone = match["host"] == _HOST and not _runs(int(match["process"]))
                if alone or time.time() - (folder / name).stat().st_mtime > _STALE_S:
                    (folder / name).unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
