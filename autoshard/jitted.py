"""Jitted: `autoshard.jit`, which plans at the first call with new shapes and then runs."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard import _jax, apply, meshes
from autoshard import binding as bindings
from autoshard import trace as traces
from autoshard.api import Options, find, peers, pose
from autoshard.errors import InfeasibleError, MeshError, PlanMismatchError
from autoshard.plans import Plan, in_auto_mode
from autoshard.store import Lock
from autoshard.tables import bytes_text

log = logging.getLogger("autoshard")


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit` that finds the sharding: bare, or with the options of `autoshard.plan`.

    The first call with new shapes plans and compiles; later ones run as `jax.jit` does.
    Arguments that kept their shapes keep their layout: state stays where it is when the
    batch changes. Arguments in another sharding are placed, with a log line that says how
    many bytes moved. Inside other transformations (`jax.jit`, `jax.grad`, `jax.vmap`) the
    constraints are emitted in place.

        step = autoshard.jit(train_step, donate_argnums=0)

    Args:
      fn: as in `autoshard.plan`.
      strict: raise where an argument in another sharding would have to move.
      move: plan new shapes freely, so that state moves to the layout that is best for them.
      **options: those of `autoshard.plan`.

    Raises:
      TypeError: there is no such option.
    """
    if fn is None:
        return lambda fn: jit(fn, **options)
    strict, move = (bool(options.pop(name, False)) for name in ("strict", "move"))
    return JitFunction(fn, Options(**options), strict=strict, move=move)


