"""Replay: a model with the layer times and gradient sizes of a profile.

It waits instead of computing, so that any number of ranks fit on a few cores; exchanges, hooks and
network are those of any other model. Its outputs are meaningless.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lab.model.profile import SLOW_FACTOR, Layer, Profile, of_replay, shapes
from lab.settings.checks import Limits
from lab.settings.fields import number_of

SLACK_S = 0.002


class Pace:
    """A timer that takes as long as a GPU's work would, one piece after the other.

    A piece begins where the last one was due, however late `sleep` returned (0.1 ms, on a busy core
    some ms, which would add up over a step). If the host was delayed between two pieces by more
    than SLACK_S, for example by an exchange in a gradient hook, the piece begins that much later. A
    GPU would hide shorter delays, of hooks and autograd, behind its queued work.

    Args:
        now: a clock in seconds.
        sleep: returns after so many seconds, or later.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self.restart()

    def restart(self) -> None:
        """Let the next piece begin now."""
        self._end = self._woke = self._now()

    def delay(self, seconds: float) -> None:
        """Begin the next piece so much later: a wait that a GPU's queue does not hide."""
        self._end += seconds
        self._woke += seconds

    @contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Enclose one piece; the work inside counts towards its time."""
        now = self._now()
        held_up = now - self._woke
        begin = self._end + (held_up if held_up > SLACK_S else 0)
        yield
        self._end = begin + max(seconds, self._now() - now)
        while (left := self._end - self._now()) > 0:
            self._sleep(left)
        self._woke = self._now()


class Replay(nn.Module):
    """Layers that wait: [batch, *input_shape] -> [batch, output_size], all zeros.

    In training, each layer's forward and backward take the profile's time for the given batch, and
    a layer's gradients appear when its backward ends, before that of the layer below begins. In
    evaluation nothing waits.

    Args:
        input_shape: not used.
        output_size: width of the outputs.
        profile: the content of a file of conf/profile. bytes_scale: factor on the profile's
        gradient sizes. time_scale: factor on the profile's layer times. pace: the timer that waits.

    Raises:
        ValueError: a value of the profile or a scale is out of range, LAB_SLOW_FACTOR too, or no
            gradient is left.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        output_size: int,
        profile: Mapping[str, Any],
        bytes_scale: float = 1.0,
        time_scale: float = 1.0,
        pace: Pace | None = None,
    ) -> None:
        super().__init__()
        text = os.environ.get(SLOW_FACTOR) or "1"
        slow_factor = number_of(SLOW_FACTOR, text, float, Limits(1, at_most=100))
        scaled = of_replay(profile, bytes_scale, time_scale)
        scaled = scaled.scaled(time_scale=slow_factor)
        self.bytes_scale = scaled.bytes_scale
        self.output_size = output_size
        self.pace = pace or Pace()
        self.delay = self.pace.delay  # called by a sync for whose exchange forward waits
        named = ((each.name, ReplayedLayer(each, scaled, self.pace)) for each in scaled.layers)
        self.layers = nn.Sequential(OrderedDict(named))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [batch, ...] to zeros float32 [batch, output_size]."""
        outputs = torch.zeros(len(inputs), self.output_size, device=inputs.device)
        if not self.training:
            return outputs
        if inputs.is_cuda:  # the host waits: it must not run ahead of exchange and update
            torch.cuda.current_stream(inputs.device).synchronize()
        self.pace.restart()
        return self.layers(
            outputs.requires_grad_()
        )  # layers without parameters too have a backward


class ReplayedLayer(nn.Module):
    """One layer of a profile, with parameters of lab.model.profile.shapes."""

    def __init__(self, layer: Layer, profile: Profile, pace: Pace) -> None:
        super().__init__()
        self.layer, self.profile, self.pace = layer, profile, pace
        for name, shape in shapes(profile.values(layer)).items():
            self.register_parameter(name, nn.Parameter(0.01 * torch.randn(shape)))

    def forward(self, activations: Tensor) -> Tensor:
        """Return the activations [batch, output_size] unchanged, after the layer's time."""
        return _Wait.apply(activations, self, *self.parameters())  # type: ignore[return-value]


class _Wait(torch.autograd.Function):
    """The identity for activations and their gradients, which takes a layer's time.

    A parameter's gradient is its value times the first output's gradient, so it differs between
    ranks, needs no other memory, and scales with the loss's factors (1/N, 1/micro-batches, loss
    scale). Autograd runs the nodes that accumulate gradients before all other ready nodes, so a
    layer's hooks run before the backward of the layer below.
    """

    @staticmethod
    def forward(ctx: Any, activations: Tensor, layer: ReplayedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*parameters)
        with layer.pace.work(layer.profile.forward_s(layer.layer, len(activations))):
            return activations.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients  # of the activations
        layer: ReplayedLayer = ctx.layer
        with layer.pace.work(layer.profile.backward_s(layer.layer, len(gradient))):
            factor = gradient[:, 0].sum()
            return gradient, None, *(parameter * factor for parameter in ctx.saved_tensors)
