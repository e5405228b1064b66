"""The command line of lab.predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.model.profile import Profile, replayed
from lab.settings.errors import ConfigError
from lab.settings.fields import fields_of, file_setting, parsed, setting, split
from lab.settings.files import read_file
from lab.settings.overrides import config_dir_of
from lab.settings.reading import escaped
from lab.simulate.hardware import Hardware
from lab.simulate.presets import parse as parse_hardware
from lab.study.grid import Cell
from lab.study.grid import read as read_grid

DEFAULT_PROFILE = "alexnet_titanx"


@dataclass(frozen=True)
class OwnSettings:
    """The settings of lab.predict beside a grid's; hardware.KEY=... is read apart."""

    hardware: str = setting(
        "titanx_x4", "a file of conf/hardware; hardware.KEY=... changes one figure of it"
    )
    fit: Path | None = setting(
        None,
        "runs/STUDY: fit the hardware to its cells of 1 and 2 ranks, score on others; "
        "or FILE.json of lab.bench collective or codec",
    )
    measured: Path | None = setting(
        None, "runs/STUDY: compare with its cells of these settings, without a fit"
    )
    out: Path | None = file_setting(
        "FILE.json for the result, its figure next to it; or FILE.png alone", ".json", ".png"
    )
    trace: Path | None = file_setting(
        "FILE.json for the one cell's timeline (ui.perfetto.dev), and its figure", ".json"
    )


@dataclass(frozen=True)
class Request:
    """The cells to predict, and their hardware.

    Attributes:
        profiles: one for each cell; None: its model has none, and is estimated.
        by_default: neither a model nor a profile was given.
        fit: a study's folder or a benchmark's JSON; the hardware is fitted to it.
        measured: a study's folder, to compare with.
    """

    cells: list[Cell]
    profiles: list[Profile | None]
    by_default: bool
    hardware: Hardware
    fit: Path | None
    measured: Path | None
    out: Path | None
    trace: Path | None


def read(arguments: Sequence[str]) -> Request:
    """Read the cells, profiles and hardware that a command line names.

    Raises:
        ConfigError: a setting is wrong.
    """
    texts, run = split(arguments, fields_of(OwnSettings))
    own = parsed(OwnSettings, texts)
    fit, trace = own.fit, own.trace
    cells = [cell for cell in read_grid([*run, "baselines=all"]).cells if cell.repeat == 0]
    if trace and len(cells) > 1:
        raise ConfigError(f"trace={trace}: takes one cell, and these are {len(cells)}")
    config_dir = config_dir_of(run)
    try:
        hardware = parse_hardware(_hardware(own.hardware, texts, config_dir))
        profiles = [_profile(cell) for cell in cells]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if fit and fit.suffix != ".json" and None in profiles:
        raise ConfigError(
            f"fit={fit}: an exchange cannot be fitted beside an estimated model; measure it with "
            "lab.profile_layers out=FILE.yaml and give profile=FILE.yaml"
        )
    if fit and own.measured:
        raise ConfigError(f"fit={fit} measured={own.measured}: a fit is scored on its own; set one")
    by_default = not any(map(_is_given, cells))
    return Request(cells, profiles, by_default, hardware, fit, own.measured, own.out, trace)


def plain(node: Any) -> dict[str, Any]:
    """Convert a node of settings to a dict, with references resolved."""
    container = OmegaConf.to_container(node, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _profile(cell: Cell) -> Profile | None:
    """Return the profile of a cell's layers; None if its model is given without one."""
    settings = plain(cell.config)
    if settings["profile"]:
        return replayed(settings) or Profile.parse(settings["profile"])
    if _is_given(cell):
        return replayed(settings)  # refuses model=replay, which needs one
    return Profile.parse(read_file("profile", DEFAULT_PROFILE))


def _is_given(cell: Cell) -> bool:
    """Return whether a cell's settings name a model or a profile, or change one."""
    keys = (word.lstrip("+~").partition("=")[0] for word in cell.arguments)
    return any(key.partition(".")[0] in ("model", "profile") for key in keys)


def _hardware(name: str, texts: Mapping[str, str], config_dir: str | None) -> Mapping[str, Any]:
    """Read a file of conf/hardware and apply `hardware.key=value` to it.

    Raises:
        ConfigError: there is no such file, or a value cannot be read.
    """
    changes = {key: text for key, text in texts.items() if key.startswith("hardware.")}
    dotted = [f"{key.removeprefix('hardware.')}={text}" for key, text in changes.items()]
    try:
        node: Any = OmegaConf.create(escaped(read_file("hardware", name, config_dir)))
        for key in changes:  # a value that is given is not assumed
            node.get("assumed", {}).pop(key.removeprefix("hardware."), None)
        return plain(OmegaConf.merge(node, OmegaConf.from_dotlist(dotted)))
    except (OmegaConfBaseException, TypeError) as error:
        lines = " ".join(f"{key}={text}" for key, text in changes.items())
        raise ConfigError(f"{lines}: {str(error).splitlines()[0]}") from None
