"""Predicted against published step times: `python -m benchmarks.published_steps [rows.json]`.

Each row is a measured training run that somebody published. The model's shape,
the layout and the hardware are read from the row; the step is predicted with
`cost_models.step_time`, which no row reaches other than through the three
constants per chip that are marked as fitted in the hardware files. Those were
fitted (`fit_steps.py`) on every second priceable row of their chip; errors
are printed for that half, for the other, and for both.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cost_models
from benchmarks import published_models
from cost_models.closed_forms.training_layout import Remat, TrainingLayout
from cost_models.closed_forms.training_step import StepTime, step_time
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines import catalogue
from cost_models.machines.model import Hardware

ROWS = Path(__file__).parent.parent / "tests" / "data" / "published_steps.json"

CHIPS = {
    "H100": "h100", "H200": "h200", "A100-80": "a100", "A100-40": "a100-40", "B200": "b200", "B300": "b300",
    "GB200": "gb200", "GB300": "gb300", "v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e",
    "TPU7x": "tpu-v7x", "H100-96GB 500W": "h100-96",
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "int8": "int8"}

# Global batches that the tables leave out. Korthikanti et al. 2022 (arXiv:2205.05198), table 3.
BATCHES = {"GPT 22B": 4, "GPT 530B": 280, "GPT 1T": 512}
# Google Cloud A3 High nodes have 100 GB/s of network for 8 GPUs.
A3_NIC, A3_SOURCE = 12.5e9, "Bekman, Machine Learning Engineering (744d01e), network/README.md:574-587"
# Without a stated batch: the sequences per device that memory holds, as MaxText's A3 and tiering pages use.
PER_DEVICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One priceable row."""

    row: dict[str, Any]
    chip: str
    dtype: str
    model: Transformer
    layout: TrainingLayout
    hardware: Hardware
    sequences: int
    sequence: int
    measured_s: float

    @property
    def family(self) -> str:
        return f"{self.chip} {self.dtype}"

    def predict(self, hardware: Hardware | None = None) -> StepTime:
        return step_time(
            self.model,
            self.layout,
            hardware or self.hardware,
            sequences=self.sequences,
            sequence=self.sequence,
            dtype=self.dtype,
        )


def read(row: dict[str, Any]) -> Run | str:
    """The run that a row describes, or why it cannot be priced."""
    try:
        return _read(row)
    except cost_models.CostModelError as error:
        return str(error)


