"""Machine: what the tables say, as JSON-ready values in SI units."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autoshard.comparison import Line, Row
from autoshard.honoured import Honoured
from autoshard.verification import Verification
from cost_models.hardware_file import COMPILER_FACTS, Chip, Number
from cost_models.topology import Topology


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
        "step": {
            "predicted": {"step_s": found.cost.step_s, "exposed_s": found.cost.exposed_s},
            "compiled": None if timeline is None else {"step_s": timeline.step_s, "exposed_s": timeline.exposed_s},
        },
        "rows": [row(x) for x in found.rows],
        "kinds": [row(x) for x in found.by_kind()],
        "lines": [row(x) for x in found.lines],
    }


def honoured(found: Honoured) -> dict[str, Any]:
    """The planned layouts that were not kept."""
    return {
        "ok": found.ok,
        "source": found.source,
        "checked": found.checked,
        "unkept": [{**asdict(x), "planned": str(x.planned), "found": str(x.found)} for x in found.unkept],
    }


def row(found: Row | Line) -> dict[str, Any]:
    """A row of a comparison."""
    return {**asdict(found), "axes": list(found.axes), "status": str(found.status)}


def hardware(chip: Chip, topology: Topology | None = None) -> dict[str, Any]:
    """Every number of a chip and of its links, with its source."""
    links = {
        role: {"name": link.name, "medium": link.medium, "numbers": _stated(link.numbers)}
        for role, link in chip.links.items()
    }
    return {
        "name": chip.name,
        "description": chip.description,
        "topology": None if topology is None else topology.name,
        "devices": None if topology is None else topology.devices,
        "numbers": _stated(chip.numbers),
        "links": links,
        "compiler": {name: asdict(chip.fact(name)) for name in COMPILER_FACTS},
    }


def _stated(numbers: Mapping[str, Number]) -> dict[str, Any]:
    return {key: {"value": number.value, "source": number.source} for key, number in numbers.items()}
