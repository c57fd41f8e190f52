"""autoshard: `jax.jit` that finds the sharding."""
