"""The outcome of a loop, the Trainer's or a user's own: its measurements, and a printed summary."""

from __future__ import annotations

import json
import os
from copy import copy
from dataclasses import astuple

import numpy as np
import torch
from omegaconf import DictConfig

from lab.cluster.settings import EMULATION
from lab.distributed.replicas import replica_hash
from lab.distributed.world import World
from lab.exchange.compressed import left_exact
from lab.exchange.layout import trainable
from lab.measure import OWN, PHASES, Span
from lab.measure.environment import num_cores
from lab.measure.operations import Uncountable, count
from lab.measure.peaks import Peak, arithmetic_of, cpu_peak, gpu_peak
from lab.measure.statistics import (
    Warmup,
    noise_scale,
    phase_statistics,
    round_means,
    step_statistics,
    wall_seconds,
    warmup_of,
    whole_rounds,
)
from lab.record.run_directory import RunDirectory
from lab.record.schema import Bucket, ComputeRecord, Record, StepSeconds, worded
from lab.record.steps import STEPS, write_rows
from lab.record.trace import TIMELINE, write_trace
from lab.settings.checks import as_text
from lab.settings.config import FIELDS, RunSettings
from lab.sync.base import Sync
from lab.sync.gradsync import GradSync
from lab.sync.pattern import ineffective
from lab.training.trainer import Loop, Trainer

OF_GPUS = ("tf32", "benchmark_limit", "share_gpus")  # settings without an effect on a CPU
TIMELINE_FACTS = ("strategy", "model", "world_size", "batch_size", "scaling", "device")


def measured(loop: Loop, record: Record, directory: RunDirectory) -> Record:
    """Return the record with all that the steps were measured for; all ranks call it together.

    Args: record: from the run's start; left unchanged, so that it shows no measurement if this
    fails.

    Raises:
        ReplicaMismatch: the ranks' weights differ, though the strategy should keep them equal.
        OSError: the steps cannot be written.
    """
    record, sync, world = copy(record), loop.sync, loop.world
    step_s, phase_s = write_steps(loop, directory)
    record.warmup = warmup_in(loop, step_s)
    warmup = record.warmup.num_steps
    timed = round_means(*_after_warmup(loop, step_s, warmup))
    statistics = step_statistics(timed)
    if loop.turns and loop.progress.step == loop.total_steps:
        record.turns_s = loop.turns.seconds(timed)
    note_progress(loop, record)
    record.num_timed_steps = timed.shape[1] * sync.every
    if statistics:
        record.step_s = StepSeconds(**statistics)
        record.samples_per_s = loop.batch_size / record.step_s.median
    gap_s = world.gather(torch.from_numpy(loop.clock.gap_seconds())).numpy()
    step_s, gap_s = (whole_rounds(*_after_warmup(loop, each, warmup)) for each in (step_s, gap_s))
    if num_samples := loop.batch_size * step_s.shape[1]:  # evaluations and checkpoints left out
        record.wall_samples_per_s = num_samples / wall_seconds(step_s, gap_s)
    note_rates(record)
    phases = round_means(*_after_warmup(loop, phase_s, warmup))
    record.phases_s = {**phase_statistics(phases, PHASES)}
    _note_ranks(loop, record, warmup)
    if sync.keeps_replicas_equal:
        record.replica_hash = replica_hash(loop.model, world)
    record.choices = sync.exchange.choices()
    note_plan(loop, record)
    record.gradient_noise = _gradient_noise(loop, warmup)
    record.drift = sync.drift_found() if isinstance(sync, Sync) else None
    return record


def _gradient_noise(loop: Loop, warmup: int) -> dict[str, float | None] | None:
    """Compute the gradient noise scale over the steps after warm-up; all ranks call it together."""
    noise = loop.sync.noise if isinstance(loop.sync, GradSync) else None
    if noise is None or not noise.mean:
        return None
    local, mean = (torch.stack(norms)[warmup:] for norms in (noise.local, noise.mean))
    made = mean.isfinite()  # and not skipped, as overflows of fp16 are on all ranks
    small = loop.world.gather(local[made]).mean(dim=0)
    sizes = loop.batch_size // loop.world.size, loop.batch_size
    found = noise_scale(small.cpu().numpy(), mean[made].cpu().numpy(), sizes)
    return {"samples": found.mid, "lo": found.lo, "hi": found.hi, "num_steps": int(made.sum())}


