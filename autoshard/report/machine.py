"""Machine: what the tables say, as JSON-ready values in SI units."""

from collections.abc import Mapping
from typing import Any

from autoshard.verify import Row, Verification
from cost_models.hardware_file import Chip, Number
from cost_models.topology import Topology


def verification(found: Verification) -> dict[str, Any]:
    """The comparison of a plan with a compiled program."""
    return {
        "ok": found.ok,
        "compiler": found.compiler,
        "version": found.version,
        "topology": found.topology,
        "wall_s": found.wall_s,
        "tolerance": found.tolerance,
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "compiled_peak_bytes": found.compiled_peak_bytes,
        "rows": [_row(row) for row in found.rows],
        "kinds": [_row(row) for row in found.by_kind()],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "axes": list(row.axes),
        "predicted_bytes": row.predicted_bytes,
        "emitted_bytes": row.emitted_bytes,
        "predicted_count": row.predicted_count,
        "emitted_count": row.emitted_count,
        "status": str(row.status),
    }


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
    }


def _stated(numbers: Mapping[str, Number]) -> dict[str, Any]:
    return {key: {"value": number.value, "source": number.source} for key, number in numbers.items()}
