"""Choosing algorithms, the layer that uses them, and the transform that puts it into models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lab.convolution import layer
from lab.convolution.algorithms import ALGORITHMS, LIBRARY, Gemm, Library
from lab.convolution.layer import ChosenConv2d, fixed, heuristic, profile
from lab.convolution.problem import Pass, Problem
from lab.model.convnet import lenet
from lab.model.mlp import mlp
from lab.transform.transforms import CHOICES, Convolution

SMALL = Problem(2, 3, (8, 8), 4, (3, 3), padding=(1, 1))
NOTHING = torch.empty(0)


class Clock:
    """Seconds that algorithms say they took: those of this machine would vary."""

    now_s = 0.0

    def time_of(self, call: Callable[[], object], _device: torch.device) -> float:
        begin = self.now_s
        call()
        return self.now_s - begin


class Slow(Library):
    """The library, in 20 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        self.clock.now_s += 0.02
        return super().forward(x, w, problem)


class Lucky(Gemm):
    """Fast in the first trials, and then later than Slow."""

    NUM_FAST = 1 + layer.TRIALS

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.num_calls = clock, 0

    def forward(self, x: Tensor, w: Tensor, problem: Problem) -> Tensor:
        self.num_calls += 1
        self.clock.now_s += 0.03 if self.num_calls > self.NUM_FAST else 0
        return super().forward(x, w, problem)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    kept = Clock()
    monkeypatch.setattr(layer, "_seconds", kept.time_of)
    return kept


def take_for_library(monkeypatch: pytest.MonkeyPatch, slow: Slow) -> None:
    """Let it run as itself too: the library's passes together are one call of torch."""
    monkeypatch.setattr(layer, "LIBRARY", slow)
    monkeypatch.setattr(layer, "convolve", layer._Passes.apply)


def names(chosen: layer.Chosen) -> list[str]:
    return [chosen[which].name for which in Pass]


def test_one_algorithm_for_all_and_the_library_where_it_refuses() -> None:
    strided = Problem(2, 3, (9, 9), 4, (3, 3), stride=(2, 2))
    assert names(fixed("fft")(SMALL, NOTHING, NOTHING)) == ["fft"] * 3
    assert names(fixed("fft")(strided, NOTHING, NOTHING)) == ["library"] * 3
    five = Problem(2, 3, (9, 9), 4, (5, 5), padding=(2, 2))
    assert names(fixed("winograd")(SMALL, NOTHING, NOTHING)) == ["winograd4x3"] * 3
    assert names(fixed("winograd")(five, NOTHING, NOTHING)) == ["winograd2x5"] * 3
    with pytest.raises(ValueError, match="algorithm=magic: allowed are library, direct, gemm, "):
        fixed("magic")


def test_the_heuristic_takes_the_fewest_operations() -> None:
    many = Problem(64, 256, (8, 8), 384, (3, 3), padding=(1, 1))
    assert names(heuristic(many, NOTHING, NOTHING)) == ["winograd4x3"] * 3
    one = Problem(64, 256, (8, 8), 384, (1, 1))
    assert names(heuristic(one, NOTHING, NOTHING)) == ["library"] * 3


def test_a_trial_takes_the_fastest(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, gemm = Slow(clock), Gemm()
    take_for_library(monkeypatch, slow)
    monkeypatch.setattr(layer, "willing", lambda *_: [slow, gemm])
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert profile(SMALL, x, w)[Pass.FORWARD] is gemm


def test_a_trial_stays_with_the_library_unless_another_is_clearly_faster(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "willing", lambda *_: [LIBRARY, Slow(clock)])
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert profile(SMALL, x, w)[Pass.FORWARD] is LIBRARY


def test_who_was_only_lucky_in_the_first_trials_does_not_win(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, lucky = Slow(clock), Lucky(clock)
    take_for_library(monkeypatch, slow)
    monkeypatch.setattr(layer, "willing", lambda *_: [slow, lucky])
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert profile(SMALL, x, w)[Pass.FORWARD] is slow
    assert lucky.num_calls > Lucky.NUM_FAST


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_the_same_outputs_and_gradients(name: str, bias: bool) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=bias)
    other = ChosenConv2d(copy.deepcopy(layer), fixed(name))
    assert other.state_dict().keys() == layer.state_dict().keys()
    x, dy = torch.randn(2, 4, 7, 7), torch.randn(2, 6, 7, 7)
    found = []
    for each in (layer, other):
        inputs = x.clone().requires_grad_()
        y = each(inputs)
        y.backward(dy)
        found.append([y, inputs.grad, *(p.grad for p in each.parameters())])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(other.chosen) == 1


def test_half_precision_and_counting_are_left_to_the_library() -> None:
    def never(*_: object) -> layer.Chosen:
        raise AssertionError("must not be asked")

    other = ChosenConv2d(nn.Conv2d(3, 4, 3), never)
    with torch.autocast("cpu", torch.bfloat16):
        assert other(torch.randn(1, 3, 5, 5)).dtype == torch.bfloat16
    assert other.to("meta")(torch.empty(1, 3, 5, 5, device="meta")).shape == (1, 4, 3, 3)


@pytest.mark.parametrize("choose", CHOICES)
def test_a_transform_keeps_the_function_and_the_parameters(choose: str) -> None:
    model = lenet(input_shape=(1, 16, 16), output_size=10)
    other = Convolution(choose, "winograd")(copy.deepcopy(model))
    assert sum(isinstance(each, ChosenConv2d) for each in other.modules()) == 2
    assert not any(isinstance(each, nn.Conv2d) for each in other.modules())
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)


def test_what_no_algorithm_knows_is_left_alone_or_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, dilation=2), nn.Conv2d(1, 1, 3, padding="same"), nn.Conv2d(1, 1, 3)
    )
    kinds = [type(each) for each in Convolution()(model).children()]
    assert kinds == [nn.Conv2d, nn.Conv2d, ChosenConv2d]
    with pytest.raises(ValueError, match="^transform=convolution: Sequential has no 2-d convol"):
        Convolution()(mlp(input_shape=(1, 4, 4), output_size=2))
    with pytest.raises(ValueError, match="^transform.choose=best: allowed are fixed, heuristic"):
        Convolution("best")
    with pytest.raises(ValueError, match="^transform.algorithm=magic: allowed are library"):
        Convolution("fixed", "magic")
