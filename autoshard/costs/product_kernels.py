"""Product kernels: what a contraction's kernel reads, computes and writes besides its product.

XLA:TPU (libtpu 0.0.52, by the kernels that it emits and the cycles that it estimates of them) multiplies in kernels
that compute their operands, element by element, from values in memory (but not what they pad), and that go on with the
product as long as nothing else must end first: a part of it (of logits, all but the last), casts, biases, gates,
residual sums, a row's maximum, a loss, an optimizer's update. Such a kernel takes as long as its multiplications or as
its bytes, whichever is longer, so that most element-wise work of a transformer takes no time of its own. What reads the
products of several contractions is in the kernel of one of them.

A kernel waits for what it goes on with, unless that needs its product. It ends at what must be there as a whole
(`costs.fusion.levels`), and where a value moves: a product that is reduced, scattered or gathered is written as it is,
and a kernel of its own goes on with it; a value that moves before it is multiplied is written by one. Sums are added
in the kernels of their terms before they are reduced.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from numpy.typing import NDArray

from autoshard.costs.casts import lying_share, widening
from autoshard.costs.compute import multiplied_dtype
from autoshard.costs.liveness import LiveRanges
from autoshard.costs.resharding import Unfused
from autoshard.costs.strategies import SUM, Strategies, decode, shards, split
from autoshard.costs.taken_parts import shares
from autoshard.ir.graph import Aval, Eqn, Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import DERIVE, LOOP_STACK, RAGGED_DOT, RECALL, SLICE

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What the kernel of one contraction does besides its product; bytes are of whole arrays.

    Attributes:
      made_from: position of an operand that it makes → the values in memory that it reads for that.
      adds_bytes: what it reads and writes to add unreduced sums.
      finishes_bytes: what it reads and writes to go on with a product that is no unreduced sum.
      writes_product: whether anything else reads the product.
    """

    made_from: Mapping[int, tuple[int, ...]]
    adds_bytes: int
    finishes_bytes: int
    writes_product: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductKernels:
    """The kernels of a graph's contractions.

    Attributes:
      host: per value, the contraction whose kernel computes it; -1 if none does.
      apart: per value, the levels of the kernels that multiply nothing and compute it, to write it or something made of
        it; of a wider cast, of those that do not read what was cast as their operand.
      reduced: the reductions that the kernel does which computes their operand.
      narrow: value → the value in memory of which it is a wider cast, that who takes it reads instead.
      kernels: contraction → its kernel.
      unfused: value → the kernel that it needs if it is moved.
    """

    host: NDArray[np.int64]
    apart: Sequence[frozenset[int]]
    reduced: frozenset[int]
    narrow: Mapping[int, int]
    kernels: Mapping[int, Kernel]
    unfused: Mapping[int, Unfused]


def product_kernels(
    graph: Graph,
    fuses: Sequence[bool],
    flows: Sequence[bool],
    lives: LiveRanges,
    levels: NDArray[np.int64],
    away: Container[int],
) -> ProductKernels:
    """The kernels of a graph's contractions.

    Args:
      graph: the program.
      fuses: per equation, whether the compiler fuses it with its neighbours.
      flows: per equation, whether its operands may all be unreduced.
      lives: of the values.
      levels: of the values, see `costs.fusion`.
      away: values that nobody reads in a device's memory: they are recomputed for free, or lie in its host's.
    """
    onward = [
        (fused or eqn.traits.renames) and not eqn.traits.link and (eqn.primitive == RECALL or not eqn.traits.choice)
        for fused, eqn in zip(fuses, graph.eqns, strict=True)
    ]
    return _Kernels(graph, onward, flows, lives, levels, away).found()


