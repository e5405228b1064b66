"""Measure the layers of a model as a profile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from lab.benchmarks import interleave
from lab.benchmarks.profile_request import TURN
from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.measure.environment import device_and_torch
from lab.measure.layers import LayerClock, fixed_and_per_sample, kernels_ms, profiled
from lab.measure.spans import PHASES
from lab.measure.turns import order
from lab.model.fits import ALL, BOTH, REST, STEP, Fit
from lab.model.profile import Layer, Profile
from lab.problem.build import require_float32
from lab.training.assemble import Assembly, assembled, join

CHECKED = 5  # steps in which torch.profiler counts the kernels
WAYS = ("forward", "backward")


@dataclass(frozen=True)
class Measured:
    """Steps at one batch size, in milliseconds, a value for each round.

    Attributes:
        sizes: number of values of each layer's gradient, by name, in the order of forward.
        layers_ms: [rounds, forward and backward, layers], scaled by one factor so that their
            medians add up to that of pass_ms.
        pass_ms: forward and backward of a step without clocks on its layers. step_ms: all of it.
    """

    batch_size: int
    sizes: dict[str, int]
    layers_ms: NDArray[np.float64]
    pass_ms: NDArray[np.float64]
    step_ms: NDArray[np.float64]

    @property
    def rest_ms(self) -> NDArray[np.float64]:
        """The rest of the step: optimizer, data, host."""
        return np.maximum(0.0, self.step_ms - self.pass_ms)

    @property
    def layers(self) -> list[Layer]:
        """The layers with the medians of their times."""
        each = zip(self.sizes.items(), *np.median(self.layers_ms, axis=0), strict=True)
        return [
            Layer(name, size, float(forward), float(backward))
            for (name, size), forward, backward in each
        ]


@dataclass(frozen=True)
class Measurement:
    """A profile, and what was measured besides it.

    Attributes:
        steps_ms: median of a whole step, by batch size.
        kernels_ms: of a step's kernels, without the optimizer's, by torch.profiler at the reference
            batch; None: not on a GPU.
    """

    profile: Profile
    steps_ms: dict[int, float]
    kernels_ms: float | None


def measure(configs: Sequence[DictConfig], name: str, settings: list[str]) -> Measurement:
    """Measure a model's profile on the device at hand.

    Args:
        configs: settings of the run at several batches, the largest first: it is the reference.
        settings: settings of the command; part of the profile's source.

    Raises:
        ConfigError: a setting does not fit the data and devices at hand.
    """
    world = join(configs[0])
    on_gpu = world.device.type == "cuda"
    try:
        found = measured(configs, world)
        kernels = _kernels_ms(configs[0], world) if on_gpu else None
        command = shlex.join(["python", "-m", "lab.profile_layers", *settings])
        source = f"measured on {device_and_torch(world.device)}: {command}"
    finally:
        worlds.stop()
    steps_ms = {each.batch_size: float(np.median(each.step_ms)) for each in found}
    threads = None if on_gpu else torch.get_num_threads()
    return Measurement(profile_of(found, name, source, threads), steps_ms, kernels)


def profile_of(
    found: Sequence[Measured], name: str, source: str, num_threads: int | None
) -> Profile:
    """Return the profile whose times lie on lines through those of several batches."""
    reference = found[0].batch_size
    fits = tuple(_fits(found))
    fixed, whole = {}, {}
    for fit in fits:
        fixed_ms, per_sample_ms = fit.fixed_ms["median"] or 0.0, fit.per_sample_ms["median"] or 0.0
        fixed[fit.layer, fit.way] = fixed_ms
        whole[fit.layer, fit.way] = fixed_ms + reference * per_sample_ms
    layers = (
        Layer(layer, size, *(times[layer, way] for times in (whole, fixed) for way in WAYS))
        for layer, size in found[0].sizes.items()
    )
    return Profile(
        name,
        source,
        reference,
        tuple(layers),
        rest_ms=whole[REST, STEP],
        fixed_rest_ms=fixed[REST, STEP],
        step_ms=float(np.median(found[0].step_ms)),
        num_threads=num_threads,
        fits=fits,
    )


def _fits(found: Sequence[Measured]) -> Iterator[Fit]:
    for index, layer in enumerate(found[0].sizes):
        for number, way in enumerate(WAYS):
            yield _fit(layer, way, found, [each.layers_ms[:, number, index] for each in found])
    yield _fit(ALL, BOTH, found, [each.pass_ms for each in found])
    yield _fit(REST, STEP, found, [each.rest_ms for each in found])


def _fit(
    layer: str, way: str, found: Sequence[Measured], times: Sequence[NDArray[np.float64]]
) -> Fit:
    batches = [each.batch_size for each in found]

    def part(number: int) -> dict[str, float | None]:
        return interleave.interval(lambda *of: fixed_and_per_sample(batches, of)[number], *times)

    return Fit(layer, way, part(0), part(1))


def measured(configs: Sequence[DictConfig], world: World) -> list[Measured]:
    """Time steps of all batches, with and without clocks on the layers.

    Batches take turns of TURN steps in a random order, so that drift favours none; and a turn is
    longer than a step, because the first one finds another batch's data in the caches.
    """
    warmup = configs[0].warmup_steps
    with ExitStack() as stack:
        timed = [_Timed(stack.enter_context(assembled(each, world)), world) for each in configs]
        for each in timed:
            each.take(warmup)
        for number in interleave.progress(range((configs[0].steps - warmup) // TURN), 0):
            for index in order(len(timed), number):
                timed[index].take(TURN)
        return [each.measured() for each in timed]


class _Timed:
    """A trainer at one batch size, and the clock of its layers."""

    def __init__(self, part: Assembly, world: World) -> None:
        self._trainer = part.trainer
        require_float32(part.trainer.model)
        self._clock = LayerClock(part.trainer.model, world.device)
        self._steps = part.trainer.steps()
        self._num_steps = 0

    def take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            with self._clock if clocked(self._num_steps) else nullcontext():
                next(self._steps)
            self._num_steps += 1

    def measured(self) -> Measured:
        """Return the times of all steps after the warm-up."""
        trainer = self._trainer
        trainer.clock.pause()
        warmup = trainer.config.warmup_steps
        taken = range(self._num_steps)
        plain = [number for number in taken[warmup:] if not clocked(number)]
        both = [PHASES.index(phase) for phase in WAYS]
        pass_ms = 1000 * trainer.clock.phase_seconds()[plain][:, both].sum(axis=1)
        step_ms = 1000 * trainer.clock.step_seconds()[plain]
        names, layers_ms = self._clock.times_ms(sum(map(clocked, taken[:warmup])))
        pass_ms, step_ms, layers_ms = map(_by_round, (pass_ms, step_ms, layers_ms))
        return Measured(
            trainer.batch_size,
            {name: self._clock.parameters[name] for name in names},
            scaled_to(float(np.median(pass_ms)), layers_ms),
            pass_ms,
            step_ms,
        )


def _by_round(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average over the steps of one kind in each turn: [steps, ...] to [rounds, ...]."""
    return values.reshape(-1, TURN // 2, *values.shape[1:]).mean(axis=1)


def clocked(number: int) -> bool:
    """Return whether step `number` has clocks: yes, no, no, yes, so that drift favours neither."""
    return number % 4 in (0, 3)


def scaled_to(pass_ms: float, layers_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale all times [rounds, ways, layers] so that their medians add up to `pass_ms`.

    The clocks cost time themselves.
    """
    return pass_ms / np.median(layers_ms, axis=0).sum() * layers_ms


def _kernels_ms(config: DictConfig, world: World) -> float:
    with assembled(config, world) as part:
        steps = part.trainer.steps()
        for _ in islice(steps, config.warmup_steps):
            pass
        with profiled() as profiler:
            num_steps = sum(1 for _ in islice(steps, CHECKED))
    return kernels_ms(profiler.key_averages(), num_steps)
