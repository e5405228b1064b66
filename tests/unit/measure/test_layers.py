"""Times of layers on a fake clock, and refused settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.autograd import DeviceType

from lab import profile_layers
from lab.device import clock, profile
from lab.device.clock import LayerClock
from lab.device.profile import clocked, held_to_step
from lab.measure import layers
from lab.measure.layers import kernels_ms
from lab.model.inception import googlenet
from lab.model.profile import Layer, Profile
from lab.model.transformer import Transformer
from lab.settings import command
from lab.settings.files import choices_of
from lab.simulate.estimate import fixed_part
from tests.support.commands import refusal
from tests.support.fake_gpu import CUDA, FakeGpu
from tests.unit.model.test_replay import PROFILE, Time, replay, train

CPU = torch.device("cpu")


class Twice(nn.Module):
    """A model with a layer used twice, and parameters outside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.last = nn.Linear(3, 2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.first(images)) * self.scale)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Let marks be 0, 1, 2, ...; the next one is the next mark."""
    numbers = count()
    monkeypatch.setattr(layers, "mark", lambda _: float(next(numbers)))
    return numbers


def medians(clock: LayerClock, warmup: int) -> list[Layer]:
    names, times_ms = clock.times_ms(warmup)
    forward_ms, backward_ms = np.median(times_ms, axis=0).tolist()
    sizes = [clock.parameters[name] for name in names]
    return list(map(Layer, names, sizes, forward_ms, backward_ms))


def test_times_of_all_layers_add_up_to_the_whole_pass(moments: Iterator[int]) -> None:
    model = Twice()
    with LayerClock(model, CPU) as clock:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    found = medians(clock, warmup=1)
    assert [layer.name for layer in found] == ["model", "first_0", "last"]
    assert [layer.parameters for layer in found] == [1, 12, 6]
    # Marks of a pass: begin, model, first, first, last, end; then one for each gradient.
    assert [layer.forward_ms for layer in found] == [2000, 2000, 1000]
    assert [layer.backward_ms for layer in found] == [1000, 2000, 1000]
    before = next(moments)
    model(torch.ones(2, 3)).sum().backward()
    assert next(moments) == before + 1  # no hook remains


@pytest.mark.parametrize(
    ("model", "inputs", "without"),
    [
        (googlenet(input_shape=(1, 32, 32), output_size=2), torch.ones(1, 1, 32, 32), set()),
        (
            Transformer(vocabulary=7, context=4, size="nano"),
            torch.zeros(1, 4, dtype=torch.int64),
            {"head"},  # its weight is the embedding's
        ),
    ],
    ids=["branches", "tied"],
)
def test_layers_of_branches_and_tied_ones_are_measured(
    moments: Iterator[int], model: nn.Module, inputs: torch.Tensor, without: set[str]
) -> None:
    with LayerClock(model, CPU) as clock:
        model(inputs).sum().backward()
    found = medians(clock, warmup=0)
    owned = {layer.name for layer in found if layer.parameters}
    assert owned == {layer.name for layer in found} - without
    assert sum(layer.parameters for layer in found) == sum(p.numel() for p in model.parameters())
    assert sum(layer.forward_ms + layer.backward_ms for layer in found) == 1000 * (
        next(moments) - 1
    )
    timed = {layer.name for layer in found if layer.backward_ms}
    assert timed == owned
    Profile("found", "this test", 1, tuple(found)).to_yaml()


def test_a_replayed_profile_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(overslept_s=0)
    monkeypatch.setattr(layers, "mark", lambda _: time.now_s)
    model = replay(time)
    with LayerClock(model, CPU) as clock:
        for _ in range(3):
            train(model).backward()
    found = {layer.name: layer for layer in medians(clock, warmup=1)}
    for layer in Profile.parse(PROFILE).layers[1:]:  # the first has no parameters
        same = found[f"layers_{layer.name}"]
        assert same.parameters == layer.parameters
        assert same.backward_ms == pytest.approx(layer.backward_ms)
    assert sum(layer.forward_ms for layer in found.values()) == pytest.approx(90)


@pytest.mark.usefixtures("moments")
def test_layers_out_of_the_ordinary_have_their_place() -> None:
    """Frozen weights, weights that another module uses, and tied ones."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = nn.Linear(4, 4)
            self.mix = nn.MultiheadAttention(4, 1)  # uses out_proj's weight without a call
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.below.weight
            self.below.bias.requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mixed, _ = self.mix(*[self.below(inputs)] * 3)
            return self.head(mixed)

    model = Odd()
    with LayerClock(model, CPU) as clock:
        for _ in range(2):
            model(torch.ones(2, 3, 4)).sum().backward()
    found = medians(clock, warmup=0)
    names = [layer.name for layer in found]
    assert names == ["below", "mix", "mix_out_proj", "head"]
    assert [layer.parameters for layer in found] == [16, 60, 20, 0]
    assert found[0].backward_ms > 0 == found[3].backward_ms  # the tied gradient comes last
    assert found[2].forward_ms == 0 < found[2].backward_ms


