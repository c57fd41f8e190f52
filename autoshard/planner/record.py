"""PlanRecord: a layout for every input, output and annotated value, with its promises.

This is all that a plan file holds. The file is JSON with a published schema
(`plan.schema.json`); reading one never executes anything. Wall-clock seconds stay out
of it, so that the same input gives the same file, byte for byte.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import _jax, files
from autoshard.errors import MeshError, PlanFileError, SpecError
from autoshard.ir.constraints import Constraints
from autoshard.ir.host_state import HOST_MEMORY
from autoshard.ir.layout import Layout
from autoshard.ir.loop_sums import LoopSum
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputation import Recomputation
from autoshard.planner import compiler_flags
from autoshard.problem.collective import Collective
from cost_models import strict_json

SCHEMA_VERSION = 2  # which a file has that computes the program otherwise than it is written; others have 1

# So begins a note of every plan for a gradient.
FOR_GRADIENT = "planned for its gradient with respect to"

# So begins a note of every plan that finishes sums over loops' trips after the loops.
AFTER_LOOPS = "summed once, after their loops:"

# So begins a note of every plan that recomputes.
KEEPS = "backward passes find"

# So begins a note of every plan with state in the host's memory.
HOST_STATE = "state in the host's memory:"

# So begins a note of every plan that chose its number of micro-batches.
ACCUMULATED = "accumulated in"

# So begins a note of every plan that chose over which axis its layers are in stages.
STAGED = "layers in"

_OPEN = "?"  # in a constraint: a dimension that a hand-written one leaves to the partitioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One input or output: its pytree path, shape, dtype and layout; `on_host`: in the host's memory or not."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    on_host: bool = False

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Where it lies on a mesh."""
        return NamedSharding(mesh, self.spec, memory_kind=HOST_MEMORY if self.on_host else None)


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
    """Predicted peak bytes per device, the equation at which it is reached, and its parts."""

    peak_bytes: int
    limit_bytes: int
    at: str
    kinds: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof of the solver: no plan in the searched space costs less than `bound_s`."""

    status: str
    objective_s: float
    bound_s: float
    gap: float
    solver: str
    space: str  # in words: the space over which the plan is optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Everything that a plan file holds."""

    name: str
    digest: str
    asked: str = ""  # digest of the pins and donations; empty where a file does not say
    emitted: str = ""  # "needed", "compiled" or "all" constraints, as asked; empty where a file does not say
    mesh: MeshAxes
    device_order: tuple[int, ...]  # physical device of each mesh position, row-major
    hardware: str
    hardware_digest: str
    versions: Mapping[str, str]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    donated: tuple[int, ...]  # positions of donated inputs
    recomputation: Recomputation | None = None  # None: the program as it is written
    microbatches: int | None = None  # of accumulations that leave it open; None: there are none
    loop_sums: tuple[LoopSum, ...] = ()  # those that are finished once, after their loops
    gradient_of: tuple[int, ...] = ()  # arguments for whose gradient a forward function was planned
    pins: Constraints
    collectives: tuple[Collective, ...]
    cost: Cost
    memory: Memory
    certificate: Certificate
    compiler_options: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def host_state(self) -> tuple[int, ...]:
        """The positions of the inputs that lie in the host's memory."""
        return tuple(i for i, leaf in enumerate(self.inputs) if leaf.on_host)

    def dumps(self) -> str:
        """The plan file's text."""
        return json.dumps(_to_json(self), indent=1, ensure_ascii=False) + "\n"


def sums_in_trips(record: PlanRecord) -> list[Collective]:
    """The collectives that finish sums in the trips of loops."""
    return [c for c in record.collectives if c.trips > 1 and c.kind in ("all-reduce", "reduce-scatter")]


def summed_in_trips_s(record: PlanRecord) -> float:
    """The seconds of a step that sums in the trips of loops take if nothing hides."""
    return sum(c.seconds * c.trips for c in sums_in_trips(record))


def write_plan_file(record: PlanRecord, path: str | Path) -> None:
    """Writes a plan file, whole or not at all.

    Raises:
      PlanFileError: it cannot be written.
    """
    files.write_whole(path, record.dumps())


def schema() -> dict[str, Any]:
    """The JSON Schema of plan files."""
    return json.loads(resources.files("autoshard").joinpath("plan.schema.json").read_text())


