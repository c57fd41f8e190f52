"""The oracle of hostile programs: each gives the numbers that `jax.jit` gives on one device, and raises nothing.

The programs of a group are planned and compiled as one; where that fails, in halves, down to
the programs that fail. A program is *right* if it gives the same numbers, where its sums are
exact, and else within 1e-5 of the largest; *rounding* if it is further off, but no further from
the same program in float64 than a few times what one device is; else *wrong*. An error of
ours is a *refusal*, any other one is *foreign*. *Void* is what `jax.jit` itself refuses, or computes wrongly on
one device: otherwise than operation by operation, which is what autoshard gives.
"""

import collections
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import autoshard
from autoshard import _jax
from autoshard.errors import AutoshardError
from autoshard.ir.graph import CALLS
from tests.assignments import QUICK_COMPILE, random_choice, run
from tests.float64 import exact
from tests.hostile_programs import GROUP, Hostility, Program, random_spec
from tests.programs import Program as Planned
from tests.programs import space_of as decisions_of

TOLERANCE = 1e-5  # of the largest entry of a result
ROUNDING = 8  # times what one device is off from float64
PLANNING: dict[str, Any] = {"rel_gap": 0.05, "time_limit_s": 10.0}

RIGHT, ROUNDED, WRONG, FOREIGN, REFUSED, VOID = "right", "rounding", "wrong", "foreign", "refused", "void"
Results = list[list[Any]]  # per program


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a program."""

    seed: int
    setting: str
    kind: str
    why: str = ""
    primitives: tuple[str, ...] = ()


def judge(seeds: Sequence[int], *, planned: bool = True) -> list[Verdict]:
    """The verdicts on programs, of any groups.

    Args:
      seeds: the programs.
      planned: False leaves out autoshard: what plain JAX makes of them.
    """
    groups: dict[int, list[int]] = {}
    for seed in seeds:
        groups.setdefault(seed // GROUP, []).append(seed)
    found: list[Verdict] = []
    for group in groups.values():
        found += verdicts_on([Program(seed) for seed in group], planned=planned)
    return sorted(found, key=lambda v: v.seed)


def verdicts_on(programs: list[Any], *, planned: bool = True) -> list[Verdict]:
    """The verdicts on programs of one setting, or on what is like them."""
    return _Trial(programs, planned=planned).verdicts()


class _Trial:
    """The programs of one group."""

    def __init__(self, programs: list[Program], *, planned: bool) -> None:
        self.programs, self.planned = programs, planned
        self.setting = programs[0].setting

    def verdicts(self) -> list[Verdict]:
        found: dict[int, tuple[str, str]] = {}
        with_gradient = [p for p in self.programs if p.gradient]
        if self.setting.mode == "gradient" and 0 < len(with_gradient) < len(self.programs):
            halves = with_gradient, [p for p in self.programs if not p.gradient]
            return [verdict for half in halves for verdict in _Trial(half, planned=self.planned).verdicts()]
        want = self._piecewise(self.programs, lambda some: plain(some), VOID, found)
        there = [p for p in self.programs if p.seed in want]
        got = self._piecewise(there, lambda some: sharded(some), FOREIGN, found) if self.planned else want
        for p in there:
            if p.seed in got:
                found[p.seed] = self._compared(p, got[p.seed], want[p.seed])
        return [
            Verdict(
                seed=p.seed,
                setting=str(self.setting),
                kind=found[p.seed][0],
                why=found[p.seed][1],
                primitives=primitives(p) if p.seed in want else (),
            )
            for p in self.programs
        ]

    def _piecewise(
        self,
        programs: list[Program],
        make: Callable[[list[Program]], Results],
        failure: str,
        found: dict[int, tuple[str, str]],
    ) -> dict[int, list[Any]]:
        """What `make` gives for each program; of those for which it fails, why."""
        if not programs:
            return {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return {p.seed: made for p, made in zip(programs, make(programs), strict=True)}
        except Exception as error:  # noqa: BLE001  # whatever it is, is what is looked for
            if len(programs) == 1:
                kind = REFUSED if isinstance(error, AutoshardError) and failure is FOREIGN else failure
                found[programs[0].seed] = kind, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                return {}
        middle = len(programs) // 2
        first = self._piecewise(programs[:middle], make, failure, found)
        return {**first, **self._piecewise(programs[middle:], make, failure, found)}

    def _compared(self, program: Program, got: list[Any], want: list[Any]) -> tuple[str, str]:
        off = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not alike(g, w, exact=program.exact[i])]
        if not off:
            return RIGHT, ""
        stepwise = step_by_step(program)
        if all(alike(got[i], stepwise[i], exact=program.exact[i]) for i in off):
            return (
                VOID,
                f"one device is wrong, but right operation by operation: {told(want[off[0]], got[off[0]])}",
            )
        try:
            true = precise(program)
        except Exception as error:  # noqa: BLE001  # not every program can be had in float64
            return WRONG, f"{told(got[off[0]], want[off[0]])}; no float64: {type(error).__name__}"
        for i in off:
            if np.shape(got[i]) != np.shape(want[i]):
                return WRONG, f"output {i}: shape {np.shape(got[i])}, {np.shape(want[i])} on one device"
            scale = float(np.max(np.abs(np.nan_to_num(np.asarray(true[i], np.float64))), initial=0))
            ours, plain_ = distance(got[i], true[i]), distance(want[i], true[i])
            if not ours <= max(ROUNDING * plain_, TOLERANCE * scale):
                return WRONG, f"output {i}: {told(got[i], want[i])}; off {ours:.2g}, one device {plain_:.2g}"
        return ROUNDED, told(got[off[0]], want[off[0]])


def alike(got: Any, want: Any, *, exact: bool) -> bool:
    """Whether two results are the same numbers, or near enough."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = widened(got), widened(want)
    if np.array_equal(got, want, equal_nan=got.dtype.kind in "fc"):
        return True
    if exact or got.dtype.kind not in "fc":
        return False
    scale = np.max(np.abs(want[np.isfinite(want)]), initial=0)
    close = np.abs(got - want) <= TOLERANCE * max(scale, 1e-30)
    return bool(np.all(close | (got == want) | (np.isnan(got) & np.isnan(want))))


