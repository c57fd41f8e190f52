"""autoshard: `jax.jit` that finds the sharding."""

import autoshard._quiet  # noqa: F401  # pyright: ignore[reportUnusedImport]  (first: it imports jax)
from autoshard.api import AUTO, Plan, jit, load, plan
from autoshard.errors import (
    AutoshardError,
    CompilerMissingError,
    InfeasibleError,
    MeshError,
    MissingRuleError,
    PlanFileError,
    PlanMismatchError,
    RuleError,
    SpecError,
    VerifyError,
)
from autoshard.evaluate import Evaluation, evaluate
from autoshard.rules import register_rule

__all__ = [
    "AUTO",
    "AutoshardError",
    "CompilerMissingError",
    "Evaluation",
    "InfeasibleError",
    "MeshError",
    "MissingRuleError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "RuleError",
    "SpecError",
    "VerifyError",
    "evaluate",
    "jit",
    "load",
    "plan",
    "register_rule",
]
