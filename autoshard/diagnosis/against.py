"""Against: a diagnosis beside an earlier one: which findings are new, gone or changed, between versions of anything.

A finding is the same as an earlier one if kind, file and function are: lines move when code does.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.diagnosis.finding import SCHEMA_VERSION, Diagnosis, Finding, schema
from autoshard.errors import PlanFileError
from autoshard.report.notebook import Shown
from autoshard.report.tables import columns, fields, render, short_place, table, time_text

LEAST = 0.01  # of a step: findings that differ by less are the same

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """All findings of one kind, file and function: their seconds before and after; None where there are none."""

    kind: str
    where: str
    before_s: float | None
    after_s: float | None

    @property
    def more_s(self) -> float:
        """Seconds that are lost now and were not before."""
        return (self.after_s or 0.0) - (self.before_s or 0.0)

    @property
    def what(self) -> str:
        """New, gone or changed."""
        return "new" if self.before_s is None else "gone" if self.after_s is None else "changed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison(Shown):
    """A diagnosis beside an earlier one; what became dearer first."""

    before: Diagnosis
    after: Diagnosis
    changes: tuple[Change, ...]

    @property
    def worst(self) -> float:
        """What became dearer most, the step or a finding, as a share of the step."""
        dearer = [self.after.step_s - self.before.step_s, *(change.more_s for change in self.changes)]
        return max(0.0, *dearer) / self.after.step_s if self.after.step_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON, with what changed."""
        changes = [{"what": change.what, **asdict(change)} for change in self.changes]
        return {**self.after.to_json(), "against": {"step_s": self.before.step_s, "changes": changes}}

    def regressions(self) -> Diagnosis:
        """The diagnosis with those findings alone that are new or dearer."""
        dearer = {(change.kind, _function(change.where)) for change in self.changes if change.more_s > 0}
        findings = tuple(one for one in self.after.findings if _key(one) in dearer)
        return Diagnosis(step=self.after.step, findings=findings, notes=self.after.notes, trials=self.after.trials)

    def __str__(self) -> str:
        """What changed, for a terminal."""
        width = columns()
        before, after = self.before.step_s, self.after.step_s
        said = [("step", f"{time_text(before)} before, {time_text(after)} now: {after / before - 1:+.1%}")]
        if not self.changes:
            said.append(("findings", f"none that changed by {LEAST:.0%} of the step or more"))
            return fields(said, width)
        rows = [
            (
                change.what,
                change.kind,
                short_place(change.where),
                "-" if change.before_s is None else time_text(change.before_s),
                "-" if change.after_s is None else time_text(change.after_s),
            )
            for change in self.changes
        ]
        listed = table(
            "findings that changed, the most seconds lost first",
            ("", "finding", "at", "before", "now"),
            rows,
            right=("before", "now"),
        )
        return render(fields(said, width) + "\n", listed, width=width)


def compared(before: Diagnosis, after: Diagnosis) -> Comparison:
    """What changed from one diagnosis to another."""
    old, new = _together(before.findings), _together(after.findings)
    where = {_key(one): one.where for one in (*before.findings, *after.findings)}
    changes = (
        Change(kind=key[0], where=where[key], before_s=old.get(key), after_s=new.get(key)) for key in {**new, **old}
    )
    least_s = LEAST * min(before.step_s, after.step_s)
    real = (change for change in changes if abs(change.more_s) >= least_s)
    return Comparison(before=before, after=after, changes=tuple(sorted(real, key=lambda one: (-one.more_s, one.where))))


def saved(path: Path) -> Diagnosis:
    """The diagnosis in a file that `doctor --json` wrote.

    Raises:
      PlanFileError: not found, not JSON, or no diagnosis of this version.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the diagnosis {path}: {error}") from error
    known = {name: value for name, value in data.items() if name != "against"} if isinstance(data, dict) else data
    import jsonschema  # here, as it is seldom asked

    try:
        jsonschema.validate(known, schema())
    except jsonschema.ValidationError as error:
        raise PlanFileError(
            f"{path} is no diagnosis of version {SCHEMA_VERSION}, as `autoshard doctor --json` writes it: "
            f"{error.message}"
        ) from error
    return Diagnosis.from_json(known)


def _together(findings: Iterable[Finding]) -> Mapping[_Key, float]:
    found: dict[_Key, float] = defaultdict(float)
    for one in findings:
        found[_key(one)] += one.seconds
    return found


def _key(one: Finding) -> _Key:
    return one.kind, _function(one.where)


def _function(where: str) -> str:
    """A place without its folders and its line: `model.py (attention)`."""
    return re.sub(r":\d+", "", short_place(where))
