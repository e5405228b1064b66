"""Run a cluster in namespaces that vanish with it.

When the process that made a sandbox ends, for any reason, the kernel closes its end of a pipe. Then
the first process inside, which is this module as a command, ends, at the latest when it has
started, and the kernel removes all other processes, mounts, namespaces and interfaces with it.

    python -m lab.cluster.sandbox CLUSTER run TORCHRUN-ARGUMENTS... | check
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lab.cluster.network import (
    INTERFACE,
    address,
    build,
    change_link,
    check,
    execute,
    name_hosts,
    on_host,
)
from lab.cluster.settings import EMULATION, Cluster, LinkChange
from lab.model.profile import SLOW_FACTOR
from lab.settings.config import ConfigError

FORWARDED = {signal.SIGINT, signal.SIGTERM}
AWAITED = FORWARDED | {signal.SIGCHLD}
AS_ROOT = ["unshare", "--user", "--map-root-user"]
ISOLATED = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
PROBE = """ip link add switch type bridge && ip link add link0 type veth &&
tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms"""
PROBE_NETEM = "tc qdisc add dev lo root netem delay 1ms"
PORT = 29400  # of the rendezvous on h0; nothing else uses this network
START_S = 600  # for h0's torchrun to start; torch would try for 60 s, then rest as long
RUN_S = 0.01  # between two halts: shorter than a step, longer than a halt's cost
GRACE_S = 30.0  # for other hosts to end after h0, which has rank 0, or one that failed


def find(cluster: Cluster) -> list[str]:
    """Return the command prefix that makes a sandbox: as root, or in a user namespace.

    Raises: ConfigError: neither is allowed here, or the kernel lacks a feature.
    """
    prefixes = (ISOLATED, [*AS_ROOT, *ISOLATED])
    problems = [_problem([*prefix, "sh", "-c", PROBE]) for prefix in prefixes]
    if all(problems):
        raise ConfigError(
            "cluster=emulated: needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), util-linux and "
            f"iproute2 on Linux: {problems[0]}"
        )
    sandbox = prefixes[problems.index("")]
    if cluster.needs_netem and (problem := _problem([*sandbox, "sh", "-c", PROBE_NETEM])):
        raise ConfigError(
            f"cluster.delay_ms={cluster.delay_ms:g} cluster.loss_percent={cluster.loss_percent:g}: "
            f"must be 0, because this kernel has no netem: {problem}"
        )
    return sandbox


def run(cluster: Cluster, task: list[str]) -> int:
    """Run a task of lab.cluster.sandbox on a new cluster; return its exit code.

    Early signals reach it too: they are blocked here and, by inheritance, in the child, until it
    handles them.

    Raises:
        ConfigError: see `find`.
    """
    inside = [sys.executable, "-m", "lab.cluster.sandbox", cluster.to_json(), *task]
    line = [*find(cluster), *inside]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    try:
        with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as process:
            while process.poll() is None:
                number = signal.sigwait(AWAITED)
                if number in FORWARDED:
                    os.killpg(process.pid, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return exit_code(process.returncode)


def exit_code(returncode: int) -> int:
    """Return a process's exit code as shells do: 128 + n after signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def _problem(command: list[str]) -> str:
    """Return one line that says why a command fails; empty if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


def main(arguments: list[str]) -> int:
    """Run one task; return the exit code of h0's torchrun (1: it did not end), or the verdict."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    cluster = Cluster.from_json(arguments[0])
    execute(build(cluster))
    name_hosts(cluster)
    if arguments[1] == "check":
        return check(cluster)
    hosts = start(cluster, arguments[2:])
    if (slow := cluster.slow_host) is not None:
        factor = cluster.slow_factor
        threading.Thread(target=slow_down, args=(hosts[slow], factor), daemon=True).start()
    wait(hosts, list(cluster.changes))
    return 1 if hosts[0].returncode is None else exit_code(hosts[0].returncode)


def _end_with_owner() -> None:
    """End the process once the owner closes its end of stdin, a pipe without data.

    PR_SET_PDEATHSIG would miss an owner that dies before it is set.
    """
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def start(cluster: Cluster, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Start a torchrun on each host. The output of hosts but h0 is prefixed with their names."""
    job = uuid.uuid4().hex  # each start is a separate job, as under torchrun --standalone
    hosts = list[subprocess.Popen[str]]()
    for host in range(cluster.num_hosts):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={cluster.num_hosts}",
            f"--nproc-per-node={cluster.ranks_per_host}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", f"--rdzv-id={job}"),
            f"--rdzv-conf=is_host={host == 0},read_timeout={START_S}",
            f"--local-addr={address(host)}",
        ]
        process = subprocess.Popen(
            on_host(host, *torchrun, *arguments),
            env=_environment(cluster, host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if host else None,
            stderr=subprocess.STDOUT if host else None,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED),
        )
        if process.stdout:
            threading.Thread(target=_show, args=(host, process.stdout), daemon=True).start()
        hosts.append(process)
    return hosts


def wait(hosts: list[subprocess.Popen[str]], changes: list[LinkChange]) -> None:
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


def _environment(cluster: Cluster, host: int) -> dict[str, str]:
    """Return a host's environment. Without NCCL_HOSTID NCCL would bypass the shaped links."""
    network = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    nccl = {"NCCL_HOSTID": f"h{host}", "NCCL_IB_DISABLE": "1"}
    start = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", EMULATION: cluster.describe()}
    if host == cluster.slow_host:
        start[SLOW_FACTOR] = str(cluster.slow_factor)
    devices = Path("/dev").glob("nvidia[0-9]*")
    visible = os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(f"{n}" for n, _ in enumerate(devices))
    )
    if gpus := [name for name in visible.split(",") if name]:
        first = host * cluster.ranks_per_host % len(gpus)
        start["CUDA_VISIBLE_DEVICES"] = ",".join([*gpus[first:], *gpus[:first]])
    return {"OMP_NUM_THREADS": "1", **os.environ, **network, **nccl, **start}


def _show(host: int, output: IO[str]) -> None:
    for line in output:
        sys.stderr.write(f"h{host}: {line}")


def slow_down(launcher: subprocess.Popen[str], factor: float) -> None:
    """Let the processes of `launcher` run for 1/factor of the time, until it ends.

    Timers and the kernel's side of connections go on while they are halted.
    """
    while launcher.poll() is None:
        began = time.monotonic()
        time.sleep(RUN_S)
        halt_s = (factor - 1) * (time.monotonic() - began)
        ranks = list(descendants(launcher.pid))
        for number, rest_s in ((signal.SIGSTOP, halt_s), (signal.SIGCONT, 0)):
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(rest_s)


def descendants(pid: int) -> Iterator[int]:
    """Return all descendants of a process (children of main threads)."""
    with contextlib.suppress(OSError):  # it has ended
        for child in map(
            int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        ):
            yield child
            yield from descendants(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
