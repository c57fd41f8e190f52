"""The physical topology: levels of links, their dimensions, and the names people write for them.

`"h100:2x4"` is two nodes of four GPUs; `"tpu-v5p:4x4x8"` a torus of chips;
`"tpu-v5e:4*16x16"` four slices of 16x16 joined by the data-centre network;
`"cpu:8"` eight devices of one host. A device's id is its row-major position.
"""

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from cost_models.errors import TopologyError
from cost_models.machines.hardware_file import Chip, Medium, TorusShapes

MOST_DEVICES = 2**20


@dataclass(frozen=True, slots=True)
class Dimension:
    """One physical dimension: its length, the level that links it, whether it closes into a ring."""

    size: int
    level: str
    medium: Medium
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """Dimensions, outermost (slowest links) first.

    Attributes:
        dimensions: What a device id is row-major over.
        name: How the topology is written after the colon: `"2x4"`.
    """

    dimensions: tuple[Dimension, ...]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dimensions)

    @property
    def devices(self) -> int:
        return prod(self.shape)


def parse_topology(chip: Chip, text: str) -> Topology:
    """The topology that `text` names on this chip.

    Raises:
        TopologyError: It is misspelt, or no such topology exists.
    """
    written = text.lower().replace("×", "x").replace(" ", "")
    match = re.fullmatch(r"(?:([0-9]{1,9})\*)?([0-9]{1,9}(?:x[0-9]{1,9}){0,7})", written)
    if match is None:
        raise TopologyError(f"`{chip.name}:{text[:80]}` is no topology; write {examples(chip)}")
    outer, sizes = int(match[1] or 1), tuple(int(x) for x in match[2].split("x"))
    if min(outer, *sizes) < 1:
        raise TopologyError(f"`{chip.name}:{text}`: sizes must be positive")
    if outer * prod(sizes) > MOST_DEVICES:
        raise TopologyError(f"`{chip.name}:{text}` has {outer * prod(sizes)} devices; {MOST_DEVICES} is the most")
    shapes = chip.links["domain"].torus
    if shapes is None:
        return _nodes(chip, outer, sizes, text)
    return _torus(chip, shapes, outer, sizes)


