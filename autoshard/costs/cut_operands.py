"""Cut operands: parts of whole arrays that XLA:GPU copies, because what takes them reads an array.

A matmul's kernel, and a loop, take an array as it lies in memory. Where a device holds more of one that was given to
the program than it takes, its part is cut out and written first, contiguous or not; in a loop, in every trip. Fusions
read their part where it lies: so a value that they make is made in the smaller layout, and a product with a single
row, which is added up element by element, copies nothing (jax-cuda12-pjrt 0.10.2 and 0.12.0.1).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.matmul_fusions import is_matmul
from autoshard.costs.strategies import Codes, shards
from autoshard.ir.graph import Aval, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, DOT_GENERAL, LOOP_CARRY, LOOP_CONST, LOOP_SLICE

_ENTERING = frozenset({LOOP_CONST, LOOP_SLICE})
_PASSING = frozenset({LOOP_CONST, LOOP_CARRY, CONSTRAINT})  # a slice of a stack is made in the layout of its stack
_READ_AND_WRITTEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOperands:
    """Whose parts are copied, and for whom.

    Attributes:
      values: those that are given to a program, or are other names of such: arrays that no kernel makes.
      takers: the equations that read arrays, matmuls and loops, or that rename them for one.
    """

    values: frozenset[int] = frozenset()
    takers: frozenset[int] = frozenset()


def cut_operands(graph: Graph) -> CutOperands:
    """Those of a graph."""
    values = {v for v in graph.inputs if graph.avals[v].ndim and v not in graph.on_host}
    for e, eqn in enumerate(graph.eqns):
        operands, results = graph.operands[e], graph.results[e]
        passes = eqn.traits.updates or eqn.traits.reshapes or eqn.primitive in _PASSING
        if passes and len(results) == 1 and operands[0] in values:
            values.add(results[0])
    takers = set[int]()
    for e in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[e]
        takes = eqn.primitive in _ENTERING or (eqn.primitive == DOT_GENERAL and is_matmul(eqn))
        if eqn.traits.reshapes or eqn.primitive == CONSTRAINT:
            takes = any(u in takers for u, _ in graph.consumers.get(graph.results[e][0], ()))
        takers |= {e} if takes else set()
    return CutOperands(values=frozenset(values), takers=frozenset(takers))


def copied_bytes(aval: Aval, codes: Codes, mesh: MeshAxes) -> NDArray[np.int64]:
    """What is read and written in each layout (S,) to cut a device's part out of a value: bytes."""
    return _READ_AND_WRITTEN * aval.nbytes // shards(codes, aval.ndim, mesh)
