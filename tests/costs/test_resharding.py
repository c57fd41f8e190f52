"""Resharding: every path is a chain of real collectives that moves a value and changes nothing in it."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding

import cost_models
from autoshard.costs.buckets import BUCKET_BYTES, TRIP_BYTES, collective_s
from autoshard.costs.prices import INF_PS, PS_PER_S
from autoshard.costs.resharding import Resharder, Step
from autoshard.costs.strategies import SUM, WHOLE, Codes, decode, encode, layout_of, layouts, shards
from autoshard.ir.graph import Aval
from autoshard.ir.mesh import MeshAxes

MESHES = {
    "two axes": (MeshAxes(("x", "y"), (2, 4)), "h100:1x8"),
    "equal axes": (MeshAxes(("a", "b", "c"), (2, 2, 2)), "h100:1x8"),
    "two nodes": (MeshAxes(("node", "gpu"), (2, 4)), "h100:2x4"),
    "torus": (MeshAxes(("x", "y"), (2, 4)), "tpu-v5e:2x4"),
}
SHAPES = [(8,), (8, 8), (16, 4), (8, 2, 3), (3, 5), ()]

STEPS = 40  # of those that the paths of one shape take, executed

each_mesh = pytest.mark.parametrize("name", MESHES)


def resharder_of(name: str) -> Resharder:
    mesh, hardware = MESHES[name]
    return Resharder(mesh, cost_models.hardware(hardware).place(mesh.shape))


def table(resharder: Resharder, aval: Aval, *, bucket: int) -> tuple[Codes, Any]:
    codes = layouts(aval.shape, resharder.mesh, unreduced=True)
    return codes, resharder.cost_ps(aval, codes, codes, bucket=bucket)


@pytest.mark.parametrize("bucket", [0, TRIP_BYTES, BUCKET_BYTES])
@pytest.mark.parametrize("shape", SHAPES)
@each_mesh
def test_costs_are_shortest_paths(name: str, shape: tuple[int, ...], bucket: int) -> None:
    """Zero to itself, triangle inequality, and no way from a finished value to a pending one."""
    resharder, aval = resharder_of(name), Aval(shape, np.dtype("float32"))
    codes, ps = table(resharder, aval, bucket=bucket)
    assert (np.diagonal(ps) == 0).all()
    assert (ps >= 0).all()
    through = (ps[:, :, None].astype(object) + ps[None, :, :]).min(axis=1)
    assert (ps <= np.minimum(through, INF_PS) + 1).all()  # a path's picoseconds are rounded down once
    pending = (decode(codes, aval.ndim, resharder.mesh.ndim) == SUM).any(axis=1)
    assert (ps[np.ix_(~pending, pending)] == INF_PS).all()
    assert (ps[np.ix_(~pending, ~pending)] < INF_PS).all()
    assert (ps[np.ix_(pending, ~pending)] < INF_PS).all()


@pytest.mark.parametrize("shape", SHAPES)
@each_mesh
def test_splitting_a_whole_value_is_free_and_gathering_is_not(name: str, shape: tuple[int, ...]) -> None:
    resharder, aval = resharder_of(name), Aval(shape, np.dtype("float32"))
    codes = layouts(shape, resharder.mesh, unreduced=False)
    whole = codes[shards(codes, len(shape), resharder.mesh) == 1]
    assert (resharder.cost_ps(aval, whole, codes, bucket=0) == 0).all()
    split = codes[shards(codes, len(shape), resharder.mesh) > 1]
    assert (resharder.cost_ps(aval, split, whole, bucket=0) > 0).all()


@each_mesh
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "left"])
def test_the_steps_of_a_path_add_up_to_its_cost(name: str, pinned: bool) -> None:  # noqa: FBT001
    of = resharder_of(name)
    resharder, aval = Resharder(of.mesh, of.machine, pinned=pinned), Aval((8, 8), np.dtype("float32"))
    codes, ps = table(resharder, aval, bucket=0)
    for (i, source), (j, target) in itertools.product(enumerate(codes.tolist()), repeat=2):
        if ps[i, j] >= INF_PS:
            with pytest.raises(ValueError, match="no resharding from code"):
                resharder.path(aval, source, target, bucket=0)
            continue
        steps = resharder.path(aval, source, target, bucket=0)
        assert (steps[-1].after if steps else source) == target
        total = sum(
            round(float(resharder.machine.collective_s(s.kind, s.axes, s.nbytes)) * 1e12)
            for s in steps
            if s.kind != "slice"
        )
        assert abs(total - int(ps[i, j])) <= len(steps)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.lists(st.sampled_from([2, 3, 4, 8, 16]), min_size=1, max_size=3).map(tuple))
def test_more_bytes_never_cost_less(data: st.DataObject, shape: tuple[int, ...]) -> None:
    resharder = resharder_of("two axes")
    codes = layouts(shape, resharder.mesh, unreduced=True).tolist()
    pair = np.array([data.draw(st.sampled_from(codes))]), np.array([data.draw(st.sampled_from(codes))])
    small, large = (
        resharder.cost_ps(Aval(shape, np.dtype(dtype)), *pair, bucket=0)[0, 0] for dtype in ("bfloat16", "float32")
    )
    assert small <= large


# --- Executed on eight devices ---------------------------------------------------------


def perform(step: Step, before: int, x: Any, ndim: int, mesh: MeshAxes) -> Any:
    """One step on local shards, inside `shard_map`: the collective itself, by its name."""
    old, new = decode(before, ndim, mesh.ndim), decode(step.after, ndim, mesh.ndim)
    changed = [a for a in range(mesh.ndim) if old[a] != new[a]]
    if step.kind == "slice":
        (a,) = changed
        size = x.shape[new[a]] // mesh.sizes[a]
        return lax.dynamic_slice_in_dim(x, lax.axis_index(mesh.names[a]) * size, size, int(new[a]))
    if step.kind == "all-gather":
        return lax.all_gather(x, step.axes, axis=int(old[changed[0]]), tiled=True)
    if step.kind == "all-reduce":
        return lax.psum(x, step.axes)
    if step.kind == "reduce-scatter":
        return lax.psum_scatter(x, step.axes, scatter_dimension=int(new[changed[0]]), tiled=True)
    if step.kind == "all-to-all":
        (a,) = changed
        return lax.all_to_all(x, step.axes, split_axis=int(new[a]), concat_axis=int(old[a]), tiled=True)
    assert step.kind == "collective-permute"
    (gone,) = [a for a in changed if new[a] < 0]
    (come,) = [a for a in changed if old[a] < 0]
    # the device at (gone, come) = (i, j) needs what some device at (gone, ·) = j holds
    size = mesh.sizes[gone]
    position = {a: n for n, a in enumerate(sorted((gone, come)))}

    def flat(i: int, j: int) -> int:
        at = [0, 0]
        at[position[gone]], at[position[come]] = i, j
        return at[0] * size + at[1]

    pairs = [(flat(j, i), flat(i, j)) for i in range(size) for j in range(size)]
    return lax.ppermute(x, step.axes, pairs)


@pytest.mark.parametrize("name", ["two axes", "equal axes"])
@pytest.mark.parametrize("shape", [(8,), (8, 8), (4, 2, 8)])
def test_every_path_delivers_the_value(name: str, shape: tuple[int, ...]) -> None:
    """Each step of each path, run as the collective that it names, gives what every device shall hold."""
    resharder = resharder_of(name)
    mesh, aval, ndim = resharder.mesh, Aval(shape, np.dtype("float32")), len(shape)
    devices = Mesh(np.asarray(jax.devices()).reshape(mesh.sizes), mesh.names)
    value = np.arange(aval.size, dtype=np.float32).reshape(shape)
    rng = np.random.default_rng(0)
    codes = layouts(shape, mesh, unreduced=True).tolist()
    pairs = [(s, t) for s in codes for t in codes if s != t]
    edges: dict[tuple[int, int], Step] = {}  # every single step that any path takes, once
    for source, target in pairs:
        if resharder.cost_ps(aval, np.array([source]), np.array([target]), bucket=0)[0, 0] < INF_PS:
            at = source
            for step in resharder.path(aval, source, target, bucket=0):
                edges[at, step.after] = step
                at = step.after
    chosen = sorted(edges)
    picked = [chosen[i] for i in rng.permutation(len(chosen))[:STEPS]]
    assert {edges[k].kind for k in picked} >= {"slice", "all-gather", "all-reduce", "reduce-scatter"}

    def run(x: Any) -> list[Any]:
        out: list[Any] = []
        for before, after in picked:
            got, want = perform(edges[before, after], before, shard(x, before), ndim, mesh), shard(x, after)
            left = tuple(np.array(mesh.names)[decode(after, ndim, mesh.ndim) == SUM].tolist())
            out.append(jax.numpy.stack([lax.psum(part, left) if left else part for part in (got, want)]))
        return out

    def shard(x: Any, code: int) -> Any:
        """What a device holds of x in a layout; partial sums are weighted so that they add up to x."""
        row = decode(code, ndim, mesh.ndim)
        for a in range(mesh.ndim):
            index = lax.axis_index(mesh.names[a])
            if row[a] >= 0:
                size = x.shape[row[a]] // mesh.sizes[a]
                x = lax.dynamic_slice_in_dim(x, index * size, size, int(row[a]))
            elif row[a] == SUM:
                x = jax.numpy.where(index == 0, x - 7.0 * (mesh.sizes[a] - 1), 7.0)
        return x

    spec = jax.sharding.PartitionSpec()
    spread = jax.sharding.PartitionSpec(mesh.names)
    fn = jax.jit(
        jax.shard_map(
            lambda x: [o[None] for o in run(x)],
            mesh=devices,
            in_specs=spec,
            out_specs=[spread] * len(picked),
            check_vma=False,
        )
    )
    for (before, after), both in zip(picked, fn(value), strict=True):
        got, want = np.asarray(both)[:, 0], np.asarray(both)[:, 1]
        np.testing.assert_allclose(
            got, want, err_msg=f"{layout_of(before, ndim, mesh)} → {layout_of(after, ndim, mesh)}"
        )


@pytest.mark.parametrize("shape", [(8, 8), (16, 4)])
def test_pins_along_a_path_keep_the_value(shape: tuple[int, ...]) -> None:
    """What apply emits: a constraint to each layout of the path in turn."""
    resharder = resharder_of("two axes")
    mesh, aval = resharder.mesh, Aval(shape, np.dtype("float32"))
    devices = Mesh(np.asarray(jax.devices()).reshape(mesh.sizes), mesh.names)
    value = np.arange(aval.size, dtype=np.float32).reshape(shape)
    codes = layouts(shape, mesh, unreduced=False).tolist()

    def sharding(code: int) -> NamedSharding:
        return NamedSharding(devices, layout_of(code, aval.ndim, mesh).spec())

    @partial(jax.jit, static_argnums=1)
    def walk(x: Any, steps: tuple[int, ...]) -> Any:
        for code in steps:
            x = lax.with_sharding_constraint(x, sharding(code))
        return x

    rng = np.random.default_rng(0)
    for source, target in rng.choice(codes, (20, 2)):
        steps = tuple(s.after for s in resharder.path(aval, int(source), int(target), bucket=0))
        np.testing.assert_array_equal(walk(jax.device_put(value, sharding(int(source))), steps), value)


@pytest.mark.parametrize(
    ("hardware", "mesh", "over", "kinds"),
    [
        ("tpu-v5e:4x4", {"x": 4, "y": 4}, ("x", "y"), ["all-reduce"]),
        ("tpu-v5e:4x4", {"x": 4, "y": 4}, ("x",), ["reduce-scatter"]),
        ("tpu-v5e:4x8", {"x": 4, "y": 8}, ("x", "y"), ["reduce-scatter"]),
        ("tpu-v5e:2x2", {"x": 2, "y": 2}, ("x", "y"), ["reduce-scatter"]),
        ("tpu-v5p:4x4x2", {"x": 4, "y": 8}, ("x", "y"), ["all-reduce"]),
        ("tpu-v5p:4x4x2", {"x": 4, "y": 8}, ("y",), ["reduce-scatter"]),
        ("h100:2x8", {"x": 4, "y": 4}, ("x", "y"), ["reduce-scatter"]),
    ],
)
def test_sums_over_all_of_a_torus_are_scattered_where_the_compiler_does(
    hardware: str, mesh: dict[str, int], over: tuple[str, ...], kinds: list[str]
) -> None:
    """What libtpu 0.0.51 emits for such a gradient; see `cost_models.Machine.unscattered_axes`."""
    axes, machine = MeshAxes.of(mesh), cost_models.hardware(hardware).place(mesh)
    resharder = Resharder(axes, machine)
    aval = Aval((1024, 1024), np.dtype("float32"))
    row = [SUM if name in over else WHOLE for name in axes.names]
    split = [0 if name in over else WHOLE for name in axes.names]
    source, target = (int(encode(np.array(r, np.int8), 2)) for r in (row, split))
    steps = resharder.path(aval, source, target, bucket=0)
    assert [step.kind for step in steps if step.kind != "slice"] == kinds


def test_where_no_sum_over_all_devices_is_scattered_none_that_is_pinned_is_finished_in_parts() -> None:
    """Left to itself libtpu 0.0.52 scatters over x and all-reduces over y (bf16[2048,4096] on v5e:4x4)."""
    mesh = {"x": 4, "y": 4}
    axes, machine = MeshAxes.of(mesh), cost_models.hardware("tpu-v5e:4x4").place(mesh)
    assert machine.unscattered_axes == {"x", "y"}
    left, pinned = (Resharder(axes, machine, pinned=p) for p in (False, True))
    aval = Aval((2048, 4096), np.dtype(jnp.bfloat16))
    scattered = [("reduce-scatter", ("x",)), ("all-reduce", ("y",))]
    reduced = [("all-reduce", ("x", "y")), ("slice", ("x",))]
    assert kinds_of(left, aval, [SUM, SUM], [0, WHOLE]) == scattered
    assert kinds_of(pinned, aval, [SUM, SUM], [0, WHOLE]) == reduced
    assert kinds_of(pinned, aval, [SUM, SUM], [0, 1]) == [*reduced, ("slice", ("y",))]
    assert kinds_of(pinned, aval, [SUM, 1], [0, 1]) == [("reduce-scatter", ("x",))]


@pytest.mark.parametrize(
    ("shape", "other", "scattered", "kinds"),
    [
        ((8, 16, 320, 1024), 0, 1, ["all-reduce"]),
        ((8, 64, 320, 1024), 0, 1, ["all-reduce"]),
        ((4, 16, 320, 1024), 0, 1, ["reduce-scatter"]),
        ((8, 16, 320, 1024), 0, 2, ["reduce-scatter"]),
        ((8, 16, 320, 1024), 0, 3, ["reduce-scatter"]),
        ((8, 16, 320, 1024), 1, 0, ["reduce-scatter"]),
        ((8, 512, 16, 1024), 0, 1, ["reduce-scatter"]),
        ((8, 16, 512, 128), 2, 1, ["all-reduce"]),
        ((8, 512, 64, 128), 2, 1, ["reduce-scatter"]),
        ((16, 320, 1024), 2, 0, ["reduce-scatter"]),
        ((4096, 512), 0, 1, ["all-reduce"]),
        ((4096, 640), 0, 1, ["reduce-scatter"]),
        ((16, 4096), 1, 0, ["all-reduce"]),
        ((32, 4096), 1, 0, ["reduce-scatter"]),
        ((8, 32, 32, 4096), 0, 2, ["all-reduce"]),
        ((8, 32, 96, 4096), 0, 2, ["all-reduce"]),
        ((8, 32, 64, 4096), 0, 2, ["reduce-scatter"]),
        ((8, 96, 4096), 0, 1, ["all-reduce"]),
        ((4, 96, 4096), 0, 1, ["reduce-scatter"]),
        ((4, 4096, 32, 96), 0, 3, ["all-reduce"]),
        ((4, 4096, 32, 64), 0, 3, ["reduce-scatter"]),
        ((6912, 2560), 0, 1, ["all-reduce"]),
        ((6912, 3072), 0, 1, ["reduce-scatter"]),
        ((2560, 6912), 1, 0, ["all-reduce"]),
        ((2560, 7168), 1, 0, ["reduce-scatter"]),
        ((3072, 6912), 1, 0, ["reduce-scatter"]),
        ((5, 1536, 6912), 2, 1, ["all-reduce"]),
        ((5, 2048, 6912), 2, 1, ["reduce-scatter"]),
    ],
)
def test_sums_are_scattered_along_dimensions_that_tiles_allow(
    shape: tuple[int, ...], other: int, scattered: int, kinds: list[str]
) -> None:
    """What libtpu 0.0.52 emits for v5e:4x4, of products in bfloat16 that are summed over x."""
    axes = MeshAxes.of({"x": 4, "y": 4})
    machine = cost_models.hardware("tpu-v5e:4x4").place(axes.shape)
    assert machine.tiled
    resharder = Resharder(axes, machine, pinned=False)
    steps = kinds_of(resharder, Aval(shape, np.dtype(jnp.bfloat16)), [SUM, other], [scattered, other])
    assert [kind for kind, _ in steps if kind != "slice"] == kinds


@pytest.mark.parametrize(("dtype", "kind"), [(jnp.bfloat16, "all-reduce"), (jnp.float32, "reduce-scatter")])
def test_tiles_of_narrow_elements_have_more_rows(dtype: Any, kind: str) -> None:
    """Eight rows to a device are half a tile of bfloat16 (libtpu 0.0.52)."""
    axes = MeshAxes.of({"x": 4, "y": 4})
    resharder = Resharder(axes, cost_models.hardware("tpu-v5e:4x4").place(axes.shape), pinned=False)
    assert kinds_of(resharder, Aval((4, 32, 32, 4096), np.dtype(dtype)), [SUM, 0], [2, 0])[0] == (kind, ("x",))


SLICES = {"slice": 2, "data": 8}


@pytest.mark.parametrize(
    ("hardware", "shape", "ends", "made"),
    [
        ("tpu-v5e:2*2x4", (64, 128), (0, WHOLE), [("all-gather", "slice", 8), ("all-gather", "data", 1)]),
        (
            "tpu-v5e:2*2x4",
            (64, 128),
            (SUM, WHOLE),
            [("reduce-scatter", "data", 1), ("all-reduce", "slice", 8), ("all-gather", "data", 1)],
        ),
        (
            "tpu-v5p:2*2x2x2",  # where a sum over a whole slice is not scattered
            (64, 128),
            (SUM, WHOLE),
            [("all-reduce", "data", 1), ("all-reduce", "slice", 8), ("all-gather", "data", 1)],
        ),
        ("tpu-v5e:2*2x4", (), (SUM, WHOLE), [("all-reduce", "data", 1), ("all-reduce", "slice", 1)]),
    ],
)
def test_a_collective_that_leaves_slices_is_made_of_parts(
    hardware: str, shape: tuple[int, ...], ends: tuple[int, int], made: list[tuple[str, str, int]]
) -> None:
    """As libtpu 0.0.52 makes them; `made`: kind, axis, and into how many pieces its bytes are cut."""
    axes, machine = MeshAxes.of(SLICES), cost_models.hardware(hardware).place(SLICES)
    assert machine.slice_axes == {"slice"}
    aval = Aval(shape, np.dtype(jnp.float32))
    source, target = (int(encode(np.array([end] * 2, np.int8), aval.ndim)) for end in ends)
    resharder = Resharder(axes, machine)
    (step,) = resharder.path(aval, source, target, bucket=0)
    assert step.collectives == tuple((kind, (axis,), aval.nbytes // pieces) for kind, axis, pieces in made)
    whole_s = sum(float(collective_s(machine, kind, over, nbytes, bucket=0)) for kind, over, nbytes in step.collectives)
    priced = resharder.cost_ps(aval, np.array([source]), np.array([target]), bucket=0)
    assert int(priced[0, 0]) == pytest.approx(whole_s * PS_PER_S, abs=2)


def test_a_sum_over_a_whole_slice_and_others_is_cut_before_it_leaves_the_slice() -> None:
    axes, machine = MeshAxes.of(SLICES), cost_models.hardware("tpu-v5p:2*2x2x2").place(SLICES)
    steps = kinds_of(Resharder(axes, machine), Aval((64, 128), np.dtype(jnp.float32)), [SUM, SUM], [WHOLE, 0])
    assert steps == [("all-reduce", ("data",)), ("all-reduce", ("slice",))]


def kinds_of(
    resharder: Resharder, aval: Aval, source: list[int], target: list[int]
) -> list[tuple[str, tuple[str, ...]]]:
    """The steps from one row of dimensions per axis to another."""
    codes = [int(encode(np.array(row, np.int8), aval.ndim)) for row in (source, target)]
    return [(step.kind, step.axes) for step in resharder.path(aval, codes[0], codes[1], bucket=0)]


def test_several_axes_of_a_dimension_move_to_another_at_once() -> None:
    resharder, aval = resharder_of("two axes"), Aval((4096, 4096), np.dtype("float32"))
    assert kinds_of(resharder, aval, [1, 1], [0, 0]) == [("all-to-all", ("x", "y"))]


def test_the_partitioner_by_itself_slices_for_good_alone() -> None:
    """Pinned, a value is split further before it moves between nodes and gathered inside of them; not so unpinned."""
    mesh = MeshAxes(("node", "gpu"), (4, 8))
    machine = cost_models.hardware("h100:4x8").place(mesh.shape)
    aval = Aval((4096, 4096), np.dtype("float32"))
    pinned, left = Resharder(mesh, machine), Resharder(mesh, machine, pinned=False)
    assert [kind for kind, _ in kinds_of(pinned, aval, [1, WHOLE], [0, WHOLE])] == ["slice", "all-to-all", "all-gather"]
    assert kinds_of(left, aval, [1, WHOLE], [0, WHOLE]) == [("all-to-all", ("node",))]


def test_the_partitioner_by_itself_scatters_a_sum_over_the_axes_that_stay() -> None:
    """HSDP's gradient: reduced and scattered inside of each replica, and what is left summed over the replicas.

    So does XLA:GPU with the hand layout of gpt2-xl: 407 MB scattered over `data`, a quarter of it reduced over
    `replica` ({"replica": 2, "data": 4} of h100:1x8, JAX 0.10.2).
    """
    mesh = MeshAxes(("replica", "data"), (2, 4))
    machine = cost_models.hardware("h100:1x8").place(mesh.shape)
    aval = Aval((4096, 4096), np.dtype("float32"))
    left = Resharder(mesh, machine, pinned=False)
    source, target = (int(encode(np.array(row, np.int8), 2)) for row in ([SUM, SUM], [WHOLE, 1]))
    steps = left.path(aval, source, target, bucket=0)
    assert [(s.kind, s.axes, s.nbytes) for s in steps] == [
        ("reduce-scatter", ("data",), aval.nbytes),
        ("all-reduce", ("replica",), aval.nbytes // 4),
    ]
    cost_s = float(machine.collective_s("reduce-scatter", ("data",), aval.nbytes))
    cost_s += float(machine.collective_s("all-reduce", ("replica",), aval.nbytes // 4))
    ps = left.cost_ps(aval, np.array([source]), np.array([target]), bucket=0)
    assert ps[0, 0] == pytest.approx(cost_s * PS_PER_S, rel=1e-6)
    assert kinds_of(left, aval, [SUM, SUM], [WHOLE, WHOLE]) == [("all-reduce", ("replica", "data"))]


def test_the_partitioner_by_itself_knows_of_no_transposes() -> None:
    """A pinned gather along a middle dimension may go by the outermost one; XLA:GPU itself gathers and transposes."""
    mesh = MeshAxes(("x",), (8,))
    machine = cost_models.hardware("h100:1x8").place(mesh.shape)
    pinned, left = (Resharder(mesh, machine, pinned=pins, outermost=True) for pins in (True, False))
    aval = Aval((8, 4096, 14336), np.dtype(jnp.bfloat16))
    assert [kind for kind, _ in kinds_of(pinned, aval, [1], [WHOLE])] == ["all-to-all", "all-gather"]
    assert [kind for kind, _ in kinds_of(left, aval, [1], [WHOLE])] == ["all-gather"]
    source, target = (int(encode(np.array([d], np.int8), 3)) for d in (1, WHOLE))
    (step,) = left.path(aval, source, target, bucket=0)
    alone_s = float(machine.collective_s("all-gather", ("x",), aval.nbytes)) + float(machine.hbm_s(step.transposed))
    ps = left.cost_ps(aval, np.array([source]), np.array([target]), bucket=0)
    assert step.transposed > 0
    assert ps[0, 0] == pytest.approx(alone_s * PS_PER_S, rel=1e-6)


def test_a_sum_is_scattered_onto_two_dimensions_where_none_takes_all_axes() -> None:
    """With the layout in between pinned, as XLA:GPU and libtpu emit it; the partitioner by itself all-reduces."""
    mesh, aval = MeshAxes(("x", "y"), (2, 4)), Aval((2, 4, 511), np.dtype("float32"))
    for hardware in ("h100:1x8", "tpu-v5e:2x4"):
        machine = cost_models.hardware(hardware).place(mesh.shape)
        steps = Resharder(mesh, machine).path(aval, _code([SUM, SUM], 3), _code([0, 1], 3), bucket=0)
        kinds = [(step.kind, step.axes, step.nbytes) for step in steps]
        if machine.tiled:  # of four rows nothing is scattered
            assert [kind for kind, *_ in kinds] == ["all-reduce", "slice", "slice"]
        else:
            assert kinds == [
                ("reduce-scatter", ("y",), aval.nbytes),
                ("reduce-scatter", ("x",), aval.nbytes // 4),
            ]
    left = Resharder(mesh, machine, pinned=False)
    assert [kind for kind, _ in kinds_of(left, aval, [SUM, SUM], [0, 1])] == ["all-reduce", "slice", "slice"]


def test_a_gpu_reduces_nothing_whole_to_cut_it() -> None:
    """XLA:GPU makes a reduce-scatter of an all-reduce that is cut behind it, also where that costs more."""
    mesh, aval = MeshAxes(("node", "gpu"), (8, 2)), Aval((4, 1024, 4096), np.dtype(jnp.bfloat16))
    machine = cost_models.hardware("h100:2x8").place(mesh.shape)
    resharder = Resharder(mesh, machine, outermost=True)
    for dim in range(3):
        kinds = kinds_of(resharder, aval, [SUM, SUM], [WHOLE, dim])
        assert kinds[0][0] == "reduce-scatter"
        assert not any(kind == "slice" for kind, _ in kinds)


def _code(row: list[int], ndim: int) -> int:
    return int(encode(np.array(row, np.int8), ndim))


def test_what_all_axes_cannot_split_is_scattered_over_some() -> None:
    resharder = resharder_of("two axes")
    kinds = kinds_of(resharder, Aval((4, 1023), np.dtype("float32")), [SUM, SUM], [WHOLE, 0])
    assert kinds == [("reduce-scatter", ("y",)), ("all-reduce", ("x",))]


@pytest.mark.parametrize("nbytes", [4, 2**20])
def test_a_small_all_reduce_among_others_costs_what_its_halves_do(nbytes: int) -> None:
    machine = cost_models.hardware("h100:1x8").place({"x": 8})
    of = {
        kind: float(collective_s(machine, kind, ("x",), nbytes, bucket=BUCKET_BYTES))
        for kind in ("all-reduce", "reduce-scatter", "all-gather")
    }
    halves = of["reduce-scatter"] + of["all-gather"]
    assert 0.8 * halves <= of["all-reduce"] <= 1.1 * halves  # or less: the node's switches reduce
