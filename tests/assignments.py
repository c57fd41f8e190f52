"""Random emittable assignments of a program's decisions, and running them on eight CPU devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from autoshard._jax import JAX_VERSION
from autoshard.backends import devices
from autoshard.costs.resharding import Resharder
from autoshard.costs.strategies import layout_of
from autoshard.ir import rewrite
from autoshard.planner.build_record import program_pins
from autoshard.planner.search_space import SearchSpace
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Decisions, reshard_ps
from autoshard.problem.network import INF

# The CPU compiler at its fastest: kernels are not optimised, and not emitted through MLIR
# (an option that JAX 0.12 no longer has).
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if JAX_VERSION < (0, 12):
    QUICK_COMPILE["xla_cpu_use_fusion_emitters"] = False


def random_choice(decisions: Decisions, resharder: Resharder, rng: np.random.Generator) -> NDArray[np.int64]:
    """One choice per decision with no forbidden pair, uniform over what earlier choices leave.

    Arc consistency is kept after every choice; only edges with forbidden pairs matter. A
    choice that leaves a neighbour nothing is taken back.
    """
    open_ = [np.ones(len(node), bool) for node in decisions.nodes]
    links: list[list[tuple[int, NDArray[np.bool_]]]] = [[] for _ in decisions.nodes]
    for edge in decisions.edges:
        allowed = reshard_ps(edge, resharder) < INF
        if not allowed.all():
            links[edge.u].append((edge.v, allowed))
            links[edge.v].append((edge.u, allowed.T))

    def narrow(start: int, states: list[NDArray[np.bool_]]) -> bool:
        queue = [start]
        while queue:
            node = queue.pop()
            for other, allowed in links[node]:
                left = states[other] & allowed[states[node]].any(axis=0)
                if not left.any():
                    return False
                if (left != states[other]).any():
                    states[other] = left
                    queue.append(other)
        return True

    for node in range(len(open_)):
        if not narrow(node, open_):
            raise AssertionError("no assignment at all")
    for node in rng.permutation(len(open_)):
        for pick in rng.permutation(np.flatnonzero(open_[node])):
            trial = [s.copy() for s in open_]
            trial[node][:] = False
            trial[node][pick] = True
            if narrow(int(node), trial):
                open_ = trial
                break
        else:
            raise AssertionError("arc consistency left a dead end")
    return np.array([int(s.argmax()) for s in open_], np.int64)


def run(space: SearchSpace, choice: NDArray[np.int64], args: list[Any]) -> list[Any]:
    """Compiles the program under a choice on real devices and runs it on flat arguments."""
    decisions = space.decisions
    assignment = Assignment(decisions=decisions, resharder=space.resharder, choice=choice)
    mesh = devices.over_devices(decisions.mesh, np.arange(decisions.mesh.size))
    pins = program_pins(assignment)
    avals = decisions.graph.avals

    def sharding(code: int, value: int) -> NamedSharding:
        return NamedSharding(mesh, layout_of(code, avals[value].ndim, decisions.mesh).spec())

    fn = jax.jit(
        lambda *xs: rewrite.emit_constraints(space.priced.jaxpr, pins, mesh, xs),
        in_shardings=tuple(sharding(assignment.input_code(i), v) for i, v in enumerate(decisions.graph.inputs)),
        out_shardings=[sharding(assignment.output_code(i), v) for i, v in enumerate(decisions.graph.outputs)],
        compiler_options=QUICK_COMPILE,
    )
    return fn(*args)
