"""Doctor: what a program that is sharded by hand loses where, what for, and what to change; the dearest first.

It stands on `audit`: the program is compiled with its own annotations, and planned without them. A finding is a
pattern in the two that costs seconds of every step (`kinds`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from autoshard.api.audit import Audit, AuditOptions, audit
from autoshard.backends import compile, devices, hlo
from autoshard.backends.known_compilers import named
from autoshard.backends.timeline import timeline
from autoshard.diagnosis.collectives import mended_in_vain
from autoshard.diagnosis.evidence import Evidence, Source
from autoshard.diagnosis.finding import Diagnosis, Finding, Step
from autoshard.diagnosis.flags import better_flags, tried
from autoshard.diagnosis.kinds import LOOKS
from autoshard.errors import AutoshardError, HloError, VerifyError
from autoshard.ir.graph import WHILE_DEPTH, WHILE_TRIPS
from autoshard.report.tables import short_place, time_text

LEAST = 1e-3  # of a step: what costs less is no finding


def doctor(
    fn: Callable[..., Any], *args: Any, hardware: str, flags: bool = False, **options: Unpack[AuditOptions]
) -> Diagnosis:
    """Finds what the layouts of a program cost, and what to change.

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
    return diagnosed(evidence_of(audit(fn, *args, hardware=hardware, **options)), flags=flags)


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
        axes = _factors(module.num_partitions) if mesh is None else mesh
        target = devices.place(axes, hardware)
        emitted = hlo.collectives(
            module,
            target.axes,
            fold_slices=named(compile.CompileTarget.parse(hardware).compiler).scatters_by_slices,
            unknown_trips=WHILE_TRIPS,
            unknown_depth=WHILE_DEPTH,
        )
        priced = timeline(module, emitted, target.machine, target.axes)
        return diagnosed(
            Evidence(module=module, emitted=emitted, timeline=priced, machine=target.machine, mesh=target.axes)
        )
    except AutoshardError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        # No compiler wrote this text: an instruction names something that is missing, or of another kind.
        raise HloError(f"the HLO text contradicts itself: {type(error).__name__}: {str(error)[:200]}") from error


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
        log=made.log,
        source=Source(
            hand=hand.record,
            assignment=hand.assignment,
            best=best.record,
            best_assignment=best.planned.assignment,
            verification=made,
            priced_with=lambda specs: audit.priced_with(specs).record,
            compiled_with=lambda flags: hand.verify(made.compiler, compiler_options=flags),
        ),
    )


def diagnosed(evidence: Evidence, *, flags: bool = False) -> Diagnosis:
    """The findings of a program."""
    priced, source = evidence.timeline, evidence.source
    trials = tried(evidence) if flags else ()
    findings = [finding for look in LOOKS for finding in look(evidence)] + [*better_flags(evidence, trials)]
    least_s = LEAST * priced.step_s
    memory = None if source is None else source.verification.memory.compiled
    return Diagnosis(
        step=Step(
            step_s=priced.step_s,
            communication_s=priced.communication_s,
            exposed_s=priced.exposed_s,
            peak_bytes=None if memory is None else memory.peak,
            best_s=None if source is None else source.best.cost.step_s,
            hand_s=None if source is None else source.hand.cost.step_s,
        ),
        findings=tuple(sorted((x for x in findings if x.seconds >= max(least_s, 1e-12)), key=_rank)),
        notes=tuple(
            f"The partitioner makes a value whole at {short_place(where)} (`Involuntary full rematerialization`): "
            f"mending it saves {time_text(saved_s)} of a step, so leave it"
            for where, saved_s in mended_in_vain(evidence, least_s).items()
        ),
        trials=trials,
    )


def _rank(finding: Finding) -> tuple[bool, float, str, str]:
    """A step that does not run comes before what makes it slow."""
    return finding.kind != "out of memory", -finding.seconds, finding.kind, finding.where


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
