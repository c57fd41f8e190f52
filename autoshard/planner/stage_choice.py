"""Stage choice: in words, over which mesh axis a plan has its layers in stages, where that was left open."""

from collections.abc import Mapping, Sequence
from math import inf

from autoshard.planner.record import STAGED
from autoshard.planner.request import PlanRequest


def stage_choice(best: int, costs: Mapping[int, float], requests: Sequence[PlanRequest]) -> str:
    """The choice and its alternatives on the same mesh, the fastest first; empty if none was left open.

    Args:
      best: the number of the chosen request.
      costs: the seconds of each request's plan, by its number; those that do not fit have none.
      requests: all that were planned.
    """
    chosen = requests[best]
    if chosen.program.stages is None:
        return ""
    others: dict[str, float] = {}
    for i, request in enumerate(requests):
        stages = request.program.stages
        if stages is not None and request.target.axes == chosen.target.axes and stages != chosen.program.stages:
            words = _words(request)
            others[words] = min(others.get(words, inf), costs.get(i, inf))
    own_s = costs[best] or 1.0
    said = [
        f"{words} the step did not fit"
        if cost == inf
        else f"{words} the step would take {cost / own_s:.3g} times as long"
        for words, cost in sorted(others.items(), key=lambda item: item[1])
    ]
    axes = {f"{name}={size}": name for name, size in chosen.target.axes.shape.items()}
    said += [f"over {axes[axis]} refused: {why}" for axis, why in chosen.program.not_staged.items() if axis in axes]
    return f"{STAGED} {_words(chosen)}" + (f" ({'; '.join(said)})" if said else "")


def _words(request: PlanRequest) -> str:
    axis = request.program.stages
    return f"{request.target.axes.shape[axis]} stages over {axis}" if axis else "1 stage, without a pipeline,"
