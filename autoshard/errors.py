"""The exception family: every error says what, where, why and the way out.

`where` is the user's `file:line` when an equation is at fault. Each exception
keeps its facts as fields, so that programs can read them, too.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose. It can be pickled, with its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[AutoshardError], args: tuple[Any, ...], facts: Mapping[str, Any]) -> AutoshardError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class MissingRuleError(AutoshardError):
    """A primitive has no sharding rule, or is declared as refused."""

    def __init__(self, primitive: str, where: str, reason: str, way_out: str) -> None:
        self.primitive, self.where, self.reason = primitive, where, reason
        super().__init__(f"no sharding rule for `{primitive}` at {where}: {reason}\n  {way_out}")


class RuleError(AutoshardError):
    """A sharding rule is malformed: it does not cover its equation's dimensions."""


class MeshError(AutoshardError, ValueError):
    """A mesh, a mesh axis or a hardware topology does not fit the request."""


class SpecError(AutoshardError, ValueError):
    """A pin or a PartitionSpec names something that does not exist, or cannot be kept."""


class ArgumentError(AutoshardError, TypeError):
    """A call has an unusable argument: one that is no array, or an option that does not exist."""


class GradientError(SpecError):
    """A function that is to be planned for its gradient has none that JAX knows.

    `where` is the equation's `file:line`, empty if it is not known; `reason` is JAX's message.
    """

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        at = f" at {where}" if where else ""
        super().__init__(
            f"the function cannot be differentiated{at}: {reason}\n"
            "  for_grad=False plans the function itself; for_grad=(1,) its gradient with respect to other arguments"
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.where, self.reason)


class RecomputeError(SpecError):
    """Values are to be repeated in a backward pass that cannot be: they have to be kept.

    `missing` maps a value's place in the program to the reason, `where` to the user's `file:line`, if there is one.
    """

    def __init__(self, missing: Mapping[str, str], where: Mapping[str, str]) -> None:
        self.missing, self.where = dict(missing), dict(where)
        lines = [
            f"  {value}{f' at {where[value]}' if where.get(value) else ''}: {why}" for value, why in missing.items()
        ]
        super().__init__(
            "a backward pass cannot repeat all that is not kept for it\n"
            + "\n".join(lines)
            + "\n  keep them, or what is made of them: SavedValues.missing says what a choice lacks"
        )

    def __reduce__(self) -> tuple[type, tuple[Mapping[str, str], Mapping[str, str]]]:
        return type(self), (self.missing, self.where)


class TargetError(AutoshardError, ValueError):
    """The target of a command cannot be found, or is no builder of a function and its arguments."""


class StageError(SpecError):
    """A loss cannot run in stages: it has no stack of layers, or its numbers would be others.

    `where` is the equation's `file:line`, empty if there is none; `reason` what it does.
    """

    def __init__(self, where: str, reason: str, way_out: str) -> None:
        self.where, self.reason = where, reason
        at = f" at {where}" if where else ""
        super().__init__(f"the loss cannot run in stages{at}: {reason}\n  {way_out}")


class StageRunError(AutoshardError, RuntimeError):
    """A stage of a pipeline failed while it ran.

    Attributes:
      stage: the stage.
      chunk: its chunk of layers.
      microbatch: the micro-batch that it worked on.
      work: "forward", "backward" or "weights".
      reason: the error's message.
    """

    def __init__(self, stage: int, chunk: int, microbatch: int, work: str, reason: str) -> None:
        self.stage, self.chunk, self.microbatch, self.work, self.reason = stage, chunk, microbatch, work, reason
        super().__init__(
            f"stage {stage} failed in the {work} pass of micro-batch {microbatch} (chunk {chunk} of the layers): "
            f"{reason}\n  no stage goes on; the parameters are as they were before the step"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int, int, str, str]]:
        return type(self), (self.stage, self.chunk, self.microbatch, self.work, self.reason)


