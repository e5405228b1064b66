"""The first process of a sandbox: makes the network, starts a torchrun on each host, waits.

python -m lab.cluster.supervisor CLUSTER run TORCHRUN-ARGUMENTS... | check
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO

from lab.cluster.check import check
from lab.cluster.network import INTERFACE, address, build, change_link, execute, name_hosts, on_host
from lab.cluster.sandbox import AWAITED, FORWARDED, exit_code
from lab.cluster.settings import EMULATION, Change, Cluster
from lab.cluster.straggler import slow_down
from lab.model.profile import SLOW_FACTOR

PORT = 29400  # of the rendezvous on h0; nothing else uses this network
START_S = 600  # seconds for h0's torchrun to start; torch would try for 60 s, then rest as long
GRACE_S = 30.0  # seconds for other hosts to end after h0, which has rank 0, or one that failed


def main(arguments: list[str]) -> int:
    """Run one task; return the exit code of h0's torchrun (1: it did not end), or the verdict."""
    threading.Thread(target=end_with_owner, daemon=True).start()
    cluster = Cluster.from_json(arguments[0])
    execute(build(cluster))
    name_hosts(cluster)
    if arguments[1] == "check":
        return check(cluster)
    hosts = start(cluster, arguments[2:])
    if cluster.slow_host is not None:
        straggler = hosts[cluster.slow_host], cluster.slow_factor
        threading.Thread(target=slow_down, args=straggler, daemon=True).start()
    wait(hosts, list(cluster.changes))
    return 1 if hosts[0].returncode is None else exit_code(hosts[0].returncode)


def end_with_owner() -> None:
    """End the process once the owner closes its end of stdin, a pipe without data.

    PR_SET_PDEATHSIG would miss an owner that dies before it is set.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def start(cluster: Cluster, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Start a torchrun on each host. The output of hosts but h0 is prefixed with their names."""
    job = uuid.uuid4().hex  # each start is a separate job, as under torchrun --standalone
    hosts = [
        subprocess.Popen(
            on_host(host, *_torchrun(cluster, host, job), *arguments),
            env=_environment(cluster, host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if host else None,
            stderr=subprocess.STDOUT if host else None,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_unblock_signals,
        )
        for host in range(cluster.num_hosts)
    ]
    for number, host in enumerate(hosts):
        if host.stdout:
            threading.Thread(target=_show, args=(number, host.stdout), daemon=True).start()
    return hosts


def wait(hosts: list[subprocess.Popen[str]], changes: list[Change]) -> None:
    """Wait for h0, then the others up to GRACE_S; change links and forward signals meanwhile.

    torchruns would wait up to ten minutes for one that was killed, so they get GRACE_S too.
    """
    began = time.monotonic()
    deadline = float("inf")
    while None in (codes := [host.poll() for host in hosts]):
        now = time.monotonic() - began
        if codes[0] is not None or any(codes):
            deadline = min(deadline, now + GRACE_S)
        if now >= deadline:
            return
        if changes and changes[0].after_s <= now:
            execute(change_link(changes.pop(0)))
            continue
        until = min([deadline, *(one.after_s for one in changes[:1]), now + 3600])
        caught = signal.sigtimedwait(AWAITED, until - now)
        if caught and caught.si_signo in FORWARDED:
            for host in hosts:
                host.send_signal(caught.si_signo)


def _torchrun(cluster: Cluster, host: int, job: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={cluster.num_hosts}",
        f"--nproc-per-node={cluster.ranks_per_host}",
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", f"--rdzv-id={job}"),
        f"--rdzv-conf=is_host={host == 0},read_timeout={START_S}",
        f"--local-addr={address(host)}",
    ]


def _environment(cluster: Cluster, host: int) -> dict[str, str]:
    """Return a host's environment. Without NCCL_HOSTID NCCL would bypass the shaped links."""
    network = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    nccl = {"NCCL_HOSTID": f"h{host}", "NCCL_IB_DISABLE": "1"}
    start = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", EMULATION: cluster.describe()}
    if host == cluster.slow_host:
        start[SLOW_FACTOR] = str(cluster.slow_factor)
    gpus = _visible_gpus()
    if gpus:
        first = host * cluster.ranks_per_host % len(gpus)
        start["CUDA_VISIBLE_DEVICES"] = ",".join([*gpus[first:], *gpus[:first]])
    return {"OMP_NUM_THREADS": "1", **os.environ, **network, **nccl, **start}


def _visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _show(host: int, output: IO[str]) -> None:
    for line in output:
        sys.stderr.write(f"h{host}: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
