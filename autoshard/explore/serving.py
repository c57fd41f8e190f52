"""Serving: prefill and decode of one model planned on the same devices, or on devices of their own.

Three ways to serve are priced for every mesh and batch, from the planner's own plans:

    together  one layout of the weights, the best for a request's prefill and its decoding
              steps in their proportion (`plan_many`)
    moved     each phase in its own best layout; the weights move before and after every prefill
    apart     each phase on devices of its own (Patel et al. 2024, arXiv:2311.18677); every
              prompt's cache is sent to where it is decoded

A prefill is of one prompt and gives the first token. Its cache is then brought into the
layout that decoding keeps, one sequence of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import cost_models
from autoshard import deadline
from autoshard.api.plan_many import plan_many
from autoshard.api.planning import plan
from autoshard.api.solved_plan import SolvedPlan
from autoshard.costs.buckets import BUCKET_BYTES, collective_s
from autoshard.costs.strategies import layout_of, matching
from autoshard.errors import InfeasibleError, StoppedError
from autoshard.explore.builder import load_target
from autoshard.explore.candidates import Candidate, candidates
from autoshard.explore.serving_result import Drafted, Served, Way
from autoshard.ir.layout import Layout
from autoshard.ir.paths import dotted
from autoshard.planner.planning_result import PlanningResult
from autoshard.problem.decisions import Equation
from cost_models import Hardware
from cost_models.closed_forms import formulas
from cost_models.closed_forms.serving_search import SECONDS_PER_HOUR

DTYPE = "bfloat16"  # of the multiplications, whose rate the crossover refers to
MOST_AXES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The served model: builders of `prefill(params, prompt)` and `decode(params, state)`, and its load.

    The first takes `batch`, `sequence` and `length` (positions of the cache), the second
    `batch` and `length`; both take `keywords`, too. The state of `decode` is donated.
    """

    prefill: str
    decode: str
    context: int
    generated: int
    keywords: Mapping[str, Any]

    @property
    def length(self) -> int:
        return self.context + self.generated


def serve(
    model: Model,
    places: Sequence[Hardware],
    batches: Sequence[int],
    *,
    axes: int = MOST_AXES,
    price_per_hour: float | None = None,
    time_limit_s: float = 20.0,
) -> tuple[Served, ...]:
    """Plans every batch on every mesh, in all three ways; by latency, then by throughput.

    Args:
      model: the served model.
      places: sets of devices.
      batches: batches to try; those that do not fit are left out.
      axes: the most mesh axes.
      price_per_hour: dollars of one device.
      time_limit_s: of the solver, per plan.

    Raises:
      InfeasibleError: no batch fits anywhere; the message is that of the smallest batch.
    """
    found: list[Served] = []
    refused: InfeasibleError | None = None
    prompts: dict[tuple[str, str], SolvedPlan] = {}
    choices = [{"batch": batch} for batch in sorted(batches)]
    by_spec = {place.spec: place for place in places}
    for candidate in candidates(places, axes=axes, choices=choices, twins=False):
        if found and deadline.is_stopped():
            break  # what was found so far
        options: dict[str, Any] = {
            "mesh": candidate.shape,
            "hardware": candidate.hardware,
            "constraints": "all",  # nobody compiles these
            "time_limit_s": time_limit_s,
        }
        batch = int(dict(candidate.choice)["batch"])
        key = (candidate.hardware, candidate.mesh_text)
        try:
            if key not in prompts:
                fn, args = _prefill(model)
                prompts[key] = plan(fn, *args, for_grad=False, **options)
            place, prompt = by_spec[candidate.hardware], prompts[key]
            made = [*_ways(model, candidate, batch, place, prompt, options, price_per_hour)]
            if not found or not deadline.is_stopped():  # an interrupted plan is not compared with whole ones
                found += made
        except InfeasibleError as error:
            refused = refused or error
        except StoppedError:
            if not found:
                raise
    if not found:
        assert refused is not None  # something was tried
        raise refused
    return tuple(sorted(found, key=lambda s: (s.token_s, s.ttft_s, -s.tokens_per_s_per_device)))


def _prefill(model: Model) -> tuple[Any, tuple[Any, ...]]:
    keywords = {**model.keywords, "batch": 1, "sequence": model.context, "length": model.length}
    return load_target(model.prefill, keywords)


def _decode(model: Model, batch: int, length: int) -> tuple[Any, tuple[Any, ...]]:
    return load_target(model.decode, {**model.keywords, "batch": batch, "length": length})


def _step(model: Model, batch: int, length: int, options: Mapping[str, Any]) -> SolvedPlan:
    fn, args = _decode(model, batch, length)
    return plan(fn, *args, for_grad=False, donate_argnums=1, **options)


