"""Deviceless compilation: the vendors' own compilers, for a topology that need not be here.

XLA:GPU (`pip install "autoshard[gpu]"`) and XLA:TPU (`[tpu]`) compile on a plain
machine; XLA:CPU comes with jax. The program is lowered in this process on an
abstract mesh, and crosses to a subprocess as StableHLO bytecode with its source
locations and donations; nothing is pickled, and what a compiler writes to stderr
(or its crash) stays there. Calls from several threads compile side by side.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard import _jax
from autoshard.backends.known_compilers import KNOWN, named
from autoshard.backends.known_compilers import TPU_PLAIN_OPTIONS as TPU_PLAIN_OPTIONS
from autoshard.backends.model import CompilerModel, CompilerName
from autoshard.backends.toolchain import Topology
from autoshard.errors import CompileError, CompilerFlagError, CompilerMissingError, MeshError
from autoshard.ir.mesh import MeshAxes
from cost_models.machines import catalogue

# The child sees none of the caller's flags: what a compilation depends on, and what it says, is in its arguments.
_DROPPED_ENVIRONMENT = frozenset({"XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "TF_CPP_MIN_LOG_LEVEL"})
_TOPOLOGY_ERROR = "TopologyError: "
_NO_FLAG = "No such compile option"  # XLA's own words
_CHILD = Path(__file__).with_name("compile_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """The memory of one device, as the compiler reports it, in bytes.

    `reported_peak_bytes` is the compiler's own peak; XLA:CPU reports its arguments
    there, and XLA:TPU includes what lies in a core's own memory (VMEM), which `temp_bytes` leaves out.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    reported_peak_bytes: int
    host_temp_bytes: int = 0
    host_argument_bytes: int = 0

    @property
    def uses_host(self) -> bool:
        """Whether arguments or temporaries lie in the host's memory."""
        return bool(self.host_temp_bytes or self.host_argument_bytes)

    @property
    def total_bytes(self) -> int:
        """Arguments + outputs − aliases + temporaries: an upper bound of the peak where temporaries are all counted."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def peak_bytes(self, compiler: CompilerModel) -> int:
        """The peak of a compiler's program: the compiler's own number, or `total_bytes` if that counts something else.

        What lies in the host's memory, that word counts, too: `total_bytes` does not. XLA:TPU's counts a core's own
        memory besides, and leaves out what lies idle between buffers of its heap, which is allocated whole.
        """
        if compiler.counts_gaps or not compiler.reports_peak or self.uses_host:
            return self.total_bytes
        return self.reported_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStats:
    """XLA's cost analysis of one device's program; None where the compiler gives none. Loop bodies may count once."""

    flops: float | None
    bytes_accessed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled program as text, and what its compiler said of it.

    `device_order[i]` is the position in the topology of the i-th device of the mesh
    (replica groups in the text hold such i). `after_propagation` and
    `after_partitioning` are the text after Shardy and after SPMD partitioning,
    where they were asked for. `wall_s` is the compiler's own time, `log` what it wrote to standard error.
    """

    hlo_text: str
    memory: MemoryStats
    cost: CostStats
    wall_s: float
    compiler: CompilerName
    version: str
    topology: str
    device_kind: str
    device_order: tuple[int, ...]
    flags: Mapping[str, Any]
    after_propagation: str | None = None
    after_partitioning: str | None = None
    log: str = ""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of one device: see `MemoryStats.peak_bytes`."""
        return self.memory.peak_bytes(named(self.compiler))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTarget:
    """A hardware name read: `h100:4x8` (hosts × GPUs), `tpu-v5p:4x4x8`, `tpu-v5e:2*4x4` (two slices), `cpu:8`."""

    compiler: CompilerName
    chip: str
    shape: tuple[int, ...]
    topology: Topology

    @classmethod
    def parse(cls, name: str) -> "CompileTarget":
        """From a hardware name: the compiler whose toolchain knows the chip.

        Raises:
          MeshError: the chip is unknown, or the shape is missing or malformed.
        """
        chip, _, shape = name.partition(":")
        chip = chip.partition("/")[0]  # a user's hardware file, by the chip that it is based on
        parsed = re.fullmatch(r"(?:(\d+)\*)?(\d+(?:x\d+)*)", shape)
        if parsed is None:
            raise MeshError(f"cannot read the topology {name!r}: write chip:shape, such as {_EXAMPLES}")
        slices, sizes = int(parsed[1] or 1), tuple(int(size) for size in parsed[2].split("x"))
        compilers = {model.name: model for model in KNOWN}  # of one name all have the same toolchain
        for model in compilers.values():
            topology = model.toolchain.topology(chip, sizes, slices)
            if topology is not None:
                return cls(compiler=model.name, chip=chip, shape=sizes, topology=topology)
        chips = ", ".join(chip for model in compilers.values() for chip in model.toolchain.chips)
        also = (
            "; it can be planned for, and its layouts verified by the 'cpu' compiler"
            if chip in catalogue.chips()
            else ""
        )
        raise MeshError(f"no compiler for {name!r}: the chips are {chips} (as in {_EXAMPLES}){also}")

    @property
    def request(self) -> dict[str, Any]:
        """The part of a child's request that names the compiler and the devices."""
        model = named(self.compiler)
        return {
            "platform": model.platform,
            "plugins": model.toolchain.plugins,
            "attached": model.toolchain.attached,
            "tuple_above": model.toolchain.tuple_above,
            "topology": self.topology.name,
            "topology_options": dict(self.topology.options),
            "config": dict(self.topology.config),
        }