def fused_bytes(
    graph: Graph,
    lives: LiveRanges,
    e: int,
    kernel: Kernel,
    strategies: Strategies,
    mesh: MeshAxes,
    part: Aval | None = None,
) -> NDArray[np.float64]:
    """Bytes per device (S,) that the kernel of contraction e reads and writes more than its operands and its product.

    Fewer than none, where it reads less than an operand that it makes, or does not write the product. Of both less
    counts where it computes no more than a `part` of its product.
    """
    eqn = graph.eqns[e]
    itemsize = jax.numpy.dtype(multiplied_dtype(eqn)).itemsize
    total = np.zeros(len(strategies))
    (result,) = graph.results[e]
    of_operands = (1.0, 1.0) if part is None else shares(eqn, part)
    for i, values in kernel.made_from.items():
        codes, operand, share = strategies.operands[i], eqn.operands[i], of_operands[i]
        pieces = shards(codes, operand.ndim, mesh)
        for v in values:
            aval, numerator = graph.avals[v], lives.numerators.get(v)
            nbytes = aval.nbytes if numerator is None else numerator.nbytes(aval)
            if numerator is not None and aval.shape == operand.shape:
                nbytes = aval.nbytes * numerator.share(aval, split(codes, 0, aval.ndim, mesh))
            total += share * nbytes / np.minimum(pieces, max(aval.size, 1))
        total -= share * operand.size * itemsize / pieces
    for i, (v, operand) in enumerate(zip(graph.operands[e][:2], eqn.operands, strict=False)):
        missing = 0.0 if i in kernel.made_from else 1.0 - lying_share(graph, lives.multiplied, v)
        pieces = shards(strategies.operands[i], operand.ndim, mesh)
        total -= of_operands[i] * missing * operand.size * itemsize / pieces
    (codes,), (product,) = strategies.results, eqn.results
    unreduced = (decode(codes, product.ndim, mesh.ndim) == SUM).any(axis=1)
    written = lying_share(graph, lives.multiplied, result) if kernel.writes_product else 0.0
    unwritten = (1.0 - written) * (product if part is None else part).size * itemsize
    finishes = np.where(unreduced, 0, kernel.finishes_bytes - unwritten)
    return total + (kernel.adds_bytes + finishes) / shards(codes, product.ndim, mesh)


