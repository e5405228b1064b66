"""Run the checklist of the first hour on GPUs: `python -m lab.first_hour`."""

from __future__ import annotations

import shlex
import sys

from lab.checklist import page
from lab.checklist.check import check, chosen
from lab.checklist.figures import Results
from lab.checklist.item import checklist
from lab.checklist.machine import machine_of, query
from lab.checklist.process import run
from lab.checklist.settings import COMMAND, Settings
from lab.record.files import write_json
from lab.settings.command import answer
from lab.settings.errors import ConfigError
from lab.settings.fields import own_settings


def main(arguments: list[str]) -> int:
    """Run a checklist; print each figure with its expected range, and write all to a page.

    Returns:
        0 if every figure holds; 1 if one differs or failed; 2 for a wrong setting, or without a
        GPU; 130 after Ctrl-C.
    """
    command = shlex.join(["python", "-m", COMMAND.name, *arguments])
    return answer(
        COMMAND, arguments, lambda line: _run(own_settings(Settings, line.settings), command)
    )


def _run(settings: Settings, command: str) -> int:
    found = query()
    machine, path = machine_of(found, settings.out)
    items = chosen(checklist(machine), [*settings.items] if settings.items else None)
    try:
        machine.folder.mkdir(parents=True, exist_ok=True)
        write_json(machine.folder / "hardware.json", found)
    except OSError as error:
        raise ConfigError(f"out={path}: cannot be written: {error.strerror}") from None
    done = []
    for item in items:
        print(f"[{item.key}] {item.title}", flush=True)
        done.append(check(item, machine, Results(machine.folder), settings.time_limit_s, run))
        print("\n".join(page.lines(done[-1])), flush=True)
        page.write(path, page.merged(path, page.result(found, command, done)))
    print(f"wrote {path} and {path.with_suffix('.json')}")
    return int(any(each["verdict"] in ("differs", "failed") for each in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
