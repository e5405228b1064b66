"""Several runs by one start of ranks, which train in turns: each has its own record.

    torchrun ... -m lab.training.in_turns STEPS '[["strategy=none", ...], ["strategy=onebit", ...]]'

A sweep starts this (docs/sweeping.md); the settings must agree in all that a turn shares.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

from omegaconf import DictConfig

from lab.distributed import world as worlds
from lab.distributed.launcher import end_process, run_as_process
from lab.distributed.worker import Failure, Watchdog
from lab.measure.statistics import InterleavedSteps, least_warmup, order
from lab.settings.config import ConfigError, load
from lab.training.assemble import Assembly, join
from lab.training.checkpoint import State, random_state, set_random_state
from lab.training.graph import leave_default_stream
from lab.training.recording import claim_directory
from lab.training.run import TrainingRun, execute, tell


class InTurns:
    """The runs of one start, on one rank.

    Each first trains alone until its warm-up is over. Then they take turns, in another order in
    each round, as often as the shortest of them allows; a longer one trains the more steps alone.

    Args:
        lists: settings of each run, from which `configs` are composed.
        steps: of a turn.

    Raises: ConfigError: a run's directory is taken, or the ranks cannot join.
    """

    def __init__(self, configs: list[DictConfig], lists: list[list[str]], steps: int) -> None:
        joined = [join(config) for config in configs]
        self.world, self.size = joined[0], steps
        limit_s = max(config.exchange_timeout_s for config in configs)
        self.watch = Watchdog(self.world, limit_s, self._end_process)
        started_at = datetime.now(UTC)
        self.runs: list[TrainingRun] = []
        for config, arguments, each in zip(configs, lists, joined, strict=True):
            world = dataclasses.replace(each, waits=self.world.waits)  # the watchdog looks there
            directory = claim_directory(config, arguments, world)
            assert directory, "sweeps start no job that is done"
            self.runs.append(
                TrainingRun(config, arguments, world, directory, self.watch, started_at)
            )
        self._random: list[State] = []  # each run's state of random numbers

    def execute(self) -> int:
        """Train all; return the process's exit code. See lab.training.run.execute."""
        return execute(self.runs, self._train, self._end_process)

    def _train(self) -> None:
        parts: list[Assembly] = []
        if any(run.config.graph for run in self.runs):
            leave_default_stream(self.world.device)
        for run in self.runs:
            parts.append(run.begin())
            self._random.append(random_state(self.world.device))
        num_turns, plan = planned(parts, self.size)
        loops: list[Iterator[int]] = []
        for run, part, turns in zip(self.runs, parts, plan, strict=True):
            part.trainer.turns = turns
            loops.append(run.steps(part, shown=False))
        for at, turns in enumerate(plan):
            self._advance(at, parts[at], loops[at], turns.num_warmup)
            trainer = parts[at].trainer
            if trainer.settled_at is None and not self.watch.stop_signal:
                raise RuntimeError(  # turns would include trials of other choices
                    f"strategy={trainer.config.strategy} has not chosen an exchange after "
                    f"{trainer.progress.step} steps; run more steps"
                )
        for number in range(num_turns):
            if self.world.rank == 0:
                print(f"turn {number + 1} of {num_turns}", flush=True)
            for at in order(len(loops), number):
                self.world.barrier()
                self._advance(at, parts[at], loops[at], self.size)
        for run, loop in zip(self.runs, loops, strict=True):
            for _ in loop:  # measures
                pass
            run.end()

    def _advance(self, at: int, part: Assembly, loop: Iterator[int], steps: int) -> None:
        """Train one run for some steps, with the random numbers that it would draw alone."""
        self.watch.worker, device = part.worker, self.world.device
        set_random_state(self._random[at], device)
        for _ in islice(loop, steps):
            pass
        part.trainer.end_turn()
        self._random[at] = random_state(device)

    def _end_process(self, failure: Failure) -> None:
        """Record the failure in each run that has no record, and exit.

        Rank 0 records; if it is lost, the sweep does.
        """
        for run in self.runs if self.world.rank == 0 else ():
            if not run.recorded:
                run.record_failure(failure)
        tell(failure)
        end_process(1)


def planned(parts: list[Assembly], size: int) -> tuple[int, list[InterleavedSteps]]:
    """Return the number of turns, and what each run does before them.

    Raises: ConfigError: a run's rounds do not fit turns, or it has too few steps for one.
    """
    trainers = [part.trainer for part in parts]
    after = [each.total_steps - least_warmup(each.config.warmup_steps) for each in trainers]
    num_turns = min(after) // size
    plan = []
    for trainer in trainers:
        every, alone = trainer.sync.every, trainer.total_steps - num_turns * size
        if size % every or size <= every or alone % every:
            raise ConfigError(
                f"turns={size}: strategy={trainer.config.strategy} exchanges every {every} steps; "
                f"turns and steps={trainer.total_steps} must be multiples of {every}, and turns "
                f"must be larger than {every}"
            )
        plan.append(InterleavedSteps(alone, size, every))
    if num_turns < 1:
        shortest = trainers[after.index(min(after))]
        raise ConfigError(
            f"turns={size}: strategy={shortest.config.strategy} has steps={shortest.total_steps}, "
            "fewer than the warm-up and one turn need"
        )
    return num_turns, plan


def main(arguments: list[str]) -> int:
    steps, lists = int(arguments[0]), json.loads(arguments[1])
    try:
        return InTurns([load(each) for each in lists], lists, steps).execute()
    except ConfigError as error:
        tell(Failure("failed", str(error)))
        return 2
    finally:
        worlds.stop()


if __name__ == "__main__":
    run_as_process(main)
