"""HLO shardings as layouts: every notation, on its own and in the text of a module."""

import pytest

from autoshard.backends import hlo
from autoshard.errors import HloError
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import MeshAxes

MESH = MeshAxes.of({"data": 2, "model": 4})


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("{replicated}", ((), ())),
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (("data",), ())),
        ("{devices=[1,8]<=[8]}", ((), ("data", "model"))),
        ("{devices=[2,4]<=[8]}", (("data",), ("model",))),
        ("{devices=[4,2]<=[2,4]T(1,0)}", (("model",), ("data",))),
        ("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", (("model",), ())),
        ("{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dims={replicated}}", (("data",), ())),
        ("{devices=[1,2,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}", ((), ("model:(1)2",))),
        ("{mesh[], replicated}", ((), ())),
        ("{mesh['data'=2,'model'=4], [{'data', 'model'}, {}]}", (("data", "model"), ())),
        ("{mesh['data'=2,'model'=4], [{}, {'model', 'data'}]}", ((), ("model", "data"))),
        ("{mesh['data'=2,'model'=4], [{'model':(1)2}, {}], metadata={op_name=\"x\"}}", (("model:(1)2",), ())),
        ("{mesh['a'=8], [{'a':(2)4}, {}]}", (("model",), ())),
        ("{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'a'}, {'b'}]}", (("model",), ("data",))),
    ],
)
def test_layouts(text: str, dims: tuple[tuple[str, ...], ...]) -> None:
    assert hlo.layout_of(text, 2, MESH) == Layout(dims)


@pytest.mark.parametrize("text", ["{maximal device=0}", "{manual}", "{devices=[2,1,4]0,3,1,2,4,5,6,7 replicated}"])
def test_what_is_no_mesh_axis_is_no_layout(text: str) -> None:
    assert hlo.layout_of(text, 2, MESH) is None


def test_what_is_no_sharding_is_an_error() -> None:
    with pytest.raises(HloError, match="cannot read the sharding"):
        hlo.layout_of("{devices=what}", 2, MESH)


def test_an_instructions_shardings() -> None:
    module = hlo.read(
        "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8,8]) -> (f32[8,8], f32[8,8]) {\n"
        "  %x = f32[8,8]{1,0} parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}\n"
        "  %y = f32[8,8]{1,0} add(%x, %x)\n"
        "  ROOT %t = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%x, %y), sharding={{devices=[2,4]<=[8]}, {replicated}}\n}\n"
    )
    entry = module[module.entry]
    assert hlo.shardings_of(entry["x"]) == ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}",)
    assert hlo.shardings_of(entry["y"]) == ()
    assert hlo.shardings_of(entry["t"]) == ("{devices=[2,4]<=[8]}", "{replicated}")
