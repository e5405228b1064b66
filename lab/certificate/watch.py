"""One rank's observation of a step: the gradients it makes, and those it is left with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.certificate.sketch import NUM_IMAGES, Sketch, in_memory, norm
from lab.distributed.comm import Comm
from lab.exchange.base import Exchange

COMPILED = "_orig_mod."  # torch.compile puts it into names


@dataclass(frozen=True)
class Seen:
    """Images of a step's gradients, float64, by parameter (P); of all ranks: [N, ...].

    Those of gradients have two rows (H), of the whole and of its head, or one, of the head.

    Attributes:
        start: of weights and buffers before the first step [P + B, K]; later [0, K].
        own: of this rank's own gradient, before any exchange [P, H, K].
        sent: of the part of it that did not stay behind as a compression error [P, H, K].
        delivered: of the gradient that the optimizer will see [P, H, K].
        reached: 1 where backward made a gradient [P].
        filled: 1 where there is a gradient for the optimizer [P].
        scale: the largest norm of anything that was added up [P], of which roundings are a share.
        largest: the largest magnitude of a value of `own` [P]; 0 where no bound needs it.
        late: 1 where a parameter of Watch.late_names has a gradient.
    """

    start: Tensor
    own: Tensor
    sent: Tensor
    delivered: Tensor
    reached: Tensor
    filled: Tensor
    scale: Tensor
    largest: Tensor
    late: Tensor

    def of_all(self, gather: Callable[[Tensor], Tensor]) -> Seen:
        """Return the same of all ranks, in host memory. A collective call."""
        mine = [getattr(self, field.name) for field in fields(self)]
        rows = gather(torch.cat([each.double().flatten() for each in mine]).cpu())
        parts = rows.split([each.numel() for each in mine], dim=1)
        shapes = [(len(rows), *each.shape) for each in mine]
        return Seen(*(part.reshape(s) for part, s in zip(parts, shapes, strict=True)))

    def row(self, index: int) -> Seen:
        """Return the same with one of the rows: 0 is the first, -1 the head's."""
        one = (each[..., index, :] for each in (self.own, self.sent, self.delivered))
        return replace(self, **dict(zip(("own", "sent", "delivered"), one, strict=True)))

    def is_finite(self) -> bool:
        """Return whether no gradient overflowed on any rank."""
        return all(bool(each.isfinite().all()) for each in (self.own, self.delivered, self.sent))


