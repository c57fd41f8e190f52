"""Loaded plans: read from a file, and bound to their function.

They refuse everything that only a plan found in this process can do (`_refused`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from autoshard.api.bind import bound_program
from autoshard.api.plan import Plan, ProgramPlan, Provenance
from autoshard.backends.devices import compiler_named
from autoshard.backends.model import CompilerModel
from autoshard.errors import PlanMismatchError
from autoshard.planner.record import parse, read_plan_file

_BIND = "bind the loaded plan to its function first: plan.bind(train_step, state, batch)"
_PLAN_AGAIN = "a plan file holds no alternatives: plan again, autoshard.plan(train_step, state, batch, mesh=…)"

# What other plans have → why a loaded one has not, and the way out. Values are refused when they are read, and methods
# when they are called. Type checkers do not see them.
_METHODS: Mapping[str, str] = {
    "init": _BIND,
    "put": _BIND,
    "put_local": _BIND,
    "verify": _BIND,
    "checkpoint_policy": _BIND,
    "explain": _PLAN_AGAIN,
    "to_html": _PLAN_AGAIN,
    "honoured": "a loaded plan holds the layouts of inputs and outputs alone: plan again",
}
_VALUES: Mapping[str, str] = {
    "traced": _BIND,
    "kept": _BIND,
    "planned": _PLAN_AGAIN,
    "problem": "a loaded plan does not hold its problem: plan again",
}


def _refuse(why: str, *args: object, **kwargs: object) -> NoReturn:
    raise PlanMismatchError(why)


def _refused(plan: Plan, name: str) -> Callable[..., NoReturn]:
    """An attribute that a plan has not."""
    if name in _METHODS:
        return partial(_refuse, _METHODS[name])
    if name in _VALUES:
        _refuse(_VALUES[name])
    raise AttributeError(f"{type(plan).__name__!r} object has no attribute {name!r}")


@final
class LoadedPlan(Plan):
    """A plan as its file holds it: layouts and promises, neither program nor alternatives."""

    def __reduce__(self) -> tuple[Callable[[str], "LoadedPlan"], tuple[str]]:
        return read_back, (self.record.dumps(),)

    if not TYPE_CHECKING:
        __getattr__ = _refused

    def _as_inputs(self, leaves: Sequence[Any]) -> Mapping[str, Any]:
        return {leaf.path: value for leaf, value in zip(self.record.inputs, leaves, strict=True)}

    def _as_outputs(self, leaves: Sequence[Any]) -> Mapping[str, Any]:
        return {leaf.path: value for leaf, value in zip(self.record.outputs, leaves, strict=True)}

    def jit(self, fn: Callable[..., Any] | None = None) -> Any:
        if fn is None:
            _refuse("a loaded plan does not hold its function: pass it, plan.jit(train_step)")
        return _BoundAtFirstCall(self, fn)

    def bind(self, fn: Callable[..., Any], *args: Any) -> "BoundPlan":
        return BoundPlan(self.record, traced=bound_program(self.record, fn, args))

    @property
    def _provenance(self) -> Provenance:
        return Provenance()


@final
class BoundPlan(ProgramPlan):
    """A loaded plan with its function."""

    def __reduce__(self) -> tuple[Callable[[str], LoadedPlan], tuple[str]]:
        return read_back, (self.record.dumps(),)

    if not TYPE_CHECKING:
        __getattr__ = _refused

    @property
    def _provenance(self) -> Provenance:
        return Provenance()

    @property
    def _compiler(self) -> CompilerModel:
        return compiler_named(self.record.hardware)

    def _gradient_to_compile(self) -> NoReturn:
        _refuse(
            f"the plan file of {self.record.name} is of a forward function planned for its gradient, which it "
            "does not hold: plan it again to verify it"
        )


class _BoundAtFirstCall:
    """A loaded plan's function: bound and compiled at the first call."""

    def __init__(self, plan: LoadedPlan, fn: Callable[..., Any]) -> None:
        self._plan, self._fn = plan, fn
        self._jitted: Any = None

    def _bound(self, args: Sequence[Any]) -> Any:
        if self._jitted is None:
            self._jitted = self._plan.bind(self._fn, *args).jit()
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        return self._bound(args)(*args)

    def lower(self, *args: Any) -> Any:
        return self._bound(args).lower(*args)


def load(path: str | Path) -> LoadedPlan:
    """Reads a plan file; nothing in it is executed.

    Raises:
      PlanFileError: not a plan file, truncated, or of a newer schema.
    """
    return LoadedPlan(read_plan_file(path))


def read_back(text: str) -> LoadedPlan:
    """Reads a pickled plan back: it has the contents of its file, as a plan from `load`."""
    return LoadedPlan(parse(text, "a pickled plan"))
