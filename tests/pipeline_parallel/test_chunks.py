"""A loss in chunks, run one after the other on one device, is the loss: its value, its gradients, its other results."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import SpecError
from autoshard.errors import ArgumentError
from autoshard.pipeline_parallel.own_stages.keeping import keeping
from autoshard.pipeline_parallel.own_stages.loss import ChunkedLoss, chunked
from tests.pipeline_parallel.test_in_stages import LAYERS, LOSSES, REFUSED, batch, outputs, same, weights

STEPS = 2


def of(loss: Any, params: Any, examples: Any, *, layers: Any = None, chunks: int = 2) -> ChunkedLoss:
    return chunked(loss, (params, examples, ()), steps=STEPS, parts=1, chunks=chunks, layers=layers, has_aux=False)


def by_chunks(loss: ChunkedLoss, params: Any, examples: Any, *, keeps: bool = False) -> tuple[Any, Any]:
    """The value and the gradients, with nothing but the chunks' own programs."""
    c = loss.chunks
    whole = jax.tree.leaves(params)
    every = list(range(len(c.slices)))
    stacks, shared = c.enter(whole, every)
    begins = np.cumsum([0, *c.layers])
    own = [[x[a:b] for x in stacks] for a, b in pairwise(begins)]
    totals: list[Any] = [0.0] * (len(c.trained(c.slices)))
    pieces: list[list[Any]] = [[0.0] * len(totals) for _ in c.layers]
    sums: list[Any] = [0.0] * len(c.trained(c.shared))
    value = 0.0
    for m in range(STEPS):
        micro = [x[m::STEPS] for x in jax.tree.leaves(examples)]
        states: list[Any] = [[]]
        given = [([shared[i] for i in c.shared_of(k)], [micro[i] for i in c.microbatch_of(k)]) for k in range(c.count)]
        kept: list[Any] = []
        for k in range(c.count - 1):
            if keeps:
                arguments = own[k], *given[k], states[k]
                passes = keeping(c, k, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments))
                out, activations = passes.forward(*arguments)
                kept.append((passes, [states[k][i] for i in passes.held], activations))
                states.append(out)
            else:
                states.append(c.forward(k, own[k], *given[k], states[k]))
        cotangents: Any = []
        for k in reversed(range(c.count)):
            results: Any = []
            if keeps and k < c.count - 1:
                passes, *held = kept[k]
                of_weights, of_shared, cotangents = passes.backward(own[k], *given[k], *held, cotangents)
            else:
                of_weights, of_shared, cotangents, results = c.backward(k, own[k], *given[k], states[k], cotangents)
            pieces[k] = [a + b for a, b in zip(pieces[k], of_weights, strict=True)]
            places = c.shared_of(k)
            mine = [places[i] for i in c.trained([c.shared[p] for p in places])]
            for place, x in zip(mine, of_shared, strict=True):
                at = c.trained(c.shared).index(place)
                sums[at] = sums[at] + x
            if results:
                value += results[0] * c.scale
    slices = {k: jnp.concatenate([p[i] for p in pieces]) for i, k in enumerate(c.trained(c.slices))}
    wanted = list(range(len(jax.tree.leaves(params))))
    return value, jax.tree.unflatten(jax.tree.structure(params), c.leave(whole, slices, sums, wanted))


FAST = ("a mask in the layers", "a counter in the carry", "remat, weights made of others")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES]
)
def test_losses_have_the_same_gradients(name: str) -> None:
    made = of(LOSSES[name], weights(), batch(), layers=(1, 3))
    got = jax.jit(partial(by_chunks, made, keeps=name != "a counter in the carry"))(weights(), batch())
    same(got, jax.jit(jax.value_and_grad(LOSSES[name]))(weights(), batch()))


def tied(p: Any, b: Any) -> Any:
    """The head's weights are the embedding's, and the layers' are also punished."""
    x, _ = jax.lax.scan(lambda x, own: (x + jnp.tanh(x @ own["w"]), None), b["x"] @ p["in"], p["layers"])
    return jnp.mean(jnp.square(x @ p["in"].T)) + 1e-2 * jnp.sum(jnp.square(p["layers"]["w"]))


