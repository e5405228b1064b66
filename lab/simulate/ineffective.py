"""Settings of a run or a sweep that move no prediction: whoever types one is told what would."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lab.settings.config import FIELDS
from lab.settings.errors import ConfigError
from lab.settings.fields import default_text, fields_of
from lab.settings.files import choices_of, is_file, read_file
from lab.settings.hints import choice_hint
from lab.settings.names import root_of
from lab.settings.optim import OF_SCHEDULE
from lab.study.grid import OF_SWEEP, SweepSettings

MEASURED = "give a profile that lab.profile_layers measured with it"
ESTIMATED = f"{MEASURED}, or model= for an estimate"
TRACED = "give a trace of a step with it, profile.from="
INSTEAD = {
    **dict.fromkeys(("precision", "tf32"), ESTIMATED),
    **dict.fromkeys(("channels_last", "deterministic", "benchmark_limit"), MEASURED),
    **dict.fromkeys(("compile", "graph"), TRACED),
    "backend": "set hardware.library=",
    "comm": "set hardware.library= or hardware.protocols=",
    "device": "set hardware=, or hardware.device.name= for an estimate",
    "threads": "set hardware.device.num_threads= for an estimate",
    "share_gpus": "set hardware=",
    "cluster": "set hardware= or hardware.inter.KEY=",
    "straggler": "set hardware.num_slow= and hardware.slow_factor=",
}
OF_TRAINING = (
    *("seed", "clip_grad_norm", "measure", "drift_every", "check", "warmup_steps", "eval_every"),
    *("checkpoint_every", "exchange_timeout_s", "runs_dir", "recorder", "steps", "epochs"),
)
# Keys of optim that change no pass over memory.
OF_OPTIM = tuple(f"optim.{k}" for k in ("lr", "betas", "eps", "decay_vectors", *OF_SCHEDULE))
INSTEAD |= dict.fromkeys((*OF_TRAINING, *OF_OPTIM), "leave it to lab.train or lab.sweep")
INSTEAD |= dict.fromkeys(OF_SWEEP - {"world_size"}, "leave it to lab.sweep")
# Commands of lab.train, which advice prints, differ by these.
OF_MACHINE = ("backend", "comm", "device", "threads", "share_gpus", "cluster")
OF_COMMANDS = (*OF_TRAINING, *OF_OPTIM, *OF_MACHINE)
OF_MODEL = ("model", "data", "task", "precision", "tf32")  # a profile has their times
DEFAULTS = {key: default_text(each) for key, each in (FIELDS | fields_of(SweepSettings)).items()}
DEFAULTS |= {"comm": "torch", "recorder": "local", "cluster": "none", "straggler": "none"}


def refuse_ineffective(
    words: Sequence[str], config_dir: str | None, moving: Collection[str]
) -> None:
    """Refuse a typed setting that can move no prediction, if it is not the default.

    A study's file has settings for its runs; a command line may narrow them.

    Args:
        words: as typed.
        moving: settings that do have an effect, as `key` or `key=value`.

    Raises:
        ConfigError: names the first, and what to give instead.
    """
    settings = [word.lstrip("+~").partition("=") for word in words]
    kept = {*moving, *_of_study({key: text for key, _, text in settings}, config_dir)}
    for key, _, text in settings:
        root = root_of(key)
        if {key, root, f"{key}={text}"} & kept:
            continue
        if text != DEFAULTS.get(key) and (instead := INSTEAD.get(root) or INSTEAD.get(key)):
            raise ConfigError(f"{key}={text}: has no effect on a prediction; {instead}")


def ineffective_settings(words: Iterable[str]) -> list[str]:
    """List the settings of a model and a machine that do not move predictions from profiles.

    Args:
        words: as typed, each perhaps for many cells.
    """
    plain = dict.fromkeys(word.lstrip("+~") for word in words)
    keys = {word: word.partition("=")[0] for word in plain}
    return [
        word
        for word, key in keys.items()
        if root_of(key) in (*OF_MODEL, *OF_MACHINE) and word != f"{key}={DEFAULTS.get(key)}"
    ]


def _of_study(texts: dict[str, str], config_dir: str | None) -> Collection[str]:
    """Return the keys in the file of a study that is given.

    Raises:
        ConfigError: there is no such study, so that its name would have no effect.
    """
    if (name := texts.get("study", "default")) == "default":
        return ()
    known = choices_of("study", config_dir)
    if name not in known and not is_file(name):
        meant = choice_hint("study", name, known)
        raise ConfigError(f"study={name}: no such study; {meant}allowed: {', '.join(known)}")
    return read_file("study", name, config_dir).keys()
