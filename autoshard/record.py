"""PlanRecord: a layout for every input, output and annotated value, with its promises.

This is all that a plan file holds. The file is JSON with a published schema
(`plan.schema.json`); reading one never executes anything. Wall-clock seconds stay out
of it, so that the same input gives the same file, byte for byte.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
from jax.sharding import PartitionSpec

from autoshard.errors import MeshError, PlanFileError, SpecError
from autoshard.layout import Layout
from autoshard.mesh import MeshAxes
from autoshard.pins import Pins
from autoshard.problem.assignment import Collective

SCHEMA_VERSION = 1

_OPEN = "?"  # in a constraint: a dimension that a hand-written one leaves to the partitioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One input or output: its pytree path, shape, dtype and layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted seconds of a step: compute + exposed communication."""

    step_s: float
    compute_s: float
    communication_s: float
    hidden_s: float

    @property
    def exposed_s(self) -> float:
        return self.communication_s - self.hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Predicted peak bytes per device, where it is reached, and what makes it up."""

    peak_bytes: int
    limit_bytes: int
    at: str
    kinds: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the solver proved: no plan in the searched space costs less than `bound_s`."""

    status: str
    objective_s: float
    bound_s: float
    gap: float
    solver: str
    space: str  # in words, what the plan is optimal over


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Everything that a plan file holds."""

    name: str
    digest: str
    asked: str = ""  # digest of the pins and donations; empty where a file does not say
    mesh: MeshAxes
    device_order: tuple[int, ...]  # physical device of each mesh position, row-major
    hardware: str
    hardware_digest: str
    versions: Mapping[str, str]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[int, ...]  # positions of donated inputs
    gradient_of: tuple[int, ...] = ()  # arguments for whose gradient a forward function was planned
    pins: Pins
    collectives: tuple[Collective, ...]
    cost: Cost
    memory: Memory
    certificate: Certificate
    compiler_options: Mapping[str, Any]
    notes: tuple[str, ...]

    def dumps(self) -> str:
        """The plan file's text."""
        return json.dumps(_to_json(self), indent=1, ensure_ascii=False) + "\n"


def write(record: PlanRecord, path: str | Path) -> None:
    """Writes a plan file, whole or not at all."""
    write_whole(Path(path), record.dumps())


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by a finished one: who reads meanwhile sees the old text or the new."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)


def schema() -> dict[str, Any]:
    """The JSON Schema of plan files."""
    return json.loads(resources.files("autoshard").joinpath("plan.schema.json").read_text())


def read(path: str | Path) -> PlanRecord:
    """Reads a plan file.

    Raises:
      PlanFileError: not found, truncated, not JSON, of a newer schema, or malformed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PlanFileError(
            f"cannot read the plan file {path}: there is none; `autoshard plan … --out {path}` or `plan.save` writes it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"cannot read the plan file {path}: {error}") from error
    return parse(text, path)


def parse(text: str, source: object) -> PlanRecord:
    """Reads a plan file's text; errors as of `read`, which name the source."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        what = "truncated or not JSON" if text.strip() else "empty"
        raise PlanFileError(f"{source} is {what}: {error}; save the plan again") from error
    version = data.get("schema") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise PlanFileError(
            f"{source} has schema {version}; this autoshard reads up to {SCHEMA_VERSION}: upgrade autoshard"
        )
    try:
        jsonschema.validate(data, schema())
    except jsonschema.ValidationError as error:
        at = "/".join(map(str, error.absolute_path)) or "the top"
        raise PlanFileError(f"{source} is not a plan file: at {at}: {error.message[:200]}") from error
    try:
        record = _from_json(data)
        _check(record)
    except (SpecError, MeshError) as error:
        raise PlanFileError(f"{source} is not a plan file: {error}") from error
    return record


def _check(record: PlanRecord) -> None:
    """Raises a SpecError or MeshError if a record contradicts itself."""
    leaves = (*record.inputs, *record.outputs)
    pins = record.pins
    constraints = [
        s
        for group in (pins.made, pins.taken, pins.again, pins.kernels, pins.inputs, pins.outputs)
        for specs in group.values()
        for s in specs
    ]
    for spec in (*(leaf.spec for leaf in leaves), *map(_without_open, constraints)):
        for axis in (axis for dim in Layout.from_spec(spec, len(spec)).dims for axis in dim):
            if axis not in record.mesh.names:
                raise SpecError(f"{spec} names the axis `{axis}`; the mesh has {', '.join(record.mesh.names)}")
    for leaf in leaves:
        Layout.from_spec(leaf.spec, len(leaf.shape)).local_shape(leaf.shape, record.mesh)
    if sorted(record.device_order) != list(range(record.mesh.size)):
        raise MeshError(f"device_order is no order of the {record.mesh.size} devices of {record.mesh}")
    if any(i >= len(record.inputs) for i in record.donated):
        raise SpecError(f"donated inputs {list(record.donated)} of {len(record.inputs)}")


