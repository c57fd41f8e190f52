"""Small programs to plan and to run: every model of the zoo at its smallest, and search spaces of any function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import models
from autoshard.backends import devices
from autoshard.backends.devices import Target
from autoshard.backends.known_compilers import XLA_CPU
from autoshard.backends.model import CompilerModel
from autoshard.ir import trace
from autoshard.planner import pipeline
from autoshard.planner import program as planner_program
from autoshard.planner.budget import Budget
from autoshard.planner.planning_result import PlanningResult
from autoshard.planner.request import PlanRequest
from autoshard.planner.requested_shardings import read_shardings
from autoshard.planner.search_space import SearchSpace, build_search_space

TINY = ("linear-tiny", "mlp-tiny", "tiny-gpt2", "tiny-llama")
MESH = {"data": 2, "model": 4}
GPUS = "h100:1x8"
TPUS = "tpu-v5e:2x4"

# Options of plans on eight GPUs that are made quickly: as far as a tenth of the optimum, with no constraint probed.
QUICKLY: dict[str, Any] = {
    "mesh": MESH,
    "hardware": GPUS,
    "donate_argnums": 0,
    "rel_gap": 0.1,
    "constraints": "all",
}

_ATTENTION = {"layers": 1, "width": 16, "heads": 8, "head_dim": 2, "hidden": 16, "vocab": 16, "context": 8}
_SMALLEST: dict[str, dict[str, int]] = {
    "linear-tiny": {"layers": 2, "width": 8},
    "mlp-tiny": {"layers": 1, "width": 8, "hidden": 16},
    "tiny-gpt2": {**_ATTENTION, "kv_heads": 8},
    "tiny-llama": {**_ATTENTION, "kv_heads": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function with concrete arguments, and which of them are donated."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...]
    donated: frozenset[int] = frozenset()


def smallest(name: str, *, step: bool) -> Program:
    """A model at one or two layers of width 8 or 16, in float32: its AdamW step, or loss and gradient alone."""
    module, config = models.find(name, compute_dtype="float32", **_SMALLEST[name])
    batch = module.example_batch(config, batch=8)
    state = jax.jit(partial(module.init, config))(jax.random.key(1))
    if step:
        return Program(
            fn=module.train_step(config), args=(state, batch), names=("state", "batch"), donated=frozenset({0})
        )
    gradient: Callable[..., Any] = jax.value_and_grad(partial(module.loss, config))
    return Program(fn=gradient, args=(state.params, batch), names=("params", "batch"))


def train_step(name: str, **fields: Any) -> tuple[Any, ...]:
    """A model's AdamW step, and the shapes of its state and batch."""
    fn, (state, batch) = models.build(name, **fields)
    return fn, state, batch


def space_of(
    program: Program,
    *,
    mesh: dict[str, int] | None = None,
    hardware: str = GPUS,
    pins: dict[str, PartitionSpec] | None = None,
    gradient_of: Sequence[int] = (),
    unknown: str = "error",
    compiler: CompilerModel = XLA_CPU,
) -> tuple[SearchSpace, Target]:
    """The search space of a program on a mesh of the catalogue's hardware."""
    target = replace(devices.place(MESH if mesh is None else mesh, hardware), compiler=compiler)
    traced = trace.trace(program.fn, program.args, program.names, target.axes)
    request = PlanRequest(
        program=planner_program.Program(name="program", traced=traced),
        target=target,
        shardings=read_shardings(traced, None, None, pins or {}, program.donated),
        memory_bytes=target.hardware.usable_memory_bytes,
        gradient_of=tuple(gradient_of),
        unknown=unknown,
    )
    return build_search_space(request), target


def planned_of(program: Program, *, rel_gap: float = 0.0, **options: Any) -> PlanningResult:
    """The plan of a program."""
    space, _ = space_of(program, **options)
    return pipeline.solve_space(space, Budget(time_limit_s=30.0, rel_gap=rel_gap))


def relative_error(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest entry of `want`."""
    got, want = jnp.asarray(got, jnp.float32), jnp.asarray(want, jnp.float32)
    if not want.size:
        return 0.0
    return float(jnp.abs(got - want).max() / jnp.maximum(jnp.abs(want).max(), jnp.finfo(jnp.float32).tiny))
