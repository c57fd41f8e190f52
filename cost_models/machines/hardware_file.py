"""The hardware file: JSON → chips and interconnects, every number with its source, or an error.

A *chip* file states numbers of one device and names its interconnects; an
*interconnect* file states the numbers of one kind of link. Units are SI and
stand at the end of each key: `_bytes`, `_bytes_per_s`, `_flops_per_s`, `_s`,
`_fraction` (0 to 1), `_count`. A chip file may be `based_on` another and then
states only what differs; `domain.`, `scale_out.` and `die.` before a key reach
into its interconnects::

    {"schema": "hardware/1", "kind": "chip", "name": "my-h100", "based_on": "h100",
     "topology": "2x8",
     "numbers": {"scale_out.one_way_bytes_per_s": {"value": 2.5e10, "source": "ib_write_bw, 2026-05-02"}}}

Who compiles for a chip is said by its `platform`, as JAX names it ("cuda", "tpu", "cpu"); what that compiler does
where chips differ stands in a `compiler` object. Both have sources, and are the base's where a file has one.

A measured file is the same with a `measured` object (date, device kind, versions,
method), where there are several devices `tables` of the domain's collectives, and
the `samples` that its numbers were fitted to, which are for people to read.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from cost_models.errors import HardwareFileError
from cost_models.machines.alpha_beta import KINDS, Floats, Kind

SCHEMA = "hardware/1"

Medium: TypeAlias = Literal["torus", "switch", "direct", "network"]

UNITS = ("bytes_per_s", "flops_per_s", "bytes", "fraction", "count", "s")

# Every number that a chip file may state; True: a catalogue chip must.
CHIP_NUMBERS: dict[str, bool] = {
    "peak_bfloat16_flops_per_s": True,
    "peak_float32_flops_per_s": True,
    "peak_int8_flops_per_s": True,
    "peak_float8_flops_per_s": True,
    "peak_float16_flops_per_s": False,
    "peak_float64_flops_per_s": False,
    "peak_float4_flops_per_s": False,
    "peak_int4_flops_per_s": False,
    "vector_flops_per_s": True,
    "hbm_bytes": True,
    "hbm_bytes_per_s": True,
    "hbm_achieved_fraction": True,
    "usable_memory_fraction": True,
    "vmem_bytes": False,
    "vmem_bytes_per_s": False,
    "smem_bytes": False,
    "l2_bytes": False,
    "cores_count": False,
    "matmul_tile_rows_count": True,
    "matmul_tile_columns_count": True,
    "matmul_tile_depth_count": True,
    "matmul_units_count": True,
    "cuda_capability_count": False,
    "matmul_achieved_fraction": True,
    "matmul_achieved_float8_fraction": False,
    "matmul_achieved_int8_fraction": False,
    "matmul_achieved_float32_fraction": False,
    "matmul_launch_s": True,
    "attention_achieved_fraction": True,
    "attention_block_count": True,
    "step_compute_fraction": True,
    "step_stream_fraction": True,
    "host_bytes_per_s": True,
    "overlap_fraction": True,
    "devices_per_chip_count": True,
}
LINK_NUMBERS: dict[str, bool] = {
    "one_way_bytes_per_s": True,
    "achieved_fraction": True,
    "hop_s": True,
    "launch_s": True,
    "all_reduce_launch_s": False,
    "all_reduce_hop_s": False,
    "max_devices_count": False,
    "dimensions_count": False,
}
# What a chip's compiler is known to do, where chips differ: see `Chip.fact`.
COMPILER_FACTS = ("gathers_ahead", "stores_quotients", "stores_score_gradients")
LEAST, MOST = 1e-18, 1e24  # of a number that is not 0: outside there is no unit in which a chip has it
MOST_COUNT = 10**6
MAY_BE_ZERO = frozenset(
    {"overlap_fraction", "hop_s", "launch_s", "matmul_launch_s", "all_reduce_launch_s", "all_reduce_hop_s"}
)
LINK_ROLES = ("die", "domain", "scale_out")  # inner to outer
_CHIP_KEYS = (
    "schema",
    "kind",
    "name",
    "aliases",
    "description",
    "platform",
    "based_on",
    "topology",
    "measured",
    "numbers",
    "compiler",
    "tables",
    "samples",
)
_MOST_AXES, _LONGEST_AXIS = 4, 128  # of a torus
_MEASURED_KEYS = ("date", "device_kind", "versions", "method")


@dataclass(frozen=True, slots=True)
class Number:
    """A value in SI units, and who says so."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Platform:
    """JAX's name of the platform that programs for a chip are lowered for, and who says so."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Fact:
    """Whether a compiler does something, and who says so."""

    value: bool
    source: str


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured seconds of one collective on one switched domain.

    Attributes:
        kind: The collective.
        devices: Devices of the group.
        nbytes: Logical bytes per device, ascending.
        seconds: Measured times.
        source: Who measured.
        link_bytes_per_s: One-way rate of the links on which it was measured.
    """

    kind: Kind
    devices: int
    nbytes: Floats
    seconds: Floats
    source: str
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorusShapes:
    """Which slices of a torus exist, and which of their axes close into rings.

    Attributes:
        wrap: `"cubes of 4"` (all axes, if every length is a multiple of 4) or
            `"axes of 16"` (each axis of length 16).
        shapes: The usual slices, smallest first.
        largest: The longest axes there are, ascending.
        name_counts_cores: Whether `v5p-256` means 256 TensorCores, two to a chip.
    """

    wrap: Literal["cubes of 4", "axes of 16"]
    shapes: tuple[tuple[int, ...], ...]
    largest: tuple[int, ...]
    name_counts_cores: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """One kind of link: its medium, its numbers, and what was measured on it.

    `timed_whole`: its all-reduces were timed on the very links, and count as they are.
    """

    name: str
    description: str
    medium: Medium
    numbers: Mapping[str, Number]
    torus: TorusShapes | None = None
    tables: tuple[CollectiveTable, ...] = ()
    timed_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of device: its numbers and its interconnects, inner to outer.

    Attributes:
        links: `"die"`, `"domain"` and `"scale_out"`, as far as the chip has them.
        platform: JAX's name of the platform that programs for it are lowered for.
        topology: The topology that a user's file states, or "".
        measured: Date, device kind, versions and method of a measured file.
        based_on: The catalogue's chip that a user's file changes, or "".
        compiler: What the chip's compiler does where chips differ: `gathers_ahead`, whether
            gathers run beside compute, so that its scheduler begins them long before their
            use; `stores_quotients`, whether a softmax's quotient lies in memory before several
            products read it; `stores_score_gradients`, whether the gradient of its scores
            does. What is not stated is as on most chips: see `fact`.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    numbers: Mapping[str, Number]
    links: Mapping[str, Interconnect]
    platform: Platform
    topology: str = ""
    measured: Mapping[str, str] = field(default_factory=dict[str, str])
    based_on: str = ""
    compiler: Mapping[str, Fact] = field(default_factory=dict[str, Fact])

    def fact(self, name: str) -> Fact:
        """What the chip's compiler does."""
        if name in self.compiler:
            return self.compiler[name]
        tiled = self.links["domain"].medium == "torus"
        usual = {"gathers_ahead": not tiled, "stores_quotients": True, "stores_score_gradients": True}[name]
        return Fact(usual, f"as on other {'TPUs' if tiled else 'GPUs and CPUs'}: the file does not say")


