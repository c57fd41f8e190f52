"""The report of `benchmarks.verification`: tables and a scatter from its result lines.

Needs matplotlib (`pip install "autoshard[docs]"`) for the figure alone.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

LARGE, TOLERANCE, SMALL = 0.05, 0.05, 0.01
MEMORY = 0.10
UNENDING_S = 1e6  # of a step that does not fit: behind all that do
PLANNED = "plan"
CONSTRAINTS = "constraints.jsonl"  # beside the results, of `benchmarks.constraints`

# Causes that were found by looking at the compiled programs of the cases below.
CAUSES = """\
- **Embedding lookups of hand layouts on two mesh axes** (`fsdp_megatron` of gpt2-small on 8 × 4): where updates are
  more than the table, the partitioner gathers the gradient that they are added to and scatters a pending sum; the price
  keeps the table where it lies.
- **`megatron_sequence` on square-ish meshes**: the partitioner gathers over the idle axis, with collective-permutes.
- **TPU, sums over a whole torus**: without windowed einsum libtpu emits a reduce-scatter over any part of a slice, but
  over all of it only on a line, on 2x2 and on unequal sides; squares and three dimensions (2x2x2 to 4x4x8) all-reduce
  and slice. Planned and priced so, and `verify` compiles so there. Left to itself it makes a ring, which scatters over
  the whole torus, too, of what most matmuls leave (of 1,024 rows a device that of 768 × 3,072; none of 64 rows), but
  for sums that are pinned whole: two layers of gpt2-small on v5p:2x2x2 (data=2 × model=4, 16 sequences) then
  scatter the 106 MB that are planned as all-reduced, in a peak of ×1.23 of the plan's (×0.68 without).
  `plan.verify(compiler_options={})` shows that.
- **TPU, sums over a whole torus in parts**: libtpu scatters such a sum over one axis if it is pinned so, and over the
  other one for some shapes (of the bf16 matrices that we tried those whose pieces are of an even number of tiles, in a
  layout of its own choice); and hides neither. Planned in parts (this page at 8ddab20), llama3-8b on v5p:4x4x2 took
  551 ms of schedule with rings and 42 constraints, all-reduced and sliced 481 and 17. Pinned sums are not finished in
  parts any more.
- **TPU, sums along a dimension of which the tiles know nothing** (the sequences of what is sent to experts): libtpu
  all-reduces and slices. Planned and priced so, by the order in which the contraction has its dimensions.
- **TPU, uses that are far apart**: libtpu gathers most weights of unrolled layers again for the backward pass, by a
  distance between the two uses; planned and priced so (`problem.sharing`), with jaxpr equations for its instructions.
  Where that is doubtful (`wq` of llama3-8b as planned, 85 equations apart in the backward loop), the gathered weight
  stays pinned: it is gathered once then. So is what mixtral gives its head, 104 apart.
