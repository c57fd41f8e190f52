"""The compilers that autoshard knows: XLA:GPU, XLA:TPU and XLA:CPU, as values; see `CompilerModel` for each fact."""

from autoshard import _jax
from autoshard.backends.model import CompilerModel

XLA_GPU = CompilerModel(
    name="gpu",
    platform="cuda",
    since=(0, 10),
    moves_collectives_past_casts=True,
    collectives_along_outermost_only=True,
    gathers_new_state_in_place=True,
    regathers_far_uses=False,
    shares_grouped_gathers=False,
    prefetches_forward_weights=True,
    reduces_loop_sums_once=True,
    merges_terms_of_sums=True,
    scatters_added_sums=False,
    renames_sums_for_additions_only=False,
    finishes_sums_by_last_name=True,
    waits_at_both_ends=True,
    hides_behind_late_work=True,
    merges_collectives_in_loops=True,
    puts_weight_gradients_last=True,
    makes_weight_gradients_in_order=False,
    defers_gradients_behind_loops=False,
    schedules_for_memory=False,
    updates_state_early=False,
    computes_loss_last=False,
    contractions_make_their_operands=False,
    stores_softmax_numerators=False,
    casts_stacked_inputs_ahead=False,
    compares_positions_for_scatters=False,
    computes_once=frozenset({"atan2", "cos", "erf_inv", "erfc", "log1p", "pow", "sin", "tanh"}),
    overwrites_last_read=True,
)

XLA_TPU = CompilerModel(
    name="tpu",
    platform="tpu",
    since=(0, 10),
    moves_collectives_past_casts=False,
    collectives_along_outermost_only=False,
    gathers_new_state_in_place=False,
    regathers_far_uses=True,
    shares_grouped_gathers=True,
    prefetches_forward_weights=False,
    reduces_loop_sums_once=True,
    merges_terms_of_sums=True,
    scatters_added_sums=True,
    renames_sums_for_additions_only=True,
    finishes_sums_by_last_name=False,
    waits_at_both_ends=False,
    hides_behind_late_work=False,
    merges_collectives_in_loops=False,
    puts_weight_gradients_last=False,
    makes_weight_gradients_in_order=True,
    defers_gradients_behind_loops=True,
    schedules_for_memory=True,
    updates_state_early=True,
    computes_loss_last=True,
    contractions_make_their_operands=True,
    stores_softmax_numerators=True,
    casts_stacked_inputs_ahead=True,
    compares_positions_for_scatters=True,
    computes_once=frozenset(),
    overwrites_last_read=False,
)

XLA_CPU = CompilerModel(
    name="cpu",
    platform="cpu",
    since=(0, 10),
    moves_collectives_past_casts=False,
    collectives_along_outermost_only=False,
    gathers_new_state_in_place=False,
    regathers_far_uses=False,
    shares_grouped_gathers=False,
    prefetches_forward_weights=False,
    reduces_loop_sums_once=False,
    merges_terms_of_sums=False,
    scatters_added_sums=False,
    renames_sums_for_additions_only=False,
    finishes_sums_by_last_name=False,
    waits_at_both_ends=False,
    hides_behind_late_work=False,
    merges_collectives_in_loops=False,
    puts_weight_gradients_last=False,
    makes_weight_gradients_in_order=False,
    defers_gradients_behind_loops=False,
    schedules_for_memory=False,
    updates_state_early=False,
    computes_loss_last=False,
    contractions_make_their_operands=False,
    stores_softmax_numerators=False,
    casts_stacked_inputs_ahead=False,
    compares_positions_for_scatters=False,
    computes_once=frozenset(),
    overwrites_last_read=False,
)

KNOWN: tuple[CompilerModel, ...] = (XLA_GPU, XLA_TPU, XLA_CPU)


def known(platform: str, version: tuple[int, ...] = _jax.JAX_VERSION) -> CompilerModel:
    """The compiler of a platform, as JAX names it, of a version of jaxlib: by default the one that runs.

    Raises:
      KeyError: no value is of that platform; the hardware files name platforms.
    """
    return max((m for m in KNOWN if m.platform == platform and m.since <= version), key=lambda m: m.since)
