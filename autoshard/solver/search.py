"""The anytime engine: bound, round, fix, and solve ever larger parts exactly.

A `Dual` bounds the reduced network and rounds. What its bounds exclude is removed and the network
reduced again, which sharpens the bound in turn. Restricted MIPs over the strategies of least
excess find choices; neighbourhood MIPs improve the best one. Once the network is small enough, one
MIP finishes.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.bound import RESTING, Dual, shifted
from autoshard.solver.exact import MipAnswer, solve_program
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.peak import approximate_peak
from autoshard.solver.presolve import neighbours, presolve, settle
from autoshard.solver.program import FORBIDDEN, Network, Program, cell_ends
from autoshard.solver.usage import memory_of, peaks_over

FIRST_CYCLES = 10  # of the dual, before the first MIP
EXACT_CELLS = 40_000  # a network of so few finite cells is solved whole
FIRST_CELLS = 20_000  # of the first restricted MIP
GROWTH = 1.6
MIP_S = 0.15  # of the time limit, the longest a restricted MIP may take
FAR = 0.05  # gap of an incumbent whose strategies are not worth a place in a part's MIP
FIRST_TOLERANCE, TOLERANCE = 2e-4, 0.05  # of a part's MIP: of the bound, of the gap
MARGIN = 0.02  # of the time limit, kept from MIPs because they overrun
MIP_CELLS_PER_S = 8_000  # of the time left: HiGHS reads, and looks at the clock, only so fast
PATIENT = 8  # rounds in which such an incumbent is not worth improving in neighbourhoods
ROW_ROUNDS = 6  # MIPs in a row that add memory rows
NEW_ROWS = 8
WHOLE = 0.6  # of the time left, for a MIP of the whole network
DEARER = (1.1, 1.3, 2.0, 4.0)  # factors on the multipliers while nothing fits


class Search:
    """Networks, duals and budgets of one search; the results go to `incumbent`."""

    def __init__(self, incumbent: Incumbent, network: Network) -> None:
        self.incumbent = incumbent
        self.random = np.random.default_rng(incumbent.seed)
        constants = tuple(hinge.constant for hinge in incumbent.problem.hinges)
        network, self.hinge_constant, self.shift = shifted(network, constants)
        self.dual = self._dual_of(network)
        self.events = self.dual.events  # of memory rows for MIPs
        self.turn = 0  # of neighbourhoods
        self.fixed_at: int | None = None  # the objective at which was last fixed

    def _dual_of(self, network: Network) -> Dual:
        memory = memory_of(self.incumbent.problem, network)
        return Dual(network, memory, self.hinge_constant, self.shift)

    def climb(self, cycles: int) -> None:
        """Improves bound and roundings."""
        for _ in range(cycles):
            if self.incumbent.left_s() <= 0 or self.incumbent.closed():
                return
            self.dual.cycle()
            if self.dual.proves_infeasible:
                self.incumbent.infeasible = self.incumbent.objective is None
                return
            self.incumbent.raise_bound(self.dual.bound)
            if self.dual.failures == 0:
                self.incumbent.offer(self.dual.network.expand(self.dual.choice))

    def fix(self) -> None:
        """Removes what no better choice than the incumbent contains, and reduces again."""
        objective = self.incumbent.objective
        if objective is None:
            return
        dual = self.dual
        network = dual.residual()
        dead = dual.dead_cells(objective)
        edge_cost = network.edge_cost.copy()
        edge_cost[0][dead] = FORBIDDEN
        settled = settle(replace(network, edge_cost=edge_cost), dual.may_improve(objective))
        if settled is None or dual.bound >= objective:
            self.incumbent.raise_bound(objective)  # nothing better exists
            return
        self.dual = self._dual_of(settled)
        self.dual.inherit(dual)
        self.fixed_at = objective

    def finite_cells(self) -> int:
        return int((self.dual.network.edge_cost[0] < INF).sum())

    def solve_whole(self, *, limit_s: float) -> bool:
        """Solves the network as it is by one MIP; returns whether that settled the problem."""
        answer = self.solve(self.dual.residual(), limit_s=limit_s)
        self._conclude(answer)
        return answer.finished

    def _conclude(self, answer: MipAnswer) -> None:
        """Takes over what an answer for the whole network proves."""
        if answer.infeasible:
            if self.incumbent.objective is None:
                self.incumbent.infeasible = True
            else:
                self.incumbent.raise_bound(self.incumbent.objective)
        elif answer.bound is not None:
            bound = -((-answer.bound) >> self.shift) if self.shift >= 0 else answer.bound << -self.shift
            self.incumbent.raise_bound(bound)

    def solve(self, network: Network, *, limit_s: float, abs_gap: int = 0) -> MipAnswer:
        """Solves `network` by a MIP whose memory rows are added as they are violated.

        Offers what it finds. The answer's bound holds for `network`.
        """
        memory = memory_of(self.incumbent.problem, network)
        self.events = np.union1d(self.events, self.dual.active_events(NEW_ROWS))
        deadline = self.incumbent.left_s() - limit_s
        answer = MipAnswer(choice=None, bound=None, infeasible=False, finished=False)
        for _ in range(ROW_ROUNDS):
            program = Program(
                network=network,
                usage=memory.coefficients(self.events),
                base=np.zeros(len(self.events), dtype=np.int64),
                limit=memory.limit,
                hinge_constant=self.hinge_constant,
            )
            answer = solve_program(
                program,
                time_limit_s=self.incumbent.left_s() - max(deadline, MARGIN * self.incumbent.time_limit_s),
                abs_gap=abs_gap,
                seed=self.incumbent.seed,
            )
            if answer.choice is None or self.incumbent.offer(network.expand(answer.choice)):
                return answer
            over = peaks_over(memory.profile(answer.choice), memory.limit, NEW_ROWS)
            more = np.union1d(self.events, over)
            if len(more) == len(self.events) or self.incumbent.left_s() <= deadline:
                break
            self.events = more
        return replace(answer, finished=False)

    def levels(self) -> tuple[Int, Int]:
        """Returns each strategy's excess, and each finite cell's: the larger of its ends'.

        Strategies of the last rounding, and of an incumbent that is not far off, count as 0.
        """
        dual = self.dual
        network = dual.network
        excess = dual.excess()
        excess[network.start[:-1] + dual.choice] = 0
        own = self.incumbent_positions()
        if own is not None and self.incumbent.gap() <= FAR:
            excess[own] = 0
        finite = network.edge_cost[0] < INF
        _, left, right = cell_ends(network)
        return excess, np.maximum(excess[left[finite]], excess[right[finite]])

    def tolerance(self) -> int:
        """Returns the gap, in the network's unit, at which a part's MIP may stop."""
        incumbent = self.incumbent
        gap = FIRST_TOLERANCE * abs(incumbent.bound)
        if incumbent.objective is not None:
            gap = min(gap, TOLERANCE * (incumbent.objective - incumbent.bound))
        return int(gap * 2.0**self.shift)

    def incumbent_positions(self) -> Int | None:
        """Returns the strategies (global numbers) that the incumbent has in the network, where it has."""
        choice = self.incumbent.choice
        if choice is None:
            return None
        network = self.dual.network
        # a root's strategy is right if every node of the problem follows as the incumbent says
        wrong = np.zeros(network.cost.shape[1], dtype=np.int64)
        length = np.diff(network.follows_start)
        node = np.repeat(np.arange(len(network.root)), length)
        local = np.arange(len(network.follows)) - np.repeat(network.follows_start[:-1], length)
        np.add.at(wrong, network.start[network.root[node]] + local, network.follows != choice[node])
        return np.flatnonzero(wrong == 0)

    def restrict(self, cells: int) -> bool:
        """Solves the strategies of least excess that make about `cells` cells.

        Returns whether the MIP finished in its time.
        """
        excess, level = self.levels()
        at = min(cells, len(level) - 1)
        threshold = np.partition(level, at)[at] if len(level) else 0
        return self.solve_part(excess <= threshold)

    def solve_part(self, alive: NDArray[np.bool_]) -> bool:
        """Solves the network of the strategies in `alive`; returns whether the MIP finished."""
        network = settle(self.dual.residual(), alive)
        if network is None:
            return True
        limit_s = min(self.incumbent.left_s(), max(2.0, MIP_S * self.incumbent.time_limit_s))
        answer = self.solve(network, limit_s=limit_s, abs_gap=self.tolerance())
        if alive.all():
            self._conclude(answer)
        return answer.finished

    def improve_neighbourhood(self, cells: int) -> bool:
        """Frees a part of the network of about `cells` cells; the rest stays as the incumbent has it.

        The parts are by turns windows in the nodes' order (which is that of time) and
        surroundings of a node. Returns whether the MIP finished in its time.
        """
        network = self.dual.network
        own = self.incumbent_positions()
        if own is None or len(network.edge_nodes) == 0:
            return True
        alive = np.zeros(network.cost.shape[1], dtype=bool)
        alive[own] = True
        held = np.add.reduceat(alive, network.start[:-1]) > 0
        size = np.diff(network.edge_start)
        left, right = network.edge_nodes.T
        first = int(self.random.integers(network.nodes))
        self.turn += 1
        order = window(network, first) if self.turn % 2 else surroundings(network, first)
        rank = np.empty(network.nodes, dtype=np.int64)
        rank[order] = np.arange(network.nodes)
        # an edge is free once both ends are
        by_rank = np.argsort(np.maximum(rank[left], rank[right]), kind="stable")
        count = int(np.searchsorted(np.cumsum(size[by_rank]), cells))
        last = by_rank[min(count, len(by_rank) - 1)]
        free = rank <= max(rank[left[last]], rank[right[last]])
        alive |= np.repeat(free | ~held, network.sizes)
        return self.solve_part(alive)

    def find_feasible(self) -> None:
        """Finds a choice that fits: rounds at higher and higher prices of memory, then for least peak."""
        for factor in DEARER:
            self.dual.improve_at(factor, RESTING)
            if self.dual.failures == 0 and self.incumbent.offer(self.dual.network.expand(self.dual.choice)):
                break
        self.dual.improve_at(1.0, RESTING)
        if self.incumbent.objective is None:
            peak = approximate_peak(self.incumbent)
            if peak is not None:
                self.incumbent.offer(peak.choice)


def window(network: Network, first: int) -> Int:
    """Returns all nodes by their distance from `first` in the nodes' order."""
    return np.argsort(np.abs(np.arange(network.nodes) - first), kind="stable")


