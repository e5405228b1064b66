"""Runs among threads whose first exchanges are examined, as `check=first` does.

    python -m tests.support.certified

runs all clean cases, and says which were accused or not proven.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lab.certificate.check import check_of
from lab.certificate.examination import CertificateError
from lab.distributed.comm import Comm, run_ranks
from lab.distributed.worker import make_worker
from lab.exchange.base import Exchange
from lab.record.schema import Certificate
from lab.settings.config import build, load
from lab.sync.base import Sync, SyncParts
from tests.support.cases import DIRECTIONS, LIBRARIES, OVER_TIME, STRATEGIES
from tests.zoo import models as zoo

CPU = torch.device("cpu")
STEPS = 5


def _perceptron() -> nn.Module:
    """Build two layers, one of them frozen in part, and one of them large."""
    made = nn.Sequential(nn.Linear(70, 300), nn.Tanh(), nn.Linear(300, 5))
    made[2].bias.requires_grad_(False)
    return made


def _tied() -> nn.Module:
    """Build the zoo's attention with a tied embedding, a scalar and a layer that is never used."""
    return zoo.Net(
        lambda net, ids: net.scale * net.inner(ids),
        **{"inner": zoo.MODELS["attention"].make(), "never": nn.Linear(3, 3)},
        scale=nn.Parameter(torch.ones(())),
    )


def _recurrent() -> nn.Module:
    return zoo.Net(
        lambda net, x: net.head(net.lstm(x)[0][:, -1]),
        **{"lstm": nn.LSTM(16, 24, batch_first=True), "head": nn.Linear(24, 4)},
    )


# What a certificate says of them is tested by their names.
OWN: dict[str, tuple[Callable[[], nn.Module], zoo.Batch]] = {
    "perceptron": (_perceptron, zoo.normal(70)),
    "recurrent": (_recurrent, zoo.normal(6, 16)),
    "tied": (_tied, zoo.tokens(30, 7)),
}
MODELS = (*OWN, "images", "channels_last")
ODD_MODELS = (
    *("float64", "partly_double", "spectral", "doublespectral", "bfloat16", "float16"),
    *("mixed_bits", "columns", "permuted", "emptyones", "sparsetable", "recomputed_twice"),
)


def model_of(name: str) -> tuple[Callable[[], nn.Module], zoo.Batch]:
    """Return a maker of a model and its batches: one of OWN, or of the zoo."""
    found = zoo.MODELS.get(name)
    return (found.make, found.batch) if found else OWN[name]


@dataclass(frozen=True)
class Case:
    """A run: its settings, a name of a model, ranks, micro-batches, and the scale of the loss.

    Attributes:
        exchange: another class for that of the settings, whose arguments it takes if it is a kind
            of theirs. (Settings that name it would have all files that it imports compared.)
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
    exchange: type[Exchange] | None = None

    def __str__(self) -> str:
        more = f"accumulate={self.accumulate} scale={self.loss_scale:g}"
        return f"{' '.join(self.settings)} {self.model} n={self.size} {more}"


def certified(case: Case) -> list[Certificate]:
    """Run a case; return each rank's certificate, also of a run that failed."""
    config = load(list(case.settings))
    if (other := case.exchange) is not None:
        kept = config.exchange if issubclass(other, type(build(config.exchange))) else {}
        config.exchange = {**kept, "_target_": f"{other.__module__}.{other.__name__}"}
    configs = [copy.deepcopy(config) for _ in range(case.size)]  # threads that build write to them
    make, inputs = model_of(case.model)
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
            loss = zoo.loss_of(sync.module(*inputs(chance, sync.comm.rank))) / case.accumulate
            loss.backward(torch.full_like(loss, sync.loss_factor))
    sync.finish()
    if not check.is_over:
        check.after_gradients()
    sync.update(optimizer)
    if not check.is_over:
        check.before_weights(last)
    sync.after_update(last)
    if not check.is_over:
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


ADD = ("overlap", "tree", "hierarchical", "caffe", "local_sgd", "cntk exchange=allreduce")
COMPRESS = ("onebit", "int8", "bf16", "topk", "powersgd", "diloco", "priority", "randomk")
MOVING = ("caffe", "local_sgd", "diloco")  # these move weights


def odd_cases() -> Iterator[Case]:
    """Yield right runs of models of all types and layouts."""
    for number, strategy in enumerate((*ADD, *COMPRESS)):
        name, *more = strategy.split()
        settings = (f"strategy={name}", *more, *MORE.get(name, ()))
        for place, model in enumerate(ODD_MODELS):
            refused = zoo.MODELS[model].refused.split()
            if ("compressed" in refused and strategy in COMPRESS) or (
                "moved" in refused and name in MOVING
            ):
                continue
            buckets = ("bucket_mb=0.002",) if number % 2 else ()
            yield Case((*settings, *buckets), model, 2 + (number + place) % 3, 1 + place % 2)


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
