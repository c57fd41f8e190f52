"""Hugging Face's Flax models by their configurations; no weights are loaded."""
# ruff: noqa: D103 (`subjects` says what each program is)

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers

from benchmarks.zoo.program import Program, Size, cross_entropy, images, tokens, trained

ADAMW = optax.adamw(1e-3)


TRAIN = {"train": True}


def _decoder(
    size: Size,
    kind: Any,
    config: Any,
    optimizer: optax.GradientTransformation = ADAMW,
    training: Mapping[str, bool] = TRAIN,
) -> Program:
    model = kind(config, input_shape=(1, size.sequence), _do_init=False)

    def loss(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(ids, params=params, dropout_rng=key, **training).logits
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    return trained(
        loss,
        lambda: model.init_weights(jax.random.key(0), (1, size.sequence)),
        lambda: (tokens(size), jax.random.key(3)),
        optimizer,
    )


def gpt2(size: Size) -> Program:
    config = transformers.GPT2Config(
        vocab_size=size.vocab,
        n_positions=size.sequence,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
    )
    return _decoder(size, transformers.FlaxGPT2LMHeadModel, config)


def llama(size: Size) -> Program:
    return _decoder(size, transformers.FlaxLlamaForCausalLM, transformers.LlamaConfig(**_gated(size)))


def mistral(size: Size) -> Program:
    config = transformers.MistralConfig(**_gated(size), sliding_window=None)
    return _decoder(size, transformers.FlaxMistralForCausalLM, config)


def gemma(size: Size) -> Program:
    config = transformers.GemmaConfig(**_gated(size), head_dim=size.head_dim, hidden_activation="gelu_pytorch_tanh")
    return _decoder(size, transformers.FlaxGemmaForCausalLM, config)


def _gated(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "max_position_embeddings": size.sequence,
    }


def opt(size: Size) -> Program:
    config = transformers.OPTConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        word_embed_proj_dim=size.width,
        ffn_dim=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
    )
    return _decoder(size, transformers.FlaxOPTForCausalLM, config, training={"deterministic": False})


def gptj(size: Size) -> Program:
    config = transformers.GPTJConfig(
        vocab_size=size.vocab,
        n_positions=size.sequence,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        rotary_dim=size.head_dim // 2,
    )
    return _decoder(size, transformers.FlaxGPTJForCausalLM, config, optax.adafactor(1e-3))


def bloom(size: Size) -> Program:
    config = transformers.BloomConfig(
        vocab_size=size.vocab, hidden_size=size.width, n_layer=size.layers, n_head=size.heads
    )
    return _decoder(size, transformers.FlaxBloomForCausalLM, config)


def bert(size: Size) -> Program:
    config = transformers.BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
    )
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, size.sequence), _do_init=False)

    def loss(params: Any, ids: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model(ids, params=params, dropout_rng=key, train=True).logits, targets)

    return trained(
        loss,
        lambda: model.init_weights(jax.random.key(0), (1, size.sequence)),
        lambda: (tokens(size), tokens(size, 1), jax.random.key(3)),
        ADAMW,
    )


def t5(size: Size) -> Program:
    config = transformers.T5Config(
        vocab_size=size.vocab,
        d_model=size.width,
        d_kv=size.head_dim,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        decoder_start_token_id=0,
    )
    model = transformers.FlaxT5ForConditionalGeneration(config, input_shape=(1, size.sequence), _do_init=False)
    return _sequence_to_sequence(
        size, model, lambda: (tokens(size),), (1, size.sequence), optax.adafactor(1e-3), "decoder_input_ids"
    )


def whisper(size: Size) -> Program:
    config = transformers.WhisperConfig(
        vocab_size=size.vocab,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        num_mel_bins=80,
        max_source_positions=size.sequence,
        max_target_positions=size.sequence,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    mel = (80, 2 * size.sequence)  # the encoder's second convolution halves the frames
    model = transformers.FlaxWhisperForConditionalGeneration(config, input_shape=(1, *mel), _do_init=False)

    def features() -> tuple[jax.Array]:
        return (jax.random.normal(jax.random.key(4), (size.batch, *mel)),)

    return _sequence_to_sequence(size, model, features, (1, *mel), ADAMW, "decoder_input_ids")


def _sequence_to_sequence(
    size: Size,
    model: Any,
    source: Callable[[], tuple[jax.Array]],
    shape: tuple[int, ...],
    optimizer: optax.GradientTransformation,
    targets: str,
) -> Program:
    def loss(params: Any, source: jax.Array, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(source, **{targets: ids}, params=params, dropout_rng=key, train=True).logits
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    return trained(
        loss,
        lambda: model.init_weights(jax.random.key(0), shape),
        lambda: (*source(), tokens(size, 1), jax.random.key(3)),
        optimizer,
    )


def vit(size: Size) -> Program:
    config = transformers.ViTConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        image_size=size.image,
        patch_size=8,
        num_labels=16,
    )
    shape = (1, size.image, size.image, 3)
    model = transformers.FlaxViTForImageClassification(config, input_shape=shape, _do_init=False)

    def loss(params: Any, pixels: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model(pixels, params=params, dropout_rng=key, train=True).logits, targets)

    return trained(
        loss,
        lambda: model.init_weights(jax.random.key(0), shape),
        lambda: (images(size, first=True), jnp.arange(size.batch) % 16, jax.random.key(3)),
        ADAMW,
    )


def clip(size: Size) -> Program:
    text = {
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.sequence,
    }
    vision = {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "image_size": size.image,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=size.width)
    shape = ((1, size.sequence), (1, size.image, size.image, 3))
    model = transformers.FlaxCLIPModel(config, input_shape=shape, _do_init=False)

    def loss(params: Any, ids: jax.Array, pixels: jax.Array, key: jax.Array) -> jax.Array:
        out = model(ids, pixels, params=params, dropout_rng=key, train=True)
        pairs = jnp.arange(size.batch)
        return (cross_entropy(out.logits_per_text, pairs) + cross_entropy(out.logits_per_image, pairs)) / 2

    return trained(
        loss,
        lambda: model.init_weights(jax.random.key(0), shape),
        lambda: (tokens(size), images(size, first=True), jax.random.key(3)),
        ADAMW,
    )
