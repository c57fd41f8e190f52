"""The page: self-contained, its numbers are the JSON's, and a browser shows all of it."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models
import models
from autoshard.diagnosis.finding import Diagnosis, Finding, Step, Trial
from autoshard.explore.search import Search, search
from autoshard.planner import baseline_layouts, view
from autoshard.report.page import page

SMALL: dict[str, Any] = {"compute_dtype": "float32", "width": 8, "layers": 2}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def found() -> Search:
    return search("models:linear_tiny", hardware="cpu", chips=(4, 8), keywords=SMALL, axes=2, processes=1, prices=1.0)


@pytest.fixture(scope="module")
def html(found: Search) -> str:
    return found.to_html()


def embedded(html: str, name: str) -> str:
    packed = re.search(rf'id="{name}">([^<]*)<', html)
    assert packed is not None
    return gzip.decompress(base64.b64decode(packed[1])).decode()


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def test_the_page_holds_what_the_json_says(found: Search, html: str) -> None:
    data = json.loads(embedded(html, "data"))
    assert data["ranking"] == json.loads(json.dumps(found.to_json()))
    assert data["plan"]["cost"]["step_s"] == pytest.approx(found.best.step_s)
    assert data["ranking"]["verdict"] in html


def test_the_page_fetches_nothing(html: str) -> None:
    shell = re.sub(r'id="(data|library)">[^<]*<', "", html)
    assert "http" not in shell
    assert not re.search(r"\b(src|@import|fetch\()", shell)


def test_the_library_is_small_and_its_licences_lie_beside_it() -> None:
    assets = resources.files("autoshard.report") / "assets"
    library = (assets / "echarts.min.js").read_text(encoding="utf-8")
    assert len(library.encode()) <= 1.2e6
    assert "Apache License" in (assets / "echarts.LICENSE").read_text()
    assert "Mike Bostock" in (assets / "echarts.LICENSE-d3").read_text()


def test_sums_in_the_view_are_those_of_the_record(found: Search) -> None:
    planned = found.planned()
    shown = view.of_plan(planned, cost_models.hardware(found.best.candidate.hardware))
    record = planned.record
    compute = sum(bar["duration_s"] for bar in shown["timeline"] if bar["lane"] == "compute")
    moved = sum(bar["duration_s"] for bar in shown["timeline"] if bar["lane"] == "communication")
    assert compute == pytest.approx(record.cost.compute_s)
    assert moved == pytest.approx(sum(c.seconds * c.trips for c in record.collectives))
    assert sum(row["seconds"] for row in shown["collectives"]) == pytest.approx(moved)
    assert max(map(sum, zip(*shown["memory"]["kinds"].values(), strict=True))) == record.memory.peak_bytes
    assert sum(shown["memory"]["peak_kinds"].values()) == record.memory.peak_bytes
    assert sum(p["flops"] * p["count"] for p in shown["roofline"]["points"]) == pytest.approx(shown["flops"])


def test_what_is_cut_out_of_whole_arrays_is_among_the_compute() -> None:
    """Whole weights, of which each device multiplies its columns: by itself, and of a stack before its loop."""

    def step(x: Any, w: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x @ w, ws)[0]

    shapes = ((64, 4096), (4096, 4096), (4, 4096, 4096))
    plan = autoshard.plan(
        step,
        *(jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16) for shape in shapes),
        mesh={"m": 8},
        hardware="h100:1x8",
        in_shardings=(P(), P(), P()),
        out_shardings=P(),
    )
    shown = view.of_plan(plan.planned, cost_models.hardware("h100:1x8"))
    bars = [bar for bar in shown["timeline"] if bar["lane"] == "compute"]
    cut_s = sum(bar["duration_s"] for bar in bars if bar["name"].startswith("copy of "))
    work_s = sum(c.work_s * c.trips for c in plan.record.collectives)
    assert cut_s > 0.1 * plan.record.cost.compute_s
    assert sum(bar["duration_s"] for bar in bars) + work_s == pytest.approx(plan.record.cost.compute_s)


def test_standard_layouts_are_those_of_the_names(found: Search) -> None:
    planned = found.planned()
    named = dict(baseline_layouts.layouts(planned))
    leaves = planned.record.inputs
    for i, leaf in enumerate(leaves):
        assert (i in planned.record.donated) <= (tuple(named["data parallel"][i]) == ())
        if leaf.shape == (8, 8) and i in planned.record.donated:
            assert named["fully sharded"][i] == P(planned.record.mesh.names)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is one of the dev extras")
    if CHROMIUM is None:
        pytest.skip("the page is looked at in a real browser: install one, as in `apt install chromium`")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


HOSTILE = "<img src=x onerror=window.hit=1>"


def hostile(value: Any) -> Any:
    """A page's data in which every name is markup."""
    named = ("name", "where", "value", "path", "axes", "hardware", "source", "layout")
    if isinstance(value, dict):
        return {k: HOSTILE if k in named and isinstance(v, str) else hostile(v) for k, v in value.items()}
    return [HOSTILE if isinstance(v, str) else hostile(v) for v in value] if isinstance(value, list | tuple) else value


