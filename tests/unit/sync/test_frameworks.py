"""The frameworks of the study, against float64 code that follows each one's own description.

A reference keeps N replicas of weights as plain lists of matrices and uses nothing of the lab: no
buckets, hooks, workers or codecs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import make_worker
from lab.exchange.grouping import binomial_node
from lab.settings.config import build, load
from tests.support.slow import some_of
from tests.support.steps import OF_RUN, made, take_steps

CPU = torch.device("cpu")
NUM_STEPS, LR, MOMENTUM, WEIGHT_DECAY = 6, 0.1, 0.9, 0.01
SIZES = (1, 2, 3, 4)
Weights = list[np.ndarray]  # float64, of each parameter


def network() -> nn.Module:
    """A model with rows of 70 weights, which 1-bit SGD quantises, and of 5, which it does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(size: int) -> Tensor:
    """Return the inputs of each rank and step: [ranks, steps, rows, 70]."""
    return torch.randn(size, NUM_STEPS, 8, 70, generator=torch.Generator().manual_seed(size))


def loss(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def run(size: int, *settings: str) -> list[tuple[list[Tensor], int, int]]:
    """Return each rank's final weights, payload bytes, and values of momentum."""
    data, config = batches(size), load(list(settings))
    configs = [copy.deepcopy(config) for _ in range(size)]  # threads that build write to them
    models = [network() for _ in range(size)]

    def rank_main(comm: Comm) -> tuple[list[Tensor], int, int]:
        config, model = configs[comm.rank], models[comm.rank]
        exchange = build(config.exchange)
        worker = make_worker(config.overlap, CPU, comm.backend, exchange.asynchronous(comm))
        of_run = {key: config[key] for key in OF_RUN}
        sync = made(partial(build, config.sync), model, comm, exchange, worker, **of_run)
        rates: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        optimizer = torch.optim.SGD(model.parameters(), **rates, fused=True)
        inputs, last = data[comm.rank].__getitem__, NUM_STEPS - 1
        with sync:
            take_steps(sync, optimizer, inputs, range(NUM_STEPS), last=last, loss=loss)
        sync.settle()
        worker.close()
        momentum = sum(s["momentum_buffer"].numel() for s in optimizer.state.values())
        return [p.detach() for p in model.parameters()], comm.traffic.payload_bytes, momentum

    return run_ranks(size, rank_main)


def gradients(weights: Weights, batch: Tensor) -> Weights:
    """Return the gradients of the loss on one replica's batch, in float64."""
    model = network().double()
    for parameter, values in zip(model.parameters(), weights, strict=True):
        parameter.data = torch.from_numpy(values.copy())
    of_each = torch.autograd.grad(loss(model(batch.double())), list(model.parameters()))
    return [gradient.numpy() for gradient in of_each]


class Solver:
    """SGD with momentum on one copy of the weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.velocity = weights, [np.zeros_like(each) for each in weights]

    def update(self, mean: Weights) -> None:
        for weight, velocity, gradient in zip(self.weights, self.velocity, mean, strict=True):
            velocity *= MOMENTUM
            velocity += gradient + WEIGHT_DECAY * weight
            weight -= LR * velocity


def replicas(size: int) -> list[Weights]:
    start = [p.detach().double().numpy() for p in network().parameters()]
    return copy.deepcopy([start] * size)


def caffe_pairs(size: int) -> list[tuple[int, int]]:
    """Return (parent, child) of equal GPUs: pair neighbours, drop the second, and repeat."""
    remaining, pairs = list(range(size)), []
    while len(remaining) > 1:
        pairs += list(zip(remaining[::2], remaining[1::2], strict=False))
        remaining = remaining[::2]
    return pairs


def caffe(size: int) -> list[Weights]:
    """Train as P2PSync: weights down the pairs, backward, gradients up, the root's solver."""
    nets, data, pairs = replicas(size), batches(size), caffe_pairs(size)
    solver = Solver(nets[0])

    def weights_down() -> None:  # on_start
        for parent, child in reversed(pairs):
            nets[child] = copy.deepcopy(nets[parent])

    for step in range(NUM_STEPS):
        weights_down()
        diffs = [gradients(nets[gpu], data[gpu, step]) for gpu in range(size)]
        for parent, child in pairs:  # on_gradients_ready
            for ours, theirs in zip(diffs[parent], diffs[child], strict=True):
                ours += theirs
        solver.update([total / size for total in diffs[0]])
    weights_down()
    return nets


def torch7(size: int) -> list[Weights]:
    """Train as DataParallelTable: add replicas' gradients to the first one's in turn."""
    nets, data = replicas(size), batches(size)
    solver = Solver(nets[0])
    for step in range(NUM_STEPS + 1):
        nets[1:] = [copy.deepcopy(nets[0]) for _ in range(1, size)]  # needsSync, before forward
        if step == NUM_STEPS:
            break
        total = gradients(nets[0], data[0, step])
        for gpu in range(1, size):
            for ours, theirs in zip(total, gradients(nets[gpu], data[gpu, step]), strict=True):
                ours += theirs
        solver.update([each / size for each in total])
    return nets


def tensorflow(size: int) -> list[Weights]:
    """Train towers on shared variables; each variable's gradients are stacked and averaged."""
    (variables,), data = replicas(1), batches(size)
    solver = Solver(variables)
    for step in range(NUM_STEPS):
        towers = [gradients(variables, data[tower, step]) for tower in range(size)]
        solver.update([np.stack(each).mean(axis=0) for each in zip(*towers, strict=True)])
    return [variables] * size


def quantise(values: np.ndarray) -> np.ndarray:
    """Return a column's (a row here) means of its negative and of its other values."""
    negative = values < 0
    means = [values[side].mean() if side.any() else 0.0 for side in (negative, ~negative)]
    return np.where(negative, *means)


class Aggregator:
    """CNTK's 1-bit aggregation of N ranks' gradients, with both residuals."""

    def __init__(self, size: int) -> None:
        (like,) = replicas(1)
        self.residuals = [[np.zeros_like(each) for each in like] for _ in range(size)]
        self.of_sums = [np.zeros_like(each) for each in like]  # all owners' shards together

    def mean(self, per_rank: list[Weights]) -> Weights:
        return [self._mean(index, each) for index, each in enumerate(zip(*per_rank, strict=True))]

    def _mean(self, index: int, matrices: tuple[np.ndarray, ...]) -> np.ndarray:
        if matrices[0].ndim < 2 or matrices[0].shape[1] < 64:  # too short to save bytes
            return np.stack(matrices).mean(axis=0)
        total = np.zeros_like(matrices[0])
        for residuals, matrix in zip(self.residuals, matrices, strict=True):
            total += self._send(matrix, residuals[index])
        return self._send(total, self.of_sums[index]) / len(matrices)

    @staticmethod
    def _send(matrix: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the decoded sum of `matrix` and `residual`, which keeps the error."""
        values = matrix + residual
        arrives = np.stack([quantise(row) for row in values])
        residual[:] = values - arrives
        return arrives


def cntk(size: int, double_buffer: bool) -> list[Weights]:
    """Train as CNTK; a double buffer updates with the sums of one step before."""
    (weights,), data = replicas(1), batches(size)
    solver, aggregator = Solver(weights), Aggregator(size)
    buffered: Weights | None = None
    for step in range(NUM_STEPS):
        newest = aggregator.mean([gradients(weights, data[rank, step]) for rank in range(size)])
        apply, buffered = (buffered, newest) if double_buffer else (newest, None)
        if apply is not None:  # None until samples have been aggregated
            solver.update(apply)
    return [weights] * size


REFERENCES: dict[str, Callable[[int], list[Weights]]] = {
    "strategy=caffe": caffe,
    "strategy=torch7": torch7,
    "strategy=torch7 bucket_mb=1e-6": torch7,
    "strategy=tensorflow": tensorflow,
    "strategy=cntk": partial(cntk, double_buffer=False),
    "strategy=cntk sync.double_buffer=true": partial(cntk, double_buffer=True),
    "strategy=cntk sync.double_buffer=true bucket_mb=1e-6": partial(cntk, double_buffer=True),
}


@pytest.mark.parametrize("size", some_of(SIZES, every=2))
@pytest.mark.parametrize("settings", REFERENCES)
def test_weights_are_those_of_a_naive_float64_reference(settings: str, size: int) -> None:
    references = REFERENCES[settings](size)
    for (weights, *_), expected in zip(run(size, *settings.split()), references, strict=True):
        for ours, theirs in zip(weights, expected, strict=True):
            error = np.linalg.norm(ours.double().numpy() - theirs) / np.linalg.norm(theirs)
            assert error < 1e-6


def test_cntk_without_a_double_buffer_is_onebit_after_backward_bit_for_bit() -> None:
    ours = run(3, "strategy=cntk")
    theirs = run(3, "strategy=onebit", "overlap=false", "bucket_mb=null")
    late = run(3, "strategy=cntk", "sync.double_buffer=true")
    for a, b, c in zip(ours, theirs, late, strict=True):
        assert all(map(torch.equal, a[0], b[0])) and not any(map(torch.equal, a[0], c[0]))
        assert a[1] == b[1] == c[1] > 0  # bytes


SENT = {  # whole models that each of four ranks sends in a step
    "caffe": [2, 1, 2, 1],  # down to 2 and 1; up; up, and down to 3; up
    "torch7": [3, 1, 1, 1],
    "tensorflow": [3, 1, 1, 1],
}


@pytest.mark.parametrize("strategy", SENT)
def test_the_root_alone_holds_momentum_and_sends_its_weights_to_all(strategy: str) -> None:
    ranks = run(4, f"strategy={strategy}")
    model = sum(p.nbytes for p in network().parameters())
    assert [momentum for *_, momentum in ranks] == [model // 4, 0, 0, 0]
    for weights, *_ in ranks:
        assert all(map(torch.equal, weights, ranks[0][0]))
    once = [32 if strategy == "tensorflow" else 0, 0, 0, 0]  # the order of four buckets, int64
    sent = [payload for _, payload, _ in ranks]
    assert sent == [NUM_STEPS * n * model + o for n, o in zip(SENT[strategy], once, strict=True)]


def test_the_binomial_tree_is_made_of_caffes_pairs() -> None:
    for size in range(1, 18):
        pairs = caffe_pairs(size)
        for rank in range(size):
            children = [child for parent, child in pairs if parent == rank]
            assert binomial_node(rank, size).children == children


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("strategy=caffe exchange=allreduce", "exchange=AllReduce: only the root updates"),
        ("strategy=caffe exchange.chunk_mb=4", "exchange=Tree: only the root updates, so"),
        ("strategy=torch7 precision=fp16", "precision=fp16: .*but only the root would know"),
        ("strategy=cntk overlap=true", "overlap=true: must be false, because sync.double_buffer"),
        ("strategy=cntk sync.double_buffer=true overlap=false", "overlap=false: must be true"),
        ("strategy=cntk sync.double_buffer=1", "sync.double_buffer=1: must be true or false"),
        ("strategy=cntk sync.double_buffer=true precision=fp16", "precision=fp16: .*but a step"),
    ],
)
def test_wrong_settings(settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(1, *settings.split())
