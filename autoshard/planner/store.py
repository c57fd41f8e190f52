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
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from autoshard import files
from autoshard.errors import PlanFileError, PlanMismatchError, SpecError
from autoshard.ir import rewrite
from autoshard.ir.loop_sums import summed_once
from autoshard.ir.recomputation import AUTO_OFFLOAD, RESIDUALS, STATE, Offload, offloads_residuals, offloads_state
from autoshard.ir.recomputed import recomputed
from autoshard.planner.host_state_space import on_host
from autoshard.planner.record import Leaf, PlanRecord, parse, read_plan_file, write_plan_file
from autoshard.planner.request import PlanRequest

log = logging.getLogger("autoshard")

Key = Mapping[str, Any]
Directory = str | os.PathLike[str] | Literal[False] | None

_DIGEST = "{digest}"
_LONGEST = 120  # bytes of a function's name in the name of a file; file systems take 255 of a whole one
_LISTS = ("arguments", "results")  # of a key


def key_of(question: PlanRequest, **options: Any) -> Key:
    """Everything that decides a plan: the program, its arguments, the machine, the request, the versions."""
    traced, target = question.traced, question.target
    return {
        "program": question.digest,
        "arguments": [f"{p}: {a.dtype}{list(a.shape)}" for p, a in zip(traced.in_paths, traced.in_avals, strict=True)],
        "results": [f"{p}: {a.dtype}{list(a.shape)}" for p, a in zip(traced.out_paths, traced.out_avals, strict=True)],
        "mesh": str(target.axes),
        "device order": list(target.device_order),
        "hardware": target.hardware.name,
        "hardware file": target.hardware.digest,
        "memory limit": question.memory_bytes,
        "pins and donations": question.asked,
        "for the gradient of": list(question.gradient_of),
        "recomputing": question.remat,
        "offloading": question.offload,
        **({"micro-batches": list(question.counts)} if question.counts else {}),
        **options,
        "version of autoshard": metadata.version("autoshard"),
        "version of jax": jax.__version__,
        "version of ortools": metadata.version("ortools"),
    }


def changes(old: Key, new: Key) -> list[str]:
    """The differences between two keys, in words; a changed argument stands for the program that it changes."""
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


def misfits(record: PlanRecord, question: PlanRequest) -> list[str]:
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
        "for the gradient of": list(record.gradient_of),
        "recomputing": _recomputing(record, question),
        "offloading": _offloading(record, question.offload),
    }
    if question.counts and record.microbatches not in question.counts:
        have["micro-batches"] = record.microbatches
    found = changes(have, key) or _not_kept(record, question)
    if not found and not record.emitted:  # made by an older version
        found += [f"no layout of {one}" for one in rewrite.not_laid_out(question.traced.jaxpr, record.pins)[:1]]
    if not found and record.donated != tuple(sorted(question.shardings.donated)):
        found.append("pins and donations (the file contradicts itself)")
    return found


def check(record: PlanRecord, question: PlanRequest, source: object) -> None:
    """Raises a PlanFileError if a plan contradicts its file's key or digest: it is damaged."""
    wrong = misfits(record, question)
    if wrong:
        raise PlanFileError(
            f"{source} is damaged: it is kept for this question, and answers another: {'; '.join(wrong)}"
        )
    try:
        chosen = record.recomputation
        asked = question if record.microbatches is None else question.in_microbatches(record.microbatches)
        asked = on_host(asked, record.host_state) if record.host_state else asked
        traced = asked.traced if chosen is None else recomputed(asked.traced, chosen)
        traced = summed_once(traced, record.loop_sums) if record.loop_sums else traced
        rewrite.check(traced.jaxpr, record.pins, record.mesh)
    except SpecError as error:
        raise PlanFileError(f"{source} is damaged: {error}; plan again") from error


def _recomputing(record: PlanRecord, question: PlanRequest) -> str:
    """What a plan was asked to do with checkpoints; one that keeps what is written may answer any such question."""
    return question.remat if record.recomputation is None else record.recomputation.remat


def _offloading(record: PlanRecord, asked: Offload) -> Offload:
    """What a plan was asked to offload; one that offloads less than it may answers such a question, too."""
    residuals = record.recomputation is not None and bool(record.recomputation.offloaded)
    state = bool(record.host_state)
    if (residuals and not offloads_residuals(asked)) or (state and not offloads_state(asked)):
        return AUTO_OFFLOAD if residuals and state else RESIDUALS if residuals else STATE
    return asked


def _not_kept(record: PlanRecord, question: PlanRequest) -> list[str]:
    """A requested layout that a plan for this request lacks: somebody has changed the file."""
    asked, traced = question.shardings, question.traced
    if len(record.outputs) != len(traced.out_avals):
        return [f"outputs ({len(record.outputs)} → {len(traced.out_avals)})"]
    pairs = [(record.inputs[i], spec) for i, spec in sorted(asked.inputs.items())]
    pairs += [(record.outputs[i], spec) for i, spec in sorted(asked.outputs.items())]
    sizes = record.mesh.shape
    wrong = [f"layout of {leaf.path} ({leaf.spec} → {spec})" for leaf, spec in pairs if not _allows(spec, leaf, sizes)]
    strays = () if asked.host_parts is None else asked.host_parts.strays(record.inputs)
    return [*wrong, *(f"layout of {leaf.path} ({leaf.spec} → split over hosts)" for leaf in strays)]


