import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.backends import compile, compile_worker
from autoshard.backends.compile import Compiled, CompileTarget
from autoshard.backends.known_compilers import named
from autoshard.backends.toolchain import GPU_TOOLCHAIN, Topology
from autoshard.errors import CompileError, CompilerFlagError, CompilerMissingError, MeshError
from autoshard.ir.mesh import MeshAxes
from tests.installed import GPU, TPU, needs_gpu_compiler

AXES = MeshAxes.of({"data": 2, "model": 4})
# Every shard is whole tiles of the TPU (8 × 128), so that no compiler pads.
WEIGHT_BYTES = 128 * 1024 * 4 // 4  # one f32 weight of 128 × 1024, split over model=4
INPUT_BYTES = 16 * 128 * 4 // 2

TOPOLOGIES = [
    pytest.param("cpu:8", id="cpu"),
    pytest.param("h100:1x8", id="gpu", marks=GPU),
    pytest.param("tpu-v5e:2x4", id="tpu", marks=TPU),
]


def loss(weights: Any, x: Any) -> Any:
    up, down = weights
    return (jax.nn.relu(x @ up) @ down).sum()


def step(weights: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))


def trace(mesh: Any) -> Any:
    """A Megatron MLP's gradient step, its weights donated."""
    weights = tuple(NamedSharding(mesh, spec) for spec in (P(None, "model"), P("model", None)))
    jitted = jax.jit(
        step,
        in_shardings=(weights, NamedSharding(mesh, P("data"))),
        out_shardings=weights,
        donate_argnums=0,
    )
    avals = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 1024), (1024, 128), (16, 128)))
    return jitted.trace(avals[:2], avals[2])


@pytest.fixture(scope="module")
def traced() -> Any:
    return trace(AbstractMesh(AXES.sizes, AXES.names, axis_types=(AxisType.Auto,) * 2))


class Programs(dict[str, Compiled]):
    def __init__(self, traced: Any) -> None:
        self.traced = traced

    def __missing__(self, topology: str) -> Compiled:
        self[topology] = compile.compile(self.traced, topology=topology, mesh=AXES, passes=True)
        return self[topology]


@pytest.fixture(scope="module")
def compiled(traced: Any) -> Programs:
    """Each topology's program, compiled once."""
    return Programs(traced)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_donation_survives(compiled: dict[str, Compiled], topology: str) -> None:
    memory = compiled[topology].memory
    assert memory.alias_bytes == 2 * WEIGHT_BYTES
    assert memory.argument_bytes == 2 * WEIGHT_BYTES + INPUT_BYTES
    assert memory.output_bytes >= memory.alias_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_peak_holds_arguments_and_fits_the_total(compiled: dict[str, Compiled], topology: str) -> None:
    program = compiled[topology]
    assert program.peak_bytes >= program.memory.argument_bytes
    assert program.peak_bytes <= program.memory.total_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES[2:])
def test_xla_tpus_own_peak_counts_what_lies_in_vmem(compiled: dict[str, Compiled], topology: str) -> None:
    """All temporaries of so small a step do."""
    memory = compiled[topology].memory
    assert memory.reported_peak_bytes > memory.total_bytes


@pytest.mark.parametrize(("compiler", "peak"), [("cpu", 110), ("gpu", 105), ("tpu", 110)])
def test_a_heap_with_gaps_is_allocated_whole(compiler: str, peak: int) -> None:
    memory = compile.MemoryStats(
        argument_bytes=70, output_bytes=70, alias_bytes=60, temp_bytes=30, reported_peak_bytes=105
    )
    assert memory.total_bytes == 110
    assert memory.peak_bytes(named(compiler)) == peak


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_source_lines_survive(compiled: dict[str, Compiled], topology: str) -> None:
    text = compiled[topology].hlo_text
    assert f'"{__file__}"' in text
    assert f"line={loss.__code__.co_firstlineno + 2} " in text
    assert re.search(r'op_name="jit\(step\)/[^"]*dot_general"', text)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_program_is_partitioned_and_scheduled(compiled: dict[str, Compiled], topology: str) -> None:
    program = compiled[topology]
    assert "num_partitions=8" in program.hlo_text
    assert "is_scheduled=true" in program.hlo_text
    assert "all-reduce" in program.hlo_text
    assert program.after_partitioning is not None
    assert "all-reduce" in program.after_partitioning
    assert program.after_propagation is not None
    kept = ("devices=[2,4]<=[8]", "[{'data'}, {'model'}]")  # the hidden activation, as JAX 0.10 or 0.12 writes it
    assert any(layout in program.after_propagation for layout in kept)
    assert "all-reduce" not in program.after_propagation


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_answer_says_what_compiled_it(compiled: dict[str, Compiled], topology: str) -> None:
    program = compiled[topology]
    kinds = {"cpu": "cpu", "gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite"}
    names = {"cpu": "jaxlib", "gpu": "jax-cuda", "tpu": "libtpu"}
    assert program.device_kind == kinds[program.compiler]
    assert program.version.startswith(names[program.compiler])
    assert program.topology == topology
    assert sorted(program.device_order) == list(range(8))
    assert 0 < program.wall_s < 60


