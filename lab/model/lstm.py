"""A language model of stacked LSTM layers."""

from __future__ import annotations

from torch import Tensor, nn

from lab.model import require_dropout, require_tokens
from lab.settings import checks


class LSTM(nn.Module):
    """The LSTM language model of Zaremba et al. (2014), with the sizes of Shi et al. (2016).

    Theirs have 2 layers of 256 units, on sequences of 32 (LSTM-32) or 64 tokens (LSTM-64). Every
    sequence begins from a state of zeros, whereas Zaremba et al. begin with the last one's end.
    6,182,672 parameters for 10000 words; torch's layers have two biases where the paper has one.

    Args:
        vocabulary: number of token ids; None: the data has none.
        layers: number of LSTM layers.
        hidden: width of embeddings and layers.
        dropout: probability that a value between layers, or before or after them, is dropped;
            never from one step to the next (Zaremba et al., section 3.1).
        init_scale: weights are uniform between minus and plus this. Zaremba et al. have 0.1 for 200
            units, 0.05 for 650, 0.04 for 1500.
    """

    def __init__(
        self,
        *,
        vocabulary: int | None = None,
        layers: int = 2,
        hidden: int = 256,
        dropout: float = 0.0,
        init_scale: float = 0.1,
    ) -> None:
        super().__init__()
        num_ids = require_tokens("lstm", vocabulary)
        checks.integer("model.layers", layers, 1)
        checks.integer("model.hidden", hidden, 1)
        require_dropout(dropout)
        checks.number("model.init_scale", init_scale, above=0)
        self.embedding = nn.Embedding(num_ids, hidden)
        self.dropout = nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0  # torch warns where there is no between
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(hidden, num_ids)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_scale, init_scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [batch, context] to logits [batch, context, vocabulary]."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(hidden))
