"""Host time of an exchange: what a strategy adds to the thread that trains.

It is rank 0 of NUM_RANKS, of which no other exists: collectives of torch's `fake` process group end
at once, and on CPUs codecs' compiled kernels do nothing. Parameters are the model's at a small
scale, and backward gives them gradients and does nothing else, so what takes time is to launch work
rather than to do it. On a GPU kernels are launched for these few values, on the side stream of a
run, and backward has a thread of its own, so the time is that of all threads of the process.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.benchmarks import harness, present
from lab.benchmarks.request import BenchRequest, Variant
from lab.codec import kernels
from lab.distributed.comm import Collective
from lab.distributed.torch_comm import TorchComm
from lab.distributed.worker import InlineWorker, StreamWorker
from lab.draw.chart import BLUE
from lab.draw.plots import bars
from lab.draw.text import number_of
from lab.measure.peaks import on_threads
from lab.problem import blueprint
from lab.settings.config import ConfigError, build
from lab.sync.base import SyncParts

NUM_RANKS = 8
SCALE = 64  # a matrix has 1 of so many rows, and of so many columns
EMULATED = f"one rank stands for {NUM_RANKS}, with 1/{SCALE**2} of the values"
WARMUP, STEPS = 6, 4  # steps before any is timed, and those that are timed together
DDP, BUCKET_MB = "DDP, gradients as views", 25.0  # torch's own size of a bucket

Step = Callable[[], None]


def measure(request: BenchRequest) -> dict[str, Any]:
    """Measure all variants in turns, each beside a backward alone, and torch's DDP.

    The order in which variants are built is drawn by `order_seed`.
    """
    with ExitStack() as stack:
        stack.enter_context(on_threads(1))
        first = request.config
        device = harness.device_for(first.device)
        comm = stack.enter_context(_fake_comm(device))
        # Compiled kernels of codecs for CPUs are launched, and do nothing.
        stack.callback(setattr, kernels, "load", kernels.load)
        kernels.load = lambda name, level: _Idle()
        # Of each a step that exchanges, and one of the same model that does not.
        built = {DDP: (_ddp(first, device), _plain(first, device))}
        for at in harness.places(len(request.variants), request.own["order_seed"]):
            variant = request.variants[at]
            step = stack.enter_context(_exchanging(variant, comm))
            built[variant.label] = step, _plain(variant.config, device)
        names = [DDP, *(variant.label for variant in request.variants)]
        steps = [step for name in names for step in built[name]]
        times = _in_turns(steps, request.own["rounds"], device).reshape(len(names), 2, -1)
    added = times[:, 0] - times[:, 1]
    return {
        "rows": [
            {"name": name, "added_s": harness.level(own), "over_ddp": harness.ratio(own, added[0])}
            for name, own in zip(names, added, strict=True)
        ],
        "plain_s": harness.middle(times[0, 1]),
        "num_rounds": times.shape[2],
        "num_parameters": sum(p.requires_grad for p in _skeleton(first, device).parameters()),
        "device": device.type,
        "num_ranks": NUM_RANKS,
        "order_seed": request.own["order_seed"],
        **harness.here(EMULATED),
    }


def combine(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of several processes; see `lab.benchmarks.harness.across_starts`."""
    plain_s = harness.middle([start["plain_s"]["median"] for start in starts])
    found = harness.joined_starts(starts, {"added_s": False, "over_ddp": False})
    return found | {"plain_s": plain_s}


