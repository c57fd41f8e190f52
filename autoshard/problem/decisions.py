"""Decisions: the layouts and strategies of a graph that must be chosen, and the prices between them.

One decision is

    Input     the layout of a program input (a donated one shares it with its output)
    Equation  the strategy of an equation that is not element-wise
    Chain     the one layout of a connected set of element-wise equations of one shape
              (cut after a cast to a smaller type and before one to a larger, where moving is cheaper)
    Copy      the layout in which a value is kept for several consumers
    Output    the layout of a program output

A value with one consumer is an edge from its producer's layout to the consumer's.
A value with several is first brought into its copy's layout; this is paid once, as in
XLA. If the copy holds more than a consumer needs, the consumer takes a local slice, so
one copy loses nothing against two. Values that are recomputed for free in any layout
(iota, broadcast constants, masks of them) need no decision.

A loop's carry is one decision: the links into and out of its body share one layout.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from autoshard.backends.hlo.text import UNKNOWN
from autoshard.costs.buckets import Bucket
from autoshard.costs.carriers import Carried
from autoshard.costs.liveness import LiveRanges
from autoshard.costs.prices import INF_PS, PS_PER_S, picoseconds
from autoshard.costs.resharding import Resharder, Strides, Unfused
from autoshard.costs.strategies import SUM, WHOLE, Codes, Strategies, decode, encode, shards
from autoshard.costs.windows import EARLY, OverlapWindows
from autoshard.ir.graph import Aval, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.problem.ports import Port, Usage
from autoshard.rules.rule import ShardingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A collective that the author of a `shard_map` wrote.

    `bucket`: the bytes of those with which it is merged, `waited`: the share of its seconds that hides behind nothing.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    dtype: str
    trips: int
    where: str
    value: str
    bucket: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One run of a `shard_map`'s body on one device.

    `seconds` include its collectives; `unpriced` names the parts without a price. `summed`: result → the axes
    over which it is summed at the end. These sums are not part of the body: they are pending sums, which the
    equations that follow finish.
    """

    seconds: float
    flops: float
    multiplying_s: float  # seconds of contractions
    collectives: tuple[Inner, ...]
    summed: Mapping[int, tuple[str, ...]]
    results: int
    beside_bytes: int
    unpriced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """One node: S choices, each with its seconds (integer ps) and its compute.

    Abstract: a decision is an `Input`, a `Chain`, an `Equation`, a `Copy` or an `Output`. `kind` is the word for it in
    reports; code asks for the class.
    """

    kind: ClassVar[str]
    name: str
    where: str
    cost_ps: NDArray[np.int64]  # (S,) summed over trips
    cover_ps: NDArray[np.int64]  # (S,) the part of contractions, which can hide communication
    window: int  # in which window that compute counts
    flops: NDArray[np.float64]  # (S,) per device
    equations: tuple[int, ...] = ()  # the decided equations, in program order
    off: NDArray[np.bool_] | None = None  # (S,) choices that leave the equations out; None: none does

    def __len__(self) -> int:
        return len(self.cost_ps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutDecision(Decision):
    """One layout is chosen: of one value, or of all values of a chain. Abstract."""

    codes: Codes  # (S,)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Input(LayoutDecision):
    """The layout of a program input; `holds` is the kind of its memory."""

    kind = "input"
    holds: Literal["arguments", "parameters", "optimizer"]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output(LayoutDecision):
    """The layout of a program output."""

    kind = "output"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy(LayoutDecision):
    """The layout in which a value is kept for several consumers."""

    kind = "copy"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain(LayoutDecision):
    """The one layout of connected element-wise equations of one shape, or of the links of a loop's carry."""

    kind = "chain"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Equation(Decision):
    """The strategy of one equation; `body` is that of a `shard_map`.

    `untaken[i]`: under which choices it does not take operand i, where that is not `off`. `loose[i]`: whether it
    needs operand i, and does not move it: whatever its layout is.
    """

    kind = "equation"
    strategies: Strategies
    body: Body | None = None
    untaken: tuple[NDArray[np.bool_], ...] = ()
    loose: tuple[bool, ...] = ()

    @property
    def equation(self) -> int:
        """Its one equation."""
        return self.equations[0]


_Moved = TypeVar("_Moved", Input, Output, Copy)


def priced_by_edges(kind: type[_Moved], name: str, where: str, codes: Codes, **more: Any) -> _Moved:
    """A decision whose choices have no price of their own; only the edges to and from it have one.

    Args:
      kind: the class of the decision.
      name: its name in reports.
      where: the user's source line.
      codes: the layouts to choose from.
      more: the fields of its class alone.
    """
    nothing_ps = np.zeros(len(codes), np.int64)
    return kind(
        name=name,
        where=where,
        codes=codes,
        cost_ps=nothing_ps,
        cover_ps=nothing_ps,
        window=EARLY,
        flops=np.zeros(len(codes)),
        **more,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """Resharding of one value between two decisions.

    `moved` is the array that moves: the value, or the smaller side of the cast that makes it.
    `source[i]`, `target[j]`: the value's code under choice i of `u` and j of `v`. `hides` is the share
    of its seconds that can hide in its window, `bucket` the bytes up to which it is merged with
    others (0: never), `strides` the dimensions that contractions take and make as groups.
    `forbidden`, if given, marks pairs (S_u, S_v) that no plan has, `impossible` those that no program
    could have. `total`, if given, is the array that moves instead, and how often, if only pending
    sums are finished (`costs.loop_reductions`), and `pending` the one that moves if there are pending
    sums. `times` counts the groups of uses for which the value moves in every trip (`costs.shared_gathers`).
    `waived`, if given, marks the choices of v (S_v,) for which nothing moves. `unfused`, if given, is the kernel that
    runs where the value moves. `cut_bytes`, if given, is what a device reads and writes in a trip, under each choice
    of v (S_v,), if it cuts its part out of what it has (`costs.cut_operands`). `carried`, if given, is what hides of
    its gathers (`costs.carriers`).
    """

    u: int
    v: int
    value: int
    moved: Aval
    source: Codes
    target: Codes
    window: int | None
    hides: float
    bucket: Bucket
    strides: Strides
    trips: int
    forbidden: NDArray[np.bool_] | None = None
    impossible: NDArray[np.bool_] | None = None
    total: tuple[Aval, int] | None = None
    pending: Aval | None = None
    times: int = 1
    waived: NDArray[np.bool_] | None = None
    unfused: Unfused | None = None
    cut_bytes: NDArray[np.int64] | None = None
    carried: Carried | None = None

    def finishes(self, source: Codes, target: Codes, axes: int) -> NDArray[np.bool_]:
        """Whether it is the total that is moved from each source to each target code: (sources, targets)."""
        if self.total is None:
            return np.zeros((len(source), len(target)), bool)
        ndim = self.moved.ndim
        here, there = decode(source, ndim, axes)[:, None], decode(target, ndim, axes)[None]
        return ((here == there) | ((here == SUM) & (there == WHOLE))).all(axis=2) & (here == SUM).any(axis=2)

    def moved_from(self, source: int, axes: int) -> Aval:
        """The array that moves from a code."""
        if self.pending is None or not (decode(np.array([source]), self.moved.ndim, axes) == SUM).any():
            return self.moved
        return self.pending

    def unfused_s(self, source: Codes, target: Codes, resharder: Resharder) -> NDArray[np.float64]:
        """Seconds of the kernel that runs in a trip if the value moves, by where from and to: (sources, targets)."""
        if self.unfused is None:
            return np.zeros((len(source), len(target)))
        ends = source[:, None] if self.unfused.before else target[None, :]
        pieces = shards(ends.ravel(), self.moved.ndim, resharder.mesh).reshape(ends.shape)
        seconds = np.asarray(resharder.machine.hbm_s(self.unfused.nbytes / pieces))
        return np.broadcast_to(seconds, (len(source), len(target)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLink:
    """What goes one way between a device's memory and its host's in the trips of one loop, or in a program.

    Attributes:
      to_host: which way.
      hidden_ps: decision → integer picoseconds (S,) of its copies that may hide behind compute, of all trips.
      waited_ps: the same of those that do not; they are part of the decision's own seconds.
      moved_bytes: decision → bytes (S,) that its copies move, in all trips.
      beside: the decisions behind whose compute copies hide.
    """

    to_host: bool
    hidden_ps: Mapping[int, NDArray[np.int64]]
    waited_ps: Mapping[int, NDArray[np.int64]]
    moved_bytes: Mapping[int, NDArray[np.int64]]
    beside: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """The decision network of one graph on one mesh and machine."""

    graph: Graph
    mesh: MeshAxes
    rules: tuple[ShardingRule, ...]
    nodes: tuple[Decision, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...]
    node_of: tuple[int, ...]  # equation → decision, -1 for free ones
    made: Mapping[int, Port]  # value → where it is made; free values are absent
    kept: Mapping[int, Port]  # value → its copy, for values with several consumers
    inputs: tuple[int, ...]  # program input → decision
    outputs: tuple[int, ...]  # program output → decision
    windows: OverlapWindows
    strides: Mapping[int, Strides]  # of values that contractions take or make
    lives: LiveRanges
    apart: Mapping[int, tuple[tuple[int, ...], ...]]  # value → groups of its uses, for each of which it is moved
    pruned: int
    links: tuple[HostLink, ...] = ()
    cast_apart: frozenset[int] = frozenset()  # values whose copies are what products cast: others move them apart
    staged: tuple[str, ...] = ()  # mesh axes that hold one stage of a pipeline's layers per shard
    counts_gaps: bool = False  # whether gaps between the buffers of the compiler's heap are part of its peak


def or_off(codes: Codes) -> tuple[Codes, NDArray[np.bool_]]:
    """The codes and one choice more, under which a value is left out; and which choice that is: (S + 1,)."""
    return np.append(codes, codes[:1]), np.append(np.zeros(len(codes), bool), True)


def digest(*parts: object) -> bytes:
    """A hash of content, equal in every process."""
    h = hashlib.blake2b(digest_size=12)
    for part in parts:
        h.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        h.update(b"|")
    return h.digest()


def consumer_port(
    nodes: Sequence[Decision], rules: Sequence[ShardingRule], node_of: Sequence[int], mesh: MeshAxes, e: int, i: int
) -> Port | None:
    """How equation e takes its operand i; None if the equation decides nothing."""
    node = node_of[e]
    if node < 0:
        return None
    decision, rule = nodes[node], rules[e]
    if isinstance(decision, Equation):
        off = decision.untaken[i] if decision.untaken else decision.off
        return Port(node, decision.strategies.operands[i], off, bool(decision.loose) and decision.loose[i])
    codes = layout_codes(decision)
    if rule.operands[i] == rule.results[0]:
        return Port(node, codes, decision.off)
    return Port(node, _narrowed(codes, len(rule.results[0]), rule.operands[i], mesh), decision.off)


def layout_codes(decision: Decision) -> Codes:
    """The codes among which a decision other than an equation's chooses: (S,)."""
    assert isinstance(decision, LayoutDecision)
    return decision.codes


def _narrowed(codes: Codes, ndim: int, dims: tuple[tuple[int, ...], ...], mesh: MeshAxes) -> Codes:
    """Codes of an element-wise operand some of whose dimensions are 1 (or a scalar)."""
    rows = decode(codes, ndim, mesh.ndim).copy()
    for d in range(ndim):
        if not dims or dims[d] == ():
            rows[rows == d] = WHOLE
    return encode(rows, len(dims))


def times(price_ps: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """A price paid several times, at most `INF_PS` together."""
    count = min(count, INF_PS)
    counted = price_ps <= INF_PS // max(count, 1)
    return np.where(counted, np.where(counted, price_ps, 0) * count, INF_PS)


def reshard_ps(edge: Edge, resharder: Resharder) -> NDArray[np.int64]:
    """The edge's cost matrix (S_u, S_v) in integer picoseconds, INF where it cannot be."""
    matrix = _of_all_trips(edge, resharder, resharder.cost_ps)
    matrix = np.minimum(matrix + np.where(matrix > 0, _unfused_ps(edge, resharder), cut_ps(edge, resharder)), INF_PS)
    if edge.waived is not None:
        matrix = np.where(edge.waived, 0, matrix)
    if edge.forbidden is not None:
        matrix = np.where(edge.forbidden, INF_PS, matrix)
    return matrix


def hidden_ps(edge: Edge, resharder: Resharder) -> NDArray[np.int64]:
    """The part of `reshard_ps` that may hide, where kinds of collectives differ: see `Resharder.hidden_ps`."""
    carried = edge.carried

    def hidden(moved: Aval, source: Codes, target: Codes, **more: Any) -> NDArray[np.int64]:
        found = resharder.hidden_ps(moved, source, target, **more)
        return found if carried is None else picoseconds(carried.hidden_s(found / PS_PER_S, target))

    matrix = _of_all_trips(edge, resharder, hidden)
    return matrix if edge.waived is None else np.where(edge.waived, 0, matrix)


def work_ps(edge: Edge, resharder: Resharder) -> NDArray[np.int64]:
    """The part of `reshard_ps` that a device works: transposes, kernels that a value needs if it moves, and cuts."""
    matrix = _of_all_trips(edge, resharder, resharder.transposes_ps)
    if edge.unfused is not None:
        moves = _of_all_trips(edge, resharder, resharder.cost_ps) > 0
        matrix = matrix + np.where(moves, _unfused_ps(edge, resharder), 0)
    matrix = matrix + cut_ps(edge, resharder)
    return matrix if edge.waived is None else np.where(edge.waived, 0, matrix)


def cut_ps(edge: Edge, resharder: Resharder) -> NDArray[np.int64]:
    """The part of `reshard_ps` in which a device copies its part out of what it has: (S_u, S_v), over all trips."""
    if edge.cut_bytes is None:
        return np.zeros((len(edge.source), len(edge.target)), np.int64)
    here, there = (shards(codes, edge.moved.ndim, resharder.mesh) for codes in (edge.source, edge.target))
    cuts = (here[:, None] < there[None, :]) & (_of_all_trips(edge, resharder, resharder.cost_ps) == 0)
    once = picoseconds(np.asarray(resharder.machine.hbm_s(edge.cut_bytes)))
    priced = np.where(cuts, times(once, edge.trips * edge.times)[None, :], 0)
    return priced if edge.waived is None else np.where(edge.waived, 0, priced)


def cut_ps_of(edge: Edge, resharder: Resharder, i: int, j: int) -> int:
    """`cut_ps` under choice i of `u` and j of `v`."""
    if edge.cut_bytes is None or edge.source[i] == edge.target[j]:
        return 0
    of = replace(
        edge,
        source=edge.source[[i]],
        target=edge.target[[j]],
        cut_bytes=edge.cut_bytes[[j]],
        waived=None if edge.waived is None else edge.waived[[j]],
    )
    return int(cut_ps(of, resharder)[0, 0])


def _unfused_ps(edge: Edge, resharder: Resharder) -> NDArray[np.int64] | int:
    """Picoseconds of the kernel that runs where the value of an edge moves, over all trips: (S_u, S_v)."""
    if edge.unfused is None:
        return 0
    return picoseconds(edge.unfused_s(edge.source, edge.target, resharder) * edge.trips)


def _of_all_trips(edge: Edge, resharder: Resharder, price: Any) -> NDArray[np.int64]:
    """A price of the resharder for all pairs of an edge's ends (S_u, S_v), over all trips."""
    sources, i = np.unique(edge.source, return_inverse=True)
    targets, j = np.unique(edge.target, return_inverse=True)

    def of_all_trips(moved: Aval, trips: int) -> NDArray[np.int64]:
        once = price(moved, sources, targets, bucket=edge.bucket, strides=edge.strides)
        return times(once, trips)

    table = of_all_trips(edge.moved, edge.trips * edge.times)
    if edge.pending is not None:
        summed = (decode(sources, edge.moved.ndim, resharder.mesh.ndim) == SUM).any(axis=1)[:, None]
        table = np.where(summed, of_all_trips(edge.pending, edge.trips * edge.times), table)
    if edge.total is not None:
        table = np.where(edge.finishes(sources, targets, resharder.mesh.ndim), of_all_trips(*edge.total), table)
    return table[np.ix_(i.ravel(), j.ravel())]


def place_of(decisions: Decisions, at: int) -> str:
    """A time point, in words: the equation that runs then, and its source line; if none is known the last before."""
    eqns = decisions.graph.eqns
    if at >= len(eqns):
        return "the end of the program"
    known = next((e for e in range(at, -1, -1) if eqns[e].where != UNKNOWN), at)
    return f"{eqns[at].primitive} {'at' if known == at else 'after'} {eqns[known].where}"
