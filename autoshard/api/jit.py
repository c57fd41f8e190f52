"""Jitted: `autoshard.jit`, which plans at the first call with new shapes and then runs."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Unpack, overload

import jax

from autoshard import _jax, deadline
from autoshard.api.dispatch import Entry
from autoshard.api.options import Options, PlanOptions, listing, refuse_unknown
from autoshard.api.planning import peers, plan_or_load, requests_of
from autoshard.api.solved_plan import SolvedPlan
from autoshard.errors import ArgumentError, GradientError, InfeasibleError, SpecError
from autoshard.ir import arguments
from autoshard.ir import trace as traces
from autoshard.planner.store import lock_at
from autoshard.report.tables import bytes_text

log = logging.getLogger("autoshard")
_jax.hide_frames(__file__)  # equations emitted in place get the source line of the user's call


class JitOptions(PlanOptions, total=False):
    """What `jit` takes: the options of `autoshard.plan`, those of `jax.jit`, its own."""

    strict: bool
    move: bool
    keep_unused: bool
    inline: bool
    backend: str | None
    device: Any
    compiler_options: Mapping[str, Any] | None


_OWN = tuple(name for name in JitOptions.__annotations__ if name not in PlanOptions.__annotations__)


@overload
def jit(fn: Callable[..., Any], **options: Unpack[JitOptions]) -> "JitFunction": ...
@overload
def jit(fn: None = None, **options: Unpack[JitOptions]) -> Any: ...
@listing(JitOptions, also=None, strict=False, move=False, keep_unused=False, inline=False)
def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`jax.jit` that finds the sharding: bare, or with the options of `autoshard.plan`.

    The first call with new shapes plans and compiles; later ones run as `jax.jit` does.
    Arguments that kept their shapes keep their layout: state stays where it is when the
    batch changes. Arguments in another sharding are placed, with a log line that says how
    many bytes moved: a warning, once, where they lay in the layout of another plan. Inside
    other transformations (`jax.jit`, `jax.grad`, `jax.vmap`) the constraints are emitted in
    place (JAX refuses, there, what is committed to other devices); inside `shard_map`, where
    nothing is left to split, it is `jax.jit`. Under
    `jax.grad` (`jax.vjp`, `jax.linearize`) the plan is for the gradient with respect to what
    is differentiated; where a `jax.jit` in between hides that, say so: `for_grad=`.

        step = autoshard.jit(train_step, donate_argnums=0)

    Args:
      fn: as in `autoshard.plan`.
      strict: raise where an argument in another sharding would have to move.
      move: plan new shapes freely, so that state moves to the layout that is best for them.
      keep_unused: as in `jax.jit`.
      compiler_options: as in `jax.jit`, over those that the plan's prices assume.
      inline: as in `jax.jit`; in other transformations the program is always inlined.
      backend: as in `jax.jit`, if the mesh is of its devices.
      device: refused: one device is a mesh of one.
      **options: those of `autoshard.plan`.

    Raises:
      ArgumentError: there is no such option.
      SpecError: an option cannot be kept.
    """
    refuse_unknown(options, tuple(JitOptions.__annotations__), "jit")
    if fn is None:
        return lambda fn: jit(fn, **options)
    own = {name: options.pop(name) for name in _OWN if name in options}
    if own.pop("device", None) is not None:
        raise SpecError('device=: a plan is over a mesh; for one device, mesh=jax.sharding.Mesh([device], ("data",))')
    if not callable(fn):
        raise ArgumentError(f"jit takes a function, got {fn!r}")
    if options.get("also") is None:
        options.pop("also", None)
    return JitFunction(fn, Options(**options), **own)


