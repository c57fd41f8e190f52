r"""The exact engine: a program as a mixed-integer program in flow form; the only room with OR-Tools.

A variable per strategy (integer, one per node chosen) and a flow per finite cell, whose margins
are the strategies: $\sum_j y_{ij} = x_i$, $\sum_i y_{ij} = x_j$. Its LP relaxation is the
strongest that looks at one edge at a time (Schlesinger 1976). Hinges are variables $\ge 0$.

Costs become floats only here, scaled; the objective of the answer is priced again in integers
and the bound is rounded down by more than the engine's tolerances.
"""

import datetime
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import INF, Int
from autoshard.solver.program import Program, cell_ends
from autoshard.solver.silence import silenced

SCALED_LARGEST = 1e6  # the largest cost that HiGHS sees
SCALED_USAGE = 1e3  # the largest usage that HiGHS sees
SCALED_PLANE, SMALLEST_SLOPE = 1e3, 1e-6  # the largest number that GLOP sees, and the least
# HiGHS's dual feasibility tolerance is 1e-7 in scaled units; every node and edge carries one unit of
# flow, so the sum of such errors is at most this much each. The rest covers the rounding of doubles
# (1e-16 each) in sums of up to ten thousand terms.
DUAL_TOLERANCE = 1e-7
SUM_TOLERANCE = 1e-12

# HiGHS stops with an internal error (`HighsStatus: kError`) on about one small model in a thousand,
# which ortools 9.15 raises as an AttributeError of its own status type. SCIP then takes over.
HIGHS_ERRORS = (AttributeError, RuntimeError)

# HiGHS's presolve replaces one variable of x + y = 1 by the other. In a program of 2,450 cells (one layer of Mixtral on
# 4 x 8 GPUs) it did so without end, so that rule is left out: bit 9 of those that may be.
DOUBLETON_EQUATIONS = 1 << 9


@dataclass(frozen=True, slots=True, kw_only=True)
class MipAnswer:
    """`choice` per node (None if none was found) and a bound, in the program's unit.

    `bound` is None if the engine has none.
    """

    choice: Int | None
    bound: int | None
    infeasible: bool  # proven: no choice satisfies the rows given
    finished: bool  # the engine closed its gap, within tolerance


def _mathopt() -> Any:
    """OR-Tools' modeller: loaded when it is first needed, as that takes a third of a second."""
    from ortools.math_opt.python import mathopt

    return mathopt


class Model:
    """Columns, rows and entries of a mixed-integer program under construction."""

    def __init__(self) -> None:
        self.columns = self.rows = 0
        self.parts: dict[str, list[NDArray]] = {}

    def _add(self, **parts: NDArray) -> None:
        for name, part in parts.items():
            self.parts.setdefault(name, []).append(part)

    def _all(self, name: str) -> NDArray:
        return np.concatenate(self.parts[name])

    def add_columns(self, price: NDArray, *, upper: float, integer: bool, lower: float = 0.0) -> Int:
        count = len(price)
        self._add(
            price=price,
            lower=np.full(count, lower),
            upper=np.full(count, upper),
            integer=np.full(count, integer),
        )
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def add_rows(self, count: int, lower: float, upper: float) -> Int:
        self._add(row_lower=np.full(count, lower), row_upper=np.full(count, upper))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def add_entries(self, row: Int, column: Int, value: NDArray | float) -> None:
        row, column, value = np.broadcast_arrays(row, column, np.asarray(value, dtype=float))
        self._add(entry_row=row, entry_column=column, entry_value=value)

    def proto(self) -> Any:
        """The model as a `model_pb2.ModelProto`."""
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.columns))
        proto.variables.lower_bounds.extend(self._all("lower").tolist())
        proto.variables.upper_bounds.extend(self._all("upper").tolist())
        proto.variables.integers.extend(self._all("integer").tolist())
        price = self._all("price")
        priced = np.flatnonzero(price)
        proto.objective.linear_coefficients.ids.extend(priced.tolist())
        proto.objective.linear_coefficients.values.extend(price[priced].tolist())
        proto.linear_constraints.ids.extend(range(self.rows))
        proto.linear_constraints.lower_bounds.extend(self._all("row_lower").tolist())
        proto.linear_constraints.upper_bounds.extend(self._all("row_upper").tolist())
        row, column, value = (self._all(name) for name in ("entry_row", "entry_column", "entry_value"))
        order = np.lexsort((column, row))
        order = order[value[order] != 0]
        proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
        proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
        proto.linear_constraint_matrix.coefficients.extend(value[order].tolist())
        return proto


