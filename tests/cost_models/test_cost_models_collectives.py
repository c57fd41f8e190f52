"""Seconds of collectives: against exact routing, measurements, and the laws that any price obeys."""

import time
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cost_models
from cost_models import KINDS, Kind
from cost_models.errors import CostModelError
from cost_models.machines.alpha_beta import Ring, interpolate_s, torus_all_to_all_s, torus_gather_s
from cost_models.machines.catalogue import chip as chip_of
from tests.random_machines import TOPOLOGIES, placed

PHASES: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute", "broadcast")


def links_used(ring: Ring) -> np.ndarray:
    """Loads of one-way links when every interleaved group runs an all-to-all of unit blocks, `[hop, direction]`."""
    n, wraps, sharers = ring.n, ring.wraps, ring.sharers
    length = n * sharers
    load = np.zeros((length, 2))
    for offset in range(sharers):
        members = [offset + sharers * i for i in range(n)]
        for source in members:
            for target in members:
                ahead, back = (target - source) % length, (source - target) % length
                if not wraps:
                    ahead, back = (target - source, np.inf) if target > source else (np.inf, source - target)
                shares = ((0, 0.5), (1, 0.5)) if ahead == back and source != target else ((int(back < ahead), 1.0),)
                for direction, share in shares:
                    for hop in range(int(min(ahead, back)) if source != target else 0):
                        at = (source + hop) % length if direction == 0 else (source - hop - 1) % length
                        load[at, direction] += share
    return load


@pytest.mark.parametrize(
    ("n", "sharers", "wraps"),
    [
        (n, sharers, wraps)
        for n, sharers, wraps in product((2, 3, 4, 5, 8), (1, 2, 4), (True, False))
        if n * sharers > 3
    ],
)
def test_all_to_all_is_the_busiest_link_of_exact_routing(n: int, sharers: int, *, wraps: bool):
    ring = Ring(n, wraps, sharers)
    routed = links_used(ring).max() / n  # each device's unit operand is n blocks
    assert float(torus_all_to_all_s(1.0, [ring], 1.0)) == pytest.approx(routed)


@pytest.mark.parametrize(
    "ring", [Ring(4, wraps=True), Ring(4, wraps=False), Ring(16, wraps=True), Ring(2, wraps=False)]
)
def test_gather_is_what_the_last_device_must_receive(ring: Ring):
    incoming_links = 2 if ring.wraps else 1
    needed = (ring.n - 1) / ring.n
    assert float(torus_gather_s(1.0, [ring], 1.0)) == pytest.approx(needed / incoming_links)


def test_hand_computed_all_gather_on_a_wrapped_axis():
    """16-ring of v5e: 2 links of 45 GB/s at 94%, 15/16 of the result, 5 µs and 8 hops of 1 µs."""
    machine = cost_models.hardware("tpu-v5e:8x16").place({"x": 8, "y": 16})
    expected = 5e-6 + 8e-6 + 134e6 * (15 / 16) / (2 * 45e9 * 0.94)
    assert float(machine.collective_s("all-gather", ("y",), 134e6)) == pytest.approx(expected)


def test_hand_computed_node_and_network():
    """All-gather of 1 GB over 2 nodes x 4 GPUs: each NIC brings a quarter, halved; NVLink works beside it."""
    machine = cost_models.hardware("h100:2x4").place({"data": 2, "model": 4})
    network_s = 1e9 / 4 * (1 / 2) / (50e9 * 0.85)
    nvlink_s = 1e9 * (3 / 4) / (450e9 * 0.78)
    latency_s = 1.34e-5 + 3 * 1e-6 + 1.4e-5
    expected = max(network_s, nvlink_s) + latency_s
    assert float(machine.collective_s("all-gather", ("data", "model"), 1e9)) == pytest.approx(expected)


def test_hand_computed_all_to_all_over_two_nodes():
    """1 GB per device in 8 blocks: 4 blocks leave the node, 3 stay in it."""
    machine = cost_models.hardware("h100:2x4").place({"data": 2, "model": 4})
    network_s, nvlink_s = 1e9 * (4 / 8) / (50e9 * 0.85), 1e9 * (3 / 8) / (450e9 * 0.78)
    latency_s = 1.34e-5 + 3 * 1e-6 + 1.4e-5
    expected = max(network_s, nvlink_s) + latency_s
    assert float(machine.collective_s("all-to-all", ("data", "model"), 1e9)) == pytest.approx(expected)
    carried = machine.link_bytes("all-to-all", ("data", "model"), 8.0)
    assert (float(carried["scale_out"]), float(carried["domain"])) == (4.0, 3.0)


