"""Runtime: concrete arrays, profiles, and the store that processes share."""

import warnings
from typing import Any

import jax
from jax._src import array, distributed
from jax.profiler import ProfileData

Array = array.ArrayImpl  # the type of every concrete array; tracers are of none such


def profiled(path: str) -> list[tuple[str, str, dict[str, Any], float]]:
    """Every event of a profile: the name of its line, its own, its statistics, and nanoseconds.

    The iterator of jaxlib 0.12's statistics warns on Python 3.13 that it is of no module; where warnings are
    errors, that ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        return [
            (line.name, event.name, dict(event.stats), event.duration_ns)
            for plane in ProfileData.from_file(path).planes
            for line in plane.lines
            for event in line.events
        ]


def process_store() -> Any:
    """The key-value store of `jax.distributed`, or None in a single process."""
    return distributed.global_state.client


def stored(store: Any, key: str, timeout_ms: int) -> str | None:
    """A key's value in `process_store`, waited for at most so long; None if nobody has set it."""
    try:
        return store.blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise
