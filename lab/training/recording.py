"""A run as it is kept and shown, the Trainer's or a user's own loop's.

Its directory and record, from its begin to its end; its progress and curves on the way; and the
summary at its end.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from lab.cluster.settings import EMULATION, straggler_of
from lab.distributed import launcher
from lab.distributed.worker import Failure
from lab.distributed.world import World
from lab.measure import PHASES
from lab.measure.environment import environment, git_commit, num_cores
from lab.record.recorders import Guarded, Recorder
from lab.record.run_directory import RunDirectory
from lab.record.schema import Emulation, Record, worded
from lab.settings.config import ConfigError, global_batch_size, settings_of
from lab.settings.names import resolved, run_name, variant
from lab.settings.own_code import fingerprint
from lab.settings.secrets import redacted_words
from lab.settings.storage import from_here
from lab.task import metrics_of, shown
from lab.training.outcome import note_progress
from lab.training.trainer import Loop

EXPOSED = PHASES.index("exchange")


class Recording:
    """One rank's part in the record of a run, from its first step to its end.

    The trainer's run (lab/training/run.py) and one in the user's own loop (lab/loop/run.py) are
    Recordings, each of its own `loop`.

    Args:
        arguments: settings that name the run.
        directory: claimed for this run.
        launch: the job that starts it, see lab.distributed.launcher.launch_id.
        started_at: of the start; None: now.
        known: more of the record's values.

    Attributes:
        loop: the steps, once there are any to be made.
        curves: hands their numbers to a recorder.
        record: says failed until the end, as a run that is lost cannot say so itself.
        recorded: rank 0 has written that the run ended; a rank lost after this changes nothing.
    """

    loop: Loop | None = None

    def __init__(
        self,
        config: DictConfig,
        arguments: list[str],
        world: World,
        directory: RunDirectory,
        launch: str | None = None,
        started_at: datetime | None = None,
        **known: Any,
    ) -> None:
        self.config, self.world, self.directory, self.launch = config, world, directory, launch
        self._began, self.started_at = time.monotonic(), started_at or datetime.now(UTC)
        self.recorded, self.curves = False, Curves()
        batch_size = global_batch_size(config, world.size)
        self.record = Record(
            status="failed",
            study=config.study,
            cell=directory.path.name,
            repeat=config.repeat,
            strategy=config.strategy,
            variant=variant(arguments),
            settings=resolved(settings_of(config)),
            world_size=world.size,
            batch_size=batch_size,
            per_rank_batch_size=batch_size // world.size,
            scaling=config.scaling,
            precision=config.precision,
            launcher=world.place.launcher,
            device=world.device.type,
            backend=world.comm.backend,
            started_at=self.started_at.isoformat(),
            emulation=emulation(world, config),
            environment=environment(world.num_hosts, asks_tools=world.place.local_rank == 0),
            git_commit=git_commit(),
            **known,
        )

    @property
    def path(self) -> Path:
        return self.directory.path

    def open(self) -> None:
        """Write on rank 0 that the run begins, and its settings; begin its curves."""
        assert self.loop
        if self.world.rank:
            return
        attempt = {"first_step": self.loop.first_step, "world_size": self.world.size}
        attempt |= {"started_at": self.record.started_at, "launch": self.launch}
        self.directory.begin_attempt(attempt)
        settings = settings_of(self.config)
        self.directory.write_config(OmegaConf.to_yaml(settings))
        self.curves.start(self.loop, self.path, self.config.study, settings)

    def end(self) -> None:
        """Record that the run is done, unless `note_stop` was called; print its summary."""
        assert self.loop
        evaluations, record = self.loop.progress.evaluations, self.record
        note_progress(self.loop, record)
        if record.status != "interrupted":
            record.end("done", None)
            record.final = metrics_of(evaluations[-1]) if evaluations else {}
        if self.world.rank == 0:
            self.write()
            self.recorded = True
            print(summary(self.record, self.path))

    def note_stop(self, stop_signal: str | None) -> None:
        """Record that a signal stops the run, before its end: mpirun kills ranks after a second."""
        assert self.loop
        note_progress(self.loop, self.record)
        self.record.end("interrupted", f"stopped by {stop_signal}")
        if self.world.rank == 0:
            self.directory.write_record(self.record)

    def fail(self, failure: Failure) -> None:
        """Note how the run failed; `write` follows, on one rank."""
        if self.loop:
            note_progress(self.loop, self.record)
        self.record.end(failure.status, failure.error, failure.traceback)

    def write(self) -> None:
        self.record.attempts = self.directory.attempts()
        self.record.duration_s = time.monotonic() - self._began
        self.directory.write_record(self.record)
        self.curves.finish(self.record)


def claim_directory(config: DictConfig, arguments: list[str], world: World) -> RunDirectory | None:
    """Claim the directory of a run of the lab's own trainer; see `acquire_run_dir`."""
    name = run_name(arguments, config.strategy, world.size, fingerprint(config.code))
    return acquire_run_dir(world, config, name, launcher.launch_id(redacted_words(arguments)))


