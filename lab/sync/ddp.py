"""torch's DistributedDataParallel, with its own communication hooks or the lab's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Self, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lab.distributed.torch_comm import TorchComm
from lab.exchange.allreduce import NoExchange
from lab.exchange.grouping import MIB
from lab.measure.clock import Clock
from lab.settings import checks
from lab.sync.base import SyncParts
from lab.sync.ddp_hook import HookState, exchange_hook
from lab.sync.library import LibrarySync, library_bound
from lab.sync.pattern import ddp

CURES = {  # by what DDP says, in many lines
    "mark a variable ready only once": (
        "a gradient was complete twice in one backward, as where a module is used twice under "
        "reentrant checkpointing; use checkpoint(use_reentrant=False), sync.static_graph=true or "
        "strategy=overlap"
    ),
    "finished reduction in the prior iteration": (
        "some parameters had no gradient in the last step; use "
        "sync.find_unused_parameters=true or strategy=overlap"
    ),
}
HOOKS = ("none", "noop", "bf16", "fp16", "powersgd", "lab")


class DDPSync(LibrarySync):
    """A sync in which DDP buckets the gradients, and finishes inside backward.

    Args:
        hook: torch's communication hook (torch.distributed.algorithms.ddp_comm_hooks). "noop" moves
            nothing, for timing alone: replicas drift apart. "powersgd" is its PowerSGD of rank 1
            after two exact steps; its errors are DDP's own, and not in checkpoints. "lab" is the
            lab's hook (lab.sync.ddp_hook), for any exchange.
        find_unused_parameters, static_graph: DDP's own.

    Raises:
        ValueError: settings that DDP or its hook does not support.
    """

    def __init__(
        self,
        parts: SyncParts,
        *,
        hook: str,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        checks.one_of("sync.hook", hook, HOOKS)
        if not parts.overlap or not parts.bucket_mb:
            raise ValueError(
                f"overlap={parts.overlap} bucket_mb={parts.bucket_mb}: strategy=ddp always "
                "overlaps, with buckets above 0 MiB"
            )
        gradient_bytes = sum(p.nbytes for p in parts.model.parameters() if p.requires_grad)
        super().__init__("ddp", parts, ddp(hook), gradient_bytes)
        if not isinstance(parts.comm, TorchComm):
            raise ValueError("strategy=ddp: runs over torch.distributed only")
        _check(hook, parts, parts.comm.backend, gradient_bytes)
        for buffer in parts.model.buffers():
            if 0 in buffer.stride():  # DDP writes to buffers, which it cannot to expanded ones
                buffer.data = buffer.detach().contiguous()
        self.wrapped = DistributedDataParallel(
            parts.module,
            bucket_cap_mb=parts.bucket_mb,
            process_group=parts.comm.group,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
        self.module = self.wrapped
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._lab: HookState | None = None
        self._hook_name = hook
        self._sent = 0  # values, by PowerSGD since it began
        self._last: LastGradient | None = None
        self._model = parts.model
        self._register(hook, parts, parts.comm.group)

    def _register(self, hook: str, parts: SyncParts, group: ProcessGroup) -> None:
        """Give DDP the hook of that name; adapt the counted bytes."""
        self.needs_like_gpus = hook == "powersgd"  # orthogonalises on every rank
        register = self.wrapped.register_comm_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if hook == "noop":
            self._wire_bytes = 0
            register(None, debugging_hooks.noop_hook)
        elif hook in ("bf16", "fp16"):
            self._wire_bytes //= 2
            register(group, getattr(default_hooks, f"{hook}_compress_hook"))
        elif hook == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
            register(self._power, powerSGD_hook.powerSGD_hook)
        elif hook == "lab":
            self._wire_bytes = 0  # the comm counts what its exchange sends
            self._lab = HookState(
                parts.model,
                parts.exchange,
                parts.comm,
                parts.worker,
                finds_unused=self.wrapped.find_unused_parameters,
            )
            register(self._lab, exchange_hook)

    @property
    def keeps_replicas_equal(self) -> bool:
        return super().keeps_replicas_equal and (
            self._lab is None or self._lab.keeps_replicas_equal
        )

    @property
    def waits_in(self) -> tuple[str, ...]:
        return waits_of_ddp(self._model)

    def __enter__(self) -> Self:
        self._last = None if self._lab else LastGradient(self._model)
        return self

    def __exit__(self, *_: object) -> None:
        if self._last:
            self._last.close()

    def bucket_shapes(self) -> list[list[tuple[int, ...]]]:
        return self._lab.bucket_shapes() if self._lab is not None else []

    def bucket_itemsizes(self) -> list[int]:
        return self._lab.bucket_itemsizes() if self._lab is not None else []

    def error_bound(self, largest: float, size: int) -> float:
        if self._hook_name == "lab":
            return super().error_bound(largest, size)
        return library_bound(self._hook_name, largest, size)

    @contextmanager
    def micro_batch(self, last: bool) -> Generator[None]:
        """Enclose one micro-batch.

        Raises:
            RuntimeError: DDP does not support the model as it is; says which setting would.
        """
        if self._last:
            self._last.clock = self.clock
        if self._lab is not None:
            self._lab.step, self._lab.loss_scale = self.step, self.loss_scale
            self._lab.clock = self.clock
        try:
            with nullcontext() if last else self.wrapped.no_sync():
                yield
        except RuntimeError as error:
            cures = [cure for words, cure in CURES.items() if words in str(error)]
            if not cures:
                raise
            raise RuntimeError(f"strategy=ddp: {cures[0]}") from None

    def finish(self) -> Tensor | None:
        """Count what DDP sent; backward has exchanged the gradients."""
        if self._power is not None:
            sent = int(self._power.compression_stats()[2])
            if sent:  # the first steps are exact, and not in its count
                self._wire_bytes = 4 * (sent - self._sent)
            self._sent = sent
        super().finish()
        if self._last:
            self._last.end_step()
        return self._lab.finite if self._lab is not None else None


def _check(hook: str, parts: SyncParts, backend: str, gradient_bytes: int) -> None:
    """Refuse hooks that cannot run here.

    Raises:
        ValueError: names the setting, and what to use instead.
    """
    if hook == "lab" and isinstance(parts.exchange, NoExchange):
        raise ValueError(
            "sync.hook=lab: needs one of the lab's exchanges, as in "
            "strategy=onebit sync=ddp sync.hook=lab"
        )
    if backend != "gloo":
        return
    if hook == "bf16":
        raise ValueError("sync.hook=bf16: torch has it over NCCL only; use sync.hook=fp16")
    # Over Gloo the callbacks of several buckets run at once and share torch's state: it aborts.
    if hook == "powersgd" and gradient_bytes > (parts.bucket_mb or 0) * MIB:
        mib = -(-gradient_bytes // MIB)
        raise ValueError(
            f"sync.hook=powersgd bucket_mb={parts.bucket_mb:g}: over Gloo, torch's hook fails with "
            f"several buckets; use bucket_mb={mib}, or strategy=powersgd"
        )


def waits_of_ddp(model: nn.Module) -> tuple[str, ...]:
    """Return the phases in which DDP waits: before forward it sends buffers, as running means."""
    return ("backward", "forward") if any(True for _ in model.buffers()) else ("backward",)


class LastGradient:
    """A hook on the parameter whose gradient came last in the first step; all count as one bucket.

    DDP's own hook runs after it, and DDP waits when backward ends. Each hook costs a microsecond,
    so the others are removed after the first step, which marks nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clock: Clock | None = None
        self._hooks: dict[str, RemovableHandle] = {}  # in the order in which gradients came
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                self._hooks[name] = cast(RemovableHandle, register(partial(self._ready, name)))

    def end_step(self) -> None:
        """Keep the hook of the last gradient alone."""
        while len(self._hooks) > 1:
            self._hooks.pop(next(iter(self._hooks))).remove()

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _ready(self, name: str, _parameter: Tensor) -> None:
        if len(self._hooks) > 1:
            self._hooks[name] = self._hooks.pop(name)
        elif self.clock:
            self.clock.ready(0, latest=True)  # micro-batches: the last one's counts