def widened(x: np.ndarray) -> np.ndarray:
    """What NumPy has no NaN in (bfloat16), in float32."""
    return x.astype(np.float32) if x.dtype.kind == "V" else x


def distance(x: Any, true: Any) -> float:
    """The largest difference; infinite where one is NaN and the other is not."""
    x, true = widened(np.asarray(x)), widened(np.asarray(true))
    if x.dtype.kind not in "fc":
        return 0.0 if np.array_equal(x, true) else float("inf")
    same = (np.isnan(x) & np.isnan(true)) | (x == true)
    return float(np.max(np.where(same, 0, np.nan_to_num(np.abs(x - true), nan=np.inf)), initial=0))


def told(got: Any, want: Any) -> str:
    """Where two results differ, in short."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{got.shape} for {want.dtype}{want.shape}"
    differ = ~((got == want) | ((got != got) & (want != want)))
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    return f"{int(differ.sum())} of {got.size} differ, first at {where}: {got[where]} for {want[where]}"


def together(programs: Sequence[Program], mesh: Any = None) -> Callable[[list[list[Any]]], Results]:
    """The programs as one function of the list of their arguments."""

    def all_of_them(arguments: list[list[Any]]) -> Results:
        return [p(given, mesh) for p, given in zip(programs, arguments, strict=True)]

    return all_of_them


def user_mesh(setting: Hostility) -> Mesh:
    """The mesh that the user's own constraints are on."""
    devices = np.asarray(jax.devices()[: setting.devices]).reshape(tuple(setting.mesh.values()))
    return Mesh(devices, tuple(setting.mesh), axis_types=(AxisType.Auto,) * devices.ndim)


def plain(programs: Sequence[Program]) -> Results:
    """What `jax.jit` gives on one device, without a sharding word."""
    if programs[0].setting.mode == "gradient" and all(p.gradient for p in programs):
        return gradients(programs, lambda loss: loss)
    fn = jax.jit(together(programs), compiler_options=QUICK_COMPILE)
    return jax.tree.map(np.asarray, fn([p.arguments for p in programs]))