def acquire_run_dir(
    world: World, config: DictConfig, name: str, launch: str | None = None
) -> RunDirectory | None:
    """Claim a run's directory on rank 0, and tell the others its path, or why there is none.

    Returns: None if an earlier start of this job has already finished.

    Raises: ConfigError: it is taken, or cannot be written.
    """
    claimed: RunDirectory | None = None

    def of_rank_0() -> str:
        nonlocal claimed
        parent = Path(config.runs_dir).absolute() / config.study
        cell, resume = config.get("cell"), config.get("resume")  # not of a loop of one's own
        claimed = RunDirectory.acquire(parent, cell, name, resume, launch)
        return f"{'done' if claimed.status() == 'done' else 'at'} {claimed.path}"

    verdict, _, text = decided(world, of_rank_0).partition(" ")
    if verdict == "done":
        if claimed:
            claimed.release()
            print(f"already done by an earlier start of this job: {text}")
        return None
    return claimed or RunDirectory(Path(text))  # rank 0's holds the lock


def decided(world: World, decide: Callable[[], str]) -> str:
    """Return on every rank what rank 0 decides: others may see an old state of a shared directory.

    Raises: ConfigError: it cannot, for a ValueError of its own.
    """
    try:
        answer = f"yes {'' if world.rank else decide()}"
    except ValueError as error:
        answer = f"no {error}"
    verdict, _, text = world.broadcast_text(answer).partition(" ")
    if verdict == "no":
        raise ConfigError(text)
    return text


def benchmark_environment(world: World, *configs: DictConfig) -> dict[str, Any]:
    """Describe machine, software and emulation of runs, for the result of a benchmark."""
    return {
        "emulation": worded(emulation(world, *configs)) or "none",
        "comm_settings": world.comm.settings,
        "environment": environment(world.num_hosts, asks_tools=world.place.local_rank == 0),
        "git_commit": git_commit(),
    }


def emulation(world: World, *configs: DictConfig) -> list[Emulation]:
    """List the ways in which ranks that run `configs` are emulated."""
    hosts = os.environ.get(EMULATION)
    num_ranks = world.size if hosts else world.place.local_size  # on this machine
    num_gpus, threads = torch.cuda.device_count(), num_ranks * torch.get_num_threads()
    found = [Emulation("hosts", hosts)] if hosts else []
    if world.device.type == "cuda" and num_ranks > num_gpus:
        found.append(Emulation("shared_gpus", f"{num_ranks} ranks share {plural(num_gpus, 'GPU')}"))
    if world.device.type == "cpu" and threads > num_cores():
        cores = plural(num_cores(), "CPU core")
        detail = f"{threads} threads of {plural(num_ranks, 'rank')} share {cores}"
        found.append(Emulation("shared_cores", detail))
    profiles = dict.fromkeys(c.profile.get("name") for c in configs if "profile" in c.model)
    found += [Emulation("replay", f"compute replayed from profile {name}") for name in profiles]
    stragglers = dict.fromkeys(straggler_of(config, world.size) for config in configs)
    return found + [Emulation("straggler", one.describe()) for one in stragglers if one]