class _Kernels:
    """The kernels of one graph: forward, what each could compute; backward, what of it is computed there."""

    def __init__(
        self,
        graph: Graph,
        onward: Sequence[bool],  # per equation, whether a kernel may go on with it
        flows: Sequence[bool],
        lives: LiveRanges,
        levels: NDArray[np.int64],
        away: Container[int],
    ) -> None:
        self.graph, self.onward, self.flows, self.levels, self.absorbed = graph, onward, flows, levels, lives.absorbed
        self.held = lives.held
        self.unwritten, self.gathered = lives.unwritten_products, lives.gathered
        self.multiplied = lives.multiplied
        self.read = {  # value that who takes it reads in memory → the bytes of it that are read
            v: lives.numerators[v].nbytes(graph.avals[v]) if v in lives.numerators else self._lying(v)
            for v in np.flatnonzero(self.held).tolist()
            if v not in away
        }
        self.sources = self._sources()
        self.last_products = self._last_products()
        self.host = np.full(len(graph.avals), _NONE, np.int64)  # per value, the contraction whose kernel could make it
        self.parts: dict[int, set[int]] = {}  # contraction → the sizes of its product and of what is cut from it alone
        self.runs_in = [_NONE] * len(graph.eqns)  # per equation, that whose kernel could run it
        for e, eqn in enumerate(graph.eqns):
            if eqn.traits.contraction and eqn.primitive != RAGGED_DOT:
                self.runs_in[e] = e
                self.parts[e] = {graph.avals[graph.results[e][0]].size}
            elif self.onward[e]:
                self.runs_in[e] = self._could_run(e)
            if not self._reduces(e):
                self.host[list(graph.results[e])] = self.runs_in[e]

    def found(self) -> ProductKernels:
        apart, made, outside = self._backward()
        kernels = self._kernels(made, outside)
        reduces = (e for e, onward in enumerate(self.onward) if onward and self._reduces(e))
        widens = (e for e, onward in enumerate(self.onward) if onward and self._widens(e))
        return ProductKernels(
            host=np.where(made, self.host, _NONE),
            apart=apart,
            reduced=frozenset(
                e for e in reduces if self.runs_in[e] >= 0 or self._is_computed(self.graph.operands[e][0])
            ),
            narrow={self.graph.results[e][0]: self.graph.operands[e][0] for e in widens},
            kernels=kernels,
            unfused=self._unfused(kernels),
        )

    def _kernels(self, made: NDArray[np.bool_], outside: NDArray[np.bool_]) -> dict[int, Kernel]:
        """Every contraction's kernel, by the values that are computed in them, and those that are read outside."""
        graph = self.graph
        reads: dict[tuple[int, bool], set[int]] = {}  # contraction, whether sums are added → what it reads besides
        written: dict[tuple[int, bool], int] = {}
        for e, eqn in enumerate(graph.eqns):
            if not self.onward[e] or self.runs_in[e] < 0:
                continue
            h, (result, *_) = self.runs_in[e], graph.results[e]
            if not (made[result] or self._reduces(e)):
                continue
            key = (h, self.flows[e])
            read = (self.sources[v] for v in graph.made_from(e) if self.host[v] != h)
            reads[key] = reads.get(key, set[int]()).union(*read)
            if self.held[result] and not eqn.traits.renames:
                written[key] = written.get(key, 0) + self._lying(result)

        for scores in self.gathered.values():
            h = int(self.host[scores.value])
            if h >= 0 and scores.lie and not scores.apart:
                key = (h, False)
                written[key] = written.get(key, 0) + graph.avals[scores.value].nbytes

        def besides(e: int, *, adds: bool) -> int:
            return self._nbytes(reads.get((e, adds), ())) + written.get((e, adds), 0)

        return {
            e: Kernel(
                made_from={
                    i: tuple(sorted(self.sources[v])) for i, v in enumerate(graph.operands[e]) if self._makes(v)
                },
                adds_bytes=besides(e, adds=True),
                finishes_bytes=besides(e, adds=False),
                writes_product=bool(outside[graph.results[e][0]]),
            )
            for e, eqn in enumerate(graph.eqns)
            if eqn.traits.contraction
        }

    def _unfused(self, kernels: Mapping[int, Kernel]) -> dict[int, Unfused]:
        """The kernels that operands need if they move, and products, under any name, also added to others."""
        graph, found = self.graph, dict[int, Unfused]()
        for e, eqn in enumerate(graph.eqns):
            for v in graph.operands[e] if e in kernels else ():
                if self._makes(v) and self.host[v] < 0:
                    found[v] = Unfused(nbytes=self._nbytes((*self.sources[v], v)), before=True)
            h, added = self.runs_in[e], self.flows[e] and not eqn.traits.renames
            if h < 0 or not (e in kernels or eqn.traits.renames or added):
                continue
            nbytes = kernels[h].finishes_bytes + (0 if added else kernels[h].adds_bytes)
            if nbytes:
                found[graph.results[e][0]] = Unfused(nbytes=nbytes, before=False)
        return found

    def _reduces(self, e: int) -> bool:
        """Whether an equation reduces what a kernel computes, which ends it."""
        eqn = self.graph.eqns[e]
        return eqn.traits.ends_fusion and eqn.operands[0].size > eqn.results[0].size

    def _is_computed(self, value: int) -> bool:
        """Whether a fusible equation computes a value, under whatever name."""
        e = self.graph.producers.get(value, (_NONE, 0))[0]
        while e >= 0 and self.graph.eqns[e].traits.renames and self.onward[e]:
            e = self.graph.producers.get(self.graph.made_from(e)[0], (_NONE, 0))[0]
        return e >= 0 and self.onward[e] and not self._reduces(e)

    def _makes(self, operand: int) -> bool:
        """Whether a contraction computes an operand that it takes from values in memory."""
        return bool(self.absorbed[operand]) and operand in self.graph.producers and bool(self.sources[operand])

    def _lying(self, value: int) -> int:
        """The bytes of a value that lies in memory, maybe as products cast it."""
        return int(self.graph.avals[value].nbytes * lying_share(self.graph, self.multiplied, value))

    def _nbytes(self, values: Iterable[int]) -> int:
        return sum(self.read.get(v, self.graph.avals[v].nbytes) for v in values)

    def _sources(self) -> list[frozenset[int]]:
        """Per value, the values in memory that are read to compute it: itself if it lies there."""
        found = [frozenset({v}) if v in self.read else frozenset[int]() for v in range(len(self.graph.avals))]
        for e, eqn in enumerate(self.graph.eqns):
            chosen = eqn.primitive in (RECALL, DERIVE)
            if not (chosen or self.onward[e]) or self._reduces(e):
                continue
            for v in self.graph.results[e]:
                if not self.held[v] or (eqn.traits.renames and not chosen) or self._widens(e):
                    found[v] = frozenset[int]().union(*(found[o] for o in self.graph.made_from(e)))
        return found

    def _last_products(self) -> list[int]:
        """Per value, the last contraction whose product it needs, in whatever way; -1 for none."""
        last = [_NONE] * len(self.graph.avals)
        for e, eqn in enumerate(self.graph.eqns):
            needed = e if eqn.traits.contraction else max((last[v] for v in self.graph.operands[e]), default=_NONE)
            for v in self.graph.results[e]:
                last[v] = needed
        return last

    def _widens(self, e: int) -> bool:
        """Whether an equation casts a value in memory to a wider type: who reads the result reads the value."""
        return widening(self.graph.eqns[e]) > 0 and self.graph.operands[e][0] in self.read

    def _takes_narrow(self, e: int, operand: int) -> bool:
        """Whether an equation takes a wider cast element by element: it reads what was cast itself."""
        graph, maker = self.graph, self.graph.producers.get(operand, (_NONE, 0))[0]
        if maker < 0 or not self._widens(maker) or graph.eqns[e].traits.renames:
            return False
        return graph.avals[graph.results[e][0]].size == graph.avals[operand].size

    def _could_run(self, e: int) -> int:
        """The contraction whose kernel could run a fusible equation; -1 for none.

        Of several the one that multiplies most; if they multiply as much, the last, which XLA:TPU's schedule need not
        follow.
        """
        graph = self.graph
        if graph.eqns[e].primitive == SLICE:
            return self._cut_by(e)
        size = graph.avals[graph.operands[e][0] if self._reduces(e) else graph.results[e][0]].size
        fitting = [
            h
            for h in {int(self.host[v]) for v in graph.made_from(e)} - {_NONE}
            if graph.eqn_loop[e] == graph.eqn_loop[h] and size in self.parts[h]
            if all(self._is_there(v, h) for v in graph.made_from(e))
        ]
        return max(fitting, key=lambda h: (_sizes(graph.eqns[h]), h), default=_NONE)

    def _cut_by(self, e: int) -> int:
        """The contraction of whose product, cast or not, an equation alone takes a part; -1 for none."""
        graph, v = self.graph, self.graph.operands[e][0]
        h = int(self.host[v])
        while h >= 0 and len(graph.consumers[v]) == 1 and v not in graph.results[h]:
            maker, _ = graph.producers[v]
            if not (graph.eqns[maker].traits.renames or graph.eqns[maker].traits.cast):
                return _NONE
            (v, *_) = graph.operands[maker]
        if h < 0 or len(graph.consumers[v]) > 1 or graph.eqn_loop[e] != graph.eqn_loop[h]:
            return _NONE
        self.parts[h].add(graph.avals[graph.results[e][0]].size)
        return h

    def _is_there(self, value: int, host: int) -> bool:
        """Whether a contraction's kernel may take a value: it makes it, or it can wait for it.

        A kernel runs after all that does not need its product. What has another level than the product may need it.
        """
        product = self.graph.results[host][0]
        return (
            self.host[value] == host or self.levels[value] <= self.levels[product] or self.last_products[value] < host
        )

    def _backward(self) -> tuple[list[frozenset[int]], NDArray[np.bool_], NDArray[np.bool_]]:
        """Per value: the levels of kernels apart that compute it, if its host's does, and what reads it outside."""
        graph, host = self.graph, self.host
        made, outside = np.zeros((2, len(graph.avals)), bool)
        nowhere, own = frozenset[int](), [frozenset({level}) for level in self.levels.tolist()]
        apart = [nowhere] * len(graph.avals)
        outside[list(graph.outputs)] = True
        for e in range(len(graph.eqns) - 1, -1, -1):
            eqn, operands, result = graph.eqns[e], list(graph.operands[e]), next(iter(graph.results[e]), _NONE)
            if e in graph.aside:
                for v in graph.read_by(e):
                    apart[v] |= own[v]
                continue
            if eqn.traits.choice:  # what is kept is computed as what takes it needs it, if it is computed at all
                kept = operands[: -1 if self.onward[e] else None]
                for v in kept:
                    apart[v] |= apart[result]
                outside[[v for v in kept if v not in self.unwritten]] = True
            if eqn.traits.choice and not self.onward[e]:
                continue
            if eqn.primitive == LOOP_STACK or e in self.gathered:
                v = operands[0]
                made[v] |= host[v] >= 0  # its slice, or what is gathered from, is written where its kernel ends
                apart[v] |= own[v] if host[v] < 0 else nowhere
                outside[v] |= host[v] < 0
            elif not self.onward[e]:
                for v in operands if not eqn.traits.contraction else ():
                    apart[v] |= own[v]
                outside[operands] = True
            else:
                h = self.runs_in[e]
                if self._reduces(e):
                    inside, alone, beyond = h >= 0, nowhere if h >= 0 else own[operands[0]], False
                else:
                    if self.held[result] and not eqn.traits.renames:
                        made[result], apart[result], outside[result] = h >= 0, nowhere if h >= 0 else own[result], False
                    inside, alone, beyond = bool(made[result]), apart[result], bool(outside[result])
                for v in graph.made_from(e):
                    made[v] |= inside and host[v] == h
                    apart[v] |= nowhere if self._takes_narrow(e, v) else alone
                    outside[v] |= bool(alone) or beyond or host[v] != h
        return apart, made, outside


def _sizes(eqn: Eqn) -> int:
    """The sizes of a contraction's operands and result, multiplied: more for one of more FLOPs in as many batches."""
    return prod(aval.size for aval in (*eqn.operands, *eqn.results))
