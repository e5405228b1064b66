"""Whether an optimizer treats each value by itself, so that slices may be updated apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lab.settings.errors import ConfigError
from lab.training.optim import Optim

SHAPE = (6, 8)
NUM_STEPS = 3
TOLERANCE = 1e-3  # of the largest change; rounding differs by the length of a vector register


def require_elementwise(optim: Optim, why: str) -> None:
    """Refuse an optimizer for which a slice of a parameter changes otherwise than in the whole.

    It is tried on a small matrix: at once, and in slices that each have an optimizer of their own,
    in which they are updated by calls of their own.

    Args: why: the reason to give.

    Raises:
        ConfigError: names the optimizer.
    """
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + NUM_STEPS, *SHAPE, generator=generator)
    whole = _updated(optim, [start], [[gradient] for gradient in gradients])
    cuts = [5, 11, start.numel() - 16]  # across rows
    slices = [_rows(values, cuts) for values in (start, *gradients)]
    first, *others = zip(*slices, strict=True)
    alone = _updated(optim, [first[0]], [[gradient] for gradient in first[1:]])
    several = _updated(
        optim,
        [values[0] for values in others],
        [[values[step] for values in others] for step in range(1, 1 + NUM_STEPS)],
    )
    apart = torch.cat([values.flatten() for values in (*alone, *several)])
    changed = (whole[0] - start).abs().max()
    if not (whole[0].flatten() - apart).abs().max() <= TOLERANCE * changed:
        raise ConfigError(
            f"optim={optim.target}: {why}, but treats a slice otherwise than the whole parameter; "
            "allowed are elementwise optimizers, as SGD, AdamW and RMSprop"
        )


def _rows(values: Tensor, cuts: list[int]) -> list[Tensor]:
    return [row.view(1, -1) for row in values.flatten().split(cuts)]


def _updated(optim: Optim, start: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return parameters after a step for each of `gradients`, one parameter after the other."""
    parameters = nn.ParameterList([nn.Parameter(values.clone()) for values in start])
    optimizer = optim.optimizer(parameters)
    for step, each in enumerate(gradients):
        optim.prepare(optimizer, step, len(gradients))
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]
