"""The closed form of a step and the jaxpr say the same: FLOPs, bytes of each collective, memory."""

import pytest

from benchmarks.closed_form_agreement import CASES, Case, Compared, compare

QUICK = ("llama3-8b dp", "llama3-8b fsdp", "llama3-8b dp_megatron", "gpt2-xl fsdp")
WITHIN = 0.05


def case(one: Case) -> object:
    marks = [] if f"{one.model} {one.recipe}" in QUICK else [pytest.mark.slow]
    if one.differs:
        marks.append(pytest.mark.xfail(strict=True, reason=one.differs))
    return pytest.param(one, id=one.name, marks=marks)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Compared:
    return compare(request.param)


@pytest.mark.parametrize("found", list(map(case, CASES)), indirect=True)
def test_flops_memory_and_bytes_of_every_collective_agree(found: Compared):
    closed, traced = found.flops
    assert closed == pytest.approx(traced, rel=WITHIN)
    closed, traced = found.peak_bytes
    assert closed == pytest.approx(traced, rel=WITHIN)
    assert found.bytes_error <= WITHIN
    whole = sum(found.evaluated_bytes.values())
    for key, nbytes in found.evaluated_bytes.items():
        if nbytes > WITHIN * whole:
            assert found.closed_bytes.get(key, 0.0) == pytest.approx(nbytes, rel=WITHIN), key


def test_there_are_a_dozen_layouts():
    assert sum(not one.differs for one in CASES) >= 12
    assert len({(one.model, one.recipe) for one in CASES}) == len(CASES)