def surroundings(network: Network, first: int) -> Int:
    """Returns all nodes breadth first from `first`; those that it does not reach last."""
    start, near = neighbours(network)
    seen = np.zeros(network.nodes, dtype=bool)
    seen[first] = True
    order, at = [first], 0
    while at < len(order):
        v = order[at]
        for w in (network.edge_nodes[near[start[v] : start[v + 1]]].sum(axis=1) - v).tolist():
            if not seen[w]:
                seen[w] = True
                order.append(w)
        at += 1
    return np.concatenate([np.array(order, dtype=np.int64), np.flatnonzero(~seen)])


def solve_by_search(incumbent: Incumbent) -> str:
    """Solves the problem in `incumbent` as well as time allows; returns the engine's name."""
    network = presolve(incumbent.problem)
    if network is None:
        incumbent.infeasible = True
        return "arc consistency"
    memory = memory_of(incumbent.problem, network)
    if memory.least().max(initial=0) > memory.limit and incumbent.problem.usage_limit is not None:
        incumbent.infeasible = True
        return "least usage"
    search = Search(incumbent, network)
    search.climb(FIRST_CYCLES)
    cells, part = float(FIRST_CELLS), float(FIRST_CELLS)
    rounds, tried = 0, -1  # `tried`: the size of the last network solved whole
    while incumbent.left_s() > 0 and not incumbent.closed() and rounds != incumbent.rounds:
        rounds += 1
        most = MIP_CELLS_PER_S * incumbent.left_s()
        cells, part = min(cells, most), min(part, most)
        if incumbent.objective is None:
            search.find_feasible()
        if incumbent.objective is not None and incumbent.objective != search.fixed_at:
            search.fix()
            search.climb(2)
        elif rounds > 1 and rounds % 2:
            search.climb(2)
        if incumbent.closed():
            break
        size = search.finite_cells()
        if size <= EXACT_CELLS and size != tried:
            tried = size
            if search.solve_whole(limit_s=WHOLE * incumbent.left_s()):
                break
        elif rounds % 2 or (incumbent.gap() > FAR and rounds < PATIENT):
            cells *= GROWTH if search.restrict(int(cells)) else 1 / GROWTH
        else:
            part *= GROWTH if search.improve_neighbourhood(int(part)) else 1 / GROWTH
    return "search"
