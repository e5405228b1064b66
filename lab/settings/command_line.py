"""One dialect for all commands: positional words, `key=value`, and Hydra's own flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lab.settings.blame import blame
from lab.settings.command import Command, CommandLine
from lab.settings.errors import ConfigError, one_line
from lab.settings.hints import hint
from lab.settings.overrides import handed_over, quoted
from lab.settings.secrets import without_secrets
from lab.settings.streams import OutputLost, drop_output, safe_streams
from lab.settings.visible import visible, visible_output

EXIT_UNREAD = 128 + 13  # as of a program that SIGPIPE ends
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal, resume=auto continues
LONGEST_ERROR = 2000
SETTING = re.compile(r"~|\+*[\w.@]+=")  # and not runs/a=b, a folder


def answer(
    command: Command,
    arguments: Sequence[str],
    act: Callable[[CommandLine], int],
    refuse: Callable[[ConfigError], int] | None = None,
) -> int:
    """Execute a command line.

    Args:
        act: runs the command and returns its exit code. refuse: handles a wrong setting; by default
        one line on stderr, and exit code 2.

    Returns:
        The exit code: 0 after help, 1 for an error in the user's own code or output that cannot be
        written, 2 for a wrong setting, 130 after Ctrl-C, 141 if nobody reads the output any more.
    """
    with safe_streams():
        return _answer(command, arguments, act, refuse)


def _answer(
    command: Command,
    arguments: Sequence[str],
    act: Callable[[CommandLine], int],
    refuse: Callable[[ConfigError], int] | None,
) -> int:
    try:
        line = read(command, arguments)
        if line.asks_help:
            from lab.settings.help import help_text

            print(help_text(command, line.settings))
        # A command with a word reads what others may have written; the others run the user's own.
        with visible_output() if command.word else nullcontext():
            code = 0 if line.asks_help else act(line)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has enough of it, as `head` has
        drop_output()
        return EXIT_UNREAD
    except OutputLost as error:
        drop_output()
        report_error(command.name, error)
        return 1
    except ConfigError as error:
        if refuse:
            return refuse(error)
        report_error(command.name, error)
        return 2
    except Exception as error:
        # A file that cannot be written, or read, is no bug of the lab's.
        if not blame(error) and not (isinstance(error, OSError) and error.filename):
            raise
        report_error(command.name, error)
        return 1
    except KeyboardInterrupt:
        if command.stopped:
            print(f"\n{command.stopped}", file=sys.stderr)
        return 130


def read(command: Command, arguments: Sequence[str]) -> CommandLine:
    """Sort the words of a command line.

    Raises:
        ConfigError: a flag that the command does not accept, or a wrong number of words.
    """
    words, settings, flags = list[str](), list[str](), set[str]()
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("-"):
            flag, value = _flag(command, argument, rest)
            flags.add(flag)
            settings += [f"config_dir={quoted(value)}"] if flag == "--config-dir" else []
        elif command.word and not SETTING.match(argument):
            words.append(argument)
        else:
            settings.append(argument)
    fits = len(words) == bool(command.word) or (command.several and words)
    if not fits and "--help" not in flags:
        asked = " ".join(words) or "(nothing)"
        number = "at least one" if command.several else "one"
        raise ConfigError(f"{asked}: takes {number} {command.word}, as in {command.usage}")
    shows_settings, is_multirun = "--cfg" in flags, "--multirun" in flags
    return CommandLine(words, handed_over(settings), shows_settings, is_multirun, "--help" in flags)


def show(configs: Iterable[DictConfig]) -> None:
    """Print settings as YAML documents, for `--cfg job`."""
    print("---\n".join(OmegaConf.to_yaml(config) for config in configs), end="")


def report_error(command: str, error: Exception) -> None:
    """Print an error as one line on stderr; before it, the traceback of the user's own code."""
    found, line = blame(error), str(error)
    if found:
        print(without_secrets(found.traceback), file=sys.stderr)
        if found.error is error:
            line = f"{type(error).__name__}: {one_line(error)} ({found.place})"
    if len(line) > LONGEST_ERROR:  # a file's value is in it
        line = f"{line[:LONGEST_ERROR]}…"
    print(visible(without_secrets(f"{command}: error: {line}")), file=sys.stderr)


def _flag(command: Command, argument: str, rest: Iterator[str]) -> tuple[str, str]:
    """Return a flag's long name and its value."""
    name, _, value = argument.partition("=")
    if name in ("-h", "--help"):
        return "--help", ""
    if command.sweeps and name in ("-m", "--multirun"):
        return "--multirun", ""
    value = value or next(rest, "")
    if (key := name.lstrip("-").replace("-", "_")) in command.settings:
        raise ConfigError(f"{name} {value}: is written {key}={value or '...'}")
    if command.runs and name in ("-c", "--cfg"):
        if value != "job":
            raise ConfigError(f"{name} {value}: allowed is --cfg job")
        return "--cfg", value
    if command.runs and name in ("-cd", "--config-dir"):
        if not Path(value).is_dir() or not value:
            raise ConfigError(f"{name} {value}: there is no such folder")
        return "--config-dir", str(Path(value).absolute())
    if command.runs and (setting := _as_setting(name, argument, value)):
        raise ConfigError(f"{name}: {setting}")
    raise ConfigError(f"{name}: flags are {command.flags}; settings are written key=value")


def _as_setting(name: str, argument: str, value: str) -> str | None:
    """Return how to write an option of other programs, such as --lr 0.1; None: it is unknown."""
    from lab.settings.config import FIELDS  # composing takes time to load, and only errors need it

    key = name.lstrip("-").replace("-", "_")
    if "=" not in argument and ("=" in value or value.startswith("-")):  # the next setting
        value = ""
    if key in FIELDS or key.partition(".")[0] in FIELDS:
        return f"write {key}={value or '...'}"
    return hint(key, value)
