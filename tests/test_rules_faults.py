"""The table of XLA's faults is true of the JAX that is installed, row by row."""

import jax
import pytest

from autoshard.rules import faults
from autoshard.rules.faults import Fault
from tests import faults_reproduced


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_seen_where_the_table_says_so(fault: Fault) -> None:
    reproduced = getattr(faults_reproduced, fault.name.replace(" ", "_"))()
    assert reproduced == (jax.__version__ in fault.seen), (
        f"XLA of JAX {jax.__version__} is {'wrong' if reproduced else 'right'} about `{fault.name}`: "
        f"change `seen` in autoshard/rules/faults.py, and see whether its remedy ({fault.remedy}) is needed still"
    )


def test_names_are_distinct() -> None:
    names = [fault.name for fault in faults.FAULTS]
    assert len(set(names)) == len(names)
