"""JAX on eight fake CPU devices, set before jax is imported; and outside of CI, where a lock may be written.

LLVM does not optimise what XLA:CPU makes, which would take longer than the tests' small programs run. How a program is
partitioned is decided before. `XLA_FLAGS=--xla_backend_optimization_level=3` has it optimised nevertheless.
"""

import os

FIRST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
LAST = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{FIRST} {os.environ.get('XLA_FLAGS', '')} {LAST}"  # of a flag given twice, the last counts
os.environ.pop("CI", None)