_EXAMPLES = "h100:4x8 (hosts × GPUs), tpu-v5e:4x4, tpu-v5e:2*4x4 (slices), cpu:8"


def topology(hardware: str, devices: int, compiler: str | None) -> str:
    """The topology for a compiler: a plan's hardware, or as many of its own devices where it takes any count."""
    return f"{compiler}:{devices}" if compiler is not None and named(compiler).compiles_for_any_count else hardware


def flags_of_plan(flags: Mapping[str, Any], compiler: str | None) -> Mapping[str, Any]:
    """A plan's flags, which are its hardware's compiler's: one that compiles for any count is not asked by them."""
    return {} if compiler is not None and named(compiler).compiles_for_any_count else flags


def available(compiler: CompilerName) -> bool:
    """Whether a compiler is installed."""
    return any(_has_module(module) for module in named(compiler).toolchain.modules)


def compile(
    lowerable: Any,
    *,
    topology: str,
    mesh: MeshAxes,
    compiler: CompilerName | None = None,
    device_order: Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    passes: bool = False,
    timeout_s: float | None = None,
) -> Compiled:
    """Compiles a traced program for a topology.

    Args:
      lowerable: what `jax.jit(…, in_shardings=…).trace(*avals)` returns, with
        shardings on an `AbstractMesh` (or any mesh of the same axes); it is lowered
        for the compiler's platform. A lowering (`.lower(…)`) is taken as it is.
      topology: a hardware name: `h100:4x8` (hosts × GPUs), `tpu-v5e:4x4`, `cpu:8`.
      mesh: the axes of the program's mesh.
      compiler: must be the one that `topology` implies; None infers it.
      device_order: positions in the topology of the mesh's devices, major to minor;
        None takes `jax.make_mesh`'s order.
      compiler_options: as `jax.stages.Lowered.compile` takes them, over the toolchain's own. Where the compiler
        fails in a way that the toolchain knows, the program is compiled once more; `Compiled.flags` says how.
      passes: keep the text after Shardy and after partitioning.
      timeout_s: gives up after so long; None waits.

    Raises:
      CompilerMissingError: the compiler is not installed.
      MeshError: topology, mesh and device order do not fit each other.
      CompileError: the compiler refuses, crashes, or takes longer than `timeout_s`;
        `CompilerFlagError` where it has no flag of that name.
    """
    target = CompileTarget.parse(topology)
    toolchain = named(target.compiler).toolchain
    if compiler is not None and compiler != target.compiler:
        raise MeshError(f"{topology} is compiled by {target.compiler!r}, not by {compiler!r}")
    if not available(target.compiler):
        raise CompilerMissingError(
            f"the {target.compiler.upper()} compiler is not installed\n"
            f'  pip install "autoshard[{target.compiler}]"  (no {target.compiler.upper()} is needed)'
        )
    if device_order is not None and len(set(device_order)) != mesh.size:
        raise MeshError(f"device_order names {len(set(device_order))} devices; the mesh {mesh} has {mesh.size}")
    flags = {**toolchain.options, **(compiler_options or {})}
    lowered = _lowered(lowerable, target)

    def compiled(flags: Mapping[str, Any]) -> Compiled:
        with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
            folder = Path(name)
            options = dict(flags)
            if passes or toolchain.dumps:
                options["xla_dump_to"] = str(folder)
                options["xla_dump_hlo_as_text"] = True
            if passes:
                options["xla_dump_hlo_pass_re"] = ".*shardy-xla.*|.*spmd-partitioning.*"
            request = {
                **target.request,
                "mesh_names": mesh.names,
                "mesh_sizes": mesh.sizes,
                "device_order": None if device_order is None else list(device_order),
                "options": options,
            }
            (folder / "request.json").write_text(json.dumps(request))
            (folder / "module.mlirbc").write_bytes(_jax.bytecode(lowered))
            log = _run_child(folder, topology, timeout_s)
            answer = json.loads((folder / "answer.json").read_text())
            return Compiled(
                hlo_text=(folder / "hlo.txt").read_text(),
                memory=MemoryStats(**answer["memory"]),
                cost=CostStats(**answer["cost"]),
                wall_s=answer["wall_s"],
                compiler=target.compiler,
                version=version(target.compiler),
                topology=topology,
                device_kind=answer["device_kind"],
                device_order=tuple(answer["device_order"]),
                flags=flags,
                after_propagation=_dump(folder, "shardy-xla") if passes else None,
                after_partitioning=_dump(folder, "spmd-partitioning") if passes else None,
                log=log,
            )

    try:
        return compiled(flags)
    except CompileError as error:
        if not any(text in str(error) for text in toolchain.second_try) or flags.keys() & toolchain.second_options:
            raise
        return compiled({**flags, **toolchain.second_options})


