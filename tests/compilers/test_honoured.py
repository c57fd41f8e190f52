"""Planned layouts read back from a compiler's own dump: every one is kept."""

import pytest

from tests.installed import GPU
from tests.verification.test_honoured import planned


@pytest.mark.parametrize("compiler", ["cpu", pytest.param("gpu", marks=GPU)])
def test_a_compilers_own_dump_says_the_same(compiler: str) -> None:
    found = planned("mlp-1k", batch=65536).honoured(compiler)
    assert found.ok, str(found)
    assert found.checked > 50
