"""Rewrite: evaluates a jaxpr again, with the sharding constraints of a plan.

Constraints are keyed by the equation's path through the nested jaxprs. Both ends of every
resharding are pinned: the layout in which a value is made, then every layout on its
way to the consumer, so that a cast is pinned before its result is gathered and an
all-to-all is not replaced by a gather. Calls with rules of their own (`remat`,
`custom_jvp`, `custom_vjp`) are bound again with rewritten bodies; source lines stay.
A lookup that fills is pinned before it is filled (`filled_lookups`); one of own rows says so (`batched_rows`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.errors import SpecError, refusing_depth
from autoshard.ir import fault_remedies, filled_lookups, manual_calls
from autoshard.ir.batched_rows import batched, batched_rows
from autoshard.ir.constraints import Constraints, Specs
from autoshard.ir.graph import BODIES, CALLS, INLINED, Path
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes

Hook = Callable[[Any, Path, int], Any]  # (value, equation path, position) → the value to go on with
Before = Callable[[list[Any], Path], list[Any]]  # (operands, equation path) → the operands to go on with
Bind = Callable[[Any, list[Any], Path], list[Any]]  # (equation without a body, operands, its path) → results
Scope = Callable[[Path], AbstractContextManager[Any]]  # equation path → the context to evaluate it in
# (closed jaxpr, arguments, its path) → results, for the rules of a custom derivative when it is differentiated
Rule = Callable[[Any, Sequence[Any], Path], list[Any]]

ConstraintSite = tuple[str, Any]  # "made", "taken", "again", "input" or "output", and the key in those pins
Fill = Callable[[Any], Any]  # what a lookup found → the same, filled where an index has no row
Label = Callable[[ConstraintSite], str]  # where a constraint is → the name scope to emit it in

# In paths: the rules of a `custom_vjp` and of a `custom_jvp`, which are no bodies of their equations.
FORWARD, BACKWARD, TANGENT = -1, -2, -3


def _keep(value: Any, path: Path, i: int) -> Any:
    return value


def _as_they_are(operands: list[Any], path: Path) -> list[Any]:
    return operands


def _bind(eqn: Any, operands: list[Any], path: Path) -> list[Any]:
    return _jax.bind(eqn, eqn.params, operands)


def _no_scope(path: Path) -> AbstractContextManager[Any]:
    return nullcontext(path)


@refusing_depth
def emit_constraints(
    closed: Any,
    pins: Constraints,
    mesh: Any,
    args: Sequence[Any],
    *,
    scope: Scope = _no_scope,
    label: Label | None = None,
) -> list[Any]:
    """Evaluates a closed jaxpr on flat arguments, with constraints on `mesh` (Auto axes).

    Args:
      closed: the program.
      pins: the constraints.
      mesh: a concrete or abstract mesh.
      args: one value per input.
      scope: entered around every equation.
      label: the name scope in which each constraint is emitted; places with equal names share them.
    """
    seen: dict[tuple[int, PartitionSpec, str], tuple[Any, Any]] = {}  # keeps the source alive: ids stay unique
    last: dict[int, tuple[PartitionSpec, ConstraintSite]] = {}  # of what is constrained: its constraint, and where
    lookups: dict[int, tuple[Any, Any, Fill]] = {}  # of what a lookup filled: itself, what it found, how to fill that

    def constrained(value: Any, spec: PartitionSpec) -> Any:
        """The value under a constraint; of what a lookup filled, what it found has the same one."""
        sharding = NamedSharding(mesh, spec)
        if id(value) not in lookups:
            return jax.lax.with_sharding_constraint(value, sharding)
        _, found, fill = lookups[id(value)]
        found = jax.lax.with_sharding_constraint(found, sharding)
        result = jax.lax.with_sharding_constraint(fill(found), sharding)
        lookups[id(result)] = result, found, fill
        return result

    def pin(value: Any, specs: Specs, place: ConstraintSite) -> Any:
        """The value under each constraint in turn; the same one on the same value is emitted once."""
        name = label(place) if label and specs else ""
        for spec in specs:
            key = (id(value), spec, name)
            if key not in seen:
                with jax.named_scope(name) if name else nullcontext():
                    seen[key] = value, constrained(value, spec)
            value = seen[key][1]
            last[id(value)] = spec, place
        return value

    behind: dict[tuple[int, int], tuple[Any, Any]] = {}  # (value, group of uses) → the value, and what the group takes

    def take(value: Any, path: Path, i: int) -> Any:
        """An operand under its constraints; one that is gathered once more, behind a barrier of its group."""
        if (group := pins.regathered.get((path, i))) is not None:
            key = (id(value), group)
            if key not in behind:
                behind[key] = (value, jax.lax.optimization_barrier(value))
            value = behind[key][1]
        return pin(value, pins.taken.get((path, i), ()), ("taken", (path, i)))

    barred = {path for path, _ in pins.again}
    own_rows = batched_rows(closed) if mesh.size > 1 else {}

    def before(operands: list[Any], path: Path) -> list[Any]:
        """The operands behind a barrier, where one of them is gathered again."""
        if path not in barred:
            return operands
        behind = jax.lax.optimization_barrier(operands)
        return [pin(value, pins.again.get((path, i), ()), ("again", (path, i))) for i, value in enumerate(behind)]

    def bind(eqn: Any, operands: list[Any], path: Path) -> list[Any]:
        """Binds an equation: an opaque kernel on each device's part, a fault of XLA in its safe form.

        What a barrier hands on is constrained as before it: Shardy lays it out as one of its readers asks for it.
        """
        if eqn.primitive.name == "optimization_barrier":
            results = _bind(eqn, operands, path)
            before = [last.get(id(operand)) for operand in operands]
            return [pin(x, one[:1], one[1]) if one else x for x, one in zip(results, before, strict=True)]
        if (rows := own_rows.get(path)) is not None:
            eqn, operands = batched(eqn, operands, rows)
        if (path, 0) not in pins.kernels or mesh.size == 1:
            if mesh.size == 1 or not filled_lookups.fills(eqn):
                return fault_remedies.bind(eqn, operands, mesh.size)
            (found,) = fault_remedies.bind(filled_lookups.clipped(eqn), operands, mesh.size)
            fill = partial(filled_lookups.filled, eqn, operands[1])
            result = fill(found)
            lookups[id(result)] = result, found, fill
            return [result]
        count = len(operands) + len(eqn.outvars)
        return manual_calls.call(eqn, operands, mesh, [pins.kernels[path, i][0] for i in range(count)])

    def rule(closed: Any, args: Sequence[Any], path: Path) -> list[Any]:
        """Evaluates a rule of a custom derivative: its kernels have layouts, the rest is emitted as elsewhere."""
        return evaluate(closed, args, Hooks(bind=bind), path=path)

    inputs = [pin(arg, pins.inputs.get(i, ()), ("input", i)) for i, arg in enumerate(args)]
    hooks = Hooks(
        made=lambda value, path, i: pin(value, pins.made.get((path, i), ()), ("made", (path, i))),
        taken=take,
        before=before,
        scope=scope,
        bind=bind,
        rule=rule if mesh.size > 1 else None,
    )
    results = evaluate(closed, inputs, hooks)
    return [pin(result, pins.outputs.get(i, ()), ("output", i)) for i, result in enumerate(results)]


def check(closed: Any, pins: Constraints, mesh: MeshAxes) -> None:
    """Raises a SpecError if pins are of another program than the closed jaxpr."""
    if not pins.regathered.keys() <= pins.taken.keys():
        raise SpecError("an operand is gathered once more, and has no constraint")
    for what, group in (("made", pins.made), ("taken", pins.taken), ("again", pins.again)):
        for (path, i), specs in group.items():
            taken, made = _ends(closed, path)
            avals = made if what == "made" else taken
            if not 0 <= i < len(avals):
                raise SpecError(f"a constraint is for value {i} {what} by the equation at {list(path)}: there is none")
            for spec in specs:
                _fit(spec, avals[i], mesh, path)
    for path in {path for path, _ in pins.kernels if min(path, default=0) >= 0}:
        _check_kernel(closed, path, pins, mesh)


def not_laid_out(closed: Any, pins: Constraints) -> list[str]:
    """The opaque equations that pins have no layouts for, in words: XLA's partitioner would misread them.

    Plans that were made when fewer equations were opaque lack theirs.
    """
    where = _jax.SourceLines()
    found = [(path, eqn) for path, eqn in _opaque_equations(closed, ()) if (path, 0) not in pins.kernels]
    return [f"{eqn.primitive.name} at {where(eqn)}" for _, eqn in found]


def _opaque_equations(closed: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every opaque equation with its path, those in bodies included."""
    for i, eqn in enumerate(_jax.open_jaxpr(closed).eqns):
        name = eqn.primitive.name
        if manual_calls.is_opaque(name, eqn.params):
            yield (*path, i), eqn
        elif name in INLINED:
            yield from _opaque_equations(eqn.params[CALLS[name]], (*path, i, 0))
        for key, k in BODIES.get(name, ()):
            bodies = eqn.params[key] if k is None else (eqn.params[key],)
            for j, body in enumerate(bodies):
                yield from _opaque_equations(body, (*path, i, j if k is None else k))


