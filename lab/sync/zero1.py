"""Syncs in which a rank updates weights for all: each its part (Zero1), or rank 0 everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.comm import Collective
from lab.exchange.base import Exchange
from lab.exchange.bucket import BucketPlan, GradBucket
from lab.exchange.layout import is_rows_first, travelling
from lab.exchange.paths import ReduceBroadcast
from lab.exchange.scatter import InCodec, scatter_of
from lab.sync.base import Shard, SyncParts, SyncState
from lab.sync.gradsync import GradSync
from lab.sync.pattern import root_update, zero1


class RootUpdate(GradSync):
    """A sync that reduces gradients to rank 0, and broadcasts its updated weights on the same path.

    Caffe's P2PSync, Torch7's nn.DataParallelTable and TensorFlow's parameter server share this
    pattern. The other ranks are left without gradients, so their optimizers do nothing and hold no
    momentum. Those systems send weights when the next forward begins; here they are sent right
    after the update, with nothing in between, so that replicas are equal after every step.

    The weights of a bucket share one block of memory, as Caffe's do, and are sent from there.

    The exchange is the path, a tree or a star. `overlap` applies to the gradients.

    Raises:
        ValueError: an exchange that does not pass through rank 0.
    """

    def __init__(self, parts: SyncParts) -> None:
        self.path = require_reduce_broadcast(parts.exchange)
        super().__init__(parts, root_update(parts.overlap))

    def finish(self) -> Tensor | None:
        """Wait until rank 0 has the mean gradient; other ranks keep none."""
        finite = super().finish()
        if self.comm.rank:
            for bucket in self.buckets:
                for parameter in bucket.parameters.values():
                    parameter.grad = None
        return finite

    def after_update(self, last: bool) -> None:
        for bucket, weights in zip(self.buckets, self._weights, strict=True):
            label = f"{type(self.path).__name__} of weights {bucket}"
            self.worker.submit(label, partial(self._from_root, weights))
        self.worker.wait()

    def _use(self, buckets: list[BucketPlan]) -> None:
        super()._use(buckets)
        for bucket in buckets:
            refuse_complex("root_update", bucket.parameters)
        self._weights = [flatten(list(bucket.parameters.values())) for bucket in buckets]

    def _stages(self, bucket: GradBucket) -> Iterator[Collective]:
        self.path.to_root(bucket, self.comm)
        bucket.unpack()
        yield from ()

    def _from_root(self, weights: Tensor) -> Iterator[Collective]:
        self.path.from_root(weights, self.comm)
        yield from ()


def require_reduce_broadcast(exchange: Exchange) -> ReduceBroadcast:
    """Return an exchange that passes through rank 0. ValueError: it does not."""
    if not isinstance(exchange, ReduceBroadcast) or not exchange.in_halves:
        raise ValueError(
            f"exchange={type(exchange).__name__}: only the root updates, so an exchange "
            "must send to the root and back; use tree (with exchange.chunk_mb=null) or star"
        )
    return exchange


def flatten(parameters: list[nn.Parameter], multiple: int = 1) -> Tensor:
    """Move `parameters` into one block of memory, each in the order in which its values travel.

    Args:
        parameters: real and of one dtype. One that is not row after row becomes row-major.
        multiple: divides the block's length; zeros fill it up.

    Returns:
        [number of values, rounded up].
    """
    rows = [travelling(p, p) for p in parameters]
    missing = -sum(map(len, rows)) % multiple
    flat = torch.cat([*rows, rows[0].new_zeros(missing)]) if len(rows) > 1 or missing else rows[0]
    parts = torch.split(flat[: len(flat) - missing], [len(row) for row in rows])
    for parameter, part in zip(parameters, parts, strict=True):
        if is_rows_first(parameter):
            parameter.data = part.as_strided(parameter.shape, parameter.stride())
        else:
            parameter.data = part.view(parameter.shape)
    return flat


def refuse_complex(strategy: str, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse complex parameters, whose weights a sync would have to move as pairs."""
    for name, parameter in parameters.items():
        if parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is {kind}, but strategy={strategy} can send only real-valued weights; "
                "use a strategy that averages gradients, such as allreduce"
            )