def _without_open(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec))


def _spec_to_json(spec: PartitionSpec) -> list[Any]:
    entries = [_OPEN if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]


def _spec_from_json(entries: list[Any]) -> PartitionSpec:
    read = [PartitionSpec.UNCONSTRAINED if entry == _OPEN else entry for entry in entries]
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in read))


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    return {"path": leaf.path, "shape": list(leaf.shape), "dtype": leaf.dtype, "spec": _spec_to_json(leaf.spec)}


def _leaf_from_json(data: dict[str, Any]) -> Leaf:
    return Leaf(path=data["path"], shape=tuple(data["shape"]), dtype=data["dtype"], spec=_spec_from_json(data["spec"]))


def _collective_from_json(data: dict[str, Any]) -> Collective:
    fields = dict(data)
    fields["axes"] = tuple(data["axes"])
    return Collective(**fields)


def _to_json(record: PlanRecord) -> dict[str, Any]:
    pins = record.pins
    return {
        "schema": SCHEMA_VERSION,
        "name": record.name,
        "digest": record.digest,
        "asked": record.asked,
        "mesh": record.mesh.shape,
        "device_order": list(record.device_order),
        "hardware": record.hardware,
        "hardware_digest": record.hardware_digest,
        "versions": dict(record.versions),
        "inputs": [_leaf_to_json(leaf) for leaf in record.inputs],
        "outputs": [_leaf_to_json(leaf) for leaf in record.outputs],
        "donated": list(record.donated),
        "gradient_of": list(record.gradient_of),
        "constraints": [
            {"at": at, "equation": list(path), "position": i, "specs": [_spec_to_json(s) for s in specs]}
            for at, group in (
                ("made", pins.made),
                ("taken", pins.taken),
                ("again", pins.again),
                ("kernel", pins.kernels),
            )
            for (path, i), specs in sorted(group.items())
        ]
        + [
            {"at": at, "equation": [], "position": i, "specs": [_spec_to_json(s) for s in specs]}
            for at, group in (("input", pins.inputs), ("output", pins.outputs))
            for i, specs in sorted(group.items())
        ],
        "collectives": [{**asdict(c), "axes": list(c.axes)} for c in record.collectives],
        "cost": asdict(record.cost),
        "memory": {**asdict(record.memory), "kinds": dict(record.memory.kinds)},
        "certificate": asdict(record.certificate),
        "compiler_options": dict(record.compiler_options),
        "notes": list(record.notes),
    }


def _from_json(data: dict[str, Any]) -> PlanRecord:
    within = ("made", "taken", "again", "kernel")
    groups: dict[str, dict[Any, Any]] = {at: {} for at in (*within, "input", "output")}
    for entry in data["constraints"]:
        specs = tuple(_spec_from_json(s) for s in entry["specs"])
        inside = entry["at"] in within
        key = (tuple(entry["equation"]), entry["position"]) if inside else entry["position"]
        groups[entry["at"]][key] = specs
    return PlanRecord(
        name=data["name"],
        digest=data["digest"],
        asked=data.get("asked", ""),
        mesh=MeshAxes.of(data["mesh"]),
        device_order=tuple(data["device_order"]),
        hardware=data["hardware"],
        hardware_digest=data["hardware_digest"],
        versions=data["versions"],
        inputs=tuple(_leaf_from_json(leaf) for leaf in data["inputs"]),
        outputs=tuple(_leaf_from_json(leaf) for leaf in data["outputs"]),
        donated=tuple(data["donated"]),
        gradient_of=tuple(data.get("gradient_of", ())),
        pins=Pins(
            made=groups["made"],
            taken=groups["taken"],
            again=groups["again"],
            kernels=groups["kernel"],
            inputs=groups["input"],
            outputs=groups["output"],
        ),
        collectives=tuple(_collective_from_json(c) for c in data["collectives"]),
        cost=Cost(**data["cost"]),
        memory=Memory(**data["memory"]),
        certificate=Certificate(**data["certificate"]),
        compiler_options=data["compiler_options"],
        notes=tuple(data["notes"]),
    )
