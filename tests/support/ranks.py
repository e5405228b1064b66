"""Ranks as processes: whole runs, or any function of a rank, over Gloo on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.distributed import world as worlds
from lab.distributed.world import World
from lab.settings.config import load
from lab.training import assemble
from lab.training.run import Run, claim_directory

# Ranks fork from a process that has imported what they import and done nothing else.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "torch._dynamo"])


@dataclass(frozen=True)
class Outcome:
    """What one rank has at the end of a run."""

    code: int
    record: dict[str, Any]  # as record.json holds it
    weights: dict[str, Tensor]
    exchange_state: dict[str, Any]


def spawn(size: int, rank_main: Callable[..., Any], *arguments: Any, timeout_s: float = 50) -> Any:
    """Call `rank_main(*arguments)` as each of `size` ranks; what each returned, in rank order."""
    wait = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
    readers, processes = [], []
    for rank in range(size):
        reader, writer = FORKS.Pipe(duplex=False)
        target = (rank, size, store.port, writer, rank_main, arguments)
        processes.append(FORKS.Process(target=_be_rank, args=target, daemon=True))
        processes[-1].start()
        writer.close()
        readers.append(reader)
    try:
        return [_result(rank, reader, timeout_s) for rank, reader in enumerate(readers)]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


def execute(settings: tuple[str, ...]) -> Outcome:
    """One rank of a run through everything that `lab.train` goes through."""
    arguments = ["device=cpu", *settings]
    config = load(arguments)
    world = assemble.join(config)
    directory = claim_directory(config, arguments, world)
    assert directory is not None
    run = Run(config, arguments, world, directory)
    code = run.execute()
    worlds.stop()
    assert run.parts is not None
    trainer = run.parts.trainer
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return Outcome(code, run.record.to_json(), weights, trainer.sync.exchange.state_dict())


def train(size: int, *settings: str, timeout_s: float = 50) -> list[Outcome]:
    """A run on `size` ranks; each one's outcome."""
    return spawn(size, execute, settings, timeout_s=timeout_s)


def join(*settings: str) -> World:
    """The ranks that `spawn` started, for a `rank_main` that needs no run."""
    return assemble.join(load(["device=cpu", *settings]))


def _be_rank(
    rank: int,
    size: int,
    port: int,
    writer: Connection,
    rank_main: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, size, rank, size, port)), strict=True))
    # The store is the test's, as it is the launcher's under torchrun.
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    writer.send_bytes(pickle.dumps(rank_main(*arguments)))


def _result(rank: int, reader: Connection, timeout_s: float) -> Any:
    assert reader.poll(timeout_s), f"rank {rank} did not answer in {timeout_s:g} s"
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} ended without an answer (its error is above)") from None
