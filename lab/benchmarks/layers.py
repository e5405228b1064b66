"""Measure the layers of a model as a profile."""

from __future__ import annotations

import shlex
from itertools import islice

from omegaconf import DictConfig
from tqdm import tqdm

from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import device_and_torch
from lab.measure.kernels import kernels_ms, profiled
from lab.measure.layers import LayerClock, with_fixed_parts
from lab.model.profile import Layer, Profile
from lab.training.assemble import join
from lab.training.dry import assembled

CHECKED = 5  # steps in which torch.profiler counts the kernels


def measure(
    configs: list[DictConfig], name: str, settings: list[str]
) -> tuple[Profile, float | None]:
    """Measure a model's profile on the device at hand; on a GPU, also its kernels' time.

    That is the time in ms of a step's kernels, without the optimizer's, by torch.profiler at the
    reference batch.

    Args:
        configs: settings of the run at the reference batch, and at a smaller one.
        settings: settings of the command; part of the profile's source.

    Raises:
        ConfigError: a setting does not fit the data and devices at hand.
    """
    world = join(configs[0])
    try:
        whole, fewer = (_layers(config, world) for config in configs)
        kernels_ms = _kernels_ms(configs[0], world) if world.device.type == "cuda" else None
        command = shlex.join(["python", "-m", "lab.profile_layers", *settings])
        source = f"measured on {device_and_torch(world.device)}: {command}"
    finally:
        worlds.stop()
    layers = with_fixed_parts(whole, fewer, configs[0].batch_size / configs[1].batch_size)
    return Profile(name, source, configs[0].batch_size, tuple(layers)), kernels_ms


def _layers(config: DictConfig, world: World) -> list[Layer]:
    label = f"batch {config.batch_size}"
    with (
        assembled(config, world) as part,
        LayerClock(part.trainer.model, world.device) as clock,
        tqdm(part.trainer.steps(), desc=label, total=config.steps, unit="step") as steps,
    ):
        for _ in steps:
            pass
    return clock.layers(config.warmup_steps)


def _kernels_ms(config: DictConfig, world: World) -> float:
    with assembled(config, world) as part:
        steps = part.trainer.steps()
        for _ in islice(steps, config.warmup_steps):
            pass
        with profiled() as profiler:
            num_steps = sum(1 for _ in islice(steps, CHECKED))
    return kernels_ms(profiler.key_averages(), num_steps)