def hostile_page(html: str) -> str:
    data = json.loads(embedded(html, "data"))
    data["plan"]["memory"]["kinds"] = {HOSTILE: next(iter(data["plan"]["memory"]["kinds"].values()))}
    return page(ranking=hostile(data["ranking"]), plan=hostile(data["plan"]))


# The height at which the memory chart's line begins, that of the stack there, and that of the highest stack.
PEAK = """() => {
  const shown = charts.map((c) => c.drawn.getOption()).find((o) => o.series[0]?.markLine?.data?.length);
  const [from] = shown.series[0].markLine.data[0];
  const stacks = shown.series[0].data.map((_, i) => shown.series.reduce((sum, kind) => sum + kind.data[i], 0));
  return [from.yAxis, stacks[from.xAxis], Math.max(...stacks)];
}"""

# What is written in any chart.
WRITTEN = """() => charts.flatMap((c) => c.drawn.getZr().storage.getDisplayList().map((x) => x.style.text ?? ""))"""

# The page's own script over a document that does nothing; prints what every tooltip of every chart says.
TOOLTIPS = """
const nothing = () => {};
const made = () => ({
  setAttribute: nothing, append: nothing, replaceChildren: nothing, addEventListener: nothing, dataset: {},
});
globalThis.document = { getElementById: made, createElement: made, documentElement: made() };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
const [script, data, name] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const run = new Function("data", "name", script.replace(/\\nstart\\(\\);\\s*$/, "") + `
  if (data.ranking) ranking(data.ranking);
  if (data.plan) planned(data.plan, false);
  const p = { data: [0, 0, 0, 0], dataIndex: 0, seriesName: name, seriesType: "scatter", value: 1, marker: "" };
  const tips = charts.map((c) => c.options({}).tooltip).filter((tip) => tip.formatter);
  return tips.map((tip) => tip.formatter(tip.trigger === "axis" ? [p] : p));
`);
console.log(JSON.stringify(run(data, name)));
"""


