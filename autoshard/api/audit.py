"""Audit: a program that is sharded by hand already, against the compiler and the optimum.

Nothing is adopted: the program's own annotations (the shardings of its arguments, those
of its `jax.jit`, its `with_sharding_constraint`s) are compiled as they are. A collective
is *asked for* if the annotations say so: a constraint stands there, it finishes the sum of a
split contraction or reduction, or it gathers an argument that is stored split. Every other
collective moves a value between two layouts that the program itself does not connect.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
from jax.sharding import NamedSharding

from autoshard import _jax
from autoshard.api.evaluate import evaluate
from autoshard.api.evaluation import Evaluation
from autoshard.api.options import REL_GAP
from autoshard.api.planning import plan
from autoshard.api.solved_plan import SolvedPlan
from autoshard.errors import MeshError
from autoshard.ir import rewrite
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.op_traits import CONSTRAINT, JITS
from autoshard.planner.requested_shardings import AUTO
from autoshard.report.notebook import Shown
from autoshard.report.tables import GAP, bytes_text, columns, fields, render, table, time_text
from autoshard.verification.asked import Asked
from autoshard.verification.collective_match import Line, attribute
from autoshard.verification.result import Verification, place_text
from autoshard.verification.verify import Places

LONGEST = 20  # source lines that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """Collectives of one kind and axes from one equation, and whether an annotation asks for them."""

    line: Line
    asked: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audit(Shown):
    """The collectives that a compiler emits for a hand-sharded program, and the best plan for the same mesh.

    Attributes:
      verification: the compiled program, against the price of its own layouts.
      emitted: its collectives by source line, the largest first.
      hand: its layouts, priced.
      best: the optimum of the same program without its constraints.
      priced_with: prices the program with other specs of some inputs, by position; None leaves the hand's.
    """

    verification: Verification
    emitted: tuple[Emitted, ...]
    hand: Evaluation
    best: SolvedPlan
    priced_with: Callable[[Sequence[Any]], Evaluation]

    @property
    def unasked_bytes(self) -> int:
        """Bytes per step of collectives that no annotation asks for."""
        return sum(x.line.emitted_bytes for x in self.emitted if not x.asked)

    @property
    def gap(self) -> float:
        """How much longer a step takes than the optimum's, both priced by the same model."""
        return self.hand.cost / self.best.cost - 1

    def __str__(self) -> str:
        """The verdict and the collectives by source line, for a terminal."""
        width = columns()
        total = sum(x.line.emitted_bytes for x in self.emitted)
        unasked = [x for x in self.emitted if not x.asked]
        hand, best = self.hand.record, self.best.record
        share = f" ({self.unasked_bytes / total:.0%} of {bytes_text(total)})" if total else ""
        said = [
            (
                "unasked",
                f"{sum(x.line.count * x.line.trips for x in unasked):,} collectives, "
                f"{bytes_text(self.unasked_bytes)}{share} per step and device, that no annotation asks for",
            ),
            (
                "step",
                f"by hand {time_text(hand.cost.step_s)} ({time_text(hand.cost.exposed_s)} exposed), at best "
                f"{time_text(best.cost.step_s)} ({time_text(best.cost.exposed_s)} exposed): {self.gap:+.1%}",
            ),
            (
                "memory",
                f"predicted peak per device: by hand {bytes_text(hand.memory.peak_bytes)}, "
                f"at best {bytes_text(best.memory.peak_bytes)}",
            ),
            (
                "compiler",
                f"{self.verification.compiler}, {self.verification.version}, for {self.verification.topology}",
            ),
        ]
        shown, rest = self.emitted[:LONGEST], self.emitted[LONGEST:]
        rows = [
            (
                "",
                x.line.kind,
                "·".join(x.line.axes),
                f"{x.line.count:,}" + (f"×{x.line.trips:,}" if x.line.trips > 1 else ""),
                bytes_text(x.line.emitted_bytes),
                "yes" if x.asked else "NO",
            )
            for x in shown
        ]
        if rest:
            nbytes = bytes_text(sum(x.line.emitted_bytes for x in rest))
            rows.append((f"{len(rest)} smaller", "", "", f"{sum(x.line.count for x in rest):,}", nbytes, ""))
        head = ("from", "collective", "over", "count", "bytes", "asked")
        others = sum(max(len(row[i]) for row in (head, *rows)) + GAP for i in range(1, len(head)))
        room = max(width - others - 1, 12)
        folded = [(place_text(x.line, room), *row[1:]) for x, row in zip(shown, rows, strict=False)]
        listed = table(
            "collectives that the compiler emits, by source line and equation (count × trips)",
            head,
            [*folded, *rows[len(shown) :]],
            right=("count", "bytes"),
            whole=("collective", "over", "asked"),
        )
        return render(fields(said, width) + "\n", listed, width=width)


class AuditOptions(TypedDict, total=False):
    """What `audit` takes beside the hardware, and `doctor` passes on."""

    compiler: str | None
    donate_argnums: Sequence[int] | None
    rel_gap: float
    time_limit_s: float | None


