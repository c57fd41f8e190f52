"""Scattered terms: additions that XLA does by scattering onto the other term.

The gradient of a value that is read whole and in a few places (scores, of which a loss takes one per row) is
`x + scatter-add(zeros, updates)`. XLA's algebraic simplifier scatters the updates onto `x`, in its place, if nothing
else reads what is scattered: no table of zeros is written, and nothing is added (jax-cuda12-pjrt 0.10.2, libtpu 0.0.52,
jaxlib 0.10.2, `tests/compilers/test_compiler_models.py`). `x` is written to memory for that, whatever made it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.backends.model import CompilerModel
from autoshard.ir.graph import Graph
from autoshard.ir.op_traits import BROADCAST, SCATTER_ADD


@dataclass(frozen=True, slots=True)
class ScatteredTerm:
    """An addition, the scatter that takes its place, and the other term, onto which it scatters."""

    addition: int
    scatter: int
    onto: int


def scattered_terms(graph: Graph, fuses: Sequence[bool], compiler: CompilerModel) -> tuple[ScatteredTerm, ...]:
    """Those of a graph.

    Only scatters that differentiation made are known to start from zeros; the values of constants are not in a graph.
    A contraction's result is scattered onto where its reduction over devices is not left between the two: where it is
    merged with that of the scatter (`CompilerModel.merges_terms_of_sums`).
    """
    made_by, consumers, outputs = graph.producers, graph.consumers, frozenset(graph.outputs)

    def scatter_of(value: int) -> int:
        """The equation that scatters onto zeros to make a value that one addition alone reads; -1 for none."""
        e = made_by.get(value, (-1, 0))[0]
        if e < 0 or graph.eqns[e].primitive != SCATTER_ADD or e not in graph.backward or fuses[e]:
            return -1
        table = made_by.get(graph.operands[e][0], (-1, 0))[0]
        if table < 0 or graph.eqns[table].primitive != BROADCAST or graph.eqns[table].operands[0].ndim:
            return -1
        return e if len(consumers[value]) == 1 and value not in outputs else -1

    def is_expression(value: int) -> bool:
        """Whether a value is made element by element, and would be by whoever reads it."""
        e = made_by.get(value, (-1, 0))[0]
        return e >= 0 and fuses[e] and not graph.eqns[e].traits.renames and not graph.eqns[e].traits.ends_fusion

    def is_product(value: int) -> bool:
        """Whether a value is a contraction's result, under whatever name, that one addition alone reads."""
        e = made_by.get(value, (-1, 0))[0]
        if e < 0 or len(consumers[value]) > 1 or value in outputs:
            return False
        traits = graph.eqns[e].traits
        return traits.contraction or (traits.renames and is_product(graph.operands[e][0]))

    found: list[ScatteredTerm] = []
    for e, eqn in enumerate(graph.eqns):
        if not eqn.traits.addition or graph.results[e][0] in outputs:
            continue
        left, right = graph.operands[e]
        for term, onto in ((left, right), (right, left)):
            scatter = scatter_of(term)
            written = is_expression(onto) or (compiler.merges_terms_of_sums and is_product(onto))
            if scatter >= 0 and written and graph.eqn_loop[scatter] == graph.eqn_loop[e]:
                found.append(ScatteredTerm(e, scatter, onto))
                break
    return tuple(found)
