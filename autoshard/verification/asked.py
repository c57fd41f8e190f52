"""Asked: whether an annotation of the program asks for a collective that the compiler emits."""

from collections import defaultdict

from jax.sharding import PartitionSpec

from autoshard.backends import hlo
from autoshard.ir.constraints import spec_of
from autoshard.ir.graph import Eqn, Graph, Path
from autoshard.ir.op_traits import CONSTRAINT, LOOP_SLICE, SHARD_MAP, traits_of
from autoshard.verification.verify import argument_of, path_of

_REDUCES = frozenset({"all-reduce", "reduce-scatter"})


class Asked:
    """Whether an annotation asks for a collective, by the equation whose path its name carries."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._equations: dict[Path, list[int]] = defaultdict(list)
        for e, (made, taken) in enumerate(zip(graph.makes, graph.takes, strict=True)):
            for path in {path for path, _ in (made[0], *taken)}:  # a loop's links take outside what they make inside
                self._equations[path].append(e)
        self._stored = frozenset(self._handed_on())

    def __call__(self, found: hlo.Collective) -> bool:
        if found.kind in _REDUCES or found.op_name.endswith(CONSTRAINT) or _is_by_hand(found):
            return True
        equations = self._equations.get(path_of(found.op_name))
        if equations is None and found.kind == "all-gather" and self._is_whole_in_call(path_of(found.op_name), found):
            return True
        if equations is None:  # a result that moves to the sharding asked of it, or an argument's gather
            return found.op_name == "" or (found.kind == "all-gather" and argument_of(found) is not None)
        if any(self._graph.eqns[e].primitive == CONSTRAINT for e in equations):
            return True
        if found.kind == "all-gather" and any(self._is_left_whole(e, found) for e in equations):
            return True
        ends = (v for e in equations for v in (*self._graph.operands[e], *self._graph.results[e]))
        gathered = [v for v in ends if v in self._stored]
        return found.kind == "all-gather" and any(self._graph.avals[v].nbytes % found.nbytes == 0 for v in gathered)

    def _is_whole_in_call(self, call: Path, found: hlo.Collective) -> bool:
        """Whether a call, after which a gather of what it takes is named, has a constraint that leaves out the axes.

        XLA:TPU names the gathers of a `jax.checkpoint` so.
        """
        axes = {axis.partition(":")[0] for axis in found.axes or ()}
        inside = (e for path, es in self._equations.items() if call and path[: len(call)] == call for e in es)
        constraints = (self._graph.eqns[e] for e in inside if self._graph.eqns[e].primitive == CONSTRAINT)
        return any(not axes & _axes(spec_of(eqn)) for eqn in constraints)

    def _is_left_whole(self, e: int, found: hlo.Collective) -> bool:
        """Whether a constraint takes what an equation makes, and leaves out the axes over which that is gathered.

        The partitioner names a gather after the value that it moves, not after the constraint that asks for it, and
        moves a term of a sum in the place of the sum.
        """
        axes = {axis.partition(":")[0] for axis in found.axes or ()}
        left, seen = list(self._graph.results[e]), set[int]()
        while left:
            value = left.pop()
            for use, _ in self._graph.consumers.get(value, ()):
                eqn = self._graph.eqns[use]
                if eqn.primitive == CONSTRAINT and not axes & _axes(spec_of(eqn)):
                    return True
                sums = eqn.traits.combines and eqn.results[0].shape == self._graph.avals[value].shape
                if (sums or eqn.traits.cast) and use not in seen:
                    seen.add(use)
                    left += self._graph.results[use]
        return False

    def _handed_on(self) -> set[int]:
        """Values that are program inputs, or such inputs cast, transposed, or a layer of them."""
        stored = set(self._graph.inputs)
        for eqn, operands, results in zip(self._graph.eqns, self._graph.operands, self._graph.results, strict=True):
            if _hands_on(eqn) and set(operands) <= stored and operands:
                stored |= set(results)
        return stored


def _is_by_hand(found: hlo.Collective) -> bool:
    """Whether the body of a `shard_map` has the collective, or differentiating it made it."""
    scopes, _, name = found.op_name.rpartition("/")
    return SHARD_MAP in scopes.split("/") and traits_of(name).collective is not None


def _axes(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a spec names."""
    entries = (entry for entry in spec if entry is not None and entry is not PartitionSpec.UNCONSTRAINED)
    return {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}


def _hands_on(eqn: Eqn) -> bool:
    """Whether an equation hands an argument on, whole or a layer of it; a constraint asks something of it instead."""
    traits = eqn.traits
    renames = traits.renames and eqn.primitive != CONSTRAINT
    return renames or traits.cast or traits.copy or eqn.primitive == LOOP_SLICE
