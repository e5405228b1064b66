"""The lab's exchanges in a training loop of the user's own: with DDP, without, and with FSDP2."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lab.distributed import replicas
from lab.distributed.comm import Traffic
from lab.distributed.replicas import is_sharded
from lab.distributed.worker import make_worker
from lab.distributed.world import World
from lab.exchange.base import Exchange, kept_state
from lab.exchange.gate import admit
from lab.exchange.grouping import MIB
from lab.exchange.layout import trainable
from lab.loop.check import (
    FORGOT_FINISH,
    FORGOT_HOOK,
    Checked,
    CopyWatch,
    LoopCheck,
    follow,
    is_on,
    naming_stalled,
    remember,
    syncs,
)
from lab.loop.setup import compose, refuses_misuse, require_module, world_of
from lab.settings.config import ConfigError, build
from lab.settings.errors import as_config_error
from lab.sync.base import SyncParts
from lab.sync.ddp import HookState, exchange_hook
from lab.sync.fsdp import WholeGradients, set_reduce_scatter
from lab.sync.fsdp_units import require_scattered
from lab.sync.gradsync import GradSync
from lab.sync.owner import KEY, NonfiniteGuard, Owner, Scaler, require_state
from lab.training.assemble import require_alike, require_like_gpus
from lab.training.rank_consistency import parameters, settings_and_software

Hook = Callable[[HookState, dist.GradBucket], Future[Tensor]]


class Unhooked:
    """Stands for the state of a hook in a copy of a DDP model, which has no hook."""


def meet_to_load(sync: Checked, facts: Mapping[str, str]) -> None:
    """Wait until all ranks load a state: later, those that load none would hang the others.

    Raises: ValueError: some ranks have not come within exchange_timeout_s, or state other `facts`.
    """
    sync.num_loads += 1
    limit_s = float(sync.settings["exchange_timeout_s"])
    with as_config_error("load_state_dict: "):
        absent = sync.world.meet(f"loads/{sync.num_loads}", facts, limit_s)
    if absent:
        raise ValueError(
            f"load_state_dict: {absent} did not call it within {limit_s:g} s "
            "(exchange_timeout_s); all ranks must, each with its own state"
        )


class LoopState(Checked, HookState):
    """The state of a hook in a custom training loop.

    Copies of the DDP model, such as an average of its weights, and saved files have none: DDP
    registers no hook for them.

    Attributes: ddp: the DistributedDataParallel, as long as the program has it.
    """

    ddp: Callable[[], DistributedDataParallel | None]

    def submit(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.is_closed:
            raise RuntimeError(
                "close() has ended this hook; wrap the model in a new DistributedDataParallel"
            )
        ddp: Any = self.ddp()
        if ddp and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise RuntimeError(
                "ddp.join(divide_by_initial_world_size=False): gradients are divided by the number "
                "of all ranks, also of those that have no more inputs; must be True"
            )
        with naming_stalled(self):
            return super().submit(bucket)

    def _gradient_ready(self, name: str) -> None:
        with naming_stalled(self):
            super()._gradient_ready(name)

    def __reduce__(self) -> tuple[type[Unhooked], tuple[()]]:
        return Unhooked, ()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to save with the model. Each rank has its own state.

        The tensors are not copied, as in a model's state, so the next step changes them.
        """
        kept = kept_state(self.exchange)
        return {"step": self.step, "exchange": kept, KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the same rank saved, in a run with as many ranks.

        Raises: ValueError: the state belongs to another rank, exchange or model.
        """
        require_state(state, "step", "exchange")
        meet_to_load(self, {"step": str(state["step"])})
        self._owner.check(state.get(KEY), state["exchange"])
        self.exchange.resume(state["exchange"], self._device)
        self.step = int(state["step"])

    def make_way(self, model: nn.Module) -> None:
        """Refuse no more updates of what another sync or hook exchanges now, as part of `model`."""
        if self._model is model:
            self.retire()
        trained = {*map(id, trainable(model).values())}
        if not trained.isdisjoint(map(id, self._model.parameters())):
            self._outside.close()

    def retire(self) -> None:
        """Refuse no more updates."""
        if self.check:
            self.check.abandon()
        self._outside.close()

    def close(self) -> None:
        """Exchange no more, and leave the process groups that this hook has made.

        All ranks must call this. DistributedDataParallel cannot forget a hook, so the module cannot
        run backward any more.
        """
        self._outside.close()
        HookState.close(self)  # its worker ends before the groups
        Checked.close(self)


@refuses_misuse
def ddp_comm_hook(
    strategy: str,
    ddp: nn.Module,
    *,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> tuple[LoopState, Hook]:
    """Create a communication hook, to register with `ddp.register_comm_hook(state, hook)`.

    The hook exchanges DDP's buckets during the backward pass, in process groups of its own. All
    ranks of DDP's process group must call this function together.

    Args:
        strategy: a choice of strategy= or exchange= that averages gradients in every step.
        ddp: a DistributedDataParallel module, which may be compiled with torch.compile.
        scaler: your loop's torch.amp.GradScaler, if it has one. Exchanges with residuals need the
            loss scale. If the scaler skips a step, the residuals are restored.
        check: "first" checks, in the first three exchanges, that ranks start with equal weights and
            average their gradients once (docs/certificate.md). A fault raises CertificateError in
            the backward pass, or before an update with gradients that were not exchanged. None or
            "none" turns the check off.
        certificate: JSON file for the results of the check. None: they are only printed.
        overrides: settings by dotted key: `**{"exchange.threshold": "mean"}`.

    Returns:
        The hook's state, with `state_dict` and `load_state_dict`; and the hook.

    Raises:
        ConfigError: a setting or module is not supported, or differs between ranks.
    """
    looks = is_on(check)
    config = compose(strategy, overrides)
    wrapped = _checked(ddp)
    exchange: Exchange = build(config.exchange)
    device = next(wrapped.parameters()).device
    world, settings = _join(config, exchange, wrapped.module, wrapped.process_group, device)
    worker = make_worker(True, device, world.comm.backend, exchange.asynchronous(world.comm))
    with as_config_error():
        guard = NonfiniteGuard(exchange, scaler, trainable(wrapped.module).values())
        finds_unused = wrapped.find_unused_parameters
        state = LoopState(wrapped.module, exchange, world.comm, worker, guard, finds_unused)
    state.world, state.ddp = world, weakref.ref(wrapped)
    remember(state)
    state.settings = settings | {
        "sync": {"_target_": "lab.sync.ddp.DDPSync", "hook": "lab"},
        "overlap": True,
        "bucket_mb": wrapped.bucket_bytes_cap / MIB,
    }
    if looks:
        state.check = LoopCheck(state, certificate, FORGOT_HOOK)
        follow(state.check, state)
    weakref.finalize(wrapped, state.retire).atexit = False
    return state, exchange_hook


@refuses_misuse
def attach(
    ddp: nn.Module,
    strategy: str,
    *,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> LoopState:
    """Make `ddp` exchange its gradients with `strategy`: create a hook and register it.

    The arguments are those of `ddp_comm_hook`.

    Returns:
        The hook's state, with `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: see `ddp_comm_hook`.
    """
    state, hook = ddp_comm_hook(
        strategy, ddp, scaler=scaler, check=check, certificate=certificate, **overrides
    )
    _checked(ddp).register_comm_hook(state, hook)
    return state


def _join(
    config: DictConfig,
    exchange: Exchange,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[World, dict[str, Any]]:
    """Connect the ranks of `group` for an exchange, if they are alike; return its settings too."""
    world = world_of(group, device, config.exchange_timeout_s)
    settings: Any = OmegaConf.to_container(config, resolve=True)
    require_alike(world, settings_and_software(config) | parameters(model))
    require_like_gpus(world, exchange)
    for earlier in syncs():
        if isinstance(earlier, LoopState):
            earlier.make_way(model)
    return world, settings


def _checked(module: nn.Module) -> DistributedDataParallel:
    """Return the DistributedDataParallel in `module`, which has no hook yet."""
    require_module("ddp", module)
    inner = getattr(module, "_orig_mod", module)  # of torch.compile
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ConfigError(
            "FSDP has no communication hook; use lab.fsdp_reduce_scatter with FSDP2 (docs/"
            "how-to/fsdp.md), or wrap the model in DistributedDataParallel"
        )
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"{type(inner).__name__}: must be a DistributedDataParallel module; "
            "without DDP, use lab.grad_sync"
        )
    if any(not isinstance(state, Unhooked) for _, state in inner._comm_hooks):
        raise ConfigError(
            "DistributedDataParallel already has a communication hook, from register_comm_hook "
            "or mixed_precision=, and can have only one"
        )
    if inner._delay_all_reduce_params:
        raise ConfigError(
            "delay_all_reduce_named_params: DistributedDataParallel exchanges these parameters "
            "itself and gives them to no hook; leave it out"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in inner.parameters()):
        raise ConfigError(
            "_apply_optimizer_in_backward: takes DistributedDataParallel's only hook; call "
            "optimizer.step() after backward"
        )
    return inner


class LoopSync(Checked, GradSync):
    """The gradient exchange of a custom training loop, as `grad_sync` returns it.

        with grad_sync(model) as sync:
            for …:
                loss(model(inputs)).backward()
                sync.finish()
                optimizer.step()

    When the `with` block begins, all ranks receive rank 0's weights and buffers. Run all
    micro-batches of a step but the last inside `with sync.accumulate():`. If some ranks do not use
    a parameter in a step, their gradients count as zero in its mean. If no rank uses it, its `grad`
    stays None, as with DistributedDataParallel(find_unused_parameters=True).
    """

    def __init__(
        self, parts: SyncParts, world: World, settings: Mapping[str, Any], scaler: Scaler | None
    ) -> None:
        super().__init__(parts)
        self.divides_loss = False  # the loop's loss is what it is
        self._is_open = False
        self.settings = settings
        self._model, self.world = parts.model, world
        self._guard = NonfiniteGuard(self.exchange, scaler, self.parameters.values())
        self._copies = CopyWatch(self, self.parameters.values())

    def __enter__(self) -> Self:
        if self.is_closed:
            raise RuntimeError("grad_sync: close() has ended it; make another one")
        self._refuse_shared()
        self._is_open = True
        replicas.broadcast_state(self._model, self.world)
        super().__enter__()
        self._arrivals.armed = True
        if self.check:
            self.check.begin()
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        super().__exit__()
        self._is_open = False
        self._copies.close()
        if kind is None:  # after an error, an exchange may wait for a rank that is lost
            self.worker.close()
        if self.check:
            self.check.close() if kind is None else self.check.abandon()

    def _refuse_shared(self) -> None:
        """Refuse a parameter of another sync: one might send its gradient while the other does."""
        for other in syncs():
            if not (isinstance(other, LoopSync) and other._is_open):
                continue
            theirs = {id(parameter) for parameter in other.parameters.values()}
            for name, parameter in self.parameters.items():
                if id(parameter) in theirs:
                    raise ConfigError(
                        f"{name}: another open lab.grad_sync exchanges its gradient; make one "
                        "grad_sync for both, as in grad_sync(nn.ModuleList([first, second]))"
                    )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "lab.grad_sync: its result cannot be copied or saved; keep it outside the model, and "
            "save its state_dict()"
        )

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for each micro-batch of a step but the last."""
        return self._arrivals.uncounted()

    @torch.inference_mode(False)  # in which torch gives no hooks, if the loop calls it in one
    def finish(self) -> Tensor | None:
        """Complete the exchange, so that `grad` contains the mean over all ranks.

        Call it once per step, after the last backward pass.

        Raises:
            RuntimeError: called outside the `with` block, so ranks may have unequal weights; or the
                loop changed gradients before this call although they overlap with backward.
            FloatingPointError: the gradients of the step before were not finite.
            CertificateError: check="first" has found a fault.
            Exception: the first error that an exchange raised.
        """
        if not self._is_open:
            raise RuntimeError(
                "grad_sync: finish() outside `with`; use `with grad_sync(...) as s:`"
            )
        self._copies.begin()
        if self.clock:
            self.clock.next_phase("exchange")
        with naming_stalled(self):
            finite = super().finish()
        if self.clock:
            self.clock.next_phase("update")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_mul_(gradients, self.loss_scale)
        self._guard.end_step(gradients, finite)
        self._copies.end()
        if self.check:
            self.check.exchanged(self.loss_scale)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to save with the model. Each rank has its own state."""
        exchange = {f"exchange.{key}": v for key, v in kept_state(self.exchange).items()}
        step = {"step": {"step": torch.tensor(self.step)}}
        return {**super().state_dict(), **exchange, **step, KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the same rank saved, in a run with as many ranks.

        Raises: ValueError: the state belongs to another rank, exchange or model.
        """
        require_state(state, "step")
        step, order = int(state["step"]["step"]), state.get("order", {})
        digest = hashlib.sha256(" ".join(order).encode()).hexdigest()
        facts = {"step": str(step), "order of gradients": digest[:12]}
        meet_to_load(self, facts)
        prefix = "exchange."
        kept = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self._owner.check(state.get(KEY), kept)
        self.exchange.resume(kept, self.world.device)
        super().load_state_dict({"order": order})
        self.step = step

    def _submit_next(self) -> None:
        if not self._exchanged:
            self.loss_scale = self._guard.begin_step()
        super()._submit_next()

    def _advance(self, _name: str) -> None:
        with naming_stalled(self):
            self.worker.advance()


@refuses_misuse
def grad_sync(
    model: nn.Module,
    strategy: str = "onebit",
    *,
    group: dist.ProcessGroup | None = None,
    scaler: Scaler | None = None,
    check: str | None = "first",
    certificate: str | Path | None = None,
    **overrides: Any,
) -> LoopSync:
    """Average the gradients of `model` over the ranks, in a custom training loop without DDP.

    All ranks of the process group must call this function together.

    Args:
        model: the module to train, on its device. Exchanges that only add gradients accept any real
            or complex dtype. Those that compress them accept float32, bfloat16, float16 and
            complex64.
        strategy: a choice of strategy= or exchange= that averages gradients in every step.
        group: the process group. None: all ranks that the launcher started; the default process
            group is created if necessary.
        scaler: as in `lab.ddp_comm_hook`.
        check: as in `lab.ddp_comm_hook`.
        certificate: as in `lab.ddp_comm_hook`.
        overrides: settings by dotted key, and also `overlap` and `bucket_mb`, in place of the
            strategy's own values.

    Raises:
        ConfigError: a setting or the model is not supported, or differs between ranks.
    """
    looks = is_on(check)
    config = compose(strategy, overrides, ("overlap", "bucket_mb"))
    require_module("model", model)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"{name}: DistributedDataParallel" if name else "DistributedDataParallel"
            raise ConfigError(f"{where}: exchanges gradients itself; use lab.attach")
    exchange: Exchange = build(config.exchange)
    with as_config_error():
        parameters = admit(model, exchange)
    device = next(iter(parameters.values())).device
    world, settings = _join(config, exchange, model, group, device)
    comm = world.comm
    worker = make_worker(config.overlap, device, comm.backend, exchange.asynchronous(comm))
    parts = SyncParts(model, model, exchange, comm, worker, config.overlap, config.bucket_mb)
    with as_config_error():
        sync = LoopSync(parts, world, settings, scaler)
    remember(sync)
    if looks:
        sync.check = LoopCheck(sync, certificate, FORGOT_FINISH)
    return sync


class ReduceScatters:
    """The state and byte counts of the reduce-scatters of a model's FSDP modules.

    Attributes: traffic: payload bytes and messages of this rank's reduce-scatters so far.

    Raises: ValueError: see lab.sync.fsdp.set_reduce_scatter.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, settings: Mapping[str, Any]) -> None:
        self.traffic = Traffic()
        self._model, self._exchange, self._settings = model, exchange, settings
        require_scattered(model, exchange)
        set_reduce_scatter(model, exchange, self.traffic)
        WholeGradients(model)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, if the exchange has any, and the rank's number."""
        return {**self._exchange.state_dict(), KEY: self._owner.mark()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the same rank saved, in a run with as many ranks.

        Raises: ValueError: the state belongs to another rank, exchange or model.
        """
        require_state(state)
        kept = {key: value for key, value in state.items() if key != KEY}
        self._owner.check(state.get(KEY), kept)
        self._exchange.resume(kept, next(self._model.parameters()).device)

    @property
    def _owner(self) -> Owner:
        """Residuals are laid out for the mesh's ranks, so its shape is one of the settings."""
        sharded: Any = next(filter(is_sharded, self._model.parameters()))
        mesh: DeviceMesh = sharded.device_mesh
        settings = {**self._settings, "mesh": list(mesh.shape)}
        rank = mesh.mesh.flatten().tolist().index(mesh.get_rank())
        return Owner(self._model, self._exchange, settings, rank, mesh.size())


@refuses_misuse
def fsdp_reduce_scatter(
    model: nn.Module, exchange: str = "allreduce", **overrides: Any
) -> ReduceScatters:
    """Replace the reduce-scatters of all modules in `model` that FSDP2 shards.

    Call this function after the last `fully_shard` and before the first backward pass. The new
    reduce-scatters use FSDP's process groups.

    Args:
        exchange: "allreduce" (exact), "bf16", "fp16", "int8", "int4" or "onebit". The first half of
            this exchange is the reduce-scatter.
        overrides: settings by dotted key: `**{"exchange.block_size": 512}`.

    Returns:
        The state of the reduce-scatters, with `traffic`, `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: a setting is wrong, or the model has no FSDP modules.
    """
    require_module("model", model)
    config = compose(exchange, overrides)
    settings: Any = OmegaConf.to_container(config.exchange, resolve=True)
    with as_config_error():
        return ReduceScatters(model, build(config.exchange), settings)