class Watch:
    """Observes the gradients of a model on one rank, by hooks that run before any exchange's.

    Only images are kept. `own` is what lies in `grad` when backward is done and nothing has been
    exchanged: so micro-batches add up, and a `zero_grad` is noticed.

    Args:
        model: names its parameters.
        on_gradient: called when a gradient appears, before any exchange of it; its argument is
            true for the first one since `reset`.

    Attributes:
        head_only: only the first values of each parameter are looked at.
        bounded: also find the largest gradient, which some exchanges' error bounds need.
    """

    def __init__(self, model: nn.Module, on_gradient: Callable[[bool], None]) -> None:
        self._model, self._tell = model, on_gradient
        self._device = next(model.parameters()).device
        tensors = [*model.parameters(), *model.buffers()]
        self._sketch = Sketch(max(t.numel() for t in tensors), self._device)
        self._hooks: list[RemovableHandle] = []
        self.parameters = _trainable(model)
        self.head_only = False
        self.bounded = False
        self.reset()
        for name, parameter in self.parameters.items():
            hook = parameter.register_hook(partial(self._on_gradient, name))
            self._hooks.append(hook)
        self._buffers = {name: self._whole(b) for name, b in model.named_buffers()}

    @property
    def names(self) -> list[str]:
        """Names of the trainable parameters."""
        return list(self.parameters)

    @property
    def names_at_start(self) -> list[str]:
        """Names of the rows of `Seen.start`."""
        return [*self.parameters, *self._buffers]

    @property
    def late_names(self) -> list[str]:
        """Names of parameters that have become trainable since."""
        return [name for name in _trainable(self._model) if name not in self.parameters]

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    @property
    def reached(self) -> bool:
        """True if backward has made a gradient since `reset`."""
        return bool(self._own)

    def reset(self) -> None:
        """Forget the gradients of a step that is over."""
        self._own: dict[str, Tensor] = {}
        self._scale: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def kept(self, exchange: Exchange, comm: Comm) -> Tensor:
        """Return the images of the compression errors that this rank keeps: [P, H, K]."""
        images = {name: self._zero() for name in self.parameters}
        for name, start, values in exchange.kept(self.shapes, comm):
            images[name] += self._sketch.image(values, start, self.head_only)
        return torch.stack(list(images.values()))

    def weights(self) -> Tensor:
        """Return the images of all weights: [P, K]."""
        return torch.stack([self._whole(each) for each in self.parameters.values()])

    def images(self, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the images of one tensor for each parameter, or of its weights: [P, H, K]."""
        values = values or self.parameters
        return torch.stack([self._image(values[name], p) for name, p in self.parameters.items()])

    def start(self) -> Tensor:
        """Return the images of weights and buffers: [P + B, K]. Buffers are those of the start."""
        return torch.cat([self.weights(), *(image[None] for image in self._buffers.values())])

    def no_start(self) -> Tensor:
        """Return no images, once the start has been seen: [0, K]."""
        return self._zero()[:0]

    def seen(self, start: Tensor, before: Tensor, after: Tensor, factor: float) -> Seen:
        """Return what this rank has seen of the step.

        Args:
            start: see Seen.
            before, after: errors that this rank kept before the step and after it [P, H, K].
            factor: of the loss, by which gradients were multiplied.
        """
        own = self._stack(self._own, self._zero()) / factor
        trainable = _trainable(self._model)
        grads = {name: p.grad for name, p in self.parameters.items()}
        delivered = {
            n: self._image(g, self.parameters[n]) for n, g in grads.items() if g is not None
        }
        added = [self._stack(self._scale, self._none()) / factor]
        added += [norm(kept).amax(dim=-1) for kept in (before, after)]
        return Seen(
            start=start,
            own=own,
            sent=own + before - after,
            delivered=self._stack(delivered, self._zero()),
            reached=self._flags(name in self._own for name in self.parameters),
            filled=self._flags(grad is not None for grad in grads.values()),
            scale=torch.stack(added).amax(dim=0),
            largest=self._stack(self._largest, self._none()) / factor,
            late=self._flags(trainable[name].grad is not None for name in self.late_names),
        )

    @torch.no_grad()
    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        self._tell(not self._own)
        parameter = self.parameters[name]
        parts = [gradient] if parameter.grad is None else [gradient, parameter.grad]
        images = torch.stack([self._image(part, parameter) for part in parts])
        self._own[name] = images.sum(dim=0)
        sizes = norm(images).max()
        self._scale[name] = torch.maximum(self._scale.get(name, sizes), sizes)
        if self.bounded and gradient.numel():
            largest = [part.detach().abs().amax().double() for part in parts]
            self._largest[name] = torch.stack(largest).sum()

    def _image(self, gradient: Tensor, like: Tensor) -> Tensor:
        return self._sketch.image(in_memory(gradient.detach(), like.detach()), 0, self.head_only)

    def _whole(self, tensor: Tensor) -> Tensor:
        return self._sketch.image(tensor.detach().reshape(-1))[0]

    def _stack(self, by_name: Mapping[str, Tensor], missing: Tensor) -> Tensor:
        return torch.stack([by_name.get(name, missing) for name in self.parameters])

    def _flags(self, values: Iterator[bool]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self._device)

    def _none(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _zero(self) -> Tensor:
        shape = (1 if self.head_only else 2), NUM_IMAGES
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {name.replace(COMPILED, ""): p for name, p in named if p.requires_grad}
