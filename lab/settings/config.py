"""The schema of a run's settings, their composition by Hydra, and the one call of `instantiate`.

Nothing here imports torch, and Hydra only what needs it: help and a wrong setting answer at once.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lab.settings import checks, hints
from lab.settings.errors import ConfigError
from lab.settings.fields import INTEGER, fields_of, number_of, setting
from lab.settings.files import choices_of, no_choice
from lab.settings.names import DIRECTORY, flat
from lab.settings.own_code import asked_for, callable_at, check_names, reason_of
from lab.settings.secrets import redacted, without_secrets

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Of an exchange that is put together, with what each is by default.
PARTS = {"path": "two_stage", "codec": "int8", "memory": "error_feedback"}
DATA = ("profile",)  # groups whose files are data
PLAIN = re.compile(r"[\w.+-]+")
IN_EXCHANGE = re.compile(r"^exchange\.(?:inter\.)*(?=(?:codec|memory)\.)")  # where these parts are


@dataclass
class RunSettings:
    """Scalar settings of a run. The groups (dicts) are filled from conf/<group>/<choice>.yaml."""

    strategy: str = setting("???", "how gradients are exchanged (a group)")
    exchange: dict[str, Any] = setting({}, "what is sent, and along which path (a group)")
    sync: dict[str, Any] = setting({}, "when gradients or weights are exchanged (a group)")
    transform: dict[str, Any] = setting({}, "how the model is changed before training (a group)")
    task: dict[str, Any] = setting({}, "loss, metrics and the required targets (a group)")
    model: dict[str, Any] = setting({}, "the model to train (a group)")
    profile: dict[str, Any] = setting({}, "layer times and sizes for model=replay (a group)")
    data: dict[str, Any] = setting({}, "the data set to train on (a group)")
    optim: dict[str, Any] = setting({}, "the optimizer and its schedule (a group)")
    comm: dict[str, Any] = setting({}, "how ranks communicate (a group)")
    recorder: dict[str, Any] = setting({}, "where results go, besides the run directory (a group)")
    cluster: dict[str, Any] = setting({}, "the hosts that ranks run on, and their links (a group)")
    straggler: dict[str, Any] = setting({}, "a rank that is delayed on purpose (a group)")

    overlap: bool = setting(
        False, "exchange gradients during the backward pass instead of after it"
    )
    bucket_mb: float | None = setting(
        None, "bucket size in MiB; null: a single bucket; 0: one bucket per layer", at_least=0
    )
    batch_size: int = setting(
        128,
        "samples per step: across all ranks (scaling=strong) or per rank (scaling=weak)",
        at_least=1,
        at_most=2**31,
    )
    scaling: str = setting("strong", "whether batch_size is global or per rank", ("strong", "weak"))
    steps: int | None = setting(None, "number of optimizer steps", at_least=1, at_most=2**53)
    epochs: float | None = setting(
        None, "passes over the data; 30 if steps is not set", above=0, at_most=1e6
    )
    seed: int = setting(0, "seed for weights, sample order and dropout", at_least=0, at_most=2**62)
    deterministic: bool = setting(False, "make reruns bit-identical, at the cost of speed")
    precision: str = setting(
        "fp32", "data type of computation; bf16 and fp16 use autocast", ("fp32", "bf16", "fp16")
    )
    tf32: bool = setting(
        False, "use TF32 for fp32 products and convolutions on GPUs; false: IEEE fp32"
    )
    benchmark_limit: int = setting(
        10, "number of cuDNN algorithms to try for a convolution; 0: all", at_least=0, at_most=1000
    )
    accumulate: int = setting(
        1, "micro-batches per step, with one exchange for all of them", at_least=1
    )
    clip_grad_norm: float | None = setting(
        None, "largest allowed norm of the averaged gradient; null: no limit", above=0
    )
    channels_last: bool = setting(False, "use the channels-last memory format")
    compile: bool = setting(
        False, "run torch.compile on the model; with overlap=true, in regions of bucket_mb MiB"
    )
    graph: bool = setting(False, "replay whole steps as one CUDA graph (GPUs with NCCL)")
    device: str = setting("auto", "where ranks compute", ("auto", "cpu", "cuda"))
    threads: int | None = setting(
        None, "threads per rank on a CPU; null: OMP_NUM_THREADS", at_least=1, at_most=1024
    )
    backend: str = setting("auto", "communication library for comm=torch", ("auto", "gloo", "nccl"))
    share_gpus: bool = setting(False, "let ranks share GPUs, as an emulation")

    measure: str = setting(
        "throughput",
        "what to measure: step times, the phases of a step, or the gradient noise scale",
        ("throughput", "breakdown", "noise"),
    )
    drift_every: int | None = setting(
        None,
        "compare delivered values with exact sums, in windows of this many exchanges; null: never",
        at_least=1,
    )
    check: str = setting(
        "first",
        "first: check in the first three exchanges that gradients are averaged",
        ("none", "first"),
    )
    warmup_steps: int | None = setting(
        None,
        "steps at the start to leave out of statistics; null: until step times are steady",
        at_least=0,
    )
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", at_least=0)
    checkpoint_every: int = setting(
        0, "steps between checkpoints; 0: only after a signal", at_least=0
    )
    resume: str | None = setting(
        None, "checkpoint to resume: auto (the newest of this cell) or a path"
    )
    exchange_timeout_s: float = setting(
        300.0, "longest time an exchange may take before the run fails", above=0, at_most=1e6
    )

    config_dir: str | None = setting(None, "a folder with your own choices (--config-dir)")
    runs_dir: str = setting("runs", "folder for all run directories")
    study: str = setting("default", "name of the study that this run belongs to")
    cell: str | None = setting(None, "name of this run; null: made from its settings")
    repeat: int = setting(0, "number of this repeat of the run, from 0", at_least=0, at_most=2**31)
    code: dict[str, Any] = setting({}, "hashes of your own files, set by the lab")


FIELDS = fields_of(RunSettings)
GROUPS = ("strategy", *(k for k, f in FIELDS.items() if f.type == "dict[str, Any]" and k != "code"))


def load(arguments: Sequence[str]) -> DictConfig:
    """Compose, type-check and validate the settings of one run.

    Args:
        arguments: command-line overrides, `key=value`.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type or a value out of range.
    """
    check_words(arguments)
    from lab.settings.composition import composed  # imports Hydra

    return composed(arguments)


def check_words(arguments: Sequence[str], own: Collection[str] = ()) -> None:
    """Refuse plain words that no run can use, which takes a third of the time that Hydra takes.

    Words in which Hydra's grammar sees more (lists, quotes, references) are left to it.

    Args:
        own: keys of the command, which may have another meaning there.

    Raises:
        ConfigError: a number or a choice is wrong.
    """
    has_own_choices = any(argument.startswith("config_dir=") for argument in arguments)
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if equals and key not in (*own, *FIELDS):
            _refuse_misspelt(argument, key, own)
        if key in own or key not in FIELDS or not PLAIN.fullmatch(text):
            continue
        kind, about = str(FIELDS[key].type).partition(" ")[0], FIELDS[key].metadata
        if key in GROUPS:
            is_name = "." not in text and text != "null" and key not in DATA
            if is_name and not has_own_choices and text not in choices_of(key):
                raise ConfigError(no_choice(key, text, None))
        elif about["choices"]:
            checks.one_of(key, text, about["choices"])
        elif kind in ("int", "float") and text != "null":
            number = hints.number(text)
            if number is None or (kind == "int" and not INTEGER.fullmatch(text)):
                raise ConfigError(f"{argument}: {expected(key, text)}")
            number_of(key, text, int if kind == "int" else float, about["limits"])


def _refuse_misspelt(argument: str, key: str, own: Collection[str]) -> None:
    """Refuse a key that is most like one of the command's own, which composing does not know."""
    name = key.lstrip("+").lower()
    close = difflib.get_close_matches(name, (*own, *FIELDS), n=1, cutoff=0.75)
    if close and close[0] in own and (name in own or not hints.hint(key, "")):
        raise ConfigError(f"{argument}: no such setting; did you mean {close[0]}?")


