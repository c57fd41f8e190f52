"""The anytime engine: bound, round, fix, search locally, and solve ever larger parts exactly.

Two processes work at once, on two cores. In this one a `Dual` bounds the reduced network and rounds its
messages to choices, what the bounds exclude is removed and the network reduced again, and a `LocalSearch`
improves the best choice. The other, a `Child`, solves MIPs: of the strategies of least excess, of
neighbourhoods of the best choice and, once it is small enough, of the whole network.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.clock import mip_cells
from autoshard.solver.dual.dual import Dual, shifted
from autoshard.solver.exact.mip import MipAnswer
from autoshard.solver.exact.mip_process import Child
from autoshard.solver.exact.rounding_gap import close
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import Memory, memory_of, peaks_over
from autoshard.solver.presolve.consistency import settle
from autoshard.solver.presolve.memory_rows import rows_of
from autoshard.solver.primal.local_search import LocalSearch
from autoshard.solver.primal.smallest_peak import approximate_peak
from autoshard.solver.program import FORBIDDEN, Network, Program, cell_ends


@dataclass(slots=True, kw_only=True)
class Job:
    """A network that the child solves; memory rows are added as its answers break them."""

    network: Network
    memory: Memory
    whole: bool  # whether the network holds every better choice, so that its bound is the problem's
    abs_gap: int  # at which it may stop, in the network's unit
    until: float  # seconds that are left of the time when it must end
    rounds: int = 0  # how many MIPs it was so far


class Search:
    """The networks, the duals and the budgets of one search. What it finds goes to `incumbent`."""

    def __init__(self, incumbent: Incumbent, network: Network, child: Child) -> None:
        begin_s = incumbent.left_s()
        self.incumbent, self.child, self.tuning = incumbent, child, incumbent.tuning.search
        self.random = np.random.default_rng(incumbent.seed)
        constants = tuple(hinge.constant for hinge in incumbent.problem.hinges)
        self.full = network
        network, self.hinge_constant, self.shift = shifted(network, constants)
        self.dual = self._dual_of(network)
        self.local: LocalSearch | None = None
        self.events = self.dual.events  # of memory rows for MIPs
        self.job: Job | None = None
        self.neighbourhoods = 0
        self.fixed_at: int | None = None  # the objective at which was last fixed
        self.rounded = -1  # the dual's iteration whose rounding the local search knows
        self.cycle_s = 0.0  # how long the last cycle took
        self.rest = self.rested = 0  # works without a cycle: wanted, and had
        self.step_s = 2 * (begin_s - incumbent.left_s())  # the longest step that nothing interrupts, at first a guess

    def _dual_of(self, network: Network) -> Dual:
        memory = memory_of(self.incumbent.problem, network)
        return Dual(network, memory, self.hinge_constant, self.shift, self.incumbent.tuning.dual)

    # ── in this process ──────────────────────────────────────────────────────

    def climb(self, cycles: int) -> None:
        """Improves the bound and the roundings by cycles of the dual."""
        for _ in range(cycles):
            if self.incumbent.left_s() <= 0 or self.incumbent.closed():
                return
            self.dual.cycle(self.incumbent.left_s)
            if self.dual.proves_infeasible:
                self.incumbent.infeasible = self.incumbent.objective is None
                return
            self._report()

    def _report(self) -> None:
        """Tells the incumbent the dual's bound and rounding."""
        if self.dual.iterations == 0:
            return
        self.incumbent.raise_bound(self.dual.bound)
        if self.dual.failures == 0:
            self.incumbent.offer(self.dual.network.expand(self.dual.choice))

    def begin(self) -> None:
        """Finds a first choice, and multipliers that lead to better ones."""
        self.dual.improve(self.tuning.first_passes, self.incumbent.left_s)
        self._report()
        for _ in range(self.tuning.first_fit):
            if self.incumbent.objective is None:
                self.wander(1)
        for cycle in range(self.tuning.first_cycles):
            if self.incumbent.objective is None and cycle == 1:
                self.find_feasible()
            self.work(0.0)

    def wander(self, turns: int, seconds: float = 0.0) -> None:
        """Goes on with the local search for so many turns and, after them, until so many seconds have passed.

        After a run it starts again, from the dual's last rounding if that is new; at once if the incumbent is far
        from the bound. It knows the incumbent.
        """
        local, incumbent = self.local, self.incumbent
        if incumbent.left_s() <= 0:
            return
        if local is None:
            plain = linearised(self.full, self.dual.hinge_multiplier)
            rows = rows_of(memory_of(incumbent.problem, self.full))
            local = LocalSearch(plain, rows, incumbent.seed, incumbent.tuning.local_search, incumbent.left_s)
            self.local = local
        price = np.zeros(local.rows.count)
        if local.rows.count:
            row = np.maximum(np.searchsorted(local.rows.events, self.dual.events, side="right") - 1, 0)
            np.add.at(price, row, self.dual.multiplier * 2.0**-self.shift)
        local.set_prices(price)
        if incumbent.choice is not None and incumbent.objective is not None:
            own = self.full.positions(incumbent.choice)
            if (own >= 0).all():
                if local.value_of(own) < local.best_value:
                    local.start_at(own)
            elif local.best is None:  # some of its strategies are dominated
                local.go_on_from(np.maximum(own, 0))
        again = local.age >= self.tuning.run or self.far
        if local.choice is None or (again and self.rounded != self.dual.iterations):
            self.rounded = self.dual.iterations
            local.go_on_from(self.full.positions(self.dual.network.expand(self.dual.choice)))
        until = incumbent.left_s() - seconds
        while turns > 0 or incumbent.left_s() > until:
            turns -= 1
            if incumbent.left_s() <= 0 or incumbent.closed():
                return
            if local.turn() and local.best is not None:
                incumbent.offer(self.full.expand(local.best))

    def work(self, share: float = 1.0) -> None:
        """Searches locally, then takes a cycle of the dual, unless cycles gain little.

        The local search takes `share` of the time of a cycle, and at least a turn. Where a solve must be
        repeatable it takes a fixed number of turns; so it does from a new rounding while the incumbent is far from
        the bound, as each may be the first that leads near it, and takes some turns to fit.
        """
        incumbent = self.incumbent
        if incumbent.repeatable:
            self.wander(self.tuning.turns)
        else:
            fresh = self.far and self.rounded != self.dual.iterations
            self.wander(self.tuning.turns if fresh else 1, share * self.cycle_s)
        self.rested += 1
        if self.rested <= self.rest:
            return
        before, self.rested = incumbent.bound, 0
        left_s = incumbent.left_s()
        self.climb(1)
        self.cycle_s = left_s - incumbent.left_s()
        gap = (incumbent.objective or 2 * abs(before)) - before
        gained = incumbent.bound - before >= self.tuning.worthwhile * gap
        self.rest = 0 if gained else min(2 * self.rest + 1, self.tuning.longest_rest)

    def fix(self) -> None:
        """Removes the strategies and cells that no better choice than the incumbent contains, and reduces again."""
        objective = self.incumbent.objective
        if objective is None:
            return
        if self.fixed_at is not None:
            gap = self.fixed_at - self.incumbent.bound
            if self.fixed_at - objective <= self.tuning.worthwhile * gap:
                return
        begin_s = self.incumbent.left_s()
        dual = self.dual
        network = dual.residual()
        dead = dual.dead_cells(objective)
        edge_cost = network.edge_cost.copy()
        edge_cost[0][dead] = FORBIDDEN
        settled = settle(replace(network, edge_cost=edge_cost), dual.may_improve(objective), self.incumbent.left_s)
        if settled is None or dual.bound >= objective:
            self.incumbent.raise_bound(objective)  # nothing better exists
            return
        self.dual = self._dual_of(settled)
        self.dual.inherit(dual)
        self.fixed_at, self.rest = objective, 0
        self._took(begin_s)
        self.climb(1)

    def find_feasible(self) -> None:
        """Finds a choice that fits: at larger multipliers of memory rows, then by the smallest peak."""
        passes = self.incumbent.tuning.dual.resting_passes
        for factor in self.tuning.dearer:
            if self.incumbent.objective is not None or self.incumbent.left_s() <= 0:
                break
            self.dual.improve_at(factor, passes, self.incumbent.left_s)
            self._report()
        self.dual.improve_at(1.0, passes, self.incumbent.left_s)
        if self.incumbent.objective is None and self.incumbent.left_s() > 0:
            peak = approximate_peak(self.incumbent)
            if peak is not None:
                self.incumbent.offer(peak.choice)
                if self.incumbent.problem.usage_limit is not None:
                    self.incumbent.infeasible = peak.bound_bytes > self.incumbent.problem.usage_limit

    @property
    def far(self) -> bool:
        """Whether there is no incumbent near the bound."""
        return self.incumbent.gap() > self.tuning.far

    def _took(self, begin_s: float) -> None:
        """Notes the length of a step that began with so many seconds left."""
        self.step_s = max(self.step_s, begin_s - self.incumbent.left_s())

    @property
    def busy(self) -> bool:
        """Whether the child works on a job."""
        return self.job is not None

    # ── in the child ─────────────────────────────────────────────────────────

    def finite_cells(self) -> int:
        """Returns the size of the network that matters to a MIP."""
        return int((self.dual.network.edge_cost[0] < INF).sum())

    def solve_whole(self, *, limit_s: float) -> None:
        """Begins to solve the whole network."""
        network = self.dual.residual()
        self._begin(network, whole=True, abs_gap=0, limit_s=limit_s)

    def most_cells(self) -> int:
        """Returns the finite cells that the next MIP may have."""
        incumbent, tuning = self.incumbent, self.tuning
        if incumbent.counts_work:
            return min(mip_cells(incumbent.room_s()), tuning.most_cells)
        return int(min(tuning.mip_cells_per_s * incumbent.left_s(), tuning.most_cells))

    def close(self) -> None:
        """Closes the gap that the tolerances of a MIP of the whole network have left."""
        close(self.incumbent, self.dual.network, self.hinge_constant, self.shift, self.events)

    def restrict(self, cells: int) -> None:
        """Begins to solve the network of the strategies of least excess that make about `cells` cells."""
        excess, level = self.levels()
        at = min(cells, len(level) - 1)
        threshold = np.partition(level, at)[at] if len(level) else 0
        self.solve_part(excess <= threshold)

    def solve_part(self, alive: NDArray[np.bool_]) -> None:
        """Begins to solve the network of the strategies in `alive`."""
        begin_s = self.incumbent.left_s()
        network = settle(self.dual.residual(), alive, self.incumbent.left_s)
        if network is not None and int((network.edge_cost[0] < INF).sum()) <= 2 * self.tuning.most_cells:
            patience_s = max(2.0, self.tuning.mip_share * self.incumbent.time_limit_s)
            limit_s = self.incumbent.limit_s(int((network.edge_cost[0] < INF).sum()), patience_s)
            if limit_s > 0:
                self._begin(network, whole=bool(alive.all()), abs_gap=self.tolerance(), limit_s=limit_s)
        self._took(begin_s)

    def improve_neighbourhood(self, cells: int) -> None:
        """Frees a part of the network of about `cells` cells; the rest stays as the incumbent has it.

        The part is by turns a window in the nodes' order, which is that of time, and the surroundings
        of a node.
        """
        network = self.dual.network
        if self.incumbent.choice is None or len(network.edge_nodes) == 0:
            return
        own = network.positions(self.incumbent.choice)
        held = own >= 0
        alive = np.zeros(network.cost.shape[1], dtype=bool)
        alive[(network.start[:-1] + own)[held]] = True
        size = np.diff(network.edge_start)
        left, right = network.edge_nodes.T
        first = int(self.random.integers(network.nodes))
        self.neighbourhoods += 1
        order = window(network, first) if self.neighbourhoods % 2 else surroundings(network, first)
        rank = np.empty(network.nodes, dtype=np.int64)
        rank[order] = np.arange(network.nodes)
        # an edge is free once both ends are
        by_rank = np.argsort(np.maximum(rank[left], rank[right]), kind="stable")
        count = int(np.searchsorted(np.cumsum(size[by_rank]), cells))
        last = by_rank[min(count, len(by_rank) - 1)]
        free = rank <= max(rank[left[last]], rank[right[last]])
        alive |= np.repeat(free | ~held, network.sizes)
        self.solve_part(alive)

    def levels(self) -> tuple[Int, Int]:
        """Returns each strategy's excess, and each finite cell's: the larger of its ends'.

        The excess counts as 0 of strategies of the last rounding, and of an incumbent of small gap.
        """
        dual = self.dual
        network = dual.network
        excess = dual.excess()
        excess[network.start[:-1] + dual.choice] = 0
        if self.incumbent.choice is not None and not self.far:
            own = network.positions(self.incumbent.choice)
            excess[(network.start[:-1] + own)[own >= 0]] = 0
        finite = network.edge_cost[0] < INF
        _, left, right = cell_ends(network)
        return excess, np.maximum(excess[left[finite]], excess[right[finite]])

    def tolerance(self) -> int:
        """Returns the gap, in the network's unit, at which a part's MIP may stop."""
        incumbent = self.incumbent
        gap = self.tuning.first_tolerance * abs(incumbent.bound)
        if incumbent.objective is not None:
            gap = min(gap, self.tuning.tolerance * (incumbent.objective - incumbent.bound))
        return int(gap * 2.0**self.shift)

    def _begin(self, network: Network, *, whole: bool, abs_gap: int, limit_s: float) -> None:
        self.events = np.union1d(self.events, self.dual.active_events(self.tuning.new_rows))
        memory = memory_of(self.incumbent.problem, network)
        until = self.incumbent.left_s() - limit_s
        self.job = Job(network=network, memory=memory, whole=whole, abs_gap=abs_gap, until=until)
        self._submit(self.job)

    def _submit(self, job: Job) -> None:
        program = Program(
            network=job.network,
            usage=job.memory.coefficients(self.events),
            base=np.zeros(len(self.events), dtype=np.int64),
            limit=job.memory.limit,
            hinge_constant=self.hinge_constant,
        )
        limit_s = max(self.incumbent.limit_s(program.cells, self.incumbent.left_s() - job.until), self.tuning.nap_s)
        self.child.submit(program, time_limit_s=limit_s, abs_gap=job.abs_gap, seed=self.incumbent.seed)
        job.rounds += 1

    def collect(self, wait_s: float) -> MipAnswer | None:
        """Returns the job's last answer, whose choice was offered; None while the job goes on."""
        assert self.job is not None
        job = self.job
        answer = self.child.answer(wait_s)
        if answer is None:
            return None
        if answer.choice is not None and not self.incumbent.offer(job.network.expand(answer.choice)):
            over = peaks_over(job.memory.profile(answer.choice), job.memory.limit, self.tuning.new_rows)
            more = np.union1d(self.events, over)
            left_s = self.incumbent.left_s()
            again = job.rounds < self.tuning.row_rounds and left_s > (0.0 if self.incumbent.counts_work else job.until)
            if len(more) > len(self.events) and again:
                self.events = more
                self._submit(job)
                return None
            answer = replace(answer, finished=False)
        self.job = None
        if job.whole:
            self._conclude(answer)
        return answer

    def _conclude(self, answer: MipAnswer) -> None:
        """Tells the incumbent what an answer for the whole network proves."""
        if answer.infeasible:
            if self.incumbent.objective is None:
                self.incumbent.infeasible = True
            else:
                self.incumbent.raise_bound(self.incumbent.objective)
        elif answer.bound is not None:
            bound = -((-answer.bound) >> self.shift) if self.shift >= 0 else answer.bound << -self.shift
            self.incumbent.raise_bound(bound)


