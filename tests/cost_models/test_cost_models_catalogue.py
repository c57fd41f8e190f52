"""Hardware files: what ships is complete and sourced; what users write is read or refused with a reason."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import cost_models
from cost_models.errors import (
    CostModelError,
    HardwareFileError,
    TopologyError,
    UnknownHardwareError,
    UnknownNumberError,
)
from cost_models.machines import catalogue, plausibility
from cost_models.machines.model import chip_named

BIG_SIX = (
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu-v7x",
    "a100-40",
    "a100",
    "h100",
    "h200",
    "b200",
    "gb200",
    "h20",
    "h800",
    "gh200",
    "l4",
    "l40s",
    "a10g",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "mi300x",
    "mi325x",
    "mi355x",
    "trn2",
    "trn3",
    "cpu",
)


def user_file(folder: Path, **changes: Any) -> Path:
    document: dict[str, Any] = {
        "schema": "hardware/1",
        "kind": "chip",
        "name": "mine",
        "based_on": "h100",
        "topology": "1x8",
        "numbers": {"hbm_bytes": {"value": 8e10, "source": "nvidia-smi"}},
    }
    path = folder / "mine.json"
    path.write_text(json.dumps(document | changes))
    return path


def number(key: str, value: Any, source: str = "measured") -> dict[str, Any]:
    return {"numbers": {key: {"value": value, "source": source}}}


def table(**changes: Any) -> dict[str, Any]:
    return {"collective": "all-gather", "devices": 8, "source": "me", "bytes": [1, 2], "seconds": [1, 2]} | changes


def torus(**changes: Any) -> dict[str, Any]:
    stated = {"wrap": "axes of 16", "shapes": [[4, 4]], "largest": [16, 16], "name_counts_cores": False, "source": "me"}
    return stated | changes


def link(**changes: Any) -> dict[str, Any]:
    values = {
        "one_way_bytes_per_s": 1e11,
        "achieved_fraction": 1.0,
        "hop_s": 0.0,
        "launch_s": 0.0,
        "max_devices_count": 16,
    }
    numbers = {key: {"value": value, "source": "vendor"} for key, value in values.items()}
    return {
        "schema": "hardware/1",
        "kind": "interconnect",
        "name": "my-switch",
        "medium": "switch",
        "numbers": numbers,
    } | changes


def without_limit() -> dict[str, Any]:
    numbers = {key: entry for key, entry in link()["numbers"].items() if key != "max_devices_count"}
    return link(numbers=numbers)


@pytest.mark.parametrize("name", BIG_SIX)
def test_the_chips_that_people_have_are_there(name: str):
    assert name in cost_models.chips()


@pytest.mark.parametrize("name", cost_models.chips())
def test_every_shipped_number_is_finite_and_sourced(name: str):
    hardware = cost_models.hardware(name, devices=8)
    for key, entry in hardware.numbers.items():
        assert math.isfinite(entry.value), key
        assert len(entry.source) > 3, key
    assert set(hardware.provenance) == set(hardware.numbers)
    assert 0 < hardware.usable_memory_bytes < hardware.memory_bytes
    assert sum(size for _, size in hardware.memory_terms[:-1]) == hardware.usable_memory_bytes


def test_aliases_and_case():
    assert cost_models.hardware("V5P:4x4x8").name == "tpu-v5p:4x4x8"
    assert cost_models.hardware("a100-80:1x8").name == "a100:1x8"


def test_data_sheet_facts():
    """Values that anyone can look up: NVIDIA and Google data sheets."""
    assert cost_models.hardware("h100:1x8").number("peak_bfloat16_flops_per_s") == pytest.approx(989e12)
    assert cost_models.hardware("tpu-v5p:4x4x4").number("peak_bfloat16_flops_per_s") == pytest.approx(459e12)
    assert cost_models.hardware("tpu-v5p:4x4x4").number("domain.one_way_bytes_per_s") == 9e10
    # A Ironwood chip is two devices; they share the chip's links.
    ironwood = cost_models.hardware("tpu-v7x:4x4x4")
    assert ironwood.devices == 128
    assert 2 * ironwood.number("peak_bfloat16_flops_per_s") == pytest.approx(2307e12)
    assert 2 * ironwood.number("domain.one_way_bytes_per_s") == 9e10


def test_unknown_chip_lists_near_names():
    with pytest.raises(UnknownHardwareError, match="did you mean h100 or h20") as caught:
        cost_models.hardware("h10:1x8")
    assert caught.value.near[0] == "h100"
    with pytest.raises(UnknownHardwareError, match="known: a100, "):
        cost_models.hardware("zzz:1x8")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("v5p-256", r"'v5p-256' counts TensorCores: it is 128 chips; write tpu-v5p:4x4x8"),
        ("tpu-v4-64", r"'v4-64' counts TensorCores: it is 32 chips; write tpu-v4:2x4x4"),
        ("tpu7x-128", r"counts TensorCores: it is 64 chips; write tpu-v7x:4x4x4"),
        ("v5e-256", r"'v5e-256' counts chips, but not how they are wired; write tpu-v5e:16x16"),
        ("tpu-v5e:32x32", r"`tpu-v5e:32x32` does not exist; slices are 1x1, 2x2"),
        ("tpu-v5p:16x20x28", r"does not exist.*multiples of 4 up to 16x16x24"),
        ("tpu-v5p:2x2x3", r"does not exist"),
        ("tpu-v5p:4x4", r"a slice has 3 dimensions"),
        ("h100:1x16", r"nvlink4 links at most 8 devices; write h100:2x8"),
        ("h100:8", r"write nodes x GPUs: h100:1x8"),
        ("h100:2*2x4", r"write nodes x GPUs: h100:2x8"),
        ("h100:two", r"is no topology"),
        ("h100:0x8", r"sizes must be positive"),
        ("cpu:2x4", r"it is one host; write cpu:8"),
        ("h100", r"names no topology"),
    ],
)
def test_topologies_that_do_not_exist(spec: str, message: str):
    with pytest.raises(TopologyError, match=message):
        cost_models.hardware(spec)


@pytest.mark.parametrize(
    ("chip", "devices", "name"),
    [
        ("tpu-v5e", 8, "tpu-v5e:2x4"),
        ("tpu-v5e", 5, "tpu-v5e:2x4"),
        ("tpu-v5e", 512, "tpu-v5e:2*16x16"),
        ("tpu-v5p", 128, "tpu-v5p:4x4x8"),
        ("tpu-v4", 192, "tpu-v4:4x4x12"),
        ("tpu-v7x", 128, "tpu-v7x:4x4x4"),
        ("h100", 8, "h100:1x8"),
        ("h100", 12, "h100:2x6"),
        ("gb200", 144, "gb200:2x72"),
        ("cpu", 8, "cpu:8"),
    ],
)
def test_a_bare_chip_takes_the_smallest_usual_topology(chip: str, devices: int, name: str):
    found = cost_models.hardware(chip, devices=devices)
    assert found.name == name
    assert name in found.note
    assert found.devices >= devices


def test_a_topology_and_a_number_of_devices_must_agree():
    with pytest.raises(TopologyError, match="has 8 devices, 4 were asked for"):
        cost_models.hardware("h100:1x8", devices=4)


def test_a_users_file_overrides_any_number(tmp_path: Path):
    path = user_file(
        tmp_path,
        numbers={
            "hbm_bytes": {"value": 9.6e10, "source": "data sheet"},
            "scale_out.one_way_bytes_per_s": {"value": 1.25e10, "source": "ib_write_bw"},
        },
        topology="2x8",
    )
    mine, stock = cost_models.hardware(str(path)), cost_models.hardware("h100:2x8")
    assert mine.name == "h100/mine:2x8"
    assert mine.memory_bytes == 9.6e10
    assert mine.provenance["scale_out.one_way_bytes_per_s"] == "ib_write_bw"
    assert mine.digest != stock.digest
    mesh = {"data": 2, "model": 8}
    faster, slower = (hw.place(mesh).collective_s("all-reduce", ("data",), 2**28) for hw in (stock, mine))
    assert 3.5 < slower / faster < 4.5  # four times less bandwidth
    assert cost_models.hardware(f"{path}:4x8").devices == 32


def test_a_users_file_may_bring_its_own_interconnect(tmp_path: Path):
    machine = cost_models.hardware(str(user_file(tmp_path, domain=link(), topology="1x16"))).place({"x": 16})
    assert float(machine.collective_s("all-gather", ("x",), 1.6e11)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (number("hbm_gb", 80), r"`hbm_gb` has the wrong unit suffix: write `hbm_bytes`, in bytes"),
        (number("matmul_launch_us", 3), r"wrong unit suffix: write `matmul_launch_s`, in s"),
        (number("domain.one_way_gbps", 450), r"wrong unit suffix: write `one_way_bytes_per_s`, in bytes per second"),
        (number("hbm_bites", 80), r"unknown number `hbm_bites`; did you mean `hbm_bytes`"),
        (number("hbm_bytes", -1), r"`hbm_bytes` is -1; it must be positive"),
        (number("hbm_bytes", 0), r"it must be positive"),
        (number("domain.hop_s", -1), r"it must be 0 or more"),
        (number("hbm_bytes", float("nan")), r"the number NaN is not finite"),
        (number("hbm_bytes", "80"), r"'80', not a finite number"),
        (number("hbm_bytes", True), r"not a finite number"),
        (number("overlap_fraction", 1.5), r"a fraction lies between 0 and 1"),
        (number("matmul_units_count", 1.5), r"a count is whole"),
        (number("hbm_bytes", 8e10, ""), r"`hbm_bytes` has no `source`"),
        ({"numbers": {"hbm_bytes": 8e10}}, r"`hbm_bytes` must be a JSON object, not float"),
        ({"numbers": [1]}, r"`numbers` must be a JSON object, not list"),
        ({"based_on": None}, r"missing numbers: peak_bfloat16_flops_per_s, "),
        ({"based_on": "h10"}, r"did you mean h100"),
        ({"domain": "nvlink9"}, r"no such interconnect; known: "),
        ({"schema": "hardware/9"}, r"`schema` is 'hardware/9'; this version reads 'hardware/1'"),
        ({"kind": "gpu"}, r"`kind` is 'gpu'; expected 'chip'"),
        ({"name": ""}, r"`name` is missing"),
        ({"topologie": "1x8"}, r"unknown key `topologie`; did you mean `topology`"),
        (number("die.hop_s", 1), r"there is no `die` interconnect here; it has domain, scale_out"),
        ({"scale_out": "nvlink4"}, r"`scale_out` is nvlink4, a switch: networks, and only they, scale out"),
        ({"tables": [{"collective": "gather"}]}, r"tables: missing keys: devices, source, bytes, seconds"),
        ({"tables": [table(collective="gather")]}, r"`collective` is 'gather'; it must be one of all-gather"),
        ({"tables": [table(devices=1)]}, r"`devices` is 1; a group has two or more"),
        ({"tables": [table(seconds=[1.0])]}, r"must be two lists of one length, 2 or more"),
        ({"tables": [table(bytes=[2.0, 1.0])]}, r"`bytes` must ascend, from 1 on"),
        ({"tables": 3}, r"`tables` must be a JSON list, not int"),
        ({"tables": [table(seconds=["1", 2.0])]}, r"all-gather on 8 devices: `seconds` must be numbers alone"),
        ({"tables": [table(bytes="1 MB")]}, r"`bytes` must be a JSON list, not str"),
        ({"aliases": None}, r"`aliases` must be a JSON list, not NoneType"),
        ({"domain": link(medium="torus", torus=torus(shapes=[]))}, r"`torus.shapes` has no shape, or one of other dim"),
        (
            {"domain": link(medium="torus", torus=torus(shapes=[[4, "4"]]))},
            r"\[4, '4'\]; write up to 4 lengths, whole, from 1 to 128",
        ),
        (
            {"domain": link(medium="torus", torus=torus(largest=[0, 4]))},
            r"`torus.largest` is \[0, 4\]; write up to 4 lengths",
        ),
        ({"domain": link(medium="torus", torus=torus(name_counts_cores=1))}, r"is 1, not true or false"),
        (
            {"numbers": {"devices_per_chip_count": {"value": 2, "source": "me"}}},
            r"`devices_per_chip_count` is more than 1: name the `die` between them",
        ),
        ({"domain": link(medium="rope")}, r"`medium` is 'rope'; it must be one of torus, switch"),
        ({"domain": link(torus={})}, r"belongs to a torus medium, and to no other"),
        ({"domain": link(medium="torus", torus={"wrap": "sometimes"})}, r"torus: missing keys: shapes"),
        ({"domain": link(numbers={})}, r"missing numbers: one_way_bytes_per_s, achieved_fraction, hop_s, launch_s"),
        ({"domain": without_limit()}, r"missing numbers: max_devices_count; how many devices does the switch join"),
        ({"measured": {"dates": "today"}}, r"unknown key `dates`; did you mean `date`"),
    ],
)
def test_malformed_files(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises((HardwareFileError, UnknownHardwareError), match=message):
        cost_models.hardware(str(user_file(tmp_path, **changes)))


@pytest.mark.parametrize("name", ["v5p-256", "tpu-v5p-256"])
def test_a_name_that_counts_cores_is_explained_with_and_without_a_topology_asked_for(name: str):
    for ask in (chip_named, cost_models.hardware):
        with pytest.raises(TopologyError, match=r"counts TensorCores: it is 128 chips; write tpu-v5p:4x4x8"):
            ask(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": -2}, "layers cannot be -2: it is a whole number from 1 on"),
        ({"heads": 0}, "heads cannot be 0: it is a whole number from 1 on"),
        ({"window": -1}, "window cannot be -1: it is a whole number from 0 on"),
        ({"active_experts": 2}, "visits 2 experts, but there are 1"),
    ],
)
def test_transformers_that_cannot_be(changes: dict[str, Any], message: str):
    sizes: dict[str, Any] = {
        "layers": 2,
        "d_model": 64,
        "d_ff": 128,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "vocab": 100,
    }
    with pytest.raises(CostModelError, match=message):
        cost_models.Transformer(**(sizes | changes))


def test_files_that_are_not_there_or_not_json(tmp_path: Path):
    with pytest.raises(HardwareFileError, match="cannot be read"):
        cost_models.hardware(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(HardwareFileError, match=r"not JSON: .*line 1"):
        cost_models.hardware(str(tmp_path / "bad.json"))


def test_numbers_that_a_file_does_not_state():
    with pytest.raises(UnknownNumberError, match="h100:1x8 states no `vmem_bytes`; it states peak_bfloat16"):
        cost_models.hardware("h100:1x8").number("vmem_bytes")


def test_replaced_keeps_the_rest_and_checks():
    stock = cost_models.hardware("h100:1x8")
    changed = stock.replaced("what if", hbm_bytes_per_s=1e12, domain__hop_s=0.0)
    assert changed.number("hbm_bytes_per_s") == 1e12
    assert changed.number("domain.hop_s") == 0
    assert changed.number("hbm_bytes") == stock.number("hbm_bytes")
    with pytest.raises(HardwareFileError, match="must be positive"):
        stock.replaced("what if", hbm_bytes_per_s=-1.0)


def test_every_interconnect_is_named_by_a_chip():
    named = {link.name for name in cost_models.chips() for link in catalogue.chip(name).links.values()}
    assert named == set(catalogue.interconnects())


@pytest.mark.parametrize("name", cost_models.chips())
def test_every_shipped_chip_is_plausible(name: str):
    plausibility.check(catalogue.chip(name), name)


@pytest.mark.parametrize("times", [1e-3, 1e3])
@pytest.mark.parametrize(
    "key", ["peak_bfloat16_flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "domain.one_way_bytes_per_s"]
)
@pytest.mark.parametrize("chip", ["h100", "h20", "l4", "b200", "tpu-v5e", "tpu-v7x"])
def test_a_number_that_is_off_by_a_thousand_is_refused(chip: str, key: str, times: float, tmp_path: Path):
    """As it is where a file states GB, or GFLOP/s."""
    stated = cost_models.hardware(chip, devices=8).number(key) * times
    path = user_file(
        tmp_path, based_on=chip, topology=cost_models.hardware(chip, 8).topology.name, **number(key, stated)
    )
    with pytest.raises(HardwareFileError, match=r"in another unit than SI"):
        cost_models.hardware(str(path))
