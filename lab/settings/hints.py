"""Hints that lead on: typical mistakes of a command line, and what to write instead.

The names that other programs use for a setting, and why some things are no setting here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

# By setting, the names that other programs give it.
NAMES: dict[str, tuple[str, ...]] = {
    "accumulate": ("accumulation_steps", "gradient_accumulation_steps", "grad_accum", "accum"),
    "batch_size": ("batch", "bs", "bsz", "global_batch_size", "train_batch_size"),
    "bucket_mb": ("bucket_cap_mb", "bucket_size_mb", "bucket_size"),
    "cell": ("name", "run_name", "run"),
    "clip_grad_norm": ("clip", "grad_clip", "max_grad_norm", "gradient_clip_val"),
    "data": ("dataset", "data_set"),
    "data.path": ("data_dir", "data_path", "root", "data.root", "data.dir"),
    "data.workers": ("num_workers", "workers", "data.num_workers"),
    "deterministic": ("reproducible",),
    "device": ("accelerator",),
    "epochs": ("epoch", "num_epochs", "n_epochs", "max_epochs"),
    "eval_every": ("eval_steps", "eval_interval", "val_every", "val_check_interval"),
    "checkpoint_every": ("save_every", "save_steps", "save_interval"),
    "model": ("network", "net", "arch", "architecture"),
    "optim": ("optimizer", "opt"),
    "optim.lr": ("lr", "learning_rate", "optim.learning_rate", "optimizer.lr", "base_lr"),
    "optim.momentum": ("momentum", "optimizer.momentum"),
    "optim.schedule": ("scheduler", "lr_scheduler", "schedule", "optim.scheduler"),
    "optim.weight_decay": ("weight_decay", "wd", "optimizer.weight_decay"),
    "precision": ("dtype", "mixed_precision"),
    "recorder": ("logger", "tracker", "report_to"),
    "resume": ("resume_from", "checkpoint", "load"),
    "runs_dir": ("output_dir", "log_dir", "logdir", "out_dir", "save_dir"),
    "seed": ("random_seed", "rng_seed"),
    "steps": ("max_steps", "num_steps", "n_steps", "iterations", "iters", "max_iters"),
    "strategy": ("compression", "algorithm", "algo", "method"),
    "study": ("exp", "experiment"),
}
# Switches of other programs, and the setting that does the same.
SWITCHES = {
    "fp16": "precision=fp16",
    "amp": "precision=fp16 or precision=bf16",
    "bf16": "precision=bf16",
    "cuda": "device=cuda",
    "use_cuda": "device=cuda",
    "cpu": "device=cpu",
    "no_cuda": "device=cpu",
    "wandb": "recorder=wandb",
    "use_wandb": "recorder=wandb",
}
RANKS = (
    *("world_size", "gpus", "num_gpus", "n_gpus", "ngpus", "nproc", "nproc_per_node"),
    *("num_processes", "num_ranks", "ranks", "devices", "np"),
)
GPU = ("gpu", "gpu_id", "gpu_ids", "device_id", "local_rank")
# Hydra's own flags and settings (docs/how-to/hydra.md), and what does the same here.
IN_A_PROGRAM = "or a program with @hydra.main and lab.run (docs/how-to/hydra.md)"
_INFO = f"use --cfg job for the settings and --help for groups and choices, {IN_A_PROGRAM}"
_NAME = (
    "to read a run's settings from a file, write a study of one cell: "
    "python -m lab.sweep study=./{0}.yaml"
)
OF_HYDRA = {
    **dict.fromkeys(("-i", "--info"), _INFO),
    "--hydra-help": f"Hydra itself has no settings here; use --help, {IN_A_PROGRAM}",
    **dict.fromkeys(("-cn", "--config-name"), _NAME),
    **dict.fromkeys(("-cp", "--config-path"), "use --config-dir {0}, which adds to the choices"),
    "hydra.run": "use runs_dir=DIR, study=NAME and cell=NAME: a run's folder is DIR/study/cell",
    "hydra.sweep": "use runs_dir=DIR and study=NAME: a cell's folder is DIR/study/cell",
    "hydra/launcher": f"use launcher=slurm with python -m lab.sweep, {IN_A_PROGRAM}",
    "hydra/sweeper": f"use python -m lab.sweep, which runs grids, {IN_A_PROGRAM}",
    "hydra.searchpath": "use --config-dir DIR, which adds to the choices",
}
OF_SWEEP = (
    *("repeats", "turns", "launcher", "dry_run", "retry", "baselines", "report"),
    "cell_timeout_s",
)
# By choice, as others call it, ours; compared without case, dashes and underscores.
CHOICES = {
    "strategy": {
        "1bit": "onebit",
        "1bitsgd": "onebit",
        "signsgd": "signsgd_ef",
        "1bitadam": "onebit_adam",
        "1bitlamb": "onebit_lamb",
        "01adam": "zero_one_adam",
        "0/1adam": "zero_one_adam",
        "hvd": "horovod",
        "ddpoverlap": "ddp or overlap",
        "distributeddataparallel": "ddp",
        "localsgd": "local_sgd",
        "parameterserver": "tensorflow",
        "ps": "tensorflow",
        "fsdp2": "fsdp",
        "fullyshard": "fsdp",
        "hybridshard": "hsdp",
        "zero": "zero1",
        "zero2": "zero1 or fsdp",
        "zero3": "fsdp",
        "zeroredundancyoptimizer": "zero1",
        "zero++": "zeropp",
        "deepspeed": "zero1 or fsdp",
    },
    "optim": {"adam": "adamw"},
}


def hint(key: str, value: str) -> str | None:
    """Return what to write instead of a key that is no setting; None if it is no typical mistake.

    Args:
        key: as typed, also as an option of other programs: batch-size.
        value: as typed; may be empty.
    """
    key = key.lstrip("+~-").replace("-", "_").lower()
    if key in RANKS:
        number = value if value.isdigit() else "N"
        return (
            f"the launcher sets how many ranks run: torchrun --nproc-per-node {number} "
            f"-m lab.train; for python -m lab.sweep, write world_size={number}"
        )
    if key in GPU:
        return f"set CUDA_VISIBLE_DEVICES={value or '0'} in the environment, and device=cuda"
    if key in OF_SWEEP:
        return f"this is a setting of a grid: python -m lab.sweep {key}={value}"
    if key.partition(".")[0] == "hardware":
        return f"this is a setting of a prediction: python -m lab.predict {key}={value}"
    if key in SWITCHES:
        return f"write {SWITCHES[key]}"
    ours = next((name for name, others in NAMES.items() if key in others), None)
    return f"write {ours}={value}" if ours else None


def nearest(key: str, known: Collection[str]) -> str | None:
    """Return a hint at the known setting that is spelled most like `key`; None if none is near."""
    key = key.lower()
    if close := difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    ends = {name.split(".")[-1]: name for name in sorted(known, reverse=True)}
    close = difflib.get_close_matches(key.split(".")[-1], list(ends), n=1, cutoff=0.6)
    return f"did you mean {ends[close[0]]}?" if close else None


def choice_hint(group: str, choice: str, allowed: Sequence[str]) -> str:
    """Return what may have been meant by a choice that a group lacks, ending in a space; or ""."""
    plain = _plain(choice)
    by_plain = {_plain(name): name for name in allowed}
    meant = by_plain.get(plain) or CHOICES.get(group, {}).get(plain)
    if meant and set(meant.split(" or ")) <= set(allowed):
        return f"did you mean {meant}? "
    close = difflib.get_close_matches(plain, list(by_plain), n=1, cutoff=0.7)
    return f"did you mean {by_plain[close[0]]}? " if close else ""


def path_hint(path: Path, otherwise: str) -> str:
    """Return the path that may have been meant by one that does not exist, or `otherwise`."""
    near = _near(path)
    return f"did you mean {near}?" if near else otherwise


def _near(path: Path) -> Path | None:
    """Return a path of names that exist, the closest to those of `path`; None: none is close."""
    folder = path.parent if path.parent.is_dir() else _near(path.parent)
    readable = folder if folder and os.access(folder, os.R_OK) else None
    names = [each.name for each in readable.iterdir()] if readable else []
    begun = sorted(name for name in names if name.startswith(path.name))  # a cell's name is long
    close = difflib.get_close_matches(path.name, names, n=1) or begun
    return folder / close[0] if folder and close else None


def number(text: str) -> float | None:
    """Return the number that a text is, which may be infinite; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def lonely_hint(arguments: Sequence[str], index: int, strategies: Collection[str]) -> str | None:
    """Return what may have been meant by a word without an equals sign, such as `lr 0.1`.

    Args:
        arguments: all words. index: of this one. strategies: names that `strategy=` takes.
    """
    word, *rest = arguments[index:]
    before = arguments[index - 1] if index else ""
    if before.endswith("="):
        return f"write {before}{word}, without spaces"
    if rest and rest[0].startswith("="):
        value = "".join(rest[1:2]) if rest[0] == "=" else rest[0][1:]
        return f"write {word}={value}, without spaces"
    if word in strategies:
        return f"write strategy={word}"
    if rest and word.isidentifier() and "=" not in rest[0]:
        return f"write {word}={rest[0]}"
    return None


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
