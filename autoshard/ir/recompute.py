"""Recompute: a program again in which other values are kept for its backward passes.

What is not kept is not stacked, nor held: the steps that make it are repeated in the
backward body, before their first use. In a scan's body that is all. In a flat body the
compiler sees both copies, and would merge them, or run the second one early: what the
repeated steps read stands behind an `optimization_barrier`, together with what their
first reader takes of the backward pass, which goes on with it from behind the barrier.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from autoshard import _jax
from autoshard.errors import RecomputeError
from autoshard.ir.bodies import REMATS, with_bodies
from autoshard.ir.passes import Pass
from autoshard.ir.saved_values import CONSTANT, LOOP_INPUT, Demand, ForwardPass, SavedValues, ValueId
from autoshard.ir.segments import segments

# Backward steps whose operands are in memory: none of them is fused with what makes these.
STORED = REMATS | {"dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "pallas_call"}
WIDENING = frozenset({"broadcast_in_dim", "convert_element_type", "reshape"})


def rewritten(values: SavedValues, kept: Collection[ValueId], on_host: Collection[ValueId] = ()) -> Any:
    """The closed jaxpr of a program that keeps these values for its backward passes, and no others.

    Its inputs and results are the program's. With `values.saved` nothing is repeated.

    Args:
      values: of the program.
      kept: what is kept; what no backward pass then reads is not.
      on_host: which of them are kept in the host's memory: of `values.stackable`.

    Raises:
      RecomputeError: something else has to be kept; it holds what.
    """
    missing = values.missing(kept)
    if missing:
        raise RecomputeError(
            {str(at): why for at, why in missing.items()},
            {str(v.id): v.where for one in values.passes for v in one.values if v.id in missing},
        )
    if not values.flat:
        return values.closed
    kept = frozenset(kept)
    described = {id(one.source): one for one in values.flat}
    return _jax.without_dead(_flat(values.program, described, kept, frozenset(on_host)))


def _flat(
    one: Pass, described: Mapping[int, ForwardPass], kept: frozenset[ValueId], on_host: frozenset[ValueId]
) -> Any:
    """A flat pass's body, written again."""
    eqns = [step.eqn for step in one.forward.steps]
    for k, bodies in one.nested.items():
        eqns[k] = with_bodies(eqns[k], {i: _flat(inside, described, kept, on_host) for i, inside in bodies.items()})
    if id(one) not in described:
        return one.forward.with_steps(eqns)
    own = described[id(one)]
    return _FlatBody(own, own.demand(kept), eqns, on_host).rewritten()


class _Rewriting:
    """Repeated steps, and the pairs of scans inside: the common part of flat passes and pairs of scans.

    `forward` and `backward` are the equations of the two bodies, one list where both are one. `ids` and `variable`
    know every variable of the forward body, those of further stacks among them; `repeated` what holds a value
    that is repeated, in the backward body. `on_host` are the values whose stacks lie in the host's memory.
    """

    def __init__(
        self,
        own: ForwardPass,
        demand: Demand,
        forward: list[Any],
        backward: list[Any],
        on_host: frozenset[ValueId],
    ) -> None:
        self.own, self.demand, self.on_host = own, demand, on_host
        self.forward, self.backward = forward, backward
        self.ids: dict[Any, ValueId] = dict(own.variables)
        self.variable: dict[ValueId, Any] = {}
        for var, at in own.variables.items():
            self.variable.setdefault(at, var)
        self.repeated: dict[ValueId, Any] = {}
        self.due: dict[int, list[int]] = {}  # backward step → the steps that are first needed there
        for k, position in sorted(demand.first.items()):
            self.due.setdefault(position, []).append(k)
        for inside, part, pair in zip(own.inside, demand.inside, own.source.pairs, strict=True):
            scans = forward[pair.forward], backward[pair.backward]
            forward[pair.forward], backward[pair.backward] = _ScanPair(inside, part, on_host).rewritten(*scans, self)

    def add(self, at: ValueId, var: Any) -> None:
        """A further stack of a forward scan."""
        self.ids[var], self.variable[at] = at, var

    def repeat(self, k: int, operand: Callable[[Any], Any]) -> Any:
        """Adds step k once more; `operand` gives the stand-in of a variable of the forward body."""
        eqn = self.forward[self.own.steps[k].position]
        results = [_jax.variable(var.aval) for var in eqn.outvars]
        for var, new in zip(eqn.outvars, results, strict=True):
            if var in self.ids:
                self.repeated[self.ids[var]] = new
        operands = [x if _jax.is_literal(x) else operand(x) for x in eqn.invars]
        return _jax.repeated(eqn, operands, results)


