"""Dispatch: one planned signature of a decorated function, called on flat leaves.

Leaves in their planned layout go straight to the compiled function. Others are placed, and the
moves are logged. Donated buffers are gone afterwards if `jax.jit` would have taken them.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.api.emit import in_auto_mode
from autoshard.api.plan import ProgramPlan
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends import devices
from autoshard.errors import DeletedError, MeshError, PlanMismatchError
from autoshard.ir import rewrite
from autoshard.planner.record import Leaf
from autoshard.report.tables import bytes_text

log = logging.getLogger("autoshard")
_jax.hide_frames(__file__)  # equations emitted in place get the source line of the user's call


class Entry:
    """A plan, and how a call with its abstract values runs.

    It was planned under `signature`, `context` and `mesh`. `context` does not tell devices apart; `concrete`
    has them.
    """

    __slots__ = (
        "_alone",
        "_options",
        "_strict",
        "_warned",
        "compiled",
        "concrete",
        "context",
        "mesh",
        "plan",
        "signature",
    )

    def __init__(
        self, plan: SolvedPlan, key: tuple[Any, Any, Any], *, strict: bool, options: Mapping[str, Any] | None = None
    ) -> None:
        self.plan = plan
        self.signature, self.context, self.mesh = key
        self.concrete = _jax.get_concrete_mesh()
        self._strict, self._options = strict, options or {}
        self.compiled: Compiled | None = None  # planning needs no devices; running does
        self._alone: Any = None  # under transformations that stage nothing
        self._warned = False

    @property
    def captures(self) -> bool:
        """Whether the function closes over tracers, so that the entry serves one trace alone."""
        return bool(self.plan.traced.captured)

    def place_and_run(self, leaves: Sequence[Any]) -> Any:
        """The outputs for leaves of the entry's abstract values, which lie anywhere."""
        compiled = self.compiled = self.compiled or Compiled(self.plan, self._options)
        if compiled.takes(leaves):
            return compiled.run(leaves)
        self._check_there(leaves)
        return compiled.run_placed(leaves, self._placed(leaves, compiled))

    def _check_there(self, leaves: Sequence[Any]) -> None:
        """Raises if a buffer is gone: jaxlib 0.10.2 ends the process where several CPU devices are given one."""
        for leaf, x in zip(self.plan.record.inputs, leaves, strict=True):
            if isinstance(x, jax.Array) and x.is_deleted():
                raise DeletedError(
                    f"{self.plan.record.name}: the array {leaf.path} is gone: it was deleted, or donated to an earlier "
                    "call; go on with that call's result, or do not donate it (donate_argnums)"
                )

    def _placed(self, leaves: Sequence[Any], compiled: "Compiled") -> list[Any]:
        """Each array in its planned sharding; moves are logged, or raise if `strict`."""
        placed: list[Any] = []
        moved: list[str] = []
        moved_bytes = 0
        spread = False  # over several devices: in the layout of another plan
        for leaf, x, target in zip(self.plan.record.inputs, leaves, compiled.shardings, strict=True):
            have = x.sharding if isinstance(x, jax.Array) else None
            if leaf.on_host and have != target:
                placed.append((x, target))
                continue
            if have is None or have == target or not x.committed:
                placed.append(x)
                continue
            same = have.is_equivalent_to(target, x.ndim)
            if not same and leaf.shape:
                moved.append(f"{leaf.path}: {getattr(have, 'spec', have)} → {leaf.spec}")
                moved_bytes += x.nbytes
                spread = spread or len(have.device_set) > 1
            placed.append((x, target))
        if moved:
            self._tell(moved, moved_bytes, spread=spread)
        for i in compiled.donated:
            if isinstance(placed[i], tuple) and sum(x is leaves[i] for x in leaves) > 1:
                path = self.plan.record.inputs[i].path
                raise PlanMismatchError(f"{self.plan.record.name}: {path} is donated, and given a second time")
        return [jax.device_put(*x) if isinstance(x, tuple) else x for x in placed]

    def _tell(self, moved: Sequence[str], moved_bytes: int, *, spread: bool) -> None:
        name = self.plan.record.name
        what = f"{len(moved)} arguments ({bytes_text(moved_bytes)}) arrive in another sharding: {'; '.join(moved[:4])}"
        what += " …" if len(moved) > 4 else ""
        if self._strict:
            raise PlanMismatchError(f"{name}: {what}; place them with plan.put, or drop strict=True")
        if spread and not self._warned:
            self._warned = True
            log.warning(
                "%s: %s; they are moved at every such call. To keep them where they lie: like= the plan that laid them "
                "out, or in_shardings=; else place them once with plan.put",
                name,
                what,
            )
        else:
            log.info("%s: %s; placed", name, what)

    def in_place(self, leaves: Sequence[Any]) -> Any:
        """The planned program on tracers: stages constraints on inputs, values and outputs into the outer trace.

        Shapes can be evaluated, and programs lowered, for more devices than there are. If nothing is staged (under
        `jax.grad` alone), the program is compiled as one.
        """
        if self.plan.record.host_state:
            raise PlanMismatchError(
                f"{self.plan.record.name} has state in the host's memory, which a program around it would take from "
                'the device\'s: call it outside of jax.jit, or plan it with offload="residuals"'
            )
        traced = self.plan.traced
        flat = [*leaves, *traced.captured]
        if _jax.under_jit():
            return jax.tree.unflatten(traced.out_tree, _emitted(self.plan, _mesh(self.plan))(*flat))
        mesh = _mesh(self.plan)
        whole = NamedSharding(mesh, PartitionSpec())
        if self._alone is None:
            self._alone = jax.jit(_emitted(self.plan, mesh))
        return jax.tree.unflatten(traced.out_tree, self._alone(*(jax.device_put(x, whole) for x in flat)))


