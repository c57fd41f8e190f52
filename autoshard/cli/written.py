"""Written: text on a command line → values."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import MeshError, SpecError, TargetError
from autoshard.report import sizes


def mesh_axes(written: str) -> dict[str, int]:
    """`data=2,model=4` → axis sizes, major to minor.

    Raises:
      MeshError: it is written in another way.
    """
    axes: dict[str, int] = {}
    for part in written.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not re.fullmatch(r"[0-9]{1,9}", size) or name in axes:
            raise MeshError(f"cannot read `{part}` in --mesh {written}: write each axis once, as in data=2,model=4")
        axes[name] = int(size)
    return axes


def chip_counts(written: str | None) -> list[int]:
    """`8,16,32` → numbers; none where nothing is written.

    Raises:
      SpecError: one of them is no number.
    """
    if written is None:
        return []
    try:
        return [int(part) for part in written.split(",")]
    except ValueError:
        raise SpecError(f"cannot read --chips {written}: write 256, or 8,16,32 for a curve") from None


def is_position(written: str) -> bool:
    """Whether an argument is named by its position."""
    return re.fullmatch(r"[0-9]{1,4}", written) is not None


def byte_count(written: str) -> int:
    """`64GB`, `60GiB`, `1.5e9` → bytes.

    Raises:
      SpecError: it is no number of bytes.
    """
    return sizes.byte_count(written, f"--memory {written}")


def pin_of(written: str) -> tuple[str, PartitionSpec]:
    """`**.embed=model,-` → pattern and PartitionSpec; `-` whole, `?` open, `data+model` both, in that order.

    Raises:
      SpecError: there is no pattern or no `=`.
    """
    pattern, equals, spec = written.rpartition("=")
    if not pattern or not equals:
        raise SpecError(f"cannot read --pin {written}: write PATTERN=SPEC, as in '**.embed=model,-'")
    marks = {"-": None, "": None, "?": PartitionSpec.UNCONSTRAINED}
    entries: list[Any] = []
    for entry in (e.strip() for e in spec.split(",")):
        axes = tuple(re.split(r"[+·]", entry))
        entries.append(marks[entry] if entry in marks else axes if len(axes) > 1 else entry)
    return pattern, PartitionSpec(*entries)


def host_local(written: str) -> tuple[str, int]:
    """`batch`, or `batch.tokens=1` → pattern and the dimension that is split over hosts.

    Raises:
      SpecError: the dimension is no number.
    """
    pattern, equals, dimension = written.partition("=")
    if not pattern or (equals and not re.fullmatch(r"[0-9]{1,2}", dimension)):
        raise SpecError(f"cannot read --host-local {written}: write batch, or batch.tokens=1 for dimension 1")
    return pattern, int(dimension or 0)


def assignments(written: Sequence[str], option: str) -> dict[str, Any]:
    """`batch=16` → values as Python literals, or as text where they are none.

    Raises:
      TargetError: one of them is no assignment.
    """
    values: dict[str, Any] = {}
    for text_ in written:
        key, equals, value = text_.partition("=")
        if not equals or not key.isidentifier():
            raise TargetError(f"cannot read {option} {text_}: write key=value, as in batch=16")
        try:
            values[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            values[key] = value
    return values


def writable(path: Path | None) -> Path | None:
    """A file to write, refused before the work is done rather than after it.

    Raises:
      SpecError: it is a folder, or stands in none.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise SpecError(f"cannot write {path}: {why}")
    return path
