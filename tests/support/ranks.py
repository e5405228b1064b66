"""Ranks as processes on this machine, over Gloo: for whole runs, or any function of a rank."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from lab.distributed import world as worlds
from lab.distributed.replicas import gathered
from lab.distributed.world import World
from lab.settings.config import load
from lab.training import assemble
from lab.training.recording import claim_directory
from lab.training.run import TrainingRun
from tests.support import HANG_S

# Ranks fork from a process that has done their imports, and has started no threads.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.preload"])
STACKS_S = 10.0  # to print its stacks a process may take


@dataclass(frozen=True)
class Outcome:
    """The state of one rank at the end of a run."""

    code: int
    record: dict[str, Any]  # as record.json holds it
    weights: dict[str, Tensor]
    exchange_state: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A call of `rank_main(*arguments)` by each of `size` ranks, which meet at a store."""

    size: int
    port: int
    directory: str
    rank_main: Callable[..., Any]
    arguments: tuple[Any, ...]


class Crew:
    """Processes that do one job after another, each time as ranks of a new process group."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def call(
        self, size: int, rank_main: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S
    ) -> list[Any]:
        """Call `rank_main(*arguments)` on each of `size` ranks.

        Returns:
            One result for each rank, in rank order.

        Raises:
            AssertionError: a rank raised, ended or hung. All processes have been killed, and the
                next call starts others.
        """
        while len(self._processes) < size:
            self._hire()
        wait = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        job = Job(size, store.port, str(Path.cwd()), rank_main, arguments)
        try:
            for pipe in self._pipes[:size]:
                pipe.send(job)
            return self._results(size, time.monotonic() + timeout_s)
        except BaseException:
            self._print_stacks()
            self.dismiss()
            raise

    def dismiss(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def _print_stacks(self) -> None:
        """Let each process say where it is: a rank that hangs has others fail before it."""
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, signal.SIGABRT)
            process.join(STACKS_S)

    def _hire(self) -> None:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(len(self._processes), theirs), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def _results(self, size: int, deadline: float) -> list[Any]:
        waiting = dict(zip(self._pipes[:size], range(size), strict=True))
        results: list[Any] = [None] * size
        while waiting:
            ready = connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not answer in time"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                results[rank] = _answer(rank, pipe)
        return results


CREW = Crew()
# multiprocessing would send SIGTERM and wait, but a rank that has trained takes that as a request
# to stop at the end of a step.
atexit.register(CREW.dismiss)


def spawn(
    size: int, rank_main: Callable[..., Any], *arguments: Any, timeout_s: float = HANG_S
) -> list[Any]:
    """Call `rank_main(*arguments)` as each of `size` ranks, in processes that do nothing else."""
    crew = Crew()
    try:
        return crew.call(size, rank_main, *arguments, timeout_s=timeout_s)
    finally:
        crew.dismiss()


def execute(arguments: list[str], config: DictConfig) -> Outcome:
    """Execute one rank of a run as `lab.train` does, with settings that are composed already."""
    world = assemble.join(config)
    directory = claim_directory(config, arguments, world)
    assert directory is not None
    run = TrainingRun(config, arguments, world, directory)
    code = run.execute()
    assert run.parts is not None
    trainer = run.parts.trainer
    weights = {n: gathered(p.detach()) for n, p in trainer.model.named_parameters()}
    worlds.stop()
    return Outcome(code, run.record.to_json(), weights, trainer.sync.exchange.state_dict())


def train(size: int, *settings: str) -> list[Outcome]:
    """Run on `size` ranks, in processes that may have run something before.

    Returns:
        One outcome for each rank.
    """
    return CREW.call(size, execute, *composed(*settings))


def train_on_two_nodes(size: int, *settings: str) -> list[Outcome]:
    """Run `train` where the last rank has a node for itself."""
    return CREW.call(size, _execute_on_two_nodes, *composed(*settings))


def _execute_on_two_nodes(arguments: list[str], config: DictConfig) -> Outcome:
    rank, first = int(os.environ["RANK"]), max(1, int(os.environ["WORLD_SIZE"]) - 1)
    place = (rank, first) if rank < first else (0, 1)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = map(str, place)
    return execute(arguments, config)


def refusals(cases: list[tuple[str, ...]]) -> list[str]:
    """Return the line that each run is refused with, as a rank whose process tries them all."""
    found = []
    for settings in cases:
        try:
            execute([*settings], load([*settings]))
            found.append("")
        except (ValueError, TypeError) as error:
            found.append(str(error))
        finally:
            worlds.stop()
    return found


def told(*runs: tuple[str, ...]) -> list[str]:
    """Make runs in turn, all by one process; return the line that each is refused with, or none."""
    (found,) = CREW.call(1, refusals, [("device=cpu", *run) for run in runs])
    return found


def composed(*settings: str) -> tuple[list[str], DictConfig]:
    """Compose a run's settings, once for all ranks: Hydra takes a tenth of a second for it."""
    arguments = ["device=cpu", *settings]
    return arguments, load(arguments)


@cache
def train_once(size: int, *settings: str) -> list[Outcome]:
    """Run `train` once for tests that share a run, in the directory that `settings` name."""
    assert any(setting.startswith("runs_dir=/") for setting in settings)
    return train(size, *settings)


def join(*settings: str) -> World:
    """Join the crew's ranks, for a `rank_main` that needs no run."""
    return assemble.join(load(["device=cpu", *settings]))


def _serve(rank: int, pipe: Connection) -> None:
    faulthandler.enable()  # prints the stack of all threads at SIGABRT
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:  # the tests have ended
            return
        os.chdir(job.directory)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        values = map(str, (rank, job.size, rank, job.size, job.port))
        os.environ.update(zip(names, values, strict=True))
        # The test owns the store, as the launcher does under torchrun.
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
        try:
            answer = pickle.dumps((job.rank_main(*job.arguments), None))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        finally:
            worlds.stop()  # else the next job would meet at this one's store, which ends with it
        pipe.send_bytes(answer)


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        result, error = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        raise AssertionError(f"rank {rank} ended without an answer (its error is above)") from None
    assert error is None, f"rank {rank}: {error}"
    return result
