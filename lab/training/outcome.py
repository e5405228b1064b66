"""The outcome of a loop, the Trainer's or a user's own: its measurements, and a printed summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from copy import copy
from dataclasses import astuple
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from lab.cluster.settings import EMULATION
from lab.distributed.replicas import replica_hash
from lab.distributed.world import World
from lab.exchange.compressed import left_exact
from lab.exchange.layout import trainable
from lab.measure.environment import num_cores
from lab.measure.operations import Uncountable, count
from lab.measure.peaks import Peak, arithmetic_of, cpu_peak, gpu_peak
from lab.measure.spans import PHASES, Span
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
from lab.record import steps
from lab.record.run_directory import RunDirectory
from lab.record.schema import Bucket, Compute, Record, StepSeconds, worded
from lab.record.steps import STEPS
from lab.record.trace import TIMELINE, write_trace
from lab.sync.base import Sync
from lab.sync.gradsync import GradSync
from lab.sync.pattern import idle
from lab.task.metrics import metrics_of, shown
from lab.training.trainer import Loop, Trainer

TIMELINE_FACTS = ("strategy", "model", "world_size", "batch_size", "scaling", "device")


def measured(trainer: Loop, record: Record, directory: RunDirectory) -> Record:
    """Return the record with all that the steps were measured for; all ranks call it together.

    Args: record: from the run's start; left unchanged, so that it shows no measurement if this
    fails.

    Raises:
        ReplicaMismatch: the ranks' weights differ, though the strategy should keep them equal.
        OSError: the steps cannot be written.
    """
    record, sync = copy(record), trainer.sync
    step_s, phase_s = write_steps(trainer, directory)
    record.warmup = warmup_in(trainer, step_s)
    warmup = record.warmup.num_steps
    timed = timed_rounds(trainer, step_s, warmup)
    statistics = step_statistics(timed)
    if trainer.turns and trainer.progress.step == trainer.total_steps:
        record.turns_s = trainer.turns.seconds(timed)
    note_progress(trainer, record)
    record.num_timed_steps = timed.shape[1] * sync.every
    if statistics:
        record.step_s = StepSeconds(**statistics)
        record.samples_per_s = trainer.batch_size / record.step_s.median
    record.wall_samples_per_s = _wall_samples_per_s(trainer, step_s, warmup)
    note_rates(record)
    record.phases_s = {**phase_statistics(timed_rounds(trainer, phase_s, warmup), PHASES)}
    _note_ranks(trainer, record, warmup)
    if sync.keeps_replicas_equal:
        record.replica_hash = replica_hash(trainer.model, trainer.world)
    record.choices = sync.exchange.choices()
    note_plan(trainer, record)
    record.gradient_noise = _gradient_noise(trainer, warmup)
    record.drift = sync.drift_found() if isinstance(sync, Sync) else None
    return record


def _gradient_noise(trainer: Loop, warmup: int) -> dict[str, float | None] | None:
    """Compute the gradient noise scale over the steps after warm-up; all ranks call it together."""
    noise = trainer.sync.noise if isinstance(trainer.sync, GradSync) else None
    if noise is None:
        return None
    local, mean = (torch.stack(norms)[warmup:] for norms in (noise.local, noise.mean))
    small = trainer.world.gather(local).mean(dim=0)
    sizes = trainer.batch_size // trainer.world.size, trainer.batch_size
    found = noise_scale(small.cpu().numpy(), mean.cpu().numpy(), sizes)
    return {"samples": found.mid, "lo": found.lo, "hi": found.hi, "num_steps": len(mean)}


def write_steps(trainer: Loop, directory: RunDirectory) -> tuple[np.ndarray, np.ndarray]:
    """Write the steps of all ranks so far to disk; all ranks call it together.

    Returns:
        Seconds of steps [ranks, steps] and of phases [ranks, steps, phases].
    """
    world = trainer.world
    step_s = world.gather(torch.from_numpy(trainer.clock.step_seconds())).numpy()
    phase_s = world.gather(torch.from_numpy(trainer.clock.phase_seconds())).numpy()
    own = trainer.clock.own_times()
    own_s = world.gather(torch.from_numpy(own.own_seconds())).numpy()
    ready_s = world.gather(torch.from_numpy(own.ready_seconds())).numpy()
    loss = world.gather(torch.from_numpy(np.array(trainer.losses.read))).numpy()
    if world.rank == 0:
        counts = counted_in(trainer, step_s.shape[1], warmup_in(trainer, step_s).num_steps)
        before_s = trainer.progress.seconds
        first = trainer.first_step
        path, times = directory.path / STEPS, (step_s, phase_s, own_s, ready_s)
        steps.write_steps(path, first, before_s, counts, *times, loss)
    return step_s, phase_s


def write_timeline(trainer: Loop, record: Record, directory: RunDirectory) -> None:
    """Write a breakdown's spans of all ranks to disk; all ranks call it together.

    Args: record: the run's record; the timeline repeats the facts needed to read it.
    """
    world, warmup = trainer.world, record.warmup
    spans = trainer.clock.spans(world.rank, trainer.first_step, warmup.num_steps if warmup else 0)
    if not spans:
        return
    clock = world.clock_ahead_s()
    texts = world.gather_text(json.dumps([clock, *map(astuple, spans)]))
    if world.rank == 0:
        about = {key: getattr(record, key) for key in TIMELINE_FACTS}
        about["emulation"] = worded(record.emulation) or "none"
        about["clocks"] = _clocks(world, texts)
        write_trace(directory.path / TIMELINE, _on_one_clock(texts), about)


def _on_one_clock(texts: list[str]) -> Iterator[Span]:
    """Yield all ranks' spans on rank 0's clock; `write_timeline` makes the text of a rank."""
    for (ahead_s, _), *spans in map(json.loads, texts):
        for rank, row, name, start_s, end_s in spans:
            yield Span(rank, row, name, start_s - ahead_s, end_s - ahead_s)


def _clocks(world: World, texts: list[str]) -> str:
    """Say by how much the clocks of hosts differ, and how well that is known."""
    if world.num_hosts == 1:
        return "all ranks share one clock"
    known = [json.loads(text)[0] for text in texts]
    return "clocks, compared with rank 0's: " + ", ".join(
        f"rank {rank} {1e3 * ahead_s:+.3f} ms, within {1e3 * error_s:.3f} ms"
        for rank, (ahead_s, error_s) in enumerate(known)
        if rank
    )


def note_progress(trainer: Loop, record: Record) -> None:
    """Record what this rank knows alone, also of a run that fails."""
    progress = trainer.progress
    record.num_steps, record.num_skipped_steps = progress.step, progress.num_skipped_steps
    record.certificate = trainer.certificate
    record.evaluations = [{**evaluation} for evaluation in progress.evaluations]


def note_end(trainer: Loop, record: Record, stop_signal: str | None) -> None:
    """Record that a run ended or was stopped, and its last evaluation."""
    note_progress(trainer, record)
    if trainer.progress.step < trainer.total_steps:
        record.end("interrupted", f"stopped by {stop_signal}")
        return
    record.end("done", None)
    if evaluations := trainer.progress.evaluations:
        record.final = metrics_of(evaluations[-1])


def _note_ranks(trainer: Loop, record: Record, warmup: int) -> None:
    """Record each rank's memory and its payload of a step: the median of timed steps or, if none,
    the mean of all.
    """
    traffic = np.array(trainer.traffic, dtype=float).reshape(1, -1, 3)
    timed = timed_rounds(trainer, traffic, warmup)
    sent = np.median(timed, axis=1) if timed.size else traffic.sum(axis=1) / max(1, len(traffic[0]))
    row = torch.tensor([*sent[0], *trainer.memory.sizes()], dtype=torch.float64)
    payloads, messages, across, *sizes = trainer.world.gather(row).T.tolist()
    peaks, reserved, in_use = (list(map(int, each)) if any(each) else None for each in sizes)
    record.payload_bytes_per_step = list(map(int, payloads))
    record.messages_per_step = messages
    record.across_bytes_per_step = list(map(int, across))
    record.peak_memory_of = trainer.memory.kind
    if trainer.turns is None:  # else it is that of all runs together
        record.peak_memory_bytes = peaks
        record.reserved_memory_bytes = reserved
        record.device_memory_bytes = in_use


def _wall_samples_per_s(trainer: Loop, step_s: np.ndarray, warmup: int) -> float | None:
    """Return samples per second from the first to the last timed step, without pauses."""
    gap_s = trainer.world.gather(torch.from_numpy(trainer.clock.gap_seconds())).numpy()
    after = (after_warmup(trainer, seconds, warmup) for seconds in (step_s, gap_s))
    timed_s, gap_s = (whole_rounds(*each) for each in after)
    num_samples = trainer.batch_size * timed_s.shape[1]
    return num_samples / wall_seconds(timed_s, gap_s) if num_samples else None


def summary(record: Record, path: Path) -> str:
    """Return the few lines that a run prints at its end."""
    ranks = f"{record.world_size} rank{'s' if record.world_size > 1 else ''}"
    emulated, skipped = worded(record.emulation), record.num_skipped_steps
    lines = [
        f"{record.status}: strategy={record.strategy} on {ranks} ({record.backend}, "
        f"{record.device}), {record.num_steps} steps of {record.batch_size} {record.unit}s",
        *([f"skipped         {skipped} steps, which overflowed fp16"] if skipped else []),
        *_metric_lines(record),
        *_step_lines(record),
        *_payload_lines(record),
        *_frozen_lines(record),
        *_noise_lines(record),
        *_drift_lines(record),
        *([f"data            {record.data_source}"] if record.data_source else []),
        *(f"no effect       {line}" for line in record.idle),
        *(f"{f'steps {each.steps}':<16}by {each.made_by}" for each in record.stretches),
        *([f"emulated        {emulated}"] if emulated else []),
    ]
    if record.status == "interrupted":
        lines.append("continue        the same command with resume=auto")
    return "\n".join([*lines, f"record          {path / 'record.json'}"])


def _metric_lines(record: Record) -> Iterator[str]:
    for name, value in record.final.items():
        if name != "loss" and value is not None:
            yield f"{f'test {name}':<15} {shown(name, value)}"


def _step_lines(record: Record) -> Iterator[str]:
    if record.step_s and record.wall_samples_per_s and record.warmup:
        step = record.step_s
        stalls = f"{step.num_stalls} stall{'' if step.num_stalls == 1 else 's'}"
        yield (
            f"step time       {1e3 * step.median:.2f} ms median (mad {1e3 * step.mad:.2f}), "
            f"{1e3 * (step.mean or 0):.2f} mean, {1e3 * step.p95:.2f} p95; {stalls}"
        )
        yield f"throughput      {record.rates(record.wall_samples_per_s)} by wall clock"
        yield from _compute_lines(record)
        yield f"warm-up         {record.warmup.num_steps} steps: {record.warmup.reason}"
    elif record.num_steps:
        why = record.warmup.reason if record.warmup else "see warmup_steps"
        yield f"step time       – none was timed: {why}"


def _compute_lines(record: Record) -> Iterator[str]:
    if record.compute is None or record.flops_per_s is None:
        return
    peak = f"peak ({record.compute.peak_source})"
    share = f", {100 * record.mfu:.3g} % of the {peak}" if record.mfu is not None else ""
    yield f"compute         {record.flops_per_s / 1e12:.3g} TFLOP/s{share}"


def _frozen_lines(record: Record) -> Iterator[str]:
    for choice in record.choices:
        if "frozen_at" in choice:
            when = choice["frozen_at"]
            yield f"variance        {f'frozen after step {when}' if when else 'not frozen'}"


def _noise_lines(record: Record) -> Iterator[str]:
    noise = record.gradient_noise
    if noise is None:
        return
    if noise["samples"] is None or not math.isfinite(noise["samples"]):
        yield f"gradient noise  not to be told from {noise['num_steps']} steps"
        return
    yield (
        f"gradient noise  {noise['samples']:.0f} {record.unit}s [{noise['lo']:.0f}, "
        f"{noise['hi']:.0f}]: larger batches need fewer steps up to about here"
    )


def _drift_lines(record: Record) -> Iterator[str]:
    if record.drift is None:
        return
    alarms = [window for window in record.drift if window["alarm"]]
    largest = max(alarms or record.drift, key=lambda window: window["error"], default=None)
    if largest is None:
        yield "drift           – no window was full, see drift_every"
        return
    yield (
        f"drift           {len(alarms)} alarms in {len(record.drift)} windows; the largest error "
        f"is {100 * largest['error']:.2g} %: {largest['bucket']}"
    )


def _payload_lines(record: Record) -> Iterator[str]:
    if record.payload_bytes_per_step and record.gradient_bytes is not None:
        sent = max(record.payload_bytes_per_step)
        ring = 2 * record.gradient_bytes * (record.world_size - 1) / record.world_size
        saving = f", {ring / sent:.1f}x less than an fp32 ring" if 0 < sent < 0.99 * ring else ""
        yield f"payload         {sent / 1e6:.3f} MB per step and rank{saving}"
        across, hosts = record.across_bytes_per_step or [0], record.environment.get("num_hosts", 1)
        if any(across) and record.world_size > hosts:  # ranks share hosts
            yield f"across hosts    {max(across) / 1e6:.3f} MB of it, of the rank that sends most"


def note_plan(trainer: Loop, record: Record) -> None:
    """Note buckets, the sync's choices and what did nothing, of a run whose steps are counted."""
    record.idle = _left_exact(trainer)
    # A loop of the user's own has its own accumulation, and DDP its own buckets.
    if not isinstance(trainer.sync, Sync) or not hasattr(trainer.config, "accumulate"):
        return
    record.buckets = _buckets(trainer)
    record.choices = [*record.choices, *trainer.sync.choices()]
    record.idle += trainer.sync.idle() + idle(
        trainer.sync.pattern,
        strategy=record.strategy,
        world_size=record.world_size,
        num_steps=record.num_steps,
        bucket_mb=trainer.config.bucket_mb,
        accumulate=trainer.config.accumulate,
        bucket_bytes=[bucket.bytes for bucket in record.buckets or ()],
    )


