"""Memory profile: what a choice per decision holds over time, and its highest point."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.costs import heap
from autoshard.ir.op_traits import LOOP_STACK
from autoshard.problem.decisions import Decisions
from autoshard.problem.memory_usage import local_bytes
from autoshard.problem.ports import KEPT

GAPS = "gaps"


def peak(decisions: Decisions, choice: NDArray[np.int64]) -> tuple[int, int, Mapping[str, int]]:
    """(bytes, time point, bytes by kind at that point): the highest point of memory, gaps of the heap included."""
    live = _live(decisions, choice)
    idle = _gaps(decisions, choice, live)
    at = int((live + idle).argmax())
    kinds: dict[str, int] = {}
    for use in decisions.usages:
        if use.start <= at < use.end:
            kinds[use.kind] = kinds.get(use.kind, 0) + int(use.nbytes[choice[use.node]])
    if idle[at]:
        kinds[GAPS] = int(idle[at])
    return int(live[at] + idle[at]), at, dict(sorted(kinds.items()))


def live_peak(decisions: Decisions, choice: NDArray[np.int64]) -> int:
    """The most bytes that live at once: what the solver's limit is about."""
    return int(_live(decisions, choice).max())


def over_time(decisions: Decisions, choice: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
    """Bytes by kind at every time point; of activations those that are kept, and those that are repeated, apart."""
    end = len(decisions.graph.eqns) + 2
    change: dict[str, NDArray[np.int64]] = {}
    for use in decisions.usages:
        parts = {part: int(nbytes[choice[use.node]]) for part, nbytes in use.parts.items()}
        rest = int(use.nbytes[choice[use.node]]) - sum(parts.values())
        for kind, nbytes in ((use.kind, rest), *parts.items()):
            row = change.setdefault(kind, np.zeros(end + 1, np.int64))
            row[use.start] += nbytes
            row[min(use.end, end - 1)] -= nbytes
    held = {kind: np.cumsum(row[:end]) for kind, row in sorted(change.items())}
    idle = _gaps(decisions, choice, sum(held.values(), np.zeros(end, np.int64)))
    return {**held, GAPS: idle} if idle.any() else held


def _live(decisions: Decisions, choice: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes that live at every time point."""
    end = len(decisions.graph.eqns) + 2
    change = np.zeros(end, np.int64)
    for use in decisions.usages:
        nbytes = int(use.nbytes[choice[use.node]])
        change[use.start] += nbytes
        change[min(use.end, end - 1)] -= nbytes
    return np.cumsum(change)


def _gaps(decisions: Decisions, choice: NDArray[np.int64], live: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes at every time point that are taken and hold nothing: between the buffers of a heap.

    Arguments and results are not in it: they have places of their own, all the time.
    """
    if not decisions.counts_gaps:
        return np.zeros_like(live)
    lasting = len(decisions.graph.eqns)
    uses = [(u.start, u.end, int(u.nbytes[choice[u.node]])) for u in decisions.usages]
    apart = sum(nbytes for _, end, nbytes in uses if end > lasting)
    start, end, nbytes = np.array([u for u in uses if u[1] <= lasting], np.int64).reshape(-1, 3).T
    return apart + heap.occupied(start, end, nbytes, len(live)) - live


def kept_bytes(decisions: Decisions, choice: NDArray[np.int64]) -> int:
    """What is kept for backward passes on one device, where it is most."""
    return int(over_time(decisions, choice).get(KEPT, np.zeros(1, np.int64)).max())


def offloaded_bytes(decisions: Decisions, choice: NDArray[np.int64]) -> int:
    """What loops stack in the host's memory for backward passes, of one device."""
    graph, total = decisions.graph, 0
    for e, eqn in enumerate(graph.eqns):
        (value, *_) = graph.results[e] or (-1,)
        port = decisions.made.get(value)
        if eqn.primitive == LOOP_STACK and value in graph.on_host and port is not None:
            total += int(local_bytes(graph.avals[value], port.codes, decisions.mesh)[choice[port.node]])
    return total


def host_state_bytes(decisions: Decisions, choice: NDArray[np.int64]) -> int:
    """What of a program's inputs lies in the host's memory, of one device."""
    graph = decisions.graph
    ports = [(v, decisions.made[v]) for v in dict.fromkeys(graph.inputs) if v in graph.on_host]
    return sum(int(local_bytes(graph.avals[v], p.codes, decisions.mesh)[choice[p.node]]) for v, p in ports)


def least_peak(decisions: Decisions) -> int:
    """A bound that no choice goes below: the peak if each decision held at every time what it can hold least."""
    return _peak_of_each(decisions, np.min)


def most_peak(decisions: Decisions) -> int:
    """A bound that no choice goes above."""
    return _peak_of_each(decisions, np.max)


def _peak_of_each(decisions: Decisions, extreme: Callable[[NDArray[np.int64]], np.int64]) -> int:
    """The peak if each decision held at every time what is extreme among its choices."""
    end = len(decisions.graph.eqns) + 2
    change = np.zeros(end, np.int64)
    together: dict[tuple[int, int, int], NDArray[np.int64]] = {}
    for use in decisions.usages:
        key = use.node, use.start, min(use.end, end - 1)
        together[key] = together[key] + use.nbytes if key in together else use.nbytes
    for (_, first, last), nbytes in together.items():
        held = extreme(nbytes)
        change[first] += held
        change[last] -= held
    return int(np.cumsum(change).max(initial=0))
