"""Options: the options of a plan beside the program and its arguments. `autoshard.plan` documents each.

`Options` is the value, with the defaults; it refuses invalid options by name. The TypedDicts are the same
options for editors and type checkers: a verb that passes options on takes them as `**options: Unpack[...]`.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypedDict, TypeVar, get_args

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import cost_models
from autoshard.api.evaluation import Evaluation
from autoshard.api.plan import Plan
from autoshard.backends.devices import MeshLike
from autoshard.backends.known_compilers import CALLED
from autoshard.errors import ArgumentError, MeshError, SpecError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputation import ADD, NO_OFFLOAD, Offload, Remat
from autoshard.planner import pipeline
from autoshard.planner.budget import REL_GAP, TIME_LIMIT_S, Budget
from autoshard.planner.host_parts import HostPatterns
from autoshard.planner.program import Call, bind
from autoshard.planner.request import RequestOptions
from autoshard.planner.requested_shardings import AUTO, refuse_unreduced
from autoshard.planner.store import Directory
from autoshard.report.sizes import byte_count

WAIT_S = 25.0  # for other processes: an error comes within half a minute

_Verb = TypeVar("_Verb", bound=Callable[..., Any])

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "constraints": ("needed", "all", "compiled"),
    "unknown": ("error", "replicate"),
    "remat": get_args(Remat),
    "offload": get_args(Offload),
    "refine": (None, *CALLED),
}


class SolvingOptions(TypedDict, total=False):
    """The options of every verb that plans."""

    memory: int | float | str | None
    unknown: str
    time_limit_s: float | None
    rel_gap: float


class DonationOptions(TypedDict, total=False):
    """As in `jax.jit`."""

    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None


class ArgumentOptions(DonationOptions, total=False):
    """The options about a function's arguments, apart from their layouts."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    for_grad: bool | int | Sequence[int] | None


class ProgramOptions(SolvingOptions, ArgumentOptions, total=False):
    """Which program is planned or priced, and within which limits."""


class FunctionOptions(ArgumentOptions, total=False):
    """The options of a single function of `plan_many`."""

    in_shardings: Any
    out_shardings: Any
    pins: Mapping[str, PartitionSpec] | None
    host_local: HostPatterns | None
    hosts: int | None
    remat: Remat


