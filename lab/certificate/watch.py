"""One rank's observation of a step: the gradients it makes, and those it is left with.

It keeps random linear images of tensors, a few numbers each, in which means can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.layout import travel_shape, travelling
from lab.sync.gradsync import accumulator

NUM_IMAGES = 8
BLOCK = 1024  # values that share a sign of their own
CHUNK = 256 * BLOCK  # values converted to float64 at a time, so that they stay in the cache
HEAD = 64 * BLOCK  # first values of a tensor, which have an image of their own
SEED = 0x5EED


class Sketch:
    """Projections of tensors onto random signs (Alon, Matias and Szegedy 1999, section 2.2).

    The image of x is NUM_IMAGES sums of x_i * s_i in float64. It is linear, so the image of a mean
    is the mean of images; its mean square estimates the squared norm of x; and tensors that differ
    have the same image only by a rare chance. The sign of value i is that of its place in its
    block times that of the block, so signs of n values take NUM_IMAGES * (BLOCK + n / BLOCK)
    numbers. All ranks draw the same.

    Args:
        most_values: of the largest tensor.
        device: where tensors lie.
    """

    def __init__(self, most_values: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(SEED)
        num_blocks = -(-most_values // BLOCK) + 1

        def signs(rows: int) -> Tensor:
            drawn = torch.randint(0, 2, (rows, NUM_IMAGES), generator=generator)
            return (2 * drawn - 1).to(device, torch.float64)

        self._of_places, self._of_blocks = signs(BLOCK), signs(num_blocks)

    def image(self, values: Tensor, start: int = 0, head_only: bool = False) -> Tensor:
        """Return the images of a tensor, and of its first HEAD values: float64 [2, NUM_IMAGES].

        Args:
            values: [n], any real dtype; the tensor, or a part of it.
            start: place of the first value in its tensor.
            head_only: leave out the first image, which reads all values: [1, NUM_IMAGES].
        """
        whole = self._of_places.new_zeros(NUM_IMAGES)
        head_values = max(0, HEAD - start)
        for chunk in values[:head_values].split(CHUNK) if head_values else ():
            whole += self._of_chunk(chunk, start)
            start += len(chunk)
        head = whole.clone()
        if head_only:
            return head[None]
        for chunk in values[head_values:].split(CHUNK):
            whole += self._of_chunk(chunk, start)
            start += len(chunk)
        return torch.stack([whole, head])

    def _of_chunk(self, values: Tensor, start: int) -> Tensor:
        if not len(values):
            return values.new_zeros((), dtype=torch.float64)
        first, before = divmod(start, BLOCK)
        after = -(before + len(values)) % BLOCK
        padded = torch.nn.functional.pad(values.double(), (before, after))
        blocks = padded.view(-1, BLOCK) @ self._of_places
        return (blocks * self._of_blocks[first : first + len(blocks)]).sum(dim=0)


def norm(images: Tensor) -> Tensor:
    """Estimate the norms of tensors from their images [..., NUM_IMAGES]: float64 [...].

    It is exact for one value; else its relative standard error is about 1 / sqrt(2 NUM_IMAGES).
    """
    return images.square().mean(dim=-1).sqrt()


@dataclass(frozen=True)
class Seen:
    """Images of a step's gradients, float64, by parameter (P); of all ranks: [N, ...].

    Those of gradients have two rows (H), of the whole and of its head, or one, of the head.

    Attributes:
        start: of weights and buffers in the first step [P + B, K]; later [0, K].
        own: of this rank's own gradient, before any exchange [P, H, K].
        sent: of the part of it that did not stay behind as a compression error [P, H, K].
        delivered: of the gradient that the optimizer will see [P, H, K].
        reached: 1 where this rank has a gradient to exchange [P].
        filled: 1 where there is a gradient for the optimizer [P].
        scale: the largest norm of anything that was added up [P], of which roundings are a share.
        largest: the largest magnitude of a value of `own` [P]; 0 where no bound needs it.
        left: 1 where a gradient has grown that did not leave [P].
        judged: 1 if this rank must be left with the mean; else it may hold anything [].
    """

    start: Tensor
    own: Tensor
    sent: Tensor
    delivered: Tensor
    reached: Tensor
    filled: Tensor
    scale: Tensor
    largest: Tensor
    left: Tensor
    judged: Tensor

    def of_all(self, gather: Callable[[Tensor], Tensor]) -> Seen:
        """Return the same of all ranks, in host memory. A collective call."""
        mine = [getattr(self, field.name) for field in fields(self)]
        rows = gather(torch.cat([each.double().flatten() for each in mine]).cpu())
        parts = rows.split([each.numel() for each in mine], dim=1)
        shapes = [(len(rows), *each.shape) for each in mine]
        return Seen(*(part.reshape(s) for part, s in zip(parts, shapes, strict=True)))

    def row(self, index: int) -> Seen:
        """Return the same with one of the rows: 0 is the first, -1 the head's."""
        names = ("own", "sent", "delivered")
        return replace(self, **{name: getattr(self, name)[..., index, :] for name in names})

    def is_finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in (self.own, self.delivered, self.sent))


