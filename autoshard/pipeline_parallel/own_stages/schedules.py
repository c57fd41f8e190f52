"""Schedules: tables by name.

GPipe        every forward pass, then every backward one (Huang et al. 2019, arXiv:1811.06965)
1F1B         one backward pass after each forward one, as early as it may run; stage s holds
S − s micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.1)
interleaved  the same with R chunks per stage (there, section 2.2, in Megatron's order)
zero-bubble  1F1B whose gradients of weights wait for a gap; at most S micro-batches are held (after
ZB-H1 of Qi et al. 2024, arXiv:2401.10241; put in order as if all tasks took as long)
"""

from collections.abc import Callable, Mapping
from operator import index

from autoshard.errors import SpecError
from autoshard.pipeline_parallel.own_stages.table import Table, Task, Work

F, B, W = Work.FORWARD, Work.BACKWARD, Work.WEIGHTS


def gpipe(stages: int, repeats: int, steps: int) -> Table:
    """Every forward pass, then every backward one."""
    _once("GPipe", repeats)
    orders = (tuple(Task(work, s, m) for work in (F, B) for m in range(steps)) for s in range(stages))
    return Table(name="GPipe", stages=stages, repeats=1, steps=steps, orders=tuple(orders))


def one_forward_one_backward(stages: int, repeats: int, steps: int) -> Table:
    """One backward pass after each forward one."""
    _once("1F1B", repeats)
    orders = tuple(
        _alternating(
            [Task(F, s, m) for m in range(steps)],
            [Task(B, s, m) for m in range(steps)],
            stages - 1 - s,
        )
        for s in range(stages)
    )
    return Table(name="1F1B", stages=stages, repeats=1, steps=steps, orders=orders)


def interleaved(stages: int, repeats: int, steps: int) -> Table:
    """1F1B with several chunks per stage; micro-batches go round in groups of as many as there are stages.

    Raises:
      SpecError: the micro-batches do not divide into such groups.
    """
    if steps % stages:
        raise SpecError(
            f"steps={steps}, stages={stages}: an interleaved schedule takes micro-batches in groups of as many as "
            "there are stages; make steps a multiple of stages, or take schedule='1F1B'"
        )

    def tasks(work: Work, stage: int) -> list[Task]:
        found: list[Task] = []
        for k in range(steps * repeats):
            group, within = divmod(k, stages * repeats)
            repeat = within // stages
            repeat = repeat if work is F else repeats - 1 - repeat
            found.append(Task(work, repeat * stages + stage, group * stages + within % stages))
        return found

    orders = tuple(
        _alternating(tasks(F, s), tasks(B, s), (stages - 1 - s) * 2 + (repeats - 1) * stages) for s in range(stages)
    )
    return Table(name="interleaved", stages=stages, repeats=repeats, steps=steps, orders=orders)


def zero_bubble(stages: int, repeats: int, steps: int) -> Table:
    """1F1B whose gradients of weights wait for a gap: backward first, then forward, then those."""
    _once("zero-bubble", repeats)
    orders: list[list[Task]] = [[] for _ in range(stages)]
    counts = {work: [0] * stages for work in Work}
    done: set[Task] = set()
    while any(counts[W][s] < steps for s in range(stages)):
        now: list[tuple[int, Task]] = []
        for s in range(stages):
            forward, backward, weights = (counts[work][s] for work in (F, B, W))
            behind = s + 1 == stages or Task(B, s + 1, backward) in done
            if backward < forward and behind:
                now.append((s, Task(B, s, backward)))
            elif forward < steps and forward - weights < stages and (s == 0 or Task(F, s - 1, forward) in done):
                now.append((s, Task(F, s, forward)))
            elif weights < backward:
                now.append((s, Task(W, s, weights)))
        for s, task in now:
            orders[s].append(task)
            counts[task.work][s] += 1
            done.add(task)
    return Table(name="zero-bubble", stages=stages, repeats=1, steps=steps, orders=tuple(map(tuple, orders)))


SCHEDULES: Mapping[str, Callable[[int, int, int], Table]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def table(schedule: str, *, stages: int, repeats: int, steps: int) -> Table:
    """The table of a schedule by its name.

    Raises:
      SpecError: there is no such schedule, it does not go round so, or a number is none.
    """
    if schedule not in SCHEDULES:
        raise SpecError(f"schedule={schedule!r}: it is one of {', '.join(map(repr, SCHEDULES))}")
    for name, count in (("steps", steps), ("repeats", repeats)):
        try:
            index(count)
        except TypeError:
            raise SpecError(f"{name}={count!r}: write a whole number") from None
    return SCHEDULES[schedule](stages, repeats, steps)


def _once(name: str, repeats: int) -> None:
    if repeats != 1:
        raise SpecError(f"repeats={repeats}: in {name} every stage has one chunk; take schedule='interleaved'")


def _alternating(forward: list[Task], backward: list[Task], ahead: int) -> tuple[Task, ...]:
    """Some forward passes, then one of each in turn, then the backward passes that are left."""
    ahead = min(ahead, len(forward))
    steady = [task for pair in zip(forward[ahead:], backward, strict=False) for task in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