class PlanOptions(SolvingOptions, FunctionOptions, total=False):
    """All that `plan` takes."""

    mesh: MeshLike | Sequence[MeshLike]
    hardware: str | cost_models.Hardware | None
    constraints: pipeline.ConstraintPolicy
    like: Plan | None
    lock: str | os.PathLike[str] | None
    cache: Directory
    wait_s: float
    refine: str | None
    candidates: int
    also: Mapping[str, Plan | Evaluation] | None
    offload: Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `plan`, each allowed.

    Raises:
      MeshError: `mesh` is no mesh.
      SpecError: another option cannot be kept.
    """

    mesh: MeshLike | Sequence[MeshLike] = None
    hardware: str | cost_models.Hardware | None = None
    in_shardings: Any = AUTO
    out_shardings: Any = AUTO
    pins: Mapping[str, PartitionSpec] | None = None
    host_local: HostPatterns | None = None
    hosts: int | None = None
    memory: int | float | str | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Sequence[str] | None = None
    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Sequence[str] | None = None
    for_grad: bool | int | Sequence[int] | None = None
    unknown: str = "error"
    constraints: pipeline.ConstraintPolicy = "needed"
    like: Plan | None = None
    lock: str | os.PathLike[str] | None = None
    cache: Directory = None
    time_limit_s: float | None = None
    rel_gap: float = REL_GAP
    wait_s: float = WAIT_S
    refine: str | None = None
    candidates: int = 3
    also: Mapping[str, Plan | Evaluation] = field(default_factory=dict[str, Plan | Evaluation])
    remat: Remat = ADD
    offload: Offload = NO_OFFLOAD

    def __post_init__(self) -> None:
        _meshes(self.mesh)
        hardware: Any = self.hardware
        if not (hardware is None or isinstance(hardware, str | cost_models.Hardware)):
            raise SpecError(f'hardware={hardware!r}: write a chip and its topology, as in hardware="h100:1x8"')
        _pins(self.pins)
        _host_local(self.host_local, self.hosts)
        for name, choices in _CHOICES.items():
            _one_of(name, getattr(self, name), choices)
        _at_least("time_limit_s", self.solver_limit_s, 0.0)
        _at_least("wait_s", self.wait_s, 0.0)
        _at_least("rel_gap", self.rel_gap, 0.0)
        _at_least("candidates", self.candidates, 1)
        like: Any = self.like
        if not (like is None or isinstance(like, Plan)):
            raise SpecError(f"like={like!r}: it takes a plan, as autoshard.plan or autoshard.load returns it")
        for name in ("donate_argnums", "static_argnums"):
            _all_are(name, getattr(self, name), int, "the positions of arguments")
        for name in ("donate_argnames", "static_argnames"):
            _all_are(name, getattr(self, name), str, "the names of arguments")

    @property
    def memory_bytes(self) -> int | None:
        """The limit that is asked for."""
        return None if self.memory is None else byte_count(self.memory, f"memory={self.memory!r}")

    @property
    def budget(self) -> Budget:
        """How far to solve."""
        return Budget(time_limit_s=self.solver_limit_s, rel_gap=self.rel_gap)

    @property
    def solver_limit_s(self) -> float:
        """The seconds that the solver has at most."""
        return TIME_LIMIT_S if self.time_limit_s is None else self.time_limit_s

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A function bound to arguments; some may be static or donated.

        Raises:
          SpecError: a static or donated argument does not exist, or is both.
        """
        return bind(
            fn,
            args,
            kwargs,
            static_argnums=self.static_argnums,
            static_argnames=self.static_argnames,
            donate_argnums=self.donate_argnums,
            donate_argnames=self.donate_argnames,
        )

    @property
    def request(self) -> RequestOptions:
        """The requested layouts."""
        return RequestOptions(
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            pins=self.pins or {},
            host_local=self.host_local,
            hosts=self.hosts,
            memory_bytes=self.memory_bytes,
            for_grad=self.for_grad,
            unknown=self.unknown,
            like=None if self.like is None else self.like.record,
            remat=self.remat,
            offload=self.offload,
        )


OPTIONS = tuple(one.name for one in fields(Options))
_DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(Options) if one.default is not MISSING}


def listing(kind: type, *, rest: str = "", **defaults: object) -> Callable[[_Verb], _Verb]:
    """Lets `help` and `inspect.signature` show a verb's `**options` one by one.

    Args:
      kind: the TypedDict of the options.
      rest: the name of further keywords that the verb takes, for its function.
      **defaults: those that are not `Options`'s.
    """
    of = {**_DEFAULTS, **defaults}

    def listed(verb: _Verb) -> _Verb:
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=of.get(name), annotation=annotation)
            for name, annotation in kind.__annotations__.items()
        ]
        others = [inspect.Parameter(rest, inspect.Parameter.VAR_KEYWORD, annotation=Any)] if rest else []
        signature = inspect.signature(verb).replace(parameters=[*own, *options, *others])
        vars(verb)["__signature__"] = signature
        return verb

    return listed


def keywords_of(verb: Callable[..., Any]) -> tuple[str, ...]:
    """The names of all that a verb takes by keyword alone."""
    return tuple(p.name for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY)


# JAX's words for options of ours, in `shard_map` and in the former `pjit`.
_OTHER_WORDS = {
    "in_specs": "in_shardings",
    "out_specs": "out_shardings",
    "in_axis_resources": "in_shardings",
    "out_axis_resources": "out_shardings",
}


