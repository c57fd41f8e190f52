"""The report of `benchmarks.verification`: tables and a scatter from its result lines."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The result lines; none where there is no file yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def write(results: Path, folder: Path) -> None:
    """Writes `verification.md` and `verification.svg`."""