def test_small_collectives_over_many_nodes_climb_a_tree_and_large_ones_go_round():
    """64 NICs: 6 hops and the bytes twice, or 63 hops and the bytes once."""
    machine = cost_models.hardware("h100:64x8").place({"data": 64, "model": 8})
    launch_s, hop_s, s_per_byte = 1.34e-5, 1.4e-5, (63 / 64) / (50e9 * 0.85)
    small, large = machine.collective_s("all-gather", ("data",), [1e6, 1e9]).tolist()
    assert small == pytest.approx(launch_s + 6 * hop_s + 2 * 1e6 * s_per_byte)
    assert large == pytest.approx(launch_s + 63 * hop_s + 1e9 * s_per_byte)


def test_the_longest_axis_of_a_torus_decides_an_all_to_all():
    """Scaling book, sharding.md:470: V·max(A, B, C)/(4·N·W) of N devices that hold V together, W both ways."""
    rings = [Ring(4, wraps=True), Ring(8, wraps=True)]
    operand = 1e9
    whole = operand * 32
    assert float(torus_all_to_all_s(operand, rings, 9e10)) == pytest.approx(whole * 8 / (4 * 32 * 1.8e11))


@pytest.mark.parametrize(
    ("nbytes", "bytes_per_s"), [(131e3, 8.7e9), (524e3, 27e9), (4.2e6, 72e9), (17e6, 86e9), (134e6, 90e9)]
)
def test_measured_all_gather_on_v5e(nbytes: float, bytes_per_s: float):
    """Read off the plot of the scaling book's sharding chapter, ±5%: v5e 8x16, the axis of 16."""
    machine = cost_models.hardware("tpu-v5e:8x16").place({"x": 8, "y": 16})
    predicted = float(machine.collective_s("all-gather", ("y",), nbytes))
    assert predicted == pytest.approx(nbytes / bytes_per_s, rel=0.15)


@pytest.mark.parametrize(("nbytes", "bytes_per_s"), [(17e6, 87.6e9), (134e6, 102e9), (8.6e9, 108.5e9)])
def test_measured_all_reduce_on_v5p(nbytes: float, bytes_per_s: float):
    """Read off the same chapter's plot, ±5%: v5p 4x4x4, one axis, from the sizes on where its host's launch fades."""
    machine = cost_models.hardware("tpu-v5p:4x4x4").place({"x": 4, "y": 4, "z": 4})
    predicted = float(machine.collective_s("all-reduce", ("z",), nbytes))
    assert predicted == pytest.approx(nbytes / bytes_per_s, rel=0.2)


@pytest.mark.parametrize(
    ("nbytes", "bytes_per_s"), [(1.57e6, 71.8e9), (6.29e6, 129.2e9), (25.2e6, 161.9e9), (402.7e6, 178.8e9)]
)
def test_measured_all_gather_on_ironwood(nbytes: float, bytes_per_s: float):
    """tpu-recipes microbenchmarks/ironwood, 2x2x1; the sizes are what was transferred, by both devices of a chip."""
    machine = cost_models.hardware("tpu-v7x:2x2x1").place({"all": 8})
    predicted = float(machine.collective_s("all-gather", ("all",), nbytes * 4 / 3))
    assert predicted == pytest.approx(nbytes / bytes_per_s, rel=0.35)


@pytest.mark.parametrize(
    ("spec", "kind", "nbytes", "microseconds"),
    [
        ("h100:1x8", "all-gather", 2**26, 214),
        ("h100:1x8", "all-gather", 2**30, 2730),
        ("h100:1x8", "all-to-all", 2**28, 759),
        ("h100:1x8", "all-reduce", 2**26, 380),
        ("b200:1x8", "reduce-scatter", 2**28, 441),
        ("gb200:1x64", "all-gather", 2**30, 1585),
    ],
)
def test_measured_nccl(spec: str, kind: Kind, nbytes: int, microseconds: float):
    """openxla/xla default_collective_perf_table.txtpb."""
    hardware = cost_models.hardware(spec)
    predicted = float(hardware.place({"x": hardware.devices}).collective_s(kind, ("x",), nbytes))
    assert predicted == pytest.approx(microseconds * 1e-6)


