"""Replay on a fake clock: when layers end, and when gradients appear and how large they are."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.model.profile import SLOW_FACTOR, Profile
from lab.model.replay import SLACK_S, Pace, Replay
from tests.support import refusing

PROFILE: dict[str, Any] = {
    **{"name": "small", "source": "made up", "reference_batch": 4},
    "layers": [
        {"name": "pool", "parameters": 0, "forward_ms": 10, "backward_ms": 20},
        {"name": "conv", "parameters": 700, "forward_ms": 30, "backward_ms": 40},
        {"name": "fc", "parameters": 1_234_567, "forward_ms": 50, "backward_ms": 60},
    ],
}
OVERSLEPT_S = 0.005


class Time:
    """A clock that advances only in `sleep`, which always returns too late."""

    def __init__(self, overslept_s: float = OVERSLEPT_S) -> None:
        self.now_s = 100.0
        self.overslept_s = overslept_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.overslept_s


@pytest.fixture
def time() -> Time:
    return Time()


def replay(time: Time, **settings: Any) -> Replay:
    pace = Pace(time.now, time.sleep)
    settings = {"profile": PROFILE, "input_shape": (1, 2, 2), "output_size": 3} | settings
    return Replay(**settings, pace=pace)


def train(model: Replay, batch: int = 4) -> Tensor:
    logits = model(torch.zeros(batch, 1, 2, 2))
    labels = torch.zeros(batch, dtype=torch.int64)
    return torch.nn.functional.cross_entropy(logits, labels)


def gradients(model: Replay) -> dict[str, Tensor]:
    """Return gradients by name, and remove them from the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def work(pace: Pace, *pieces: float) -> None:
    for seconds in pieces:
        with pace.work(seconds):
            pass


def test_oversleeping_does_not_add_up(time: Time) -> None:
    work(Pace(time.now, time.sleep), 0.1, 0.2, 0.001, 0.3)  # one is due before it begins
    assert time.now_s == pytest.approx(100.601 + OVERSLEPT_S)


@pytest.mark.parametrize(("held_up_s", "delay_s"), [(SLACK_S / 2, 0.0), (0.05, 0.05)])
def test_only_what_really_holds_the_host_up_delays(
    time: Time, held_up_s: float, delay_s: float
) -> None:
    pace = Pace(time.now, time.sleep)
    work(pace, 0.1)
    time.now_s += held_up_s
    work(pace, 0.1)
    assert time.now_s == pytest.approx(100.2 + delay_s + OVERSLEPT_S)


def test_what_is_done_within_a_piece_is_part_of_it(time: Time) -> None:
    pace = Pace(time.now, time.sleep)
    for busy_s in (0.03, 0.5):  # less and more than the piece
        with pace.work(0.1):
            time.now_s += busy_s
    assert time.now_s == pytest.approx(100.1 + OVERSLEPT_S + 0.5)
    work(pace, 0.1)
    assert time.now_s == pytest.approx(100.7 + OVERSLEPT_S)


def test_a_pass_begins_when_it_is_asked_for(time: Time) -> None:
    pace = Pace(time.now, time.sleep)
    time.now_s = 200.0
    pace.restart()
    work(pace, 0.1)
    assert time.now_s == pytest.approx(200.1 + OVERSLEPT_S)


def test_a_layers_gradients_are_there_when_its_backward_ends(time: Time) -> None:
    model, seen = replay(time), []
    for name, parameter in model.named_parameters():
        note = partial(lambda name, _: seen.append((name, time.now_s)), name)
        parameter.register_post_accumulate_grad_hook(note)
    loss = train(model)
    assert time.now_s == pytest.approx(100.09 + OVERSLEPT_S)
    loss.backward()
    names = ["layers.fc.bias", "layers.fc.weight", "layers.conv.bias"]
    assert sorted(name for name, _ in seen[:2]) == names[:2]
    assert [name for name, _ in seen[2:]] == names[2:]
    moments = [moment for _, moment in seen]
    assert moments == pytest.approx([100.15 + OVERSLEPT_S] * 2 + [100.19 + OVERSLEPT_S])
    assert time.now_s == pytest.approx(100.21 + OVERSLEPT_S)