def test_steps_with_and_without_clocks_take_turns() -> None:
    turns = [clocked(number) for number in range(8)]
    assert turns == [True, False, False, True, True, False, False, True]


def launched(gpu: FakeGpu) -> nn.Module:
    """Two layers, whose kernels run for 20 us forward and 40 us backward, and launch in 100 us."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        layer.register_forward_hook(lambda *_: gpu.kernel("forward", 2e-5, launch_s=1e-4))
        for parameter in layer.parameters():
            parameter.register_hook(lambda _: gpu.kernel("backward", 2e-5, launch_s=1e-4))
    return model


def test_layers_on_a_gpu_last_as_long_as_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch, clock)
    model = launched(gpu)
    with LayerClock(model, CUDA) as timed:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            gpu.host_s += 5e-3  # other work of a step
    for layer in medians(timed, warmup=1):
        assert layer.forward_ms == pytest.approx(0.02), layer.name
        assert layer.backward_ms == pytest.approx(0.04), layer.name
    assert gpu.log.count("sleep") == 4


def average(key: str, kind: DeviceType, own_us: float, whole_us: float, note: bool = False) -> Any:
    """Make an element of torch.profiler's key_averages()."""
    times = {"self_device_time_total": own_us, "device_time_total": whole_us}
    return SimpleNamespace(key=key, device_type=kind, is_user_annotation=note, **times)


def test_kernels_of_a_step_are_counted_once_and_without_the_optimizer() -> None:
    averages = [
        average("aten::conv", DeviceType.CPU, 900, 900),  # its kernels are listed separately
        average("conv_kernel", DeviceType.CUDA, 900, 900),
        average("sgd_kernel", DeviceType.CUDA, 60, 60),
        average("Optimizer.step#SGD.step", DeviceType.CPU, 0, 60),
        average("Optimizer.step#SGD.step", DeviceType.CUDA, 75, 75, note=True),
    ]
    assert kernels_ms(averages, num_steps=3) == pytest.approx(0.3)


def test_parts_that_miss_the_whole_step_are_no_profile_to_trust() -> None:
    assert held_to_step(8, 10.0, 9.5).endswith("the fitted lines give 9.500 ms (-5.0 %)")
    assert "(-17.0 %); warning: too far apart to trust" in held_to_step(8, 10.0, 8.3)
    assert "warning" in held_to_step(8, 10.0, 11.2)


def test_the_fixed_part_is_what_a_line_has_at_no_images() -> None:
    assert fixed_part(10.0, 4.0, 4) == 2.0
    assert fixed_part(3.0, 3.5, 4) == 3.0  # 3.5 of 3 is noise
    assert fixed_part(4.0, 0.5, 4) == fixed_part(1.0, 0.25, 4) == 0.0


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    odd = [Layer("1", 5, 1.5, 2.25, 0.5, 0.125), Layer("on", 0, 0.0, 0.0)]
    profile = Profile("mine", 'a "source": here', 8, tuple(odd), 0.5)
    whole = replace(profile, rest_ms=1.5, fixed_rest_ms=0.25, step_ms=5.0, num_threads=2)
    path = tmp_path / "on.yaml"
    for each in (profile, whole, replace(profile, fixed_share=(0.0, 0.12), name="on")):
        path.write_text(each.to_yaml())
        assert Profile.parse(OmegaConf.load(path)) == each  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "out=my.own.yaml",
            "out=my.own.yaml: must be NAME.yaml, with only letters, digits, _ and - in NAME",
        ),
        ("out=mine.json", "out=mine.json: must name FILE.yaml in an existing folder"),
        ("out=no/mine.yaml", "out=no/mine.yaml: must name FILE.yaml in an existing folder"),
        (
            "strategy=ddp",
            "strategy=ddp has no effect, because nothing is exchanged; to change the model, "
            "set transform=, as in transform=fc1x1",
        ),
        (
            "batch_size=1",
            "batch_size=1: a line through the times needs two different "
            "batch sizes, as in batch_size=16,32",
        ),
        ("batch_size=8,8", "batch_size=8,8: a value is listed twice"),
        ("accumulate=2", "accumulate=2: layers can be measured only with accumulate=1"),
        ("compile=true", "compile=True: layers can be measured only with compile=False"),
        ("measure=noise", "measure=noise: layers can be measured only with measure=breakdown"),
        ("steps=11", "steps=11: must be at least 4 more than warmup_steps=8"),
        ("model=vgg", f"model=vgg: did you mean vgg19? allowed: {', '.join(choices_of('model'))}"),
    ],
)
def test_refuses_in_one_line(setting: str, message: str) -> None:
    assert refusal(profile_layers.main, setting) == message


def test_output_that_nobody_reads_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def present(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(profile, "measure", lambda *_: (None, []))
    monkeypatch.setattr(profile, "present", present)
    monkeypatch.setattr(command, "drop_output", lambda: None)  # would be the tests' own
    assert profile_layers.main(["model=mlp"]) == command.EXIT_UNREAD