def refuse_unknown(given: Iterable[str], known: Sequence[str], verb: str) -> None:
    """Raises if an option does not exist, with the one that may be meant.

    Raises:
      ArgumentError: so it is.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(_OTHER_WORDS.get(name, name), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ArgumentError(f"{verb} has no option {name!r}: {hint}")


def refuse_misspelt(
    fn: Callable[..., Any], kwargs: Mapping[str, Any], verb: str, known: Sequence[str] = OPTIONS
) -> None:
    """Raises if a keyword argument that `fn` does not take is nearly the name of an option, or JAX's other word for it.

    Raises:
      ArgumentError: so it is.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in kwargs.keys() - {p.name for p in parameters}:
        near = get_close_matches(_OTHER_WORDS.get(name, name), known, n=1, cutoff=0.7)
        if near:
            raise ArgumentError(
                f"{verb}: {getattr(fn, '__name__', fn)} takes no argument {name!r}; did you mean the option {near[0]}?"
            )


def _meshes(mesh: Any) -> None:
    several = isinstance(mesh, Sequence) and not isinstance(mesh, str)
    if several and not mesh:
        raise MeshError("mesh=[]: there is none to choose from; None compares the meshes over all devices")
    for one in mesh if several else [mesh]:
        if isinstance(one, Mapping):
            MeshAxes.of(one)
        elif not (one is None or isinstance(one, Mesh | AbstractMesh)):
            raise MeshError(
                f'mesh={mesh!r}: name the axes and their sizes, as in mesh={{"data": 8}}, or give a jax.sharding.Mesh'
            )


def _pins(pins: Any) -> None:
    if pins is None:
        return
    if not isinstance(pins, Mapping):
        raise SpecError(f'pins={pins!r}: map path patterns to layouts, as in pins={{"**.embed": P("model", None)}}')
    for pattern, spec in pins.items():
        if not isinstance(pattern, str):
            raise SpecError(f'pins: {pattern!r} is no path pattern, which is text, as in "state.params.embed"')
        if spec is None or spec is AUTO:
            raise SpecError(
                f"pins[{pattern!r}] is {spec}: a pin is a PartitionSpec, P() for whole; without one the planner chooses"
            )
        if isinstance(spec, NamedSharding):
            raise SpecError(
                f"pins[{pattern!r}] is a NamedSharding: a pin is on the plan's mesh; give its spec, {spec.spec}"
            )
        if not isinstance(spec, PartitionSpec):
            raise SpecError(f'pins[{pattern!r}] is {spec!r}: a pin is a PartitionSpec, as in P("model", None)')
        refuse_unreduced(f"pins[{pattern!r}]", spec)


def _host_local(host_local: Any, hosts: Any) -> None:
    of = {host_local: 0} if isinstance(host_local, str) else {} if host_local is None else host_local
    if not isinstance(of, Mapping) or not all(isinstance(p, str) and type(d) is int for p, d in of.items()):
        raise SpecError(
            f'host_local={host_local!r}: name the inputs of which each host loads its part, as in host_local="batch", '
            'or with the dimension, as in host_local={"batch.tokens": 1}'
        )
    if hosts is not None:
        if type(hosts) is not int or hosts < 1:
            raise SpecError(f"hosts={hosts!r}: it is a whole number of at least 1")
        if host_local is None:
            raise SpecError(f"hosts={hosts!r} says over how many hosts host_local= is split: name that, too")


def _one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        near = get_close_matches(str(value), [c for c in choices if c is not None], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "it is one of"
        raise SpecError(f"{name}={value!r}: {hint} {', '.join(map(repr, choices)) if not near else ''}".rstrip())


def _at_least(name: str, value: Any, least: float) -> None:
    number = not isinstance(value, bool) and isinstance(value, Real)
    if not number or math.isnan(value) or value < least:
        raise SpecError(f"{name}={value!r}: it is a number of at least {least:g}")


def _all_are(name: str, value: Any, kind: type, what: str) -> None:
    items = [value] if value is None or isinstance(value, str) else value if isinstance(value, Iterable) else [value]
    for item in items:
        whole = hasattr(item, "__index__") and not isinstance(item, bool)
        if value is not None and not (whole if kind is int else isinstance(item, kind)):
            raise SpecError(f"{name}={value!r}: it takes {what}")
