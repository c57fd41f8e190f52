"""Cut: a loss of one micro-batch, cut where its stack of layers begins and ends.

The stack is a scan over stacked weights whose carry follows from the batch (of several,
the one with the most weights). Around it stand three programs:

    once     what follows from no micro-batch: casts of weights, tables
    before   from a micro-batch to the stack's first carry: the embedding
    after    from the stack's last carry to the loss: the head

All of them are jaxprs over the equations of the traced loss, with their source lines.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import _jax
from autoshard.errors import StageError
from autoshard.ir.bodies import Body, Step, opened, why_once
from autoshard.ir.op_traits import SCAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A loss in parts; every value is named by its variable in the traced loss.

    Attributes:
      body: the loss, its calls opened.
      layers: the scan over the layers.
      where: its line.
      length: how many layers there are.
      consts, carry, slices: the scan's operands: constants, first carry, stacked weights.
      carried: the scan's last carry.
      of_batch: what follows from the micro-batch, its inputs included.
      before: the steps that the stack needs of a micro-batch.
      after: the steps behind the stack, and those of a micro-batch that only they need.
      once: the steps that follow from no micro-batch.
    """

    body: Body
    layers: Any
    where: str
    length: int
    consts: tuple[Any, ...]
    carry: tuple[Any, ...]
    slices: tuple[Any, ...]
    carried: tuple[Any, ...]
    of_batch: frozenset[Any]
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    once: tuple[Step, ...]

    @property
    def constants(self) -> set[Any]:
        """The variables of the arrays that the loss closes over."""
        return {var for var, _ in self.body.consts}

    def ordered(self, variables: Collection[Any]) -> list[Any]:
        """Some of its variables in the order of the program, constants first."""
        body = self.body
        order = [var for var, _ in body.consts] + [*body.invars, *(v for step in body.steps for v in step.eqn.outvars)]
        return [v for v in order if v in variables]

    def program(self, steps: Sequence[Step], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """The closed jaxpr of some steps from variables to atoms."""
        eqns = [step.eqn for step in steps]
        return _jax.without_dead(self.body.with_steps(eqns, invars=list(inputs), outvars=list(outputs)))


def cut(closed: Any, batch: Sequence[bool], chunks: int) -> Cut:
    """Cuts a loss at its stack of layers.

    Args:
      closed: the loss of one micro-batch.
      batch: which of its inputs are the micro-batch.
      chunks: in how many equal chunks the layers are to be divided.

    Raises:
      StageError: there is no such stack, or it does not divide.
    """
    body = opened(closed)
    lines = _jax.SourceLines()
    of_batch = following({var for var, own in zip(body.invars, batch, strict=True) if own}, body.steps)
    for step in body.steps:
        if (why := why_once(step.eqn)) and not why.startswith("rng"):
            raise StageError(lines(step.eqn), why, "leave it out of the loss, or plan without stages")
    k = _stack(body, of_batch, lines)
    eqn = body.steps[k].eqn
    consts, carries = _jax.scan_arity(eqn)
    length = eqn.params["length"]
    if length % chunks:
        raise StageError(
            lines(eqn),
            f"its {length} layers do not divide into {chunks} equal chunks (stages · repeats)",
            f"take stages · repeats from the divisors of {length}",
        )
    carried = tuple(eqn.outvars[:carries])
    behind = following({var for var in eqn.outvars if not _jax.is_unnamed(var)}, body.steps)
    needed = _leading(eqn.invars, body.steps[:k])
    own = [(i, step, any(is_in(v, of_batch) for v in step.eqn.invars)) for i, step in enumerate(body.steps) if i != k]
    before = tuple(step for _, step, tainted in own if tainted and any(v in needed for v in step.eqn.outvars))
    kept = set(map(id, before))
    return Cut(
        body=body,
        layers=eqn,
        where=lines(eqn),
        length=length,
        consts=tuple(eqn.invars[:consts]),
        carry=tuple(eqn.invars[consts : consts + carries]),
        slices=tuple(eqn.invars[consts + carries :]),
        carried=carried,
        of_batch=frozenset(of_batch | behind),
        before=before,
        after=tuple(step for _, step, tainted in own if tainted and id(step) not in kept),
        once=tuple(step for _, step, tainted in own if not tainted),
    )


def used(steps: Iterable[Step]) -> set[Any]:
    """The variables that steps take."""
    return {v for step in steps for v in step.eqn.invars if not _jax.is_literal(v)}


def made(steps: Iterable[Step]) -> set[Any]:
    """The variables that steps make."""
    return {v for step in steps for v in step.eqn.outvars}


def named(atoms: Iterable[Any]) -> set[Any]:
    """The variables among atoms."""
    return {v for v in atoms if not _jax.is_literal(v)}


def is_in(atom: Any, variables: Collection[Any]) -> bool:
    """Whether an atom is one of these variables."""
    return not _jax.is_literal(atom) and atom in variables


def following(given: set[Any], steps: Iterable[Step]) -> set[Any]:
    """The variables that follow from the given ones, these included."""
    found = set(given)
    for step in steps:
        if any(is_in(v, found) for v in step.eqn.invars):
            found.update(step.eqn.outvars)
    return found


def _leading(wanted: Iterable[Any], steps: Sequence[Step]) -> set[Any]:
    """The variables that the wanted ones follow from, these included."""
    found = named(wanted)
    for step in reversed(steps):
        if any(v in found for v in step.eqn.outvars):
            found.update(v for v in step.eqn.invars if not _jax.is_literal(v))
    return found


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan whose carry follows from the batch, over arrays.

    Attributes:
      at: its position in the body.
      weights: the elements of the arrays.
      refused: why it is no stack of layers; empty if it is one.
    """

    at: int
    weights: int
    refused: str


def loops_over_layers(body: Body, of_batch: set[Any]) -> list[Loop]:
    """The scans that may be the stack of layers."""
    found: list[Loop] = []
    for k, step in enumerate(body.steps):
        if step.primitive != SCAN:
            continue
        consts, carries = _jax.scan_arity(step.eqn)
        carry, slices = step.eqn.invars[consts : consts + carries], step.eqn.invars[consts + carries :]
        if not slices or not any(is_in(v, of_batch) for v in carry):
            continue
        why = ""
        if any(is_in(v, of_batch) for v in slices):
            why = "it loops over the batch, not over layers"
        elif step.eqn.params["reverse"]:
            why = "it goes through its layers backwards"
        elif any(not _jax.is_unnamed(v) for v in step.eqn.outvars[carries:]):
            why = "its layers return values beside the carry, which stages do not hand on"
        found.append(Loop(k, sum(v.aval.size for v in slices), why))
    return found


def _stack(body: Body, of_batch: set[Any], lines: _jax.SourceLines) -> int:
    """The position of the scan over the layers."""
    loops = loops_over_layers(body, of_batch)
    fitting = [loop for loop in loops if not loop.refused]
    if fitting:
        return max(fitting, key=lambda loop: (loop.weights, -loop.at)).at
    where, why = "", "the loss has no `jax.lax.scan` over stacked layers, and no equal layers one after the other"
    if loops:
        where, why = lines(body.steps[loops[0].at].eqn), loops[0].refused
    raise StageError(where, why, "stack the layers' weights on a leading dimension, and apply them by jax.lax.scan")
