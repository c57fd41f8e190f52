"""Shapes of the models whose training runs were published, by the names that the tables use.

Sources: MaxText src/maxtext/configs/models (2026), Hugging Face config.json of
each model, llm-foundry scripts/train/yamls (8c8dd48), the papers for GPT-3,
GPT-NeoX-20B, PaLM and Megatron-LM (arXiv:2104.04473).
"""

import re
from dataclasses import replace

from cost_models.closed_forms.transformer import Transformer

MPT_VOCAB = 50432
DEEPSEEK_ATTENTION = 187_105_280  # per block: latent projections of q (1536), kv (512 + 64 rotary), and the output

KIMI_ATTENTION = 101_122_048  # the same latent projections with half the heads


def dense(
    layers: int,
    d: int,
    f: int,
    heads: int,
    kv: int,
    vocab: int,
    *,
    head: int = 128,
    gated: bool = True,
    tied: bool = False,
) -> Transformer:
    """A dense decoder."""
    return Transformer(
        layers=layers, d_model=d, d_ff=f, heads=heads, kv_heads=kv, head_dim=head, vocab=vocab, gated=gated, tied=tied
    )


def windowed(model: Transformer, window: int, global_layers: int) -> Transformer:
    """The same with local attention in all but some layers."""
    return replace(model, window=window, global_layers=global_layers)


