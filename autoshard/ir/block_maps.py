"""Walks: which dimensions the grid of a `pallas_call` walks over in equal parts, proven from its block maps.

The index map of each operand and result says which block a grid point reads or writes.
An axis of the grid may be cut into parts, each walked by a device of its own with the same kernel on a
shorter grid, if every index map is the same in every part but for whole parts of the array:

    index(i + one part, …) = index(i, …) + c        with all that the first part takes within the first c

which is looked up in the maps, evaluated at every point of the grid that they depend on. A dimension with
c > 0 is *driven* by the axis and is cut with it (`h`, and `h // 4` in parts of four); one with c = 0 is
whole in every part (`i % 4`, in parts of four, or `0`). Everything else is no equal walk: halos, ragged and
reversed blocks, blocks that prefetched scalars choose, results that an axis writes again and again. Nor may
a kernel ask for its place on the axis (`pl.program_id`) or keep scratch memory along it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard import _jax

DimRef = tuple[int, int]  # (operands then results of the call, dimension)

# The most grid points at which one index map is evaluated; the largest known grid has 8,192.
POINTS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Driven:
    """A dimension that one axis of the grid walks over, in so many equal parts."""

    axis: int
    parts: int
    elements: int  # per part


@dataclasses.dataclass(frozen=True, slots=True)
class Walks:
    """The driven dimensions, by place, and why each other axis of the grid must be whole."""

    driven: Mapping[DimRef, Driven]
    whole: Mapping[int, str]
    touched: Mapping[DimRef, frozenset[int]]  # place → the axes that its block depends on


@dataclasses.dataclass(frozen=True, slots=True)
class _Map:
    """Where blocks begin in one dimension: index(…) × stride, over the axes that the index depends on."""

    place: DimRef
    axes: tuple[int, ...]
    index: NDArray[Any]  # one dimension per axis
    stride: int
    extent: int  # elements that a block takes
    size: int  # of the dimension


def walks(params: Mapping[str, Any]) -> Walks:
    """Finds the equal walks that the block maps of a `pallas_call` prove."""
    grid = params["grid_mapping"]
    unknown = (
        "the grid's size is known at run time only"
        if not all(isinstance(size, int) for size in grid.grid)
        else "the kernel is laid out over the cores of a device"
        if params["mesh"] is not None
        else "the grid is empty"
        if not all(grid.grid)
        else ""
    )
    if unknown:
        return Walks({}, dict.fromkeys(range(len(grid.grid)), unknown), {})
    whole = _of_body(params)
    maps: list[_Map] = []
    touched: dict[DimRef, frozenset[int]] = {}
    for position, mapping in enumerate(grid.block_mappings):
        value = position + grid.num_index_operands
        for d, axes, found in _maps(mapping, value, grid.grid):
            touched[value, d] = axes
            if isinstance(found, str):
                for axis in axes:
                    whole.setdefault(axis, f"{found} of {named(params, (value, d))}")
            else:
                maps.append(found)
    driven: dict[DimRef, Driven] = {}
    for axis, size in enumerate(grid.grid):
        if size < 2 or axis in whole:
            continue
        found = _equal_parts(params, axis, maps)
        if isinstance(found, str):
            whole[axis] = found
        else:
            driven.update(found)
    return Walks(driven, whole, touched)


def named(params: Mapping[str, Any], place: DimRef) -> str:
    """A place in words."""
    operands = params["grid_mapping"].num_index_operands + params["grid_mapping"].num_inputs
    value, d = place
    return f"dimension {d} of {f'operand {value}' if value < operands else f'result {value - operands}'}"


def _equal_parts(params: Mapping[str, Any], axis: int, maps: Sequence[_Map]) -> dict[DimRef, Driven] | str:
    """The dimensions that an axis drives, in as many equal parts as may be; or why there are none."""
    size = params["grid_mapping"].grid[axis]
    mine = [m for m in maps if axis in m.axes]
    for steps in (n for n in range(1, size) if size % n == 0):
        shifts = [_shift(m, axis, steps) for m in mine]
        if all(shift is not None for shift in shifts):
            found = {m.place: Driven(axis, size // steps, c) for m, c in zip(mine, shifts, strict=True) if c}
            return _unfit(params, axis, found) or found
    wrong = next((m for m in mine if all(_shift(m, axis, n) is None for n in range(1, size) if size % n == 0)), mine[0])
    first = np.moveaxis(wrong.index, wrong.axes.index(axis), 0).reshape(size, -1)[:6, 0].tolist()
    blocks = ", ".join(map(str, first)) + (", …" if size > 6 else "")
    return (
        f"its steps take the blocks {blocks} of {named(params, wrong.place)} ({wrong.size} in blocks of "
        f"{wrong.extent}), which are no equal parts"
    )


def _shift(m: _Map, axis: int, steps: int) -> int | None:
    """By how many elements the blocks of a map lie farther after so many steps; None if parts differ or overlap."""
    index = np.moveaxis(m.index, m.axes.index(axis), 0)
    moved = index[steps:] - index[:-steps]
    shift = int(moved.flat[0]) * m.stride
    if (moved != moved.flat[0]).any() or shift < 0:
        return None
    first = index[:steps] * m.stride
    within = first.min() >= 0 and first.max() + m.extent <= shift
    return shift if not shift or (within and len(index) // steps * shift == m.size) else None


def _unfit(params: Mapping[str, Any], axis: int, found: Mapping[DimRef, Driven]) -> str:
    """Why an axis of equal parts cannot be cut all the same; empty if it can."""
    grid = params["grid_mapping"]
    dims: dict[int, list[int]] = {}
    for value, d in found:
        dims.setdefault(value, []).append(d)
    for value, many in dims.items():
        if len(many) > 1:
            return f"it walks over two dimensions at once, {named(params, (value, many[0]))} being one"
    first = grid.num_index_operands + grid.num_inputs
    for result in range(grid.num_outputs):
        if first + result not in dims:
            return f"result {result} is written again in every step: its block does not move along the axis"
    for operand, result in params["input_output_aliases"]:
        if dims.get(operand) != dims[first + result]:
            return f"operand {operand} and result {result} share their memory and are walked over differently"
    return ""


def _of_body(params: Mapping[str, Any]) -> dict[int, str]:
    """The axes along which the kernel itself tells its steps apart, with the reason.

    Axes that `vmap` has added are no business of the kernel's: `program_id` does not count them.
    """
    grid = params["grid_mapping"]
    own = [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]
    whole: dict[int, str] = {}
    for eqn in _equations(params["jaxpr"]):
        name = eqn.primitive.name
        if name in ("program_id", "num_programs") and eqn.params["axis"] < len(own):
            whole.setdefault(own[eqn.params["axis"]], f"the kernel asks for `pl.{name}({eqn.params['axis']})`")
        elif name == "axis_index":
            whole.update(dict.fromkeys(range(len(grid.grid)), "the kernel asks for `jax.lax.axis_index`"))
    if grid.scratch_avals:
        kinds = getattr(params["compiler_params"], "dimension_semantics", None) or [""] * len(own)
        for axis, kind in zip(own, kinds, strict=True):
            if not str(getattr(kind, "value", kind)).endswith("parallel"):
                whole.setdefault(
                    axis, 'the kernel keeps scratch memory, and its dimension_semantics do not say "parallel"'
                )
    return whole


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in _jax.sub_jaxprs(eqn.params):
            yield from _equations(inner)


# --- Index maps, evaluated -----------------------------------------------------------------


class _UnknownError(Exception):
    """An index map holds a primitive that is not evaluated here."""


def _maps(mapping: Any, value: int, grid: Sequence[int]) -> Iterator[tuple[int, frozenset[int], _Map | str]]:
    """(dimension, the axes that its block depends on, the map or why there is none), where it depends on any."""
    jaxpr = _jax.open_jaxpr(mapping.index_map_jaxpr)
    every = list(jaxpr.outvars)
    if len(every) != len(mapping.block_shape):  # slices of any size, each a start and a size
        axes = frozenset[int]().union(*(_needs(jaxpr, var)[0] & set(range(len(grid))) for var in every))
        yield 0, axes, "the index map chooses the sizes of slices"
        return
    for d, (block, var) in enumerate(zip(mapping.block_shape, every, strict=True)):
        needed, eqns = _needs(jaxpr, var)
        axes = frozenset(needed & set(range(len(grid))))
        if not axes:
            continue
        sizes = [grid[axis] for axis in sorted(axes)]
        stride, extent = _block(block)
        if needed - axes:
            found: _Map | str = "prefetched scalars choose the blocks"
        elif any(eqn.effects for eqn in eqns):
            found = "the index map has effects: nothing is known of the blocks"
        elif not stride:
            found = f"{type(block).__name__} blocks are not looked into: those"
        elif prod(sizes) > POINTS:
            found = f"the index map has {prod(sizes)} points, too many to look at: that"
        else:
            try:
                index = _evaluate(mapping.index_map_jaxpr, eqns, var, sorted(axes), sizes)
            except _UnknownError as unknown:
                found = f"the index map has `{unknown}`, which is not looked into: that"
            else:
                found = _Map((value, d), tuple(sorted(axes)), index, stride, extent, mapping.array_aval.shape[d])
        yield d, axes, found


def _block(block: Any) -> tuple[int, int]:
    """(elements from one index to the next, elements taken) of a kind of block; zeros of one that is not known."""
    if isinstance(block, int):
        return block, block
    kind = type(block).__name__
    if kind == "Blocked":
        return int(block.block_size), int(block.block_size)
    if kind == "Element" and tuple(block.padding) == (0, 0):
        return 1, int(block.block_size)
    return (1, 1) if kind in ("Squeezed", "Mapped") else (0, 0)


def _needs(jaxpr: Any, var: Any) -> tuple[set[int], list[Any]]:
    """The inputs that one output of a jaxpr depends on, by position, and the equations between, in order."""
    wanted = set() if _jax.is_literal(var) else {var}
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            eqns.append(eqn)
            wanted.update(atom for atom in eqn.invars if not _jax.is_literal(atom))
    return {i for i, v in enumerate(jaxpr.invars) if v in wanted}, eqns[::-1]


def _evaluate(closed: Any, eqns: Sequence[Any], var: Any, axes: Sequence[int], sizes: Sequence[int]) -> NDArray[Any]:
    """An output of an index map at every point of the axes that it depends on."""
    jaxpr = _jax.open_jaxpr(closed)
    points = np.indices(sizes, np.int32).reshape(len(sizes), -1)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(np.asarray, _jax.consts_of(closed)), strict=True))
    env.update({jaxpr.invars[axis]: points[i] for i, axis in enumerate(axes)})
    with np.errstate(all="ignore"):
        (found,) = _run(eqns, [var], env)
    return np.broadcast_to(found, points.shape[1:]).reshape(sizes).astype(np.int64)


def _run(eqns: Sequence[Any], outs: Sequence[Any], env: dict[Any, Any]) -> list[NDArray[Any]]:
    """Scalar equations on arrays of points."""

    def read(atom: Any) -> NDArray[Any]:
        return np.asarray(_jax.literal(atom), atom.aval.dtype) if _jax.is_literal(atom) else env[atom]

    for eqn in eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)):
            raise _UnknownError(eqn.primitive.name)
        for var, value in zip(eqn.outvars, _step(eqn, operands), strict=True):
            env[var] = np.asarray(value).astype(var.aval.dtype)
    return [read(atom) for atom in outs]


def _step(eqn: Any, operands: list[NDArray[Any]]) -> list[NDArray[Any]]:
    name = eqn.primitive.name
    if name in _SCALAR:
        return [_SCALAR[name](*operands)]
    if name == "integer_pow":
        return [operands[0] ** eqn.params["y"]]
    if name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        return _inline(eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"], operands)
    if name == "cond":
        branches = [_inline(branch, operands[1:]) for branch in eqn.params["branches"]]
        pick = np.clip(operands[0], 0, len(branches) - 1)
        return [np.choose(pick, np.broadcast_arrays(*outs)) for outs in zip(*branches, strict=True)]
    raise _UnknownError(name)


def _inline(body: Any, operands: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    jaxpr = _jax.open_jaxpr(body)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(np.asarray, _jax.consts_of(body)), strict=True))
    env.update(zip(jaxpr.invars, operands, strict=True))
    return _run(jaxpr.eqns, jaxpr.outvars, env)


def _divide(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """As XLA divides: integers towards zero."""
    if np.issubdtype(a.dtype, np.inexact):
        return a / b
    if not b.all():
        raise _UnknownError("div by zero")
    return (a - np.fmod(a, b)) // b


def _select(which: NDArray[Any], *cases: NDArray[Any]) -> NDArray[Any]:
    return np.choose(which.astype(np.int32), np.broadcast_arrays(*cases))


def _same(x: NDArray[Any]) -> NDArray[Any]:
    return x


_SCALAR: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "floor": np.floor,
    "ceil": np.ceil,
    "select_n": _select,
    "convert_element_type": _same,
    "broadcast_in_dim": _same,
    "reshape": _same,
    "squeeze": _same,
    "copy": _same,
    "stop_gradient": _same,
}
