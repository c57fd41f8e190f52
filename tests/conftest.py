"""JAX on eight fake CPU devices, set before jax is imported; and outside of CI, where a lock may be written.

LLVM optimises as for users, though that takes longer than the tests' small programs run. Without it, JAX 0.10.2's
XLA:CPU makes zeros of the gradient of a scan, as `XLA_FLAGS=--xla_backend_optimization_level=0` shows in
`tests/ir/test_checkpoint_policy.py` (but for `xla_cpu_use_fusion_emitters=false`, which JAX 0.12 does not have).
"""

import os

import pytest

from tests.slow_tests import listed

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.pop("CI", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that were measured to be slow."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
