"""The lab's exchanges in a DistributedDataParallel of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lab.distributed.worker import make_worker
from lab.exchange.base import Exchange
from lab.exchange.grouping import MIB
from lab.loop.check import FORGOT_HOOK, LoopCheck, follow, is_on
from lab.loop.settings import compose
from lab.loop.world import world_of
from lab.record.schema import Certificate
from lab.settings.config import ConfigError, build
from lab.sync.ddp import HookState, exchange_hook
from lab.sync.owner import NonfiniteGuard, Scaler
from lab.training.alike import exchanged_alike
from lab.training.assemble import require_alike, require_like_gpus

Hook = Callable[[HookState, dist.GradBucket], Future[Tensor]]


class LoopState(HookState):
    """The state of a hook in a loop.

    Attributes:
        check: examines the first exchanges; None: nothing does.
    """

    check: LoopCheck | None = None

    @property
    def certificate(self) -> Certificate | None:
        """Return the finding of check="first"; None: nothing yet, or it is off."""
        return self.check.certificate if self.check else None

    def close(self) -> None:
        if self.check:
            self.check.abandon()
        super().close()


def ddp_comm_hook(
    strategy: str,
    ddp: nn.Module,
    *,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> tuple[LoopState, Hook]:
    """Make a communication hook: `ddp.register_comm_hook(state, hook)`.

    DDP's buckets are exchanged while backward computes, by process groups of the hook's own. All
    ranks of DDP's process group call this together.

    Args:
        strategy: a choice of strategy= or exchange= that averages gradients in every step.
        ddp: a DistributedDataParallel, or what torch.compile made of it.
        scaler: the loop's torch.amp.GradScaler, if it has one: exchanges with residuals need its
            scale, and are undone where the scaler skips the step.
        check: "first" proves, in the first three exchanges, that ranks started equal and average
            their gradients once; a fault raises CertificateError out of backward, or before an
            update without an exchange; see docs/certificate.md. None or "none": nothing is checked.
        certificate: file for what it finds, as JSON; None: it is printed only.
        overrides: settings by dotted key: `**{"exchange.threshold": "mean"}`.

    Returns:
        The hook's state, with `state_dict` and `load_state_dict`; and the hook.

    Raises:
        ConfigError: a setting, or a module, that a hook does not support, or that is another on
            some rank.
    """
    looks = is_on(check)
    config = compose(strategy, overrides)
    wrapped = _checked(ddp)
    exchange: Exchange = build(config.exchange)
    device = next(wrapped.parameters()).device
    world = world_of(wrapped.process_group, device, config.exchange_timeout_s)
    settings: Any = OmegaConf.to_container(config, resolve=True)
    require_alike(world, exchanged_alike(settings, wrapped.module))
    worker = make_worker(True, device, world.comm.backend, exchange.asynchronous(world.comm))
    guard = NonfiniteGuard(exchange, scaler)
    require_like_gpus(world, exchange)
    try:
        finds_unused = wrapped.find_unused_parameters
        state = LoopState(wrapped.module, exchange, world.comm, worker, guard, finds_unused)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    state.settings = settings | {
        "sync": {"_target_": "lab.sync.ddp.DDPSync", "hook": "lab"},
        "overlap": True,
        "bucket_mb": wrapped.bucket_bytes_cap / MIB,
    }
    if looks:
        state.check = LoopCheck(
            wrapped.module, state, world, state.settings, certificate, FORGOT_HOOK
        )
        follow(state.check, state)
    return state, exchange_hook


def attach(
    ddp: nn.Module,
    strategy: str,
    *,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> LoopState:
    """Let `ddp` exchange its gradients by `strategy`, in one line.

    Returns:
        The hook's state, with `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: see `ddp_comm_hook`.
    """
    more = {"check": check, "certificate": certificate}
    state, hook = ddp_comm_hook(strategy, ddp, scaler=scaler, **more, **overrides)
    _checked(ddp).register_comm_hook(state, hook)
    return state


def _checked(module: nn.Module) -> DistributedDataParallel:
    """Return the DistributedDataParallel in `module`, if it is one.

    Raises:
        ConfigError: it is not, or has a hook already.
    """
    inner = getattr(module, "_orig_mod", module)  # of torch.compile
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ConfigError(
            "FSDP: has no communication hook; use lab.fsdp_reduce_scatter with FSDP2 (docs/"
            "your_own.md), or wrap the model in DistributedDataParallel"
        )
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"{type(inner).__name__}: is no DistributedDataParallel; without it, use lab.grad_sync"
        )
    if inner._comm_hooks:
        raise ConfigError(
            "DistributedDataParallel: has a communication hook, by register_comm_hook or "
            "mixed_precision=, and takes one"
        )
    return inner
