"""One run from its settings to its record, which holds its failure if it fails."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from lab.distributed import launcher
from lab.distributed import world as worlds
from lab.distributed.worker import Failure, Watchdog
from lab.distributed.world import World
from lab.measure.environment import source_hash
from lab.measure.layers import marked_layers
from lab.record.run_directory import RunDirectory
from lab.record.schema import Stretch, append_stretch, decode, stretches_of
from lab.settings.command import EXIT_INTERRUPTED, say_error
from lab.settings.config import ConfigError, build
from lab.settings.errors import lacks_memory
from lab.settings.names import class_name
from lab.settings.own_code import user_traceback
from lab.settings.secrets import redacted_words, without_secrets
from lab.task import metrics_of
from lab.training import checkpoint, outcome
from lab.training.assemble import Assembly, assemble, compiled_as, join, require_alike
from lab.training.outcome import compute_of
from lab.training.rank_consistency import checkpoint_facts
from lab.training.recording import Curves, ProgressBar, Recording, claim_directory, decided
from lab.training.trainer import Trainer

# torch raises plain RuntimeErrors from Gloo's waits and Gloo's connections to a lost rank, so only
# their messages tell them apart.
TIMEOUT = ("timed out", "timeout")
LOST_PEER = ("peer", "connection reset")
LONGEST = 10_000  # characters of an error's text
RECORD_WAIT_S = 5.0  # time for rank 0 to record a failure before another rank does


class TrainingRun(Recording):
    """One rank of one run.

    Args: watch: of several runs that one start trains; None: this run has its own.
    """

    def __init__(
        self,
        config: DictConfig,
        arguments: list[str],
        world: World,
        directory: RunDirectory,
        watch: Watchdog | None = None,
        started_at: datetime | None = None,
    ) -> None:
        super().__init__(
            config,
            arguments,
            world,
            directory,
            launcher.launch_id(redacted_words(arguments)),
            started_at,
            model=class_name(config.model["_target_"]),
            data=class_name(config.data["_target_"]),
            task=class_name(config.task["_target_"]),
            compile=compiled_as(config),
            measure=config.measure,
            comm_settings=world.comm.settings,
        )
        self.continues = directory.was_started_by(self.launch)
        self.parts: Assembly | None = None
        self._made_before: list[Stretch] = []  # steps, by runs that this one goes on from
        self.watch = watch or Watchdog(world, config.exchange_timeout_s, self._end_process)

    def execute(self) -> int:
        """Build, train, evaluate and record; return the process's exit code. See `execute`."""
        return execute([self], self._train, self._end_process)

    def _train(self) -> None:
        parts = self.begin()
        for _ in self.steps(parts, shown=self.world.rank == 0):
            pass
        self.end()

    def begin(self) -> Assembly:
        """Build everything that trains, restored to the step from which to continue, and open the
        records. Raises ConfigError as `execute` does.
        """
        resumed = self._resumed()
        self.parts = parts = assemble(self.config, self.world, self.watch)
        self.loop = trainer = parts.trainer
        record, data = self.record, trainer.data
        record.unit, record.data_source = data.unit, getattr(data, "source", None)
        record.predictions_per_sample = trainer.task.num_predictions(data.targets()[0])
        record.prediction = trainer.task.prediction
        record.model_source = source_hash(trainer.model)
        for key, value in parts.sizes.items():  # of the model before and after its transform
            setattr(record, key, value)
        if self.world.rank == 0:
            record.compute = compute_of(self.config, trainer, self.world)
        if "_target_" in self.config.recorder:  # a wrong one is an error of all ranks
            self.curves = Curves(build(self.config.recorder))
        if resumed or self.config.checkpoint_every:
            checkpoint.require_resumable(self.config, trainer.model, trainer.batch_size)
        if resumed:
            self._restore(trainer, resumed)
        self.open()
        return parts

    def discard(self) -> None:
        """Leave nothing of a run that did not begin.

        It must close: a thread in the library when Python ends would abort the process.
        """
        self.directory.discard_if_empty()
        self.close()

    def save(self, parts: Assembly) -> None:
        """Write a checkpoint. All ranks call this after the same step."""
        shared, of_rank = checkpoint.state_of(parts.trainer)
        step = parts.trainer.progress.step
        shared["made"] = list(map(asdict, self._made()))
        self.directory.require_own()
        outcome.write_steps(parts.trainer, self.directory)  # rows of a step are written over
        checkpoint.save(self.directory.checkpoints, step, shared, of_rank, self.world)

    def close(self) -> None:
        """Stop this rank's other threads, and release the directory."""
        self.directory.release()
        self.watch.close()
        if self.parts:
            self.parts.close()

    def _resumed(self) -> Path | None:
        """Return the checkpoint from which all ranks continue, if any."""
        if not (text := decided(self.world, self._checkpoint)):
            return None
        require_alike(self.world, checkpoint_facts(Path(text)))
        return Path(text)

    def _restore(self, trainer: Trainer, path: Path) -> None:
        try:
            shared, by_rank = checkpoint.load(path)
            checkpoint.restore(trainer, shared, by_rank)
            self._made_before = decode(list[Stretch], shared.get("made", []), "made")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if user_traceback(error):  # of the user's own exchange, which shall see where
                raise
            raise ConfigError(f"resume={path}: not a checkpoint of a run: {error!r:.200}") from None
        step = trainer.progress.step
        if step > trainer.total_steps:
            raise ConfigError(
                f"resume={path} is at step {step}, but this run ends at step "
                f"{trainer.total_steps}; use a larger steps= or epochs="
            )

    def _made(self) -> list[Stretch]:
        """Return how all steps so far were made, those before a resume too."""
        first, end = (self.loop.first_step, self.loop.progress.step) if self.loop else (0, 0)
        record, git = self.record, self.record.git_commit
        also = ("strategy", "scaling", "repeat", "model_source")
        now = Stretch(
            first_step=first,
            end_step=end,
            cell=f"{record.study}/{record.cell}",
            world_size=record.world_size,
            batch_size=record.batch_size,
            commit=git["commit"] and git["commit"] + (" changed" if git["dirty"] else ""),
            settings=record.settings | {key: getattr(record, key) for key in also},
        )
        return append_stretch(self._made_before, now)

    def _checkpoint(self) -> str:
        """Return the path of the checkpoint to resume, or "". A restarted job prefers its own."""
        resume = self.config.resume
        if resume == "auto" or self.continues:
            newest = checkpoint.newest(self.directory.checkpoints)
            if newest or resume == "auto":
                return str(newest or "")
        return resume or ""

    def steps(self, parts: Assembly, shown: bool) -> Iterator[int]:
        """Train and measure; yield the number of steps done after each one.

        Args: shown: whether this rank shows the progress.
        """
        config, trainer = self.config, parts.trainer
        progress = ProgressBar(self.record, trainer.total_steps, trainer.progress.step, shown)
        layers = contextlib.nullcontext()
        if config.measure == "breakdown" and not config.compile:  # compiled, a model has none
            layers = marked_layers(trainer.model, self.world.device, lambda: trainer.clock.passes)
        with layers, progress:
            for step in trainer.steps():
                progress.update()
                self.curves.after_step(trainer.optimizer.param_groups[0]["lr"])
                if (certificate := trainer.check.news()) and self.world.rank == 0:
                    progress.write(certificate.line)
                is_last = step == trainer.total_steps
                if config.eval_every and step % config.eval_every == 0 and not is_last:
                    self._evaluate(trainer, progress)
                if config.checkpoint_every and step % config.checkpoint_every == 0:
                    self.save(parts)
                yield step
            self.curves.send()
            if trainer.progress.step < trainer.total_steps:
                self.note_stop(self.watch.stop_signal)
                self.save(parts)
            # Before the last evaluation, so that an error in it costs no measurement.
            self.record = outcome.measured(trainer, self.record, self.directory)
            outcome.write_timeline(trainer, self.record, self.directory)
            if trainer.progress.step == trainer.total_steps and not trainer.evaluated():
                self._evaluate(trainer, progress)

    def _evaluate(self, trainer: Trainer, progress: ProgressBar) -> None:
        result = trainer.evaluate()
        progress.set_postfix({name: f"{value:.4g}" for name, value in metrics_of(result).items()})
        self.curves.evaluated(result)

    def write(self) -> None:
        self.record.stretches = stretches_of(self._made())
        super().write()

    def _end_process(self, failure: Failure) -> None:
        """Record a failure and exit, even if threads and devices of this process still wait."""
        if not self.recorded and self.record_failure(failure):
            tell(failure)
        launcher.end_process(self.exit_code())

    def record_failure(self, failure: Failure) -> bool:
        """Record a failure, unless rank 0 does; return whether this rank did."""
        deadline = time.monotonic() + RECORD_WAIT_S
        while self.world.rank and time.monotonic() < deadline:
            if self.directory.recorded_since(self.started_at.timestamp()):
                return False
            time.sleep(0.1)
        self.fail(failure)
        try:
            self.write()
        except OSError as error:  # the failure itself must still be printed
            tell(Failure("failed", f"the record cannot be written: {error}"))
        return True

    def exit_code(self) -> int:
        """Return EXIT_INTERRUPTED only if another start of this command would make progress."""
        progressed = self.loop is not None and self.loop.progress.step > self.loop.first_step
        codes = {"done": 0, "interrupted": EXIT_INTERRUPTED if progressed else 1}
        return codes.get(self.record.status, 1)


