"""The schema of a run's settings, their composition by Hydra, and the one call of `instantiate`.

Nothing here imports torch, so `--help` and a wrong setting answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

GROUPS = (
    *("strategy", "exchange", "sync", "transform"),
    *("model", "profile", "data", "optim", "comm", "recorder", "cluster"),
)


class ConfigError(ValueError):
    """A setting the user can correct. Its text is one line: the key, the value, what is allowed."""


def setting(
    default: Any,
    help: str,
    choices: tuple[Any, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A scalar setting: its default, its line of `--help` and what it may hold."""
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
    }
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Settings:
    """Scalar settings of a run. The groups (dicts) are filled from conf/<group>/<choice>.yaml."""

    strategy: str = setting("???", "how gradients are exchanged (a group)")
    exchange: dict[str, Any] = setting({}, "what moves, and along which path (a group)")
    sync: dict[str, Any] = setting({}, "when gradients or weights are exchanged (a group)")
    transform: dict[str, Any] = setting({}, "which model is made of the model (a group)")
    model: dict[str, Any] = setting({}, "what is trained (a group)")
    profile: dict[str, Any] = setting({}, "what the layers of model=replay cost (a group)")
    data: dict[str, Any] = setting({}, "on what (a group)")
    optim: dict[str, Any] = setting({}, "SGD and its schedule (a group)")
    comm: dict[str, Any] = setting({}, "over what ranks talk (a group)")
    recorder: dict[str, Any] = setting({}, "where numbers go beside the run directory (a group)")
    cluster: dict[str, Any] = setting({}, "the hosts and links that ranks are started on (a group)")

    overlap: bool = setting(False, "exchange buckets while backward still runs")
    bucket_mb: float | None = setting(
        None, "bucket size in MB; null: one bucket, 0: one per layer", at_least=0
    )
    batch_size: int = setting(
        128, "images per step: global (strong) or per rank (weak)", at_least=1
    )
    scaling: str = setting("strong", "what batch_size fixes", ("strong", "weak"))
    steps: int | None = setting(None, "optimizer steps (instead of epochs)", at_least=1)
    epochs: float | None = setting(None, "passes over the data; 30 if steps is not set", above=0)
    seed: int = setting(0, "seed of weights, sample order and dropout", at_least=0, at_most=2**62)
    deterministic: bool = setting(False, "bit-identical reruns, at the price of speed")
    precision: str = setting("fp32", "fp32, or autocast to", ("fp32", "bf16", "fp16"))
    tf32: bool = setting(False, "TF32 in fp32 products and convolutions on GPUs; false: IEEE fp32")
    accumulate: int = setting(
        1, "micro-batches per optimizer step; one exchange for all", at_least=1
    )
    clip_grad_norm: float | None = setting(None, "largest norm of the averaged gradient", above=0)
    channels_last: bool = setting(False, "channels-last memory format")
    compile: bool = setting(False, "torch.compile the model; with overlap by regions of bucket_mb")
    device: str = setting("auto", "where ranks compute", ("auto", "cpu", "cuda"))
    backend: str = setting("auto", "of comm=torch", ("auto", "gloo", "nccl"))
    share_gpus: bool = setting(False, "more ranks than GPUs, as an emulation")

    measure: str = setting("throughput", "what is timed", ("throughput", "breakdown"))
    warmup_steps: int = setting(5, "first steps that no statistic counts", at_least=0)
    eval_every: int = setting(0, "steps between evaluations; 0: at the end alone", at_least=0)
    checkpoint_every: int = setting(
        0, "steps between checkpoints; 0: on a signal alone", at_least=0
    )
    resume: str | None = setting(None, "auto: this cell's newest checkpoint, or a path")
    exchange_timeout_s: float = setting(
        300.0, "an exchange that takes longer has failed", above=0, at_most=1e6
    )

    runs_dir: str = setting("runs", "root of all run directories")
    study: str = setting("default", "the sweep this run belongs to")
    cell: str | None = setting(None, "name of this run; by default made of what was set")
    repeat: int = setting(0, "which repetition of the same cell this is", at_least=0)


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
ConfigStore.instance().store(name="settings", node=Settings)


def conf_dir() -> Path:
    """The configuration tree: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices_of(group: str) -> list[str]:
    """Names that `group=` may take, in alphabetical order."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def read_file(group: str, name: str) -> dict[str, Any]:
    """What conf/<group>/<name>.yaml holds.

    Raises:
        ConfigError: there is no such file.
    """
    if name not in choices_of(group):
        raise ConfigError(f"{group}={name}: allowed are {', '.join(choices_of(group))}")
    content = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def parse_overrides(arguments: list[str]) -> list[Override]:
    """`key=value` arguments in Hydra's grammar.

    Raises:
        ConfigError: an argument is not of that form.
    """
    for argument in arguments:
        try:
            OverridesParser.create().parse_override(argument)
        except HydraException:
            raise ConfigError(
                f"{argument!r} is not a setting: write key=value, and quote values with "
                "commas, brackets or '=' as in 'cell=\"a=b\"'"
            ) from None
        if argument[0] in "+~" or argument.startswith("hydra."):
            raise ConfigError(f"{argument}: settings can be changed, not added or removed")
    return OverridesParser.create().parse_overrides(arguments)