class JitFunction:
    """The result of `autoshard.jit`."""

    __name__: str

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        *,
        strict: bool = False,
        move: bool = False,
        keep_unused: bool = False,
        inline: bool = False,
        backend: str | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._name = str(getattr(fn, "__name__", type(fn).__name__))
        self._options = options
        self._strict, self._move = bool(strict), bool(move)
        self._inline, self._backend = bool(inline), backend
        self._compiling: dict[str, Any] = {
            "keep_unused": bool(keep_unused),
            "compiler_options": dict(compiler_options or {}),
        }
        roles = arguments.roles(
            fn,
            static_argnums=options.static_argnums,
            static_argnames=options.static_argnames,
            donate_argnums=options.donate_argnums,
            donate_argnames=options.donate_argnames,
        )
        self._roles = roles
        self._static = roles.static_argnums, roles.static_argnames
        # As `jax.jit` itself: for shapes alone, and where every device runs a program of its own.
        self._plain: Any = jax.jit(
            fn, static_argnums=roles.static_argnums, static_argnames=roles.static_argnames, inline=self._inline
        )
        self._entries: dict[Any, Entry] = {}
        self._last: Entry | None = None
        # Mesh in context, arguments that are differentiated → the plan whose layouts later ones keep.
        self._first: dict[tuple[Any, tuple[int, ...]], SolvedPlan] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bound as a method, as functions are."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<autoshard.jit of {self._fn!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature, leaves = _jax.parsed_call(args, kwargs, *self._static)
        last = self._last
        if (
            last is not None
            and last.signature == signature
            and last.context == _jax.trace_context()
            and last.concrete == _jax.get_concrete_mesh()
            and last.compiled is not None
            and last.compiled.takes(leaves)
        ):
            return last.compiled.run(leaves)
        if _jax.per_device():
            return self._plain(*args, **kwargs)
        entry = self._entry(args, kwargs, signature, leaves)
        if entry.captures or any(map(_jax.is_tracer, leaves)):
            return entry.in_place(leaves)
        self._last = entry
        return entry.place_and_run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> SolvedPlan:
        """The plan for these arguments (arrays or ShapeDtypeStructs); planned once per shapes."""
        return self._entry(args, kwargs, *_jax.parsed_call(args, kwargs, *self._static)).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`, with the plan's layouts."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`, with the plan's layouts."""
        bound = self._bind(args, kwargs)
        jitted, positional, named = self.plan(*args, **kwargs).named_jit(bound.keywords, **self._compiling)
        return jitted.trace(*positional, **named)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).eval_shape`; nothing is planned."""
        return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets every plan, and the layouts that later ones would have kept."""
        self._entries.clear()
        self._first.clear()
        self._last = None
        self._plain.clear_cache()

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> arguments.Binding:
        o = self._options
        return arguments.bind(
            self._fn,
            args,
            kwargs,
            static_argnums=o.static_argnums,
            static_argnames=o.static_argnames,
            donate_argnums=o.donate_argnums,
            donate_argnames=o.donate_argnames,
        )

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Any, leaves: Sequence[Any]) -> Entry:
        try:
            hash(signature)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self._name}: a static argument has to be hashable: {error}") from error
        mesh, context = _jax.context_mesh(), _jax.trace_context()
        gradient = self._differentiated(args, kwargs, leaves)
        key = (signature, self._avals(args, kwargs, leaves), context, mesh, gradient)
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        first = self._first.get((mesh, gradient))
        try:
            made = self._planned(args, kwargs, first, gradient)
        except GradientError as error:  # an error of the user's program: JAX itself will raise it, if it is right
            if not gradient:
                raise
            log.info("%s: planned as it is: %s", self._name, error)
            made = self._planned(args, kwargs, first, ())
        log.info("planned %s: %s", made.record.name, made)
        self._check_backend(made)
        entry = Entry(made, (signature, context, mesh), strict=self._strict, options=self._compiling)
        if not entry.captures:  # tracers that are closed over live no longer than their trace
            self._first.setdefault((mesh, gradient), made)
            self._entries[key] = entry
        return entry

    def _check_backend(self, made: SolvedPlan) -> None:
        """Raises if the plan's devices are not those of `backend`."""
        if self._backend is None:
            return
        own = made.own_mesh
        device = jax.devices()[0] if own is None else own.devices.flat[0]
        if device not in jax.devices(self._backend):
            raise SpecError(
                f"backend={self._backend!r}: {self._name} is planned over devices of {device.platform!r}; "
                f"give a mesh of the others: mesh=jax.sharding.Mesh(jax.devices({self._backend!r}), names)"
            )

    def _avals(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The abstract values of the leaves, as `jax.jit` distinguishes them."""
        avals: list[Any] = []
        try:
            for leaf in leaves:
                aval = _jax.shaped(leaf)
                avals.append((aval.shape, aval.dtype, aval.weak_type))
        except TypeError as error:
            bound = self._bind(args, kwargs)
            raise traces.no_array(self._name, bound.values, bound.names) from error
        return tuple(avals)

    def _differentiated(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> tuple[int, ...]:
        """The arguments that a `jax.grad` around the call differentiates; none where `for_grad` is given."""
        if self._options.for_grad is not None or not any(map(_jax.is_differentiated, leaves)):
            return ()
        values = self._bind(args, kwargs).values
        return tuple(i for i, value in enumerate(values) if any(map(_jax.is_differentiated, jax.tree.leaves(value))))

    def _planned(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], first: SolvedPlan | None, gradient: tuple[int, ...]
    ) -> SolvedPlan:
        def planned(options: Options) -> SolvedPlan:
            with deadline.within(options.time_limit_s):
                questions = requests_of(self._fn, args, kwargs, options)
                return plan_or_load(questions, options, peers=peers(questions[0].target, options))

        options = replace(self._options, for_grad=gradient) if gradient else self._options
        if options.lock is not None and self._first:
            lock_at(options.lock).check_several(self._name)
        if first is None:
            return planned(options)
        if self._move:
            made = planned(options)
            log.info("%s: %s", made.record.name, moves(first, made))
            return made
        try:
            return planned(replace(options, like=options.like or first))
        except InfeasibleError as error:
            raise _would_move(error, first, functools.partial(planned, options)) from error


def _would_move(error: InfeasibleError, first: SolvedPlan, planned: Callable[[], SolvedPlan]) -> InfeasibleError:
    """An error that names the leaves that `move=True` would move."""
    try:
        free = planned()
    except InfeasibleError as alone:
        return alone
    return InfeasibleError(
        f"with the layouts of earlier shapes kept: {error}\n  with move=True {moves(first, free)}",
        peak_bytes=error.peak_bytes,
        limit_bytes=error.limit_bytes,
    )


def moves(first: SolvedPlan, second: SolvedPlan) -> str:
    """The leaves that have to move between the calls of two plans, in words."""
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
