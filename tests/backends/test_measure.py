"""Timing the devices at hand: what is timed, what is refused, and the file that the planner takes."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
from autoshard.backends import measure
from autoshard.backends.hlo import collectives, read
from autoshard.backends.hlo.loops import Loops
from autoshard.errors import MeasureError
from autoshard.ir.mesh import MeshAxes
from cost_models.machines import catalogue
from cost_models.machines.measured import CollectiveSample, MatmulSample, StreamSample, document

CPU = catalogue.chip("cpu")
USUAL_CASES = measure.cases
QUICK = measure.Effort(program_s=0.002, repeats=3, scale=1e-4)


def few_cases(*_: object) -> Iterator[measure.Case]:
    """Of the usual ones on 4 devices, few, of sizes far apart."""
    wanted = {
        *(MatmulSample(1, size, size, size, 1.0) for size in (64, 256)),
        *(StreamSample("copy", 2 * nbytes, 1.0) for nbytes in (2**16, 2**22)),
        *(CollectiveSample(kind, 4, nbytes, 1.0) for kind in ("all-gather", "all-reduce") for nbytes in (2**12, 2**22)),
    }
    found = [case for scale in (1.0, 0.05, 0.02, 1e-3) for case in USUAL_CASES(CPU, 4, ("float32",), scale)]
    return iter({case.sample(1.0): case for case in found if case.sample(1.0) in wanted}.values())


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    heard: list[tuple[int, int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "cases", few_cases)
        found = measure.measure(
            jax.devices()[:4], dtypes=("float32",), effort=QUICK, progressed=lambda *now: heard.append(now)
        )
    assert [done for done, _, _ in heard] == list(range(8))
    assert {of for _, of, _ in heard} == {8}
    return document(found)


def test_matmuls_memory_and_every_collective_are_timed():
    cases = list(measure.cases(CPU, 8, ("float32", "bfloat16"), 1.0))
    samples = [case.sample(1.0) for case in cases]
    assert Counter(s.kind for s in samples if isinstance(s, CollectiveSample)) == dict.fromkeys(
        measure.COLLECTIVES, 3 * 6
    )
    assert {s.devices for s in samples if isinstance(s, CollectiveSample)} == {2, 4, 8}
    assert {s.operation for s in samples if isinstance(s, StreamSample)} == {"copy", "reduce"}
    matmuls = [s for s in samples if isinstance(s, MatmulSample)]
    assert any(s.m * 16 <= s.k for s in matmuls)  # thin
    assert any(s.batch > 1 for s in matmuls)
    assert {case.dtype for case in cases if isinstance(case.sample(1.0), MatmulSample)} == {"float32", "bfloat16"}


def looped(step: measure.Step) -> measure.Step:
    def repeated(carried: Any, *constants: Any) -> Any:
        return jax.lax.fori_loop(0, 1000, lambda _, x: step(x, *constants), carried)

    return repeated


def test_nothing_but_the_kernel_is_timed():
    """A loop copies what cannot take the place of the value that it carries; that would count as the kernel's time."""
    local = [case for case in measure.cases(CPU, 1, ("float32",), 1e-4) if case.group == 1]
    assert {case.what.partition(" of ")[0].partition(" ")[0] for case in local} == {"float32", "copy", "reduce"}
    for case in local:
        carried, *constants = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes)
        module = read(jax.jit(looped(case.step)).lower(carried, *constants).compile().as_text() or "")
        (loop,) = (x for computation in module for x in computation if x.opcode == "while")
        copies = [
            x for x in Loops(module).body(loop) if x.opcode == "copy" and x.shapes[0].size >= np.prod(carried.shape)
        ]
        assert not copies, case.what


@pytest.mark.parametrize("kind", measure.COLLECTIVES)
def test_the_timed_program_holds_the_collective_and_its_bytes(kind: Any):
    case = next(
        c
        for c in measure.cases(CPU, 8, (), 1.0)
        if isinstance(s := c.sample(1.0), CollectiveSample) and (s.kind, s.devices, s.nbytes) == (kind, 4, 2**16)
    )
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("apart", "group"))
    spec = P(("apart", "group"))
    step = jax.shard_map(case.step, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    whole = jax.ShapeDtypeStruct((8 * case.shapes[0][0],), case.dtype)
    compiled = jax.jit(step).lower(whole).compile()
    (found,) = collectives(read(compiled.as_text() or ""), MeshAxes.of({"apart": 2, "group": 4}))
    # XLA:CPU has no reduce-scatter of its own
    assert found.kind in ((kind, "all-reduce") if kind == "reduce-scatter" else (kind,))
    assert (found.axes, found.nbytes) == (("group",), 2**16)


def test_steps_carry_what_they_take():
    for case in measure.cases(CPU, 8, ("float32",), 1.0):
        if case.group == 1:
            carried, *constants = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes)
            out = jax.eval_shape(case.step, carried, *constants)
            assert (out.shape, out.dtype) == (carried.shape, carried.dtype)


