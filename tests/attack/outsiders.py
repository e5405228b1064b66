"""What people who knew the documents alone tried, odd surroundings, two of the same at once.

Each case is a piece of bash that ends in a folder of its own. It fails where one of its lines does:
a wrong exit code, a message that does not say what it should, a traceback, something lost or run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.outcome import Attempt
from tests.conftest import ROOT

CASES = Path(__file__).with_suffix(".sh")
HEADER = re.compile(r"^## (\d+) ([\w ]+): (.+)$", re.MULTILINE)
LIMIT_S = 300.0
TINY = "device=cpu steps=6 batch_size=24 threads=1"
MODEL = "data.size=16 model=mlp model.hidden=[8]"
RANKS = "-m lab.distributed.torchrun --nproc-per-node=2 -m lab.train"
PROGRAMS = {  # on the PATH, so that `env`, `unshare` and `timeout` start them as well
    "L": 'name=$1; shift; exec $PY -m "lab.$name" "$@"',
    "U1": f'exec $PY -m lab.train {TINY} "$@"',
    "U2": f'exec $PY {RANKS} {TINY} "$@"',
    "T1": f'exec $PY -m lab.train {TINY} {MODEL} "$@"',
    "T2": f'exec $PY {RANKS} {TINY} {MODEL} "$@"',
    "S": f'exec $PY -m lab.sweep {TINY} {MODEL} "$@"',
}
PRELUDE = r"""
set -euo pipefail
HEAD='import torch; from torch import nn
class M(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__(); self.f = nn.Linear(256, num_classes)
    def forward(self, x):
        return self.f(x.flatten(1))
'
base() { cp -r "$BASE/runs" .; }
m() { cat > m.py; }
acts() {  # a model N whose fifth forward pass does ACT
  m <<< "import os, signal, sys, time, torch.distributed as dist; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: exec(os.environ['ACT'])
        return super().forward(x)"
}
until_true() { for _ in $(seq 300); do "$@" > /dev/null 2>&1 && break; sleep .2; done; }
begun() { until_true test -e "runs/default/$1/attempts.json"; sleep 2; }
live() {  # starts a sweep with its page: p is its process, u the address
  env --default-signal=INT S study=s report=live "$@" > o 2>&1 & p=$!
  until_true grep -q http: o; u=$(grep -o -m1 'http://[^ ]*' o)
}
stop_live() { local code=0; kill -INT $p; wait $p || code=$?; test $code = 130; }
ranks() {
  for q in /proc/[0-9]*; do
    [ "$(readlink "$q/cwd")" = "$PWD" ] || continue
    if tr '\0' ' ' 2>/dev/null < "$q/cmdline" | grep -q '^[^ ]*python.*m lab.train'
    then echo "${q#/proc/}"; fi
  done
}
record() {
  "$PY" -c 'import json, sys; found = json.load(open(sys.argv[1]))[sys.argv[2]]
if str(found) != sys.argv[3]: sys.exit(f"record: {sys.argv[2]} is {found!r}")' \
    "runs/default/$1/record.json" "$2" "$3"
}
ends() {  # as try, where a traceback may be printed
  local code=0
  timeout 120 "${@:3}" > out 2>&1 || code=$?
  if [ $code != "$1" ] || ! grep -q -- "$2" out; then
    echo "exit code $code, not $1, or does not say '$2': ${*:3}: $(tail -n 2 out)"; exit 1
  fi
}
R='strategy=onebit steps=12 checkpoint_every=3'
lives() { try 0,1,2 'done:|lab[.a-z]*: error:' "$@"; }
both() {  # N LINE LINE: at once, each is done or says why not in a line; N records say done
  local n=$1 at code failed=0 pids=()
  for at in 1 2; do shift; bash -c "$1" > "o$at" 2>&1 & pids[at]=$!; done
  for at in 1 2; do
    code=0; wait "${pids[at]}" || code=$?
    if [ $code != 0 ]; then
      failed=$((failed + 1))
      if ! sed '/^Traceback/,$d' "o$at" | grep -q '^lab.*error:'
      then echo "exit code $code: $(tail -n 3 "o$at")"; exit 1; fi
    fi
  done
  if [ $failed = 2 ]; then echo "neither is done: $(tail -n 3 o1 o2)"; exit 1; fi
  if [ "$(grep -l '"status": "done"' runs/*/*/record.json 2> /dev/null | wc -l)" -lt "$n" ]
  then echo "fewer than $n are done: $(tail -n 3 o1 o2)"; exit 1; fi
  if find runs -name '.*' ! -name .lock | grep .; then echo 'left behind'; exit 1; fi
}
try() {
  local codes=$1 says=$2 code=0; shift 2
  timeout 120 "$@" > out 2>&1 || code=$?
  if [ "$codes" != any ] && [[ ",$codes," != *",$code,"* ]]; then
    echo "exit code $code, not $codes: $*: $(tail -n 2 out)"; exit 1
  fi
  if ! grep -Eq -- "$says" out; then echo "does not say '$says': $*: $(tail -n 2 out)"; exit 1; fi
  if grep -q 'Traceback (most recent call last)' out; then
    echo "traceback: $*: $(tail -n 1 out)"; exit 1
  fi
  if [ "$codes" = 2 ] && [ "$(grep -c 'error:' out)" -gt 3 ]; then
    echo "more than a line: $*"; exit 1
  fi
}
"""


@dataclass(frozen=True)
class Case:
    """One attempt, by its number in the list that was made before any code was read."""

    number: int
    kind: str
    title: str
    script: str


def cases() -> list[Case]:
    """Return all cases, in order of their numbers."""
    text = CASES.read_text()
    found = list(HEADER.finditer(text))
    ends = [each.start() for each in found[1:]] + [len(text)]
    return [
        Case(int(each[1]), each[2], each[3], text[each.end() : end])
        for each, end in zip(found, ends, strict=True)
    ]


def attack(folder: Path, chosen: Sequence[Case]) -> Iterator[Attempt]:
    """Try each case in a folder of its own."""
    environment = surroundings(folder)
    for case in chosen:
        yield tried(case, folder / str(case.number), environment)


def surroundings(folder: Path) -> dict[str, str]:
    """Make the programs that cases call, and a study that is done; return their environment."""
    programs, done = folder / "programs", folder / "done"
    programs.mkdir(parents=True)
    done.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PY": sys.executable,
        "PYTHONPATH": str(ROOT),
        "BASE": str(done),
    }
    grid = "S study=s strategy=allreduce,onebit world_size=1,2"
    whole = f"{grid}; T2 study=s cell=bd measure=breakdown"
    subprocess.run(
        ["bash", "-ec", whole], cwd=done, env=environment, check=True, capture_output=True
    )
    return environment


def tried(case: Case, folder: Path, environment: dict[str, str]) -> Attempt:
    """Try a case; nothing of it is left afterwards."""
    folder.mkdir()
    line = ["bash", "-c", PRELUDE + case.script]
    with (folder.parent / f"{case.number}.txt").open("w+") as said:
        process = subprocess.Popen(
            line, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            outcome = "lost" if process.wait(LIMIT_S) else "survived"
        except subprocess.TimeoutExpired:
            outcome = "hung"
        _end(process)
        said.seek(0)
        last = said.read()[-400:].strip() if outcome != "survived" else ""
    shutil.rmtree(folder, ignore_errors=True)
    return Attempt(f"outsiders: {case.kind}", f"{case.number}: {case.title}", outcome, last)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