def test_a_table_is_read_at_equal_bytes_on_the_wire_and_longer_rings_wait_longer():
    """72 GPUs against the table of 64: 8 more hops of 1.3 µs on 81.9 µs, and 71/72 against 63/64 of the bytes."""
    machine = cost_models.hardware("gb200:1x72").place({"x": 72})
    small, large = machine.collective_s("all-gather", ("x",), [1.0, 2**30]).tolist()
    assert small == pytest.approx(81.9e-6 + 8 * 1.3e-6)
    assert large == pytest.approx(1585e-6 * (71 / 72) / (63 / 64) + 8 * 1.3e-6, rel=1e-3)


def test_what_a_table_takes_beyond_its_floor_follows_the_stated_links():
    stock = cost_models.hardware("h100:1x8")
    half = stock.replaced("half", domain__one_way_bytes_per_s=2.25e11)
    fast, slow = (float(hw.place({"x": 8}).collective_s("all-gather", ("x",), 2**30)) for hw in (stock, half))
    assert slow - 18.6e-6 == pytest.approx(2 * (fast - 18.6e-6))


def test_a_table_never_falls_and_extends_at_its_last_rate():
    sizes, seconds = np.array([1e3, 1e4, 1e5]), np.array([3e-6, 2e-6, 5e-6])
    assert interpolate_s([1.0, 1e3, 1e4, 1e5, 2e5], sizes, seconds) == pytest.approx([2e-6, 2e-6, 2e-6, 5e-6, 1e-5])


def test_no_network_is_faster_than_the_links_of_its_nodes():
    """A group over several nodes takes at least as long as its part in one: `collective_law`."""
    for name in cost_models.chips():
        rates = {
            level: link.numbers["one_way_bytes_per_s"].value * link.numbers["achieved_fraction"].value
            for level, link in chip_of(name).links.items()
        }
        assert rates.get("scale_out", 0.0) <= rates["domain"], name


@settings(deadline=None)
@given(placed(), st.sampled_from(KINDS), st.floats(1, 1e12), st.floats(1, 4))
def test_more_bytes_never_cost_less(machine: cost_models.Machine, kind: Kind, nbytes: float, more: float):
    less_s, more_s = machine.collective_s(kind, machine.placement.axes, [nbytes, nbytes * more])
    assert more_s >= less_s * (1 - 1e-12)


@settings(deadline=None)
@given(st.data(), st.sampled_from(TOPOLOGIES), st.sampled_from(KINDS), st.floats(1, 1e12), st.floats(1, 100))
def test_more_bandwidth_never_costs_more(data: st.DataObject, spec: str, kind: Kind, nbytes: float, more: float):
    hardware = cost_models.hardware(spec)
    key = data.draw(st.sampled_from([k for k in hardware.numbers if k.endswith("one_way_bytes_per_s")]))
    faster = hardware.replaced("faster", **{key.replace(".", "__"): hardware.number(key) * more})
    mesh = {"a": hardware.topology.shape[0], "b": hardware.devices // hardware.topology.shape[0]}
    for axes in (("a",), ("b",), ("a", "b")):
        slow_s, fast_s = (float(hw.place(mesh).collective_s(kind, axes, nbytes)) for hw in (hardware, faster))
        assert fast_s <= slow_s * (1 + 1e-12)


@settings(deadline=None)
@given(placed())
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(machine: cost_models.Machine):
    axes, huge = machine.placement.axes, 1e13
    both = machine.collective_s("reduce-scatter", axes, huge) + machine.collective_s("all-gather", axes, huge)
    one = float(machine.collective_s("all-reduce", axes, huge))
    if len(machine.crossings(axes)) == 1 and any(t.kind == "all-reduce" for t in machine.chip.links["domain"].tables):
        assert float(both) / 2 < one <= float(both)  # its switches reduce
    else:
        assert one == pytest.approx(float(both), rel=1e-4)


@settings(deadline=None)
@given(placed(), st.floats(1, 1e12))
def test_an_all_reduce_costs_less_latency_than_its_two_halves(machine: cost_models.Machine, nbytes: float):
    axes = machine.placement.axes
    both = machine.collective_s("reduce-scatter", axes, nbytes) + machine.collective_s("all-gather", axes, nbytes)
    one = machine.collective_s("all-reduce", axes, nbytes)
    assert float(both) / 2 <= float(one) <= float(both)


@pytest.mark.parametrize("chip", ["h100", "h200", "b200", "a100", "gb200"])
@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), nbytes=st.floats(1, 1e12))
@example(kind="all-reduce", nbytes=34e6)  # on 64 GB200 the published halves take less than the whole of 32
@example(kind="all-reduce", nbytes=4.4e6)
def test_larger_groups_on_the_same_links_never_cost_less(chip: str, kind: Kind, nbytes: float):
    """From two devices of a node to many whole nodes; a broadcast's and a permute's ends are the same for all."""
    node = int(cost_models.hardware(chip, devices=1).number("domain.max_devices_count"))
    inside = [f"1x{n}" for n in (2, 4, 8, 16, 32, 36, 48, 64, 72) if n <= node]
    seconds: list[float] = []
    for spec in (*inside, *(f"{n}x{node}" for n in (2, 3, 4, 8, 9, 64))):
        hardware = cost_models.hardware(f"{chip}:{spec}")
        machine = hardware.place({"x": hardware.devices})
        seconds.append(float(machine.collective_s(kind, ("x",), nbytes)))
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(seconds)), seconds


