"""Where a forward first reads its parameters, however it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.sync.first_use import FirstReads


class Tied(nn.Module):
    """An output layer with the embedding's weight, which its function reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.embed(x)), self.embed.weight)


class ReadsAhead(nn.Module):
    """A model that reads a view of its last layer's weight before that layer begins."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.view = self.last.weight.view(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.view.detach().mean())


class Hidden(torch.autograd.Function):
    """Takes a parameter, and shows no operation that reads it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.weight)  # type: ignore[return-value]


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj's weight and never calls that module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.attend = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.attend(x, x, x)[0]


X = torch.zeros(2, 3, 4)
OF_0 = ["0.weight", "0.bias"]
OF_ATTENTION = ["attend.in_proj_weight", "attend.out_proj.weight"]
IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "inputs", "waits"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False)),
            X,
            {"0": OF_0, "2": ["2.weight"]},
        ),
        (Tied(), IDS, {"embed": ["embed.weight"], "norm": ["norm.weight", "norm.bias"]}),
        (
            ReadsAhead(),
            X,
            {
                "": ["last.weight"],
                "first": ["first.weight", "first.bias"],
                "last": ["last.bias"],
                "never": ["never.weight", "never.bias"],
            },
        ),
        (nn.Sequential(nn.Linear(4, 4), Raw()), X, {"0": OF_0, "1": ["1.weight"]}),
        (Attention(), X, {"first": ["first.weight"], "attend": OF_ATTENTION}),
        (nn.LSTM(4, 4, bias=False), X, {"": ["weight_ih_l0", "weight_hh_l0"]}),
    ],
)  # fmt: skip
def test_a_parameter_is_waited_for_before_its_first_read(
    model: nn.Module, inputs: Tensor, waits: dict[str, list[str]]
) -> None:
    with FirstReads(model) as reads:
        model(inputs)
    assert reads.waits() == waits
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    model(inputs)
    assert not hooked and reads.waits() == waits
