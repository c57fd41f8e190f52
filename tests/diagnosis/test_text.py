"""The doctor of HLO text: no program, no compiler; and what it says on the command line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.backends.partitioner_log import rematerialized, way_between
from autoshard.cli import app
from autoshard.diagnosis.doctor import doctor_of_text
from autoshard.diagnosis.evidence import Evidence
from autoshard.diagnosis.finding import Finding
from autoshard.errors import HloError, MeshError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes
from tests.backends.test_repeats import NESTED

FIXTURES = Path(__file__).parents[1] / "data" / "hlo" / "jax-0.10"

# A gather whose result every device cuts again; a sum in each of four trips; a gather of what is read in 16 bits.
SICK = """\
HloModule sick, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[1024,1024], f32[1024,1024])) -> (s32[], f32[1024,1024], f32[1024,1024]) {
  %state = (s32[], f32[1024,1024], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %total = f32[1024,1024] get-tuple-element(%state), index=1
  %x = f32[1024,1024] get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %dot = f32[1024,1024] dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %reduced = f32[1024,1024] all-reduce(%dot), to_apply=%add, metadata={source_file="t.py" source_line=7}
  %more = f32[1024,1024] add(%total, %reduced)
  ROOT %out = (s32[], f32[1024,1024], f32[1024,1024]) tuple(%next, %more, %x)
}

%condition (state: (s32[], f32[1024,1024], f32[1024,1024])) -> pred[] {
  %state = (s32[], f32[1024,1024], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %trips = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %trips), direction=LT
}

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024] parameter(0)
  %q = f32[128,1024] parameter(1)
  %w = f32[128,4096] parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[1024,1024], f32[1024,1024]) tuple(%zero, %p, %p)
  %loop = (s32[], f32[1024,1024], f32[1024,1024]) while(%start), condition=%condition, body=%body
  %grad = f32[1024,1024] get-tuple-element(%loop), index=1
  %whole = f32[1024,1024] all-gather(%q), dimensions={0}, metadata={source_file="t.py" source_line=9}
  %id = u32[] partition-id()
  %width = u32[] constant(128)
  %at = u32[] multiply(%id, %width)
  %none = u32[] constant(0)
  %cut = f32[1024,128] dynamic-slice(%whole, %none, %at), dynamic_slice_sizes={1024,128}
  %wide = f32[1024,4096] all-gather(%w), dimensions={0}, metadata={source_file="t.py" source_line=12}
  %narrow = bf16[1024,4096] convert(%wide)
  ROOT %results = (f32[1024,1024], f32[1024,128], bf16[1024,4096]) tuple(%grad, %cut, %narrow)
}
"""
# A sum over all devices, of which every one keeps an eighth.
KEPT = """\
HloModule kept, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8192,4096]) -> f32[1024,4096] {
  %p = f32[8192,4096] parameter(0)
  %whole = f32[8192,4096] all-reduce(%p), to_apply=%add, metadata={source_file="t.py" source_line=3}
  %id = u32[] partition-id()
  %rows = u32[] constant(1024)
  %at = u32[] multiply(%id, %rows)
  %none = u32[] constant(0)
  %half = f32[8192,4096] tanh(%whole)
  ROOT %mine = f32[1024,4096] dynamic-slice(%half, %at, %none), dynamic_slice_sizes={1024,4096}
}
"""
LOG = (
    "W0000 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
    "{devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} efficiently for HLO operation %add.2 = f32[8,16,4] "
    'add(%param), sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="jit(f)/add" stack_frame_id=4}. As the '
    "last resort, SPMD will replicate the tensor"
)


def test_patterns_are_found_and_priced() -> None:
    found = doctor_of_text(SICK, hardware="h100:1x8")
    assert {one.kind: one.where for one in found.findings} == {
        "sums in every trip": "t.py:7",
        "rematerialized": "t.py:9",
        "gathered wide": "t.py:12",
    }
    assert found.findings[0].kind == "sums in every trip"
    assert "4 times" in found.findings[0].cause
    assert sum(one.seconds for one in found.findings) < found.step.exposed_s == found.step.communication_s
    assert found.step.best_s is None


def test_a_sum_that_is_kept_over_one_axis_is_summed_over_the_others() -> None:
    """A device keeps halves of a sum over all eight: scattered over `data`, and a half of it summed over `model`."""
    whole, halves = (
        doctor_of_text(text, hardware="h100:1x8", mesh={"data": 2, "model": 4})
        for text in (KEPT, KEPT.replace("[1024,4096]", "[4096,4096]").replace("{1024,", "{4096,"))
    )
    (eighths,), (half,) = whole.findings, halves.findings
    assert eighths.kind == half.kind == "summed whole"
    assert 0.2 * eighths.seconds < half.seconds < 0.7 * eighths.seconds


def test_findings_are_ranked_by_their_share_of_the_step_or_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(kind: str, seconds: float, nbytes: float) -> Finding:
        return Finding(kind=kind, seconds=seconds, bytes=int(nbytes), where="", cause="", change="")

    def looks(evidence: Evidence) -> Iterator[Finding]:
        step_s, limit = evidence.timeline.step_s, evidence.limit_bytes
        yield finding("unasked", 0.05 * step_s, 0)
        yield finding("optimizer state whole", 0.02 * step_s, 0.1 * limit)
        yield finding("gathered wide", 0.3 * step_s, 0)
        yield finding("gathered and kept", 0, 0.03 * limit)
        yield finding("out of memory", 0.2 * step_s, 0.01 * limit)
        yield finding("copied to another order", 0.0005 * step_s, 0.01 * limit)

    monkeypatch.setattr("autoshard.diagnosis.doctor.LOOKS", (looks,))
    found = doctor_of_text(KEPT, hardware="h100:1x8").findings
    assert [one.kind for one in found] == [
        "out of memory",
        "gathered wide",
        "optimizer state whole",
        "unasked",
        "gathered and kept",
    ]


def test_what_a_device_has_no_room_for_is_gathered_again_on_purpose() -> None:
    """Four layers of a stack of which each micro-batch takes all: in 137 GB they do not fit, one by one they do.

    Then what is gathered in every trip of the inner loop, whole, is found alone, if there is room for it.
    """
    assert {one.kind for one in doctor_of_text(NESTED, hardware="h100:1x8").findings} == {"gathered in every trip"}
    large = NESTED.replace("512", "131072").replace("64,", "16384,")
    assert doctor_of_text(large, hardware="h100:1x8").findings == ()
    more = '%more = f32[4,512,512] all-gather(%g), dimensions={1}, metadata={source_file="t.py" source_line=5}'
    both = NESTED.replace("%after = s32[] fusion", f"{more}\n  %after = s32[] fusion")
    assert len(doctor_of_text(both, hardware="h100:1x8").findings) == 2
    (near,) = doctor_of_text(both.replace("512", "61440").replace("64,", "7680,"), hardware="h100:1x8").findings
    assert near.where == "t.py:5"  # in 60 GB; with the layers it would be 91


def test_a_sum_that_the_compiler_scatters_for_nobody_is_no_finding() -> None:
    """XLA:TPU all-reduces a sum over all of a square torus, whatever is asked of it; over a part of it, it scatters."""
    text = KEPT.replace("num_partitions=8", "num_partitions=16")
    one, other = "replica_groups=[1,16]<=[16], to_apply=%add", "replica_groups=[2,8]<=[16], to_apply=%add"
    over_all = text.replace("to_apply=%add", one).replace("[1024,4096]", "[512,4096]").replace("{1024,", "{512,")
    over_half = text.replace("to_apply=%add", other)
    mesh = {"data": 2, "model": 8}

    def kinds(text: str, hardware: str) -> set[str]:
        return {one.kind for one in doctor_of_text(text, hardware=hardware, mesh=mesh).findings}

    assert kinds(over_all, "h100:2x8") == kinds(over_half, "h100:2x8") == {"summed whole"}
    assert kinds(over_all, "tpu-v5e:4x4") == set()
    assert kinds(over_half, "tpu-v5e:4x4") == {"summed whole"}
    assert doctor_of_text(KEPT, hardware="tpu-v5e:2x4").findings[0].kind == "summed whole"


def test_what_a_loop_gathers_and_does_not_change_is_found() -> None:
    """XLA:CPU moves such gathers ahead of the loop itself; the compile test is `hand_sharded`'s, on XLA:GPU."""
    taken = "%x = f32[1024,1024] get-tuple-element(%state), index=2"
    gather = '\n  %all = f32[8192,1024] all-gather(%x), dimensions={0}, metadata={source_file="t.py" source_line=4}'
    text = SICK.replace(taken, taken + gather).replace("dot(%x, %x), lhs", "dot(%all, %all), lhs")
    found = {one.kind: one for one in doctor_of_text(text, hardware="h100:1x8").findings}
    assert found["gathered in every trip"].where == "t.py:4"
    assert "4 times" in found["gathered in every trip"].cause
    changed = text.replace("tuple(%next, %more, %x)", "tuple(%next, %more, %reduced)")
    assert "gathered in every trip" not in {one.kind for one in doctor_of_text(changed, hardware="h100:1x8").findings}