def smallest_topology(chip: Chip, devices: int) -> str:
    """The smallest usual topology of this chip that holds so many devices, as text.

    Raises:
        TopologyError: None does: the number is not one, or has no usual shape.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise TopologyError(f"{devices} devices of {chip.name}: there must be 1 to {MOST_DEVICES}")
    shapes = chip.links["domain"].torus
    if shapes is None:
        limit = _domain_limit(chip)
        inner = max(d for d in range(1, min(limit, devices) + 1) if devices % d == 0)
        return str(devices) if "scale_out" not in chip.links else f"{devices // inner}x{inner}"
    per_chip = int(chip.numbers["devices_per_chip_count"].value)
    slices = sorted(_slices(shapes), key=lambda shape: (prod(shape), max(shape), shape))
    for shape in slices:
        if prod(shape) * per_chip >= devices:
            return "x".join(map(str, shape))
    # More than one slice: the largest that divides the number.
    for shape in reversed(slices):
        if devices % (prod(shape) * per_chip) == 0:
            return f"{devices // (prod(shape) * per_chip)}*{'x'.join(map(str, shape))}"
    raise TopologyError(f"no usual topology of {chip.name} holds {devices} devices; write one: {examples(chip)}")


def topologies(chip: Chip, devices: int) -> tuple[str, ...]:
    """Every usual topology of exactly so many devices, as text: full nodes, or slices that exist.

    Several slices over the data-centre network only where the largest one is too small.
    """
    shapes = chip.links["domain"].torus
    if shapes is None:
        whole = devices > 0 and ("scale_out" in chip.links or devices <= _domain_limit(chip))
        return (smallest_topology(chip, devices),) if whole else ()
    per_chip = int(chip.numbers["devices_per_chip_count"].value)
    slices = sorted(_slices(shapes), key=lambda shape: (max(shape), shape))
    single = ["x".join(map(str, s)) for s in slices if prod(s) * per_chip == devices]
    if single or devices < per_chip * max(prod(s) for s in slices):
        return tuple(single)
    largest = max((prod(s) for s in slices if devices % (prod(s) * per_chip) == 0), default=0)
    return tuple(
        f"{devices // (largest * per_chip)}*{'x'.join(map(str, s))}" for s in slices if largest and prod(s) == largest
    )


def counts(chip: Chip) -> tuple[int, ...]:
    """Numbers of devices that single slices, or nodes up to a thousand, have; ascending."""
    shapes = chip.links["domain"].torus
    if shapes is not None:
        per_chip = int(chip.numbers["devices_per_chip_count"].value)
        return tuple(sorted({prod(s) * per_chip for s in _slices(shapes)}))
    limit = _domain_limit(chip)
    inside = range(1, limit + 1)
    return (*inside, *range(2 * limit, 1000 * limit + 1, limit)) if "scale_out" in chip.links else tuple(inside)


def _slices(shapes: TorusShapes) -> set[tuple[int, ...]]:
    """Every slice, axes ascending: the listed ones, and boxes of whole cubes."""
    found = set(shapes.shapes)
    if shapes.wrap == "cubes of 4":
        boxes = product(*(range(4, most + 1, 4) for most in shapes.largest))
        found |= {box for box in boxes if tuple(sorted(box)) == box}
    return found


def examples(chip: Chip) -> str:
    """How topologies of this chip are written."""
    shapes = chip.links["domain"].torus
    if shapes is not None:
        usual = "x".join(map(str, shapes.shapes[len(shapes.shapes) // 2]))
        return f"{chip.name}:{usual} (chips), or {chip.name}:2*{usual} for two slices"
    if "scale_out" not in chip.links:
        return f"{chip.name}:8"
    return f"{chip.name}:2x{_domain_limit(chip)} (nodes x GPUs)"


def explain_core_count(chip: Chip, count: int) -> str:
    """Explains a name such as `v5p-256`, and the text to write for it."""
    shapes = chip.links["domain"].torus
    if shapes is None:
        return f"{chip.name} has no such names; write {examples(chip)}"
    chips = count // 2 if shapes.name_counts_cores else count
    per_chip = int(chip.numbers["devices_per_chip_count"].value)
    counted = f"TensorCores: it is {chips} chips" if shapes.name_counts_cores else "chips, but not how they are wired"
    return f"'{chip.name.removeprefix('tpu-')}-{count}' counts {counted}; write {chip.name}:" + (
        smallest_topology(chip, max(1, chips * per_chip))
    )


def _domain_limit(chip: Chip) -> int:
    domain = chip.links["domain"]
    return int(domain.numbers["max_devices_count"].value)


def _nodes(chip: Chip, outer: int, sizes: tuple[int, ...], text: str) -> Topology:
    domain, limit = chip.links["domain"], _domain_limit(chip)
    if "scale_out" not in chip.links:
        if outer != 1 or len(sizes) != 1:
            raise TopologyError(f"`{chip.name}:{text}`: it is one host; write {chip.name}:{outer * prod(sizes)}")
        nodes, inner = 1, sizes[0]
    elif outer != 1 or len(sizes) != 2:
        near = smallest_topology(chip, outer * prod(sizes))
        raise TopologyError(f"`{chip.name}:{text}` is no topology; write nodes x GPUs: {chip.name}:{near}")
    else:
        nodes, inner = sizes
    if inner > limit:
        raise TopologyError(
            f"`{chip.name}:{text}`: {domain.name} links at most {limit} devices; write "
            f"{chip.name}:{smallest_topology(chip, nodes * inner)}"
        )
    inside = Dimension(inner, "domain", domain.medium)
    if "scale_out" not in chip.links:
        return Topology((inside,), str(inner))
    return Topology((Dimension(nodes, "scale_out", "network"), inside), f"{nodes}x{inner}")


def _torus(chip: Chip, shapes: TorusShapes, slices: int, sizes: tuple[int, ...]) -> Topology:
    name = "x".join(map(str, sizes))
    ndim = len(shapes.largest)
    if len(sizes) != ndim:
        raise TopologyError(f"`{chip.name}:{name}`: a slice has {ndim} dimensions; write {examples(chip)}")
    ascending = tuple(sorted(sizes))
    whole_cubes = all(n % 4 == 0 for n in sizes)
    wraps = [whole_cubes if shapes.wrap == "cubes of 4" else n == 16 for n in sizes]
    if ascending not in {tuple(sorted(shape)) for shape in _slices(shapes)}:
        listed = ", ".join("x".join(map(str, s)) for s in shapes.shapes)
        more = f", and multiples of 4 up to {'x'.join(map(str, shapes.largest))}" if shapes.wrap == "cubes of 4" else ""
        raise TopologyError(f"`{chip.name}:{name}` does not exist; slices are {listed}{more}")
    dims = [Dimension(n, "domain", "torus", w) for n, w in zip(sizes, wraps, strict=True)]
    if slices > 1:
        dims.insert(0, Dimension(slices, "scale_out", "network"))
        name = f"{slices}*{name}"
    per_chip = int(chip.numbers["devices_per_chip_count"].value)
    if per_chip > 1:
        dims.append(Dimension(per_chip, "die", chip.links["die"].medium))
    return Topology(tuple(dims), name)
