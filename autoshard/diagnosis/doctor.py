"""Doctor: what a program that is sharded by hand loses where, what for, and what to change; the dearest first.

It stands on `audit`: the program is compiled with its own annotations, and planned without them. A finding is a
pattern in the two that costs seconds of every step (`kinds`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import jax

from autoshard import _jax
from autoshard.api.audit import Audit, AuditOptions, audit, mesh_of
from autoshard.backends import compile, devices, hlo
from autoshard.backends.known_compilers import named
from autoshard.backends.model import CompilerModel
from autoshard.backends.timeline import timeline
from autoshard.diagnosis.collectives import mended_in_vain
from autoshard.diagnosis.evidence import Evidence, Source
from autoshard.diagnosis.finding import Diagnosis, Finding, Step
from autoshard.diagnosis.flags import better_flags, tried
from autoshard.diagnosis.kinds import LOOKS
from autoshard.errors import (
    AutoshardError,
    HloError,
    InfeasibleError,
    MissingRuleError,
    RuleError,
    ShardyError,
    SpecError,
    VerifyError,
)
from autoshard.report.tables import short_place, time_text
from autoshard.verification.verify import GUESSED_TRIPS

LEAST = 1e-3  # of a step: what saves less is no finding,
LEAST_BYTES = 0.02  # unless it saves so much of a device's memory


def doctor(
    fn: Callable[..., Any], *args: Any, hardware: str, flags: bool = False, **options: Unpack[AuditOptions]
) -> Diagnosis:
    """Finds what the layouts of a program cost, and what to change.

    A program that cannot be planned (a mesh with Explicit axes, constraints that the planner has no layout for) is
    compiled all the same: its collectives are looked at, not what its devices compute alike.

    Args:
      fn: the function, or the result of `jax.jit`, with the annotations of a hand.
      args: pytrees of arrays or ShapeDtypeStructs; their NamedShardings count as annotations.
      hardware: chip and topology, such as "h100:1x8"; it need not be here.
      flags: also compile with each of the compiler's flags that are known to matter.
      options: as `audit` takes them: compiler, donate_argnums, rel_gap, time_limit_s.

    Raises:
      MeshError: no annotation names a mesh.
      CompilerMissingError: the compiler is not installed.
    """
    try:
        with _jax.explicit_mesh(jax.tree.leaves(args)):
            found = audit(fn, *args, hardware=hardware, **options)
        return diagnosed(evidence_of(found), flags=flags)
    except (InfeasibleError, MissingRuleError, RuleError, ShardyError, SpecError) as error:
        evidence = compiled_alone(
            fn, args, hardware, options.get("compiler"), donate_argnums=options.get("donate_argnums") or ()
        )
        why = str(error).splitlines()[0].rstrip(".")
        return diagnosed(evidence, notes=(f"It was compiled, but not planned: {why}",))


def doctor_of_text(text: str, *, hardware: str, mesh: Mapping[str, int] | None = None) -> Diagnosis:
    """Finds what the collectives of a compiled program cost, by its HLO text alone.

    Args:
      text: after scheduling: `jax.jit(f).lower(…).compile().as_text()`, or an XLA dump after optimizations.
      hardware: the chip and topology that it was compiled for.
      mesh: the axes of the program's mesh, major to minor; None takes the prime factors of its devices as axes.

    Raises:
      HloError: the text is no HLO module, contradicts itself, or is of another number of devices than the mesh.
      MeshError: mesh and hardware do not fit each other.
    """
    try:
        module = hlo.read(text)
        if mesh is None:  # another number of devices is told of as one, not by its factors
            devices.place({"devices": module.num_partitions}, hardware)
        target = devices.place(_factors(module.num_partitions) if mesh is None else mesh, hardware)
        return diagnosed(_of_module(module, target, target.compiler))
    except AutoshardError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        # No compiler wrote this text: an instruction names something that is missing, or of another kind.
        raise HloError(f"the HLO text contradicts itself: {type(error).__name__}: {str(error)[:200]}") from error


def compiled_alone(
    fn: Callable[..., Any], args: Sequence[Any], hardware: str, compiler: str | None, *, donate_argnums: Sequence[int]
) -> Evidence:
    """The evidence of a program as its own `jax.jit` compiles it."""
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn, donate_argnums=tuple(donate_argnums))
    with _jax.explicit_mesh(jax.tree.leaves(args)):
        target = devices.place(mesh_of(fn, *args), hardware)
        traced = jitted.trace(*args)
    topology = compile.topology(hardware, target.axes.size, compiler)
    made = compile.compile(traced, topology=topology, mesh=target.axes)
    return _of_module(hlo.read(made.hlo_text), target, named(made.compiler), log=made.log, peak_bytes=made.peak_bytes)


def _of_module(
    module: hlo.Module, target: devices.Target, compiler: CompilerModel, *, log: str = "", peak_bytes: int | None = None
) -> Evidence:
    emitted = hlo.collectives(
        module,
        target.axes,
        fold_slices=compiler.scatters_by_slices,
        unknown_trips=GUESSED_TRIPS,
        slices=target.machine.slices,
    )
    priced = timeline(module, emitted, target.machine, target.axes, unknown_trips=GUESSED_TRIPS)
    return Evidence(
        module=module,
        emitted=emitted,
        timeline=priced,
        machine=target.machine,
        mesh=target.axes,
        limit_bytes=target.hardware.usable_memory_bytes,
        log=log,
        peak_bytes=peak_bytes,
    )


def evidence_of(audit: Audit) -> Evidence:
    """The evidence of an audited program.

    Raises:
      VerifyError: no compiler ran.
    """
    hand, best, made = audit.hand, audit.best, audit.verification
    if made.module is None or made.timeline is None:
        raise VerifyError("the doctor reads a compiled schedule: take compiler gpu, tpu or cpu")
    return Evidence(
        module=made.module,
        emitted=made.emitted,
        timeline=made.timeline,
        machine=hand.space.request.target.machine,
        mesh=hand.space.request.target.axes,
        limit_bytes=hand.record.memory.limit_bytes,
        log=made.log,
        peak_bytes=None if made.memory.compiled is None else made.memory.compiled.peak,
        source=Source(
            hand=hand.record,
            assignment=hand.assignment,
            best=best.record,
            best_assignment=best.planned.assignment,
            verification=made,
            priced_with=lambda specs: audit.priced_with(specs).record,
            compiled_with=lambda flags: hand.verify(made.compiler, compiler_options=flags),
            compiled_in=lambda specs: audit.priced_with(specs).verify(made.compiler),
        ),
    )


def diagnosed(evidence: Evidence, *, flags: bool = False, notes: Sequence[str] = ()) -> Diagnosis:
    """The findings of a program; `notes`: what else is told of it."""
    priced, source = evidence.timeline, evidence.source
    trials = tried(evidence) if flags else ()
    findings = [finding for look in LOOKS for finding in look(evidence)] + [*better_flags(evidence, trials)]
    least_s = LEAST * priced.step_s
    return Diagnosis(
        step=Step(
            step_s=priced.step_s,
            communication_s=priced.communication_s,
            exposed_s=priced.exposed_s,
            peak_bytes=evidence.peak_bytes,
            best_s=None if source is None else source.best.cost.step_s,
            hand_s=None if source is None else source.hand.cost.step_s,
            limit_bytes=evidence.limit_bytes,
        ),
        findings=tuple(sorted((x for x in findings if _counts(x, evidence)), key=partial(_rank, evidence))),
        notes=(
            *notes,
            *(
                f"The partitioner makes a value whole at {short_place(where)} (`Involuntary full rematerialization`): "
                f"mending it saves {time_text(saved_s)} of a step, so leave it"
                for where, saved_s in mended_in_vain(evidence, least_s).items()
            ),
        ),
        trials=trials,
    )


def _counts(finding: Finding, evidence: Evidence) -> bool:
    """Whether a finding saves enough to be one."""
    return finding.bytes >= LEAST_BYTES * evidence.limit_bytes or finding.seconds > LEAST * evidence.timeline.step_s


def _rank(evidence: Evidence, finding: Finding) -> tuple[bool, float, float, str, str]:
    """A step that does not run comes before what makes it slow; then what saves the most of the step or of memory."""
    saved_s = finding.seconds / (evidence.timeline.step_s or 1.0)
    share = max(saved_s, finding.bytes / evidence.limit_bytes)
    return finding.kind != "out of memory", -share, -saved_s, finding.kind, finding.where


def _factors(devices: int) -> dict[str, int]:
    """The prime factors of a number of devices as mesh axes, major to minor: any groups in order are some of them."""
    found: dict[str, int] = {}
    prime = 2
    while devices > 1:
        while devices % prime == 0:
            found[f"part{len(found)}"] = prime
            devices //= prime
        prime += 1
    return found or {"part0": 1}
