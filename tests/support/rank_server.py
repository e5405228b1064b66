"""Fork ranks for launchers from a process that has imported torch: each starts 3 s sooner.

torchrun starts what PYTHON_EXEC names, horovodrun what it finds as `python` on the PATH:
tests/support/forked_python.py, which asks the server here.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.commands import run_as_main
from tests.support.hosts import enter_network
from tests.support.ranks import FORKS

CLIENT = Path(__file__).with_name("forked_python.py")


def start(folder: Path) -> dict[str, str]:
    """Start a server in `folder`, which ends with this process.

    Returns:
        What the environment of torchrun must hold.
    """
    client = folder / "python"
    client.write_text(f"#!{sys.executable} -SE\n{CLIENT.read_text()}")
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        # No daemon: horovodrun, which may be a fork of it, starts processes by multiprocessing.
        server = FORKS.Process(target=_serve, args=(listener,))
        server.start()
    atexit.register(server.kill)
    return {"PYTHON_EXEC": str(client), "LAB_TEST_RANK_SERVER": str(folder / "socket")}


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _supervise(connection)
            os._exit(0)
        connection.close()


def _supervise(connection: socket.socket) -> None:
    """Fork a rank; forward signals to it, and its exit code to the client. It ends with either."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    job = json.loads(text)
    enter_network(job["pid"])
    pid = os.fork()
    if pid == 0:
        connection.close()
        _be_rank(job, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    while ended not in select.select([connection, ended], [], [])[0]:
        numbers = connection.recv(16)
        os.kill(pid, numbers[0] if numbers else signal.SIGKILL)
        if not numbers:
            return
    with suppress(BrokenPipeError):
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _be_rank(job: dict[str, Any], descriptors: list[int]) -> None:
    code: Any = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
        run_as_main(job["line"], job["directory"], job["environment"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