class _ScanPair(_Rewriting):
    """A forward scan and its backward one, written again.

    `held` are the backward body's variables of values that it is given, `staying` those of its own that remain,
    `further` the constants that it closes over. `sent` are copies to the host's memory, in the forward body, `fetched`
    those back, in the backward one.
    """

    def __init__(self, own: ForwardPass, demand: Demand, on_host: frozenset[ValueId]) -> None:
        source = own.source
        self.held: dict[ValueId, Any] = {}
        self.staying: set[Any] = set()
        self.further: dict[Any, Any] = {}
        self.sent: list[Any] = []
        self.fetched: list[Any] = []
        forward, backward = ([step.eqn for step in body.steps] for body in (source.forward, source.backward))
        super().__init__(own, demand, forward, backward, on_host)

    def rewritten(self, ahead: Any, back: Any, outer: _Rewriting) -> tuple[Any, Any]:
        """Returns both scans. `outer` is told of further stacks; the second scan may take its forward variables."""
        source = self.own.source
        consts, carries = _jax.scan_arity(back)
        given = list(zip(back.invars, source.backward.invars, strict=True))
        constant = [(x, var) for x, var in given[:consts] if self.stays(x, var, outer)]
        carried = given[consts : consts + carries]
        sliced = [(x, var) for x, var in given[consts + carries :] if self.stays(x, var, outer)]
        ahead, stacked, results = self.wire(ahead, outer)
        for x, var, every in stacked:
            (constant if every else sliced).append((x, var))
        self.further = dict(source.backward.consts)
        eqns = list(self.fetched)
        for position, eqn in enumerate(self.backward):
            eqns += [self.repeat(k, self.operand) for k in self.due.get(position, ())]
            eqns.append(eqn.replace(invars=[self.operand(x) for x in eqn.invars]))
        eqns += [self.repeat(k, self.operand) for k in self.due.get(len(self.backward), ())]
        outvars = [self.operand(x) for x in source.backward.outvars]
        used = {x for eqn in eqns for x in eqn.invars if not _jax.is_literal(x)}
        used |= {x for x in outvars if not _jax.is_literal(x)}
        constant, sliced = ([(x, var) for x, var in group if var in used] for group in (constant, sliced))
        invars = [var for _, var in (*constant, *carried, *sliced)]
        body = _jax.rewired(
            source.backward.closed,
            eqns=eqns,
            invars=invars,
            outvars=outvars,
            consts=[(var, value) for var, value in self.further.items() if var in used],
        )
        forward = source.forward.with_steps([*self.forward, *self.sent], outvars=[*source.forward.outvars, *results])
        ahead_arity = source.arity
        first, last = ahead.invars[: ahead_arity[0]], ahead.invars[sum(ahead_arity) :]
        middle = ahead.invars[ahead_arity[0] : sum(ahead_arity)]
        return (
            _jax.scan_again(ahead, forward, first, middle, last),
            _jax.scan_again(back, body, *([x for x, _ in group] for group in (constant, carried, sliced))),
        )

    def stays(self, atom: Any, var: Any, outer: _Rewriting) -> bool:
        """Whether an input of the backward body remains one; what it holds is noted.

        A stack of what every trip is given anyway does not.
        """
        at = self.ids.get(self.own.source.same.get(var))
        if at is None:
            return True
        is_stack = outer.ids.get(outer.own.source.read(atom)) == at.stack
        if at not in self.demand.wired or at in self.on_host or (is_stack and self.is_given(at)):
            return False
        self.held.setdefault(at, var)
        self.staying.add(var)
        return True

    def is_given(self, at: ValueId) -> bool:
        return self.own.value[at].free == LOOP_INPUT

    def wire(self, ahead: Any, outer: _Rewriting) -> tuple[Any, list[tuple[Any, Any, bool]], list[Any]]:
        """Returns the operands that the backward body is given in addition to its own.

        Returns:
          ahead: the forward scan, with the variables of further stacks.
          taken: of what is to be given: outside, inside, and whether every trip has the same.
          results: what the forward body is to stack further.
        """
        consts, _ = self.own.source.arity
        inputs = {self.ids[var]: i for i, var in enumerate(self.own.source.forward.invars)}
        taken: list[tuple[Any, Any, bool]] = []
        results: list[Any] = []
        outvars = list(ahead.outvars)
        for at in sorted(self.demand.wired):
            inner = self.variable[at]
            new = _jax.variable(inner.aval)
            if self.is_given(at):
                if at not in self.held:
                    i = inputs[at]
                    if _jax.is_literal(ahead.invars[i]):
                        new = ahead.invars[i]
                    else:
                        taken.append((ahead.invars[i], new, i < consts))
                    self.held[at] = new
                continue
            if at in self.on_host:
                there, stack = self.send(at, inner)
                taken.append((stack, self.fetch(at, there), False))
                outvars.append(stack)
                results.append(there)
                continue
            if at.stack not in outer.variable:
                stack = _jax.variable(_jax.stacked(inner.aval, self.own.source.length))
                outer.add(at.stack, stack)
                outvars.append(stack)
                results.append(inner)
            if at not in self.held:
                self.held[at] = new
                taken.append((outer.variable[at.stack], new, False))
        return ahead.replace(outvars=outvars), taken, results

    def send(self, at: ValueId, inner: Any) -> tuple[Any, Any]:
        """Copies a value to the host's memory; returns the variable that is there, and that of the stack around."""
        eqn, there = _jax.moved(self._maker(at), inner, jax.memory.Space.Host)
        self.sent.append(eqn)
        return there, _jax.variable(_jax.stacked(there.aval, self.own.source.length))

    def fetch(self, at: ValueId, there: Any) -> Any:
        """Copies a value back; returns the backward body's variable of the slice."""
        part = _jax.variable(there.aval)
        eqn, self.held[at] = _jax.moved(self._maker(at), part, jax.memory.Space.Device)
        self.fetched.append(eqn)
        return part

    def _maker(self, at: ValueId) -> Any:
        """The equation of the forward body that makes a value; its first one for what the loop is given."""
        step = self.own.value[at].step
        return self.forward[0 if step is None else self.own.steps[step].position]

    def operand(self, atom: Any) -> Any:
        """Returns the variable that the backward body reads for one of its own, or of the forward body."""
        if _jax.is_literal(atom) or atom in self.staying:
            return atom
        at = self.ids.get(self.own.source.same.get(atom, atom))
        if at is None:
            for var, value in self.own.source.forward.consts:
                if var is atom:
                    self.further[var] = value
            return atom
        return self.held[at] if at in self.held else self.repeated[at]


