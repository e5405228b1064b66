"""The list of commands: `python -m lab`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from lab import __version__
from lab.settings.command import Command, CommandLine, answer
from lab.settings.errors import ConfigError

COMMAND = Command("lab", "List the commands.", ("python -m lab", "python -m lab.train --help"))


def main(arguments: list[str]) -> int:
    """Print a line for each command; the exit code is 2 for any argument but --help."""
    return answer(COMMAND, arguments, _list)


def _list(line: CommandLine) -> int:
    if line.settings:
        raise ConfigError(f"{line.settings[0]}: takes none; a command is python -m lab.NAME")
    print(f"scaling-lab {__version__}; python -m COMMAND --help tells more\n")
    for command in sorted(_commands(), key=lambda each: each.name):
        print(f"  {command.name:<20} {_sentence(command.purpose)}")
    print('\nin a program of your own: "import lab", see docs/your_own.md')
    return 0


def _commands() -> Iterator[Command]:
    """Yield the command of each door, and of each room that is one."""
    folder = Path(__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    for path in (file for file in files if file.parent != folder or file.stem[0] != "_"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        yield importlib.import_module(".".join(parts)).COMMAND


def _sentence(purpose: str) -> str:
    """Return the first sentence, or line, of a command's purpose."""
    return purpose.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
