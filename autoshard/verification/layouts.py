"""Layouts: finds the planned layouts that a partitioner did not keep.

They are read back where layouts still have names: after Shardy's propagation, in-process, or
in the dump that a compiler makes of its own module after that pass. The name of every op holds
its equation's path (`backends.shardy.propagation.annotated`), so values are found exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.backends import compile, hlo
from autoshard.backends.shardy.propagation import SCOPE, Annotations, annotated, propagated
from autoshard.costs.strategies import layout_of
from autoshard.errors import VerifyError
from autoshard.ir.graph import Graph, Path
from autoshard.ir.layout import Layout
from autoshard.planner.nearest import code_near
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import PlanRecord
from autoshard.problem.assignment import Assignment
from autoshard.report.notebook import Shown
from autoshard.report.tables import bytes_text, columns, fields, render, short_aval, short_place, table

LONGEST = 20  # values that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkept:
    """One value that lies elsewhere than planned: `nbytes` of it on one device as planned."""

    role: str  # "input", "output", or the primitive that makes it
    where: str
    value: str
    planned: Layout
    found: Layout | None  # None: over parts that are no mesh axes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCheck(Shown):
    """The planned layouts that are not kept, the largest first; `checked` counts all that were compared."""

    source: str
    checked: int
    unkept: tuple[Unkept, ...]

    @property
    def ok(self) -> bool:
        return not self.unkept

    def __str__(self) -> str:
        """The count and the table, for a terminal."""
        width = columns()
        kept = self.checked - len(self.unkept)
        said = fields([("layouts", f"{kept:,} of {self.checked:,} are kept, by {self.source}")], width)
        if not self.unkept:
            return render(said, width=width)
        rows = [
            (
                f"{x.role} {short_place(x.where).partition(' (')[0]}".strip(),
                short_aval(x.value),
                str(x.planned),
                "no axes" if x.found is None else str(x.found),
                bytes_text(x.nbytes),
            )
            for x in self.unkept[:LONGEST]
        ]
        if len(self.unkept) > LONGEST:
            rows.append((f"{len(self.unkept) - LONGEST} smaller", "", "", "", ""))
        head = ("from", "value", "planned", "found", "bytes")
        return render(said + "\n", table("", head, rows, right=("bytes",), whole=("value",)), width=width)


def honoured(planned: PlanningResult, *, compiler: str | None = None) -> LayoutCheck:
    """Compares every layout of a plan with the partitioner's.

    Args:
      planned: a plan that was made in this process.
      compiler: "gpu", "tpu" or "cpu" to read that compiler's own dump; None asks Shardy in-process.

    Raises:
      VerifyError: the function was planned for its gradient, whose values only exist inside `jax.grad`.
      CompilerMissingError: that compiler is not installed.
      ShardyError: propagation fails.
    """
    space, record = planned.space, planned.record
    if space.gradient is not None:
        raise VerifyError(
            "layouts are read back of the program that was planned, and this plan is for the gradient of a forward "
            "function: plan the train step itself, or pass for_grad=False"
        )
    annotations = Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(record.donated),
    )
    graph = space.decisions.graph
    wanted = _planned_layouts(planned.assignment)
    if compiler is None:
        platform = space.compiler.platform
        found: Mapping[int, Layout | None] = propagated(
            planned.traced, graph, space.decisions.made, record.mesh, annotations, platform
        )
        source = "Shardy's propagation"
    else:
        topology = compile.topology(record.hardware, record.mesh.size, compiler)
        compiled = compile.compile(
            annotated(planned.traced, record.mesh, annotations),
            topology=topology,
            mesh=record.mesh,
            compiler=compiler,  # pyright: ignore[reportArgumentType]
            device_order=record.device_order,
            compiler_options=compile.flags_of_plan(record.compiler_options, compiler),
            passes=True,
        )
        assert compiled.after_propagation is not None  # asked for
        found = _read_dump(hlo.read(compiled.after_propagation), graph, record)
        source = f"{compiled.compiler} ({compiled.version}) after its Shardy pass"
    makers = graph.producers
    unkept = [
        _find_unkept(planned.assignment, record, v, layouts[0], found[v], makers)
        for v, layouts in wanted.items()
        if v in found and not any(_same(layout, found[v], graph.avals[v].shape, record) for layout in layouts)
    ]
    return LayoutCheck(
        source=source,
        checked=len(wanted.keys() & found.keys()),
        unkept=tuple(sorted(unkept, key=lambda x: -x.nbytes)),
    )


def _planned_layouts(assignment: Assignment) -> dict[int, tuple[Layout, ...]]:
    """Value → the layouts in which it may be found, for values that are not left as partial sums.

    The first is the layout after all constraints in the scope of its equation: mostly its copy's. If the
    compiler moves the value by itself, it has the layout in which it was made. An input keeps its layout.
    """
    d = assignment.decisions
    inputs = frozenset(d.graph.inputs)
    found: dict[int, tuple[Layout, ...]] = {}
    for v in d.made:
        codes = (assignment.made(v),) if v in inputs else (assignment.left(v), assignment.made(v))
        ndim = d.graph.avals[v].ndim
        layouts = [layout_of(c, ndim, d.mesh) for c in codes if c is not None and ndim and assignment.reduced(c, v)]
        if layouts and codes[0] is not None and assignment.reduced(codes[0], v):
            found[v] = tuple(dict.fromkeys(layouts))
    return found


def _same(planned: Layout, found: Layout | None, shape: tuple[int, ...], record: PlanRecord) -> bool:
    """Whether two layouts are one; axes of size 1 and the order of axes within a dimension do not count."""
    if found is None:
        return False
    (one, _), (other, exact) = (code_near(x, shape, record.mesh) for x in (planned, found))
    return one == other and (exact or planned == found)


def _find_unkept(
    assignment: Assignment,
    record: PlanRecord,
    v: int,
    planned: Layout,
    found: Layout | None,
    makers: Mapping[int, tuple[int, int]],
) -> Unkept:
    graph = assignment.decisions.graph
    aval = graph.avals[v]
    maker = makers.get(v)
    pieces = 1
    for axis in (axis for dim in planned.dims for axis in dim):
        pieces *= record.mesh.shape[axis]
    if maker is not None:
        role, where = graph.eqns[maker[0]].primitive, graph.eqns[maker[0]].where
    else:
        role, where = "input", record.inputs[graph.inputs.index(v)].path if v in graph.inputs else "constant"
    return Unkept(
        role=role, where=where, value=str(aval), planned=planned, found=found, nbytes=aval.nbytes // max(pieces, 1)
    )


def _read_dump(module: hlo.Module, graph: Graph, record: PlanRecord) -> dict[int, Layout | None]:
    """Value → layout in a compiler's dump: of inputs, and of the ops in the scope of their equations.

    An op without a sharding is whole. Of several ops of a value's shape in its
    equation's scope the last counts, as in `propagation.propagated`.
    """
    ops: dict[tuple[Path, tuple[int, ...]], list[hlo.Instruction]] = {}
    for computation in module:
        for instruction in computation:
            scopes = SCOPE.findall(instruction.op_name)
            if scopes and len(instruction.shapes) == 1:
                path = tuple(int(step) for step in scopes[-1].split("."))
                ops.setdefault((path, instruction.shapes[0].dims), []).append(instruction)
    found: dict[int, Layout | None] = {}
    for number, parameter in module[module.entry].parameters.items():
        if number < len(graph.inputs):
            found[graph.inputs[number]] = _layout(parameter, record)
    for makes, values in zip(graph.makes, graph.results, strict=True):
        for (path, _), v in zip(makes, values, strict=True):
            fitting = ops.get((path, graph.avals[v].shape))
            if fitting:
                found[v] = _layout(fitting[-1], record)
    return found


def _layout(instruction: hlo.Instruction, record: PlanRecord) -> Layout | None:
    ndim = len(instruction.shapes[0].dims)
    texts = hlo.shardings_of(instruction)
    return hlo.layout_of(texts[0], ndim, record.mesh) if texts else Layout.replicated(ndim)