class _FlatBody(_Rewriting):
    """A body that holds both passes, written again.

    Variables that went through a barrier are read from behind it from then on: `present` has them.
    """

    def __init__(self, own: ForwardPass, demand: Demand, eqns: list[Any], on_host: frozenset[ValueId]) -> None:
        super().__init__(own, demand, eqns, eqns, on_host)
        self.present: dict[Any, Any] = {}
        self.constants = {var for var, _ in own.source.forward.consts}

    def rewritten(self) -> Any:
        """The closed jaxpr."""
        source = self.own.source
        begins = {group[0]: group for group in self.groups()}
        behind: dict[Any, Any] = {}
        anchors = _Anchors(source)
        eqns: list[Any] = []
        for position, eqn in enumerate(self.forward):
            if position in begins:
                behind = self.barred(eqn, anchors.before(position), begins[position][1:], eqns)
            eqns += [self.repeat(k, self.reader(behind)) for k in self.due.get(position, ())]
            read = self.reader({}) if position in source.transposed else self.current
            eqns.append(eqn.replace(invars=[x if _jax.is_literal(x) else read(x) for x in eqn.invars]))
        outvars = [x if _jax.is_literal(x) else self.current(x) for x in source.forward.outvars]
        return source.forward.with_steps(eqns, outvars=outvars)

    def groups(self) -> list[list[int]]:
        """Where barriers stand, each before a backward step, followed by the steps that what it serves is repeated for.

        What a barrier waits for is stored, so the best place is before a contraction: it takes a stored operand anyway.
        Small groups stand before the last one ahead of them. A large one (half of the largest) begins a new barrier;
        small ones join the barrier ahead of them, if they read nothing that is made behind it and all that it serves is
        no more than twice the largest. All that is of one segment of the forward pass: what a layer repeats does not
        wait beside what another one does.
        """
        segment = segments(self.own)
        made = {x: k for k, eqn in enumerate(self.forward) for x in eqn.outvars}
        leaves = {position: self.leaves(ks) for position, ks in self.due.items()}
        sizes = {position: self.made_bytes(self.due[position]) for position, read in leaves.items() if read}
        part = {position: max(segment[k] for k in self.due[position]) for position in sizes}
        largest: dict[int, int] = {}
        for position, nbytes in sizes.items():
            largest[part[position]] = max(largest.get(part[position], 0), nbytes)
        found: list[list[int]] = []
        joined, stored = 0, 0
        for position in range(len(self.forward)):
            if position in self.own.source.transposed and self.forward[position].primitive.name in STORED:
                stored = position
            if position not in sizes:
                continue
            latest = max((made.get(x, -1) for x in leaves[position]), default=-1)
            most = largest[part[position]]
            large = 2 * sizes[position] >= most
            elsewhere = bool(found) and part[position] != part[found[-1][-1]]
            place = stored if stored > latest and not large else position
            joined += sizes[position]
            if not found or latest >= found[-1][0] or large or elsewhere or joined > 2 * most:
                found.append([max(place, found[-1][-1] + 1 if found else 0)])
                joined = sizes[position]
            found[-1].append(position)
        return found

    def made_bytes(self, ks: Sequence[int]) -> int:
        value = self.own.value
        return sum(value[at].aval.nbytes for k in ks for at in self.own.steps[k].results if not at.stacked)

    def leaves(self, ks: Sequence[int]) -> list[Any]:
        """Returns the variables that steps read and both passes hold, constants left out."""
        operands = [x for k in ks for x in self.forward[self.own.steps[k].position].invars]
        return list(dict.fromkeys(x for x in operands if not _jax.is_literal(x) and self.is_leaf(x)))

    def is_leaf(self, var: Any) -> bool:
        at = self.ids.get(var)
        if at is None:
            return var not in self.constants
        return self.is_held(at) and self.own.value[at].free != CONSTANT

    def is_held(self, at: ValueId) -> bool:
        return at in self.demand.wired or bool(self.own.value[at].free)

    def barred(self, near: Any, anchor: Any, group: Sequence[int], eqns: list[Any]) -> dict[Any, Any]:
        """Puts a barrier before the steps that a group repeats; returns each variable's stand-in behind it."""
        before = self.leaves([k for position in group for k in self.due[position]])
        if anchor is not None:
            before = [*(x for x in before if x is not anchor), anchor]
        after = [_jax.variable(x.aval) for x in before]
        eqns.append(_jax.barrier(near, [self.current(x) for x in before], after))
        if anchor is not None:
            self.present[anchor] = after[-1]
        return dict(zip(before, after, strict=True))

    def current(self, var: Any) -> Any:
        return self.present.get(var, var)

    def reader(self, behind: Mapping[Any, Any]) -> Callable[[Any], Any]:
        """Returns the stand-in of a variable in the backward pass, behind a barrier."""

        def read(var: Any) -> Any:
            at = self.ids.get(var)
            if at is not None and at in self.repeated and not self.is_held(at):
                return self.repeated[at]
            return behind.get(var, self.current(var))

        return read


