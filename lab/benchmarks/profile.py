"""Measure the layers of a model as a profile."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import device_and_torch
from lab.measure.kernels import kernels_ms, profiled
from lab.measure.layers import LayerClock
from lab.measure.spans import PHASES
from lab.model.profile import Layer, Profile, fixed_part, with_fixed_parts
from lab.training.assemble import join
from lab.training.dry import assembled

CHECKED = 5  # steps in which torch.profiler counts the kernels


@dataclass(frozen=True)
class Measured:
    """A step at one batch size, in milliseconds.

    Attributes:
        layers: of forward and backward; they add up to a pass without clocks on them.
        rest_ms: what they leave of the step: optimizer, data, host.
        step_ms: a whole step without clocks on its layers.
    """

    layers: list[Layer]
    rest_ms: float
    step_ms: float


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
    on_gpu = world.device.type == "cuda"
    try:
        whole, fewer = (measured(config, world) for config in configs)
        kernels_ms = _kernels_ms(configs[0], world) if on_gpu else None
        command = shlex.join(["python", "-m", "lab.profile_layers", *settings])
        source = f"measured on {device_and_torch(world.device)}: {command}"
    finally:
        worlds.stop()
    ratio = configs[0].batch_size / configs[1].batch_size
    profile = Profile(
        name,
        source,
        configs[0].batch_size,
        tuple(with_fixed_parts(whole.layers, fewer.layers, ratio)),
        rest_ms=whole.rest_ms,
        fixed_rest_ms=fixed_part(whole.rest_ms, fewer.rest_ms, ratio),
        step_ms=whole.step_ms,
        num_threads=None if on_gpu else torch.get_num_threads(),
    )
    return profile, kernels_ms


def measured(config: DictConfig, world: World) -> Measured:
    """Time steps with and without clocks on the layers, in turns.

    The clocks cost time themselves, so all layers are scaled to the pass of the steps without.
    """
    with assembled(config, world) as part:
        trainer, clock = part.trainer, LayerClock(part.trainer.model, world.device)
        label = f"batch {config.batch_size}"
        loop = iter(tqdm(trainer.steps(), desc=label, total=config.steps, unit="step"))
        for number in range(config.steps):
            with clock if clocked(number) else nullcontext():
                next(loop)
        next(loop, None)  # ends the training
        warmup = config.warmup_steps
        plain = [number for number in range(warmup, config.steps) if not clocked(number)]
        step_ms = 1000 * float(np.median(trainer.clock.step_seconds()[plain]))
        phases_ms = 1000 * trainer.clock.phase_seconds()[plain]
        both = [PHASES.index(phase) for phase in ("forward", "backward")]
        pass_ms = float(np.median(phases_ms[:, both].sum(axis=1)))
        layers = clock.layers(sum(map(clocked, range(warmup))))
    return Measured(scaled_to(pass_ms, layers), max(0.0, step_ms - pass_ms), step_ms)


def clocked(number: int) -> bool:
    """Return whether step `number` has clocks: yes, no, no, yes, so that drift favours neither."""
    return number % 4 in (0, 3)


def scaled_to(pass_ms: float, layers: list[Layer]) -> list[Layer]:
    """Scale the times of all layers by one factor, so that they add up to `pass_ms`."""
    factor = pass_ms / sum(layer.forward_ms + layer.backward_ms for layer in layers)
    return [
        replace(
            layer,
            forward_ms=factor * layer.forward_ms,
            backward_ms=factor * layer.backward_ms,
        )
        for layer in layers
    ]


def _kernels_ms(config: DictConfig, world: World) -> float:
    with assembled(config, world) as part:
        steps = part.trainer.steps()
        for _ in islice(steps, config.warmup_steps):
            pass
        with profiled() as profiler:
            num_steps = sum(1 for _ in islice(steps, CHECKED))
    return kernels_ms(profiler.key_averages(), num_steps)
