"""The compilers that autoshard knows, as values; see `CompilerModel` for each fact.

XLA:GPU for NVIDIA, XLA:TPU and XLA:CPU were compiled with. For AMD's GPUs and for Trainium there is none without the
devices: their plans are priced by assumed facts, and nothing of them is verified here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard import _jax
from autoshard.backends.model import CompilerModel, CompilerName
from autoshard.backends.toolchain import CPU_TOOLCHAIN, GPU_TOOLCHAIN, NO_TOOLCHAIN, TPU_TOOLCHAIN
from autoshard.errors import MeshError

# Windowed einsum off: the collectives stay what they are, so that their bytes can be compared exactly.
# With it (XLA:TPU's default) the program is faster, and `hlo.collectives` folds its rings.
TPU_PLAIN_OPTIONS: Mapping[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "100000"}

# Flags that shorten some schedules and lengthen others (8 H100, docs/comparing.md, `scheduled` in its results).
# XLA:GPU's scheduler has one collective under way at once unless told otherwise: with 2 llama3-8b's medium batch takes
# 24.6 ms in place of 26.0, with 4 25.2. It gathers nothing for the next trip of a loop unless told to: mixtral's
# small batch gains (21.7 in place of 24.1), gemma-7b's medium one loses (33.9 in place of 30.6).
# XLA:TPU makes rings of what contractions gather: with them gpt2-small takes 69.5 ms on v5e:4x4 in place of 58.0,
# llama3-8b 481 ms on v5p:4x4x2 in place of 570 (docs/verification.md).
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"

XLA_GPU = CompilerModel(
    name="gpu",
    platform="cuda",
    since=(0, 11),
    device_platforms=frozenset({"cuda", "gpu"}),
    toolchain=GPU_TOOLCHAIN,
    flag_prefixes=("xla_gpu_",),
    compiles_for_any_count=False,
    reports_peak=True,
    counts_gaps=False,
    peak_meaning="XLA's own (peak_memory_in_bytes)",
    scatters_by_slices=False,
    ring_free_flags={},
    scheduling_flags=({_AT_ONCE: 2}, {_AT_ONCE: 4}, {_AT_ONCE: 4, "xla_gpu_enable_pipelined_all_gather": True}),
    scheduler_flags={"xla_gpu_enable_latency_hiding_scheduler": True},
    scheduler_flags_in_loops={},
    scheduler_flags_in_loops_between_nodes={_AT_ONCE: 2},
    scheduler_flags_between_nodes={_AT_ONCE: 2},
    profiling_flags={"xla_gpu_enable_command_buffer": ""},  # of a buffer (a CUDA graph) it knows the name alone
    scatter_bucket_flag="xla_gpu_reduce_scatter_combine_threshold_bytes",
    keeps_host_values_apart=True,
    moves_collectives_past_casts=True,
    collectives_along_outermost_only=True,
    gathers_new_state_in_place=True,
    copies_gathered_state=False,
    regathers_far_uses=False,
    merges_broadcasts=True,
    merges_casts=False,
    writes_rotations=False,
    merged_product_bytes=64 << 20,
    multiplies_ragged_as_dense=True,
    scatters_even_tiles=False,
    shares_grouped_gathers=False,
    prefetches_forward_weights=True,
    reduces_loop_sums_once=True,
    moves_transposed_loop_sums=False,
    merges_terms_of_sums=True,
    scatters_added_sums=False,
    renames_sums_for_additions_only=False,
    finishes_sums_by_last_name=True,
    waits_at_both_ends=True,
    hides_gathers_alone=False,
    hides_behind_late_work=True,
    merges_collectives_in_loops=True,
    puts_weight_gradients_last=True,
    makes_weight_gradients_in_order=False,
    defers_gradients_behind_loops=False,
    schedules_for_memory=False,
    updates_state_early=False,
    computes_loss_last=False,
    contractions_make_their_operands=False,
    contractions_finish_their_results=False,
    loops_repeat_constants=False,
    gathers_make_their_operands=True,
    gathers_whole_lanes=False,
    multiplies_whole_lanes=False,
    stores_softmax_numerators=False,
    casts_stacked_inputs_ahead=False,
    multiplies_in_bfloat16=False,
    compares_positions_for_scatters=False,
    transposes_what_meets=True,
    transposes_operands=True,
    reads_rows_in_parts=True,
    matmuls_make_simple_operands=True,
    matmuls_cast_their_products=True,
    copies_cut_operands=True,
    adds_up_single_rows=True,
    computes_once=frozenset({"atan2", "cos", "erf_inv", "erfc", "log1p", "pow", "sin", "tanh"}),
    draws_where_taken=True,
    writes_what_is_placed=False,
    spaces_in_kernels_of_their_own=False,
    multiplies_what_is_taken=False,
    joins_in_place=True,
    widens_apart=frozenset({"erfc"}),
    overwrites_last_read=True,
    zeroes_stacks_early=False,
    cuts_contractions=True,
    reduces_in_kernels_of_their_own=True,
)

# Its analytical latency estimator works for every program. Since jaxlib 0.11 it may ask, in loops that communicate, for
# the dimensions of a tuple, and ends the process (shape.h, "Check failed: buffer != nullptr"; scanned layers of
# llama3-8b, jax-cuda12-pjrt 0.11.0, 0.12.0 and 0.12.0.1). Without it, gathers between nodes stand one after the other
# at the start of a trip: 0.12.0.1 takes 303 ms for scanned llama3-8b on 32 H100, 280 with two under way at once
# (0.10.2: 271). On one node, where two share the same links, that lengthens schedules by a percent or three.
# Stacks of gradients lie beside a head's scores in 0.10.2, and not in 0.12.0.1 (scanned gemma-7b and llama3-8b). State
# that a condition may leave as it was is copied in 0.10.2.
XLA_GPU_0_10 = replace(
    XLA_GPU,
    since=(0, 10),
    scheduler_flags_in_loops={"xla_gpu_enable_analytical_latency_estimator": True},
    scheduler_flags_in_loops_between_nodes={},
    zeroes_stacks_early=True,
    reads_rows_in_parts=False,
    joins_in_place=False,
)

XLA_TPU = CompilerModel(
    name="tpu",
    platform="tpu",
    since=(0, 10),
    device_platforms=frozenset({"tpu"}),
    toolchain=TPU_TOOLCHAIN,
    flag_prefixes=("xla_tpu_", "xla_jf_"),
    compiles_for_any_count=False,
    reports_peak=True,
    counts_gaps=True,
    peak_meaning="arguments + outputs − aliases + XLA's heap, which is allocated whole",
    scatters_by_slices=False,
    ring_free_flags=TPU_PLAIN_OPTIONS,
    scheduling_flags=(TPU_PLAIN_OPTIONS,),
    scheduler_flags={},
    scheduler_flags_in_loops={},
    scheduler_flags_in_loops_between_nodes={},
    scheduler_flags_between_nodes={},
    profiling_flags={},
    scatter_bucket_flag=None,
    keeps_host_values_apart=True,
    moves_collectives_past_casts=False,
    collectives_along_outermost_only=False,
    gathers_new_state_in_place=False,
    copies_gathered_state=True,
    regathers_far_uses=True,
    merges_broadcasts=True,
    merges_casts=True,
    writes_rotations=True,
    merged_product_bytes=0,
    multiplies_ragged_as_dense=False,
    scatters_even_tiles=True,
    shares_grouped_gathers=True,
    prefetches_forward_weights=False,
    reduces_loop_sums_once=True,
    moves_transposed_loop_sums=True,
    merges_terms_of_sums=True,
    scatters_added_sums=True,
    renames_sums_for_additions_only=True,
    finishes_sums_by_last_name=False,
    waits_at_both_ends=False,
    hides_gathers_alone=True,
    hides_behind_late_work=False,
    merges_collectives_in_loops=False,
    puts_weight_gradients_last=False,
    makes_weight_gradients_in_order=True,
    defers_gradients_behind_loops=True,
    schedules_for_memory=True,
    updates_state_early=True,
    computes_loss_last=True,
    contractions_make_their_operands=True,
    contractions_finish_their_results=True,
    loops_repeat_constants=True,
    gathers_make_their_operands=False,
    gathers_whole_lanes=True,
    multiplies_whole_lanes=True,
    stores_softmax_numerators=True,
    casts_stacked_inputs_ahead=True,
    multiplies_in_bfloat16=True,
    compares_positions_for_scatters=True,
    transposes_what_meets=False,
    transposes_operands=False,
    reads_rows_in_parts=False,
    matmuls_make_simple_operands=False,
    matmuls_cast_their_products=False,
    copies_cut_operands=False,
    adds_up_single_rows=False,
    computes_once=frozenset({"erfc"}),
    draws_where_taken=True,
    writes_what_is_placed=True,
    spaces_in_kernels_of_their_own=True,
    multiplies_what_is_taken=True,
    joins_in_place=True,
    widens_apart=frozenset(),
    overwrites_last_read=False,
    zeroes_stacks_early=False,
    cuts_contractions=False,
    reduces_in_kernels_of_their_own=False,
)

XLA_CPU = CompilerModel(
    name="cpu",
    platform="cpu",
    since=(0, 10),
    device_platforms=frozenset({"cpu"}),
    toolchain=CPU_TOOLCHAIN,
    flag_prefixes=("xla_cpu_",),
    compiles_for_any_count=True,
    reports_peak=False,
    counts_gaps=False,
    peak_meaning="arguments + outputs − aliases + temporaries, a bound",
    scatters_by_slices=True,
    ring_free_flags={},
    scheduling_flags=(),
    scheduler_flags={},
    scheduler_flags_in_loops={},
    scheduler_flags_in_loops_between_nodes={},
    scheduler_flags_between_nodes={},
    profiling_flags={},
    scatter_bucket_flag=None,
    keeps_host_values_apart=False,
    moves_collectives_past_casts=False,
    collectives_along_outermost_only=False,
    gathers_new_state_in_place=False,
    copies_gathered_state=False,
    regathers_far_uses=False,
    merges_broadcasts=False,
    merges_casts=False,
    writes_rotations=False,
    merged_product_bytes=0,
    multiplies_ragged_as_dense=True,
    scatters_even_tiles=False,
    shares_grouped_gathers=False,
    prefetches_forward_weights=False,
    reduces_loop_sums_once=False,
    moves_transposed_loop_sums=False,
    merges_terms_of_sums=False,
    scatters_added_sums=False,
    renames_sums_for_additions_only=False,
    finishes_sums_by_last_name=False,
    waits_at_both_ends=False,
    hides_gathers_alone=False,
    hides_behind_late_work=False,
    merges_collectives_in_loops=False,
    puts_weight_gradients_last=False,
    makes_weight_gradients_in_order=False,
    defers_gradients_behind_loops=False,
    schedules_for_memory=False,
    updates_state_early=False,
    computes_loss_last=False,
    contractions_make_their_operands=False,
    contractions_finish_their_results=False,
    loops_repeat_constants=False,
    gathers_make_their_operands=True,
    gathers_whole_lanes=False,
    multiplies_whole_lanes=False,
    stores_softmax_numerators=False,
    casts_stacked_inputs_ahead=False,
    multiplies_in_bfloat16=False,
    compares_positions_for_scatters=False,
    transposes_what_meets=False,
    transposes_operands=False,
    reads_rows_in_parts=False,
    matmuls_make_simple_operands=False,
    matmuls_cast_their_products=False,
    copies_cut_operands=False,
    adds_up_single_rows=False,
    computes_once=frozenset(),
    draws_where_taken=False,
    writes_what_is_placed=False,
    spaces_in_kernels_of_their_own=False,
    multiplies_what_is_taken=False,
    joins_in_place=True,
    widens_apart=frozenset(),
    overwrites_last_read=False,
    zeroes_stacks_early=False,
    cuts_contractions=False,
    reduces_in_kernels_of_their_own=False,
)

# The same passes as for NVIDIA's GPUs (openxla/xla, amdgpu_compiler.cc derives from GpuCompiler).
XLA_ROCM = replace(
    XLA_GPU,
    name="rocm",
    platform="rocm",
    since=(0, 10),
    device_platforms=frozenset({"rocm"}),
    toolchain=NO_TOOLCHAIN,
    assumed="as XLA:GPU for NVIDIA, of which it has the passes; no program was compiled for AMD's GPUs",
)

# XLA's partitioner, and a scheduler of its own of which nothing is known here: no fact holds, as of XLA:CPU.
NEURON = replace(
    XLA_CPU,
    name="neuron",
    platform="neuron",
    device_platforms=frozenset({"neuron"}),
    toolchain=NO_TOOLCHAIN,
    assumed="that it does nothing beyond XLA's partitioner; no program was compiled by neuronx-cc",
    flag_prefixes=(),
    compiles_for_any_count=False,
    reports_peak=True,
    peak_meaning="unknown",
    scatters_by_slices=False,
)

KNOWN: tuple[CompilerModel, ...] = (XLA_GPU_0_10, XLA_GPU, XLA_TPU, XLA_CPU, XLA_ROCM, NEURON)
# Those that are called here, without their devices.
CALLED: tuple[CompilerName, ...] = tuple(dict.fromkeys(m.name for m in KNOWN if m.toolchain.distributions))


def known(platform: str, version: tuple[int, ...] = _jax.JAX_VERSION) -> CompilerModel:
    """The compiler of a platform, as JAX names it, of a version of jaxlib: by default the one that runs.

    Raises:
      MeshError: no compiler of that platform is known.
    """
    found = [model for model in KNOWN if model.platform == platform and model.since <= version]
    if not found:
        platforms = ", ".join(sorted({model.platform for model in KNOWN}))
        raise MeshError(f"no compiler is known for the platform {platform!r}; the hardware file may say {platforms}")
    return max(found, key=lambda model: model.since)


def named(name: str) -> CompilerModel:
    """The compiler of that name, of the jaxlib that runs.

    Raises:
      MeshError: there is none.
    """
    found = next((model for model in KNOWN if model.name == name), None)
    if found is None:
        raise MeshError(f"no compiler {name!r}; there are {', '.join(sorted({model.name for model in KNOWN}))}")
    return known(found.platform)


def flag_prefixes(device_platform: str) -> tuple[str, ...]:
    """How the flags begin of the compiler of devices that say so of their platform; none where it is not known."""
    return next((model.flag_prefixes for model in KNOWN if device_platform in model.device_platforms), ())


def of_devices(platform: str) -> CompilerModel:
    """Who compiles for devices that say so of their platform.

    Raises:
      MeshError: no compiler of theirs is known.
    """
    return known(next((model.platform for model in KNOWN if platform in model.device_platforms), platform))