- **TPU, rings that share their first permutes**: the first two of a scatter's ring pass on zeros, and XLA merges them
  with those of other rings of equal blocks (gradients of llama's up and gate); a gather's ring of one trip leaves out
  the last two. Both are read as the collective that they stand for (`hlo.rings`).
- **TPU, products that are only reshaped** (gradients of grouped heads): XLA:TPU reshapes the weight instead, before it
  partitions, and gathers it again. Pinned where it is gathered, it is gathered once (`minimal._reshaped`).
- **GPU, peak memory**: programs without loops are counted in the order in which XLA:GPU runs them: weights'
  gradients last, gathers ahead where they take longer than the forward pass (`autoshard.costs.execution_order`,
  `problem.fetching`). Too much is predicted of `megatron_sequence` of mlp-8k with many rows, where the partitioner
  gathers over the idle axis, and of two scanned layers by `fsdp`; too little of `megatron_sequence` of those.
  Gradients of layers that are computed again may wait whole for the links: eight unrolled layers of llama3-8b by
  `fsdp` with remat (not in these tables) need 1.15 times what is predicted; four and sixteen 0.99 and 1.00.
- **TPU, peak memory**: XLA:TPU's heap is allocated whole. The loss is computed last, and at once where its scores are
  split along the vocabulary, so that it communicates (`memory.lives`). Its f32 scores lie in a hole of the heap or on
  top of everything, as the pieces that gradients leave allow; predicted on top. gpt2-small lies below that by
  `fsdp_megatron` (×0.81 on v5e, ×0.86 on v5p), and on v5p by `fsdp` and as planned (×0.87).
  Gathers run beside compute on v5e alone ("not supported/recommended on platforms other than TPU v5e"): there hand
  layouts' weights are gathered ahead and held, elsewhere right before their use. And there libtpu makes gradients
  that are whole on every device early; elsewhere last, or before as much is gathered (llama3-8b and mixtral by `fsdp`
  on v5p were ×0.85 and ×0.59, and are ×1.01 and ×1.00). Of a device's only sequence the scores of attention are kept
  as their product leaves them, in bf16. Four unrolled layers of llama3-8b without remat on v5p (not in these tables)
  need ×0.83 of what is predicted by `fsdp`, ×0.80 by `dp_megatron`, whose scores are kept in bf16, too.
- **Schedules of scanned layers on GPU** are up to a tenth longer than predicted: a gather hides behind what stands
  right before its use, and behind one matmul alone it does not fit (the second of three gathers of an MLP behind the
  projection before it). A trip's first gather is priced as hidden behind what precedes its contractions alone, its
  last reduction as exposed.
- **Layouts that do not fit** (`dp` of llama3-8b needs 127 GB of 80): XLA's scheduler then saves memory and overlaps
  nothing; the prediction is of a device that holds it.
"""

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The result lines, the last of each key; none where there is no file yet."""
    if not path.is_file():
        return []
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return list({line["key"]: line for line in lines}.values())


def write(results: Path, folder: Path) -> None:
    """Writes `verification.md` and `verification.svg`."""
    lines = read(results)
    folder.mkdir(exist_ok=True)
    _scatter([line for line in lines if "error" not in line and not line["windowed"]], folder / "verification.svg")
    (folder / "verification.md").write_text(_text(lines, read(results.with_name(CONSTRAINTS))), encoding="utf-8")


def bytes_agree(line: Line) -> bool:
    """Whether emitted bytes are within tolerance, in total and in every row of a twentieth of them."""
    rows = line["rows"]
    predicted, emitted = (sum(row[f"{side}_bytes"] for row in rows) for side in ("predicted", "emitted"))
    total = max(predicted, emitted)
    pairs = [(row["predicted_bytes"], row["emitted_bytes"]) for row in rows]
    return _within(predicted, emitted) and all(_within(p, e) for p, e in pairs if max(p, e) >= LARGE * total)


def worst_row(line: Line) -> str:
    """The large row that differs most, as `×1.42 all-gather data`; empty where all agree."""
    total = max(sum(row[f"{side}_bytes"] for row in line["rows"]) for side in ("predicted", "emitted"))
    wrong = [
        row
        for row in line["rows"]
        if max(row["predicted_bytes"], row["emitted_bytes"]) >= LARGE * total
        and not _within(row["predicted_bytes"], row["emitted_bytes"])
    ]
    if not wrong:
        return ""
    row = max(wrong, key=lambda r: abs(r["predicted_bytes"] - r["emitted_bytes"]))
    return f"{_ratio(row['emitted_bytes'], row['predicted_bytes'])} {row['kind']} {'·'.join(row['axes'])}"


def unknown_share(line: Line) -> float:
    """The largest row that the plan does not have, as a share of all emitted bytes."""
    emitted = sum(row["emitted_bytes"] for row in line["rows"]) or 1
    return max((row["emitted_bytes"] / emitted for row in line["rows"] if row["status"] == "EXTRA"), default=0.0)


def peak_ratio(line: Line) -> float:
    """Compiled over predicted peak bytes per device."""
    return line["compiled_memory"]["peak"] / line["predicted_memory"]["peak"]


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's τ-a: concordant less discordant pairs, over all pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs) if signs else 1.0


def steps(line: Line) -> tuple[float, float]:
    """The predicted step and the compiled schedule, as they rank: a program that does not fit never ends.

    Where it does not fit, XLA schedules for memory and overlaps nothing; such steps rank among
    themselves by their seconds, behind all others.
    """
    limit = line["memory_bytes"]
    over = [line[f"{side}_memory"]["peak"] > limit for side in ("predicted", "compiled")]
    return tuple(  # pyright: ignore[reportReturnType]
        seconds + (UNENDING_S if too_much else 0.0)
        for seconds, too_much in zip((line["cost"]["step_s"], line["timeline"]["step_s"]), over, strict=True)
    )


def _within(predicted: float, emitted: float) -> bool:
    return abs(predicted - emitted) <= TOLERANCE * max(predicted, emitted)


def _ratio(emitted: float, predicted: float) -> str:
    return f"×{emitted / predicted:.2f}" if predicted else f"×{inf}"


def _constraints(lines: Sequence[Line]) -> str:
    rows: list[tuple[str, ...]] = []
    for line in lines:
        before, after = line["needed"], line["compiled"]
        rows.append(
            (
                f"{line['hardware']}, {' × '.join(f'{name}={size}' for name, size in line['mesh'].items())}",
                f"{line['contractions']}: {line['contractions'] / 3:.1f}",
                str(before["constraints"]),
                str(after["constraints"]),
                f"{_bytes(before['bytes'])} → {_bytes(after['bytes'])}",
                f"{_bytes(before['peak'])} → {_bytes(after['peak'])}",
                f"{before['step_s'] * 1e3:.1f} → {after['step_s'] * 1e3:.1f} ms",
                f"{line['thinned_s'] / 60:.0f} min",
            )
        )
    heads = ("plan", "contractions: a third", "needed", "compiled", "emitted bytes", "peak", "schedule", "took")
    return _table(heads, rows) + "\n"


def _text(lines: Sequence[Line], constraints: Sequence[Line]) -> str:
    compiled = [line for line in lines if "error" not in line]
    plain = [line for line in compiled if not line["windowed"]]
    days = sorted({line["date"] for line in lines})
    versions = sorted({f"jax {line['versions']['jax']}" for line in lines} | {line["compiler"] for line in compiled})
    parts = [
        "# Predicted against emitted\n",
        f"Made by `python -m benchmarks.verification run` and `… render`; {', '.join(days)}; {', '.join(versions)}. "
        f"{len(compiled)} compiles without a device ({len(lines) - len(compiled)} more were refused by a compiler or "
        "the planner: last section). Every line of `benchmarks/results/verification.jsonl` is one compile.\n",
        "Bytes are logical, per device and step, loops multiplied out. A case agrees when the emitted bytes are "
        "within 5 % of the predicted in total and in every (collective, axes) of at least 5 % of them. *Peak* is "
        "compiled over predicted peak memory per device. *Schedule* is the compiled schedule priced by the plan's own "
        "cost model (the text of a program holds no prices): it judges the planner's view of overlap and fusion, not "
        "the prices. On TPU bytes and peaks are of programs without windowed einsum, so that collectives stay "
        "what they are; *with rings* and in the rank order of layouts the schedule is that of the program with it, as "
        "XLA:TPU compiles by itself, where all layouts of a case were compiled so. In the rank order a layout that "
        "does not fit in memory comes last, by prediction and by compiler. The board is the three models as planned "
        "and in four hand-written layouts; all adds smaller models, more meshes and more hand layouts.\n",
        "## Against the targets\n",
        _summary(plain, timed(compiled)),
        "\n![predicted and emitted bytes](verification.svg)\n",
        "Each point is one (collective, axes) of one compile: filled for our own plans, hollow for hand-written "
        "layouts, whose open values the partitioner itself completes.\n",
        "## The board\n",
        *_board(compiled),
        "## Constraints\n",
        "How many a plan of llama3-8b has (`python -m benchmarks.constraints`): those that Shardy's propagation, asked "
        "in-process, does not reach (`needed`), and those of them that the hardware's compiler needs to emit the same "
        '(`constraints="compiled"`: within 1 % of all bytes in total and for every collective and axes, 1 % of the '
        "peak and 0.1 % of the schedule). Wanted is at most a third of the contractions. The search on v5e:4x4 ran "
        "over a change of `hlo.rings`: of the 14 that were left before it the 7 that were closest to being dropped "
        "were asked about again behind it (a run of its own may ask in another order), and both programs of the row "
        "were compiled and read behind it.\n",
        _constraints(constraints),
        "## What differs, and why\n",
        CAUSES,
        _differences(plain),
        "## Refused\n",
        _refused([line for line in lines if "error" in line]),
    ]
    return "\n".join(parts)


def timed(lines: Sequence[Line]) -> list[Line]:
    """The lines whose schedules count: with windowed einsum, where all layouts of a case were compiled so."""
    found: dict[tuple[str, ...], dict[bool, list[Line]]] = defaultdict(lambda: {False: [], True: []})
    for line in lines:
        found[_group(line)][line["windowed"]].append(line)
    return [
        line
        for each in found.values()
        for line in each[{x["layout"] for x in each[False]} <= {x["layout"] for x in each[True]}]
    ]


def _summary(lines: Sequence[Line], schedules: Sequence[Line]) -> str:
    rows: list[tuple[str, ...]] = []

    def share(name: str, target: str, found: Iterable[bool]) -> None:
        values = list(found)
        told = f"{sum(values)} of {len(values)} ({sum(values) / len(values):.0%})" if values else "none compiled"
        rows.append((name, target, told))

    for compiler, target in (("gpu", "≥ 95 %"), ("tpu", "≥ 90 %")):
        mine = [line for line in lines if _compiler(line) == compiler]
        on_board = [line for line in mine if line["group"] == "board"]
        for who, some in (
            ("our plans of the board", [x for x in on_board if x["layout"] == PLANNED]),
            ("the board", on_board),
            ("our plans, all", [x for x in mine if x["layout"] == PLANNED]),
            ("all", mine),
        ):
            share(f"{compiler.upper()}: bytes agree, {who}", target, map(bytes_agree, some))
    own = [line for line in lines if line["layout"] == PLANNED]
    share("no unknown row above 1 % in our plans", "100 %", [unknown_share(line) <= SMALL for line in own])
    for who, some in (("the board", [x for x in lines if x["group"] == "board"]), ("all", lines)):
        share(f"peak memory within 10 %, {who}", "≥ 90 %", [abs(peak_ratio(line) - 1) <= MEMORY for line in some])
        share(
            f"peak memory not above the plan by more than 10 %, {who}",
            "100 %",
            [peak_ratio(x) <= 1 + MEMORY for x in some],
        )
    for who, some in (("the board", [x for x in schedules if x["group"] == "board"]), ("all", schedules)):
        taus = [tau for _, tau in _taus(some)]
        if taus:
            found = f"{median(taus):.2f} of {len(taus)} (model, mesh)"
            rows.append((f"rank order of layouts, Kendall τ, median, {who}", "≥ 0.8", found))
    return _table(("what", "target", "found"), rows)


def _taus(lines: Iterable[Line]) -> list[tuple[tuple[str, ...], float]]:
    """Kendall's τ between predicted steps and compiled schedules, per (model, sizes, hardware, mesh)."""
    groups: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in lines:
        groups[_group(line)].append(line)
    return [(group, kendall([steps(line) for line in same])) for group, same in groups.items() if len(same) >= 4]


def _group(line: Line) -> tuple[str, ...]:
    sizes = ", ".join(f"{k}={v}" for k, v in line["fields"].items())
    return line["model"], sizes, line["hardware"], " × ".join(f"{n}={s}" for n, s in line["mesh"].items())


def _board(lines: Sequence[Line]) -> list[str]:
    groups: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if line["group"] == "board" and not line["windowed"]:
            groups[_group(line)].append(line)
    windowed = {(_group(x), x["layout"]): x for x in lines if x["windowed"]}
    parts: list[str] = []
    for group, same in groups.items():
        model, sizes, hardware, mesh = group
        tau = kendall([steps(line) for line in timed([x for x in lines if _group(x) == group])])
        parts.append(f"**{model}** ({sizes}), {hardware}, {mesh}; Kendall τ {tau:.2f}\n")
        rows = [
            (
                line["layout"],
                *(_bytes(sum(row[f"{side}_bytes"] for row in line["rows"])) for side in ("predicted", "emitted")),
                "yes" if bytes_agree(line) else worst_row(line) or "total",
                f"{line['predicted_memory']['peak'] / 1e9:.1f} → {line['compiled_memory']['peak'] / 1e9:.1f} GB "
                f"(×{peak_ratio(line):.2f})",
                f"{line['cost']['step_s'] * 1e3:.1f} ms",
                f"{line['timeline']['step_s'] * 1e3:.1f} ms"
                + (
                    f"; {other['timeline']['step_s'] * 1e3:.1f} with rings"
                    if (other := windowed.get((group, line["layout"])))
                    else ""
                ),
            )
            for line in same
        ]
        head = ("layout", "predicted bytes", "emitted", "agree", "peak", "predicted step", "schedule")
        parts.append(_table(head, rows) + "\n")
    return parts


def _differences(lines: Sequence[Line]) -> str:
    rows = [
        (
            line["layout"],
            f"{line['model']} {line['hardware']} {'×'.join(map(str, line['mesh'].values()))}",
            worst_row(line) or "total",
            _ratio(*(sum(row[f"{side}_bytes"] for row in line["rows"]) for side in ("emitted", "predicted"))),
        )
        for line in lines
        if not bytes_agree(line)
    ]
    return _table(("layout", "case", "largest difference", "total"), sorted(rows)) if rows else "Nothing.\n"


def _refused(lines: Sequence[Line]) -> str:
    if not lines:
        return "None.\n"
    return _table(
        ("case", "predicted peak", "why"),
        [
            (
                line["key"],
                f"{line['predicted_peak_bytes'] / 1e9:.1f} GB" if "predicted_peak_bytes" in line else "",
                line["error"].split("\n")[0][:160].replace("|", "/"),
            )
            for line in lines
        ],
    )


def _compiler(line: Line) -> str:
    return "tpu" if line["hardware"].startswith("tpu") else "gpu"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _scatter(lines: Sequence[Line], path: Path) -> None:
    """Predicted against emitted bytes of every (collective, axes), in logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "autoshard"  # equal input, equal file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    kinds = sorted({row["kind"] for line in lines for row in line["rows"]})
    least = 1e3  # bytes: below are scalars, and what one side does not have lies on this edge
    for i, kind in enumerate(kinds):
        for own in (True, False):
            points = [
                (max(row["predicted_bytes"], least), max(row["emitted_bytes"], least))
                for line in lines
                if (line["layout"] == PLANNED) is own
                for row in line["rows"]
                if row["kind"] == kind and max(row["predicted_bytes"], row["emitted_bytes"]) > least
            ]
            axes.scatter(
                [p for p, _ in points],
                [e for _, e in points],
                s=22,
                color=f"C{i}" if own else "none",
                edgecolors=f"C{i}",
                label=f"{kind}, {'plans' if own else 'hand layouts'} ({len(points)})",
                alpha=0.8,
            )
    ends = [least, 1e12]
    axes.plot(ends, ends, color="0.6", linewidth=0.8, zorder=0)
    axes.fill_between(ends, [x * 0.95 for x in ends], [x * 1.05 for x in ends], color="0.85", zorder=0, label="± 5 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted bytes", ylabel="emitted bytes")
    axes.set_title(f"{len(lines)} compiles, bytes per device and step")
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.02))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
