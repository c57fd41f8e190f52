"""Tracing: abstract values, tracers and contexts of a trace, and the user's lines that it came from."""

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Generator, Iterable, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import jax
from jax._src import config, core, source_info_util, tree_util
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import ad, partial_eval
from jax._src.lib import jax_jit
from jax._src.mesh import get_concrete_mesh as get_concrete_mesh
from jax._src.mesh import thread_resources
from jax._src.named_sharding import DuplicateSpecError as DuplicateSpecError
from jax._src.state.types import AbstractRef
from jax.core import Tracer

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
JAX_VERSION: tuple[int, ...] = tuple(int(x) for x in jax.__version__.split(".")[:3])
NO_LINE = "<unknown>"  # the line of an equation that no frame of the user's made


class SourceLines:
    """`file:line (function)` of the user's frame that made an equation; cached by traceback."""

    def __init__(self) -> None:
        self._known: dict[Any, str | None] = {}

    def __call__(self, eqn: Any, call: str = NO_LINE) -> str:
        """The line of an equation; inside of a function of JAX's own, which is traced once, that of its `call`."""
        raw = eqn.source_info.traceback
        if raw not in self._known:
            frame = source_info_util.user_frame(raw)
            self._known[raw] = (
                None if frame is None else f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
            )
        return self._known[raw] or call


def user_lines(eqn: Any) -> tuple[str, ...]:
    """`file:line` of every frame of the user's that was running when an equation was made, the innermost first."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple(f"{frame.file_name}:{frame.start_line}" for frame in frames)


def refused_layout(error: BaseException) -> tuple[str, str] | None:
    """Where a program asks for a layout that JAX refuses while it traces, and why; None of any other error."""
    text = str(error)
    if "its sharding annotation" in text:  # where the array is not one for it
        text = str(error.__cause__ or error.__context__ or error)
    elif not isinstance(error, DuplicateSpecError) and not text.startswith("Resource axis:"):
        return None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else NO_LINE
    return where, text


def code_of(eqn: Any) -> tuple[CodeType, ...]:
    """The code of every function that was running when an equation was made, the innermost first."""
    raw = eqn.source_info.traceback
    return () if raw is None else tuple(raw.raw_frames()[0])


@cache
def itemsize(dtype: Any) -> int:
    """Bytes per element; extended dtypes (PRNG keys) count their base array."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        base = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return base.size * base.dtype.itemsize
    return jax.numpy.dtype(dtype).itemsize


def itemsize_of(name: str) -> int:
    """Bytes per element of a dtype by its name, as `str` gives it (of a PRNG key: `key<fry>`)."""
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg") if name.startswith("key<") else ():
        key = jax.eval_shape(lambda impl=implementation: jax.random.key(0, impl=impl))
        if str(key.dtype) == name:
            return itemsize(key.dtype)
    return jax.numpy.dtype(name).itemsize


def abstract_of(leaf: Any) -> Any:
    """The abstract value (shape, dtype, weak type) of an array or Python scalar."""
    return jax.typeof(leaf)


def shaped(leaf: Any) -> Any:
    """The abstract value as which `jax.jit` takes a leaf of its arguments (a ShapeDtypeStruct, too).

    Raises:
      TypeError: it is no array.
      OverflowError: a Python number that fits in no dtype.
    """
    return core.shaped_abstractify(leaf)


def parsed_call(
    args: Sequence[Any], kwargs: dict[str, Any], static_argnums: tuple[int, ...], static_argnames: tuple[str, ...]
) -> tuple[Any, list[Any]]:
    """The key by which `jax.jit` tells calls apart (beside abstract values and context), and the dynamic leaves.

    The first knows pytrees, names of keywords in any order, and statics by type and equality. The
    leaves of keyword arguments follow those of the positional ones, sorted by name.
    """
    return jax_jit.parse_arguments(
        args, tuple(kwargs.values()), tuple(kwargs), static_argnums, static_argnames, tree_util.tracing_registry
    )


trace_context = config.trace_context  # () → all settings that a trace depends on, hashable


def under_jit() -> bool:
    """Whether operations are now traced into a program, and not run at once (as under `jax.grad` alone)."""
    return core.unsafe_am_i_under_a_jit()