def read_plan_file(path: str | Path) -> PlanRecord:
    """Reads a plan file.

    Raises:
      PlanFileError: not found, truncated, not JSON, of a newer schema, or malformed.
    """
    path = Path(path)
    if not files.exists(path):
        raise PlanFileError(
            f"cannot read the plan file {path}: there is none; `autoshard plan … --out {path}` or `plan.save` writes it"
        )
    return parse(files.read_text(path, "the plan file"), path)


def parse(text: str, source: object) -> PlanRecord:
    """Reads a plan file's text; errors as of `read_plan_file`, which name the source."""
    try:
        data = files.read_json(text, source)
    except PlanFileError as error:
        raise PlanFileError(f"{error}; save the plan again") from error
    version = data.get("schema") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise PlanFileError(
            f"{source} has schema {version}; this autoshard reads up to {SCHEMA_VERSION}: upgrade autoshard"
        )
    from jsonschema.exceptions import best_match  # here: what reads no plan need not load it

    try:
        wrong = best_match(_validator().iter_errors(data))
    except RecursionError as error:
        raise PlanFileError(f"{source} is not a plan file: lists in lists, too deep to read") from error
    if wrong is not None:
        at = "/".join(map(str, wrong.absolute_path)) or "the top"
        raise PlanFileError(f"{source} is not a plan file: at {at}: {wrong.message[:200]}") from wrong
    options = compiler_flags.checked(data["compiler_options"], source)
    try:
        record = _from_json({**data, "compiler_options": options})
        _check(record)
    except (SpecError, MeshError) as error:
        raise PlanFileError(f"{source} is not a plan file: {error}") from error
    return record


@cache
def _validator() -> Any:
    """The schema's validator, to which 1.0 is no integer, as it is in JSON Schema."""
    from jsonschema import Draft202012Validator, validators

    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, x: type(x) is int)
    return validators.extend(Draft202012Validator, type_checker=checker)(schema())


def _check(record: PlanRecord) -> None:
    """Raises a SpecError or MeshError if a record contradicts itself."""
    pins, mesh, inputs = record.pins, record.mesh, len(record.inputs)
    if mesh.size > strict_json.LARGEST or len(record.device_order) != mesh.size:
        raise MeshError(f"device_order has {len(record.device_order)} devices, the mesh {mesh.size}: {mesh}")
    if sorted(record.device_order) != list(range(mesh.size)):
        raise MeshError(f"device_order is no order of the {mesh.size} devices of {mesh}")
    leaves = (*record.inputs, *record.outputs)
    for leaf in leaves:
        if not _is_dtype(leaf.dtype):
            raise SpecError(f"{leaf.path}: there is no dtype {leaf.dtype[:40]!r}")
        if math.prod(leaf.shape) * 16 > strict_json.LARGEST:
            raise SpecError(f"{leaf.path}: nothing has the shape {list(leaf.shape)}")
        Layout.from_spec(_named(leaf.spec, mesh), len(leaf.shape)).local_shape(leaf.shape, mesh)
    for group in (pins.made, pins.taken, pins.again, pins.kernels, pins.inputs, pins.outputs):
        for spec in (spec for specs in group.values() for spec in specs):
            Layout.from_spec(_named(_without_open(spec), mesh), len(spec))
    for what, group, avals in (("input", pins.inputs, record.inputs), ("output", pins.outputs, record.outputs)):
        for i, specs in group.items():
            if i >= len(avals) or any(len(spec) > len(avals[i].shape) for spec in specs):
                raise SpecError(f"a constraint of {what} {i} fits none of the {len(avals)} {what}s")
    if any(len(specs) != 1 for specs in pins.kernels.values()):
        raise SpecError("a kernel's operand or result has one layout")
    if any(i >= inputs for i in record.donated):
        raise SpecError(f"donated inputs {list(record.donated)} of {inputs}")
    for collective in record.collectives:
        for axis in collective.axes:
            _named(PartitionSpec(axis), mesh)
    memory = record.memory
    counted = (memory.peak_bytes, memory.limit_bytes, *memory.kinds.values(), *(c.nbytes for c in record.collectives))
    if min(counted) < 0:
        raise SpecError(f"{min(counted)} bytes: there cannot be less than none")


def _named(spec: PartitionSpec, mesh: MeshAxes) -> PartitionSpec:
    """A spec whose axes are the mesh's, or a SpecError."""
    for axis in (axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())):
        if axis not in mesh.names:
            raise SpecError(f"{spec} names the axis `{axis}`; the mesh has {', '.join(mesh.names)}")
    return spec


def _is_dtype(name: str) -> bool:
    try:
        _jax.itemsize_of(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    return "," not in name


def _without_open(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec))