def gpt(layers: int, d: int, heads: int, vocab: int, *, tied: bool = True) -> Transformer:
    """The GPT shape: two MLP matrices of width 4D, every head its own keys."""
    return dense(layers, d, 4 * d, heads, heads, vocab, head=d // heads, gated=False, tied=tied)


NAMED: dict[str, Transformer] = {
    "llama3-8b": dense(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": dense(80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": dense(126, 16384, 53248, 128, 8, 128256),
    "llama2-7b": dense(32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": dense(40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": dense(80, 8192, 28672, 64, 8, 32000),
    "gpt3-175b": gpt(96, 12288, 96, 50304),
    "mpt-1b": gpt(24, 2048, 16, MPT_VOCAB),
    "mpt-3b": gpt(32, 2560, 20, MPT_VOCAB),
    "mpt-7b": gpt(32, 4096, 32, MPT_VOCAB),
    "mpt-13b": gpt(40, 5120, 40, MPT_VOCAB),
    "mpt-30b": gpt(48, 7168, 56, MPT_VOCAB),
    "mpt-70b": gpt(80, 8192, 64, MPT_VOCAB),
    "gpt-neox-20b": gpt(44, 6144, 64, 50432, tied=False),
    "gpt 22b": gpt(48, 6144, 64, 51200),
    "gpt 530b": gpt(105, 20480, 128, 51200),
    "gpt 1t": gpt(128, 25600, 160, 51200),
    "palm-540b": dense(118, 18432, 73728, 48, 1, 256000, head=256, tied=True),
    "gemma2-9b": windowed(dense(42, 3584, 14336, 16, 8, 256128, head=256, tied=True), 4096, 21),
    "gemma2-27b": windowed(dense(46, 4608, 36864, 32, 16, 256128, tied=True), 4096, 23),
    "gemma3-12b": windowed(dense(48, 3840, 15360, 16, 8, 262144, head=256, tied=True), 1024, 8),
    "gemma3-27b": windowed(dense(62, 5376, 21504, 32, 16, 262144, tied=True), 1024, 10),
    "gemma4-31b": windowed(dense(60, 5376, 21504, 32, 16, 262144, head=256, tied=True), 1024, 10),
    "gemma4-26b": Transformer(
        layers=30,
        d_model=2816,
        d_ff=2112,
        heads=16,
        kv_heads=8,
        head_dim=256,
        vocab=262144,
        tied=True,
        experts=128,
        active_experts=8,
        shared_experts=3,
        expert_d_ff=704,
        window=1024,
        global_layers=5,
    ),
    "mixtral-8x7b": Transformer(
        layers=32,
        d_model=4096,
        d_ff=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=32000,
        experts=8,
        active_experts=2,
    ),
    "mixtral-8x22b": Transformer(
        layers=56,
        d_model=6144,
        d_ff=16384,
        heads=48,
        kv_heads=8,
        head_dim=128,
        vocab=32768,
        experts=8,
        active_experts=2,
    ),
    "deepseek-v3": Transformer(
        layers=61,
        d_model=7168,
        d_ff=18432,
        heads=128,
        kv_heads=128,
        head_dim=160,
        vocab=129280,
        experts=256,
        active_experts=8,
        shared_experts=1,
        expert_d_ff=2048,
        dense_layers=3,
        attention_parameters=DEEPSEEK_ATTENTION,
    ),
    "llama4-scout": Transformer(
        layers=48,
        d_model=5120,
        d_ff=8192,
        heads=40,
        kv_heads=8,
        head_dim=128,
        vocab=202048,
        experts=16,
        active_experts=1,
        shared_experts=1,
        window=8192,
        global_layers=12,
    ),
    "llama4-maverick": Transformer(
        layers=48,
        d_model=5120,
        d_ff=16384,
        heads=40,
        kv_heads=8,
        head_dim=128,
        vocab=202048,
        experts=128,
        active_experts=1,
        shared_experts=1,
        expert_d_ff=8192,
        dense_layers=24,
        window=8192,
        global_layers=12,
    ),
    "kimi-k2": Transformer(
        layers=61,
        d_model=7168,
        d_ff=18432,
        heads=64,
        kv_heads=64,
        head_dim=160,
        vocab=163840,
        experts=384,
        active_experts=8,
        shared_experts=1,
        expert_d_ff=2048,
        dense_layers=1,
        attention_parameters=KIMI_ATTENTION,
    ),
    "gpt-oss-20b": Transformer(
        layers=24,
        d_model=2880,
        d_ff=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        experts=32,
        active_experts=4,
        window=128,
        global_layers=12,
    ),
    "gpt-oss-120b": Transformer(
        layers=36,
        d_model=2880,
        d_ff=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        experts=128,
        active_experts=4,
        window=128,
        global_layers=18,
    ),
    "qwen3-235b": Transformer(
        layers=94,
        d_model=4096,
        d_ff=1536,
        heads=64,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        experts=128,
        active_experts=8,
    ),
    "qwen3-30b": Transformer(
        layers=48,
        d_model=2048,
        d_ff=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        experts=128,
        active_experts=8,
    ),
}

ALIASES = (
    (r"llama-?3(\.\d)?-(\d+b)", r"llama3-\2"),
    (r"llama-?2-(\d+b)", r"llama2-\1"),
    (r"deepseek-?v?3", "deepseek-v3"),
    (r"llama4-17b-128e", "llama4-maverick"),
    (r"llama4-17b-16e", "llama4-scout"),
    (r"llama4-scout", "llama4-scout"),
    (r"qwen3-(\d+b)", r"qwen3-\1"),
)


def find(name: str) -> Transformer | None:
    """The shape that a table's model name means, or None if it is not known.

    Names either carry their shape ("emb4096 heads64 mlp28672 L32 hd128", "h2048 L24
    heads16, vocab131072") or are those of public models.
    """
    return _spelt(name) or _named(name)


def _spelt(name: str) -> Transformer | None:
    got = {key: int(value) for key, value in re.findall(r"\b(emb|heads|mlp|L|hd|h|vocab|E|k)(\d+)\b", name)}
    if {"emb", "mlp", "heads", "L"} <= set(got) and "E" not in got:
        # MaxText names sizes by parameters: 22B and 52B are the v4 models with two MLP matrices.
        gated = not re.match(r"(22|52)B", name)
        return dense(
            got["L"], got["emb"], got["mlp"], got["heads"], got["heads"], 32000, head=got.get("hd", 256), gated=gated
        )
    if {"h", "L"} <= set(got):
        heads = got.get("heads", got["h"] // 128)
        return gpt(got["L"], got["h"], heads, got.get("vocab", 50304))
    return None


def _named(name: str) -> Transformer | None:
    lower = name.lower()
    for pattern, known in ALIASES:
        lower = re.sub(pattern, known, lower)
    return next((shape for known, shape in NAMED.items() if lower.startswith(known)), None)
