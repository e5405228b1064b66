"""A decoder-only Transformer language model, in the sizes of GPT-2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lab.model import require_dropout, require_tokens
from lab.settings import checks

POSITIONS = ("learned", "rotary")
INIT_STD = 0.02  # GPT-2's
BASE = 10_000.0


class Size(NamedTuple):
    """Number of blocks, of heads in each, and width of a token's vector."""

    layers: int
    heads: int
    width: int


SIZES = {
    "nano": Size(3, 3, 48),  # karpathy/minGPT
    "mini": Size(6, 6, 384),  # karpathy/nanoGPT, config/train_shakespeare_char.py
    "small": Size(12, 12, 768),  # Radford et al. 2019, table 2, from here on
    "medium": Size(24, 16, 1024),
    "large": Size(36, 20, 1280),
    "xl": Size(48, 25, 1600),
}


class Transformer(nn.Module):
    """GPT-2 (Radford et al. 2019): causal, LayerNorm before each part, GELU; attention is fused.

    With 50257 tokens and a context of 1024, size=small has 124,439,808 parameters.

    Args:
        vocabulary: number of token ids; None: the data has none.
        context: tokens of a sequence, at most; None: the data has no sequences.
        size: nano, mini, small, medium, large or xl.
        layers, heads, width: instead of that size's; null keeps it.
        positions: "learned" vectors added to the tokens', as GPT-2; "rotary": queries and keys
            turned by angles that grow with their position (see Rotary).
        tied: the last layer's weight is the tokens' embedding (Press & Wolf 2017).
        dropout: probability that a value of embeddings, attention or a part's output is dropped.
    """

    def __init__(
        self,
        *,
        vocabulary: int | None = None,
        context: int | None = None,
        size: str = "mini",
        layers: int | None = None,
        heads: int | None = None,
        width: int | None = None,
        positions: str = "learned",
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        num_ids = require_tokens("transformer", vocabulary)
        self.context = require_tokens("transformer", context)
        self.size = _checked_size(size, layers, heads, width, positions)
        require_dropout(dropout)
        checks.truth("model.tied", tied)
        learned = positions == "learned"
        rotary = None if learned else Rotary(self.context, self.size.width // self.size.heads)
        self.embedding = nn.Embedding(num_ids, self.size.width)
        self.positions = nn.Embedding(self.context, self.size.width) if learned else None
        self.dropout = nn.Dropout(dropout)
        blocks = (Block(self.size, rotary, dropout) for _ in range(self.size.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(self.size.width)
        self.head = nn.Linear(self.size.width, num_ids, bias=False)
        self._initialise()
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [batch, length] to logits [batch, length, vocabulary].

        Raises:
            ValueError: sequences are longer than `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"model=transformer: sequences have {length} tokens, but the model's context is "
                f"{self.context}"
            )
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[:length]
        return self.head(self.norm(self.blocks(self.dropout(hidden))))

    def _initialise(self) -> None:
        """Draw weights as GPT-2: N(0, 0.02), biases zero.

        Layers that end a residual branch have a deviation smaller by the root of the number of
        branches (Radford et al. 2019, section 2.3).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for branch in self.modules():
            if isinstance(branch, Attention | FeedForward):
                nn.init.normal_(branch.out.weight, std=INIT_STD * (2 * self.size.layers) ** -0.5)


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a LayerNorm before it and a shortcut."""

    def __init__(self, size: Size, rotary: Rotary | None, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size, rotary, dropout)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map vectors [batch, length, width] to such."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Attention(nn.Module):
    """Causal attention of several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, size: Size, rotary: Rotary | None, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, dropout
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.rotary = rotary

    def forward(self, hidden: Tensor) -> Tensor:
        """Map vectors [batch, length, width] to such."""
        batch, length, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, values]
        if self.rotary is not None:
            queries, keys = self.rotary(queries), self.rotary(keys)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two layers for each token alone, with GPT-2's approximation of GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.activation = nn.GELU(approximate="tanh")
        self.out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map vectors [batch, length, width] to such."""
        return self.out(self.activation(self.wide(hidden)))


def _checked_size(
    size: str, layers: int | None, heads: int | None, width: int | None, positions: str
) -> Size:
    """Return the named size with the given numbers instead of its own."""
    checks.one_of("model.size", size, SIZES)
    checks.one_of("model.positions", positions, POSITIONS)
    given = {"layers": layers, "heads": heads, "width": width}
    for key, value in given.items():
        if value is not None:
            checks.integer(f"model.{key}", value, 1)
    chosen = SIZES[size]._replace(**{k: value for k, value in given.items() if value is not None})
    if chosen.width % chosen.heads:
        raise ValueError(
            f"model.width={chosen.width}: must be a multiple of model.heads={chosen.heads}"
        )
    if positions == "rotary" and chosen.width // chosen.heads % 2:
        raise ValueError(
            f"model.positions=rotary: rotates pairs of values, so model.width={chosen.width} "
            f"divided by model.heads={chosen.heads} must be even"
        )
    return chosen


class Rotary(nn.Module):
    """Turns pairs of values by angles proportional to the position (Su et al. 2021, section 3.2).

    Then the product of a query and a key depends on their contents and the distance between them,
    not on where they are. Value i is paired with i + size/2, in every pair at another frequency.

    Args:
        context: number of positions.
        size: values of one head's query or key; even.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        frequencies = BASE ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Turn vectors [..., length, size], the first of which is at position 0."""
        length = vectors.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = vectors.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return turned.type_as(vectors)
