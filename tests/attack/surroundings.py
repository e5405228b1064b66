"""Runs where something is missing, full or small: they train, or say in a line what is wrong."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.outcome import REFUSED, SURVIVED, Attempt
from tests.conftest import ROOT

LIMIT_S = 120.0
RUN = (
    "device=cpu strategy=onebit data.size=16 batch_size=24 optim.lr=0.01 steps=12"
    " checkpoint_every=3 cell=a"
)
TRAIN = f"{{python}} -m lab.train {RUN}"
TRAIN_TWO = TRAIN.replace("-m", "-m torch.distributed.run --standalone --nproc-per-node=2 -m")


@dataclass(frozen=True)
class Surroundings:
    """Where a run is tried.

    Attributes:
        shell: commands of bash; {python} starts Python.
        environment: changes; empty text: the variable is removed.
    """

    shell: str = TRAIN
    environment: dict[str, str] = field(default_factory=dict[str, str])
    folder: str = "here"


def _mounted(options: str, at: str, then: str) -> str:
    inside = f"mount -t tmpfs -o {options} none {at} && {then}"
    return f"mkdir -p {at} && unshare --mount bash -c {shlex.quote(inside)}"


# The date jumps by an hour, back and forth, every second.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, now);
  if (which == CLOCK_REALTIME && now->tv_sec % 2) now->tv_sec -= 3600;
  return code;
}
"""
# Stops all processes of a run nine tenths of the time.
SLOWED = """setsid {train} & pid=$!
while grep -qs ') [^Z]' /proc/$pid/stat; do
  kill -STOP -- -$pid; sleep 0.09; kill -CONT -- -$pid; sleep 0.01
done 2>/dev/null
wait $pid"""
# torchrun resolves localhost, which not every machine's /etc/hosts names in IPv6.
NO_IPV4 = (
    "ip link set lo up && ip address delete 127.0.0.1/8 dev lo"
    " && echo ::1 localhost $(hostname) > hosts && mount --bind hosts /etc/hosts"
)
PLACES: dict[str, Surroundings] = {
    "no HOME": Surroundings(environment={"HOME": "", "XDG_CACHE_HOME": ""}),
    "a HOME that is not there": Surroundings(
        environment={"HOME": "/proc/nowhere", "XDG_CACHE_HOME": ""}
    ),
    "a TMPDIR that is not there": Surroundings(environment={"TMPDIR": "/proc/nowhere"}),
    "no compiler and no git": Surroundings(
        environment={"PATH": "/proc/nowhere", "XDG_CACHE_HOME": "cache"}
    ),
    "no locale": Surroundings(environment={"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    "a path with spaces, 200 characters": Surroundings(folder="a b'\"$é" + "x" * 190),
    "python -O": Surroundings(TRAIN.replace("-m", "-O -m")),
    "ulimit -n 64": Surroundings(f"ulimit -n 64; {TRAIN_TWO}"),
    "/dev/shm of 64 kB": Surroundings(_mounted("size=64k", "/dev/shm", TRAIN_TWO)),
    "a network without loopback": Surroundings(f"unshare --net {TRAIN}"),
    "a network of IPv6 alone": Surroundings(
        f"unshare --net --mount bash -c {shlex.quote(f'{NO_IPV4} && {TRAIN_TWO}')}"
    ),
    "not root": Surroundings(f"unshare --user --map-user=65534 --map-group=65534 {TRAIN_TWO}"),
    "a clock that jumps by an hour": Surroundings(
        f"printf %s {shlex.quote(CLOCK)} | cc -shared -fPIC -x c - -o clock.so -ldl"
        f" && LD_PRELOAD=$PWD/clock.so {TRAIN_TWO}"
    ),
    "a machine that is ten times slower": Surroundings(SLOWED.replace("{train}", TRAIN_TWO)),
    "a full disk": Surroundings(_mounted("size=1m", "runs", TRAIN)),
    "no inodes": Surroundings(_mounted("nr_inodes=12", "runs", TRAIN)),
    "a read-only folder": Surroundings(_mounted("ro", "runs", TRAIN)),
    "runs is a file": Surroundings(f"touch runs; {TRAIN}"),
    "runs leads to nowhere": Surroundings(f"ln -s /proc/nowhere/else runs; {TRAIN}"),
    "the folder goes away": Surroundings(
        f"(while [ ! -d runs/default/a/checkpoints ]; do sleep 0.05; done; rm -rf runs) & {TRAIN}"
    ),
    "output that nobody reads": Surroundings(f"{TRAIN} | head -c 1"),
    "a closed standard output": Surroundings(f"{TRAIN} >&-"),
}


def attack(folder: Path) -> Iterator[Attempt]:
    """Run in every place; yield what came of each."""
    for name, place in PLACES.items():
        where = folder.resolve() / name.replace("/", "_") / place.folder
        where.mkdir(parents=True)
        yield tried(name, place, where)


def tried(name: str, place: Surroundings, folder: Path) -> Attempt:
    """Run in one place."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {k: v for k, v in (environment | place.environment).items() if v}
    line = place.shell.replace("{python}", shlex.quote(sys.executable))
    attempt = Attempt("surroundings", name, SURVIVED)
    try:
        done = subprocess.run(
            ["/bin/bash", "-o", "pipefail", "-c", line],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Attempt("surroundings", name, "hung")
    if done.returncode in (0, 141):  # 141: nobody reads the output any more
        return attempt
    errors = [line for line in done.stderr.splitlines() if line.startswith("lab.train: error:")]
    if len(errors) == 1 and "Traceback" not in done.stderr:
        return Attempt("surroundings", name, REFUSED, errors[0])
    return Attempt("surroundings", name, "traceback", done.stderr[-1500:])
