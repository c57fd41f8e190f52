"""Trace: a function and abstract arguments → closed jaxpr, and the path of every leaf."""

import ast
import hashlib
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import numpy as np

from autoshard import _jax
from autoshard.errors import ArgumentError, SpecError, refusing_depth
from autoshard.garbage import collected_rarely
from autoshard.ir.accumulation import is_by_mesh_axes
from autoshard.ir.call_shardings import explicit
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.layers import Layers, find_layers
from autoshard.ir.mesh import MeshAxes


@dataclass(frozen=True, kw_only=True)  # no slots: what is worked out once
class Traced:
    """A closed jaxpr with the pytree path of each input and output.

    `in_paths[i]` reads `state['params']['w']`: the argument's name, then
    `jax.tree_util.keystr`. `out_paths` read the same without a name.
    """

    jaxpr: Any
    in_tree: Any
    out_tree: Any
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    argument_of: tuple[int, ...]  # position of each leaf's argument
    names: tuple[str, ...]  # of the arguments, those without leaves too
    source_digest: str = ""  # of the program that this one computes otherwise; empty if it is as it was traced
    source: Any = None  # that program, where this one keeps other values for its backward passes
    captured: tuple[Any, ...] = ()  # tracers that the function closes over: its last inputs, in their trace

    @cached_property
    def digest(self) -> str:
        """A hash of the program and of every argument's path, shape and dtype; source lines and mesh are no part."""
        if self.source_digest:
            return self.source_digest
        return hashlib.sha256("\n".join((fingerprint(self.jaxpr), *self._about)).encode()).hexdigest()[:32]

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """The stacks of equal layers of the program, if it is unrolled."""
        return tuple(find_layers(self.jaxpr))

    def is_digest(self, digest: str) -> bool:
        """Whether a plan file's digest is this program's, as it is made today or as autoshard 0.1.0 made it."""
        return digest == self.digest or digest in self.former_digests

    @cached_property
    def _about(self) -> tuple[str, str]:
        avals = ";".join(f"{a.dtype}{list(a.shape)}" for a in self.in_avals)
        return avals, ";".join(self.in_paths) + ">" + ";".join(self.out_paths)

    @cached_property
    def former_digests(self) -> frozenset[str]:
        """The digests of autoshard 0.1.0: of JAX's own text, with or without colours, and of the outer constants."""
        texts = [_jax.former_text(self.jaxpr, color=color) for color in (False, True)]
        consts = b"".join(np.asarray(c).tobytes() for c in _jax.array_consts(self.jaxpr))
        return frozenset(
            hashlib.sha256("\n".join((text, *self._about)).encode() + consts).hexdigest()[:32] for text in texts
        )


