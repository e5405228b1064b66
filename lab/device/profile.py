"""Measure the layers of a model as a profile, and show it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from lab.benchmarks.harness import interval, joined, take_turns
from lab.benchmarks.present import ranged
from lab.device.clock import WAYS, LayerClock
from lab.device.profile_request import TURN
from lab.distributed.world import World
from lab.draw.text import aligned
from lab.measure import PHASES
from lab.measure.environment import device_and_torch
from lab.measure.layers import kernels_ms, profiled
from lab.model.profile import ALL, BOTH, REST, STEP, BatchFit, Layer, Profile
from lab.problem import require_float32
from lab.settings.storage import write_text
from lab.simulate.strategy import update_of
from lab.training.assemble import Assembly, assembled

APART = 0.1  # of a step: a profile whose parts miss more of it predicts no better
CHECKED = 5  # steps in which torch.profiler counts the kernels
KERNELS = "kernels of a step except the optimizer's, by torch.profiler:"
HEADER = [
    *("layer", "parameters"),
    *("forward ms", "fixed ms", "us per sample"),
    *("backward ms", "fixed ms", "us per sample"),
]
US_PER_MS = 1e3

Values = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps at one batch size, in milliseconds, a value for each round.

    Attributes:
        sizes: number of values of each layer's gradient, by name, in the order of forward.
        layers_ms: [rounds, forward and backward, layers], scaled by one factor so that their
            medians add up to that of pass_ms.
        pass_ms: forward and backward of a step without clocks on its layers. step_ms: all of it.
    """

    batch_size: int
    sizes: dict[str, int]
    layers_ms: Values
    pass_ms: Values
    step_ms: Values

    @property
    def layers(self) -> list[Layer]:
        """The layers with the medians of their times."""
        forward, backward = np.median(self.layers_ms, axis=0).tolist()
        return list(map(Layer, self.sizes, self.sizes.values(), forward, backward))


def measure(
    configs: Sequence[DictConfig], name: str, settings: list[str]
) -> tuple[Profile, list[str]]:
    """Measure a model's profile on the device at hand; return it, and lines about it.

    Args:
        configs: settings of the run at several batches, the largest first: it is the reference.
        settings: settings of the command; part of the profile's source.

    Raises:
        ConfigError: a setting does not fit the data and devices at hand.
    """
    with joined(configs[0]) as world:
        on_gpu = world.device.type == "cuda"
        found = measured(configs, world)
        kernels = None
        if on_gpu:
            with assembled(configs[0], world) as part:
                steps = part.trainer.steps()
                for _ in islice(steps, configs[0].warmup_steps):
                    pass
                with profiled() as profiler:
                    num_steps = sum(1 for _ in islice(steps, CHECKED))
            kernels = kernels_ms(profiler.key_averages(), num_steps)
        command = shlex.join(["python", "-m", "lab.profile_layers", *settings])
        source = f"measured on {device_and_torch(world.device)}: {command}"
    threads = None if on_gpu else torch.get_num_threads()
    update = update_of(configs[0].optim)
    profile = profile_of(found, name, source, threads)
    profile = replace(profile, update_passes=update and update.passes)
    return profile, _notes(profile, found, kernels)


def profile_of(
    found: Sequence[MeasuredSteps], name: str, source: str, num_threads: int | None
) -> Profile:
    """Return the profile whose times lie on lines through those of several batches."""
    batches = [each.batch_size for each in found]
    times = {
        (layer, way): [each.layers_ms[:, number, index] for each in found]
        for index, layer in enumerate(found[0].sizes)
        for number, way in enumerate(WAYS)
    }
    times[ALL, BOTH] = [each.layers_ms.reshape(len(each.layers_ms), -1) for each in found]
    # Optimizer, data, host.
    times[REST, STEP] = [np.maximum(0.0, each.step_ms - each.pass_ms) for each in found]

    def part(number: int, of: list[Values]) -> dict[str, float | None]:
        samples = [column for values in of for column in values.reshape(len(values), -1).T]

        def together(*medians: Values) -> Values:  # of each batch, and of each part at it
            parts = np.array(medians).reshape(len(of), -1, *np.shape(medians[0]))
            return fixed_and_per_sample(batches, [*parts])[number].sum(axis=0)

        return interval(together, *samples)

    fits = tuple(BatchFit(*key, part(0, of), part(1, of)) for key, of in times.items())
    fixed, whole = {}, {}
    for fit in fits:
        fixed_ms, per_sample_ms = fit.fixed_ms["median"] or 0.0, fit.per_sample_ms["median"] or 0.0
        fixed[fit.layer, fit.way] = fixed_ms
        whole[fit.layer, fit.way] = fixed_ms + batches[0] * per_sample_ms
    layers = (
        Layer(layer, size, *(ms[layer, way] for ms in (whole, fixed) for way in WAYS))
        for layer, size in found[0].sizes.items()
    )
    return Profile(
        name,
        source,
        batches[0],
        tuple(layers),
        rest_ms=whole[REST, STEP],
        fixed_rest_ms=fixed[REST, STEP],
        step_ms=float(np.median(found[0].step_ms)),
        num_threads=num_threads,
        fits=fits,
    )


