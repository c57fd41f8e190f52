"""Pallas kernels in a model that XLA:TPU compiles."""

from typing import Any

import pytest

import autoshard
import models
from autoshard.api import emit
from autoshard.backends import compile, devices, hlo
from autoshard.backends.hlo.dataflow import VIEWS
from tests.installed import needs_tpu_compiler


@pytest.mark.slow
@needs_tpu_compiler
def test_a_llama_with_flash_attention_compiles_for_tpu_as_planned() -> None:
    """One layer of heads of 128; at the kernel nothing moves: its operands are made in the kernel's layout."""
    sizes: dict[str, Any] = {"layers": 1, "width": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128}
    sizes |= {"hidden": 2048, "vocab": 1024}
    step, args = models.build("tiny-llama", attention="flash", context=512, batch=8, **sizes)
    plan = autoshard.plan(step, *args, mesh={"data": 2, "model": 2}, hardware="tpu-v5e:2x2", donate_argnums=0)
    assert plan.record.pins.kernels
    mesh = plan.record.mesh
    program = emit.jitted(plan.record, plan.traced, devices.abstract(mesh)).trace(*args)
    compiled = compile.compile(program, topology="tpu-v5e:2x2", mesh=mesh, device_order=plan.record.device_order)
    module = hlo.read(compiled.hlo_text)
    kernels = [
        (computation, instruction)
        for computation in module
        for instruction in computation
        if 'custom_call_target="tpu_custom_call"' in instruction.attributes
    ]
    assert len(kernels) == 3
    moving = {row.instruction for row in hlo.collectives(module, mesh)}
    moving |= {row.done for row in hlo.collectives(module, mesh)}
    assert moving
    for computation, kernel in kernels:
        around = beside(computation, kernel)
        assert len(around) > 4  # q, k, v and o at least, in one name or another
        assert not around & moving


def beside(computation: hlo.Computation, kernel: hlo.Instruction) -> set[str]:
    """What makes a kernel's operands and takes its results: past copies and other names, up to what computes."""
    found: set[str] = set()
    for following in (lambda x: x.operands, lambda x: [user.name for user in computation.users[x.name]]):
        left = list(following(kernel))
        while left:
            instruction = computation[left.pop()]
            if instruction.name not in found and instruction.opcode != "parameter":
                found.add(instruction.name)
                if instruction.opcode in VIEWS | {"copy-start", "copy-done"}:
                    left.extend(following(instruction))
    return found
