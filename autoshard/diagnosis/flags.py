"""Flags of the compiler, each tried by compiling the program with it: what a step and its memory then take."""

from collections.abc import Iterator, Sequence

from autoshard import deadline
from autoshard.backends.known_compilers import named
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding, Trial
from autoshard.errors import CompileError


def tried(evidence: Evidence) -> tuple[Trial, ...]:
    """Every flag that the compiler's toolchain has for trial."""
    source = evidence.source
    if source is None:
        return ()
    found: list[Trial] = []
    for flag, value in named(source.verification.compiler).toolchain.trials:
        if deadline.is_stopped():
            break  # those that were tried so far
        written = f"--{flag}={str(value).lower()}"
        try:
            made = source.compiled_with({flag: value})
        except CompileError:
            found.append(Trial(flag=written, step_s=None, peak_bytes=None))
            continue
        memory = made.memory.compiled
        step_s = None if made.timeline is None else made.timeline.step_s
        found.append(Trial(flag=written, step_s=step_s, peak_bytes=None if memory is None else memory.peak))
    return tuple(found)


def better_flags(evidence: Evidence, trials: Sequence[Trial]) -> Iterator[Finding]:
    """The flag with which the compiled schedule is shortest, if that is one of those tried."""
    known = [(trial.step_s, trial.flag) for trial in trials if trial.step_s is not None]
    step_s = evidence.timeline.step_s
    if known and min(known)[0] < step_s:
        best_s, flag = min(known)
        yield Finding(
            kind="flag",
            seconds=step_s - best_s,
            where=flag,
            cause=f"Of {len(trials)} flags that were tried alone, the compiled schedule is shortest with this one",
            change=f"Compile with {flag} (XLA_FLAGS, or compiler_options of jax.jit), and measure",
        )