def _lowered(lowerable: Any, target: CompileTarget) -> Any:
    """A program lowered for a target's platform; one that is lowered already, as it is."""
    if not hasattr(lowerable, "lower"):
        return lowerable
    try:
        return lowerable.lower(lowering_platforms=(named(target.compiler).platform,))
    except ValueError as error:
        if "require devices to be present" not in str(error):
            raise
        raise CompileError(
            "a program that calls the host (jax.pure_callback, io_callback, jax.debug) or has cuDNN's attention "
            "cannot be compiled without its devices: leave these out for this"
        ) from error


def _run_child(folder: Path, topology: str, timeout_s: float | None) -> str:
    """Runs the child on a request folder; returns its standard error, or raises what it failed with."""
    environment = {k: v for k, v in os.environ.items() if k not in _DROPPED_ENVIRONMENT}
    environment |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    # -P: this folder must not come before the standard library on sys.path (it has a trace.py).
    command = [sys.executable, "-P", str(_CHILD), str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, capture_output=True, text=True, errors="replace", check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"compiling for {topology} took longer than {timeout_s:g} s") from error
    if done.returncode == 0:
        return done.stderr
    failure = folder / "error.txt"
    if failure.is_file():
        reason = failure.read_text().strip()
        if reason.startswith(_TOPOLOGY_ERROR):
            raise MeshError(f"{topology} {reason.removeprefix(_TOPOLOGY_ERROR)}")
    elif done.returncode < 0:
        reason = f"the compiler's process died of signal {-done.returncode}"
    else:
        reason = f"the compiler's process ended with status {done.returncode}"
    kind = CompilerFlagError if _NO_FLAG in reason else CompileError
    raise kind(f"compiling for {topology} failed: {reason}", stderr=done.stderr)


def _dump(folder: Path, stage: str) -> str:
    """The HLO text that was dumped after a pass (the largest module's, when there are several)."""
    found = [path for path in folder.glob("*.txt") if re.search(rf"\.after_(tpu-)?{stage}\.", path.name)]
    if not found:
        raise CompileError(f"the compiler dumped no HLO after {stage}")
    return max(found, key=lambda path: path.stat().st_size).read_text()


def version(compiler: CompilerName) -> str:
    """Name and version of the installed compiler's distribution."""
    for name in named(compiler).toolchain.distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{compiler}, version unknown"


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
