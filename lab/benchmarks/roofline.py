"""A model's layers under the measured roofs of this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from omegaconf import DictConfig

from lab.benchmarks.profile import measured
from lab.benchmarks.request import Request
from lab.distributed import world as worlds
from lab.layers.roofline import Roofs, Spot, spots
from lab.measure.operations import Uncountable, count
from lab.measure.peaks import arithmetic_of, gpu_peak
from lab.measure.rates import copy_rate, measured_rates
from lab.problem.build import blueprint
from lab.settings.config import ConfigError
from lab.settings.names import class_name
from lab.training.assemble import join
from lab.training.identity import surroundings

COPIES = (200_000, 4_000_000, 256_000_000)  # bytes: about those of two caches, and of none
STEPS, WARMUP = 24, 4


def measure(request: Request) -> dict[str, Any]:
    """Measure the roofs and the layers of one model at one batch.

    Raises:
        ConfigError: the model cannot be counted, or there are several.
    """
    config = request.only_config
    # As lab.profile_layers: a rate of 0 keeps the weights.
    config.measure, config.steps, config.warmup_steps = "breakdown", STEPS, WARMUP
    config.optim.lr = 0.0
    plan = blueprint(config)
    data = plan.data
    try:
        work = count(plan.model, data.input_shape, data.input_dtype, plan.target, plan.task.loss)
    except Uncountable as error:
        raise ConfigError(f"model={config.model['_target_']}: cannot be counted: {error}") from None
    try:
        world = join(config)
        torch.set_num_threads(request.own["threads"])
        roofs = _roofs(config, world.device)
        (at_batch,) = measured([config], world)
        found = spots(work, at_batch.layers, config.batch_size)
        return {
            "rows": [_row(spot, roofs) for spot in found],
            "roofs": {
                "flops_per_s": roofs.flops_per_s,
                "bytes_per_s": [[size, rate] for size, rate in roofs.bytes_per_s.items()],
                "source": roofs.source,
            },
            "model": class_name(config.model["_target_"]),
            "batch_size": config.batch_size,
            "unit": data.unit,
            **surroundings(world, config),
        }
    finally:
        worlds.stop()


def _row(spot: Spot, roofs: Roofs) -> dict[str, Any]:
    products_s, memory_s = spot.bound_s(roofs)
    least_s = max(products_s, memory_s)
    return {
        **asdict(spot),
        "flops_per_byte": spot.flops / spot.num_bytes if spot.num_bytes else None,
        "bound": "products" if products_s >= memory_s else "memory",
        "of_roof": least_s / spot.seconds if spot.seconds else None,
    }


def _roofs(config: DictConfig, device: torch.device) -> Roofs:
    """Return a GPU's peaks by its datasheet, or those of the CPU as measured.

    Raises:
        ConfigError: the GPU's peaks are not known.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        rates = measured_rates(threads)
        copies = {size: copy_rate(size, threads) for size in COPIES}
        source = f"measured, {threads} thread{'s' if threads > 1 else ''}"
        return Roofs(max(rates.product, rates.convolution), copies, source)
    name = torch.cuda.get_device_name(device)
    found = gpu_peak(name)
    rate = found and found.flops_per_s.get(arithmetic_of(config.precision, config.tf32))
    if not (found and rate and found.bandwidth_bytes_per_s):
        raise ConfigError(f"device={name}: lab/measure/peaks.py does not know its peaks")
    return Roofs(rate, {0: found.bandwidth_bytes_per_s}, found.source)
