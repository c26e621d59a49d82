"""A plain decoder that tensor parallelism cuts by its structure alone."""

from typing import Any

import torch
from torch import Tensor, nn


class UnevenMlp(nn.Module):
    """A pair of matrices whose inner width, 6, is uneven for 4 ranks; a norm in front."""

    def __init__(self, inner: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, inner)
        self.down = nn.Linear(inner, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class GroupedAttention(nn.Module):
    """Grouped-query attention that reshapes by sizes of its own, as torchtune's does."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, embed_dim: int = 16) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.embed_dim = num_heads, num_kv_heads, embed_dim
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.embed_dim))


class DecoderBlock(nn.Module):
    """Attention and a pair of matrices, each behind a norm, dropout after."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(16)
        self.attention = GroupedAttention(num_heads, num_kv_heads, 4 * num_heads)
        self.mlp_norm = nn.RMSNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.0), nn.Linear(24, 16))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A plain decoder whose plan is inferred by structure; 21 tokens, which no number of ranks divides."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 16, padding_idx=20)
        self.layers = nn.ModuleList(DecoderBlock(num_heads, num_kv_heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 21)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_batch(seed: int = 1, tokens: int = 20) -> Tensor:
    """Tokens `(4, 8)`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tokens, (4, 8), generator=generator)


def loss_of(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The language-modeling loss: the model's own, or of its logits."""
    out = model(input_ids=input_ids, labels=input_ids)
    if isinstance(out, Tensor):
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    return out.loss
