"""Whether an optimizer treats parameters, or values, by themselves, so that it may update parts."""

from __future__ import annotations

from itertools import groupby

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from lab.settings.errors import ConfigError, one_line
from lab.sync.pending import update_some
from lab.training.optim import Optim, make_optim

STEPS = 3  # the first may differ from later ones, which have momentum
LONGEST = 4  # of a copy's dimensions
SHAPE = (6, 8)
NUM_STEPS = 3
TOLERANCE = 1e-3  # of the largest change; rounding differs by the length of a vector register


def require_piecewise(config: DictConfig, model: nn.Module, batch_size: int) -> None:
    """Refuse settings under which the parameters of `model` cannot be updated one by one.

    The optimizer updates small copies of some parameters, of each number of dimensions, both ways.

    Raises:
        ConfigError: the weights differ, or gradients are clipped by the norm of all of them.
    """
    name = f"strategy={config.strategy}"
    if config.clip_grad_norm is not None:
        raise ConfigError(
            f"clip_grad_norm={config.clip_grad_norm}: needs all gradients at once, but {name} "
            "updates layers as theirs arrive; allowed is null"
        )
    target = config.optim["_target_"]
    with torch.random.fork_rng(devices=[]):
        try:
            whole, pieces = (_trained(config, model, batch_size, way) for way in (False, True))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optim={target}: fails where it updates parameters one by one, as {name} does: "
                f"{one_line(error)}"
            ) from error
    if not all(map(torch.equal, whole, pieces)):
        raise ConfigError(
            f"optim={target}: gives other weights if it updates parameters one by one, as {name} "
            "does; allowed are optimizers that treat each by itself"
        )


def _trained(
    config: DictConfig, model: nn.Module, batch_size: int, piecewise: bool
) -> list[Tensor]:
    """Return copies' weights after some steps of random gradients, the same for both ways."""
    torch.manual_seed(0)
    copies = _small_copies(model)
    optimizer = make_optim(config.optim, batch_size).optimizer(copies)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] or 0.01  # at 0 any two ways agree
    for _ in range(STEPS):
        for parameter in copies.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.device)
        if not piecewise:
            optimizer.step()
            optimizer.zero_grad()
            continue
        for parameter in reversed(list(copies.parameters())):
            update_some(optimizer, [parameter])
    return list(copies.parameters())


def _small_copies(model: nn.Module) -> nn.ParameterList:
    """Return random parameters like the first two of `model` of each number of dimensions."""
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.dim())
    alike = [list(group)[:2] for _, group in groupby(trained, key=lambda p: p.dim())]
    return nn.ParameterList(
        torch.randn([min(size, LONGEST) for size in p.shape]).to(p.device)
        for group in alike
        for p in group
    )


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
