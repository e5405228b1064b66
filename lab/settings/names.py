"""Names of runs, made from their settings; and which of these change nothing on one rank."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lab.settings.checks import as_text
from lab.settings.secrets import is_secret, redacted_words
from lab.settings.storage import mapped

AXES = ("strategy", "world_size", "batch_size", "scaling", "repeat", "measure")
AXIS_LETTERS = {"batch_size": "b", "repeat": "r"}
BOOKKEEPING = (
    "study",
    "cell",
    "runs_dir",
    "resume",
    "config_dir",
    "recorder",
    "check",
    "exchange_timeout_s",
)
# Settings that hosts may have differently: paths of their own, or read on rank 0 alone. What data
# and checkpoints hold is compared, wherever they lie.
LOCAL = ("runs_dir", "config_dir", "resume", "data.path")
# Groups that a strategy may choose, and its own settings: another strategy differs in them anyway.
OF_STRATEGY = ("exchange", "transform", "sync", "comm", "overlap", "bucket_mb")
# A name of a directory: none that a study gives to what lies beside its cells.
DIRECTORY = r"(?!\.|(?:figures|report\.html|study\.json)$)[\w.,=+\-]+"
# The lab's classes of exchanges and syncs that add nothing to the step of one rank.
EXACT = ("NoExchange", "AllReduce", "Tree", "DoubleTree", "Ring", "Star")
PLAIN = ("NoSync", "GradSync", "RootUpdate")
OF_EXCHANGE = ("exchange", "sync", "overlap", "bucket_mb")

Computation = frozenset[tuple[str, str]]
LONGEST = 120  # characters of a name; file systems take 255 bytes


def class_name(path: str) -> str:
    """Return the name by which the lab knows a class or function: of its own the last part.

    Anyone else's is known by its whole path, so that `mine.Star`, or a subclass, is never taken
    for the lab's Star. Records of any age have other modules for the same class.

    Args:
        path: such as "lab.exchange.paths.Star", of a `_target_`.
    """
    return path.rpartition(".")[2] if path.startswith("lab.") else path


def by_class(settings: Any) -> Any:
    """Return settings, nested or by dotted key, that name each class as the lab knows it."""

    def known(key: str, value: Any) -> Any:
        is_target = key.endswith("_target_") and isinstance(value, str)
        return class_name(value) if is_target else value

    return mapped(settings, known)


def variant(arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings of a run other than a study's usual axes, bookkeeping and secrets.

    `+key=value` is kept under its key, `~key` under that with the tilde and without a value.
    """
    texts = _by_key(redacted_words(arguments))
    return {key: value for key, value in texts.items() if not _is_apart(key)}


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a run other than a study's axes and its bookkeeping, by dotted key.

    Args:
        settings: composed and resolved, groups as mappings.
    """
    return {key: value for key, value in flat(settings).items() if not _is_apart(key)}


def of_all_ranks(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that all ranks of a run must have alike, as texts by dotted key.

    Of secrets a digest: ranks send these texts to each other, and what differs is printed.
    """
    texts = {key: as_text(value) for key, value in flat(settings).items() if key not in LOCAL}
    return {key: _digest(text) if is_secret(key) else text for key, text in texts.items()}


def root_of(key: str) -> str:
    """Return the group, or the setting itself, that a dotted key begins with."""
    return key.lstrip("~").partition(".")[0]


def is_of_strategy(key: str) -> bool:
    """Return whether a dotted key is one of those that a strategy sets."""
    return root_of(key) in OF_STRATEGY


def _is_apart(key: str) -> bool:
    return key in AXES or root_of(key) in BOOKKEEPING


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings, of which groups are mappings, by dotted key."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _by_key(arguments: Sequence[str]) -> dict[str, str]:
    pairs = (argument.lstrip("+").partition("=") for argument in arguments)
    return {key: value for key, _, value in pairs}


def run_name(arguments: Sequence[str], strategy: str, world_size: int, code: str = "") -> str:
    """Return a readable name of a run: strategy, ranks, other settings, and a hash of own code."""
    texts = _by_key(arguments)
    parts = [strategy, f"n{world_size}"]
    parts += [f"{AXIS_LETTERS[key]}{texts[key]}" for key in AXIS_LETTERS if key in texts]
    parts += [texts[key] for key in ("scaling", "measure") if key in texts]
    parts += [f"{key}_{value}" for key, value in variant(arguments).items()]
    parts += [f"code_{code}"] if code else []
    name = "-".join(parts)
    readable = re.sub(r"[^\w.+\-]+", "_", name)
    if len(readable) <= LONGEST:
        return readable
    return f"{readable[:LONGEST]}-{_digest(name)}"


def adds_nothing(exchange: str, sync: str) -> bool:
    """Return whether an exchange and a sync, by class name, add nothing to one rank's step."""
    return exchange in EXACT and sync in PLAIN


def idle_groups(compiled: object) -> tuple[str, ...]:
    """Return the groups and settings that then change nothing on one rank.

    Args:
        compiled: the setting `compile`; torch.compile divides a model that overlaps by buckets.
    """
    return ("exchange", "sync") if str(compiled) == "True" else OF_EXCHANGE


def computation(resolved: Mapping[str, Any]) -> Computation | None:
    """Return what a run's settings compute on one rank: equal ones are the same computation.

    None if its strategy does something of its own even there: compresses, averages weights, leaves
    gradients to a library.

    Args:
        resolved: of a composed run; see lab.settings.names.resolved.
    """
    exchange, sync = (
        class_name(str(resolved.get(f"{group}._target_", ""))) for group in ("exchange", "sync")
    )
    if not adds_nothing(exchange, sync):
        return None
    idle = idle_groups(resolved.get("compile"))
    return frozenset((k, str(v)) for k, v in resolved.items() if root_of(k) not in idle)