def _mesh(plan: ProgramPlan) -> Any:
    try:
        return plan.mesh()
    except MeshError:  # fewer devices than it is for
        return devices.abstract(plan.record.mesh)


def _emitted(plan: ProgramPlan, mesh: Any) -> Callable[..., list[Any]]:
    """The program of flat inputs with all of the plan's constraints in it."""
    traced, record = plan.traced, plan.record

    note = (
        f"autoshard planned {record.name} over the devices of {record.mesh}: arguments of a jax.jit around it are to "
        "lie on these devices, or to be committed to none; jax.device_put(x, NamedSharding(mesh, P())) moves one"
    )

    def emitted(*flat: Any) -> list[Any]:
        with _jax.noted(note):  # the first constraints that JAX finds
            inputs = [
                jax.lax.with_sharding_constraint(x, NamedSharding(mesh, leaf.spec)) if leaf.shape else x
                for x, leaf in zip(flat, record.inputs, strict=True)
            ]
        return rewrite.emit_constraints(traced.jaxpr, record.pins, mesh, inputs)

    emitted.__name__ = record.name
    return in_auto_mode(emitted, record.outputs)


class Compiled:
    """A plan's function of flat leaves, jitted on its devices."""

    __slots__ = (
        "_avals",
        "_consumed",
        "_donated",
        "_finish",
        "_given_up",
        "_jitted",
        "_on_host",
        "_own",
        "_seen",
        "donated",
        "shardings",
    )

    def __init__(self, plan: ProgramPlan, options: Mapping[str, Any]) -> None:
        traced, record, mesh = plan.traced, plan.record, plan.mesh()
        known = {(leaf.spec, leaf.on_host): leaf.sharding(mesh) for leaf in record.inputs}
        self.shardings = tuple(known[leaf.spec, leaf.on_host] for leaf in record.inputs)
        self._on_host = frozenset(record.host_state)
        self._avals = tuple((a.shape, a.dtype, a.weak_type) for a in traced.in_avals)
        own = plan.own_mesh
        self._own = None if own is None or own == mesh else own
        self.donated = tuple(record.donated)
        self._consumed, given = consumed(plan)
        self._donated = frozenset(record.donated)
        self._given_up = tuple(i for i in self._consumed if i not in given)  # the compiler takes the others
        self._finish = bool(self._given_up) or self._own is not None
        self._seen: list[Any] = [None] * len(self._avals)  # abstract values known to be equal to the planned ones
        self._jitted = plan.flat_jit(donate=given, **options)

    def takes(self, leaves: Sequence[Any]) -> bool:
        """As for the entry; the compiled function places arrays that are uncommitted and not donated."""
        seen = self._seen
        for i, (x, want) in enumerate(zip(leaves, self.shardings, strict=True)):
            if type(x) is _jax.Array:
                aval = x.aval
                if aval is not seen[i]:
                    if (aval.shape, aval.dtype, aval.weak_type) != self._avals[i]:
                        return False
                    seen[i] = aval
                if x.is_deleted():
                    return False
                have = x.sharding
                if have is not want and have != want and (x.committed or i in self._donated):
                    return False  # what lies in the host's memory is donated
            elif not self._takes_other(x, i):
                return False
        return True

    def _takes_other(self, x: Any, i: int) -> bool:
        """Whether leaves other than plain arrays fit."""
        if _jax.is_tracer(x):
            return False
        aval = _jax.shaped(x)
        if (aval.shape, aval.dtype, aval.weak_type) != self._avals[i]:
            return False
        if not isinstance(x, jax.Array):
            return i not in self._on_host
        return not x.is_deleted() and x.sharding == self.shardings[i]  # an array of keys

    def run(self, leaves: Sequence[Any]) -> Any:
        """The outputs for leaves that it takes."""
        outputs = self._jitted(*leaves)
        return self._finished(leaves, outputs, self._given_up) if self._finish else outputs

    def run_placed(self, leaves: Sequence[Any], placed: Sequence[Any]) -> Any:
        """The outputs for leaves that have been placed; `leaves` are the caller's, whose buffers go where donated."""
        return self._finished(leaves, self._jitted(*placed), self._consumed)

    def _finished(self, leaves: Sequence[Any], outputs: Any, gone: Sequence[int]) -> Any:
        for i in gone:
            x = leaves[i]
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
        own = self._own
        if own is None:
            return outputs
        # As arrays on the caller's own mesh object (Explicit axes): nothing is copied.
        return jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(own, x.sharding.spec, memory_kind=x.sharding.memory_kind)),
            outputs,
        )


