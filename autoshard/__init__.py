"""autoshard: `jax.jit` that finds the sharding.

The public names are imported when first used: who wants the solver alone
(`autoshard.solver`) does not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autoshard import _startup

if TYPE_CHECKING:
    __version__: str
    from autoshard.api.compare import Hand, Template, compare
    from autoshard.api.evaluate import evaluate
    from autoshard.api.evaluation import Evaluation
    from autoshard.api.jit import jit
    from autoshard.api.loaded_plan import LoadedPlan, load
    from autoshard.api.own_stages import in_own_stages
    from autoshard.api.plan import Plan
    from autoshard.api.plan_many import plan_many
    from autoshard.api.planning import plan
    from autoshard.api.solved_plan import SolvedPlan
    from autoshard.diagnosis.doctor import doctor
    from autoshard.errors import (
        AutoshardError,
        CompilerMissingError,
        InfeasibleError,
        MeshError,
        MissingRuleError,
        PlanFileError,
        PlanMismatchError,
        ProcessError,
        RuleError,
        SearchError,
        SpecError,
        StageError,
        StageRunError,
        StoppedError,
        TimeLimitError,
        VerifyError,
    )
    from autoshard.explore.search import Search, search
    from autoshard.ir.accumulation import accumulate
    from autoshard.pipeline_parallel.in_stages import in_stages
    from autoshard.planner.requested_shardings import AUTO
    from autoshard.report.progress import progress
    from autoshard.rules import register_rule

_ROOMS = {
    "AUTO": "planner.requested_shardings",
    "AutoshardError": "errors",
    "CompilerMissingError": "errors",
    "Evaluation": "api.evaluation",
    "Hand": "api.compare",
    "InfeasibleError": "errors",
    "LoadedPlan": "api.loaded_plan",
    "MeshError": "errors",
    "MissingRuleError": "errors",
    "Plan": "api.plan",
    "PlanFileError": "errors",
    "PlanMismatchError": "errors",
    "ProcessError": "errors",
    "RuleError": "errors",
    "Search": "explore.search",
    "SearchError": "errors",
    "SolvedPlan": "api.solved_plan",
    "SpecError": "errors",
    "StageError": "errors",
    "StageRunError": "errors",
    "StoppedError": "errors",
    "TimeLimitError": "errors",
    "Template": "api.compare",
    "VerifyError": "errors",
    "accumulate": "ir.accumulation",
    "compare": "api.compare",
    "doctor": "diagnosis.doctor",
    "evaluate": "api.evaluate",
    "in_own_stages": "api.own_stages",
    "in_stages": "pipeline_parallel.in_stages",
    "jit": "api.jit",
    "load": "api.loaded_plan",
    "plan": "api.planning",
    "plan_many": "api.plan_many",
    "progress": "report.progress",
    "register_rule": "rules",
    "search": "explore.search",
}

__all__ = [
    "AUTO",
    "AutoshardError",
    "CompilerMissingError",
    "Evaluation",
    "Hand",
    "InfeasibleError",
    "LoadedPlan",
    "MeshError",
    "MissingRuleError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "ProcessError",
    "RuleError",
    "Search",
    "SearchError",
    "SolvedPlan",
    "SpecError",
    "StageError",
    "StageRunError",
    "StoppedError",
    "Template",
    "TimeLimitError",
    "VerifyError",
    "accumulate",
    "compare",
    "doctor",
    "evaluate",
    "in_own_stages",
    "in_stages",
    "jit",
    "load",
    "plan",
    "plan_many",
    "progress",
    "register_rule",
    "search",
]


_startup.before_jax()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("autoshard")
    if name not in _ROOMS:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"autoshard.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
