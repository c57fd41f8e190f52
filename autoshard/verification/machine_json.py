"""Machine-readable results: the contents of the tables as JSON-ready values in SI units."""

from dataclasses import asdict
from typing import Any

from autoshard.verification.collective_match import CollectiveRow, HandOvers, Line
from autoshard.verification.kept_match import OffloadedBytes, RepeatedMatmuls
from autoshard.verification.layouts import LayoutCheck
from autoshard.verification.result import Verification


def verification(found: Verification) -> dict[str, Any]:
    """The comparison of a plan with a compiled program."""
    timeline, memory = found.timeline, found.memory
    return {
        "ok": found.ok,
        "compiler": found.compiler,
        "version": found.version,
        "topology": found.topology,
        "wall_s": found.wall_s,
        "tolerance": found.tolerance,
        "memory": {
            "predicted": asdict(memory.predicted),
            "compiled": None if memory.compiled is None else asdict(memory.compiled),
            "peak": memory.meaning,
            "tolerance": memory.tolerance,
        },
        "compute": None if found.compute is None else asdict(found.compute),
        "repeated": None
        if found.repeated is None
        else {**_repeated(found.repeated), "lines": [_repeated(x) for x in found.repeated_lines]},
        "offloaded": None
        if not found.offloaded
        else {
            **{_way(x): _offloaded(x) for x in found.offloaded},
            "lines": [{"where": x.where, "way": _way(x), **_offloaded(x)} for x in found.offloaded_lines],
        },
        "pipelines": [_stages(x) for x in found.pipelines],
        "step": {
            "predicted": {"step_s": found.cost.step_s, "exposed_s": found.cost.exposed_s},
            "compiled": None if timeline is None else {"step_s": timeline.step_s, "exposed_s": timeline.exposed_s},
        },
        "rows": [row(x) for x in found.rows],
        "kinds": [row(x) for x in found.by_kind()],
        "lines": [row(x) for x in found.lines],
    }


def _repeated(found: RepeatedMatmuls) -> dict[str, Any]:
    """FLOPs that run once more."""
    status = None if found.status is None else str(found.status)
    where = {"where": found.where} if found.where else {}
    return {**where, "predicted_flops": found.predicted_flops, "compiled_flops": found.compiled_flops, "status": status}


def _way(found: OffloadedBytes) -> str:
    return "to_host" if found.to_host else "from_host"


def _offloaded(found: OffloadedBytes) -> dict[str, Any]:
    """Bytes that go one way between a device's memory and its host's."""
    status = None if found.status is None else str(found.status)
    return {"predicted_bytes": found.predicted_bytes, "compiled_bytes": found.compiled_bytes, "status": status}


def _stages(found: HandOvers) -> dict[str, Any]:
    """What the stages of a pipeline hand on, and its bubble."""
    return {
        "ok": found.ok,
        **asdict(found.pipeline),
        "bubble": found.pipeline.bubble,
        "kind": found.kind,
        "compiled_trips": list(found.compiled_trips),
        "predicted_bytes": found.predicted_bytes,
        "emitted_bytes": found.emitted_bytes,
    }


def honoured(found: LayoutCheck) -> dict[str, Any]:
    """The planned layouts that were not kept."""
    return {
        "ok": found.ok,
        "source": found.source,
        "checked": found.checked,
        "unkept": [{**asdict(x), "planned": str(x.planned), "found": str(x.found)} for x in found.unkept],
    }


def row(found: CollectiveRow | Line) -> dict[str, Any]:
    """A row of a comparison."""
    return {**asdict(found), "axes": list(found.axes), "status": str(found.status)}
