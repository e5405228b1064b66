"""What each layer of a model costs here: `python -m lab.profile_layers model=alexnet_small`."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lab.distributed.launcher import world_size
from lab.model.profile import Layer, Profile
from lab.settings.command_line import answer_help, report_error
from lab.settings.config import ConfigError, load

if TYPE_CHECKING:
    from lab.distributed.world import World

OWN = {"out": ("null", "FILE.yaml for the profile; profile=NAME reads conf/profile/NAME.yaml")}
PURPOSE = """\
Measure forward and backward of each layer and write a profile, by which model=replay waits.
Measured with batch_size images and with a quarter of them, which tells what grows with the batch
from what does not."""
EXAMPLES = (
    "python -m lab.profile_layers model=alexnet_small batch_size=64 out=conf/profile/mine.yaml",
    "python -m lab.profile_layers model=alexnet data=synthetic 'data.shape=[3,224,224]' "
    "batch_size=256 precision=bf16",
)
FEWER = 4  # the second batch is so many times smaller
KERNELS = "kernels of a step but the optimizer's, by torch.profiler:"
CHECKED = 5  # steps of which torch.profiler counts the kernels
DEFAULTS = ("strategy=none", "steps=30")


def main(arguments: list[str]) -> int:
    """Measure one model; print a table, and write the profile to `out=FILE.yaml` or print it too.

    Returns:
        0; 2 for a wrong setting; 130 after Ctrl-C.
    """
    if answer_help("lab.profile_layers", PURPOSE, EXAMPLES, arguments, OWN):
        return 0
    try:
        settings = [argument for argument in arguments if not argument.startswith("out=")]
        out = _out([argument for argument in arguments if argument not in settings])
        profile, kernels_ms = measure(_configs(settings), out.stem if out else "measured", settings)
        _present(profile, kernels_ms, out)
        return 0
    except ConfigError as error:
        report_error("lab.profile_layers", error)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def measure(
    configs: list[DictConfig], name: str, settings: list[str]
) -> tuple[Profile, float | None]:
    """The profile of a model on the device at hand; on a GPU also what torch.profiler finds.

    That is the time of all kernels of a step but the optimizer's, in ms, at the batch of reference.

    Args:
        configs: of the run at the batch of reference, and at a smaller one.
        settings: what the command was given; part of the profile's source.

    Raises:
        ConfigError: a setting that proves wrong with data and devices at hand.
    """
    # Only now is torch imported: help and wrong settings have been answered without it.
    from lab.distributed import world as worlds
    from lab.measure.environment import device_and_torch
    from lab.measure.layers import with_fixed_parts
    from lab.training.assemble import join

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


def table(profile: Profile) -> str:
    """Times of each layer, for people."""
    from lab.draw.text import aligned

    header = ["layer", "parameters", "forward ms", "of it fixed", "backward ms", "of it fixed"]
    return "\n".join(aligned([header, *map(_line, profile.layers), _line(_sum(profile.layers))]))


def _line(layer: Layer) -> list[str]:
    times = (
        *(layer.forward_ms, layer.fixed_forward_ms),
        *(layer.backward_ms, layer.fixed_backward_ms),
    )
    return [layer.name, f"{layer.parameters:,}", *(f"{each:.3f}" for each in times)]


def _sum(layers: tuple[Layer, ...]) -> Layer:
    _, *columns = zip(*(astuple(layer) for layer in layers), strict=True)
    return Layer("all", *map(sum, columns))


def _layers(config: DictConfig, world: World) -> list[Layer]:
    from tqdm import tqdm

    from lab.benchmarks.step import assembled
    from lab.measure.layers import LayerClock

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
    from lab.benchmarks.step import assembled
    from lab.measure.kernels import kernels_ms, profiled

    with assembled(config, world) as part:
        steps = part.trainer.steps()
        for _ in islice(steps, config.warmup_steps):
            pass
        with profiled() as profiler:
            num_steps = sum(1 for _ in islice(steps, CHECKED))
    return kernels_ms(profiler.key_averages(), num_steps)


def _configs(settings: list[str]) -> list[DictConfig]:
    """The run's settings as they were given, and with a smaller batch."""
    for setting in settings:
        if setting.startswith("strategy="):
            raise ConfigError(f"{setting}: nothing is exchanged here; take transform=fc1x1 alone")
    config = load([*DEFAULTS, *settings])
    for key, needed in (("accumulate", 1), ("compile", False)):
        if config[key] != needed:
            raise ConfigError(f"{key}={config[key]}: layers are measured with {key}={needed}")
    if config.warmup_steps >= config.steps:
        raise ConfigError(f"steps={config.steps}: must be above warmup_steps={config.warmup_steps}")
    if config.batch_size < FEWER:
        raise ConfigError(f"batch_size={config.batch_size}: must be at least {FEWER}")
    if world_size() > 1:
        raise ConfigError(f"{world_size()} ranks were started: layers are measured on one")
    return [config, load([*DEFAULTS, *settings, f"batch_size={config.batch_size // FEWER}"])]


def _out(given: list[str]) -> Path | None:
    """The last `out=`, if it is a place for a profile."""
    if not given:
        return None
    path = Path(given[-1].removeprefix("out="))
    if not re.fullmatch(r"[\w-]+\.yaml", path.name):
        raise ConfigError(f"{given[-1]}: must be NAME.yaml, of letters, digits, _ and -")
    if not path.parent.is_dir():
        raise ConfigError(f"{given[-1]}: there is no directory {path.parent}")
    return path


def _present(profile: Profile, kernels_ms: float | None, out: Path | None) -> None:
    print(table(profile))
    if kernels_ms is not None:
        whole_ms = sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
        print(f"\nlayers {whole_ms:.3f} ms; {KERNELS} {kernels_ms:.3f} ms")
    if out is None:
        print(f"\n{profile.to_yaml()}", end="")
        return
    from lab.record.files import write_atomically

    try:
        write_atomically(out, lambda temporary: temporary.write_text(profile.to_yaml()))
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written: {error.strerror}") from None
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