def fixed_and_per_sample(batches: Sequence[int], times: Sequence[Values]) -> tuple[Values, Values]:
    """Fit time = fixed + per_sample · batch by least squares, both of at least 0.

    Errors are relative to the times: noise grows with a time, so in absolute terms the largest
    batch would decide alone, and the fixed part is what the smallest ones show. Through two batches
    the line passes exactly, unless a part would be below 0; the other then fits alone.

    Args:
        batches: at least two, all different.
        times: for each batch an array of any shape, the same for all.

    Returns:
        fixed, per_sample: of that shape, in the unit of the times; 0 where a time is.
    """
    t = np.stack([np.asarray(each, dtype=np.float64) for each in times], axis=-1)
    b = np.array(batches, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        s, sb, sbb = ((b**power / t**2).sum(axis=-1) for power in (0, 1, 2))
        st, sbt = (1 / t).sum(axis=-1), (b / t).sum(axis=-1)
        determinant = s * sbb - sb**2
        fixed = (sbb * st - sb * sbt) / determinant
        per_sample = (s * sbt - sb * st) / determinant
        growing, constant = fixed < 0, per_sample < 0
        fixed = np.where(growing, 0.0, np.where(constant, st / s, fixed))
        per_sample = np.where(constant, 0.0, np.where(growing, sbt / sbb, per_sample))
    return np.nan_to_num(fixed), np.nan_to_num(per_sample)


def measured(configs: Sequence[DictConfig], world: World) -> list[MeasuredSteps]:
    """Time steps of all batches, with and without clocks on the layers.

    Batches take turns of TURN steps in a random order, so that drift favours none; and a turn is
    longer than a step, because the first one finds another batch's data in the caches.
    """
    warmup = configs[0].warmup_steps
    with ExitStack() as stack:
        timed = [_Timed(stack.enter_context(assembled(each, world)), world) for each in configs]
        for each in timed:
            each.take(warmup)
        num_rounds = (configs[0].steps - warmup) // TURN
        take_turns([partial(each.take, TURN) for each in timed], num_rounds)
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

    def measured(self) -> MeasuredSteps:
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
        return MeasuredSteps(
            trainer.batch_size,
            {name: self._clock.parameters[name] for name in names},
            scaled_to(float(np.median(pass_ms)), layers_ms),
            pass_ms,
            step_ms,
        )


def _by_round(values: Values) -> Values:
    """Average over the steps of one kind in each turn: [steps, ...] to [rounds, ...]."""
    return values.reshape(-1, TURN // 2, *values.shape[1:]).mean(axis=1)


def clocked(number: int) -> bool:
    """Return whether step `number` has clocks: yes, no, no, yes, so that drift favours neither."""
    return number % 4 in (0, 3)


def scaled_to(pass_ms: float, layers_ms: Values) -> Values:
    """Scale all times [rounds, ways, layers] so that their medians add up to `pass_ms`.

    The clocks cost time themselves.
    """
    return pass_ms / np.median(layers_ms, axis=0).sum() * layers_ms


def present(profile: Profile, notes: list[str], out: Path | None) -> None:
    """Print a table of the layers, and write the profile to `out`, or print it too.

    Raises:
        OSError: the file cannot be written.
    """
    print(table(profile))
    print("\n".join(["", *notes]))
    if out is None:
        print(f"\n{profile.to_yaml()}", end="")
        return
    write_text(out, profile.to_yaml())
    print(f"wrote {out}")


def table(profile: Profile) -> str:
    """List the times of each layer at the reference batch, and the lines that they are on."""
    fits = {(fit.layer, fit.way): _parts(fit) for fit in profile.fits}
    lines = [HEADER]
    for layer in profile.layers:
        forward, backward = (fits[layer.name, way] for way in WAYS)
        times = f"{layer.forward_ms:.3f}", *forward, f"{layer.backward_ms:.3f}", *backward
        lines.append([layer.name, f"{layer.parameters:,}", *times])
    parameters, forward_ms, backward_ms = (
        sum(getattr(layer, key) for layer in profile.layers)
        for key in ("parameters", "forward_ms", "backward_ms")
    )
    total = ["all", f"{parameters:,}", f"{forward_ms:.3f}", "", "", f"{backward_ms:.3f}", "", ""]
    return "\n".join(aligned([*lines, total]))


def _parts(fit: BatchFit) -> tuple[str, str]:
    return ranged(fit.fixed_ms), ranged(fit.per_sample_ms, US_PER_MS)


def held_to_step(batch: int, step_ms: float, by_lines: float) -> str:
    """Compare a measured step with the sum of the profile's parts, and warn if they are apart."""
    off = by_lines / step_ms - 1
    text = f"batch {batch}: step {step_ms:.3f} ms without layer timers; the fitted lines give "
    text += f"{by_lines:.3f} ms ({100 * off:+.1f} %)"
    if abs(off) <= APART:
        return text
    return f"{text}; warning: too far apart to trust; measure again, with more steps"


def _notes(profile: Profile, found: Sequence[MeasuredSteps], kernels: float | None) -> list[str]:
    """Write the lines of the profile, and how they compare with steps and, on a GPU, kernels."""
    lines = []
    for fit in profile.fits:
        if (fit.layer, fit.way) in ((ALL, BOTH), (REST, STEP)):
            fixed, per_sample = _parts(fit)
            lines.append(f"{fit.layer}: {fixed} ms fixed, {per_sample} us per sample")
    for each in found:
        by_lines = profile.compute_s(each.batch_size) + (profile.rest_s(each.batch_size) or 0.0)
        lines.append(held_to_step(each.batch_size, float(np.median(each.step_ms)), 1e3 * by_lines))
    lines.append("(rest): optimizer, data and host; in brackets: 95 % intervals")
    if kernels is not None:
        whole_ms = sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
        lines.append(f"layers {whole_ms:.3f} ms; {KERNELS} {kernels:.3f} ms")
    return lines
