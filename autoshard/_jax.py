"""Which JAX is this: the only room that may reach past the public API.

JAX 0.10 to 0.12 differ in jaxpr classes, loop parameters and source lines; all of
it is absorbed here and pinned by `tests/test_jax.py`.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax._src import source_info_util
from jax.extend import core as jex_core

JAX_VERSION: tuple[int, ...] = tuple(int(x) for x in jax.__version__.split(".")[:3])


def open_jaxpr(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one; identity where JAX has merged the two."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex_core.ClosedJaxpr) else jaxpr


def consts_of(jaxpr: Any) -> tuple[Any, ...]:
    """The constants that a closed jaxpr carries."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether an equation parameter holds a jaxpr (open or closed)."""
    return isinstance(value, (jex_core.ClosedJaxpr, jex_core.Jaxpr))


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def where(eqn: Any) -> str:
    """`file:line (function)` of the user's frame that made an equation."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "<unknown>"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def itemsize(dtype: Any) -> int:
    """Bytes per element; extended dtypes (PRNG keys) count their base array."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        base = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return base.size * base.dtype.itemsize
    return jax.numpy.dtype(dtype).itemsize


def sub_jaxprs(params: Any) -> Iterable[Any]:
    """Every jaxpr in an equation's parameters, in order."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item