def test_the_file_says_when_on_what_and_how(measured: dict[str, Any]):
    assert (measured["name"], measured["based_on"], measured["topology"]) == ("cpu-measured", "cpu", "4")
    assert measured["measured"]["device_kind"] == "cpu"
    assert f"jax {jax.__version__}" in measured["measured"]["versions"]
    assert "median of 3 programs" in measured["measured"]["method"]
    assert {row["collective"] for row in measured["tables"]} == {"all-gather", "all-reduce"}
    assert all(seconds > 0 for row in measured["tables"] for seconds in row["seconds"])
    assert [s["m"] for s in measured["samples"]["matmuls"]] == [64, 256]


def test_the_planner_takes_the_file(measured: dict[str, Any], tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(measured))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((x @ w) ** 2)

    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    plan = autoshard.plan(loss, *shapes, mesh={"data": 2, "model": 2}, hardware=str(path))
    assert plan.record.hardware == "cpu/cpu-measured:4"
    assert plan.verify().compiler == "cpu"
    stock = autoshard.plan(loss, *shapes, mesh={"data": 2, "model": 2}, hardware="cpu:4")
    assert plan.record.hardware_digest != stock.record.hardware_digest
    machine = cost_models.hardware(path).place({"x": 4})
    table = next(t for t in measured["tables"] if (t["collective"], t["devices"]) == ("all-reduce", 4))
    assert float(machine.collective_s("all-reduce", ("x",), table["bytes"][-1])) == pytest.approx(table["seconds"][-1])


def test_the_planner_takes_the_shipped_measurement_by_name_and_by_path():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((x @ w) ** 2)

    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    path = Path(cost_models.__file__).parent / "hardware" / "cpu-measured.json"
    plans = [autoshard.plan(loss, *shapes, mesh={"x": 8}, hardware=spec) for spec in ("cpu-measured:8", str(path))]
    assert [plan.record.hardware for plan in plans] == ["cpu-measured:8", "cpu/cpu-measured:8"]
    assert plans[0].record.hardware_digest == plans[1].record.hardware_digest
    assert plans[0].record.cost == plans[1].record.cost
    assert plans[0].verify().compiler == "cpu"


def test_repeats_last_as_long_as_asked():
    case = next(few_cases())
    timed = measure.time_case(case, jax.devices()[:1], measure.Effort(program_s=0.02, repeats=3))
    assert 0 < timed.seconds < 0.1
    assert timed.spread >= 0


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MeasureError, match="seconds and repeats must be positive"):
        measure.Effort(repeats=0)
    nothing = measure.Case(
        what="nothing",
        step=lambda x: x,
        shapes=((1,),),
        dtype="float32",
        sample=lambda seconds: StreamSample("nothing", 1.0, seconds),
    )
    monkeypatch.setattr(measure, "perf_counter", lambda: 0.0)
    with pytest.raises(MeasureError, match="nothing: 100000 runs of it take 0 s together, too short to be work"):
        measure.time_case(nothing, jax.devices()[:1], QUICK)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(measure.os, "getloadavg", lambda: (5.2, 1.0, 1.0))
    assert measure._busy() == "; the 2 cores were busy with 5 other threads"
    monkeypatch.setattr(measure.os, "getloadavg", lambda: (0.1, 1.0, 1.0))
    assert measure._busy() == ""


@pytest.mark.slow
def test_the_command_writes_a_file_that_prices(tmp_path: Path):
    path = tmp_path / "machine.json"
    options = ["--quick", "--platform", "cpu", "--cpu-devices", "2", "--dtype", "float32", "--out", str(path)]
    ran = subprocess.run(
        [sys.executable, "-c", "from autoshard.cli import main; main()", "hardware", "measure", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{path}: cpu/cpu-measured:2; plan for it with --hardware {path}\n"
    assert "timing 2 devices: cpu" in ran.stderr
    assert float(cost_models.hardware(path).place({"x": 2}).collective_s("all-gather", ("x",), 1e6)) > 0


def test_a_command_that_asks_for_too_much_is_refused():
    found = subprocess.run(
        [sys.executable, "-m", "autoshard.backends.measure", "--based-on", "h10"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "UnknownHardwareError: unknown chip `h10`: did you mean h100 or h20 or h100-96?" in found.stderr
