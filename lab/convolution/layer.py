"""Convolution layers of a model, each of whose three passes may have an algorithm of its own.

Which one, is chosen in one of the three ways that frameworks have (Kim et al. 2017, slides 18 and
19): fixed by the user, by a heuristic (cuDNN's Get), by a profile (cuDNN's Find).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from lab.convolution import Algorithm, Pass, Problem
from lab.convolution.algorithms import ALGORITHMS, LIBRARY

Chosen = Mapping[Pass, Algorithm]
Chooser = Callable[[Problem, Tensor, Tensor], Chosen]  # of input and filters
Named = TypeVar("Named")
FAMILIES = {"winograd": ("winograd4x3", "winograd2x5")}
# Operations in the time that a byte takes to or from memory: 90 GFLOP/s over 9 GB/s, of one core.
OPERATIONS_PER_BYTE = 10
MOVES = 2  # a workspace is written once and read once
TRIALS, CONFIRMING_TRIALS = 5, 15
MARGIN = 0.05  # the library stays unless another one is faster by more than that
HOPELESS = 2.0  # so many times slower than the library in its first call, and there is no second


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem, chosen: Chosen) -> Tensor:
    """Return [N, K, H', W'] for x [N, C, H, W], w [K, C / groups, R, S] and bias [K].

    Where the library is chosen for all passes, its own fused forward and backward run.
    """
    if all(algorithm is LIBRARY for algorithm in chosen.values()):
        return conv2d(x, w, bias, problem.stride, problem.padding, 1, problem.groups)
    return _Passes.apply(x, w, bias, problem, chosen)  # pyright: ignore[reportReturnType]


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, problem: Problem, chosen: Chosen
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem, ctx.chosen = problem, chosen
        y = chosen[Pass.FORWARD].compute(Pass.FORWARD, x, w, problem)
        return y if bias is None else y.add_(bias.view(-1, 1, 1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        wants_dx, wants_dw, wants_db, *_ = ctx.needs_input_grad
        calls = calls_of(ctx.chosen, ctx.problem, x, w, dy.contiguous())
        dx = calls[Pass.BACKWARD_DATA]() if wants_dx else None
        dw = calls[Pass.BACKWARD_WEIGHTS]() if wants_dw else None
        return dx, dw, dy.sum((0, 2, 3)) if wants_db else None, None, None


def fixed(name: str) -> Chooser:
    """Choose one algorithm, and the library where it refuses.

    Raises:
        ValueError: there is no such algorithm.
    """
    if name not in (*ALGORITHMS, *FAMILIES):
        allowed = ", ".join((*ALGORITHMS, *FAMILIES))
        raise ValueError(f"algorithm={name}: no such algorithm; allowed: {allowed}")
    candidates = [ALGORITHMS[each] for each in (*FAMILIES.get(name, (name,)), LIBRARY.name)]
    return lambda problem, _x, _w: {
        which: next(each for each in candidates if not each.refusal(problem, which))
        for which in Pass
    }


def heuristic(problem: Problem, _x: Tensor, _w: Tensor) -> Chosen:
    """Choose the fewest operations and bytes of workspace, as counted."""

    def cost(algorithm: Algorithm, which: Pass) -> float:
        counted = algorithm.total(problem, which)
        return counted.operations + OPERATIONS_PER_BYTE * MOVES * counted.workspace_bytes

    return {
        which: min(willing(problem, which), key=lambda each: cost(each, which)) for which in Pass
    }


def profile(problem: Problem, x: Tensor, w: Tensor) -> Chosen:
    """Try all algorithms in turns on these tensors, and choose the fastest of each pass.

    The winner of a few trials among many was lucky too, and a layer has other work than its passes:
    so forward and backward of the whole layer must be faster again, or the library computes it all.
    """
    with torch.no_grad():
        dy = torch.randn(problem.batch, problem.filters, *problem.out_size, device=x.device)
        chosen = {which: _fastest(problem, which, x.detach(), w.detach(), dy) for which in Pass}
    library = dict.fromkeys(Pass, LIBRARY)
    if chosen == library:
        return library
    ways = {"chosen": chosen, "library": library}
    layers = {name: _whole(problem, way, x, w, dy) for name, way in ways.items()}
    seconds = _medians(layers, CONFIRMING_TRIALS, x.device)
    return chosen if seconds["chosen"] < (1 - MARGIN) * seconds["library"] else library


def willing(problem: Problem, which: Pass) -> list[Algorithm]:
    """Return the algorithms that compute this pass, the library first."""
    return [each for each in ALGORITHMS.values() if not each.refusal(problem, which)]


def calls_of(
    chosen: Chosen, problem: Problem, x: Tensor, w: Tensor, dy: Tensor
) -> dict[Pass, Callable[[], Tensor]]:
    """Return a call of each pass, by the algorithm that is chosen for it."""
    operands = dict(zip(Pass, ((x, w), (dy, w), (dy, x)), strict=True))
    return {
        which: partial(algorithm.compute, which, *operands[which], problem)
        for which, algorithm in chosen.items()
    }


def _fastest(problem: Problem, which: Pass, x: Tensor, w: Tensor, dy: Tensor) -> Algorithm:
    calls = {
        each: calls_of({which: each}, problem, x, w, dy)[which] for each in willing(problem, which)
    }
    # First calls prepare, such as to map memory, so they only tell who has no chance.
    first_s = {algorithm: _seconds(call, x.device) for algorithm, call in calls.items()}
    limit = HOPELESS * min(first_s[LIBRARY], _seconds(calls[LIBRARY], x.device))
    left = [each for each in calls if each is LIBRARY or first_s[each] < limit]
    tried = _medians({each: calls[each] for each in left}, TRIALS, x.device)
    best = min(left, key=lambda each: tried[each])
    return best if tried[best] < (1 - MARGIN) * tried[LIBRARY] else LIBRARY


def _whole(
    problem: Problem, chosen: Chosen, x: Tensor, w: Tensor, dy: Tensor
) -> Callable[[], object]:
    """Return a call of forward and backward, with a bias, which costs the library nothing."""
    inputs = x.detach().requires_grad_(x.requires_grad)
    filters = w.detach().requires_grad_()
    bias = w.new_zeros(problem.filters).requires_grad_()
    wanted = [each for each in (inputs, filters, bias) if each.requires_grad]

    def call() -> object:
        with torch.enable_grad():
            y = convolve(inputs, filters, bias, problem, chosen)
        return torch.autograd.grad(y, wanted, dy)

    return call


def _medians(
    calls: Mapping[Named, Callable[[], object]], trials: int, device: torch.device
) -> dict[Named, float]:
    """Call all in turns, and return their medians in seconds."""
    times: dict[Named, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for trial in range(trials):
        start = trial % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(_seconds(calls[name], device))
    return {name: median(seconds) for name, seconds in times.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


class ChosenConv2d(nn.Module):
    """A Conv2d with the same parameters, computed by chosen algorithms.

    It chooses at its first forward of each shape; see `convolve`. On the meta device and in half
    precision it is a Conv2d, because the algorithms compute in float32.

    Args:
        layer: see `can_replace`; its parameters are shared.
        choose: for a problem, its input and filters.
    """

    def __init__(self, layer: nn.Conv2d, choose: Chooser) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.groups = _pair(layer.stride), layer.groups
        assert not isinstance(layer.padding, str)
        self.padding = _pair(layer.padding)
        self.chosen: dict[Problem, Chosen] = {}
        self._choose = choose

    @staticmethod
    def can_replace(layer: nn.Module) -> bool:
        """Tell whether a module is a convolution that algorithms know: zeros around, no gaps."""
        return (
            isinstance(layer, nn.Conv2d)
            and not isinstance(layer.padding, str)
            and layer.padding_mode == "zeros"
            and layer.dilation == (1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, K, H', W'] for x [N, C, H, W]."""
        device = x.device.type
        if device == "meta" or x.dtype != torch.float32 or torch.is_autocast_enabled(device):
            return conv2d(x, self.weight, self.bias, self.stride, self.padding, 1, self.groups)
        return self._by_choice(x)

    @torch.compiler.disable()  # trials and choices are no part of a graph
    def _by_choice(self, x: Tensor) -> Tensor:
        problem = Problem.of(x, self.weight, self.stride, self.padding, self.groups)
        if problem not in self.chosen:
            self.chosen[problem] = self._choose(problem, x, self.weight)
        return convolve(x, self.weight, self.bias, problem, self.chosen[problem])


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    down, across = value
    return down, across


def convolutions_of(
    model: nn.Module, input_shape: tuple[int, ...], input_dtype: torch.dtype, batch: int
) -> dict[str, Problem]:
    """Return the problem of each convolution that the algorithms know, in the order of forward.

    Nothing is computed: the model runs on torch's meta device. A layer that is called several times
    counts once, as it was called last.

    Args:
        model: on the meta device.
        input_shape, input_dtype: of one sample.
    """
    found: dict[str, Problem] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Conv2d) and not isinstance(layer.padding, str)
        stride, padding = _pair(layer.stride), _pair(layer.padding)
        found[name] = Problem.of(inputs[0], layer.weight, stride, padding, layer.groups)

    with torch.no_grad(), ExitStack() as stack:
        for name, module in model.named_modules():
            if ChosenConv2d.can_replace(module):
                stack.enter_context(module.register_forward_pre_hook(partial(note, name)))
        model(torch.zeros(batch, *input_shape, dtype=input_dtype, device="meta"))
    return found
