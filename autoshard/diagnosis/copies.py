"""Findings of copies: values that are stored in one order of their dimensions in memory, and computed in another."""

import re
from collections import defaultdict
from collections.abc import Iterator

from autoshard.backends import hlo
from autoshard.backends.hlo.text import UNKNOWN
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding
from autoshard.report.tables import bytes_text

_ORDER = re.compile(r"\]\{([\d,]*)")  # of dimensions in memory, the minor one first


def reordered(evidence: Evidence) -> Iterator[Finding]:
    """The lines whose arguments or results are copied to another order of their dimensions."""
    entry = evidence.module[evidence.module.entry]
    returned = {entry.root.name, *entry.root.operands}
    found: dict[str, list[int]] = defaultdict(list)  # bytes of every copy
    for instruction in entry:
        if _reorders(entry, instruction) and (instruction.name in returned or _takes_argument(entry, instruction)):
            where = evidence.flow.where(entry, (instruction,))
            found[instruction.op_name or where if where == UNKNOWN else where].append(instruction.nbytes)
    for where, copied in found.items():
        times = "once" if len(copied) == 1 else f"{len(copied):,} times"
        yield Finding(
            kind="copied to another order",
            seconds=float(evidence.machine.hbm_s(2 * sum(copied))),
            where=where,
            cause=f"Arguments or results are copied, {times}, {bytes_text(sum(copied))}, since the order of their "
            "dimensions in memory is not that in which a product takes or makes them",
            change="Write the product so that its result is not transposed. Under Explicit axes an annotation stands "
            "between a product and its transpose, so that the compiler does not fold them: under Auto axes it does",
        )


def _takes_argument(entry: hlo.Computation, instruction: hlo.Instruction) -> bool:
    return entry[instruction.operands[0]].opcode == "parameter"


def _reorders(computation: hlo.Computation, instruction: hlo.Instruction) -> bool:
    """Whether an instruction only copies its one operand, to another order."""
    if instruction.opcode != "copy":
        return False
    source, result = _ORDER.search(computation[instruction.operands[0]].type), _ORDER.search(instruction.type)
    return source is not None and result is not None and source[1] != result[1]
