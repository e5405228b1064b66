"""Buckets: gradients that travel together."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from lab.codec.layout import spans
from lab.exchange.grouping import group
from lab.exchange.layout import as_real, dense, is_rows_first, order_of, trainable, travel_shape

VERSION = attrgetter("_version")  # of a tensor: counts its changes
ALIGNED = 64  # bytes: a multiple of 16-byte loads, and of the unit in which NCCL copies


class Plans(dict[object, Any]):
    """All that exchanges keep for one bucket from step to step, by keys of theirs."""

    def scratch(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return uninitialised memory like `like`; that of earlier calls with `name` is invalid.

        Memory is kept: fresh allocations cost page faults.
        """
        memory, num_values = self.get(name), math.prod(shape)
        if (
            memory is None
            or memory.numel() < num_values
            or memory.dtype != like.dtype
            or memory.device != like.device
        ):
            memory = self[name] = like.new_empty(num_values)
        return memory[:num_values].view(shape)


@dataclass
class GradBucket:
    """The input of an exchange: one flat tensor, and where each parameter lies in it.

    Attributes:
        shapes: shape of each parameter's travelling values, by name, in the order in which they lie
            in `flat`. None is empty.
        flat: [num_values], this rank's gradient before `average`, the mean after it; each
            parameter's values as lab.exchange.layout.travelling has them, so a matrix's rows follow
            each other. Its dtype is one of Exchange.dtypes. Zeros follow if its length must be a
            multiple of some number.
        step: the optimizer step this exchange belongs to, counted from 0.
        divided: `flat` holds gradient / N before `average`, so that the sum is the mean.
        finite: 0-dim bool tensor, set by an exchange that checks; None: not checked.
        plans: of this bucket's exchanges.
        copied: gradients that are no views of `flat`, each with its values in `flat`, to which
            `unpack` copies the mean.
        lacking: names of parameters without a gradient on this rank, which count as zeros.
    """

    shapes: dict[str, torch.Size]
    flat: Tensor
    step: int = 0
    divided: bool = False
    finite: Tensor | None = None
    plans: Plans = field(default_factory=Plans)
    copied: Sequence[tuple[Tensor, Tensor]] = ()
    lacking: Sequence[str] = ()

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter's name and its range in `flat`."""
        return spans(self.shapes)

    def divide(self, total: Tensor, size: int) -> None:
        """Turn `total`, the sum of this bucket's values over `size` ranks, into the mean."""
        if not self.divided:
            total.div_(size)

    def unpack(self) -> None:
        """Copy the mean to the gradients that are no views of `flat`."""
        for gradient, values in self.copied:
            gradient.copy_(values)

    def __str__(self) -> str:
        return label(self.shapes)


def label(names: Iterable[str]) -> str:
    """Name a bucket after its first parameter, if it has any."""
    first, *rest = [*names] or ["no values"]
    return f"{first} and {len(rest)} more" if rest else first