class InfeasibleError(AutoshardError):
    """No plan satisfies the constraints (memory, or pins that exclude each other).

    If memory is the reason, `peak_bytes` is the smallest peak found, `bound_bytes` a bound that no
    plan goes below, `where` the equation at which the peak is reached, and `kinds` its bytes by
    kind: parameters, optimizer, arguments, gradients, activations, copies, and the gaps of a compiler's heap.
    """

    def __init__(
        self,
        message: str,
        *,
        peak_bytes: int | None = None,
        bound_bytes: int | None = None,
        limit_bytes: int | None = None,
        where: str | None = None,
        kinds: Mapping[str, int] | None = None,
    ) -> None:
        self.peak_bytes, self.bound_bytes, self.limit_bytes = peak_bytes, bound_bytes, limit_bytes
        self.where, self.kinds = where, dict(kinds or {})
        super().__init__(message)


class PlanFileError(AutoshardError, ValueError):
    """A plan file cannot be read, or belongs to another function, mesh or version."""


class PlanMismatchError(AutoshardError, ValueError):
    """A plan is used with a function, shapes or a mesh that it was not made for."""


class DeletedError(AutoshardError, RuntimeError):
    """An argument's buffer is gone: an earlier call took it, or it was deleted."""


class CompilerMissingError(AutoshardError):
    """A deviceless compiler is not installed; the message names the package to install."""


class VerifyError(AutoshardError):
    """The compiled program breaks a promise of the plan."""


class ProblemFileError(AutoshardError, ValueError):
    """A problem file (IOPDDL JSON) is malformed; the message gives the position."""


class ShardyError(AutoshardError):
    """Shardy in-process refused a module, or wrote a sharding that cannot be read."""


class HloError(AutoshardError, ValueError):
    """HLO text cannot be read; the message quotes the line."""


class MeasureError(AutoshardError):
    """The devices at hand cannot be timed, or their times make no sense."""


class SearchError(AutoshardError):
    """A process that planned candidates of a search died."""


class SolverError(AutoshardError):
    """A process of the solver's could not work."""


class ProcessError(AutoshardError):
    """Several processes do not plan the same program, or one of them does not answer."""


class TimeLimitError(AutoshardError, TimeoutError):
    """The time that a call was given ended before there was a plan.

    Attributes:
      stage: what was being done.
      limit_s: the seconds that were given.
    """

    def __init__(self, stage: str, limit_s: float) -> None:
        super().__init__(
            f"time_limit_s={limit_s:g} ended while {stage}, before there was any plan\n"
            "  raise time_limit_s (left out, it takes as long as it takes, and the solver 20 s); or give the mesh "
            "fewer axes, several as one: there are fewer layouts to price"
        )
        self.stage, self.limit_s = stage, limit_s

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.stage, self.limit_s)

    @property
    def why(self) -> str:
        """What ended the call, in words."""
        return f"time_limit_s={self.limit_s:g} ended"


class StoppedError(TimeLimitError):
    """A call was asked to end, as by Ctrl-C on the command line, before there was a plan."""

    def __init__(self, stage: str) -> None:
        AutoshardError.__init__(self, f"interrupted while {stage}, before there was any plan")
        self.stage, self.limit_s = stage, 0.0

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.stage,)

    @property
    def why(self) -> str:
        return "the call was interrupted"


class CompileError(AutoshardError):
    """A deviceless compilation failed; `stderr` holds the compiler's output."""

    def __init__(self, message: str, *, stderr: str = "") -> None:
        self.stderr = stderr
        super().__init__(message)


class CompilerFlagError(CompileError):
    """The compiler does not have a requested flag: flags come and go with its versions."""


class DepthError(AutoshardError, RecursionError):
    """A program's calls lie inside each other, deeper than Python can follow."""


def refusing_depth(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """A function that walks a program, and raises a DepthError where it is too deep."""

    @functools.wraps(fn)
    def walk(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return fn(*args, **kwargs)
        except RecursionError as error:
            raise DepthError(
                "the program's calls lie inside each other (as in a jax.checkpoint of a jax.checkpoint of …), too deep "
                f"for Python's recursion limit of {sys.getrecursionlimit()}\n"
                "  nest fewer, or raise it: sys.setrecursionlimit(10_000)"
            ) from error

    return walk
