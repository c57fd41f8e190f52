"""Plans: the Plan that users hold, fresh or loaded from a file."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cost_models
from autoshard.api import placing
from autoshard.backends import devices as meshes
from autoshard.backends.devices import Target
from autoshard.backends.shardy.propagation import Annotations, annotated
from autoshard.errors import PlanFileError, PlanMismatchError, SpecError
from autoshard.explain import runner_up
from autoshard.explain import text as explanation
from autoshard.explain.sensitivity import turning_points
from autoshard.ir import accumulation, rewrite
from autoshard.ir import arguments as bindings
from autoshard.ir import graph as graphs
from autoshard.ir import trace as traces
from autoshard.ir.constraints import Constraints
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted
from autoshard.ir.trace import Traced
from autoshard.planner import pipeline, view
from autoshard.planner import summary as text
from autoshard.planner.pipeline import PlanningResult
from autoshard.planner.record import Leaf, PlanRecord, parse, read, write
from autoshard.problem import Problem
from autoshard.problem.assignment import Assignment
from autoshard.report import page
from autoshard.verification.layouts import LayoutCheck, honoured
from autoshard.verification.profile import Profile, profile
from autoshard.verification.result import Verification
from autoshard.verification.verify import TOLERANCE, check, verify


class Plan:
    """A sharding plan: layouts for a program's inputs, outputs and values, with its promises.

    Made by `autoshard.plan` or `autoshard.jit(...).plan`; read from a file by
    `autoshard.load`, in which case the function is given to `jit`.
    """

    def __init__(
        self,
        record: PlanRecord,
        *,
        place: Target | None,
        planned: PlanningResult | None,
        traced: Traced | None,
        plan_again: Callable[[], PlanningResult] | None = None,
    ) -> None:
        self.record = record
        self._place = place
        self._planned = planned
        self._traced = traced
        self._plan_again = plan_again

    def __repr__(self) -> str:
        r = self.record
        return f"<Plan of {r.name} on {r.mesh} ({r.hardware}): {r.cost.step_s * 1e3:.3g} ms, {r.certificate.status}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled plan is what its file holds: read back, it is as one from `load`."""
        return _unpickled, (self.record.dumps(),)

    def noted(self, note: str, *, compiler_options: Mapping[str, Any] | None = None) -> "Plan":
        """The same plan with one more note, and more compiler flags, if any."""
        options = {**self.record.compiler_options, **(compiler_options or {})}
        return self._instead(replace(self.record, notes=(*self.record.notes, note), compiler_options=options))

    def pinned(self, pins: Constraints) -> "Plan":
        """The same plan with other constraints emitted."""
        return self._instead(replace(self.record, pins=pins))

    def took(self, seconds: Mapping[str, float]) -> "Plan":
        """The same plan, whose summary counts more of the call that made it; as it is where it was not planned now."""
        if self._planned is None:
            return self
        planned = replace(self._planned, seconds={**self._planned.seconds, **seconds})
        return Plan(self.record, place=self._place, planned=planned, traced=self._traced, plan_again=self._plan_again)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall-clock per stage of planning; empty where the plan was not planned now."""
        return {} if self._planned is None else self._planned.seconds

    def emitting(self, constraints: str) -> "Plan":
        """The same plan with a record of which constraints were asked for."""
        return self._instead(replace(self.record, emitted=constraints))

    def _instead(self, record: PlanRecord) -> "Plan":
        again = self._plan_again
        return Plan(record, place=self._place, planned=self._planned, traced=self._traced, plan_again=again)

    # What was decided.

    @property
    def planned(self) -> PlanningResult | None:
        """What led to the plan; one from a cache or another process is planned again for it. None for a plan file."""
        if self._planned is None and self._plan_again is not None:
            self._planned = self._plan_again()
        return self._planned

    @property
    def traced(self) -> Traced | None:
        """The program; None for a plan file that is not bound to its function."""
        return self._traced

    @property
    def cost(self) -> float:
        """Predicted seconds of one step."""
        return self.record.cost.step_s

    @property
    def problem(self) -> Problem:
        """What the solver was given, as arrays; `plan.problem.dump("plan.json.gz")` writes it as IOPDDL JSON.

        Raises:
          PlanMismatchError: the plan was read from a file.
        """
        if self.planned is None:
            raise PlanMismatchError("a loaded plan does not hold its problem: plan again")
        return self.planned.formulation.problem

    @property
    def specs(self) -> Any:
        """PartitionSpecs of the inputs: a tuple of pytrees, one per argument (of a loaded plan: by path)."""
        return self._tree(self.record.inputs, None if self._traced is None else self._traced.in_tree)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the outputs, a pytree (of a loaded plan: by path)."""
        return self._tree(self.record.outputs, None if self._traced is None else self._traced.out_tree)

    @staticmethod
    def _tree(leaves: Sequence[Leaf], tree: Any) -> Any:
        if tree is None:
            return {leaf.path: leaf.spec for leaf in leaves}
        return jax.tree.unflatten(tree, [leaf.spec for leaf in leaves])

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """A Mesh with Auto axes, in the device order that was priced (or the caller's own mesh).

        Raises:
          MeshError: there are fewer devices than the mesh has.
        """
        if devices is None and self._place is not None and self._place.own is not None:
            return meshes.auto_twin(self._place.own)
        order = np.asarray(self.record.device_order)
        return meshes.over_devices(self.record.mesh, order, None if devices is None else list(devices))

    @property
    def own_mesh(self) -> Mesh | None:
        """The Mesh that the caller gave or had set, if any."""
        return None if self._place is None else self._place.own

    def in_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings of the inputs, for `device_put`, Orbax or `jax.jit`.

        Raises:
          PlanMismatchError: the mesh is not of the plan's shape.
        """
        return self._shardings(self.specs, mesh)

    def out_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings of the outputs."""
        return self._shardings(self.out_specs, mesh)

    def _shardings(self, specs: Any, mesh: Mesh | None) -> Any:
        on = self.mesh() if mesh is None else mesh
        if dict(on.shape) != self.record.mesh.shape or tuple(on.axis_names) != self.record.mesh.names:
            raise PlanMismatchError(
                f"the plan was made for the mesh {self.record.mesh}, got {MeshAxes.of(dict(on.shape))}; plan again"
            )
        return jax.tree.map(lambda spec: NamedSharding(on, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """The compiler flags that the prices assume, for `lowered.compile(compiler_options=…)`."""
        return self.record.compiler_options

    # What it is used for.

    def jit(self, fn: Callable[..., Any] | None = None) -> Any:
        """A `jax.jit`-ed function of the dynamic arguments with the plan's layouts.

        Args:
          fn: for a loaded plan, the function it was made for; its program is traced at the
            first call and its digest compared.

        Raises:
          PlanMismatchError: the function, its shapes or its pytrees are not the plan's.
        """
        if self._traced is not None:
            return self._jitted(self._traced, self.mesh())
        if fn is None:
            raise PlanMismatchError("a loaded plan does not hold its function: pass it, plan.jit(train_step)")
        return _Loaded(self, fn)

    def _jitted(self, traced: Traced, mesh: Any) -> Any:
        arguments = max(traced.argument_of, default=-1) + 1
        record = self.record
        in_specs = jax.tree.unflatten(traced.in_tree, [NamedSharding(mesh, leaf.spec) for leaf in record.inputs])
        donated = {traced.argument_of[i] for i in record.donated}
        return self._jit(
            traced,
            mesh,
            in_shardings=in_specs,
            donate_argnums=tuple(i for i in range(arguments) if i in donated),
        )

    def _jit(self, traced: Traced, mesh: Any, *, compiler_options: Mapping[str, Any] | None = None, **how: Any) -> Any:
        """The emitted program under `jax.jit`, of arguments with the plan's leaves in any pytrees."""
        record = self.record

        def run(*args: Any, **kwargs: Any) -> Any:

            def emitted(*flat: Any) -> list[Any]:
                return rewrite.constrained(traced.jaxpr, record.pins, mesh, flat)

            outputs = in_auto_mode(emitted, record.outputs)(*jax.tree.leaves((args, kwargs)))
            return jax.tree.unflatten(traced.out_tree, outputs)

        run.__name__ = record.name
        out_specs = jax.tree.unflatten(traced.out_tree, [NamedSharding(mesh, leaf.spec) for leaf in record.outputs])
        options = {**(record.compiler_options if _runs_on(mesh, record.hardware) else {}), **(compiler_options or {})}
        return jax.jit(run, out_shardings=out_specs, compiler_options=options or None, **how)

    def flat_jit(self, *, donate: Sequence[int], **how: Any) -> Any:
        """As `jit`, of the flat leaves; `donate` are their positions, the rest are options of `jax.jit`."""
        assert self._traced is not None
        mesh = self.mesh()
        flat = tuple(NamedSharding(mesh, leaf.spec) for leaf in self.record.inputs)
        return self._jit(self._traced, mesh, in_shardings=flat, donate_argnums=tuple(donate), **how)

    def named_jit(self, names: Sequence[str], **how: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """As `jit`, with the last arguments by keyword, and the arguments to lower it for, which carry the layouts.

        `jax.jit` takes no `in_shardings` for keyword arguments.
        """
        traced, mesh = self._traced, self.mesh()
        assert traced is not None
        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=NamedSharding(mesh, leaf.spec))
            for a, leaf in zip(traced.in_avals, self.record.inputs, strict=True)
        ]
        arguments = jax.tree.unflatten(traced.in_tree, avals)
        count = len(arguments) - len(names)
        donated = {traced.argument_of[i] for i in self.record.donated}
        jitted = self._jit(
            traced,
            mesh,
            donate_argnums=tuple(i for i in range(count) if i in donated),
            donate_argnames=tuple(name for i, name in enumerate(names, count) if i in donated),
            **how,
        )
        return jitted, arguments[:count], dict(zip(names, arguments[count:], strict=True))

    def bind(self, fn: Callable[..., Any], *args: Any) -> "Plan":
        """A loaded plan with its function: checks shapes, paths and the program's digest."""
        bound = bindings.bind(fn, args, {})
        traced = self._same_program(lambda: traces.trace(bound.fn, bound.values, bound.names, self.record.mesh))
        want = [(leaf.path, leaf.shape, leaf.dtype) for leaf in self.record.inputs]
        have = [(p, a.shape, str(a.dtype)) for p, a in zip(traced.in_paths, traced.in_avals, strict=True)]
        if want != have:
            for old, new in zip(want, have, strict=False):
                if old != new:
                    raise PlanMismatchError(
                        f"the plan was made for {old[0]}: {old[2]}{list(old[1])}, "
                        f"got {new[0]}: {new[2]}{list(new[1])}; plan again"
                    )
            raise PlanMismatchError(f"the plan was made for {len(want)} input leaves, got {len(have)}; plan again")
        if not traced.is_digest(self.record.digest):
            raise PlanMismatchError(
                f"the plan was made for another program ({self.record.name}): its digest is {self.record.digest}, "
                f"this function's is {traced.digest}; plan again"
            )
        try:
            made = [(leaf.path, leaf.shape, leaf.dtype) for leaf in self.record.outputs]
            if made != [(p, a.shape, str(a.dtype)) for p, a in zip(traced.out_paths, traced.out_avals, strict=True)]:
                raise SpecError("its outputs are not those of the program that its digest is of")
            rewrite.check(traced.jaxpr, self.record.pins, self.record.mesh)
        except SpecError as error:
            raise PlanFileError(f"the plan of {self.record.name} is damaged: {error}; plan again") from error
        if not self.record.emitted and (lacking := rewrite.not_laid_out(traced.jaxpr, self.record.pins)):
            raise PlanMismatchError(
                f"the plan of {self.record.name} was made by an older autoshard, which left {lacking[0]} to XLA's "
                "partitioner; that misreads it: plan again"
            )
        return Plan(self.record, place=self._place, planned=None, traced=traced)

    def _same_program(self, trace: Callable[[], Traced]) -> Traced:
        """The trace, with an open accumulation in as many parts as the plan has."""
        with accumulation.tried_parts(1):
            first = trace()
        if accumulation.is_open(first.jaxpr):
            for parts in accumulation.choices(self.record.mesh)[1:]:
                with accumulation.tried_parts(parts), contextlib.suppress(SpecError):
                    other = trace()
                    if other.is_digest(self.record.digest):
                        return other
        return first

    def _argument(self, arg: str) -> list[Leaf]:
        if self._traced is None:
            raise PlanMismatchError("bind the loaded plan to its function first: plan.bind(train_step, state, batch)")
        roots = [dotted(path).split(".")[0] for path in self._traced.in_paths]
        if arg not in roots:
            raise SpecError(f"no argument named {arg!r}; there are: {', '.join(dict.fromkeys(roots))}")
        return [leaf for leaf, root in zip(self.record.inputs, roots, strict=True) if root == arg]

    def init(self, init: Callable[..., Any], *args: Any, arg: str) -> Any:
        """`init(*args)` born sharded as argument `arg`: nothing is allocated on one device first.

        Raises:
          PlanMismatchError: a path, shape or dtype of what `init` returns is not the argument's.
        """
        return placing.born(init, args, arg, self._argument(arg), self.mesh())

    def put(self, value: Any, arg: str) -> Any:
        """Places a pytree in the layout of argument `arg`.

        Raises:
          PlanMismatchError: a path, shape or dtype is not the argument's.
        """
        return placing.put(value, arg, self._argument(arg), self.mesh())

    def put_local(self, value: Any, arg: str) -> Any:
        """As `put`, of what this process has of the argument: each host gives its own part of the batch.

        The parts are those of the planned shapes along one dimension, in the order of the processes, whatever the
        layout; what one process's devices need of another's part is sent there. A leaf of the planned
        shape itself is the same in every process.

        Raises:
          PlanMismatchError: what a process gives is no equal part of what was planned.
        """
        return placing.put_local(value, arg, self._argument(arg), self.mesh())

    def summary(self) -> str:
        """The plan as text: step time, memory, proof, layouts, collectives."""
        if self._planned is None or self._place is None:
            return text.summary(self.record)
        return text.summary(
            self.record,
            seconds=self._planned.seconds,
            flops=self._planned.assignment.flops(),
            peak_flops_per_s=self._planned.assignment.peak_flops_per_s(self._place.machine.peak_flops_per_s),
        )

    def explain(
        self,
        pattern: str | None = None,
        *,
        at: str | None = None,
        flips: bool = False,
        vary: Mapping[str, tuple[int, Callable[[int], "Plan"]]] | None = None,
    ) -> str:
        """Why inputs, or what a source line computes, lie as they do: the runner-up and what it costs, as text.

        Args:
          pattern: of inputs' paths, such as `"**.wq"`.
          at: or a source line, such as `"model.py:61"`.
          flips: whether to look for the link rates and the memory that turn the decision, too.
          vary: sizes to look for besides: name → its present value, and a function that plans
            the program at another, such as `{"batch": (32, lambda n: autoshard.plan(step,
            state, batches(n), mesh=mesh))}`. A plan alone does not know how its arguments
            follow from a size.

        Raises:
          SpecError: nothing is found there.
          PlanMismatchError: the plan was read from a file.
        """
        planned, place = self._explainable()
        varied = {name: (now, _planned_by(plan_at)) for name, (now, plan_at) in (vary or {}).items()}
        turned = turning_points(planned, place.hardware, pattern, at=at, varied=varied) if flips or varied else ()
        undivided = runner_up.blocked(self.record.inputs, self.record.mesh)
        return explanation.text(runner_up.explain(planned, pattern, at=at), turned, undivided)

    def to_html(self) -> str:
        """A page that opens offline: layouts as tiles, timeline, memory, roofline, collectives, sources.

        Raises:
          PlanMismatchError: the plan was read from a file.
        """
        planned, place = self._explainable()
        return page.page(plan=view.of_plan(planned, place.hardware))

    def _explainable(self) -> tuple[PlanningResult, Target]:
        if self.planned is None or self._place is None:
            raise PlanMismatchError(
                "a plan file holds no alternatives: plan again, autoshard.plan(train_step, state, batch, mesh=…)"
            )
        return self.planned, self._place

    def save(self, path: str | Path) -> None:
        """Writes the plan file: JSON, the same bytes for the same input."""
        write(self.record, path)

    def verify(
        self,
        compiler: str | None = None,
        *,
        topology: str | None = None,
        tolerance: float = TOLERANCE,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Verification:
        """Compiles the planned program for its hardware, without a device, and compares.

        A forward function that was planned for its gradient is compiled with its gradient.

        Args:
          compiler: "gpu", "tpu" or "cpu"; None takes the hardware's own. "shardy" compares with
            the collectives that Shardy itself names, in-process, without a compiler.
          topology: another topology to compile for, such as "cpu:8".
          tolerance: relative difference in bytes that still counts as a match.
          compiler_options: flags over the plan's own; None for those of the program whose collectives are priced
            (XLA:TPU without windowed einsum, where sums over a whole torus are not scattered), {} for the
            compiler's own.

        Raises:
          CompilerMissingError: that compiler is not installed.
        """
        traced = self._traced
        if traced is None:
            raise PlanMismatchError("bind the loaded plan to its function first: plan.bind(train_step, state, batch)")
        if self.record.gradient_of:
            if self.planned is None:
                raise PlanMismatchError(
                    f"the plan file of {self.record.name} is of a forward function planned for its gradient, which it "
                    "does not hold: plan it again to verify it"
                )
            planned = replace(self.planned, record=self.record)
            program, graph = pipeline.traced_gradient(planned, meshes.abstract(self.record.mesh)), None
        else:
            program = annotated(traced, self.record.mesh, _annotations(self.record))
            graph = graphs.build(traced.jaxpr, meshes.platform(self.record.hardware))
        return verify(
            program,
            self.record,
            compiler=compiler,
            topology=topology,
            tolerance=tolerance,
            machine=self._machine,
            graph=graph,
            assignment=self._assignment,
            compiler_options=compiler_options,
        )

    def check(self, compiled: Any, *, compiler: str | None = None, tolerance: float = TOLERANCE) -> Verification:
        """Compares the plan with an executable that was compiled elsewhere, or with its HLO text.

        Args:
          compiled: what `jax.jit(…).lower(…).compile()` returns, or scheduled HLO text.
          compiler: who compiled it: "gpu", "tpu" or "cpu"; None takes the executable's
            platform, or for text that of the plan's hardware.
          tolerance: relative difference in bytes that still counts as a match.

        Raises:
          VerifyError: it is neither, or the executable has no text.
          HloError: the text is no HLO module, or of another number of devices.
        """
        return check(
            compiled,
            self.record,
            compiler=compiler,
            tolerance=tolerance,
            machine=self._machine,
            assignment=self._assignment,
        )

    def honoured(self, compiler: str | None = None) -> LayoutCheck:
        """Reads the layout of every value back and lists those that the partitioner did not keep.

        Args:
          compiler: "gpu", "tpu" or "cpu" to read that compiler's own dump; None asks Shardy in-process.

        Raises:
          PlanMismatchError: the plan was read from a file.
          VerifyError: it is the plan of a forward function for its gradient.
        """
        if self.planned is None:
            raise PlanMismatchError("a loaded plan holds the layouts of inputs and outputs alone: plan again")
        return honoured(self.planned, compiler=compiler)

    def profile(self, step: Callable[..., Any], *args: Any, steps: int = 5) -> Profile:
        """Runs the planned step under JAX's profiler: predicted beside measured, per class of operation.

        Args:
          step: what `jit()` returned.
          args: its arguments; donated ones are consumed. An output of an argument's structure and
            shapes takes its place in the next step, as of a train step its state.
          steps: how many to measure, after one to warm up.

        Raises:
          VerifyError: `step` is not jitted, or the profiler saw none of its operations.
        """
        return profile(step, args, self.record, self._assignment, steps=steps)

    @property
    def _machine(self) -> cost_models.Machine | None:
        return None if self._place is None else self._place.machine

    @property
    def _assignment(self) -> Assignment | None:
        return None if self._planned is None else self._planned.assignment


def _planned_by(plan_at: Callable[[int], Plan]) -> Callable[[int], PlanningResult]:
    """The problem behind a user's plans at other sizes."""

    def planned_at(size: int) -> PlanningResult:
        planned = plan_at(size).planned
        if planned is None:
            raise PlanMismatchError("vary= takes functions that plan; a plan file holds no alternatives")
        return planned

    return planned_at


def _annotations(record: PlanRecord) -> Annotations:
    """Everything that a plan says of layouts."""
    return Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(record.donated),
    )


class _Loaded:
    """A loaded plan's function: bound and compiled at the first call."""

    def __init__(self, plan: Plan, fn: Callable[..., Any]) -> None:
        self._plan, self._fn = plan, fn
        self._jitted: Any = None

    def _bound(self, args: Sequence[Any]) -> Any:
        if self._jitted is None:
            self._jitted = self._plan.bind(self._fn, *args).jit()
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        return self._bound(args)(*args)

    def lower(self, *args: Any) -> Any:
        return self._bound(args).lower(*args)


def load(path: str | Path) -> Plan:
    """Reads a plan file; nothing in it is executed.

    Raises:
      PlanFileError: not a plan file, truncated, or of a newer schema.
    """
    return Plan(read(path), place=None, planned=None, traced=None)


def _unpickled(text: str) -> Plan:
    return Plan(parse(text, "a pickled plan"), place=None, planned=None, traced=None)


def in_auto_mode(fn: Callable[..., list[Any]], outputs: Sequence[Leaf]) -> Callable[..., list[Any]]:
    """`fn` under the mesh in context with Auto axes: with Explicit ones, constraints would be assertions."""
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return fn
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))

    def said(spec: PartitionSpec) -> PartitionSpec:
        """What a type may say of a layout: the Explicit axes."""
        dims = ((dim,) if isinstance(dim, str) else dim or () for dim in spec)
        return PartitionSpec(*(tuple(axis for axis in dim if kinds.get(axis) == AxisType.Explicit) for dim in dims))

    auto: Any = jax.sharding.auto_axes(fn, out_sharding=[NamedSharding(around, said(leaf.spec)) for leaf in outputs])
    return auto


def _runs_on(mesh: Any, hardware: str) -> bool:
    """Whether a mesh's devices are of the planned kind, so that its compiler flags apply."""
    if not isinstance(mesh, Mesh):
        return False
    platform = mesh.devices.flat[0].platform
    return platform == ("tpu" if hardware.startswith("tpu") else "cpu" if hardware.startswith("cpu") else "gpu")
