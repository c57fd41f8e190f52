"""Host state: a program whose optimizer state lies in the host's memory between steps, and while they compute.

A train step's state that is read late, and only to be written anew (AdamW's moments, a master copy of the weights), is
not needed in the device's memory before its own update. Here such a leaf enters and leaves the program in the host's
memory, and is copied to the device for its update alone. What is updated together (both moments of a weight) is copied
together, as a *group*. The copies of a group wait behind a barrier until the group before is back in the host's memory:
compilers begin all of them at once otherwise, and all leaves lie in the device's memory together.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from autoshard import _jax
from autoshard.errors import SpecError
from autoshard.ir.bodies import Body, opened
from autoshard.ir.graph import BODIES
from autoshard.ir.op_traits import traits_of
from autoshard.ir.trace import Traced

HOST_MEMORY = "pinned_host"  # JAX's name of the memory of the host from which devices copy


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Leaves of a program's state that are updated together.

    Attributes:
      inputs: their positions among the program's inputs, rising.
      outputs: of each, the position of the output that takes its place.
      steps: the equations that depend on them, by their positions in the opened program.
      nbytes: of all of them, on all devices together.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[int, ...]
    nbytes: int


def state_groups(traced: Traced, ties: Mapping[int, int]) -> tuple[StateGroup, ...]:
    """The groups of a program's state that may lie in the host's memory, the largest first.

    Args:
      traced: the program.
      ties: output position → the donated input that it replaces.
    """
    return tuple(_groups(opened(traced.jaxpr, remats=None), traced, ties))


def with_host_state(traced: Traced, ties: Mapping[int, int], inputs: Sequence[int]) -> Traced:
    """The program with these inputs, and the outputs that replace them, in the host's memory.

    Its digest is that of the program as it was traced.

    Raises:
      SpecError: the program has no such groups of state.
    """
    body = opened(traced.jaxpr, remats=None)
    wanted, groups = set(inputs), _groups(body, traced, ties)
    chosen = [group for group in groups if wanted.intersection(group.inputs)]
    strange = sorted(wanted ^ {i for group in chosen for i in group.inputs})
    if strange:
        names = ", ".join(traced.in_paths[i] if i < len(traced.in_paths) else f"input {i}" for i in strange[:3])
        raise SpecError(f"the program has no state to keep in the host's memory at {names}")
    return replace(traced, jaxpr=_Writer(body).rewritten(chosen), source_digest=traced.digest)


def _groups(body: Body, traced: Traced, ties: Mapping[int, int]) -> list[StateGroup]:
    readers: dict[Any, list[int]] = {}
    for k, step in enumerate(body.steps):
        for x in step.eqn.invars:
            if not _jax.is_literal(x):
                readers.setdefault(x, []).append(k)
    told = _told(body)
    outputs = {i: o for o, i in ties.items()}
    found: list[tuple[set[int], set[int]]] = []  # inputs, and the steps that depend on them
    for i in sorted(outputs):
        result = body.outvars[outputs[i]]
        if not body.invars[i].aval.shape or _jax.is_literal(result):
            continue
        steps = _updating(body, body.invars[i], readers, told)
        if not any(result is x for k in steps for x in body.steps[k].eqn.outvars):
            continue
        inputs = {i}
        for other in [one for one in found if steps & one[1]]:
            found.remove(other)
            inputs, steps = inputs | other[0], steps | other[1]
        found.append((inputs, steps))
    groups = [
        StateGroup(
            inputs=tuple(sorted(inputs)),
            outputs=tuple(outputs[i] for i in sorted(inputs)),
            steps=tuple(sorted(steps)),
            nbytes=sum(_nbytes(traced.in_avals[i]) for i in inputs),
        )
        for inputs, steps in found
    ]
    return sorted(groups, key=lambda group: (-group.nbytes, group.steps))


def _updating(body: Body, var: Any, readers: Mapping[Any, Sequence[int]], told: frozenset[int]) -> set[int]:
    """The steps that depend on a variable, but for those that tell a number of it; none if any is no update."""
    steps: set[int] = set()
    left = [var]
    while left:
        for k in readers.get(left.pop(), ()):
            if k not in steps and k not in told:
                if not _updates(body.steps[k].eqn):
                    return set()
                steps.add(k)
                left += body.steps[k].eqn.outvars
    return steps


def _told(body: Body) -> frozenset[int]:
    """The steps that lead to numbers alone, such as a norm for the log."""
    needed = {x for x in body.outvars if not _jax.is_literal(x) and x.aval.shape}
    found: set[int] = set()
    for k in range(len(body.steps) - 1, -1, -1):
        eqn = body.steps[k].eqn
        if eqn.effects or any(x in needed or x.aval.shape for x in eqn.outvars):
            needed.update(x for x in eqn.invars if not _jax.is_literal(x))
        elif not needed.intersection(eqn.outvars):
            found.add(k)
    return frozenset(found)


def _updates(eqn: Any) -> bool:
    """Whether an equation may be a part of an update: it has no body, multiplies no matrices, and calls nothing."""
    name = eqn.primitive.name
    traits = traits_of(name)
    return not (eqn.effects or name in BODIES or traits.contraction or traits.foreign or traits.collective)


def _nbytes(aval: Any) -> int:
    return prod(aval.shape) * _jax.itemsize(aval.dtype)


class _Writer:
    """A program that is written again, with groups of its state in the host's memory.

    All gradients, and all other results, are made before the first group comes in: XLA:GPU makes a weight's gradient as
    late as it can, and holds what it is made of until then.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.makers = {x: k for k, step in enumerate(body.steps) for x in step.eqn.outvars}
        self.written: list[Any] = []

    def rewritten(self, groups: Sequence[StateGroup]) -> Any:
        """The closed jaxpr."""
        updates = {k for group in groups for k in group.steps}
        gradients, between = self.held_back(updates)
        told = self.behind(updates | between) - updates
        for k in range(len(self.body.steps)):
            if k not in updates and k not in told:
                self.write(k, {})
        invars, outvars = list(self.body.invars), list(self.body.outvars)
        present: dict[Any, Any] = {}  # variable → the one that is read in its place from here on
        waiting = list(dict.fromkeys((*gradients, *self.others(updates | told))))
        fetched = self.fetch(groups[-1], waiting, present)
        for k in sorted(told & between):
            self.write(k, present)
        for n in range(len(groups) - 1, -1, -1):  # the largest comes last, when all other gradients are gone
            for k in groups[n].steps:
                self.write(k, present)
            back: list[Any] = []
            for o in groups[n].outputs:
                maker = self.body.steps[self.makers[outvars[o]]].eqn
                put, there = _jax.moved(maker, present.get(outvars[o], outvars[o]), jax.memory.Space.Host)
                self.written.append(put)
                outvars[o] = there
                back.append(there)
            for i, x in zip(groups[n].inputs, fetched, strict=True):
                invars[i] = x
            fetched = self.fetch(groups[n - 1], back, present) if n else []
        for k in sorted(told - between):
            self.write(k, present)
        results = [x if _jax.is_literal(x) else present.get(x, x) for x in outvars]
        return self.body.with_steps(self.written, invars=invars, outvars=results)

    def fetch(self, group: StateGroup, before: Sequence[Any], present: dict[Any, Any]) -> list[Any]:
        """Copies a group's state to the device when other variables are there, and returns its inputs on the host.

        Whatever reads one of the others, reads it behind the barrier: compilers drop of one what nobody reads.
        """
        near = self.body.steps[group.steps[0]].eqn
        there = [_there(self.body.invars[i]) for i in group.inputs]
        behind = [_jax.variable(x.aval) for x in (*there, *before)]
        self.written.append(_jax.barrier(near, [*there, *before], behind))
        present.update(zip(before, behind[len(there) :], strict=True))
        for i, x in zip(group.inputs, behind, strict=False):
            put, present[self.body.invars[i]] = _jax.moved(near, x, jax.memory.Space.Device)
            self.written.append(put)
        return there

    def write(self, k: int, present: Mapping[Any, Any]) -> None:
        """Writes a step that reads variables as they are at present."""
        eqn = self.body.steps[k].eqn
        self.written.append(eqn.replace(invars=[x if _jax.is_literal(x) else present.get(x, x) for x in eqn.invars]))

    def behind(self, steps: Collection[int]) -> set[int]:
        """These steps, and those that depend on them."""
        found, made = set(steps), {x for k in steps for x in self.body.steps[k].eqn.outvars}
        for k, step in enumerate(self.body.steps):
            if k in found or any(not _jax.is_literal(x) and x in made for x in step.eqn.invars):
                found.add(k)
                made.update(step.eqn.outvars)
        return found

    def others(self, later: Collection[int]) -> list[Any]:
        """The results that are made before the groups are updated: other leaves of the new state."""
        made = {x: k for x, k in self.makers.items() if k not in later}
        results = dict.fromkeys(x for x in self.body.outvars if not _jax.is_literal(x))
        return [x for x in results if x in made and x.aval.shape]

    def held_back(self, updates: Collection[int]) -> tuple[list[Any], set[int]]:
        """The gradients that updates read, before casts, scales and clips, and the steps that these are."""
        gradients, between = self.gradients(updates)
        makers = {self.makers[x] for x in gradients}
        if not makers.isdisjoint(self.behind(self.readers(gradients) & between)):  # one is made of another
            gradients = [x for x in gradients if makers.isdisjoint(self.behind(self.readers([x]) & between))]
        return gradients, between & self.behind(self.readers(gradients) & between)

    def readers(self, variables: Collection[Any]) -> set[int]:
        """The steps that read one of these variables."""
        of = set(variables)
        steps = enumerate(self.body.steps)
        return {k for k, step in steps if any(not _jax.is_literal(x) and x in of for x in step.eqn.invars)}

    def gradients(self, updates: Collection[int]) -> tuple[list[Any], set[int]]:
        """What leaves the backward pass for the updates, and the steps between both."""
        left = [x for k in updates for x in self.body.steps[k].eqn.invars]
        seen, found, between = set[Any](), list[Any](), set[int]()
        while left:
            x = left.pop()
            k = None if _jax.is_literal(x) or x in seen else self.makers.get(x)
            if k is None:
                continue
            seen.add(x)
            eqn = self.body.steps[k].eqn
            if k in updates or traits_of(eqn.primitive.name).cast or (_updates(eqn) and not _jax.is_transposed(eqn)):
                left += eqn.invars
                between.add(k)
            elif x.aval.shape:
                found.append(x)
        return sorted(found, key=self.makers.__getitem__), between - set(updates)


def _there(var: Any) -> Any:
    """An input's variable, in the host's memory."""
    return _jax.variable(var.aval.update(memory_space=jax.memory.Space.Host))