def expected(key: str, text: str) -> str:
    """Return what the value of a setting must be: "must be a number", "allowed: fp32, bf16"."""
    if words := FIELDS[key].metadata["choices"]:
        return f"allowed: {', '.join(words)}"
    kind, value = str(FIELDS[key].type).partition(" ")[0], hints.number(text)
    if kind == "int" and value is not None and value.is_integer():  # 1e3
        return f"must be an integer; write {value:.0f}"
    kinds = {"int": "an integer", "float": "a number", "bool": "true or false"}
    return f"must be {kinds.get(kind, 'text')}"


def build(node: DictConfig, *parts: Any, **runtime: Any) -> Any:
    """Construct the `_target_` of `node` with its own arguments, `parts` and `runtime`.

    Args:
        parts: positional arguments. runtime: those that only a run knows, where it names them.

    Raises:
        ConfigError: the lab's constructor refused an argument (ValueError), the arguments are not
            those of the signature, or the target is unknown.
        Exception: the constructor raised it; a user's, any.
    """
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    if "_target_" not in node:
        raise ConfigError(f"{node._get_full_key('_target_')}: is missing")
    later = node.get("_partial_", False)
    target = callable_at(node._target_, f"_target_={node._target_}")
    names = [str(key) for key in node if not str(key).startswith("_")]
    check_names(target, names, str(node._key() or "settings"))
    try:
        made = instantiate(node, _partial_=True, _convert_="all")
        asked = asked_for(target, runtime)
        return functools.partial(made, *parts, **asked) if later else made(*parts, **asked)
    except (HydraException, ValueError, TypeError) as error:
        failed = error
    # Outside of `except`, where Python would note Hydra's error as the context of the user's.
    raise _with_whole_key(reason_of(failed, node._target_), node)