def _check_kernel(closed: Any, path: Path, pins: Constraints, mesh: MeshAxes) -> None:
    eqn = _equation_at(closed, path)
    if eqn is None or not manual_calls.is_opaque(eqn.primitive.name, eqn.params):
        raise SpecError(f"the layouts of a kernel are of the equation at {list(path)}, which is none")
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    layouts = [pins.kernels.get((path, i)) for i in range(len(avals))]
    for i, (aval, specs) in enumerate(zip(avals, layouts, strict=True)):
        if specs is None:
            raise SpecError(f"the kernel at {list(path)} has {len(avals)} operands and results; {i} has no layout")
        _fit(specs[0], aval, mesh, path)


def _fit(spec: PartitionSpec, aval: Any, mesh: MeshAxes, path: Path) -> tuple[int, ...]:
    """The shape of a part under a spec."""
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    try:
        shape = tuple(getattr(aval, "shape", ()))
        return Layout.from_spec(PartitionSpec(*entries), len(shape)).local_shape(shape, mesh)
    except SpecError as error:
        raise SpecError(f"at the equation {list(path)}: {error}") from error


def _ends(closed: Any, path: Path) -> tuple[list[Any], list[Any]]:
    """The values taken and made at a path: of an equation, or of a body (its results, its arguments)."""
    if len(path) % 2:
        eqn = _equation_at(closed, path)
        return ([], []) if eqn is None else ([x.aval for x in eqn.invars], [x.aval for x in eqn.outvars])
    body = _body_at(closed, path)
    jaxpr = None if body is None else _jax.open_jaxpr(body)
    return ([], []) if jaxpr is None else ([x.aval for x in jaxpr.outvars], [x.aval for x in jaxpr.invars])


