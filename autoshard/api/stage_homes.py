"""Stage homes: where parameters and gradients are between steps, and how they come to the stages and back.

Between steps everything is an array over all devices, in the user's pytree and shapes, so that an
optimizer is one program of all devices, whatever it computes. A leaf of stacked weights that the
stages share evenly is split over the stage axis along its layers: every stage's part is where it
is used, and going to the stage and back moves nothing. Everything else (embeddings, heads, the
parts of uneven stages) is split over all devices, stages included; one program of all devices
brings it to the stages at the begin of a step, and its transpose brings the gradients back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import _jax
from autoshard.api.stage_devices import StageDevices
from autoshard.api.stage_plans import ChunkPlan
from autoshard.ir.accumulation import split_batch
from autoshard.ir.mesh import MeshAxes
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss
from autoshard.pipeline_parallel.own_stages.table import Table
from autoshard.pipeline_parallel.own_stages.tasks import MICROBATCH, SHARED, TOTAL, WEIGHTS

_jax.hide_frames(__file__)

Leaves = list[Any]


def home_specs(loss: ChunkedLoss, table: Table, plans: Sequence[ChunkPlan], axes: MeshAxes) -> list[PartitionSpec]:
    """The layouts of the parameters' leaves between steps.

    Args:
      loss: the chunks.
      table: what runs where.
      plans: of the chunks.
      axes: the mesh, the stages first.
    """
    chunks = loss.chunks
    by_place = {place: k for k, place in stays(loss, table).items()}
    stacked = {v: k for k, v in enumerate(chunks.slices) if k in chunks.trained(chunks.slices)}
    found: list[PartitionSpec] = []
    for place, aval in enumerate(loss.whole[: sum(chunks.params)]):
        if place in by_place:
            first, *others = _of_total(by_place[place], loss, plans)
            found.append(PartitionSpec((axes.names[0], *_names(first)), *others))
        elif chunks.whole[place] in stacked:
            own = _of_total(stacked[chunks.whole[place]], loss, plans)
            found.append(spread(aval.shape, PartitionSpec(None, *_tail(own)), axes))
        else:
            found.append(spread(aval.shape, _shared_spec(chunks.whole[place], loss, plans), axes))
    return found


def stays(loss: ChunkedLoss, table: Table) -> dict[int, int]:
    """The stacked weights that are where they are used: their places in `slices`, and those in `whole`."""
    if table.repeats > 1 or len(set(loss.chunks.layers)) > 1:
        return {}
    return dict(loss.chunks.direct)


def spread(shape: Sequence[int], spec: PartitionSpec, axes: MeshAxes) -> PartitionSpec:
    """A layout, split along further dimensions by the axes that it does not use, as far as they divide."""
    dims = [list(_names(dim)) for dim in (*spec, *(None for _ in range(len(shape) - len(spec))))]
    sizes = axes.shape
    rest = [size // int(np.prod([sizes[n] for n in names])) for size, names in zip(shape, dims, strict=True)]
    taken = {name for names in dims for name in names}
    for name in axes.names:
        if name in taken:
            continue
        for d in sorted(range(len(shape)), key=lambda d: -rest[d]):
            if rest[d] % sizes[name] == 0 and rest[d] > 1:
                dims[d].append(name)
                rest[d] //= sizes[name]
                break
    return PartitionSpec(*(tuple(names) if names else None for names in dims))


def _of_total(k: int, loss: ChunkedLoss, plans: Sequence[ChunkPlan]) -> PartitionSpec:
    """The layout that a stage's sum of the gradients of stacked weights has, by their place in `slices`."""
    chunks, plan = loss.chunks, plans[loss.chunks.layered]
    spec = plan.specs(TOTAL)["weights"][chunks.trained(chunks.slices).index(k)]
    shape = chunks.slices[k].aval.shape
    layers, *others = _of_sum(spec, len(shape), loss.parts)
    if loss.parts > 1:
        others = spread(shape[1:], PartitionSpec(*others), plan.whole.record.mesh)
    return PartitionSpec(layers, *others)