def write_steps(loop: Loop, directory: RunDirectory) -> tuple[np.ndarray, np.ndarray]:
    """Write the steps of all ranks so far to disk; all ranks call it together.

    Returns: Seconds of steps [ranks, steps] and of phases [ranks, steps, phases].
    """
    clock, own, world = loop.clock, loop.clock.own_times(), loop.world
    mine = (clock.step_seconds(), clock.phase_seconds(), own.own_seconds(), own.ready_seconds())
    *times, loss = (
        world.gather(torch.from_numpy(each)).numpy() for each in (*mine, np.array(loop.losses.read))
    )
    step_s, phase_s, own_s, ready_s = times
    if world.rank == 0:
        ranks, steps = step_s.shape
        first, before_s = loop.first_step, loop.progress.seconds
        counts = _timed(loop, steps, warmup_in(loop, step_s).num_steps)
        columns = {
            "rank": np.repeat(np.arange(ranks, dtype=np.int32), steps),
            "step": np.tile(np.arange(first, first + steps, dtype=np.int64), ranks),
            "timed": np.tile(counts, ranks),
            "step_s": step_s.ravel(),
            **{f"{name}_s": phase_s[:, :, i].ravel() for i, name in enumerate(PHASES)},
            **{f"own_{name}_s": own_s[:, :, i].ravel() for i, name in enumerate(OWN)},
            "ready_s": list(ready_s.reshape(ranks * steps, ready_s.shape[-1])),  # by bucket
            "loss": loss.ravel(),
            "end_s": before_s + step_s.cumsum(axis=1).ravel(),
        }
        write_rows(directory.path / STEPS, first, columns)
    return step_s, phase_s


def write_timeline(loop: Loop, record: Record, directory: RunDirectory) -> None:
    """Write a breakdown's spans of all ranks to disk, with facts of the record needed to read it.

    All ranks call it together.
    """
    world, warmup = loop.world, record.warmup
    mine = loop.clock.spans(world.rank, loop.first_step, warmup.num_steps if warmup else 0)
    if not mine:
        return
    ahead_s, error_s = world.clock_ahead_s()
    clock = ahead_s, error_s + loop.clock.host_error_s
    texts = world.gather_text(json.dumps([clock, *map(astuple, mine)]))
    if world.rank:
        return
    spans: list[Span] = []  # of all ranks, on rank 0's clock
    clocks: list[str] = []
    everyones = [*map(json.loads, texts)]
    first_error_s = everyones[0][0][1]
    for number, ((ahead_s, error_s), *rows) in enumerate(everyones):
        for rank, row, name, start_s, end_s in rows:
            spans.append(Span(rank, row, name, start_s - ahead_s, end_s - ahead_s))
        within_s = error_s + first_error_s
        clocks.append(f"rank {number} {1e3 * ahead_s:+.3f} ms, within {1e3 * within_s:.3f} ms")
    several = f"clocks, compared with rank 0's: {', '.join(clocks[1:])}"
    about = {key: getattr(record, key) for key in TIMELINE_FACTS}
    about["emulation"] = worded(record.emulation) or "none"
    about["clocks"] = several if world.num_hosts > 1 else "all ranks share one clock"
    write_trace(directory.path / TIMELINE, spans, about)


def note_progress(loop: Loop, record: Record) -> None:
    """Record what this rank knows alone, also of a run that fails."""
    progress = loop.progress
    record.num_steps, record.num_skipped_steps = progress.step, progress.num_skipped_steps
    record.graph_from = loop.captured_at
    record.certificate = loop.certificate
    record.evaluations = [{**evaluation} for evaluation in progress.evaluations]


def _note_ranks(loop: Loop, record: Record, warmup: int) -> None:
    """Record each rank's memory and its payload of a step: the median of timed steps or, if none,
    the mean of all.
    """
    traffic = np.array(loop.traffic, dtype=float).reshape(1, -1, 3)
    timed = round_means(*_after_warmup(loop, traffic, warmup))
    whole = traffic[0].sum(axis=0) + loop.sent_last
    sent = np.median(timed[0], axis=0) if timed.size else whole / max(1, len(traffic[0]))
    row = torch.tensor([*sent, *loop.memory.sizes()], dtype=torch.float64)
    payloads, messages, across, *sizes = loop.world.gather(row).T.tolist()
    peaks, reserved, in_use = (list(map(int, each)) if any(each) else None for each in sizes)
    record.payload_bytes_per_step = list(map(int, payloads))
    record.messages_per_step = messages
    record.across_bytes_per_step = list(map(int, across))
    record.peak_memory_of = loop.memory.kind
    if loop.turns is None:  # else it is that of all runs together
        record.peak_memory_bytes = peaks
        record.reserved_memory_bytes = reserved
        record.device_memory_bytes = in_use


