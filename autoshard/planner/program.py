"""Program: a call → its traced programs, each traced once and kept for every mesh.

A `Call` binds a function to its arguments. A `Program` is its jaxpr, without mesh, hardware or prices. A program is
traced again on another mesh only if it depends on the mesh (`ir.trace.depends_on_mesh`).

One call may have several programs, its *variants*, such as the numbers of parts of an `autoshard.accumulate`. The one
with the fastest plan is taken. A rewrite of the program adds its variants in `Call.variants`.

An accumulation with `steps="auto"` leaves open how many micro-batches a program takes. The program is then that of one
micro-batch, and `Program.open_count` has its programs of more, each traced when first asked for.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from autoshard.errors import SpecError, StageError
from autoshard.ir import accumulation, arguments, trace
from autoshard.ir import graph as graphs
from autoshard.ir.arguments import Binding
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.trace import Traced
from autoshard.report.tables import short_place

log = logging.getLogger("autoshard")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenCount:
    """The numbers of micro-batches that a program may take, rising, and its program in each.

    `staged`: stages work on them one after the other, and wait the less the more there are.
    """

    counts: tuple[int, ...]
    program: "Callable[[int], Program]"
    staged: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: costly properties are cached
class Program:
    """A traced program: no arguments' values, no mesh, no prices.

    Attributes:
      name: name of the function.
      traced: its jaxpr, with the path of every input and output.
      trace_s: seconds that tracing took.
      variant: its difference from the call's first program, in words; empty for the first.
      open_count: the numbers of micro-batches to choose among; None where the program says them all.
      stages: the mesh axis that splits its layers into stages, empty for one stage; None where the program says it.
      not_staged: axes ("stage=4") over which its layers cannot be in stages, and why, where that was left open.
    """

    name: str
    traced: Traced
    trace_s: float = 0.0
    variant: str = ""
    open_count: OpenCount | None = None
    stages: str | None = None
    not_staged: Mapping[str, str] = field(default_factory=dict[str, str])
    _graphs: dict[str, Graph] = field(default_factory=dict[str, Graph], init=False)

    def graph(self, platform: str) -> Graph:
        """The program as equations over numbered values, as it runs on JAX's `platform`; built once."""
        if platform not in self._graphs:
            self._graphs[platform] = graphs.build(self.traced.jaxpr, platform)
        return self._graphs[platform]

    def rewritten(self, traced: Traced, how: str) -> "Program":
        """The same program in another form; `how` says in words which."""
        variant = ", ".join(filter(None, (self.variant, how)))
        return Program(name=self.name, traced=traced, trace_s=self.trace_s, variant=variant, stages=self.stages)

    @cached_property
    def depends_on_mesh(self) -> bool:
        """Whether it is the call's program on the mesh that it was traced on alone."""
        return trace.depends_on_mesh(self.traced)


class _Tried(NamedTuple):
    """The parts, micro-batches and stages of open accumulations; None: as many parts as outside of the planner."""

    parts: int | None
    steps: int = 1
    stages: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A function bound to the arguments of one call; `program` and `variants` trace it when first asked to."""

    name: str
    bound: Binding
    _programs: dict[tuple[_Tried, MeshAxes], Program] = field(default_factory=dict[tuple[_Tried, MeshAxes], Program])
    _not_staged: dict[str, str] = field(default_factory=dict[str, str])

    def program(self, axes: MeshAxes) -> Program:
        """The call's program on a mesh, as the function says it."""
        return self._program(_Tried(None), axes)

    def variants(self, axes: MeshAxes, *, in_parts: bool = True) -> Iterator[Program]:
        """The programs that the planner chooses among on a mesh: usually one.

        Several, where an `autoshard.accumulate` leaves open in how many parts it keeps the gradients, or an
        `autoshard.in_stages` over which axis the layers are in stages. With `in_parts` False the parts are those of the
        function outside of the planner.
        """
        own = 1 if in_parts else None
        first = self._program(_Tried(own), axes)
        yield first
        open_parts = in_parts and accumulation.is_open(first.traced.jaxpr)
        for stages in ("", *(axes.names if first.stages is not None else ())):
            others = MeshAxes.of({name: size for name, size in axes.shape.items() if name != stages})
            for parts in accumulation.choices(others) if open_parts else [own]:
                tried = _Tried(parts, stages=stages)
                if tried == _Tried(own) or (stages and axes.shape[stages] == 1):
                    continue
                try:
                    yield self._program(tried, axes)
                except SpecError as error:  # the layers are no stages, or the batch does not split into so many
                    log.debug("accumulation in %s parts, stages over %r: %s", parts, stages, error)
                    if stages:
                        self._not_staged.setdefault(f"{stages}={axes.shape[stages]}", _reason(error))

    def donating(self, donated: frozenset[int]) -> "Call":
        """The same call, with these of its arguments donated."""
        return replace(self, bound=replace(self.bound, donated=donated))

    def _program(self, tried: _Tried, axes: MeshAxes) -> Program:
        """The program with open accumulations as they are tried."""
        key = tried, axes
        if key not in self._programs:
            other = next((p for (same, _), p in self._programs.items() if same == tried), None)
            reused = other is not None and not other.depends_on_mesh
            self._programs[key] = other if other is not None and reused else self._trace(tried, axes)
        return self._programs[key]

    def _trace(self, tried: _Tried, axes: MeshAxes) -> Program:
        begin = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(accumulation.tried_steps(tried.steps))
            stack.enter_context(accumulation.tried_stages(tried.stages))
            if tried.parts is not None:
                stack.enter_context(accumulation.tried_parts(tried.parts))
            traced = trace.trace(self.bound.fn, self.bound.values, self.bound.names, axes)
        words = [f"accumulated in {tried.parts} parts"] if (tried.parts or 1) > 1 else []
        words += [f"in {tried.steps} micro-batches"] if tried.steps > 1 else []
        words += [f"in stages over {tried.stages}"] if tried.stages else []
        counts = accumulation.counts(traced.jaxpr) if tried.steps == 1 else ()
        staged = accumulation.are_staged(traced.jaxpr)
        return Program(
            name=self.name,
            traced=traced,
            trace_s=time.perf_counter() - begin,
            variant=", ".join(words),
            open_count=OpenCount(counts=counts, program=partial(self._in, tried, axes), staged=staged)
            if counts
            else None,
            stages=tried.stages if accumulation.has_open_stages(traced.jaxpr) else None,
            not_staged=self._not_staged,
        )

    def _in(self, tried: _Tried, axes: MeshAxes, count: int) -> Program:
        """The program in another number of micro-batches; its digest is that of the program in one.

        Raises:
          SpecError: its results would have other shapes, or the batch does not split so.
        """
        first, program = self._program(tried, axes), self._program(tried._replace(steps=count), axes)
        if not program.traced.source_digest:
            _check_results(self.name, first.traced, program.traced, count)
            traced = replace(program.traced, source_digest=first.traced.digest)
            program = replace(program, traced=traced, open_count=None)
            self._programs[tried._replace(steps=count), axes] = program
        return program


def _reason(error: SpecError) -> str:
    """Why layers are in no stages, in a line."""
    if not isinstance(error, StageError):
        return str(error).partition("\n")[0]
    return f"{error.reason} at {short_place(error.where)}" if error.where else error.reason


def _check_results(name: str, first: Traced, traced: Traced, count: int) -> None:
    """Raises a SpecError if the number of micro-batches decides the shape of a result."""
    for path, one, other in zip(first.out_paths, first.out_avals, traced.out_avals, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise SpecError(
                f"{name}: the result {path} has the shape {one.shape}, and in {count} micro-batches {other.shape}: "
                'with steps="auto" (autoshard.accumulate) the plan would decide what the program returns; take the '
                "mean of aux in the step, or give steps a number"
            )


def bind(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
) -> Call:
    """Binds a function to the arguments of one call; numbers and names as in `jax.jit`.

    Raises:
      SpecError: a static or donated argument does not exist, or is both.
    """
    bound = arguments.bind(
        fn,
        args,
        kwargs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    return Call(name=getattr(fn, "__name__", type(fn).__name__), bound=bound)
