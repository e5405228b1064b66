"""The module clock: every piece of work has one owner, and nothing stays behind in the model."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.device.clock import (
    Call,
    ModuleClock,
    ModulePass,
    clock_cost,
    noting_calls,
    seconds_of_bias,
    share_of_data,
)
from lab.device.layers import PASSES, backward_ratio, by_kind, passes_of
from lab.measure.clock import Mark

CPU = torch.device("cpu")
WORK_S = 0.25
HOST = SimpleNamespace(now_s=0.0)  # a clock that only slow functions advance


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: HOST.now_s)
    monkeypatch.setattr("lab.measure.clock.time", clock)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        HOST.now_s += WORK_S
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        HOST.now_s += 2 * WORK_S
        return gradients[0]


class Slow(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return _Slow.apply(inputs)  # pyright: ignore[reportReturnType]


class Block(nn.Module):
    """A product, a slow function of its own, and a slow module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.slow = nn.Linear(4, 4), Slow()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.slow(_Slow.apply(self.product(inputs)))  # pyright: ignore


def one_pass(model: nn.Module) -> ModulePass:
    clock = ModuleClock(model, CPU)
    loss = clock.around("(loss)", lambda outputs: _Slow.apply(outputs).sum())  # pyright: ignore
    with clock:
        loss(model(torch.ones(2, 4))).backward()
    loss(model(torch.ones(2, 4))).backward()  # outside: nothing is noted
    assert len(clock.passes) == 1
    return clock.passes[0]


@pytest.mark.usefixtures("host_clock")
def test_each_function_belongs_to_the_module_that_calls_it_forward_and_backward() -> None:
    one = one_pass(nn.Sequential(Block(), nn.Identity()))
    idle, works = (0.0, 0.0), (WORK_S, 2 * WORK_S)
    assert one.seconds() == {
        **{"model": idle, "0": works, "0.product": idle},
        **{"0.slow": works, "1": idle, "(loss)": works},
    }
    assert one.creators == {"0", "0.product", "0.slow", "(loss)"}  # others only call modules


@pytest.mark.usefixtures("host_clock")
def test_a_shared_module_adds_up_and_each_forward_is_given_back() -> None:
    slow = Slow()
    model = nn.Sequential(nn.Linear(4, 4), slow, slow)
    replaced = model[0].forward = partial(model[0].forward)  # as checkpointing does
    assert one_pass(model).seconds()["1"] == (2 * WORK_S, 4 * WORK_S)
    assert model[0].forward is replaced
    assert "forward" not in vars(model) and "forward" not in vars(slow)


@pytest.mark.parametrize("share", [0.25, None])
def test_parts_of_a_layer_add_up_to_it(share: float | None) -> None:
    layer = {
        "kind": "Conv2d",
        "forward_s": {"median": 1.0},
        "backward_s": {"median": 2.0},
        "data_share": share,
        "has_weights": True,
    }
    parts = passes_of(layer)
    assert list(parts) == list(PASSES)
    assert list(parts.values()) == ([1.0, 0.5, 1.5, 0.0] if share else [1.0, 0.0, 0.0, 2.0])
    relu = {**layer, "kind": "ReLU", "has_weights": False, "data_share": None}
    kinds = by_kind([relu, layer, layer])
    assert list(kinds) == ["Conv2d", "ReLU"] and kinds["Conv2d"]["forward"] == 2.0
    assert kinds["ReLU"]["backward data"] == 2.0
    assert backward_ratio([relu, layer], ("Conv2d",)) == 2.0
    assert backward_ratio([relu], ("Conv2d",)) is None


def test_backward_is_divided_only_where_its_parts_are_computed_apart() -> None:
    calls: dict[str, Call] = {}
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64), nn.LayerNorm(64))
    with noting_calls(model, calls):
        model(torch.ones(512, 256))
    assert list(calls) == ["0", "1", "2"]
    assert share_of_data(calls["0"]) == 0.0  # a step does not need it
    share = share_of_data(calls["1"])
    assert share is None or 0.0 < share < 1.0
    ids = Call(nn.Embedding(4, 2), torch.zeros(3, dtype=torch.int64), needs_data=True)
    assert share_of_data(ids) is None


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv2d(3, 4, 3), (2, 3, 8, 8)), (nn.Linear(8, 4), (2, 5, 8))]
)
def test_a_bias_is_timed_on_the_shapes_of_its_layer(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    before = layer.state_dict()["bias"].clone()
    times_s = seconds_of_bias(Call(layer, torch.ones(shape), needs_data=True))
    assert times_s is not None and times_s.shape[1] == 2 and np.all(times_s > 0)
    assert torch.equal(layer.state_dict()["bias"], before)


@pytest.mark.parametrize("layer", [nn.Linear(8, 4, bias=False), nn.LayerNorm(8)])
def test_what_is_no_product_or_has_no_bias_takes_none(layer: nn.Module) -> None:
    call = Call(layer, torch.ones(2, 8), needs_data=True)
    assert seconds_of_bias(call) is None


def test_what_clocks_add_is_taken_from_each_span_of_forward() -> None:
    spans: list[tuple[str, Mark, Mark]] = [("a", 0.0, 2.0), ("b", 2.0, 3.0), ("a", 3.0, 4.0)]
    taken = ModulePass(spans, [("a", 5.0, 6.0)]).seconds(span_s=0.25)
    assert taken == {"a": (2.5, 1.0), "b": (0.75, 0.0)}


def test_clocks_cost_some_microseconds() -> None:
    assert all(0 <= added_s < 1e-3 for added_s in clock_cost().values())  # noise may hide it
