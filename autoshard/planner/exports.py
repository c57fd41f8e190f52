"""Exports: a plan in other people's words: PartitionSpec code, Flax's and MaxText's logical axis rules."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError
from autoshard.ir.layout import Layout
from autoshard.planner.record import Leaf, PlanRecord

Axes = tuple[str, ...]
LogicalNames = Mapping[str, Sequence[str | None]]  # input path → a name per dimension, as Flax's metadata has them
Rules = tuple[tuple[str, Axes | None], ...]


def spec_code(spec: PartitionSpec) -> str:
    """A PartitionSpec as one would write it: `P("data", None, ("data", "model"))`."""

    def entry(value: object) -> str:
        if isinstance(value, tuple):
            return "(" + ", ".join(f'"{axis}"' for axis in value) + ("," if len(value) == 1 else "") + ")"
        return "None" if value is None else f'"{value}"'

    return f"P({', '.join(entry(value) for value in spec)})"


def partition_specs(record: PlanRecord) -> str:
    """A Python module of plain JAX with the plan's mesh, and the PartitionSpec of every input and output by path.

    Its `shardings(mesh, name, tree)` gives the NamedShardings of one argument, for `jax.jit`,
    `jax.device_put` or a checkpoint; `OUTPUTS` are keyed by the path in the output.
    """
    sizes = ", ".join(str(size) for size in record.mesh.sizes)
    names = ", ".join(f'"{name}"' for name in record.mesh.names)
    comma = "," if record.mesh.ndim == 1 else ""

    def table(name: str, leaves: Sequence[Leaf]) -> list[str]:
        rows = [f"    {leaf.path!r}: {spec_code(leaf.spec)},  # {leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        return [f"{name} = {{", *rows, "}"]

    lines = [
        f'"""Layouts of {record.name} on {record.mesh}, planned for {record.hardware}."""',
        "",
        "import jax",
        "from jax.sharding import NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"MESH_SHAPE, MESH_NAMES = ({sizes}{comma}), ({names}{comma})",
        "",
        *table("INPUTS", record.inputs),
        "",
        *table("OUTPUTS", record.outputs),
        "",
        "",
        "def shardings(mesh, name, tree):",
        '    """NamedShardings of the argument of a name, a pytree."""',
        "    return jax.tree_util.tree_map_with_path(",
        "        lambda path, _: NamedSharding(mesh, INPUTS[name + jax.tree_util.keystr(path)]), tree",
        "    )",
        "",
    ]
    return "\n".join(lines)


def logical_axis_rules(record: PlanRecord, names: LogicalNames) -> Rules:
    """Flax's logical axis rules under which every named input has the layout that the plan gives it.

    Each logical name is one rule. A name whose mesh axes another dimension of the same value
    has taken may be whole there: in rules, the earlier one wins an axis.

    Args:
      record: the plan.
      names: of inputs, by path: one logical name (or None) per dimension.

    Raises:
      SpecError: there is no such input, the names do not fit its dimensions, or the plan gives
        one name two layouts, so that no rules express it.
    """
    leaves = {leaf.path: leaf for leaf in record.inputs}
    axes_of: dict[str, tuple[Axes, str]] = {}
    before: set[tuple[str, str]] = set()  # (winner, loser) of a mesh axis
    dims_of: list[tuple[str, Sequence[str | None], tuple[Axes, ...]]] = []
    for path, logical in names.items():
        if path not in leaves:
            raise SpecError(f"the plan has no input {path}; there are: {', '.join(list(leaves)[:8])} …")
        leaf = leaves[path]
        if len(logical) != len(leaf.shape):
            raise SpecError(f"{path} has {len(leaf.shape)} dimensions, and {len(logical)} logical names: {logical}")
        dims = Layout.from_spec(leaf.spec, len(leaf.shape)).dims
        dims_of.append((path, logical, dims))
        for name, axes in zip(logical, dims, strict=True):
            if name is None and axes:
                raise SpecError(f"{path}: a dimension without a logical name is split over {'·'.join(axes)}")
            if name is not None and axes:
                have, where = axes_of.setdefault(name, (axes, path))
                if have != axes:
                    raise SpecError(
                        f"no rules express this plan: `{name}` is split over {'·'.join(have)} in {where}, "
                        f"over {'·'.join(axes)} in {path}; name the two apart"
                    )
    for path, logical, dims in dims_of:
        taken = {axis: name for name, axes in zip(logical, dims, strict=True) for axis in axes}
        for name, axes in zip(logical, dims, strict=True):
            if name is None or axes or name not in axes_of:
                continue
            winners = {taken[axis] for axis in axes_of[name][0] if axis in taken}
            if not winners or name in winners:
                raise SpecError(
                    f"no rules express this plan: `{name}` is split over {'·'.join(axes_of[name][0])} in "
                    f"{axes_of[name][1]} and whole in {path}; name the two apart"
                )
            before.update((str(winner), name) for winner in winners)
    found = dict.fromkeys(str(name) for _, logical, _ in dims_of for name in logical if name is not None)
    return tuple((name, axes_of[name][0] if name in axes_of else None) for name in _ordered(list(found), before))


def _ordered(names: list[str], before: set[tuple[str, str]]) -> list[str]:
    """The names such that every winner comes before its losers.

    Raises:
      SpecError: two names win against each other.
    """
    left, done = list(names), list[str]()
    while left:
        free = next((n for n in left if not any(winner in left for winner, loser in before if loser == n)), None)
        if free is None:
            raise SpecError(f"no rules express this plan: {', '.join(left)} each give way to another; name them apart")
        left.remove(free)
        done.append(free)
    return done


def maxtext_rules(rules: Rules) -> str:
    """Logical axis rules as a MaxText configuration has them (YAML)."""
    rows = [f"  ['{name}', [{', '.join(repr(a) for a in axes or ())}]]" for name, axes in rules]
    return "logical_axis_rules: [\n" + ",\n".join(rows) + "\n]\n"
