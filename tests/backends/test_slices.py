"""Slices: sends to other slices are read as the collectives that they are part of (lines of libtpu 0.0.52)."""

import pytest

from autoshard.backends import hlo
from autoshard.errors import HloError
from autoshard.ir.mesh import MeshAxes

FOUR = MeshAxes.of({"a": 2, "b": 2, "x": 4})
TWO = MeshAxes.of({"slice": 2, "x": 4})
PAIRS_A = "{" + ",".join(f"{{{s}0000{d},{s + 2}0000{d}}}" for s in (1, 2) for d in range(4)) + "}"
ALONG_B = "{{100000->200000},{200000->100000},{100001->200001}}"


def program(kind: str, target: str, *, partitions: int = 4) -> hlo.Module:
    """A send and its receive, beside a gather inside of the slice."""
    attributes = (
        'channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="one_0",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return hlo.read(
        f"HloModule jit_f, is_scheduled=true, num_partitions={partitions}\n\n"
        "ENTRY %main (p: f32[512]) -> f32[512] {\n"
        "  %p = f32[512]{0} parameter(0)\n"
        "  %whole = f32[2048]{0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, "
        "use_global_device_ids=true\n"
        "  %after = token[] after-all()\n"
        f"  %send = (f32[512]{{0}}, u32[], token[]) send(%p, %after), {attributes}\n"
        f"  %recv = (f32[512]{{0}}, u32[], token[]) recv(%after), {attributes}\n"
        "  %sent = token[] send-done(%send), channel_id=2\n"
        "  %came = (f32[512]{0}, token[]) recv-done(%recv), channel_id=1\n"
        "  ROOT %out = f32[512]{0} get-tuple-element(%came), index=0\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("kind", "target", "mesh", "found"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:3}"', TWO, ("all-reduce", ("slice",), 2048)),
        ("ALL_GATHER", '"{1,2}x{0:3}"', TWO, ("all-gather", ("slice",), 4096)),
        ("REDUCE_SCATTER", '"{1,2,3,4}x{0:3}"', FOUR, ("reduce-scatter", ("a", "b"), 2048)),
        ("ALL_TO_ALL", PAIRS_A, FOUR, ("all-to-all", ("a",), 2048)),
        ("ONE_TO_ONE", ALONG_B, FOUR, ("collective-permute", ("b",), 2048)),
    ],
)
def test_a_send_is_a_collective_between_slices(
    kind: str, target: str, mesh: MeshAxes, found: tuple[str, tuple[str, ...], int]
) -> None:
    inside, between = hlo.collectives(program(kind, target), mesh)
    assert (inside.kind, inside.axes, inside.nbytes) == ("all-gather", ("x",), 2048 * 4)
    assert inside.groups == tuple(tuple(range(s, s + 4)) for s in range(0, mesh.size, 4))
    assert (between.kind, between.axes, between.nbytes) == found
    assert (between.asynchronous, between.done) == (True, "came")


def test_a_program_of_one_slice_is_for_its_devices_alone() -> None:
    module = hlo.read(
        "HloModule jit_f, num_partitions=4\n\n"
        "ENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %p = f32[4]{0} parameter(0)\n}\n"
    )
    assert hlo.collectives(module, TWO, slices=2) == ()
    with pytest.raises(HloError, match="for 4 devices; the mesh slice=2 × x=4 has 8"):
        hlo.collectives(module, TWO)


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [("SCATTER_ALL", '"{1,2}x{0:3}"', "a kind that is not known"), ("ALL_REDUCE", "?", "does not say which")],
)
def test_what_cannot_be_read_is_an_error(kind: str, target: str, said: str) -> None:
    with pytest.raises(HloError, match=said):
        hlo.collectives(program(kind, target), TWO)
