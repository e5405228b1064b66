"""Language models: counts, causality, positions, tied embedding, one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lab.model.lstm import LSTM
from lab.model.transformer import Rotary, Transformer
from tests.support import refusing

Make = Callable[..., nn.Module]
VOCABULARY, CONTEXT = 11, 8
GPT2 = {"vocabulary": 50257, "context": 1024}
PTB = {"vocabulary": 10_000}
PUBLISHED = [
    # model, arguments, parameters, source
    (Transformer, {**GPT2, "size": "small"}, 124_439_808, "openai-community/gpt2's checkpoint"),
    (Transformer, {**GPT2, "size": "xl"}, 1_557_611_200, "gpt2-xl's"),
    # nanoGPT's 10,646,784 without learned positions, plus 4224 biases in each of 6 blocks
    # (9 * 384 of linear layers, 2 * 384 of norms) and 384 of the last norm
    (
        Transformer,
        {"vocabulary": 65, "context": 256, "size": "mini", "positions": "rotary"},
        *(10_646_784 + 6 * 4224 + 384, "nanoGPT's shakespeare_char, 10.65 M"),
    ),
    # 66 M: Zaremba et al. 2014, section 4.1, with the second biases of torch, 4 * 1500 a layer
    (LSTM, {**PTB, "hidden": 1500}, 66_022_000 + 2 * 4 * 1500, "Zaremba et al., the large one"),
    (LSTM, PTB, 6_180_624 + 2 * 4 * 256, "Shi et al., from dlbench's layers"),
]


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small(**arguments: Any) -> Transformer:
    torch.manual_seed(0)
    defaults = {"vocabulary": VOCABULARY, "context": CONTEXT, "size": "nano"}
    return Transformer(**(defaults | arguments))


@pytest.mark.parametrize(("make", "arguments", "parameters"), [row[:3] for row in PUBLISHED])
def test_has_its_published_parameters(
    make: Make, arguments: dict[str, Any], parameters: int
) -> None:
    with torch.device("meta"):
        model = make(**arguments)
        logits = model(torch.zeros(2, 4, dtype=torch.int64))
    assert size(model) == parameters
    assert logits.shape == (2, 4, arguments["vocabulary"])


def test_sizes_can_be_changed_in_part() -> None:
    model = small(size="mini", layers=2, width=36)
    assert model.size == (2, 6, 36)
    assert len(model.blocks) == 2
    assert model(torch.zeros(1, CONTEXT, dtype=torch.int64)).shape == (1, CONTEXT, VOCABULARY)


@pytest.mark.parametrize(
    "model",
    [small(), small(positions="rotary"), LSTM(vocabulary=VOCABULARY, hidden=16)],
    ids=["learned", "rotary", "lstm"],
)
def test_a_token_changes_no_logits_before_it(model: nn.Module) -> None:
    tokens = torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 5] = (tokens[:, 5] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens), model(other)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert all(not torch.allclose(after[:, t], before[:, t]) for t in range(5, CONTEXT))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_order_of_earlier_tokens_matters(positions: str) -> None:
    model = small(positions=positions)
    with torch.no_grad():
        one, other = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
    assert not torch.allclose(one, other)


def test_rotary_products_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, generator=generator)
    rotary = Rotary(CONTEXT, 6)
    queries, keys = rotary(query.expand(CONTEXT, 6)), rotary(key.expand(CONTEXT, 6))
    products = queries @ keys.T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1])
    assert products[0].std() > 0.1  # and on that it does depend
    torch.testing.assert_close(queries[0], query)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(CONTEXT))


def test_rotary_begins_at_position_0_for_shorter_sequences_too() -> None:
    rotary, vectors = Rotary(CONTEXT, 4), torch.ones(1, 2, CONTEXT, 4)
    torch.testing.assert_close(rotary(vectors[:, :, :3]), rotary(vectors)[:, :, :3])


def test_a_tied_embedding_is_one_parameter() -> None:
    tied, untied = small(), small(tied=False)
    assert size(untied) - size(tied) == VOCABULARY * 48
    assert "head.weight" not in dict(tied.named_parameters())
    tied(torch.zeros(1, CONTEXT, dtype=torch.int64)).sum().backward()
    torch.optim.SGD(tied.parameters(), lr=0.1).step()
    assert tied.head.weight is tied.embedding.weight


def test_branches_begin_smaller_the_more_there_are() -> None:
    model = small(layers=8, width=192)
    first, last = model.blocks[0], model.blocks[-1]

    def deviation(layer: nn.Module) -> float:
        return float(layer.get_parameter("weight").detach().std())

    assert deviation(first.get_submodule("attention.qkv")) == pytest.approx(0.02, rel=0.05)
    for end in (first.get_submodule("attention.out"), last.get_submodule("feed_forward.out")):
        assert deviation(end) == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    "model",
    [small(), small(positions="rotary", tied=False), LSTM(vocabulary=VOCABULARY, hidden=16)],
    ids=["learned", "rotary", "lstm"],
)
def test_steps_reduce_the_loss(model: nn.Module) -> None:
    tokens = torch.arange(2 * (CONTEXT + 1)).view(2, -1) % VOCABULARY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(torch.tensor(VOCABULARY).log().item(), abs=0.3)
    assert losses[0] > losses[1] > losses[2]


def test_dropout_differs_in_training_alone() -> None:
    for model in (small(dropout=0.5), LSTM(vocabulary=VOCABULARY, hidden=16, dropout=0.5)):
        tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_trains_in_bfloat16() -> None:
    model = small(positions="rotary")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.zeros(1, CONTEXT, dtype=torch.int64))
    assert logits.dtype == torch.bfloat16
    logits.sum().backward()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (small, {"heads": 5}, "model.width=48: must be a multiple of model.heads=5"),
        (small, {"heads": 16, "positions": "rotary"}, "model.positions=rotary: rotates pairs"),
        (small, {"vocabulary": None}, "model=transformer: learns sequences of tokens"),
        (small, {"context": None}, "model=transformer: learns sequences of tokens"),
        (LSTM, {}, "model=lstm: learns sequences of tokens, but this data has no vocabulary"),
        (LSTM, {**PTB, "init_scale": 0}, "model.init_scale=0: must be a number above 0"),
    ],
)
def test_refuses_in_one_line(make: Make, arguments: dict[str, Any], message: str) -> None:
    with refusing(message):
        make(**arguments)


def test_refuses_sequences_longer_than_its_context() -> None:
    with pytest.raises(
        ValueError, match=f"{CONTEXT + 1} tokens, but the model's context is {CONTEXT}"
    ):
        small()(torch.zeros(1, CONTEXT + 1, dtype=torch.int64))