def _with_whole_key(error: Exception, node: DictConfig) -> Exception:
    """Name a setting as the user wrote it: a part of an exchange calls its own exchange.KEY."""
    from omegaconf import OmegaConf

    found = re.match(r"exchange\.(\w+)(=(.*?): .*)", str(error))
    if not (isinstance(error, ConfigError) and found):
        return error
    names = (found[1], "keeps") if found[1] == "error_feedback" else (found[1],)
    values = cast(Any, OmegaConf.to_container(node, resolve=True))
    for key, value in flat(values, "exchange.").items():
        if key.rpartition(".")[2] in names and checks.as_text(value) == found[3]:
            return ConfigError(IN_EXCHANGE.sub("", key) + found[2])
    return error


def check_name(key: str, value: str | None) -> None:
    """Refuse a study's or cell's name that no directory can have, or that holds a secret."""
    as_name = value is None or (re.fullmatch(DIRECTORY, value) and len(value.encode()) <= 255)
    if not as_name or without_secrets(str(value)) != str(value):
        raise ConfigError(
            f"{key}={value!r}: must be able to name a directory: use only letters, digits "
            "and . , = + _ - (but no dot at the start), at most 255 bytes, and no secret"
        )


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return a run's settings, nested as they are composed, without secrets."""
    from omegaconf import OmegaConf

    return redacted(OmegaConf.to_container(config, resolve=True))


def global_batch_size(config: DictConfig | RunSettings, world_size: int) -> int:
    """Return the samples of a step across all ranks."""
    return config.batch_size * (world_size if config.scaling == "weak" else 1)


def check_batch(config: DictConfig, world_size: int) -> None:
    """Refuse a batch that does not divide evenly, and name the nearest that do."""
    ranks = 1 if config.scaling == "weak" else world_size
    unit = ranks * config.accumulate
    if config.batch_size % unit:
        below = config.batch_size // unit * unit
        nearest = " or ".join(str(size) for size in (below, below + unit) if size)
        raise ConfigError(
            f"batch_size={config.batch_size}: must be a multiple of {unit} for {ranks} "
            f"rank{'s' if ranks > 1 else ''} with accumulate={config.accumulate}, such as {nearest}"
        )