def note_plan(loop: Loop, record: Record) -> None:
    """Note buckets, the sync's choices and what did nothing, of a run whose steps are counted."""
    sync, config = loop.sync, loop.config
    record.idle = []  # a new list: the record may be a copy that shares the other one
    by_library = isinstance(sync, Sync) and not sync.pattern.takes_any_exchange
    if loop.world.size > 1 and not by_library:
        shapes = {name: p.shape for name, p in trainable(loop.model).items()}
        record.idle = left_exact(sync.exchange, shapes)
    # A loop of the user's own has its own accumulation, and DDP its own buckets.
    if not isinstance(sync, Sync) or not hasattr(config, "accumulate"):
        return
    if isinstance(sync, GradSync):
        record.buckets = [Bucket(each.nbytes, " ".join(each.shapes)) for each in sync.buckets]
    record.choices = [*record.choices, *sync.choices()]
    record.idle += sync.ineffective() + ineffective(
        sync.pattern,
        strategy=record.strategy,
        world_size=record.world_size,
        num_steps=record.num_steps,
        bucket_mb=config.bucket_mb,
        accumulate=config.accumulate,
        bucket_bytes=[bucket.bytes for bucket in record.buckets or ()],
    )
    if loop.world.device.type == "cpu":
        record.idle += idle_on_cpus(config)


def idle_on_cpus(config: RunSettings) -> list[str]:
    """List what does nothing on a CPU. It is no error: one file of settings may serve both."""
    return [
        f"{key}={as_text(value)}: has an effect only on GPUs"
        for key in OF_GPUS
        if (value := getattr(config, key)) != FIELDS[key].default
    ]


def warmup_in(loop: Loop, step_s: np.ndarray) -> Warmup:
    if turns := loop.turns:
        first = "step does" if turns.every == 1 else f"{turns.every} steps do"
        reason = (
            f"until it took turns of {turns.size} steps with other runs; the first {first} not "
            "count in each turn"
        )
        return Warmup(turns.num_warmup, reason)
    unlike = {} if loop.captured_at is None else {"why": "no graph was replayed"}
    # The first steps are unlike later ones as exchanges try others, or no graph is captured yet.
    settled_at = loop.progress.step if loop.settled_at is None else loop.settled_at
    trials = max(0, settled_at - loop.first_step)
    return warmup_of(step_s, loop.config.warmup_steps, loop.sync.every, trials, **unlike)


def _after_warmup(loop: Loop, values: np.ndarray, warmup: int) -> tuple[np.ndarray, int, int]:
    """Return the `values` [ranks, steps, ...] after warm-up, the number of the first step, and
    steps per round.
    """
    counted = values[:, _steady_mask(loop, values.shape[1], warmup)]
    return counted, loop.first_step + warmup, loop.sync.every


def _timed(loop: Loop, num_steps: int, warmup: int) -> np.ndarray:
    """Tell which steps statistics count, [steps]: those of whole rounds."""
    places = np.arange(num_steps)
    return np.isin(places, whole_rounds(*_after_warmup(loop, places[None], warmup)))


def _steady_mask(loop: Loop, num_steps: int, warmup: int) -> np.ndarray:
    """Tell which steps are no warm-up, [steps]."""
    return loop.turns.steady_mask(num_steps) if loop.turns else np.arange(num_steps) >= warmup


def compute_of(config: DictConfig, trainer: Trainer, world: World) -> ComputeRecord:
    """Count the run's operations, and look up the peak of the devices that it computes on."""
    flops, unknown = None, None
    try:
        flops = flops_per_sample(config, trainer, world)
    except Uncountable as error:
        unknown = str(error)
    peak = peak_of(world)
    rate = peak.flops_per_s.get(arithmetic_of(config.precision, config.tf32)) if peak else None
    return ComputeRecord(flops, unknown, rate, peak.source if peak and rate else None)


def flops_per_sample(config: DictConfig, trainer: Trainer, world: World) -> float:
    """Count forward and backward of one sample, as the model trains on it.

    Raises: Uncountable: the model waits instead of computing, or cannot be counted.
    """
    if "profile" in config.model:
        raise Uncountable("model=replay waits and computes nothing")
    data, loss = trainer.data, trainer.task.loss
    one = (data.input_shape, data.input_dtype, data.targets()[0][0])
    # A model with collectives of its own would wait for other ranks.
    return count(trainer.model, *one, loss, may_compute=world.size == 1).flops_per_sample


def peak_of(world: World) -> Peak | None:
    """Return the peak of all devices that the ranks compute on; None: it is not known."""
    hosts = 1 if os.environ.get(EMULATION) else world.num_hosts
    if world.device.type == "cpu":
        return cpu_peak(min(world.size * torch.get_num_threads(), hosts * num_cores()))
    num_gpus = min(world.size, hosts * torch.cuda.device_count())
    one = gpu_peak(torch.cuda.get_device_name(world.device))
    return one.times(num_gpus) if one else None


def note_rates(record: Record) -> None:
    """Add to the record what its throughput makes of its operations.

    MFU as in PaLM (Chowdhery et al. 2022, appendix B): operations that the model needs, so without
    any that are computed again, over the peak.
    """
    compute, samples_per_s = record.compute, record.wall_samples_per_s
    if compute is None or compute.flops_per_sample is None or samples_per_s is None:
        return
    record.flops_per_s = samples_per_s * compute.flops_per_sample
    if compute.peak_flops_per_s:
        record.mfu = record.flops_per_s / compute.peak_flops_per_s
