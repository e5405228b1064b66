"""Names of machines, for studies that were measured on several and are shown together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from os.path import realpath
from pathlib import Path

from lab.analysis.series import MACHINE

# Of the values by which runs may differ, those that tell machines apart, and how to word them.
WORDED = {"machine": "{}", "device": "on {}", "num_cores": "{} cores", "memory_gib": "{} GiB"}
KEYS = ("device", "machine", *MACHINE)
Differing = Mapping[str, str]


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
