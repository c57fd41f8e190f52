"""Closed forms against what they abbreviate: searches, simulations, sums."""

from math import inf, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_models import NAMED
from cost_models.closed_forms import formulas
from cost_models.closed_forms.transformer import Transformer


def simulate_pipeline(stages: int, microbatches: int) -> float:
    """Idle share of GPipe's forward pass: stage s starts microbatch m when s-1 and its own last one are done."""
    done = np.zeros((stages, microbatches))
    for s in range(stages):
        for m in range(microbatches):
            before = max(done[s - 1, m] if s else 0.0, done[s, m - 1] if m else 0.0)
            done[s, m] = before + 1
    return 1 - microbatches / done[-1, -1]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 24))
def test_the_bubble_is_what_a_simulated_pipeline_idles(stages: int, microbatches: int):
    assert formulas.pipeline_bubble(stages, microbatches) == pytest.approx(simulate_pipeline(stages, microbatches))


def test_the_rough_bubble_is_close_for_many_stages_and_interleaving_shrinks_it():
    assert formulas.pipeline_bubble_rough(64, 256) == pytest.approx(formulas.pipeline_bubble(64, 256), rel=0.02)
    assert formulas.pipeline_bubble(8, 16, repeats=4) == pytest.approx(formulas.pipeline_bubble(8, 64))


@settings(deadline=None)
@given(
    tokens=st.floats(1, 1e5),
    alpha_s=st.floats(1e-7, 1e-3),
    parameters=st.floats(1e5, 1e9),
    bytes_per_s=st.floats(1e9, 1e12),
)
def test_the_largest_hidden_group_is_the_last_that_satisfies_the_inequality(
    tokens: float, alpha_s: float, parameters: float, bytes_per_s: float
):
    flops_per_s = 1e14

    def hides(p: float) -> bool:
        return alpha_s * log2(p) <= (tokens / flops_per_s - 1 / bytes_per_s) * parameters

    largest = formulas.largest_hidden_group(tokens, flops_per_s, bytes_per_s, alpha_s, parameters)
    if largest == inf:
        assert hides(2.0**900)
    elif largest > 1:
        assert hides(largest * 0.999)
        assert not hides(largest * 1.001)
    else:
        assert not hides(1.001)


def test_without_latency_any_group_hides_or_none():
    assert formulas.largest_hidden_group(1e5, 1e14, 1e12, 0.0, 1e9) == inf
    assert formulas.largest_hidden_group(1.0, 1e14, 1e9, 0.0, 1e9) == 1


@settings(deadline=None)
@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 2.0]))
def test_the_exact_critical_batch_is_the_first_compute_bound_one(d: int, f: int, weight: float, activation: float):
    flops_per_s, bytes_per_s = 1.97e14, 8.2e11

    def compute_bound(b: float) -> bool:
        traffic = activation * b * (d + f) + weight * d * f
        return 2 * b * d * f / flops_per_s >= traffic / bytes_per_s * (1 - 1e-12)

    found = formulas.exact_critical_batch(
        d, f, flops_per_s, bytes_per_s, weight_itemsize=weight, activation_itemsize=activation
    )
    if found == inf:
        assert not compute_bound(1e12)
    else:
        assert compute_bound(found)
        assert found <= 1 or not compute_bound(found - 1)


@settings(deadline=None)
@given(st.floats(1e3, 1e7), st.integers(8, 8192), st.integers(1024, 65536))
def test_x_opt_balances_and_minimises_the_traffic(tokens: float, devices: int, f: int):
    """training.md:430-458: FSDP moves 4DF/(Y·M_X), tensor parallelism 4BD/(X·M_Y); their maximum is least at X_opt."""

    def traffic(x: float) -> float:
        return max(4 * f * x / devices / 2, 4 * tokens / x)

    best = formulas.best_fsdp(tokens, devices, f, fsdp_axes=2)
    assert traffic(best) <= min(traffic(best * step) for step in (0.9, 0.99, 1.01, 1.1)) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(256, 16384), st.integers(256, 65536), st.integers(4, 4096))
def test_the_best_2d_split_is_a_minimum(d: int, f: int, devices: int):
    best = formulas.weight_stationary_2d_best(d, f, devices)
    least = formulas.weight_stationary_2d_s(1, d, f, best, devices, 1.0)
    assert all(
        formulas.weight_stationary_2d_s(1, d, f, best * s, devices, 1.0) >= least * (1 - 1e-12) for s in (0.9, 1.1)
    )


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8.03e9, 8.03e9),
        ("llama3-70b", 70.6e9, 70.6e9),
        ("llama3-405b", 405.9e9, 405.9e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 141e9, 39e9),
        ("deepseek-v3", 671e9, 37e9),
        ("qwen3-235b", 235e9, 22e9),
        ("qwen3-30b", 30.5e9, 3.3e9),
        ("gpt-oss-120b", 116.8e9, 5.7e9),
        ("gpt-oss-20b", 20.9e9, 4.2e9),
        ("kimi-k2", 1.03e12, 32.7e9),
        ("llama4-maverick", 400e9, 17e9),
        ("gemma2-9b", 9.24e9, 9.24e9),
        ("palm-540b", 540e9, 540e9),
        ("gpt-neox-20b", 20.6e9, 20.6e9),
    ],
)
def test_parameters_of_public_models(name: str, total: float, active: float):
    """As their papers and model cards count them; norms, biases and vision are left out here."""
    assert NAMED[name].parameters == pytest.approx(total, rel=0.005)
    assert NAMED[name].active_parameters == pytest.approx(active, rel=0.015)


def test_windows_cut_the_scores():
    full = Transformer(layers=6, d_model=512, d_ff=2048, heads=8, kv_heads=8, head_dim=64, vocab=1000)
    local = Transformer(
        layers=6, d_model=512, d_ff=2048, heads=8, kv_heads=8, head_dim=64, vocab=1000, window=256, global_layers=1
    )
    per_layer = full.score_flops(8192) / 6
    assert local.score_flops(8192) == pytest.approx(per_layer * (1 + 5 * 256 / 4096))
    assert local.score_flops(128) == full.score_flops(128)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_a_round_of_speculation_gives_what_drawn_rounds_do(acceptance: float):
    rng, drafted = np.random.default_rng(0), 4
    kept = rng.random((20_000, drafted)) < acceptance
    drawn = 1 + np.cumprod(kept, axis=1).sum(axis=1)  # drafted tokens up to the first that is refused, and one more
    assert formulas.tokens_per_round(acceptance, drafted) == pytest.approx(drawn.mean(), rel=0.02)
