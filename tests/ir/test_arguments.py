"""What a call says: names of arguments, path patterns, meshes and hardware."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard import MeshError
from autoshard.backends import devices as meshes
from autoshard.ir.arguments import bind
from autoshard.ir.mesh import MeshAxes
from autoshard.ir.paths import dotted, matches

# --- Binding ---------------------------------------------------------------------------


def example(a: Any, b: Any, *rest: Any, c: Any = None, **more: Any) -> tuple[Any, ...]:
    return a, b, rest, c, more


def test_arguments_are_bound_as_they_were_given() -> None:
    bound = bind(example, (1, 2, 3, 4), {"c": 5, "d": 6})
    assert bound.names == ("a", "b", "rest0", "rest1", "c", "d")
    assert bound.fn(*bound.values) == example(1, 2, 3, 4, c=5, d=6)
    assert bound.fn.__name__ == "example"


def test_static_arguments_leave_the_dynamic_ones_in_order() -> None:
    bound = bind(example, (1, 2, 3), {"c": 5}, static_argnums=(1, -1), static_argnames="c", donate_argnames="a")
    assert (bound.names, bound.values, bound.donated) == (("a",), (1,), frozenset({0}))
    assert bound.statics == (("b", 2), ("rest0", 3), ("c", 5))
    assert bound.fn(7) == example(7, 2, 3, c=5)


def test_numbers_find_arguments_that_were_given_by_name() -> None:
    bound = bind(example, (), {"a": 1, "b": 2}, static_argnums=1, donate_argnums=0)
    assert (bound.names, bound.donated) == (("a",), frozenset({0}))
    assert bound.fn(1) == (1, 2, (), None, {})


def test_functions_without_a_signature_number_their_arguments() -> None:
    assert bind(max, (1, 2), {}).names == ("arg0", "arg1")


def test_too_many_arguments() -> None:
    with pytest.raises(TypeError, match="two takes 1 positional arguments, 2 were given"):
        bind(two, (1, 2), {})


def two(a: Any) -> Any:
    return a


# --- Paths -----------------------------------------------------------------------------

MATCHES = [
    ("state.params.w", "state.params['w']", True),
    ("state.params['w']", "state.params['w']", True),
    ("**.w", "state.params['layers'][0]['w']", True),
    ("**.w", "w", True),
    ("**", "state.params['w']", True),
    ("*.w", "state.params['w']", False),
    ("state.*.w", "state.params['w']", True),
    ("state.**.w", "state['w']", True),
    ("**.layers.*.w*", "state.params['layers'][11]['wq']", True),
    ("**.layers[0].w", "state.params['layers'][0]['w']", True),
    ("**.layers.1?.w", "params['layers'][12]['w']", True),
    ("**.layers.1?.w", "params['layers'][1]['w']", False),
    ("w", "x", False),
    ("params", "params['w']", False),
    ("params.**", "params", True),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), MATCHES)
def test_patterns(pattern: str, path: str, expected: bool) -> None:  # noqa: FBT001
    assert matches(pattern, path) == expected


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner)


@given(st.recursive(st.just(0), containers))
def test_every_path_matches_itself_in_both_spellings(tree: Any) -> None:
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        text = "state" + jax.tree_util.keystr(path)
        assert matches(text, text)
        assert matches(dotted(text), text)
        assert matches("**", text)
        assert matches("state.**", text)


# --- Meshes ----------------------------------------------------------------------------


def test_every_way_to_say_a_mesh() -> None:
    devices = np.asarray(jax.devices()).reshape(2, 4)
    concrete = Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    for given_mesh in ({"data": 2, "model": 4}, AbstractMesh((2, 4), ("data", "model")), concrete):
        place = meshes.place(given_mesh, "h100:1x8")
        assert place.axes == MeshAxes(("data", "model"), (2, 4))
        assert (place.own is not None) == (given_mesh is concrete)
        made = place.device_mesh()
        assert made.axis_types == (AxisType.Auto,) * 2
        assert dict(made.shape) == {"data": 2, "model": 4}
    assert (meshes.auto_twin(concrete).devices == devices).all()
    with jax.set_mesh(concrete):
        assert meshes.place(None, "h100:1x8").own == concrete
    auto = Mesh(devices, ("data", "model"))
    with pytest.deprecated_call(), auto:
        assert meshes.place(None, "h100:1x8").own == auto
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, 4), ("data", "model"))):
        assert meshes.place(None, "h100:1x8").axes.size == 8


def test_devices_say_what_hardware_they_are() -> None:
    place = meshes.place({"data": 8}, None)
    assert place.hardware.name == "cpu:8"
    assert place.notes[0].startswith("hardware detected: ")


class Device:
    def __init__(self, platform: str, device_kind: str) -> None:
        self.platform, self.device_kind = platform, device_kind


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        (("gpu", "NVIDIA H100 80GB HBM3"), "h100"),
        (("gpu", "NVIDIA A100-SXM4-80GB"), "a100"),
        (("gpu", "NVIDIA A100-SXM4-40GB"), "a100-40"),
        (("gpu", "NVIDIA H200"), "h200"),
        (("gpu", "NVIDIA B200"), "b200"),
        (("tpu", "TPU v4"), "tpu-v4"),
        (("tpu", "TPU v5 lite"), "tpu-v5e"),
        (("tpu", "TPU v5p"), "tpu-v5p"),
        (("tpu", "TPU v5"), "tpu-v5p"),
        (("tpu", "TPU v6 lite"), "tpu-v6e"),
        (("tpu", "TPU7x"), "tpu-v7x"),
        (("gpu", "NVIDIA GB200"), "gb200"),
    ],
)
def test_device_kinds_of_the_catalogue(kind: tuple[str, str], chip: str) -> None:
    assert meshes.detect([Device(*kind)] * 8, 8) == chip


def test_a_device_that_is_not_in_the_catalogue() -> None:
    with pytest.raises(MeshError, match=r"no hardware file for 'Abacus': pass hardware=; known: .*h100"):
        meshes.detect([Device("gpu", "Abacus")], 1)


def test_candidates_are_all_meshes_of_one_and_two_dimensions() -> None:
    assert meshes.candidates(8) == [{"data": 8}, {"data": 2, "model": 4}, {"data": 4, "model": 2}]
    assert meshes.candidates(7) == [{"data": 7}]
