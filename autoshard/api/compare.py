"""Compare: our plan beside hand-written layouts, each on its own best mesh.

    def fsdp(mesh):
        return Hand(in_specs=(P("data"), P("data")))

    print(compare(step, state, batch, hardware="h100:1x8", layouts={"fsdp": Template(axes=("data",), write=fsdp)}))

Every layout is priced by the planner's own model on every mesh that it can have, and
shown on its best one: the fastest that fits in memory. By construction ours is the
fastest there. With a compiler, a hand-written layout is compiled on every mesh
on which it is predicted to fit, and its best one is the one with the shortest schedule;
ours is compiled on the mesh that the model chose.
"""

import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, Unpack

from jax.sharding import AbstractMesh
from rich.console import RenderableType

from autoshard import deadline
from autoshard.api.evaluate import evaluate
from autoshard.api.evaluation import Completion, Evaluation
from autoshard.api.options import DonationOptions, SolvingOptions, keywords_of, listing, refuse_unknown
from autoshard.api.planning import plan
from autoshard.api.solved_plan import SolvedPlan
from autoshard.backends import devices as meshes
from autoshard.errors import AutoshardError, InfeasibleError, MeshError, StoppedError
from autoshard.explain.attribution import Attribution, ledger
from autoshard.ir.mesh import MeshAxes
from autoshard.planner.record import PlanRecord
from autoshard.planner.requested_shardings import AUTO
from autoshard.report.notebook import Shown
from autoshard.report.progress import counted
from autoshard.report.tables import bytes_text, columns, fields, render, table, time_text
from autoshard.verification.result import Verification
from cost_models import hardware as read_hardware

log = logging.getLogger("autoshard")

OURS = "autoshard"
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
NAME = 17  # columns of a layout's name
COMPUTES, WAITS = "█", "░"
LONGEST = 3.0  # bars in a chart, of the fastest

Shape = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """A hand-written layout of a program on one mesh.

    Attributes:
      in_specs: PartitionSpecs of the arguments, as `autoshard.evaluate` takes them.
      out_specs: likewise, of the outputs.
      fn: the program with constraints on its activations; None is the program as it is.
    """

    in_specs: Any
    out_specs: Any = AUTO
    fn: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A hand-written layout for meshes of any shape: the names of its axes, and mesh → layout.

    `write` may refuse a mesh by a ValueError, such as where a dimension does not divide.
    """

    axes: tuple[str, ...]
    write: Callable[[AbstractMesh], Hand]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A layout on its best mesh.

    Attributes:
      name: name of the layout; ours is "autoshard".
      record: its prices in the planner's model.
      ledger: why its step takes longer than ours; None for ours.
      verification: the compiled program beside it; None without a compiler, or if it failed.
      refused: why it was not compiled, or empty.
    """

    name: str
    record: PlanRecord
    ledger: Attribution | None
    verification: Verification | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory of a device."""
        return self.record.memory.peak_bytes <= self.record.memory.limit_bytes

    @property
    def compiled_s(self) -> float | None:
        """The step of the compiled schedule; None without one, or where the compiled program does not fit."""
        found = self.verification
        if found is None or found.timeline is None or found.memory.compiled is None:
            return None
        fits = found.memory.compiled.peak <= self.record.memory.limit_bytes
        return found.timeline.step_s if fits else None

    @property
    def moved(self) -> Mapping[str, int]:
        """Predicted logical bytes per device and step, by kind of collective."""
        found: dict[str, int] = {}
        for row in self.record.collectives:
            found[row.kind] = found.get(row.kind, 0) + row.nbytes * row.trips
        return found

    @property
    def emitted(self) -> Mapping[str, int]:
        """The compiled program's, likewise."""
        rows = () if self.verification is None else self.verification.by_kind()
        return {row.kind: row.emitted_bytes for row in rows}


