"""Attack the lab: `python -m tests.attack [kills=N] [reads=N] … [seed=N] [out=FILE]`.

`kills=0` and the like leave a part out; the parts are in PARTS. Attempts go to OUT, one per line;
what the attacked processes print goes to a file beside it that ends in `.log`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

from tests.attack import (
    changes,
    commands,
    kills,
    launchers,
    numbers,
    outsiders,
    planted,
)
from tests.attack.outcome import BAD, Attempt, table
from tests.attack.readers import READERS
from tests.support.commands import divert

Part = Callable[[int, int, Path], Iterator[Attempt]]  # called with seed, how many, and a folder


def reads(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Damage every reader's file in `count` ways, two readers at a time."""
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda name: _of_reader(name, seed, count), READERS):
            yield from found


PARTS: dict[str, tuple[int, Part]] = {
    "reads": (200, reads),
    "secrets": (10, planted.attack),
    "kills": (100, lambda seed, count, at: kills.attack(seed, count, at, kills.here())),
    "commands": (30, commands.attack),
    "changes": (100, changes.attack),
    "numbers": (100, numbers.attack),
    "outsiders": (1, lambda seed, count, at: outsiders.attack(at, outsiders.cases())),
}


def main(words: list[str]) -> int:
    """Attack, print the table of what came of it, and return 1 if something was lost."""
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    out, allowed = given.pop("out", "attack.jsonl"), ("seed", *PARTS)
    for key, value in given.items():
        if key not in allowed or not value.isdecimal():
            print(f"{key}={value}: allowed: {'=N, '.join(allowed)}=N, out=FILE", file=sys.stderr)
            return 2
    divert(Path(out).with_suffix(".log"))
    for launcher, reason in launchers.missing().items():
        print(f"no attack by {launcher}: {reason}")
    counts = {name: int(given.get(name, count)) for name, (count, _) in PARTS.items()}
    attempts = list(_all(counts, int(given.get("seed", 0)), Path(out)))
    print(table(attempts))
    lost_s = [float(a.said) for a in attempts if a.attack.startswith("kill: ") and _is_time(a.said)]
    if lost_s:
        print(f"a signal costs {median(lost_s):.1f} s in the median, starts included")
    return int(any(attempt.outcome in BAD for attempt in attempts))


def _all(counts: dict[str, int], seed: int, out: Path) -> Iterator[Attempt]:
    """Attack by all parts; write each attempt to `out`, and print what was lost."""
    with out.open("w") as file, tempfile.TemporaryDirectory() as folder:
        for name, (_, part) in PARTS.items():
            if not counts[name]:
                continue
            print(f"attacking: {name}")
            for number, attempt in enumerate(part(seed, counts[name], Path(folder, name)), 1):
                if number % 20 == 0:
                    print(f"{name}: {number} done")
                file.write(json.dumps(asdict(attempt)) + "\n")
                file.flush()
                if attempt.outcome in BAD:
                    what = f"{attempt.attack}: {attempt.what}: {attempt.outcome}"
                    print(f"{what}: {attempt.said}")
                yield attempt


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
