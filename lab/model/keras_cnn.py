"""The CNN of Keras' examples: blocks of convolutions under one hidden FC layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lab.model.convnet import ConvNet, with_fc_head
from lab.model.require import require_dropout, require_size, require_widths
from lab.settings import checks


def keras_cnn(
    *,
    input_shape: Sequence[int],
    output_size: int,
    blocks: Sequence[Sequence[int]] = ((32, 32), (64, 64)),
    hidden: int = 256,
    block_dropout: float = 0.25,
    dropout: float = 0.5,
) -> ConvNet:
    """The "VGG-like convnet" of Keras 1's guide to its Sequential model.

    7,998,250 parameters for 3x100x100 images and 10 classes, 99.2 % of them in the head. With
    blocks=[[32,64]] hidden=128 it is Keras' mnist_cnn. Weights are Glorot's (2010), as in Keras.

    Args:
        input_shape: (C, H, W) of an image.
        output_size: width of the last layer.
        blocks: for each block, the channels of its 3x3 convolutions, which have no padding. Max
            pooling, which halves the image, ends a block.
        hidden: width of the hidden FC layer.
        block_dropout: probability that an output of a block is dropped.
        dropout: probability that an output of the hidden FC layer is dropped.

    Raises:
        ValueError: images too small for `blocks` (16 px by default), or an argument out of range.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
        raise ValueError(f"model.blocks={blocks}: must be a list of blocks such as [[32,32],[64]]")
    for block in blocks:
        require_widths("model.blocks", block)
    checks.whole("model.hidden", hidden, 1)
    require_dropout(block_dropout, "model.block_dropout")
    require_dropout(dropout)
    require_size("keras_cnn", input_shape, _smallest_px(blocks))
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for block in blocks:
        for width in block:
            layers += [nn.Conv2d(channels, width, 3), nn.ReLU()]
            channels = width
        layers += [nn.MaxPool2d(2), nn.Dropout(block_dropout)]
    features = nn.Sequential(*layers)
    model = with_fc_head(features, input_shape, [hidden], output_size, dropout, dropout_after=True)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def _smallest_px(blocks: Sequence[Sequence[int]]) -> int:
    """Return the least height and width of images that leave the last block one pixel."""
    smallest = 1
    for block in reversed(blocks):
        smallest = 2 * smallest + 2 * len(block)  # a 3x3 convolution without padding takes two
    return smallest
