"""Which algorithm computes a layer: one for all, by counted cost, or by trial.

These are the three ways that frameworks have (Kim et al. 2017, slides 18 and 19): fixed by the
user, by a heuristic (cuDNN's Get), by a profile (cuDNN's Find).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from lab.convolution.algorithm import Algorithm
from lab.convolution.algorithms import ALGORITHMS, LIBRARY
from lab.convolution.passes import Chosen, convolve
from lab.convolution.problem import Pass, Problem

Chooser = Callable[[Problem, Tensor, Tensor], Chosen]  # of input and filters

Named = TypeVar("Named")

FAMILIES = {"winograd": ("winograd4x3", "winograd2x5")}
# Operations in the time that a byte takes to or from memory: 90 GFLOP/s over 9 GB/s, of one core.
OPERATIONS_PER_BYTE = 10
MOVES = 2  # a workspace is written once and read once
TRIALS, CONFIRMING_TRIALS = 5, 15
MARGIN = 0.05  # the library stays unless another one is faster by more than that
HOPELESS = 2.0  # so many times slower than the library in its first call, and there is no second


def fixed(name: str) -> Chooser:
    """Choose one algorithm, and the library where it refuses.

    Raises:
        ValueError: there is no such algorithm.
    """
    if name not in (*ALGORITHMS, *FAMILIES):
        allowed = ", ".join((*ALGORITHMS, *FAMILIES))
        raise ValueError(f"algorithm={name}: allowed are {allowed}")
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


def call_of(
    algorithm: Algorithm, problem: Problem, which: Pass, x: Tensor, w: Tensor, dy: Tensor
) -> Callable[[], Tensor]:
    """Return a call of one pass."""
    calls: dict[Pass, Callable[[], Tensor]] = {
        Pass.FORWARD: lambda: algorithm.forward(x, w, problem),
        Pass.BACKWARD_DATA: lambda: algorithm.backward_data(dy, w, problem),
        Pass.BACKWARD_WEIGHTS: lambda: algorithm.backward_weights(dy, x, problem),
    }
    return calls[which]


def _fastest(problem: Problem, which: Pass, x: Tensor, w: Tensor, dy: Tensor) -> Algorithm:
    calls = {each: call_of(each, problem, which, x, w, dy) for each in willing(problem, which)}
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
    for trial in range(trials):
        for name in _turned(list(calls), trial):
            times[name].append(_seconds(calls[name], device))
    return {name: median(seconds) for name, seconds in times.items()}


def _turned(candidates: list[Named], trial: int) -> Iterable[Named]:
    """Return the candidates in another order in each trial."""
    start = trial % len(candidates)
    return candidates[start:] + candidates[:start]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