def audit(
    fn: Callable[..., Any],
    *args: Any,
    hardware: str,
    compiler: str | None = None,
    donate_argnums: Sequence[int] | None = None,
    rel_gap: float = REL_GAP,
    time_limit_s: float | None = None,
) -> Audit:
    """Compiles a program with its own annotations, and holds it against the best plan.

    Args:
      fn: the function, or the result of `jax.jit`, with or without shardings of arguments and results.
      args: pytrees of arrays or ShapeDtypeStructs; their NamedShardings count as annotations.
      hardware: chip and topology, such as "h100:1x8".
      compiler: "gpu", "tpu" or "cpu"; None takes the hardware's own.
      donate_argnums: as in `jax.jit`; None takes those of `fn`.
      rel_gap: of the solver.
      time_limit_s: of the best plan, as in `autoshard.plan`.

    Raises:
      MeshError: no annotation names a mesh.
      CompilerMissingError: the compiler is not installed.
    """
    leaves, tree = jax.tree.flatten(args)
    closed, out_tree = jax.make_jaxpr(fn, return_shape=True)(*args)
    jitted = _jit_of(closed)
    inputs = _specs(jitted.get("in_shardings", ()), leaves)
    outputs = _specs(jitted.get("out_shardings", ()), [None] * len(_jax.open_jaxpr(closed).outvars))
    donated = jitted.get("donated_invars", (False,) * len(leaves))
    if donate_argnums is None:
        flags: Any = jax.tree.unflatten(tree, donated)
        donate_argnums = [i for i, of_one in enumerate(flags) if (every := jax.tree.leaves(of_one)) and all(every)]
    mesh = _mesh(jitted, leaves, closed)
    bare = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    out_structure = jax.tree.structure(out_tree)

    def priced_with(specs: Sequence[Any]) -> Evaluation:
        """The program with other specs of some inputs, and of the outputs that are stored in their place."""
        changed = {i for i, spec in enumerate(specs) if spec is not None}
        own = [inputs[i] if spec is None else spec for i, spec in enumerate(specs)]
        if changed:
            tied = {output for output, position in hand.space.tied.items() if position in changed}
            ends = [AUTO if i in tied else spec for i, spec in enumerate(outputs)]
        else:
            ends = outputs
        return evaluate(
            fn,
            *bare,
            mesh=mesh,
            hardware=hardware,
            in_specs=jax.tree.unflatten(tree, own),
            out_specs=jax.tree.unflatten(out_structure, ends),
            donate_argnums=donate_argnums,
            for_grad=False,
        )

    hand = priced_with([None] * len(leaves))

    def free(*values: Any) -> Any:
        """The program without its constraints."""
        found = rewrite.evaluate(closed, jax.tree.leaves(values), rewrite.Hooks())
        return jax.tree.unflatten(out_structure, found)

    best = plan(
        free,
        *bare,
        mesh=mesh,
        hardware=hardware,
        donate_argnums=donate_argnums,
        for_grad=False,
        rel_gap=rel_gap,
        time_limit_s=time_limit_s,
    )
    found = hand.verify(compiler)
    graph = hand.space.decisions.graph
    axes = MeshAxes.of(mesh)
    where = Places(graph)
    asked = Asked(graph)
    emitted = [
        Emitted(line=line, asked=wanted)
        for wanted in (True, False)
        for line in attribute((), [x for x in found.emitted if asked(x) is wanted], axes, found.tolerance, where)
    ]
    return Audit(
        verification=found,
        emitted=tuple(sorted(emitted, key=lambda x: -x.line.emitted_bytes)),
        hand=hand,
        best=best,
        priced_with=priced_with,
    )


def _specs(shardings: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Per leaf: its spec in `jax.jit`, else its own NamedSharding's spec, else AUTO."""
    told = [*shardings, *([None] * (len(leaves) - len(shardings)))]
    found: list[Any] = []
    for sharding, leaf in zip(told, leaves, strict=True):
        named = next((x for x in (sharding, getattr(leaf, "sharding", None)) if isinstance(x, NamedSharding)), None)
        found.append(AUTO if named is None else named.spec)
    return found


def mesh_of(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """The axes of the mesh that a program's annotations name.

    Raises:
      MeshError: none names a mesh.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return _mesh(_jit_of(closed), jax.tree.leaves(args), closed)


def _jit_of(closed: Any) -> Mapping[str, Any]:
    """The parameters of the one `jax.jit` that is the whole program; empty if it is none."""
    eqns = _jax.open_jaxpr(closed).eqns
    return eqns[0].params if len(eqns) == 1 and eqns[0].primitive.name in JITS else {}


def _mesh(jitted: Mapping[str, Any], leaves: Sequence[Any], closed: Any) -> dict[str, int]:
    """The mesh that annotations name: of results and arguments, else of constraints inside."""
    annotated = (*jitted.get("in_shardings", ()), *jitted.get("out_shardings", ()), *leaves)
    inside = (eqn.params["sharding"] for eqn in _equations(closed) if eqn.primitive.name == CONSTRAINT)
    for x in (*annotated, *inside):
        sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return dict(sharding.mesh.shape)
    raise MeshError(
        "no annotation of this program names a mesh: give its arguments NamedShardings "
        "(jax.ShapeDtypeStruct(shape, dtype, sharding=…)), or jax.jit its in_shardings"
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of sub-jaxprs included."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in _jax.sub_jaxprs(eqn.params):
            yield from _equations(body)
