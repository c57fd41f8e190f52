"""Remats: a program's own `jax.checkpoint`s undone.

A checkpoint leaves, in the backward pass, the equations that compute values again, under
their own name. Those that the forward pass computes too (the same operation of the same
values) are taken from there; the others (factors of a derivative, which a forward pass
under a checkpoint has no use for) become equations of the forward pass. What of all that
is repeated is then a choice as for any other value.
"""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from autoshard import _jax
from autoshard.ir.bodies import Body, Step, why_once
from autoshard.ir.fingerprint import Writer

Constants = Mapping[Any, str]
"""Variables of values that are made of no input, each with a text that says how."""


def undone_in_place(body: Body, transposed: frozenset[int]) -> tuple[Body, frozenset[int], Constants]:
    """A flat body, its checkpoints opened, without them; which of its steps are transposed, and what is constant."""
    known = _Known(body, {}, {})
    steps: list[Step] = []
    backward: set[int] = set()
    for k, step in enumerate(body.steps):
        step = known.renamed(step)
        if k not in transposed:
            known.add(step)
        elif known.is_again(step):
            if known.is_known(step):
                continue
            known.add(step)
        else:
            backward.add(len(steps))
        steps.append(step)
    outvars = tuple(known.name(atom) for atom in body.outvars)
    return replace(body, steps=tuple(steps), outvars=outvars), frozenset(backward), known.constant


def undone(
    forward: Body, backward: Body, same: Mapping[Any, Any], constants: Constants
) -> tuple[Body, Body, dict[Any, Any], Constants]:
    """The bodies of a pair of scans, their checkpoints opened, without them.

    Args:
      forward: the forward body.
      backward: the backward one.
      same: variable of the backward body → variable of the forward one with the same value; what the bodies are
        returned with has also those of steps that the backward one has no longer.
      constants: inputs of the forward body that are; what they are returned with has also those made in it.
    """
    known = _Known(forward, same, constants)
    for step in forward.steps:
        known.add(step)
    ahead, back = list(forward.steps), list[Step]()
    for step in backward.steps:
        if not known.is_again(step):
            back.append(step)
        elif not known.is_known(known.renamed(step)):
            ahead.append(known.renamed(step))
            known.add(ahead[-1])
    found = {**known.same, **{var: var for step in ahead[len(forward.steps) :] for var in step.eqn.outvars}}
    return replace(forward, steps=tuple(ahead)), replace(backward, steps=tuple(back)), found, known.constant


class _Known:
    """The values of a forward pass by what computes them.

    `same` maps a variable of the backward pass to the one of the forward pass that holds its value; `forward` has
    all of the latter.
    """

    def __init__(self, forward: Body, same: Mapping[Any, Any], constants: Constants) -> None:
        self.same = dict(same)
        self.forward = {*forward.invars, *(var for var, _ in forward.consts)}
        self.constant: dict[Any, str] = {}
        self._of_constant: dict[str, Any] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self._writer = Writer()
        for var, text in constants.items():
            self._add_constant(var, text)

    def name(self, atom: Any) -> Any:
        return atom if _jax.is_literal(atom) else self.same.get(atom, atom)

    def renamed(self, step: Step) -> Step:
        """The step over variables of the forward pass, as far as there are."""
        return replace(step, eqn=step.eqn.replace(invars=[self.name(atom) for atom in step.eqn.invars]))

    def add(self, step: Step) -> None:
        """A step of the forward pass."""
        self.forward.update(step.eqn.outvars)
        if why_once(step.eqn):
            return
        self._results.setdefault(self._key(step), step.eqn.outvars)
        for var, text in self._constants(step):
            self._add_constant(var, text)

    def is_again(self, step: Step) -> bool:
        """Whether a backward step belongs to a checkpoint and computes a value of the forward pass."""
        operands = [self.name(atom) for atom in step.eqn.invars]
        forward = all(_jax.is_literal(x) or x in self.forward for x in operands)
        return forward and _jax.is_repeated(step.eqn) and not why_once(step.eqn)

    def is_known(self, step: Step) -> bool:
        """Whether the forward pass computes the same; its variables stand for the step's results from then on.

        A constant may have been made outside of the forward body, where JAX puts what is the same in every trip.
        """
        results = self._results.get(self._key(step)) or [
            self._of_constant.get(text) for _, text in self._constants(step)
        ]
        if len(results) != len(step.eqn.outvars) or any(x is None or _jax.is_unnamed(x) for x in results):
            return False
        self.same.update(zip(step.eqn.outvars, results, strict=True))
        return True

    def _add_constant(self, var: Any, text: str) -> None:
        self.constant[var] = text
        if not _jax.is_unnamed(var):
            self._of_constant.setdefault(text, var)

    def _constants(self, step: Step) -> list[tuple[Any, str]]:
        """The results of a step that takes constants alone, each with its text."""
        if not all(_jax.is_literal(x) or x in self.constant for x in step.eqn.invars):
            return []
        text = sha256(" ".join(map(str, self._key(step))).encode()).hexdigest()
        return [(var, f"{text}/{i}") for i, var in enumerate(step.eqn.outvars)]

    def _key(self, step: Step) -> tuple[Any, ...]:
        return self._writer.operation(step.eqn), *map(self._operand, step.eqn.invars)

    def _operand(self, atom: Any) -> Any:
        if _jax.is_literal(atom):
            return f"{self._writer.value(_jax.literal(atom))}:{atom.aval}"
        return self.constant.get(atom, atom)