def test_many_layers_keep_that_order(time: Time) -> None:
    layers = [
        {"name": f"l{i}", "parameters": 5000 + i, "forward_ms": 1, "backward_ms": i}
        for i in range(20)
    ]
    model, seen = replay(time, profile={**PROFILE, "layers": layers}), []
    for name, parameter in model.named_parameters():
        note = partial(lambda name, _: seen.append((name.split(".")[1], time.now_s)), name)
        parameter.register_post_accumulate_grad_hook(note)
    train(model).backward()
    assert list(dict.fromkeys(name for name, _ in seen)) == [f"l{i}" for i in range(19, -1, -1)]
    ends = dict(zip(range(19, -1, -1), accumulate(range(19, -1, -1)), strict=True))
    for name, moment in seen:
        late_s = moment - (100.02 + ends[int(name[1:])] / 1000)
        assert -1e-6 < late_s <= OVERSLEPT_S + 1e-6


def test_an_exchange_in_a_hook_delays_the_layers_below(time: Time) -> None:
    model = replay(time)

    def exchange(_: Tensor) -> None:
        time.now_s += 0.5

    model.get_parameter("layers.fc.weight").register_post_accumulate_grad_hook(exchange)
    train(model).backward()
    assert time.now_s == pytest.approx(100.71 + OVERSLEPT_S)


def test_a_passs_time_is_that_of_its_own_micro_batch(time: Time) -> None:
    train(replay(time, time_scale=2), batch=2).backward()
    assert time.now_s == pytest.approx(100.21 + OVERSLEPT_S)
    train(replay(time), batch=8).backward()
    assert time.now_s == pytest.approx(100.63 + 2 * OVERSLEPT_S)


def test_gradients_have_the_profiles_sizes_as_matrices(time: Time) -> None:
    for bytes_scale in (1, 0.5, 0.0214):
        model = replay(time, bytes_scale=bytes_scale)
        profile = Profile.parse(PROFILE).scaled(bytes_scale)
        for layer in profile.layers:
            parameters = dict(model.layers.get_submodule(layer.name).named_parameters())
            assert sum(p.numel() for p in parameters.values()) == profile.values(layer)
            if profile.values(layer) >= 1024:
                assert 1024 <= parameters["weight"].shape[1] <= 2048
                assert "bias" not in parameters or parameters["bias"].numel() < 64


def test_gradients_follow_the_losss_factors_and_are_memory_of_their_own(time: Time) -> None:
    model = replay(time)
    train(model).backward()
    whole = gradients(model)
    (train(model) / 4).backward()
    for name, quarter in gradients(model).items():
        assert quarter.norm() > 0
        assert quarter.data_ptr() != model.get_parameter(name).data_ptr()
        torch.testing.assert_close(4 * quarter, whole[name])


def test_evaluation_does_not_wait(time: Time) -> None:
    logits = replay(time).eval()(torch.ones(4, 1, 2, 2))
    assert logits.tolist() == [[0, 0, 0]] * 4
    assert time.now_s == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bytes_scale": 0}, "model.bytes_scale=0: must be a number above 0"),
        ({"bytes_scale": 1e-9}, "model.bytes_scale=1e-09: leaves no values in any layer; use"),
        ({"time_scale": "a"}, "model.time_scale=a: must be a number above 0"),
        ({"profile": {"name": "x"}}, "profile=x: source: is missing"),
    ],
)
def test_refuses_in_one_line(time: Time, settings: dict[str, Any], message: str) -> None:
    with refusing(message):
        replay(time, **settings)


def test_layers_take_longer_on_a_slow_host(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    def layer_s() -> float:
        layer: Any = replay(time).layers[1]
        return layer.profile.forward_s(layer.layer, 4)

    usual = layer_s()
    monkeypatch.setenv(SLOW_FACTOR, "3")
    assert layer_s() == pytest.approx(3 * usual)
    monkeypatch.setenv(SLOW_FACTOR, "nan")
    with refusing("LAB_SLOW_FACTOR=nan: must be a number from 1 to 100"):
        layer_s()
