"""CompilerModel: what one compiler is known to do with an annotated program, one fact per field.

Every price that depends on a compiler asks a field of such a value; `known_compilers` has the values. A fact
says where it is known from, and which test compiles a program that shows it (`Evidence`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from autoshard.backends.toolchain import Toolchain

CompilerName = Literal["gpu", "tpu", "cpu", "rocm", "neuron"]

_EVIDENCE = "evidence"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a fact is known from.

    Attributes:
      source: the versions that were looked at, and what they emitted; or the compiler's own code.
      test: the test, as pytest names it, that compiles a program and sees the fact, or collectives, memory or seconds
        of a whole program that depend on it.
    """

    source: str
    test: str


def _seen(source: str, test: str) -> Mapping[str, Evidence]:
    return {_EVIDENCE: Evidence(source, f"tests/{test}")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerModel:
    """One compiler, of jaxlib `since` on: its names, and what it does with an annotated program.

    Attributes:
      name: ours.
      platform: JAX's name of the platform: what `platform_index` resolves to and programs are lowered for.
      since: the first version of jaxlib of which the facts hold, up to the next value of that name.
      device_platforms: what devices for which it compiles say of their platform (`jax.Device.platform`).
      toolchain: how it is called for devices that need not be here.
      assumed: why the facts are assumed, where no program was compiled by it; else "".
      flag_prefixes: how the flags begin that it alone has.
      compiles_for_any_count: whether it compiles a plan of any hardware, for as many devices.
      reports_peak: whether its own peak counts temporaries; else all of them count (`MemoryStats.peak_bytes`).
      counts_gaps: whether its heap is allocated whole: what lies idle between buffers is part of the peak.
      peak_meaning: what the peak of a compiled program is, in words.
      scatters_by_slices: whether it emits a reduce-scatter as an all-reduce and a slice.
      ring_free_flags: those without which it makes rings of permutes of what matmuls gather and scatter.
      scheduling_flags: sets of flags under which a schedule may be shorter, which `refine` tries.
      scheduler_flags: those that a plan's overlap needs.
      scheduler_flags_in_loops: those that it needs in a program with loops, too.
      scheduler_flags_in_loops_between_nodes: those that it needs there if devices are linked on several levels, too.
      scheduler_flags_between_nodes: those that it needs in a program without loops if devices are linked so.
      profiling_flags: those under which JAX's profiler tells all kernels apart.
      scatter_bucket_flag: the flag for the bytes of results up to which reduce-scatters are merged.
    """

    name: CompilerName
    platform: str
    since: tuple[int, ...]
    device_platforms: frozenset[str]
    toolchain: Toolchain
    assumed: str = ""
    flag_prefixes: tuple[str, ...]
    compiles_for_any_count: bool
    reports_peak: bool
    counts_gaps: bool
    peak_meaning: str
    scatters_by_slices: bool
    ring_free_flags: Mapping[str, Any] = field(hash=False)
    scheduling_flags: tuple[Mapping[str, Any], ...] = field(hash=False)
    scheduler_flags: Mapping[str, Any] = field(hash=False)
    scheduler_flags_in_loops: Mapping[str, Any] = field(hash=False)
    scheduler_flags_in_loops_between_nodes: Mapping[str, Any] = field(hash=False)
    scheduler_flags_between_nodes: Mapping[str, Any] = field(hash=False)
    profiling_flags: Mapping[str, Any] = field(hash=False)
    scatter_bucket_flag: str | None

    def __str__(self) -> str:
        return self.name

    # What is moved.

    keeps_host_values_apart: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, 0.12.0.1, libtpu 0.0.52: a scan's stack in memory space 5; jaxlib drops it",
            "compilers/test_compiler_models.py::test_a_stack_lies_in_the_host_s_memory_or_in_the_device_s",
        )
    )
    """A device does not hold values that its program puts into the host's memory; loops copy slices of them."""

    moves_collectives_past_casts: bool = field(
        metadata=_seen(
            "openxla/xla collective_quantizer.cc; libtpu 0.0.52, jaxlib 0.10.2: none moves before a cast that widens",
            "compilers/test_compiler_models.py::test_a_value_is_moved_before_or_behind_the_cast_that_widens_it",
        )
    )
    """A value is moved on the narrow side of a cast, whichever side the program moves it on."""

    collectives_along_outermost_only: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 transposes around every other collective, libtpu 0.0.52 around none, jaxlib 0.10.2 "
            "around gathers alone, which is not priced",
            "compilers/test_compiler_models.py::test_a_gather_along_an_inner_dimension_is_transposed_or_not",
        )
    )
    """Collectives take and leave arrays along their outermost dimension in memory; along others they are transposed."""

    gathers_new_state_in_place: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, ZeRO-1 of one weight, split along either dimension",
            "compilers/test_memory.py::test_a_state_gathered_after_its_update_lies_beside_the_old_one",
        )
    )
    """A new state that is gathered after its update along the major dimension is written where the old one lies."""

    copies_gathered_state: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, ZeRO-1 of perceptrons and of a transformer, in float32 and bfloat16",
            "compilers/test_memory_tpu.py::test_a_state_that_is_gathered_after_its_update_is_copied_twice",
        )
    )
    """A donated state that is gathered after its update is copied before the step, and behind it into its place."""

    regathers_far_uses: bool = field(
        metadata=_seen(
            "openxla/xla schedule_aware_collective_ops_cse.cc; libtpu 0.0.51 and 0.0.52",
            "compilers/test_sharing.py::test_libtpu_gathers_weights_again_for_the_backward_pass",
        )
    )
    """A value is gathered once for each group of uses that are near each other, not once for all."""

    merges_broadcasts: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, jax-cuda12-pjrt 0.10.2: one is left before `shardy-xla`; jaxlib 0.10.2: all",
            "compilers/test_compiler_models.py::test_one_broadcast_draws_all_that_it_meets_into_its_layout",
        )
    )
    """Equal broadcasts are one before layouts are propagated: the layout of one use draws what the other meets."""

    merges_casts: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: one is left before `shardy-xla`, also of a transposed value; jax-cuda12-pjrt 0.10.2 and "
            "jaxlib 0.10.2: all",
            "compilers/test_compiler_models.py::test_equal_casts_are_one_before_they_are_moved",
        )
    )
    """So are equal casts of one value, transposed or not: the layout of one draws the readers of the other."""

    writes_rotations: bool = field(
        metadata=_seen(
            "libtpu 0.0.52 writes the float32 cast of what is rotated, or in a layer of attention four halves in "
            "bfloat16: as many bytes; jax-cuda12-pjrt 0.10.2 reads it where it lies",
            "compilers/test_compiler_models.py::test_what_a_rotation_splits_is_written_or_read_where_it_lies",
        )
    )
    """A cast that is split (a rotation in float32) lies in memory, and so do its parts; what is not cast is read."""

    merged_product_bytes: int = field(
        metadata=_seen(
            "openxla/xla dot_merger.h; jax-cuda12-pjrt 0.10.2 and 0.12.0.1 merge two of 64 MiB, and none of 200 MB",
            "compilers/test_compiler_models.py::test_small_products_that_share_an_operand_are_one",
        )
    )
    """Products that share an operand are one if one of two reads and writes no more bytes than these; 0: never."""

    multiplies_ragged_as_dense: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1, and JAX for CPUs; libtpu 0.0.52 goes over each group's rows alone",
            "compilers/test_compiler_models.py::test_ragged_products_are_dense_ones_or_not",
        )
    )
    """A ragged product multiplies all rows with every group's matrix: see `costs.ragged_products`."""

    scatters_even_tiles: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, v5e:4x4 and v5p:4x4x2, matrices and stacks of them, bfloat16",
            "compilers/test_tiles_tpu.py::test_a_sum_is_scattered_where_it_is_constrained",
        )
    )
    """A sum is scattered along its last dimension only where an even number of tiles is left (`costs.resharding`)."""

    shares_grouped_gathers: bool = field(
        metadata=_seen(
            "openxla/xla dot_handler.cc; mlp-8k by `fsdp_megatron` on v5e:2x4, libtpu 0.0.52",
            "compilers/test_evaluation.py::test_a_weight_is_gathered_once_unless_each_matmul_gathers_it_in_its_groups",
        )
    )
    """A contraction's gather inside of groups of devices is shared with equal gathers for other uses."""

    prefetches_forward_weights: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, llama3-8b and mlp-8k by FSDP with few tokens",
            "compilers/test_memory.py::test_the_gpu_compiler_gathers_all_weights_at_once_where_tokens_are_few",
        )
    )
    """Weights of a forward pass outside of loops are gathered as early as it takes to wait for none."""

    # How sums are finished.

    reduces_loop_sums_once: bool = field(
        metadata=_seen(
            "openxla/xla while_loop_all_reduce_code_motion.cc; libtpu 0.0.52 does so, too; jaxlib 0.10.2 in each trip",
            "compilers/test_compiler_models.py::test_a_sum_over_trips_is_reduced_in_the_loop_or_behind_it",
        )
    )
    """A sum over a loop's trips is reduced over devices once, behind the loop."""

    moves_transposed_loop_sums: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, eight micro-batches on v5e",
            "compilers/test_accumulation.py::test_plain_scans_reduce_on_tpus_as_priced",
        )
    )
    """So is one that is transposed between its end and the addition."""

    merges_terms_of_sums: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and libtpu 0.0.52 reduce one sum, jaxlib 0.10.2 every term",
            "compilers/test_compiler_models.py::test_terms_of_a_sum_are_added_before_they_are_reduced_or_behind",
        )
    )
    """The reductions of the terms of an addition are one, although constraints finish each by itself."""

    scatters_added_sums: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and jaxlib 0.10.2 scatter term by term, libtpu 0.0.52 what was added",
            "compilers/test_compiler_models.py::test_terms_of_a_sum_over_two_axes_are_added_before_they_are_scattered_or_behind",
        )
    )
    """The sum of several contractions is scattered over some of its axes after it was added, not term by term."""

    renames_sums_for_additions_only: bool = field(
        metadata=_seen(
            "libtpu 0.0.52 scatters along what its tiles let it, by the order of the product's dimensions",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """A sum is finished before it is transposed or reshaped, unless it is added under its new name."""

    finishes_sums_by_last_name: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2: mlp-8k needs 0.89 of the predicted peak else",
            "compilers/test_memory.py::test_the_gpu_compiler_gathers_all_weights_at_once_where_tokens_are_few",
        )
    )
    """In programs without loops a sum is finished behind the transposes and reshapes that follow it."""

    # What hides behind what.

    waits_at_both_ends: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, schedules of 310 trips: see `costs.overlap`",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """The first contraction's weights, and the sum of what the last one makes, hide behind no contraction."""

    hides_gathers_alone: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: products of v5e carry gathers on; all else, and all on v4, v5p, v6e and v7x, is waited for",
            "compilers/test_hidden_tpu.py::test_gathers_alone_run_beside_products",
        )
    )
    """Of collectives only gathers run beside compute, if the chip's run ahead at all: see `overlap.hidden_shares`."""

    hides_behind_late_work: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, schedules of 310 trips: see `costs.overlap`",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """Collectives that contractions wait for run beside contractions that no other waits for."""

    merges_collectives_in_loops: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 merges two weights' gathers of a layer, libtpu 0.0.52 and jaxlib 0.10.2 do not",
            "compilers/test_compiler_models.py::test_what_a_trip_gathers_is_merged_or_not",
        )
    )
    """Collectives of a loop's trip are merged up to a bucket, as those outside of loops are.

    Reductions of a trip are merged by every compiler; where gathers are not, each is priced with a latency of its own.
    """

    # In which order equations run.

    puts_weight_gradients_last: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, its latency-hiding scheduler",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """In programs without loops weights' gradients are the last contractions, small ones first."""

    makes_weight_gradients_in_order: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, two scanned layers of llama3-8b; a chain of products without loops puts them off",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """A weight's gradient is made as soon as it can be; else it is in no hurry, and what it is made of lives on."""

    defers_gradients_behind_loops: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: the head's gradient is moved behind the layers' backward pass",
            "compilers/test_memory_tpu.py::"
            "test_where_nothing_runs_beside_compute_a_whole_gradient_is_made_behind_the_loop",
        )
    )
    """Where nothing runs beside compute, a weight's gradient is moved behind all loops that follow it."""

    schedules_for_memory: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, compiled for v5p",
            "compilers/test_memory_tpu.py::test_a_whole_gradient_is_made_before_as_much_is_gathered_again",
        )
    )
    """Where nothing runs beside compute, gradients that are whole on every device are made as late as they can be."""

    updates_state_early: bool = field(
        metadata=_seen(
            "libtpu 0.0.52; 0.95 of the predicted peak of four weights, 0.86 without",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """A state is updated as soon as its gradient is there."""

    computes_loss_last: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, llama3-8b on v5e:4x4; four perceptrons without loops need 0.73 of the peak by it",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """Equations that lead to scalars alone (the loss) are computed last, unless they communicate.

    Not ahead of loops, where something runs beside compute: see `problem.decision_builders.late_gradients`.
    """

    # What lies in memory.

    contractions_make_their_operands: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, `benchmarks.verification`",
            "compilers/test_compiler_models.py::test_what_contractions_make_themselves",
        )
    )
    """A contraction computes its operands itself, element by element, from values that lie in memory."""

    contractions_finish_their_results: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: kernels of transformers' steps, and the cycles that it estimates of them",
            "compilers/test_product_kernels.py::test_what_follows_a_product_takes_no_time_of_its_own",
        )
    )
    """A contraction's kernel goes on with its product, element by element, and reduces it: see `product_kernels`."""

    loops_repeat_constants: bool = field(
        metadata=_seen(
            "libtpu 0.0.52; one number is repeated in the loop by every compiler",
            "compilers/test_compiler_models.py::test_what_a_loop_repeats_itself",
        )
    )
    """A loop takes a constant, or what is computed of constants, as small as it is, and repeats it itself."""

    gathers_make_their_operands: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, jaxlib 0.10.2 and libtpu 0.0.52: the labels' scores of logits that are cast",
            "compilers/test_compiler_models.py::test_what_gathers_make_themselves",
        )
    )
    """A gather computes the elements that it takes itself, from values that lie in memory."""

    gathers_whole_lanes: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, rows of 8 to 200 elements, and slices of two dimensions, compiled for v5e and v5p",
            "compilers/test_memory_tpu.py::test_narrow_rows_are_gathered_in_whole_lanes",
        )
    )
    """Rows that are gathered, or added by a scatter, lie in whole lanes, until they are copied: see `costs.lanes`."""

    multiplies_whole_lanes: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, attention with its gradient over 49 to 257 positions, compiled for v5e and v5p",
            "compilers/test_lanes.py::test_odd_lengths_lie_in_whole_lanes",
        )
    )
    """Operands and results of products with a batch lie in whole lanes, also while they are kept: see `costs.lanes`."""

    stores_softmax_numerators: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, attention with its gradient, compiled for v5e and v5p, of many orders and sizes",
            "compilers/test_memory_tpu.py::test_scores_are_kept_as_their_product_leaves_them_or_exponentiated",
        )
    )
    """The numerators of a softmax lie in memory, unless its product does: see `costs.softmaxes.Numerator`."""

    casts_stacked_inputs_ahead: bool = field(
        metadata=_seen("libtpu 0.0.52", "compilers/test_compiler_models.py::test_stacked_weights_are_cast")
    )
    """Stacked weights that are cast slice by slice in loops are cast whole, before these."""

    multiplies_in_bfloat16: bool = field(
        metadata=_seen("libtpu 0.0.52", "compilers/test_compiler_models.py::test_operands_of_products_are_cast")
    )
    """Operands of float32 products at the default precision are cast to bfloat16, moved and stored so."""

    compares_positions_for_scatters: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, the labels' scores of gpt2-small",
            "compilers/test_compiler_models.py::test_one_of_each_row_is_taken_back",
        )
    )
    """A scatter that adds one element to each row is fused with what reads it: it compares positions."""

    transposes_what_meets: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1, attention of grouped heads by einsum, and its gradient",
            "compilers/test_compiler_models.py::test_products_that_meet_in_different_orders_are_transposed",
        )
    )
    """Products lie in the order of their dimensions; one that meets an earlier one of another order is transposed."""

    transposes_operands: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1, attention to caches by einsum, products of given operands",
            "compilers/test_operand_orders.py::test_what_lies_in_another_order_is_transposed",
        )
    )
    """A matmul reads its batch, what it contracts and the rest of an operand as one dimension each, with any stride."""

    reads_rows_in_parts: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.12.0.1 does, 0.10.2 only as rows of a matmul without a batch",
            "compilers/test_operand_orders.py::test_what_lies_in_another_order_is_transposed",
        )
    )
    """What is left of a matmul's operand may lie in two parts, of either operand, and beside a batch.

    A compiler that does so takes an operand from a loop as it lies, too, where the batch has several dimensions.
    """

    matmuls_make_simple_operands: bool = field(
        metadata=_seen(
            "openxla/xla gemm_fusion.cc; jax-cuda12-pjrt 0.10.2 and 0.12.0.1",
            "compilers/test_matmul_fusions.py::test_what_a_matmul_computes_of_its_operand_is_not_stored",
        )
    )
    """A matmul computes an operand of one array, element by element, itself: see `costs.matmul_fusions`."""

    matmuls_cast_their_products: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1, products with a preferred type that are cast",
            "compilers/test_matmul_fusions.py::test_a_product_that_is_narrowed_is_stored_narrow",
        )
    )
    """A matmul writes its product in the narrower type that it is cast to, if nothing else takes it."""

    copies_cut_operands: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1, along any dimension, of weights and of stacks in front of loops",
            "compilers/test_cut_operands.py::test_a_part_of_a_whole_weight_is_copied_before_a_matmul",
        )
    )
    """A matmul, or a loop, takes a part of an array that was given as a copy of it: see `costs.cut_operands`."""

    adds_up_single_rows: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1: products of a vector, and attention of single queries",
            "compilers/test_cut_operands.py::test_a_product_of_a_single_row_is_a_fusion_that_copies_nothing",
        )
    )
    """A product whose operand has a single row or column, whole, is a fusion that reads its operands where they lie."""

    computes_once: frozenset[str] = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2: it repeats exponentials, logistic functions, divisions, roots, logarithms, erf; "
            "libtpu 0.0.52 computes erfc once (compilers/test_heads_tpu.py); sines were not settled",
            "compilers/test_memory.py::test_the_gpu_compiler_repeats_what_it_is_said_to",
        )
    )
    """Primitives that are computed once for all fusions that read the result, where others are repeated in each.

    By a compiler whose contractions make their operands: for these, too. It repeats them in float32 on chips that do
    not store gradients of scores.
    """

    draws_where_taken: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and libtpu 0.0.52: dropout under `vmap`; jaxlib 0.10.2 writes the bits",
            "compilers/test_compiler_models.py::test_what_several_keys_draw_is_not_stored",
        )
    )
    """Random bits of several keys are drawn in the kernels that take them, and lie nowhere."""

    writes_what_is_placed: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: pads, concatenations and turned orders; jax-cuda12-pjrt and jaxlib 0.10.2 compute what "
            "they place",
            "compilers/test_compiler_models.py::test_what_is_placed_is_written",
        )
    )
    """What is padded, put together or turned round lies in memory for it."""

    spaces_in_kernels_of_their_own: bool = field(
        metadata=_seen(
            "libtpu 0.0.52: pads between elements, and slices with strides along the two dimensions that it tiles",
            "compilers/test_compiler_models.py::test_what_is_spaced_is_written",
        )
    )
    """What puts elements apart, or takes every k-th of a row or of rows, writes its result."""

    multiplies_what_is_taken: bool = field(
        metadata=_seen(
            "libtpu 0.0.52; jax-cuda12-pjrt and jaxlib 0.10.2 multiply all, and cut",
            "compilers/test_compiler_models.py::test_of_a_product_the_part_that_is_taken_is_computed",
        )
    )
    """Of a product of which a slice is taken, and nothing else, no more is computed: see `costs.taken_parts`."""

    joins_in_place: bool = field(
        metadata=_seen(
            "libtpu 0.0.52, jaxlib 0.10.2 and jax-cuda12-pjrt 0.12.0.1: a step that a condition may leave out; "
            "jax-cuda12-pjrt 0.10.2 copies the state",
            "compilers/test_memory.py::test_a_branch_writes_where_its_result_lies",
        )
    )
    """What a branch makes of donated state is written in its place."""

    widens_apart: frozenset[str] = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2 and 0.12.0.1: the exact gelu of products with several dimensions of rows",
            "compilers/test_memory.py::test_what_a_gelu_in_bfloat16_takes_is_stored",
        )
    )
    """Primitives that are computed in float32, and whose narrower argument may lie in memory for that."""

    overwrites_last_read: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """A fusion writes where what it reads for the last time lies, if that has as many elements of its type."""

    zeroes_stacks_early: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2",
            "compilers/test_compiler_facts.py::test_what_is_predicted_with_a_fact_is_nearer_than_without",
        )
    )
    """A loop's stacks are zeroed, and have memory, from the end of the loop before it on."""

    cuts_contractions: bool = field(
        metadata=_seen(
            "openxla/xla splitk_rewriter.cc; jax-cuda12-pjrt 0.10.2 and 0.12.0.1",
            "compilers/test_compiler_models.py::test_a_long_contraction_with_a_small_result_is_cut_into_sums",
        )
    )
    """A contraction whose result has few tiles is cut into sums, which lie in memory until a kernel adds them."""

    reduces_in_kernels_of_their_own: bool = field(
        metadata=_seen(
            "jax-cuda12-pjrt 0.10.2, softmax and norms of llama3",
            "compilers/test_compiler_models.py::test_a_reduction_that_two_expressions_take_is_a_kernel_of_its_own",
        )
    )
    """A reduction that several expressions take, or of long rows, reads again what its operand is made from."""


def evidence() -> dict[str, Evidence]:
    """Fact → where it is known from."""
    found: Any = {f.name: f.metadata.get(_EVIDENCE) for f in fields(CompilerModel)}
    return {name: seen for name, seen in found.items() if seen is not None}