def test_no_name_in_a_tooltip_is_markup(html: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("the page's script is run by node: install one, as in `apt install nodejs`")
    script = resources.files("autoshard.report").joinpath("assets", "page.js").read_text(encoding="utf-8")
    given = json.dumps([script, json.loads(embedded(hostile_page(html), "data")), HOSTILE])
    done = subprocess.run([node, "-e", TOOLTIPS], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tips = json.loads(done.stdout)
    assert len(tips) >= 4  # ranking, timeline, memory, roofline
    assert all("&#60;img" in tip for tip in tips)
    assert not any("<img" in tip for tip in tips)


def test_a_name_that_is_a_mark_of_the_template_is_a_name(html: str) -> None:
    data = json.loads(embedded(html, "data"))
    made = page(plan=data["plan"] | {"name": "@DATA@", "verdict": "@JS@ @LIBRARY@ @NONE@"})
    assert "<title>@DATA@: autoshard report</title>" in made
    assert "<h1>@JS@ @LIBRARY@ @NONE@</h1>" in made
    assert json.loads(embedded(made, "data"))["plan"]["name"] == "@DATA@"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_shows_it(browser: Any, html: str, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    tab.goto(file.as_uri())
    tab.wait_for_selector("body[data-ready=yes]")

    charts = tab.locator(".chart")
    assert charts.count() == 5  # ranking: two; plan: timeline, memory, roofline
    assert charts.evaluate_all("all => all.every(c => c.dataset.drawn && c.querySelector('canvas'))")
    assert tab.evaluate("document.documentElement.scrollWidth") == width

    assert len(set(tab.evaluate(PEAK))) == 1
    shades = tab.locator(".scroll").first.evaluate("box => getComputedStyle(box).backgroundAttachment")
    assert shades == "local, local, scroll, scroll"  # more columns are hinted at

    head = tab.locator("table").first.locator("th", has_text="step").locator("button")
    shown: list[list[float]] = []
    for _ in range(2):
        head.click()
        cells = tab.locator("table").first.locator("tbody tr")
        shown.append(cells.evaluate_all("rows => rows.map(r => Number(r.cells[4].dataset.value))"))
    assert shown[0] == sorted(shown[0])
    assert shown[1] == sorted(shown[0], reverse=True)

    known = set(numbers(json.loads(embedded(html, "data"))))
    cells = tab.locator("td[data-value]").evaluate_all("all => all.map(c => Number(c.dataset.value))")
    assert cells
    assert set(cells) <= known
    assert said == []
    tab.close()


def test_a_narrow_page_writes_every_name_of_a_bar_and_of_a_kind_of_memory(
    browser: Any, html: str, tmp_path: Path
) -> None:
    plan = json.loads(embedded(html, "data"))["plan"]
    layouts = "data parallel", "fully sharded", "tensor parallel", "sequence parallel"
    prices = {"step_s": 1.0, "exposed_s": 0.5, "peak_bytes": 1, "fits": True}
    plan["compared"] = [{"name": name, **prices} for name in layouts]
    kinds = "activations", "kept for backward", "arguments", "copies", "gradients", "optimizer", "parameters"
    values = next(iter(plan["memory"]["kinds"].values()))
    plan["memory"]["kinds"] = dict.fromkeys(kinds, values)
    plan["collectives"] = []
    file = tmp_path / "report.html"
    file.write_text(page(plan=plan), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 390, "height": 900})
    tab.goto(file.as_uri())
    tab.wait_for_selector("body[data-ready=yes]")
    written = " ".join(tab.evaluate(WRITTEN))
    assert tab.locator("section", has_text="Collectives of a step").locator("p").inner_text().startswith("None")
    assert {name for name in (*layouts, *kinds) for word in name.split() if word not in written} == set()
    tab.close()


def test_a_page_of_findings_shows_each_with_its_price_and_no_markup(browser: Any, tmp_path: Path) -> None:
    first, second = (
        Finding(kind=kind, seconds=seconds, where=HOSTILE, cause=f"Because {kind}", change=f"Mend {kind}")
        for kind, seconds in (("sums in every trip", 0.01), ("gathered twice", 0.002))
    )
    found = Diagnosis(
        step=Step(step_s=0.1, communication_s=0.03, exposed_s=0.02, peak_bytes=10, limit_bytes=100),
        findings=(first, second),
        trials=(Trial(flag="--xla_no=1", step_s=None, peak_bytes=None), Trial(flag="--f=1", step_s=0.09, peak_bytes=9)),
        notes=(HOSTILE,),
    )
    file = tmp_path / "doctor.html"
    file.write_text(found.to_html(), encoding="utf-8")
    for width, scheme in ((1280, "light"), (390, "dark")):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.goto(file.as_uri())
        tab.wait_for_selector("body[data-ready=yes]")
        heads = tab.locator("h2").all_inner_texts()
        assert [head for head in heads if head[:2] in ("1.", "2.")] == [
            "1. sums in every trip: 10 ms (10.0% of the step)",
            "2. gathered twice: 2 ms (2.0% of the step)",
        ]
        text = tab.locator("main").inner_text()
        for part in ("Because gathered twice.", "Mend gathered twice.", HOSTILE, "does not compile", "-10.0%", "100 B"):
            assert part in text
        assert tab.locator(".chart[data-drawn=yes]").count() == 1
        assert tab.evaluate("window.hit") is None
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        tab.close()


@pytest.mark.parametrize(
    ("left", "words"), [(0.0, "proven optimal"), (5e-9, "proven optimal to 5 ns"), (1e-2, "within")]
)
def test_a_page_says_what_is_proven_and_every_number_in_one_way(left: float, words: str) -> None:
    made = autoshard.plan(
        jax.numpy.sin, jax.ShapeDtypeStruct((8, 8), jax.numpy.float32), mesh={"data": 8}, hardware="h100:1x8"
    )
    proof = replace(made.record.certificate, status="feasible", objective_s=1.0, bound_s=1.0 - left, gap=left)
    planned = replace(made.planned, record=replace(made.record, certificate=proof))
    shown = view.of_plan(planned, cost_models.hardware("h100:1x8"))
    assert shown["certificate"]["proof"].startswith(words)
    assert shown["certificate"]["proof"] in shown["verdict"]
    assert shown["certificate"]["proof"] in view.markdown(shown)
    text = {row["name"]: row["text"] for row in shown["numbers"]}
    assert text["peak_bfloat16_flops_per_s"] == "989 TFLOP/s"
    assert text["hbm_bytes"] == "84.9 GB"


@pytest.mark.slow
def test_thirty_two_unrolled_layers_stay_small() -> None:
    fn, args = models.build("tiny-llama", layers=32)
    plan = autoshard.plan(
        fn, *args, mesh={"data": 8}, hardware="h100:1x8", donate_argnums=0, constraints="all", rel_gap=0.05
    )
    shown = view.of_plan(plan.planned, cost_models.hardware("h100:1x8"))
    assert len(page(plan=shown).encode()) < 5e6