def _allows(spec: PartitionSpec, leaf: Leaf, sizes: Mapping[str, int]) -> bool:
    """Whether a leaf lies as a spec says: alike but for mesh axes of size 1, and for dimensions that are left open."""

    def split(entry: Any) -> tuple[str, ...]:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(axis for axis in axes if sizes.get(axis) != 1)

    pairs = zip_longest(spec, leaf.spec)
    return all(want is PartitionSpec.UNCONSTRAINED or split(want) == split(have) for want, have in pairs)


@dataclass(frozen=True, slots=True)
class Lock:
    """A plan file that holds: `path` may contain `{digest}`, for functions of several shapes."""

    path: Path

    def of(self, digest: str) -> Path:
        """The file of a program.

        Raises:
          PlanFileError: the given digest is none.
        """
        if not re.fullmatch(r"[0-9a-f]{16,64}", digest):
            raise PlanFileError(f"{digest[:40]!r} is no digest of a program")
        return Path(str(self.path).replace(_DIGEST, digest[:12]))

    def find(self, questions: Sequence[PlanRequest], constraints: str) -> tuple[PlanRecord, PlanRequest] | None:
        """The locked plan and which of the questions it answers; None if it is to be planned (again).

        Args:
          questions: one of them is to be answered.
          constraints: which are to be emitted, as in `autoshard.plan`.

        Raises:
          PlanMismatchError: in CI, the plan is missing or answers none of them.
          SpecError: elsewhere, the plan is another function's.
          PlanFileError: the file cannot be read.
        """
        paths = dict.fromkeys(self.of(question.digest) for question in questions)
        present = [path for path in paths if files.exists(path)] or self._former(questions)
        if not present:
            what = f"there is no {next(iter(paths))}"
            self._changed(questions[0].name, what)
            return log.info("%s: %s; planning", questions[0].name, what)
        records = [read_plan_file(path) for path in present]
        reasons: list[list[str]] = []
        for record in records:
            other = record.emitted not in ("", constraints)
            also = [f"constraints ({record.emitted} → {constraints})"] if other else []
            for question in questions:
                reasons.append(misfits(record, question) + also)
                if not reasons[-1]:
                    check(record, question, self.of(question.digest))
                    return record, question
        name, what = questions[0].name, f"{present[0]} was made for another: {'; '.join(min(reasons, key=len))}"
        self._changed(name, what)
        if records[0].name != name:
            raise SpecError(
                f"{present[0]} holds the plan of {records[0].name}, and would be replaced by that of {name}: "
                "give each function a lock of its own, or remove the file if it was renamed"
            )
        return log.warning("%s: %s; planning again, and replacing it", name, what)

    def _former(self, questions: Sequence[PlanRequest]) -> list[Path]:
        """Files under the digests that autoshard 0.1.0 gave."""
        if _DIGEST not in str(self.path):
            return []
        paths = {self.of(digest) for question in questions for digest in question.traced.former_digests}
        return sorted(path for path in paths if path.exists())

    def _changed(self, name: str, what: str) -> None:
        """Raises a PlanMismatchError in CI."""
        if _in_ci():
            raise PlanMismatchError(
                f"the locked plan of {name} changed: {what}; "
                "plan outside of CI (where the variable CI is not set) and commit the file"
            )

    def check_writable(self, question: PlanRequest) -> None:
        """Raises a PlanFileError if there is no place for the file; before minutes of planning."""
        folder = self.of(question.digest).parent
        try:
            _make_folder(folder)
        except PlanFileError as error:
            raise _not_locked(question.name, error) from error
        if not os.access(folder, os.W_OK):
            raise _not_locked(question.name, f"the folder {folder} is not writable")

    def write(self, record: PlanRecord) -> None:
        """Locks a plan.

        Raises:
          PlanFileError: the file cannot be written, so the plan would not be locked.
        """
        path = self.of(record.digest)
        try:
            _make_folder(path.parent)
            write_plan_file(record, path)
        except PlanFileError as error:
            raise _not_locked(record.name, error) from error

    def check_several(self, name: str) -> None:
        """Raises a SpecError if a second plan of the same function would replace the first."""
        if _DIGEST not in str(self.path):
            raise SpecError(
                f"{name} is called with several shapes, and lock={str(self.path)!r} holds one plan: "
                f"write lock='{self.path.with_suffix('')}-{_DIGEST}.json'"
            )


def _not_locked(name: str, why: object) -> PlanFileError:
    return PlanFileError(f"{name}: the plan cannot be locked: {why}; give lock= a path that can be written, or drop it")


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Cache:
    """A directory of plans; one file per key, its name the function's and the key's hash."""

    directory: Path

    def find(self, question: PlanRequest, key: Key) -> PlanRecord | None:
        """The plan of a request under a key; a miss is logged with the changes since the most similar plan."""
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
    """The cache that an option names: a directory, False for none, None for that of AUTOSHARD_CACHE.

    Raises:
      SpecError: the option is none of them.
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
