"""Layout search: ranks every product of the parallelisms for a transformer's training step.

For stacks of equal layers on more devices than anybody compiles for: tensor, context,
expert, pipeline (1F1B, interleaved), sharded and replicated data parallelism, with
microbatches and rematerialization. Each is priced by `step_time`. The best layout
without a parallelism shows the worth of that parallelism.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from cost_models.closed_forms.training_layout import Remat, TrainingLayout
from cost_models.closed_forms.training_step import StepTime, placed, step_time
from cost_models.closed_forms.transformer import Transformer
from cost_models.errors import MeshFitError
from cost_models.machines.machine import Machine
from cost_models.machines.model import Hardware

MOST_TENSOR = 64
MOST_CONTEXT = 64
LEAST_TOKENS = 1024  # of a sequence on one device of context parallelism: below, attention is all exchange
MICROBATCHES = (1, 2, 4)
VIRTUAL_STAGES = (1, 2, 4, 8)
REMATS: tuple[Remat, ...] = ("none", "minimal", "full")
# Stages of unequal depth: as many blocks as layers are missing may be empty in all (Llama 3's
# 126 layers on 16 stages leave one block out on the first and on the last; arXiv:2407.21783, 3.3.2).
UNEVEN = 2


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout and its predicted step."""

    layout: TrainingLayout
    step: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The worth of a parallelism: the best layout without it, or None if none fits in memory."""

    parallelism: str
    ways: int
    without: Priced | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRanking:
    """Layouts that fit, the fastest first.

    Attributes:
        ranked: As many as were asked for.
        worth: For each parallelism of the best layout.
        tried: Layouts that were priced.
        too_large: How many of them do not fit.
        smallest_bytes: The least memory per device among all.
    """

    ranked: tuple[Priced, ...]
    worth: tuple[Worth, ...]
    tried: int
    too_large: int
    smallest_bytes: float


def best_layouts(
    model: Transformer,
    hardware: Hardware,
    *,
    sequences: int,
    sequence: int,
    dtype: str = "bfloat16",
    memory_bytes: float | None = None,
    keep: int = 10,
) -> LayoutRanking:
    """Prices every layout of a training step on this hardware.

    Args:
        model: The transformer.
        hardware: Devices and links; all devices are used.
        sequences: Global batch.
        sequence: Tokens per sequence.
        dtype: Of the matmuls' operands.
        memory_bytes: Per device; None: the usable bytes of the hardware's file.
        keep: Rows of the ranking.

    Raises:
        MeshFitError: There is no sequence, or no token in one.
    """
    if sequences < 1 or sequence < 1:
        raise MeshFitError(f"{sequences} sequences of {sequence} tokens: there must be at least one of each")
    limit = hardware.usable_memory_bytes if memory_bytes is None else memory_bytes
    fitting: list[Priced] = []
    tried, smallest = 0, float("inf")
    machine: Machine | None = None
    for layout in layouts(model, hardware, sequences=sequences, sequence=sequence):
        try:
            machine = placed(layout, hardware, machine)
            step = step_time(
                model, layout, hardware, sequences=sequences, sequence=sequence, dtype=dtype, machine=machine
            )
        except MeshFitError:
            continue
        tried += 1
        smallest = min(smallest, step.peak_bytes)
        if step.peak_bytes <= limit:
            fitting.append(Priced(layout, step))
    fitting.sort(key=lambda priced: (priced.step.seconds, priced.step.peak_bytes))
    return LayoutRanking(
        ranked=tuple(_distinct(fitting, keep)),
        worth=_worth(fitting),
        tried=tried,
        too_large=tried - len(fitting),
        smallest_bytes=smallest,
    )


def layouts(model: Transformer, hardware: Hardware, *, sequences: int, sequence: int) -> Iterator[TrainingLayout]:
    """Every layout over the hardware's devices whose ways divide the sizes that they split."""
    devices = hardware.devices
    tensors = [t for t in _divisors(devices) if t <= MOST_TENSOR and model.heads % t == 0 and model.d_ff % t == 0]
    contexts = [
        c for c in _divisors(devices) if c <= MOST_CONTEXT and sequence % (2 * c) == 0 and sequence // c >= LEAST_TOKENS
    ] or [1]
    pipelines = [p for p in _divisors(devices) if p <= model.layers and -model.layers % p <= UNEVEN]
    experts = [e for e in _divisors(model.experts) if devices % e == 0] if model.experts > 1 else [1]
    for tensor, context, pipeline, expert in product(tensors, contexts, pipelines, experts):
        inner = tensor * context * pipeline * expert
        shards, rest = devices // inner, devices % inner
        if rest or shards < 1 or sequences % (shards * expert):
            continue
        base = TrainingLayout(tensor=tensor, context=context, pipeline=pipeline, expert=expert, data=shards)
        for data in {replace(base, data=1, fsdp=shards), base}:
            yield from _schedules(data, model, sequences)


def _schedules(base: TrainingLayout, model: Transformer, sequences: int) -> Iterator[TrainingLayout]:
    """Microbatches, interleaving and rematerialization of one mesh."""
    kept = (False, True) if base.fsdp > 1 else (False,)
    for microbatch, virtual, remat, keep in product(MICROBATCHES, VIRTUAL_STAGES, REMATS, kept):
        made = replace(base, microbatch=microbatch, virtual_stages=virtual, remat=remat, keep_gathered=keep)
        count = made.microbatches(sequences)
        if count < 1 or count % 1 or (base.pipeline > 1 and count < base.pipeline):
            continue
        interleaves = base.pipeline > 1 and model.layers >= base.pipeline * virtual and count % base.pipeline == 0
        if virtual == 1 or interleaves:
            yield made


def describe(layout: TrainingLayout) -> str:
    """`TP 8 · PP 16 · DP 128, 16 stages in 2 chunks, microbatches of 1, full recomputation`."""
    ways = (
        ("TP", layout.tensor),
        ("CP", layout.context),
        ("EP", layout.expert),
        ("PP", layout.pipeline),
        ("FSDP", layout.fsdp),
        ("DP", layout.data),
    )
    said = " · ".join(f"{name} {n}" for name, n in ways if n > 1) or "one device"
    if layout.pipeline > 1:
        said += ", 1F1B" if layout.virtual_stages == 1 else f", interleaved in {layout.virtual_stages} chunks"
    said += f", microbatches of {layout.microbatch}"
    if layout.keep_gathered:
        said += ", weights kept gathered"
    return said + (f", {layout.remat} recomputation" if layout.remat != "none" else "")


_PARALLELISMS = ("tensor", "context", "expert", "pipeline", "fsdp", "data", "virtual_stages")


def _worth(fitting: Sequence[Priced]) -> tuple[Worth, ...]:
    """The best layout without each parallelism that the best one uses."""
    if not fitting:
        return ()
    best = fitting[0].layout
    return tuple(
        Worth(
            parallelism=name,
            ways=ways,
            without=next((priced for priced in fitting if getattr(priced.layout, name) == 1), None),
        )
        for name in _PARALLELISMS
        if (ways := getattr(best, name)) > 1
    )


def _distinct(fitting: Sequence[Priced], keep: int) -> Iterator[Priced]:
    """The first of each mesh: schedules of one mesh are told apart by its best alone."""
    seen: set[tuple[int, ...]] = set()
    mesh = [f.name for f in fields(TrainingLayout) if f.name in _PARALLELISMS[:-1]]
    for priced in fitting:
        key = tuple(getattr(priced.layout, name) for name in mesh)
        if key not in seen and len(seen) < keep:
            seen.add(key)
            yield priced


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
