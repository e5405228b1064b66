"""Tell the cells of a study apart: by every setting and by the machine; name studies of several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import realpath
from pathlib import Path
from typing import Any

from lab.record.schema import Record
from lab.settings.names import class_name, is_of_strategy

# Keys of a record's environment: figures measured elsewhere are no repeats.
MACHINE = ("num_cores", "memory_gib", "torch")
# What a record of an earlier version, or of a run that did not begin, may not know.
CONTEXT = ("model", "model_source", "data", "precision", "device", "machine", *MACHINE)

# Settings that say what is computed and for how long. The profile knows the former; the latter
# changes no step. Any other difference between cells is one of the machine or of how it computes.
OF_WORK = (
    *("profile", "model", "data", "task", "optim", "steps", "epochs", "seed"),
    *("warmup_steps", "eval_every", "checkpoint_every", "clip_grad_norm"),
)
# Those that change no step, of which a strategy may need more: they tell its own runs apart alone.
LENGTHS = ("steps", "epochs", "warmup_steps", "eval_every", "checkpoint_every")
# What people look for first in a long name.
SUBJECT = ("model", "profile", "cluster.rate")
# Settings that change nothing unless another one is given.
NEEDS = {"cluster.slow_factor": "cluster.slow_host"}
# Of the values by which runs may differ, those that tell machines apart, and how to word them.
WORDED = {"machine": "{}", "device": "on {}", "num_cores": "{} cores", "memory_gib": "{} GiB"}
KEYS = ("device", "machine", *MACHINE)
USUAL = 0.7  # share of a study's series with a value that charts need not repeat in each name
Differing = Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """One run's settings and machine, besides a study's axes.

    Attributes:
        typed: settings as typed, and the context that runs must share to be compared.
        resolved: all settings by dotted key; {} if unknown.
    """

    strategy: str
    typed: Mapping[str, str]
    resolved: Mapping[str, str]

    def class_of(self, group: str) -> str:
        """Return the class that a group of settings names; empty if it is unknown."""
        return class_name(self.resolved.get(f"{group}._target_", ""))

    def value(self, key: str) -> str | None:
        """Return the value of a key that this or another run was given.

        A strategy's own settings are known by its name, so they count only as typed.
        """
        if key in self.typed or is_of_strategy(key):
            return self.typed.get(key)
        return self.resolved.get(key)


def identity(record: Record) -> Identity:
    """Collect the settings and the machine that tell this run from others."""
    context = {
        "model": record.model,
        "model_source": record.model_source,
        "data": record.data,
        "precision": record.precision,
        "device": record.device,
        "machine": _machine(record),
        **{key: record.environment.get(key) for key in MACHINE},
    }
    known = {key: str(value) for key, value in context.items() if value is not None}
    resolved = {key: str(value) for key, value in record.settings.items()}
    typed = {key: resolved.get(key, value) for key, value in record.variant.items()}
    return Identity(record.strategy, typed | known, resolved)


def differences(identities: Sequence[Identity]) -> list[dict[str, str]]:
    """Return for each run the values by which it differs from others; runs alike are repeats.

    Settings that someone typed come first. Of the others, those by which runs still differ that
    are alike in the former; what a strategy brings with it differs between strategies anyway.
    """
    typed = sorted({key for each in identities for key in each.typed}, key=_place)
    first = [key for key in typed if _differs(key, identities)]
    then = _hidden(first, typed, identities)
    return [
        _known({key: one.value(key) for key in first})
        | _known({key: one.resolved.get(key) for key in then})
        for one in identities
    ]


def usual_values(runs: Iterable[tuple[str, Differing]]) -> dict[str, str]:
    """Find the values that most series of a study share.

    Args:
        runs: the strategy of each, and the values by which it differs from others.

    Returns:
        By key, in the order of the runs, for a note that says them once; empty if names without
            them would not be unique.
    """
    series = dict.fromkeys((strategy, *values.items()) for strategy, values in runs)
    counts = Counter(pair for _, *pairs in series for pair in pairs)
    usual = dict(pair for pair, count in counts.items() if count >= USUAL * len(series))
    told = usual.items()
    names = {(name, *(pair for pair in pairs if pair not in told)) for name, *pairs in series}
    return usual if len(names) == len(series) else {}


def labels_of_series(
    runs: Sequence[tuple[str, Differing]], usual: Mapping[str, str]
) -> dict[tuple[str, ...], str]:
    """Name series in short: by the strategy, and by values that are not the usual ones.

    A value of SUBJECT needs no key, and of others the last part of a dotted one will do. A value
    that goes on where the usual one ends needs only what it adds: `allreduce fc1x1` beside the
    usual `profile=alexnet_titanx`. If names were alike, keys and values are written in full.

    Args:
        runs: as in usual_values.

    Returns:
        By strategy and `key=value` of each value, as series are named in full.
    """
    words = {
        series_of(strategy, values): [
            (key, value) for key, value in values.items() if usual.get(key) != value
        ]
        for strategy, values in runs
    }
    short = {
        series: " ".join([series[0], *(_short(*pair, usual) for pair in told)])
        for series, told in words.items()
    }
    if len(set(short.values())) == len(short):
        return short
    return {s: " ".join([s[0], *map("=".join, told)]) for s, told in words.items()}


def series_of(strategy: str, values: Differing) -> tuple[str, ...]:
    """Name a series in full: its strategy, and each value by which it differs from others."""
    return strategy, *map("=".join, values.items())


def _short(key: str, value: str, usual: Mapping[str, str]) -> str:
    added = value.removeprefix(f"{usual[key]}_") if key in usual else value
    return added if key in SUBJECT and added else f"{key.rpartition('.')[2]}={value}"


def _hidden(first: list[str], typed: list[str], identities: Sequence[Identity]) -> list[str]:
    """List the keys nobody typed by which runs differ that are alike in `first`."""
    groups: defaultdict[tuple[Any, ...], list[Identity]] = defaultdict(list)
    of_strategy: defaultdict[tuple[Any, ...], list[Identity]] = defaultdict(list)
    for each in identities:
        values = tuple(each.value(key) for key in first)
        groups[values].append(each)
        of_strategy[each.strategy, *values].append(each)
    keys = sorted({key for each in identities for key in each.resolved} - set(typed))
    return [
        key
        for key in keys
        for alike in (of_strategy if is_of_strategy(key) else groups).values()
        if len({each.resolved.get(key) for each in alike if each.resolved}) > 1
    ]


def _known(values: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in values.items() if value is not None}


def _place(key: str) -> tuple[int, str]:
    subject = SUBJECT.index(key) if key in SUBJECT else len(SUBJECT)
    return subject + (key in LENGTHS), key


def _differs(key: str, identities: Sequence[Identity]) -> bool:
    if key in LENGTHS:
        of_strategy = {(each.strategy, each.value(key)) for each in identities}
        return len(of_strategy) > len({each.strategy for each in identities})
    values = {each.value(key) for each in identities}
    return len(values - ({None} if key in CONTEXT else set())) > 1


def _machine(record: Record) -> str | None:
    """Name the machine: runs on others of the same device type are not comparable."""
    gpus = record.environment.get("gpus") if record.device == "cuda" else None
    return gpus[0] if gpus else record.environment.get("cpu")


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Name folders by what their paths do not share: `m1` for m1/runs/demo beside m2/runs/demo."""
    paths = [Path(realpath(folder)).parts for folder in folders]
    start = _num_alike(paths)
    end = _num_alike([path[:start:-1] for path in paths])
    labels = ["-".join(path[start : len(path) - end]).replace(" ", "_") for path in paths]
    return labels if len(set(labels)) == len(labels) and all(labels) else list(map(str, folders))


