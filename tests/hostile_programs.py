"""Hostile programs: random ones out of all that JAX has, on data that finds what is wrong.

A program is its seed: tracing it again draws the same operations, and nothing else decides.
What it is run under, its *setting* (mesh, hardware, mode), is that of its group of `GROUP`
seeds, so that a group can be planned and compiled as one.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tests.hostile_bodies import ALL, step
from tests.hostile_draw import Draw, Shape, UnfitError, Value, kind_of, small_numbers

GROUP = 20  # seeds of one setting

MODES = ("optimum", "specs", "inside", "assignment", "gradient")
MESHES: tuple[dict[str, int], ...] = (
    *({"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 2}, {"a": 4}, {"a": 2}),
    *({"a": 3}, {"a": 2, "b": 3}, {"a": 6}, {"a": 5}, {"a": 7}, {"a": 1}, {"a": 1, "b": 4}, {"a": 2, "b": 1, "c": 4}),
)
TPUS = {1: "tpu-v5e:1x1", 4: "tpu-v5e:2x2", 8: "tpu-v5e:2x4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostility:
    """What the programs of a group are run under."""

    mesh: dict[str, int]
    hardware: str
    mode: str
    constraints: str  # "needed" or "all"
    donated: bool
    whole_gradient: bool  # whether the programs are the gradients of what they would be

    @property
    def devices(self) -> int:
        return int(np.prod(list(self.mesh.values())))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of dimensions: what divides over the mesh, primes, one, and now and then none."""
        real = [s for s in self.mesh.values() if s > 1] or [2]
        fits = [*real, *real, *(2 * s for s in real), *([int(np.prod(real))] * 2)]
        return (*fits, *fits, *fits, *fits, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0)

    def __str__(self) -> str:
        mesh = "×".join(f"{name}{size}" for name, size in self.mesh.items())
        extra = (" donated" if self.donated else "") + (" gradient" if self.whole_gradient else "")
        return f"{self.mode} {mesh} {self.hardware} {self.constraints}{extra}"