class _Anchors:
    """The values that a barrier before a backward step waits for: those that the step takes of the backward pass.

    The first steps take nothing of it but constants: a result of the forward pass (the loss) takes its place.
    """

    def __init__(self, source: Pass) -> None:
        self.source = source
        self.made: dict[Any, int] = {}  # by what is no constant
        outvars = {x for x in source.forward.outvars if not _jax.is_literal(x)}
        varies = {*source.forward.invars}
        latest: dict[bool, Any] = {}  # of the forward results so far, of those that leave the body and of the others
        self.forward: list[Any] = []
        for k, step in enumerate(source.forward.steps):
            self.forward.append(latest.get(True, latest.get(False)))
            if not any(not _jax.is_literal(x) and x in varies for x in step.eqn.invars):
                continue
            for x in step.eqn.outvars:
                if not _jax.is_unnamed(x):
                    varies.add(x)
                    self.made[x] = k
                    if k not in source.transposed:
                        latest[x in outvars] = x

    def before(self, position: int) -> Any:
        """The variable; None if there is none."""
        operands = [x for x in self.source.forward.steps[position].eqn.invars if not _jax.is_literal(x)]
        taken = [x for x in operands if self.made.get(x) in self.source.transposed]
        return self.narrowest(max(taken, key=self.made.__getitem__)) if taken else self.forward[position]

    def narrowest(self, var: Any) -> Any:
        """Returns the value that one is broadcast or converted from: behind a barrier the wide one would be stored."""
        eqn = self.source.forward.steps[self.made[var]].eqn
        if eqn.primitive.name not in WIDENING:
            return var
        operand = eqn.invars[0]
        if _jax.is_literal(operand) or self.made.get(operand) not in self.source.transposed:
            return var
        return self.narrowest(operand) if _nbytes(operand) <= _nbytes(var) else var


def _nbytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize
