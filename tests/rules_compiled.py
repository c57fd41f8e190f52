"""An oracle for what XLA makes of a rule: the compiled program of each split, against the unsharded equation.

Every strategy that a rule allows on a mesh is emitted as a plan's constraints are, by
`ir.rewrite.emit_constraints`: operands come in the strategy's layout, whole, or in another one, and
are pinned to it; results leave so, too. Many splits are one program, compiled once. The
data is hostile where it can be: indices out of range on both sides, infinities and NaN.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.costs.strategies import enumerate_strategies, layout_of, layouts
from autoshard.ir import manual_calls, rewrite
from autoshard.ir.constraints import Constraints
from autoshard.ir.mesh import MeshAxes
from autoshard.rules import rule_of
from tests.assignments import QUICK_COMPILE
from tests.rules_oracle import Traced, close, data

MESHES = (MeshAxes.of({"a": 2, "b": 4}), MeshAxes.of({"a": 3}))
Specs = tuple[PartitionSpec, ...]


class Ends(StrEnum):
    """In which layouts operands come, and results leave."""

    SAME = "same"  # the strategy's own
    WHOLE = "whole"
    OTHER = "other"  # any that divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One strategy of one equation, with layouts before and after it."""

    name: str
    traced: Traced
    values: tuple[Any, ...]
    before: Specs
    operands: Specs
    results: Specs
    after: Specs

    def __str__(self) -> str:
        def side(name: str, specs: Specs) -> str:
            return f"{name} {', '.join(str(spec) for spec in specs)}"

        groups = {"from": self.before, "operands": self.operands, "results": self.results, "to": self.after}
        return f"{self.name} ({self.traced.eqn.primitive}): " + "; ".join(side(k, v) for k, v in groups.items())

    def pins(self) -> Constraints:
        return Constraints(
            taken={((0,), i): (spec,) for i, spec in enumerate(self.operands)},
            made={((0,), i): (spec,) for i, spec in enumerate(self.results)},
            inputs={i: (spec,) for i, spec in enumerate(self.before)},
            outputs={i: (spec,) for i, spec in enumerate(self.after)},
            kernels={((0,), i): (spec,) for i, spec in enumerate((*self.operands, *self.results)) if self.opaque},
        )

    @property
    def opaque(self) -> bool:
        return manual_calls.is_opaque(self.traced.eqn.primitive, self.traced.eqn.params)


def splits_of(
    name: str, traced: Traced, values: Sequence[Any], mesh: MeshAxes, rng: np.random.Generator, most: int | None = None
) -> Iterator[Split]:
    """The strategies of an equation that split it, each with ends of every kind; at most so many, drawn at random."""
    found = enumerate_strategies(rule_of(traced.eqn), mesh)
    avals = (traced.eqn.operands, traced.eqn.results)

    def end(kind: Ends, own: Specs, side: int) -> Specs:
        if kind is Ends.SAME:
            return own
        if kind is Ends.WHOLE:
            return tuple(PartitionSpec() for _ in own)
        return tuple(
            layout_of(int(rng.choice(layouts(aval.shape, mesh, unreduced=False))), aval.ndim, mesh).spec()
            for aval in avals[side]
        )

    pairs = [(s, kind) for s in range(1, len(found)) for kind in Ends]
    chosen = pairs if most is None or len(pairs) <= most else [pairs[i] for i in rng.permutation(len(pairs))[:most]]
    for s, kind in chosen:
        operands, results = (
            tuple(layout_of(int(codes[s]), aval.ndim, mesh).spec() for codes, aval in zip(side, avals[k], strict=True))
            for k, side in enumerate((found.operands, found.results))
        )
        yield Split(
            name=name,
            traced=traced,
            values=tuple(values),
            before=end(kind, operands, 0),
            operands=operands,
            results=results,
            after=end(kind, results, 1),
        )


def wrong(splits: Iterable[Split], axes: MeshAxes) -> list[str]:
    """What differs from the unsharded equation, of splits that are compiled as one program."""
    splits = list(splits)
    mesh = Mesh(np.array(jax.devices()[: axes.size]).reshape(axes.sizes), axes.names)

    def layouts_at(side: Specs) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, spec) for spec in side)

    programs = [(jax.make_jaxpr(split.traced.run)(*split.values), split.pins()) for split in splits]

    def together(args: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [
            rewrite.emit_constraints(closed, pins, mesh, given)
            for (closed, pins), given in zip(programs, args, strict=True)
        ]

    jitted = jax.jit(
        together,
        in_shardings=([layouts_at(split.before) for split in splits],),
        out_shardings=[list(layouts_at(split.after)) for split in splits],
        compiler_options=QUICK_COMPILE,
        keep_unused=True,
    )
    known: dict[tuple[int, int], Sequence[Any]] = {}
    found: list[str] = []
    for split, got in zip(splits, jitted([split.values for split in splits]), strict=True):
        key = (id(split.traced), id(split.values))
        if key not in known:
            known[key] = split.traced.run(*[_array(value) for value in split.values])
        try:
            for one, want in zip(got, known[key], strict=True):
                close(data(one), data(want))
        except AssertionError as error:
            found.append(f"{split}\n{str(error).strip()}")
    return found


def hostile(traced: Traced, values: Sequence[Any], rng: np.random.Generator) -> tuple[Any, ...]:
    """The operands of an equation with data that gives a compiler the most to get wrong.

    Indices and starts lie in range, just out of it and far out of it on both sides. What is compared, not
    summed, has ties, infinities and NaN.
    """
    primitive, found = traced.eqn.primitive, list(values)
    first = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}.get(primitive, 1)
    if primitive in ("gather", "dynamic_slice", "dynamic_update_slice") or primitive.startswith("scatter"):
        last = first + 1 if primitive == "gather" or primitive.startswith("scatter") else len(found)
        for i in range(first, last):
            found[i] = _positions(found[i], max(traced.eqn.operands[0].shape, default=1), rng)
    if primitive in COMPARING:
        found = [_uneven(value, rng) if data(value).dtype == np.float32 else value for value in found]
    return tuple(found)


COMPARING = frozenset(
    {
        *("argmax", "argmin", "cummax", "cummin", "max", "min", "reduce_max", "reduce_min", "sort", "top_k"),
        *(
            "reduce_window_max",
            "reduce_window_min",
            "gather",
            "scatter",
            "scatter-max",
            "scatter-min",
            "dynamic_slice",
            "dynamic_update_slice",
        ),
        *("concatenate", "pad", "rev", "slice", "reshape", "transpose", "clamp", "select_n", "eq", "lt", "sign"),
    }
)


def _positions(starts: Any, size: int, rng: np.random.Generator) -> Any:
    limits = np.iinfo(starts.dtype)
    edges = [limits.min, limits.max, -size - 1, -size, -1, 0, 1, size - 2, size - 1, size, size + 3, 2 * size]
    within = [edge for edge in edges if limits.min <= edge <= limits.max]
    drawn = np.where(
        rng.random(starts.shape) < 0.5, rng.choice(within, starts.shape), rng.integers(0, size, starts.shape)
    )
    return drawn.astype(starts.dtype)


def _uneven(value: Any, rng: np.random.Generator) -> Any:
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0], np.float32), value.shape)
    return np.where(rng.random(value.shape) < 0.3, odd, value)


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)
