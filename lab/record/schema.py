"""The record of a run: `Record` alone defines the keys of `record.json`."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lab.measure.statistics import Warmup
from lab.settings.names import by_class
from lab.settings.secrets import without_secrets
from lab.settings.storage import DamagedFile, read_json, write_json

Outcome = Literal["holds", "fails", "not checked"]


@dataclass(frozen=True)
class CertifiedProperty:
    """One property of the exchange.

    Attributes:
        property: "equal start", "exchanged", "averaged once", "right group", "complete", "fresh" or
            "bytes"; docs/certificate.md describes each.
        detail: how it is known, or why it was not checked.
    """

    property: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Certificate:
    """Result of an examination of a run's first exchanges.

    Attributes:
        holds: nothing that was checked failed.
        line: all of it in one line.
        num_exchanges: exchanges that were looked at.
        num_parameters: trainable ones.
        proven: number of those whose gradients are the mean, and could not be by chance.
        unused: names of those that backward reached on no rank.
        alike: names of those whose right gradient cannot be told from a wrong one.
        factor: bytes of an fp32 ring over those handed to the network; null: nothing was.
        counted_factor: the same over the bytes that an interface counted; null: it was not checked.
    """

    holds: bool
    line: str
    num_exchanges: int
    findings: list[CertifiedProperty]
    num_parameters: int = 0
    proven: int = 0
    unused: list[str] | None = None
    alike: list[str] | None = None
    factor: float | None = None
    counted_factor: float | None = None


SCHEMA = 2  # the number of this schema; 1 is still read

Status = Literal["done", "failed", "oom", "timeout", "interrupted"]
Scaling = Literal["strong", "weak"]
EmulationKind = Literal["hosts", "shared_gpus", "shared_cores", "replay", "straggler"]
STATUSES: tuple[Status, ...] = get_args(Status)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
SHARED: tuple[EmulationKind, ...] = ("shared_gpus", "shared_cores")  # ranks lack processors

# Of schema 1: keys that early and failed records lack, with the value for "unknown"; and how it
# worded emulation (any other clause described hosts).
UNNAMED_1: dict[str, Any] = {"study": "", "cell": "", "repeat": 0, "variant": {}}
UNKNOWN_1: dict[str, Any] = {
    **{"strategy": "unknown", "scaling": "strong"},
    **{"world_size": 0, "batch_size": 0, "per_rank_batch_size": 0},
}
CLAUSES_1: tuple[tuple[str, EmulationKind], ...] = (
    (r"share .*GPUs?$", "shared_gpus"),
    (r"share .*cores?$", "shared_cores"),
    (r"^compute replayed from profile ", "replay"),
)


@dataclass(frozen=True)
class Emulation:
    """One way in which ranks are emulated.

    Attributes:
        kind: "hosts" (network namespaces as hosts), "shared_gpus" or "shared_cores" (more ranks
            than processors), "replay" (compute replayed from a profile), "straggler" (a rank
            delayed on purpose).
        detail: a clause that describes it with figures.
    """

    kind: EmulationKind
    detail: str


@dataclass(frozen=True)
class StepSeconds:
    """Statistics over timed steps of the slowest rank, in seconds; null is unknown.

    Attributes:
        mad: median absolute deviation.
        num_stalls: number of steps that took more than twice the median.
    """

    median: float
    p95: float
    mad: float
    mean: float | None = None
    num_stalls: int | None = None


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        bytes: their size.
        parameters: names in the order in which they lie in the bucket, separated by spaces.
    """

    bytes: int
    parameters: str


