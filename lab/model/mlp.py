"""Multi-layer perceptrons: FC layers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lab.model import require_dropout, require_widths
from lab.model.convnet import initialise
from lab.settings import checks

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
KERAS_UNIFORM = 0.05  # Keras' init="uniform" draws from minus to plus this


def mlp(
    *, input_shape: Sequence[int], output_size: int, hidden: Sequence[int] = (512, 256)
) -> nn.Sequential:
    """Return FC layers with ReLU between them: [batch, *input_shape] -> [batch, output_size].

    Args:
        hidden: widths of the hidden layers; none makes a linear model.
    """
    return _perceptron(input_shape, output_size, hidden, "relu")


def keras_mlp(
    *,
    input_shape: Sequence[int],
    output_size: int,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    dropout: float = 0.5,
) -> nn.Sequential:
    """The multi-layer perceptron of Keras 1's guide to its Sequential model.

    6,154 parameters for 20 inputs and 10 classes. Weights are uniform between -0.05 and 0.05.

    Args:
        activation: relu, sigmoid or tanh, after each hidden layer.
        dropout: probability that an output of a hidden layer is dropped.
    """
    require_dropout(dropout)
    model = _perceptron(input_shape, output_size, hidden, activation, dropout)
    initialise(model, lambda weight: nn.init.uniform_(weight, -KERAS_UNIFORM, KERAS_UNIFORM))
    return model


def fcn5(
    *,
    input_shape: Sequence[int],
    output_size: int,
    hidden: Sequence[int] = (2048, 4096, 1024),
    activation: str = "sigmoid",
) -> nn.Sequential:
    """FCN-5 of Shi et al. (2016): five layers of units, counting inputs and outputs.

    14,205,962 parameters for 28x28 inputs and 10 classes (FCN-R; hclhkbu/dlbench,
    tools/caffe/fc/fcn5.prototxt). Their FCN-S has hidden=[2048,2048,2048] between 26752 inputs and
    outputs. Weights are Glorot's (2010), as theirs.

    Args:
        activation: relu, sigmoid or tanh, after each hidden layer.
    """
    model = _perceptron(input_shape, output_size, hidden, activation)
    initialise(model, nn.init.xavier_uniform_)
    return model


def _perceptron(
    input_shape: Sequence[int],
    output_size: int,
    hidden: Sequence[int],
    activation: str,
    dropout: float = 0.0,
) -> nn.Sequential:
    require_widths("model.hidden", hidden)
    checks.one_of("model.activation", activation, ACTIVATIONS)
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for hidden_width in hidden:
        layers += [nn.Linear(width, hidden_width), ACTIVATIONS[activation]()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = hidden_width
    return nn.Sequential(*layers, nn.Linear(width, output_size))
