r"""Problems with hinges: multipliers turn hinges into costs, and exact search closes what they leave open.

A hinge is $\max(0, h) = \max_{0 \le \lambda \le 1} \lambda h$. At fixed multipliers $\lambda$ the
problem is a plain network, which reduces far more than one with hinges. Message passing mostly proves its
optimum $L(\lambda)$. L is concave, and each choice x bounds it from above by the plane $c(x) + \lambda
h(x)$, so that Kelley's method (1960) climbs to its maximum in a few steps.

What remains is the duality gap. At the best multipliers $\lambda^*$, message passing bounds from below
every choice that contains a given strategy or cell. Strategies and cells whose bounds reach a *target* a
little above $L(\lambda^*)$ go. Label elimination solves the rest or, where it grows too large, a MIP does.
Every choice that is not in the rest costs at least the target, which rises until the gap is closed.

Memory rows join once a choice breaks them: with multipliers of their own in the climb, as constraints in
the search.

All bounds are sums of integers: multipliers are multiples of $2^{-20}$, and products are rounded down.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from autoshard.problem.network import INF, Hinge, Int, Problem
from autoshard.solver.clock import Clock, endless
from autoshard.solver.dual.dual import ROUNDING, Dual, plain_dual, settled_dual, shifted
from autoshard.solver.exact.bucket_elimination import eliminate_all, order_by_size
from autoshard.solver.exact.label_elimination import layer_sums, objective_of, solve_by_labels
from autoshard.solver.exact.mip import MipAnswer, highest_point
from autoshard.solver.exact.mip_process import solve_for
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.memory import Memory, memory_of, peaks_over
from autoshard.solver.presolve.consistency import presolve, settle
from autoshard.solver.presolve.elimination import Core, reduce
from autoshard.solver.program import FORBIDDEN, Network, Program
from autoshard.solver.solution import Engine
from autoshard.solver.tuning import SolverTuning

MULTIPLIER_BITS = 20
ROUNDED_OFF = 1e-12  # relative gap that integer messages leave
ROW_BITS = 54  # no row's form exceeds 2^54, whatever the choice, nor all of them 2^57
EMPTY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """A network and linear forms of its choices: its hinges, then memory rows (see `row_forms`)."""

    network: Network
    constants: tuple[int, ...]  # of hinges, then of rows
    rows: Int  # rows, strategies; in units of cost

    def priced(self, multiplier: Int) -> Network:
        """Returns the plain network at fixed multipliers: a choice that fits costs at most what it costs with hinges.

        There is a multiplier per form, in units of 2^-20.
        """
        net = self.network
        cost, edge_cost, offset = net.cost[0].copy(), net.edge_cost[0].copy(), net.offset
        layers = [*net.cost[1:], *self.rows]
        for form, m in enumerate(multiplier.tolist()):
            if m:
                cost += product(m, layers[form])
                if form + 1 < len(net.edge_cost):
                    edge_cost += product(m, net.edge_cost[form + 1])
                offset += (m * self.constants[form]) >> MULTIPLIER_BITS
        return replace(
            net,
            cost=np.where(net.cost[0] >= INF, FORBIDDEN, cost)[None],
            edge_cost=np.where(net.edge_cost[0] >= INF, FORBIDDEN, edge_cost)[None],
            offset=offset,
        )

    def plane(self, choice: Int) -> list[int]:
        """Returns what a finite choice costs without hinges, and the value of each form under it."""
        cost, *hinges = layer_sums(self.network, choice)
        strategy = self.network.start[:-1] + choice
        values = [*hinges, *(int(row[strategy].sum()) for row in self.rows)]
        forms = [value + constant for value, constant in zip(values, self.constants, strict=True)]
        return [cost + self.network.offset, *forms]


@dataclass(slots=True, kw_only=True)
class Hinged:
    """A reduced network in shifted units, its hinges' constants, and where results go."""

    incumbent: Incumbent
    network: Network
    constants: tuple[int, ...]
    shift: int  # costs are shifted left by so many bits
    events: Int  # of the memory rows that have multipliers
    row_scale: float = 0.0  # cost per byte above the limit at a multiplier of one

    def forms(self, network: Network, constants: tuple[int, ...], usage: Int, base: Int) -> Forms:
        """Returns the forms of a network whose memory rows are `usage` and `base`."""
        rows, row_constants = row_forms(usage, base, self.incumbent.problem.usage_limit or 0, self.row_scale)
        return Forms(network=network, constants=(*constants, *row_constants), rows=rows)

    def forms_of(self, network: Network) -> Forms:
        """Returns the forms of `network`, to which the problem was reduced."""
        usage = memory_of(self.incumbent.problem, network).coefficients(self.events)
        return self.forms(network, self.constants, usage, np.zeros(len(usage), dtype=np.int64))

    def dual_of(self, forms: Forms, multiplier: Int) -> Dual:
        """Returns message passing over forms at fixed multipliers, as good as its cycles make it."""
        incumbent = self.incumbent
        return settled_dual(forms.priced(multiplier), self.shift, incumbent.tuning.dual, incumbent.left_s)

    def bound_of(self, shifted_bound: int) -> int:
        """Returns a bound in shifted units as a bound in the problem's unit."""
        return -((-shifted_bound) >> self.shift) if self.shift >= 0 else shifted_bound << -self.shift

    def climb(self) -> Int | None:
        """Returns multipliers near the maximum of L; None if no finite choice exists.

        Raises the incumbent's bound to L, and offers every choice met on the way.
        """
        tuning = self.incumbent.tuning
        most_rows, rows_per_step = tuning.hinges.priced_rows, tuning.hinges.rows_per_step
        memory = memory_of(self.incumbent.problem, self.network)
        multiplier = np.zeros(len(self.constants), dtype=np.int64)
        best, best_multiplier = -FORBIDDEN, multiplier
        choices: list[Int] = []
        forms = self.forms_of(self.network)
        for _ in range(tuning.hinges.steps):
            answer = minimum(forms.priced(multiplier), tuning, self.incumbent.left_s)
            if answer is None:
                return None
            bound, choice = answer
            if bound > best:
                best, best_multiplier = bound, multiplier
                self.incumbent.raise_bound(self.bound_of(bound))
            if choice is not None:
                self.incumbent.offer(self.network.expand(choice))
            if choice is None or self.incumbent.closed() or self.incumbent.left_s() <= 0:
                break
            choices.append(choice)
            over = peaks_over(memory.profile(choice), memory.limit, most_rows) if len(memory.times) else EMPTY
            over = over[~np.isin(over, self.events)][: min(rows_per_step, most_rows - len(self.events))]
            if len(over):
                self.add_rows(over, best)
                forms = self.forms_of(self.network)
                best_multiplier = np.pad(best_multiplier, (0, len(over)))
                multiplier = np.pad(multiplier, (0, len(over)))
            peak = highest_point(np.array([forms.plane(met) for met in choices], dtype=float))
            if peak is None:
                break
            top, place = peak
            following = np.rint(place * 2**MULTIPLIER_BITS).astype(np.int64)
            if top - best <= tuning.dual.flat_gain * abs(top) or (following == multiplier).all():
                break
            multiplier = following
        return best_multiplier

    def add_rows(self, events: Int, bound: int) -> None:
        """Gives multipliers to the memory rows at `events`; `bound` sets their scale, once."""
        problem = self.incumbent.problem
        if not len(self.events):
            limit = max(problem.usage_limit or 0, 1)
            row_cost = self.incumbent.tuning.hinges.row_cost
            most = int(np.maximum.reduceat(problem.usage, problem.use_start[:-1]).sum())
            self.row_scale = min(row_cost * max(abs(bound), 1) / limit, 2.0**ROW_BITS / max(most, 1))
        self.events = np.concatenate([self.events, events])

    def close(self, multiplier: Int, *, patience_s: float) -> bool:
        """Solves what targets leave open until the gap is as asked; returns whether it is."""
        incumbent, tuning = self.incumbent, self.incumbent.tuning.hinges
        deadline = incumbent.left_s() - patience_s
        dual = self.dual_of(self.forms_of(self.network), multiplier)
        incumbent.raise_bound(dual.bound)
        distance = max(int(tuning.first_distance * abs(dual.bound)), 1)
        events = self.events
        for _ in range(tuning.targets):
            if incumbent.closed() or self.is_over(deadline):
                break
            target = dual.bound + distance
            if incumbent.objective is not None:
                target = min(target, incumbent.objective)
            rest = self.narrowed(dual, multiplier, target)
            if rest is None:
                incumbent.raise_bound(target)
            else:
                bound, events = self.solve_rest(rest, multiplier, target, events, deadline)
                if bound is None:
                    return False
                incumbent.raise_bound(bound)
                if bound < target and not incumbent.closed():
                    return False  # as far as the tolerances of the MIP allow
            distance *= tuning.growth
        return incumbent.closed()

    def is_over(self, deadline: float) -> bool:
        """Whether nothing more is to be begun: `deadline` seconds are left or, where work decides, what is spared."""
        incumbent = self.incumbent
        if not incumbent.counts_work:
            return incumbent.left_s() <= max(deadline, 0.0)
        return incumbent.left_s() <= 0.0 or (not incumbent.would_do and incumbent.to_end_s() <= self.spare_s)

    @property
    def spare_s(self) -> float:
        """The work that is left to the search."""
        return self.incumbent.tuning.hinges.spare * self.incumbent.work_s

    def narrowed(self, dual: Dual, multiplier: Int, target: int) -> Network | None:
        """Returns the network of what choices cheaper than `target` can contain; None if there are no such choices."""
        network = self.network
        for again in range(self.incumbent.tuning.hinges.narrowings):
            if again:
                dual = self.dual_of(self.forms_of(network), multiplier)
            edge_cost = network.edge_cost.copy()
            edge_cost[0][dual.dead_cells(target)] = FORBIDDEN
            settled = settle(replace(network, edge_cost=edge_cost), dual.may_improve(target), self.incumbent.left_s)
            if settled is None or dual.bound >= target:
                return None
            network = settled
        return network

    def solve_rest(
        self, rest: Network, multiplier: Int, target: int, events: Int, deadline: float
    ) -> tuple[int | None, Int]:
        """Solves `rest` with memory rows as they bind; offers what it finds.

        Returns a bound on all choices, given that others cost at least `target` (None if the MIP
        is too large or does not finish), and the memory rows in use, by their events.
        """
        incumbent = self.incumbent
        memory = memory_of(incumbent.problem, rest)
        while not self.is_over(deadline):
            core = Core(as_problem(rest, self.constants, memory, events), np.arange(len(events)))
            reduce(core, incumbent.tuning.presolve, incumbent.left_s)
            if not core.feasible:
                return target, events
            program, names = core.program()
            answer = self.solve_core(program, multiplier, target, incumbent.left_s() - deadline)
            if answer is None:
                return None, events
            if answer.infeasible:
                return target, events
            assert answer.choice is not None
            assert answer.bound is not None
            choice = core.expand(dict(zip(names, answer.choice.tolist(), strict=True)))
            if incumbent.offer(rest.expand(choice)):
                return min(target, answer.bound), events
            over = peaks_over(memory.profile(choice), memory.limit, incumbent.tuning.hinges.new_rows)
            more = np.concatenate([events, over[~np.isin(over, events)]])
            if len(more) == len(events):
                return None, events
            events = more
        return None, events

    def solve_core(self, program: Program, multiplier: Int, target: int, patience_s: float) -> MipAnswer | None:
        """Returns the best choice cheaper than `target` and a bound, in the problem's unit.

        None if labels are too many, and the MIP too large or too slow.
        """
        count = len(self.events)
        forms = self.forms(program.network, program.hinge_constant, program.usage[:count], program.base[:count])
        incumbent, dual = self.incumbent, self.dual_of(forms, multiplier)
        room = (target << self.shift if self.shift >= 0 else (target >> -self.shift) + 1) - dual.constant
        labels = solve_by_labels(program, dual, room, incumbent.tuning.tables, incumbent.left_s)
        if labels is not None:
            if labels.choice is None:
                return MipAnswer(choice=None, bound=target, infeasible=True, finished=True)
            bound = self.bound_of(objective_of(program, labels.choice))
            return MipAnswer(choice=labels.choice, bound=bound, infeasible=False, finished=True)
        limit_s = incumbent.limit_s(program.cells, patience_s, self.spare_s)
        if program.cells > incumbent.tuning.hinges.mip_cells or limit_s <= 0:
            return None
        answer = solve_for(incumbent, program, limit_s=limit_s)
        if answer.infeasible:
            return answer
        if answer.choice is None or answer.bound is None or not answer.finished:
            return None
        return replace(answer, bound=self.bound_of(answer.bound))