def _equation_at(closed: Any, path: Path) -> Any:
    body = _body_at(closed, path[:-1])
    eqns = () if body is None else _jax.open_jaxpr(body).eqns
    return eqns[path[-1]] if 0 <= path[-1] < len(eqns) else None


def _body_at(closed: Any, path: Path) -> Any:
    """The jaxpr at a path of equations and bodies; None if it leads nowhere."""
    for at, k in zip(path[::2], path[1::2], strict=True):
        eqns = _jax.open_jaxpr(closed).eqns
        bodies = _bodies(eqns[at]) if 0 <= at < len(eqns) else {}
        if k not in bodies:
            return None
        closed = bodies[k]
    return closed


def _bodies(eqn: Any) -> dict[int, Any]:
    name = eqn.primitive.name
    found: dict[int, Any] = {}
    for key, k in ((CALLS[name], 0),) if name in INLINED else BODIES.get(name, ()):
        found |= dict(enumerate(eqn.params[key])) if k is None else {k: eqn.params[key]}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What is called while a program is evaluated.

    Attributes:
      made: called on every result.
      taken: called on every operand.
      before: called on every equation's operands together, ahead of `taken`.
      scope: entered around every equation.
      bind: called for every equation that has no body.
      own: whether the program's own `with_sharding_constraint`s stay; if not, pins stand for them.
      rule: evaluates the rules of custom derivatives when they are differentiated; None leaves them as they are.
    """

    made: Hook = _keep
    taken: Hook = _keep
    before: Before = _as_they_are
    scope: Scope = _no_scope
    bind: Bind = _bind
    own: bool = False
    rule: Rule | None = None


def evaluate(closed: Any, args: Sequence[Any], hooks: Hooks, *, path: Path = ()) -> list[Any]:
    """Evaluates a closed jaxpr as JAX does, with hooks on every operand and result.

    Args:
      closed: the program.
      args: one per input.
      hooks: what is called meanwhile.
      path: of the equation whose body this is.
    """
    jaxpr = _jax.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return _jax.literal(atom) if _jax.is_literal(atom) else env[atom]

    for index, eqn in enumerate(jaxpr.eqns):
        here = (*path, index)
        with _jax.as_written(eqn), hooks.scope(here):
            operands = hooks.before([read(atom) for atom in eqn.invars], here)
            operands = [hooks.taken(operand, here, i) for i, operand in enumerate(operands)]
            results = _equation(eqn, operands, hooks, here)
            env.update(zip(eqn.outvars, [hooks.made(result, here, i) for i, result in enumerate(results)], strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Any], hooks: Hooks, here: Path) -> list[Any]:
    name = eqn.primitive.name
    if name == "reshard" or (name == "sharding_constraint" and not hooks.own):
        return operands
    if name not in INLINED and name not in BODIES:
        return hooks.bind(eqn, operands, here)
    if name in INLINED:
        return evaluate(eqn.params[CALLS[name]], operands, hooks, path=(*here, 0))

    constants: list[Any] = []  # of a body that may not hold them

    def rewritten(body: Any, k: int) -> Any:
        path = (*here, k)

        def run(*xs: Any) -> list[Any]:
            entered = [hooks.made(x, path, i) for i, x in enumerate(xs)]
            outs = evaluate(body, entered, hooks, path=path)
            return [hooks.taken(x, path, i) for i, x in enumerate(outs)]

        new = _jax.with_body(body, run)
        if name in WITHOUT_CONSTANTS:
            new, own_constants = _jax.without_constants(new)
            constants.extend(own_constants)
        return new

    params = dict(eqn.params)
    for key, k in BODIES[name]:
        body = params[key]
        params[key] = tuple(rewritten(b, i) for i, b in enumerate(body)) if k is None else rewritten(body, k)
    rule = hooks.rule
    if rule is not None:
        params = _jax.with_derivatives(
            name, params, lambda closed, args, k: rule(closed, args, (*here, (FORWARD, BACKWARD, TANGENT)[k]))
        )
    return _jax.bind(eqn, params, [*constants, *operands])


# Their bodies may hold no constants, such as those of calls inside that were evaluated in place: they become operands.
WITHOUT_CONSTANTS = frozenset({"checkpoint", "remat", "remat2"})
