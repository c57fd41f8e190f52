"""Testing: assertions on plans for the test suites of those who use autoshard.

    # conftest.py
    pytest_plugins = ["autoshard.testing"]

    # test_sharding.py
    from autoshard.testing import assert_plan_unchanged, assert_plan_within

    def test_not_slower_than_fsdp():
        assert_plan_within(1.0, step, state, batch, of=fsdp_specs, mesh={"data": 8}, hardware="h100:1x8")

    def test_same_layout_as_ever():
        assert_plan_unchanged("plans/step.json", step, state, batch, mesh={"data": 8}, hardware="h100:1x8")

The plugin adds `pytest --update-plans`, which writes the plan files; without the plugin
the variable AUTOSHARD_UPDATE_PLANS does the same.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.api.compare import Hand
    from autoshard.api.evaluation import Completion, Evaluation
    from autoshard.api.solved_plan import SolvedPlan
    from autoshard.explain.attribution import Attribution
    from autoshard.planner.record import PlanRecord

UPDATE = "AUTOSHARD_UPDATE_PLANS"
STEP_TOLERANCE = 1e-3  # relative; the gap at which the solver stops by default, so that less says nothing
LEAVES = 12  # layouts that a message shows


def pytest_addoption(parser: Any) -> None:
    """Adds `--update-plans`."""
    group = parser.getgroup("autoshard")
    group.addoption("--update-plans", action="store_true", help="write the plan files of assert_plan_unchanged")


def pytest_configure(config: Any) -> None:
    """Passes `--update-plans` on to the assertions, and to processes that tests start."""
    if config.getoption("update_plans") and UPDATE not in os.environ:
        os.environ[UPDATE] = "1"
        config.add_cleanup(lambda: os.environ.pop(UPDATE, None))


def assert_plan_within(
    ratio: float,
    fn: Callable[..., Any],
    *args: Any,
    of: "Hand | Evaluation | Any",
    mesh: Mapping[str, int],
    hardware: str,
    compiler: str | None = None,
    completion: "Completion" = "shardy",
    memory: int | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    **options: Any,
) -> "Attribution":
    """Asserts that the plan's step takes at most `ratio` times that of a hand-written layout.

    In the planner's own model a ratio of 1 holds by construction, up to the solver's gap, as
    long as memory does not bind; smaller ratios, and compiled schedules, tell more.

    Args:
      ratio: the largest allowed ratio of the steps, ours over the hand-written layout's.
      fn: a jittable function without sharding words.
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      of: PartitionSpecs of the arguments; an `autoshard.Hand`, which may hold constraints,
        too; or an `Evaluation`.
      mesh: the mesh of both.
      hardware: the hardware of both.
      compiler: "gpu", "tpu" or "cpu" compiles both and compares their schedules, priced by the
        same model; None compares the predicted steps.
      completion: as in `autoshard.evaluate`.
      memory: as in `autoshard.plan`.
      donate_argnums: as in `jax.jit`.
      options: further options of `autoshard.plan`.

    Returns:
      The predicted loss of the hand-written layout, entry by entry.

    Raises:
      AssertionError: the plan is slower, or the hand-written layout does not fit in memory; the
        message says which tensors lie differently and what each costs.
    """
    from autoshard.api.compare import Hand
    from autoshard.api.evaluate import evaluate
    from autoshard.api.evaluation import Evaluation
    from autoshard.api.planning import plan
    from autoshard.explain.attribution import ledger

    common: dict[str, Any] = {
        "mesh": mesh,
        "hardware": hardware,
        "memory": memory,
        "donate_argnums": donate_argnums,
    }
    if isinstance(of, Evaluation):
        by_hand = of
    else:
        hand = of if isinstance(of, Hand) else Hand(in_specs=of)
        by_hand = evaluate(
            hand.fn or fn,
            *args,
            in_specs=hand.in_specs,
            out_specs=hand.out_specs,
            completion=completion,
            **common,
        )
    memory_of = by_hand.record.memory
    if not by_hand.fits:
        raise AssertionError(
            f"the hand-written layout is no measure: it needs {memory_of.peak_bytes / 1e9:.3g} GB per device, and "
            f"{memory_of.limit_bytes / 1e9:.3g} GB are there\n  at {memory_of.at}\n"
            "  compare with a layout that fits, or say memory="
        )
    made = plan(fn, *args, **common, **options)
    found = ledger((by_hand.record, by_hand.assignment), (made.record, made.planned.assignment))
    hand_s, plan_s, said = by_hand.cost, made.cost, "predicted"
    if compiler is not None:
        hand_s, plan_s = _compiled_s(by_hand, compiler), _compiled_s(made, compiler)
        said = f"compiled by {compiler}, priced by the model of {hardware}"
    if plan_s > ratio * hand_s:
        raise AssertionError(_slower(found, ratio, hand_s, plan_s, said))
    return found


def _compiled_s(made: "SolvedPlan | Evaluation", compiler: str) -> float:
    timeline = made.verify(compiler=compiler, compiler_options={}).timeline
    assert timeline is not None  # a compiler's program has a schedule
    return timeline.step_s


def _slower(found: "Attribution", ratio: float, hand_s: float, plan_s: float, said: str) -> str:
    from autoshard.explain.attribution import ROUNDING, signed
    from autoshard.report.tables import time_text

    head = (
        f"the plan of {found.best.name} takes {time_text(plan_s)}, {plan_s / hand_s:.3f} times the {time_text(hand_s)} "
        f"of the hand-written layout ({said}); at most {ratio:g} times was asked"
    )
    lines = [head, f"  predicted, the hand-written layout {found.sentence()}", *_leaves(found)]
    lines += [
        "  the largest entries; + is what the hand-written layout loses:",
        *(f"    {signed(e.lost_s):>11}  {e.title}" for e in found.entries[:LEAVES] if e.kind != ROUNDING),
    ]
    return "\n".join(lines)


def _leaves(found: "Attribution") -> list[str]:
    """Inputs that lie differently, and the seconds that each one's collectives cost by hand."""
    from autoshard.explain.attribution import signed
    from autoshard.explain.diff import diff

    changes = [x for x in diff(found.hand, found.best).leaves if not x.path.startswith("output ")]
    if not changes:
        return ["  every input lies alike"]
    costs = [found.of_tensor(re.sub(r"\.[\d,…]+(?=\.|$)", "", change.path)) for change in changes]
    lines = ["  tensors that lie differently (by hand → planned), and what their collectives lose by hand:"]
    for cost, change in sorted(zip(costs, changes, strict=True), key=lambda x: -abs(x[0] or 0.0))[:LEAVES]:
        said = "" if cost is None else signed(cost)
        lines.append(f"    {said:>11}  {change.path}: {change.before} → {change.after}")
    if len(changes) > LEAVES:
        lines.append(f"    and {len(changes) - LEAVES} more")
    return lines


