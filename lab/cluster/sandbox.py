"""Run a cluster in namespaces that vanish with it.

When the process that made a sandbox ends, for any reason, the kernel closes its end of a pipe. Then
the first process inside ends, at the latest when it has started, and the kernel removes all other
processes, mounts, namespaces and interfaces with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from lab.cluster.settings import Cluster
from lab.settings.config import ConfigError

FORWARDED = {signal.SIGINT, signal.SIGTERM}
AWAITED = FORWARDED | {signal.SIGCHLD}
AS_ROOT = ["unshare", "--user", "--map-root-user"]
ISOLATED = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
PROBE = """ip link add switch type bridge && ip link add link0 type veth &&
tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms"""
PROBE_NETEM = "tc qdisc add dev lo root netem delay 1ms"


def find(cluster: Cluster) -> list[str]:
    """Return the command prefix that makes a sandbox: as root, or in a user namespace.

    Raises:
        ConfigError: neither is allowed here, or the kernel lacks a feature.
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
            f"must be 0, for this kernel has no netem: {problem}"
        )
    return sandbox


def run(cluster: Cluster, task: list[str]) -> int:
    """Run a task of lab.cluster.supervisor on a new cluster; return its exit code.

    Early signals reach it too: they are blocked here and, by inheritance, in the child, until it
    handles them.

    Raises:
        ConfigError: see `find`.
    """
    inside = [sys.executable, "-m", "lab.cluster.supervisor", cluster.to_json(), *task]
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