class Watch:
    """Observes the gradients of a model on one rank: only images of them are kept.

    `own` is what lies in `grad` when the exchange begins, whatever has put it there: micro-batches,
    recomputation, or a loop that changes it. A sync that tells when (see BeforeExchange) has it
    noted then; of a library it is noted by hooks, which run before the library's.

    Args:
        model: has the buffers. Parameters that it tells DDP to ignore are left out.
        trained: parameters by name, also those frozen for now. Those without values are left out.
        on_first: called when the first gradient since `reset` grows; from then on all are noted as
            they grow. None: `note` is called.

    Attributes:
        parameters: the trainable ones, by name.
        grown: names of those whose gradient has grown since `reset`.
        head_only: only the first values of each parameter are looked at.
        bounded: also find the largest gradient, which some exchanges' error bounds need.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        on_first: Callable[[], None] | None,
    ) -> None:
        self._on_first = on_first
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters = {
            name: p for name, p in trained.items() if p.numel() and name not in ignored
        }
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._device = next(iter(self.parameters.values())).device
        tensors = [*self.parameters.values(), *model.buffers()]
        self._sketch = Sketch(max(travel_shape(t).numel() for t in tensors), self._device)
        self.head_only = False
        self.bounded = False
        self.reset()
        accumulators = {name: accumulator(p) for name, p in self.parameters.items()}
        self._accumulators = accumulators  # which torch would make anew
        self._hooks: list[RemovableHandle] = [
            node.register_prehook(partial(self._on_gradient, name))
            for name, node in accumulators.items()
        ]
        self._buffers = {name: self._whole(b) for name, b in model.named_buffers()}

    @property
    def names_at_start(self) -> list[str]:
        """Names of the rows of `Seen.start`."""
        return [*self.parameters, *self._buffers]

    def reset(self) -> None:
        """Forget the gradients of a step that is over."""
        self.grown: set[str] = set()
        self._weights: Tensor | None = None  # when the first gradient grew
        self.restart()

    def restart(self) -> None:
        self._own: dict[str, Tensor] = {}
        self._scale: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._noted: set[str] = set()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._accumulators.clear()

    def note(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Note a gradient that is about to leave; its first part counts for all of it."""
        name = self._names.get(id(parameter))
        if name is None or name in self._noted:
            return
        self._noted.add(name)
        if gradient is None:  # cleared since it grew, in a step that was broken off
            self.grown.discard(name)
        else:
            self._take(name, [gradient])

    def residual_images(self, exchange: Exchange, comm: Comm) -> Tensor:
        """Return the images of the compression errors that this rank keeps: [P, H, K]."""
        images = {name: self._zero() for name in self.parameters}
        shapes = {name: travel_shape(parameter) for name, parameter in self.parameters.items()}
        for name, start, values in exchange.residuals(shapes, comm):
            images[name] += self._sketch.image(values, start, self.head_only)
        return torch.stack(list(images.values()))

    def weights(self) -> Tensor:
        return torch.stack([self._whole(each) for each in self.parameters.values()])

    def images(self, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the images of one tensor for each parameter, or of its weights: [P, H, K]."""
        values = values or self.parameters
        return torch.stack([self._image(values[name], p) for name, p in self.parameters.items()])

    def start(self) -> Tensor:
        """Return the images of weights and buffers: [P + B, K]. Buffers are those of the start.

        Weights are those with which the step began: a loop may move a rank's own before the last
        backward, as sharpness-aware minimization does.
        """
        weights = self.weights() if self._weights is None else self._weights
        return torch.cat([weights, *(image[None] for image in self._buffers.values())])

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
            left=self._flags(name in self.grown - self._own.keys() for name in self.parameters),
            judged=self._none() + 1,
        )

    @torch.no_grad()
    def _on_gradient(self, name: str, gradients: tuple[Tensor, ...]) -> None:
        if not self.grown and not self.head_only:
            self._weights = self.weights()
        if self._on_first:
            if not self.grown:
                self._on_first()
            before = self.parameters[name].grad
            self._take(name, [*gradients] if before is None else [*gradients, before])
        self.grown.add(name)

    def _take(self, name: str, parts: list[Tensor]) -> None:
        """Note a gradient that is the sum of some parts."""
        parameter = self.parameters[name]
        images = torch.stack([self._image(part, parameter) for part in parts])
        self._own[name] = images.sum(dim=0)
        sizes = norm(images).max()
        self._scale[name] = torch.maximum(self._scale.get(name, sizes), sizes)
        if self.bounded:
            values = [travelling(part, parameter) for part in parts]
            self._largest[name] = torch.stack([v.abs().amax().double() for v in values]).sum()

    def _image(self, gradient: Tensor, like: Tensor) -> Tensor:
        return self._sketch.image(travelling(gradient, like), 0, self.head_only)

    def _whole(self, tensor: Tensor) -> Tensor:
        return self._sketch.image(travelling(tensor, tensor))[0]

    def _stack(self, by_name: Mapping[str, Tensor], missing: Tensor) -> Tensor:
        return torch.stack([by_name.get(name, missing) for name in self.parameters])

    def _flags(self, values: Iterator[bool]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self._device)

    def _none(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _zero(self) -> Tensor:
        shape = (1 if self.head_only else 2), NUM_IMAGES
        return torch.zeros(shape, dtype=torch.float64, device=self._device)
