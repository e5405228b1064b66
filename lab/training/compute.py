"""Floating-point operations of a run, the peak of its devices, and how much of it is used (MFU)."""

from __future__ import annotations

import os

import torch
from omegaconf import DictConfig

from lab.cluster.settings import EMULATION
from lab.distributed.world import World
from lab.measure.environment import num_cores
from lab.measure.operations import Uncountable, count
from lab.measure.peaks import Peak, arithmetic_of, cpu_peak, gpu_peak
from lab.record.schema import Compute, Record
from lab.training.trainer import Trainer


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