def named_by_study(
    differing: Sequence[Differing], studies: Sequence[str]
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Tell the machines of several studies apart by one short value, `on=LABEL`.

    That needs studies of one machine each; otherwise the values that tell machines stay as they
    are. Studies of the same machine share a label, `a+b`.

    Args:
        differing: for each run the values by which it differs from others.
        studies: for each run the label of its study.

    Returns:
        The values anew, and a description of each machine by label; none if there is one machine.
    """
    keys = [key for key in KEYS if any(key in values for values in differing)]
    machines: dict[str, set[tuple[str, ...]]] = {study: set() for study in studies}
    for values, study in zip(differing, studies, strict=True):
        if all(key in values for key in keys):  # a run may fail before they are known
            machines[study].add(tuple(values[key] for key in keys))
    if not keys or any(len(found) != 1 for found in machines.values()):
        return [dict(values) for values in differing], {}
    sharing: dict[tuple[str, ...], list[str]] = {}
    for study, (machine,) in machines.items():
        sharing.setdefault(machine, []).append(study)
    label = {study: "+".join(names) for names in sharing.values() for study in names}
    apart = [
        {key: value for key, value in values.items() if key not in keys} | {"on": label[study]}
        for values, study in zip(differing, studies, strict=True)
    ]
    texts = {"+".join(names): _worded(keys, machine) for machine, names in sharing.items()}
    return apart, texts


def _worded(keys: Sequence[str], machine: Sequence[str]) -> str:
    values = dict(zip(keys, machine, strict=True))
    return ", ".join(WORDED.get(key, f"{key} {{}}").format(value) for key, value in values.items())


def _num_alike(paths: Sequence[tuple[str, ...]]) -> int:
    """Count the first parts that all paths share."""
    return len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