@dataclass(frozen=True, kw_only=True)
class Compared(Shown):
    """Ours and every hand-written layout, the fastest that fit first; `left_out` says why a layout has no place."""

    contenders: tuple[Contender, ...]
    left_out: Mapping[str, str]
    compiler: str | None

    @property
    def ours(self) -> Contender:
        """The planner's."""
        return next(c for c in self.contenders if c.name == OURS)

    @property
    def ratio(self) -> float | None:
        """Our step over the best hand-written one's that fits: compiled, if a compiler was asked. None without one."""
        steps = [s for c in self.contenders if c.name != OURS and (s := self._step_s(c)) is not None]
        own = self._step_s(self.ours)
        return own / min(steps) if steps and own is not None else None

    def _step_s(self, c: Contender) -> float | None:
        """The step that counts; None where the layout does not fit, or is not compiled."""
        if self.compiler is None:
            return c.record.cost.step_s if c.fits else None
        return c.compiled_s

    def __str__(self) -> str:
        width = columns()
        record = self.ours.record
        limit = bytes_text(record.memory.limit_bytes)
        parts: list[Any] = [
            textwrap.fill(f"{record.name} on {record.hardware}, {limit} per device: {self._verdict()}", width) + "\n",
            self._predicted(),
        ]
        if self.compiler is not None:
            parts.append(self._compiled())
        parts += [self._chart(width), self._bytes()]
        losses = [(c.name, c.ledger.sentence()) for c in self.contenders if c.ledger is not None]
        if losses:
            parts.append(f"predicted, against ours\n{fields(losses, width)}\n")
        refused = {c.name: f"not compiled: {c.refused}" for c in self.contenders if c.refused}
        left_out = {**refused, **{name: f"left out: {why}" for name, why in self.left_out.items()}}
        if left_out:
            parts.append(fields(left_out.items(), width))
        return render(*parts, width=width)

    def _verdict(self) -> str:
        if self.ratio is None:
            return "no hand-written layout to compare with"
        what = "predicted" if self.compiler is None else f"compiled by {self.compiler}, priced by the same model"
        return f"ours takes {self.ratio:.3f} of the best hand-written step that fits ({what})"

    def _predicted(self) -> RenderableType:
        ours = self.ours.record.cost.step_s
        cells = [
            (
                _broken(c.name),
                _mesh(c),
                f"{c.record.cost.step_s / ours:.3f}" if c.fits else "no fit",
                *(time_text(s) for s in _times(c.record.cost)),
                bytes_text(c.record.memory.peak_bytes),
            )
            for c in self.contenders
        ]
        return _steps("predicted", cells)

    def _compiled(self) -> RenderableType:
        ours = self.ours.compiled_s
        cells: list[tuple[str, ...]] = []
        for c in sorted(self.contenders, key=lambda c: c.compiled_s or inf):
            found = c.verification
            if found is None or found.timeline is None or found.memory.compiled is None:
                continue
            peak = found.memory.compiled.peak
            ratio = "" if ours is None else f"{found.timeline.step_s / ours:.3f}"
            cells.append(
                (
                    _broken(c.name),
                    _mesh(c),
                    "no fit" if c.compiled_s is None else ratio,
                    *(time_text(s) for s in _times(found.timeline)),
                    bytes_text(peak),
                )
            )
        return _steps(f"compiled by {self.compiler}: its schedule, priced by the same model", cells)

    def _chart(self, width: int) -> str:
        """A bar per layout that fits, the fastest first: the seconds that its step computes, and waits."""
        bars: list[tuple[str, float, float]] = []
        for c in self.contenders:
            timed = c.record.cost if self.compiler is None or c.verification is None else c.verification.timeline
            if timed is not None and self._step_s(c) is not None:
                bars.append((f"{c.name} {_mesh(c)}", timed.compute_s, timed.exposed_s))
        bars.sort(key=lambda bar: bar[1] + bar[2])
        said = "predicted" if self.compiler is None else f"compiled by {self.compiler}"
        return f"step, {said}: {COMPUTES} computes, {WAITS} waits for communication\n\n{_drawn(bars, width)}\n"

    def _bytes(self) -> RenderableType:
        of = [(c, c.moved if self.compiler is None else c.emitted) for c in self.contenders]
        kinds = [k for k in KINDS if any(moved.get(k) for _, moved in of)]
        cells = [(_broken(c.name), *(bytes_text(m[k]) if m.get(k) else "-" for k in kinds)) for c, m in of]
        said = "predicted" if self.compiler is None else "emitted"
        heads = [k.replace("-", "-\n", 1) for k in kinds]
        return table(f"bytes per device and step, {said}", ("layout", *heads), cells, right=heads, whole=("layout",))

    def to_json(self) -> dict[str, Any]:
        """Everything, in SI units."""
        return {
            "name": self.ours.record.name,
            "hardware": self.ours.record.hardware,
            "limit_bytes": self.ours.record.memory.limit_bytes,
            "compiler": self.compiler,
            "ratio": self.ratio,
            "layouts": [_contender_json(c) for c in self.contenders],
            "left_out": dict(self.left_out),
        }


def _steps(title: str, cells: Sequence[Sequence[str]]) -> RenderableType:
    head = ("layout", "mesh", "÷ ours", "step", "compute", "exposed", "hidden", "peak")
    return table(title, head, cells, right=head[2:], whole=("layout", "mesh"))


def _times(cost: Any) -> tuple[float, float, float, float]:
    return cost.step_s, cost.compute_s, cost.exposed_s, cost.hidden_s


def _mesh(c: Contender) -> str:
    return "×".join(map(str, c.record.mesh.sizes))


def _drawn(bars: Sequence[tuple[str, float, float]], width: int) -> str:
    """Lines of a name, a bar of two parts and the step; bars of more than `LONGEST` times the first are cut."""
    names = [textwrap.shorten(name, width // 2, placeholder="…") for name, *_ in bars]
    margin = max(map(len, names), default=0) + 3
    room = width - margin - len("  0.00 ms") - 1
    steps = [compute_s + exposed_s for _, compute_s, exposed_s in bars]
    full = min(max(steps, default=0.0), LONGEST * min(steps, default=0.0))
    lines: list[str] = []
    for name, (_, compute_s, exposed_s) in zip(names, bars, strict=True):
        ends = [round(room * s / full) for s in (compute_s, compute_s + exposed_s)]
        bar = COMPUTES * ends[0] + WAITS * (ends[1] - ends[0])
        drawn = bar if len(bar) <= room else bar[: room - 1] + "…"
        lines.append(f" {name}".ljust(margin) + f"{drawn}  {time_text(compute_s + exposed_s)}")
    return "\n".join(lines)


def _broken(name: str) -> str:
    """A long name over two lines, broken at an underscore."""
    cut = name.rfind("_", 0, NAME) + 1
    return name if len(name) <= NAME or not cut else f"{name[:cut]}\n  {name[cut:]}"


def _contender_json(c: Contender) -> dict[str, Any]:
    found = c.verification
    compiled = None
    if found is not None and found.timeline is not None:
        step_s, compute_s, exposed_s, hidden_s = _times(found.timeline)
        compiled = {
            "step_s": step_s,
            "compute_s": compute_s,
            "exposed_s": exposed_s,
            "hidden_s": hidden_s,
            "peak_bytes": None if found.memory.compiled is None else found.memory.compiled.peak,
            "bytes": dict(c.emitted),
            "ok": found.ok,
            "version": found.version,
        }
    step_s, compute_s, exposed_s, hidden_s = _times(c.record.cost)
    return {
        "layout": c.name,
        "mesh": c.record.mesh.shape,
        "fits": c.fits,
        "step_s": step_s,
        "compute_s": compute_s,
        "exposed_s": exposed_s,
        "hidden_s": hidden_s,
        "peak_bytes": c.record.memory.peak_bytes,
        "bytes": dict(c.moved),
        "ledger": None if c.ledger is None else c.ledger.to_json(),
        "compiled": compiled,
        "refused": c.refused,
    }


class CompareOptions(DonationOptions, SolvingOptions, total=False):
    """Those of `plan` that `compare` passes on."""


@listing(CompareOptions)
def compare(
    fn: Callable[..., Any],
    *args: Any,
    hardware: str,
    layouts: Mapping[str, Template],
    mesh: Shape | None = None,
    compiler: str | None = None,
    completion: Completion = "shardy",
    **options: Unpack[CompareOptions],
) -> Compared:
    """Prices ours and every hand-written layout, each on its own best mesh; compiles them, if asked.

    Args:
      fn: a jittable function without sharding words.
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      hardware: chip and topology, `"h100:1x8"`.
      layouts: by name.
      mesh: the only mesh to look at: ours, and of layouts with as many axes (in its order);
        those with one axis take all devices. None tries every one- and two-dimensional mesh
        for ours, and for a layout every mesh of as many axes as it has.
      compiler: "gpu", "tpu" or "cpu", which compiles ours, and every layout on every mesh where it is
        predicted to fit, without a device.
      completion: as in `autoshard.evaluate`.
      **options: of `autoshard.plan`: memory, unknown, donate_argnums, donate_argnames;
        time_limit_s, per mesh, and rel_gap.

    Raises:
      InfeasibleError: we have no plan that fits.
      MissingRuleError: a primitive without a rule, with its source line.
      MeshError: the hardware cannot hold the mesh.
    """
    refuse_unknown(options, keywords_of(compare), "compare")
    devices = read_hardware(hardware).devices
    common: dict[str, Any] = {"hardware": hardware, **options}
    ours = _ours(fn, args, [mesh] if mesh is not None else meshes.candidates(devices), common)
    own = (ours.record, ours.planned.assignment)
    mine = Contender(name=OURS, record=ours.record, ledger=None)
    contenders = [mine if compiler is None else _compiled(mine, ours, compiler)]
    left_out: dict[str, str] = {}
    for name, template in counted(list(layouts.items()), "layout"):
        if deadline.is_stopped():
            left_out[name] = "interrupted before it was priced"
            continue
        tried_on = list(mesh_shapes(template.axes, devices, mesh))
        try:
            found = evaluations(fn, args, template, tried_on, completion=completion, **common)
        except (AutoshardError, ValueError) as error:
            left_out[name] = str(error).partition("\n")[0]
            continue
        tried = [
            Contender(name=name, record=made.record, ledger=ledger((made.record, made.assignment), own))
            for made in found
        ]
        if compiler is not None:
            some = max(1, sum(made.fits for made in found))
            tried = [_compiled(c, made, compiler) for c, made in zip(tried[:some], found, strict=False)]
            tried.sort(key=lambda c: c.compiled_s or inf)
        contenders.append(tried[0])
    contenders.sort(key=lambda c: (not c.fits, round(c.record.cost.step_s, 9), c.name != OURS))
    return Compared(contenders=tuple(contenders), left_out=left_out, compiler=compiler)


def _tell(now: str) -> None:
    log.debug("%s", now, extra={"now": now})


def _ours(
    fn: Callable[..., Any], args: Sequence[Any], shapes: Sequence[Shape], options: Mapping[str, Any]
) -> SolvedPlan:
    """The best plan over several meshes."""
    found: list[SolvedPlan] = []
    last: InfeasibleError | None = None
    for shape in counted(shapes, "mesh"):
        if found and deadline.is_stopped():
            break  # the best of the meshes so far
        _tell(f"ours on {MeshAxes.of(shape)}")
        try:
            found.append(plan(fn, *args, mesh=shape, **options))
        except InfeasibleError as error:
            last = error
        except StoppedError:
            if not found:
                raise
    if not found:
        raise last or MeshError("there is no mesh to plan for: take more than one device")
    best_s = min(made.cost for made in found)
    return min(found, key=lambda made: meshes.order(made.cost, made.record.mesh.ndim, best_s))


def evaluations(
    fn: Callable[..., Any], args: Sequence[Any], template: Template, shapes: Sequence[Shape], **options: Any
) -> list[Evaluation]:
    """A template on every mesh that it takes: those where it fits first, the fastest first.

    Raises:
      ValueError: it takes none of the meshes; the message is that of the last refusal.
    """
    found: list[Evaluation] = []
    last: Exception = MeshError(f"no mesh over these devices has the axes {', '.join(template.axes)}")
    for shape in shapes:
        if deadline.is_stopped():
            last = StoppedError("pricing a layout")
            break
        _tell(f"a layout over {', '.join(template.axes)} on {MeshAxes.of(shape)}")
        try:
            hand = template.write(meshes.abstract(MeshAxes.of(shape)))
            made = evaluate(
                hand.fn or fn, *args, mesh=shape, in_specs=hand.in_specs, out_specs=hand.out_specs, **options
            )
        except (AutoshardError, ValueError) as error:
            last = error
            continue
        found.append(made)
    if not found:
        raise last
    return sorted(found, key=lambda made: (not made.fits, made.cost))


def mesh_shapes(axes: Sequence[str], devices: int, given: Shape | None = None) -> Iterator[Shape]:
    """Meshes with these axes: every ordered factorization into parts above 1, or the given mesh, if it fits."""
    if given is not None and len(given) == len(axes):
        yield dict(zip(axes, given.values(), strict=True))
    elif given is not None and len(axes) == 1:
        yield {axes[0]: prod(given.values())}
    else:
        for sizes in _factors(devices, len(axes)):
            yield dict(zip(axes, sizes, strict=True))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in (d for d in range(2, number) if number % d == 0):
        for others in _factors(number // first, count - 1):
            yield (first, *others)


def _compiled(contender: Contender, made: SolvedPlan | Evaluation, compiler: str) -> Contender:
    _tell(f"compile {contender.name}")
    try:
        return replace(contender, verification=made.verify(compiler=compiler, compiler_options={}))
    except AutoshardError as error:
        return replace(contender, refused=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
