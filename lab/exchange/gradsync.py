"""GradSync: when gradients are exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.bucket import Bucket, plan
from lab.exchange.exchange import Exchange


class GradSync:
    """Averages the gradients of a model over the ranks, once per optimizer step.

    A context manager: hooks live between `__enter__` and `__exit__`. One step is

        for each micro-batch:
            with sync.micro_batch(last=...):
                sync.module(images) ... loss.backward()
        finite = sync.finish()

    With `overlap`, gradient hooks count down each bucket during the last backward and hand full
    buckets to the worker, always in bucket order: all ranks must start the same exchanges in the
    same order, while their gradients may arrive in different ones. What backward did not complete
    (unused parameters count as zeros) follows in `finish`. Without `overlap`, everything does.

    Args:
        model: already on its device, the same weights on all ranks; names its parameters.
        module: what runs forward: the model, or its compiled form.
        exchange: how one bucket is averaged.
        comm: over what.
        worker: where exchanges run.
        overlap: start exchanges from hooks.
        bucket_mb: see lab.exchange.bucket.plan.

    Raises:
        ValueError: the exchange cannot run over this comm.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        exchange: Exchange,
        comm: Comm,
        worker: Worker,
        *,
        overlap: bool = False,
        bucket_mb: float | None = None,
    ) -> None:
        if exchange.needs_send_recv and comm.no_send_recv:
            name = type(exchange).__name__
            raise ValueError(f"exchange={name}: sends from rank to rank; {comm.no_send_recv}")
        self.module = module
        self.exchange = exchange
        self.comm = comm
        self.worker = worker
        self.overlap = overlap
        self.step = 0
        self.loss_scale = 1.0
        self.buckets = plan(model, bucket_mb)
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._exchanged: list[Bucket] = []
        self._armed = False
        self._hooks: list[RemovableHandle] = []

    @property
    def keeps_replicas_equal(self) -> bool:
        return self.exchange.keeps_replicas_equal

    def __enter__(self) -> Self:
        if self.overlap:
            for index, bucket in enumerate(self.buckets):
                for parameter in bucket.parameters.values():
                    hook = partial(self._gradient_ready, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Forward and backward of one micro-batch. Only the last one's hooks start exchanges."""
        self._armed = last
        yield
        self._armed = False

    def finish(self) -> bool:
        """Exchange what backward did not, and wait for all of it.

        Returns:
            False if an exchange found a gradient that is not finite. All ranks agree.

        Raises:
            Exception: the first error of an exchange.
        """
        while len(self._exchanged) < len(self.buckets):
            self._submit_next()
        self.worker.wait()
        looked = [bucket.finite for bucket in self._exchanged if bucket.finite is not None]
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._exchanged = []
        self.step += 1
        return not looked or bool(torch.stack(looked).all())

    def _gradient_ready(self, index: int, _parameter: torch.Tensor) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        while len(self._exchanged) < len(self.buckets) and self._missing[len(self._exchanged)] == 0:
            self._submit_next()

    def _submit_next(self) -> None:
        bucket = self.buckets[len(self._exchanged)].pack(self.step)
        self._exchanged.append(bucket)
        label = f"{type(self.exchange).__name__} of bucket {bucket}"
        self.worker.submit(label, partial(self._average, bucket))

    def _average(self, bucket: Bucket) -> None:
        if self.loss_scale != 1.0:
            bucket.flat.div_(self.loss_scale)  # residuals are kept in units of true gradients
        self.exchange.average(bucket, self.comm)