def _left_exact(trainer: Loop) -> list[str]:
    sync = trainer.sync
    by_library = isinstance(sync, Sync) and not sync.pattern.takes_any_exchange
    if trainer.world.size == 1 or by_library:
        return []
    shapes = {name: p.shape for name, p in trainable(trainer.model).items()}
    return left_exact(sync.exchange, shapes)


def _buckets(trainer: Loop) -> list[Bucket] | None:
    if not isinstance(trainer.sync, GradSync):
        return None
    return [Bucket(bucket.nbytes, " ".join(bucket.shapes)) for bucket in trainer.sync.buckets]


def warmup_in(trainer: Loop, step_s: np.ndarray) -> Warmup:
    """Return how many first steps are warm-up, and why."""
    if turns := trainer.turns:
        first = "step does" if turns.every == 1 else f"{turns.every} steps do"
        reason = (
            f"until it took turns of {turns.size} with other runs, whose first {first} not count"
        )
        return Warmup(turns.alone, reason)
    asked, every = trainer.config.warmup_steps, trainer.sync.every
    return warmup_of(step_s, asked, every, steps_of_trials(trainer))


def steps_of_trials(trainer: Loop) -> int:
    """Count the first steps in which others were tried: all so far, if they still are."""
    settled_at = trainer.sync.settled_at
    last = trainer.progress.step if settled_at is None else settled_at
    return max(0, last - trainer.first_step)


