"""Losses on their way from a fake GPU to the host; clipping; batches."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lab.training.trainer import Losses, Trainer, clip_gradients, marked


class OnGpu:
    """A loss whose copy holds its value only after a wait for the event behind it."""

    device = torch.device("cuda")

    def __init__(self, value: float, log: list[str]) -> None:
        self.value, self.log = value, log

    def to(self, device: str, non_blocking: bool, copy: bool) -> OnGpu:
        assert (device, non_blocking, copy) == ("cpu", True, True)
        self.log.append(f"copy {self.value:g}")
        return self

    def record_event(self) -> OnGpu:
        self.log.append("event")
        return self

    def synchronize(self) -> None:
        self.log.append("wait")

    def __float__(self) -> float:
        self.log.append(f"read {self.value:g}")
        return self.value


def test_the_host_waits_for_a_loss_when_it_reads_it_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: OnGpu(0.0, log))
    losses = Losses()
    assert losses.read_last() is None
    losses.append(OnGpu(1.0, log))  # type: ignore[arg-type]
    assert log == ["copy 1", "event"]
    losses.append(OnGpu(2.0, log))  # type: ignore[arg-type]
    assert log[2:] == ["wait", "read 1", "copy 2", "event"]
    assert losses.read_last() == 2
    assert losses.read_last() is None
    assert losses.read.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("found", "expected"), [((), 2.0), ((None, True), 2.0), ((True, False), float("nan"))]
)
def test_what_exchanges_find_turns_a_loss_into_nan(
    found: tuple[bool | None, ...], expected: float
) -> None:
    flags = (None if flag is None else torch.tensor(flag) for flag in found)
    assert float(marked(torch.tensor(2.0), *flags)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, theirs = (nn.Linear(4, 3) for _ in range(2))
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    clip_gradients(ours, max_norm)
    nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_clipping_spreads_nothing_that_is_not_finite(bad: float) -> None:
    model = nn.Linear(4, 3)
    model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)
    model.bias.grad[1] = bad
    clip_gradients(model, 1.0)
    assert model.weight.grad.isfinite().all()
    assert not model.bias.grad.isfinite().all()


def test_a_rank_without_gradients_has_nothing_to_clip() -> None:
    clip_gradients(nn.Linear(4, 3), 1.0)


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([], r"\(\)"),
        ([(torch.zeros(3), torch.zeros(3))], r"\(3, 3\)"),
        ([(torch.zeros(4), torch.zeros(3))], r"\(4, 3\)"),
        ([([0.0], torch.zeros(4))], r"\(list, 4\)"),
        ([(torch.zeros(4), torch.zeros(4), torch.zeros(4))], r"\(4, 4, 4\)"),
    ],
)
def test_batches_of_other_sizes_would_weigh_samples_unequally(
    batches: list[Any], found: str
) -> None:
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(data={"_target_": "mine.Data"}),
        clock=SimpleNamespace(phase=lambda _: nullcontext()),
        graph=None,
        train=lambda inputs, _targets: inputs,
        losses=[],
        _samples=(4,),
    )
    trainer._refuse_batch = partial(Trainer._refuse_batch, trainer)
    line = (
        rf"^data=mine.Data: train_batches yields {found} samples; it must yield .* 4 inputs and 4"
    )
    with pytest.raises(RuntimeError, match=line):
        Trainer._step(trainer, iter(batches))
    good = torch.zeros(4), torch.zeros(4)
    Trainer._step(trainer, iter([good]))
    assert trainer.losses == [good[0]]
