"""Graph: a jaxpr as frozen equations over numbered values.

Calls (`jit`, `remat`, `custom_jvp`, `custom_vjp`) are opened: their bodies'
equations stand in the list as if written in place. So do the bodies of loops and
branches; *links* join them to the equations around them:

    loop_const     (outer) -> (inner)              the same in every trip
    loop_slice     ([trips, …]) -> ([…])           one of a scan's stacked inputs
    loop_carry     (initial) -> (inner)            a carried value, on its way in
    loop_result    (inner) -> (outer)              a carried value, on its way out
    loop_stack     ([…]) -> ([trips, …])           one of a scan's stacked outputs
    branch_join    (inner of each branch) -> (outer)
    predicate      (scalar) -> (the same)          whether a loop goes on, or which branch is taken

A `platform_index` is resolved to the platform that is planned for. Each equation
keeps its *path* through the nested jaxprs, by which `ir.rewrite` finds its operands and
results again; the values of a loop's body keep their number of *trips*. Dead equations
are dropped; predicates are none, though nothing takes their results. Constants (literals,
closed-over arrays) are values without a producer. Names and barriers are skipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from autoshard import _jax
from autoshard.ir.op_traits import (
    BRANCH_JOIN,
    LOOP_CARRY,
    LOOP_CONST,
    LOOP_RESULT,
    LOOP_SLICE,
    LOOP_STACK,
    PREDICATE,
    RECALL,
    REDUCE_OR,
    OpTraits,
    traits_of,
    traits_of_shapes,
)
from autoshard.ir.own_rows import OwnRows

# Of an equation: its index, then per level (index of the sub-jaxpr, equation index). Of a
# body: its equation's path and the index of the sub-jaxpr.
Path = tuple[int, ...]
Spot = tuple[Path, int]  # operand or result of an equation; input or output of a body

# A while loop does not say how often it runs; its costs count this many trips (XLA's
# own auto-sharding assumed 100: auto_sharding_option.h, loop_iteration_count_estimate).
WHILE_TRIPS = 100
WHILE_DEPTH = 3  # nested loops that count as guessed; a deeper one counts once per trip of those around it


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of a value (`dtype` may be an extended one, such as `key<fry>`)."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _jax.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eqn:
    """One equation as rules see it: no tracers, no variables, no mesh.

    `where` is the user's `file:line (function)`. `traits` are the facts about the primitive, or about what
    compilers make of it where its dimensions are as they are.
    """

    primitive: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: Mapping[str, Any]
    where: str = _jax.NO_LINE
    traits: OpTraits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken, made = [a.shape for a in self.operands], [a.shape for a in self.results]
        object.__setattr__(self, "traits", traits_of_shapes(self.primitive, taken, made, self.params))


@dataclass(frozen=True, kw_only=True)  # without slots, for what is worked out once
class Graph:
    """Equations in program order over values 0, 1, 2 and so on.

    `operands[e]` and `results[e]` are the value ids of equation e; `takes[e][i]` and
    `makes[e][i]` are the places where `ir.rewrite` meets them. A value that no equation makes is an input
    or a constant. `trips[v]` is how often value v is made, `value_loop[v]` the innermost
    loop body that it belongs to (0: none; bodies are numbered from 1), `eqn_loop[e]` that of
    an equation (a link into a body belongs to the body). `again_of[e]` numbers the
    `jax.checkpoint` call whose equations, e among them, are computed again for the backward
    pass; calls are numbered from 1, and 0 means none. `repeated` are the equations that run once more
    for a backward pass, as the program says or as a plan chose: those that transpose them are not among them.
    `backward` are those that reverse-mode differentiation made, and what these repeat. `on_host` are the values that
    the program puts into the host's memory. `optional` are equations that a plan may leave out, `derived` those of
    them that have a value of the forward pass in its layout (`problem.whole_step`).
    """

    eqns: tuple[Eqn, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    takes: tuple[tuple[Spot, ...], ...]
    makes: tuple[tuple[Spot, ...], ...]
    eqn_loop: tuple[int, ...]
    again_of: tuple[int, ...]
    trips: tuple[int, ...]
    value_loop: tuple[int, ...]
    loops: int
    avals: tuple[Aval, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    named: Mapping[str, int]  # `checkpoint_name` → value
    carry: Mapping[int, tuple[int, int]]  # loop_carry or loop_result → (loop, which carry)
    on_host: frozenset[int] = frozenset()
    repeated: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()
    optional: frozenset[int] = frozenset()
    derived: Mapping[int, int] = field(default_factory=dict[int, int])  # equation → value
    unrolled: frozenset[int] = frozenset()  # the loops that the program has unrolled as a whole
    guessed: tuple[str, ...] = ()  # the source lines of loops that do not say how often they run

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The path of every equation (of a link: where its result appears)."""
        return tuple(spots[0][0] for spots in self.makes)

    def runs(self, e: int) -> int:
        """How often equation e runs; a link runs as often as the body that it belongs to."""
        return max((self.trips[v] for v in (*self.operands[e], *self.results[e])), default=1)

    def made_from(self, e: int) -> tuple[int, ...]:
        """What equation e computes its results from: of what is kept or repeated, what is repeated."""
        return self.operands[e][-1:] if self.eqns[e].primitive == RECALL else self.operands[e]

    @cached_property
    def aside(self) -> frozenset[int]:
        """The equations that only keep something in a loop's stack that a plan may leave out.

        These stacks, what sends their parts elsewhere, and what the forward pass computes for them alone.
        """
        found = set[int]()
        for e in sorted(self.optional, reverse=True):
            takers = {u for v in self.results[e] for u, _ in self.consumers.get(v, ())}
            if self.eqns[e].primitive == LOOP_STACK or (takers and found.issuperset(takers)):
                found.add(e)
        return frozenset(found)

    def read_by(self, e: int) -> tuple[int, ...]:
        """The operands of equation e that it is a reader of: what is kept aside is none of what others take, too."""
        operands = self.operands[e]
        if e not in self.aside:
            return operands
        return tuple(v for v in operands if self.producers.get(v, (-1, 0))[0] in self.aside)

    def recalls_slice(self, e: int) -> bool:
        """Whether equation e takes what a loop's stack keeps, or what is repeated."""
        if self.eqns[e].primitive != RECALL:
            return False
        maker = self.producers.get(self.operands[e][0], (-1, 0))[0]
        return maker >= 0 and self.eqns[maker].primitive == LOOP_SLICE

    @cached_property
    def derivations(self) -> Mapping[int, tuple[int, ...]]:
        """Value → the equations that have it as the forward pass does, but for its storage."""
        found: dict[int, tuple[int, ...]] = {}
        for e, v in self.derived.items():
            found[v] = (*found.get(v, ()), e)
        return found

    @cached_property
    def producers(self) -> Mapping[int, tuple[int, int]]:
        """Value → (equation, result position)."""
        return {v: (e, i) for e, values in enumerate(self.results) for i, v in enumerate(values)}

    @cached_property
    def consumers(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Value → [(equation, operand position), …] in program order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for e, values in enumerate(self.operands):
            for i, v in enumerate(values):
                found.setdefault(v, []).append((e, i))
        return found

    def carries(self) -> list[list[int]]:
        """The links into and out of a loop's body that carry one value round."""
        into: dict[tuple[int, int], int] = {}
        found: list[list[int]] = []
        for e, eqn in enumerate(self.eqns):
            if eqn.primitive == LOOP_CARRY:
                into[self.carry[e]] = e
            elif eqn.primitive == LOOP_RESULT:
                entry = into.get(self.carry[e])
                found.append([e] if entry is None else [entry, e])
        return found

    def networkx(self) -> Any:
        """A `networkx.DiGraph` with equations as nodes (`primitive`, `where`), values as edges, for analysis."""
        import networkx as nx  # here: loading it takes longer than most plans from the store

        view = nx.DiGraph()
        for e, eqn in enumerate(self.eqns):
            view.add_node(e, primitive=eqn.primitive, where=eqn.where)
        made_by = self.producers
        for e, values in enumerate(self.operands):
            for v in values:
                if v in made_by:
                    view.add_edge(made_by[v][0], e, value=v, aval=str(self.avals[v]))
        return view


# Calls that are opened: primitive → the parameter that holds the body.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}

# Calls without rules of their own: their bodies are evaluated in place.
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_vmap_call"})

# Equations that are bound again with rewritten bodies: (parameter, index of the body in
# paths; None where the parameter holds several, numbered in order).
BODIES: Mapping[str, tuple[tuple[str, int | None], ...]] = {
    **{name: ((key, 0),) for name, key in CALLS.items() if name not in INLINED},
    "scan": (("jaxpr", 0),),
    "while": (("cond_jaxpr", 0), ("body_jaxpr", 1)),
    "cond": (("branches", None),),
}


# Equations whose results are their operands. A `reshard` (JAX's indexing emits one) says
# nothing of Auto axes, and programs are traced with no others.
ALIASES = frozenset(
    {
        *("name", "optimization_barrier", "reshard"),
        *("pvary", "reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p"),
    }
)


def _keeps_precision(eqn: Any) -> bool:
    """Whether a `reduce_precision` leaves every bit: `jax.checkpoint` puts one on what it saves, XLA takes it away."""
    kept = jnp.finfo(eqn.invars[0].aval.dtype)
    return eqn.params["exponent_bits"] >= kept.nexp and eqn.params["mantissa_bits"] >= kept.nmant


def build(closed: Any, platform: str, *, live: Sequence[bool] | None = None) -> Graph:
    """The graph of a closed jaxpr.

    Args:
      closed: the program.
      platform: JAX's name of the platform ("cpu", "cuda", "tpu").
      live: which of the outputs are wanted; None: all of them.
    """
    builder = _Builder(platform)
    jaxpr = _jax.open_jaxpr(closed)
    inputs = [builder.value(var.aval, _TOP) for var in jaxpr.invars]
    outputs = builder.walk(closed, inputs, (), _TOP)
    wanted = [True] * len(outputs) if live is None else live
    return builder.finish(inputs, [v for v, taken in zip(outputs, wanted, strict=True) if taken])


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where the walk is: the innermost loop body, and how often it runs."""

    loop: int
    trips: int
    guessed: int = 0  # loops around it whose trips are a guess


_TOP = _Scope(0, 1)


class _Builder:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.avals: list[Aval] = []
        self.on_host: set[int] = set()
        self.scopes: list[_Scope] = []
        self.eqns: list[Eqn] = []
        self.operands: list[tuple[int, ...]] = []
        self.results: list[tuple[int, ...]] = []
        self.takes: list[tuple[Spot, ...]] = []
        self.makes: list[tuple[Spot, ...]] = []
        self.eqn_loop: list[int] = []
        self.again_of: list[int] = []
        self.again = 0  # the call that the walk is in
        self.agains = 0
        self.repeating = False  # whether the walk is in what runs once more
        self.repeated: list[bool] = []
        self.behind = False  # whether it is in a backward pass
        self.backward: list[bool] = []
        self.named: dict[str, int] = {}
        self.branch: dict[int, int] = {}  # a resolved platform index → its value
        self.loops = 0
        self.own_rows = OwnRows(lambda x: x.val if _jax.is_literal(x) else None)
        self.unrolled: set[int] = set()
        self.guessed: list[str] = []
        self.carry: dict[int, tuple[int, int]] = {}
        self._aval_of: dict[Any, Aval] = {}
        self.line = _jax.NO_LINE  # the user's, of the equation that the walk is at
        self._where = _jax.SourceLines()

    def aval(self, aval: Any) -> Aval:
        key = (getattr(aval, "shape", ()), aval.dtype if hasattr(aval, "dtype") else str(aval))
        if key not in self._aval_of:
            self._aval_of[key] = Aval(tuple(int(d) for d in key[0]), key[1])
        return self._aval_of[key]

    def value(self, aval: Any, scope: _Scope) -> int:
        if _jax.is_on_host(aval):
            self.on_host.add(len(self.avals))
        self.avals.append(self.aval(aval))
        self.scopes.append(scope)
        return len(self.avals) - 1

    def add(
        self,
        name: str,
        eqn: Any,
        operands: Sequence[int],
        results: Sequence[int],
        takes: Sequence[Spot],
        makes: Sequence[Spot],
        loop: int,
    ) -> None:
        self.eqns.append(
            Eqn(
                primitive=name,
                operands=tuple(self.avals[v] for v in operands),
                results=tuple(self.avals[v] for v in results),
                params={} if traits_of(name).link else self.own_rows.see(name, eqn, operands, results),
                where=self.line,
            )
        )
        self.operands.append(tuple(operands))
        self.results.append(tuple(results))
        self.takes.append(tuple(takes))
        self.makes.append(tuple(makes))
        self.eqn_loop.append(loop)
        self.again_of.append(self.again)
        self.repeated.append(self.repeating)
        self.backward.append(self.behind or self.repeating)

    def walk(self, closed: Any, args: Sequence[int], path: Path, scope: _Scope) -> list[int]:
        jaxpr = _jax.open_jaxpr(closed)
        env: dict[Any, int] = dict(zip(jaxpr.invars, args, strict=True))
        for var, array in zip(jaxpr.constvars, _jax.consts_of(closed), strict=True):
            env[var] = self.value(var.aval, scope)
            if not _jax.is_tracer(array):
                self.own_rows.constant(env[var], array)

        def read(atom: Any) -> int:
            return self.value(atom.aval, scope) if _jax.is_literal(atom) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            around = self.repeating, self.behind, self.line
            self.line = self._where(eqn, self.line)
            self.repeating, self.behind = (
                self.repeating or _jax.is_repeated(eqn),
                self.behind or _jax.is_transposed(eqn),
            )
            results = self.equation(eqn, operands, (*path, index), scope)
            self.repeating, self.behind, self.line = around
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[int], here: Path, scope: _Scope) -> list[int]:
        name = eqn.primitive.name
        if name in CALLS:
            # Outside of loops XLA merges a call that it may merge with the forward pass: nothing runs again.
            merged = not scope.loop and eqn.params.get("prevent_cse") is False
            outermost = not self.again and not merged and bool(eqn.params.get("differentiated"))
            if outermost:
                self.agains += 1
                self.again = self.agains
            results = self.walk(eqn.params[CALLS[name]], operands, (*here, 0), scope)
            if outermost:
                self.again = 0
            return results
        if name in ALIASES or (name == "reduce_precision" and _keeps_precision(eqn)):
            if name == "name":
                self.named[eqn.params["name"]] = operands[0]
            return operands
        if name == "scan":
            return self.scan(eqn, operands, here, scope)
        if name == "while":
            return self.while_loop(eqn, operands, here, scope)
        if name == "cond":
            return self.cond(eqn, operands, here, scope)
        results = [self.value(var.aval, scope) for var in eqn.outvars]
        if name == "platform_index":
            self.branch[results[0]] = self.chosen(eqn.params["platforms"])
        takes = [(here, i) for i in range(len(operands))]
        self.add(name, eqn, operands, results, takes, [(here, i) for i in range(len(results))], scope.loop)
        return results

    def chosen(self, platforms: Sequence[Any]) -> int:
        """The index of the platform that is planned for; `None` stands for any other."""
        known = {"cuda": ("cuda", "gpu"), "rocm": ("rocm", "gpu")}.get(self.platform, (self.platform,))
        for index, names in enumerate(platforms):
            if names is None or any(name in known for name in names):
                return index
        return len(platforms) - 1

    def enter(self, trips: int | None, scope: _Scope) -> _Scope:
        """A loop's body; None if nobody knows how often it runs."""
        self.loops += 1
        if trips is not None:
            return _Scope(self.loops, scope.trips * trips, scope.guessed)
        times = WHILE_TRIPS if scope.guessed < WHILE_DEPTH else 1
        return _Scope(self.loops, scope.trips * times, scope.guessed + 1)

    def into(
        self, name: str, eqn: Any, outer: int, aval: Any, take: Spot, make: Spot, scope: _Scope, carry: int = 0
    ) -> int:
        """A link from an outer value into a loop's body."""
        inner = self.value(aval, scope)
        if name == LOOP_CARRY:
            self.carry[len(self.eqns)] = (scope.loop, carry)
        self.add(name, eqn, [outer], [inner], [take], [make], scope.loop)
        return inner

    def out(
        self,
        name: str,
        eqn: Any,
        inner: Sequence[int],
        aval: Any,
        takes: Sequence[Spot],
        make: Spot,
        scope: _Scope,
        carry: tuple[int, int] = (0, 0),
    ) -> int:
        """A link from a body to a value of the scope around it."""
        outer = self.value(aval, scope)
        if name == LOOP_RESULT:
            self.carry[len(self.eqns)] = carry
        self.add(name, eqn, inner, [outer], takes, [make], scope.loop)
        return outer

    def predicate(self, eqn: Any, value: int, take: Spot, here: Path, scope: _Scope) -> None:
        """What an equation with bodies goes by; no place of the program has its result.

        The condition of a loop that `vmap` made is one per element: the loop goes on while any of them holds.
        """
        if ndim := self.avals[value].ndim:
            anyone, spot = self.value(SimpleNamespace(shape=(), dtype=self.avals[value].dtype), scope), (*here, -2)
            reduction = SimpleNamespace(params={"axes": tuple(range(ndim))})
            self.add(REDUCE_OR, reduction, [value], [anyone], [take], [(spot, 0)], scope.loop)
            value, take = anyone, (spot, 0)
        result = self.value(self.avals[value], scope)
        self.add(PREDICATE, eqn, [value], [result], [take], [((*here, -1), 0)], scope.loop)

    def scan(self, eqn: Any, operands: list[int], here: Path, scope: _Scope) -> list[int]:
        consts, carries = _jax.scan_arity(eqn)
        body, entry = eqn.params["jaxpr"], (*here, 0)
        inside = self.enter(eqn.params["length"], scope)
        self.unrolled |= {inside.loop} if eqn.params.get("unroll", 1) >= eqn.params["length"] else set()
        kinds = [LOOP_CONST] * consts + [LOOP_CARRY] * carries
        kinds += [LOOP_SLICE] * (len(operands) - len(kinds))
        variables = _jax.open_jaxpr(body).invars
        inner = [
            self.into(kind, eqn, v, var.aval, (here, i), (entry, i), inside, i - consts)
            for i, (kind, v, var) in enumerate(zip(kinds, operands, variables, strict=True))
        ]
        outs = self.walk(body, inner, entry, inside)
        return [
            self.out(
                LOOP_RESULT if i < carries else LOOP_STACK,
                eqn,
                [v],
                var.aval,
                [(entry, i)],
                (here, i),
                scope,
                (inside.loop, i),
            )
            for i, (v, var) in enumerate(zip(outs, eqn.outvars, strict=True))
        ]

    def while_loop(self, eqn: Any, operands: list[int], here: Path, scope: _Scope) -> list[int]:
        tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inside = self.enter(None, scope)
        self.guessed.append(self.line)
        first, condition, entry = tests + consts, (*here, 0), (*here, 1)
        within = [*((condition, i) for i in range(tests)), *((entry, i) for i in range(consts))]
        constants = [
            self.into(LOOP_CONST, eqn, operands[i], self.avals[operands[i]], (here, i), spot, inside)
            for i, spot in enumerate(within)
        ]
        carried = [
            self.into(LOOP_CARRY, eqn, v, self.avals[v], (here, first + i), (entry, consts + i), inside, i)
            for i, v in enumerate(operands[first:])
        ]
        (goes_on,) = self.walk(eqn.params["cond_jaxpr"], [*constants[:tests], *carried], condition, inside)
        self.predicate(eqn, goes_on, (condition, 0), here, inside)
        outs = self.walk(eqn.params["body_jaxpr"], [*constants[tests:], *carried], entry, inside)
        return [
            self.out(LOOP_RESULT, eqn, [v], var.aval, [(entry, i)], (here, i), scope, (inside.loop, i))
            for i, (v, var) in enumerate(zip(outs, eqn.outvars, strict=True))
        ]

    def cond(self, eqn: Any, operands: list[int], here: Path, scope: _Scope) -> list[int]:
        branches = list(enumerate(eqn.params["branches"]))
        if operands[0] in self.branch:
            branches = [branches[self.branch[operands[0]]]]
        else:
            self.predicate(eqn, operands[0], (here, 0), here, scope)
        outs = {k: self.walk(branch, operands[1:], (*here, k), scope) for k, branch in branches}
        return [
            self.out(
                BRANCH_JOIN,
                eqn,
                [v[i] for v in outs.values()],
                var.aval,
                [((*here, k), i) for k in outs],
                (here, i),
                scope,
            )
            for i, var in enumerate(eqn.outvars)
        ]

    def finish(self, inputs: list[int], outputs: list[int]) -> Graph:
        live = set(outputs)
        keep: list[int] = []
        running = set[Path]()  # the equations with bodies, those of which something is kept
        for e in range(len(self.eqns) - 1, -1, -1):
            primitive, path = self.eqns[e].primitive, self.makes[e][0][0] if self.makes[e] else ()
            # A carried value has a layout even if its last value is not used.
            kept = primitive == LOOP_RESULT or any(v in live for v in self.results[e])
            if kept or (primitive == PREDICATE and path[:-1] in running):
                keep.append(e)
                if primitive in (LOOP_RESULT, BRANCH_JOIN):
                    running.add(path)
                live.update(self.operands[e])
        keep.reverse()
        return Graph(
            eqns=tuple(self.eqns[e] for e in keep),
            operands=tuple(self.operands[e] for e in keep),
            results=tuple(self.results[e] for e in keep),
            takes=tuple(self.takes[e] for e in keep),
            makes=tuple(self.makes[e] for e in keep),
            eqn_loop=tuple(self.eqn_loop[e] for e in keep),
            again_of=tuple(self.again_of[e] for e in keep),
            trips=tuple(scope.trips for scope in self.scopes),
            value_loop=tuple(scope.loop for scope in self.scopes),
            loops=self.loops,
            unrolled=frozenset(self.unrolled),
            avals=tuple(self.avals),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            named=self.named,
            carry={position: self.carry[e] for position, e in enumerate(keep) if e in self.carry},
            guessed=tuple(self.guessed),
            on_host=frozenset(self.on_host),
            repeated=frozenset(position for position, e in enumerate(keep) if self.repeated[e]),
            backward=frozenset(position for position, e in enumerate(keep) if self.backward[e]),
        )