def test_a_mesh_of_its_own_gives_the_same() -> None:
    one, other = (doctor_of_text(SICK, hardware="h100:1x8", mesh=mesh) for mesh in (None, {"data": 8}))
    assert one.to_json() == other.to_json()
    with pytest.raises(MeshError):
        doctor_of_text(SICK, hardware="h100:1x8", mesh={"data": 3})


@pytest.mark.parametrize(
    "name", ["megatron.gpu", "sequence_parallel.gpu", "nested.gpu", "fsdp_scan.gpu", "experts.gpu"]
)
def test_healthy_programs_have_no_findings(name: str) -> None:
    assert doctor_of_text((FIXTURES / f"{name}.txt").read_text(), hardware="h100:1x8").findings == ()


@pytest.mark.parametrize("text", ["", "no HLO", SICK.replace("%total, %reduced", "%total, %lost")])
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(HloError):
        doctor_of_text(text, hardware="h100:1x8")


def test_the_partitioner_says_what_it_made_whole() -> None:
    mesh = MeshAxes.of({"x": 4, "y": 2})
    (found,) = rematerialized(f"noise\n{LOG}\n{LOG}\nnoise", mesh)
    assert found.op_name == "jit(f)/add"
    assert (str(found.source), str(found.target)) == ("[y,-,x]", "[-,x·y,-]")
    assert found.source is not None
    assert found.target is not None
    between = way_between(found.source, found.target)
    assert str(between) == "[y,x,-]"
    assert between is not None
    assert way_between(between, found.target) is None
    old = LOG.replace("cannot go", "was not able to go").replace(
        "efficiently", "without doing a full rematerialization of the tensor"
    )
    assert rematerialized(old, mesh) == (found,)


def test_layouts_that_are_one_move_apart_have_nothing_between() -> None:
    assert way_between(Layout((("x",), ())), Layout(((), ("x",)))) is None
    assert way_between(Layout((("x",), ())), Layout((("x",), ()))) is None


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_the_command_line_reads_text_compares_and_fails(tmp_path: Path) -> None:
    sick, well = tmp_path / "sick.txt", tmp_path / "well.txt"
    sick.write_text(SICK)
    well.write_text(SICK.replace("dynamic-slice(%whole, %none, %at)", "dynamic-slice(%whole, %none, %none)"))
    on = ("--hardware", "h100:1x8")
    earlier = tmp_path / "well.json"
    earlier.write_text(run("--hlo", str(well), *on, "--json"))
    assert "rematerialized" in run("--hlo", str(sick), *on, "--fail-on", "1%", status=1)
    assert "new" in run("--hlo", str(sick), *on, "--against", str(earlier))
    run("--hlo", str(sick), *on, "--against", str(earlier), "--fail-on", "1%", status=1)
    run("--hlo", str(well), *on, "--against", str(earlier), "--fail-on", "1%")
    (line,) = run("--hlo", str(sick), *on, "--against", str(earlier), "--format", "github").splitlines()
    assert line.startswith("::warning file=t.py,line=9,title=rematerialized")
    changes = json.loads(run("--hlo", str(sick), *on, "--against", str(earlier), "--json"))["against"]["changes"]
    assert [(one["what"], one["kind"]) for one in changes] == [("new", "rematerialized")]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "is empty"),
        ("hello", "not HLO text"),
        ("HloModule x", "no computation"),
        (SICK[:900], "cannot read this line"),
    ],
)
def test_a_file_that_is_no_program_is_named_with_the_way_to_write_one(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "step.txt"
    path.write_text(text)
    result = CliRunner().invoke(app, ["doctor", "--hlo", str(path), "--hardware", "h100:1x8"])
    assert result.exit_code != 0
    assert isinstance(result.exception, HloError)
    for part in ("step.txt", cause, "compile().as_text()"):
        assert part in str(result.exception)


def test_another_number_of_devices_is_told() -> None:
    with pytest.raises(MeshError, match="mesh devices=8 has 8 devices, topology 2x8 has 16"):
        doctor_of_text(SICK, hardware="h100:2x8")


@pytest.mark.parametrize(
    "arguments", [(), ("module:builder", "--hlo", "x"), ("--hlo", "x"), ("--hlo", "missing", "--hardware", "h100:1x8")]
)
def test_requests_that_cannot_be_served_are_refused(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code != 0
