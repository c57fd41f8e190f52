"""Jaxprs: read, bound again, taken apart and put together."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax._src import core, effects, linear_util, source_info_util, tree_util
from jax._src.interpreters import partial_eval
from jax._src.named_sharding import UNSPECIFIED
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend import core as jex_core

ANYWHERE = UNSPECIFIED  # a call's sharding of an operand or a result that it leaves open
POLICIES = "jax._src.ad_checkpoint"  # the module of `jax.checkpoint_policies`
REMATTED = "rematted_computation"  # in the name stack of equations that `jax.checkpoint` computes again
_RESULT_SHARDING = frozenset({"sharding", "out_sharding"})
_OF_SHARDING = frozenset({"sharding_constraint", "reshard"})
CONTEXT_MESH = frozenset({"ctx_mesh", "context_mesh"})  # what an equation keeps of the mesh of its trace
_OF_A_MESH = (jax.sharding.NamedSharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)
# How later JAX names the kinds of a loop's inputs; JAX 0.10 has their numbers.
flattree: Any = importlib.util.find_spec("jax._src.flattree") and importlib.import_module("jax._src.flattree")
_RESHAPE = jax.make_jaxpr(lambda x: jax.lax.reshape(x, (1, 1)))(jax.ShapeDtypeStruct((1,), "float32")).eqns[0]
_TO_HOST = jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Host))(0.0).eqns[0]
_BARRIER = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


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


def used_inputs(closed: Any) -> frozenset[int]:
    """The inputs that a program's results or effects depend on; others are no arguments of the compiled program."""
    jaxpr = open_jaxpr(closed)
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(i for i, needed in enumerate(used) if needed)