def setting_of(seed: int) -> Hostility:
    """The setting of a program: that of its group."""
    rng = np.random.default_rng((seed // GROUP, 0))
    mesh = MESHES[int(rng.integers(7)) if rng.random() < 0.6 else int(rng.integers(len(MESHES)))]
    count = int(np.prod(list(mesh.values())))
    chips = [f"cpu:{count}", f"h100:1x{count}", *([TPUS[count]] if count in TPUS else [])]
    mode = MODES[int(rng.choice(len(MODES), p=[0.35, 0.2, 0.15, 0.2, 0.1]))]
    return Hostility(
        mesh=mesh,
        hardware=chips[int(rng.integers(len(chips)))],
        mode=mode,
        constraints="all" if rng.random() < 0.4 else "needed",
        donated=bool(rng.random() < 0.2) and mode in ("optimum", "specs"),
        whole_gradient=mode == "gradient" or bool(rng.random() < 0.15),
    )


class Program:
    """A program: its arguments, and a function of them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.setting = seed, setting_of(seed)
        self.arguments: list[np.ndarray] = []
        self.exact: tuple[bool, ...] = ()  # per result
        self._traced: dict[Any, Callable[..., list[Value]]] = {}
        jax.eval_shape(lambda: self._drawn(None, None))
        self.gradient = self.setting.whole_gradient and self._has_gradient()

    def _forward(self, given: Sequence[Value], mesh: Any) -> list[Value]:
        """The program as it was drawn, traced once per mesh."""
        if mesh not in self._traced:
            traced = jax.make_jaxpr(lambda xs: self._drawn(xs, mesh))(self.arguments)
            self._traced[mesh] = jax.extend.core.jaxpr_as_fun(traced)
        return self._traced[mesh](*given)

    def _fresh(self, given: Sequence[Value] | None) -> Any:
        """Makes arguments when first traced, and hands them out in the same order from then on."""
        count = 0

        def fresh(shape: Shape, dtype: str, draw: Draw) -> Value:
            nonlocal count
            if count >= 6 or draw.coin(0.1):
                return draw.constant(shape, dtype)
            if given is None:
                rng = np.random.default_rng((self.seed, 1, count))
                self.arguments.append(small_numbers(rng, shape, dtype))
            count += 1
            return jnp.asarray(self.arguments[-1]) if given is None else given[count - 1]

        return fresh

    def _drawn(self, given: Sequence[Value] | None, mesh: Any) -> list[Value]:
        rng = np.random.default_rng((self.seed, 2))
        d = Draw(rng=rng, sizes=self.setting.sizes, fresh=self._fresh(given), derived=self.setting.whole_gradient)
        d.hold(d.fresh(d.shape(d.whole(1, 3), 256), "float32", d), exact=True)
        kind = d.choice("fffiihbc")
        d.hold(d.fresh(d.shape(d.whole(1, 3), 128), d.dtype(kind), d), exact=True)
        last = 2 + d.whole(1, 4)
        while len(d.values) < last:
            if self.setting.mode == "inside" and d.coin(0.5):
                d.rounded = False
                d.hold(pinned(d, d.pick("fibc"), self.setting.mesh, mesh), exact=not d.rounded)
                last += 1
            try:
                step(d, ALL)
            except UnfitError:
                break
        places = [*(i for i in range(2, len(d.values) - 1) if d.coin()), len(d.values) - 1]
        self.exact = tuple(d.exact[i] for i in places)
        return [d.values[i] for i in places]

    def __call__(self, given: Sequence[Value], mesh: Any = None) -> list[Value]:
        """Traces it; the user's own constraints are on `mesh`, None leaves them out."""
        if not self.gradient:
            return self._forward(given, mesh)
        made = self._derived(*self.apart(given), mesh)
        self.exact = (False,) * len(made)
        return made

    def _derived(self, own: Sequence[Value], others: Sequence[Value], mesh: Any = None) -> list[Value]:
        """The float results, and the gradients."""
        values, backward = jax.vjp(lambda xs: self.floats(xs, others, mesh), own)
        return [*values, *backward([self.weights(v) for v in values])[0]]

    def apart(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arguments that it is differentiated by, and the others."""
        pairs = list(zip(given, self.arguments, strict=True))
        return [x for x, a in pairs if a.dtype == np.float32], [x for x, a in pairs if a.dtype != np.float32]

    def floats(self, own: Sequence[Value], others: Sequence[Value], mesh: Any = None) -> list[Value]:
        """The float results, by the arguments that it is differentiated by."""
        left = [list(others), list(own)]
        given = [left[a.dtype == np.float32].pop(0) for a in self.arguments]
        return [y for y in self._forward(given, mesh) if kind_of(y) == "f"]

    def weights(self, y: Value) -> Value:
        """The cotangent of a result."""
        return lax.iota(jnp.float32, y.size).reshape(y.shape) % 5 - 1

    def _has_gradient(self) -> bool:
        given = [jnp.asarray(a) for a in self.arguments]
        own, others = self.apart(given)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = jax.eval_shape(lambda xs: self.floats(xs, others), own)
                jax.eval_shape(lambda xs: self._derived(xs, others), own)
        except (NotImplementedError, ValueError, TypeError):  # a loop of unknown length, an operation without one
            return False
        return bool(made) and bool(own)


def pinned(d: Draw, x: Value, axes: dict[str, int], mesh: Any) -> Value:
    """A value laid out as a user would, at random; drawn the same where there is no mesh."""
    spec = random_spec(d.rng, x.shape, axes, free=d.coin(0.2))
    return jnp.copy(x) if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def random_spec(rng: np.random.Generator, shape: Shape, mesh: dict[str, int], *, free: bool = False) -> PartitionSpec:
    """Mesh axes on dimensions that they divide, in mesh order; with `free`, some dimensions are left open."""
    entries: list[Any] = [()] * len(shape)
    for name, size in mesh.items():
        fits = [i for i, n in enumerate(shape) if n % (size * int(np.prod([mesh[a] for a in entries[i]]))) == 0]
        if fits and rng.random() < 0.8:
            entries[int(rng.choice(fits))] += (name,)
    named = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
    if free:
        named = [PartitionSpec.UNCONSTRAINED if rng.random() < 0.3 else entry for entry in named]
    return PartitionSpec(*named)