def _spec_to_json(spec: PartitionSpec) -> list[Any]:
    entries = [_OPEN if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]


def _spec_from_json(entries: list[Any]) -> PartitionSpec:
    read = [PartitionSpec.UNCONSTRAINED if entry == _OPEN else entry for entry in entries]
    return PartitionSpec(*(_axes_from_json(entry) if isinstance(entry, list) else entry for entry in read))


def _axes_from_json(names: list[str]) -> str | tuple[str, ...] | None:
    return names[0] if len(names) == 1 else tuple(names) or None


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    there = {"memory": "host"} if leaf.on_host else {}
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "spec": _spec_to_json(leaf.spec),
        **there,
    }


def _leaf_from_json(data: dict[str, Any]) -> Leaf:
    return Leaf(
        path=data["path"],
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        spec=_spec_from_json(data["spec"]),
        on_host=data.get("memory") == "host",
    )


def _collective_from_json(data: dict[str, Any]) -> Collective:
    fields = dict(data)
    fields["axes"] = tuple(data["axes"])
    return Collective(**fields)


def _recomputation_to_json(chosen: Recomputation | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    group = {} if chosen.group == 1 else {"group": chosen.group}
    offloaded = {"offloaded": list(chosen.offloaded)} if chosen.offloaded else {}
    return {"recomputation": {"remat": chosen.remat, "kept": list(chosen.kept), **offloaded, **group}}


def _recomputation_from_json(data: dict[str, Any] | None) -> Recomputation | None:
    if data is None:
        return None
    return Recomputation(
        remat=data["remat"],
        kept=tuple(data["kept"]),
        offloaded=tuple(data.get("offloaded", ())),
        group=data.get("group", 1),
    )


def _is_computed_otherwise(record: PlanRecord) -> bool:
    decided = record.recomputation is not None or record.microbatches is not None
    return decided or bool(record.loop_sums or record.host_state)


def _to_json(record: PlanRecord) -> dict[str, Any]:
    pins = record.pins
    return {
        "schema": SCHEMA_VERSION if _is_computed_otherwise(record) else 1,
        "name": record.name,
        "digest": record.digest,
        "asked": record.asked,
        "emitted": record.emitted,
        "mesh": record.mesh.shape,
        "device_order": list(record.device_order),
        "hardware": record.hardware,
        "hardware_digest": record.hardware_digest,
        "versions": dict(record.versions),
        "inputs": [_leaf_to_json(leaf) for leaf in record.inputs],
        "outputs": [_leaf_to_json(leaf) for leaf in record.outputs],
        "donated": list(record.donated),
        "gradient_of": list(record.gradient_of),
        **_recomputation_to_json(record.recomputation),
        **({} if record.microbatches is None else {"microbatches": record.microbatches}),
        **({"loop_sums": [asdict(one) for one in record.loop_sums]} if record.loop_sums else {}),
        "constraints": [
            {"at": at, "equation": list(path), "position": i, "specs": [_spec_to_json(s) for s in specs]}
            | ({"group": pins.regathered[path, i]} if at == "taken" and (path, i) in pins.regathered else {})
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
    regathered: dict[Any, int] = {}
    for entry in data["constraints"]:
        specs = tuple(_spec_from_json(s) for s in entry["specs"])
        inside = entry["at"] in within
        key = (tuple(entry["equation"]), entry["position"]) if inside else entry["position"]
        groups[entry["at"]][key] = specs
        if "group" in entry:  # of operands alone, as the schema says
            regathered[key] = entry["group"]
    return PlanRecord(
        name=data["name"],
        digest=data["digest"],
        asked=data.get("asked", ""),
        emitted=data.get("emitted", ""),
        mesh=MeshAxes.of(data["mesh"]),
        device_order=tuple(data["device_order"]),
        hardware=data["hardware"],
        hardware_digest=data["hardware_digest"],
        versions=data["versions"],
        inputs=tuple(_leaf_from_json(leaf) for leaf in data["inputs"]),
        outputs=tuple(_leaf_from_json(leaf) for leaf in data["outputs"]),
        donated=tuple(data["donated"]),
        gradient_of=tuple(data.get("gradient_of", ())),
        recomputation=_recomputation_from_json(data.get("recomputation")),
        microbatches=data.get("microbatches"),
        loop_sums=tuple(LoopSum(**one) for one in data.get("loop_sums", ())),
        pins=Constraints(
            made=groups["made"],
            taken=groups["taken"],
            again=groups["again"],
            kernels=groups["kernel"],
            regathered=regathered,
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
