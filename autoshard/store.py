"""Store: plans on disk, found again by the question that they answer.

A *lock* is one plan file that people commit: while it fits, it is the plan. A *cache* is
a directory of plans by key; a key is everything that decides a plan, item by item, so
that a miss can say which of them changed.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from autoshard import apply, files
from autoshard.errors import PlanFileError, PlanMismatchError, SpecError
from autoshard.question import Question
from autoshard.record import PlanRecord, parse, read, write

log = logging.getLogger("autoshard")

Key = Mapping[str, Any]
Directory = str | os.PathLike[str] | Literal[False] | None

_DIGEST = "{digest}"
_LONGEST = 120  # bytes of a function's name in the name of a file; file systems take 255 of a whole one
_LISTS = ("arguments", "results")  # of a key


def key_of(question: Question, **options: Any) -> Key:
    """Everything that decides a plan: the program, its arguments, the machine, what was asked, the versions."""
    traced, place = question.traced, question.place
    return {
        "program": question.digest,
        "arguments": [f"{p}: {a.dtype}{list(a.shape)}" for p, a in zip(traced.in_paths, traced.in_avals, strict=True)],
        "results": [f"{p}: {a.dtype}{list(a.shape)}" for p, a in zip(traced.out_paths, traced.out_avals, strict=True)],
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
        if name in _LISTS:
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
        "results": [f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in record.outputs],
        "mesh": str(record.mesh),
        "device order": list(record.device_order),
        "hardware": record.hardware,
        "hardware file": record.hardware_digest,
        "memory limit": record.memory.limit_bytes,
        "pins and donations": record.asked,
    }
    found = changes(have, key)
    if not found and (record.donated, record.gradient_of) != (
        tuple(sorted(question.wanted.donated)),
        question.gradient_of,
    ):
        found.append("pins and donations (the file contradicts itself)")
    return found


def check(record: PlanRecord, question: Question, source: object) -> None:
    """Raises a PlanFileError if a plan is not what its file's key or digest says: it is damaged."""
    wrong = misfits(record, question)
    if wrong:
        raise PlanFileError(
            f"{source} is damaged: it is kept for this question, and answers another: {'; '.join(wrong)}"
        )
    try:
        apply.check(question.traced.jaxpr, record.pins, record.mesh)
    except SpecError as error:
        raise PlanFileError(f"{source} is damaged: {error}; plan again") from error


@dataclass(frozen=True, slots=True)
class Lock:
    """A plan file that holds: `path` may contain `{digest}`, for functions of several shapes."""

    path: Path

    def of(self, digest: str) -> Path:
        """The file of a program.

        Raises:
          PlanFileError: what is said to be its digest is none.
        """
        if not re.fullmatch(r"[0-9a-f]{16,64}", digest):
            raise PlanFileError(f"{digest[:40]!r} is no digest of a program")
        return Path(str(self.path).replace(_DIGEST, digest[:12]))

    def find(self, questions: Sequence[Question]) -> tuple[PlanRecord, Question] | None:
        """The locked plan and which of the questions it answers; None if it is to be planned (again).

        Raises:
          PlanMismatchError: in CI, the plan is missing or answers none of them.
          PlanFileError: the file cannot be read.
        """
        paths = dict.fromkeys(self.of(question.digest) for question in questions)
        present = [path for path in paths if files.exists(path)] or self._former(questions)
        if not present:
            what = f"there is no {next(iter(paths))}"
            return self._changed(questions[0].name, what)
        records = [read(path) for path in present]
        for record in records:
            for question in questions:
                if not misfits(record, question):
                    check(record, question, self.of(question.digest))
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
        """Locks a plan; if that fails the plan is still good, and a warning says that it is not locked."""
        path = self.of(record.digest)
        try:
            _make_folder(path.parent)
            write(record, path)
        except PlanFileError as error:
            log.warning("%s: planned, but not locked: %s", record.name, error)

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

    def find(self, question: Question, key: Key) -> PlanRecord | None:
        """The plan of a question under a key; a miss is logged with what changed since the most similar plan."""
        name, path = question.name, self._path(question.name, key)
        try:
            if path.is_file():
                stored = _entry(path)
                if stored[0] == key:
                    record = parse(stored[1], path)
                    check(record, question, path)
                    log.info("%s: plan from %s", name, path)
                    return record
        except (PlanFileError, OSError) as error:
            log.warning("%s: %s; planning again", name, error)
            return None
        log.info("%s: not in the cache %s%s", name, self.directory, self._nearest(name, key))
        return None

    def write(self, name: str, key: Key, record: PlanRecord) -> None:
        """Keeps a plan; a directory that cannot be written to is no error."""
        text = json.dumps({"key": key, "plan": record.dumps()}, indent=1, ensure_ascii=False) + "\n"
        try:
            _make_folder(self.directory)
            files.write_whole(self._path(name, key), text)
        except PlanFileError as error:
            log.warning("%s: the plan is not cached: %s", name, error)

    def _path(self, name: str, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return self.directory / f"{_file_name(name)}-{digest}.json"

    def _nearest(self, name: str, key: Key) -> str:
        found: list[list[str]] = []
        try:
            for path in sorted(self.directory.glob(f"{_file_name(name)}-{'?' * 32}.json")):
                try:
                    if path.is_file():
                        found.append(changes(_entry(path)[0], key))
                except PlanFileError as error:
                    log.debug("%s", error)
        except OSError as error:
            log.debug("%s", error)
        return f": changed since the plan most like it: {'; '.join(min(found, key=len))}" if found else ""


def cache_at(directory: Directory) -> Cache | None:
    """The cache that an option names: a directory, False for none, None for what AUTOSHARD_CACHE says.

    Raises:
      SpecError: it is none of them.
    """
    if directory is None:
        directory = os.environ.get("AUTOSHARD_CACHE") or False
    if directory is False:
        return None
    path = files.path_of(directory, "cache")
    try:
        return Cache(path.expanduser())
    except RuntimeError as error:
        raise SpecError(f"cache={directory!r}: {error}") from error


def lock_at(path: Any) -> Lock:
    """The lock that an option names.

    Raises:
      SpecError: it is no path.
    """
    return Lock(files.path_of(path, "lock"))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanFileError(f"cannot make the folder {folder}: {error.strerror}") from error


def _file_name(name: str) -> str:
    plain = "".join(c if c.isalnum() or c in "_." else "_" for c in name)
    return plain.encode()[:_LONGEST].decode(errors="ignore")


def _entry(path: Path) -> tuple[Key, str]:
    """A cache's file: the key, and the text of the plan."""
    data = files.read_json(files.read_text(path, "the cached plan"), path)
    key, text = (data.get("key"), data.get("plan")) if isinstance(data, dict) else (None, None)
    if not isinstance(key, dict) or not isinstance(text, str):
        raise PlanFileError(f"{path} is no cached plan")
    if not all(isinstance(key.get(name), list) for name in _LISTS):
        raise PlanFileError(f"{path} is no cached plan: its key has no lists of {' and '.join(_LISTS)}")
    return key, text
