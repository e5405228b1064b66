"""Run the checklist of the first hour on GPUs: `python -m lab.first_hour`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.checklist import page
from lab.checklist.check import check, chosen, run
from lab.checklist.figures import Results
from lab.checklist.item import checklist, machine_of, query
from lab.record.files import write_json
from lab.settings.command import Command, CommandLine, answer
from lab.settings.errors import ConfigError
from lab.settings.fields import file_setting, own_settings, setting


@dataclass(frozen=True)
class Settings:
    """The settings of lab.first_hour; None: the machine's default."""

    items: tuple[str, ...] | None = setting(None, "numbers or parts, as in items=1,4,6a; null: all")
    time_limit_s: int = setting(
        570, "for an item; a longer one is ended, and fails", unit="seconds", at_least=1
    )
    out: Path | None = file_setting(
        "FILE.md, FILE.json and a folder next to it; null: docs/results/gpu-NAME", ".md"
    )


COMMAND = Command(
    "lab.first_hour",
    """\
Run the checklist of the first hour on GPUs, from a checkout's root: items 1 to 9 need one GPU,
10 to 15 several. Each figure is printed with its expected range, and a page is written. Parts that
are run separately, by items=, are added to the same page.""",
    ("python -m lab.first_hour", "python -m lab.first_hour items=1,4,6a out=mine.md"),
    Settings,
    stopped="stopped; the page has the finished items",
)


def main(arguments: list[str]) -> int:
    """Run a checklist; print each figure with its expected range, and write all to a page.

    Returns:
        0 if every figure holds; 1 if one differs or failed; 2 for a wrong setting, or without a
        GPU; 130 after Ctrl-C.
    """
    return answer(COMMAND, arguments, _run)


def _run(line: CommandLine) -> int:
    settings = own_settings(Settings, line.settings)
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
        page.write(path, page.merged(path, page.result(found, line.text, done)))
    print(f"wrote {path} and {path.with_suffix('.json')}")
    return int(any(each["verdict"] in ("differs", "failed") for each in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