def test_the_same_program_as_in_process(compiled: dict[str, Compiled]) -> None:
    mesh = jax.make_mesh(AXES.sizes, AXES.names, axis_types=(AxisType.Auto,) * 2)
    here = trace(mesh).lower().compile()
    assert body(compiled["cpu:8"].hlo_text) == body(here.as_text())
    assert compiled["cpu:8"].memory.temp_bytes == here.memory_analysis().temp_size_in_bytes


def body(text: str) -> str:
    """HLO from its first computation on, less what a compilation draws anew: source tables, the order of JSON keys."""
    instructions = text[re.search(r"\n(%|ENTRY)", text).start() :]  # pyright: ignore[reportOptionalMemberAccess]
    return re.sub(r"stack_frame_id=\d+|backend_config=.*", "", instructions)


def test_the_parents_device_count_does_not_matter() -> None:
    axes = MeshAxes.of({"x": 16})
    mesh = AbstractMesh(axes.sizes, axes.names, axis_types=(AxisType.Auto,))
    jitted = jax.jit(jnp.tanh, in_shardings=NamedSharding(mesh, P("x")))
    program = compile.compile(
        jitted.trace(jax.ShapeDtypeStruct((32, 4), jnp.float32)), topology="cpu:16", mesh=axes, compiler="cpu"
    )
    assert len(jax.devices()) == 8
    assert program.memory.argument_bytes == 32 * 4 * 4 // 16
    assert program.after_partitioning is None


def test_the_device_order_is_kept(traced: Any) -> None:
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    program = compile.compile(traced, topology="cpu:8", mesh=AXES, device_order=order)
    assert program.device_order == order


@pytest.mark.parametrize("topology", TOPOLOGIES[2:])
def test_a_tpu_mesh_takes_the_order_of_its_torus(compiled: dict[str, Compiled], topology: str) -> None:
    assert compiled[topology].device_order == (0, 1, 2, 3, 7, 6, 5, 4)


@pytest.mark.parametrize("pair", [pytest.param(("h100:2x4", "b200:1x8"), id="gpu", marks=GPU)])
def test_two_compile_side_by_side_and_in_silence(
    traced: Any, pair: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    def compile_on(topology: str) -> Compiled:
        return compile.compile(traced, topology=topology, mesh=AXES)

    with ThreadPoolExecutor(2) as pool:
        h100, b200 = pool.map(compile_on, pair)
    assert (h100.device_kind, b200.device_kind) == ("NVIDIA H100 80GB HBM3", "NVIDIA B200")
    assert h100.flags == GPU_TOOLCHAIN.options
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "compiler", "chip", "shape"),
    [
        ("h100:4x8", "gpu", "h100", (4, 8)),
        ("h100:8", "gpu", "h100", (8,)),
        ("a100-40:2x1x16", "gpu", "a100-40", (2, 1, 16)),
        ("tpu-v5p:4x4x8", "tpu", "tpu-v5p", (4, 4, 8)),
        ("tpu-v5e:2*4x4", "tpu", "tpu-v5e", (4, 4)),
        ("cpu:8", "cpu", "cpu", (8,)),
    ],
)
def test_hardware_names(name: str, compiler: Any, chip: str, shape: tuple[int, ...]) -> None:
    target = CompileTarget.parse(name)
    assert (target.compiler, target.chip, target.shape) == (compiler, chip, shape)


@pytest.mark.parametrize("chip", ["a100", "a100-40", "h100", "h200", "b200", "gb200"])
def test_every_gpu_has_a_target(chip: str) -> None:
    request = CompileTarget.parse(f"{chip}:2x8").request["topology_options"]
    assert request["topology"] == "1x2x8"
    assert f'"NVIDIA {chip.split("-")[0].upper()}' in request["target_config"]


def test_slices_of_a_tpu_are_asked_for() -> None:
    assert CompileTarget.parse("tpu-v5e:2*4x4").request["topology_options"] == {"num_slices": 2}
    assert CompileTarget.parse("tpu-v5e:4x4").request["topology_options"] == {}


