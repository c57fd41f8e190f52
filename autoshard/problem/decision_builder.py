"""Decide: a graph on a mesh and a machine → its decisions, with every choice priced."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.model import CompilerModel
from autoshard.costs import compute as costs
from autoshard.costs.casts import narrow_side, widening
from autoshard.costs.execution_order import feeding
from autoshard.costs.fusion import fusion_traits, levels
from autoshard.costs.liveness import cast_ahead, in_place, live_ranges
from autoshard.costs.loop_reductions import NONE, accumulators
from autoshard.costs.overlap import EARLY, overlap_windows
from autoshard.costs.prefetch import begins, fetchable
from autoshard.costs.resharding import NO_STRIDES, PS_PER_S
from autoshard.costs.shared_gathers import groups
from autoshard.costs.strategies import (
    SUM,
    WHOLE,
    Codes,
    Strategies,
    check_counts,
    decode,
    enumerate_strategies,
    given,
    layouts,
    parted,
    reduced,
    shards,
)
from autoshard.costs.strides import strides
from autoshard.ir import manual_calls
from autoshard.ir.graph import Aval, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import LOOP_STACK, PALLAS, SHARD_MAP
from autoshard.problem import bodies
from autoshard.problem.decisions import Body, Decision, Decisions, Edge, Port, consumer_port
from autoshard.problem.memory_usage import MemoryUsageBuilder, local_bytes
from autoshard.rules import rules_of


def decide(
    graph: Graph,
    mesh: MeshAxes,
    machine: costs.Machine,
    *,
    tied: Mapping[int, int],
    donated: frozenset[int],
    input_pins: Mapping[int, Codes],
    output_pins: Mapping[int, Codes],
    equation_pins: Mapping[int, Codes],
    held_bytes: Mapping[int, int],
    unknown: str,
    compiler: CompilerModel,
) -> Decisions:
    """Builds the decisions of a graph.

    Args:
      graph: the program.
      mesh: the logical mesh.
      machine: the cost model with the mesh placed on it.
      tied: program output position → input position that share one layout.
      donated: input positions whose memory may be reused after their last use.
      input_pins: input position → the codes that it may have.
      output_pins: output position → the codes that it may have.
      equation_pins: equation → the codes that its one result may have.
      held_bytes: input position → further bytes per element of memory that share its
        layout throughout (an optimizer's state that is not in the program).
      unknown: "error", or "replicate" to keep equations without a rule whole.
      compiler: who compiles it.
    """
    decider = _Decider(graph, mesh, machine, equation_pins, unknown, compiler)
    return decider.run(tied, donated, input_pins, output_pins, held_bytes)


class _Decider:
    def __init__(
        self,
        graph: Graph,
        mesh: MeshAxes,
        machine: costs.Machine,
        equation_pins: Mapping[int, Codes],
        unknown: str,
        compiler: CompilerModel,
        manual: MeshAxes | None = None,  # the mesh of the `shard_map` that the graph is the body of
    ) -> None:
        self.graph, self.mesh, self.machine, self.manual = graph, mesh, machine, manual
        self.bodies = bodies.Bodies(manual or mesh, machine, compiler, self._alone)
        self.summed: set[int] = set()  # results of a `shard_map` that end in a sum of its author's
        self.equation_pins = equation_pins
        self.rules = rules_of(graph.eqns, unknown=unknown)
        check_counts(graph, self.rules, mesh)
        self.traits = fusion_traits(graph, self.rules, equation_pins, compiler)
        self.free = self.traits.free
        self.compiler = compiler
        self.accumulators = accumulators(graph) if compiler.reduces_loop_sums_once else NONE
        self.made_by = graph.producers()
        self.consumers = graph.consumers()
        self.lives = live_ranges(
            graph, self.rules, self.traits.fuses, compiler, stores_quotients=machine.stores_quotients
        )
        self.windows = overlap_windows(graph, compiler)
        self.strides = strides(graph) if compiler.collectives_along_outermost_only else {}
        self.held = self.lives.stored | self.lives.named
        self.levels = levels(graph, self.traits.fuses)
        self.nodes: list[Decision] = []
        self.edges: list[Edge] = []
        self.node_of = [-1] * len(graph.eqns)
        self.copies: dict[int, Port] = {}  # value → its copy
        self.ports: dict[int, Port] = {}  # value → where it is made
        self.apart = groups(graph) if compiler.regathers_far_uses else {}  # value → uses that share no gather
        before = None
        if compiler.schedules_for_memory and not (machine.gathers_ahead or machine.scatters_whole):
            weights = {v: parts for v, parts in self.apart.items() if self.windows.of_value[v] == EARLY}
            before = sorted((part[0], graph.avals[v].nbytes) for v, parts in weights.items() for part in parts)
        self.usages = MemoryUsageBuilder(graph, mesh, self.lives, self.traits, self.windows, compiler, before=before)
        self.fetched: dict[int, int] = {}  # value → the equation before which its gather begins
        self.parameters: set[int] = set()  # inputs that a new value replaces and that a contraction depends on
        self.pruned = 0

    def run(
        self,
        tied: Mapping[int, int],
        donated: frozenset[int],
        input_pins: Mapping[int, Codes],
        output_pins: Mapping[int, Codes],
        held_bytes: Mapping[int, int],
    ) -> Decisions:
        kept = {v for i, v in enumerate(self.graph.inputs) if i not in donated}
        self.in_place = in_place(self.graph, kept | set(self.graph.outputs))
        inputs = self._add_inputs(tied, donated, input_pins, output_pins, held_bytes)
        self._add_chains()
        self._add_equations()
        outputs = self._add_outputs(inputs, tied, output_pins)
        self._connect(inputs, outputs)
        return Decisions(
            graph=self.graph,
            mesh=self.mesh,
            rules=tuple(self.rules),
            nodes=tuple(self.nodes),
            edges=tuple(self.edges),
            usages=self.usages.all(),
            node_of=tuple(self.node_of),
            made=self.ports,
            kept=self.copies,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            windows=self.windows,
            strides=self.strides,
            lives=self.lives,
            apart=frozenset(self.apart),
            pruned=self.pruned,
        )

    # Nodes.

    def _node(
        self,
        kind: str,
        name: str,
        where: str,
        count: int,
        *,
        seconds: NDArray[np.float64] | None = None,
        cover: NDArray[np.float64] | None = None,
        window: int = EARLY,
        flops: NDArray[np.float64] | None = None,
        equations: Sequence[int] = (),
        strategies: Strategies | None = None,
        codes: Codes | None = None,
        body: Body | None = None,
    ) -> int:
        zero = np.zeros(count)
        self.nodes.append(
            Decision(
                kind=kind,
                name=name,
                where=where,
                cost_ps=costs.picoseconds(zero if seconds is None else seconds),
                cover_ps=costs.picoseconds(zero if cover is None else cover),
                window=window,
                flops=zero if flops is None else flops,
                equations=tuple(equations),
                strategies=strategies,
                codes=codes,
                body=body,
            )
        )
        return len(self.nodes) - 1

    def _add_inputs(
        self,
        tied: Mapping[int, int],
        donated: frozenset[int],
        input_pins: Mapping[int, Codes],
        output_pins: Mapping[int, Codes],
        held_bytes: Mapping[int, int],
    ) -> list[int]:
        found: list[int] = []
        end = len(self.graph.eqns) + 1
        tied_inputs = set(tied.values())
        pins = dict(input_pins)
        for output, position in tied.items():
            if output in output_pins:
                pins.setdefault(position, output_pins[output])
        feeds = feeding(self.graph)
        ahead = cast_ahead(self.graph) if self.compiler.casts_stacked_inputs_ahead else {}
        for position, value in enumerate(self.graph.inputs):
            aval = self.graph.avals[value]
            codes = layouts(aval.shape, self.mesh, unreduced=False)
            if position in pins:
                codes = pins[position]
            node = self._node("input", f"input {position}", "", len(codes), codes=codes)
            self.ports[value] = Port(node, codes)
            last = end
            if position in donated and position not in tied_inputs:
                last = int(self.lives.end[value])
            # What goes round is the model's if a contraction depends on it, else its optimizer's.
            kind = "arguments" if position not in tied_inputs else "parameters" if feeds[value] else "optimizer"
            if kind == "parameters":
                self.parameters.add(node)
            nbytes = local_bytes(aval, codes, self.mesh)
            self.usages.add(node, 0, last, nbytes, kind)
            if value in ahead:
                itemsize, first, final = ahead[value]
                self.usages.add(node, first, final + 1, nbytes * itemsize // aval.itemsize, "copies")
            if position in held_bytes:
                pieces = shards(codes, aval.ndim, self.mesh)
                self.usages.add(node, 0, end, aval.size * held_bytes[position] // pieces, "optimizer")
            found.append(node)
        return found

    def _add_chains(self) -> None:
        parent: dict[int, int] = {}

        def find(e: int) -> int:
            while parent[e] != e:
                parent[e] = parent[parent[e]]
                e = parent[e]
            return e

        graph = self.graph
        for e, rule in enumerate(self.rules):
            if not self.traits.pointwise[e] or self.traits.flows[e] or graph.results[e][0] in self.free:
                continue
            parent[e] = e
            for v, dims in zip(graph.operands[e], rule.operands, strict=True):
                maker = self.made_by.get(v, (-1, 0))[0]
                cut = maker in parent and (widening(graph.eqns[maker]) < 0 or widening(graph.eqns[e]) > 0)
                if maker in parent and dims == rule.results[0] and not cut:
                    parent[find(maker)] = find(e)
        chains: dict[int, list[int]] = {}
        for e in parent:
            chains.setdefault(find(e), []).append(e)
        for members in [*chains.values(), *graph.carries()]:
            self._add_chain(members)

    def _add_chain(self, members: list[int]) -> None:
        graph, mesh = self.graph, self.mesh
        first = members[0]
        aval = graph.avals[graph.results[first][0]]
        codes = layouts(aval.shape, mesh, unreduced=False)
        inside = {graph.results[e][0] for e in members}
        pieces = shards(codes, aval.ndim, mesh)
        nbytes = np.zeros(len(codes))
        trips = graph.runs(first)
        seen: set[int] = set()
        for e in members:
            result = graph.results[e][0]
            for v in graph.operands[e]:
                if v in seen or v in self.free or not self.held[v]:
                    continue
                if v in inside and self.levels[v] == self.levels[result]:
                    continue  # written by the same kernel, which has it in registers
                seen.add(v)
                nbytes += graph.avals[v].nbytes / np.minimum(pieces, max(graph.avals[v].size, 1))
            if self.held[result]:
                nbytes += graph.avals[result].nbytes / pieces
        if graph.eqns[first].traits.link:
            nbytes[:] = 0.0
        seconds = np.asarray(self.machine.hbm_s(nbytes)) * trips
        idle = self.windows.idle.issuperset(members)
        node = self._node(
            "chain",
            f"{graph.eqns[first].primitive} …" if len(members) > 1 else graph.eqns[first].primitive,
            graph.eqns[first].where,
            len(codes),
            seconds=seconds,
            cover=seconds * self.machine.overlap if idle else None,
            window=self.windows.of_equation[first] if idle else EARLY,
            equations=members,
            codes=codes,
        )
        for e in members:
            self.node_of[e] = node
            self.ports[graph.results[e][0]] = Port(node, codes)

    def _add_equations(self) -> None:
        graph = self.graph
        for e, (eqn, rule) in enumerate(zip(graph.eqns, self.rules, strict=True)):
            if self.node_of[e] >= 0 or all(v in self.free for v in graph.results[e]):
                continue
            body = None
            if eqn.primitive == SHARD_MAP and self.manual is None:
                laid_out = manual_calls.manual_layouts(eqn, self.mesh)
                body = self.bodies.of(eqn, laid_out[len(eqn.operands) :], self._live(e))
                self.summed.update(graph.results[e][i] for i in body.summed)
                strategies = given(bodies.pending(laid_out, body), len(eqn.operands), self.mesh)
            else:
                strategies = enumerate_strategies(rule, self.mesh, sums_flow=self.traits.flows[e])
                if self.traits.flows[e] and len(set(graph.operands[e])) > 1 and self.compiler.merges_terms_of_sums:
                    strategies = strategies.merging()
            if e in self.equation_pins:
                strategies = strategies.only(np.isin(strategies.results[0], self.equation_pins[e]))
            self.pruned += strategies.pruned
            seconds = costs.in_op_s(eqn, rule, strategies, self.mesh, self.machine)
            cover = flops = None
            window = EARLY
            if eqn.primitive == SHARD_MAP:
                body = body or self.bodies.of(eqn, (), self._live(e))
                seconds, flops = seconds + body.seconds, np.full(len(strategies), body.flops)
                cover = np.full(len(strategies), body.multiplying_s * self.machine.overlap * graph.runs(e))
                window = self.windows.of_equation[e]
            elif self.manual is not None and bodies.over(eqn, self.manual):
                pass  # a collective is priced as such
            elif eqn.primitive == PALLAS and manual_calls.estimate(eqn) is not None:
                seconds, flops = costs.kernel_s(eqn, strategies, self.mesh, self.machine)
            elif costs.is_contraction(eqn):
                compute, flops = costs.contraction_s(eqn, rule, strategies, self.mesh, self.machine)
                seconds = seconds + compute
                cover = compute * self.machine.overlap * graph.runs(e)
                window = self.windows.of_equation[e]
            else:
                reads = [v not in self.free and bool(self.held[v]) for v in graph.operands[e]]
                writes = [bool(self.held[v]) for v in graph.results[e]]
                if eqn.traits.updates:
                    writes = [e not in self.in_place]
                readers = sum(len(self.consumers.get(v, ())) for v in graph.results[e])
                nbytes = costs.touched_bytes(eqn, strategies, self.mesh, reads, writes, readers)
                touched = np.asarray(self.machine.hbm_s(nbytes))
                seconds = seconds + touched
                if e in self.windows.idle:
                    cover = touched * self.machine.overlap * graph.runs(e)
                    if eqn.primitive == LOOP_STACK:  # zeroed before the loop, and written by what makes it
                        cover *= 2 / 3 if reads[0] else 0.0
                    window = self.windows.of_equation[e]
            node = self._node(
                "equation",
                eqn.primitive,
                eqn.where,
                len(strategies),
                seconds=seconds * graph.runs(e),
                cover=cover,
                window=window,
                flops=None if flops is None else flops * graph.runs(e),
                equations=(e,),
                strategies=strategies,
                body=body,
            )
            self.node_of[e] = node
            if body is not None:
                self.usages.add(node, e, e + 1, np.full(len(strategies), body.beside_bytes), "activations")
            for v, codes in zip(graph.results[e], strategies.results, strict=True):
                self.ports[v] = Port(node, codes)

    def _live(self, e: int) -> list[bool]:
        """Which results of an equation anything takes."""
        return [v in self.consumers or v in self.graph.outputs for v in self.graph.results[e]]

    def _alone(self, graph: Graph) -> Decisions:
        """The decisions of a `shard_map`'s body, a program on one device."""
        mesh = self.manual or self.mesh
        body = _Decider(graph, bodies.ALONE, self.machine, {}, "replicate", self.compiler, manual=mesh)
        return body.run({}, frozenset(), {}, {}, {})

    def _add_outputs(self, inputs: list[int], tied: Mapping[int, int], output_pins: Mapping[int, Codes]) -> list[int]:
        found: list[int] = []
        for position, value in enumerate(self.graph.outputs):
            if position in tied:
                found.append(inputs[tied[position]])
                continue
            aval = self.graph.avals[value]
            codes = layouts(aval.shape, self.mesh, unreduced=False)
            if position in output_pins:
                codes = output_pins[position]
            found.append(self._node("output", f"output {position}", "", len(codes), codes=codes))
        return found

    # Edges and memory.

    def _connect(self, inputs: list[int], outputs: list[int]) -> None:
        graph = self.graph
        leaves: dict[int, list[Port]] = {}
        for position, value in enumerate(graph.outputs):
            node = outputs[position]
            codes = self.nodes[node].codes
            assert codes is not None  # inputs and outputs have codes
            leaves.setdefault(value, []).append(Port(node, codes))
        if self.compiler.prefetches_forward_weights:
            self.fetched = self._fetched()
        for value in range(len(graph.avals)):
            port = self.ports.get(value)
            if port is None:
                continue
            self._connect_value(value, port, leaves.get(value, []))

    def _connect_value(self, value: int, port: Port, leaves: list[Port]) -> None:
        targets: dict[tuple[int, bytes], Port] = {}
        uses = self.consumers.get(value, [])
        for e, i in uses:
            target = consumer_port(self.nodes, self.rules, self.node_of, self.mesh, e, i)
            if target is None or (target.node == port.node and self.nodes[port.node].kind == "chain"):
                continue
            targets.setdefault((target.node, target.codes.tobytes()), target)
        is_input = self.nodes[port.node].kind == "input"
        for target in leaves:
            if not (is_input and target.node == port.node):
                targets.setdefault((target.node, target.codes.tobytes()), target)
        found = list(targets.values())
        several = len(found) > 1 or bool(found and value in self.summed)
        lent = is_input or bool(self.lives.named[value]) or bool(self.lives.absorbed[value])
        first = min((e for e, _ in uses), default=0)
        begin = self.fetched.get(value, max(first, int(self.lives.start[value])))
        # What is computed element by element and leaves in a donated input's place is written there.
        replaces = self.nodes[port.node].kind == "chain" and any(self.nodes[t.node].kind == "input" for t in leaves)
        state = replaces and len(found) == 1 and found[0].node in self.parameters
        arrives = state and self.compiler.gathers_new_state_in_place
        holder = port
        if arrives:
            holder = self._add_arrival(value, port, found[0])
        elif several or (found and lent and any(not self.traits.pointwise[e] for e, _ in uses)):
            holder = self._add_copy(value, port, found, lent=lent)
            if not replaces:
                self.usages.add_copy(value, holder, port, begin, self._groups(value, port), lent=lent)
        elif not is_input and self.lives.stored[value] and not replaces:
            name, target = self._last_name(value, found[0]) if found else (value, None)
            in_place = target is not None and self.nodes[target.node].kind == "input"
            self.usages.add_value(value, port, begin, name, target, in_place=in_place)
        for target in found:
            kept = holder.codes[:, None] != target.codes[None, :] if arrives else None
            self._edge(holder, target, value, forbidden=kept)

    def _fetched(self) -> dict[int, int]:
        """Value → the equation before which its gather begins, of weights in a forward pass outside of loops."""
        uses = fetchable(self.graph)
        names = self.mesh.names
        gather_s = {v: float(self.machine.collective_s("all-gather", names, self.graph.avals[v].nbytes)) for v in uses}
        fastest = np.array([int(node.cost_ps.min()) for node in self.nodes]) / PS_PER_S
        equation_s = np.zeros(len(self.graph.eqns))
        for e, node in enumerate(self.node_of):
            if node >= 0 and self.nodes[node].equations[0] == e:
                equation_s[e] = fastest[node]
        return begins(uses, gather_s, equation_s.tolist())

    def _last_name(self, value: int, target: Port) -> tuple[int, Port]:
        """By which name a pending sum is finished, and who alone takes it by that.

        XLA:GPU keeps one beside loops as it is made.
        """
        if not self.compiler.finishes_sums_by_last_name or self.graph.loops:
            return value, target
        while self.nodes[target.node].kind == "equation":
            (e,) = self.nodes[target.node].equations
            if not (self.traits.flows[e] and self.graph.eqns[e].traits.renames):
                break
            (result,) = self.graph.results[e]
            uses = self.consumers.get(result, ())
            if len(uses) != 1 or result in self.graph.outputs:
                break
            onward = consumer_port(self.nodes, self.rules, self.node_of, self.mesh, *uses[0])
            if onward is None:
                break
            value, target = result, onward
        return value, target

    def _add_copy(self, value: int, port: Port, targets: list[Port], *, lent: bool) -> Port:
        """The copy of a value for its consumers.

        The copy of a value whose memory is another's (an input, a stored value under another
        name) either *is* that value (same layout, no memory) or lies beside it: each code
        appears as both, first the aliases.
        """
        aval = self.graph.avals[value]
        wanted = np.unique(np.concatenate([t.codes for t in targets]))
        rows = decode(wanted, aval.ndim, self.mesh.ndim)
        finished = ~(rows == SUM).any(axis=1)
        made = np.unique(port.codes)
        codes = np.unique(
            np.concatenate(
                [wanted[finished], np.intersect1d(wanted[~finished], made), reduced(made, aval.ndim, self.mesh)]
            )
        )
        name = f"copy of {self.nodes[port.node].name}"
        where = self.nodes[port.node].where
        forbidden = None
        if lent:
            alias = codes[np.isin(codes, port.codes)]
            forbidden = np.zeros((len(port.codes), len(alias) + len(codes)), bool)
            forbidden[:, : len(alias)] = port.codes[:, None] != alias[None, :]
            codes = np.concatenate([alias, codes])
        node = self._node("copy", name, where, len(codes), codes=codes)
        copy = Port(node, codes)
        self.copies[value] = copy
        self._edge(port, copy, value, forbidden=forbidden, times=len(self._groups(value, port)) or 1)
        return copy

    def _groups(self, value: int, port: Port) -> tuple[tuple[int, ...], ...]:
        """The groups of uses for which a value is moved, if there are several; pending sums are finished once.

        An all-to-all or a permute is one more instruction that libtpu finds twice, as a gather is.
        """
        pending = (decode(port.codes, self.graph.avals[value].ndim, self.mesh.ndim) == SUM).any()
        return () if pending else self.apart.get(value, ())

    def _add_arrival(self, value: int, port: Port, target: Port) -> Port:
        """The copy of a new state that is gathered after its update: in its input's place, or beside it first.

        XLA's GPU compiler gathers along the major dimension only. What is moved along another is
        made in memory of its own, beside the piece that it is made of, and transposed into its place
        from there; the moves of all that leaves the program are under way at once. Each code
        appears as both, first in its place.
        """
        aval = self.graph.avals[value]
        codes = np.unique(target.codes)
        source = decode(port.codes, aval.ndim, self.mesh.ndim)[:, None, :]
        there = decode(codes, aval.ndim, self.mesh.ndim)[None, :, :]
        beside = ((source != there) & ~((source == 0) & (there == WHOLE))).any(axis=2)
        codes = np.concatenate([codes, codes])
        made = self.nodes[port.node]
        node = self._node("copy", f"copy of {made.name}", made.where, len(codes), codes=codes)
        arrival = Port(node, codes)
        self.copies[value] = arrival
        self._edge(port, arrival, value, forbidden=np.concatenate([beside, ~beside], axis=1))
        nbytes = local_bytes(aval, codes, self.mesh) + aval.nbytes // self.mesh.size
        nbytes[: len(codes) // 2] = 0
        self.usages.add(node, int(self.lives.start[value]), len(self.graph.eqns) + 1, nbytes, "copies")
        return arrival

    def _edge(
        self, source: Port, target: Port, value: int, forbidden: NDArray[np.bool_] | None = None, times: int = 1
    ) -> None:
        window = self.windows.of_value[value]
        if value in self.windows.beside and not self._urgent(target):
            window = None
        impossible = forbidden
        if value in self.accumulators.totals:
            impossible = forbidden = source.codes[:, None] != target.codes[None, :]
        elif (never := self._never(source, target, value)).any():
            forbidden = never if impossible is None else impossible | never
        self.edges.append(
            Edge(
                u=source.node,
                v=target.node,
                value=value,
                moved=self._moved(value),
                source=source.codes,
                target=target.codes,
                window=window,
                hides=0.0 if window is None else self.machine.overlap * self.windows.share(value),
                bucket=self.windows.bucket(value),
                strides=self.strides.get(value, NO_STRIDES),
                trips=self.graph.trips[value],
                forbidden=forbidden,
                impossible=impossible,
                total=self._total(value),
                times=times,
            )
        )

    def _never(self, source: Port, target: Port, value: int) -> NDArray[np.bool_]:
        """Pairs in which a sum is finished as the compiler would not.

        On its way to an addition that has it come finished; or scattered over some of its axes alone, which
        is done for what contractions make: of what was added, on GPU, term by term, and not for lookups. What the
        author of a `shard_map` sums does not wait.
        """
        node, ndim = self.nodes[target.node], self.graph.avals[value].ndim
        never = np.zeros((len(source.codes), len(target.codes)), bool)
        if value not in self.traits.products and not (self.compiler.scatters_added_sums and value in self.traits.added):
            never |= parted(source.codes, target.codes, ndim, self.mesh.ndim)
        if value in self.summed:
            never |= bodies.unscattered(source.codes, target.codes, self.ports[value].codes, ndim, self.mesh.ndim)
        if node.strategies is not None and (node.strategies.finished >= 0).any():
            pending = (decode(source.codes, ndim, self.mesh.ndim) == SUM).any(axis=1)
            position = self.graph.operands[node.equations[0]].index(value)
            never |= pending[:, None] & (node.strategies.finished == position)[None, :]
        return never

    def _urgent(self, target: Port) -> bool:
        """Whether what takes a value there is on the way to a contraction that is not late, or may be."""
        node = self.nodes[target.node]
        results = [v for e in node.equations for v in self.graph.results[e]]
        return not results or not self.windows.urgent.isdisjoint(results)

    def _total(self, value: int) -> tuple[Aval, int] | None:
        """What is reduced of the accumulator that a value is added to, and how often: XLA:GPU undoes the cast."""
        if (term := self.accumulators.terms.get(value)) is None:
            return None
        total, trips = term
        casts = self.compiler.moves_collectives_past_casts
        return self._moved(value) if casts else self.graph.avals[total], trips

    def _moved(self, value: int) -> Aval:
        """What is moved of a value: XLA:GPU exchanges collectives with casts, XLA:TPU does not."""
        casts = self.compiler.moves_collectives_past_casts
        return narrow_side(self.graph, self.made_by, value) if casts else self.graph.avals[value]
