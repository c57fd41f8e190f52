"""Toolchains: how each compiler is called for devices that need not be here.

A compiler's packages, the way it names a topology, and its options are one value, which `CompilerModel` holds.
`compile` and its child ask that value; they know no compiler by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("gpu_targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Names devices as JAX asks for them.

    Attributes:
      name: the first argument of `jax.experimental.topologies.get_topology_desc`.
      options: its further arguments, beside `platform`.
      config: flags of JAX that make the devices, in a process of their own, where they are that process's own.
    """

    name: str = ""
    options: Mapping[str, str | int] = field(default_factory=dict[str, str | int], hash=False)
    config: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """How a compiler is called.

    Attributes:
      distributions: its packages, of which the first that is installed says the version.
      modules: its modules, of which one must be there.
      plugins: modules whose `initialize()` tells JAX of the compiler; the first that is there is asked.
      topology: (chip, shape, slices) → the topology's name for JAX; None if it compiles for no such devices.
      chips: the chips that `topology` takes, for an error.
      attached: whether the devices are those of the process that compiles, so that a program is loaded at once.
      options: flags of every compilation, unless the caller has others.
      second_try: parts of errors after which a program is compiled once more with `second_options`.
      second_options: flags of that second compilation.
      dumps: whether the compiler must write its program as text, as jaxlib may not be able to read it.
      trials: flags with values other than its own or those of `options`, which may pay: the doctor tries them.
      tuple_above: programs of more arguments than this take one tuple, as JAX has it; None: never.
    """

    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    plugins: tuple[str, ...] = ()
    topology: Callable[[str, tuple[int, ...], int], Topology | None]
    chips: tuple[str, ...]
    attached: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    second_try: tuple[str, ...] = ()
    second_options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    dumps: bool = False
    trials: tuple[tuple[str, Any], ...] = ()
    tuple_above: int | None = None


_GPU_FILES = {"a100": "a100_80", "a100-40": "a100_40"}  # chip → its file, where the names differ
_TPU_VERSIONS = {"v7x": "tpu7x"}


def gpu_topology(chip: str, shape: tuple[int, ...], slices: int) -> Topology | None:
    """GPUs of a chip that has its description in `gpu_targets/`: slices × hosts × GPUs, the first ones left out."""
    file = TARGETS / f"{_GPU_FILES.get(chip, chip)}.txtpb"
    if not file.is_file() or len(shape) > 3 or slices > 1:
        return None
    sizes = (1,) * (3 - len(shape)) + shape
    return Topology(name=chip, options={"target_config": file.read_text(), "topology": _by(sizes)})


def tpu_topology(chip: str, shape: tuple[int, ...], slices: int) -> Topology | None:
    """Slices of a TPU's torus; libtpu itself refuses those that do not exist."""
    if not chip.startswith("tpu-"):
        return None
    version = chip.removeprefix("tpu-")
    several = {"num_slices": slices} if slices > 1 else {}
    return Topology(name=f"{_TPU_VERSIONS.get(version, version)}:{_by(shape)}", options=several)


def cpu_topology(chip: str, shape: tuple[int, ...], slices: int) -> Topology | None:
    """So many devices of the child's own processor, whichever that is."""
    if chip.partition("-")[0] != "cpu" or len(shape) != 1 or slices > 1:
        return None
    return Topology(config={"jax_num_cpu_devices": shape[0]})


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _gpu_chips() -> tuple[str, ...]:
    """The chips that have a description."""
    of_file = {file: chip for chip, file in _GPU_FILES.items()}
    return tuple(sorted(of_file.get(path.stem, path.stem) for path in TARGETS.glob("*.txtpb")))


GPU_TOOLCHAIN = Toolchain(
    distributions=("jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    modules=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    plugins=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    topology=gpu_topology,
    chips=_gpu_chips(),
    # Autotuning needs the real GPU. The latency-hiding scheduler is what training runs on GPU
    # turn on (JAX's GPU performance guide), and without it nothing overlaps.
    options={"xla_gpu_autotune_level": "0", "xla_gpu_enable_latency_hiding_scheduler": True},
    # XLA:GPU's Triton emitter finds no tiles for matmuls of odd sizes (257 patches of an image, over some of 8 devices)
    # and gives up, or has no configuration to start from where nothing is tuned (jax-cuda12-pjrt 0.11.2); without it
    # the library's matmul is taken, and no collective changes.
    second_try=("Couldn't find output tile sizes", "TritonBackend does not support a default config"),
    second_options={"xla_gpu_enable_triton_gemm": False},
    # Named in JAX's GPU performance guide, whose advice differs between programs (marin#8054 tried 40 of them).
    trials=(
        ("xla_gpu_enable_latency_hiding_scheduler", False),
        ("xla_gpu_enable_pipelined_all_gather", True),
        ("xla_gpu_enable_pipelined_all_reduce", True),
        ("xla_gpu_enable_pipelined_reduce_scatter", True),
        ("xla_gpu_enable_while_loop_double_buffering", True),
        ("xla_gpu_all_gather_combine_threshold_bytes", 1 << 30),
        ("xla_gpu_all_reduce_combine_threshold_bytes", 1 << 30),
        ("xla_gpu_reduce_scatter_combine_threshold_bytes", 1 << 30),
    ),
)

TPU_TOOLCHAIN = Toolchain(
    distributions=("libtpu", "libtpu-nightly"),
    modules=("libtpu",),
    topology=tpu_topology,
    chips=("tpu-*",),
    dumps=True,
    trials=(
        ("xla_tpu_enable_async_collective_fusion", False),
        ("xla_tpu_overlap_compute_collective_tc", False),
        ("xla_jf_spmd_threshold_for_windowed_einsum_mib", 1 << 20),
    ),
    tuple_above=2000,  # jax/_src/dispatch.py, should_tuple_args
)

# Of compilers that run nowhere but beside their devices, or that were never tried here.
NO_TOOLCHAIN = Toolchain(distributions=(), modules=(), topology=lambda chip, shape, slices: None, chips=())

CPU_TOOLCHAIN = Toolchain(
    distributions=("jaxlib",),
    modules=("jaxlib",),
    topology=cpu_topology,
    chips=("cpu",),
    attached=True,
)