class BucketPlan:
    """The parameters of one bucket, whose gradients it packs into a GradBucket.

    Gradients are gathered into a buffer, and each `.grad` becomes a view of it, so that nothing is
    copied back. Gradients that cannot be views, because their values travel in another order or
    dtype, are copied there and back.

    Args:
        in_place: the single parameter's gradient is exchanged where autograd left it. No other
            gradient may share its memory; see `in_one_memory`.
        multiple: divides the length of `flat`.
        dtype: of the buffer; None: that of the parameters, which are all of one.

    Attributes:
        reordered: a parameter whose values travel in another order than before, as a layout has
            changed, and so unlike what an exchange keeps of them; empty: there is none.

    Exchanges write to memory by other tensors than those in `.grad`, so a version of one of these
    changes only if somebody else changes it, in spite of the exchange.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        in_place: bool = False,
        multiple: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = parameters
        # Parameters of odd sizes come last, so that all others are aligned for wide loads.
        self._in_flat = dict(sorted(parameters.items(), key=lambda p: p[1].nbytes % ALIGNED != 0))
        self._ordered = list(self._in_flat.values())
        self.shapes = {name: travel_shape(p) for name, p in self._in_flat.items()}
        self.num_values = sum(map(math.prod, self.shapes.values()))
        self._missing = -self.num_values % multiple
        self.dtype = dtype or next(iter(parameters.values())).dtype
        self.in_place = in_place and not self._missing
        self.label = label(self.shapes)
        self._left: tuple[list[Any], list[int]] = [], []  # gradients under way, their versions
        self._plans = Plans()
        self._buffer: Tensor | None = None
        self._values: list[Tensor] = []  # of each parameter in the buffer, like its gradient
        self._places: list[int] = []  # their addresses
        # One that Module.to lays out anew for all others, as in channels-last, and its values.
        self._image: tuple[Tensor, Tensor] | None = None
        self._dtypes = [p.dtype for p in self._ordered]
        self._strides: list[tuple[int, ...]] = []  # of the values, as they travelled last
        self.reordered = ""
        self._seen: list[Tensor | None] = []  # by Python, which is fast as long as it holds them

    def twin(self) -> BucketPlan:
        """Return a plan for the same gradients in other memory.

        Both share what exchanges keep for a bucket, so only one may be under way.
        """
        other = copy(self)
        other._buffer, other._values = None, []
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @cached_property
    def has_views(self) -> bool:
        """True if all gradients can be views of the buffer; a sync may move weights until then."""
        return all(self._are_views)

    def pack(self, step: int, divided: bool = False) -> GradBucket:
        """Return this step's bucket. A parameter without a gradient counts as zeros, and gets one.

        `.grad` of each parameter is the mean once the exchange has ended and `unpack` was called.
        """
        if self.in_place and (flat := self._in_place()) is not None:
            return GradBucket(self.shapes, flat, step, divided, plans=self._plans)
        bucket = GradBucket(self.shapes, self._allocated(), step, divided, plans=self._plans)
        if (image := self._image) and image[0].stride() != image[1].stride():
            for parameter in self._ordered:  # gradients may lie where the new views will
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            self._make_views(bucket.flat)
        elif [*map(Tensor.data_ptr, self._values)] != self._places:
            self._make_views(bucket.flat)
        if not self.has_views or not self._copied_at_once():
            self._pack_each(bucket)
        self._seen = []
        return bucket

    def addresses(self) -> list[tuple[int, str]]:
        """Return where each dense gradient begins in memory, and its parameter's name."""
        grads = ((p.grad, name) for name, p in self._in_flat.items())
        return [(g.data_ptr(), n) for g, n in grads if g is not None and g.layout == torch.strided]

    def has_gradients(self, fresh: bool = False) -> bool:
        """Tell whether all parameters have a gradient; `fresh`: made since `pack` took the last."""
        self._allocated()
        self._seen = seen = [parameter.grad for parameter in self._ordered]
        # Without loops in Python: backward waits.
        return all(map(is_not, seen, repeat(None))) and not (
            fresh and any(map(is_, seen, self._values))
        )

    def leave(self) -> None:
        """Note the gradients that `pack` has left, while backward or a loop may change them."""
        gradients: list[Any] = self._values  # without loops in Python, as in has_gradients
        if len(self._ordered) == 1 or not self.has_views:
            gradients = [parameter.grad for parameter in self._ordered]
        self._left = gradients, [*map(VERSION, gradients)]

    def changed(self) -> str | None:
        """Return the name of a parameter whose gradient was changed since `leave`, if any."""
        (gradients, versions), self._left = self._left, ([], [])
        now: list[Any] = [parameter.grad for parameter in self._ordered[: len(gradients)]]
        if all(map(is_, now, gradients)) and [*map(VERSION, now)] == versions:
            return None
        rows = zip(self._in_flat, now, gradients, versions, strict=True)
        return next(name for name, one, then, was in rows if one is not then or one._version != was)

    def __str__(self) -> str:
        return self.label

    @cached_property
    def _are_views(self) -> list[bool]:
        """Which gradients can be views of the buffer."""
        return [p.dtype == self.dtype and is_rows_first(p) for p in self._in_flat.values()]

    def _in_place(self) -> Tensor | None:
        """Return the single gradient's own memory, [num_values], if it can be exchanged there."""
        if not self.has_views:
            return None
        (parameter,) = self._ordered
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.stride() != parameter.stride():
            return None
        self._note_order([gradient])
        return gradient.data.as_strided((gradient.numel(),), (1,))

    def _copied_at_once(self) -> bool:
        """Copy all gradients and make them views, unless one is missing, sparse or of its kind."""
        gradients: list[Any] = [parameter.grad for parameter in self._ordered]
        try:  # to look at each one first would take as long as to copy it
            torch._foreach_copy_(self._values, gradients)
        except (TypeError, RuntimeError):
            return False
        for parameter, values in zip(self._ordered, self._values, strict=True):
            parameter.grad = values
        return True

    def _pack_each(self, bucket: GradBucket) -> None:
        """Copy gradients of any kind into the buffer, and note what `unpack` is to copy back."""
        copied: list[tuple[Tensor, Tensor]] = []
        lacking: list[str] = []
        rows = zip(self._in_flat.items(), self._values, self._are_views, strict=True)
        for (name, parameter), values, is_view in rows:
            if parameter.grad is None:
                lacking.append(name)
                values.zero_()
                gradient = torch.empty_like(parameter)
            else:
                gradient = dense(parameter.grad)
                values.copy_(as_real(gradient))
            parameter.grad = values if is_view else gradient
            if not is_view:
                copied.append((as_real(gradient.data), values))
        bucket.copied, bucket.lacking = copied, lacking

    def _allocated(self) -> Tensor:
        """Return the buffer; make it, and its views, for the first step."""
        if self._buffer is not None:
            return self._buffer
        first = next(iter(self._in_flat.values()))
        self._buffer = buffer = first.new_zeros(self.num_values + self._missing, dtype=self.dtype)
        self._make_views(buffer)
        return buffer

    def _make_views(self, buffer: Tensor) -> None:
        """Make the views; anew if something has given other memory to the gradients that they are.

        Module.to and `grad.data = ...` do so: the tensors stay the same, and their memory does not.

        Raises: RuntimeError: a parameter has another dtype than when buckets were planned.
        """
        for (name, p), dtype in zip(self._in_flat.items(), self._dtypes, strict=True):
            if p.dtype != dtype:
                raise RuntimeError(
                    f"{name}: is {p.dtype} now, and was {dtype} when its exchange was set up; "
                    "convert the model before you set up the exchange"
                )
        for known in ("has_views", "_are_views"):  # a layout may have changed
            self.__dict__.pop(known, None)
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = buffer[: self.num_values].split(sizes)
        # A view has its parameter's layout (e.g. channels-last), as fused optimizers expect.
        self._values = [
            (part.as_strided(p.shape, p.stride()) if is_rows_first(p) else part.view(shape)).data
            for part, p, shape in zip(parts, self._ordered, self.shapes.values(), strict=True)
        ]
        self._places = [values.data_ptr() for values in self._values]
        self._note_order(self._values)
        rows = zip(self._ordered, self._values, strict=True)
        self._image = next(
            (row for row in rows if row[0].dim() > 3 and is_rows_first(row[0])), None
        )

    def _note_order(self, laid_out: list[Tensor]) -> None:
        """Note the order in which values travel, and whether it is another than before."""
        before, self._strides = self._strides, [values.stride() for values in laid_out]
        if before == self._strides:
            return
        for name, was, values in zip(self._in_flat, before, laid_out, strict=False):
            if order_of(was, values.shape) != order_of(values.stride(), values.shape):
                self.reordered = name