def timed_rounds(trainer: Loop, values: np.ndarray, warmup: int) -> np.ndarray:
    """Keep the `values` [ranks, steps, ...] that statistics count, by step or by round."""
    return round_means(*after_warmup(trainer, values, warmup))


def after_warmup(trainer: Loop, values: np.ndarray, warmup: int) -> tuple[np.ndarray, int, int]:
    """Return values [ranks, steps, ...], the number of the first step, and steps per round."""
    kept = values[:, counted_in(trainer, values.shape[1], warmup)]
    return kept, trainer.first_step + warmup, trainer.sync.every


def counted_in(trainer: Loop, num_steps: int, warmup: int) -> np.ndarray:
    """Tell which steps statistics count, [steps]."""
    return trainer.turns.counted(num_steps) if trainer.turns else np.arange(num_steps) >= warmup


def compute_of(config: DictConfig, trainer: Trainer, world: World) -> Compute:
    """Count the run's operations, and look up the peak of the devices that it computes on."""
    flops, unknown = None, None
    try:
        flops = flops_per_sample(config, trainer, world)
    except Uncountable as error:
        unknown = str(error)
    peak = peak_of(world)
    rate = peak.flops_per_s.get(arithmetic_of(config.precision, config.tf32)) if peak else None
    return Compute(flops, unknown, rate, peak.source if peak and rate else None)


def flops_per_sample(config: DictConfig, trainer: Trainer, world: World) -> float:
    """Count forward and backward of one sample, as the model trains on it.

    Raises:
        Uncountable: the model waits instead of computing, or cannot be counted.
    """
    if "profile" in config.model:
        raise Uncountable("model=replay waits and computes nothing")
    data = trainer.data
    work = count(
        trainer.model,
        data.input_shape,
        data.input_dtype,
        data.targets()[0][0],
        trainer.task.loss,
        may_compute=world.size == 1,  # a model with collectives of its own would wait for others
    )
    return work.flops_per_sample


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