Finder: TypeAlias = Callable[[str], Any]
"""Looks a catalogue file up by name, for `based_on` and the interconnects."""


def parse_chip(document: Any, file: str, find_chip: Finder, find_link: Finder) -> Chip:
    """The chip that a JSON document describes.

    Args:
        document: The decoded JSON.
        file: Where it comes from, for errors.
        find_chip: Name → `Chip` of the catalogue.
        find_link: Name → `Interconnect` of the catalogue.

    What a file does not state is its base's, but for peaks: where it states another bfloat16
    peak than its base, the other peaks are as many times the base's.

    Raises:
        HardwareFileError: A key is unknown or missing, or a number is no number,
            negative, without a source, or in the wrong unit.
    """
    doc = _object(document, file, "the file")
    _known(doc, (*_CHIP_KEYS, *LINK_ROLES), file)
    _schema(doc, file, "chip")
    base_name = doc.get("based_on") or ""
    if not isinstance(base_name, str):
        raise HardwareFileError(file, f"`based_on` is {base_name!r}; write the name of a chip of the catalogue")
    base: Chip | None = find_chip(base_name) if base_name else None
    links: dict[str, Interconnect] = dict(base.links) if base else {}
    for role in LINK_ROLES:
        link = doc.get(role)
        if isinstance(link, str):
            links[role] = find_link(link)
        elif link is not None:
            links[role] = parse_interconnect(link, f"{file}, {role}")
        elif role in doc:
            links.pop(role, None)
    numbers: dict[str, Number] = dict(base.numbers) if base else {}
    own = _object(doc.get("numbers", {}), file, "`numbers`")
    for key, entry in own.items():
        role, dot, rest = key.partition(".")
        if not dot:
            numbers[key] = _number(key, entry, CHIP_NUMBERS, file)
        elif role in links:
            changed = dict(links[role].numbers) | {rest: _number(rest, entry, LINK_NUMBERS, file)}
            links[role] = replace(links[role], numbers=changed)
        else:
            raise HardwareFileError(file, f"`{key}`: there is no `{role}` interconnect here; it has {', '.join(links)}")
    if base is not None:
        numbers |= _scaled_peaks(base, numbers, own)
    _complete(numbers, CHIP_NUMBERS, file)
    if "domain" not in links:
        raise HardwareFileError(file, "`domain` is missing: name the interconnect between neighbouring devices")
    for role, link in links.items():
        if (link.medium == "network") != (role == "scale_out"):
            raise HardwareFileError(
                file, f"`{role}` is {link.name}, a {link.medium}: networks, and only they, scale out"
            )
    if numbers["devices_per_chip_count"].value > 1 and "die" not in links:
        raise HardwareFileError(file, "`devices_per_chip_count` is more than 1: name the `die` between them")
    if "tables" in doc:
        rate = links["domain"].numbers["one_way_bytes_per_s"].value
        tables = tuple(_table(row, rate, file) for row in _list(doc["tables"], file, "`tables`"))
        links["domain"] = replace(links["domain"], tables=tables, timed_whole=True)
    measured = _object(doc.get("measured", {}), file, "`measured`")
    _known(measured, _MEASURED_KEYS, f"{file}, measured")
    return Chip(
        name=str(doc["name"]),
        aliases=tuple(map(str, _list(doc.get("aliases", []), file, "`aliases`"))),
        description=str(doc.get("description", base.description if base else "")),
        numbers=numbers,
        links=links,
        platform=_platform(doc, base, file),
        topology=str(doc.get("topology", "")),
        measured={key: str(value) for key, value in measured.items()},
        compiler={**(base.compiler if base else {}), **_facts(doc.get("compiler", {}), file)},
    )


