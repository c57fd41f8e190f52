"""Host links: what a program copies to its host's memory and back, each way on a link of its own.

Within a loop's trip a copy to the host begins when its value is made, and ends with the trip; one from the host begins
with the trip, and ends before its value is read first. So it is waited for as far as it takes longer than the compute
behind its value, or before that reader. All copies of a loop that go one way share the link, and hide behind all
compute of its trips. (XLA:GPU and XLA:TPU begin and end them so: `tests/compilers/test_offload.py`.) Outside of loops
the program is the trip.

State in the host's memory (`ir/host_state.py`) comes in behind all gradients, one group of leaves after the other, and
XLA:GPU has one queue for both ways: all of its copies are waited for.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.prices import picoseconds
from autoshard.ir.graph import Graph
from autoshard.problem.decision_builders.draft import Draft
from autoshard.problem.decisions import HostLink
from autoshard.problem.memory_usage import local_bytes

_NOTHING = np.zeros((), np.int64)


def add_host_links(draft: Draft) -> None:
    """Prices the copies to the host's memory and back.

    Args:
      draft: the decisions so far: those of all equations.
    """
    facts, graph = draft.facts, draft.facts.graph
    order = {n: node.equations[0] for n, node in enumerate(draft.nodes) if node.equations}
    fastest = {n: int(draft.nodes[n].cost_ps.min()) for n in order}
    hidden: dict[tuple[int, bool], dict[int, NDArray[np.int64]]] = defaultdict(dict)
    waited: dict[tuple[int, bool], dict[int, NDArray[np.int64]]] = defaultdict(dict)
    moved: dict[tuple[int, bool], dict[int, NDArray[np.int64]]] = defaultdict(dict)
    state = _state_copies(graph, facts.host_copies)
    for e in sorted(facts.host_copies):
        n, loop, to_host = draft.node_of[e], graph.eqn_loop[e], graph.results[e][0] in graph.on_host
        if n < 0:
            continue
        node = draft.nodes[n]
        ports = {v: draft.made[v] for v in graph.results[e] if v in draft.made}
        nbytes = sum((local_bytes(graph.avals[v], port.codes, facts.mesh) for v, port in ports.items()), start=_NOTHING)
        moved_bytes = nbytes * graph.runs(e)
        if node.off is not None:
            moved_bytes = np.where(node.off, 0, moved_bytes)
        link_ps = picoseconds(moved_bytes / facts.machine.host_bytes_per_s)
        if e in state:
            waited_ps = link_ps
        else:
            until = len(graph.eqns) if to_host else _first_read(graph, e)
            between = (m for m, at in order.items() if e < at < until and loop in (0, graph.eqn_loop[at]))
            waited_ps = np.maximum(link_ps - sum(fastest[m] for m in between), 0)
        hidden[loop, to_host][n], waited[loop, to_host][n] = link_ps - waited_ps, waited_ps
        moved[loop, to_host][n] = moved_bytes
        draft.nodes[n] = replace(node, cost_ps=node.cost_ps + waited_ps)
    copies = {n for one in hidden.values() for n in one}
    for link in sorted(hidden):
        beside = tuple(m for m, at in order.items() if link[0] in (0, graph.eqn_loop[at]) and m not in copies)
        draft.links.append(
            HostLink(
                to_host=link[1],
                hidden_ps=hidden[link],
                waited_ps=waited[link],
                moved_bytes=moved[link],
                beside=beside,
            )
        )


def _state_copies(graph: Graph, copies: Collection[int]) -> frozenset[int]:
    """The copies of inputs that lie in the host's memory, and of what replaces them."""
    kept = graph.on_host.intersection((*graph.inputs, *graph.outputs))
    return frozenset(e for e in copies if not kept.isdisjoint((*graph.operands[e], *graph.results[e])))


def _first_read(graph: Graph, e: int) -> int:
    """The first equation that reads a result of e itself, by whatever name."""
    first, values = len(graph.eqns), list(graph.results[e])
    while values:
        for u, _ in graph.consumers.get(values.pop(), ()):
            if graph.eqns[u].traits.renames:
                values += graph.results[u]
            else:
                first = min(first, u)
    return first