def switched() -> list[str]:
    """The chips whose links inside a node are the same for every group; in a torus and between peers they are not."""
    return [name for name in cost_models.chips() if chip_of(name).links["domain"].medium == "switch"]


@pytest.mark.parametrize("chip", switched())
@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS), nbytes=st.floats(1, 1e12))
def test_no_group_of_equal_links_costs_less_than_a_smaller_one(
    chip: str, data: st.DataObject, kind: Kind, nbytes: float
):
    """More devices of one node, or the same devices of more nodes."""
    links = chip_of(chip).links
    node = int(links["domain"].numbers["max_devices_count"].value)
    within = data.draw(st.integers(1, node))
    if "scale_out" in links and data.draw(st.booleans()):
        few = data.draw(st.integers(1 if within > 1 else 2, 40))
        specs = [f"{few}x{within}", f"{data.draw(st.integers(few, 80))}x{within}"]
    else:
        counts = sorted((max(2, within), data.draw(st.integers(2, node))))
        specs = [f"1x{n}" if "scale_out" in links else str(n) for n in counts]
    machines = [cost_models.hardware(f"{chip}:{spec}") for spec in specs]
    small_s, large_s = (float(m.place({"x": m.devices}).collective_s(kind, ("x",), nbytes)) for m in machines)
    assert large_s >= small_s * (1 - 1e-9), specs


@pytest.mark.parametrize(
    ("few", "many", "kind", "nbytes"),
    [("h100:1x5", "h100:2x5", "all-reduce", 9.5e6), ("h800:1x8", "h800:2x8", "all-to-all", 1e6)],
)
def test_a_second_node_makes_nothing_faster(few: str, many: str, kind: Kind, nbytes: float):
    """What was measured inside a node takes more than a tree over two, or half of the bytes in each: 4 and 14 %."""
    machines = [cost_models.hardware(spec) for spec in (few, many)]
    small_s, large_s = (float(m.place({"x": m.devices}).collective_s(kind, ("x",), nbytes)) for m in machines)
    assert large_s >= small_s


def test_an_all_reduce_inside_a_node_is_reduced_by_its_switches():
    """About 480 GB/s of bus bandwidth on 8 H100 (Austin et al., gpus.md:436-451), where a ring reaches 370 at most."""
    machine = cost_models.hardware("h100:1x8").place({"x": 8})
    assert 2 * 7 / 8 * 2**33 / float(machine.collective_s("all-reduce", ("x",), 2**33)) == pytest.approx(
        480e9, rel=0.01
    )


def test_an_all_reduce_over_many_nodes_reaches_the_links_by_a_tree():
    """1,984 H200, 512 MiB: two passes of an eighth over each NIC, in 2 · 8 hops in place of 2 · 247."""
    machine = cost_models.hardware("h200:248x8").place({"x": 1984})
    seconds = float(machine.collective_s("all-reduce", ("x",), 2**29))
    assert 300e9 < 2 * 2**29 / seconds < 400e9


