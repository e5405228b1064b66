"""Read the run directories of a study, a `RecordedCell` for each run, and tell series apart."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix, realpath
from pathlib import Path
from typing import Any

import pandas as pd

from lab.record.schema import Record, Scaling, Status, read_record
from lab.record.steps import read_table
from lab.settings.errors import one_line
from lab.settings.hints import path_hint
from lab.settings.names import adds_nothing, class_name, is_of_strategy, root_of
from lab.settings.storage import DamagedFile

NO_RECORD = "left no record.json"

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
class RecordedCell:
    """One run: its record, what tells it from others, and those of its values that many need.

    Of these, values that a run did not measure are NaN or empty, and `step_s` is the median alone.

    Attributes:
        commit: of the lab; empty if it is not known, or its files had been changed.
        adds_nothing: its exchange and sync do nothing on one rank (lab.settings.names).
        series: the strategy, and the settings in which runs of the study differ.
        label: the same in short (labels_of_series), for charts: without the values that most
            series share (RecordedStudy.usual).
        conditions: of these settings, those that no strategy brings with it.
        profile: the one whose layers model=replay waits for; empty for a real model.
        settings: the settings typed or differing, and the context that runs must share to be
            compared.
    """

    folder: Path
    record: Record
    commit: str
    status: Status
    strategy: str
    adds_nothing: bool
    series: str
    label: str
    world_size: int
    batch_size: int
    per_rank_batch_size: int
    scaling: Scaling
    repeat: int
    measure: str
    conditions: Mapping[str, str]
    profile: str
    settings: Mapping[str, str]
    transform: str
    environment: Mapping[str, Any]
    step_s: float
    step_mad_s: float
    flops_per_s: float
    mfu: float
    phases_s: Mapping[str, float]
    payload_bytes_per_step: tuple[float, ...]
    num_parameters: float

    @property
    def name(self) -> str:
        """The cell's folder name."""
        return self.folder.name

    @property
    def fixed_batch_size(self) -> int:
        """The batch size that stays as ranks are added: global if strong, per rank if weak."""
        return self.batch_size if self.scaling == "strong" else self.per_rank_batch_size

    @property
    def paired_s(self) -> dict[Hashable, float]:
        """Seconds of a step by what was measured next to it: a turn of its start, or a repeat."""
        if turns_s := self.record.turns_s:
            return {(self.record.started_at, at): time for at, time in enumerate(turns_s)}
        return {self.repeat: self.step_s}

    @property
    def hosts(self) -> dict[str, str]:
        """The settings of the emulated cluster by which runs differ."""
        return {k: v for k, v in self.conditions.items() if root_of(k) == "cluster"}

    @property
    def circumstances(self) -> str:
        """The settings of machine, links and arithmetic by which runs differ; empty for none."""
        apart = {k: v for k, v in self.conditions.items() if root_of(k) not in OF_WORK}
        given = {k: v for k, v in apart.items() if v != "None"}
        idle = [k for k, other in NEEDS.items() if other in apart and other not in given]
        return " ".join(f"{key}={value}" for key, value in given.items() if key not in idle)

    def steps(self) -> pd.DataFrame | None:
        """Read steps.parquet, one row per rank and step; None if there is no such file.

        Raises: DamagedFile: it cannot be read.
        """
        path = self.folder / "steps.parquet"
        return read_steps(path) if os.path.lexists(path) else None


@dataclass(frozen=True)
class RecordedStudy:
    """All cells of a study folder, or of several, and those whose record cannot be read.

    Attributes:
        folder: the first one.
        missing: why a cell is not among them, by its name.
        labels: a name for each of several folders; empty for one.
        machines: descriptions of the machines that `on=...` names; empty if there is one.
        usual: settings that most series share, which their labels leave out.
    """

    folder: Path
    name: str
    cells: tuple[RecordedCell, ...]
    missing: Mapping[str, str]
    labels: Mapping[Path, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, folder: Path) -> str:
        """Name a cell's folder, with its study if there are several."""
        label = self.labels.get(folder.parent)
        return f"{label}/{folder.name}" if label else folder.name

    @property
    def troubles(self) -> list[tuple[str, str, str]]:
        """The name of each cell that did not finish, how it ended, and why."""
        failed = [
            (self.name_of(cell.folder), cell.status, cell.record.error or "no error was recorded")
            for cell in self.cells
            if cell.status != "done"
        ]
        return failed + [(name, "missing", why) for name, why in self.missing.items()]


def read_steps(path: Path) -> pd.DataFrame:
    """Read the steps of a run. DamagedFile: there is no such file, or it holds something else."""
    if not path.exists():
        raise DamagedFile(f"{path}: no such file")
    try:
        steps = read_table(path).to_pandas()
        steps[["rank", "step"]].astype(float)
    except Exception as error:  # damaged bytes fail in many ways
        raise DamagedFile(f"{path}: not a table of steps: {one_line(error)}") from None
    return steps


def commits_of(cells: Iterable[RecordedCell]) -> tuple[str, ...]:
    """List the lab's commits that measured the finished cells; empty if one is not known."""
    commits = {cell.commit for cell in cells if cell.status == "done"}
    return () if "" in commits else tuple(sorted(commits))


def refuse_same(folders: Sequence[Path]) -> None:
    """Refuse a folder that is given twice. ValueError: names all."""
    if len({*map(realpath, folders)}) < len(folders):  # resolve() raises where links go round
        raise ValueError(f"{' '.join(map(str, folders))}: the same folder is given twice")