def _ways(
    model: Model,
    candidate: Candidate,
    batch: int,
    place: Hardware,
    prompt: SolvedPlan,
    options: Mapping[str, Any],
    price: float | None,
) -> Iterator[Served]:
    """The three ways to serve a batch on a mesh."""
    step = _step(model, batch, model.length, options)
    both = plan_many(
        {"prefill": _prefill(model), "decode": (*_decode(model, batch, model.length), {"donate_argnums": 1})},
        share={"prefill": _argument(prompt), "decode": _argument(step)},
        weights={"prefill": batch, "decode": model.generated},
        **options,
    )
    made: tuple[tuple[Way, SolvedPlan, SolvedPlan], ...] = (
        ("together", both["prefill"], both["decode"]),
        ("moved", prompt, step),
        ("apart", prompt, step),
    )
    for way, first, then in made:
        yield _served(model, candidate, batch, place, way, first, then, price)


def _served(
    model: Model,
    candidate: Candidate,
    batch: int,
    place: Hardware,
    way: Way,
    prompt: SolvedPlan,
    step: SolvedPlan,
    price: float | None,
) -> Served:
    first, then = prompt.planned, step.planned
    insert_s, cache_bytes = _insert_s(first, then)
    move_s = _move_s(first, then) if way == "moved" else 0.0
    prefill_s, token_s = prompt.cost, step.cost
    send_s = ratio = 0.0
    if way == "apart":
        link = "scale_out" if "scale_out" in place.chip.links else "domain"
        send_s = cache_bytes / (place.devices * place.number(f"{link}.one_way_bytes_per_s"))
        # A batch takes its steps in `generated · token_s`, and needs as many prefills as it has sequences.
        ratio = batch * prefill_s / (model.generated * token_s)
        rate = batch / token_s / (place.devices * (1 + ratio))
    else:
        each_s = prefill_s + insert_s + 2 * move_s
        rate = batch * model.generated / (model.generated * token_s + batch * each_s) / place.devices
    bound, crossover = _bound(then, place, batch)
    return Served(
        candidate=candidate,
        way=way,
        devices=place.devices,
        prefill_s=prefill_s,
        token_s=token_s,
        ttft_s=prefill_s + move_s,
        insert_s=insert_s,
        move_s=move_s,
        send_s=send_s,
        prefill_per_decode=ratio,
        tokens_per_s_per_device=rate,
        bound=bound,
        crossover_batch=crossover,
        cache_layout=_cache_layout(then),
        cache_bytes=_cache_bytes(then),
        dollars_per_million=None if price is None else price / SECONDS_PER_HOUR / rate * 1e6,
        prefill=prompt.record,
        decode=step.record,
    )


def _argument(made: SolvedPlan) -> str:
    """The name of a program's first argument, its weights."""
    return dotted(made.planned.traced.in_paths[0]).partition(".")[0]


def _leaves(planned: PlanningResult, argument: int) -> dict[str, int]:
    """Path below an argument → input position."""
    traced = planned.traced
    return {
        dotted(path).partition(".")[2]: i
        for i, (path, at) in enumerate(zip(traced.in_paths, traced.argument_of, strict=True))
        if at == argument
    }


def _move_s(first: PlanningResult, then: PlanningResult) -> float:
    """All weights from one plan's layouts into the other's, leaf by leaf."""
    here, there = _leaves(first, 0), _leaves(then, 0)
    return sum(
        _reshard_s(first, first.assignment.decisions.graph.inputs[i], first.assignment.input_code(i), code)
        for path, i in here.items()
        for code in (then.assignment.input_code(there[path]),)
    )


def _insert_s(first: PlanningResult, then: PlanningResult) -> tuple[float, int]:
    """Seconds to move one prompt's cache from prefill's layout to decode's, and its bytes.

    The two shapes differ in the batch dimension. A prompt is one entry of the batch: it lies
    on the devices of its part, whole in the axes that split the batch.
    """
    kept = _leaves(then, 1)
    graph = first.assignment.decisions.graph
    seconds, nbytes = 0.0, 0
    for o, path in enumerate(first.traced.out_paths):
        i = kept.get(dotted(path).partition(".")[2])
        value = graph.outputs[o]
        aval = graph.avals[value]
        if i is None or aval.ndim < 2:
            continue
        batched = then.traced.in_avals[i].shape
        if len(batched) != aval.ndim:
            continue
        nbytes += aval.nbytes
        mesh = then.assignment.decisions.mesh
        layout = layout_of(then.assignment.input_code(i), aval.ndim, mesh)
        split = [axes if a == b else () for axes, a, b in zip(layout.dims, aval.shape, batched, strict=True)]
        codes = matching(aval.shape, mesh, Layout(tuple(split)), frozenset())
        if len(codes):
            seconds += _reshard_s(first, value, first.assignment.output_code(o), int(codes[0]))
    return seconds, nbytes


def _reshard_s(planned: PlanningResult, value: int, source: int, target: int) -> float:
    """Seconds of moving a value from one layout to another, among many that move."""
    assignment = planned.assignment
    resharder = assignment.resharder
    steps = resharder.path(assignment.decisions.graph.avals[value], source, target, bucket=BUCKET_BYTES)
    return sum(
        float(collective_s(resharder.machine, step.kind, step.axes, step.nbytes, bucket=BUCKET_BYTES))
        + float(resharder.machine.hbm_s(step.transposed))
        for step in steps
        if step.kind != "slice"
    )


