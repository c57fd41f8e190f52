"""Hardware: the catalogue, and every number of one chip with its source."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isinf
from typing import Any

from autoshard.report.tables import bytes_text, columns, fields, flops_text, render, table, time_text
from cost_models import Limit
from cost_models.machines.hardware_file import COMPILER_FACTS, Chip, Number
from cost_models.machines.topology import Topology


def catalogue(chips: Sequence[Chip], *, width: int | None = None) -> str:
    """One row per chip."""
    width = columns() if width is None else width
    rows = [
        (
            chip.name,
            chip.description,
            _value(chip, "hbm_bytes"),
            _value(chip, "hbm_bytes_per_s"),
            _value(chip, "peak_bfloat16_flops_per_s"),
        )
        for chip in chips
    ]
    head = ("chip", "what it is", "memory", "memory rate", "bfloat16")
    return render(table("", head, rows, right=head[2:], whole=("chip",)), width=width)


def numbers(chip: Chip, topology: Topology | None = None, *, width: int | None = None) -> str:
    """Every number of a chip and of its links, with the sources below."""
    width = columns() if width is None else width
    sources: dict[str, int] = {}
    title = (
        chip.description if topology is None else f"{chip.description}, {topology.devices} devices as {topology.name}"
    )
    parts: list[Any] = [textwrap.fill(f"{chip.name}: {title}", width) + "\n"]
    stated = {"device": ("", chip.numbers)} | {
        role: (f"{role}: {link.description or link.name}", link.numbers) for role, link in chip.links.items()
    }
    for group, (heading, found) in stated.items():
        rows = [
            (key, number_text(key, number.value), f"[{sources.setdefault(number.source, len(sources) + 1)}]")
            for key, number in found.items()
        ]
        parts.append(table(heading, (group, "value", "source"), rows, right=("value",), whole=(group,)))
    facts = [(name, chip.fact(name)) for name in COMPILER_FACTS]
    rows = [
        (name, "yes" if fact.value else "no", f"[{sources.setdefault(fact.source, len(sources) + 1)}]")
        for name, fact in facts
    ]
    parts.append(table("", ("compiler", "does", "source"), rows, right=("does",), whole=("compiler",)))
    for role, link in chip.links.items():
        for measured in link.tables:
            sources.setdefault(measured.source, len(sources) + 1)
        if link.tables:
            parts.append(
                table(
                    f"measured on {link.name}",
                    (role, "devices", "bytes", "seconds", "source"),
                    [
                        (
                            t.kind,
                            str(t.devices),
                            f"{bytes_text(t.nbytes[0])} … {bytes_text(t.nbytes[-1])}",
                            f"{time_text(t.seconds[0])} … {time_text(t.seconds[-1])}",
                            f"[{sources[t.source]}]",
                        )
                        for t in link.tables
                    ],
                    right=("devices",),
                )
            )
    parts.append(fields([(f"[{i}]", source) for source, i in sources.items()], width))
    return render(*parts, width=width)


def limits(found: Sequence[Limit], *, width: int | None = None) -> str:
    """Rules of thumb: the sizes from which each strategy is compute-bound, and the models that fit."""
    rows = [(limit.name, *_limit(limit), limit.source) for limit in found]
    title = "rules of thumb, at peak rates; chapters of How to Scale Your Model"
    head = ("rule", "value", "unit", "chapter")
    return render(table(title, head, rows, right=("value",)), width=columns() if width is None else width)


def _limit(limit: Limit) -> tuple[str, str]:
    """A threshold, and its unit: times in the unit that reads best, sizes as counts."""
    unit, _, per = limit.unit.partition(" ")
    if unit == "s":
        value, unit = time_text(limit.value).split(" ")
        return value, f"{unit} {per}".rstrip()
    if isinf(limit.value):
        return "any", limit.unit
    return f"{limit.value:,.0f}" if limit.value >= 100 else f"{limit.value:.3g}", limit.unit


def number_text(key: str, value: float) -> str:
    """A value in the unit that its key ends in, as people read it."""
    if key.endswith("_bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if key.endswith("_flops_per_s"):
        return f"{flops_text(value)}/s"
    if key.endswith("_bytes"):
        return bytes_text(value)
    if key.endswith("_s"):
        return time_text(value)
    return f"{value:g}"


def _value(chip: Chip, key: str) -> str:
    return number_text(key, chip.numbers[key].value)


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