def plan(
    model: nn.Module,
    bucket_mb: float | None,
    order: list[str] | None = None,
    only: Container[str] | None = None,
    multiple: int = 1,
    carrier: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    copied: Container[str] = (),
) -> list[BucketPlan]:
    """Divide the trainable parameters into buckets, in the order in which backward fills them.

    Parameters of several dtypes have buckets of their own; those without values have none.

    Args:
        model: parameters shared between modules are taken once. A model with the attribute
            bytes_scale stands for one with larger parameters, and gets the buckets of that one;
            one with on_gpu, those of a model on a GPU.
        bucket_mb: size of a bucket in MiB (2**20 bytes), of the first at most 1; see
            lab.exchange.grouping. None: one bucket for all. 0: one per module.
        order: names of the parameters as their gradients arrive. None: the reverse order of
            registration, in which gradients usually arrive.
        only: names of the parameters to divide. None: all.
        multiple: divides the length of each bucket's flat tensor.
        carrier: returns the real dtype in which gradients of a dtype travel.
        copied: names of parameters whose gradients are not exchanged in place.
    """
    named = [
        (name, p)
        for name, p in reversed(trainable(model).items())
        if p.numel() and (only is None or name in only)
    ]
    if order is not None:
        position = {name: index for index, name in enumerate(order)}
        named.sort(key=lambda pair: position[pair[0]])
    # Their own forward makes gradients of fresh memory. No subclasses: theirs may do more.
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    fresh = {id(m.weight) for m in model.modules() if type(m) in layers}
    scale = getattr(model, "bytes_scale", 1.0)
    on_gpu = getattr(model, "on_gpu", any(p.is_cuda for _, p in named))
    by_name, ready_at = dict(named), {name: place for place, (name, _) in enumerate(named)}
    groups: list[list[str]] = []
    for dtype in dict.fromkeys(p.dtype for _, p in named):
        sized = [(n, p.nbytes) for n, p in named if p.dtype == dtype]
        groups += group(sized, bucket_mb, scale, on_gpu)
    if len({p.dtype for _, p in named}) > 1:
        groups.sort(key=lambda names: max(map(ready_at.__getitem__, names)))
    return [
        BucketPlan(
            {name: by_name[name] for name in names},
            in_place=len(names) == 1 and id(by_name[names[0]]) in fresh and names[0] not in copied,
            multiple=multiple,
            dtype=carrier(by_name[names[0]].dtype),
        )
        for names in groups
    ]


def in_one_memory(buckets: Iterable[BucketPlan]) -> set[str]:
    """Return the parameters whose gradient lies where another's does.

    Backward gives one memory to all parts of a stack that is summed: `torch.stack([a, b]).sum(0)`.
    """
    names: dict[int, set[str]] = {}  # several buckets may be parts of one gradient
    for bucket in buckets:
        for address, name in bucket.addresses():
            names.setdefault(address, set()).add(name)
    return {name for those in names.values() if len(those) > 1 for name in those}