def _local_bytes(planned: PlanningResult, i: int) -> int:
    """One device's part of an input."""
    graph = planned.assignment.decisions.graph
    aval = graph.avals[graph.inputs[i]]
    return aval.nbytes // _pieces(planned, planned.assignment.input_code(i), aval.ndim)


def _pieces(planned: PlanningResult, code: int, ndim: int) -> int:
    """Into how many parts a layout splits a value."""
    mesh = planned.assignment.decisions.mesh
    return prod(mesh.shape[axis] for dim in layout_of(code, ndim, mesh).dims for axis in dim)


def _bound(planned: PlanningResult, place: Hardware, batch: int) -> tuple[str, float]:
    """The largest part of a decoding step, and the batch from which its weights' products are compute-bound."""
    assignment = planned.assignment
    d = assignment.decisions
    graph = d.graph
    weights = set(_leaves(planned, 0).values())
    width: dict[int, int] = {}  # value that follows from weights alone → bytes of an element in memory
    state: set[int] = set()
    for i, value in enumerate(graph.inputs):
        if i in weights:
            width[value] = graph.avals[value].itemsize
        else:
            state.add(value)
    nbytes = flops = 0.0
    for e, operands in enumerate(graph.operands):
        if not any(v in state for v in operands):
            known = [(graph.avals[v].nbytes, width[v]) for v in operands if v in width]
            if known:  # a scale beside a weight is small
                width.update(dict.fromkeys(graph.results[e], max(known)[1]))
            continue
        state.update(graph.results[e])
        node = d.node_of[e]
        decision = d.nodes[node] if node >= 0 else None
        if not isinstance(decision, Equation):
            continue
        pick = assignment.choice[node]
        for v, codes in zip(operands, decision.strategies.operands, strict=True):
            if v in width and decision.flops[pick]:
                local = graph.avals[v].size // _pieces(planned, int(codes[pick]), graph.avals[v].ndim)
                nbytes += local * width[v] * graph.runs(e)
                flops += float(decision.flops[pick])
    machine = place.place(planned.record.mesh.shape)
    unit = machine.matmul_unit(DTYPE)
    load_s = float(machine.hbm_s(nbytes))
    multiply_s = flops / (unit.peak_flops_per_s * unit.achieved_fraction)
    waits = {
        "weights": load_s if load_s >= multiply_s else 0.0,
        "compute": multiply_s if multiply_s > load_s else 0.0,
        "cache": float(machine.hbm_s(_cache_bytes(planned))),
        "links": planned.record.cost.exposed_s,
    }
    return max(waits, key=lambda name: waits[name]), batch * load_s / multiply_s if multiply_s else float("inf")


def _cache_bytes(planned: PlanningResult) -> int:
    """Bytes that decoding keeps on one device."""
    return sum(_local_bytes(planned, i) for i in _leaves(planned, 1).values())


def _cache_layout(planned: PlanningResult) -> str:
    avals = planned.traced.in_avals
    path, i = max(_leaves(planned, 1).items(), key=lambda leaf: int(np.prod(avals[leaf[1]].shape, dtype=np.int64)))
    d = planned.assignment.decisions
    return f"{path} {layout_of(planned.assignment.input_code(i), len(avals[i].shape), d.mesh)}"


def drafted(
    model: Model,
    draft: Model,
    served: Served,
    *,
    acceptance: float,
    lengths: Sequence[int] = (1, 2, 4, 8),
    time_limit_s: float = 20.0,
) -> Drafted:
    """The best number of drafted tokens on a served batch's mesh.

    The target reads a round's tokens in one step: the products of as many sequences as
    there are tokens, planned with an empty cache, and the caches of the batch, once.

    Args:
      model: the target.
      draft: a smaller one with the same vocabulary.
      served: the batch, its mesh and the target's plan.
      acceptance: chance that a drafted token is kept, each on its own.
      lengths: drafted tokens to try.
      time_limit_s: of the solver, per plan.

    Raises:
      InfeasibleError: the draft model does not fit.
    """
    options: dict[str, Any] = {
        "mesh": served.candidate.shape,
        "hardware": served.candidate.hardware,
        "constraints": "all",
        "time_limit_s": time_limit_s,
    }
    machine = cost_models.hardware(served.candidate.hardware).place(served.candidate.shape)
    cache_s = float(machine.hbm_s(served.cache_bytes))
    draft_s = _step(draft, served.batch, model.length, options).cost
    found: list[Drafted] = []
    for length in lengths:
        accepted = formulas.tokens_per_round(acceptance, length)
        read_s = _step(model, served.batch * (length + 1), 1, options).cost + cache_s
        round_s = length * draft_s + read_s
        found.append(
            Drafted(
                length=length,
                accepted=accepted,
                draft_s=draft_s,
                read_s=read_s,
                token_s=round_s / accepted,
                speedup=served.token_s * accepted / round_s,
            )
        )
    return max(found, key=lambda d: d.speedup)