# What JAX raises where a program asks for the value of what it traces.
_NEEDS_VALUE = jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone: no sharding (so Explicit meshes do not leak into the trace)."""
    aval = _jax.shaped(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _is_array(leaf: Any) -> bool:
    """Whether JAX takes a leaf: an array, a number, or their abstract value."""
    try:
        _jax.shaped(leaf)
    except TypeError:
        return False
    return True


def no_array(function: str, values: Sequence[Any], names: Sequence[str]) -> ArgumentError:
    """The error of arguments of which one leaf, the first that JAX does not take, is no array."""
    leaves = zip(leaf_paths(values, names)[0], jax.tree.leaves(values), strict=True)
    path, leaf = next((path, leaf) for path, leaf in leaves if not _is_array(leaf))
    way_out = (
        f"mark it static: static_argnames={path!r}"
        if path in names
        else "keep it apart from the arrays: in a static argument of its own (static_argnames=), or in a closure"
    )
    return ArgumentError(
        f"{function}: the argument {path} is no array: {leaf!r} ({type(leaf).__name__}); if the program "
        f"depends on its value, {way_out}"
    )


def leaf_paths(values: Sequence[Any], names: Sequence[str]) -> tuple[list[str], list[int]]:
    """The path of every leaf of named pytrees, and the position of its tree."""
    paths: list[str] = []
    positions: list[int] = []
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        for path, _ in jax.tree_util.tree_leaves_with_path(value):
            paths.append(name + jax.tree_util.keystr(path))
            positions.append(position)
    return paths, positions


@collected_rarely()
@refusing_depth
def trace(fn: Callable[..., Any], args: Sequence[Any], names: Sequence[str], mesh: MeshAxes | None = None) -> Traced:
    """Traces `fn(*args)`; `names` are the arguments' names in paths.

    Args:
      mesh: the mesh (Auto axes) that the user's own constraints refer to.
      fn: a function of positional pytrees; static arguments are already bound.
      args: pytrees of arrays, scalars or ShapeDtypeStructs; nothing is allocated.
      names: one per argument.

    Raises:
      ArgumentError: an argument is no array.
      SpecError: an argument is mutable, or the program asks for a layout that the mesh does not have.
    """
    for package in FRAMEWORKS:
        _jax.hide_package(package)
    for name, arg in zip(names, args, strict=True):
        if any(map(_jax.is_reference, jax.tree.leaves(arg))):
            raise _reference(fn, f"the argument {name}")
    try:
        avals = tuple(jax.tree.map(abstract, arg) for arg in args)
    except TypeError as error:
        raise no_array(_name(fn), args, names) from error
    try:
        with _jax.cudnn_if_missing(), _jax.auto_mesh(mesh.names if mesh else (), mesh.sizes if mesh else ()):
            closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
            closed = explicit(_jax.spelled_out(closed))
    except _NEEDS_VALUE as error:
        for name, arg in zip(names, args, strict=True):
            if isinstance(arg, (bool, int, float)):
                error.add_note(f"{name}={arg!r} is traced: if the program depends on it, static_argnames={name!r}")
        raise
    except (ValueError, _jax.DuplicateSpecError) as error:
        if (refused := _jax.refused_layout(error)) is not None:
            raise _refusal(*refused, mesh) from error
        if "should match the aval mesh" in str(error):
            raise _closes_over_explicit(fn, error) from error
        if "mesh passed to shard_map" not in str(error):
            raise
        closed, out_shape = _with_own_mesh(fn, avals, error)
    if any(map(_jax.is_reference, _jax.consts_of(closed))):
        raise _reference(fn, "a reference that it closes over")
    closed, captured = _jax.hoisted(closed)
    own_names = tuple(names)
    avals = (*avals, *map(abstract, captured))
    names = (*names, *(f"closed over {i}" for i in range(len(captured))))
    leaves, in_tree = jax.tree.flatten(avals)
    in_paths, argument_of = leaf_paths(avals, names)
    out_leaves, out_tree = jax.tree.flatten(out_shape)
    out_paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out_shape)]
    return Traced(
        jaxpr=closed,
        in_tree=in_tree,
        out_tree=out_tree,
        in_paths=tuple(in_paths),
        out_paths=tuple(out_paths),
        in_avals=tuple(leaves),
        out_avals=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_leaves),
        argument_of=tuple(argument_of),
        names=own_names,
        captured=tuple(captured),
    )


FRAMEWORKS = ("flax", "haiku", "equinox")  # an equation's line is the user's, where a layer is called
_READING_MESH = frozenset({"get_abstract_mesh", "get_concrete_mesh", "get_mesh", "thread_resources"})
_OURS = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))  # JAX reads it, too, and keeps what is said


def depends_on_mesh(traced: Traced) -> bool:
    """Whether another mesh in context may have given another program.

    So it is where an equation says a mesh (a constraint, a `shard_map`), where an accumulation has as many parts as
    mesh axes say, and where a source file whose functions made an equation reads the mesh in context anywhere.
    """
    codes: set[CodeType] = set()
    for eqn in _jax.equations(traced.jaxpr):
        if _jax.says_mesh(eqn):
            return True
        codes.update(_jax.code_of(eqn))
    return is_by_mesh_axes(codes) or any(map(_file_reads_mesh, {code.co_filename for code in codes}))


@cache
def _file_reads_mesh(path: str) -> bool:
    """Whether a Python file names one of JAX's ways to the mesh in context."""
    text = "" if path.startswith(_OURS) else "".join(linecache.getlines(path))
    if not any(name in text for name in _READING_MESH):
        return False
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a notebook's cell, or no Python
        return True
    return any(
        _READING_MESH & {getattr(node, field, None) for field in ("id", "attr", "name")} for node in ast.walk(tree)
    )


def _reference(fn: Callable[..., Any], what: str) -> SpecError:
    return SpecError(
        f"{_name(fn)}: {what} is mutable (jax.new_ref): what is planned has values alone; "
        "pass the array, ref[...], and return the new one"
    )


def _refusal(where: str, reason: str, mesh: MeshAxes | None) -> SpecError:
    return SpecError(
        f"the program asks for a layout that does not exist, at {where}: {reason}\n"
        f"  the mesh that is planned for is {mesh or 'one device'}: name its axes, each once at most and in no more "
        "entries than the array has dimensions, or plan for another with mesh="
    )


def _closes_over_explicit(fn: Callable[..., Any], error: Exception) -> SpecError:
    mesh, shape = (
        re.search(r"aval mesh AbstractMesh\((.*?), axis_types", str(error)),
        re.search(r"shape (\S+)\.", str(error)),
    )
    array = (
        f"{'an array' if shape is None else shape[1]} on a mesh with Explicit axes ({'' if mesh is None else mesh[1]})"
    )
    return SpecError(
        f"{_name(fn)} closes over {array}, whose type says where it lies; a plan decides that\n"
        "  pass the array as an argument, or close over it on Auto axes: jax.device_put(w, NamedSharding(jax.make_mesh("
        "shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)), w.sharding.spec))"
    )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def own_mesh(jaxpr: Any, mesh: MeshAxes) -> Any:
    """The mesh of the first `shard_map` over a mesh other than `mesh`; None if there is none."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "shard_map":
            own = eqn.params["mesh"]
            if _split(own.shape) != _split(mesh.shape):
                return own
            continue
        for inner in _jax.sub_jaxprs(eqn.params):
            found = own_mesh(inner, mesh)
            if found is not None:
                return found
    return None


def _split(shape: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in shape.items() if size > 1]


def _with_own_mesh(fn: Callable[..., Any], avals: Sequence[Any], refusal: Exception) -> Any:
    """Traces a function that brings the mesh of a `shard_map` along: none is set meanwhile."""
    if "Explicit" in str(refusal):
        raise SpecError(
            "a `shard_map` in the function is over a mesh with Explicit axes, which say what a plan is to decide\n"
            "  give it the same devices with Auto axes: "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        ) from refusal
    with _jax.cudnn_if_missing(), _jax.auto_mesh((), ()):
        closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
        return explicit(_jax.spelled_out(closed)), out_shape
