"""What a run says about itself: its measurements, its failure, and a summary for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from lab.cluster.settings import EMULATION
from lab.distributed.replicas import replica_hash
from lab.distributed.watchdog import Failure
from lab.distributed.world import World
from lab.measure.clock import PHASES
from lab.measure.environment import environment, git_commit, num_cores
from lab.measure.spans import Span
from lab.measure.statistics import (
    phase_statistics,
    round_means,
    step_statistics,
    wall_seconds,
    whole_rounds,
)
from lab.record.run_directory import RunDirectory
from lab.record.trace import TIMELINE, write_trace
from lab.task.metrics import metrics_of, shown
from lab.training.trainer import Trainer

# A record has every key of the contract, whatever became of the run.
NOTHING_MEASURED: dict[str, Any] = {
    "num_steps": 0,
    "num_timed_steps": 0,
    "num_skipped_steps": 0,
    "num_parameters": None,
    "gradient_bytes": None,
    "transform": None,
    "untransformed": None,
    "step_s": None,
    "images_per_s": None,
    "wall_images_per_s": None,
    "phases_s": {},
    "payload_bytes_per_step": None,
    "messages_per_step": None,
    "peak_memory_bytes": None,
    "peak_memory_of": None,
    "reserved_memory_bytes": None,
    "device_memory_bytes": None,
    "final": {"loss": None, "accuracy": None},
    "evaluations": [],
    "replica_hash": None,
    "choices": [],
    "attempts": [],
    "duration_s": None,
}

TIMELINE_FACTS = ("strategy", "model", "world_size", "batch_size", "scaling", "device", "emulation")


def surroundings(world: World, *configs: DictConfig) -> dict[str, Any]:
    """Machine, software, and whether ranks had devices of their own. `configs`: what was run."""
    return {
        "emulation": emulation(world, *configs),
        "comm_settings": world.comm.settings,
        "environment": environment(world.num_hosts, asks_tools=world.place.local_rank == 0),
        "git_commit": git_commit(),
    }


def emulation(world: World, *configs: DictConfig) -> str:
    """ "none", or in which ways the ranks that run `configs` are not what they stand for."""
    hosts = os.environ.get(EMULATION)
    replays = [config for config in configs if "profile" in config.model]
    profiles = dict.fromkeys(config.profile.get("name") for config in replays)
    reasons = [hosts, _sharing(world, bool(hosts))]
    reasons += [f"compute replayed from profile {name}" for name in profiles]
    return "; ".join(filter(None, reasons)) or "none"


def _sharing(world: World, one_machine: bool) -> str | None:
    """What the ranks of this host, or of all hosts if they are `one_machine`, have to share."""
    num_ranks = world.size if one_machine else world.place.local_size
    num_gpus = torch.cuda.device_count()
    if world.device.type == "cuda" and num_ranks > num_gpus:
        return f"{num_ranks} ranks share {num_gpus} GPUs"
    wanted = num_ranks * torch.get_num_threads()
    if world.device.type == "cpu" and wanted > num_cores():
        return f"{wanted} threads of {num_ranks} ranks share {num_cores()} CPU cores"
    return None


def measurements(
    trainer: Trainer, directory: RunDirectory, stop_signal: str | None
) -> dict[str, Any]:
    """The record of a run that came to its end, or was stopped. All ranks call it together.

    Raises:
        ReplicaMismatch: the ranks' weights differ, though the strategy should keep them equal.
    """
    world, every = trainer.world, trainer.sync.every
    step_s, phase_s = write_steps(trainer, directory)
    timed = _timed(trainer, step_s)
    statistics = step_statistics(timed)
    keeps_equal = trainer.sync.keeps_replicas_equal
    return {
        **_outcome(trainer, stop_signal),
        "num_steps": trainer.progress.step,
        "num_timed_steps": timed.shape[1] * every,
        "num_skipped_steps": trainer.progress.num_skipped_steps,
        "step_s": statistics,
        "images_per_s": statistics and trainer.batch_size / statistics["median"],
        "wall_images_per_s": _wall_images_per_s(trainer, step_s),
        "phases_s": phase_statistics(_timed(trainer, phase_s), PHASES),
        **_by_rank(trainer),
        "evaluations": trainer.progress.evaluations,
        "replica_hash": replica_hash(trainer.model, world) if keeps_equal else None,
        "choices": trainer.sync.exchange.choices(),
    }


def write_steps(trainer: Trainer, directory: RunDirectory) -> tuple[np.ndarray, np.ndarray]:
    """Put the steps of all ranks so far on disk; all ranks call it together.

    Returns:
        Seconds of steps [ranks, steps] and of phases [ranks, steps, phases].
    """
    world = trainer.world
    step_s = world.gather(torch.from_numpy(trainer.clock.step_seconds())).numpy()
    phase_s = world.gather(torch.from_numpy(trainer.clock.phase_seconds())).numpy()
    loss = world.gather(torch.from_numpy(np.array(trainer.losses.read))).numpy()
    if world.rank == 0:
        warmup = trainer.config.warmup_steps
        before_s = trainer.progress.seconds
        directory.write_steps(trainer.first_step, before_s, warmup, step_s, phase_s, loss)
    return step_s, phase_s


def write_timeline(trainer: Trainer, record: dict[str, Any], directory: RunDirectory) -> None:
    """Put what a breakdown noted of all ranks on disk, if any; all ranks call it together.

    Args:
        record: of the run; the timeline repeats what one must know to read it.
    """
    world, warmup = trainer.world, trainer.config.warmup_steps
    own = trainer.clock.spans(world.rank, trainer.first_step, warmup)
    if not own:
        return
    ahead_s = world.clock_ahead_s()
    texts = world.gather_text(json.dumps([ahead_s, *map(astuple, own)]))
    if world.rank == 0:
        about = {key: record[key] for key in TIMELINE_FACTS}
        write_trace(directory.path / TIMELINE, _on_one_clock(texts), about)


def _on_one_clock(texts: list[str]) -> Iterator[Span]:
    """Spans of all ranks by the clock of rank 0; see `write_timeline` for the text of a rank."""
    for ahead_s, *spans in map(json.loads, texts):
        for rank, row, name, start_s, end_s in spans:
            yield Span(rank, row, name, start_s - ahead_s, end_s - ahead_s)


def _outcome(trainer: Trainer, stop_signal: str | None) -> dict[str, Any]:
    if trainer.progress.step < trainer.total_steps:
        return {"status": "interrupted", "error": f"stopped by {stop_signal}"}
    final = metrics_of(trainer.progress.evaluations[-1])
    return {"status": "done", "error": None, "final": final}


def _timed(trainer: Trainer, values: np.ndarray) -> np.ndarray:
    """Of `values` [ranks, steps, ...] those that statistics count: by step, or by round."""
    return round_means(*_after_warmup(trainer, values))


def _after_warmup(trainer: Trainer, values: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Values [ranks, steps, ...], the number of their first step, and steps of a round."""
    warmup = trainer.config.warmup_steps
    return values[:, warmup:], trainer.first_step + warmup, trainer.sync.every