def _shared_spec(var: Any, loss: ChunkedLoss, plans: Sequence[ChunkPlan]) -> PartitionSpec:
    """The layout that a stage's sum of a shared parameter's gradients has, if a parameter is shared as it is."""
    chunks = loss.chunks
    for c, plan in enumerate(plans):
        variables = [chunks.shared[i] for i in chunks.shared_of(c)]
        if var in variables and variables.index(var) in chunks.trained(variables):
            spec = plan.specs(TOTAL)["shared"][chunks.trained(variables).index(variables.index(var))]
            own = PartitionSpec(*_of_sum(spec, len(var.aval.shape), loss.parts))
            return own if loss.parts == 1 else spread(var.aval.shape, own, plan.whole.record.mesh)
    return PartitionSpec()


def _of_sum(spec: PartitionSpec, ndim: int, parts: int) -> list[Any]:
    """A layout of sums of gradients, an entry per dimension; without that of parts, if there is one."""
    own = [*spec][parts > 1 :]
    return [*own, *(None for _ in range(ndim - len(own)))]


def _names(dim: Any) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


@dataclass(frozen=True, kw_only=True, eq=False)
class Homes:
    """The way of values between all devices and the stages.

    Attributes:
      loss: the chunks.
      plans: of the chunks.
      devices: of the stages.
      specs: the layouts of the parameters' leaves between steps.
    """

    loss: ChunkedLoss
    plans: Sequence[ChunkPlan]
    devices: StageDevices
    specs: Sequence[PartitionSpec]

    # To the stages.

    def bring(self, whole: Leaves, batch: Leaves) -> list[tuple[Leaves, Leaves, Leaves] | None]:
        """Weights, shared values and micro-batches of every chunk, where they are used; None of other processes'.

        Args:
          whole: the leaves that are not the batch's, in their homes.
          batch: the leaves of the batch, on all devices.
        """
        chunks, table = self.loss.chunks, self.devices.table
        staying = stays(self.loss, table)
        own = set(staying.values())
        packed, shared, micro = self._enter([None if i in own else x for i, x in enumerate(whole)], batch)
        found: list[tuple[Leaves, Leaves, Leaves] | None] = []
        parts = {stage: self._unpack(stage)(self._of_stage(packed, stage)) for stage in self.devices.here}
        for c, plan in enumerate(self.plans):
            stage, repeat = table.stage_of(c), c // table.stages
            if stage not in parts:
                found.append(None)
                continue
            weights: Leaves = [None] * len(chunks.slices_of(c))
            for k, place in staying.items():
                weights[k] = self._part(whole[place], stage)
            for k, x in zip(self._packed if weights else [], parts[stage][repeat], strict=True):
                weights[k] = x
            taken = [self._same(shared[i], stage) for i in chunks.shared_of(c)]
            own_batch = [self._same(micro[i], stage) for i in chunks.microbatch_of(c)]
            found.append(
                (
                    self._laid_out(c, weights, plan.specs(WEIGHTS)),
                    self._laid_out(c, taken, plan.specs(SHARED)),
                    self._laid_out(c, own_batch, plan.specs(MICROBATCH)),
                )
            )
        return found

    def zeros(self) -> list[Any]:
        """What every chunk begins to add up with; None of other processes'."""
        return [
            self._zeros(c)() if self.devices.is_here(self.devices.table.stage_of(c)) else None
            for c in range(len(self.plans))
        ]

    # And back.

    def take_home(self, whole: Leaves, totals: Sequence[Any]) -> tuple[Any, Leaves, Leaves]:
        """The loss, the other results and the gradients of the parameters' leaves.

        Args:
          whole: as of `bring`.
          totals: what every chunk added up.
        """
        staying = stays(self.loss, self.devices.table)
        by_stage = [self._finish(s)([totals[c] for c in self._chunks_of(s)]) for s in self.devices.here]
        direct, packed, shared, results = (
            [self._joined(parts, stacked=n > 0) for parts in zip(*group, strict=True)]
            for n, group in enumerate(zip(*by_stage, strict=True))
        )
        own = set(staying.values())
        value, others, grads = self._leave(
            [None if i in own else x for i, x in enumerate(whole)], packed, shared, results
        )
        found: Leaves = [None] * len(self.specs)
        for place, x in zip(staying.values(), direct, strict=True):
            found[place] = x
        for place, x in zip(self._other_params, grads, strict=True):
            found[place] = x
        return value, others, found

    # Programs of all devices.

    @cached_property
    def _packed(self) -> list[int]:
        """The places in `slices` of weights that a program brings to the stages."""
        staying = stays(self.loss, self.devices.table)
        return [k for k in range(len(self.loss.chunks.slices)) if k not in staying]

    @cached_property
    def _other_params(self) -> list[int]:
        own = set(stays(self.loss, self.devices.table).values())
        return [i for i in range(len(self.specs)) if i not in own]

    @cached_property
    def _enter(self) -> Callable[..., Any]:
        chunks, table, first = self.loss.chunks, self.devices.table, self.devices.mesh.axis_names[0]
        parts = self.loss.parts

        def enter(whole: Leaves, batch: Leaves) -> tuple[Leaves, Leaves, Leaves]:
            weights, shared = chunks.enter(whole, self._packed)
            micro = [split_batch(x, table.steps, parts) for x in batch]
            micro = [x[:, 0] for x in micro] if parts == 1 else micro
            weights = [
                jax.lax.with_sharding_constraint(
                    _pack(x, self._rows), self.devices.at_home(PartitionSpec(None, None, *near))
                )
                for x, near in zip(weights, apart, strict=True)
            ]
            return weights, shared, micro

        spec = [PartitionSpec(first, None, None, *_tail(self._weights_spec(k))) for k in self._packed]
        apart = [
            spread(chunks.slices[k].aval.shape, PartitionSpec(None, *x[3:]), MeshAxes.of(dict(self.devices.mesh.shape)))
            for k, x in zip(self._packed, spec, strict=True)
        ]
        shared = [self._first_spec(i, SHARED) for i in range(len(chunks.shared))]
        micro = [self._first_spec(i, MICROBATCH) for i in range(len(chunks.of_microbatch))]
        return jax.jit(
            enter, out_shardings=tuple([self.devices.at_home(x) for x in group] for group in (spec, shared, micro))
        )

    @cached_property
    def _leave(self) -> Callable[..., Any]:
        chunks = self.loss.chunks
        trained = chunks.trained(chunks.slices)
        places = [k for k in self._packed if k in trained]

        def leave(whole: Leaves, packed: Leaves, shared: Leaves, results: Leaves) -> tuple[Any, Leaves, Leaves]:
            value, *others = (x.any(0) if x.dtype == jnp.bool_ else x.sum(0, dtype=x.dtype) for x in results)
            kinds = [chunks.shared[i].aval.dtype for i in chunks.trained(chunks.shared)]
            slices = {k: _unpack(x, self._rows) for k, x in zip(places, packed, strict=True)}
            sums = [x.sum(0).astype(dtype) for x, dtype in zip(shared, kinds, strict=True)]
            grads = chunks.leave(whole, slices, sums, self._other_params)
            return value.astype(chunks.value.dtype), others, grads

        grads = [self.devices.at_home(self.specs[i]) for i in self._other_params]
        whole = self.devices.at_home(PartitionSpec())
        return jax.jit(leave, out_shardings=(whole, [whole] * len(chunks.others), grads))

    @cached_property
    def _rows(self) -> np.ndarray:
        """[stage, repeat, row]: which layer is where; -1: none."""
        layers, table = self.loss.chunks.layers, self.devices.table
        begins = np.cumsum([0, *layers])
        rows = np.full((table.stages, table.repeats, max(layers)), -1)
        for c, count in enumerate(layers):
            rows[table.stage_of(c), c // table.stages, :count] = begins[c] + np.arange(count)
        return rows

    # Programs of one stage.

    def _unpack(self, stage: int) -> Callable[[Leaves], list[Leaves]]:
        return self._cached("unpack", stage, lambda: self._make_unpack(stage))

    def _make_unpack(self, stage: int) -> Callable[..., Any]:
        own, layers = self._chunks_of(stage), self.loss.chunks.layers

        def unpack(packed: Leaves) -> list[Leaves]:
            return [[x[0, r, : layers[c]] for x in packed] if layers[c] else [] for r, c in enumerate(own)]

        places = [
            [self.devices.on_stage(c, self.plans[c].specs(WEIGHTS)[k]) for k in self._packed if layers[c]] for c in own
        ]
        return jax.jit(unpack, out_shardings=places)

    def _zeros(self, chunk: int) -> Callable[[], Any]:
        return self._cached("zeros", chunk, lambda: self._make_zeros(chunk))

    def _make_zeros(self, chunk: int) -> Callable[[], Any]:
        avals = self.plans[chunk].avals(TOTAL)
        specs, tree = jax.tree.flatten(self.plans[chunk].specs(TOTAL), is_leaf=lambda x: isinstance(x, PartitionSpec))
        places = tree.unflatten([self.devices.on_stage(chunk, spec) for spec in specs])
        return jax.jit(lambda: tree.unflatten([jnp.zeros(x.shape, x.dtype) for x in avals]), out_shardings=places)

    def _finish(self, stage: int) -> Callable[..., tuple[Leaves, Leaves, Leaves, Leaves]]:
        return self._cached("finish", stage, lambda: self._make_finish(stage))

    def _make_finish(self, stage: int) -> Callable[..., Any]:
        """The gradients that a stage added up, in the form in which they go home."""
        chunks = self.loss.chunks
        trained = chunks.trained(chunks.slices)
        staying = stays(self.loss, self.devices.table)
        own, last = self._chunks_of(stage), chunks.count - 1
        shared = chunks.trained(chunks.shared)
        rows, parts = self._rows.shape[2], self.loss.parts

        def finish(totals: list[Any]) -> tuple[Leaves, Leaves, Leaves, Leaves]:
            def of(k: int) -> Leaves:
                aval, place = chunks.slices[k].aval, trained.index(k)
                none = jnp.zeros((0, *aval.shape[1:]), aval.dtype)
                given = [total["weights"] for total in totals]
                return [_sum_of(x[place], parts).astype(aval.dtype) if x else none for x in given]

            direct = [of(k)[0] for k in staying]
            packed = [
                jnp.stack([jnp.pad(x, [(0, rows - x.shape[0]), *((0, 0) for _ in x.shape[1:])]) for x in of(k)])[None]
                for k in self._packed
                if k in trained
            ]
            sums: dict[int, Any] = {}
            for c, total in zip(own, totals, strict=True):
                places = chunks.shared_of(c)
                mine = [places[i] for i in chunks.trained([chunks.shared[p] for p in places])]
                for place, x in zip(mine, total["shared"], strict=True):
                    whole = _sum_of(x, parts)
                    sums[place] = sums[place] + whole if place in sums else whole
            shapes = {i: chunks.shared[i].aval for i in shared}
            wide = {i: jnp.promote_types(v.dtype, jnp.float32) for i, v in shapes.items()}
            own_sums = [sums[i] if i in sums else jnp.zeros(shapes[i].shape, wide[i]) for i in shared]
            if last in own:
                results = [totals[own.index(last)]["value"], *totals[own.index(last)]["others"]]
            else:
                traced = self.plans[last].whole.traced
                results = [
                    jnp.zeros(x.shape, x.dtype)
                    for x, path in zip(traced.in_avals, traced.in_paths, strict=True)
                    if path.startswith(("total['value']", "total['others']"))
                ]
                results = [results[-1], *results[:-1]]
            if parts > 1:
                value, *others = results
                results = [value.sum(), *(x.reshape(-1, *x.shape[2:]) for x in others)]
            return direct, packed, [x[None] for x in own_sums], [x[None] for x in results]

        def here(spec: PartitionSpec) -> NamedSharding:
            return self.devices.on_stage(own[0], spec)

        direct = [here(_of_total(k, self.loss, self.plans)) for k in staying]
        packed = [
            here(PartitionSpec(None, None, None, *_tail(_of_total(k, self.loss, self.plans))))
            for k in self._packed
            if k in trained
        ]
        sums = [here(PartitionSpec(None, *self._shared_total(i))) for i in shared]
        results = [here(PartitionSpec())] * (1 + len(chunks.others))
        return jax.jit(finish, out_shardings=(direct, packed, sums, results))

    # Helpers.

    @cached_property
    def _programs(self) -> dict[tuple[str, int], Any]:
        return {}

    def _cached(self, name: str, number: int, make: Callable[[], Any]) -> Any:
        if (name, number) not in self._programs:
            self._programs[name, number] = make()
        return self._programs[name, number]

    def _chunks_of(self, stage: int) -> list[int]:
        return list(range(stage, self.devices.table.chunks, self.devices.table.stages))

    def _weights_spec(self, k: int) -> PartitionSpec:
        """The layout in which a program of all devices brings stacked weights: that of their gradients, if any."""
        trained = self.loss.chunks.trained(self.loss.chunks.slices)
        return (
            _of_total(k, self.loss, self.plans)
            if k in trained
            else self.plans[self.loss.chunks.layered].specs(WEIGHTS)[k]
        )

    def _first_spec(self, place: int, argument: int) -> PartitionSpec:
        """The layout of a shared value, or a leaf of the batch, in the first chunk that takes it."""
        chunks = self.loss.chunks
        for c, plan in enumerate(self.plans):
            places = chunks.shared_of(c) if argument == SHARED else chunks.microbatch_of(c)
            if place in places:
                return plan.specs(argument)[places.index(place)]
        return PartitionSpec()

    def _shared_total(self, place: int) -> PartitionSpec:
        return _shared_spec(self.loss.chunks.shared[place], self.loss, self.plans)

    def _laid_out(self, chunk: int, values: Leaves, specs: Sequence[PartitionSpec]) -> Leaves:
        """Values of a chunk's stage in its layouts; one that has it already is not copied."""
        return [jax.device_put(x, self.devices.on_stage(chunk, spec)) for x, spec in zip(values, specs, strict=True)]

    def _of_stage(self, values: Leaves, stage: int) -> Leaves:
        """A stage's parts of arrays whose leading dimension is the stages'."""
        return [self._take(x, stage, (1, *x.shape[1:]), PartitionSpec(None, *x.sharding.spec[1:])) for x in values]

    def _part(self, x: Any, stage: int) -> Any:
        """A stage's part of an array that is split over the stages, outermost, along its leading dimension."""
        (_, *inner), *others = (_names(dim) for dim in x.sharding.spec)
        spec = PartitionSpec(tuple(inner) or None, *(tuple(names) or None for names in others))
        return self._take(x, stage, (x.shape[0] // self.devices.table.stages, *x.shape[1:]), spec)

    def _same(self, x: Any, stage: int) -> Any:
        """A stage's copy of an array that is whole on every stage."""
        return self._take(x, stage, x.shape, x.sharding.spec)

    def _take(self, x: Any, stage: int, shape: Sequence[int], spec: PartitionSpec) -> Any:
        mesh = self.devices.stages[stage]
        own = set(mesh.devices.flat)
        arrays = [shard.data for shard in x.addressable_shards if shard.device in own]
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), arrays, dtype=x.dtype)

    def _joined(self, parts: Sequence[Any], *, stacked: bool) -> Any:
        """One array of all devices from one of each stage (of those that are here), along the leading dimension."""
        first = parts[0]
        spec = first.sharding.spec
        lead, *others = (*spec, *(None for _ in range(first.ndim - len(spec))))
        inner = () if stacked else _names(lead)
        whole = PartitionSpec((self.devices.mesh.axis_names[0], *inner), *others)
        arrays = [shard.data for part in parts for shard in part.addressable_shards]
        shape = (first.shape[0] * self.devices.table.stages, *first.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.devices.at_home(whole), arrays, dtype=first.dtype)


def _tail(spec: PartitionSpec) -> tuple[Any, ...]:
    return tuple(spec[1:])


def _sum_of(total: Any, parts: int) -> Any:
    """The sum of a total's parts."""
    return total if parts == 1 else total.sum(0)


def _pack(x: Any, rows: np.ndarray) -> Any:
    """Layers [L, …] as [stage, repeat, row, …]; rows without a layer hold any."""
    if (rows >= 0).all():
        stages, repeats, count = rows.shape
        return x.reshape(repeats, stages, count, *x.shape[1:]).swapaxes(0, 1)
    return jnp.take(x, np.maximum(rows, 0), axis=0)


def _unpack(x: Any, rows: np.ndarray) -> Any:
    """The opposite: every layer once."""
    if (rows >= 0).all():
        return x.swapaxes(0, 1).reshape(-1, *x.shape[3:])
    flat = rows.ravel()
    return jnp.take(x.reshape(-1, *x.shape[3:]), np.argsort(flat)[(flat < 0).sum() :], axis=0)
