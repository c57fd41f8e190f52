"""Reports fold what is equal, add up, and fit the terminal."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import cost_models
from autoshard.ir.constraints import Constraints
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import ranges
from autoshard.planner import summary
from autoshard.planner.backward_passes import repeated_text
from autoshard.planner.leaf_rows import fold, local_bytes
from autoshard.planner.record import Certificate, Cost, Leaf, Memory, PlanRecord
from autoshard.problem.collective import Collective
from autoshard.problem.repeated import RepeatedLine, RepeatedWork
from autoshard.report import hardware
from autoshard.report import hardware as hardware_room
from autoshard.report.tables import (
    broken_path,
    bytes_text,
    columns,
    count_text,
    fields,
    flops_text,
    proof_text,
    render,
    short_aval,
    table,
    time_text,
)
from cost_models.machines import catalogue

MESH = MeshAxes.of({"data": 2, "model": 4})


def leaf(path: str, *shape: int, spec: P | None = None, dtype: str = "float32") -> Leaf:
    return Leaf(path=path, shape=shape, dtype=dtype, spec=P() if spec is None else spec)


def repeated(count: int, *lines: RepeatedLine) -> RepeatedWork:
    return RepeatedWork(equations=count, lines=lines, flops=2e9, share=0.1, compute_s=2e-3, waited_s=1e-3)


def test_what_is_repeated_is_said_in_flops_and_seconds() -> None:
    one = RepeatedLine(where="/me/model.py:61 (mlp)", primitive="dot_general", count=1, flops=1e9)
    said = "1 matrix product (model.py:61): 2 GFLOP per device (10.0% of all), 3 ms (30.0% of the step)"
    assert repeated_text(repeated(9, one), 1e-2) == f"9 equations, among them {said}"
    assert repeated_text(repeated(1), 1e-2) == "1 equation, none of them a matrix product: 3 ms (30.0% of the step)"
    more = [replace(one, where=f"/me/model.py:{line} (mlp)") for line in (1, 2, 3, 4)]
    assert "4 matrix products (model.py:1, model.py:2, model.py:3, …)" in repeated_text(repeated(9, *more), 1e-2)


def layers(prefix: str, count: int, spec: P) -> list[Leaf]:
    """A list of layers under a prefix, each a matrix split by `spec` and a whole vector."""
    return [
        made
        for i in range(count)
        for made in (
            leaf(f"{prefix}['layers'][{i}]['norm']", 8),
            leaf(f"{prefix}['layers'][{i}]['w']", 8, 8, spec=spec),
        )
    ]


def state(mu: P, count: int = 3) -> list[Leaf]:
    """Parameters, and moments of them whose matrices are split by `mu`."""
    return [
        *layers("state.params", count, P("data", "model")),
        leaf("state.opt_state[0].count", dtype="int32"),
        *layers("state.opt_state[0].mu", count, mu),
        *layers("state.opt_state[0].nu", count, mu),
    ]


def shown(leaves: list[Leaf]) -> list[tuple[str, int, str]]:
    return [("  " * row.depth + row.path, row.count, row.layout) for row in fold(leaves, MESH)]


# --- Folding -------------------------------------------------------------------------


def test_equal_layers_are_one_row() -> None:
    assert shown(layers("params", 3, P("data", "model"))) == [
        ("params.layers.0…2.norm", 3, "[-]"),
        ("params.layers.0…2.w", 3, "[data,model]"),
    ]


def test_equal_layers_that_linen_named_are_one_row() -> None:
    leaves = [
        leaf(f"params['Block_{i}']['Dense_{j}']['kernel']", 8, 8 << j, spec=P("data"))
        for i in (*range(8), 10)
        for j in range(2)
    ]
    assert shown([*leaves, leaf("params['Dense_0']['kernel']", 8, 8)]) == [
        ("params.Block_0…7,10.Dense_0.kernel", 9, "[data,-]"),
        ("params.Block_0…7,10.Dense_1.kernel", 9, "[data,-]"),
        ("params.Dense_0.kernel", 1, "[-,-]"),
    ]


def test_a_layer_with_another_layout_has_its_own_row() -> None:
    leaves = layers("params", 4, P("data"))
    leaves[5] = replace(leaves[5], spec=P(None, "model"))
    assert shown(leaves)[1:] == [
        ("params.layers.0,1,3.w", 3, "[data,-]"),
        ("params.layers.2.w", 1, "[-,model]"),
    ]


def test_moments_in_the_layout_of_the_parameters_are_one_row() -> None:
    assert shown(state(P("data", "model"))) == [
        ("state.params", 6, ""),
        ("  layers.0…2.norm", 3, "[-]"),
        ("  layers.0…2.w", 3, "[data,model]"),
        ("state.opt_state.0.count", 1, "[]"),
        ("state.opt_state.0.{mu,nu}", 12, "as params"),
    ]


def test_moments_in_another_layout_are_exceptions() -> None:
    leaves = state(P("data", "model"))
    leaves[8] = replace(leaves[8], spec=P(("data", "model")))  # mu of the first layer
    assert shown(leaves)[-2:] == [
        ("state.opt_state.0.{mu,nu}", 12, "as params"),
        ("  but state.opt_state.0.mu.layers.0.w", 1, "[data·model,-]"),
    ]


def test_moments_that_mostly_differ_are_folded_among_themselves() -> None:
    leaves = [
        replace(made, spec=P("model")) if made.shape and "opt_state" in made.path else made for made in state(P("data"))
    ]
    assert shown(leaves) == [
        ("state.params", 6, ""),
        ("  layers.0…2.norm", 3, "[-]"),
        ("  layers.0…2.w", 3, "[data,model]"),
        ("state.opt_state.0.count", 1, "[]"),
        ("state.opt_state.0.mu", 6, ""),
        ("  layers.0…2.norm", 3, "[model]"),
        ("  layers.0…2.w", 3, "[model,-]"),
        ("state.opt_state.0.nu", 6, "as mu"),
    ]


def test_subtrees_of_other_shapes_are_not_the_same() -> None:
    leaves = [*layers("a", 2, P()), *(replace(made, shape=(*made.shape, 2)) for made in layers("b", 2, P()))]
    assert not any(layout.startswith("as ") for _, _, layout in shown(leaves))


names = st.sampled_from(["a", "b", "layers", "0", "1", "2", "w"])
specs = st.sampled_from([P(), P("data"), P(None, "model"), P(("data", "model"))])


@given(st.dictionaries(st.lists(names, min_size=1, max_size=4).map(".".join), specs, min_size=1, max_size=30))
def test_rows_add_up_to_the_leaves(found: dict[str, P]) -> None:
    leaves = [leaf(path, 8, 8, spec=spec) for path, spec in found.items()]
    rows = fold(leaves, MESH)
    assert sum(row.count for row in rows if row.depth == 0) == len(leaves)
    assert sum(row.local_bytes for row in rows if row.depth == 0) == sum(local_bytes(made, MESH) for made in leaves)


@pytest.mark.parametrize(
    ("numbers", "written"), [([0], "0"), ([0, 1], "0,1"), ([2, 0, 1], "0…2"), ([0, 1, 2, 5, 7, 8], "0…2,5,7,8")]
)
def test_ranges(numbers: list[int], written: str) -> None:
    assert ranges(numbers) == written


def test_keys_weigh_nothing() -> None:
    assert local_bytes(leaf("key", dtype="key<fry>"), MESH) == 0


# --- Units ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "written"),
    [
        (time_text(0.0), "0 µs"),
        (count_text(3150.4), "3,150"),
        (count_text(2.46), "2.5"),
        (time_text(1.5e-7), "0.15 µs"),
        (time_text(0.0123456), "12.3 ms"),
        (time_text(0.99951), "1 s"),
        (time_text(12345.0), "12,345 s"),
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(999_600), "1 MB"),
        (bytes_text(80e9), "80 GB"),
        (flops_text(9.89e14), "989 TFLOP"),
        (short_aval("bfloat16[8,128]"), "bf16[8,128]"),
        (short_aval("uint32[2]"), "u32[2]"),
        (short_aval("bool[]"), "bool[]"),
    ],
)
def test_units(found: str, written: str) -> None:
    assert found == written


def test_long_paths_break_at_their_dots() -> None:
    assert broken_path("  layers.0…31.attention_norm.scale", 24) == "  layers.0…31\n      .attention_norm\n      .scale"


def test_a_unit_stays_with_its_number() -> None:
    assert fields([("step", "takes 12 ms")], 17) == "  step  takes\n        12 ms"


# --- The whole report ----------------------------------------------------------------


def collective(kind: str, nbytes: int, window: int | None, *, trips: int = 1) -> Collective:
    return Collective(
        kind=kind,
        axes=("data",),
        nbytes=nbytes,
        dtype="bfloat16",
        trips=trips,
        seconds=nbytes / 1e11,
        window=window,
        where="/home/me/model.py:61 (mlp)",
        value=f"bfloat16[{nbytes // 2}]",
    )


def record(leaves: list[Leaf]) -> PlanRecord:
    return PlanRecord(
        name="train_step",
        digest="d",
        mesh=MESH,
        device_order=tuple(range(8)),
        hardware="h100:1x8",
        hardware_digest="h",
        versions={},
        inputs=tuple(leaves),
        outputs=(*(replace(made, path=made.path.replace("state", "[0]", 1)) for made in leaves), leaf("[1]")),
        donated=tuple(range(len(leaves))),
        pins=Constraints(made={((0,), 0): (P("data"), P())}, taken={}, inputs={}, outputs={}),
        collectives=(
            collective("all-gather", 4_000_000, 0, trips=3),
            collective("all-gather", 4_000_000, 0),
            collective("all-reduce", 8_000, None),
        ),
        cost=Cost(step_s=0.010, compute_s=0.008, communication_s=0.005, hidden_s=0.003),
        memory=Memory(
            peak_bytes=3_000_000_000,
            limit_bytes=64_000_000_000,
            at="mul at model.py:7 (f)",
            kinds={"arguments": 2_000_000_000, "copies": 1_000_000_000},
        ),
        certificate=Certificate(
            status="optimal",
            objective_s=0.010,
            bound_s=0.0099,
            gap=0.01,
            solver="highs, ortools 9",
            space="layouts of a test",
        ),
        compiler_options={},
        notes=("hardware detected: cpu:8",),
    )


def test_the_summary() -> None:
    made = summary.summary(
        record(state(P("data", "model"))),
        seconds={"trace": 1.0, "solve": 2.0},
        flops=4e12,
        peak_flops_per_s=1e15,
        width=80,
    )
    assert (
        made
        == """\