def test_the_newest_tpu_has_another_name() -> None:
    assert CompileTarget.parse("tpu-v7x:4x4x4").topology == Topology(name="tpu7x:4x4x4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "cannot read the topology 'h100'"),
        ("h100:8y", "cannot read the topology"),
        ("cray:8", "the chips are a100, a100-40, b200, gb200, h100, h200, tpu-\\*, cpu"),
        ("cpu:2x4", "no compiler for 'cpu:2x4'"),
        ("h100:2*1x8", "no compiler for 'h100:2\\*1x8'"),
        ("h100:1x1x2x4", "no compiler for 'h100:1x1x2x4'"),
    ],
)
def test_unknown_hardware_is_refused(name: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        CompileTarget.parse(name)


def test_what_does_not_fit_is_refused(traced: Any) -> None:
    with pytest.raises(MeshError, match="cpu:8 is compiled by 'cpu', not by 'gpu'"):
        compile.compile(traced, topology="cpu:8", mesh=AXES, compiler="gpu")
    with pytest.raises(MeshError, match=r"device_order names 2 devices; the mesh data=2 × model=4 has 8"):
        compile.compile(traced, topology="cpu:8", mesh=AXES, device_order=(0, 1))
    with pytest.raises(MeshError, match=r"cpu:4 has 4 devices; the mesh needs 8, or a device_order"):
        compile.compile(traced, topology="cpu:4", mesh=AXES)
    with pytest.raises(MeshError, match=r"cpu:8 has 8 devices; device_order names 8"):
        compile.compile(traced, topology="cpu:8", mesh=AXES, device_order=range(1, 9))


@pytest.mark.parametrize(("topology", "extra"), [("h100:8", "gpu"), ("tpu-v5e:2x4", "tpu")])
def test_a_missing_compiler_says_what_to_install(
    traced: Any, topology: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "_has_module", lambda _: False)
    with pytest.raises(CompilerMissingError, match=rf'pip install "autoshard\[{extra}\]"'):
        compile.compile(traced, topology=topology, mesh=AXES)


def test_a_refusal_carries_the_compilers_words(traced: Any) -> None:
    with pytest.raises(CompilerFlagError, match=r"compiling for cpu:8 failed: .*no_such_flag") as caught:
        compile.compile(traced, topology="cpu:8", mesh=AXES, compiler_options={"no_such_flag": "1"})
    assert "Traceback" in caught.value.stderr


def test_a_crash_is_an_error_and_not_ours(traced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os, sys\nsys.stderr.write('Check failed')\nsys.stderr.flush()\nos.abort()\n")
    monkeypatch.setattr(compile, "_CHILD", child)
    with pytest.raises(CompileError, match="the compiler's process died of signal 6") as caught:
        compile.compile(traced, topology="cpu:8", mesh=AXES)
    assert caught.value.stderr.startswith("Check failed")


def test_what_jaxlib_cannot_read_is_read_from_the_compilers_dump(tmp_path: Path) -> None:
    """libtpu's newer programs for v5p: jaxlib says that it does not know an op, and libtpu has dumped the text."""

    class Unreadable:
        def hlo_modules(self) -> list[Any]:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Unknown opcode")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Unknown opcode"):
        compile_worker.text_of(Unreadable(), tmp_path)
    (tmp_path / "module_0001.jit_step.after_codegen.txt").write_text("HloModule jit_step")
    (tmp_path / "module_0001.jit_step.before_optimizations.txt").write_text("HloModule before")
    assert compile_worker.text_of(Unreadable(), tmp_path) == "HloModule jit_step"


@needs_gpu_compiler
@pytest.mark.parametrize("reason", GPU_TOOLCHAIN.second_try)
def test_matmuls_without_tiles_are_tried_without_triton(
    traced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    """A child that never finds tiles is asked twice, the second time for another matmul."""
    child, asked = tmp_path / "child.py", tmp_path / "asked"
    child.write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"with open({str(asked)!r}, 'a') as file: print((folder / 'request.json').read_text(), file=file)\n"
        f"(folder / 'error.txt').write_text({reason!r})\n"
        "sys.exit(1)\n"
    )
    monkeypatch.setattr(compile, "_CHILD", child)
    with pytest.raises(CompileError, match=reason):
        compile.compile(traced, topology="h100:1x8", mesh=AXES)
    first, second = (json.loads(line)["options"] for line in asked.read_text().splitlines())
    assert second == {**first, "xla_gpu_enable_triton_gemm": False}


def test_patience_ends(traced: Any) -> None:
    with pytest.raises(CompileError, match=r"compiling for cpu:8 took longer than 0\.05 s"):
        compile.compile(traced, topology="cpu:8", mesh=AXES, timeout_s=0.05)
