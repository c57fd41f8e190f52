"""Fingerprint: a closed jaxpr as text that depends on the whole program, and not on how it was traced.

Two traces of one program have the same text: it does not depend on the hash seed, the
terminal, memory addresses, source lines or the mesh (a user's constraint counts with its
spec alone). Two programs have different texts: constants count, also those of inner calls,
and so do the names that a policy of `jax.checkpoint` keeps. Functions count by their names.
Unreadable values (an array of other processes, a value that is being traced) count by type.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard import _jax

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")

# Parameters that depend on the trace: the mesh set at the time, and the source line.
_OF_THE_TRACE = frozenset({*_jax.CONTEXT_MESH, "debug_info", "name_and_src_info", "src_info"})
_SHORT = 100  # characters of a body that is written out where it is called; of a longer one its hash


def fingerprint(closed: Any) -> str:
    """A hash of a closed jaxpr."""
    return hashlib.sha256(text(closed).encode()).hexdigest()


def text(closed: Any) -> str:
    """The canonical text of a closed jaxpr: one line per equation, of longer bodies their hashes."""
    return Writer().body(closed)


def elements(value: Any) -> str:
    """A hash of an array's elements; empty where this process cannot read them."""
    if isinstance(value, jax.Array):
        if value.is_deleted() or not (value.is_fully_addressable or value.is_fully_replicated):
            return ""
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
    raw = np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8)
    return hashlib.sha256(raw.data).hexdigest()


class Writer:
    """Writes jaxprs and the parameters of equations; each body and each constant is read once.

    Args:
      read: array → text that stands for its elements.
    """

    def __init__(self, read: Callable[[Any], str] = elements) -> None:
        self._read = read
        self._known: dict[int, tuple[Any, str]] = {}  # by identity; the object is kept, so that ids stay unique
        self._open: set[int] = set()  # objects being written: cycles end here

    def body(self, closed: Any) -> str:
        jaxpr = _jax.open_jaxpr(closed)
        number: dict[Any, int] = {}

        def bound(variables: Iterable[Any]) -> str:
            return " ".join(f"{number.setdefault(v, len(number))}:{_aval(v.aval)}" for v in variables)

        def read(atom: Any) -> str:
            if _jax.is_literal(atom):
                return f"{self.value(_jax.literal(atom))}:{_aval(atom.aval)}"
            return str(number[atom])

        consts = " ".join(map(self.value, _jax.consts_of(closed)))
        lines = [f"consts {bound(jaxpr.constvars)} = {consts}", f"in {bound(jaxpr.invars)}"]
        for eqn in jaxpr.eqns:
            operands = " ".join(map(read, eqn.invars))
            lines.append(f"{bound(eqn.outvars)} = {self.operation(eqn)} {operands}")
        return "\n".join((*lines, f"out {' '.join(map(read, jaxpr.outvars))}"))

    def operation(self, eqn: Any) -> str:
        """The operation of an equation, without its operands."""
        return f"{eqn.primitive.name}[{self._params(eqn.primitive.name, eqn.params)}]"

    def _params(self, primitive: str, params: Mapping[str, Any]) -> str:
        kept = {k: v for k, v in params.items() if not _jax.noted_while_tracing(primitive, k, v)}
        if primitive == "shard_map":  # its body is written for the sizes of its mesh
            kept["mesh"] = tuple(dict(kept["mesh"].shape).items())
        return self._named(kept)

    def _named(self, fields: Mapping[str, Any]) -> str:
        return " ".join(f"{k}={self.value(v)}" for k, v in sorted(fields.items()) if k not in _OF_THE_TRACE)

    def value(self, value: Any) -> str:
        """The text of any value that an equation holds."""
        if value is None or value is Ellipsis or isinstance(value, str | bytes | bool | int | float | complex):
            return str(value) if isinstance(value, enum.Enum) else repr(value)
        if isinstance(value, np.integer):
            return repr(int(value))
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._open:
            return "…"
        self._open.add(id(value))
        text = self._value(value)
        self._open.discard(id(value))
        if _jax.is_jaxpr(value) and len(text) > _SHORT:
            text = f"{{{hashlib.sha256(text.encode()).hexdigest()}}}"
        self._known[id(value)] = (value, text)
        return text

    def _value(self, value: Any) -> str:
        kind = type(value)
        if _jax.is_jaxpr(value):
            return self.body(value)
        if isinstance(value, np.dtype | Mesh | AbstractMesh):
            return str(value) if isinstance(value, np.dtype) else "mesh"
        if isinstance(value, NamedSharding):
            return f"sharding({self.value(value.spec)} {value.memory_kind or 'device'})"
        if isinstance(value, PartitionSpec):
            return f"P({' '.join(map(self.value, value))} {self._unreduced(value)})"
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._array(value)
        if isinstance(value, jax.tree_util.PyTreeDef):
            return f"tree({self.value(value.node_data())} {' '.join(map(self.value, value.children()))})"
        if isinstance(value, Mapping):
            return (
                f"{kind.__name__}{{{' '.join(sorted(f'{self.value(k)}:{self.value(v)}' for k, v in value.items()))}}}"
            )
        if isinstance(value, Set):
            return f"set{{{' '.join(sorted(map(self.value, value)))}}}"
        if isinstance(value, Sequence):
            return f"{kind.__name__}({' '.join(map(self.value, value))})"
        return self._callable(value) if callable(value) and hasattr(value, "__qualname__") else self._object(value)

    def _array(self, value: Any) -> str:
        about = f"{value.dtype}[{','.join(map(str, value.shape))}]"
        readable = hasattr(value, "__array__") and not _jax.is_tracer(value)  # no abstract value, no `Ref`
        return f"{about}#{self._read(value)}" if readable else about

    def _unreduced(self, spec: PartitionSpec) -> str:
        return " ".join(self.value(getattr(spec, name, frozenset())) for name in ("unreduced", "reduced"))

    def _callable(self, value: Callable[..., Any]) -> str:
        """A function's name; for the functions of JAX's policies, also the values that they close over."""
        name = value.__qualname__
        if not getattr(value, "__module__", "").startswith(_jax.POLICIES):
            return name
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return f"{name}({' '.join(map(self.value, cells))})"

    def _object(self, value: Any) -> str:
        """An object's type name and fields; without fields, its `repr` without addresses."""
        kind = type(value)
        if isinstance(value, functools.partial):
            return f"partial({self.value(value.func)} {self.value(value.args)} {self.value(value.keywords)})"
        if hasattr(value, "call_wrapped"):  # a function that JAX has wrapped
            return f"wrapped({self.value(value.f)})"
        if dataclasses.is_dataclass(kind):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(kind)}
        else:
            found = getattr(value, "__dict__", {})
            lazy = {
                name for c in kind.__mro__ for name, v in vars(c).items() if isinstance(v, functools.cached_property)
            }
            fields = {k: v for k, v in found.items() if k not in lazy}
        if fields:
            return f"{kind.__qualname__}({self._named(fields)})"
        return kind.__qualname__ if kind.__repr__ is object.__repr__ else _ADDRESS.sub("", str(value))


def _aval(aval: Any) -> str:
    """Dtype and shape (for a `Ref`, those of its referent); other avals by their `repr`."""
    shape = getattr(aval, "shape", None)
    if shape is None or not hasattr(aval, "dtype"):
        return _ADDRESS.sub("", str(aval))
    kind = type(aval).__name__
    return f"{'' if kind == 'ShapedArray' else kind}{aval.dtype}[{','.join(map(str, shape))}]"
