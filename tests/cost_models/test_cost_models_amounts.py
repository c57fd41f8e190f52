"""Nothing negative or unknown is priced, wherever it comes from, and more bytes never take less time."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cost_models
from benchmarks import damaged_files
from cost_models import CostModelError, HardwareFileError, UnknownNumberError
from cost_models.closed_forms import operations
from cost_models.machines.topology import examples

H100 = cost_models.hardware("h100:1x8")
MACHINE = H100.place({"data": 2, "model": 4})
MODEL: Any = {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 100}
SMALL = cost_models.Transformer(**MODEL)
NO_AMOUNTS = [float("nan"), -1.0, float("inf"), [1.0, float("nan")], "x", None, 10**400, [-1]]


@pytest.mark.parametrize("wrong", NO_AMOUNTS, ids=repr)
@pytest.mark.parametrize(
    "priced",
    [
        lambda x: MACHINE.collective_s("all-gather", ("model",), x),
        lambda x: MACHINE.collective_s("all-gather", (), x),
        lambda x: MACHINE.wire_bytes("all-gather", ("model",), x),
        lambda x: MACHINE.link_bytes("all-gather", ("model",), x),
        lambda x: MACHINE.hbm_s(x),
        lambda x: MACHINE.matmul_s(x, 64, 64, 64, "bfloat16"),
        lambda x: MACHINE.matmul_s(1, 64, 64, x, "bfloat16"),
        lambda x: MACHINE.matmul_flops_per_s(1, x, 64, 64, "bfloat16"),
        lambda x: MACHINE.exposed_s(x, 1.0),
        lambda x: MACHINE.exposed_s(1.0, x),
        lambda x: operations.elementwise_s(MACHINE, x, 1, 1, "float32"),
        lambda x: operations.lookup_s(MACHINE, x, 8, "float32"),
        lambda x: operations.optimizer_s(MACHINE, x),
        lambda x: operations.attention_s(MACHINE, x, 8, 8, 64, 64, 64, "bfloat16"),
        lambda x: operations.attention_s(MACHINE, 1, 8, 8, x, 64, 64, "bfloat16"),
        lambda x: cost_models.model_limits(SMALL, H100, x),
    ],
)
def test_what_is_no_amount_has_no_price(priced: Any, wrong: Any) -> None:
    with pytest.raises(CostModelError):
        priced(wrong)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, float("nan"), "2", None, True])
@pytest.mark.parametrize(
    "asked",
    [
        lambda x: cost_models.serving_time(SMALL, H100, batch=x, context=8),
        lambda x: cost_models.serving_time(SMALL, H100, batch=8, context=x),
        lambda x: cost_models.step_time(SMALL, cost_models.TrainingLayout(fsdp=8), H100, sequences=x, sequence=64),
        lambda x: cost_models.step_time(SMALL, cost_models.TrainingLayout(fsdp=8), H100, sequences=8, sequence=x),
        lambda x: cost_models.TrainingLayout(data=x),
        lambda x: cost_models.TrainingLayout(microbatch=x),
        lambda x: cost_models.Transformer(**(MODEL | {"layers": x})),
        lambda x: H100.place({"data": 8, "x": x}),
        lambda x: cost_models.hardware("h100", x if x is not None else 0),
    ],
)
def test_what_is_no_count_is_refused(asked: Any, wrong: Any) -> None:
    with pytest.raises(CostModelError):
        asked(wrong)


def test_a_framework_of_negative_bytes_is_refused() -> None:
    with pytest.raises(CostModelError, match="parameter_bytes"):
        cost_models.Framework(parameter_bytes=-1.0)
    with pytest.raises(CostModelError, match="remat"):
        cost_models.TrainingLayout(remat="some")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "dtype", ["nonsense", "", "float9_e4m3fn", "float99_", "3f4", "O", "S8", "M8[ns]", "f4", "a,b"]
)
def test_what_is_no_dtype_has_no_rate(dtype: str) -> None:
    for asked in (MACHINE.peak_flops_per_s, MACHINE.matmul_unit, lambda d: MACHINE.matmul_s(1, 8, 8, 8, d)):
        with pytest.raises(CostModelError, match="dtype"):
            asked(dtype)


@pytest.mark.parametrize("spec", ["", ":", "h100:", "h100:1x", "h100:" + "9" * 5000, "h100:0x8", "v5p-" + "9" * 5000])
def test_what_is_no_topology_is_refused(spec: str) -> None:
    with pytest.raises(CostModelError):
        cost_models.hardware(spec)
    for devices in (0, -1, 10**30, 1.5):
        with pytest.raises(CostModelError):
            cost_models.hardware("h100", devices)  # pyright: ignore[reportArgumentType]


def test_a_mesh_of_many_axes_is_placed() -> None:
    """Beyond the 64 dimensions that NumPy reshapes to, counted with the torus's."""
    found = cost_models.hardware("tpu-v5p:4x4x4").place({f"a{i}": 2 if i < 6 else 1 for i in range(32)})
    assert sorted(found.device_order.ravel().tolist()) == list(range(64))
    with pytest.raises(CostModelError, match="axes"):
        cost_models.hardware("h100:1x8").place({f"a{i}": 1 for i in range(40)} | {"x": 8})
    with pytest.raises(CostModelError, match="orders"):
        H100.best_order({f"a{i}": 1 for i in range(9)} | {"x": 8}, ())