def hoisted(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr with those of its constants that are tracers as further inputs, and these tracers."""
    jaxpr, consts = open_jaxpr(closed), consts_of(closed)
    traced = [i for i, const in enumerate(consts) if isinstance(const, Tracer)]
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


def on_present_mesh(body: Any) -> Any:
    """A jaxpr (and the bodies in it) whose equations bind on the mesh that is set now, not on their trace's."""
    jaxpr, eqns = open_jaxpr(body), []
    for eqn in jaxpr.eqns:
        mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
        with eqn.ctx.manager, mesh:
            context = type(eqn.ctx)()
        params = {k: _on_present_mesh(v) for k, v in without_mesh(eqn, eqn.params).items()}
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
    params = without_mesh(eqn, params)
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


def without_mesh(eqn: Any, params: Any) -> dict[str, Any]:
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
        # Known values, such as shapes, stay known.
        traced = [i for i, value in enumerate(given) if isinstance(value, Tracer)]

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


def scan_arity(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan; its sliced inputs follow them."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = (len(tree) for tree in eqn.params["ft_in"].unpack())
    return consts, carry


def equations_within(eqn: Any) -> Iterable[Any]:
    """All equations of the bodies in an equation's parameters."""
    for body in sub_jaxprs(eqn.params):
        yield from equations(body)


def is_transposed(eqn: Any) -> bool:
    """Whether reverse-mode differentiation made an equation: of the derivatives in its name stack, by the outermost."""
    for scope in eqn.source_info.name_stack.stack:
        if isinstance(scope, source_info_util.Transform) and scope.name in ("jvp", "transpose"):
            return scope.name == "transpose"
    return False


def scopes(eqn: Any) -> frozenset[str]:
    """The names in an equation's name stack: of `jax.named_scope`s and of transformations."""
    return frozenset(scope.name for scope in eqn.source_info.name_stack.stack)


def within(call: Any, eqn: Any) -> Any:
    """An equation of a call's body in the place of the call: its name stack under the call's."""
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def repeated(eqn: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A copy of an equation over other variables, named as what `jax.checkpoint` computes again."""
    source = eqn.source_info.replace(name_stack=eqn.source_info.name_stack.extend(REMATTED))
    return eqn.replace(invars=list(invars), outvars=list(outvars), source_info=source)


def is_on_host(aval: Any) -> bool:
    """Whether a value lies in the host's memory, by its type."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def is_repeated(eqn: Any) -> bool:
    """Whether an equation runs once more for a backward pass, by its own name stack (not those around it)."""
    return REMATTED in str(eqn.source_info.name_stack)


def variable(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def is_unnamed(var: Any) -> bool:
    """Whether a variable stands for a result that nobody takes."""
    return isinstance(var, core.DropVar)


def stacked(aval: Any, length: int) -> Any:
    """The abstract value of a scan's stack of so many."""
    return core.unmapped_aval(length, 0, aval)


def element(aval: Any) -> Any:
    """The abstract value of one part of a scan's stack."""
    return core.mapped_aval(aval.shape[0], 0, aval)


def barrier(near: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An `optimization_barrier` equation with the source line of another one."""
    return core.new_jaxpr_eqn(list(invars), list(outvars), _BARRIER, {}, core.no_effects, near.source_info, near.ctx)


def moved(near: Any, var: Any, space: Any) -> tuple[Any, Any]:
    """Copies a variable to the device's or the host's memory.

    Args:
      near: an equation, whose source line the copy has.
      var: the variable.
      space: the `jax.memory.Space` where it goes.

    Returns:
      The equation, and the variable that is there.
    """
    there = variable(var.aval.update(memory_space=space))
    params = {**_TO_HOST.params, "devices": (space,)}
    put = core.new_jaxpr_eqn([var], [there], _TO_HOST.primitive, params, core.no_effects, near.source_info, near.ctx)
    return put, there


def traced_at(near: Any, fn: Any, operands: Sequence[Any], result: Any = None) -> tuple[list[Any], Any]:
    """The equations of a function of one result, at the source line of another equation.

    Args:
      near: that equation.
      fn: of the operands' values.
      operands: variables and literals around it.
      result: the variable for its result; None makes a new one.

    Returns:
      The equations, and the variable of the result.
    """
    taken = [x for x in operands if not is_literal(x)]

    def of_taken(*values: Any) -> Any:
        left = iter(values)
        return fn(*(literal(x) if is_literal(x) else next(left) for x in operands))

    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type) for x in taken]
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with mesh:
        jaxpr = open_jaxpr(jax.make_jaxpr(of_taken)(*avals))
    assert not jaxpr.constvars, "the function closes over arrays"
    names: dict[Any, Any] = dict(zip(jaxpr.invars, taken, strict=True))
    (last,) = jaxpr.outvars
    end = variable(last.aval) if result is None else result
    eqns: list[Any] = []
    for eqn in _without_calls(jaxpr, names):
        eqns.append(eqn.replace(source_info=near.source_info, ctx=near.ctx))
    if eqns and eqns[-1].outvars[0] is names.get(last, last):
        eqns[-1] = eqns[-1].replace(outvars=[end])
        return eqns, end
    raise AssertionError("the function's last equation makes its result")


def _without_calls(jaxpr: Any, names: dict[Any, Any]) -> Iterable[Any]:
    """The equations of a jaxpr and of the calls in it; `names` has other names of its variables, and gets more."""

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else names[atom]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            inner = open_jaxpr(eqn.params["jaxpr"])
            inside: dict[Any, Any] = dict(zip(inner.invars, map(read, eqn.invars), strict=True))
            yield from _without_calls(inner, inside)
            names.update(
                (var, x if is_literal(x) else inside[x]) for var, x in zip(eqn.outvars, inner.outvars, strict=True)
            )
            continue
        results = [variable(var.aval) for var in eqn.outvars]
        yield eqn.replace(invars=[read(x) for x in eqn.invars], outvars=results)
        names.update(zip(eqn.outvars, results, strict=True))


def reshaped(near: Any, operand: Any, result: Any) -> Any:
    """A `reshape` equation between two variables with the source line of another equation."""
    params = {**_RESHAPE.params, "new_sizes": tuple(result.aval.shape)}
    return core.new_jaxpr_eqn(
        [operand], [result], _RESHAPE.primitive, params, core.no_effects, near.source_info, near.ctx
    )


def scan_again(eqn: Any, body: Any, consts: Sequence[Any], carries: Sequence[Any], slices: Sequence[Any]) -> Any:
    """A scan with another body, other constants and slices.

    Args:
      eqn: the scan, its results named; its length stays.
      body: a closed jaxpr; its results are the carries, then the stacked outputs.
      consts: variables around the scan, for its constants.
      carries: variables for its carries.
      slices: variables for its sliced inputs.
    """
    stacks = len(open_jaxpr(body).outvars) - len(carries)
    if "num_consts" in eqn.params:
        arity: dict[str, Any] = {"num_consts": len(consts), "num_carry": len(carries)}
    else:
        nones, pack = flattree.nones, flattree.pack
        arity = {
            "ft_in": pack((nones(len(consts)), nones(len(carries)), nones(len(slices)))),
            "ft_out": pack((nones(len(carries)), nones(stacks))),
        }
    return eqn.replace(invars=[*consts, *carries, *slices], params={**eqn.params, **arity, "jaxpr": body})


def rewired(closed: Any, *, eqns: Sequence[Any], invars: Any = None, outvars: Any = None, consts: Any = None) -> Any:
    """A closed jaxpr with other equations, and other inputs, results or constants where they are given.

    Args:
      closed: the jaxpr.
      eqns: its equations.
      invars: variables; None leaves them.
      outvars: variables and literals; None leaves them.
      consts: (variable, value) of every constant; None leaves them.
    """
    jaxpr = open_jaxpr(closed)
    named = list(zip(jaxpr.constvars, consts_of(closed), strict=True)) if consts is None else list(consts)
    new = jaxpr.replace(
        constvars=[var for var, _ in named],
        invars=jaxpr.invars if invars is None else list(invars),
        outvars=jaxpr.outvars if outvars is None else list(outvars),
        eqns=list(eqns),
    )
    return jex_core.ClosedJaxpr(new, [value for _, value in named])


def without_dead(closed: Any) -> Any:
    """A closed jaxpr without the equations, stacks and slices that nothing depends on; its inputs stay."""
    jaxpr = open_jaxpr(closed)
    alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return alive if consts_of(alive) else jex_core.ClosedJaxpr(alive, list(consts_of(closed)))


def check(jaxpr: Any) -> None:
    """Raises JAX's own error if an open jaxpr is not well-formed."""
    core.check_jaxpr(jaxpr)
