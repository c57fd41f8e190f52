"""The table of XLA's faults is true of the JAX that is installed, row by row."""

import jax
import pytest

from autoshard.ir import partitioner_faults
from autoshard.ir.partitioner_faults import Fault
from tests import faults_reproduced


@pytest.mark.parametrize("fault", partitioner_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_seen_where_the_table_says_so(fault: Fault) -> None:
    reproduced = getattr(faults_reproduced, fault.name.replace(" ", "_"))()
    assert reproduced == (jax.__version__ in fault.seen), (
        f"XLA of JAX {jax.__version__} is {'wrong' if reproduced else 'right'} about `{fault.name}`: "
        f"change `seen` in autoshard/ir/partitioner_faults.py, and see whether its remedy ({fault.remedy}) is needed"
    )


def test_names_are_distinct() -> None:
    names = [fault.name for fault in partitioner_faults.FAULTS]
    assert len(set(names)) == len(names)
