"""Exchanges and optimizers that a sync cannot be combined with, in a run or its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.exchange.auto import Auto
from lab.exchange.base import Exchange, iter_nested, require_mean
from lab.settings.errors import ConfigError, one_line
from lab.sync.pattern import Pattern
from lab.sync.update import update_some

# Of the trials that tell whether slices, or whole parameters, may be updated by themselves:
NUM_STEPS = 3  # the first may differ from later ones, which have momentum
LONGEST = 4  # of the dimensions of a parameter's copy
SHAPE = (6, 8)
MATRIX = torch.empty(SHAPE)
TOLERANCE = 1e-3  # of the largest change; rounding differs by the length of a vector register


def refuse_exchange(pattern: Pattern, exchange: Exchange) -> None:
    """Refuse an exchange with which a sync does not do what it promises.

    Raises: ValueError: says why.
    """
    name = type(exchange).__name__
    if pattern.own_replicas:
        require_mean("exchange", exchange)
    if pattern.only_exact and not exchange.exact:
        raise ValueError(f"exchange={name} is not exact, but {pattern.only_exact}; use allreduce")
    if pattern.no_auto and any(isinstance(each, Auto) for each in iter_nested(exchange)):
        raise ValueError(f"exchange=Auto: {pattern.no_auto}; use another exchange")


def refuse_optimizer(
    pattern: Pattern,
    delivers: str,
    settings: Mapping[str, Any],
    momentum: float | None,
) -> None:
    """Refuse an optimizer, or clipping, that is not what the sync and its exchange stand for.

    Args:
        delivers: what the exchange does; see Exchange.
        settings: of the run; `strategy`, `optim` and `clip_grad_norm` are read.
        momentum: of SGD; None: it is another optimizer.

    Raises: ConfigError: says why.
    """
    strategy, clip = f"strategy={settings['strategy']}", settings["clip_grad_norm"]
    chosen = f"{strategy} optim={settings['optim']['_target_']}"
    if pattern.only_sgd and momentum is None:
        raise ConfigError(f"{chosen}: {pattern.only_sgd}; use optim=sgd")
    if not pattern.takes_exchanges or delivers != "direction":
        return
    if momentum is None or momentum:
        given = f" optim.momentum={momentum}" if momentum else ""
        raise ConfigError(
            f"{chosen}{given}: the exchange stores the moments and produces an update direction; "
            "use optim=direction, which is SGD without momentum"
        )
    if clip is not None:
        raise ConfigError(
            f"clip_grad_norm={clip}: {strategy} produces an update direction, whose norm is not "
            "that of the gradient; must be null"
        )


def require_elementwise(
    target: str,
    why: str,
    make: Callable[[nn.ParameterList], Optimizer],
    prepare: Callable[[Optimizer, int, int], None] | None = None,
) -> None:
    """Refuse an optimizer for which a slice of a parameter changes otherwise than in the whole.

    It is tried on a small matrix: at once, and in slices, each updated by a call of its own.

    Args:
        target: its path.
        prepare: sets the hyperparameters of a step, of so many; None: they stay.

    Raises: ConfigError: names the optimizer, and says `why`.
    """

    def updated(start: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
        """Return parameters after a step for each of `gradients`, one after the other."""
        parameters = nn.ParameterList([nn.Parameter(values.clone()) for values in start])
        optimizer = make(parameters)
        for step, each in enumerate(gradients):
            if prepare:
                prepare(optimizer, step, len(gradients))
            for parameter, gradient in zip(parameters, each, strict=True):
                parameter.grad = gradient.clone()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach() for parameter in parameters]

    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + NUM_STEPS, *SHAPE, generator=generator)
    (whole,) = updated([start], [[gradient] for gradient in gradients])
    cuts = pairwise((0, 5, 16, start.numel()))  # across rows
    slices = [slice(*ends) for ends in cuts]
    in_slices, *others = (
        [values.flatten()[each].view(1, -1) for each in slices] for values in (start, *gradients)
    )
    apart = torch.cat([values.flatten() for values in updated(in_slices, others)])
    changed = (whole - start).abs().max()
    if not (whole.flatten() - apart).abs().max() <= TOLERANCE * changed:
        raise ConfigError(
            f"optim={target}: {why}, but this optimizer updates a slice of a parameter "
            "differently from the whole parameter; use an elementwise optimizer such as SGD, "
            "AdamW or RMSprop"
        )


def require_piecewise(
    settings: Mapping[str, Any],
    make: Callable[[nn.ParameterList], Optimizer],
    parameters: Iterable[Tensor] = (MATRIX, MATRIX),
) -> None:
    """Refuse settings under which a model's parameters cannot be updated one by one.

    The optimizer updates small copies of some parameters, of each number of dimensions, both ways.

    Args:
        settings: of the run; `strategy`, `optim` and `clip_grad_norm` are read.
        parameters: the model's; a prediction has none.

    Raises: ConfigError: the weights differ, or gradients are clipped by the norm of all of them.
    """
    name, clip = f"strategy={settings['strategy']}", settings["clip_grad_norm"]
    if clip is not None:
        raise ConfigError(
            f"clip_grad_norm={clip}: needs all gradients at once, but {name} updates each layer "
            "when its gradient arrives; must be null"
        )
    target, parameters = settings["optim"]["_target_"], [*parameters]
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        try:
            whole, pieces = (_trained(make, parameters, way) for way in (False, True))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optim={target}: fails when it updates parameters one by one, as {name} does: "
                f"{one_line(error)}"
            ) from error
    if not all(map(torch.equal, whole, pieces)):
        raise ConfigError(
            f"optim={target}: gives different weights when it updates parameters one by one, as "
            f"{name} does; use an optimizer that treats each parameter separately"
        )


def _trained(
    make: Callable[[nn.ParameterList], Optimizer], parameters: Sequence[Tensor], piecewise: bool
) -> list[Tensor]:
    """Return copies' weights after some steps of random gradients, the same for both ways."""
    copies, optimizer = small_copies(make, parameters)
    for seed in range(NUM_STEPS):
        step_at_random(copies, optimizer, seed, piecewise)
    return list(copies.parameters())


def small_copies(
    make: Callable[[nn.ParameterList], Optimizer], parameters: Iterable[Tensor]
) -> tuple[nn.ParameterList, Optimizer]:
    """Return small copies of the first two parameters of each number of dimensions, and a run's
    optimizer of them.
    """
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    copies = nn.ParameterList(
        torch.randn([min(size, LONGEST) for size in p.shape]).to(p.device)
        for _, alike in groupby(sorted(parameters, key=Tensor.dim), key=Tensor.dim)
        for p in list(alike)[:2]
    )
    optimizer = make(copies)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] or 0.01  # at 0 any two ways agree
    return copies, optimizer


def step_at_random(
    copies: nn.Module, optimizer: Optimizer, seed: int, piecewise: bool = False
) -> None:
    """Update copies by random gradients, all at once or one by one."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    for parameter in copies.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.device)
    if not piecewise:
        optimizer.step()
        optimizer.zero_grad()
        return
    for parameter in reversed(list(copies.parameters())):
        update_some(optimizer, [parameter])