def _read(row: dict[str, Any]) -> Run | str:
    chip, precision = CHIPS.get(row["hw"]), re.match(r"\w+", row["precision"].lower())
    if chip is None:
        return f"chip {row['hw']} is not in the catalogue"
    dtype = DTYPES.get(precision[0] if precision else "")
    if dtype is None:
        return f"precision {row['precision']} is not known"
    model = published_models.find(row["model"])
    if model is None:
        return f"the shape of {row['model']} is not published, or no transformer"
    if "n/p" in row["layout"] or row["seq"] is None:
        return "the layout is not published"
    hardware = _hardware(chip, row)
    layout = _layout(row, model, hardware)
    stated = row["gbs_seqs"] or BATCHES.get(row["model"])
    sequences = int(stated or PER_DEVICE * layout.data_shards)
    if "mbs" not in row["layout"] and "lbs" not in row["layout"] and layout.pipeline == 1:
        layout = replace(layout, microbatch=max(1, sequences // layout.data_shards))
    run = Run(
        row=row, chip=chip, dtype=dtype, model=model, layout=layout, hardware=hardware, sequences=sequences,
        sequence=int(row["seq"]), measured_s=0.0,
    )  # fmt: skip
    if layout.devices != hardware.devices:
        return f"the layout has {layout.devices} devices, the hardware {hardware.devices}"
    if layout.microbatches(sequences) < 1:
        return "the batch is smaller than the layout's microbatches"
    return _measured(run)


def _hardware(chip: str, row: dict[str, Any]) -> Hardware:
    """GPUs in whole nodes; TPU slices of at most 256 (v5e, v6e) or as the layout says."""
    per_chip = int(catalogue.chip(chip).numbers["devices_per_chip_count"].value)
    devices = row["chips"] * per_chip
    if not chip.startswith("tpu"):
        found = cost_models.hardware(chip, devices=devices)
        return found.replaced(A3_SOURCE, scale_out__one_way_bytes_per_s=A3_NIC) if "/a3/" in row["src"] else found
    stated = re.search(r"(\d+)xv5p|(\d+) slices|DP(\d+) (?:over )?DCN|pod, DP(\d+)", row["layout"])
    slices = int(next(filter(None, stated.groups()))) if stated else 1
    if chip in ("tpu-v5e", "tpu-v6e"):
        slices = max(slices, row["chips"] // 256)
    if "PaLM" in row["model"]:
        slices = 2
    one = cost_models.hardware(chip, devices=devices // slices)
    return cost_models.hardware(f"{chip}:{slices}*{one.topology.name}") if slices > 1 else one


def _layout(row: dict[str, Any], model: Transformer, hardware: Hardware) -> TrainingLayout:
    """The layout that a row's text names, completed by the habits of its source."""
    text, source = row["layout"], row["src"]
    tpu = hardware.chip.name.startswith("tpu")
    ways = {key: int(value) for key, value in re.findall(r"(?:\b|x)(TP|PP|CP|DP|EP|VP|mbs|lbs)\s*(\d+)", text)}
    if (product := re.search(r"TPxPP=(\d+)", text)) is not None:
        ways["TP"] = min(8, int(product[1]))
        ways["PP"] = int(product[1]) // ways["TP"]
    if (palm := re.search(r"(\d+)-way TP", text)) is not None:
        ways["TP"] = int(palm[1])
    tensor, pipeline, context = (ways.get(key, 1) for key in ("TP", "PP", "CP"))
    left = hardware.devices // (tensor * pipeline * context)
    sharded = re.search(r"FSDP|FULL_SHARD|SHARD_GRAD_OP", text) is not None or tpu
    slices = (
        hardware.topology.shape[0] if tpu and len(hardware.topology.shape) > 2 and "*" in hardware.topology.name else 1
    )
    data = slices if slices > 1 and "FSDP2 DCN" not in text else ways.get("DP", 1) if sharded else left
    if pipeline > 1:
        data, sharded = left, False
    expert = min(ways.get("EP", 1), left)
    while left % expert:
        expert -= 1
    fsdp = left // data // expert if sharded else 1
    if not sharded:
        data = left // expert
    per_stage = model.layers / pipeline
    if "VP" in ways:
        virtual = ways["VP"]
    elif pipeline > 1 and "Llama-3 paper" in source:
        virtual = round(per_stage)  # 128 places of one layer each, two of them empty
    elif pipeline > 1 and source.startswith("Megatron-LM"):
        virtual = max(1, round(per_stage / 2))
    else:
        virtual = 1
    return TrainingLayout(
        data=data,
        fsdp=fsdp,
        expert=expert,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=virtual,
        microbatch=ways.get("mbs", ways.get("lbs", 1)),
        remat=_remat(text, source, row["model"]),
        keep_gathered="SHARD_GRAD_OP" in text,
        shard_optimizer=not tpu,
        collective_matmul=tpu or "AsyncTP" in text or "model_table" in source or "Megatron-Bridge" in source,
    )


def _remat(text: str, source: str, model: str) -> Remat:
    """The rematerialization of the source: as written, else as in its recipes."""
    if re.search(r"remat minimal|selAC", text):
        return "minimal"
    # MaxText benchmarks/maxtext_trillium_model_configs.py, tpu-recipes training/ironwood: Llama 3.1
    # keeps (or offloads) attention's operands and recomputes the MLP.
    if "offloaded" in text or ("tpu-recipes" in source and "llama3.1" in model.lower()):
        return "mlp"
    if re.search(r"remat full|actckpt=1|fullAC", text):
        return "full"
    if "actckpt=0" in text:
        return "none"
    if "torchtitan" in source:
        return "minimal" if "8B" in model and "CP" not in text else "full"
    if re.search(r"cases_april2021|23.08 README$|NeoX|llm-foundry|PaLM", source):
        return "full"
    if "A3" in source or "/a3/" in source:
        return "minimal"
    return "full" if re.search(r"MaxText|tpu-recipes|gpu-recipes", source) else "none"


def _measured(run: Run) -> Run | str:
    """Fill in the measured step: as printed, else from tokens, FLOP/s or MFU in the source's own accounting."""
    row, model = run.row, run.model
    tokens = run.sequences * run.sequence
    chips = row["chips"]
    if row["step_s"] and row["gbs_seqs"]:
        return replace(run, measured_s=float(row["step_s"]))
    if row["tok_s_chip"]:
        return replace(run, measured_s=tokens / (row["tok_s_chip"] * chips))
    flops = model.train_flops(run.sequence, causal=False)
    if re.search(r"cases_april2021|NeoX", row["src"]):
        # These tables count what activation checkpointing computes again.
        inner = model.multiplied_parameters - model.vocab * model.d_model
        flops += 2 * inner + model.score_flops(run.sequence, causal=False)
    peak = catalogue.chip(run.chip).numbers["peak_bfloat16_flops_per_s"].value
    per_chip = catalogue.chip(run.chip).numbers["devices_per_chip_count"].value
    if row["tflops_per_chip"]:
        return replace(run, measured_s=flops * tokens / (row["tflops_per_chip"] * 1e12 * chips))
    if row["mfu_pct"]:
        return replace(run, measured_s=flops * tokens / (row["mfu_pct"] / 100 * peak * per_chip * chips))
    return "no step time, tokens/s, FLOP/s or MFU is stated"


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, ties sharing their mean."""
    ascending = np.sort(values)
    return [float(np.mean(np.flatnonzero(ascending == value))) for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def describe(errors: Sequence[float]) -> str:
    """Median and 90th percentile of absolute relative errors."""
    absolute = np.abs(errors)
    worst = np.quantile(absolute, 0.9)
    return f"median {np.median(absolute):6.1%}   90th percentile {worst:6.1%}   ({len(absolute)} rows)"


@dataclass(frozen=True, slots=True)
class Family:
    """The runs of one chip at one precision.

    Attributes:
        rows: Number of them.
        error: Median absolute error of the predicted step times.
        constant_error: The same of one constant MFU for all of them, their geometric mean.
        rank: Spearman's correlation of predicted and measured MFU; None of fewer than 8 rows.
    """

    name: str
    rows: int
    error: float
    constant_error: float
    rank: float | None


@dataclass(frozen=True, slots=True)
class Board:
    """Every run, predicted.

    Attributes:
        skipped: Why rows are not priced.
        runs: Those that are.
        predicted_s: Their predicted step times.
        families: By chip and precision.
        errors: Relative, by run.
        fitted: Positions of the runs that constants were fitted on.
        baseline: Relative errors of one MFU per family.
    """

    skipped: tuple[str, ...]
    runs: tuple[Run, ...]
    predicted_s: tuple[float, ...]
    families: tuple[Family, ...]
    errors: tuple[float, ...]
    fitted: frozenset[int]
    baseline: tuple[float, ...]

    def of(self, *, fitted: bool) -> list[float]:
        """Errors of the runs that constants were fitted on, or of the others."""
        return [error for i, error in enumerate(self.errors) if (i in self.fitted) == fitted]


def board(rows: Sequence[dict[str, Any]]) -> Board:
    """Predicts every row that can be priced."""
    found = [(row, read(row)) for row in rows]
    runs = [run for _, run in found if isinstance(run, Run)]
    steps = [run.predict() for run in runs]
    errors = [step.seconds / run.measured_s - 1 for run, step in zip(runs, steps, strict=True)]
    by_chip: dict[str, list[int]] = defaultdict(list)
    by_family: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        by_chip[run.chip].append(i)
        by_family[run.family].append(i)
    families: list[Family] = []
    baseline: list[float] = []
    for name, members in sorted(by_family.items()):
        measured = [steps[i].mfu * steps[i].seconds / runs[i].measured_s for i in members]
        constant = float(np.exp(np.mean(np.log(measured))))
        off = [abs(mfu / constant - 1) for mfu in measured]
        baseline += off
        rank = spearman(measured, [steps[i].mfu for i in members]) if len(members) >= 8 else None
        error = float(np.median(np.abs([errors[i] for i in members])))
        families.append(Family(name, len(members), error, float(np.median(off)), rank))
    return Board(
        skipped=tuple(
            f"{row['hw']} {row['model']}, {row['layout']}: {why}" for row, why in found if isinstance(why, str)
        ),
        runs=tuple(runs),
        predicted_s=tuple(step.seconds for step in steps),
        families=tuple(families),
        errors=tuple(errors),
        fitted=frozenset(i for members in by_chip.values() for i in members[1::2]),
        baseline=tuple(baseline),
    )


def main() -> None:
    """Print errors by chip and precision, and of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS, help="JSON list of published runs")
    parser.add_argument("--all", action="store_true", help="print every row")
    arguments = parser.parse_args()
    found = board(json.loads(arguments.rows.read_text(encoding="utf-8")))
    for why in found.skipped:
        print(f"skipped: {why}")
    if arguments.all:
        for run, predicted_s, error in zip(found.runs, found.predicted_s, found.errors, strict=True):
            print(
                f"{run.family:24s} {run.row['model'][:24]:24s} {run.row['layout'][:44]:44s} "
                f"measured {run.measured_s:8.3f} s  predicted {predicted_s:8.3f} s  {error:+6.1%}"
            )
    print("\nchip and precision         rows   model error   constant MFU   Spearman of MFU")
    for family in found.families:
        rank = "  (few)" if family.rank is None else f"{family.rank:8.2f}"
        print(f"{family.name:24s} {family.rows:6d}   {family.error:11.1%}   {family.constant_error:12.1%}   {rank}")
    print(f"\npredicted, all rows          {describe(found.errors)}")
    print(f"predicted, not fitted on     {describe(found.of(fitted=False))}")
    print(f"predicted, fitted on         {describe(found.of(fitted=True))}")
    print(f"one MFU per chip, precision  {describe(found.baseline)}")


if __name__ == "__main__":
    main()
