"""Store: plans on disk, found again by the question that they answer.

A *lock* is one plan file that people commit: while it fits, it is the plan. A *cache* is
a directory of plans by key; a key is everything that decides a plan, item by item, so
that a miss can say which of them changed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from autoshard.errors import PlanFileError, PlanMismatchError, SpecError
from autoshard.question import Question
from autoshard.record import PlanRecord, parse, read, write, write_whole

log = logging.getLogger("autoshard")

Key = Mapping[str, Any]
Directory = str | os.PathLike[str] | Literal[False] | None

_DIGEST = "{digest}"


def key_of(question: Question, **options: Any) -> Key:
    """Everything that decides a plan: the program, its arguments, the machine, what was asked, the versions."""
    traced, place = question.traced, question.place
    return {
        "program": question.digest,
        "arguments": [f"{p}: {a.dtype}{list(a.shape)}" for p, a in zip(traced.in_paths, traced.in_avals, strict=True)],
        "mesh": str(place.axes),
        "device order": np.asarray(place.machine.device_order).ravel().tolist(),
        "hardware": place.hardware.name,
        "hardware file": place.hardware.digest,
        "memory limit": question.memory_bytes,
        "pins and donations": question.asked,
        **options,
        "version of autoshard": metadata.version("autoshard"),
        "version of jax": jax.__version__,
        "version of ortools": metadata.version("ortools"),
    }


def changes(old: Key, new: Key) -> list[str]:
    """What differs between two keys, in words; a changed argument stands for the program that it changes."""
    found: list[str] = []
    for name in new:
        before, after = old.get(name), new[name]
        if before == after or (name == "program" and old.get("arguments") != new["arguments"]):
            continue
        if name == "arguments":
            pairs = [(a, b) for a, b in zip(before or (), after, strict=False) if a != b]
            (before, after), more = pairs[0] if pairs else (len(before or ()), len(after)), len(pairs) - 1
            found.append(f"{name} ({before} → {after}{f' and {more} more' if more > 0 else ''})")
        else:
            found.append(f"{name} ({before} → {after})")
    return found


def misfits(record: PlanRecord, question: Question) -> list[str]:
    """Why a plan does not answer a question, in words; empty if it does. Versions do not count."""
    key = key_of(question)
    have = {
        **key,
        "program": question.digest if question.traced.is_digest(record.digest) else record.digest,
        "arguments": [f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in record.inputs],
        "mesh": str(record.mesh),
        "device order": list(record.device_order),
        "hardware": record.hardware,
        "hardware file": record.hardware_digest,
        "memory limit": record.memory.limit_bytes,
        "pins and donations": record.asked,
    }
    return changes(have, key)


@dataclass(frozen=True, slots=True)
class Lock:
    """A plan file that holds: `path` may contain `{digest}`, for functions of several shapes."""

    path: Path

    def of(self, digest: str) -> Path:
        """The file of a program."""
        return Path(str(self.path).replace(_DIGEST, digest[:12]))

    def find(self, questions: Sequence[Question]) -> tuple[PlanRecord, Question] | None:
        """The locked plan and which of the questions it answers; None if it is to be planned (again).

        Raises:
          PlanMismatchError: in CI, the plan is missing or answers none of them.
          PlanFileError: the file cannot be read.
        """
        paths = dict.fromkeys(self.of(question.digest) for question in questions)
        present = [path for path in paths if path.exists()] or self._former(questions)
        if not present:
            what = f"there is no {next(iter(paths))}"
            return self._changed(questions[0].name, what)
        records = [read(path) for path in present]
        for record in records:
            for question in questions:
                if not misfits(record, question):
                    return record, question
        closest = min((misfits(r, q) for r in records for q in questions), key=len)
        return self._changed(questions[0].name, f"{present[0]} was made for another: {'; '.join(closest)}")

    def _former(self, questions: Sequence[Question]) -> list[Path]:
        """Files under the digests that autoshard 0.1.0 gave."""
        if _DIGEST not in str(self.path):
            return []
        paths = {self.of(digest) for question in questions for digest in question.traced.former_digests}
        return sorted(path for path in paths if path.exists())

    def _changed(self, name: str, what: str) -> None:
        if _in_ci():
            raise PlanMismatchError(
                f"the locked plan of {name} changed: {what}; "
                "plan outside of CI (where the variable CI is not set) and commit the file"
            )
        log.info("%s: %s; planning", name, what)

    def write(self, record: PlanRecord) -> None:
        path = self.of(record.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(record, path)

    def check_several(self, name: str) -> None:
        """Raises a SpecError if a second plan of the same function would replace the first."""
        if _DIGEST not in str(self.path):
            raise SpecError(
                f"{name} is called with several shapes, and lock={str(self.path)!r} holds one plan: "
                f"write lock='{self.path.with_suffix('')}-{_DIGEST}.json'"
            )


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Cache:
    """A directory of plans; one file per key, its name the function's and the key's hash."""

    directory: Path

    def find(self, name: str, key: Key) -> PlanRecord | None:
        """The plan of a key; a miss is logged with what changed since the most similar plan."""
        path = self._path(name, key)
        if path.exists():
            try:
                stored, record = _entry(path)
                if stored == key:
                    log.info("%s: plan from %s", name, path)
                    return record
            except PlanFileError as error:
                log.warning("%s: %s; planning again", name, error)
                return None
        log.info("%s: not in the cache %s%s", name, self.directory, self._nearest(name, key))
        return None

    def write(self, name: str, key: Key, record: PlanRecord) -> None:
        """Keeps a plan; a directory that cannot be written to is no error."""
        text = json.dumps({"key": key, "plan": record.dumps()}, indent=1, ensure_ascii=False) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(name, key), text)
        except OSError as error:
            log.warning("%s: the plan is not cached: %s", name, error)

    def _path(self, name: str, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return self.directory / f"{_file_name(name)}-{digest}.json"

    def _nearest(self, name: str, key: Key) -> str:
        found: list[list[str]] = []
        for path in sorted(self.directory.glob(f"{_file_name(name)}-{'?' * 32}.json")):
            try:
                found.append(changes(_entry(path)[0], key))
            except PlanFileError as error:
                log.debug("%s", error)
        return f": changed since the plan most like it: {'; '.join(min(found, key=len))}" if found else ""


def cache_at(directory: Directory) -> Cache | None:
    """The cache that an option names: a directory, False for none, None for what AUTOSHARD_CACHE says."""
    if directory is None:
        directory = os.environ.get("AUTOSHARD_CACHE") or False
    return None if directory is False else Cache(Path(directory).expanduser())


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_." else "_" for c in name)


def _entry(path: Path) -> tuple[Key, PlanRecord]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        key, text = data["key"], data["plan"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanFileError(f"{path} is no cached plan: {error!r}") from error
    if not isinstance(key, dict) or not isinstance(text, str):
        raise PlanFileError(f"{path} is no cached plan")
    return key, parse(text, path)
