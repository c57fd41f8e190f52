"""The shape of a transformer: its parameters, its arithmetic and its memory.

Source: Austin et al., How to Scale Your Model (2026-06-24), transformers.md:150-310.
"""

from dataclasses import dataclass, fields

from cost_models.errors import CostModelError
from cost_models.machines.amounts import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder, dense or mixture of experts.

    Attributes:
        layers: Number of blocks.
        d_model: Width of the residual stream (D).
        d_ff: Hidden width of a dense MLP (F); 0 where there is none.
        heads: Query heads (N).
        kv_heads: Key and value heads (K).
        head_dim: Width of a head (H), of queries and keys.
        vocab: Rows of the embedding (V).
        gated: Whether the MLP has three matrices (SwiGLU) or two.
        tied: Whether input and output embedding are one matrix.
        experts: Routed experts per mixture layer; 1 in a dense model.
        active_experts: Routed experts that a token visits.
        shared_experts: Experts that every token visits.
        expert_d_ff: Hidden width of an expert; `d_ff` if 0.
        dense_layers: Blocks with a dense MLP in a mixture model.
        window: Positions that a local attention layer sees; 0: all attend to everything.
        global_layers: Blocks that attend to everything when `window` is set.
        attention_parameters: Of one block, where it is not 2·D·(N+K)·H (latent attention).

    Raises:
        CostModelError: A size is negative, or zero where there must be one; a token visits
            more experts than there are.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    shared_experts: int = 0
    expert_d_ff: int = 0
    dense_layers: int = 0
    window: int = 0
    global_layers: int = 0
    attention_parameters: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 or field.name == "d_ff" else 1  # no dense MLP where all are of experts
            if field.type is not bool:
                count(value, f"a transformer's {field.name}", least=least)
        for part in ("dense_layers", "global_layers"):
            if getattr(self, part) > self.layers:
                raise CostModelError(f"a transformer of {self.layers} layers has no {getattr(self, part)} {part}")
        if self.active_experts > self.experts:
            raise CostModelError(f"a token visits {self.active_experts} experts, but there are {self.experts}")

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def moe_layers(self) -> int:
        """Blocks with experts."""
        return self.layers - self.dense_layers if self.experts > 1 else 0

    @property
    def expert_width(self) -> int:
        return self.expert_d_ff or self.d_ff

    @property
    def attention_layer_parameters(self) -> int:
        """Q, K, V and output projections of one block."""
        return self.attention_parameters or 2 * self.d_model * (self.heads + self.kv_heads) * self.head_dim

    @property
    def dense_mlp_parameters(self) -> int:
        """Matrices of one dense MLP."""
        return self.mlp_matrices * self.d_model * self.d_ff

    @property
    def expert_parameters(self) -> int:
        """Matrices of one expert."""
        return self.mlp_matrices * self.d_model * self.expert_width

    @property
    def mlp_parameters(self) -> int:
        """MLP matrices of all blocks, every expert counted."""
        dense = self.layers - self.moe_layers
        per_moe = (self.experts + self.shared_experts) * self.expert_parameters
        return dense * self.dense_mlp_parameters + self.moe_layers * per_moe

    @property
    def embedding_parameters(self) -> int:
        """Input and output embedding."""
        return (1 if self.tied else 2) * self.vocab * self.d_model

    @property
    def parameters(self) -> int:
        """All matrices; norms and biases are left out."""
        return self.mlp_parameters + self.layers * self.attention_layer_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Matrices that one token visits."""
        idle = self.moe_layers * (self.experts - self.active_experts) * self.expert_parameters
        return self.parameters - idle

    @property
    def multiplied_parameters(self) -> int:
        """Active parameters that are multiplied: all but the input embedding's look-up."""
        lookup = 0 if self.tied else self.vocab * self.d_model
        return self.active_parameters - lookup

    def score_flops(self, sequence: int, *, causal: bool = True) -> float:
        """Forward FLOPs per token of scores and weighted values, all blocks: 4·T·N·H each.

        Args:
            sequence: Tokens that attend to each other.
            causal: Whether the half above the diagonal is left out, as flash kernels do.
        """
        half = 0.5 if causal else 1.0
        everywhere = self.global_layers if self.window else self.layers
        width = 4 * self.heads * self.head_dim
        local = self.layers - everywhere
        span = min(self.window, sequence * half) if local else 0.0
        return width * (everywhere * sequence * half + local * span)

    @property
    def parity_sequence(self) -> float:
        """Sequence length at which full attention costs as much as the blocks' matmuls. transformers.md:250."""
        matmul = 2 * (self.active_parameters - self.embedding_parameters)
        return matmul / (4 * self.heads * self.head_dim * self.layers)

    def train_flops(self, sequence: int, *, causal: bool = True) -> float:
        """Model FLOPs per token of forward and backward: 6 per multiplied parameter, and attention.

        Recomputation is not counted. Source: transformers.md:250-266; MaxText logs
        before 2025 count full attention, later ones and Megatron half.
        """
        return 6.0 * self.multiplied_parameters + 3.0 * self.score_flops(sequence, causal=causal)

    def kv_bytes(self, itemsize: float = 2.0) -> float:
        """Key-value cache per token: 2·L·K·H. Source: inference.md."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * itemsize