def _by_rank(trainer: Trainer) -> dict[str, Any]:
    """What each rank sent in a step (the median of the timed ones; without any, the mean of all),
    and its memory.
    """
    traffic = np.array(trainer.traffic, dtype=float).reshape(1, -1, 2)
    timed = _timed(trainer, traffic)
    sent = np.median(timed, axis=1) if timed.size else traffic.sum(axis=1) / max(1, len(traffic[0]))
    own = torch.tensor([*sent[0], *trainer.memory.sizes()], dtype=torch.float64)
    payloads, messages, *sizes = trainer.world.gather(own).T.tolist()
    peaks, reserved, in_use = (list(map(int, each)) if any(each) else None for each in sizes)
    return {
        "payload_bytes_per_step": list(map(int, payloads)),
        "messages_per_step": messages,
        "peak_memory_bytes": peaks,
        "peak_memory_of": trainer.memory.kind,
        "reserved_memory_bytes": reserved,
        "device_memory_bytes": in_use,
    }


def _wall_images_per_s(trainer: Trainer, step_s: np.ndarray) -> float | None:
    """From the first timed step's begin to the last one's end, evaluations and checkpoints out."""
    gap_s = trainer.world.gather(torch.from_numpy(trainer.clock.gap_seconds())).numpy()
    timed_s, gap_s = (whole_rounds(*_after_warmup(trainer, s)) for s in (step_s, gap_s))
    num_images = trainer.batch_size * timed_s.shape[1]
    return num_images / wall_seconds(timed_s, gap_s) if num_images else None


def summary(record: dict[str, Any], path: Path) -> str:
    """A few lines for people at the end of a run."""
    ranks = f"{record['world_size']} rank{'s' if record['world_size'] > 1 else ''}"
    lines = [
        f"{record['status']}: strategy={record['strategy']} on {ranks} ({record['backend']}, "
        f"{record['device']}), {record['num_steps']} steps of {record['batch_size']} images"
    ]
    for name, value in record["final"].items():
        if name != "loss" and value is not None:
            lines.append(f"{f'test {name}':<15} {shown(name, value)}")
    if record["step_s"]:
        step, mad = 1000 * record["step_s"]["median"], 1000 * record["step_s"]["mad"]
        lines.append(
            f"step time       {step:.2f} ms median (mad {mad:.2f}), "
            f"{record['images_per_s']:.0f} images/s, "
            f"{record['wall_images_per_s']:.0f} by wall clock"
        )
    elif record["num_steps"]:
        lines.append("step time       – none was timed, see warmup_steps")
    sent, gradients = max(record["payload_bytes_per_step"]), record["gradient_bytes"]
    ring = 2 * gradients * (record["world_size"] - 1) / record["world_size"]
    saving = f", {ring / sent:.1f}x less than an fp32 ring" if 0 < sent < 0.99 * ring else ""
    lines.append(f"payload         {sent / 1e6:.3f} MB per step and rank{saving}")
    if record["emulation"] != "none":
        lines.append(f"emulated        {record['emulation']}")
    if record["status"] == "interrupted":
        lines.append("continue        the same command with resume=auto")
    return "\n".join([*lines, f"record          {path / 'record.json'}"])


def classify(error: BaseException, rank: int) -> Failure:
    """The status and the one line that a record holds of an error."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    line = f"rank {rank}: {type(error).__name__}: {text.strip()}".rstrip(": ")
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", line)
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "can't allocate memory" in text:
        return Failure("oom", line)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return Failure("timeout", line)
    if "peer" in text or "Connection reset" in text:
        return Failure(
            "failed", f"rank {rank}: lost another rank: {text.strip().rstrip(': ')[:200]}"
        )
    return Failure("failed", line)