def _platform(doc: Mapping[str, Any], base: Chip | None, file: str) -> Platform:
    if "platform" not in doc:
        if base is None:
            raise HardwareFileError(
                file,
                "`platform` is missing: say who compiles for the chip, "
                '`"platform": {"value": "cuda", "source": …}`, or what the file is `based_on`',
            )
        return base.platform
    entry = _object(doc["platform"], file, "`platform`")
    _exactly(entry, ("value", "source"), f"{file}, platform")
    value, source = entry["value"], entry["source"]
    if not isinstance(value, str) or not value or not isinstance(source, str) or not source.strip():
        raise HardwareFileError(file, "`platform` needs a `value`, JAX's name of it, and a `source`")
    if base is not None and value != base.platform.value:
        raise HardwareFileError(file, f"`platform` is {value!r}, and that of {base.name} is {base.platform.value!r}")
    return Platform(value, source)


def _facts(entries: Any, file: str) -> dict[str, Fact]:
    doc = _object(entries, file, "`compiler`")
    _known(doc, COMPILER_FACTS, f"{file}, compiler")
    found: dict[str, Fact] = {}
    for name, entry in doc.items():
        fact = _object(entry, file, f"`compiler.{name}`")
        _exactly(fact, ("value", "source"), f"{file}, compiler, `{name}`")
        if not isinstance(fact["value"], bool) or not isinstance(fact["source"], str) or not fact["source"].strip():
            raise HardwareFileError(file, f"`compiler.{name}` needs a `value`, true or false, and a `source`")
        found[name] = Fact(fact["value"], fact["source"])
    return found


def _scaled_peaks(base: Chip, numbers: Mapping[str, Number], own: Mapping[str, Any]) -> dict[str, Number]:
    """The peaks that a file does not state, as many times its base's as the peak next to them that it does."""
    found: dict[str, Number] = {}
    for key in CHIP_NUMBERS:
        if not key.startswith("peak_") or key in own or key not in base.numbers:
            continue
        wide = ("peak_float32_flops_per_s",) if key == "peak_float64_flops_per_s" else ()
        near = next((k for k in (*wide, "peak_bfloat16_flops_per_s") if k in own and k in base.numbers), None)
        if near is not None and numbers[near].value != base.numbers[near].value:
            times = numbers[near].value / base.numbers[near].value
            source = f"assumed: {times:.4g} times that of {base.name}, as {near} is; state it where that is not so"
            found[key] = Number(base.numbers[key].value * times, source)
    return found


