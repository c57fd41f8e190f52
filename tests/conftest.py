"""JAX on eight fake CPU devices, set before jax is imported; and outside of CI, where a lock may be written.

LLVM optimises as for users, though it takes a quarter of the suite: without it, JAX 0.10.2's XLA:CPU makes zeros of the
gradient of a scan (`xla_backend_optimization_level=0` with `xla_cpu_use_fusion_emitters`, as is the default).
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.pop("CI", None)
