"""autoshard: `jax.jit` that finds the sharding.

The public names are imported when first used: who wants the solver alone
(`autoshard.solver`) does not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from autoshard import _quiet

if TYPE_CHECKING:
    __version__: str
    from autoshard.accumulation import accumulate
    from autoshard.api import plan
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
        VerifyError,
    )
    from autoshard.evaluation import Evaluation, evaluate
    from autoshard.jitted import jit
    from autoshard.mesh_search import Search, search
    from autoshard.plans import Plan, load
    from autoshard.rules import register_rule
    from autoshard.standings import Hand, Template, compare
    from autoshard.together import plan_many
    from autoshard.wanted import AUTO

_ROOMS = {
    "AUTO": "wanted",
    "AutoshardError": "errors",
    "CompilerMissingError": "errors",
    "Evaluation": "evaluation",
    "Hand": "standings",
    "InfeasibleError": "errors",
    "MeshError": "errors",
    "MissingRuleError": "errors",
    "Plan": "plans",
    "PlanFileError": "errors",
    "PlanMismatchError": "errors",
    "ProcessError": "errors",
    "RuleError": "errors",
    "Search": "mesh_search",
    "SearchError": "errors",
    "SpecError": "errors",
    "Template": "standings",
    "VerifyError": "errors",
    "accumulate": "accumulation",
    "compare": "standings",
    "evaluate": "evaluation",
    "jit": "jitted",
    "load": "plans",
    "plan": "api",
    "plan_many": "together",
    "register_rule": "rules",
    "search": "mesh_search",
}

__all__ = [
    "AUTO",
    "AutoshardError",
    "CompilerMissingError",
    "Evaluation",
    "Hand",
    "InfeasibleError",
    "MeshError",
    "MissingRuleError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "ProcessError",
    "RuleError",
    "Search",
    "SearchError",
    "SpecError",
    "Template",
    "VerifyError",
    "accumulate",
    "compare",
    "evaluate",
    "jit",
    "load",
    "plan",
    "plan_many",
    "register_rule",
    "search",
]


_quiet.before_jax()


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
