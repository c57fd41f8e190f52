"""Facts: the facts about a graph on a mesh, a machine and a compiler that no decision changes."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.costs.carriers import Carriers, carriers
from autoshard.costs.casts import lying_share
from autoshard.costs.cut_operands import CutOperands, cut_operands
from autoshard.costs.dimension_orders import DimensionOrders, dimension_orders
from autoshard.costs.execution_order import in_place, late_gradients, loop_spans
from autoshard.costs.fusion import FusionTraits, fusion_traits, host_copies, levels
from autoshard.costs.liveness import LiveRanges, live_ranges
from autoshard.costs.loop_reductions import NONE, Accumulators, accumulators
from autoshard.costs.merged_products import MergedProduct, merged_products
from autoshard.costs.operand_orders import Rewritten, rewritten_operands
from autoshard.costs.overlap import hidden_shares, overlap_windows
from autoshard.costs.prices import Machine
from autoshard.costs.product_kernels import ProductKernels, product_kernels
from autoshard.costs.ragged_products import DenseProduct, dense_products
from autoshard.costs.reductions import Rereads, computed_elsewhere, kernel_levels, rereads
from autoshard.costs.resharding import Strides
from autoshard.costs.shared_gathers import groups
from autoshard.costs.softmaxes import SoftmaxFacts
from autoshard.costs.strategies import SUM, Codes, check_counts, decode, split
from autoshard.costs.strides import strides
from autoshard.costs.windows import EARLY, OverlapWindows
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import LOOP_SLICE
from autoshard.problem.decision_builders.stage_dimensions import Stage, stage_dimensions
from autoshard.problem.ports import Port
from autoshard.rules import rules_of
from autoshard.rules.rule import ShardingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The layouts and memory of a program that are fixed beforehand.

    Attributes:
      tied: program output position → input position that share one layout.
      donated: input positions whose memory may be reused after their last use.
      inputs: input position → the codes that it may have.
      outputs: output position → the codes that it may have.
      equations: equation → the codes that its one result may have.
      held_bytes: input position → further bytes per element of memory that share its layout throughout (an
        optimizer's state that is not in the program).
    """

    tied: Mapping[int, int] = field(default_factory=dict[int, int])
    donated: frozenset[int] = frozenset()
    inputs: Mapping[int, Codes] = field(default_factory=dict[int, Codes])
    outputs: Mapping[int, Codes] = field(default_factory=dict[int, Codes])
    equations: Mapping[int, Codes] = field(default_factory=dict[int, Codes])
    held_bytes: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphFacts:
    """Everything that the builders of decisions read; no fact depends on a decision.

    `manual` is the mesh of the `shard_map` whose body the graph is. `held`: values that lie in memory, also
    under another name. `levels`: see `costs.fusion`. `in_place`: equations that may overwrite their first operand.
    `apart`: value → groups of its uses that share no gather. `reread`, `reread_to_keep`, `elsewhere`, `kernels`:
    reductions that have kernels of their own, stacks for which some have, values that other kernels compute, and per
    value the levels of those that compute it (None: only that of its own level does): see `costs.reductions`.
    `sliced`: slice of a stack → how many kernels read it, where that is known. `products`: what kernels of contractions
    do besides, by a compiler whose do: see `costs.product_kernels`. `merged`: contractions that are one with others,
    see `costs.merged_products`. `dense`: ragged products that are multiplied as dense ones. `rewritten`: operands of
    dots that are transposed: see `costs.operand_orders`. `hides`: the most of communication's seconds that hides, 1
    where kinds differ (`Resharder.hidden_ps`); `hiding`: the most of a contraction's beside which any does.
    `late_gradients`: products that may stand behind the loops that follow: see
    `decision_builders.late_gradients`. `carriers`: of gathers, on chips whose contractions carry them on.
    `cut_operands`: of what a part is copied before a matmul or a loop takes it.
    `host_copies`: equations that copy to the host's memory or back. `stages`: see `stage_dimensions`.
    """

    graph: Graph
    mesh: MeshAxes
    machine: Machine
    compiler: CompilerModel
    manual: MeshAxes | None
    required: Requirements
    rules: tuple[ShardingRule, ...]
    traits: FusionTraits
    lives: LiveRanges
    windows: OverlapWindows
    strides: Mapping[int, Strides]
    accumulators: Accumulators
    held: NDArray[np.bool_]
    levels: NDArray[np.int64]
    in_place: frozenset[int]
    apart: Mapping[int, tuple[tuple[int, ...], ...]]
    reread: Mapping[int, float]
    reread_to_keep: Mapping[int, float]
    elsewhere: NDArray[np.bool_]
    kernels: Sequence[frozenset[int]] | None
    sliced: Mapping[int, int]
    products: ProductKernels | None
    merged: Mapping[int, MergedProduct]
    dense: Mapping[int, DenseProduct]
    rewritten: Mapping[int, tuple[Rewritten, ...]]
    cut_operands: CutOperands
    hides: float
    hiding: float
    late_gradients: frozenset[int]
    carriers: Carriers | None
    host_copies: frozenset[int]
    stages: Mapping[int, Stage]

    def decides(self, value: int) -> bool:
        """Whether a value has a layout to choose: it is not recomputed for free wherever it is needed."""
        return value not in self.traits.free

    def reads(self, value: int) -> bool:
        """Whether who takes a value pays for reading it; of one that a loop keeps or repeats its recall does."""
        maker = self.graph.producers.get(value, (-1, 0))[0]
        recalled = maker >= 0 and self.graph.recalls_slice(maker)
        return self.decides(value) and bool(self.held[value]) and not recalled

    def read_share(self, value: int, codes: Codes) -> NDArray[np.float64]:
        """In each layout, the share of a value's bytes that who takes it reads: for a numerator maybe its product's."""
        numerator = self.lives.numerators.get(value)
        if numerator is None:
            return np.full(len(codes), lying_share(self.graph, self.lives.multiplied, value))
        aval = self.graph.avals[value]
        return numerator.share(aval, split(codes, 0, aval.ndim, self.mesh))

    def written_share(self, value: int, codes: Codes) -> NDArray[np.float64]:
        """In each layout, the share of a value's bytes that who makes it writes: none where its product lies there."""
        numerator = self.lives.numerators.get(value)
        if numerator is None:
            return np.full(len(codes), lying_share(self.graph, self.lives.multiplied, value))
        aval = self.graph.avals[value]
        return np.where(numerator.are_products(aval, split(codes, 0, aval.ndim, self.mesh)), 0.0, 1.0)

    def narrow(self, value: int) -> int:
        """What who takes a value reads: the value in memory of which it is a wider cast, or itself."""
        return value if self.products is None else self.products.narrow.get(value, value)

    def writes(self, value: int) -> bool:
        """Whether who makes a value pays for writing it: a contraction's kernel that does pays itself."""
        elsewhere = value in self.lives.narrowed or (self.products is not None and self.products.host[value] >= 0)
        return bool(self.held[value]) and not elsewhere

    def reading(self, value: int, result: int, *, inside: bool) -> frozenset[int]:
        """The levels of a chain's kernels that read a value in memory to compute a result.

        What the same kernel writes, `inside` of the chain, it has in registers.
        """
        if self.kernels is not None:
            levels = self.kernels[result]
        else:
            levels = self.products.apart[result] if self.products else frozenset({int(self.levels[result])})
        return levels - ({int(self.levels[value])} if inside else set[int]())

    def readers(self, value: int) -> int:
        """How many equations take a value, also as one that a loop keeps or repeats."""
        users = [e for e, _ in self.graph.consumers.get(value, ())]
        recalls = [e for e in users if self.graph.recalls_slice(e)]
        return len(users) + sum(self.readers(self.graph.results[e][0]) - 1 for e in recalls)

    def kernels_of_slice(self, value: int) -> int:
        """How many kernels read a slice of a stack; how many equations take it, where kernels are not known."""
        return self.sliced[value] if value in self.sliced else self.readers(value)

    def on_host(self, value: int) -> bool:
        """Whether a value lies in the host's memory, by a compiler that has one apart."""
        return self.compiler.keeps_host_values_apart and value in self.graph.on_host

    def uses_apart(self, value: int, port: Port) -> tuple[tuple[int, ...], ...]:
        """The groups of uses for which a value is moved, if there are several; pending sums are finished once.

        An all-to-all or a permute is one more instruction that libtpu finds twice, as a gather is.
        """
        pending = (decode(port.codes, self.graph.avals[value].ndim, self.mesh.ndim) == SUM).any()
        return () if pending else self.apart.get(value, ())

    def gathered_before(self) -> list[tuple[int, int]] | None:
        """(equation, bytes) of the weights that are gathered before each, where whole gradients are put off to these.

        None where gradients are made at once.
        """
        if not self.compiler.schedules_for_memory or self.machine.gathers_ahead or not self.machine.unscattered_axes:
            return None
        weights = {v: parts for v, parts in self.apart.items() if self.windows.of_value[v] == EARLY}
        return sorted((part[0], self.graph.avals[v].nbytes) for v, parts in weights.items() for part in parts)


