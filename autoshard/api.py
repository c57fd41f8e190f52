"""The public verb `plan`: from a function and its arguments to the best plan."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

import cost_models
from autoshard import _jax, _quiet, meshes, planner
from autoshard.meshes import MeshLike
from autoshard.planner import Budget
from autoshard.plans import Plan
from autoshard.question import Question, ask, variants
from autoshard.wanted import AUTO

REL_GAP = 1e-3  # proven optimal to a tenth of a percent: well inside what a cost model can tell apart


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike = None,
    hardware: str | cost_models.Hardware | None = None,
    in_shardings: Any = AUTO,
    out_shardings: Any = AUTO,
    pins: Mapping[str, PartitionSpec] | None = None,
    memory: int | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    for_grad: bool | int | Sequence[int] | None = None,
    unknown: str = "error",
    constraints: planner.Constraints = "needed",
    time_limit_s: float = 60.0,
    rel_gap: float = REL_GAP,
    **kwargs: Any,
) -> Plan:
    """Finds the sharding of `fn(*args, **kwargs)` with the least step time that fits in memory.

    Args:
      fn: a jittable function without sharding words (its own constraints are kept).
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      mesh: a Mesh, an AbstractMesh, `{"data": 2, "model": 4}`, or None for the mesh in
        context, else the best one- or two-dimensional mesh over `jax.devices()`.
      hardware: chip and physical topology, `"h100:4x8"` (nodes × GPUs), `"tpu-v5p:4x4x8"`,
        `"cpu:8"`; a bare chip name takes the smallest usual topology; None detects it.
      in_shardings: as in `jax.jit`, with `AUTO` wherever the planner shall choose.
      out_shardings: likewise.
      pins: path pattern → PartitionSpec of inputs, first match wins: `{"**.emb": P("model", None)}`.
      memory: bytes per device; None takes the chip's memory less what JAX cannot use.
      donate_argnums: as in `jax.jit`; a donated leaf and the output that replaces it
        (same path, shape and dtype) share one layout.
      donate_argnames: likewise, by name.
      static_argnums: as in `jax.jit`.
      static_argnames: likewise, by name.
      for_grad: whether a forward function is planned for its gradient, and with respect to
        which arguments (True: the first). None decides: yes, if no output could replace
        an input.
      unknown: "error", or "replicate" to keep equations without a sharding rule whole.
      constraints: "needed" leaves out the constraints that the partitioner's own
        propagation reaches anyway, "all" emits every one.
      time_limit_s: the solver's limit; then the best plan so far, with its gap.
      rel_gap: stop when proven optimal to this fraction.
      **kwargs: keyword arguments of `fn`, as `args`.

    Raises:
      InfeasibleError: nothing fits; the message gives the smallest peak found.
      MissingRuleError: a primitive without a rule, with its source line.
      SpecError: a pin or sharding that cannot be kept.
      MeshError: mesh, hardware and devices do not fit each other.
    """

    def ask_on(mesh: MeshLike) -> Question:
        return ask(
            fn,
            args,
            kwargs,
            mesh=mesh,
            hardware=hardware,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            pins=pins,
            memory=memory,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            for_grad=for_grad,
            unknown=unknown,
        )

    any_mesh = mesh is None and _jax.context_mesh() is None and hardware is None
    plans = [
        answer(question, constraints=constraints, time_limit_s=time_limit_s, rel_gap=rel_gap)
        for on in (_device_meshes() if any_mesh else (mesh,))
        for question in variants(partial(ask_on, on))
    ]
    return min(plans, key=lambda p: p.record.cost.step_s)


def _device_meshes() -> list[dict[str, int]]:
    count = len(_quiet.devices())
    return meshes.candidates(count) if count > 1 else [{"data": 1}]


def answer(
    question: Question,
    *,
    constraints: planner.Constraints = "needed",
    time_limit_s: float = 60.0,
    rel_gap: float = REL_GAP,
) -> Plan:
    """The plan of a question; arguments and errors as of `plan`."""
    place = question.place
    planned = planner.make(
        question.setting,
        name=question.name,
        mesh=place.axes,
        hardware=place.hardware,
        machine=place.machine,
        wanted=question.wanted,
        constraints=constraints,
        platform=meshes.platform(place.hardware.name),
        budget=Budget(memory_bytes=question.memory_bytes, time_limit_s=time_limit_s, rel_gap=rel_gap),
        notes=place.notes,
    )
    return Plan(planned.record, place=place, planned=planned, traced=question.setting.traced)
