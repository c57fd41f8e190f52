r"""The exact engine: a core as a mixed-integer program in flow form; the only room with OR-Tools.

A variable per strategy (integer, one per node chosen) and a flow per finite cell, whose margins
are the strategies: $\sum_j y_{ij} = x_i$, $\sum_i y_{ij} = x_j$. Its LP relaxation is the
strongest that looks at one edge at a time (Schlesinger 1976). Hinges are variables $\ge 0$.

Costs become floats only here, scaled; the objective of the answer is priced again in integers
and the bound is rounded down by more than the engine's tolerances.
"""

import datetime
import math
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autoshard.problem.network import INF
from autoshard.solver.core import Core

SCALED_LARGEST = 1e6  # the largest cost that HiGHS sees; its tolerances are absolute, 1e-6 to 1e-7
RELATIVE_TOLERANCE = 1e-6  # taken off the bound, of the largest magnitude involved

# HiGHS stops with an internal error (`HighsStatus: kError`) on about one small model in a thousand,
# which ortools 9.15 raises as an AttributeError of its own status type. SCIP then takes over.
HIGHS_ERRORS = (AttributeError, RuntimeError, mathopt.InternalMathOptError)


@dataclass(frozen=True, slots=True, kw_only=True)
class MipAnswer:
    """`position` per remaining node (None if none was found) and a bound in the core's unit.

    `bound` is None when the engine proved that no choice satisfies the rows given.
    """

    position: dict[int, int] | None
    bound: int | None
    infeasible: bool
    finished: bool  # the engine closed its gap within tolerance


@dataclass(slots=True)
class Model:
    """Column and row lists of a mixed-integer program under construction."""

    lower: list[float]
    upper: list[float]
    integer: list[bool]
    objective: list[float]
    row_lower: list[float]
    row_upper: list[float]
    entry_row: list[np.ndarray]
    entry_column: list[np.ndarray]
    entry_value: list[np.ndarray]

    @classmethod
    def empty(cls) -> "Model":
        return cls([], [], [], [], [], [], [], [], [])

    def columns(self, objective: np.ndarray, *, upper: float, integer: bool) -> np.ndarray:
        first = len(self.lower)
        count = len(objective)
        self.lower += [0.0] * count
        self.upper += [upper] * count
        self.integer += [integer] * count
        self.objective += objective.tolist()
        return np.arange(first, first + count)

    def row(self, lower: float, upper: float) -> int:
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    def entries(self, row: np.ndarray | int, column: np.ndarray, value: np.ndarray | float) -> None:
        column = np.atleast_1d(column)
        self.entry_row.append(np.broadcast_to(np.asarray(row), column.shape))
        self.entry_column.append(column)
        self.entry_value.append(np.broadcast_to(np.asarray(value, dtype=float), column.shape))

    def proto(self) -> model_pb2.ModelProto:
        proto = model_pb2.ModelProto()
        columns, rows = len(self.lower), len(self.row_lower)
        proto.variables.ids.extend(range(columns))
        proto.variables.lower_bounds.extend(self.lower)
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend(self.integer)
        priced = [c for c in range(columns) if self.objective[c] != 0]
        proto.objective.linear_coefficients.ids.extend(priced)
        proto.objective.linear_coefficients.values.extend([self.objective[c] for c in priced])
        proto.linear_constraints.ids.extend(range(rows))
        proto.linear_constraints.lower_bounds.extend(self.row_lower)
        proto.linear_constraints.upper_bounds.extend(self.row_upper)
        row = np.concatenate(self.entry_row)
        column = np.concatenate(self.entry_column)
        value = np.concatenate(self.entry_value)
        order = np.lexsort((column, row))
        order = order[value[order] != 0]
        proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
        proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
        proto.linear_constraint_matrix.coefficients.extend(value[order].tolist())
        return proto


