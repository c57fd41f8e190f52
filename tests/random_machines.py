"""Random meshes on real topologies, for the properties of cost models."""

from hypothesis import strategies as st

import cost_models

TOPOLOGIES = (
    "h100:1x8",
    "h100:4x8",
    "h100:3x8",
    "h800:5x4",
    "gb200:2x72",
    "tpu-v5e:4x4",
    "tpu-v5e:16x16",
    "tpu-v5e:2*8x16",
    "tpu-v5p:4x4x8",
    "tpu-v5p:4x4x12",
    "tpu-v7x:2x2x2",
    "l40s:2x8",
    "mi300x:2x8",
    "trn2:4x4",
    "trn3:2x64",
    "cpu:8",
)


def factorizations(n: int, axes: int) -> list[tuple[int, ...]]:
    if axes == 1:
        return [(n,)]
    return [(f, *rest) for f in range(1, n + 1) if n % f == 0 for rest in factorizations(n // f, axes - 1)]


@st.composite
def placed(draw: st.DrawFn) -> cost_models.Machine:
    hardware = cost_models.hardware(draw(st.sampled_from(TOPOLOGIES)))
    sizes = draw(st.sampled_from(factorizations(hardware.devices, draw(st.integers(1, 4)))))
    names = tuple("abcd"[: len(sizes)])
    return hardware.place(dict(zip(names, sizes, strict=True)), draw(st.permutations(names)))
