"""Attack the lab: `python -m tests.attack [kills=N] [reads=N] [changes=N] [seed=N] [out=FILE]`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

from tests.attack import changes, kills, surroundings
from tests.attack.outcome import BAD, Attempt, table
from tests.attack.readers import READERS

DEFAULTS = {"kills": "100", "reads": "200", "changes": "100", "seed": "0", "out": "attack.jsonl"}


def main(words: list[str]) -> int:
    """Attack, print the table of what came of it, and return 1 if something was lost."""
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    if unknown := sorted(given.keys() - DEFAULTS.keys()):
        print(f"{unknown[0]}: no such setting; allowed are {', '.join(DEFAULTS)}", file=sys.stderr)
        return 2
    settings = DEFAULTS | given
    seed, attempts = int(settings["seed"]), list[Attempt]()
    with Path(settings["out"]).open("w") as out:
        num_kills, num_reads, num_changes = (
            int(settings[name]) for name in ("kills", "reads", "changes")
        )
        for attempt in _all(num_kills, num_reads, num_changes, seed):
            attempts.append(attempt)
            out.write(json.dumps(asdict(attempt)) + "\n")
            out.flush()
            if attempt.outcome in BAD:
                print(f"{attempt.attack}: {attempt.what}: {attempt.outcome}: {attempt.said}")
    print(table(attempts))
    lost_s = [float(a.said) for a in attempts if a.attack.startswith("kill") and _is_time(a.said)]
    if lost_s:
        print(f"a signal costs {median(lost_s):.1f} s in the median, starts included")
    return int(any(attempt.outcome in BAD for attempt in attempts))


def _all(num_kills: int, num_reads: int, num_changes: int, seed: int) -> Iterator[Attempt]:
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda name: _of_reader(name, seed, num_reads), READERS):
            yield from found
    with tempfile.TemporaryDirectory() as folder:
        yield from kills.attack(seed, num_kills, Path(folder, "kills"))
        yield from changes.attack(seed, num_changes, Path(folder, "changes"))
        yield from surroundings.attack(Path(folder, "surroundings"))


def _of_reader(name: str, seed: int, count: int) -> list[Attempt]:
    """Attack a reader in a process of its own, whose memory is limited."""
    line = [sys.executable, "-m", "tests.attack.readers", name, str(seed), str(count)]
    done = subprocess.run(line, capture_output=True, text=True)
    attempts = [Attempt(**json.loads(text)) for text in done.stdout.splitlines()]
    if len(attempts) < count:
        attempts.append(Attempt(f"read: {name}", "its process", "lost", done.stderr[-300:]))
    return attempts


def _is_time(text: str) -> bool:
    return text.replace(".", "").isdigit()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
