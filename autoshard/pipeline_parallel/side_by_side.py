"""Side by side: what JAX cannot run under `jax.vmap`, told at the user's line."""

from collections.abc import Callable
from typing import TypeVar

from autoshard.errors import StageError

Results = TypeVar("Results")


def side_by_side(
    run: Callable[[], Results], *, alone: Callable[[], object], what: str, where: str, otherwise: str
) -> Results:
    """What `run` returns, which traces a loss under `jax.vmap`.

    JAX says by a NotImplementedError that a primitive has no rule for `jax.vmap` (`jax.lax.ragged_dot`, of which
    layers of experts are made, in JAX 0.10 and 0.12). So it does of one without a derivative, and a user's own
    derivative may raise it: that is what `alone` raises, too, and is told as it is.

    Args:
      run: it is called once.
      alone: traces the same without `jax.vmap`; called only where `run` raised.
      what: what was to run side by side.
      where: the layers' `file:line`.
      otherwise: what to ask for instead.

    Raises:
      StageError: a primitive has no rule for `jax.vmap`.
      NotImplementedError: of `alone`.
    """
    try:
        return run()
    except NotImplementedError as error:
        alone()
        way_out = f"write the layers in operations that jax.vmap knows, or {otherwise}"
        raise StageError(where, f"JAX cannot run {what} side by side ({error})", way_out) from error
