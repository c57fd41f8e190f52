"""The board of steps of other people's models: a row replaces the one before it, and every row is on the page."""

import json
from pathlib import Path
from typing import Any

from benchmarks.zoo_steps import page, rows_of


def row(subject: str, target: str, version: str, **fields: Any) -> str:
    pair = {"predicted": 1.05e-3, "compiled": 1e-3}
    found = {
        "model": subject,
        "step": pair,
        "compute": pair,
        "peak": {"predicted": 2e9, "compiled": 2e9},
        "agrees": True,
    }
    return json.dumps({"subject": subject, "target": target, "jax": version, "date": "2026-11-28", **found, **fields})


def test_a_row_replaces_the_one_of_the_same_case(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows_of(path) == {}
    path.write_text(
        "\n".join(row("hf-gpt2", "h100:1x8", version, seconds=seconds) for version, seconds in (("1", 1), ("1", 2)))
    )
    (only,) = rows_of(path).values()
    assert only["seconds"] == 2


def test_the_page_has_a_section_per_target_and_release_and_keeps_failures(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    error = {
        "subject": "hf-t5",
        "target": "h100:1x8",
        "jax": "0.12.0",
        "date": "2026-11-28",
        "error": "TypeError: clip",
    }
    lines = row("linen-vit", "h100:1x8", "0.10.2"), row("linen-mlp", "h100:1x8", "0.10.2"), json.dumps(error)
    path.write_text(
        "\n".join((*lines, row("linen-mlp", "tpu-v5e:4x4", "0.10.2"), row("linen-mlp", "h100:1x8", "0.12.0")))
    )
    text = page(rows_of(path))
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert [head.split(", 2026")[0] for head in heads] == [
        "## h100:1x8 (data=2 × model=4), JAX 0.10.2",
        "## h100:1x8 (data=2 × model=4), JAX 0.12.0",
        "## tpu-v5e:4x4 (data=4 × model=4), JAX 0.10.2",
    ]
    assert text.index("| linen-mlp | 1.05 → 1.00 (×1.05)") < text.index("| linen-vit |")  # in the list's order
    assert "| hf-t5 | TypeError: clip | | | |" in text
    assert text.count("1 of 1 within 10%") + text.count("2 of 2 within 10%") == 6
    assert text.count("Not run: ") == 3
    assert "hf-t5" in text.split("Not run: ")[1].splitlines()[0]
    assert "hf-t5" not in text.split("Not run: ")[2].splitlines()[0]
