"""Ranks as threads that have torch's process groups, for code that needs these, such as FSDP2."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from lab.distributed.torch_comm import TorchComm
from tests.support import HANG_S


def run_ranks(hosts: int, per_host: int, rank_main: Callable[[TorchComm], Any]) -> list[Any]:
    """Run `rank_main(comm)` on each rank, a thread each; return their results in rank order.

    Raises:
        Exception: the first rank's error, once every rank has stopped.
    """
    size = hosts * per_host
    store, results, errors = dist.HashStore(), [None] * size, list[BaseException]()

    def target(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            group = dist.group.WORLD
            assert group is not None
            comm = TorchComm(group, group, torch.device("cpu"))
            comm.nodes = [list(range(at, at + per_host)) for at in range(0, size, per_host)]
            results[rank] = rank_main(comm)
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # ends the others' waits

    with _isolated_threads():
        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
    if errors:
        raise errors[0]
    return results


@contextmanager
def _isolated_threads() -> Iterator[None]:
    """Give each thread process groups of its own, under the same names."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore
    isolate(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