class ProgressBar(tqdm):
    """Steps done, and the throughput of the last seconds, evaluations and checkpoints included.

    Args:
        record: names samples and predictions, and has the batch size.
        total, first: the run's steps, and those that were done before this start.
        shown: false on all ranks but one.
    """

    def __init__(self, record: Record, total: int, first: int, shown: bool) -> None:
        self._record = record
        super().__init__(
            total=total,
            initial=first,
            desc=record.cell,
            unit="step",
            disable=not shown,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """Return tqdm's values of a display, with the throughput before the metrics."""
        values = super().format_dict
        elapsed = values["elapsed"]
        rate = values["rate"] or (elapsed and (values["n"] - values["initial"]) / elapsed)
        if rate:
            samples_per_s = rate * self._record.batch_size
            rates = (self._record.rates(samples_per_s), self._compute(samples_per_s))
            values["postfix"] = ", ".join(filter(None, (*rates, values["postfix"])))
        return values

    def _compute(self, samples_per_s: float) -> str:
        """Return operations per second, and their share of the peak, as far as they are known."""
        compute = self._record.compute
        if compute is None or compute.flops_per_sample is None:
            return ""
        rate = samples_per_s * compute.flops_per_sample
        text = f"{rate / 1e12:.3g} TFLOP/s"
        return f"{text}, MFU {rate / peak:.1%}" if (peak := compute.peak_flops_per_s) else text


class Curves:
    """Hands to a recorder the numbers of steps that the host knows. It never waits for the device.

    A step's numbers come once its loss has been read and the device has passed its end: a step or
    more late, and at once after the last one. All are rank 0's: of its share of the batch, on its
    clock.

    Args: recorder: None: nothing is recorded, as on ranks that never call `start`.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = Guarded(recorder)
        self._loop: Loop | None = None
        self._lr = array("d")  # of each step of this start of the run, if it is known
        self._num_sent = 0

    def start(self, loop: Loop, directory: Path, study: str, config: dict[str, Any]) -> None:
        self._loop = loop if self._recorder.works else None
        self._recorder.start(directory, study, config, loop.first_step)

    def after_step(self, lr: float | None = None) -> None:
        """Note the step that the host has just queued; record those that the device has done."""
        if self._loop:
            if lr is not None:
                self._lr.append(lr)
            self.send()

    def send(self) -> None:
        """Record every step whose numbers have reached the host."""
        if (loop := self._loop) is None:
            return
        losses = loop.losses.read
        rows = loop.clock.finished(self._num_sent)[: len(losses) - self._num_sent]
        for step_s, gap_s, *phases_s in rows:
            step = self._num_sent
            values = {
                "train/loss": losses[step],
                **({"train/lr": self._lr[step]} if self._lr else {}),
                "train/step_s": step_s,
                "train/samples_per_s": loop.batch_size / (step_s + gap_s),
                **({"train/payload_bytes": loop.traffic[3 * step]} if loop.counts_payload else {}),
                **({"train/exposed_exchange_s": phases_s[EXPOSED]} if phases_s else {}),
            }
            self._num_sent += 1
            self._recorder.log(loop.first_step + self._num_sent, values)

    def evaluated(self, result: Mapping[str, float]) -> None:
        """Record an evaluation, which waited for all steps: its step, seconds and metrics."""
        if not self._loop:
            return
        self.send()
        values = metrics_of(result) | {"seconds": result["seconds"]}
        named = {f"test/{name}": value for name, value in values.items()}
        self._recorder.log(int(result["step"]), named)

    def finish(self, record: Record) -> None:
        if self._loop:
            self._recorder.finish(record)


def summary(record: Record, path: Path) -> str:
    """Return what a person wants to know of a run, and what to do next; the record has the rest."""
    ranks = plural(record.world_size, "rank")
    emulated, skipped = worded(record.emulation), record.num_skipped_steps
    metrics = record.final.items()
    lines = [
        f"{record.status}: strategy={record.strategy} on {ranks} ({record.backend}, "
        f"{record.device}), {plural(record.num_steps, 'step')} of "
        f"{plural(record.batch_size, record.unit)}",
        *([f"skipped         {plural(skipped, 'step')} that overflowed fp16"] if skipped else []),
        *(
            f"{name:<15} {shown(name, value)} on test data"
            for name, value in metrics
            if name != "loss" and value is not None
        ),
        *_step_lines(record),
        *_payload_lines(record),
        *_observed_lines(record),
        *([f"data            {record.data_source}"] if record.data_source else []),
        *(f"no effect       {line}" for line in record.idle),
        *(f"{f'steps {each.steps}':<16}by {each.made_by}" for each in record.stretches),
        *([f"emulated        {emulated}"] if emulated else []),
    ]
    path = from_here(path)
    lines.append(f"record          {path / 'record.json'}")
    if record.status == "interrupted":
        return "\n".join(
            [*lines, "next            to continue the run, repeat the command with resume=auto"]
        )
    explain = f"python -m lab.explain {shlex.quote(str(path))}"
    return "\n".join([*lines, f"next            what limits its speed? {explain}"])


def plural(number: int, what: str) -> str:
    """Return "1 step", "2 steps" and so on."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _few(value: float) -> str:
    """Write a number with three digits that count, and without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _step_lines(record: Record) -> Iterator[str]:
    if record.step_s and record.wall_samples_per_s and record.warmup:
        step, warmup, count = record.step_s, record.warmup, record.step_s.num_stalls or 0
        after = plural(warmup.num_steps, "step")
        stalls = f"; {plural(count, 'stall')}" if count else ""
        yield (
            f"step            {_few(1e3 * step.median)} ms, median after {after} of warm-up; "
            f"95 % of steps take at most {_few(1e3 * step.p95)} ms{stalls}"
        )
        if "may not be steady" in warmup.reason:
            yield f"not steady      {warmup.reason}; run more steps"
        yield f"speed           {record.rates(record.wall_samples_per_s)}, wall clock"
        if record.compute and record.flops_per_s is not None:
            peak = f"peak ({record.compute.peak_source})"
            share = f", {_few(100 * record.mfu)} % of the {peak}" if record.mfu is not None else ""
            yield f"compute         {_few(record.flops_per_s / 1e12)} TFLOP/s{share}"
    elif record.num_steps:
        why = record.warmup.reason if record.warmup else "see warmup_steps"
        yield f"step            not timed: {why}"


def _observed_lines(record: Record) -> Iterator[str]:
    for choice in record.choices:
        if "frozen_at" in choice:
            when = choice["frozen_at"]
            yield f"variance        {f'frozen after step {when}' if when else 'not frozen'}"
    if noise := record.gradient_noise:
        if noise["samples"] is None or not math.isfinite(noise["samples"]):
            yield f"gradient noise  unknown: too few steps ({noise['num_steps']})"
        else:
            yield (
                f"gradient noise  {noise['samples']:z.0f} {record.unit}s [{noise['lo']:z.0f}, "
                f"{noise['hi']:z.0f}]: larger batches need fewer steps up to about this size"
            )
    if record.drift is not None:
        alarms = [window for window in record.drift if window["alarm"]]
        largest = max(alarms or record.drift, key=lambda window: window["error"], default=None)
        if largest is None:
            yield "drift           – no window was full; see drift_every"
        else:
            windows = f"{plural(len(alarms), 'alarm')} in {plural(len(record.drift), 'window')}"
            yield (
                f"drift           {windows}; the largest error is "
                f"{100 * largest['error']:.2g} %: {largest['bucket']}"
            )


def _payload_lines(record: Record) -> Iterator[str]:
    if record.payload_bytes_per_step and record.gradient_bytes is not None:
        sent = max(record.payload_bytes_per_step)
        ring = 2 * record.gradient_bytes * (record.world_size - 1) / record.world_size
        saving = (
            f", {_few(ring / sent)} times less than an fp32 ring" if 0 < sent < 0.99 * ring else ""
        )
        yield f"sent            {_few(sent / 1e6)} MB per rank per step{saving}"
        across, hosts = record.across_bytes_per_step or [0], record.environment.get("num_hosts", 1)
        if any(across) and record.world_size > hosts:  # ranks share hosts
            yield f"across hosts    {_few(max(across) / 1e6)} MB of it, by the rank that sends most"
