"""Findings: one thing each that a step loses; all of a program, as text, as JSON, and as annotations of a build."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from json import loads
from pathlib import Path
from typing import Any

from autoshard.report import page
from autoshard.report.notebook import Shown
from autoshard.report.tables import bytes_text, columns, fields, paragraph, render, short_place, table, time_text

SCHEMA_VERSION = 1

LEAST_SHOWN = 5e-4  # of a step, or of a device's memory: rounds to 0.1 %
_TRIAL_NUMBERS = 28  # columns of a table of flags, behind the flags
_PLACE = re.compile(r"(?P<file>[^\s:]+):(?P<line>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a step waits for, or does more often than it need.

    Attributes:
      kind: its name, for scripts; `kinds.KINDS` lists them.
      seconds: how much sooner the step ends with the change: of the compiled schedule for collectives and flags,
        of the cost model for what devices compute.
      where: the user's `file:line (function)`, the path of an argument, or a flag.
      cause: the reason, as a sentence without its full stop.
      change: the remedy, likewise.
      bytes: how much less memory the change takes on each device; 0 where that is not its point.
    """

    kind: str
    seconds: float
    where: str
    cause: str
    change: str
    bytes: int = 0

    @property
    def place(self) -> tuple[str, int] | None:
        """File and line, where `where` names them."""
        found = _PLACE.match(self.where)
        return (found["file"], int(found["line"])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A flag of the compiler, tried: seconds of the compiled schedule, and its peak; None where it does not compile."""

    flag: str
    step_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a compiled program, priced: its seconds, those of communication, and those in which it waits for it.

    Attributes:
      step_s: of the compiled schedule.
      communication_s: in which anything is communicated.
      exposed_s: in which nothing is computed meanwhile: a union of intervals, not a sum of collectives' own seconds.
      peak_bytes: of memory; None where only the text is known.
      best_s: of the best plan, by the cost model; None without a program to plan.
      hand_s: of the program as it is, by the cost model.
      limit_bytes: memory of a device; None in what was saved before it was told.
    """

    step_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int | None = None
    best_s: float | None = None
    hand_s: float | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diagnosis(Shown):
    """The findings of a program, the dearest first: what saves the largest share of the step, or of a device's memory.

    Attributes:
      step: the step, as it was compiled.
      findings: what to change.
      notes: what was found and need not be changed, and why.
      trials: the flags that were tried, if they were asked for.
    """

    step: Step
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step of the program as it was compiled."""
        return self.step.step_s

    @property
    def worst(self) -> float:
        """The dearest finding as a share of the step; 0 without any."""
        return max(map(self.share, self.findings), default=0.0)

    def share(self, finding: Finding) -> float:
        """A finding's seconds as a share of the step."""
        return finding.seconds / self.step_s if self.step_s else 0.0

    def memory_share(self, finding: Finding) -> float:
        """The bytes that a finding's change saves as a share of a device's memory."""
        return finding.bytes / self.step.limit_bytes if self.step.limit_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON; `finding.schema()` describes it."""
        return {
            "schema": SCHEMA_VERSION,
            "step": asdict(self.step),
            "findings": [{**asdict(one), "share": self.share(one)} for one in self.findings],
            "notes": list(self.notes),
            "trials": [asdict(one) for one in self.trials],
        }

    def to_html(self) -> str:
        """A page that opens offline: the step, the findings with what each saves, the flags that were tried."""
        found = [
            {**asdict(one), "share": self.share(one), "memory_share": self.memory_share(one), "price": self.price(one)}
            for one in self.findings
        ]
        best = f": {found[0]['kind']} would save {found[0]['price']}" if found else ""
        count = f"{len(found)} finding{'' if len(found) == 1 else 's'}"
        verdict = f"{time_text(self.step_s)} a step, {count}{best}"
        return page.page(diagnosis={**self.to_json(), "name": "doctor", "verdict": verdict, "findings": found})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Diagnosis":
        """From what `to_json` gave."""
        return cls(
            step=Step(**data["step"]),
            findings=tuple(Finding(**{k: v for k, v in one.items() if k != "share"}) for one in data["findings"]),
            notes=tuple(data["notes"]),
            trials=tuple(Trial(**one) for one in data["trials"]),
        )

    def annotations(self, root: Path | None = None) -> str:
        """The findings as GitHub's workflow commands, a line each: a warning at its line of the source.

        Args:
          root: of the repository; paths below it are written relative to it. None takes the working directory.
        """
        return "\n".join(annotation(one, self.price(one), root or Path.cwd()) for one in self.findings)

    def __str__(self) -> str:
        """The findings for a terminal."""
        width = columns()
        parts: list[Any] = [fields(self._verdict(), width)]
        for number, one in enumerate(self.findings, 1):
            head = f"{number}. {one.kind}: {self.price(one)}, at {short_place(one.where)}"
            texts = (head, f"{one.cause}.", f"{one.change}.")
            parts += ["", *(paragraph(text, width) for text in texts)]
        if self.trials:
            parts += ["", self._trial_table(width)]
        for note in self.notes:
            parts += ["", paragraph(f"{note}.", width)]
        return render(*parts, width=width)

    def price(self, finding: Finding) -> str:
        """What a finding's change saves: time, memory, or both, the larger share first; what is nothing is left out."""
        saved = [
            (self.share(finding), f"{time_text(finding.seconds)} ({self.share(finding):.1%} of the step)"),
            (
                self.memory_share(finding),
                f"{bytes_text(finding.bytes)} ({self.memory_share(finding):.1%} of a device's memory)",
            ),
        ]
        shown = [text for share, text in sorted(saved, reverse=True) if share >= LEAST_SHOWN]
        return " and ".join(shown) or saved[0][1]

    def _verdict(self) -> list[tuple[str, str]]:
        step = self.step
        said = [
            ("step", f"{time_text(step.step_s)}, as it was compiled"),
            (
                "exposed",
                f"{time_text(step.exposed_s)} of {time_text(step.communication_s)} of communication, in which nothing "
                "else runs",
            ),
        ]
        if step.best_s is not None and step.hand_s is not None:
            said.append(
                (
                    "distance",
                    f"{step.hand_s / step.best_s - 1:+.1%}: by the cost model {time_text(step.hand_s)}, the best plan "
                    f"{time_text(step.best_s)}; `autoshard plan` writes it",
                )
            )
        if step.peak_bytes is not None:
            said.append(("memory", f"{bytes_text(step.peak_bytes)} at its peak, as it was compiled"))
        each = "each with what its change saves" if self.findings else "no change is known that saves much"
        said.append(("findings", f"{len(self.findings)}; {each}"))
        return said

    def _trial_table(self, width: int) -> Any:
        head = ("flag", "step", "change", "peak")
        room = width - _TRIAL_NUMBERS
        rows = [
            (
                trial.flag if len(trial.flag) <= room else trial.flag.replace("=", "\n=", 1),
                "-" if trial.step_s is None else time_text(trial.step_s),
                "does not compile" if trial.step_s is None else f"{trial.step_s / self.step_s - 1:+.1%}",
                "-" if trial.peak_bytes is None else bytes_text(trial.peak_bytes),
            )
            for trial in self.trials
        ]
        return table("flags of the compiler, each tried alone", head, rows, right=("step", "change", "peak"))


def annotation(finding: Finding, price: str, root: Path) -> str:
    """One finding and its price as a workflow command of GitHub's: `::warning file=…,line=…,title=…::message`."""
    properties: dict[str, str] = {}
    if finding.place:
        file, line = finding.place
        path = Path(file)
        properties["file"] = str(path.relative_to(root)) if path.is_relative_to(root) else file
        properties["line"] = str(line)
    properties["title"] = f"{finding.kind}: {price}"
    said = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    at = "" if finding.place else f"{finding.where}: "
    return f"::warning {said}::{_escaped(f'{at}{finding.cause}. {finding.change}.')}"


def _escaped(text: str, more: str = "") -> str:
    """Text as workflow commands take it: https://github.com/actions/toolkit, packages/core/src/command.ts."""
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of `Diagnosis.to_json`."""
    return loads(resources.files("autoshard").joinpath("diagnosis.schema.json").read_text())
