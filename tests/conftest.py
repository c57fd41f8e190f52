"""JAX on eight fake CPU devices, set before jax is imported; and outside of CI, where a lock may be written."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.pop("CI", None)