def _slice_kernels(
    graph: Graph, traits: FusionTraits, lives: LiveRanges, levels: NDArray[np.int64], paid: Container[int]
) -> Mapping[int, int]:
    """Slice of a stack → how many kernels read it, also as one that a loop keeps or repeats."""
    slices = [graph.results[e][0] for e, eqn in enumerate(graph.eqns) if eqn.primitive == LOOP_SLICE]
    if not slices:
        return {}
    reading = kernel_levels(graph, traits.fuses, lives.held, levels, paid, made=lives.made, recalled=True).reading
    return {v: len(reading[v]) for v in slices}


def _accumulators(graph: Graph, compiler: CompilerModel) -> Accumulators:
    """The sums over trips that the compiler moves behind their loop."""
    if not compiler.reduces_loop_sums_once:
        return NONE
    return accumulators(graph, past_transposes=compiler.moves_transposed_loop_sums)


def facts_of(
    graph: Graph,
    mesh: MeshAxes,
    machine: Machine,
    compiler: CompilerModel,
    required: Requirements,
    *,
    unknown: str,
    manual: MeshAxes | None = None,
) -> GraphFacts:
    """The facts of a graph; the arguments are those of `decide`."""
    rules = rules_of(graph.eqns, unknown=unknown)
    check_counts(graph, rules, mesh)
    traits = fusion_traits(graph, rules, required.equations, compiler)
    orders = dimension_orders(graph, traits.fuses) if compiler.transposes_what_meets else DimensionOrders()
    late = late_gradients(graph) if compiler.computes_loss_last and machine.gathers_ahead else frozenset[int]()
    lives = live_ranges(
        graph,
        rules,
        traits.fuses,
        compiler,
        orders=orders,
        softmax_facts=SoftmaxFacts(
            devices=mesh.size,
            stores_quotients=machine.stores_quotients,
            stores_gradients=machine.stores_score_gradients,
        ),
        loss_last=compiler.computes_loss_last and not late,
    )
    held = lives.held
    lasting = {v for i, v in enumerate(graph.inputs) if i not in required.donated} | set(graph.outputs)
    level = levels(graph, traits.fuses, orders.turned, lives.maxima)
    alone = compiler.reduces_in_kernels_of_their_own
    again, to_keep = rereads(graph, traits.fuses, held, level, orders.across) if alone else Rereads({}, {})
    products = None
    if compiler.contractions_finish_their_results:
        away = traits.free | (graph.on_host if compiler.keeps_host_values_apart else frozenset[int]())
        products = product_kernels(graph, traits.fuses, traits.flows, lives, level, away)
    rewritten: Mapping[int, tuple[Rewritten, ...]] = {}
    if compiler.transposes_operands:
        in_parts = compiler.reads_rows_in_parts
        rewritten = rewritten_operands(graph, loop_spans(graph), in_parts=in_parts, devices=mesh.size)
    if products:
        elsewhere = np.array([bool(levels) for levels in products.apart])
    else:
        elsewhere = computed_elsewhere(graph, traits.fuses, held, again)
    return GraphFacts(
        graph=graph,
        mesh=mesh,
        machine=machine,
        compiler=compiler,
        manual=manual,
        required=required,
        rules=tuple(rules),
        traits=traits,
        lives=lives,
        windows=overlap_windows(graph, compiler),
        strides=strides(graph) if compiler.collectives_along_outermost_only else {},
        accumulators=_accumulators(graph, compiler),
        held=held,
        levels=level,
        in_place=in_place(graph, lasting),
        apart=groups(graph, far=compiler.regathers_far_uses),
        host_copies=host_copies(graph, compiler),
        stages={} if manual else stage_dimensions(graph, rules, traits.pointwise, mesh),
        reread=again,
        reread_to_keep=to_keep,
        elsewhere=elsewhere,
        kernels=kernel_levels(graph, traits.fuses, held, level, again, made=lives.made).computing if alone else None,
        sliced=_slice_kernels(graph, traits, lives, level, again) if alone else {},
        products=products,
        merged=merged_products(graph, up_to) if (up_to := compiler.merged_product_bytes) else {},
        rewritten=rewritten,
        cut_operands=cut_operands(graph) if compiler.copies_cut_operands else CutOperands(),
        dense=dense_products(graph, lives.start) if compiler.multiplies_ragged_as_dense else {},
        hides=1.0 if hidden_shares(machine, compiler) else machine.overlap,
        hiding=max(hidden_shares(machine, compiler).values(), default=machine.overlap),
        late_gradients=late,
        carriers=carriers(graph) if compiler.hides_gathers_alone and machine.gathers_ahead else None,
    )
