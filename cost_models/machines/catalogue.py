"""The catalogue: chip and interconnect files that ship with the package, by name."""

import difflib
import json
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from cost_models import strict_json
from cost_models.errors import HardwareFileError, UnknownHardwareError
from cost_models.machines import plausibility
from cost_models.machines.hardware_file import Chip, Interconnect, parse_chip, parse_interconnect

_LARGEST_BYTES = 2**26  # of a user's file, measured tables included


def chips() -> tuple[str, ...]:
    """Names of the chips in the catalogue."""
    return tuple(name for name, doc in sorted(_documents().items()) if doc["kind"] == "chip")


def interconnects() -> tuple[str, ...]:
    """Names of the interconnects in the catalogue."""
    return tuple(name for name, doc in sorted(_documents().items()) if doc["kind"] == "interconnect")


@cache
def chip(name: str) -> Chip:
    """The chip of that name or alias, case ignored.

    Raises:
        UnknownHardwareError: There is none; lists the nearest names.
    """
    wanted = name.lower().strip()
    documents = _documents()
    for key in chips():
        if wanted == key or wanted in documents[key].get("aliases", ()):
            return parse_chip(documents[key], f"cost_models/hardware/{key}.json", chip, interconnect)
    every = [*chips(), *(alias for key in chips() for alias in documents[key].get("aliases", ()))]
    near = dict.fromkeys(
        next(key for key in chips() if match == key or match in documents[key].get("aliases", ()))
        for match in difflib.get_close_matches(wanted, every, n=3, cutoff=0.5)
    )
    raise UnknownHardwareError(name, tuple(near), chips())


@cache
def interconnect(name: str) -> Interconnect:
    """The interconnect of that name.

    Raises:
        HardwareFileError: There is none.
    """
    if name not in interconnects():
        raise HardwareFileError(name, f"no such interconnect; known: {', '.join(interconnects())}")
    return parse_interconnect(_documents()[name], f"cost_models/hardware/{name}.json")


def read(path: str | Path) -> Chip:
    """The chip that a user's own file describes; raises `HardwareFileError`."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
        if len(raw) > _LARGEST_BYTES:
            raise HardwareFileError(str(path), f"has more than {_LARGEST_BYTES} bytes")
        document: Any = strict_json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise HardwareFileError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HardwareFileError(str(path), f"byte {error.start} is not UTF-8") from error
    except HardwareFileError:
        raise
    except ValueError as error:  # the path holds a null character, or the text is no JSON
        raise HardwareFileError(str(path), f"not JSON: {error}") from error
    found = parse_chip(document, str(path), chip, interconnect)
    plausibility.check(found, str(path))
    return replace(found, based_on=chip(document["based_on"]).name if document.get("based_on") else "")


@cache
def _documents() -> dict[str, Any]:
    folder = resources.files("cost_models") / "hardware"
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir() if file.name.endswith(".json")]
    return {doc["name"]: doc for doc in found}
