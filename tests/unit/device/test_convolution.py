"""Algorithms of a convolution against the definition, the choice among them, and its layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.convolution import Algorithm, Pass, Problem, Unsupported, layer
from lab.convolution.algorithms import ALGORITHMS, Gemm, Library
from lab.convolution.layer import ChosenConv2d, calls_of, fixed, heuristic, profile
from lab.model.convnet import lenet
from lab.model.mlp import mlp
from lab.transform.transforms import CHOICES, Convolution

PROBLEMS = [
    Problem(2, 3, (9, 7), 4, (3, 3), padding=(1, 1)),
    Problem(3, 4, (8, 8), 6, (3, 3), padding=(0, 2), groups=2),
    Problem(2, 3, (11, 10), 5, (5, 5), padding=(2, 2)),
    Problem(1, 2, (6, 9), 3, (5, 5), padding=(0, 1)),
    Problem(2, 3, (19, 23), 4, (11, 11), stride=(4, 4), padding=(2, 2)),
    Problem(2, 4, (9, 8), 4, (3, 2), stride=(2, 3), padding=(1, 0), groups=4),
    Problem(2, 5, (4, 4), 3, (1, 1)),
    Problem(1, 1, (1, 1), 1, (1, 1)),
]
# Relative to the largest value.
TOLERANCE = {"fft": 1e-5, "winograd4x3": 1e-4, "winograd2x5": 1e-4}


class OneDevice(TorchDispatchMode):
    """Fails where an operation has operands on two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        assert len({each.device for each in operands}) < 2, func
        return func(*args, **(kwargs or {}))