class JitFunction:
    """What `autoshard.jit` returns."""

    def __init__(self, fn: Callable[..., Any], options: Options, *, strict: bool, move: bool) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._options = options
        self._strict, self._move = strict, move
        self._compiled: dict[Any, tuple[Plan, Any]] = {}
        self._first: dict[Any, Plan] = {}  # mesh in context → the plan whose layouts later ones keep

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs); planned once per shapes."""
        return self._entry(args, kwargs)[0]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`, with the plan's layouts."""
        entry, bound = self._entry(args, kwargs)[1], self._bind(args, kwargs)
        return entry.lower(*bound.values)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bindings.Binding:
        o = self._options
        return bindings.bind(
            self._fn,
            args,
            kwargs,
            static_argnums=o.static_argnums,
            static_argnames=o.static_argnames,
            donate_argnums=o.donate_argnums,
            donate_argnames=o.donate_argnames,
        )

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Plan, Any]:
        bound = self._bind(args, kwargs)
        leaves, tree = jax.tree.flatten(bound.values)
        avals = tuple((a.shape, a.dtype, a.weak_type) for a in map(traces.abstract, leaves))
        mesh = _jax.context_mesh()
        key = (tree, avals, bound.statics, mesh)
        if key not in self._compiled:
            made = self._planned(args, kwargs, self._first.get(mesh))
            log.info("planned %s: %s", made.record.name, made)
            self._first.setdefault(mesh, made)
            self._compiled[key] = (made, _LazyJit(made))
        return self._compiled[key]

    def _planned(self, args: Sequence[Any], kwargs: Mapping[str, Any], first: Plan | None) -> Plan:
        def planned(options: Options) -> Plan:
            questions = pose(self._fn, args, kwargs, options)
            return find(questions, options, peers=peers(questions[0], options))

        options = self._options
        if first is None:
            return planned(options)
        if options.lock is not None:
            Lock(Path(options.lock)).check_several(first.record.name)
        if self._move:
            made = planned(options)
            log.info("%s: %s", made.record.name, moves(first, made))
            return made
        try:
            return planned(replace(options, like=options.like or first))
        except InfeasibleError as error:
            raise self._would_move(error, first, planned) from error

    def _would_move(self, error: InfeasibleError, first: Plan, planned: Callable[[Options], Plan]) -> InfeasibleError:
        try:
            free = planned(self._options)
        except InfeasibleError as alone:
            return alone
        return InfeasibleError(
            f"with the layouts of earlier shapes kept: {error}\n  with move=True {moves(first, free)}",
            peak_bytes=error.peak_bytes,
            limit_bytes=error.limit_bytes,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made, jitted = self._entry(args, kwargs)
        bound = self._bind(args, kwargs)
        flat, tree = jax.tree.flatten(bound.values)
        if any(_jax.is_tracer(leaf) for leaf in flat):
            return made_in_place(made, flat)
        placed = place_arguments(made, flat, strict=self._strict)
        outputs = jitted(*jax.tree.unflatten(tree, placed))
        return on_caller_mesh(made, outputs)


def moves(first: Plan, second: Plan) -> str:
    """What has to move between the calls of two plans, in words."""
    before = {(leaf.path, leaf.shape, leaf.dtype): leaf.spec for leaf in first.record.inputs}
    changed = [
        leaf for leaf in second.record.inputs if before.get((leaf.path, leaf.shape, leaf.dtype), leaf.spec) != leaf.spec
    ]
    if not changed:
        return "nothing moves between these shapes and the first"
    count = sum(math.prod(leaf.shape) * _jax.itemsize(leaf.dtype) for leaf in changed)
    one = changed[0]
    text = f"{one.path}: {before[one.path, one.shape, one.dtype]} → {one.spec}{', …' if len(changed) > 1 else ''}"
    return f"{len(changed)} arguments ({bytes_text(count)}) move between these shapes and the first: {text}"


class _LazyJit:
    """A plan's jitted function, made when first needed (planning needs no devices; running does)."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._jitted: Any = None

    @property
    def jitted(self) -> Any:
        if self._jitted is None:
            self._jitted = self._plan.jit()
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)

    def lower(self, *args: Any) -> Any:
        return self.jitted.lower(*args)


def made_in_place(made: Plan, flat: Sequence[Any]) -> Any:
    """The planned program on tracers: constraints on inputs, values and outputs, no `jit` of its own.

    Shapes can be evaluated, and programs lowered, for more devices than there are.
    """
    mesh: Any
    try:
        mesh = made.mesh()
    except MeshError:
        mesh = meshes.abstract(made.record.mesh)
    traced = made.traced
    assert traced is not None  # plans of a JitFunction are fresh

    def emitted(*flat: Any) -> list[Any]:
        inputs = [
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, leaf.spec)) if leaf.shape else x
            for x, leaf in zip(flat, made.record.inputs, strict=True)
        ]
        return apply.constrained(traced.jaxpr, made.record.pins, mesh, inputs)

    return jax.tree.unflatten(traced.out_tree, in_auto_mode(emitted, made.record.outputs)(*flat))


def place_arguments(made: Plan, flat: Sequence[Any], *, strict: bool) -> list[Any]:
    """Each leaf in its planned sharding; what had to move is logged, or raises if `strict`."""
    mesh = made.mesh()
    placed: list[Any] = []
    moved: list[str] = []
    moved_bytes = 0
    for leaf, x in zip(made.record.inputs, flat, strict=True):
        target = NamedSharding(mesh, leaf.spec)
        have = getattr(x, "sharding", None)
        if have is not None and have.is_equivalent_to(target, len(leaf.shape)):
            placed.append(x if have == target else jax.device_put(x, target))
            continue
        if have is not None and getattr(x, "committed", False) and leaf.shape:
            moved.append(f"{leaf.path}: {_spec_text(have)} → {leaf.spec}")
            moved_bytes += x.nbytes
        placed.append(jax.device_put(x, target))
    if moved:
        what = f"{len(moved)} arguments ({moved_bytes / 1e6:.3g} MB) arrive in another sharding: {'; '.join(moved[:4])}"
        what += " …" if len(moved) > 4 else ""
        if strict:
            raise PlanMismatchError(f"{made.record.name}: {what}; place them with plan.put, or drop strict=True")
        log.info("%s: %s; placed", made.record.name, what)
    return placed


def _spec_text(sharding: Any) -> str:
    return str(getattr(sharding, "spec", sharding))


def on_caller_mesh(made: Plan, outputs: Any) -> Any:
    """Outputs as arrays on the caller's own mesh object (Explicit axes): nothing is copied."""
    own = made.own_mesh
    if own is None or own == made.mesh():
        return outputs
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(own, x.sharding.spec)), outputs)