def sharded(programs: Sequence[Program]) -> Results:
    """What autoshard gives in the programs' setting."""
    setting = programs[0].setting
    rng = np.random.default_rng((programs[0].seed, 3))
    args = [p.arguments for p in programs]
    options: dict[str, Any] = {
        "mesh": setting.mesh,
        "hardware": setting.hardware,
        "constraints": setting.constraints,
        **PLANNING,
    }
    if setting.mode == "gradient" and all(p.gradient for p in programs):
        return gradients(programs, lambda loss: autoshard.jit(loss, for_grad=True, **options))
    if setting.mode == "assignment":
        program = Planned(fn=together(programs), args=(args,), names=("arguments",))
        asked, _ = decisions_of(program, mesh=setting.mesh, hardware=setting.hardware)
        choice = random_choice(asked.decisions, asked.resharder, rng)
        flat = run(asked, choice, jax.tree.leaves(args))
        return jax.tree.map(np.asarray, jax.tree.unflatten(asked.traced.out_tree, flat))
    fn = together(programs)
    if setting.mode == "specs":
        out = jax.eval_shape(fn, args)

        def some(x: Any) -> Any:
            return random_spec(rng, x.shape, setting.mesh) if rng.random() < 0.6 else autoshard.AUTO

        options["in_shardings"] = (jax.tree.map(some, args),)
        if not setting.donated:  # a donated leaf and the output that replaces it may not contradict each other
            options["out_shardings"] = jax.tree.map(some, out)
    elif setting.mode == "inside":
        options["mesh"] = user_mesh(setting)
        fn = together(programs, options["mesh"])
    if setting.donated:
        options["donate_argnums"] = 0
    plan = autoshard.plan(fn, args, for_grad=False, **options)
    compiled = plan.jit().lower(args).compile(compiler_options=QUICK_COMPILE)
    return jax.tree.map(np.asarray, compiled(plan.put(args, arg="arguments")))


def gradients(programs: Sequence[Program], planned: Callable[[Any], Any]) -> Results:
    """The gradients of a loss that all programs are parts of, by their float arguments."""

    def loss(floats: list[list[Any]], rest: list[list[Any]]) -> Any:
        total = jnp.float32(0)
        for p, own, others in zip(programs, floats, rest, strict=True):
            for y in p.floats(own, others):
                total += jnp.sum(y * p.weights(y)) / 64
        return total

    floats, rest = (list(side) for side in zip(*(p.apart(p.arguments) for p in programs), strict=True))
    fn = jax.jit(jax.grad(planned(loss)), compiler_options=QUICK_COMPILE)
    for p, own in zip(programs, floats, strict=True):
        p.exact = (False,) * len(own)
    return jax.tree.map(np.asarray, fn(floats, rest))


def alone(program: Program) -> Callable[[list[Any]], Any]:
    """The function of its arguments by whose results a program is compared."""
    if program.setting.mode != "gradient" or not program.gradient:
        return program

    def loss(own: list[Any], others: list[Any]) -> Any:
        return sum(jnp.sum(y * program.weights(y)) / 64 for y in program.floats(own, others))

    return lambda given: jax.grad(loss)(*program.apart(given))


def precise(program: Program) -> list[Any]:
    """The program's results in float64."""
    return exact(alone(program), program.arguments)


def step_by_step(program: Program) -> list[Any]:
    """The program's results, each operation compiled by itself: no operation is merged with another."""

    def evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = _jax.open_jaxpr(closed)
        env = dict(zip(jaxpr.constvars, _jax.consts_of(closed), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in eqn.invars]
            if eqn.primitive.name in CALLS:
                results = evaluated(eqn.params[CALLS[eqn.primitive.name]], operands)
            else:
                results = _jax.bind(eqn, eqn.params, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [_jax.literal(v) if _jax.is_literal(v) else env[v] for v in jaxpr.outvars]

    given = [jnp.asarray(a) for a in program.arguments]
    return [np.asarray(x) for x in evaluated(jax.make_jaxpr(alone(program))(given), given)]


def primitives(program: Program) -> tuple[str, ...]:
    """The names of all primitives in a program, bodies included."""
    found: collections.Counter[str] = collections.Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in _jax.open_jaxpr(jaxpr).eqns:
            found[eqn.primitive.name] += 1
            for value in eqn.params.values():
                for body in value if isinstance(value, tuple | list) else (value,):
                    if _jax.is_jaxpr(body):
                        walk(body)

    walk(jax.make_jaxpr(alone(program))(program.arguments))
    return tuple(sorted(found))
