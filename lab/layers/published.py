"""Published formulae for the operations of a model's forward, beside which counts are held.

(D. Levinthal, Performance analysis of deep neural networks, 2018, slides 4 to 6: convolutions, LSTM
cells, the Transformer.) All give floating-point operations of one sample; a multiply-add is two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lab.convolution.layer import convolutions_of
from lab.model.lstm import LSTM
from lab.model.transformer import Transformer

SAMPLES = 2  # one is too few for BatchNorm at 1x1 px
# H·W of the output; C are the channels that a filter sees: lab.convolution.problem.
CONVOLUTION = "2·N·K·C·R·S·H·W of each convolution"
CELL = "16·hidden² a token and layer"
TRANSFORMER = "3·2·(L²·d + L·d²/heads) + 64·L·d² a module"


@dataclass(frozen=True)
class Estimate:
    """The operations of one sample's forward by a published formula.

    Attributes:
        formula: in words; it leaves out layers of other kinds.
    """

    flops: float
    formula: str


def estimate(
    model: nn.Module, input_shape: tuple[int, ...], input_dtype: torch.dtype
) -> Estimate | None:
    """Estimate a model of a published kind; None: there is no formula for it.

    Args:
        model: on the meta device.
        input_shape, input_dtype: of one sample.
    """
    if isinstance(model, LSTM):
        layers, hidden = model.lstm.num_layers, model.lstm.hidden_size
        return Estimate(input_shape[0] * layers * cell(hidden), CELL)
    if isinstance(model, Transformer):
        layers, heads, width = model.size
        return Estimate(layers * transformer_module(input_shape[0], width, heads), TRANSFORMER)
    problems = convolutions_of(model, input_shape, input_dtype, SAMPLES).values()
    flops = sum(problem.operations for problem in problems) / SAMPLES
    return Estimate(flops, CONVOLUTION) if flops else None


def cell(hidden: int) -> int:
    """Return 16·hidden² of an LSTM cell, for one token (slide 5).

    Four gates, each with two products of a vector and a matrix of hidden x hidden: the input is as
    wide as the state.
    """
    return 16 * hidden**2


def transformer_module(length: int, width: int, heads: int) -> float:
    """Return 3·2·(L²·d + L·d²/heads) + 64·L·d² of a module, as printed (slide 6).

    A module is a layer of the encoder with one of the decoder, so it has three attentions; the
    slide has six modules. docs/layers.md holds its terms to a count.

    Args:
        length: L, tokens of a sequence. width: d, values of a token.
    """
    attention = 2 * (length**2 * width + length * width**2 / heads)
    return 3 * attention + 64 * length * width**2
