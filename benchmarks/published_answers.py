"""Answers of books and courses beside those of the searches: `python -m benchmarks.published_answers`.

Each row puts a published exercise to the search, with this project's hardware numbers,
and explains the difference. Sources: Austin et al., How to Scale
Your Model (2026-06-24); R. Witten, HighPerfLLMs2024 (183ee74), sessions 7 and 8.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import cost_models
from benchmarks.published_models import NAMED, dense
from cost_models.closed_forms import formulas
from cost_models.closed_forms.layout_search import best_layouts, describe
from cost_models.closed_forms.serving_search import Workload, servers

# Gemma Team 2024 (arXiv:2403.08295), table 1.
GEMMA_7B = dense(28, 3072, 24576, 16, 16, 256000, head=256, tied=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One exercise: the answer of its source, the answer of the search, and why they differ."""

    source: str
    question: str
    published: str
    found: str
    why: str


def training() -> Iterator[Answer]:
    """The layouts of "Training" and "Applying training", on a cube of 4,096 v5p."""
    place = cost_models.hardware("tpu-v5p:16x16x16")
    for name, sequences, sequence, ref, published in (
        ("llama2-13b", 1024, 3072, "training.md Q3", "1024 FSDP × 4 TP (X_opt 1333)"),
        ("llama3-70b", 1024, 4096, "applied-training.md", "2048 FSDP × 4 TP on 8,960 chips (X_opt 1618)"),
    ):
        model = NAMED[name]
        tokens = sequences * sequence
        ranking = best_layouts(model, place, sequences=sequences, sequence=sequence)
        best = ranking.ranked[0]
        optimum = formulas.best_fsdp(tokens, place.devices, model.d_ff, fsdp_axes=2, tensor_axes=1)
        mixed = next(p for p in ranking.ranked if p.layout.pipeline == 1 and p.layout.context == 1)
        yield Answer(
            source=ref,
            question=f"{name}, {tokens / 1e6:.1f}M tokens a step, 4,096 v5p: which layout?",
            published=published,
            found=f"{describe(best.layout)}: {best.step.seconds:.3f} s, {best.step.mfu:.0%} MFU",
            why=(
                f"X_opt here is {optimum:.0f}; of FSDP × TP alone the best is {describe(mixed.layout)}, "
                f"{mixed.step.seconds / best.step.seconds - 1:+.1%}; the book weighs traffic alone, "
                "this also latency, overlap, padding to tiles and memory"
            ),
        )


def serving() -> Iterator[Answer]:
    """LLaMA-3-70B on v5e, and Gemma-7B on a v4-8."""
    model = NAMED["llama3-70b"]
    for topology, weights, cache, book_batch, book_s, ref in (
        ("4x4", "bfloat16", "bfloat16", 43, 0.019, "applied-inference.md:165, :193"),
        ("2x4", "int8", "int8", 43, 0.019, "applied-inference.md:165, :193"),
        ("4x8", "bfloat16", "bfloat16", 140, 0.019, "applied-inference.md:211"),
    ):
        place = cost_models.hardware(f"tpu-v5e:{topology}")
        work = Workload(context=8192, generated=512, weight_dtype=weights, cache_dtype=cache)
        largest = max(servers(model, [place], work, ()), key=lambda s: s.batch, default=None)
        whole = formulas.largest_batch(
            place.devices * 16e9,
            70e9 * (2 if weights == "bfloat16" else 1),
            8192 * (324e3 if cache == "bfloat16" else 162e3),
        )
        found = (
            "nothing fits" if largest is None else f"{largest.batch} sequences, {1e3 * largest.token_s:.1f} ms a step"
        )
        yield Answer(
            source=ref,
            question=f"LLaMA-3-70B {weights} on v5e {topology}, 8k context: batch and step?",
            published=f"{book_batch} sequences, {1e3 * book_s:.0f} ms",
            found=found,
            why=(
                f"with the book's 16 GB a chip, 70e9 parameters and 324 kB a token the form gives {whole}; "
                f"here {place.usable_memory_bytes / 1e9:.1f} GB, {model.parameters / 1e9:.1f}e9 and "
                f"{model.kv_bytes() / 1e3:.0f} kB; the step has the exchanges, too"
            ),
        )
    yield _gemma()


def _gemma() -> Answer:
    """Witten's Gemma-7B on four v4 chips of 32 GB, sequences of 2,048."""
    cache = GEMMA_7B.kv_bytes() * 2048
    theory = formulas.largest_batch(4 * 32e9, 2 * 7e9, cache)
    exact = formulas.largest_batch(4 * 32e9, 2 * GEMMA_7B.parameters, cache)
    place = cost_models.hardware("tpu-v4:2x2x1")
    work = Workload(context=2048, generated=512)
    ours = max(s.batch for s in servers(GEMMA_7B, [place], work, ()))
    read = 110 * cache + 2 * 7e9
    return Answer(
        source="HighPerfLLMs2024, session 7",
        question="Gemma-7B on a v4-8, 2,048 tokens: sequences that fit, bytes read a step at 110?",
        published="121 in theory, 110 with a reserve, 117 GB",
        found=f"{theory} with 7e9 parameters, {ours} here, {read / 1e9:.0f} GB",
        why=(
            f"the model has {GEMMA_7B.parameters / 1e9:.2f}e9 parameters, which leaves {exact} in 4 × 32 GB; "
            f"here {place.devices} × {place.usable_memory_bytes / 1e9:.2f} GB are usable"
        ),
    )


def answers() -> Iterator[Answer]:
    """All of them."""
    yield from training()
    yield from serving()


def markdown(rows: list[Answer]) -> str:
    """A table of the answers."""
    lines = ["| source | question | published | found | why they differ |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {a.source} | {a.question} | {a.published} | {a.found} | {a.why} |" for a in rows]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("training", "serving"))
    only = parser.parse_args().only
    rows = [*(training() if only != "serving" else ()), *(serving() if only != "training" else ())]
    print(markdown(rows))


if __name__ == "__main__":
    main()
