"""Counted operations: by hand, against torch's counter, and without a trace in the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lab.measure.operations import Uncountable, count
from lab.model.alexnet import alexnet_paper
from lab.model.convnet import lenet
from lab.model.transformer import Transformer
from lab.model.work import Work

CLASS = torch.zeros((), dtype=torch.int64)


def images(model: nn.Module, *shape: int) -> Work:
    return count(model, shape, torch.float32, CLASS, cross_entropy)


def values(model: nn.Module, *shape: int, **more: Any) -> Work:
    with torch.no_grad():
        target = torch.zeros(model.to("cpu")(torch.zeros(2, *shape)).shape[1:])
    return count(model, shape, torch.float32, target, mse_loss, **more)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def test_a_transformer_takes_24_width_squared_a_token_and_4_widths_a_pair() -> None:
    length, vocabulary = 32, 64
    with torch.device("meta"):
        model = Transformer(vocabulary=vocabulary, context=length, size="nano")
    targets = CLASS.expand(length)
    work = count(model, (length,), torch.int64, targets, token_loss)
    layers, _, width = model.size
    products = layers * 24 * length * width**2  # 8 around attention, 16 in the two after it
    pairs = layers * 4 * length**2 * width  # of tokens: their weight, and their value's share
    head = 2 * length * width * vocabulary
    assert work.forward_flops_per_sample == products + pairs + head


def test_counts_are_those_of_torch() -> None:
    with torch.device("meta"):
        model = alexnet_paper(input_shape=(3, 224, 224), output_size=1000)
        inputs, targets = torch.empty(1, 3, 224, 224), torch.empty(1, dtype=torch.int64)
    work = images(model, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(inputs), targets).backward()
    assert work.flops_per_sample == counter.get_total_flops()


def test_operations_stand_in_the_layer_that_does_them() -> None:
    work = images(lenet(input_shape=(1, 32, 32), output_size=10), 1, 32, 32)
    names = [layer.name for layer in work.layers]
    assert names == ["features_0", "features_2", "classifier_1", "classifier_3"]
    conv2 = work.layers[1]
    products = 2 * 10 * 10 * 50 * 20 * 25
    assert sum(op.flops.per_sample for op in conv2.forward) == products
    assert sum(op.flops.per_sample for op in conv2.backward) == 2 * products
    assert [op.name for op in conv2.backward] == [
        "max_pool2d_with_indices_backward",
        "convolution_backward",
    ]
    weights = 4 * (50 * 20 * 25 + 50)
    convolution, pooling = conv2.forward
    assert (convolution.num_bytes.fixed, pooling.num_bytes.fixed) == (weights, 0)
    assert work.input_bytes == 4 * 32 * 32


class Tagger(nn.Module):
    """A recurrent layer under a linear one, which shares the embedding's weight."""

    def __init__(self, recurrent: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.recurrent = recurrent
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def test_a_recurrent_layer_is_counted_at_every_step() -> None:
    width, steps = 8, 5
    model = Tagger(nn.LSTM(width, width, num_layers=2, batch_first=True), width)
    tokens = torch.zeros(steps, dtype=torch.int64)
    work = count(model, (steps,), torch.int64, tokens, token_loss)
    cells = 2 * steps * 2 * (width * 4 * width + width * 4 * width)
    assert work.flops_per_sample == 3 * (cells + steps * 2 * width * 11)
    recurrent = work.layers[1]
    every = [*recurrent.forward, *recurrent.backward]
    assert {op.name for op in every} == {"addmm", "mm"} and len(every) == 3 * 2 * 2
    # The head's weight is the embedding's: exchanged once.
    assert work.num_parameters == sum(p.numel() for p in model.parameters())
    assert [layer.parameters for layer in work.layers][-1] == 0
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_both_directions_of_a_recurrent_layer_are_counted(kind: Any) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(input_size=4, hidden_size=6, bidirectional=True, batch_first=True)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs, state = self.layer(inputs)
            assert outputs.shape[1:] == (3, 12) and state.shape[::2] == (2, 6)
            return outputs + state.sum()

    gates = {nn.GRU: 3, nn.RNN: 1}[kind]
    work = values(Last(), 3, 4)
    assert work.forward_flops_per_sample == 2 * 3 * 2 * gates * 6 * (4 + 6)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    work = count(model, (4,), torch.float32, torch.zeros(4), mse_loss)
    assert work.flops_per_sample == 2 * 2 * 4 * 4
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


class NeedsValues(nn.Module):
    """A model that asks for a value, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(inputs) if float(inputs.sum()) == 0 else inputs


def test_a_model_that_needs_values_computes_or_says_why_not() -> None:
    model = NeedsValues()
    work = count(model, (4,), torch.float32, torch.zeros(4), mse_loss)
    assert work.flops_per_sample == 2 * 2 * 4 * 4 and model.seen == 0
    with pytest.raises(Uncountable, match="^on meta: "):
        count(model, (4,), torch.float32, torch.zeros(4), mse_loss, may_compute=False)


@torch.library.custom_op("lab_test::twice", mutates_args=())
def twice(inputs: Tensor) -> Tensor:
    return 2 * inputs


@twice.register_fake
def _(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs)


def test_an_operation_without_a_formula_is_not_counted_as_nothing() -> None:
    class Custom(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(twice(input))

    with pytest.raises(Uncountable, match=r"lab_test.twice has no formula"):
        count(Custom(4, 4), (4,), torch.float32, torch.zeros(4), mse_loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_takes_time_but_is_no_work(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, inputs: Tensor) -> Tensor:
            kept = self.below(inputs)
            return checkpoint(self.inner, kept, use_reentrant=reentrant)  # type: ignore[return-value]

    work = count(Checkpointed(), (4,), torch.float32, torch.zeros(4), mse_loss)
    product = 2 * 4 * 4
    assert work.flops_per_sample == 2 * product + 3 * product  # inputs need no gradient
    every = [op for layer in work.layers for op in (*layer.forward, *layer.backward)]
    assert sum(op.flops.per_sample for op in every) == 6 * product


def test_a_backward_that_is_differentiated_again_is_work() -> None:
    class Penalised(nn.Module):
        """Its output is the gradient of a network by the inputs, as in a gradient penalty."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            inputs = inputs.requires_grad_()
            return torch.autograd.grad(self.net(inputs).sum(), inputs, create_graph=True)[0]

    work = count(Penalised(), (4,), torch.float32, torch.zeros(4), mse_loss)
    # The first layer's product in forward, in its gradient by the inputs, and two of each in
    # backward; the second's in forward and in that gradient, of which backward needs its weight's.
    assert work.flops_per_sample == 2 * (4 * 6 * (1 + 1 + 2 + 2) + 6 * (1 + 1 + 1))


def test_frozen_weights_have_no_gradient_to_exchange() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    work = count(model, (4,), torch.float32, torch.zeros(4), mse_loss)
    assert [layer.parameters for layer in work.layers] == [0, 20]
    assert work.flops_per_sample == 3 * 2 * 4 * 4  # of the second: forward, and its weights'
