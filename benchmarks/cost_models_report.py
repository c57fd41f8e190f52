"""The board of the cost models: `python -m benchmarks.cost_models_report` writes docs/cost_models.md.

It compares prices with textbooks, with published measurements and with the jaxpr, and
times the pricing itself. `--compile` adds XLA:GPU's memory, minutes more.
"""

import argparse
import datetime
import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

import cost_models
from autoshard import _startup
from benchmarks import closed_form_agreement, cost_oracles, published_steps
from cost_models.machines import catalogue

PAGE = Path(__file__).parent.parent / "docs" / "cost_models.md"
MILLION = 1_000_000

INTRODUCTION = """\
# What the cost models are worth

Made by `python -m benchmarks.cost_models_report` on {today}: Python {python}, numpy {numpy}, jax {jax}.

`cost_models` prices hardware that need not be here, in seconds, from data files whose every number has a source
(`autoshard hardware h100`). What follows holds it against answers that others printed, runs that others measured,
and the program itself.
"""

KNOWN = """\
## What is left out, and why

- **NVLS.** NVSwitches of Hopper and Blackwell reduce inside the switch: XLA's table has 4,721 µs for an all-reduce of
  1 GiB on 8 H100, where its reduce-scatter and all-gather take 5,651 µs one after the other. The catalogue prices an
  all-reduce as the two, so that a program with one and a program with the other are not told apart by a library's
  setting: at most 20 % too much, for large all-reduces inside one node. A measured file's own all-reduce table is
  used as it is.
- **Twisted tori**, which users may pick for v4 and v5p slices of k×k×2k and k×2k×2k (Jouppi et al. 2023,
  arXiv:2304.01433). The plain torus is priced; a twist raises the bisection, which all-to-alls over the whole slice
  alone are bound by.
- **Two collectives at once on shared links.** A step prices its collectives one after the other, also those of
  different axes that could run side by side: on one link nothing is gained by that, on two a step is priced up to the
  shorter of them too high. Groups of one mesh axis that share links among each other are priced as sharing.
- **No GPU or TPU was at hand**: what the catalogue knows of them is published, and no measured file of one ships.
  `autoshard hardware measure --platform gpu --out FILE` times those that it runs on, `--hardware FILE` plans for them.
- **Gradients that are scattered early.** `autoshard.evaluate` and the closed form keep the gradients of an unrolled
  program whole until the update. XLA:GPU (JAX 0.10.2) scatters some before, and keeps more elsewhere: of 13 of the
  layouts above, compiled, it needs 8.3 GB for Mixtral's FSDP, 4.3 for Llama's, 3.8 with Megatron's split inside, and
  5.0 for Llama's with split sequences; for the other nine the closed form is within 5 %.
- **Small all-reduces over TPU torus axes** at 4 MB take three times what is priced, by a published plot of v5p; from
  134 MB on the two agree within 8 %.
"""

SOURCES = {
    "RL": "roofline", "TP": "tpus", "SH": "sharding", "TR": "transformers", "TN": "training", "AT": "applied-training",
    "IN": "inference", "AI": "applied-inference", "GP": "gpus", "PR": "profiling", "HP": "HighPerfLLMs2024",
    "FL": "FLOPs in published logs", "NC": "nccl-tests", "XL": "XLA",
}  # fmt: skip


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)) + "\n"


def oracles() -> str:
    """Textbook answers, by chapter."""
    right, computed, skipped = Counter[str](), Counter[str](), Counter[str]()
    for name, row in cost_oracles.ROWS.items():
        chapter = SOURCES[name[:2]]
        if name in cost_oracles.COMPUTED:
            computed[chapter] += 1
            right[chapter] += cost_oracles.is_close(row, float(cost_oracles.COMPUTED[name]()))
        else:
            skipped[chapter] += 1
    chapters = list(dict.fromkeys((*computed, *skipped)))
    rows = [[c, str(computed[c]), str(right[c]), str(skipped[c])] for c in chapters]
    total = ["all", str(computed.total()), str(right.total()), str(skipped.total())]
    reasons = Counter(cost_oracles.SKIPPED[name] for name in cost_oracles.ROWS if name in cost_oracles.SKIPPED)
    listed = "\n".join(f"- {count}: {reason}" for reason, count in reasons.most_common())
    return (
        "## Printed answers\n\n"
        "Problems whose answers are printed, mostly in Austin et al., *How to Scale Your Model* (2026-06-24), computed "
        "through public functions (`benchmarks/cost_oracles.py`), each within the tolerance that its own rounding "
        "needs.\n\n"
        + table(("chapter or source", "computed", "within tolerance", "skipped"), [*rows, total])
        + f"\nSkipped:\n\n{listed}\n"
    )


