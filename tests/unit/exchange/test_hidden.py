"""Which parameters are matrices between hidden layers, told by module."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lab.exchange.direction import Hidden, find_hidden
from lab.exchange.muon import Dion, Muon, native_dtype

WIDTH = 8


class Scale(nn.Module):
    """A user's parametrization with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WIDTH)


class GPT(nn.Module):
    """Its position table has the shape of its hidden matrices."""

    def __init__(self, head: bool = True, tied: bool = False, raw: bool = False) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(20, WIDTH), nn.ModuleList([Block(), Block()])
        if raw:
            self.pos = nn.Parameter(torch.zeros(1, WIDTH, WIDTH))
            self.register = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        else:
            self.positions = nn.Embedding(WIDTH, WIDTH)
        if head:
            self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


class Parts(nn.Module):
    """Layers of one kind each, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Conv2d(4, 6, 3)
        self.grouped, self.depthwise = nn.Conv2d(4, 8, 3, groups=2), nn.Conv1d(4, 4, 3, groups=4)
        self.transposed, self.rnn = nn.ConvTranspose2d(4, 6, 3), nn.LSTM(4, 4)
        self.norm, self.gate = nn.LayerNorm([4, 4]), nn.Linear(4, 1)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 5))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 5))
        self.table = nn.Embedding(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(self.table, "weight", Scale())
        self.weights = nn.ParameterList([torch.ones(3, 4)])
        self.experts_weight = nn.Parameter(torch.ones(2, 3, 4))
        self.head = nn.Linear(4, 3)


def plan(model: nn.Module, adam: Sequence[str] = (), matrices: Sequence[str] = ()) -> Hidden:
    return find_hidden(model, adam, matrices)


IN_BLOCK = ("attention.in_proj_weight", "attention.out_proj.weight", "out.weight")
BLOCKS = {f"blocks.{i}.{name}" for i in (0, 1) for name in IN_BLOCK}
TABLES = {"tokens.weight": "embedding", "positions.weight": "embedding"}
RAW = {"pos": "one row or column", "register": "not the weight of a layer"}


@pytest.mark.parametrize(
    ("model", "by_adam"),
    [
        (GPT(), TABLES | {"head.weight": "output layer"}),
        (GPT(tied=True), TABLES),
        (GPT(head=False), TABLES),  # the token table is used as one, by function
        (GPT(tied=True, raw=True), RAW | {"tokens.weight": "embedding"}),
    ],
)
def test_of_a_transformer_all_matrices_of_blocks_are_hidden(
    model: nn.Module, by_adam: dict[str, str]
) -> None:
    found = plan(model)
    assert (set(found.matrices), found.by_adam) == (BLOCKS, by_adam)


def test_each_kind_of_layer_is_known() -> None:
    found = plan(Parts())
    assert found.matrices == {
        "kernels.weight": (6, 36),
        "transposed.weight": (4, 54),
        "rnn.weight_ih_l0": (16, 4),
        "rnn.weight_hh_l0": (16, 4),
        "normed.parametrizations.weight.original1": (5, 4),
        "spectral.parametrizations.weight.original": (5, 4),
        "weights.0": (3, 4),
    }
    assert found.by_adam == {
        "experts_weight": "not the weight of a layer",
        "grouped.weight": "grouped convolution",
        "depthwise.weight": "grouped convolution",
        "gate.weight": "one row or column",
        "normed.parametrizations.weight.original0": "one row or column",
        "norm.weight": "not a linear map",
        "norm.bias": "not a linear map",
        "table.parametrizations.weight.original": "embedding",
        "table.parametrizations.weight.0.gate": "embedding",
        "head.weight": "output layer",
    }


@pytest.mark.parametrize(
    ("model", "output"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2.weight"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 1))), "1.0.weight"),
        (nn.Sequential(nn.Linear(4, 4), Block(), Block()), None),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)), "0.weight"),
    ],
)
def test_the_output_layer_is_the_last_that_is_in_no_stack(
    model: nn.Module, output: str | None
) -> None:
    assert [*plan(model).by_adam] == ([output] if output else [])


def test_ones_own_lists_come_first() -> None:
    found = plan(GPT(), ["blocks.1.*", "blocks.0.out.weight"], ["head.*", "positions.weight"])
    assert set(found.matrices) == {n for n in BLOCKS if n.startswith("blocks.0.attention")} | {
        "head.weight",
        "positions.weight",
    }
    assert found.by_adam["blocks.1.out.weight"] == "exchange.adam"
    tied = plan(GPT(tied=True), matrices=["head.weight"])
    assert "tokens.weight" in tied.matrices  # any name of a shared parameter will do


@pytest.mark.parametrize(
    ("lists", "line"),
    [
        ((["haed.*"], []), r"^exchange\.adam=haed\.\* matches no trainable parameter; the"),
        (([], ["head.bias"]), r"^exchange\.matrices=head\.bias matches no trainable"),
        ((["head.*"], ["head.*"]), r"^exchange\.adam and exchange\.matrices: both match"),
        (([], ["blocks.0.out.bias"]), r"^exchange\.matrices: blocks\.0\.out\.bias is not a mat"),
    ],
)
def test_a_list_that_fits_nothing_is_refused_in_a_line(
    lists: tuple[list[str], list[str]], line: str
) -> None:
    with pytest.raises(ValueError, match=rf"{line}.*\Z"):
        Muon(adam=lists[0], matrices=lists[1]).setup(GPT())


@pytest.mark.parametrize("make", [Muon, Dion])
def test_choices_say_what_went_to_adam_and_why(make: type[Muon | Dion]) -> None:
    exchange = make(adam=["blocks.*"])
    exchange.setup(GPT())
    (choice,) = exchange.choices()
    names = [*(f"blocks.0.{n}" for n in IN_BLOCK), *(f"blocks.1.{n}" for n in IN_BLOCK)]
    assert choice["matrices"] == 0
    assert choice["by_adam"]["exchange.adam"] == names
    assert choice["by_adam"]["output layer"] == ["head.weight"]
    shapes = {"blocks.0.out.weight": torch.Size([WIDTH, WIDTH]), "new": torch.Size([])}
    assert exchange.moves_as(shapes) == [(WIDTH * WIDTH,), (1,)]


def test_products_are_in_float32_where_bfloat16_is_not_native() -> None:
    assert native_dtype(torch.device("cpu")) is torch.float32
