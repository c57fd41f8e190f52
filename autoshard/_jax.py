"""Which JAX is this: the only room that may reach past the public API.

JAX 0.10 to 0.12 differ in jaxpr classes, loop parameters and source lines; all of
it is absorbed here and pinned by `tests/ir/test_jax.py`.
"""

import contextlib
import inspect
import os
import re
import traceback
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import jax
from jax._src import array, config, core, distributed, effects, linear_util, source_info_util, tree_util
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import ad, partial_eval
from jax._src.lib import jax_jit
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.named_sharding import UNSPECIFIED, DuplicateSpecError
from jax._src.state.types import AbstractRef
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend import core as jex_core
from jax.interpreters import mlir
from jax.profiler import ProfileData
from jaxlib.mlir import ir, passmanager

_OWN_FOLDER = os.path.dirname(__file__)


MLIRError = ir.MLIRError
ANYWHERE = UNSPECIFIED  # a call's sharding of an operand or a result that it leaves open
JAX_VERSION: tuple[int, ...] = tuple(int(x) for x in jax.__version__.split(".")[:3])


def open_jaxpr(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one; identity where JAX has merged the two."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex_core.ClosedJaxpr) else jaxpr


def consts_of(jaxpr: Any) -> tuple[Any, ...]:
    """The constants that a closed jaxpr carries."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether an equation parameter holds a jaxpr (open or closed)."""
    return isinstance(value, (jex_core.ClosedJaxpr, jex_core.Jaxpr))


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def literal(atom: Any) -> Any:
    """A literal's value, without the mesh that was set when it was traced (arrays remember it in their type)."""
    return atom.val.view() if hasattr(atom.val, "view") else atom.val


class SourceLines:
    """`file:line (function)` of the user's frame that made an equation; cached by traceback."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def __call__(self, eqn: Any) -> str:
        raw = eqn.source_info.traceback
        if raw not in self._known:
            frame = source_info_util.user_frame(raw)
            self._known[raw] = (
                "<unknown>" if frame is None else f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
            )
        return self._known[raw]


def refused_layout(error: BaseException) -> tuple[str, str] | None:
    """Where a program asks for a layout that JAX refuses while it traces, and why; None of any other error."""
    text = str(error)
    if "its sharding annotation" in text:  # where the array is not one for it
        text = str(error.__cause__ or error.__context__ or error)
    elif not isinstance(error, DuplicateSpecError) and not text.startswith("Resource axis:"):
        return None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "<unknown>"
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


def sub_jaxprs(params: Any) -> Iterable[Any]:
    """Every jaxpr in an equation's parameters, in order."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def equations(jaxpr: Any) -> Iterable[Any]:
    """All equations of a jaxpr and of the bodies in it, those whose results nobody takes included; each once."""
    seen: set[int] = set()
    left = [jaxpr]
    while left:
        one = open_jaxpr(left.pop())
        if id(one) in seen:
            continue
        seen.add(id(one))
        for eqn in one.eqns:
            yield eqn
            left += sub_jaxprs(eqn.params)


def function_name(jaxpr: Any) -> str:
    """The name of the function that a jaxpr was traced from; empty if it is not known."""
    info = getattr(open_jaxpr(jaxpr), "debug_info", None)
    name = (getattr(info, "func_name", None) or "").split()
    return name[0] if name else ""


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

Array = array.ArrayImpl  # the type of every concrete array; tracers are of none such


def under_jit() -> bool:
    """Whether operations are now traced into a program, and not run at once (as under `jax.grad` alone)."""
    return core.unsafe_am_i_under_a_jit()


def per_device() -> bool:
    """Whether each device runs a program of its own now (in `shard_map`, in `pmap`): there is nothing left to split."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_reference(value: Any) -> bool:
    """Whether it is a mutable array (`jax.new_ref`)."""
    return isinstance(getattr(value, "aval", None), AbstractRef)


def used_inputs(closed: Any) -> frozenset[int]:
    """The inputs that a program's results or effects depend on; others are no arguments of the compiled program."""
    jaxpr = open_jaxpr(closed)
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(i for i, needed in enumerate(used) if needed)


def hoisted(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr with those of its constants that are tracers as further inputs, and these tracers."""
    jaxpr, consts = open_jaxpr(closed), consts_of(closed)
    traced = [i for i, const in enumerate(consts) if is_tracer(const)]
    if not traced:
        return closed, []
    rest = [i for i in range(len(consts)) if i not in traced]
    info: Any = getattr(jaxpr, "debug_info", None)
    names = getattr(info, "arg_names", None)
    if names is not None:
        info = info._replace(arg_names=(*names, *("" for _ in traced)))
    jaxpr = jaxpr.replace(
        constvars=[jaxpr.constvars[i] for i in rest],
        invars=[*jaxpr.invars, *(jaxpr.constvars[i] for i in traced)],
        **({} if info is None else {"debug_info": info}),
    )
    return jex_core.ClosedJaxpr(jaxpr, [consts[i] for i in rest]), [consts[i] for i in traced]


def auto_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """A context with an abstract mesh of Auto axes, so that avals carry no sharding."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, axis_types=auto))


def array_consts(closed: Any) -> tuple[Any, ...]:
    """Concrete arrays that the closed jaxpr closes over (keys as their raw data)."""
    found: list[Any] = []
    for const in consts_of(closed):
        if hasattr(const, "dtype") and jax.numpy.issubdtype(const.dtype, jax.dtypes.extended):
            found.append(jax.random.key_data(const))
        else:
            found.append(const)
    return tuple(found)


def former_text(closed: Any, *, color: bool) -> str:
    """The text whose hash plan files of autoshard 0.1.0 have: the jaxpr as JAX prints it (in colours on a terminal)."""
    return re.sub(r" at 0x[0-9a-f]+", "", closed.pretty_print(use_color=color))


POLICIES = "jax._src.ad_checkpoint"  # the module of `jax.checkpoint_policies`


def noted_while_tracing(primitive: str, name: str, value: Any) -> bool:
    """Whether a parameter only notes, of results on Auto axes, the mesh that was set: no wish of anybody's."""
    return primitive not in _OF_SHARDING and name in _RESULT_SHARDING and (value is None or _is_auto(value))


def says_mesh(eqn: Any) -> bool:
    """Whether an equation's parameters say a mesh: the one that was set when it was traced, or one of the user's."""
    given = {k: v for k, v in eqn.params.items() if k not in CONTEXT_MESH}
    wishes = (v for k, v in given.items() if not noted_while_tracing(eqn.primitive.name, k, v))
    leaves = tree_util.tree_leaves([*wishes], is_leaf=is_jaxpr)
    meshes: list[Any] = [getattr(leaf, "mesh", leaf) for leaf in leaves if isinstance(leaf, _OF_A_MESH)]
    return any(not mesh.empty for mesh in meshes)


def profiled(path: str) -> list[tuple[str, str, dict[str, Any], float]]:
    """Every event of a profile: the name of its line, its own, its statistics, and nanoseconds.

    The iterator of jaxlib 0.12's statistics warns on Python 3.13 that it is of no module; where warnings are
    errors, that ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        return [
            (line.name, event.name, dict(event.stats), event.duration_ns)
            for plane in ProfileData.from_file(path).planes
            for line in plane.lines
            for event in line.events
        ]


def lower(traced: Any, platform: str) -> Any:
    """Lowers a traced function for a platform; of an op's traceback, the innermost frame of the user's is enough."""
    with config.traceback_in_locations_limit(1):
        return traced.lower(lowering_platforms=(platform,))


def stablehlo(lowered: Any) -> Any:
    """A private copy of a lowering's StableHLO module operation (its owner keeps the original)."""
    return lowered.compiler_ir("stablehlo").operation.clone()


def bytecode(lowered: Any) -> bytes:
    """A lowering's StableHLO as MLIR bytecode, source locations included."""
    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


def run_passes(module: Any, pipeline: str) -> None:
    """Runs an MLIR pass pipeline, such as Shardy's, on a module operation in place (or raises `MLIRError`).

    The module is not verified again after every pass: that takes as long as the passes do.
    """
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
        manager.enable_verifier(False)
        manager.run(module)


def operations(module: Any, names: Container[str]) -> list[Any]:
    """The operations of these names in a module, at any depth, in order (inner ones before those around them)."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    return found


def parse_attribute(text: str, module: Any) -> Any:
    """An MLIR attribute from its text, in a module's context."""
    return ir.Attribute.parse(text, module.context)


def replace_op(op: Any, name: str) -> None:
    """Puts an op of another name, without attributes, in the place of one: same operands, results and location."""
    types = [result.type for result in op.results]
    new = ir.Operation.create(
        name, results=types, operands=list(op.operands), loc=op.location, ip=ir.InsertionPoint(op)
    )
    for before, after in zip(op.results, new.results, strict=True):
        before.replace_all_uses_with(after)
    op.erase()


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


def on_present_mesh(body: Any) -> Any:
    """A jaxpr (and the bodies in it) whose equations bind on the mesh that is set now, not on their trace's."""
    jaxpr, eqns = open_jaxpr(body), []
    for eqn in jaxpr.eqns:
        mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
        with eqn.ctx.manager, mesh:
            context = type(eqn.ctx)()
        params = {k: _on_present_mesh(v) for k, v in _without_mesh(eqn, eqn.params).items()}
        eqns.append(eqn.replace(params=params, ctx=context))
    present = jaxpr.replace(eqns=eqns)
    return body.replace(jaxpr=present) if isinstance(body, jex_core.ClosedJaxpr) else present


def _on_present_mesh(param: Any) -> Any:
    if isinstance(param, tuple):
        return tuple(_on_present_mesh(item) for item in param)
    return on_present_mesh(param) if is_jaxpr(param) else param


def bind(eqn: Any, params: Any, operands: Any) -> list[Any]:
    """Binds an equation's primitive again; a list of results.

    What JAX notes of results on Auto axes while tracing (`sharding=`, nothing but the mesh) is left out:
    the mesh may be another one now.
    """
    params = _without_mesh(eqn, params)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def bind_on_several(eqn: Any, operands: Any) -> list[Any]:
    """As `bind`, for a program on several devices: an ordered `jax.debug` call is bound as an ordered `io_callback`.

    Of the two JAX lowers that one alone for more than one device.
    """
    held_up = any(effects.ordered_effects.contains(e) for e in eqn.effects)
    if eqn.primitive.name not in ("debug_callback", "debug_print") or not held_up:
        return bind(eqn, eqn.params, operands)

    def on_host(*values: Any) -> None:
        eqn.primitive.impl(*values, **eqn.params)

    io_callback(on_host, None, *operands, ordered=True)
    return []


_RESULT_SHARDING = frozenset({"sharding", "out_sharding"})
_OF_SHARDING = frozenset({"sharding_constraint", "reshard"})
CONTEXT_MESH = frozenset({"ctx_mesh", "context_mesh"})  # what an equation keeps of the mesh of its trace
_OF_A_MESH = (jax.sharding.NamedSharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)


def _without_mesh(eqn: Any, params: Any) -> dict[str, Any]:
    """An equation's parameters without shardings that say nothing but the mesh of its trace."""
    return {k: None if noted_while_tracing(eqn.primitive.name, k, v) else v for k, v in params.items()}


def _is_auto(sharding: Any) -> bool:
    """Whether a sharding is on a mesh of Auto axes alone."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def with_derivatives(
    name: str, params: Any, rewritten: Callable[[Any, Sequence[Any], int], list[Any]]
) -> dict[str, Any]:
    """The parameters of a call whose rules for its derivatives are evaluated in another way.

    Args:
      name: its primitive's; a call without such rules keeps its parameters.
      params: of the equation.
      rewritten: (closed jaxpr, arguments, the rule) → results; the rules are 0, the forward one of a `custom_vjp`, 1,
        its backward one, and 2, the one of a `custom_jvp`.
    """
    if name == "custom_jvp_call":
        return _with_tangents(params, rewritten)
    if name != "custom_vjp_call":
        return params
    forward, backward = params["fwd_jaxpr_thunk"], params["bwd"]

    def forward_jaxpr(*nonzeros: Any) -> tuple[Any, Any]:
        jaxpr, consts = forward.call_wrapped(*nonzeros)
        closed = _closed(jaxpr, consts)
        traced = with_body(closed, lambda *args: rewritten(closed, args, 0))
        return open_jaxpr(traced), traced.consts

    def backward_rule(*args: Any) -> Any:
        structure: list[Any] = []
        given, tree = jax.tree.flatten(args)
        traced = [i for i, value in enumerate(given) if is_tracer(value)]  # known values, such as shapes, stay known

        def leaves(*values: Any) -> list[Any]:
            known = {**dict(enumerate(given)), **dict(zip(traced, values, strict=True))}
            results = backward.call_wrapped(*jax.tree.unflatten(tree, list(known.values())))
            found, structure[:] = jax.tree.flatten(results)[0], [jax.tree.structure(results)]
            return found  # symbolic zeros have no leaves

        of_traced = [given[i] for i in traced]
        closed = jax.make_jaxpr(leaves)(*of_traced)
        return jax.tree.unflatten(structure[0], rewritten(closed, of_traced, 1))

    return {
        **params,
        "fwd_jaxpr_thunk": linear_util.wrap_init(forward_jaxpr, debug_info=forward.debug_info),
        "bwd": linear_util.wrap_init(backward_rule, debug_info=backward.debug_info),
    }


def _with_tangents(params: Any, rewritten: Callable[[Any, Sequence[Any], int], list[Any]]) -> dict[str, Any]:
    """As `with_derivatives`, of a `custom_jvp_call`."""
    rule = params["jvp_jaxpr_fun"]

    def tangent_jaxpr(*zeros: Any) -> tuple[Any, Any, Any]:
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        closed = _closed(jaxpr, consts)
        traced = with_body(closed, lambda *args: rewritten(closed, args, 2))
        return open_jaxpr(traced), traced.consts, out_zeros

    return {**params, "jvp_jaxpr_fun": linear_util.wrap_init(tangent_jaxpr, debug_info=rule.debug_info)}


def _closed(jaxpr: Any, consts: Any) -> Any:
    return jaxpr.with_consts(consts) if hasattr(jaxpr, "with_consts") else jex_core.ClosedJaxpr(jaxpr, consts)


def spelled_out(closed: Any) -> Any:
    """A closed jaxpr in which calls that JAX 0.12 keeps whole (`jnp.searchsorted`) are replaced by their equations."""
    return partial_eval.lower_jaxpr2(closed) if getattr(closed, "is_high", False) else closed


def with_body(body: Any, fn: Any) -> Any:
    """`fn` traced in the place of a call's body: with its constants."""
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in open_jaxpr(body).invars
    ]
    return jax.make_jaxpr(fn)(*avals)


def without_constants(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """An open jaxpr whose first inputs are the constants of a closed one, and these: the body of a `checkpoint`."""
    return partial_eval.convert_constvars_jaxpr(open_jaxpr(closed)), consts_of(closed)


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


def scan_arity(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan; its sliced inputs follow them."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = (len(tree) for tree in eqn.params["ft_in"].unpack())
    return consts, carry


def hide_frames(path: str) -> None:
    """Leaves a file out of source lines, as JAX's own: an equation's line is the caller's."""
    source_info_util.register_exclusion(path)


def process_store() -> Any:
    """The key-value store of `jax.distributed`, or None in a single process."""
    return distributed.global_state.client


def stored(store: Any, key: str, timeout_ms: int) -> str | None:
    """A key's value in `process_store`, waited for at most so long; None if nobody has set it."""
    try:
        return store.blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def element_bits(kind: Any) -> int:
    """Bits of one element of an MLIR tensor: `i1` takes a byte, a complex number two floats."""
    if isinstance(kind, ir.ComplexType):
        return 2 * element_bits(ir.ComplexType(kind).element_type)
    return max(int(kind.width), 8) if str(kind) == "i1" else int(kind.width)