def steps() -> str:
    """Published training runs."""
    board = published_steps.board(json.loads(published_steps.ROWS.read_text(encoding="utf-8")))
    rows = [
        [f.name, str(f.rows), f"{f.error:.1%}", f"{f.constant_error:.1%}", "" if f.rank is None else f"{f.rank:.2f}"]
        for f in board.families
    ]
    summary = [
        ["predicted, all rows", board.errors],
        ["predicted, rows that nothing was fitted on", board.of(fitted=False)],
        ["predicted, rows that constants were fitted on", board.of(fitted=True)],
        ["baseline: one MFU per chip and precision, fitted on all rows", board.baseline],
    ]
    quantiles = [
        [str(what), str(len(errors)), f"{np.median(np.abs(errors)):.1%}", f"{np.quantile(np.abs(errors), 0.9):.1%}"]
        for what, errors in summary
    ]
    missing = "\n".join(f"- {why}" for why in board.skipped)
    return (
        "## Published training runs\n\n"
        "Step times that others measured (Megatron-LM, Megatron-Bridge, MaxText, tpu-recipes, llm-foundry, torchtitan, "
        "papers), predicted from a model's shape, a layout and a hardware file (`benchmarks/published_steps.py`). "
        "Three constants per chip, marked as fitted in its file, were fitted on every second run of it "
        "(`benchmarks/fit_steps.py`).\n\n"
        + table(("", "rows", "median error", "90th percentile"), quantiles)
        + "\n"
        + table(("chip and precision", "rows", "median error", "of one MFU", "Spearman of MFU (8 rows or more)"), rows)
        + f"\nNot priced:\n\n{missing}\n"
    )


def agreement(*, compiled: bool) -> str:
    """Closed form against jaxpr."""
    rows: list[tuple[str, ...]] = []
    for case in closed_form_agreement.CASES:
        found = closed_form_agreement.compare(case)
        peak = closed_form_agreement.compiled_peak(found.evaluation) if compiled else None
        rows.append(closed_form_agreement.row(found, peak))
        print("  ".join(rows[-1]), flush=True)
    return (
        "## Closed form and program\n\n"
        "`cost_models.step_time`, which knows a model's shape alone, beside `autoshard.evaluate` of the traced train "
        "step in the hand-written layout (`benchmarks/closed_form_agreement.py`): truncated models, 16 sequences of "
        "512 tokens unless said, attention without a kernel. Bytes moved otherwise: what one of the two has in another "
        "collective or over other axes, over all that is moved.\n\n"
        + table(closed_form_agreement.HEADER, rows)
        + "".join(f"\n{case.name}: {case.differs}.\n" for case in closed_form_agreement.CASES if case.differs)
    )


def speed() -> str:
    """A million prices."""
    machine = cost_models.hardware("h100:4x8").place({"data": 4, "model": 8})
    sizes = np.linspace(1, 1e9, MILLION)
    rows: list[list[str]] = []
    for kind in cost_models.KINDS:
        cells = [kind]
        for axes in (("data",), ("model",), ("data", "model")):
            start = time.process_time()
            machine.collective_s(kind, axes, sizes)
            cells.append(f"{time.process_time() - start:.3f} s")
        rows.append(cells)
    header = ("collective", "over nodes", "over NVLink (measured tables)", "over both")
    return "## A million prices\n\nCPU seconds, on 32 H100.\n\n" + table(header, rows)


def measured() -> str:
    """The measurements on a CPU."""
    if "cpu-measured" not in cost_models.chips():
        return ""
    chip = catalogue.chip("cpu-measured")
    keys = [key for key, number in chip.numbers.items() if number.source.startswith("measured")]
    rows = [[f"`{key}`", f"{chip.numbers[key].value:.4g}"] for key in keys]
    rows += [
        [f"`domain.{k}`", f"{n.value:.4g}"]
        for k, n in chip.links["domain"].numbers.items()
        if n.source.startswith("measured")
    ]
    facts = ", ".join(f"{chip.measured[key]}" for key in ("date", "device_kind", "versions", "method"))
    return (
        f"## Measured on a CPU\n\n`cpu-measured` ships: {facts}. Memory is what no cache holds; smaller arrays are "
        "several times as fast. Its tables and samples are in the file; `autoshard hardware measure --platform cpu "
        "--out FILE` makes one of another machine, and the planner takes either: `cpu-measured:8`, or its path.\n\n"
        + table(("number", "value, SI"), rows)
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--compile", action="store_true", help="XLA:GPU's memory, too")
    arguments = parser.parse_args()
    _startup.on_cpu_alone()
    introduction = INTRODUCTION.format(
        today=datetime.datetime.now(datetime.UTC).date().isoformat(),
        python=platform.python_version(),
        numpy=metadata.version("numpy"),
        jax=jax.__version__,
    )
    parts = (introduction, oracles(), steps(), agreement(compiled=arguments.compile), speed(), measured(), KNOWN)
    arguments.out.write_text("\n".join(part for part in parts if part), encoding="utf-8")


if __name__ == "__main__":
    main()