@dataclass(frozen=True)
class ComputeRecord:
    """Floating-point operations of a run and what its devices could do; null is unknown.

    Attributes:
        flops_per_sample: operations of forward and backward over one sample, of matrix products,
            convolutions and attention; a multiply-add is two.
        flops_unknown: why they are not known.
        peak_flops_per_s: of all devices of the run together, at its precision.
        peak_source: where that figure comes from; it says if it is an estimate.
    """

    flops_per_sample: float | None
    flops_unknown: str | None
    peak_flops_per_s: float | None
    peak_source: str | None


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that were made alike.

    Attributes:
        first_step, end_step: number of the first one, and of the one after the last.
        cell: "study/cell", the run that made them.
        world_size: number of ranks.
        batch_size: global, in samples.
        commit: of the lab, and whether its files were changed; null: not known.
        settings: by dotted key, those that were others than the record's own; null: there was none.
    """

    first_step: int
    end_step: int
    cell: str
    world_size: int
    batch_size: int
    commit: str | None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def steps(self) -> str:
        """The numbers of its steps: "0-9", or of a single one: "0"."""
        last = self.end_step - 1
        return f"{self.first_step}-{last}" if last > self.first_step else str(last)

    @property
    def made_by(self) -> str:
        """The run, ranks, batch, commit, and other settings, in words."""
        others = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        commit, _, changed = (self.commit or "unknown").partition(" ")
        return (
            f"{self.cell} on {self.world_size} rank{'s' if self.world_size > 1 else ''}, "
            f"batch_size={self.batch_size}, commit {commit[:10]}"
            + (f" {changed}" if changed else "")
            + (f"; {others}" if others else "")
        )


@dataclass(kw_only=True)
class Record:
    """One run: its identity, how it ended, and what it measured.

    Every record has all of these keys, however the run ended: null means unknown. A non-finite
    number is written as null, too. Lists "by rank" have one entry per rank.

    Attributes:
        status: how the run ended.
        error: one line; null if it is done.
        traceback: Python's text, from the first frame of the user's own code on; null if none of
            it failed.
        study, cell: folders: `<runs_dir>/<study>/<cell>/record.json`.
        repeat: number of the repeat, which also moves the seed (`seed + repeat`).
        strategy: name of its configuration.
        variant: settings besides a study's axes, as typed.
        settings: the same, resolved, and those that were not typed, by dotted key; {}: unknown.
        world_size: number of ranks.
        batch_size: global, in samples.
        per_rank_batch_size: of each rank, in samples.
        scaling: the batch size that a study fixes as it adds ranks: "strong" batch_size, "weak"
            per_rank_batch_size.
        unit: name of one sample, in the singular: "image".
        predictions_per_sample: number of predictions of one sample: of the values of its target,
            such as 1 class, the tokens of a sequence or the pixels of a mask.
        prediction: name of one of them, in the singular: "token".
        data_source: what was read, as the data says it; null: it does not.
        model, data, task: names of their configurations' targets.
        model_source: hash of the source code of the model's classes.
        precision: "fp32", "bf16" or "fp16".
        compile: how torch.compile is used: "whole", "regions", or null for not at all.
        graph_from: the first step that a CUDA graph replayed, from 0, and with it all later ones
            (graph=true); null: none did.
        measure: "throughput", "breakdown" or "noise".
        launcher: the program that started the ranks.
        device: "cpu" or "cuda".
        backend: library that moves bytes: "gloo", "nccl", ...
        started_at: ISO 8601, UTC.
        num_steps: optimizer steps made, including those before a resume.
        num_timed_steps: steps that statistics count.
        warmup: the steps before them, and why so many.
        turns_s: seconds of a step in each turn, of a run that took turns with others of the same
            start (`started_at`), whose turns are paired with its own; empty: it ran alone.
        num_skipped_steps: steps whose gradients overflowed (fp16).
        num_parameters: of the model that trains.
        gradient_bytes: bytes of its gradients.
        transform: name of the transform of the model; null for none.
        untransformed: num_parameters and gradient_bytes before the transform.
        step_s: seconds of a step.
        samples_per_s: batch_size over the median step; stalls do not count.
        wall_samples_per_s: throughput: samples from the first timed step's begin to the last one's
            end, over the time that passed, evaluations and checkpoints left out.
        compute: operations of a sample, and the peak of the devices.
        flops_per_s: operations of all samples in a second of wall_samples_per_s.
        mfu: model FLOP utilisation: flops_per_s over the peak, a share of 1.
        phases_s: seconds of a step by phase, the median over steps of the mean over ranks; only
            of breakdowns.
        payload_bytes_per_step: by rank, bytes handed to the network in a step.
        messages_per_step: by rank.
        across_bytes_per_step: by rank, those of payload_bytes_per_step that went to other hosts.
        peak_memory_bytes: by rank.
        peak_memory_of: a description of what that peak covers.
        reserved_memory_bytes: by rank, held by torch's allocator after the last step (GPUs).
        device_memory_bytes: by rank, in use on its device by all processes (GPUs).
        final: metrics of the last evaluation by name; accuracy is a share of 1.
        evaluations: step, training seconds and metrics of each evaluation.
        gradient_noise: the gradient noise scale in samples, its 95 % interval and the steps that it
            was taken from; of runs with measure=noise (lab.measure.statistics).
        drift: of runs with drift_every, for each window its bucket and last step, the relative
            error and cosine of what was delivered, and whether that is an alarm (lab.sync.drift).
        certificate: what check=first found; null: it was off, not reached, or of one rank.
        replica_hash: SHA-256 of the weights, which all ranks share; null where they may differ:
            `none`, and a run stopped in the middle of a round.
        buckets: the buckets in the order in which they leave; null: a library plans them, or none
            is exchanged.
        idle: settings that did nothing in this run, a line each (lab.sync.pattern).
        choices: choices that exchange and sync made by themselves: `auto` for each bucket, with
            the seconds of a step in each configuration and the step since when it holds;
            `path=symmetric` which way how many parameters took, and why if not its own;
            exchanges with moments after how many steps they froze the variance (null: not yet).
        attempts: every start of the run: first step, world size, time and, if another one followed,
            its end.
        stretches: steps by how they were made; empty: all were made alike.
        duration_s: seconds from the last start to the record.
        emulation: ways in which ranks are emulated; empty: none.
        comm_settings: settings given to the communication library.
        environment: machine and software; see lab.measure.environment.
        git_commit: commit of the lab, and whether its files were changed.
    """

    status: Status
    error: str | None = None
    traceback: str | None = None
    study: str
    cell: str
    repeat: int
    strategy: str
    variant: dict[str, str]
    world_size: int
    batch_size: int
    per_rank_batch_size: int
    scaling: Scaling
    unit: str = "sample"
    predictions_per_sample: int = 1
    prediction: str = "prediction"
    data_source: str | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    model: str | None = None
    model_source: str | None = None
    data: str | None = None
    task: str | None = None
    precision: str | None = None
    compile: str | None = None
    graph_from: int | None = None
    measure: str = "throughput"
    launcher: str | None = None
    device: str | None = None
    backend: str | None = None
    started_at: str | None = None
    num_steps: int = 0
    num_timed_steps: int = 0
    warmup: Warmup | None = None
    turns_s: list[float] = field(default_factory=list[float])
    num_skipped_steps: int = 0
    num_parameters: int | None = None
    gradient_bytes: int | None = None
    transform: str | None = None
    untransformed: dict[str, int] | None = None
    step_s: StepSeconds | None = None
    samples_per_s: float | None = None
    wall_samples_per_s: float | None = None
    compute: ComputeRecord | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    phases_s: dict[str, float | None] = field(default_factory=dict[str, float | None])
    payload_bytes_per_step: list[int] | None = None
    messages_per_step: list[float] | None = None
    across_bytes_per_step: list[int] | None = None
    peak_memory_bytes: list[int] | None = None
    peak_memory_of: str | None = None
    reserved_memory_bytes: list[int] | None = None
    device_memory_bytes: list[int] | None = None
    final: dict[str, float | None] = field(default_factory=dict[str, float | None])
    evaluations: list[dict[str, float | None]] = field(
        default_factory=list[dict[str, float | None]]
    )
    gradient_noise: dict[str, float | None] | None = None
    drift: list[dict[str, Any]] | None = None
    certificate: Certificate | None = None
    replica_hash: str | None = None
    buckets: list[Bucket] | None = None
    idle: list[str] = field(default_factory=list[str])
    choices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    attempts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    duration_s: float | None = None
    emulation: list[Emulation] = field(default_factory=list[Emulation])
    comm_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    git_commit: dict[str, Any] = field(default_factory=dict[str, Any])

    def end(self, status: str, error: str | None, traceback: str | None = None) -> None:
        """Record how the run ended. ValueError: `status` is not one of STATUSES."""
        self.status = decode(Status, status, "status")
        self.error = error and without_secrets(error)
        self.traceback = traceback and without_secrets(traceback)

    def rates(self, samples_per_s: float) -> str:
        """Return a throughput as text: "93 sequences/s, 11904 tokens/s"; one rate of images."""
        text = f"{_whole(samples_per_s)} {self.unit}s/s"
        each = self.predictions_per_sample
        rate = _whole(each * samples_per_s)
        return f"{text}, {rate} {self.prediction}s/s" if each > 1 else text

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> Record:
        """Build a record from a JSON object of this schema or of schema 1.

        Raises: ValueError: it is not such an object; one line that names the key.
        """
        if not isinstance(value, dict):
            raise ValueError(
                f"contains a value of type {type(value).__name__}; must be one JSON object"
            )
        keys: dict[str, Any] = dict(value)  # type: ignore[reportUnknownArgumentType]
        schema = keys.pop("schema", 1)
        if schema == 1:
            keys = _upgraded(keys)
        elif schema != SCHEMA:
            raise ValueError(
                f"schema={schema!r}: this version of the lab reads only 1 and {SCHEMA}"
            )
        return decode(cls, keys, "")

    def write(self, path: Path) -> None:
        """Write `record.json` atomically. OSError: its folder cannot be written."""
        write_json(path, self.to_json())


def _whole(rate: float) -> str:
    """Write a rate as a whole number, or two digits of less than ten."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def read_record(path: Path) -> Record:
    """Read the record in a file.

    Raises: DamagedFile: the file does not hold a record; one line that names file and key.
        OSError: the file cannot be read.
    """
    value = read_json(path)
    try:
        return Record.from_json(value)
    except ValueError as error:
        raise DamagedFile(f"{path}: {error}") from None