def load_study(folder: Path, *more: Path) -> RecordedStudy:
    """Read every `record.json` one level below each folder, as one study.

    A sub-folder that holds neither a record nor the tables this package writes is a cell that
    was killed: it is named in `missing`, as one whose record is damaged. Studies of several
    machines are told apart by `on=...` (lab.analysis.records).

    Raises:
        ValueError: no such folder, no record in it that can be read, the same folder twice, or two
            finished runs of the same cell and repeat.
    """
    folders = (folder, *more)
    refuse_same(folders)
    labels = dict(zip(folders, labels_of(folders), strict=True)) if more else {}
    found = {path: record for each in folders for path, record in _records_below(each).items()}
    records = {path: record for path, record in found.items() if isinstance(record, Record)}
    missing = {path: why for path, why in found.items() if isinstance(why, str)}
    identities = [identity(record) for record in records.values()]
    differing, machines = differences(identities), dict[str, str]()
    if more:
        differing, machines = named_by_study(differing, [labels[path.parent] for path in records])
    runs = [(who.strategy, each) for who, each in zip(identities, differing, strict=True)]
    usual = usual_values(runs)
    short = labels_of_series(runs, usual)
    each_cell = zip(records.items(), identities, differing, strict=True)
    cells = tuple(_cell(*read, who, values, short) for read, who, values in each_cell)
    names = sorted({record.study or path.parent.name for path, record in records.items()})
    study = RecordedStudy(folder, ", ".join(names), cells, {}, labels, machines, usual)
    _refuse_copies(study)
    return replace(study, missing={study.name_of(path): why for path, why in missing.items()})


def _records_below(folder: Path) -> dict[Path, Record | str]:
    """Read the records of a study's cells by their folders; of a cell without one, say why."""
    if not folder.is_dir():
        is_there, otherwise = folder.exists(), "give a study folder such as runs/demo"
        hint = otherwise if is_there else path_hint(folder, otherwise)
        raise ValueError(f"{folder}: {'is a file' if is_there else 'no such folder'}; {hint}")
    below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found: dict[Path, Record | str] = {}
    for path in below:
        if (path / "record.json").is_file():
            try:
                found[path] = record = read_record(path / "record.json")
            except (ValueError, OSError) as error:
                found[path] = str(error)
            else:
                if flaw := _flaw(record):
                    found[path] = f"{path / 'record.json'}: {flaw}"
        elif not (path / "summary.csv").is_file():
            found[path] = NO_RECORD
    if not any(isinstance(record, Record) for record in found.values()):
        unread = next((why for why in found.values() if why != NO_RECORD), "")
        raise ValueError(unread or f"{folder}: contains no <cell>/record.json; give a study folder")
    return found


def _flaw(record: Record) -> str:
    """Name a value that no run can have, and that tables would divide by or leave out."""
    values: dict[str, float | None] = {
        "step_s.median": record.step_s and record.step_s.median,
        "wall_samples_per_s": record.wall_samples_per_s,
    }
    if record.status == "done":  # others may have ended before these were known
        values |= {"world_size": record.world_size, "batch_size": record.batch_size}
        values["per_rank_batch_size"] = record.per_rank_batch_size
    wrong = (k for k, v in values.items() if v is not None and not 0 < v < math.inf)
    return next((f"{key}={values[key]:g}: must be above 0 and finite" for key in wrong), "")


def _refuse_copies(study: RecordedStudy) -> None:
    """Refuse runs that cannot be told apart: which of them counts would be chance."""
    seen: dict[tuple[Any, ...], RecordedCell] = {}
    for cell in (cell for cell in study.cells if cell.status == "done"):
        point = cell.series, cell.scaling, cell.batch_size, cell.world_size
        other = seen.setdefault((*point, cell.measure, cell.repeat), cell)
        if other is not cell:
            raise ValueError(
                f"{study.folder}: {study.name_of(other.folder)} and {study.name_of(cell.folder)} "
                f"are the same cell, repeat={cell.repeat}; remove one, or measure it again with "
                "another repeat=..."
            )


def _cell(
    folder: Path,
    record: Record,
    who: Identity,
    differing: Mapping[str, str],
    labels: Mapping[tuple[str, ...], str],
) -> RecordedCell:
    series = series_of(record.strategy, differing)
    return RecordedCell(
        folder=folder,
        record=record,
        commit="" if record.git_commit.get("dirty") else record.git_commit.get("commit") or "",
        status=record.status,
        strategy=record.strategy,
        adds_nothing=adds_nothing(
            *(class_name(who.resolved.get(f"{x}._target_", "")) for x in ("exchange", "sync"))
        ),
        series=" ".join(series),
        label=labels[series],
        world_size=record.world_size,
        batch_size=record.batch_size,
        per_rank_batch_size=record.per_rank_batch_size,
        scaling=record.scaling,
        repeat=record.repeat,
        measure=record.measure,
        conditions={k: v for k, v in differing.items() if not is_of_strategy(k)},
        profile=who.resolved.get("model.profile.name", ""),
        settings={**differing, **who.typed},
        transform=record.transform or "",
        environment=record.environment,
        step_s=number(record.step_s and record.step_s.median),
        step_mad_s=number(record.step_s and record.step_s.mad),
        flops_per_s=number(record.flops_per_s),
        mfu=number(record.mfu),
        phases_s={key: number(value) for key, value in record.phases_s.items()},
        payload_bytes_per_step=tuple(record.payload_bytes_per_step or ()),
        num_parameters=number(record.num_parameters),
    )


def number(value: float | None) -> float:
    """Convert a value to float; null becomes NaN."""
    return math.nan if value is None else float(value)


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
    start = len(commonprefix(paths))
    end = len(commonprefix([path[:start:-1] for path in paths]))
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