class Zero1(GradSync):
    """A sync that shards the optimizer's state (ZeRO, stage 1: Rajbhandari et al. 2020, section 5).

    Each bucket is divided into N equal parts, across the borders of parameters. Its gradients are
    reduce-scattered, during backward with `overlap`: rank r receives the mean of part r. It updates
    part r of the weights, which it then sends to all ranks, while it updates its part of the next
    bucket. Both ways together send as much as an all-reduce: 2(N-1)/N of the gradients.

    Weights of a bucket share one block of memory, and `optimized` is made of views of this rank's
    parts. Buckets keep the order in which they are planned first, since a part's state lies on one
    rank.

    Gradients travel as the exchange's first half has them: an all-reduce's in its `dtype`, others'
    as messages of their codec, of which the exchange keeps what they leave out. Sums are in float32
    (over NCCL in its own order), and weights travel as they are.

    Raises:
        ValueError: the exchange has no reduce-scatter, or a model has too few values for some rank
            to have any.
    """

    def __init__(self, parts: SyncParts) -> None:
        self._scatter = scatter_of(parts.exchange)
        self._spares: list[Tensor] = []  # flat, of buckets that are not under way
        # A part that is not finite is so on one rank, but messages spoil residuals on all.
        self._checks_finite = parts.precision == "fp16" or isinstance(self._scatter, InCodec)
        super().__init__(parts, zero1(parts.overlap), multiple=parts.comm.size)
        self.order = [name for bucket in self.buckets for name in bucket.parameters]

    def optimized(self, model: nn.Module) -> nn.Module:
        return nn.ParameterList(shard.values for shard in self.shards.values())

    def state_dict(self) -> SyncState:
        """Keep no order of gradients: an optimizer's state of a part lies on one rank."""
        return {}

    def load_state_dict(self, state: SyncState) -> None: ...

    def finish(self) -> Tensor | None:
        """Leave this rank's part of the mean in the gradients of its slices, and nowhere else."""
        super().finish()
        for bucket, mean in zip(self.buckets, self._means, strict=True):
            for parameter in bucket.parameters.values():
                parameter.grad = None
            for name, place in self._places[str(bucket)].items():
                values = self.shards[name].values
                own = mean[place : place + values.numel()].view_as(values)
                values.grad = None if name in self.nowhere else own.to(values.dtype)
        finite = None
        if self._checks_finite:
            num_bad = (
                torch.stack([mean.isfinite().all() for mean in self._means])
                .all()
                .logical_not()
                .float()
            )
            self._alone("finite gradients", partial(self.comm.iall_reduce, num_bad))
            finite = num_bad == 0
        self._means.clear()
        return finite

    def norm(self, own: Tensor) -> Tensor:
        total = own.square()
        self._alone("norm of gradients", partial(self.comm.iall_reduce, total))
        return total.sqrt()

    def update(self, optimizer: Optimizer) -> None:
        """Update a bucket after the other, and begin to send each one's weights."""
        gradients = {name: shard.values.grad for name, shard in self.shards.items()}
        optimizer.zero_grad()
        for bucket, weights in zip(self.buckets, self._weights, strict=True):
            for name in self._places[str(bucket)]:
                self.shards[name].values.grad = gradients.pop(name)
            optimizer.step()  # passes over parameters without gradients
            optimizer.zero_grad()
            label = f"weights {bucket}"
            job = partial(self._gather, weights)
            if self.clock:
                job = self.clock.traced(label, job, coded=False)
            self.worker.submit(label, job)

    def after_update(self, last: bool) -> None:
        self.worker.wait()

    def _use(self, buckets: list[BucketPlan]) -> None:
        super()._use(buckets)
        self._means: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._places: dict[str, dict[str, int]] = {}  # where slices begin in a part, by bucket
        self.shards = {}
        for bucket in buckets:
            refuse_complex("zero1", bucket.parameters)
            in_memory = [bucket.parameters[name] for name in bucket.shapes]
            self._weights.append(flatten(in_memory, self.comm.size).view(self.comm.size, -1))
            self._places[str(bucket)] = self._divide(bucket, self._weights[-1])
        rank_of_last = max(
            (bucket.num_values - 1) // weights.shape[1]
            for bucket, weights in zip(self.buckets, self._weights, strict=True)
        )
        if rank_of_last < self.comm.size - 1:
            raise ValueError(
                f"world_size={self.comm.size}: strategy=zero1 leaves rank {self.comm.size - 1} "
                "with an empty shard; use fewer ranks or larger buckets"
            )

    def _divide(self, bucket: BucketPlan, weights: Tensor) -> dict[str, int]:
        """Add this rank's slices of a bucket to `shards`; return where they begin in its part."""
        part, places, begin = weights.shape[1], dict[str, int](), 0
        low = self.comm.rank * part
        for name, shape in bucket.shapes.items():
            size = math.prod(shape)
            start, stop = max(begin, low), min(begin + size, low + part)
            if start < stop:
                row = weights[self.comm.rank, start - low : stop - low]
                own_shape = [*[1] * (len(shape) - 1), -1] if shape else []
                values = nn.Parameter(row.view(own_shape))
                self.shards[name] = Shard(values, start - begin, stop - begin)
                places[name] = start - low
            begin += size
        return places

    def _stages(self, bucket: GradBucket) -> Iterator[Collective]:
        if self.loss_scale != 1.0:
            bucket.flat.div_(self.loss_scale)
        parts = bucket.flat.view(self.comm.size, -1)
        mean = parts[self.comm.rank]  # received in place: what was sent is free by then
        self._means.append(mean)
        if isinstance(self._scatter, InCodec):
            yield from self._scatter.mean_of(bucket, mean, self.comm)
            return
        spare = self._take_spare(parts) if self._scatter.needs_spare(self.comm.backend) else None
        memory = None if spare is None else spare[: parts.numel()].view_as(parts)
        yield self._scatter.begin(mean, parts, self.comm, memory)
        bucket.divide(mean, self.comm.size)
        if spare is not None:
            self._spares.append(spare)

    def _take_spare(self, like: Tensor) -> Tensor:
        """Return flat memory for `like`: the least that is large enough, or else fresh."""
        enough = [i for i, each in enumerate(self._spares) if len(each) >= like.numel()]
        if not enough:
            return like.new_empty(like.numel())
        return self._spares.pop(min(enough, key=lambda i: len(self._spares[i])))

    def _gather(self, weights: Tensor) -> Iterator[Collective]:
        yield self.comm.iall_gather_rows(weights)
