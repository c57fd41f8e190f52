"""Graph: a jaxpr as frozen equations over numbered values.

Calls (`jit`, `remat`, `custom_jvp`, `custom_vjp`) are seen through: their bodies'
equations stand in the list as if written in place. Each equation keeps its *path*
through the nested jaxprs, by which apply finds it again, and its number of *trips*.
Dead equations are dropped. Constants (literals, closed-over arrays) are values
without a producer. Names and barriers are seen through, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import networkx as nx

from autoshard import _jax

Path = tuple[int, ...]  # equation index, then (index of the sub-jaxpr, equation index) per level


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of a value (`dtype` may be an extended one, such as `key<fry>`)."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _jax.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eqn:
    """One equation as rules see it: no tracers, no variables, no mesh.

    `where` is the user's `file:line (function)`.
    """

    primitive: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    params: Mapping[str, Any]
    where: str = "<unknown>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Equations in program order over values 0, 1, 2, …

    `operands[e]` and `results[e]` are the value ids of equation e. A value that no
    equation makes is an input or a constant.
    """

    eqns: tuple[Eqn, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    paths: tuple[Path, ...]
    trips: tuple[int, ...]
    avals: tuple[Aval, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    named: Mapping[str, int]  # `checkpoint_name` → value

    def producers(self) -> dict[int, tuple[int, int]]:
        """Value → (equation, result position)."""
        return {v: (e, i) for e, values in enumerate(self.results) for i, v in enumerate(values)}

    def consumers(self) -> dict[int, list[tuple[int, int]]]:
        """Value → [(equation, operand position), …] in program order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for e, values in enumerate(self.operands):
            for i, v in enumerate(values):
                found.setdefault(v, []).append((e, i))
        return found

    def networkx(self) -> nx.DiGraph:
        """Equations as nodes (`primitive`, `where`), values as edges, for analysis."""
        view: nx.DiGraph = nx.DiGraph()
        for e, eqn in enumerate(self.eqns):
            view.add_node(e, primitive=eqn.primitive, where=eqn.where)
        made_by = self.producers()
        for e, values in enumerate(self.operands):
            for v in values:
                if v in made_by:
                    view.add_edge(made_by[v][0], e, value=v, aval=str(self.avals[v]))
        return view


# Calls that are seen through: primitive → the parameter that holds the body.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}


# Equations whose results are their operands.
ALIASES = frozenset({"name", "optimization_barrier"})


def build(closed: Any) -> Graph:
    """The graph of a closed jaxpr."""
    builder = _Builder()
    jaxpr = _jax.open_jaxpr(closed)
    inputs = [builder.value(var.aval) for var in jaxpr.invars]
    outputs = builder.walk(closed, inputs, ())
    return builder.finish(inputs, outputs)


class _Builder:
    def __init__(self) -> None:
        self.avals: list[Aval] = []
        self.eqns: list[Eqn] = []
        self.operands: list[tuple[int, ...]] = []
        self.results: list[tuple[int, ...]] = []
        self.paths: list[Path] = []
        self.named: dict[str, int] = {}
        self._aval_of: dict[Any, Aval] = {}
        self._where = _jax.SourceLines()

    def aval(self, aval: Any) -> Aval:
        key = (getattr(aval, "shape", ()), aval.dtype if hasattr(aval, "dtype") else str(aval))
        if key not in self._aval_of:
            self._aval_of[key] = Aval(tuple(int(d) for d in key[0]), key[1])
        return self._aval_of[key]

    def value(self, aval: Any) -> int:
        self.avals.append(self.aval(aval))
        return len(self.avals) - 1

    def walk(self, closed: Any, args: list[int], path: Path) -> list[int]:
        jaxpr = _jax.open_jaxpr(closed)
        env: dict[Any, int] = dict(zip(jaxpr.invars, args, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.value(var.aval)

        def read(atom: Any) -> int:
            return self.value(atom.aval) if _jax.is_literal(atom) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            here = (*path, index)
            name = eqn.primitive.name
            if name in CALLS:
                results = self.walk(eqn.params[CALLS[name]], operands, (*here, 0))
            elif name in ALIASES:
                results = operands
                if name == "name":
                    self.named[eqn.params["name"]] = operands[0]
            else:
                results = [self.value(var.aval) for var in eqn.outvars]
                self.eqns.append(
                    Eqn(
                        primitive=name,
                        operands=tuple(self.avals[v] for v in operands),
                        results=tuple(self.avals[v] for v in results),
                        params=eqn.params,
                        where=self._where(eqn),
                    )
                )
                self.operands.append(tuple(operands))
                self.results.append(tuple(results))
                self.paths.append(here)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def finish(self, inputs: list[int], outputs: list[int]) -> Graph:
        live = set(outputs)
        keep: list[int] = []
        for e in range(len(self.eqns) - 1, -1, -1):
            if any(v in live for v in self.results[e]):
                keep.append(e)
                live.update(self.operands[e])
        keep.reverse()
        return Graph(
            eqns=tuple(self.eqns[e] for e in keep),
            operands=tuple(self.operands[e] for e in keep),
            results=tuple(self.results[e] for e in keep),
            paths=tuple(self.paths[e] for e in keep),
            trips=(1,) * len(keep),
            avals=tuple(self.avals),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            named=self.named,
        )