def assert_plan_unchanged(
    path: str | Path,
    fn: Callable[..., Any],
    *args: Any,
    update: bool | None = None,
    **options: Any,
) -> "SolvedPlan":
    """Asserts that a program's plan is still the one in a plan file: a change of the model may not change it silently.

    It compares the layout of every input and output, the bytes of each kind of collective, and the
    predicted step. It does not compare the program itself: a change that keeps all of these passes.

    Args:
      path: the plan file, to be kept under version control.
      fn: a jittable function without sharding words.
      args: pytrees of arrays or ShapeDtypeStructs; nothing is allocated.
      update: whether to write the file instead; None: under `pytest --update-plans`.
      options: of `autoshard.plan`, mesh and hardware among them.

    Raises:
      AssertionError: there is no file, or the plan differs; the message says how.
      PlanFileError: the file is no plan file.
    """
    from autoshard.api.planning import plan
    from autoshard.planner.record import read_plan_file, write_plan_file

    path = Path(path)
    made = plan(fn, *args, **options)
    if update if update is not None else os.environ.get(UPDATE, "") not in ("", "0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan_file(made.record, path)
        return made
    if not path.exists():
        raise AssertionError(f"there is no plan file {path}; write it by `pytest --update-plans`, and commit it")
    changed = _describe_changes(read_plan_file(path), made.record)
    if changed:
        raise AssertionError(
            f"the plan of {made.record.name} is not the one in {path}:\n{changed}\n"
            "if that is meant, run `pytest --update-plans` and commit the file"
        )
    return made


def _describe_changes(before: "PlanRecord", after: "PlanRecord") -> str:
    """The differences as text; empty if there are none."""
    from autoshard.explain.diff import diff

    found = diff(before, after)
    moved = abs(after.cost.step_s - before.cost.step_s) > STEP_TOLERANCE * before.cost.step_s
    elsewhere = before.mesh != after.mesh or before.hardware != after.hardware
    return str(found) if found.leaves or found.traffic or found.missing or moved or elsewhere else ""