def solve_core(core: Core, *, time_limit_s: float, rel_gap: float, seed: int, minimise_peak: bool = False) -> MipAnswer:
    """Solves `core` by HiGHS.

    With `minimise_peak` costs and hinges are ignored and the bound and objective are the largest
    excess over the limit of any memory row (negative if all fit).
    """
    model = Model.empty()
    scale = cost_scale(core)
    place: dict[int, np.ndarray] = {}
    offset = 0 if minimise_peak else core.offset
    for v, cost in core.cost.items():
        low = 0 if minimise_peak else int(cost.min())
        offset += low
        price = np.zeros(len(cost)) if minimise_peak else (cost - low) / scale
        place[v] = model.columns(price, upper=1.0, integer=True)
        model.entries(model.row(1.0, 1.0), place[v], 1.0)
    flow: dict[tuple[int, int], np.ndarray] = {}
    for (u, v), table in core.table.items():
        low = 0 if minimise_peak else int(table.min())
        offset += low
        i, j = np.nonzero(table < INF)
        price = np.zeros(len(i)) if minimise_peak else (table[i, j] - low) / scale
        columns = model.columns(price, upper=math.inf, integer=False)
        cell = np.full(table.shape, -1)
        cell[i, j] = columns
        flow[u, v] = cell
        for ends, position in ((u, i), (v, j)):
            first = len(model.row_lower)
            for _ in range(len(core.cost[ends])):
                model.row(0.0, 0.0)
            model.entries(first + position, columns, 1.0)
            model.entries(first + np.arange(len(place[ends])), place[ends], -1.0)

    memory_scale = max(
        [float(c.max()) for row in core.rows if row.limit is not None for c in row.node.values()], default=1.0
    )
    memory_scale = max(memory_scale / SCALED_LARGEST, 1.0) if minimise_peak else max(memory_scale / 1e3, 1e-9)
    peak: np.ndarray | None = None
    if minimise_peak:
        peak = model.columns(np.ones(1), upper=math.inf, integer=False)
        model.lower[int(peak[0])] = -float(core.limit or 0) / memory_scale
    for row in core.rows:
        if row.limit is None:
            if minimise_peak:
                continue
            column = model.columns(np.ones(1), upper=math.inf, integer=False)
            at = model.row(-math.inf, -row.constant / scale)
            model.entries(at, column, -1.0)
            unit = scale
        else:
            at = model.row(-math.inf, (row.limit - row.constant) / memory_scale)
            if peak is not None:
                model.entries(at, peak, -1.0)
            unit = memory_scale
        for v, coef in row.node.items():
            model.entries(at, place[v], coef / unit)
        for edge, coef in row.edge.items():
            finite = flow[edge] >= 0
            model.entries(at, flow[edge][finite], coef[finite] / unit)

    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit_s, 0.05)),
        relative_gap_tolerance=rel_gap,
        absolute_gap_tolerance=0.0,
        random_seed=seed,
    )
    built = mathopt.Model.from_model_proto(model.proto())
    try:
        result = mathopt.solve(built, mathopt.SolverType.HIGHS, params=parameters)
    except HIGHS_ERRORS:
        result = mathopt.solve(built, mathopt.SolverType.GSCIP, params=parameters)
    return read(result, place, offset, memory_scale if minimise_peak else scale)


def cost_scale(core: Core) -> float:
    """Returns the divisor of costs that makes the largest spread of a table `SCALED_LARGEST`."""
    largest = 1.0
    for part in [*core.cost.values(), *core.table.values()]:
        finite = part[part < INF]
        largest = max(largest, float(finite.max() - finite.min()))
    return max(largest / SCALED_LARGEST, 1.0)


def read(result: mathopt.SolveResult, place: dict[int, np.ndarray], offset: int, scale: float) -> MipAnswer:
    """Turns HiGHS's result into positions and a bound rounded safely down."""
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return MipAnswer(position=None, bound=None, infeasible=True, finished=True)
    dual = result.termination.objective_bounds.dual_bound
    bound = None
    if math.isfinite(dual):
        slack = RELATIVE_TOLERANCE * max(1.0, abs(dual)) * scale
        bound = offset + math.ceil(dual * scale - slack)
    position = None
    if result.has_primal_feasible_solution():
        values = result.variable_values()
        flat = np.zeros(max(variable.id for variable in values) + 1)
        for variable, value in values.items():
            flat[variable.id] = value
        position = {v: int(flat[columns].argmax()) for v, columns in place.items()}
    finished = reason is mathopt.TerminationReason.OPTIMAL
    return MipAnswer(position=position, bound=bound, infeasible=False, finished=finished)
