"""Names for the activations of a model, and the one hook that may act on them.

A model says `x = name(x, "residual")` at the places that its literature has words
for. By default that is the identity and leaves no trace in the jaxpr. To act at
these places (print, count, constrain), trace the model inside `hooked(hook)`:
`hook(x, label)` replaces `x`.

Why a scoped hook and not `jax.ad_checkpoint.checkpoint_name`: that adds one `name`
equation per place to every trace, and to act on it afterwards takes an interpreter
of jaxprs that re-binds loops, remat and custom derivatives. A hook runs while the
model is traced, so that `jax.grad`, `scan` and `remat` treat what it adds as if it
stood in the model. One caution: `jax.jit` caches traces by function, so the hook
must wrap the outermost jit, never sit inside one.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

Hook = Callable[[jax.Array, str], jax.Array]

_hook: ContextVar[Hook | None] = ContextVar("activation_hook", default=None)


def name(x: jax.Array, label: str) -> jax.Array:
    """`x` itself, or the result of the hook in scope."""
    hook = _hook.get()
    return x if hook is None else hook(x, label)


@contextmanager
def hooked(hook: Hook) -> Generator[None, None, None]:
    """Every `name(x, label)` traced in this scope returns `hook(x, label)`."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


@contextmanager
def also(hook: Hook) -> Generator[None, None, None]:
    """As `hooked`, after what the scope around does."""
    outer = _hook.get()
    with hooked(hook if outer is None else lambda x, label: hook(outer(x, label), label)):
        yield
