"""Checkpoint policy: what a plan keeps for backward passes, as a policy of `jax.checkpoint`.

A policy sees one equation at a time: its primitive, its operands' types and its parameters, not which layer it is in
nor what comes of it. So it can say what a plan decided only if no two equations that look alike are decided
otherwise. The bodies of the program's loops count where there are any, as that is where layers are; else all.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoshard.errors import SpecError
from autoshard.ir.graph import Path
from autoshard.ir.op_traits import traits_of
from autoshard.ir.recomputation import Recomputation
from autoshard.ir.recomputed import savable
from autoshard.ir.saved_values import ForwardPass, ForwardStep, SavedValues, ValueId
from autoshard.ir.trace import Traced

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLACED = frozenset(
    {"out_sharding", "sharding", "ctx_mesh", "context_mesh"}
)  # where an equation runs, not what it does

Signature = tuple[str, tuple[str, ...], str]
"""Of an equation: its primitive, its operands' types, its parameters."""


@dataclass(frozen=True)  # no slots: JAX refers to it weakly
class CheckpointPolicy:
    """A policy for `jax.checkpoint(layer, policy=…)`.

    Attributes:
      saves: what is saved: signatures, each with where the program has it, `dot_general at model.py:61 (mlp)`.
      names: those of `jax.ad_checkpoint.checkpoint_name` among what is saved.
    """

    saves: tuple[tuple[Signature, str], ...]
    names: tuple[str, ...]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Whether the results of an equation are saved; JAX asks this of every equation of a layer."""
        return _signature(primitive.name, avals, params) in self._signatures

    @cached_property
    def _signatures(self) -> frozenset[Signature]:
        return frozenset(signature for signature, _ in self.saves)

    def __repr__(self) -> str:
        return (
            f"<CheckpointPolicy that saves {', '.join(dict.fromkeys(where for _, where in self.saves)) or 'nothing'}>"
        )


def checkpoint_policy(traced: Traced, chosen: Recomputation) -> CheckpointPolicy:
    """The policy under which a layer saves what was chosen.

    Args:
      traced: the program as it was traced.
      chosen: what is kept of it.

    Raises:
      SpecError: two equations that look alike are decided otherwise.
    """
    saved = savable(traced, chosen.remat)
    known = {str(value.id): value.id for one in saved.passes for value in one.values}
    kept = frozenset(known[text] for text in chosen.kept)
    decided = [*_decided(saved, kept)]
    again = {_of(one, step) for one, step, is_kept in decided if not is_kept}
    saves: dict[Signature, str] = {}
    names: list[str] = []
    said: set[Path] = set()  # the steps whose results are saved
    for one, step in ((one, _sayable(one, step, again)) for one, step, is_kept in decided if is_kept):
        if step is None:
            continue
        said.add(step.path)
        saves.setdefault(_of(one, step), f"{step.primitive} at {step.where}")
        if step.primitive == "name":
            names.append(one.source.forward.steps[step.position].eqn.params["name"])
    repeats = {
        _of(one, step): f"{step.primitive} at {step.where}"
        for one, step, is_kept in decided
        if not is_kept and step.path not in said
    }
    for signature, where in saves.items():
        if signature in repeats:
            raise SpecError(
                f"no policy of jax.checkpoint says what the plan keeps: {where} is kept and {repeats[signature]} "
                f"repeated, and a policy cannot tell them apart ({signature[0]} of {', '.join(signature[1])})\n"
                "  what helps: names, jax.ad_checkpoint.checkpoint_name(x, …) in the program, and plan again; or leave "
                "it to the plan: plan.jit() needs no policy"
            )
    return CheckpointPolicy(tuple(saves.items()), tuple(dict.fromkeys(names)))


def _decided(saved: SavedValues, kept: frozenset[ValueId]) -> Iterable[tuple[ForwardPass, ForwardStep, bool]]:
    """The steps whose results are kept, and those that are repeated, of loops' bodies if there are any.

    What a backward pass does not need is neither.
    """
    bodies = [part for one in saved.flat for part in one.each(one.demand(kept))]
    loops = [(one, demand) for one, demand in bodies if not one.source.is_flat and demand.wired]
    for one, demand in loops or bodies:
        for step in one.steps:
            if any(at in demand.wired and at in kept for at in step.results):
                yield one, step, True
            elif step.position in {one.steps[k].position for k in demand.first}:
                yield one, step, False


def _sayable(one: ForwardPass, step: ForwardStep, repeats: Collection[Signature]) -> ForwardStep | None:
    """The step to be saved for one that is kept; None where a layer is given its result.

    That is the step itself; if it is the same values under another name, and looks like one that is repeated, the step
    that makes these values.
    """
    traits = traits_of(step.primitive)
    if _of(one, step) not in repeats or not (traits.renames or traits.repeats) or step.operands[0] is None:
        return step
    maker = one.value[step.operands[0]].step
    return None if maker is None else _sayable(one, one.steps[maker], repeats)


def _of(one: ForwardPass, step: ForwardStep) -> Signature:
    eqn = one.source.forward.steps[step.position].eqn
    return _signature(step.primitive, [x.aval for x in eqn.invars], eqn.params)


def _signature(primitive: str, avals: Iterable[Any], params: Mapping[str, Any]) -> Signature:
    said = sorted((key, _ADDRESS.sub("", str(value))) for key, value in params.items() if key not in _PLACED)
    types = tuple(f"{getattr(a, 'dtype', '?')}{list(getattr(a, 'shape', ()))}" for a in avals)
    return primitive, types, str(said)
