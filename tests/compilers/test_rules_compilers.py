"""The claims of all rules at once, put to the compilers for GPU and TPU.

Each case of the table contributes one computation per factor that passes or sums, with
its operands and results laid out as the rule says; all are compiled as one program.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.backends import compile
from autoshard.ir.mesh import MeshAxes
from autoshard.rules import FactorKind, rule_of
from autoshard.rules.rule import Dims
from tests.installed import GPU, TPU
from tests.rules_cases import CASES
from tests.rules_oracle import COLLECTIVE, Traced, emitted, equations, majors

AXES = MeshAxes.of({"x": 2})
TOPOLOGIES = [
    pytest.param("h100:1x2", id="gpu", marks=GPU),
    pytest.param("tpu-v5e:1x2", id="tpu", marks=TPU),
]
Layouts = tuple[NamedSharding, ...]


def strategies(kind: FactorKind) -> Iterator[tuple[Traced, Layouts, Layouts]]:
    """Each case's equation with operand and result layouts, per factor that `x` can split."""
    mesh = AbstractMesh(AXES.sizes, AXES.names, axis_types=(AxisType.Auto,))

    def layouts(values: tuple[Dims, ...], factor: int) -> Layouts:
        return tuple(
            NamedSharding(mesh, PartitionSpec(*["x" if factor in dim else None for dim in dims])) for dims in values
        )

    for case in CASES:
        found = equations(case.fn, *(arg.abstract() for arg in case.args))
        one = next(one for one in found if one.eqn.primitive == case.primitive)
        rule = rule_of(one.eqn)
        for f, factor in enumerate(rule.factors):
            if factor.kind is kind and factor.size % 2 == 0 and not majors(rule, f) and factor.reduction in ("", "sum"):
                yield one, layouts(rule.operands, f), layouts(rule.results, f)


def collectives(kind: FactorKind, topology: str) -> list[str]:
    """Kinds of all collectives in the one program of all strategies."""
    runs: list[Callable[..., Any]] = []
    avals: list[Any] = []
    operands: list[Layouts] = []
    results: list[Layouts] = []
    for one, ins, outs in strategies(kind):
        runs.append(emitted(one, ins, outs))
        avals.append(tuple(one.abstract()))
        operands.append(ins)
        results.append(outs)
    assert len(runs) > 10

    def program(args: Any) -> Any:
        return tuple(run(*mine) for run, mine in zip(runs, args, strict=True))

    jitted = jax.jit(program, in_shardings=(tuple(operands),), out_shardings=tuple(results))
    compiled = compile.compile(jitted.trace(tuple(avals)), topology=topology, mesh=AXES)
    return COLLECTIVE.findall(compiled.hlo_text)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_factors_that_pass_need_no_communication(topology: str) -> None:
    assert collectives(FactorKind.PASS, topology) == []


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_factors_that_sum_need_all_reduces_alone(topology: str) -> None:
    assert set(collectives(FactorKind.REDUCTION, topology)) == {"all-reduce"}
