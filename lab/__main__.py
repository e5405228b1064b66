"""All commands: `lab` lists them and `lab train` is `python -m lab.train`."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lab
from lab.settings.command import Command, CommandLine, answer
from lab.settings.errors import ConfigError

COMMAND = Command(
    "lab",
    "List the commands; lab NAME runs one, as python -m lab.NAME does.",
    ("python -m lab", "python -m lab train --help"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first word names, or print a line for each.

    Args:
        arguments: the words; None: of this process, as of the script `lab`.

    Returns:
        0; 2 for a word that names no command. A command that runs ends the process itself.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and (name := f"lab.{words[0]}") in modules():
        sys.argv = [name, *words[1:]]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    if words[-2:] == ["-sc", "query=bash"]:
        from lab.settings.help import of_line

        print("\n".join(of_line(modules())))
        return 0
    lists = {"-h", "--help"} & {*words}
    purpose = f"{COMMAND.purpose}\n\n{_listing()}" if lists else COMMAND.purpose
    return answer(replace(COMMAND, purpose=purpose), words, _list)


def _list(line: CommandLine) -> int:
    if line.settings:
        named = ", ".join(name.removeprefix("lab.") for name in modules())
        raise ConfigError(f"{line.settings[0]}: no such command; allowed: {named}")
    print(f"scaling-lab {lab.__version__}; for details, run python -m COMMAND --help\n")
    print(f'{_listing()}\n\nfor your own program, "import lab" (docs/how-to/own_loop.md)')
    return 0


def _listing() -> str:
    imported = (importlib.import_module(module) for module in modules().values())
    commands: Iterator[Command] = (module.COMMAND for module in imported)
    return "\n".join(f"  {each.name:<20} {_sentence(each.purpose)}" for each in commands)


def modules() -> dict[str, str]:
    """Return the module of each command: of each file in lab/, and of each package that is one."""
    folder = Path(__file__).parent
    files = {f"lab.{path.stem}" for path in folder.glob("*.py") if path.stem[0] != "_"}
    packages = {f"lab.{path.parent.name}" for path in folder.glob("*/__main__.py")}
    return {
        name: name if name in files else f"{name}.__main__" for name in sorted(files | packages)
    }


def _sentence(purpose: str) -> str:
    """Return the first sentence, or line, of a command's purpose."""
    return purpose.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(main())