def _skeleton(config: DictConfig, device: torch.device) -> nn.Module:
    """Return a model of smaller parameters, whose output adds up all of them.

    All shrink alike, as matrices do: so buckets hold what those of the real model hold, and what is
    compressed there is compressed here.
    """
    model = blueprint(config).model
    before = sum(p.numel() for p in model.parameters() if p.requires_grad)
    small: dict[int, nn.Parameter] = {}  # by the parameter that it stands for
    for module in model.modules():
        for name, whole in module.named_parameters(recurse=False):
            if id(whole) not in small:
                values = torch.randn(_scaled(whole), device=device)
                small[id(whole)] = nn.Parameter(values, whole.requires_grad)
            setattr(module, name, small[id(whole)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(1, dtype=buffer.dtype, device=device))
    trained = [p for p in model.parameters() if p.requires_grad]
    built: Any = model
    built.bytes_scale = sum(p.numel() for p in trained) / before  # buckets are the real model's
    built.on_gpu = True  # on the machines that a device keeps busy meanwhile

    def forward() -> Tensor:
        total = torch.zeros((), device=device)
        for parameter in trained:
            total = total + parameter.sum()
        return total

    built.forward = forward
    return model


def _scaled(whole: Tensor) -> list[int]:
    """Return the shape of the matrix [rows, columns] that stands for a parameter."""
    if whole.dim() < 2:
        return [-(-whole.numel() // SCALE**2)]
    rows = whole.shape[0]
    return [-(-rows // SCALE), -(-whole.numel() // (rows * SCALE))]


class _FakeComm(TorchComm):
    """Begins an all-gather as an all-reduce: torch's fake one copies the tensor for each rank."""

    def _iall_gather(self, output: Tensor, tensor: Tensor) -> Collective | None:
        return self._iall_reduce(tensor)


@contextmanager
def _fake_comm(device: torch.device) -> Iterator[TorchComm]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        groups = [cast(dist.ProcessGroup, dist.new_group()) for _ in range(2)]
        yield _FakeComm(groups[0], groups[1], device)
    finally:
        dist.destroy_process_group()


class _Idle:
    """A library whose functions take any numbers and do nothing with them."""

    def __getitem__(self, name: str) -> Any:
        return ctypes.CDLL(None)["labs"]  # C's own, which looks at one number and returns


@contextmanager
def _exchanging(variant: Variant, comm: TorchComm) -> Iterator[Step]:
    config, model = variant.config, _skeleton(variant.config, comm.device)
    worker = StreamWorker(comm.device) if comm.device.type == "cuda" else InlineWorker()
    try:
        parts = SyncParts(
            *(model, model, build(config.exchange), comm, worker),
            *(config.overlap, config.bucket_mb, config.precision),
        )
        sync = build(config.sync, parts)
    except ValueError as error:
        why = str(error).removeprefix(f"strategy={config.strategy}: ")
        raise ConfigError(f"strategy={config.strategy}: {why}") from None

    def step() -> None:
        with sync.micro_batch(last=True):
            total = sync.module()
            total.backward(torch.full_like(total, sync.loss_factor))
        sync.finish()
        sync.step += 1

    with sync:
        yield _cleared(model, step)


def _plain(config: DictConfig, device: torch.device) -> Step:
    model = _skeleton(config, device)
    return _cleared(model, lambda: model().backward())


def _ddp(config: DictConfig, device: torch.device) -> Step:
    model: Any = _skeleton(config, device)
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=BUCKET_MB * model.bytes_scale, gradient_as_bucket_view=True
    )
    # A lambda has no annotations, of which torch takes only classes, and not their names.
    wrapped.register_comm_hook(None, lambda _, bucket: _all_reduce_begun(bucket))
    return _cleared(model, lambda: wrapped().backward())


def _all_reduce_begun(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Begin a bucket's all-reduce, as DDP does; the fake group has ended it, and has no future."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    return debugging_hooks.noop_hook(None, bucket)


def _cleared(model: nn.Module, step: Step) -> Step:
    parameters = list(model.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        step()

    return run


def _in_turns(steps: list[Step], num_rounds: int, device: torch.device) -> np.ndarray:
    """Return processor seconds of each step: [steps, rounds]."""
    for step in steps:
        for _ in range(WARMUP):
            step()

    # A GPU's backward runs in a thread of autograd's, for which this one waits without working.
    clock = time.process_time if device.type == "cuda" else time.thread_time

    def seconds(step: Step) -> float:
        harness.wait_for(device)
        began = clock()
        for _ in range(STEPS):
            step()
        return (clock() - began) / STEPS

    gc.collect()
    gc.freeze()  # what the collector looks at would grow with each candidate
    try:
        return np.array(harness.take_turns([partial(seconds, step) for step in steps], num_rounds))
    finally:
        gc.unfreeze()


COLUMNS: dict[str, present.Column] = {
    "": present.text("name"),
    "added (us)": present.intervals("added_s", 1e6),
    "x DDP": present.intervals("over_ddp"),
}


def notes(result: dict[str, Any]) -> list[str]:
    threads = "all threads" if result.get("device") == "cuda" else "the training thread"
    return [
        f"processor time of {threads} in a step of {result['num_parameters']} "
        f"parameters on {number_of(result['num_ranks'], 'rank')}, minus that of the backward pass "
        f"alone ({1e6 * result['plain_s']['median']:.0f} us)",
        f"medians of {result['num_rounds']} interleaved rounds; [95 % intervals] "
        + present.intervals_of(result),
    ]


def chart(result: dict[str, Any]) -> present.Drawn:
    """Draw a bar for each strategy, with its interval; marks show DDP's time."""
    rows = result["rows"]
    ddp = 1e6 * rows[0]["added_s"]["median"]
    data: Any = pd.DataFrame(
        {"name": row["name"], "part": "added", "mark": ddp, **present.ends(row["added_s"], 1e6)}
        for row in rows
    )
    factors = [row["over_ddp"]["median"] for row in rows]
    data["text"] = [
        f"{us:,.0f} ({factor:.2f} × DDP)" for us, factor in zip(data["value"], factors, strict=True)
    ]
    title = "processor time added to the training thread (µs per step)"
    times = present.span(factors[1:], ".2f")
    message = f"Exchanges cost the training thread {times} × DDP's host time"
    sample = f"medians of {result['num_rounds']} rounds, 95 % intervals"
    about = f"{result['num_parameters']} parameters · {present.machine(result)} · {sample}"
    return message, [about], bars(data, title, {"added": BLUE}, marks="DDP's time")