def test_tied_and_otherwise_used_weights_have_the_sum_of_their_gradients() -> None:
    made = of(tied, weights(), batch())
    assert list(made.chunks.direct.values()) == [1]  # the scales; the punished weights do not stay on a stage
    got = jax.jit(partial(by_chunks, made))(weights(), batch())
    same(got, jax.jit(jax.value_and_grad(tied))(weights(), batch()))


def test_a_chunk_takes_what_it_uses() -> None:
    chunks = of(LOSSES["mean"], weights(), batch(), chunks=4).chunks
    names = [leaf for leaf, _ in sorted(weights().items()) if leaf != "layers"]
    assert names == ["in", "out"]
    assert [[chunks.shared[i].aval.shape for i in chunks.shared_of(c)] for c in range(4)] == [
        [(8, 8)],
        [],
        [],
        [(8, 8)],
    ]
    assert [len(chunks.microbatch_of(c)) for c in range(4)] == [1, 0, 0, 1]
    assert sorted(chunks.direct) == [0, 1]  # the layers' weights


@pytest.mark.parametrize(("chunks", "layers"), [(1, (4,)), (2, (2, 2)), (3, (1, 2, 1)), (4, (1, 1, 1, 1))])
def test_layers_are_divided_evenly_and_the_ends_have_fewer(chunks: int, layers: tuple[int, ...]) -> None:
    assert of(LOSSES["mean"], weights(), batch(), chunks=chunks).chunks.layers == layers


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_would_change_is_refused(name: str) -> None:
    loss, why = REFUSED[name]
    with pytest.raises(SpecError, match=why):
        of(loss, weights(), batch())


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(SpecError, match=f"{LAYERS} layers are not enough for 7 chunks"):
        of(LOSSES["mean"], weights(), batch(), chunks=7)
    with pytest.raises(SpecError, match=r"layers=\(2, 0, 2\): .* the first and the last, which may have none"):
        of(LOSSES["mean"], weights(), batch(), chunks=3, layers=(2, 0, 2))
    with pytest.raises(SpecError, match=r"layers=\(1, 1\): 2 chunks .* have 4 layers in all"):
        of(LOSSES["mean"], weights(), batch(), layers=(1, 1))
    with pytest.raises(SpecError, match="a batch of 12 does not split into 5 micro-batches"):
        chunked(LOSSES["mean"], (weights(), batch(), ()), steps=5, parts=1, chunks=2, layers=None, has_aux=False)
    with pytest.raises(SpecError, match="a batch of 12 does not split into 4 micro-batches of 2 parts: 8 must"):
        chunked(LOSSES["mean"], (weights(), batch(), ()), steps=4, parts=2, chunks=2, layers=None, has_aux=False)
    with pytest.raises(ArgumentError, match=r"params\['n'\] is int32, which has no gradient"):
        of(lambda p, b: jnp.mean(outputs(p, b)), {**weights(), "n": np.zeros((), np.int32)}, batch())


def test_what_is_kept_of_a_microbatch_are_activations() -> None:
    """Weights are given again, and casts of them made again: neither is kept once per micro-batch."""

    def layer(x: Any, own: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ own["w"].astype(jnp.bfloat16)) * own["scale"].astype(jnp.bfloat16), None

    def cast(p: Any, b: Any) -> Any:
        x, _ = jax.lax.scan(layer, b["x"].astype(jnp.bfloat16) @ p["in"].astype(jnp.bfloat16), p["layers"])
        return jnp.mean(jnp.square(x @ p["out"].astype(jnp.bfloat16)).astype(jnp.float32))

    c = of(cast, weights(), batch()).chunks
    stacks = [jax.ShapeDtypeStruct((2, *v.aval.shape[1:]), v.aval.dtype) for v in c.slices]
    shared = [jax.ShapeDtypeStruct(c.shared[i].aval.shape, c.shared[i].aval.dtype) for i in c.shared_of(0)]
    made = keeping(c, 0, [stacks, shared, [jax.ShapeDtypeStruct((12 // STEPS, 8), jnp.float32)], []])
    assert {x.shape[-2:] for x in made.kept} == {(12 // STEPS, 8)}
    assert {x.dtype for x in made.kept} == {jnp.dtype(jnp.bfloat16)}
    assert {kind for kind, _ in made.sources} == {"again", "kept"}