def per_device() -> bool:
    """Whether each device runs a program of its own now (in `shard_map`, in `pmap`): there is nothing left to split."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_reference(value: Any) -> bool:
    """Whether it is a mutable array (`jax.new_ref`)."""
    return isinstance(getattr(value, "aval", None), AbstractRef)


def auto_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """A context with an abstract mesh of Auto axes, so that avals carry no sharding."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, axis_types=auto))


@contextlib.contextmanager
def explicit_mesh(avals: Iterable[Any]) -> Generator[None]:
    """Traces under the mesh with Explicit axes that an aval's sharding names, if one does: its specs are read there."""
    shardings = (getattr(aval, "sharding", None) for aval in avals)
    meshes = (x.mesh.abstract_mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding))
    mesh = next((mesh for mesh in meshes if jax.sharding.AxisType.Explicit in mesh.axis_types), None)
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def as_written(eqn: Any) -> Generator[None]:
    """Binds under an equation's own source lines, name stack and context, but on the mesh that is set now."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager, mesh:
        yield


@contextlib.contextmanager
def noted(note: str) -> Generator[None]:
    """Binds equations at the user's running line; JAX's errors about them carry a note."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back

    def now() -> Any:
        return source_info_util.Traceback.get_traceback()

    # JAX reads file, line and function of the code that runs: this one's are the user's, and the note.
    code = now.__code__.replace(
        co_filename=frame.f_code.co_filename,
        co_firstlineno=frame.f_lineno,
        co_qualname=f"{frame.f_code.co_qualname}; {note}",
    )
    with source_info_util.user_context(FunctionType(code, now.__globals__)()):
        yield


def _is_users(path: str) -> bool:
    return not path.startswith(_OWN_FOLDER) and source_info_util.is_user_filename(path)


@contextlib.contextmanager
def cudnn_if_missing() -> Generator[None]:
    """Lets `jax.nn.dot_product_attention(implementation="cudnn")` be traced where cuDNN is not installed.

    JAX asks for cuDNN's version and the GPU's capability while it traces; without cuDNN the
    answers are those of version 9.10 on an H100. The traced program has the same equations.
    """
    try:
        fused.check_cudnn_version()
    except RuntimeError:
        pass
    else:
        yield
        return
    answers = {"check_cudnn_version": lambda: 91000, "check_compute_capability": lambda capability: True}
    own = {name: getattr(fused, name) for name in answers}
    for name, answer in answers.items():
        setattr(fused, name, answer)
    try:
        yield
    finally:
        for name, answer in own.items():
            setattr(fused, name, answer)


def context_mesh() -> Any:
    """The mesh that `jax.set_mesh` or `with mesh:` has set: concrete if there is one, else abstract, else None."""
    concrete = get_concrete_mesh()  # `jax.sharding.get_mesh` refuses inside transformations
    if not concrete.empty:
        return concrete
    legacy = thread_resources.env.physical_mesh
    if not legacy.empty:
        return legacy
    abstract = jax.sharding.get_abstract_mesh()
    return None if abstract.empty else abstract


def is_differentiated(value: Any) -> bool:
    """Whether a value is being linearized (`jax.grad`, `jax.vjp`, `jax.linearize`), at any depth; `jax.jvp` is none."""
    while isinstance(value, Tracer):
        if isinstance(value, ad.LinearizeTracer):
            return True
        if isinstance(value, ad.JVPTracer) and isinstance(value.tangent, partial_eval.JaxprTracer):
            return True
        value = getattr(value, "primal", getattr(value, "val", None))
    return False


def is_tracer(value: Any) -> bool:
    """Whether a value is being traced (by jit, grad, vmap, …)."""
    return isinstance(value, Tracer)


def hide_frames(path: str) -> None:
    """Leaves a file out of source lines, as JAX's own: an equation's line is the caller's."""
    source_info_util.register_exclusion(path)


def hide_package(name: str) -> None:
    """Leaves a package out of source lines once it is imported: an equation's line is where the package is called."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    for folder in getattr(spec, "submodule_search_locations", None) or ():
        _hide_folder(folder)


@cache
def _hide_folder(folder: str) -> None:
    hide_frames(folder + os.sep)
