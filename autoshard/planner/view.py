"""View: a plan as plain values for the page, for JSON and for Markdown; SI units throughout.

The timeline and the memory schedule are the planner's own prices in program order. A
decision's bar spans all its trips; a transfer that can hide runs beside compute as soon
as the link is free, any other one stops it.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.costs.strategies import layout_of
from autoshard.ir.mesh import MeshAxes
from autoshard.planner import backward_passes
from autoshard.planner.leaf_rows import fold
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import Leaf, PlanRecord
from autoshard.problem import bill, memory_profile
from autoshard.problem.assignment import Assignment
from autoshard.problem.decisions import Copy, Equation, Output
from autoshard.problem.ports import KEPT, REPEATED
from autoshard.problem.repeated import repeated_share
from autoshard.report.hardware import number_text
from autoshard.report.tables import LEFT, bytes_text, flops_text, proof_text, short_aval, short_place, time_text
from cost_models import Hardware

SCHEMA = 1
MOMENTS = 200  # points of the memory chart; of each stretch the highest is shown
WEIGHTIEST = 60  # activations that are listed, by bytes

Json = dict[str, Any]


def of_plan(planned: PlanningResult, hardware: Hardware, compared: Sequence[Json] = ()) -> Json:
    """Everything that the page shows of a plan.

    Args:
      planned: the plan with its problem.
      hardware: that it was made for.
      compared: other layouts of the program in the same model, see `compared_row`.
    """
    record, assignment = planned.record, planned.assignment
    return {
        "schema": SCHEMA,
        "name": record.name,
        "mesh": record.mesh.shape,
        "hardware": record.hardware,
        "verdict": verdict(record),
        "cost": {
            "step_s": record.cost.step_s,
            "compute_s": record.cost.compute_s,
            "communication_s": record.cost.communication_s,
            "hidden_s": record.cost.hidden_s,
            "exposed_s": record.cost.exposed_s,
        },
        "flops": bill.flops(assignment),
        "backward": backward_passes.to_json(assignment),
        "memory": _memory(record, assignment),
        "layouts": [*_leaves("input", record.inputs, record), *_activations(assignment)],
        "timeline": _timeline(assignment),
        "roofline": _roofline(assignment, hardware, record.mesh),
        "collectives": collectives(record),
        "compared": list(compared),
        "certificate": {
            "status": record.certificate.status,
            "proof": proven(record),
            "objective_s": record.certificate.objective_s,
            "bound_s": record.certificate.bound_s,
            "gap": record.certificate.gap,
            "solver": record.certificate.solver,
            "space": record.certificate.space,
        },
        "numbers": [
            {"name": key, "value": number.value, "text": number_text(key, number.value), "source": number.source}
            for key, number in hardware.numbers.items()
        ],
        "notes": list(record.notes),
    }


def verdict(record: PlanRecord) -> str:
    """A plan in one sentence."""
    cost, memory = record.cost, record.memory
    waits = cost.exposed_s / cost.step_s if cost.step_s else 0.0
    return (
        f"{record.name} on {record.mesh} ({record.hardware}) takes {time_text(cost.step_s)} a step, "
        f"{waits:.0%} of it waiting for communication, and "
        f"{bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)} per device; {proven(record)}."
    )


def proven(record: PlanRecord) -> str:
    """The proof of a plan, in the same words everywhere on a page."""
    found = record.certificate
    if not found.gap:
        return "proven optimal"
    if found.gap < LEFT:
        return f"proven {proof_text(found.status, found.objective_s, found.bound_s)}"
    return f"within {found.gap:.2%} of the optimum"


def compared_row(name: str, record: PlanRecord) -> Json:
    """Another layout of the same program, priced in the same model."""
    return {
        "name": name,
        "step_s": record.cost.step_s,
        "exposed_s": record.cost.exposed_s,
        "peak_bytes": record.memory.peak_bytes,
        "limit_bytes": record.memory.limit_bytes,
        "fits": record.memory.peak_bytes <= record.memory.limit_bytes,
    }


def collectives(record: PlanRecord) -> list[Json]:
    """The collectives of a step, equal ones together, the longest first."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for c in record.collectives:
        key = (c.kind, c.axes, c.window is not None, short_aval(c.value), short_place(c.where))
        groups.setdefault(key, []).append(c)
    rows = [
        {
            "kind": kind,
            "axes": "·".join(axes),
            "count": sum(c.trips for c in same),
            "bytes": sum(c.nbytes * c.trips for c in same),
            "seconds": sum(c.seconds * c.trips for c in same),
            "hides": hides,
            "value": value,
            "where": where,
        }
        for (kind, axes, hides, value, where), same in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def _leaves(role: str, leaves: Sequence[Leaf], record: PlanRecord) -> list[Json]:
    return [
        {
            "role": role,
            "path": ("  " if row.depth else "") + row.path,
            "value": short_aval(row.shape),
            "layout": row.layout,
            "count": row.count,
            "bytes": row.local_bytes,
            "where": "",
        }
        for row in fold(leaves, record.mesh)
    ]


def _activations(assignment: Assignment) -> list[Json]:
    """Results of contractions, those of one line, shape and layout together, the weightiest first."""
    d = assignment.decisions
    rows: dict[tuple[str, str, str], Json] = {}
    for node, pick in zip(d.nodes, assignment.choice, strict=True):
        if not isinstance(node, Equation):
            continue
        e = node.equation
        value = d.graph.results[e][0]
        aval = d.graph.avals[value]
        code = int(node.strategies.results[0][pick])
        layout = layout_of(code, aval.ndim, d.mesh)
        ways = _ways(code, aval.ndim, assignment)
        key = (short_place(node.where), str(aval), str(layout))
        row = rows.setdefault(
            key,
            {
                "role": "activation",
                "path": d.graph.eqns[e].primitive,
                "value": short_aval(str(aval)),
                "layout": str(layout),
                "count": 0,
                "bytes": 0,
                "where": key[0],
            },
        )
        row["count"] += 1
        row["bytes"] += aval.nbytes // ways
    return sorted(rows.values(), key=lambda row: -row["bytes"])[:WEIGHTIEST]


def _ways(code: int, ndim: int, assignment: Assignment) -> int:
    mesh = assignment.decisions.mesh
    layout = layout_of(code, ndim, mesh)
    sizes = mesh.shape
    return int(np.prod([sizes[axis] for dim in layout.dims for axis in dim], dtype=np.int64))


def _memory(record: PlanRecord, assignment: Assignment) -> Json:
    """Bytes by kind over the program, the highest moment of every stretch of it."""
    d = assignment.decisions
    end = len(d.graph.eqns) + 2
    held = memory_profile.over_time(d, assignment.choice)
    total = sum(held.values(), np.zeros(end, np.int64))
    edges = np.linspace(0, end, min(MOMENTS, end) + 1).astype(int)
    at = [int(a + total[a:b].argmax()) for a, b in pairwise(edges)]
    return {
        "peak_bytes": record.memory.peak_bytes,
        "limit_bytes": record.memory.limit_bytes,
        "peak_at": short_place(record.memory.at),
        "peak_kinds": dict(record.memory.kinds),
        "peak_moment": int(np.argmax(total[at])) if at else 0,
        "moments": [short_place(d.graph.eqns[i].where) if i < len(d.graph.eqns) else "end" for i in at],
        "kinds": {kind: [int(x) for x in held[kind][at]] for kind in _stacked(held)},
    }


def _stacked(kinds: Collection[str]) -> list[str]:
    """The kinds from the bottom up: what is kept, and what is repeated, beside the other activations."""
    own = [kind for kind in (KEPT, REPEATED) if kind in kinds]
    return [x for kind in kinds if kind not in own for x in ((kind, *own) if kind == "activations" else (kind,))]


def _transfers(assignment: Assignment) -> dict[int, list[Json]]:
    """Equation → the collectives that bring values to it."""
    d = assignment.decisions
    found: dict[int, list[Json]] = {}
    last = len(d.graph.eqns)
    for edge, row in bill.transfers(assignment):
        at = d.nodes[edge.v].equations[:1] or [last if isinstance(d.nodes[edge.v], Output) else -1]
        if isinstance(d.nodes[edge.v], Copy):
            at = [max(d.nodes[edge.u].equations, default=-1) + 1]
        found.setdefault(int(at[0]), []).append(
            {
                "name": f"{row.kind} over {'·'.join(row.axes)}",
                "value": short_aval(row.value),
                "where": short_place(row.where),
                "seconds": row.seconds * row.trips,
                "trips": row.trips,
                "hides": row.window is not None,
                "repeated": repeated_share(d, edge.v) > 0.5,
                "after": edge.u,
            }
        )
    return found


def _timeline(assignment: Assignment) -> list[Json]:
    """Bars of two lanes: compute and communication; both start at 0."""
    d = assignment.decisions
    transfers = _transfers(assignment)
    copied = {port.node: value for value, port in d.kept.items()}
    # First equation, or the first that takes a copy → decisions, seconds.
    costs: dict[int, list[tuple[int, float]]] = {}
    for n, node in enumerate(d.nodes):
        at = node.equations or [e for e, _ in d.graph.consumers.get(copied.get(n, -1), ())]
        if at and assignment.own_ps(n):
            costs.setdefault(min(at), []).append((n, assignment.own_ps(n) * 1e-12))
    bars: list[Json] = []
    now = link = 0.0
    made: dict[int, float] = {}  # decision → when its compute ends
    for e in range(-1, len(d.graph.eqns) + 1):
        for transfer in transfers.get(e, ()):
            start = max(link, made.get(transfer["after"], 0.0) if transfer["hides"] else now)
            bars.append(
                {
                    "lane": "communication",
                    "name": transfer["name"],
                    "value": transfer["value"],
                    "where": transfer["where"],
                    "start_s": start,
                    "duration_s": transfer["seconds"],
                    "trips": transfer["trips"],
                    "hides": transfer["hides"],
                    "repeated": transfer["repeated"],
                }
            )
            link = start + transfer["seconds"]
            now = now if transfer["hides"] else link
        for n, seconds in sorted(costs.get(e, ()), key=lambda cost: cost[0] not in copied):
            avals = (d.graph.avals[copied[n]],) if n in copied else d.graph.eqns[e].results
            bars.append(
                {
                    "lane": "compute",
                    "name": d.nodes[n].name,
                    "value": short_aval(str(avals[0])) if avals else "",
                    "where": short_place(d.nodes[n].where),
                    "start_s": now,
                    "duration_s": seconds,
                    "trips": d.graph.trips[copied[n]] if n in copied else d.graph.runs(e),
                    "hides": False,
                    "repeated": repeated_share(d, n) > 0.5,
                }
            )
            now += seconds
            made[n] = now
    return bars


def _roofline(assignment: Assignment, hardware: Hardware, mesh: MeshAxes) -> Json:
    """FLOPs, bytes and seconds of every contraction on one device, equal ones together; the peak is that of them."""
    machine = hardware.place(mesh.shape)
    d = assignment.decisions
    points: dict[tuple[Any, ...], Json] = {}
    for node, pick in zip(d.nodes, assignment.choice, strict=True):
        if not isinstance(node, Equation) or not node.flops[pick]:
            continue
        e = node.equation
        eqn, trips = d.graph.eqns[e], d.graph.runs(e)
        nbytes = sum(
            aval.nbytes // _ways(int(codes[pick]), aval.ndim, assignment)
            for avals, found in ((eqn.operands, node.strategies.operands), (eqn.results, node.strategies.results))
            for aval, codes in zip(avals, found, strict=True)
        )
        flops, seconds = float(node.flops[pick]) / trips, int(node.cost_ps[pick]) * 1e-12 / trips
        key = (short_place(node.where), " × ".join(short_aval(str(a)) for a in eqn.operands), flops, nbytes)
        point = points.setdefault(
            key,
            {
                "name": key[1],
                "where": key[0],
                "flops": flops,
                "bytes": nbytes,
                "seconds": seconds,
                "count": 0,
            },
        )
        point["count"] += trips
    return {
        "peak_flops_per_s": bill.peak_flops_per_s(assignment, machine.peak_flops_per_s)
        or hardware.number("peak_bfloat16_flops_per_s"),
        "bytes_per_s": hardware.number("hbm_bytes_per_s"),
        "points": sorted(points.values(), key=lambda p: -p["seconds"] * p["count"]),
    }


def markdown(view: Mapping[str, Any]) -> str:
    """The same as Markdown."""
    memory, proof = view["memory"], view["certificate"]
    lines = [f"# Plan: {view['name']}", "", view["verdict"], ""]
    lines += _table(
        ("what", "value"),
        [
            ("step", time_text(view["cost"]["step_s"])),
            ("compute", time_text(view["cost"]["compute_s"])),
            ("exposed communication", time_text(view["cost"]["exposed_s"])),
            ("hidden communication", time_text(view["cost"]["hidden_s"])),
            *_backward(view),
            ("peak memory", f"{bytes_text(memory['peak_bytes'])}, at {short_place(memory['peak_at'])}"),
            *((f"of which {kind}", bytes_text(nbytes)) for kind, nbytes in memory["peak_kinds"].items()),
            ("proof", f"{proof['proof']}: {proof['space']}"),
            ("solver", proof["solver"]),
        ],
    )
    if view["compared"]:
        lines += ["", "## Other layouts, in the same model", ""]
        lines += _table(
            ("layout", "step", "exposed", "memory", "fits"),
            [
                (
                    row["name"],
                    time_text(row["step_s"]),
                    time_text(row["exposed_s"]),
                    bytes_text(row["peak_bytes"]),
                    "yes" if row["fits"] else "no",
                )
                for row in view["compared"]
            ],
        )
    lines += ["", "## Layouts", ""]
    lines += _table(
        ("role", "path", "value", "layout", "count", "bytes per device"),
        [
            (row["role"], row["path"].strip(), row["value"], row["layout"], str(row["count"]), bytes_text(row["bytes"]))
            for row in view["layouts"]
        ],
    )
    lines += ["", "## Collectives of a step", ""]
    lines += _table(
        ("collective", "over", "count", "bytes", "time", "hides", "value", "at"),
        [
            (
                row["kind"],
                row["axes"],
                str(row["count"]),
                bytes_text(row["bytes"]),
                time_text(row["seconds"]),
                "yes" if row["hides"] else "no",
                row["value"],
                row["where"],
            )
            for row in view["collectives"]
        ],
    )
    lines += ["", "## Hardware", ""]
    lines += _table(
        ("number", "value", "source"), [(row["name"], row["text"], row["source"]) for row in view["numbers"]]
    )
    return "\n".join([*lines, "", *(f"- {note}" for note in view["notes"])]) + "\n"


def _backward(view: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is kept for backward passes, and runs once more in them."""
    found = view["backward"]["repeated"]
    if found is None:
        return []
    seconds = found["compute_s"] + found["waited_s"]
    repeated = f"{flops_text(found['flops'])} ({found['share_of_flops']:.1%} of all), {time_text(seconds)}"
    return [(KEPT, bytes_text(view["backward"]["kept_bytes"])), (REPEATED, repeated)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
