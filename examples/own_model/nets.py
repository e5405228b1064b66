"""Your own models. The lab passes the arguments that a signature names, such as image_shape."""

import torch
from torch import nn
from torch.nn import functional as F


class SmallResNet(nn.Module):
    """Three residual stages for small images."""

    def __init__(self, image_shape, num_classes, width=16):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(image_shape[0], width, 3, padding=1)
        pairs = zip([width, *widths], widths, strict=False)
        self.stages = nn.Sequential(*(Block(a, b) for a, b in pairs))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images):
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut, at half the resolution."""

    def __init__(self, channels_in, channels):
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=2)

    def forward(self, x):
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.shortcut(x))


class TinyGPT(nn.Module):
    """A decoder with two blocks, which also uses its embedding as its head."""

    def __init__(self, vocabulary, context, width=32):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        return self.blocks(x, mask=self.mask, is_causal=True) @ self.tokens.weight.T


class Curve(nn.Module):
    """A multilayer perceptron for a few numbers."""

    def __init__(self, input_shape, output_size, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(input_shape[0], hidden), nn.Tanh(), nn.Linear(hidden, output_size)
        )

    def forward(self, x):
        return self.layers(x)