def parse_interconnect(document: Any, file: str) -> Interconnect:
    """The interconnect that a JSON document describes; raises as `parse_chip`."""
    doc = _object(document, file, "the interconnect")
    _known(doc, ("schema", "kind", "name", "description", "medium", "numbers", "torus", "tables"), file)
    _schema(doc, file, "interconnect")
    medium = doc.get("medium")
    if medium not in get_args(Medium):
        raise HardwareFileError(file, f"`medium` is {medium!r}; it must be one of {', '.join(get_args(Medium))}")
    stated = _object(doc.get("numbers", {}), file, "`numbers`")
    numbers = {key: _number(key, entry, LINK_NUMBERS, file) for key, entry in stated.items()}
    _complete(numbers, LINK_NUMBERS, file)
    if medium in ("switch", "direct") and "max_devices_count" not in numbers:
        raise HardwareFileError(file, f"missing numbers: max_devices_count; how many devices does the {medium} join?")
    if (medium == "torus") != ("torus" in doc):
        raise HardwareFileError(file, "`torus` (shapes, wrap) belongs to a torus medium, and to no other")
    return Interconnect(
        name=str(doc["name"]),
        description=str(doc.get("description", "")),
        medium=cast(Medium, medium),
        numbers=numbers,
        torus=_torus(doc["torus"], file) if medium == "torus" else None,
        tables=tuple(
            _table(row, numbers["one_way_bytes_per_s"].value, file)
            for row in _list(doc.get("tables", []), file, "`tables`")
        ),
    )


def _torus(entry: Any, file: str) -> TorusShapes:
    doc = _object(entry, file, "`torus`")
    _exactly(doc, ("wrap", "shapes", "largest", "name_counts_cores", "source"), f"{file}, torus")
    if doc.get("wrap") not in ("cubes of 4", "axes of 16"):
        raise HardwareFileError(file, f'`torus.wrap` is {doc.get("wrap")!r}; write "cubes of 4" or "axes of 16"')
    if not isinstance(doc["name_counts_cores"], bool):
        raise HardwareFileError(file, f"`torus.name_counts_cores` is {doc['name_counts_cores']!r}, not true or false")
    shapes = tuple(
        _lengths(shape, file, "a shape of `torus.shapes`") for shape in _list(doc["shapes"], file, "`torus.shapes`")
    )
    largest = _lengths(doc["largest"], file, "`torus.largest`")
    if not shapes or any(len(shape) != len(largest) for shape in shapes):
        raise HardwareFileError(file, "`torus.shapes` has no shape, or one of other dimensions than `torus.largest`")
    return TorusShapes(
        wrap=doc["wrap"],
        shapes=shapes,
        largest=largest,
        name_counts_cores=doc["name_counts_cores"],
        source=str(doc["source"]),
    )


def _lengths(value: Any, file: str, what: str) -> tuple[int, ...]:
    lengths = tuple(_list(value, file, what))
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _LONGEST_AXIS for n in lengths)
    if not whole or not 1 <= len(lengths) <= _MOST_AXES:
        raise HardwareFileError(
            file, f"{what} is {str(value)[:80]}; write up to {_MOST_AXES} lengths, whole, from 1 to {_LONGEST_AXIS}"
        )
    return lengths


def _table(entry: Any, link_bytes_per_s: float, file: str) -> CollectiveTable:
    doc = _object(entry, file, "a row of `tables`")
    _exactly(doc, ("collective", "devices", "source", "bytes", "seconds"), f"{file}, tables")
    kind = doc.get("collective")
    if kind not in KINDS:
        raise HardwareFileError(file, f"tables: `collective` is {kind!r}; it must be one of {', '.join(KINDS)}")
    devices = doc["devices"]
    if isinstance(devices, bool) or not isinstance(devices, int) or not 2 <= devices <= MOST_COUNT:
        raise HardwareFileError(file, f"tables, {kind}: `devices` is {str(devices)[:40]}; a group has two or more")
    where = f"tables, {kind} on {devices} devices"
    sizes, seconds = (_floats(doc[key], file, f"{where}: `{key}`") for key in ("bytes", "seconds"))
    if sizes.shape != seconds.shape or sizes.size < 2:
        raise HardwareFileError(file, f"{where}: `bytes` and `seconds` must be two lists of one length, 2 or more")
    if not (np.all(np.diff(sizes) > 0) and sizes[0] >= 1 and sizes[-1] <= MOST):
        raise HardwareFileError(file, f"{where}: `bytes` must ascend, from 1 on")
    if not (np.all(seconds >= LEAST) and np.all(seconds <= MOST)):
        raise HardwareFileError(file, f"{where}: `seconds` must be positive")
    return CollectiveTable(kind, devices, sizes, seconds, str(doc["source"]), link_bytes_per_s)


