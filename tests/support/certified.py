"""Runs among threads whose first exchanges are examined, as `check=first` does.

    python -m tests.support.certified

runs all clean cases, and says which were accused or not proven.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.certificate.check import check_of
from lab.certificate.examination import CertificateError
from lab.distributed.comm import Comm
from lab.distributed.thread_comm import run_ranks
from lab.distributed.worker import make_worker
from lab.record.schema import Certificate
from lab.settings.config import build, load
from lab.sync.base import Sync, SyncParts
from tests.support.cases import DIRECTIONS, LIBRARIES, OVER_TIME, STRATEGIES

CPU = torch.device("cpu")
ROWS, STEPS = 8, 5


class Tied(nn.Module):
    """Token ids through a tied embedding, attention, a scalar and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.never = nn.Embedding(30, 72), nn.Linear(3, 3)
        self.attention, self.norm = nn.MultiheadAttention(72, 4, batch_first=True), nn.LayerNorm(72)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.scale * (x @ self.tokens.weight.T)


class Images(nn.Sequential):
    """Convolutions with normalisation, and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)),
        )


def _channels_last() -> nn.Module:
    images: Any = Images()
    return images.to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    """An LSTM, whose last output is read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Perceptron(nn.Sequential):
    """Two layers, one of them frozen in part, and one of them large."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(70, 300), nn.Tanh(), nn.Linear(300, 5))
        self[2].bias.requires_grad_(False)


class Typed(nn.Module):
    """Layers of some types, real or complex, whose outputs are added."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 30, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        dtypes = (next(layer.parameters()).dtype for layer in self.layers)
        each = zip(self.layers, dtypes, strict=True)
        outputs = [
            layer((torch.fft.fft(x.double()) if d.is_complex else x).to(d)) for layer, d in each
        ]
        reals = [output.abs() if output.is_complex() else output for output in outputs]
        return sum(output.double().tanh() for output in reals)  # type: ignore[return-value]


class Laid(nn.Module):
    """Parameters that are not row-major, single values, none, of sparse gradients, or used twice.

    The last layer is computed again in backward, by reentrant checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(40, 50).T)
        self.sliced = nn.Parameter(torch.randn(40, 99)[:, ::3])
        self.permuted = nn.Parameter(torch.randn(5, 8, 33).permute(2, 0, 1))
        self.scalar, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
        self.rows, self.twice = nn.Embedding(20, 40, sparse=True), nn.Linear(33, 33)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids).sum(dim=1)
        x = (x @ self.columns.T)[:, :40] @ self.sliced + x @ self.permuted.reshape(33, 40).T
        for _ in range(2):
            x = checkpoint(self.twice, x.tanh(), use_reentrant=True)
        return self.scalar * x + self.none.sum()


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda chance: torch.randn(ROWS, *shape, generator=chance)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "perceptron": (Perceptron, _normal(70)),
    "images": (Images, _normal(3, 8, 8)),
    "channels last": (_channels_last, _normal(3, 8, 8)),
    "recurrent": (Recurrent, _normal(6, 16)),
    "tied": (Tied, lambda chance: torch.randint(30, (ROWS, 7), generator=chance)),
}
DTYPES = {
    "double": (torch.float64,),
    "complex double": (torch.complex128,),
    "bfloat16": (torch.bfloat16,),
    "half": (torch.float16,),
    "mixed": (torch.bfloat16, torch.float32, torch.complex64, torch.float16),
}
ODD_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    **{name: (partial(Typed, *dtypes), _normal(40)) for name, dtypes in DTYPES.items()},
    "laid": (Laid, lambda chance: torch.randint(20, (ROWS, 6), generator=chance)),
}


@dataclass(frozen=True)
class Case:
    """A run: its settings, a key of MODELS, ranks, micro-batches, and the scale of the loss.

    Attributes:
        spoil: called with model and sync before the first step, on each rank.
        same_samples: all ranks train on the same.
    """

    settings: tuple[str, ...]
    model: str = "perceptron"
    size: int = 2
    accumulate: int = 1
    loss_scale: float = 1.0
    spoil: Callable[[nn.Module, Sync, int], None] | None = None
    same_samples: bool = False

    def __str__(self) -> str:
        more = f"accumulate={self.accumulate} scale={self.loss_scale:g}"
        return f"{' '.join(self.settings)} {self.model} n={self.size} {more}"


def certified(case: Case) -> list[Certificate]:
    """Run a case; return each rank's certificate, also of a run that failed."""
    config = load(list(case.settings))
    configs = [copy.deepcopy(config) for _ in range(case.size)]  # threads that build write to them
    make, inputs = {**MODELS, **ODD_MODELS}[case.model]
    models = []
    for _ in range(case.size):
        torch.manual_seed(0)
        models.append(make())

    def rank_main(comm: Comm) -> Certificate:
        config, model = configs[comm.rank], models[comm.rank]
        exchange = build(config.exchange)
        asynchronous = exchange.asynchronous(comm)
        worker = make_worker(config.overlap, CPU, comm.backend, asynchronous)
        precision = "fp32" if case.loss_scale == 1 else "fp16"
        parts = (config.overlap, config.bucket_mb, precision, case.accumulate)
        sync = build(config.sync, SyncParts(model, model, exchange, comm, worker, *parts))
        try:
            return _train(case, config, model, sync, worker, inputs)
        finally:
            worker.close()

    return run_ranks(case.size, rank_main)


