"""Page: a report as one HTML file that opens offline; data and chart library lie in it, compressed."""

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from importlib import metadata, resources
from typing import Any

ECHARTS = "6.1.0"


def page(
    *,
    ranking: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    phase: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
) -> str:
    """The page of a ranking (`Search.to_json`), a plan (`view.of_plan`), a phase diagram, or several of them.

    Or of what the doctor found (`Diagnosis.to_html`).

    The page embeds their JSON: every number that it shows comes from there.
    """
    data = {"ranking": ranking, "plan": plan, "phase": phase, "diagnosis": diagnosis}
    shown = ranking or plan or phase or diagnosis
    assert shown is not None  # one of them is given
    parts = {
        "TITLE": html.escape(f"{shown['name']}: autoshard report"),
        "VERDICT": html.escape(str(shown.get("verdict", shown["name"]))),
        "VERSION": metadata.version("autoshard"),
        "ECHARTS": ECHARTS,
        "CSS": _asset("page.css"),
        "JS": _asset("page.js"),
        "DATA": _compress(json.dumps(data, ensure_ascii=False, separators=(",", ":"))),
        "LIBRARY": _compress(_asset("echarts.min.js")),
    }
    return re.sub(r"@([A-Z]+)@", lambda mark: parts[mark[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("autoshard.report").joinpath("assets", name).read_text(encoding="utf-8")


def _compress(text: str) -> str:
    """Gzip without a date, so that equal reports are equal files; as base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
