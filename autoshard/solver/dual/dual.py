r"""The dual: message passing with a multiplier per memory row and hinge, and the bound it proves.

Relaxing memory row r, which demands $r(x) \le M$, with a multiplier $\lambda_r \ge 0$ adds the penalty
$\lambda_r (r(x) - M)$ to the objective (Lagrangian relaxation); a hinge is $\max(0, h) = \max_{0 \le
\lambda \le 1} \lambda h$. What is left is a network without rows, which message passing bounds.
Everything is kept in integers: costs are shifted left by `shift` bits, penalties are rounded down. So the
bound is exact, with nothing to trust but additions.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.dual import message_passing
from autoshard.solver.dual.message_passing import Messages, Tables, Visited
from autoshard.solver.memory import Memory, peaks_over
from autoshard.solver.program import FORBIDDEN, Network, cell_ends
from autoshard.solver.tuning import DualTuning

BITS = 55  # costs are shifted so that no choice exceeds 2^55, leaving room below INF
ROUNDING = 1 + 2.0**-48  # float products are off by 2^-53; limits are raised by more
PENALTY_BITS = 58  # no choice's penalties exceed 2^58

Floats = NDArray[np.float64]


class Dual:
    """Messages and multipliers of one network in shifted costs. `cycle` improves them."""

    def __init__(
        self, network: Network, memory: Memory, hinge_constant: tuple[int, ...], shift: int, tuning: DualTuning
    ) -> None:
        """Starts without messages; `network` and `hinge_constant` are shifted (see `shifted`)."""
        self.network, self.memory, self.shift, self.tuning = network, memory, shift, tuning
        self.hinge_constant = hinge_constant
        self.flat = network.flat()
        sizes = network.sizes
        u, w = network.edge_nodes[:, 0], network.edge_nodes[:, 1]
        self.owner = np.repeat(np.arange(network.nodes), sizes)
        row_start = np.concatenate([[0], np.cumsum(sizes[u])]).astype(np.int64)
        column_start = np.concatenate([[0], np.cumsum(sizes[w])]).astype(np.int64)
        self.messages = Messages(
            row_start=row_start,
            rows=np.zeros(row_start[-1], dtype=np.int64),
            column_start=column_start,
            columns=np.zeros(column_start[-1], dtype=np.int64),
        )
        self.cost = network.cost[0].copy()  # with the penalties at the multipliers
        self.table = network.edge_cost[0].copy()  # with the penalties at the multipliers
        self.potential = self.cost.copy()
        self.lower = np.full(len(self.cost), -FORBIDDEN)
        self.least = np.zeros(network.nodes, dtype=np.int64)
        self.choice = np.zeros(network.nodes, dtype=np.int64)
        self.failures = 0  # forbidden pairs met in rounding `choice`
        self.iterations = 0
        self.constant = network.offset
        self.best = -FORBIDDEN

        self.penalty_constant = 0
        self.events = np.zeros(0, dtype=np.int64)
        self.usage = np.zeros((0, len(self.cost)), dtype=np.int64)
        self.multiplier = np.zeros(0)
        self.steps = Steps(0, tuning)
        self.average: np.ndarray | None = None
        self.hinge_multiplier = np.zeros(len(hinge_constant))
        self.hinge_steps = Steps(len(hinge_constant), tuning)
        self.hinge_average = np.zeros(len(hinge_constant))
        self._exchange(self.multiplier, np.full(len(hinge_constant), 0.5))

    @property
    def bound(self) -> int:
        """The best bound proven, in the problem's unit (rounded up: objectives are integers)."""
        return -((-self.best) >> self.shift) if self.shift >= 0 else self.best << -self.shift

    @property
    def proves_infeasible(self) -> bool:
        """Whether the bound exceeds what any choice can cost."""
        return self.best > 2**BITS

    def may_improve(self, objective: int) -> NDArray[np.bool_]:
        """Returns which strategies a choice better than `objective` may contain."""
        target = objective - 1
        return self.lower <= (target << self.shift if self.shift >= 0 else (target >> -self.shift) + 1)

    def cycle(self, left_s: Clock = endless) -> None:
        """Moves the multipliers for some passes, then rests at the average of the later half.

        While the multipliers move, messages lag behind and the bound suffers; the average of their way is
        steadier than any point of it, as in all subgradient methods. Ends early once `left_s()` is not
        positive.
        """
        tuning = self.tuning
        half = tuning.moving_passes // 2
        mean, hinge_mean = np.zeros(0), np.zeros(0)
        for moves in range(tuning.moving_passes):
            if left_s() <= 0:
                return
            self._pass()
            if moves < half and self.iterations % tuning.rows_every == 0 and self.average is not None:
                self.add_rows(peaks_over(self.average, self.memory.limit * tuning.tolerated, tuning.rows_at_once))
            if self.relaxed:
                self._step()
            if moves == half:
                mean, hinge_mean = 0.0 * self.multiplier, 0.0 * self.hinge_multiplier
            if moves >= half:
                mean += self.multiplier / (tuning.moving_passes - half)
                hinge_mean += self.hinge_multiplier / (tuning.moving_passes - half)
        if self.relaxed:
            self._exchange(mean, hinge_mean)
            self.steps.shorten()
            self.hinge_steps.shorten()
        self.improve(tuning.resting_passes, left_s)

    def improve_at(self, factor: float, passes: int, left_s: Clock = endless) -> None:
        """Passes messages at `factor` times the multipliers of memory rows, which are as before afterwards."""
        multiplier = self.multiplier
        self._exchange(np.minimum(factor * multiplier, self._largest_multipliers()), self.hinge_multiplier)
        self.improve(passes, left_s)
        self._exchange(multiplier, self.hinge_multiplier)

    def improve(self, passes: int, left_s: Clock = endless) -> None:
        """Passes messages at the multipliers as they are, while `left_s()` is positive."""
        for _ in range(passes):
            if left_s() <= 0:
                return
            self._pass()

    @property
    def relaxed(self) -> bool:
        """Whether any row or hinge is priced by a multiplier."""
        return len(self.events) > 0 or len(self.hinge_constant) > 0

    def _pass(self) -> None:
        effort.spend(steps=4, cells=2 * len(self.table))
        self._sweep(forward=True)
        self._sweep(forward=False)
        self.iterations += 1
        self.best = max(self.best, self.constant)
        if len(self.memory.times):
            profile = self.memory.profile(self.least).astype(float)
            self.average = profile if self.average is None else self._averaged(self.average, profile)

    def _averaged(self, past: Floats, now: Floats) -> Floats:
        """Returns the running average of usage per event, or of the value per hinge."""
        weight = self.tuning.past_weight
        return weight * past + (1 - weight) * now

    def dead_cells(self, objective: int) -> NDArray[np.bool_]:
        """Returns the cells that no choice better than `objective` contains, as far as is proven."""
        net = self.network
        target = objective - 1
        room = (target << self.shift if self.shift >= 0 else (target >> -self.shift) + 1) - self.constant
        moved = message_passing.residual(self.flat, self.messages, self.table)
        _, left, right = cell_ends(net)
        return moved + self.potential[left] + self.potential[right] > room

    def active_events(self, most: int) -> Int:
        """Returns the events of rows that matter: priced, nearly full on average, or broken by the last rounding."""
        limit = self.memory.limit
        matters = self.multiplier > 0
        if self.average is not None:
            matters |= self.average[self.events] > self.tuning.nearly_full * limit
        return np.union1d(self.events[matters], peaks_over(self.memory.profile(self.choice), limit, most))

    def excess(self) -> Int:
        """Returns how far each strategy's best proven lower bound lies above the bound."""
        above = np.maximum(self.lower - self.best, 0)
        above[self.network.start[:-1] + self.least] = 0
        return above

    def inherit(self, other: "Dual") -> None:
        """Takes over the multipliers and step lengths of a dual of the same problem."""
        self.add_rows(other.events)
        at = np.searchsorted(other.events, self.events)
        self.steps.largest, self.hinge_steps.largest = other.steps.largest, other.hinge_steps.largest
        self.steps.length, self.hinge_steps.length = other.steps.length[at], other.hinge_steps.length
        self._exchange(other.multiplier[at], other.hinge_multiplier)

    def add_rows(self, events: Int) -> None:
        """Adds memory rows at the given events, except those that exist."""
        new = np.setdiff1d(events, self.events)
        events = np.concatenate([self.events, new])
        order = np.argsort(events)
        self.events = events[order]
        self.usage = np.concatenate([self.usage, self.memory.coefficients(new)])[order]
        self.multiplier = np.concatenate([self.multiplier, np.zeros(len(new))])[order]
        self.steps.extend(len(new))
        self.steps.reorder(order)

    def residual(self) -> Network:
        """Returns the network with all moves made, in the same shifted unit, without penalties.

        Every choice costs what it costs in `network`; most of it now lies in the offset.
        """
        net = self.network
        table = message_passing.residual(self.flat, self.messages, net.edge_cost[0])
        cost = self.potential - (self.cost - net.cost[0])
        return replace(
            net,
            cost=np.concatenate([cost[None], net.cost[1:]]),
            edge_cost=np.concatenate([table[None], net.edge_cost[1:]]),
            offset=self.constant - self.penalty_constant,
        )

    def _sweep(self, *, forward: bool) -> None:
        visited = Visited(
            cost=self.cost, potential=self.potential, lower=self.lower, least=self.least, choice=self.choice
        )
        self.constant, failures = message_passing.sweep(
            1 if forward else -1, self.flat, self.messages, Tables(self.table, self.flipped), visited, self.constant
        )
        if forward:
            self.failures = failures

    def _step(self) -> None:
        multiplier, hinge_multiplier = self.multiplier, self.hinge_multiplier
        if len(self.events):
            assert self.average is not None
            slope = self.average[self.events] / max(self.memory.limit, 1) - 1
            unit = max(abs(self.best), 1) / max(self.memory.limit, 1)
            multiplier = np.clip(multiplier + unit * self.steps.towards(slope), 0.0, self._largest_multipliers())
        if self.hinge_constant:
            value = np.array(self._hinge_values(), dtype=float) / max(abs(self.best), 1)
            self.hinge_average = self._averaged(self.hinge_average, value)
            hinge_multiplier = np.clip(hinge_multiplier + self.hinge_steps.towards(self.hinge_average), 0.0, 1.0)
        self._exchange(multiplier, hinge_multiplier)

    def _largest_multipliers(self) -> Floats:
        """Returns the largest multipliers at which all penalties of a choice together stay below 2^PENALTY_BITS."""
        most = np.maximum.reduceat(self.usage, self.network.start[:-1], axis=1).sum(axis=1, dtype=float)
        return 2.0**PENALTY_BITS / (len(self.events) * np.maximum(most, max(self.memory.limit, 1)))

    def _hinge_values(self) -> list[int]:
        net = self.network
        u, w = net.edge_nodes[:, 0], net.edge_nodes[:, 1]
        chosen = net.start[:-1] + self.least
        cell = net.edge_start[:-1] + self.least[u] * net.sizes[w] + self.least[w]
        return [
            constant + int(net.cost[h, chosen].sum()) + int(net.edge_cost[h, cell].sum())
            for h, constant in enumerate(self.hinge_constant, start=1)
        ]

    def _exchange(self, multiplier: Floats, hinge_multiplier: Floats) -> None:
        """Replaces the multipliers, and the penalties in costs, tables and potentials; the bound stays a bound."""
        net = self.network
        effort.spend(steps=4 + len(multiplier), cells=len(multiplier) * len(self.cost))
        cost = net.cost[0].copy()
        constant = 0
        for m, row in zip(multiplier.tolist(), self.usage, strict=True):
            if m > 0:
                cost += np.floor(m * row).astype(np.int64)
                constant -= math.ceil(m * self.memory.limit * ROUNDING)
        for h, m in enumerate(hinge_multiplier.tolist(), start=1):
            cost += np.floor(m * net.cost[h]).astype(np.int64)
            constant += math.floor(m * self.hinge_constant[h - 1]) - math.ceil(self._magnitude(h) * (ROUNDING - 1))
        if self.hinge_constant or self.iterations == 0:
            effort.spend(steps=len(self.hinge_constant), cells=(4 + 3 * len(self.hinge_constant)) * len(self.table))
            table = net.edge_cost[0].copy()
            for h, m in enumerate(hinge_multiplier.tolist(), start=1):
                table += np.floor(m * net.edge_cost[h]).astype(np.int64)
            self.table = np.where(net.edge_cost[0] >= INF, FORBIDDEN, table)
            self.flipped = message_passing.transpose(self.flat, self.table)
            self.constant += message_passing.settle_edges(self.flat, self.messages, self.table)
        self.potential += cost - self.cost
        self.cost = cost
        self.constant += constant - self.penalty_constant
        self.penalty_constant = constant
        self.multiplier, self.hinge_multiplier = multiplier, hinge_multiplier
        low = np.minimum.reduceat(self.potential, net.start[:-1])
        self.potential -= low[self.owner]
        self.constant += int(low.sum())

    def _magnitude(self, h: int) -> float:
        """Returns the largest sum of absolute coefficients of hinge h, for its rounding error."""
        net = self.network
        of_nodes = np.maximum.reduceat(np.abs(net.cost[h]), net.start[:-1]).sum(dtype=float)
        of_edges = np.abs(net.edge_cost[h]).max(initial=0) * float(len(net.edge_nodes))
        return of_nodes + of_edges + abs(self.hinge_constant[h - 1])