def linearised(network: Network, multiplier: NDArray[np.float64]) -> Network:
    """Returns the network with its hinges added to layer 0 at fixed multipliers, rounded."""
    if not len(multiplier):
        return network
    cost = network.cost[0] + np.rint(multiplier @ network.cost[1:]).astype(np.int64)
    edge_cost = network.edge_cost[0] + np.rint(multiplier @ network.edge_cost[1:]).astype(np.int64)
    return replace(
        network,
        cost=np.where(network.cost[0] >= INF, FORBIDDEN, cost)[None],
        edge_cost=np.where(network.edge_cost[0] >= INF, FORBIDDEN, edge_cost)[None],
    )


def window(network: Network, first: int) -> Int:
    """Returns all nodes by their distance from `first` in the nodes' order."""
    return np.argsort(np.abs(np.arange(network.nodes) - first), kind="stable")


def surroundings(network: Network, first: int) -> Int:
    """Returns all nodes breadth first from `first`; those that it does not reach last."""
    flat = network.flat()
    seen = np.zeros(network.nodes, dtype=bool)
    seen[first] = True
    order, at = [first], 0
    while at < len(order):
        v = order[at]
        for w in (network.edge_nodes[flat.near[flat.near_start[v] : flat.near_start[v + 1]]].sum(axis=1) - v).tolist():
            if not seen[w]:
                seen[w] = True
                order.append(w)
        at += 1
    return np.concatenate([np.array(order, dtype=np.int64), np.flatnonzero(~seen)])


def solve_by_search(incumbent: Incumbent, network: Network) -> None:
    """Solves the problem in `incumbent`, which was reduced to `network`, as well as time allows."""
    child = Child(incumbent.tuning.mip_process)
    try:
        child.start()
        run(Search(incumbent, network, child))
    finally:
        child.close()


def run(search: Search) -> None:
    """Searches until the gap is closed, or time or rounds run out."""
    incumbent, tuning = search.incumbent, search.tuning
    search.begin()
    cells = part = float(tuning.first_cells_of_work if incumbent.counts_work else tuning.first_cells)
    rounds, tried = 0, (-1, None)  # `tried`: the last network solved whole, by size and objective
    while incumbent.left_s() > 0 and not incumbent.closed() and rounds != incumbent.rounds:
        if incumbent.left_s() < search.step_s:
            search.work()
            continue
        most = search.most_cells()
        if incumbent.counts_work and most < tuning.least_cells:
            search.work()
            continue
        rounds += 1
        cells, part = min(cells, most), min(part, most)
        if incumbent.objective is None:
            search.find_feasible()
        search.fix()
        if incumbent.closed():
            return
        size = search.finite_cells()
        whole = size <= min(tuning.whole_cells, most) and (size, search.fixed_at) != tried
        widens = bool(rounds % 2) or incumbent.objective is None
        if whole:
            tried = (size, search.fixed_at)
            search.solve_whole(limit_s=incumbent.limit_s(size, tuning.whole_share * incumbent.left_s()))
        elif widens:
            search.restrict(int(cells))
        else:
            search.improve_neighbourhood(int(part))
        finished = finish(search)
        if whole and finished and incumbent.objective == search.fixed_at:
            search.close()
            return
        if widens:
            cells *= tuning.growth if finished else 1 / tuning.growth
        else:
            part *= tuning.growth if finished else 1 / tuning.growth


def finish(search: Search) -> bool:
    """Works while the child solves its job; returns whether that finished.

    Under a budget of rounds the work is the same every time; else it goes on as long as the job.
    """
    incumbent = search.incumbent
    if not search.busy:
        search.work()
        return True
    worked = False
    while incumbent.left_s() > 0 and not (incumbent.reached if incumbent.counts_work else incumbent.closed()):
        if not incumbent.repeatable or not worked:
            search.work()
            worked = True
            wait_s = 0.0
        else:
            wait_s = search.tuning.nap_s
        answer = search.collect(wait_s)
        if not search.busy:
            return answer is not None and (answer.finished or answer.infeasible)
    return False