# --- Files that change another chip ------------------------------------------------------


def file_of(folder: Path, **more: Any) -> Path:
    path = folder / "mine.json"
    numbers = {key: {"value": value, "source": "me"} for key, value in more.pop("numbers", {}).items()}
    document = {"schema": "hardware/1", "kind": "chip", "name": "mine", "numbers": numbers, **more}
    path.write_text(json.dumps(document))
    return path


def test_other_peaks_follow_the_one_that_a_file_states(tmp_path: Path) -> None:
    path = file_of(tmp_path, based_on="h100", topology="1x8", numbers={"peak_bfloat16_flops_per_s": 5e14})
    found, base = cost_models.hardware(path), H100
    times = 5e14 / base.number("peak_bfloat16_flops_per_s")
    for key in ("peak_float8_flops_per_s", "peak_int8_flops_per_s", "peak_float32_flops_per_s"):
        assert found.number(key) == pytest.approx(base.number(key) * times)
        assert "state it" in found.provenance[key]
    stated = {"peak_bfloat16_flops_per_s": 5e14, "peak_float8_flops_per_s": 6e14}
    found = cost_models.hardware(file_of(tmp_path, based_on="h100", topology="1x8", numbers=stated))
    assert found.number("peak_float8_flops_per_s") == 6e14
    found = cost_models.hardware(file_of(tmp_path, based_on="h100", topology="1x8", numbers={"hbm_bytes": 9e10}))
    assert found.number("peak_float8_flops_per_s") == base.number("peak_float8_flops_per_s")


@pytest.mark.parametrize("chip", cost_models.chips())
def test_a_file_based_on_a_chip_has_its_compiler(chip: str, tmp_path: Path) -> None:
    stock = cost_models.hardware(chip, 8)
    path = file_of(tmp_path, based_on=chip, topology=stock.topology.name, numbers={"hbm_bytes": 5e9})
    machines = [
        hw.place({"x": hw.devices})
        for hw in (stock, cost_models.hardware(path), stock.replaced("tried", hbm_bytes=5e9))
    ]
    for fact in ("gathers_ahead", "stores_quotients", "stores_score_gradients", "unscattered_axes", "tiled"):
        assert len({getattr(machine, fact) for machine in machines}) == 1, fact
    if chip.startswith("tpu"):
        assert set(stock.chip.compiler) == {"gathers_ahead", "stores_quotients", "stores_score_gradients"}


