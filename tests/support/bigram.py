"""The smallest language model."""

from __future__ import annotations

from torch import nn


class Bigram(nn.Sequential):
    """Predict the next token from the last one: [batch, context] -> [batch, context, vocabulary].

    Args:
        vocabulary: number of token ids.
        width: of a token's vector.
    """

    def __init__(self, *, vocabulary: int, width: int = 16) -> None:
        super().__init__(nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary))
