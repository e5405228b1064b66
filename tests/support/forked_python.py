"""Stand in for `python -m MODULE ARGUMENTS`, as torchrun and SLURM start a rank.

It imports nothing of weight: a process of tests/support/rank_server.py, which has imported torch,
forks the rank, within the network of this process. Signals to this process go on to the rank; the
rank does not outlive it.
"""

import ctypes
import json
import os
import signal
import socket
import sys

line = [word for word in sys.argv[1:] if word != "-u"]
if line[0] != "-m":  # a script, or code
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(os.environ["LAB_TEST_RANK_SERVER"])
line.pop(0)
directory = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than all else here
job = {"line": line, "directory": directory, "environment": dict(os.environ), "pid": os.getpid()}
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _frame: server.send(bytes([number])))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # when its parent dies, as lab.train asks for
socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
code = int(server.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
