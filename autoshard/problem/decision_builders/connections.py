"""Connections: every value from where it is made to all that take it, by edges and copies, with its memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.casts import widening
from autoshard.costs.cut_operands import copied_bytes
from autoshard.costs.prefetch import begins, fetchable
from autoshard.costs.prices import PS_PER_S
from autoshard.costs.resharding import Unfused
from autoshard.costs.strategies import SUM, decode, shards
from autoshard.ir.op_traits import BRANCH_JOIN, DERIVE, KEEP, LOOP_CARRY, LOOP_CONST, LOOP_SLICE
from autoshard.problem.decision_builders.copies import add_arrival, add_copy
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decision_builders.edges import Kernels, add_edge, takes_as_it_is, unfused_kernel
from autoshard.problem.decision_builders.facts import GraphFacts
from autoshard.problem.decisions import Chain, Equation, Input
from autoshard.problem.ports import Port

_COPIES = 4  # times that two copies read or write an array


def connect(draft: Draft, outputs: Sequence[int]) -> None:
    """Connects every value to its consumers.

    Args:
      draft: the decisions so far: all but copies.
      outputs: program output → its decision.
    """
    graph = draft.facts.graph
    leaves: dict[int, list[Port]] = {}
    for value, node in zip(graph.outputs, outputs, strict=True):
        leaves.setdefault(value, []).append(draft.end(node))
    fetched = _fetched(draft) if draft.facts.compiler.prefetches_forward_weights else {}
    for value in range(len(graph.avals)):
        port = draft.made.get(value)
        if port is not None:
            _connect_value(draft, value, port, leaves.get(value, []), fetched)
    for e, eqn in enumerate(graph.eqns):
        (carried, *_), entering = graph.results[e] or (-1,), graph.operands[e]
        lies = eqn.primitive == LOOP_CARRY and not draft.facts.lives.stored[carried]
        if lies and carried in draft.made and entering[0] not in draft.made:
            draft.usages.add_carried_constant(entering[0], carried, draft.made[carried])


def _connect_value(draft: Draft, value: int, port: Port, leaves: Sequence[Port], fetched: Mapping[int, int]) -> None:
    """Connects one value, directly if it has one consumer and memory of its own, else through a copy.

    Args:
      draft: the decisions so far.
      value: the value.
      port: the place where it is made.
      leaves: the inputs and outputs in which it leaves the program.
      fetched: value → the equation before which its gather begins.
    """
    facts = draft.facts
    made = draft.nodes[port.node]
    uses = facts.graph.consumers.get(value, ())
    takers = _takers(draft, value, port, leaves)
    is_input = isinstance(made, Input)
    several = len(takers) > 1 or bool(takers and value in draft.summed)
    lent = is_input or bool(facts.lives.named[value]) or bool(facts.lives.absorbed[value])
    first = min((e for e, _ in uses), default=0)
    begin = fetched.get(value, max(first, int(facts.lives.start[value])))
    if facts.carriers is not None and (carrier := facts.carriers.of(value, [e for e, _ in uses])) is not None:
        begin = min(begin, carrier)  # a gather that is carried on lies there
    # What is updated, or computed element by element or by a branch, and replaces a donated input is written there.
    replaces = _is_written_there(draft, port) and any(isinstance(draft.nodes[t.node], Input) for t in leaves)
    arrives = replaces and len(takers) == 1 and _gathered_in_place(draft, takers[0])
    holder = port
    takes_array = [_takes_array(draft, taker) for taker in takers]
    if arrives:
        holder, never = add_arrival(draft, value, port, takers[0])
        copied = Unfused(nbytes=_COPIES * facts.graph.avals[value].nbytes, before=False)
        add_edge(
            draft,
            port,
            holder,
            value,
            forbidden=never,
            kernels=Kernels(unfused=copied if facts.compiler.copies_gathered_state else unfused_kernel(facts, value)),
        )
    elif several or (takers and lent and any(not facts.traits.pointwise[e] for e, _ in uses)):
        groups = facts.uses_apart(value, port)
        holder, never = add_copy(draft, value, port, takers, lent=lent)
        cut = _cut_bytes(facts, value, holder) if any(takes_array) else None
        kernels = Kernels(unfused=unfused_kernel(facts, value), cut_bytes=cut)
        add_edge(draft, port, holder, value, forbidden=never, times=len(groups) or 1, kernels=kernels)
        if not replaces:
            draft.usages.add_copy(value, holder, port, begin, groups, lent=lent)
    elif not is_input and facts.lives.stored[value] and not replaces:
        name, taker = _last_name(draft, value, takers[0]) if takers else (value, None)
        in_place = taker is not None and isinstance(draft.nodes[taker.node], Input)
        draft.usages.add_value(value, port, begin, name, taker, in_place=in_place)
    if holder is not port and not arrives and _is_cast_apart(draft, value, port):
        draft.cast_apart.add(value)
    for taker, is_array in zip(takers, takes_array, strict=True):
        source, apart, unplanned = holder, None, None
        cut = _cut_bytes(facts, value, taker) if is_array else None
        past = value in draft.cast_apart and takes_as_it_is(draft, taker, value)
        if past or (facts.compiler.regathers_far_uses and _keeps(draft, taker)):
            source = port
        elif arrives:
            apart = holder.codes[:, None] != taker.codes[None, :]
        elif lent and holder is not port and len(takers) == 1 and not taker.loose:
            apart = _moved(draft, value, holder, taker, cuts=cut is None and _multiplies(draft, taker))
        elif holder is not port and (_takes_for_a_loop(draft, taker, value) or _carried_to(draft, taker, value)):
            unplanned = _moved(draft, value, holder, taker, cuts=True)
        elif (lent or holder is not port) and _renames(draft, taker):
            unplanned = _moved(draft, value, holder, taker, cuts=True)
            later = np.isin(holder.codes, taker.codes)[:, None]
            unplanned &= later if holder is port else later | _cut(draft, value, taker, holder).T
        elif is_input and facts.compiler.regathers_far_uses and _narrows(draft, taker, value):
            unplanned = _moved(draft, value, holder, taker, cuts=True)
            if holder is not port:
                unplanned |= _beside(holder)[:, None] & ~_cut(draft, value, holder, taker)
        moved = unfused_kernel(facts, value, edges=1 if holder is port else len(takers))
        kernels = Kernels(unfused=moved, cut_bytes=cut)
        add_edge(draft, source, taker, value, forbidden=apart, unplanned=unplanned, kernels=kernels)


def _is_cast_apart(draft: Draft, value: int, port: Port) -> bool:
    """Whether the copy of a value is what products cast, and others move the value for themselves.

    None of what may be a pending sum, which is finished once, of what moves for groups of uses, and of what a loop
    takes, which holds the copy.
    """
    facts = draft.facts
    cast = facts.lives.multiplied.get(value)
    if cast is None or not cast.otherwise or value in facts.apart:
        return False
    if any(facts.graph.eqns[e].traits.link for e, _ in facts.graph.consumers[value]):
        return False
    return not (decode(port.codes, facts.graph.avals[value].ndim, facts.mesh.ndim) == SUM).any()


def _is_written_there(draft: Draft, port: Port) -> bool:
    """Whether the kernels that make a value may write it where another lies that it replaces."""
    node, facts = draft.nodes[port.node], draft.facts
    if not isinstance(node, Equation):
        return isinstance(node, Chain)
    eqn = facts.graph.eqns[node.equation]
    if eqn.traits.updates:
        return node.equation in facts.in_place
    return eqn.primitive == BRANCH_JOIN and facts.compiler.joins_in_place


def _takes_array(draft: Draft, taker: Port) -> bool:
    """Whether the consumer at a port takes an array as it lies in memory."""
    node = draft.nodes[taker.node]
    return isinstance(node, Equation) and node.equation in draft.facts.cut_operands.takers


def _cut_bytes(facts: GraphFacts, value: int, port: Port) -> NDArray[np.int64] | None:
    """What a device reads and writes to cut its part out of a value; None of what a kernel makes: it cuts that."""
    if value not in facts.cut_operands.values:
        return None
    return copied_bytes(facts.graph.avals[value], port.codes, facts.mesh)


def _keeps(draft: Draft, taker: Port) -> bool:
    """Whether the consumer at a port keeps a value for a backward pass, outside of loops.

    What is gathered once more for a use that is far from the first is not kept as it is gathered.
    """
    node = draft.nodes[taker.node]
    return isinstance(node, Equation) and draft.facts.graph.eqns[node.equation].primitive in (KEEP, DERIVE)


def _takes_for_a_loop(draft: Draft, taker: Port, value: int) -> bool:
    """Whether a loop holds an array as it is taken there, for all its trips: that is the copy, which has memory."""
    node, graph = draft.nodes[taker.node], draft.facts.graph
    if not isinstance(node, Equation) or not graph.avals[value].ndim or draft.facts.on_host(value):
        return False
    return graph.eqns[node.equation].primitive in (LOOP_CONST, LOOP_SLICE)


def _carried_to(draft: Draft, taker: Port, value: int) -> bool:
    """Whether what a consumer takes may be gathered before it runs: the copy is, which has memory from then on.

    What is gathered for each of several far uses is where it is used.
    """
    facts = draft.facts
    return facts.carriers is not None and value not in facts.apart and _multiplies(draft, taker)


def _narrows(draft: Draft, taker: Port, value: int) -> bool:
    """Whether the consumer at a port does nothing with a value but cast it to a narrower type.

    XLA:TPU (libtpu 0.0.52), and XLA:GPU, cast it before they move it, wherever the program does: a plan moves what was
    cast, of which it knows how often it moves and where it lies.
    """
    graph = draft.facts.graph
    casts = [widening(graph.eqns[e]) < 0 for e, _ in graph.consumers.get(value, ()) if draft.node_of[e] == taker.node]
    return bool(casts) and all(casts)


def _renames(draft: Draft, taker: Port) -> bool:
    """Whether the consumer at a port gives a value that lies in memory another name.

    What moves has memory of its own for as long as the name is read. So it does not move on the way there: the name's
    copy does, or the value's is gathered already (for a program's constraint, or a reshape without such a layout).
    """
    node, facts = draft.nodes[taker.node], draft.facts
    return isinstance(node, Equation) and bool(facts.lives.named[facts.graph.results[node.equation][0]])


def _multiplies(draft: Draft, taker: Port) -> bool:
    """Whether the consumer at a port is a contraction."""
    node = draft.nodes[taker.node]
    return isinstance(node, Equation) and draft.facts.graph.eqns[node.equation].traits.contraction


def _moved(draft: Draft, value: int, holder: Port, taker: Port, *, cuts: bool) -> NDArray[np.bool_]:
    """Pairs of layouts of a copy and a consumer between which it moves; `cuts`: a cut is no move.

    What moves lies beside the value whose memory it had: the copy does, in the layout that is taken.
    """
    other = holder.codes[:, None] != taker.codes[None, :]
    return other & ~_cut(draft, value, holder, taker) if cuts else other


def _cut(draft: Draft, value: int, holder: Port, taker: Port) -> NDArray[np.bool_]:
    """Pairs of layouts of a copy and a consumer that takes a smaller piece."""
    aval, mesh = draft.facts.graph.avals[value], draft.facts.mesh
    pieces, taken = (shards(port.codes, aval.ndim, mesh) for port in (holder, taker))
    return pieces[:, None] < taken[None, :]


def _beside(copy: Port) -> NDArray[np.bool_]:
    """Which choices of a lent copy lie beside the value that it is a copy of (`copies.add_copy`)."""
    first = np.zeros(len(copy.codes), bool)
    first[np.unique(copy.codes, return_index=True)[1]] = True
    return ~first | ~np.isin(copy.codes, copy.codes[~first])


def _takers(draft: Draft, value: int, port: Port, leaves: Sequence[Port]) -> list[Port]:
    """The consumers of a value, equal ones once; without those that share its decision."""
    made = draft.nodes[port.node]
    found: dict[tuple[int, bytes], Port] = {}
    for e, i in draft.facts.graph.consumers.get(value, ()):
        taker = draft.taker(e, i)
        if taker is None or (taker.node == port.node and isinstance(made, Chain)):
            continue
        off = b"" if taker.off is None else taker.off.tobytes()
        found.setdefault((taker.node, taker.codes.tobytes() + off), taker)
    for e in draft.facts.graph.derivations.get(value, ()):
        node = draft.node_of[e]
        derive = draft.nodes[node]
        assert isinstance(derive, Equation)
        found[node, b""] = Port(node, derive.strategies.results[0], derive.off)
    for taker in leaves:
        if not (isinstance(made, Input) and taker.node == port.node):
            found.setdefault((taker.node, taker.codes.tobytes()), taker)
    return list(found.values())


def _gathered_in_place(draft: Draft, taker: Port) -> bool:
    """Whether the consumer of a new state is an input into which the compiler gathers it, or copies what it gathers."""
    node, compiler = draft.nodes[taker.node], draft.facts.compiler
    in_place = compiler.gathers_new_state_in_place and isinstance(node, Input) and node.holds == "parameters"
    return in_place or (compiler.copies_gathered_state and isinstance(node, Input))


def _fetched(draft: Draft) -> dict[int, int]:
    """Value → the equation before which its gather begins, of weights in a forward pass outside of loops."""
    facts, graph = draft.facts, draft.facts.graph
    uses = fetchable(graph)
    names = facts.mesh.names
    gather_s = {v: float(facts.machine.collective_s("all-gather", names, graph.avals[v].nbytes)) for v in uses}
    fastest = np.array([int(node.cost_ps.min()) for node in draft.nodes]) / PS_PER_S
    equation_s = np.zeros(len(graph.eqns))
    for e, node in enumerate(draft.node_of):
        if node >= 0 and draft.nodes[node].equations[0] == e:
            equation_s[e] = fastest[node]
    return begins(uses, gather_s, equation_s.tolist())


def _last_name(draft: Draft, value: int, taker: Port) -> tuple[int, Port]:
    """By which name a pending sum is finished, and who alone takes it by that.

    XLA:GPU keeps one beside loops as it is made; XLA:TPU finishes it where it is made, if that runs beside compute.
    """
    facts, graph = draft.facts, draft.facts.graph
    finished = facts.compiler.finishes_sums_by_last_name and not graph.loops
    if not (finished or (facts.compiler.defers_gradients_behind_loops and facts.machine.gathers_ahead)):
        return value, taker
    while isinstance(node := draft.nodes[taker.node], Equation):
        e = node.equation
        if not (facts.traits.flows[e] and graph.eqns[e].traits.renames):
            break
        (result,) = graph.results[e]
        onward = _takers(draft, result, draft.made[result], [])
        if len(onward) != 1 or result in graph.outputs:
            break
        value, (taker,) = result, onward
    return value, taker