def _list(value: Any, file: str, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise HardwareFileError(file, f"{what} must be a JSON list, not {type(value).__name__}")
    return cast(list[Any], value)


def _floats(value: Any, file: str, what: str) -> Floats:
    found = _list(value, file, what)
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in found):
        raise HardwareFileError(file, f"{what} must be numbers alone")
    if not all(_is_finite(x) for x in found):
        raise HardwareFileError(file, f"{what} must be finite")
    return np.asarray(found, float)


def _object(value: Any, file: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise HardwareFileError(file, f"{what} must be a JSON object, not {type(value).__name__}")
    return cast(dict[str, Any], value)


def _known(doc: Mapping[str, Any], keys: tuple[str, ...], file: str) -> None:
    for key in doc:
        if key not in keys:
            raise HardwareFileError(file, f"unknown key `{key}`{_near(key, keys)}")


def _exactly(doc: Mapping[str, Any], keys: tuple[str, ...], file: str) -> None:
    """All of these keys and no others."""
    _known(doc, keys, file)
    missing = [key for key in keys if key not in doc]
    if missing:
        raise HardwareFileError(file, f"missing keys: {', '.join(missing)}")


def _near(key: str, keys: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, keys, n=2, cutoff=0.6)
    return f"; did you mean `{'` or `'.join(near)}`?" if near else f"; known: {', '.join(keys)}"


def _schema(doc: Mapping[str, Any], file: str, kind: str) -> None:
    if doc.get("schema") != SCHEMA:
        raise HardwareFileError(file, f"`schema` is {doc.get('schema')!r}; this version reads {SCHEMA!r}")
    if doc.get("kind") != kind:
        raise HardwareFileError(file, f"`kind` is {doc.get('kind')!r}; expected {kind!r}")
    if not isinstance(doc.get("name"), str) or not doc["name"]:
        raise HardwareFileError(file, "`name` is missing")


def _stem(key: str) -> str:
    """The key without what looks like a unit: `hbm_gb`, `hbm_bytes` → `hbm`."""
    return re.sub(
        r"_(bytes_per_s|flops_per_s|[a-z]*bytes|[kmgt]i?bp?s?|t?g?flops|[nmu]?s|us|fraction|percent|count|hz)$", "", key
    )


def _number(key: str, entry: Any, known: Mapping[str, bool], file: str) -> Number:
    if key not in known:
        for right in known:
            if _stem(right) == _stem(key):
                unit = next(u for u in UNITS if right.endswith(f"_{u}")).replace("_per_s", " per second")
                raise HardwareFileError(
                    file,
                    f"`{key}` has the wrong unit suffix: write `{right}`, in {unit} (SI)",
                )
        raise HardwareFileError(file, f"unknown number `{key}`{_near(key, tuple(known))}")
    doc = _object(entry, file, f"`{key}`")
    _known(doc, ("value", "source"), f"{file}, `{key}`")
    value, source = doc.get("value"), doc.get("source")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise HardwareFileError(file, f"`{key}`: `value` is {repr(value)[:40]}, not a finite number")
    if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
        raise HardwareFileError(
            file, f"`{key}` is {value}; it must be {'0 or more' if key in MAY_BE_ZERO else 'positive'}"
        )
    if value and not LEAST <= value <= MOST:
        raise HardwareFileError(file, f"`{key}` is {value:.3g}; in SI units no chip has it")
    if key.endswith("_fraction") and value > 1:
        raise HardwareFileError(file, f"`{key}` is {value}; a fraction lies between 0 and 1")
    if key.endswith("_count") and (value != int(value) or value > MOST_COUNT):
        raise HardwareFileError(file, f"`{key}` is {value}; a count is whole, and at most {MOST_COUNT}")
    if not isinstance(source, str) or not source.strip():
        raise HardwareFileError(file, f"`{key}` has no `source`: say who measured or published it")
    return Number(float(value), source)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _complete(numbers: Mapping[str, Number], known: Mapping[str, bool], file: str) -> None:
    missing = [key for key, required in known.items() if required and key not in numbers]
    if missing:
        raise HardwareFileError(
            file, f"missing numbers: {', '.join(missing)}; state them, or say what the file is `based_on`"
        )
