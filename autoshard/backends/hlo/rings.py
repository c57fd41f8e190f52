"""Windowed einsums: rings of collective-permutes that stand for one gather or scatter.

XLA:TPU turns a matmul that needs an all-gather, or ends in a reduce-scatter, into a
loop that multiplies one block while it passes the next to a neighbour (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023).
The blocks go round in both directions, two to a trip, and the n of them take n + 1
permutes. A loop of one trip is unrolled, and only its permutes are left. A gather then
lacks the last two if nobody reads their blocks; the first two of a scatter pass on
zeros and are merged with those of other rings of equal blocks.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from autoshard.backends.hlo.dataflow import Dataflow
from autoshard.backends.hlo.groups import Groups, cycles, parse_pairs
from autoshard.backends.hlo.text import Computation, Instruction

PERMUTES = frozenset({"collective-permute", "collective-permute-start"})

# Names that the SPMD partitioner gives the loop's body (xla/service/spmd/dot_handler.cc).
_BODY = re.compile(r"windowed_dot_general_body_(ag|rs)")
_PARTITIONER = 'is_spmd_generated="true"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One ring, and the collective that it replaces.

    Attributes:
      kind: the collective that it replaces.
      anchor: the loop, or the first permute of an unrolled ring.
      done: the loop, or the last permute.
      permutes: permutes beside the loop (all of them, where there is none) that belong to it.
      block: the array that one permute moves.
      groups: the devices of each ring, in its order.
      moved_bytes: bytes that one device sends in all permutes.
      known: whether the loop's trip count is known (else it counts once).
    """

    kind: Literal["all-gather", "reduce-scatter"]
    anchor: str
    done: str
    permutes: tuple[str, ...]
    block: Instruction
    groups: Groups
    moved_bytes: int
    known: bool = True

    @property
    def size(self) -> int:
        return max(len(group) for group in self.groups)


def rings(flow: Dataflow, computation: Computation) -> dict[str, Ring]:
    """The rings of a computation, by anchor."""
    permutes = [x for x in computation if x.opcode in PERMUTES]
    found = [
        _of_loop(flow, computation, x, permutes)
        for x in computation
        if x.opcode == "while" and _BODY.search(x.called("body") or "")
    ]
    taken = {name for ring in found if ring for name in ring.permutes}
    found += _find_unrolled(flow, computation, [x for x in permutes if x.name not in taken])
    return {ring.anchor: ring for ring in found if ring}


def _of_loop(
    flow: Dataflow,
    computation: Computation,
    loop: Instruction,
    permutes: list[Instruction],
) -> Ring | None:
    """A ring in a loop; a gather's may begin with a permute before it, a scatter's end with one after it."""
    body = flow.loops.body(loop)
    inside = [x for x in body if x.opcode in PERMUTES]
    if not inside:
        return None
    named = _BODY.search(body.name)
    gathers = named is not None and named[1] == "ag"
    if gathers:
        before = flow.sources(computation, computation[loop.operands[0]].operands)
        beside = [x for x in permutes if x.name in before]
    else:
        beside = [x for x in permutes if loop.name in flow.sources(computation, x.operands)]
    trips = flow.loops.trip_count(loop)
    moved = [body[x.operands[0]].nbytes for x in inside] * (1 if trips is None else trips)
    return Ring(
        kind="all-gather" if gathers else "reduce-scatter",
        anchor=loop.name,
        done=loop.name,
        permutes=tuple(x.name for x in beside),
        block=max((body[x.operands[0]] for x in inside), key=lambda x: x.nbytes),
        groups=_cycles(inside[0]),
        moved_bytes=sum(moved) + sum(computation[x.operands[0]].nbytes for x in beside),
        known=trips is not None,
    )


def _find_unrolled(flow: Dataflow, computation: Computation, permutes: list[Instruction]) -> list[Ring]:
    """Rings without a loop: the partitioner's permutes for one matmul, n + 1 or n - 1 of equal size over rings of n.

    Equal matmuls of one source line (layers of an unrolled model) are told apart by
    their order alone, which does for counting them.
    """
    alike: dict[tuple[str, str, int, int], list[Instruction]] = defaultdict(list)
    equal: dict[tuple[int, int], set[str]] = defaultdict(set)  # of all matmuls
    for permute in permutes:
        groups = _cycles(permute)
        size = len(groups[0]) if groups else 0
        if size > 1 and all(len(group) == size for group in groups) and _PARTITIONER in permute.attributes:
            nbytes = computation[permute.operands[0]].nbytes
            alike[permute.op_name, flow.module.where(permute), nbytes, size].append(permute)
            equal[nbytes, size].add(permute.name)
    found: list[Ring] = []
    for (op_name, _, nbytes, size), members in alike.items():
        if not op_name.endswith("dot_general"):
            continue
        names = equal[nbytes, size]
        # A gather passes on what another permute brought, but for the first two blocks; a scatter adds to it first.
        handed_on = sum(bool(names & flow.sources(computation, x.operands)) for x in members)
        count, odd = divmod(len(members) - handed_on, 2)
        gathers = handed_on > 0 and not odd and len(members) in ((size + 1) * count, (size - 1) * count)
        zeros = [x for x in members if not gathers and _of_zeros(computation, x)]
        own = [x for x in members if x not in zeros]
        if gathers:
            each = len(members) // count
        else:
            each = size - 1 if any(_of_zeros(computation, computation[name]) for name in names) else size + 1
        if len(own) % each:
            continue
        for k in range(len(own) // each):
            part = zeros[2 * k : 2 * k + 2] + own[k * each : (k + 1) * each]
            found.append(
                Ring(
                    kind="all-gather" if gathers else "reduce-scatter",
                    anchor=part[0].name,
                    done=part[-1].name,
                    permutes=tuple(x.name for x in part),
                    block=computation[part[0].operands[0]],
                    groups=_cycles(part[0]),
                    moved_bytes=nbytes * len(part),
                )
            )
    return found


def _of_zeros(computation: Computation, permute: Instruction) -> bool:
    return computation[permute.operands[0]].opcode == "broadcast"


def _cycles(permute: Instruction) -> Groups:
    return cycles(parse_pairs(permute.attribute("source_target_pairs") or ""))
