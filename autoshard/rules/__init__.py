"""Sharding rules: primitive → which dimensions are which factors.

Importing this package registers every family.
"""

from autoshard.rules import contraction as contraction
from autoshard.rules import control_flow as control_flow
from autoshard.rules import indexing as indexing
from autoshard.rules import kernels as kernels
from autoshard.rules import linalg as linalg
from autoshard.rules import pointwise as pointwise
from autoshard.rules import random as random
from autoshard.rules import reduction as reduction
from autoshard.rules import refused as refused
from autoshard.rules import shape as shape
from autoshard.rules.notation import register_rule
from autoshard.rules.rule import (
    Factor,
    FactorKind,
    RuleBuilder,
    ShardingRule,
    refusals,
    register,
    registered,
    rule_of,
    rules_of,
    whole,
)

__all__ = [
    "Factor",
    "FactorKind",
    "RuleBuilder",
    "ShardingRule",
    "refusals",
    "register",
    "register_rule",
    "registered",
    "rule_of",
    "rules_of",
    "whole",
]
