"""Reshapes of any two shapes: a factor of both sides is the same coordinate of every element."""

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.rules import FactorKind, RuleBuilder
from autoshard.rules.rule import Dim
from autoshard.rules.shape import refine

PRIMES = st.lists(st.sampled_from([2, 2, 3, 5]), max_size=7)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equal element count, with dimensions of size 1."""
    primes = draw(PRIMES)

    def shape() -> tuple[int, ...]:
        order = draw(st.permutations(primes))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
        return tuple(prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True))

    return shape(), shape()


def coordinates(build: RuleBuilder, dims: list[Dim], shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Each factor's coordinate of every element, in row-major order."""
    found: dict[int, np.ndarray] = {}
    for dim, position in zip(dims, np.unravel_index(np.arange(prod(shape)), shape), strict=True):
        rest = position
        for f in reversed(dim):
            rest, found[f] = np.divmod(rest, build.factors[f].size)
    return found


@settings(deadline=None)
@given(shapes())
def test_common_factors_are_common_coordinates(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    build = RuleBuilder()
    ins, outs = refine(build, *pair)
    for dims, shape in zip((ins, outs), pair, strict=True):
        assert tuple(prod(build.factors[f].size for f in dim) for dim in dims) == shape
    here, there = (coordinates(build, dims, shape) for dims, shape in zip((ins, outs), pair, strict=True))
    for f, factor in enumerate(build.factors):
        if factor.kind is FactorKind.PASS:
            np.testing.assert_array_equal(here[f], there[f])
        else:
            assert (f in here) != (f in there)  # whole, and of one side alone


@settings(deadline=None)
@given(shapes())
def test_the_way_back_has_the_same_factors(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    forth, back = RuleBuilder(), RuleBuilder()
    refine(forth, *pair)
    refine(back, *pair[::-1])
    passing = [[f.size for f in build.factors if f.kind is FactorKind.PASS] for build in (forth, back)]
    assert passing[0] == passing[1]


@settings(deadline=None)
@given(shapes())
def test_the_same_shape_passes_whole_dimensions(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    build = RuleBuilder()
    ins, outs = refine(build, pair[0], pair[0])
    assert ins == outs
    assert [factor.size for factor in build.factors] == [size for size in pair[0] if size > 1]
