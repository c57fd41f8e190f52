"""Nearest: the layouts of decisions that lie nearest to given ones."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.backends.shardy.propagation import Ps
from autoshard.costs import shared_gathers
from autoshard.costs.casts import widening
from autoshard.costs.prices import INF_PS
from autoshard.costs.resharding import NO_STRIDES, Resharder
from autoshard.costs.strategies import SUM, WHOLE, Codes, Rows, decode, encode, groups_of, shards
from autoshard.ir.graph import Aval
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import DOT_GENERAL, GATHER
from autoshard.problem.decisions import Chain, Copy, Decisions, Edge, Equation, layout_codes, reshard_ps
from autoshard.problem.ports import Usage


class _Nearest:
    def __init__(
        self, decisions: Decisions, resharder: Resharder, layouts: Mapping[int, Layout], compiler: CompilerModel
    ) -> None:
        self.d, self.resharder, self.compiler = decisions, resharder, compiler
        self.choice = np.full(len(decisions.nodes), -1, np.int64)
        self.lies: dict[int, int] = {}  # value → the code in which consumers find it
        codes = {v: code_near(layouts[v], decisions.graph.avals[v].shape, decisions.mesh) for v in decisions.made}
        self.target = {v: code for v, (code, _) in codes.items()}
        self.inexact = sum(not exact for _, exact in codes.values())

    def run(self) -> tuple[NDArray[np.int64], int]:
        d = self.d
        for position, value in enumerate(d.graph.inputs):
            self._end(d.inputs[position], value)
            self._settle(value)
        for node, decision in enumerate(d.nodes):
            if isinstance(decision, Chain):
                self._chain(node)
        for e, values in enumerate(d.graph.results):
            node = d.node_of[e]
            if node >= 0 and isinstance(d.nodes[node], Equation):
                self._equation(node, e)
            for v in values:
                if v in d.made:
                    self._settle(v)
        for position, value in enumerate(d.graph.outputs):
            if self.choice[d.outputs[position]] < 0:
                self._end(d.outputs[position], value)
        self._share()
        return self.choice, self.inexact

    def _share(self) -> None:
        """Moves copies and casts to where all that touches them costs least: as something before or behind them lies.

        The compilers merge equal moves of one value, but for those that a contraction makes
        by itself, and move it on the smaller side of a cast (openxla/xla collective_quantizer.cc); XLA:TPU
        only behind one that narrows (the tokens' vectors in llama3-8b and mixtral-8x7b, libtpu 0.0.52).
        """
        d = self.d
        around: dict[int, list[Edge]] = {}
        for edge in d.edges:
            for node in {edge.u, edge.v}:
                if isinstance(d.nodes[node], Copy) or self._casts(node):
                    around.setdefault(node, []).append(edge)
        for node, edges in around.items():
            total = np.zeros(len(d.nodes[node]), np.int64)
            before, behind = np.zeros((2, len(d.nodes[node])), bool)
            alone = False
            for edge in edges:
                ps = reshard_ps(edge, self.resharder)
                if edge.u == node:
                    ps = ps[:, self.choice[edge.v]]
                    behind |= edge.source == edge.target[self.choice[edge.v]]
                    alone |= isinstance(d.nodes[node], Copy) and self._alone(edge)
                else:
                    ps = ps[self.choice[edge.u]]
                    before |= edge.target == self._reduced(edge.value, int(edge.source[self.choice[edge.u]]))
                total = np.minimum(total + ps, INF_PS)
            total = np.where(before if alone else before | behind, total, INF_PS)
            if total.min() < total[self.choice[node]]:
                self.choice[node] = int(total.argmin())

    def _reduced(self, value: int, code: int) -> int:
        """A code with its pending sums finished, whole."""
        row = self._row(value, code)
        return int(encode(np.where(row == SUM, WHOLE, row).astype(np.int8), self.d.graph.avals[value].ndim))

    def _alone(self, edge: Edge) -> bool:
        """Whether a contraction gathers its operand inside the groups that it splits the devices into.

        No other use shares the gather (`shared_gathers.in_groups`), but on TPUs: XLA:TPU finds such gathers equal, too
        (mlp-8k by `fsdp_megatron` on v5e:2x4, libtpu 0.0.52).
        """
        d = self.d
        taker = d.nodes[edge.v]
        if not isinstance(taker, Equation):
            return False
        e, strategies = taker.equation, taker.strategies
        if d.graph.eqns[e].primitive != DOT_GENERAL or self.compiler.shares_grouped_gathers:
            return False
        rule, values, pick = d.rules[e], d.graph.operands[e], self.choice[edge.v]
        factors = [{f for dim in dims for f in dim} for dims in (*rule.operands, rule.results[0])]
        groups, nbytes = [1, 1], [0, 0]
        for i, (value, codes) in enumerate(zip(values, strategies.operands, strict=True)):
            if value not in self.target:
                return False
            row, free = self._row(value, int(codes[pick])), factors[2] - factors[1 - i]
            split = [row[a] >= 0 and set(rule.operands[i][row[a]]) <= free for a in range(d.mesh.ndim)]
            groups[i] = int(np.prod([s for s, on in zip(d.mesh.sizes, split, strict=True) if on], dtype=np.int64))
            aval = d.graph.avals[value]
            nbytes[i] = aval.nbytes // int(shards(np.array([self.target[value]]), aval.ndim, d.mesh)[0])
        gathered = shared_gathers.in_groups(groups, nbytes)
        lies, taken = (
            self._row(edge.value, code) for code in (self.target[edge.value], int(edge.target[self.choice[edge.v]]))
        )
        gathers = ((lies >= 0) & (taken != lies)).any()
        return gathered is not None and values[gathered] == edge.value and bool(gathers)

    def _casts(self, node: int) -> bool:
        """Whether a decision is one cast alone, and may be made on the other side of a move."""
        decision = self.d.nodes[node]
        if not isinstance(decision, Chain) or len(decision.equations) != 1:
            return False
        eqn = self.d.graph.eqns[decision.equations[0]]
        return eqn.traits.cast and (self.compiler.moves_collectives_past_casts or widening(eqn) < 0)

    def _ps(self, value: int, source: int | Codes, target: int | Codes) -> Ps:
        """Picoseconds between one code and several, either way round, INF where there is no way."""
        aval = self.d.graph.avals[value]
        ends = np.atleast_1d(source), np.atleast_1d(target)
        bucket, strides = self.d.windows.bucket(value), self.d.strides.get(value, NO_STRIDES)
        return self.resharder.cost_ps(aval, *ends, bucket=bucket, strides=strides).ravel()

    def _end(self, node: int, value: int) -> None:
        """Chooses the layout of an input or output; an output that is a constant is whole, the first of them."""
        codes = layout_codes(self.d.nodes[node])
        if value not in self.target:
            self.choice[node] = 0
            return
        self.choice[node] = int(self._ps(value, self.target[value], codes).argmin())

    def _settle(self, value: int) -> None:
        """Chooses a value's copy, if it has one; its maker is decided."""
        made = self.d.made[value]
        code = int(made.codes[self.choice[made.node]])
        copy = self.d.kept.get(value)
        if copy is not None:
            ps = self._ps(value, self.target[value], copy.codes)
            edge = next(x for x in self.d.edges if x.v == copy.node)
            if edge.forbidden is not None:
                ps = np.where(edge.forbidden[self.choice[made.node]], INF_PS, ps)
            self.choice[copy.node] = int(ps.argmin())
            code = int(copy.codes[self.choice[copy.node]])
        self.lies[value] = code

    def _chain(self, node: int) -> None:
        d = self.d
        codes = layout_codes(d.nodes[node])
        votes = np.zeros(len(codes), np.int64)
        for e in d.nodes[node].equations:
            value = d.graph.results[e][0]
            votes[codes == self.target[value]] += d.graph.avals[value].nbytes
        self.choice[node] = int(votes.argmax())

    def _equation(self, node: int, e: int) -> None:
        """As the partitioner would, by habits in this order; among equals the least seconds win.

        The table of a gather or scatter stays where it lies. A result is computed where it
        belongs, or as a pending sum. As few operands as can be are moved, over as few axes
        (so that a pending sum flows on where it can), then as few sums are left pending.
        """
        d = self.d
        decision = d.nodes[node]
        assert isinstance(decision, Equation)
        strategies = decision.strategies
        eqn = d.graph.eqns[e]
        table, displaced, moved, summed = (np.zeros(len(strategies), np.int64) for _ in range(4))
        ps = d.nodes[node].cost_ps.copy()
        for i, (v, codes) in enumerate(zip(d.graph.operands[e], strategies.operands, strict=True)):
            if v in self.lies:
                here, there = self._row(v, self.lies[v]), self._row(v, codes)
                move = ((there != here) & (here != WHOLE)).sum(axis=1)  # a whole axis is split by a local slice
                moved += move
                if eqn.primitive == GATHER and i == 0:
                    table += move
                ps = np.minimum(ps + self._ps(v, self.lies[v], codes), INF_PS)
                if (here == SUM).any():
                    ps[strategies.finished == i] = INF_PS
        for v, codes in zip(d.graph.results[e], strategies.results, strict=True):
            here, there = self._row(v, codes), self._row(v, self.target[v])
            displaced += ((here != there) & (here != SUM)).sum(axis=1)
            summed += ((here != there) & (here == SUM)).sum(axis=1)
            if eqn.traits.scatters:
                table += ((here != there) & (there != WHOLE)).sum(axis=1)
            ps = np.minimum(ps + self._ps(v, codes, self.target[v]), INF_PS)
        self.choice[node] = int(np.lexsort((ps, summed, moved, displaced, table, ps >= INF_PS))[0])

    def _row(self, value: int, code: int | Codes) -> Rows:
        return decode(code, self.d.graph.avals[value].ndim, self.d.mesh.ndim)


def code_near(layout: Layout, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, bool]:
    """The code of a layout, and whether it is exact.

    What codes do not have is left whole: from the first axis of a dimension on that is split
    itself (`model:(1)2`) or does not divide, and last dimensions while the axes are used in too
    many groups. Axes within a dimension are put in mesh order.
    """
    row = np.full(mesh.ndim, WHOLE, np.int8)
    exact = True
    for d, axes in enumerate(layout.dims):
        size, before = shape[d], -1
        for name in axes:
            if name not in mesh.names:
                if ":" in name:
                    exact = False
                    break
                continue  # an axis of size 1
            a = mesh.names.index(name)
            if size % mesh.sizes[a]:
                exact = False
                break
            exact = exact and a > before
            row[a], size, before = d, size // mesh.sizes[a], a
    while groups_of(row.tolist()) > (mesh.groups or mesh.ndim):
        row[row == row.max()], exact = WHOLE, False
    return int(encode(row, len(shape))), exact


def before_casts(decisions: Decisions) -> Decisions:
    """The same decisions, with results of widening casts moved before the cast, as XLA:GPU does.

    A hand-written layout does not pin the cast, which is made again for every use (openxla/xla
    collective_quantizer.cc). XLA:TPU moves the result of the cast (gpt2-small, the gradient of its positions,
    libtpu 0.0.51).
    """
    graph = decisions.graph
    narrow: dict[int, Aval] = {}
    for eqn, operands, results in zip(graph.eqns, graph.operands, graph.results, strict=True):
        if widening(eqn) > 0:
            narrow[results[0]] = graph.avals[operands[0]]
    edges = tuple(replace(e, moved=narrow[e.value]) if e.value in narrow else e for e in decisions.edges)
    return replace(decisions, edges=edges)


def of_partitioner(decisions: Decisions) -> Decisions:
    """The decisions with all choices that the partitioner may make of annotations, also those of no plan."""
    return replace(decisions, edges=tuple(replace(e, forbidden=e.impossible) for e in decisions.edges))


def nearest(
    decisions: Decisions, resharder: Resharder, layouts: Mapping[int, Layout], compiler: CompilerModel
) -> tuple[NDArray[np.int64], int]:
    """The choice per decision nearest to the layouts of all values, and how many values have none of its codes.

    Inputs, outputs and copies take the layout that is cheapest to reach from the value's
    own. A chain takes the layout of most of its values, by bytes. An equation takes the
    strategy that leaves most of its operands where they lie and its results where they belong.
    """
    return _Nearest(decisions, resharder, layouts, compiler).run()


def gathered(decisions: Decisions, choice: NDArray[np.int64]) -> Decisions:
    """The same decisions with the memory of values that a choice gathers for each of several uses.

    The gathered weights count from the start: XLA's scheduler gathers for the last use before the first is over.
    """
    graph = decisions.graph
    held: dict[int, tuple[int, int, int]] = {}  # copy → first and last use, bytes
    for edge in decisions.edges:
        node = decisions.nodes[edge.v]
        if not (isinstance(decisions.nodes[edge.u], Copy) and isinstance(node, Equation)):
            continue
        aval, codes = graph.avals[edge.value], (edge.source[choice[edge.u]], edge.target[choice[edge.v]])
        lies, taken = (int(n) for n in aval.nbytes // shards(np.array(codes), aval.ndim, decisions.mesh))
        if taken > lies:
            e = node.equation
            first, last, nbytes = held.get(edge.u, (e, e, 0))
            held[edge.u] = min(first, e), max(last, e), max(nbytes, taken)
    found = (
        Usage(node=n, start=first, end=last + 1, nbytes=np.full(len(decisions.nodes[n]), nbytes), kind="copies")
        for n, (first, last, nbytes) in held.items()
    )
    return replace(decisions, usages=(*decisions.usages, *found))