def test_what_the_compiler_does_may_be_stated_and_is_part_of_the_digest(tmp_path: Path) -> None:
    numbers = {"hbm_bytes": 5e9}
    facts = {"gathers_ahead": {"value": False, "source": "me"}}
    plain = cost_models.hardware(file_of(tmp_path, based_on="tpu-v5e", topology="2x4", numbers=numbers))
    found = cost_models.hardware(file_of(tmp_path, based_on="tpu-v5e", topology="2x4", numbers=numbers, compiler=facts))
    assert plain.place({"x": 8}).gathers_ahead
    assert not found.place({"x": 8}).gathers_ahead
    assert plain.digest != found.digest
    for wrong in ({"gathers": {}}, {"gathers_ahead": True}, {"gathers_ahead": {"value": 1, "source": "me"}}, []):
        with pytest.raises(HardwareFileError, match="compiler"):
            cost_models.hardware(file_of(tmp_path, based_on="tpu-v5e", topology="2x4", compiler=wrong))


def test_a_rate_that_no_file_states_is_an_error(tmp_path: Path) -> None:
    base = json.loads(damaged_files.good_hardware(1))
    del base["numbers"]["vmem_bytes"]
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(base))
    with pytest.raises(UnknownNumberError, match="vmem_bytes"):
        cost_models.hardware(path).number("vmem_bytes")


# --- Any file ----------------------------------------------------------------------------

FACTORS = st.floats(0.01, 100.0)


@settings(max_examples=60, deadline=None)
@given(
    chip=st.sampled_from(cost_models.chips()),
    devices=st.sampled_from([2, 4, 8, 16]),
    rate=FACTORS,
    memory=FACTORS,
    hop=st.just(0.0) | st.floats(1e-12, 1e-3),
    size=st.floats(1, 1e12),
    more=st.floats(1, 1e3),
)
def test_more_bytes_never_take_less_time_nor_faster_links_more(
    chip: str, devices: int, rate: float, memory: float, hop: float, size: float, more: float
) -> None:
    stock = cost_models.hardware(chip, devices)
    numbers = {"hbm_bytes_per_s": memory * stock.number("hbm_bytes_per_s"), "domain__hop_s": hop}
    found = stock.replaced("tried", **numbers)
    links = {
        f"{role}__one_way_bytes_per_s": (1 + rate) * link.numbers["one_way_bytes_per_s"].value
        for role, link in stock.chip.links.items()
    }
    faster = found.replaced("tried", **links, hbm_bytes_per_s=2 * numbers["hbm_bytes_per_s"])
    mesh = {"x": found.devices}
    sizes = np.array([0.0, 1.0, size, size * more])
    for kind in cost_models.KINDS:
        slow, fast = (hw.place(mesh).collective_s(kind, ("x",), sizes) for hw in (found, faster))
        assert (np.diff(slow) >= 0).all(), (kind, slow)
        assert (fast <= slow * (1 + 1e-12)).all(), (kind, slow, fast)
    slow, fast = (hw.place(mesh).hbm_s(sizes) for hw in (found, faster))
    assert (np.diff(slow) >= 0).all()
    assert (fast <= slow).all()
    rows = np.floor(sizes**0.5)
    assert (np.diff(found.place(mesh).matmul_s(1, rows, 128, 512, "bfloat16")) >= -1e-18).all()
    assert examples(found.chip)


VALUES = st.sampled_from([0, -1, 1e-320, 1e300, 1e24, 10**30, 0.5, 1, 2, 7, 10**6, True, None, "x", [], {}])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_of_any_numbers_is_refused_or_prices(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    document = json.loads(damaged_files.good_hardware(data.draw(st.integers(0, 1))))
    numbers = document["numbers"] | {f"domain.{key}": {"source": "me"} for key in ("hop_s", "achieved_fraction")}
    for key in data.draw(st.lists(st.sampled_from(sorted(numbers)), min_size=1, max_size=4)):
        document["numbers"][key] = {"value": data.draw(VALUES), "source": "me"}
    path = tmp_path_factory.mktemp("any") / "chip.json"
    path.write_text(json.dumps(document))
    with contextlib.suppress(CostModelError):
        damaged_files.use_hardware(path, random.Random(0))
