"""Stages of exchanges in messages of a codec, recorded from their own code.

An exchange runs on tensors without values, over a comm that sends nothing. The comm notes what it
is asked to send, and kernels note how much memory they would pass over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lab.codec.base import Codec
from lab.codec.layout import Layout
from lab.distributed.collective import Collective, Done
from lab.distributed.comm import Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.coded import Coded, TwoStage
from lab.exchange.gather import gather_bytes
from lab.exchange.scatter import Layout as Columns
from lab.exchange.scatter import scatter_of
from lab.settings.config import build
from lab.simulate.load import Load, Settings, Shape

META = torch.device("meta")
AFTER_WARMUP = 2**62  # a step


class Moved(NamedTuple):
    """Bytes of memory that a kernel reads and writes; `in_torch`: that plain torch would."""

    num_bytes: float
    in_torch: float | None


class Collected(NamedTuple):
    """A collective: the method of Network that tells its cost, and that method's argument."""

    call: str
    num_bytes: float


Event = Moved | Collected


def add_stages(load: Load, part: str = "whole") -> None:
    """Append the stages of a bucket.

    Args:
        part: "whole"; of an exchange whose ranks decode the same message at last (see Relay), "sum"
            until they have it, and "decode" after that; "scatter": its reduce-scatter alone, and
            "gather": an all-gather in bytes, of shapes that all ranks have as much of.
    """
    for event in _events(_key(load.exchange), tuple(load.shapes), load.N, part):
        if isinstance(event, Moved):
            load.codec(event.num_bytes, in_torch=event.in_torch)
        else:
            load.wire(getattr(load.network, event.call)(event.num_bytes))


def message_bytes(load: Load) -> int:
    """Return the bytes of the message that all ranks decode at last."""
    return _message_bytes(_key(load.exchange), tuple(load.shapes), load.N)


def require_scatter(settings: Settings) -> None:
    """Refuse an exchange without a reduce-scatter. ValueError: see lab.exchange.scatter."""
    scatter_of(_exchange(_key(settings)))


def _key(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True, default=str)


def _exchange(settings: str) -> Any:
    return build(cast(DictConfig, OmegaConf.create(json.loads(settings))))


def _bucket(shapes: Sequence[Shape]) -> GradBucket:
    named = {str(number): torch.Size(shape) for number, shape in enumerate(shapes)}
    flat = torch.empty(sum(shape.numel() for shape in named.values()), device=META)
    return GradBucket(named, flat, AFTER_WARMUP)


@lru_cache(maxsize=10_000)
def _message_bytes(settings: str, shapes: tuple[Shape, ...], size: int) -> int:
    exchange: TwoStage = _exchange(settings)
    return exchange.message_bytes(_bucket(shapes), size)


@lru_cache(maxsize=10_000)
def _events(settings: str, shapes: tuple[Shape, ...], size: int, part: str) -> tuple[Event, ...]:
    """Record one exchange of a bucket: the whole of it, or a part, as `add_stages` names it."""
    exchange: Coded = _exchange(settings)
    found, bucket = list[Event](), _bucket(shapes)
    kernels = Noting(exchange.codec, found.append)
    exchange.codec.kernels = lambda device: kernels
    comm = Recorder(size, found.append)
    parts = bucket.flat.view(size, -1) if part in ("scatter", "gather") else bucket.flat
    if part == "whole":
        _run(exchange.stages(bucket, comm))
    elif part == "scatter":
        scatter_of(exchange).sum(torch.empty_like(parts[0]), parts, comm, Columns({}))
    elif part == "gather":
        gather_bytes(bucket.flat, parts[0], comm, {}, exchange.codec)
    else:
        assert isinstance(exchange, TwoStage)
        num_bytes = exchange.message_bytes(bucket, size)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=META)
        if part == "sum":
            _run(exchange.sum(bucket, comm, message))
        else:
            exchange.decode(message, bucket, size, size)
    return tuple(found)


def _run(stages: Any) -> None:
    for collective in stages:
        collective.wait()


class Recorder(Comm):
    """Rank 0 of `size`, whose collectives are noted and move nothing."""

    backend = "none"

    def __init__(self, size: int, note: Callable[[Event], None]) -> None:
        super().__init__(0, size)
        self._note = note

    def _iall_reduce(self, tensor: Tensor) -> Collective:
        return self._noted("all_reduce", tensor.nbytes)

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective:
        return self._noted("all_gather", tensor.nbytes)

    def _iall_to_all(self, output: Tensor, tensor: Tensor) -> Collective:
        return self._noted("all_to_all", tensor.nbytes / self.size)

    def _ibroadcast(self, tensor: Tensor, source: int) -> Collective:
        raise NotImplementedError("no exchange broadcasts")

    def _noted(self, call: str, num_bytes: float) -> Done:
        self._note(Collected(call, num_bytes))
        return Done()


class Noting:
    """Kernels that do nothing but note what theirs move; see lab.codec.base.Kernels.

    Plain torch reads and writes `codec.in_torch` bytes for a value, and 12 to add one to another.
    """

    def __init__(self, codec: Codec, note: Callable[[Event], None]) -> None:
        self._codec, self._note = codec, note

    def encode(
        self, layout: Layout, values: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        n, keeps = layout.num_values, residual is not None
        moved = (4 + 8 * keeps) * n + layout.num_bytes + self._codec.also_moved(layout)
        self._moved(moved, lambda write, read: (write + keeps * (read + 24)) * n)

    def add_up(
        self, layout: Layout, messages: Tensor, out: Tensor, divisor: int, finite: Tensor
    ) -> None:
        n, count = layout.num_values, len(messages)
        moved = 4 * n + count * layout.num_bytes
        self._moved(moved, lambda write, read: (count * read + 12 * (count - 1)) * n)

    def reduce(
        self, layout: Layout, messages: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        n, count, keeps = layout.num_values, len(messages), residual is not None
        moved = 8 * keeps * n + (count + 1) * layout.num_bytes
        self._moved(moved, lambda write, read: (count * (read + 12) + write) * n)

    def _moved(self, num_bytes: float, in_torch: Callable[[float, float], float]) -> None:
        per_value = self._codec.in_torch
        self._note(Moved(num_bytes, None if per_value is None else in_torch(*per_value)))