def solve_program(
    program: Program,
    *,
    time_limit_s: float,
    rel_gap: float = 0.0,
    seed: int = 0,
    abs_gap: int = 0,
    minimise_peak: bool = False,
) -> MipAnswer:
    """Solves `program` by HiGHS, until the gap is `abs_gap` (in the program's unit) or `rel_gap`.

    With `minimise_peak`, costs and hinges are ignored and what is minimised is the largest usage
    over the memory rows, in bytes.
    """
    net = program.network
    finite = net.cost[0] < INF
    low = np.minimum.reduceat(net.cost[0], net.start[:-1])
    sizes = net.sizes
    cost = net.cost[0] - np.repeat(low, sizes)
    cells = np.flatnonzero(net.edge_cost[0] < INF)
    edge, left, right = (part[cells] for part in cell_ends(net))
    edge_low = np.zeros(len(net.edge_nodes), dtype=np.int64)
    if len(cells):
        edge_low = np.minimum.reduceat(net.edge_cost[0], net.edge_start[:-1])
    cell_cost = net.edge_cost[0][cells] - edge_low[edge]
    hinges = [net.cost[1:], net.edge_cost[1:][:, cells], np.array(program.hinge_constant, dtype=np.int64)]
    largest = max(int(np.abs(part).max(initial=1)) for part in [cost[finite], cell_cost, *hinges])
    scale = largest / SCALED_LARGEST
    offset = net.offset + int(low.sum()) + int(edge_low.sum())
    if minimise_peak:
        offset, scale = 0, float(max(program.usage.max(initial=1), 1)) / SCALED_USAGE

    model = Model()
    of = 0.0 if minimise_peak else 1.0 / scale
    strategy = model.add_columns(np.where(finite, cost, 0) * of, upper=1.0, integer=True)
    for forbidden in np.flatnonzero(~finite):
        model.parts["upper"][0][forbidden] = 0.0
    model.add_entries(np.repeat(model.add_rows(net.nodes, 1.0, 1.0), sizes), strategy, 1.0)
    flow = model.add_columns(cell_cost * of, upper=math.inf, integer=False)
    for side, ends in ((0, left), (1, right)):
        node = net.edge_nodes[:, side]
        count = np.concatenate([[0], np.cumsum(sizes[node])])
        margins = model.add_rows(int(count[-1]), 0.0, 0.0)
        if len(margins):
            model.add_entries(margins[count[edge] + ends - net.start[node[edge]]], flow, 1.0)
            local = margins - np.repeat(margins[count[:-1]], sizes[node])
            model.add_entries(margins, strategy[np.repeat(net.start[node], sizes[node]) + local], -1.0)
    peak = model.add_columns(np.ones(1 if minimise_peak else 0), upper=math.inf, integer=False)
    usage_scale = scale if minimise_peak else float(max(program.usage.max(initial=1), 1)) / SCALED_USAGE
    for usage, base in zip(program.usage, program.base.tolist(), strict=True):
        room = -base if minimise_peak else program.limit - base
        at = model.add_rows(1, -math.inf, room / usage_scale)
        model.add_entries(at, strategy, usage / usage_scale)
        model.add_entries(np.repeat(at, len(peak)), peak, -1.0)
    if not minimise_peak:
        for h, constant in enumerate(program.hinge_constant, start=1):
            at = model.add_rows(1, -math.inf, -constant / scale)
            model.add_entries(at, model.add_columns(np.ones(1), upper=math.inf, integer=False), -1.0)
            model.add_entries(at, strategy, net.cost[h] / scale)
            model.add_entries(at, flow, net.edge_cost[h][cells] / scale)

    mathopt = _mathopt()
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.05)),
        relative_gap_tolerance=rel_gap,
        absolute_gap_tolerance=abs_gap / scale,
        random_seed=seed,
    )
    parameters.highs.int_options["presolve_rule_off"] = DOUBLETON_EQUATIONS
    built = mathopt.Model.from_model_proto(model.proto())
    with silenced():
        try:
            result = mathopt.solve(built, mathopt.SolverType.HIGHS, params=parameters)
        except (*HIGHS_ERRORS, mathopt.InternalMathOptError):
            result = mathopt.solve(built, mathopt.SolverType.GSCIP, params=parameters)
    return read(result, net.start, offset, scale, DUAL_TOLERANCE * (net.nodes + len(net.edge_nodes) + 1))


def read(result: Any, start: Int, offset: int, scale: float, slack: float) -> MipAnswer:
    """Turns HiGHS's result (a `mathopt.SolveResult`) into a choice and a bound rounded safely down."""
    mathopt = _mathopt()
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return MipAnswer(choice=None, bound=None, infeasible=True, finished=True)
    dual = result.termination.objective_bounds.dual_bound
    bound = None
    if math.isfinite(dual):
        bound = offset + math.ceil((dual - slack - SUM_TOLERANCE * abs(dual)) * scale)
    choice = None
    if result.has_primal_feasible_solution():
        values = result.variable_values()
        strategies = int(start[-1])
        flat = np.zeros(strategies)
        for variable, value in values.items():
            if variable.id < strategies:
                flat[variable.id] = value
        choice = np.array([int(flat[a:b].argmax()) for a, b in itertools.pairwise(start.tolist())], dtype=np.int64)
    finished = reason is mathopt.TerminationReason.OPTIMAL
    return MipAnswer(choice=choice, bound=bound, infeasible=False, finished=finished)


def highest_point(planes: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]] | None:
    """Returns the maximum over 0 ≤ x ≤ 1 of the least of `planes[i, 0] + planes[i, 1:] · x`, and where.

    None if the engine fails for numerical reasons.
    """
    base = float(planes[:, 0].min())
    planes = np.column_stack([planes[:, :1] - base, planes[:, 1:]])
    scale = max(float(np.abs(planes).max()), 1.0) / SCALED_PLANE
    planes = np.where(np.abs(planes) < SMALLEST_SLOPE * scale, 0.0, planes / scale)
    model = Model()
    place = model.add_columns(np.zeros(planes.shape[1] - 1), upper=1.0, integer=False)
    top = model.add_columns(np.array([-1.0]), upper=math.inf, integer=False, lower=-math.inf)
    for height, *slope in planes.tolist():
        row = model.add_rows(1, -math.inf, height)
        model.add_entries(row, place, -np.array(slope))
        model.add_entries(row, top, 1.0)
    mathopt = _mathopt()
    result = mathopt.solve(mathopt.Model.from_model_proto(model.proto()), mathopt.SolverType.GLOP)
    if not result.has_primal_feasible_solution():
        return None
    found = np.zeros(model.columns)
    for variable, value in result.variable_values().items():
        found[variable.id] = value
    return base + float(found[-1]) * scale, np.clip(found[:-1], 0.0, 1.0)