def execute(
    runs: Sequence[TrainingRun], train: Callable[[], None], end_process: Callable[[Failure], None]
) -> int:
    """Train the runs of one start; return the process's exit code, the first that is not 0.

    Args:
        train: begins, trains and ends all of them.
        end_process: records a failure and exits.

    Raises:
        ConfigError: a setting does not fit the data, devices or files. No run has begun, and
            nothing is left behind.
    """
    world, watch = runs[0].world, runs[0].watch
    try:
        watch.listen_to_signals()
        train()
    except ConfigError as error:
        watch.publish(Failure("failed", str(error)))
        for run in runs:
            run.discard()
        raise
    except BaseException as error:  # a user's code may call exit
        end_process(watch.publish(failure_of(error, world.rank)))
    world.barrier()
    for run in runs:
        run.close()
    return next(filter(None, (run.exit_code() for run in runs)), 0)


def start(
    config: DictConfig, arguments: list[str], begun: Callable[[Path], object] = lambda _path: None
) -> int:
    """Run one rank of a run; return the process's exit code.

    Args: begun: is told the run's directory once it is claimed.

    Raises: ConfigError: a setting does not fit the data, devices or files.
    """
    ranks = join(config)
    try:
        directory = claim_directory(config, arguments, ranks)
        if directory is None:
            return 0
        begun(directory.path)
        return TrainingRun(config, arguments, ranks, directory).execute()
    finally:
        worlds.stop()


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return the status and the one line that a record holds for an error on `rank`.

    If the user's code failed, the line names the place, and the traceback is there as well.
    """
    text = _first_line(error)

    def says(words: tuple[str, ...]) -> bool:
        return isinstance(error, RuntimeError) and any(word in text.lower() for word in words)

    line = f"rank {rank}: {type(error).__name__}: {text}".rstrip(": ")
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", line)
    if lacks_memory(error):
        return Failure("oom", line)
    if isinstance(error, TimeoutError) or says(TIMEOUT):
        return Failure("timeout", line)
    if isinstance(error, ConnectionError) or says(LOST_PEER):
        return Failure("failed", f"rank {rank}: lost another rank: {text.rstrip(': ')[:200]}")
    found = user_traceback(error)
    if found:
        return Failure("failed", f"{line} ({found.place})", found.traceback)
    return Failure("failed", line)


def tell(failure: Failure) -> None:
    """Print a failure, so that its line is the last."""
    if failure.traceback:
        print(without_secrets(failure.traceback), file=sys.stderr)
    say_error(f"lab.train: error: {failure.error}")


def _first_line(error: BaseException) -> str:
    try:
        text = str(error)[:LONGEST].encode(errors="backslashreplace").decode()
    except Exception:  # a user's error may have no text
        return "(its text cannot be read)"
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
