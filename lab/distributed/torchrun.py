"""torchrun for the ranks of one host, by a store that no other host can reach.

`python -m lab.distributed.torchrun --nproc-per-node=2 -m lab.train …` is `torchrun --standalone`,
whose store listens on all interfaces, where it unpickles what any peer writes; this one listens on
loopback, and unpickles nothing. The rendezvous is torchrun's own extension point.
"""

from __future__ import annotations

import atexit
import gc
import signal
import socket
import sys
import uuid
from itertools import takewhile
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

HOST = "127.0.0.1"
NAME = "loopback"


class Loopback(StaticTCPRendezvous):
    """The rendezvous of one host with itself; its ranks meet at the same store."""

    def __init__(self, job: str) -> None:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        super().__init__(HOST, port, rank=0, world_size=1, run_id=job, timeout=0)
        self._store = dist.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return NAME


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


def main(arguments: list[str]) -> None:
    """Run torchrun with these arguments; wrong ones end it with a line and code 2."""
    rendezvous_handler_registry.register(NAME, _handler)
    job = uuid.uuid4().hex  # each start is a job of its own
    own = (f"--rdzv-backend={NAME}", f"--rdzv-endpoint={HOST}", f"--rdzv-id={job}")
    # If a parent has let SIGCHLD be ignored, no exit code of a rank would be known.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        run.main([*own, *arguments])
    except SignalException as error:  # it has ended its ranks
        sys.exit(128 + error.sigval)
    except UnicodeError:  # it looks up the host's name, which Linux lets be longer than DNS does
        _refuse(f"the host's name, {socket.gethostname()}, has more than 63 characters; shorten it")
    except (AssertionError, OSError, ValueError) as error:  # no rank has begun
        why = str(error).partition("\n")[0] or "torchrun does not accept this number"
        options = takewhile(lambda word: word.startswith("-") and word != "-m", arguments)
        _refuse(f"{' '.join(options)}: {why}")


def _refuse(why: str) -> NoReturn:
    print(f"lab.distributed.torchrun: error: {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    atexit.register(gc.freeze)  # a search for garbage among torch's objects would take 0.4 s
    main(sys.argv[1:])