def plain_dual(network: Network, shift: int, tuning: DualTuning) -> Dual:
    """Returns message passing over layer 0 of a network, without memory."""
    none = np.zeros(0, dtype=np.int64)
    memory = Memory(
        times=none, root=none, begin=none, end=none, first=none, follow_first=none,
        usage=none, follows=none, strategies=network.start, limit=0,
    )  # fmt: skip
    return Dual(network, memory, (), shift, tuning)


def settled_dual(network: Network, shift: int, tuning: DualTuning, left_s: Clock) -> Dual:
    """Returns message passing over layer 0 of a network, after as many cycles as raise its bound."""
    dual = plain_dual(network, shift, tuning)
    before = -FORBIDDEN
    for _ in range(tuning.most_cycles):
        dual.cycle(left_s)
        if dual.best - before <= tuning.flat_gain * abs(dual.best):
            break
        before = dual.best
    return dual


class Steps:
    """Step lengths, one per multiplier, that grow while a slope keeps its sign and shrink when it turns.

    Source: Rprop, Riedmiller & Braun 1993.
    """

    def __init__(self, count: int, tuning: DualTuning) -> None:
        self.tuning = tuning
        self.length = np.full(count, tuning.first_step)
        self.largest = tuning.largest_step
        self.side = np.zeros(count)

    def shorten(self) -> None:
        """Cuts the longest step allowed, and every step with it."""
        self.largest = max(self.largest * self.tuning.shorter, self.tuning.smallest_step)
        self.length = np.minimum(self.length, self.largest)

    def extend(self, count: int) -> None:
        self.length = np.concatenate([self.length, np.full(count, min(self.tuning.first_step, self.largest))])
        self.side = np.concatenate([self.side, np.zeros(count)])

    def reorder(self, order: Int) -> None:
        self.length, self.side = self.length[order], self.side[order]

    def towards(self, slope: Floats) -> Floats:
        """Returns the next step of each coordinate; small slopes take part of a step."""
        tuning, same = self.tuning, np.sign(slope) * self.side
        self.length *= np.where(same > 0, tuning.faster, np.where(same < 0, tuning.slower, 1.0))
        self.length = np.clip(self.length, tuning.smallest_step, self.largest)
        self.side = np.sign(slope)
        return self.length * np.clip(tuning.steepness * slope, -1.0, 1.0)


def shifted(network: Network, hinge_constant: tuple[int, ...]) -> tuple[Network, tuple[int, ...], int]:
    """Returns the network and the hinges' constants times 2^shift, as large as is safe, and the shift.

    Where costs are too large the shift is negative, and costs are rounded down, so that a bound stays a bound.
    """
    total = abs(network.offset) + sum(map(abs, hinge_constant))
    for layer, start in ((network.cost, network.start), (network.edge_cost, network.edge_start)):
        if len(start) > 1:
            for values in layer:
                size = np.abs(values)
                size[size >= INF] = 0
                total += int(np.maximum.reduceat(size, start[:-1]).sum(dtype=float))
    shift = BITS - total.bit_length()

    def move(values: Int) -> Int:
        moved = values << shift if shift >= 0 else values >> -shift
        moved[values >= INF] = FORBIDDEN
        return moved

    def move_one(value: int) -> int:
        return value << shift if shift >= 0 else value >> -shift

    moved = replace(
        network, cost=move(network.cost), edge_cost=move(network.edge_cost), offset=move_one(network.offset)
    )
    return moved, tuple(map(move_one, hinge_constant)), shift
