"""Local search: blocks of nodes move to their joint optimum while prices steer memory.

The search swings about the memory limit (strategic oscillation: Glover & Laguna 1997). Prices of memory
start as the dual's multipliers. While the choice overflows, rows at its peaks become dearer. While it fits,
all prices fall, and a copy of the choice is polished by moves that keep it within the limit; the parts in
which it beats the best choice so far are taken over. After turns without success the search goes on from
the best choice, perturbed (iterated local search: Lourenço, Martin & Stützle 2003).
"""

import math

import numpy as np

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import Clock, effort, endless
from autoshard.solver.memory import peaks_over
from autoshard.solver.presolve.memory_rows import Rows
from autoshard.solver.primal import block_moves
from autoshard.solver.primal.block_moves import NEVER, Current, Floats, Prices
from autoshard.solver.program import Network
from autoshard.solver.tuning import LocalSearchTuning

ANY = 2**62  # a limit that refuses nothing


class LocalSearch:
    """A choice of a network that swings about the memory limit, and the best choice met that fits."""

    def __init__(
        self, network: Network, rows: Rows, seed: int, tuning: LocalSearchTuning, left_s: Clock = endless
    ) -> None:
        """Starts without a choice. Hinges of `network` are ignored; moves end when `left_s()` is not positive."""
        self.network, self.rows, self.tuning, self.left_s = network, rows, tuning, left_s
        self.flat, self.items = network.flat(), rows.memory_items
        self.table, self.cost = as_floats(network.edge_cost[0]), as_floats(network.cost[0])
        self.state = np.array([2 * seed + 0x9E3779B97F4A7C15], dtype=np.uint64)
        self.random = np.random.default_rng(seed)
        self.price = np.zeros(rows.count)
        self.added = np.zeros(rows.count)
        self.level = 1.0
        self.choice: Int | None = None
        self.best: Int | None = None
        self.best_value = np.inf
        self.polished = np.inf  # value of the choice that was last polished
        self.idle = 0
        self.age = 0  # turns since it went on from a choice of another's making

    def value_of(self, choice: Int) -> float:
        """Returns what a choice costs; at least `NEVER` if it is forbidden."""
        return float(block_moves.total(self.flat, Prices(self.cost, self.table), choice))

    def set_prices(self, price: Floats) -> None:
        """Takes the dual's multipliers: a price per row and byte."""
        self.price = price

    def start_at(self, choice: Int) -> None:
        """Goes on from a finite choice, which is the best so far if it fits and costs least."""
        self.choice, self.profile = choice.copy(), self.rows.profile(choice)
        self._keep(choice, self.profile)

    def go_on_from(self, choice: Int) -> None:
        """Goes on from any choice, which need not fit nor be finite, at the dual's prices alone."""
        self.choice, self.profile = choice.copy(), self.rows.profile(choice)
        self.added = np.zeros(self.rows.count)
        self.level, self.idle, self.age = 1.0, 0, 0

    def turn(self) -> bool:
        """Moves, then changes prices; returns whether a better choice that fits was found."""
        assert self.choice is not None
        limit, tuning = self.rows.limit, self.tuning
        if self.idle >= tuning.patience:
            self._perturb()
        unary = self._unary(self.level * self.price + self.added)
        self._move(unary, self.choice, self.profile, ANY, tuning.visits)
        peaks = peaks_over(self.profile, limit, tuning.peaks)
        value = self.value_of(self.choice)
        found = False
        if len(peaks):
            unit = max(abs(value), 1.0) / max(limit, 1)
            excess = self.profile[peaks] / max(limit, 1) - 1
            self.added[peaks] += unit * np.maximum(tuning.dearer * excess, tuning.least_dearer)
            self.level = min(self.level / tuning.level_factor, 1.0)
        else:
            if value != self.polished:
                self.polished = value
                found = self._polish()
            self.added *= tuning.cheaper
            self.level = max(self.level * tuning.level_factor, tuning.lowest_level)
        self.idle = 0 if found else self.idle + 1
        self.age += 1
        return found

    def _polish(self) -> bool:
        assert self.choice is not None
        choice, profile = self.choice.copy(), self.profile.copy()
        found = self._keep(choice, profile)
        price = self._unary(self.price + self.added) - self.cost
        for factor in self.tuning.polish_factors:
            self._move(self.cost + factor * price, choice, profile, self.rows.limit, self.tuning.polish_visits)
            found |= self._keep(choice, profile)
        return self._cross(choice) or found

    def _cross(self, other: Int) -> bool:
        """Takes the better parts of `other` over into the best choice."""
        if self.best is None or self.best is other:
            return False
        choice, profile = self.best.copy(), self.rows.profile(self.best)
        current = Current(choice, profile, self.rows.limit)
        taken = block_moves.cross(self.flat, Prices(self.cost, self.table), self.items, current, other)
        return taken > 0 and self._keep(choice, profile)

    def _perturb(self) -> None:
        self.idle = 0
        if self.best is None:
            return
        self.choice, self.profile = self.best.copy(), self.rows.profile(self.best)
        unary = self._unary(self.level * self.price + self.added)
        scale = self.random.choice(self.tuning.noises) * max(abs(self.best_value), 1.0) / self.network.nodes
        self._move(unary + scale * self.random.random(len(unary)), self.choice, self.profile, ANY, self.tuning.visits)

    def _unary(self, price: Floats) -> Floats:
        return self.cost + block_moves.priced(self.items, self.network.start, price)

    def _move(self, unary: Floats, choice: Int, profile: Int, limit: int, visits: float) -> None:
        nodes, portions = self.network.nodes, self.tuning.portions
        prices, current = Prices(unary, self.table), Current(choice, profile, limit)
        effort.spend(steps=portions, cells=math.ceil(visits * 4 * len(self.table)))
        for _ in range(math.ceil(visits * portions)):
            if self.left_s() <= 0:
                return
            portion = math.ceil(nodes / portions)
            block_moves.wander(portion, nodes, self.state, self.flat, prices, self.items, current)

    def _keep(self, choice: Int, profile: Int) -> bool:
        """Keeps a choice if it fits and costs less than the best."""
        value = self.value_of(choice)
        if value >= min(self.best_value, NEVER) or profile.max(initial=0) > self.rows.limit:
            return False
        self.best, self.best_value = choice.copy(), value
        return True


def as_floats(costs: Int) -> Floats:
    """Returns costs as floats, forbidden ones as `NEVER`."""
    return np.where(costs >= INF, NEVER, costs.astype(float))