def worded(emulation: Iterable[Emulation]) -> str:
    """Return an emulation's clauses as text; empty if nothing is emulated."""
    return "; ".join(one.detail for one in emulation)


def append_stretch(earlier: list[Stretch], now: Stretch) -> list[Stretch]:
    """Add steps to those made before, in one stretch with the last ones if these were made alike.

    Args: earlier, now: with all settings.
    """
    if earlier:
        longer = dataclasses.replace(earlier[-1], end_step=now.end_step)
        if longer == dataclasses.replace(now, first_step=longer.first_step):
            return [*earlier[:-1], longer]
    return [*earlier, now] if now.end_step > now.first_step else earlier


def stretches_of(made: list[Stretch]) -> list[Stretch]:
    """Return what a record holds of the steps made: none if all were made alike."""
    if len(made) < 2:
        return []
    # Of the lab's classes the name counts, as their modules may have moved since.
    own, found = by_class(made[-1].settings), list[Stretch]()
    for one in made:
        then = by_class(one.settings)
        unlike = {k: one.settings.get(k) for k in then | own if then.get(k) != own.get(k)}
        found.append(dataclasses.replace(one, settings=unlike))
    return found


def _upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a record of schema 1; missing keys stay missing.

    Schema 1 counted images, worded `emulation` as one sentence, and let a run that could not start
    leave most keys out.
    """
    renamed = {"images_per_s": "samples_per_s", "wall_images_per_s": "wall_samples_per_s"}
    known = {renamed.get(k, k): value for k, value in record.items() if value is not None}
    known["unit"] = "image"
    sentence = known.get("emulation", "none")
    if not isinstance(sentence, str):
        raise ValueError(f"emulation={sentence!r:.80}: must be str in a record of schema 1")
    clauses = sentence.split("; ") if sentence not in ("", "none") else []
    known["emulation"] = [
        {"kind": next((k for p, k in CLAUSES_1 if re.search(p, clause)), "hosts"), "detail": clause}
        for clause in clauses
    ]
    return UNNAMED_1 | ({} if known.get("status") == "done" else UNKNOWN_1) | known


def decode(kind: Any, value: Any, key: str) -> Any:
    """Convert a JSON `value` to a `kind`.

    Args:
        kind: bool, int, float, str, None, Any, a Literal, list[...], tuple[..., ...],
            dict[str, ...], a union of these, or a dataclass of them: of one that is made already
            nothing is checked. Unknown keys are ignored, and a field with a default may be missing.
        key: path of the value for errors: a.b is b in a.

    Raises: ValueError: the value does not fit; one line that names the key.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return value if type(value) is kind else _dataclass(kind, value, key)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only `X | None` occurs
        if value is None and type(None) in parts:
            return None
        (member,) = (each for each in parts if each is not type(None))
        return decode(member, value, key)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{key}={value!r}: must be one of {', '.join(map(str, parts))}")
        return value
    if origin is list:
        return [
            decode(parts[0], item, f"{key}[{i}]") for i, item in enumerate(_a(list, value, key))
        ]
    if origin is tuple:
        return tuple(decode(parts[0], item, key) for item in _a(tuple, value, key))
    if origin in (dict, Mapping):
        return {k: decode(parts[1], item, f"{key}.{k}") for k, item in _a(dict, value, key).items()}
    if kind is float and type(value) is int:
        return float(value)
    return _a(kind, value, key)


def check_types(made: object) -> None:
    """Check that the fields of a dataclass have the types that it declares, as `decode` has them.

    Raises: ValueError: one has not; one line that names the field.
    """
    for each in dataclasses.fields(cast(Any, made)):
        decode(_hints(type(made))[each.name], getattr(made, each.name), each.name)


def _a(kind: type, value: Any, key: str) -> Any:
    if type(value) is not kind:  # True is an int to isinstance
        shown = "null" if value is None else repr(value)
        raise ValueError(f"{key}={shown}: must be {kind.__name__}")
    return value


def _dataclass(kind: Any, value: Any, key: str) -> Any:
    items: dict[str, Any] = _a(dict, value, key)
    prefix, missing, found = f"{key}." if key else "", dataclasses.MISSING, dict[str, Any]()
    for each in dataclasses.fields(kind):
        if each.name in items:
            place = prefix + each.name
            found[each.name] = decode(_hints(kind)[each.name], items[each.name], place)
        elif each.default is missing and each.default_factory is missing:
            raise ValueError(f"{prefix}{each.name}: is missing")
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass' fields; making them from their text takes milliseconds."""
    return get_type_hints(kind)
