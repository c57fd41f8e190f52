"""Findings of memory: who owns the bytes of a step that does not fit, and the nearest layout that does."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from autoshard.backends import hlo
from autoshard.diagnosis.evidence import Evidence, Source
from autoshard.diagnosis.finding import Finding
from autoshard.problem import memory_profile
from autoshard.problem.decisions import Input
from autoshard.report.tables import bytes_text, short_place

UNNAMED = "values without a source line"
OWNERS = 4  # named of those that hold the most
_AT_ONCE = 6  # that a step which gathers again still holds (XLA:GPU, `benchmarks.hand_sharded: kept_gathers`: 6.5)

# What is laid out otherwise, the least first.
_CHANGES: Sequence[tuple[str, frozenset[str]]] = (
    ("the optimizer's state", frozenset({"optimizer"})),
    ("the parameters and the optimizer's state", frozenset({"optimizer", "parameters"})),
    ("all arguments", frozenset({"optimizer", "parameters", "arguments"})),
)


def out_of_memory(evidence: Evidence) -> Iterator[Finding]:
    """A step that needs more than a device has: nothing else matters, so its price is the whole step."""
    source = evidence.source
    if source is None:
        return
    memory, made = source.hand.memory, source.verification.memory.compiled
    peak = memory.peak_bytes if made is None else made.peak
    if peak <= memory.limit_bytes:
        return
    most = owners(source)
    yield Finding(
        kind="out of memory",
        seconds=evidence.timeline.step_s,
        where=most[0][0],
        bytes=peak - memory.limit_bytes,
        cause=f"A device needs {bytes_text(peak)} and has {bytes_text(memory.limit_bytes)}. At the peak it holds "
        + ", ".join(f"{bytes_text(nbytes)} of {short_place(name)}" for name, nbytes in most[:OWNERS] if nbytes),
        change=_nearest(source, peak),
    )


def kept_gathers(evidence: Evidence) -> Iterator[Finding]:
    """Gathered values that wait for the backward pass: they could be gathered again instead."""
    entry = evidence.module[evidence.module.entry]
    order = {name: at for at, name in enumerate(entry.instructions)}
    users = evidence.flow.users_in(entry)
    change = [0] * (len(order) + 1)
    members: list[hlo.Collective] = []
    for one in evidence.emitted:
        if one.kind != "all-gather" or one.combined > 1 or one.done not in order or not users[one.done]:
            continue
        members.append(one)
        change[order[one.done]] += one.nbytes
        change[max(order[user.name] for user in users[one.done])] -= one.nbytes
    if not members:
        return
    largest = max(members, key=lambda one: one.nbytes)
    saved = max(accumulate(change)) - _AT_ONCE * largest.nbytes
    if saved > 0:
        yield Finding(
            kind="gathered and kept",
            seconds=0.0,
            where=evidence.where(largest),
            bytes=saved,
            cause=f"Gathered values wait for the backward pass, {bytes_text(saved)} more at once than in a step that "
            "gathers them again",
            change="Wrap the layer, in which the weight is constrained to be whole, in jax.checkpoint with the policy "
            "dots_saveable: the weight is then gathered again, and no product is computed again",
        )


def owners(source: Source) -> list[tuple[str, int]]:
    """What holds bytes at the predicted peak, the most first: arguments by the name of their pytree, others by line."""
    decisions, choice = source.assignment.decisions, source.assignment.choice
    _, at, _ = memory_profile.peak(decisions, choice)
    names = {node: leaf.path for node, leaf in zip(decisions.inputs, source.hand.inputs, strict=True)}
    found: dict[str, int] = defaultdict(int)
    for use in decisions.usages:
        if use.start <= at < use.end:
            node = decisions.nodes[use.node]
            name = f"{node.holds} ({names[use.node].split('.')[0].split('[')[0]})" if isinstance(node, Input) else ""
            found[name or node.where or UNNAMED] += int(use.nbytes[choice[use.node]])
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def _nearest(source: Source, peak: int) -> str:
    """The fewest arguments that, laid out as the best plan has them, make the step fit."""
    limit, decisions = source.hand.memory.limit_bytes, source.assignment.decisions
    beyond = peak - source.hand.memory.peak_bytes  # what the compiler needs more than is predicted
    kinds = [getattr(decisions.nodes[node], "holds", "arguments") for node in decisions.inputs]
    for what, changed in _CHANGES:
        specs = [best.spec if kind in changed else None for kind, best in zip(kinds, source.best.inputs, strict=True)]
        if any(kind in changed for kind in kinds):
            other = source.priced_with(specs)
            if other.memory.peak_bytes + beyond <= limit:
                split = [i for i, kind in enumerate(kinds) if kind in changed]
                i = max(split, key=lambda i: len([*source.best.inputs[i].spec]))
                leaf, spec = source.hand.inputs[i].path, source.best.inputs[i].spec
                return (
                    f"Split {what} as `autoshard plan` does, such as {leaf} over {spec}: then "
                    f"{bytes_text(other.memory.peak_bytes)} are predicted"
                )
    best = source.best.memory.peak_bytes
    return f"No layout of the arguments alone is enough: `autoshard plan` needs {bytes_text(best)}"
