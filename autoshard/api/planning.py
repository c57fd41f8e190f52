"""The public verb `plan`: from a function and its arguments to the best plan."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from jax.sharding import PartitionSpec

import cost_models
from autoshard import _jax, _startup, deadline
from autoshard.api import multihost
from autoshard.api.compiler_minimal_constraints import compiler_minimal
from autoshard.api.evaluation import Evaluation
from autoshard.api.multihost import Peers
from autoshard.api.options import REL_GAP, WAIT_S, Options, refuse_misspelt
from autoshard.api.plan import Plan
from autoshard.api.refine import Entered, adopted, refined
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends import devices as meshes
from autoshard.backends.devices import MeshLike, Target
from autoshard.errors import InfeasibleError, SpecError, TimeLimitError
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.recomputation import ADD, NO_OFFLOAD, Offload, Remat
from autoshard.planner import named_shardings, pipeline, request
from autoshard.planner.decided_program import decided_by
from autoshard.planner.host_parts import HostPatterns
from autoshard.planner.microbatches import solve_counts
from autoshard.planner.named_shardings import OtherMeshError
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.record import PlanRecord, parse
from autoshard.planner.request import OwnMeshError, PlanRequest
from autoshard.planner.requested_shardings import AUTO
from autoshard.planner.stage_choice import stage_choice
from autoshard.planner.store import Directory, cache_at, key_of, lock_at, misfits
from autoshard.report.progress import counted


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: MeshLike | Sequence[MeshLike] = None,
    hardware: str | cost_models.Hardware | None = None,
    in_shardings: Any = AUTO,
    out_shardings: Any = AUTO,
    pins: Mapping[str, PartitionSpec] | None = None,
    host_local: HostPatterns | None = None,
    hosts: int | None = None,
    memory: int | float | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    for_grad: bool | int | Sequence[int] | None = None,
    unknown: str = "error",
    constraints: pipeline.ConstraintPolicy = "needed",
    like: Plan | None = None,
    lock: str | os.PathLike[str] | None = None,
    cache: Directory = None,
    time_limit_s: float | None = None,
    rel_gap: float = REL_GAP,
    wait_s: float = WAIT_S,
    refine: str | None = None,
    candidates: int = 3,
    also: Mapping[str, Plan | Evaluation] | None = None,
    remat: Remat = ADD,
    offload: Offload = NO_OFFLOAD,
    **kwargs: Any,
) -> SolvedPlan:
    """Finds the sharding of `fn(*args, **kwargs)` with the least step time that fits in memory.

    Args:
      fn: a jittable function without sharding words (its own constraints are kept).
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      mesh: a Mesh, an AbstractMesh, `{"data": 2, "model": 4}`, or None for the mesh in
        context, else the best one- or two-dimensional mesh over the hardware's devices, or over
        `jax.devices()`; several of them, to take the best.
      hardware: chip and physical topology, `"h100:4x8"` (nodes × GPUs), `"tpu-v5p:4x4x8"`,
        `"cpu:8"`; a bare chip name takes the smallest usual topology; None detects it.
      in_shardings: as in `jax.jit`, with `AUTO` wherever the planner shall choose.
      out_shardings: likewise.
      pins: path pattern → PartitionSpec of inputs, first match wins: `{"**.emb": P("model", None)}`.
      host_local: the inputs of which each host loads its part, such as `"batch"`: path pattern,
        for all below it, too; of the first dimension, or of another, `{"batch.tokens": 1}`. Every
        layout is left out in which a host would need another's part, as `put_local` places it.
      hosts: over how many hosts they are split, in the devices' order; None: the processes of
        the devices, or the nodes of the hardware.
      memory: bytes per device, or text such as "64GB"; None takes the chip's memory less what JAX cannot use.
      donate_argnums: as in `jax.jit`; a donated leaf and the output that replaces it
        (same path, shape and dtype) share one layout.
      donate_argnames: likewise, by name.
      static_argnums: as in `jax.jit`.
      static_argnames: likewise, by name.
      for_grad: True or argument numbers plan for its gradient a function that takes none itself,
        such as a loss (True: with respect to the first argument), with the optimizer's state of
        these arguments in memory. None and False plan the function as it is; but with None a
        function of `autoshard.jit` that is called under `jax.grad`, `jax.vjp` or
        `jax.linearize` is planned for that gradient.
      unknown: "error", or "replicate" to keep equations without a sharding rule whole.
      constraints: "needed" leaves out the constraints that the partitioner's own
        propagation reaches anyway, "all" emits every one. "compiled" asks the hardware's
        compiler about each that is left, without a device, and leaves out those without which
        it emits the same collectives: fewer, after minutes.
      like: a plan whose layouts are kept by the arguments that have the same paths, shapes
        and dtypes there: state passes from one function to the other without a move.
      lock: a plan file. It is read if it fits the program, the mesh, the hardware and the
        options; else the plan is made and written. In CI (the variable CI is set) a plan that
        is missing or does not fit is an error. `{digest}` in the path stands for the
        program's digest.
      cache: a directory in which plans are kept and found again; None takes what the
        variable AUTOSHARD_CACHE says, False none. The reason of a miss is logged.
      time_limit_s: of the whole call. When it ends, the plan is the best so far, with its gap, and its notes say
        what was not tried (what to repeat or to keep in the host's memory, which constraints to leave out); before
        there is any plan, it is an error. None: the solver has 20 s, the rest what it takes.
      rel_gap: stop when proven optimal to this fraction; after about three seconds of work, to ten times of it.
      wait_s: where the mesh spans several processes (`jax.distributed`), process 0 plans for
        all; how long they wait for each other. That is so for every mesh of as many devices as
        there are in all; with 0 each process plans by itself.
      refine: "gpu", "tpu" or "cpu": a compiler that compiles `candidates` near-optimal plans
        for the hardware, without a device; the plan is the one whose schedule, priced by the
        same model, is shortest, and its notes say what changed the order. On GPUs its compiler
        options may get a flag of the scheduler that makes it shorter still. A locked plan stays.
      candidates: how many plans `refine` compiles, the optimum included: those that are best
        without one of its choices, and the best on other meshes, if there are several.
      also: layouts that `refine` compiles besides, by name: hand-written ones as
        `autoshard.evaluate` returns them, or plans. One whose schedule is shorter than ours is
        the plan.
      remat: what backward passes find kept of their forward ones, and what they repeat, decided with the layouts.
        "add": the program's own `jax.checkpoint`s stay, and more is repeated where that is faster, or fits at all.
        "free": what its own checkpoints repeat may be kept as well. "written": what the program says. Random bits come
        out the same; effects and calls of the host are never repeated. A loss that is planned for its gradient
        (`for_grad`) keeps what JAX keeps.
      offload: what may lie in the host's memory, where the compiler has it apart (GPUs and TPUs) and that is faster,
        or nothing fits without. "residuals": what loops stack for backward passes. "state": donated state that its
        update alone reads, such as the moments of AdamW; `plan.put` and `plan.in_shardings` place it there. "auto":
        both.
      **kwargs: keyword arguments of `fn`, as `args`.

    Raises:
      InfeasibleError: nothing fits; the message gives the smallest peak found.
      MissingRuleError: a primitive without a rule, with its source line.
      SpecError: a pin or sharding that cannot be kept; `for_grad` names arguments without a gradient.
      MeshError: mesh, hardware and devices do not fit each other.
      PlanMismatchError: in CI, the locked plan is not this program's.
      ProcessError: the processes do not have the same program, or one does not turn up.
      TimeLimitError: `time_limit_s` ended before there was a plan.
    """
    options = Options(
        mesh=mesh,
        hardware=hardware,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        pins=pins,
        host_local=host_local,
        hosts=hosts,
        memory=memory,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        for_grad=for_grad,
        unknown=unknown,
        constraints=constraints,
        like=like,
        lock=lock,
        cache=cache,
        time_limit_s=time_limit_s,
        rel_gap=rel_gap,
        wait_s=wait_s,
        refine=refine,
        candidates=candidates,
        also=also or {},
        remat=remat,
        offload=offload,
    )
    refuse_misspelt(fn, kwargs, "plan")
    with deadline.within(time_limit_s):
        questions = requests_of(fn, args, kwargs, options)
        if like is not None and not questions[0].kept:
            raise SpecError(
                f"like={like!r}: no argument of {questions[0].name} has the paths, shapes and dtypes of one there; "
                "plan_many shares leaves of different paths"
            )
        offline = mesh is not None and hardware is not None
        return plan_or_load(questions, options, peers=peers(questions[0].target, options, offline=offline))


def requests_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> tuple[PlanRequest, ...]:
    """The requests of a call; the one with the fastest plan counts. Usually there is one.

    Several, if the mesh is to be chosen, or the parts of an `accumulate`.
    """
    o = options
    call = o.call(fn, args, kwargs)
    asked = o.request
    choices: list[MeshLike] = list(o.mesh) if isinstance(o.mesh, Sequence) else [o.mesh]
    own = named_shardings.mesh_of(o.in_shardings, o.out_shardings)
    if o.mesh is None and _jax.context_mesh() is None and own is None:
        choices = _open_meshes(o) if o.like is None else [o.like.own_mesh or o.like.record.mesh.shape]

    def on(mesh: MeshLike) -> Iterator[PlanRequest]:
        return request.requests_of(call, asked.target(mesh, o.hardware), asked)

    try:
        return tuple(question for mesh in choices for question in on(mesh))
    except (OwnMeshError, OtherMeshError) as error:  # without an option, the function's own layouts name the mesh
        if o.mesh is not None or o.like is not None or _jax.context_mesh() is not None:
            raise
        return tuple(on(error.mesh))


def _open_meshes(options: Options) -> list[MeshLike]:
    """One- and two-dimensional meshes over the devices, and those of the layouts that enter besides."""
    hardware = options.hardware
    count = len(_startup.devices()) if hardware is None else meshes.devices_of(hardware)
    axes = [*map(MeshAxes.of, meshes.candidates(count)), *(made.record.mesh for made in options.also.values())]
    return [one.shape for one in dict.fromkeys(axes)] if count > 1 else [{"data": 1}]


def peers(target: Target, options: Options, *, offline: bool = False) -> Peers | None:
    """The processes that share a mesh; None if there is one, or the plan is for devices elsewhere.

    Args:
      target: the mesh.
      options: `wait_s` 0 asks nobody.
      offline: mesh and hardware are given, so that the devices may be others: they are not if they are as many.
    """
    if _jax.process_store() is None or not options.wait_s:
        return None
    own = target.own
    if offline and own is None and target.axes.size != len(_startup.devices()):
        return None
    devices = _startup.devices()[: target.axes.size] if own is None else own.devices.ravel().tolist()
    return multihost.peers_of(devices, options.wait_s)


def plan_or_load(questions: Sequence[PlanRequest], options: Options, *, peers: Peers | None = None) -> SolvedPlan:
    """The best plan among the answers: from the lock, from the cache, or planned; by process 0 for all."""
    if peers is None:
        return _found(questions, options)
    first = questions[0]
    decided = {"program": first.digest, **key_of(first, constraints=options.constraints)}
    mine: list[SolvedPlan] = []

    def decide() -> str:
        mine.append(_found(questions, options))
        return mine[0].record.dumps()

    record = parse(peers.agree(first.name, decided, decide), "the plan of process 0")
    return mine[0] if mine else _answered(record, questions, options)


def _found(questions: Sequence[PlanRequest], options: Options) -> SolvedPlan:
    lock = None if options.lock is None else lock_at(options.lock)
    locked = None if lock is None else lock.find(questions, options.constraints)
    if locked is not None:
        return _plan(*locked, options)
    if lock is not None:
        lock.check_writable(questions[0])
    begin = time.perf_counter()
    plans = _fitting(questions, options)
    best_s = min(made.cost for made in plans.values())
    (at, best), *others = sorted(
        plans.items(), key=lambda item: meshes.order(item[1].cost, item[1].record.mesh.ndim, best_s)
    )
    staged = stage_choice(at, {i: made.cost for i, made in plans.items()}, questions)
    best = best.noted(staged) if staged else best
    if len(plans) < len(questions) and deadline.is_stopped():
        best = best.noted(f"interrupted: {len(plans)} of {len(questions)} meshes were planned")
    if options.refine is not None and not deadline.is_stopped():
        also = {name: adopted(name, layout, questions) for name, layout in options.also.items()}
        again = partial(_with_inputs, questions[at], options)
        entered = Entered(first=best, again=again, elsewhere=[made for _, made in others], also=also)
        best = refined(entered, compiler=options.refine, count=options.candidates)
    if options.constraints == "compiled" and not deadline.is_stopped():
        best = _thinned(best, questions[at], options)
    best = best.emitting(options.constraints)
    if lock is not None and not deadline.is_stopped():
        lock.write(best.record)
    return best.took(_rest(best, questions[at], questions, options, time.perf_counter() - begin))


def _rest(
    best: SolvedPlan, question: PlanRequest, questions: Sequence[PlanRequest], options: Options, elapsed_s: float
) -> dict[str, float]:
    """Seconds of a call beside the stages of the returned plan: other meshes, and the compiler."""
    others_s = sum(other.trace_s for other in {q.program for q in questions} - {question.program})
    rest_s = elapsed_s + others_s - sum(s for stage, s in best.seconds.items() if stage != "trace")
    names = ["other meshes"] if len(questions) > 1 else []
    names += ["compiler"] if options.refine is not None or options.constraints == "compiled" else []
    return {" and ".join(names): rest_s} if names and rest_s > 0 else {}


def _thinned(plan: SolvedPlan, question: PlanRequest, options: Options) -> SolvedPlan:
    """A plan with the constraints that its compiler needs; from the cache, but for a refined one."""
    cache = cache_at(options.cache) if options.refine is None else None
    if cache is None:
        return compiler_minimal(plan)
    key = key_of(question, constraints="compiled", rel_gap=options.rel_gap, time_limit_s=options.solver_limit_s)
    record = cache.find(question, key)
    if record is not None:
        return _plan(record, question, options)
    made = compiler_minimal(plan)
    if not deadline.is_stopped():
        cache.write(question.name, key, made.record)
    return made


def _fitting(questions: Sequence[PlanRequest], options: Options) -> dict[int, SolvedPlan]:
    """The answer of every question that has one, by its number.

    Raises:
      InfeasibleError: none has; the error is that of the smallest peak.
    """
    plans: dict[int, SolvedPlan] = {}
    errors: list[InfeasibleError] = []
    for i, question in counted(list(enumerate(questions)), "mesh"):
        try:
            plans[i] = _cached(question, options)
        except InfeasibleError as error:
            errors.append(error)
        except TimeLimitError:
            if not plans:
                raise
            break  # the best of the meshes so far
    if not plans:
        raise min(errors, key=lambda error: inf if error.peak_bytes is None else error.peak_bytes)
    return plans


def _answered(record: PlanRecord, questions: Sequence[PlanRequest], options: Options) -> SolvedPlan:
    for question in questions:
        if not misfits(record, question):
            return _plan(record, question, options)
    raise AssertionError("the plan of process 0 answers none of the questions, whose digests were equal")


def _cached(question: PlanRequest, options: Options) -> SolvedPlan:
    cache = cache_at(options.cache)
    if cache is None:
        return plan_request(question, options)
    constraints = "all" if options.constraints == "all" else "needed"
    key = key_of(question, constraints=constraints, rel_gap=options.rel_gap, time_limit_s=options.solver_limit_s)
    record = cache.find(question, key)
    if record is not None:
        return _plan(record, question, options)
    made = plan_request(question, replace(options, constraints=constraints))
    if not deadline.is_stopped():
        cache.write(question.name, key, made.record)
    return made


def _plan(record: PlanRecord, question: PlanRequest, options: Options) -> SolvedPlan:
    """A plan that was made elsewhere; its planning result is found again on first use."""
    question = decided_by(record, question)
    return SolvedPlan(
        record,
        place=question.target,
        traced=question.traced,
        planned=partial(_planned, question, options),
    )


def _with_inputs(question: PlanRequest, options: Options, inputs: Mapping[int, PartitionSpec]) -> SolvedPlan:
    """The plan of a request with these layouts of inputs added; the record keeps the original request."""
    planned = _planned(question.asking(inputs), options)
    planned = replace(planned, record=replace(planned.record, asked=question.asked))
    return SolvedPlan(planned.record, place=question.target, traced=question.traced, planned=planned)


def plan_request(question: PlanRequest, options: Options) -> SolvedPlan:
    """The plan of a question."""
    planned = _planned(question, options)
    return SolvedPlan(planned.record, place=question.target, traced=planned.traced, planned=planned)


def _planned(question: PlanRequest, options: Options) -> PlanningResult:
    solver = solve_counts if question.counts else pipeline.solve_request
    planned = solver(question, options.budget, constraints=options.constraints)
    asked: dict[str, Any] = {
        "asked": question.asked,
        "emitted": options.constraints,
        "gradient_of": question.gradient_of,
    }
    return replace(planned, record=replace(planned.record, **asked))
