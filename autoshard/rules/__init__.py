"""Sharding rules: primitive → which dimensions are which factors.

Importing this package registers every family.
"""

from autoshard.rules import contraction, indexing, pointwise, random, reduction, shape
from autoshard.rules.rule import (
    Factor,
    FactorKind,
    RuleBuilder,
    ShardingRule,
    refused,
    register,
    registered,
    rule_of,
)

__all__ = [
    "Factor",
    "FactorKind",
    "RuleBuilder",
    "ShardingRule",
    "contraction",
    "indexing",
    "pointwise",
    "random",
    "reduction",
    "refused",
    "register",
    "registered",
    "rule_of",
    "shape",
]
