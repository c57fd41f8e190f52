"""The list of programs: fixed before any of them was tried, and none leaves it for failing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    """One whole program: its name, the library of its model, the optimizer, and the reason to have it.

    `builder` is `module:function` in `benchmarks.zoo`; it takes a `Size`.
    """

    name: str
    framework: str
    optimizer: str
    what: str
    builder: str


LINEN, NNX, EQUINOX, HAIKU, HF = "Flax Linen", "Flax NNX", "Equinox", "Haiku", "Hugging Face Flax"
OPTAX, JAX, OURS = "plain JAX + optax", "plain JAX", "models/"

SUBJECTS: tuple[Subject, ...] = (
    Subject("linen-mlp", LINEN, "adamw", "TrainState, dense layers", "linen:mlp"),
    Subject("linen-cnn", LINEN, "sgd + momentum", "convolutions, batch norm with mutable statistics", "linen:cnn"),
    Subject("linen-transformer", LINEN, "adamw", "attention with dropout, keys per step", "linen:transformer"),
    Subject("linen-scan-remat", LINEN, "lion", "nn.scan over nn.remat layers", "linen:scan_remat"),
    Subject("linen-lstm", LINEN, "adam", "nn.RNN of an LSTMCell", "linen:lstm"),
    Subject("linen-seq2seq", LINEN, "adafactor", "encoder-decoder with cross attention", "linen:seq2seq"),
    Subject("linen-vit", LINEN, "adamw", "patches by a convolution, class token", "linen:vit"),
    Subject(
        "linen-unet", LINEN, "adamw + EMA", "diffusion step: U-Net, group norm, resize, time embedding", "linen:unet"
    ),
    Subject("linen-mixed", LINEN, "adamw", "bfloat16 compute, dynamic loss scaling with lax.cond", "linen:mixed"),
    Subject("linen-decode", LINEN, "none", "one-token decode, mutable KV cache (decode=True)", "linen:decode"),
    Subject("nnx-mlp", NNX, "adamw", "nnx.split and merge, nnx.Optimizer's state", "nnx_models:mlp"),
    Subject("nnx-cnn", NNX, "sgd", "batch norm and dropout as state", "nnx_models:cnn"),
    Subject("nnx-transformer", NNX, "adamw", "nnx.MultiHeadAttention blocks", "nnx_models:transformer"),
    Subject("nnx-scan", NNX, "adamw", "layers made by nnx.vmap, run by nnx.scan", "nnx_models:scanned"),
    Subject("nnx-lora", NNX, "adamw", "nnx.LoRA: only the adapters are trained", "nnx_models:lora"),
    Subject("equinox-mlp", EQUINOX, "adamw", "eqx.nn.MLP under jax.vmap, filter_value_and_grad", "equinox_models:mlp"),
    Subject("equinox-cnn", EQUINOX, "sgd", "eqx.nn.Conv2d and pooling under jax.vmap", "equinox_models:cnn"),
    Subject(
        "equinox-transformer", EQUINOX, "adamw", "eqx.nn.MultiheadAttention, dropout keys", "equinox_models:transformer"
    ),
    Subject("equinox-gru", EQUINOX, "adam", "eqx.nn.GRUCell under lax.scan", "equinox_models:gru"),
    Subject("haiku-mlp", HAIKU, "adam", "hk.transform, hk.nets.MLP", "haiku_models:mlp"),
    Subject("haiku-resnet18", HAIKU, "sgd + momentum", "hk.nets.ResNet18 with state", "haiku_models:resnet"),
    Subject("haiku-transformer", HAIKU, "adamw", "hk.MultiHeadAttention, dropout", "haiku_models:transformer"),
    Subject("haiku-lstm", HAIKU, "adam", "hk.dynamic_unroll of hk.LSTM", "haiku_models:lstm"),
    Subject("hf-gpt2", HF, "adamw", "FlaxGPT2LMHeadModel", "hugging_face:gpt2"),
    Subject("hf-llama", HF, "adamw", "FlaxLlamaForCausalLM", "hugging_face:llama"),
    Subject("hf-mistral", HF, "adamw", "FlaxMistralForCausalLM", "hugging_face:mistral"),
    Subject("hf-gemma", HF, "adamw", "FlaxGemmaForCausalLM", "hugging_face:gemma"),
    Subject("hf-opt", HF, "adamw", "FlaxOPTForCausalLM", "hugging_face:opt"),
    Subject("hf-gptj", HF, "adafactor", "FlaxGPTJForCausalLM", "hugging_face:gptj"),
    Subject("hf-bloom", HF, "adamw", "FlaxBloomForCausalLM", "hugging_face:bloom"),
    Subject("hf-bert", HF, "adamw", "FlaxBertForMaskedLM, dropout", "hugging_face:bert"),
    Subject("hf-t5", HF, "adafactor", "FlaxT5ForConditionalGeneration", "hugging_face:t5"),
    Subject("hf-vit", HF, "adamw", "FlaxViTForImageClassification", "hugging_face:vit"),
    Subject("hf-clip", HF, "adamw", "FlaxCLIPModel, contrastive loss over the batch", "hugging_face:clip"),
    Subject("hf-whisper", HF, "adamw", "FlaxWhisperForConditionalGeneration", "hugging_face:whisper"),
    Subject(
        "optax-adamw", OPTAX, "adamw + clip + schedule", "global-norm clipping, cosine schedule", "optimizers:adamw"
    ),
    Subject("optax-adafactor", OPTAX, "adafactor", "factored second moments", "optimizers:adafactor"),
    Subject("optax-lion", OPTAX, "lion", "signs of momenta", "optimizers:lion"),
    Subject("optax-sgd", OPTAX, "sgd + nesterov", "", "optimizers:sgd"),
    Subject("optax-muon", OPTAX, "muon", "Newton-Schulz iterations on matrices", "optimizers:muon"),
    Subject("optax-masked", OPTAX, "masked adamw", "weight decay on matrices alone", "optimizers:masked"),
    Subject(
        "optax-multisteps", OPTAX, "MultiSteps(adamw)", "gradient accumulation with lax.cond", "optimizers:multisteps"
    ),
    Subject("lora", OPTAX, "adamw", "frozen matrices, trained low-rank factors", "shapes:lora"),
    Subject("ragged-moe", OURS, "adamw", "tokens sorted by expert, ragged_dot", "shapes:ragged_moe"),
    Subject("ssm-scan", OPTAX, "adamw", "a diagonal state-space model, associative_scan", "shapes:ssm"),
    Subject("lstm-scan", OPTAX, "adam", "an LSTM written with lax.scan", "shapes:lstm"),
    Subject("prefill", JAX, "none", "prompt through a decoder, writing its KV cache", "shapes:prefill"),
    Subject("decode", JAX, "none", "one token with a KV cache, position as an argument", "shapes:decode"),
    Subject("generate", JAX, "none", "greedy generation in a lax.while_loop", "shapes:generate"),
    Subject("two-losses", OPTAX, "two adams", "generator and discriminator, each its own loss", "shapes:two_losses"),
    Subject("ensemble", OPTAX, "adam", "jax.vmap over whole models", "shapes:ensemble"),
    Subject("int8", JAX, "none", "int8 weights with scales, int8 products", "shapes:int8"),
    Subject("fp8", OPTAX, "adamw", "float8_e4m3fn operands, float8_e5m2 gradients, delayed scales", "shapes:fp8"),
    Subject("gnn", OPTAX, "adam", "message passing: gather, segment_sum", "shapes:gnn"),
    Subject(
        "rl", OPTAX, "adam", "rollout under scan, categorical actions, REINFORCE with a baseline", "shapes:reinforce"
    ),
)
