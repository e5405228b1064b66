"""The schema of a run's settings, their composition by Hydra, and the one call of `instantiate`.

Nothing here imports torch, so `--help` and a wrong setting answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lab.settings import checks, hints
from lab.settings.blame import reason_of
from lab.settings.composition import composed, exchange_of, parts_apart
from lab.settings.errors import ConfigError, one_line
from lab.settings.fields import fields_of, setting
from lab.settings.files import choices_of, keys_of, make_importable
from lab.settings.names import DIRECTORY
from lab.settings.overrides import config_dir_of, parse_overrides
from lab.settings.own_code import asked_for, callable_at, check_choices
from lab.settings.secrets import without_secrets

GROUPS = (
    *("strategy", "exchange", "sync", "transform"),
    *("task", "model", "profile", "data", "optim", "comm", "recorder", "cluster", "straggler"),
)
DATA = ("profile",)  # groups whose files are data
# Groups whose choice may be the path of a callable, and the arguments that it may ask for.
OFFERED: dict[str, tuple[str, ...]] = {
    "model": ("input_shape", "image_shape", "output_size", "num_classes", "vocabulary", "context"),
    "data": ("seed", "device"),
    "optim": ("params", "batch_size"),
    "sync": ("parts",),
    **dict.fromkeys(("exchange", "transform", "task", "comm", "recorder"), ()),
}


@dataclass
class Settings:
    """Scalar settings of a run. The groups (dicts) are filled from conf/<group>/<choice>.yaml."""

    strategy: str = setting("???", "how gradients are exchanged (a group)")
    exchange: dict[str, Any] = setting({}, "what moves, and along which path (a group)")
    sync: dict[str, Any] = setting({}, "when gradients or weights are exchanged (a group)")
    transform: dict[str, Any] = setting({}, "how the model is rewritten before training (a group)")
    task: dict[str, Any] = setting({}, "loss, metrics and the required targets (a group)")
    model: dict[str, Any] = setting({}, "the model to train (a group)")
    profile: dict[str, Any] = setting({}, "times and sizes of the layers of model=replay (a group)")
    data: dict[str, Any] = setting({}, "the data set to train on (a group)")
    optim: dict[str, Any] = setting({}, "the optimizer and its schedule (a group)")
    comm: dict[str, Any] = setting({}, "how ranks communicate (a group)")
    recorder: dict[str, Any] = setting({}, "where numbers go besides the run directory (a group)")
    cluster: dict[str, Any] = setting({}, "the hosts and links that ranks are started on (a group)")
    straggler: dict[str, Any] = setting({}, "a rank that is delayed on purpose (a group)")

    overlap: bool = setting(False, "exchange buckets while backward still runs")
    bucket_mb: float | None = setting(
        None, "bucket size in MiB; null: one bucket, 0: one per layer", at_least=0
    )
    batch_size: int = setting(
        128, "samples per step: global (strong) or per rank (weak)", at_least=1, at_most=2**31
    )
    scaling: str = setting("strong", "what batch_size fixes", ("strong", "weak"))
    steps: int | None = setting(None, "optimizer steps, not epochs", at_least=1, at_most=2**53)
    epochs: float | None = setting(
        None, "passes over the data; 30 if steps is not set", above=0, at_most=1e6
    )
    seed: int = setting(0, "seed of weights, sample order and dropout", at_least=0, at_most=2**62)
    deterministic: bool = setting(False, "bit-identical reruns, at the price of speed")
    precision: str = setting("fp32", "fp32, or autocast to", ("fp32", "bf16", "fp16"))
    tf32: bool = setting(False, "TF32 in fp32 products and convolutions on GPUs; false: IEEE fp32")
    accumulate: int = setting(1, "micro-batches per step; one exchange for all", at_least=1)
    clip_grad_norm: float | None = setting(None, "largest norm of the averaged gradient", above=0)
    channels_last: bool = setting(False, "channels-last memory format")
    compile: bool = setting(False, "torch.compile the model; with overlap by regions of bucket_mb")
    device: str = setting("auto", "where ranks compute", ("auto", "cpu", "cuda"))
    threads: int | None = setting(
        None, "threads of a rank on a CPU; null: OMP_NUM_THREADS", at_least=1, at_most=1024
    )
    backend: str = setting("auto", "of comm=torch", ("auto", "gloo", "nccl"))
    share_gpus: bool = setting(False, "more ranks than GPUs, as an emulation")

    measure: str = setting("throughput", "what is timed", ("throughput", "breakdown", "noise"))
    drift_every: int | None = setting(
        None, "check what a bucket delivers, over windows of so many exchanges", at_least=1
    )
    check: str = setting(
        "first", "first: prove in the first steps that gradients are averaged", ("none", "first")
    )
    warmup_steps: int | None = setting(
        None, "first steps, which statistics leave out; null: until step time is steady", at_least=0
    )
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", at_least=0)
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: only on a signal", at_least=0)
    resume: str | None = setting(None, "auto: this cell's newest checkpoint, or a path")
    exchange_timeout_s: float = setting(
        300.0, "an exchange that takes longer has failed", above=0, at_most=1e6
    )

    config_dir: str | None = setting(None, "a folder with choices of your own (--config-dir)")
    runs_dir: str = setting("runs", "root of all run directories")
    study: str = setting("default", "the sweep this run belongs to")
    cell: str | None = setting(None, "name of this run; by default made from its settings")
    repeat: int = setting(0, "which repetition of the cell this is", at_least=0, at_most=2**31)
    code: dict[str, Any] = setting({}, "hashes of your own files, which the lab sets")


FIELDS = fields_of(Settings)
ConfigStore.instance().store(name="settings", node=Settings)


def load(arguments: Sequence[str]) -> DictConfig:
    """Compose, type-check and validate the settings of one run.

    Args:
        arguments: command-line overrides, `key=value`.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type or a value out of range.
    """
    overrides = parse_overrides(arguments)
    for override in overrides:
        _refuse(override)
    method_parts, overrides = parts_apart(overrides)
    config_dir = config_dir_of(arguments)
    # A run's study is a name; Hydra would take it for a choice among the files of conf/study.
    studies = [str(o.value()) for o in overrides if o.key_or_group == "study"]
    try:
        config = _compose([o for o in overrides if o.key_or_group != "study"], config_dir)
        if studies:
            config.study = studies[-1]
        if method_parts:
            config.exchange = exchange_of(method_parts, config_dir)
        _validate(config)
        make_importable(config_dir)
        config.code = check_choices(config, OFFERED, arguments)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments, config_dir)) from None
    except ConfigError:
        raise
    except ValueError as error:  # Hydra's own, of a group without a choice
        raise ConfigError(one_line(error)) from None
    return config


def _refuse(override: Override) -> None:
    """Refuse overrides that Hydra accepts but no run can use."""
    line, key = override.input_line, override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(f"{line}: a run takes one value; lists are for python -m lab.sweep")
    if override.is_delete() and ("." not in key or key.endswith("._target_")):
        raise ConfigError(f"{line}: a run needs it; what a choice sets can be removed: ~data.size")
    if key.split(".")[0] == "code":
        raise ConfigError(f"{line}: the lab sets it, from the files of your own that a run uses")
    if (override.is_add() or override.is_force_add()) and key.split(".")[0] not in FIELDS:
        raise ConfigError(f"{line}: nothing would read it; a choice can get more: +data.key=value")


def _compose(overrides: list[Override], config_dir: str | None) -> DictConfig:
    try:
        return composed(overrides, config_dir, GROUPS, OFFERED, DATA)
    except (ConfigAttributeError, ConfigKeyError) as error:
        key = str(getattr(error, "full_key", ""))
        line = next((str(o.input_line) for o in overrides if o.key_or_group == key), key)
        raise ConfigError(_unknown(line, key, config_dir)) from None


def build(node: DictConfig, *parts: Any, **runtime: Any) -> Any:
    """Construct the `_target_` of `node` with its own arguments, `parts` and `runtime`.

    Args:
        parts: positional arguments. runtime: those that only a run knows, where it names them.

    Raises:
        ConfigError: the lab's constructor refused an argument (ValueError), the arguments are not
            those of the signature, or the target is unknown.
        Exception: the constructor raised it; a user's, any.
    """
    from hydra.utils import instantiate  # imported here: help and wrong settings do not need it

    if "_target_" not in node:
        raise ConfigError(f"{node._get_full_key('_target_')}: is missing")
    later = node.get("_partial_", False)
    target = callable_at(node._target_, f"_target_={node._target_}")
    try:
        made = instantiate(node, _partial_=True, _convert_="all")
        asked = asked_for(target, runtime)
        return functools.partial(made, *parts, **asked) if later else made(*parts, **asked)
    except (HydraException, ValueError, TypeError) as error:
        failed = error
    # Outside of `except`, where Python would note Hydra's error as the context of the user's.
    raise reason_of(failed, node._target_)


def _validate(config: DictConfig) -> None:
    for name, field in FIELDS.items():
        value, choices, limits = config[name], field.metadata["choices"], field.metadata["limits"]
        if choices:
            checks.one_of(name, value, choices)
        elif checks.is_whole(value):
            checks.whole(name, value, limits.at_least, limits.at_most)
        elif isinstance(value, float):
            checks.number(name, value, **dataclasses.asdict(limits))
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(f"steps={config.steps} epochs={config.epochs}: set one of the two")
    if not config.runs_dir:
        raise ConfigError("runs_dir=: must name a directory")
    for name in ("study", "cell"):
        check_name(name, config[name])


def check_name(key: str, value: str | None) -> None:
    """Refuse a study's or cell's name that is none of a directory.

    Raises:
        ConfigError: it has other signs, or holds a secret.
    """
    as_name = value is None or re.fullmatch(DIRECTORY, value)
    if not as_name or without_secrets(str(value)) != str(value):
        raise ConfigError(
            f"{key}={value!r}: names a directory under runs_dir; allowed are letters, "
            "digits and . , = + _ - (not first a dot), and no secret"
        )


def _explain(error: Exception, arguments: Sequence[str], config_dir: str | None) -> str:
    """Return one line that names the key, the value and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.strip("/").rpartition("/")
        group, choice = (group, choice) if group else (choice, "")
        allowed = choices_of(group, config_dir)
        meant = hints.choice_hint(group, choice, allowed)
        return f"{group}={choice}: {meant}allowed are {', '.join(allowed)}"
    cause = error.__cause__ or error
    quoted_key = re.search(r"'([^']+)'", str(error))
    key = str(getattr(cause, "full_key", None) or (quoted_key.group(1) if quoted_key else ""))
    argument = next((a for a in reversed(arguments) if a.lstrip("+~").split("=")[0] == key), key)
    if "Could not override" in str(error):
        return _unknown(argument, key, config_dir)
    reason = one_line(cause)
    return f"{argument}: {hints.value_hint(argument.partition('=')[2], reason) or reason}"


def _unknown(argument: str, key: str, config_dir: str | None) -> str:
    keys = {group: keys_of(group, config_dir) for group in GROUPS}
    group, _, name = key.partition(".")
    if has_it := [choice for choice, names in keys.get(group, {}).items() if name in names]:
        return f"{argument}: needs {' or '.join(f'{group}={name}' for name in sorted(has_it))}"
    known = {
        *FIELDS,
        *(f"{group}.{name}" for group in keys for names in keys[group].values() for name in names),
    }
    hint = hints.hint(key, argument.partition("=")[2]) or hints.nearest(key, known)
    return f"{argument}: no such setting; {hint or '--help lists them'}"


def check_batch(config: DictConfig, world_size: int) -> None:
    """Refuse a batch that does not divide evenly.

    Raises:
        ConfigError: the message names the nearest batch sizes that work.
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