train_step on data=2 × model=4 (h100:1x8)

  step     10 ms = 8 ms compute (80%) + 2 ms exposed communication; hidden
           behind compute: 3 ms
  matmuls  4 TFLOP per device, 40.0% of the peak of 1 PFLOP/s
  memory   3 GB of 64 GB per device: 2 GB arguments + 1 GB copies, at mul at
           model.py:7 (f)
  proof    optimal, gap 1.00%: nothing takes less than 9.9 ms among layouts of a
           test
  solver   highs, ortools 9
  planned  in 3.0 s: trace 1.0, solve 2.0
  emitted  2 sharding constraints
  note     hardware detected: cpu:8

 input                      leaves  shape     layout        bytes
 ────────────────────────────────────────────────────────────────
 state.params                    6                          192 B
   layers.0…2.norm               3  f32[8]    [-]            96 B
   layers.0…2.w                  3  f32[8,8]  [data,model]   96 B
 state.opt_state.0.count         1  i32[]     []              4 B
 state.opt_state.0.{mu,nu}      12            as params     384 B

 output  leaves  shape  layout  bytes
 ────────────────────────────────────
 1            1  f32[]  []        4 B

19 outputs take the place of donated inputs, in the same layout

collectives per step: logical bytes per device, time if nothing hides

 collective  over  count  bytes     time  hides  value          at
 ──────────────────────────────────────────────────────────────────────────
 all-gather  data      4  16 MB   160 µs  yes    bf16[2000000]  model.py:61
 all-reduce  data      1   8 kB  0.08 µs  no     bf16[4000]     model.py:61

 sum                   5  16 MB   160 µs"""
    )


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_summary_fits_the_terminal(width: int) -> None:
    long = layers("state.params_of_the_whole_transformer", 126, P(("data", "model")))
    made = summary.summary(replace(record(long), hardware="tpu-v5p:4x4x8"), width=width)
    assert max(map(len, made.splitlines())) <= width
    assert "0…125" in made


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_numbers_are_never_cut_in_tables_that_are_too_narrow(width: int) -> None:
    """`8.39 MB` and `8.19 kB` both begin with `8.`; what is text is broken over lines, with nothing left out."""
    head = ("input", "leaves", "shape", "layout", "bytes", "bytes")
    paths = ["state.params.encoder.Block_0.SelfAttention_0.kernel", "x"]
    rows = [
        (paths[0], "1,024", "f32[14336,4096,128,64]", "[data·model·expert,-,replica]", "8.39 MB", "12 B"),
        (paths[1], "4", "f32[3]", "[-]", "8.19 kB", "345 GB"),
    ]
    made = render(
        table("a title", head, rows, right=("leaves", "bytes"), whole=("input", "shape", "layout")), width=width
    )
    for number in ("1,024", "8.39 MB", "8.19 kB", "12 B", "345 GB"):
        assert number in made
    assert all(name in made for name in head)
    letters = "".join(made.split())
    assert sorted(letters.replace("─", "")) == sorted(
        "".join(["atitle", *head, *(c for row in rows for c in row)]).replace(" ", "")
    )
    assert max(map(len, made.splitlines())) <= max(width, 54)


@pytest.mark.parametrize(("given", "used"), [(40, 60), (60, 60), (80, 80), (300, 120)])
def test_reports_are_as_wide_as_the_terminal_within_limits(
    given: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(given))
    assert columns() == used


def test_a_word_that_is_too_long_is_broken_at_its_joints() -> None:
    cells = ["reduce-scatter", "model.py:61 sharding_constraint", "word unbreakableword", "  .indented.kernel.scale"]
    made = render(table("", ("kind", "bytes"), [(cell, "1 B") for cell in cells], right=("bytes",)), width=20)
    assert [line.removesuffix("1 B").rstrip()[1:] for line in made.splitlines()[2:]] == [
        "reduce-",
        "scatter",
        "model.py:61",
        "sharding_",
        "constraint",
        "word",
        "unbreakable",
        "word",
        "  .indented",
        ".kernel.",
        "scale",
    ]


@pytest.mark.parametrize("width", range(64, 110, 5))
def test_words_stay_whole_where_there_is_room_for_them(width: int) -> None:
    calls = ['in_own_stages(\nstages="pipeline", steps=8, schedule="interleaved", repeats=8)', "accumulate(steps=2)"]
    layouts = ["CP 2 · PP 2 · FSDP 8, interleaved in 8 chunks, microbatches of 1, weights kept gathered", "DP 32"]
    rows = [(layout, "1.92 s", call) for layout, call in zip(layouts, calls, strict=True)]
    made = render(table("", ("layout", "step", "runs by"), rows, right=("step",)), width=width)
    assert set(" ".join([*layouts, *calls]).split()) <= set(made.split())
    assert max(map(len, made.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100])
def test_a_summary_of_long_names_shows_every_number(width: int) -> None:
    spec = P(("data", "model"), None, ("replica", "expert"))
    mesh = MeshAxes.of({"data": 2, "model": 4, "replica": 2, "expert": 2})
    leaves = [
        leaf(
            f"state.params['Transformer_{i}']['SelfAttention_0']['query_projection']['kernel']",
            8 * (i + 1),
            4096,
            4096,
            spec=spec,
        )
        for i in range(3)
    ]
    made = summary.summary(replace(record(leaves), mesh=mesh), width=width)
    for one in leaves:
        assert bytes_text(local_bytes(one, mesh)) in made
    assert max(map(len, made.splitlines())) <= width


def test_small_collectives_are_one_row() -> None:
    many = tuple(collective("all-gather", 2 * n, None) for n in range(1, 16))
    made = summary.summary(replace(record([leaf("x", 8)]), collectives=many), width=80)
    assert f"{15 - summary.LONGEST} smaller" in made
    assert len([line for line in made.splitlines() if line.startswith(" all-gather")]) == summary.LONGEST


# --- Hardware ------------------------------------------------------------------------


def test_every_number_of_every_chip_is_shown_with_its_source() -> None:
    for name in cost_models.chips():
        chip = catalogue.chip(name)
        shown_text = hardware.numbers(chip, width=80)
        assert max(map(len, shown_text.splitlines())) <= 80
        flat = " ".join(shown_text.split())
        for stated in (chip.numbers, *(link.numbers for link in chip.links.values())):
            for key, number in stated.items():
                assert f" {key} {hardware.number_text(key, number.value)} [" in flat
                assert "".join(number.source.split()) in flat.replace(" ", "")  # an address may be broken over lines


def test_the_catalogue_fits_80_columns() -> None:
    chips = [catalogue.chip(name) for name in cost_models.chips()]
    shown_text = hardware.catalogue(chips, width=80)
    assert max(map(len, shown_text.splitlines())) <= 80
    assert all(f" {chip.name} " in shown_text for chip in chips)


def test_hardware_for_machines_is_json() -> None:
    found = cost_models.hardware("h100:2x8")
    data = json.loads(json.dumps(hardware_room.hardware(found.chip, found.topology)))
    assert data["devices"] == 16
    assert data["links"]["domain"]["numbers"]["one_way_bytes_per_s"] == {
        "value": found.number("domain.one_way_bytes_per_s"),
        "source": found.provenance["domain.one_way_bytes_per_s"],
    }


@pytest.mark.parametrize(
    ("status", "bound_s", "told"),
    [
        ("optimal", 0.5, "optimal, gap 0.00%"),
        ("feasible", 0.5 - 1e-13, "optimal to 1 ns"),
        ("feasible", 0.5 - 2e-6, "optimal to 2 µs"),
        ("feasible", 0.495, "feasible, gap 1.00%"),
        ("priced", 0.5, "priced, gap 0.00%"),
    ],
)
def test_what_is_proven_is_told(status: str, bound_s: float, told: str) -> None:
    assert proof_text(status, 0.5, bound_s) == told


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.0009694, "s", "969 µs"),
        (1.995, "s per step", "2 s per step"),
        (26619.6, "tokens per sequence", "26,620 tokens per sequence"),
        (1.26, "devices", "1.26 devices"),
        (inf, "replicas", "any replicas"),
    ],
)
def test_rules_of_thumb_are_written_as_people_read_them(value: float, unit: str, written: str) -> None:
    made = hardware.limits([cost_models.Limit("a rule", value, unit, "a page")], width=80)
    assert written in " ".join(made.split())
