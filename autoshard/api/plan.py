"""Plan: the verbs of every plan, and those of plans that know their program.

    Plan               a record of layouts and promises
    ├ LoadedPlan       read from a file: its function is given to `jit` or `bind`
    └ ProgramPlan      with the program that it was made for
      ├ BoundPlan      a loaded plan and its function
      └ SolvedPlan     found in this process: with its problem, its alternatives and its proof

Classes with subclasses are abstract, the others final.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import cost_models
from autoshard.api import emit, placing
from autoshard.api.bind import bound_program
from autoshard.backends import devices as meshes
from autoshard.backends.model import CompilerModel
from autoshard.backends.shardy.propagation import Annotations, annotated
from autoshard.errors import PlanMismatchError, SpecError
from autoshard.explain.diff import Diff, diff
from autoshard.ir import graph as graphs
from autoshard.ir.checkpoint_policy import CheckpointPolicy, checkpoint_policy
from autoshard.ir.graph import Graph
from autoshard.ir.loop_sums import LoopSum
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted
from autoshard.ir.recomputation import Recomputation
from autoshard.ir.recomputed import KeptValue, kept_values_of
from autoshard.ir.trace import Traced
from autoshard.pipeline_parallel.hand_overs import pipelines
from autoshard.planner import exports
from autoshard.planner import summary as text
from autoshard.planner.record import Leaf, PlanRecord, write_plan_file
from autoshard.problem import bill
from autoshard.problem.assignment import Assignment
from autoshard.problem.repeated import repeated_work
from autoshard.report.notebook import Text, preformatted
from autoshard.verification.profile import Profile, profile
from autoshard.verification.result import Verification
from autoshard.verification.verify import TOLERANCE, Known, check, verify


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provenance:
    """How a plan was made, as far as that is at hand: of a plan that was read from a file, nothing is.

    Attributes:
      own_mesh: the Mesh that the caller gave or had set.
      machine: the cost model of the hardware, with the mesh placed on it.
      assignment: the solver's choices.
      seconds: wall-clock per stage of planning.
    """

    own_mesh: Mesh | None = None
    machine: cost_models.Machine | None = None
    assignment: Assignment | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


class Plan(ABC):
    """A sharding plan: layouts for a program's inputs, outputs and values, with its promises.

    `autoshard.plan` and `autoshard.jit(...).plan` return a `SolvedPlan`, `autoshard.load` a
    `LoadedPlan`, which says of what it does not hold why, and the way out.
    """

    def __init__(self, record: PlanRecord) -> None:
        self.record = record

    def __repr__(self) -> str:
        r = self.record
        return f"<Plan of {r.name} on {r.mesh} ({r.hardware}): {r.cost.step_s * 1e3:.3g} ms, {r.certificate.status}>"

    def _repr_html_(self) -> str:
        return preformatted(self.summary())

    # What was decided.

    @property
    def cost(self) -> float:
        """Predicted seconds of one step."""
        return self.record.cost.step_s

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall-clock per stage of planning; empty where the plan was not planned now."""
        return self._provenance.seconds

    @property
    def specs(self) -> Any:
        """PartitionSpecs of the inputs: a tuple of pytrees, one per argument (of a loaded plan: by path)."""
        return self._as_inputs([leaf.spec for leaf in self.record.inputs])

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the outputs, a pytree (of a loaded plan: by path)."""
        return self._as_outputs([leaf.spec for leaf in self.record.outputs])

    @abstractmethod
    def _as_inputs(self, leaves: Sequence[Any]) -> Any:
        """One value per input, in the form of the arguments."""

    @abstractmethod
    def _as_outputs(self, leaves: Sequence[Any]) -> Any:
        """One value per output, in the form of the result."""

    @property
    def own_mesh(self) -> Mesh | None:
        """The Mesh that the caller gave or had set, if any."""
        return self._provenance.own_mesh

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """A Mesh with Auto axes, in the device order that was priced (or the caller's own mesh).

        Raises:
          MeshError: there are fewer devices than the mesh has.
        """
        own = self.own_mesh
        if devices is None and own is not None:
            return meshes.auto_twin(own)
        order = np.asarray(self.record.device_order)
        return meshes.over_devices(self.record.mesh, order, None if devices is None else list(devices))

    def in_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings of the inputs, for `device_put`, Orbax or `jax.jit`; state on the host has its memory kind.

        Raises:
          PlanMismatchError: the mesh is not of the plan's shape.
        """
        return self._as_inputs(self._shardings(self.record.inputs, mesh))

    def out_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings of the outputs."""
        return self._as_outputs(self._shardings(self.record.outputs, mesh))

    def _shardings(self, leaves: Sequence[Leaf], mesh: Mesh | None) -> list[NamedSharding]:
        on = self.mesh() if mesh is None else mesh
        if dict(on.shape) != self.record.mesh.shape or tuple(on.axis_names) != self.record.mesh.names:
            raise PlanMismatchError(
                f"the plan was made for the mesh {self.record.mesh}, got {MeshAxes.of(dict(on.shape))}; plan again"
            )
        return [leaf.sharding(on) for leaf in leaves]

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """The compiler flags that the prices assume, for `lowered.compile(compiler_options=…)`."""
        return self.record.compiler_options

    @property
    def recomputation(self) -> Recomputation | None:
        """What backward passes find kept, the rest of what they read being repeated; None: as the program says."""
        return self.record.recomputation

    @property
    def microbatches(self) -> int | None:
        """The micro-batches of accumulations with `steps="auto"`, as chosen; None: the program has none."""
        return self.record.microbatches

    @property
    def loop_sums(self) -> tuple[LoopSum, ...]:
        """The sums over loops' trips that are kept in parts, and finished once after the loop."""
        return self.record.loop_sums

    # What it is used for.

    @abstractmethod
    def jit(self, fn: Callable[..., Any] | None = None) -> Any:
        """A `jax.jit`-ed function of the dynamic arguments with the plan's layouts.

        Args:
          fn: for a loaded plan, the function it was made for; its program is traced at the
            first call and its digest compared.

        Raises:
          PlanMismatchError: the function, its shapes or its pytrees are not the plan's.
        """

    @abstractmethod
    def bind(self, fn: Callable[..., Any], *args: Any) -> "ProgramPlan":
        """The plan with its function, whose shapes, paths and digest are compared.

        Raises:
          PlanMismatchError: it is not the function that the plan was made for.
          PlanFileError: the plan's file is damaged.
        """

    def summary(self) -> str:
        """The plan as text: step time, memory, proof, layouts, collectives."""
        known = self._provenance
        used = known.assignment
        written = text.summary(
            self.record,
            seconds=known.seconds,
            flops=None if used is None else bill.flops(used),
            peak_flops_per_s=None
            if used is None or known.machine is None
            else bill.peak_flops_per_s(used, known.machine.peak_flops_per_s),
            repeated=None if used is None else repeated_work(used),
        )
        return Text(written)

    def save(self, path: str | Path) -> None:
        """Writes the plan file: JSON, the same bytes for the same input."""
        write_plan_file(self.record, path)

    def diff(self, other: "Plan") -> Diff:
        """What `other`, a later plan as a rule, changes: step, memory, layouts, traffic, the state to move."""
        return diff(self.record, other.record)

    def logical_axis_rules(self, names: exports.LogicalNames) -> exports.Rules:
        """Flax's logical axis rules under which every named input has the layout of the plan.

        Args:
          names: of inputs, by path: one logical name (or None) per dimension.

        Raises:
          SpecError: no such input, names that do not fit it, or a name that the plan splits in two ways.
        """
        return exports.logical_axis_rules(self.record, names)

    def check(self, compiled: Any, *, compiler: str | None = None, tolerance: float = TOLERANCE) -> Verification:
        """Compares the plan with an executable that was compiled elsewhere, or with its HLO text.

        Args:
          compiled: the result of `jax.jit(…).lower(…).compile()`, or scheduled HLO text.
          compiler: who compiled it: "gpu", "tpu" or "cpu"; None takes the executable's
            platform, or for text that of the plan's hardware.
          tolerance: relative difference in bytes that still counts as a match.

        Raises:
          VerifyError: `compiled` is neither, or the executable has no text.
          HloError: the text is no HLO module, or of another number of devices.
        """
        return check(
            compiled,
            self.record,
            compiler=compiler,
            tolerance=tolerance,
            known=Known(machine=self._provenance.machine, assignment=self._provenance.assignment),
        )

    def profile(self, step: Callable[..., Any], *args: Any, steps: int = 5) -> Profile:
        """Runs the planned step under JAX's profiler: predicted beside measured, per class of operation.

        Args:
          step: the result of `jit()`.
          args: its arguments; donated ones are consumed. An output with an argument's structure and
            shapes (a train step's state) is that argument of the next step.
          steps: number of measured steps, after one to warm up.

        Raises:
          VerifyError: `step` is not jitted, or the profiler saw none of its operations.
        """
        return profile(step, args, self.record, self._provenance.assignment, steps=steps)

    @property
    @abstractmethod
    def _provenance(self) -> Provenance:
        """How the plan was made."""


class ProgramPlan(Plan):
    """A plan with the program that it was made for: it runs, places its arguments, and is compiled for comparison."""

    def __init__(self, record: PlanRecord, *, traced: Traced) -> None:
        super().__init__(record)
        self.traced = traced

    def _as_inputs(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.traced.in_tree, leaves)

    def _as_outputs(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.traced.out_tree, leaves)

    @property
    def kept(self) -> tuple[KeptValue, ...]:
        """The values of `recomputation`, with their source lines, shapes and bytes; none if it is None."""
        chosen = self.record.recomputation
        return () if chosen is None else kept_values_of(self.traced, chosen)

    def checkpoint_policy(self) -> CheckpointPolicy:
        """What the plan keeps for backward passes, as a policy of `jax.checkpoint(layer, policy=…)`.

        It is for code of one's own; the plan's own function needs none.

        Raises:
          SpecError: the plan repeats nothing beyond what the program says, or no policy says what it keeps.
        """
        chosen = self.record.recomputation
        if chosen is None:
            raise SpecError(
                f"the plan of {self.record.name} keeps what the program says, so there is no policy to give: "
                'it repeats more only where that pays, unless remat="written" forbids it'
            )
        return checkpoint_policy(replace(self.traced, jaxpr=self.traced.source), chosen)

    def jit(self, fn: Callable[..., Any] | None = None) -> Any:
        return emit.jitted(self.record, self.traced, self.mesh())

    def flat_jit(self, *, donate: Sequence[int], **how: Any) -> Any:
        """As `jit`, of the flat leaves; `donate` are their positions, the rest are options of `jax.jit`."""
        return emit.flat_jitted(self.record, self.traced, self.mesh(), donate=donate, **how)

    def named_jit(self, names: Sequence[str], **how: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """As `jit`, with the last arguments by keyword, and the arguments to lower it for, which carry the layouts."""
        return emit.named_jitted(self.record, self.traced, self.mesh(), names, **how)

    def bind(self, fn: Callable[..., Any], *args: Any) -> Self:
        bound_program(self.record, fn, args)
        return self

    def init(self, init: Callable[..., Any], *args: Any, arg: str) -> Any:
        """`init(*args)` born sharded as argument `arg`: nothing is allocated on one device first.

        Raises:
          PlanMismatchError: a path, shape or dtype of the result of `init` is not the argument's.
        """
        return placing.born(init, args, arg, self._argument(arg), self.mesh())

    def put(self, value: Any, arg: str) -> Any:
        """Places a pytree in the layout of argument `arg`.

        Raises:
          PlanMismatchError: a path, shape or dtype is not the argument's.
        """
        return placing.put(value, arg, self._argument(arg), self.mesh())

    def put_local(self, value: Any, arg: str) -> Any:
        """Like `put`, from this process's part of the argument: each host gives its own part of the batch.

        The parts split the planned shapes along one dimension, in the order of the processes, whatever the layout.
        If a process's devices need another process's part, it is sent there. A leaf of the whole planned shape is the
        same in every process.

        Raises:
          PlanMismatchError: the value of a process is no equal part of the planned shape.
        """
        return placing.put_local(value, arg, self._argument(arg), self.mesh())

    def _argument(self, arg: str) -> list[Leaf]:
        roots = [dotted(path).split(".")[0] for path in self.traced.in_paths]
        names = dict.fromkeys((*self.traced.names, *roots))
        if arg not in names:
            raise SpecError(f"no argument named {arg!r}; there are: {', '.join(names) or 'none'}")
        return [leaf for leaf, root in zip(self.record.inputs, roots, strict=True) if root == arg]

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
        program, graph = self._program_to_compile()
        return verify(
            program,
            self.record,
            compiler=compiler,
            topology=topology,
            tolerance=tolerance,
            known=Known(
                machine=self._provenance.machine,
                graph=graph,
                assignment=self._provenance.assignment,
                pipelines=pipelines(self.traced.jaxpr),
            ),
            compiler_options=compiler_options,
        )

    def _program_to_compile(self) -> tuple[Any, Graph | None]:
        """The program with the plan's annotations, traced, and its graph where its operations carry their paths."""
        if self.record.gradient_of:
            return self._gradient_to_compile(), None
        program = annotated(self.traced, self.record.mesh, _annotations(self.record))
        return program, graphs.build(self.traced.jaxpr, self._compiler.platform)

    @property
    @abstractmethod
    def _compiler(self) -> CompilerModel:
        """Who compiles for the plan's hardware."""

    @abstractmethod
    def _gradient_to_compile(self) -> Any:
        """The gradient of a forward function that was planned for it, in the planned layouts, traced."""


def _annotations(record: PlanRecord) -> Annotations:
    """Everything that a plan says of layouts."""
    return Annotations(
        inputs={i: leaf.spec for i, leaf in enumerate(record.inputs)},
        outputs={i: leaf.spec for i, leaf in enumerate(record.outputs)},
        pins=record.pins,
        donated=frozenset(record.donated),
    )
