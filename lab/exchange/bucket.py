"""Buckets: gradients that travel together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lab.codec.scratch import ScratchBuffer
from lab.exchange.grouping import group

ALIGNED = 64  # bytes: a multiple of 16-byte loads, and of the unit in which NCCL copies


class ScratchBuffers(defaultdict[str, ScratchBuffer]):
    """Memory that an exchange keeps for one bucket from step to step, by name."""

    def __init__(self) -> None:
        super().__init__(ScratchBuffer)


@dataclass
class GradBucket:
    """The input of an exchange: one flat tensor, and where each parameter lies in it.

    Attributes:
        shapes: shape of each parameter, by name, in the order in which they lie in `flat`.
        flat: float32 [num_values], this rank's gradient before `average`, the mean after it; each
            parameter's values in the order in which they lie in memory. Zeros follow if its length
            must be a multiple of some number.
        step: the optimizer step this exchange belongs to, counted from 0.
        divided: `flat` holds gradient / N before `average`, so that the sum is the mean.
        finite: 0-dim bool tensor, set by an exchange that checks; None: not checked.
        buffers: see ScratchBuffers.
    """

    shapes: dict[str, torch.Size]
    flat: Tensor
    step: int = 0
    divided: bool = False
    finite: Tensor | None = None
    buffers: ScratchBuffers = field(default_factory=ScratchBuffers)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter's name and its range in `flat`."""
        start = 0
        for name, shape in self.shapes.items():
            yield name, start, start + math.prod(shape)
            start += math.prod(shape)

    def divide(self, total: Tensor, size: int) -> None:
        """Turn `total`, the sum of this bucket's values over `size` ranks, into the mean."""
        if not self.divided:
            total.div_(size)

    def __str__(self) -> str:
        return label(self.shapes)


def label(names: Iterable[str]) -> str:
    """Name a bucket after its first parameter."""
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else first


class BucketPlan:
    """The parameters of one bucket, whose gradients it packs into a GradBucket.

    Gradients are gathered into a buffer, and each `.grad` becomes a view of it, so that nothing is
    copied back.

    Args:
        in_place: the single parameter's gradient is exchanged where autograd left it. No other
            gradient may share its memory, as those of parameters that are only viewed and added do.
        multiple: divides the length of `flat`.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], in_place: bool = False, multiple: int = 1
    ) -> None:
        self.parameters = parameters
        num_values = sum(parameter.numel() for parameter in parameters.values())
        self._missing = -num_values % multiple
        self.in_place = in_place and not self._missing
        self._in_memory = _aligned_first(parameters)
        self.shapes = {name: parameter.shape for name, parameter in self._in_memory.items()}
        self._buffers = ScratchBuffers()
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def pack(self, step: int, divided: bool = False) -> GradBucket:
        """Return this step's bucket. A parameter that backward did not reach counts as zeros."""
        parameters = list(self._in_memory.values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if self.in_place and gradients[0].stride() == parameters[0].stride():
            flat = gradients[0].as_strided((gradients[0].numel(),), (1,))
        else:
            flat, gradients = self._gather(parameters, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return GradBucket(self.shapes, flat, step, divided, buffers=self._buffers)

    def __str__(self) -> str:
        return label(self.shapes)

    def _gather(
        self, parameters: list[nn.Parameter], gradients: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        if self._buffer is None:
            sizes = [parameter.numel() for parameter in parameters]
            self._buffer = gradients[0].new_zeros(sum(sizes) + self._missing)
            parts = self._buffer[: sum(sizes)].split(sizes)
            # A view has its parameter's layout (e.g. channels-last), as fused optimizers expect.
            self._views = [
                part.as_strided(parameter.shape, parameter.stride())
                for part, parameter in zip(parts, parameters, strict=True)
            ]
        torch._foreach_copy_(self._views, gradients)
        return self._buffer, self._views


def plan(
    model: nn.Module,
    bucket_mb: float | None,
    order: list[str] | None = None,
    only: Container[str] | None = None,
    multiple: int = 1,
) -> list[BucketPlan]:
    """Divide the trainable parameters into buckets, in the order in which backward fills them.

    Args:
        model: parameters shared between modules are taken once. A model with the attribute
            bytes_scale stands for one with larger parameters, and gets the buckets of that one.
        bucket_mb: largest bucket in MiB (2**20 bytes), the first at most 1. A parameter of this
            size, or of grouping.LARGE_BYTES, has its own bucket; the others share one if they sum
            to less. None: one bucket for all. 0: one per module.
        order: names of the parameters as their gradients arrive. None: the reverse order of
            registration, in which gradients usually arrive.
        only: names of the parameters to divide. None: all.
        multiple: divides the length of each bucket's flat tensor.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad][::-1]
    named = [(name, p) for name, p in trainable if only is None or name in only]
    if order is not None:
        position = {name: index for index, name in enumerate(order)}
        named.sort(key=lambda pair: position[pair[0]])
    fresh = _with_fresh_gradients(model)
    sizes = [(name, p.nbytes) for name, p in named]
    groups = group(sizes, bucket_mb, getattr(model, "bytes_scale", 1.0))
    by_name = dict(named)
    return [
        BucketPlan(
            {name: by_name[name] for name in names},
            in_place=len(names) == 1 and names[0] in fresh,
            multiple=multiple,
        )
        for names in groups
    ]


def _aligned_first(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Move parameters of odd sizes to the end, so that all others are aligned for wide loads."""
    return dict(sorted(parameters.items(), key=lambda named: named[1].nbytes % ALIGNED != 0))


def _with_fresh_gradients(model: nn.Module) -> set[str]:
    """Return the names of parameters whose gradients share no memory with another gradient."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, layers)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}