def load(arguments: list[str]) -> DictConfig:
    """Compose, type-check and validate the settings of one run.

    Args:
        arguments: command-line overrides, `key=value`.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type or a value out of range.
    """
    overrides = parse_overrides(arguments)
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: a run takes one value; lists are for python -m lab.sweep"
            )
    # A run's study is a name. To Hydra it would be a choice among the files of conf/study.
    studies = [str(o.value()) for o in overrides if o.key_or_group == "study"]
    others = [str(o.input_line) for o in overrides if o.key_or_group != "study"]
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = compose("train", overrides=others)
        if studies:
            config.study = studies[-1]
        _validate(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments)) from None
    except ConfigError:
        raise
    except ValueError as error:  # Hydra's own, of a group without a choice
        raise ConfigError(_one_line(error)) from None
    return config


def build(node: DictConfig, *parts: Any, **runtime: Any) -> Any:
    """Construct the `_target_` of `node` with its own arguments, `parts` and `runtime`.

    Args:
        parts: positional arguments, handed over as they are: Hydra takes a dataclass among
            `runtime` for configuration.

    Raises:
        ConfigError: the constructor refused an argument (ValueError), or the target is unknown.
    """
    try:
        return instantiate(node, *parts, **runtime)
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, (ValueError, TypeError)):
            raise ConfigError(_one_line(cause)) from error
        if cause is not None and not isinstance(cause, (ImportError, AttributeError)):
            raise cause from None
        raise ConfigError(f"_target_={node.get('_target_')}: {_one_line(error)}") from error


def _validate(config: DictConfig) -> None:
    for name, field in FIELDS.items():
        value, allowed = config[name], field.metadata["choices"]
        if allowed and value not in allowed:
            raise ConfigError(f"{name}={value}: allowed are {', '.join(allowed)}")
        if isinstance(value, int | float) and (problem := _out_of_range(value, field.metadata)):
            raise ConfigError(f"{name}={value}: {problem}")
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(f"steps={config.steps} epochs={config.epochs}: set one of the two")
    if not config.runs_dir:
        raise ConfigError("runs_dir=: must name a directory")
    for name in ("study", "cell"):
        value = config[name]
        if value is not None and not re.fullmatch(r"(?!\.)[\w.,=+\-]+", value):
            raise ConfigError(
                f"{name}={value!r}: names a directory under runs_dir; allowed are letters, "
                "digits and . , = + _ - (not first a dot)"
            )


def _out_of_range(value: float, limits: Mapping[str, Any]) -> str | None:
    at_least, above = limits["at_least"], limits["above"]
    if at_least is not None and not at_least <= value < math.inf:
        return f"must be a number of at least {at_least}"
    if above is not None and not above < value < math.inf:
        return f"must be a number above {above}"
    if limits["at_most"] is not None and value > limits["at_most"]:
        return f"must be at most {limits['at_most']:g}"
    return None


def _explain(error: Exception, arguments: list[str]) -> str:
    """One line that names the key, the value and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.strip("/").rpartition("/")
        group, choice = (group, choice) if group else (choice, "")
        return f"{group}={choice}: allowed are {', '.join(choices_of(group))}"
    cause = error.__cause__ or error
    quoted = re.search(r"'([^']+)'", str(error))
    key = str(getattr(cause, "full_key", None) or (quoted.group(1) if quoted else ""))
    given = next((a for a in arguments if a.lstrip("+~").split("=")[0] == key), key)
    if "Could not override" in str(error):
        return _unknown(given, key)
    return f"{given}: {_one_line(cause)}"


def _unknown(given: str, key: str) -> str:
    group, _, name = key.partition(".")
    if group in GROUPS:
        has_it = [choice for choice in choices_of(group) if name in read_file(group, choice)]
        if has_it:
            return f"{given}: needs {' or '.join(f'{group}={choice}' for choice in has_it)}"
    close = difflib.get_close_matches(key.split(".")[-1], _known_keys(), n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{given}: no such setting{hint} (--help lists them)"


def _known_keys() -> list[str]:
    keys = [*FIELDS]
    for group in GROUPS:
        for path in (conf_dir() / group).glob("*.yaml"):
            keys += [str(key) for key in OmegaConf.load(path)]
    return [key for key in keys if key not in ("_target_", "defaults")]


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def check_batch(config: DictConfig, world_size: int) -> None:
    """Refuse a batch that does not divide evenly.

    Raises:
        ConfigError: names the nearest batch sizes that work.
    """
    ranks = 1 if config.scaling == "weak" else world_size
    unit = ranks * config.accumulate
    if config.batch_size % unit:
        below = config.batch_size // unit * unit
        nearest = " and ".join(str(size) for size in (below, below + unit) if size)
        raise ConfigError(
            f"batch_size={config.batch_size}: {ranks} rank{'s' if ranks > 1 else ''} with "
            f"accumulate={config.accumulate} need a multiple of {unit}; nearest are {nearest}"
        )