def defined(problem: Problem, x: Tensor, w: Tensor, dy: Tensor) -> dict[Pass, Tensor]:
    """The three passes by autograd, in float64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    y = torch.nn.functional.conv2d(
        x, w, None, problem.stride, problem.padding, groups=problem.groups
    )
    y.backward(dy.double())
    assert x.grad is not None and w.grad is not None
    return dict(zip(Pass, (y.detach(), x.grad, w.grad), strict=True))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_computes_what_the_definition_says_or_refuses(name: str, problem: Problem) -> None:
    algorithm = ALGORITHMS[name]
    x, w, dy = problem.draw()
    assert Problem.of(x, w, problem.stride, problem.padding, problem.groups) == problem
    calls = calls_of(dict.fromkeys(Pass, algorithm), problem, x, w, dy)
    for which, expected in defined(problem, x, w, dy).items():
        reason = algorithm.refusal(problem, which)
        if reason:
            with pytest.raises(Unsupported, match=rf"^{name}, {which}: "):
                calls[which]()
            continue
        found = calls[which]()
        assert found.shape == expected.shape and found.dtype == torch.float32
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE.get(name, 2e-6), which


def test_what_is_refused_is_what_cudnn_refuses() -> None:
    strided, large = PROBLEMS[4], PROBLEMS[2]
    refused = {
        name: [bool(algorithm.refusal(problem, Pass.FORWARD)) for problem in (PROBLEMS[0], strided)]
        for name, algorithm in ALGORITHMS.items()
    }
    assert refused["direct"] == refused["gemm"] == refused["library"] == [False, False]
    assert refused["fft"] == refused["winograd4x3"] == [False, True]
    assert "must be (3, 3)" in str(ALGORITHMS["winograd2x3"].refusal(large, Pass.FORWARD))
    too_padded = replace(PROBLEMS[0], padding=(3, 3))
    assert ALGORITHMS["winograd2x3"].refusal(too_padded, Pass.BACKWARD_DATA)
    assert not ALGORITHMS["winograd2x3"].refusal(too_padded, Pass.FORWARD)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, w, _ = PROBLEMS[0].draw()
    with pytest.raises(ValueError, match=r"input \[2, 3, 9, 7\], filters \[4, 3, 3, 3\], groups=2"):
        Problem.of(x, w, groups=2)
    with pytest.raises(ValueError, match="larger than the padded input"):
        Problem.of(x[..., :2, :2], w)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_computes_on_the_device_of_its_inputs(name: str) -> None:
    """Operands on two devices fail on a GPU; meta tensors stand for its tensors."""
    problem = PROBLEMS[0] if ALGORITHMS[name].refusal(PROBLEMS[2], Pass.FORWARD) else PROBLEMS[2]
    x, w, dy = (each.to("meta") for each in problem.draw())
    with OneDevice():
        for call in calls_of(dict.fromkeys(Pass, ALGORITHMS[name]), problem, x, w, dy).values():
            call()


# Kim et al. 2017, slide 8: conv2 of AlexNet at 256 images.
CONV2 = Problem(256, 96, (27, 27), 256, (5, 5), padding=(2, 2))


def test_operations_are_those_of_the_paper() -> None:
    assert CONV2.operations == pytest.approx(229e9, rel=0.005)
    for which in Pass:
        assert ALGORITHMS["direct"].total(CONV2, which).operations == CONV2.operations


def test_tiles_add_operations_and_winograd_saves_them() -> None:
    conv3 = Problem(256, 256, (13, 13), 384, (3, 3), padding=(1, 1))
    tiled = Gemm((128, 128)).total(conv3, Pass.FORWARD).operations
    assert tiled == 2 * 384 * 43264 * 256 * 9  # 384 filters are three tiles, 43264 pixels 338
    odd = replace(conv3, filters=400)
    assert Gemm((128, 128)).total(odd, Pass.FORWARD).operations > 1.2 * odd.operations
    for name, products in (("winograd2x3", 2 * 16 / 4), ("winograd4x3", 2 * 36 / 16)):
        # Levinthal, slide 4: fewer than the 18 operations of an output and channel.
        outputs = conv3.batch * conv3.out_pixels * conv3.filters * conv3.channels
        assert products < 18
        executed = ALGORITHMS[name].total(conv3, Pass.FORWARD).operations
        assert executed > products * outputs  # and the transforms


def test_ffts_products_do_not_depend_on_the_filters_size() -> None:
    small, large = (
        Problem(8, 64, (side, side), 64, (kernel, kernel), padding=(pad, pad))
        for side, kernel, pad in ((30, 3, 1), (22, 11, 5))
    )
    costs = [ALGORITHMS["fft"].total(each, Pass.FORWARD) for each in (small, large)]
    assert costs[0] == costs[1]
    assert large.operations > 7 * small.operations


def test_workspace_of_gemm_is_the_unrolled_batch() -> None:
    assert ALGORITHMS["gemm"].total(CONV2, Pass.FORWARD).workspace_bytes == (
        4 * 256 * 96 * 25 * 27 * 27
    )
    grouped = replace(CONV2, groups=2)
    assert math.isclose(
        ALGORITHMS["gemm"].total(grouped, Pass.FORWARD).operations, CONV2.operations / 2
    )


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


def tried(monkeypatch: pytest.MonkeyPatch, slow: Slow, other: Algorithm) -> Algorithm:
    """Return which of two, of which the slow one is the library, a trial chooses for forward."""
    # It runs as itself too: the library's passes together are one call of torch.
    monkeypatch.setattr(layer, "LIBRARY", slow)
    monkeypatch.setattr(layer, "convolve", layer._Passes.apply)
    monkeypatch.setattr(layer, "willing", lambda *_: [slow, other])
    return profile(SMALL, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))[Pass.FORWARD]


def names(chosen: layer.Chosen) -> list[str]:
    return [chosen[which].name for which in Pass]


def test_one_algorithm_for_all_and_the_library_where_it_refuses() -> None:
    strided = Problem(2, 3, (9, 9), 4, (3, 3), stride=(2, 2))
    assert names(fixed("fft")(SMALL, NOTHING, NOTHING)) == ["fft"] * 3
    assert names(fixed("fft")(strided, NOTHING, NOTHING)) == ["library"] * 3
    five = Problem(2, 3, (9, 9), 4, (5, 5), padding=(2, 2))
    assert names(fixed("winograd")(SMALL, NOTHING, NOTHING)) == ["winograd4x3"] * 3
    assert names(fixed("winograd")(five, NOTHING, NOTHING)) == ["winograd2x5"] * 3
    with pytest.raises(ValueError, match="algorithm=magic: no such algorithm; allowed: library"):
        fixed("magic")


def test_the_heuristic_takes_the_fewest_operations() -> None:
    many = Problem(64, 256, (8, 8), 384, (3, 3), padding=(1, 1))
    assert names(heuristic(many, NOTHING, NOTHING)) == ["winograd4x3"] * 3
    one = Problem(64, 256, (8, 8), 384, (1, 1))
    assert names(heuristic(one, NOTHING, NOTHING)) == ["library"] * 3


def test_a_trial_takes_the_fastest(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = Gemm()
    assert tried(monkeypatch, Slow(clock), gemm) is gemm


def test_a_trial_stays_with_the_library_unless_another_is_clearly_faster(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(clock)
    assert tried(monkeypatch, slow, Slow(clock)) is slow


def test_who_was_only_lucky_in_the_first_trials_does_not_win(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, lucky = Slow(clock), Lucky(clock)
    assert tried(monkeypatch, slow, lucky) is slow
    assert lucky.num_calls > Lucky.NUM_FAST


@pytest.mark.parametrize(("name", "bias"), [("library", True), ("gemm", True), ("fft", False)])
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
    with pytest.raises(ValueError, match="^transform.choose=best: allowed: fixed, heuristic"):
        Convolution("best")
    with pytest.raises(ValueError, match="^transform.algorithm=magic: no such algorithm; allowed"):
        Convolution("fixed", "magic")