def consumed(plan: ProgramPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The donated leaves whose buffers `jax.jit` would take for outputs, and those to donate to the compiler.

    On one device, `jax.jit` takes a buffer for an output of its shape and dtype. It offers other buffers with as many
    elements as an output to the compiler, which takes those with as many bytes as one. On several devices, the
    parts on a device must also have one size; otherwise the buffer is only given up.
    """
    traced, record = plan.traced, plan.record
    used = _jax.used_inputs(traced.jaxpr)

    def nbytes(leaf: Leaf) -> int:
        return prod(leaf.shape) * _jax.itemsize_of(leaf.dtype)

    def part(leaf: Leaf) -> tuple[int, int]:
        return nbytes(leaf), prod(record.mesh.shape[axis] for axis in _axes(leaf.spec))

    def matched(
        donors: Iterable[int], outputs: Sequence[Leaf], key: Callable[[Leaf], Any]
    ) -> tuple[list[int], list[Leaf]]:
        """The donors that have an output of their own by a key, and the outputs that have none."""
        found, left = [], list(outputs)
        for i in donors:
            own = next((o for o in left if key(o) == key(record.inputs[i])), None)
            if own is not None:
                left.remove(own)
                found.append(i)
        return found, left

    donors = [i for i in record.donated if i in used]
    taken, left = matched(donors, record.outputs, lambda leaf: (leaf.shape, leaf.dtype))
    offered, _ = matched([i for i in donors if i not in taken], left, lambda leaf: prod(leaf.shape))
    taken += matched(offered, left, nbytes)[0]
    unusable = [record.inputs[i] for i in donors if i not in taken]
    if unusable:  # as JAX says it
        shapes = ", ".join(f"{leaf.path}: {leaf.dtype}{list(leaf.shape)}" for leaf in unusable)
        warnings.warn(f"Some donated buffers were not usable: {shapes}", stacklevel=2)
    given, _ = matched(taken, record.outputs, part)
    return tuple(sorted(taken)), tuple(sorted(given))


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())]
