"""Decisions: a final class per kind, each built in one place."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.backends.known_compilers import KNOWN, XLA_GPU, XLA_TPU
from autoshard.backends.model import CompilerModel
from autoshard.problem import decisions
from autoshard.problem.decisions import Chain, Copy, Decision, Equation, Input, LayoutDecision, Output, layout_codes
from tests.programs import Program, smallest, space_of

FINAL = (Input, Chain, Equation, Copy, Output)
BUILDERS = Path(autoshard.__file__).parent / "problem" / "decision_builders"


@pytest.mark.parametrize("compiler", KNOWN, ids=str)
def test_every_choice_of_a_decision_has_its_price(compiler: CompilerModel) -> None:
    """Arrays are as long as what is chosen from; every input, output and copy is one of the right class."""
    d = space_of(smallest("tiny-gpt2", step=True), compiler=compiler)[0].decisions
    for node in d.nodes:
        assert type(node) in FINAL
        choices = len(node.strategies) if isinstance(node, Equation) else len(layout_codes(node))
        assert len(node) == len(node.cost_ps) == len(node.cover_ps) == len(node.flops) == choices > 0
        assert isinstance(node, Equation | Chain) == bool(node.equations)
        assert not isinstance(node, Input | Output | Copy) or not node.cost_ps.any()
    assert all(isinstance(d.nodes[n], Input) for n in d.inputs)
    assert {type(d.nodes[n]) for n in d.outputs} == {Input, Output}  # new state lies where the old one did
    assert {type(d.nodes[port.node]) for port in d.kept.values()} == {Copy}
    assert {type(d.nodes[n]) for n in d.node_of if n >= 0} == {Chain, Equation}
    assert {node.holds for node in d.nodes if isinstance(node, Input)} == {"arguments", "parameters", "optimizer"}


def test_an_edge_leads_from_where_its_value_is_made_or_kept() -> None:
    d = space_of(smallest("mlp-tiny", step=True))[0].decisions
    for edge in d.edges:
        assert edge.u in {d.made[edge.value].node, *([d.kept[edge.value].node] if edge.value in d.kept else [])}
        assert (len(edge.source), len(edge.target)) == (len(d.nodes[edge.u]), len(d.nodes[edge.v]))
        assert isinstance(d.nodes[edge.v], Copy) or not isinstance(d.nodes[edge.u], Output)


def test_kinds_differ_and_abstract_classes_have_none() -> None:
    assert len({kind.kind for kind in FINAL}) == len(FINAL)
    assert not hasattr(Decision, "kind")
    assert not hasattr(LayoutDecision, "kind")
    found = {c for c in vars(decisions).values() if isinstance(c, type) and issubclass(c, Decision)}
    assert found == {Decision, LayoutDecision, *FINAL}


def test_the_codes_of_an_equation_are_its_strategies() -> None:
    d = space_of(smallest("linear-tiny", step=False))[0].decisions
    node = next(node for node in d.nodes if isinstance(node, Equation))
    with pytest.raises(AssertionError):
        layout_codes(node)
    assert np.array_equal(d.made[d.graph.results[node.equation][0]].codes, node.strategies.results[0])


@pytest.mark.parametrize("kind", FINAL, ids=lambda kind: kind.kind)
def test_each_kind_is_built_in_one_module(kind: type[Decision]) -> None:
    """A call of its class, or of `priced_by_edges` with it."""
    builds = {
        path.stem
        for path in BUILDERS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and kind.__name__ in {ast.unparse(f) for f in (node.func, *node.args[:1])}
        if ast.unparse(node.func) != "isinstance"
    }
    assert builds == {{"copy": "copies"}.get(kind.kind, f"{kind.kind}s")}


@pytest.mark.parametrize("compiler", [XLA_GPU, XLA_TPU], ids=str)
def test_a_slice_written_in_its_place_touches_the_slice_alone(compiler: CompilerModel) -> None:
    """A decode step's keys are written into a donated cache. What is old is copied first, what is computed written."""

    def step(cache: jax.Array, new: jax.Array) -> Any:
        return jax.lax.dynamic_update_slice(cache, new, (0, 7, 0))

    def computed(cache: jax.Array, new: jax.Array) -> Any:
        return step(2 * cache + 1, new)

    def price(fn: Callable[..., Any], *donated: int) -> int:
        args = jnp.zeros((8, 1024, 64)), jnp.ones((8, 1, 64))
        program = Program(fn=fn, args=args, names=("cache", "new"), donated=frozenset(donated))
        d = space_of(program, compiler=compiler)[0].decisions
        return sum(int(node.cost_ps.max()) for node in d.nodes if isinstance(node, Chain))

    assert 0 < 256 * price(step, 0) <= price(step)
    assert price(computed) == price(step)