def _train(case: Case, config: Any, model: nn.Module, sync: Sync, worker: Any, inputs: Any) -> Any:
    comm = sync.comm

    def gather(tensor: Tensor) -> Tensor:
        worker.wait()  # a Comm is not for two threads
        before = copy.copy(comm.traffic)
        out = tensor.new_empty(comm.size, *tensor.shape)
        comm.all_gather(out, tensor)
        comm.traffic = before
        return out

    exchange: Any = OmegaConf.to_container(config.exchange, resolve=True)
    check = check_of(model, sync, gather, comm.size, exchange, config.strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(0 if case.same_samples else comm.rank)
    try:
        with sync, check:
            if case.spoil:
                case.spoil(model, sync, comm.rank)
            for step in range(STEPS):
                _step(case, sync, check, optimizer, chance, inputs, step == STEPS - 1)
        sync.settle()
    except CertificateError as error:
        return error.certificate
    return check.certificate


def _step(
    case: Case, sync: Sync, check: Any, optimizer: Any, chance: Any, inputs: Any, last: bool
) -> None:
    sync.loss_scale = case.loss_scale
    for number in range(1, case.accumulate + 1):
        with sync.micro_batch(last=number == case.accumulate):
            outputs = sync.module(inputs(chance))
            loss = (outputs - 1).square().mean() / case.accumulate
            (loss * sync.loss_factor).backward()
    sync.finish()
    check.after_gradients()
    sync.update(optimizer)
    check.before_weights(last)
    sync.after_update(last)
    check.after_weights()


NO_FP16 = (
    *("caffe", "torch7", "tensorflow"),
    *("local_sgd", "diloco", "streaming_diloco", "des_loc"),
    "priority",
)
THREADED = [strategy for strategy in STRATEGIES if strategy not in LIBRARIES]  # need processes
UNCHECKED = ("none", "zero1", "des_loc", "streaming_diloco", *DIRECTIONS)  # their lines say why
MORE: dict[str, tuple[str, ...]] = {
    "local_sgd": ("sync.every=2",),
    "diloco": ("sync.every=2", "exchange=onebit"),
    "des_loc": ("sync.second_every=null",),  # SGD has one moment
    "schedule": tuple(f"exchange.{each}" for each in OVER_TIME["schedule"]),
    "priority": ("sync.trials=0", "sync.chunk_mb=0.01"),  # the third exchange outlasts its step
}


def clean_cases() -> Iterator[Case]:
    """Yield more than 200 runs in which nothing is wrong."""
    for number, strategy in enumerate(s for s in THREADED if not s.startswith("fc1x1")):
        settings = (f"strategy={strategy}", *MORE.get(strategy, ()))
        buckets = () if strategy == "none" else ("bucket_mb=0.01",)
        for place, model in enumerate(MODELS):
            yield Case(settings, model, size=2 + (number + place) % 3)
            scale = 1.0 if strategy in NO_FP16 else 1024.0
            accumulate = 1 + (number + place) % 2
            yield Case((*settings, *buckets), model, 4, accumulate, scale)
    for model in MODELS:
        yield Case(("strategy=cntk", "sync.double_buffer=true"), model, 3)
        yield Case(
            ("strategy=onebit", "exchange.granularity=block", "exchange.block_size=64"), model
        )
        yield Case(("strategy=onebit", "exchange.error_feedback=false"), model, 3)


ADD = (
    "overlap",
    "tree",
    "hierarchical",
    "caffe",
    "local_sgd",
    "cntk exchange=allreduce sync.double_buffer=true",
)
REAL_ONLY = ("caffe", "local_sgd", "diloco")  # these move weights
COMPRESS = ("onebit", "int8", "bf16", "topk", "powersgd", "diloco", "priority", "randomk")


def odd_cases() -> Iterator[Case]:
    """Yield right runs of models of all types and layouts."""
    for number, strategy in enumerate((*ADD, *COMPRESS)):
        name, *more = strategy.split()
        settings = (f"strategy={name}", *more, *MORE.get(name, ()))
        for place, model in enumerate(ODD_MODELS):
            if "double" in model and strategy not in ADD:
                continue  # codecs refuse it
            if model in ("complex double", "mixed") and name in REAL_ONLY:
                continue
            size = 2 + (number + place) % 3
            buckets = ("bucket_mb=0.002",) if number % 2 else ()
            yield Case((*settings, *buckets), model, size, 1 + place % 2)


def main() -> int:
    """Run all clean cases; return 1 if one was accused."""
    accused, total, proven = 0, 0, 0
    for case in (*clean_cases(), *odd_cases()):
        found = certified(case)[0]
        total += 1
        accused += not found.holds
        proven += bool(found.proven)
        if not found.holds or not found.proven:
            print(f"{case}: {found.line}")
    print(f"{total} clean runs, {accused} accused, {proven} proven")
    return int(accused > 0)


if __name__ == "__main__":
    sys.exit(main())