@settings(deadline=None)
@given(placed(), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_prices_are_positive_and_finite(machine: cost_models.Machine, kind: Kind, nbytes: float):
    seconds = float(machine.collective_s(kind, machine.placement.axes, nbytes))
    assert 0 < seconds < np.inf


@settings(deadline=None)
@given(placed(), st.sampled_from(KINDS))
def test_nothing_costs_nothing(machine: cost_models.Machine, kind: Kind):
    assert machine.collective_s(kind, machine.placement.axes, 0.0) == 0
    assert machine.collective_s(kind, (), 1e9) == 0
    assert machine.wire_bytes(kind, (), 1e9) == 0


@settings(deadline=None)
@given(placed(), st.floats(1e3, 1e12))
def test_gathering_at_once_is_no_slower_than_axis_by_axis(machine: cost_models.Machine, nbytes: float):
    """The result of the inner gather is the operand of the outer one: 1/n of its bytes."""
    axes = machine.placement.axes
    if len(axes) < 2 or not machine.chip.name.startswith("tpu"):
        return  # measured tables of switches are per group size, and not consistent to the last percent
    first, rest = axes[:1], axes[1:]
    outer_n = machine.group_size(first)
    steps = machine.collective_s("all-gather", rest, nbytes / outer_n) + machine.collective_s(
        "all-gather", first, nbytes
    )
    assert float(machine.collective_s("all-gather", axes, nbytes)) <= float(steps) * (1 + 1e-9)


@settings(deadline=None)
@given(placed(), st.sampled_from(PHASES), st.floats(1e3, 1e12))
def test_no_level_is_beaten(machine: cost_models.Machine, kind: Kind, nbytes: float):
    """Time is at least what the busiest link of each level takes at its full rate."""
    if any(link.tables for link in machine.chip.links.values()):
        return  # tables are measured, nominal rates are not
    axes = machine.placement.axes
    seconds = float(machine.collective_s(kind, axes, nbytes))
    for level, carried in machine.link_bytes(kind, axes, nbytes).items():
        rate = machine.chip.links[level].numbers["one_way_bytes_per_s"].value
        assert seconds >= float(carried) / rate * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("all-reduce", 14 / 8), ("all-to-all", 7 / 8), ("broadcast", 1)],
)
def test_wire_bytes(kind: Kind, share: float):
    machine = cost_models.hardware("h100:1x8").place({"x": 8})
    assert float(machine.wire_bytes(kind, ("x",), 8000.0)) == pytest.approx(8000 * share)


def test_direct_links_between_peers_are_slower_for_one_and_as_fast_for_all():
    switched = cost_models.hardware("a100:1x4").place({"x": 4})
    direct = cost_models.hardware("a100-hgx4:1x4").place({"x": 4})
    one = [float(m.collective_s("collective-permute", ("x",), 2**30)) for m in (switched, direct)]
    every = [float(m.collective_s("all-gather", ("x",), 2**30)) for m in (switched, direct)]
    assert one[1] / one[0] == pytest.approx(3, rel=0.01)
    assert every[1] == pytest.approx(every[0], rel=0.01)


def test_a_million_collectives_price_in_under_a_second():
    machine = cost_models.hardware("h100:4x8").place({"data": 4, "model": 8})
    sizes = np.linspace(1, 1e9, 1_000_000)
    for axes in (("data",), ("model",), ("data", "model")):
        start = time.process_time()
        assert machine.collective_s("all-reduce", axes, sizes).shape == sizes.shape
        assert time.process_time() - start < 1


def test_a_misspelt_collective_is_an_error():
    machine = cost_models.hardware("h100:1x8").place({"x": 8})
    with pytest.raises(CostModelError, match="no collective `allreduce`; there are all-gather, "):
        machine.collective_s("allreduce", ("x",), 1)  # pyright: ignore[reportArgumentType]


def test_slices_over_dcn_move_what_one_slice_left_over():
    """All-reduce of V over 2 slices of 256: each chip sends V/256 over DCN, twice half of it."""
    machine = cost_models.hardware("tpu-v5e:2*16x16").place({"data": 2, "fsdp": 256})
    assert float(machine.link_bytes("all-reduce", ("data", "fsdp"), 1e9)["scale_out"]) == pytest.approx(1e9 / 256)
    assert prod(c.n for c in machine.crossings(("data", "fsdp"))) == 512
