"""Recomputed: a traced program and what it keeps → the program that keeps this alone."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from autoshard.errors import RecomputeError, SpecError
from autoshard.ir.grouping import grouped
from autoshard.ir.recomputation import Recomputation, Remat
from autoshard.ir.recompute import rewritten
from autoshard.ir.saved_values import CARRIED, ForwardPass, ForwardValue, SavedValues, ValueId, saved_values
from autoshard.ir.sinking import sunk
from autoshard.ir.trace import Traced


def recomputed(traced: Traced, chosen: Recomputation) -> Traced:
    """The program that keeps these values alone; its digest is that of the program as it was traced.

    Raises:
      SpecError: the program has no such values or groups, others have to be kept as well, or what is offloaded is not
        stacked by one loop for another.
    """
    saved = savable(traced, chosen.remat)
    known = {str(value.id): value.id for one in saved.passes for value in one.values}
    strange = [text for text in chosen.kept if text not in known]
    if strange:
        raise SpecError(f"the program has no value at {', '.join(strange[:3])} that a backward pass could read")
    stackable = {str(at) for at in saved.stackable}
    strange = [text for text in chosen.offloaded if text not in stackable or text not in chosen.kept]
    if strange:
        raise SpecError(f"the program keeps no stack of {', '.join(strange[:3])} that the host's memory could hold")
    kept, on_host = (frozenset(known[text] for text in texts) for texts in (chosen.kept, chosen.offloaded))
    try:
        jaxpr = rewritten(saved, kept, on_host)
    except RecomputeError as error:
        raise SpecError(str(error)) from error
    jaxpr = jaxpr if chosen.group == 1 else grouped(jaxpr, chosen.group)
    return replace(traced, jaxpr=jaxpr, source_digest=traced.digest, source=traced.jaxpr)


def savable(traced: Traced, remat: Remat) -> SavedValues:
    """Finds the values that a program could keep for its backward passes; its cheap constants are made in its loops."""
    return saved_values(sunk(traced.jaxpr), remat=remat)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptValue:
    """A value that backward passes find kept.

    Attributes:
      place: its place in the program, as `Recomputation.kept` has it.
      where: the user's line that makes it.
      shape: of one trip of the loops around it.
      dtype: its type.
      trips: how many of them are in memory at once.
      nbytes: of all of them, on all devices together.
      on_host: whether the host's memory holds them.
    """

    place: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    trips: int
    nbytes: int
    on_host: bool


def kept_values_of(traced: Traced, chosen: Recomputation) -> tuple[KeptValue, ...]:
    """Lists the values that a recomputed program keeps; a stack is told by the value that it stacks."""
    saved = savable(replace(traced, jaxpr=traced.source), chosen.remat)
    found = {str(value.id): (value, one) for one in saved.passes for value in one.values}
    kept: list[KeptValue] = []
    for text in chosen.kept:
        v, one = found[text]
        if v.id.stacked:
            continue
        trips = v.trips * _at_once(v, one, chosen.group) // one.source.length
        kept.append(
            KeptValue(
                place=text,
                where=v.where,
                shape=v.aval.shape,
                dtype=str(v.aval.dtype),
                trips=trips,
                nbytes=v.aval.nbytes * trips,
                on_host=text in chosen.offloaded,
            )
        )
    return tuple(kept)


def _at_once(value: ForwardValue, one: ForwardPass, group: int) -> int:
    """Of how many trips of the scan around it a value is in memory at once."""
    length = one.source.length
    if group == 1 or length % group or length <= group:
        return length
    return group + (length // group if value.must_keep == CARRIED else 0)


def recomputation_of(
    saved: SavedValues, kept: Collection[ValueId], remat: Remat, on_host: Collection[ValueId] = ()
) -> Recomputation:
    """Returns these values, and those of them in the host's memory, without those that no backward pass reads."""
    used = saved.used(kept)
    offloaded = used.intersection(on_host)
    return Recomputation(remat=remat, kept=tuple(sorted(map(str, used))), offloaded=tuple(sorted(map(str, offloaded))))