def solve_hinged(incumbent: Incumbent, *, patience_s: float) -> Engine | None:
    """Solves the problem in `incumbent`, which has hinges; returns the engine, or None if it gave up.

    What it found is kept. `patience_s` limits its MIPs together (see `Incumbent.limit_s`).
    """
    network = presolve(incumbent.problem, incumbent.left_s)
    if network is None:
        incumbent.infeasible = True
        return Engine.CONSISTENCY
    network, constants, shift = shifted(network, tuple(hinge.constant for hinge in incumbent.problem.hinges))
    hinged = Hinged(incumbent=incumbent, network=network, constants=constants, shift=shift, events=EMPTY)
    multiplier = hinged.climb()
    if multiplier is None:
        incumbent.infeasible = True
        return Engine.ELIMINATION
    if incumbent.closed():
        return Engine.MULTIPLIERS
    if incumbent.objective is None and (multiplier[len(constants) :] == 2**MULTIPLIER_BITS).any():
        return None  # memory has no price: most likely nothing fits
    return Engine.LABELS if hinged.close(multiplier, patience_s=patience_s) else None


def row_forms(usage: Int, base: Int, limit: int, scale: float) -> tuple[Int, tuple[int, ...]]:
    """Returns memory rows as forms in units of cost, and their constants.

    Entries are rounded down and the limit up, by more than the rounding of doubles, so that a
    choice that fits keeps each form at most zero.
    """
    rows = np.floor(usage * scale).astype(np.int64)
    room = [math.ceil(max(limit - b, 0) * scale * ROUNDING) + 1 for b in base.tolist()]
    return rows, tuple(-r for r in room)


def product(multiplier: int, values: Int) -> Int:
    """Returns ⌊multiplier · values / 2^20⌋, exactly, for multipliers up to 2^20."""
    high, low = values >> MULTIPLIER_BITS, values & (2**MULTIPLIER_BITS - 1)
    return multiplier * high + ((multiplier * low) >> MULTIPLIER_BITS)


def minimum(network: Network, tuning: SolverTuning, left_s: Clock = endless) -> tuple[int, Int | None] | None:
    """Returns a bound on every choice of a plain network and, mostly, a choice that attains it.

    None if no finite choice exists.
    """
    core = Core(as_problem(network), EMPTY)
    reduce(core, tuning.presolve, left_s)
    if not core.feasible:
        return None
    program, names = core.program()
    dual = plain_dual(program.network, 0, tuning.dual)
    position: dict[int, int] | None = None
    least = FORBIDDEN
    resting = 0  # looks in a row at which the bound had not risen
    for _ in range(tuning.hinges.looks):
        before = dual.best
        dual.improve(tuning.hinges.passes, left_s)
        if dual.failures == 0 and dual.iterations > 0:
            value = layer_sums(program.network, dual.choice)[0] + program.network.offset
            if value < least:
                position, least = dict(zip(names, dual.choice.tolist(), strict=True)), value
        resting = 0 if dual.best > before else resting + 1
        rested = resting == tuning.hinges.rested_looks
        if least - dual.best <= ROUNDED_OFF * abs(least) or dual.proves_infeasible or rested:
            break
    bound = dual.best
    if bound < least and left_s() > 0 and order_by_size(core, tuning.tables)[2] <= tuning.hinges.elimination_work:
        try:
            exact = eliminate_all(core, tuning.tables, left_s)
        except ValueError:
            return None
        if exact is not None:
            choice = core.expand(exact)
            return layer_sums(network, choice)[0] + network.offset, choice
    return bound, None if position is None else core.expand(position)


def as_problem(
    network: Network, constants: tuple[int, ...] = (), memory: Memory | None = None, events: Int = EMPTY
) -> Problem:
    """Returns a network as a problem; memory row r of `events` becomes time point r."""
    hinges: list[Hinge] = []
    for h, constant in enumerate(constants, start=1):
        strategy, cell = np.flatnonzero(network.cost[h]), np.flatnonzero(network.edge_cost[h])
        hinges.append(
            Hinge(
                strategy=strategy,
                strategy_coef=network.cost[h][strategy],
                cell=cell,
                cell_coef=network.edge_cost[h][cell],
                constant=constant,
            )
        )
    usage = EMPTY if memory is None else memory.coefficients(events).reshape(-1)
    rows = len(events)
    time = np.repeat(np.arange(rows), network.nodes)
    use_node = np.tile(np.arange(network.nodes), rows)
    return Problem(
        start=network.start,
        cost=network.cost[0],
        edge_nodes=network.edge_nodes,
        edge_start=network.edge_start,
        edge_cost=network.edge_cost[0],
        use_node=use_node,
        use_interval=np.stack([time, time + 1], axis=1),
        use_start=np.concatenate([[0], np.cumsum(network.sizes[use_node])]).astype(np.int64),
        usage=usage,
        usage_limit=None if memory is None else memory.limit,
        hinges=tuple(hinges),
        offset=network.offset,
    )
