"""Assignment: one choice per decision, read as layouts, constraints and collectives."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat, zip_longest

import numpy as np
from numpy.typing import NDArray

from autoshard.costs.resharding import NO_STRIDES, PS_PER_S, Resharder, Step, collective_s
from autoshard.costs.strategies import SUM, WHOLE, Rows, decode, encode
from autoshard.ir.graph import Aval
from autoshard.ir.op_traits import GATHER
from autoshard.problem.decisions import Chain, Decisions, Edge, Equation, Input, Port, consumer_port, layout_codes

TRANSPOSE = "transpose"  # the name of the work around a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective that the plan expects, per device.

    `nbytes` are logical: an all-gather's result, every other collective's operand. `trips` counts its
    runs, `seconds` is the price of one run, `window` the window in which it may hide, `work_s` the
    seconds of the transposes around one run.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    dtype: str
    trips: int
    seconds: float
    window: int | None
    where: str
    value: str
    work_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Layouts under one choice per decision.

    Codes are those of `autoshard.costs.strategies`. A value is *made* in one layout, *kept* in
    another (its copy's, for several consumers), and *taken* by each consumer.
    """

    decisions: Decisions
    resharder: Resharder
    choice: NDArray[np.int64]
    _ports: dict[tuple[int, int], Port | None] = field(init=False, repr=False, default_factory=dict)
    _moved: dict[int, Aval] = field(init=False, repr=False, default_factory=dict)

    def _code(self, port: Port) -> int:
        return int(port.codes[self.choice[port.node]])

    def made(self, value: int) -> int | None:
        """The code in which a value is made; None for free values."""
        port = self.decisions.made.get(value)
        return None if port is None else self._code(port)

    def kept(self, value: int) -> int | None:
        """The code in which a value is kept for its consumers."""
        port = self.decisions.kept.get(value)
        return self.made(value) if port is None else self._code(port)

    def taken(self, e: int, i: int) -> int | None:
        """The code in which equation e takes its operand i."""
        d = self.decisions
        if (e, i) not in self._ports:
            self._ports[e, i] = consumer_port(d.nodes, d.rules, d.node_of, d.mesh, e, i)
        port = self._ports[e, i]
        return None if port is None else self._code(port)

    def input_code(self, position: int) -> int:
        return self._end(self.decisions.inputs[position])

    def output_code(self, position: int) -> int:
        return self._end(self.decisions.outputs[position])

    def _end(self, node: int) -> int:
        return int(layout_codes(self.decisions.nodes[node])[self.choice[node]])

    def reduced(self, code: int, value: int) -> bool:
        """Whether a code has no unreduced axes, so that it can be pinned."""
        return not (self._row(code, value) == SUM).any()

    def route(self, value: int, source: int, target: int) -> tuple[int, ...]:
        """The pinnable codes that a value passes through from source to target.

        Three kinds of scattered sums are whole in between: onto a dimension of the contraction's batch that
        is already split, onto a second dimension, and a lookup's. Otherwise XLA all-reduces and then moves
        them; an all-reduce that is cut right after becomes a reduce-scatter. Only the last of several
        slices in a row is listed.
        """
        codes: list[int] = []
        here = source
        steps = self._path(value, source, target)
        for step, following in zip_longest(steps, steps[1:]):
            if step.kind == "reduce-scatter" and (here != source or self._detours(value, here, step.after)):
                codes.append(self._whole(here, value))
            if not (step.kind == "slice" and following is not None and following.kind == "slice"):
                codes.append(step.after)
            here = step.after
        return tuple(code for code in codes if self.reduced(code, value))

    def _row(self, code: int, value: int) -> Rows:
        return decode(code, self.decisions.graph.avals[value].ndim, self.decisions.mesh.ndim)

    def _whole(self, code: int, value: int) -> int:
        """A code with its sums finished."""
        row = self._row(code, value)
        return int(encode(np.where(row == SUM, WHOLE, row), self.decisions.graph.avals[value].ndim))

    def _detours(self, value: int, source: int, target: int) -> bool:
        """Whether XLA scatters a sum only behind a pin: a lookup's sum, or one onto a batch that is already split."""
        if self._lookup(value):
            return True
        before, after = self._row(source, value), self._row(target, value)
        onto = set(after[(before == SUM) & (after != SUM)].tolist()) & set(before.tolist())
        return bool(onto) and not onto.isdisjoint(self._batch(value))

    def _lookup(self, value: int) -> bool:
        e, _ = self.decisions.graph.producers[value]
        return self.decisions.graph.eqns[e].primitive == GATHER

    def _batch(self, value: int) -> set[int]:
        """The dimensions of a pending sum that all operands of its contraction have."""
        d = self.decisions
        e, position = d.graph.producers[value]
        rule = d.rules[e]
        decision = d.nodes[d.node_of[e]]
        if isinstance(decision, Equation) and decision.body is not None:
            return set()
        if any(factor.reduction for factor in rule.factors):
            shared = set.intersection(*({f for dim in dims for f in dim} for dims in rule.operands))
        else:  # sums flow through
            operands = zip(d.graph.operands[e], rule.operands, strict=True)
            shared = {f for operand, dims in operands for n in self._batch(operand) for f in dims[n]}
        return {n for n, dim in enumerate(rule.results[position]) if shared & set(dim)}

    def left(self, value: int) -> int | None:
        """The code in which a value goes on from where it is made: its copy's, or its own.

        Its own where an equation of the same chain takes it as it was made, and the way back
        from the copy would be a collective; and that of an input which anyone takes as it came
        and could cut from the copy, which need not live as long then. Everyone else moves it for
        himself; and all do what is moved for groups of uses, by a compiler that finds what is near. A
        pending sum is finished once.
        """
        made, kept = self.made(value), self.kept(value)
        if made is None or kept is None or made == kept:
            return made
        if value in self.decisions.apart and self.reduced(made, value) and self._communicates(value, made, kept):
            return made
        uses = self.decisions.graph.consumers.get(value, ())
        if self._is_input(value):
            as_came = any(self.taken(e, i) == made for e, i in uses)
            return made if as_came and not self._communicates(value, kept, made) else kept
        back = any(self._in_chain(e, value) for e, _ in uses)
        return made if back and self._communicates(value, kept, made) else kept

    def _is_input(self, value: int) -> bool:
        return isinstance(self.decisions.nodes[self.decisions.made[value].node], Input)

    def _as_made(self, e: int, i: int) -> bool:
        """Whether equation e takes its operand i from where it is made, past its copy."""
        value = self.decisions.graph.operands[e][i]
        return self.taken(e, i) == self.left(value) and (self._is_input(value) or self._in_chain(e, value))

    def _in_chain(self, e: int, value: int) -> bool:
        """Whether equation e is of the chain that makes a value."""
        node = self.decisions.made[value].node
        return self.decisions.node_of[e] == node and isinstance(self.decisions.nodes[node], Chain)

    def _to_copy(self, value: int) -> tuple[int, ...]:
        """The codes to pin on the way to a value's copy, from where it is left."""
        left, kept = self.left(value), self.kept(value)
        return () if left is None or kept is None else self.route(value, left, kept)

    def after_made(self, value: int) -> tuple[int, ...]:
        """Codes to pin, in order, where a value is made: its own, then on to where it is left."""
        made, left = self.made(value), self.left(value)
        if made is None or left is None:
            return ()
        own = (made,) if self.reduced(made, value) else ()
        return own + self.route(value, made, left)

    def before_taken(self, e: int, i: int) -> tuple[int, ...]:
        """Codes to pin, in order, where equation e takes operand i."""
        value = self.decisions.graph.operands[e][i]
        kept, taken = self.kept(value), self.taken(e, i)
        if kept is None or taken is None or self._as_made(e, i):
            return ()
        return self._to_copy(value) + self.route(value, kept, taken)

    def again(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Operands (equation, position) that are moved by collectives of their own, and the codes on the way.

        A value that is kept in one layout and taken by several equations in another is moved for each of
        them: otherwise the compiler would merge the moves, and hold the moved value from the first use to
        the last. The first move is already accounted for; only the repeats are returned.
        """
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        d = self.decisions
        uses = d.graph.consumers
        for value in d.kept:
            kept = self.kept(value)
            assert kept is not None  # copies have codes
            seen: set[int] = set()
            for e, i in uses.get(value, ()):
                taken = self.taken(e, i)
                if taken is None or taken == kept or not self._communicates(value, kept, taken):
                    continue
                if taken in seen and isinstance(d.nodes[d.node_of[e]], Equation) and self.reduced(kept, value):
                    found[e, i] = (kept, *self.route(value, kept, taken))
                seen.add(taken)
        return found

    def _communicates(self, value: int, source: int, target: int) -> bool:
        return any(step.kind != "slice" for step in self._path(value, source, target))

    def _path(self, value: int, source: int, target: int) -> tuple[Step, ...]:
        """The path of the moved array, as in `transfers`: the smaller side of the cast that makes the value."""
        d = self.decisions
        if not self._moved:
            self._moved.update((edge.value, edge.moved) for edge in d.edges)
        aval = self._moved.get(value, d.graph.avals[value])
        bucket, strides = d.windows.bucket(value), d.strides.get(value, NO_STRIDES)
        return self.resharder.path(aval, source, target, bucket=bucket, strides=strides)

    def before_output(self, position: int) -> tuple[int, ...]:
        """Codes to pin, in order, before a program output."""
        value = self.decisions.graph.outputs[position]
        kept = self.kept(value)
        return () if kept is None else self._to_copy(value) + self.route(value, kept, self.output_code(position))

    def transfers(self) -> Iterator[tuple[Edge, Collective]]:
        """The collectives between equations: once per value, layouts and group of uses, and per operand moved again."""
        d = self.decisions
        seen: set[tuple[int, int, int]] = set()
        again = {(d.graph.operands[e][i], d.node_of[e]) for e, i in self.again()}
        for edge in d.edges:
            source, target = int(edge.source[self.choice[edge.u]]), int(edge.target[self.choice[edge.v]])
            if source == target or ((edge.value, source, target) in seen and (edge.value, edge.v) not in again):
                continue
            seen.add((edge.value, source, target))
            where = d.nodes[edge.v].where or d.nodes[edge.u].where
            ends = (np.array([source], np.int64), np.array([target], np.int64))
            whole = edge.total if edge.finishes(*ends, d.mesh.ndim)[0, 0] else None
            aval, trips = whole or (edge.moved, edge.trips)
            for step in self.resharder.path(aval, source, target, bucket=edge.bucket, strides=edge.strides):
                if step.kind != "slice":
                    row = Collective(
                        kind=step.kind,
                        axes=step.axes,
                        nbytes=step.nbytes,
                        dtype=str(aval.dtype),
                        trips=trips,
                        seconds=self._seconds(step.kind, step.axes, step.nbytes, edge.bucket),
                        window=edge.window,
                        where=where,
                        value=str(aval),
                    )
                    work_s = float(self.resharder.machine.hbm_s(step.transposed)) if step.transposed else 0.0
                    yield from repeat((edge, replace(row, work_s=work_s)), edge.times)

    def collectives(self) -> Iterator[Collective]:
        """Every collective, as emitted: between equations, and inside of them."""
        for _, row in self.transfers():
            yield row
        for n in range(len(self.decisions.nodes)):
            yield from self.in_op(n)

    def waits(self) -> Iterator[tuple[Collective, float]]:
        """Every collective, and the seconds that the step waits for it: its share of the windows' exposed seconds.

        A collective in several windows has a share in each (`formulation`), at times more than its own seconds.
        """
        d = self.decisions
        moved = [(row, edge.hides) for edge, row in self.transfers()]
        hides, covers = np.zeros(d.windows.count), np.zeros(d.windows.count)
        for row, hidden in moved:
            for window, share in () if row.window is None else d.windows.hides[row.window]:
                hides[window] += share * hidden * row.seconds * row.trips
        for node, pick in zip(d.nodes, self.choice, strict=True):
            for window, share in d.windows.covers[node.window]:
                covers[window] += share * int(node.cover_ps[pick]) / PS_PER_S
        left = np.maximum(0.0, hides - covers) / np.where(hides > 0, hides, 1.0)
        for row, hidden in moved:
            shares = () if row.window is None else d.windows.hides[row.window]
            exposed = sum(share * float(left[window]) for window, share in shares)
            yield row, row.seconds * row.trips * (1.0 - hidden + hidden * exposed)
        for n in range(len(d.nodes)):
            yield from self._in_op(n)

    def in_op(self, n: int) -> Iterator[Collective]:
        """The collectives inside decision n: reductions that an equation finishes itself, and those of a body."""
        return (row for row, _ in self._in_op(n))

    def _in_op(self, n: int) -> Iterator[tuple[Collective, float]]:
        """They, and for how many seconds the step waits for each."""
        d = self.decisions
        node, pick = d.nodes[n], self.choice[n]
        if not isinstance(node, Equation):
            return
        for inner in node.body.collectives if node.body else ():
            trips = inner.trips * d.graph.runs(node.equation)
            row = Collective(
                kind=inner.kind,
                axes=inner.axes,
                nbytes=inner.nbytes,
                dtype=inner.dtype,
                trips=trips,
                seconds=self._seconds(inner.kind, inner.axes, inner.nbytes, inner.bucket),
                window=None,
                where=inner.where,
                value=inner.value,
            )
            yield row, row.seconds * trips * inner.waited
        if not node.strategies.in_op[pick].any():
            return
        e = node.equation
        axes = tuple(name for name, used in zip(d.mesh.names, node.strategies.in_op[pick], strict=True) if used)
        for aval, codes in zip(d.graph.eqns[e].results, node.strategies.results, strict=True):
            row = decode(int(codes[pick]), aval.ndim, d.mesh.ndim)
            pieces = int(np.prod([s for s, r in zip(d.mesh.sizes, row, strict=True) if r >= 0], dtype=np.int64))
            local, trips = aval.nbytes // pieces, d.graph.runs(e)
            row = Collective(
                kind="all-reduce",
                axes=axes,
                nbytes=local,
                dtype=str(aval.dtype),
                trips=trips,
                seconds=self._seconds("all-reduce", axes, local, 0),
                window=None,
                where=node.where,
                value=str(aval),
            )
            yield row, row.seconds * trips

    def node_s(self, n: int) -> float:
        """Seconds of decision n over all its trips, without the collectives inside."""
        return int(self.decisions.nodes[n].cost_ps[self.choice[n]]) / PS_PER_S - sum(
            waited_s for _, waited_s in self._in_op(n)
        )

    def _seconds(self, kind: str, axes: tuple[str, ...], nbytes: int, bucket: int) -> float:
        """What a collective takes once, merged with others into a bucket of so many bytes."""
        return float(collective_s(self.resharder.machine, kind, axes, nbytes, bucket=bucket))

    def peak(self) -> tuple[int, int, Mapping[str, int]]:
        """(bytes, time point, bytes by kind at that point): the highest point of memory."""
        d = self.decisions
        end = len(d.graph.eqns) + 2
        change = np.zeros(end, np.int64)
        for use in d.usages:
            nbytes = int(use.nbytes[self.choice[use.node]])
            change[use.start] += nbytes
            change[min(use.end, end - 1)] -= nbytes
        held = np.cumsum(change)
        at = int(held.argmax())
        kinds: dict[str, int] = {}
        for use in d.usages:
            if use.start <= at < use.end:
                kinds[use.kind] = kinds.get(use.kind, 0) + int(use.nbytes[self.choice[use.node]])
        return int(held[at]), at, dict(sorted(kinds.items()))

    def compute_s(self) -> float:
        """Seconds of all equations and of the transposes around collectives, without communication."""
        own = sum(map(self.node_s, range(len(self.decisions.nodes))))
        return own + sum(row.work_s * row.trips for row in self.collectives())

    def flops(self) -> float:
        """Contractions' FLOPs per device."""
        return float(sum(n.flops[c] for n, c in zip(self.decisions.nodes, self.choice, strict=True)))

    def peak_flops_per_s(self, rate: Callable[[str], float]) -> float | None:
        """The rate at which a device that reached each type's peak would do all contractions; None without any.

        Args:
          rate: the peak per element type.
        """
        at_peak_s = sum(
            float(node.flops[pick]) / rate(str(self.decisions.graph.eqns[node.equations[0]].operands[0].dtype))
            for node, pick in zip(self.decisions.nodes, self.choice, strict=True)
            if node.flops[pick]
        )
        return self.flops() / at_peak_s if at_peak_s else None
