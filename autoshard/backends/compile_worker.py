"""The subprocess that compiles: reads a request folder, writes the answer beside it.

`compile.py` runs it as a script, so that a compiler's noise and crashes stay out
of the caller's process. It imports jax, never autoshard. The folder holds
`request.json` and `module.mlirbc` (StableHLO bytecode); it gains `hlo.txt` and
`answer.json`, or `error.txt`.
"""

import importlib
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir


class TopologyError(Exception):
    """The topology's devices are not those that the mesh needs; the parent says so."""


def topology_of(request: dict[str, Any]) -> topologies.TopologyDescription:
    """The devices to compile for; none of them needs to exist, but those that this process makes itself."""
    for name, value in request["config"].items():
        jax.config.update(name, value)
    if request["attached"]:
        return topologies.get_attached_topology(request["platform"])
    for plugin in request["plugins"]:
        if importlib.util.find_spec(plugin) is not None:
            importlib.import_module(plugin).initialize()
            break
    options = request["topology_options"]
    return topologies.get_topology_desc(request["topology"], platform=request["platform"], **options)


def compile_options(request: dict[str, Any], module: Any, ids: list[int]) -> Any:
    """The options that `jax.jit(…).lower(…).compile(compiler_options)` would use.

    XLA may choose the layout of exactly those arguments and results that carry no
    sharding, as jax asks it to.
    """
    (main,) = (
        op.operation
        for op in module.body.operations
        if op.operation.name == "func.func" and op.operation.attributes["sym_name"].value == "main"
    )
    function = main.attributes["function_type"].value
    free: dict[str, list[bool]] = {}
    for name, count in (("arg_attrs", len(function.inputs)), ("res_attrs", len(function.results))):
        entries = main.attributes[name] if name in main.attributes else [{}] * count
        free[name] = ["sdy.sharding" not in entry for entry in entries]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(ids)
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([ids], np.int32))
    tuple_above = request["tuple_above"]
    options.parameter_is_tupled_arguments = tuple_above is not None and len(free["arg_attrs"]) > tuple_above
    options.env_option_overrides = list(request["options"].items())
    build = options.executable_build_options
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_parameters = free["arg_attrs"]
    build.allow_spmd_sharding_propagation_to_output = free["res_attrs"]
    return options


def text_of(executable: Any, folder: Path) -> str:
    """The HLO text of an executable, or the compiler's own dump if jaxlib cannot read its (newer) program."""
    try:
        return "\n\n".join(module.to_string() for module in executable.hlo_modules())
    except jax.errors.JaxRuntimeError:
        dumped = sorted(folder.glob("*.after_codegen.txt"))
        if not dumped:
            raise
        return "\n\n".join(path.read_text() for path in dumped)


def answer(folder: Path) -> dict[str, Any]:
    """Compiles the request and writes the HLO text; returns its devices, memory, cost and compile time."""
    request = json.loads((folder / "request.json").read_text())
    topology = topology_of(request)
    need = math.prod(request["mesh_sizes"])
    if request["device_order"] is None and len(topology.devices) != need:
        raise TopologyError(f"has {len(topology.devices)} devices; the mesh needs {need}, or a device_order")
    if max(request["device_order"] or [0]) >= len(topology.devices):
        raise TopologyError(f"has {len(topology.devices)} devices; device_order names {max(request['device_order'])}")
    if request["device_order"] is None:
        mesh = topologies.make_mesh(topology, request["mesh_sizes"], tuple(request["mesh_names"]))
        devices = list(mesh.devices.flat)
    else:
        devices = [topology.devices[i] for i in request["device_order"]]
    with mlir.make_ir_context():
        module: Any = ir.Module.parse((folder / "module.mlirbc").read_bytes())
        options = compile_options(request, module, [device.id for device in devices])
        client = devices[0].client
        compile_ = client.compile_and_load if request["attached"] else client.compile
        start = time.perf_counter()
        executable = compile_(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)
        wall_s = time.perf_counter() - start
    (folder / "hlo.txt").write_text(text_of(executable, folder))
    memory = executable.get_compiled_memory_stats()
    try:
        cost = executable.cost_analysis()
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("UNIMPLEMENTED"):
            raise
        cost = {}
    return {
        "wall_s": wall_s,
        "device_order": [topology.devices.index(device) for device in devices],
        "device_kind": devices[0].device_kind,
        "memory": {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "host_temp_bytes": memory.host_temp_size_in_bytes,
            "host_argument_bytes": memory.host_argument_size_in_bytes,
            "reported_peak_bytes": memory.peak_memory_in_bytes,
        },
        "cost": {"flops": cost.get("flops"), "bytes_accessed": cost.get("bytes accessed")},
    }


def main(folder: Path) -> None:
    """Writes the answer to a request, or the error."""
    try:
        found = answer(folder)
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
