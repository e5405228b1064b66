"""One dialect for all commands: positional words, `key=value`, and Hydra's own flags."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import Field, dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab
from lab.settings.errors import ConfigError, Failed, OutputLost, lacks_memory, one_line
from lab.settings.fields import columns, fields_of
from lab.settings.files import is_folder
from lab.settings.hints import OF_HYDRA, hint
from lab.settings.own_code import user_traceback
from lab.settings.secrets import redacted_words, without_secrets
from lab.settings.streams import drop_output, escape_controls, safe_streams, visible_output

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXIT_UNREAD = 128 + 13  # as of a program that SIGPIPE ends
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal, resume=auto continues
LONGEST_ERROR = 2000
OF_REPORTS = ("pandas", "altair", "vl_convert", "jinja2")  # the extra `report` installs them
SHORT = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-p": "--package"},
    **{"-cd": "--config-dir", "-sc": "--shell-completion"},
}
ABOUT = ("--help", "--version", "--shell-completion")  # flags that ask for a text alone
OF_CFG = ("--resolve", "--package")
SETTING = re.compile(r"~|\+*[\w.@]+=")  # and not runs/a=b, a folder


@dataclass(frozen=True)
class Nothing:
    """The settings of a command that has none of its own."""


@dataclass(frozen=True)
class Command:
    """The words and settings that a command takes, as its help shows them.

    Attributes:
        name: as in `python -m NAME`.
        purpose: its description, in a few lines. examples: command lines. settings: a dataclass of
        its own ones. word: name of its one positional word; empty: it has none. several: whether it
        takes more than one such word. runs: whether it also takes the settings of a run, and
        Hydra's flags. grid: those of a grid that it takes too. sweeps: whether it accepts
        `--multirun`. stopped: text to print after Ctrl-C; empty: nothing.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    settings: type = Nothing
    word: str = ""
    several: bool = False
    runs: bool = False
    grid: tuple[Field[Any], ...] = ()
    sweeps: bool = False
    stopped: str = "stopped"

    @property
    def fields(self) -> Mapping[str, Field[Any]]:
        """Return its own settings, and those of a grid, by key."""
        return fields_of(self.settings) | {field.name: field for field in self.grid}

    @property
    def flag_names(self) -> list[str]:
        """Return the flags that the command accepts, each with its value."""
        names = ["--help", "--version", "--shell-completion install=bash"]
        of_runs = ("--config-dir DIR", "--cfg job", "--resolve", "--package KEY")
        return [*names, *(of_runs if self.runs else ()), *(["--multirun"] if self.sweeps else [])]

    @property
    def usage(self) -> str:
        """Return the command line that the help shows."""
        words = f"{self.word} ..." if self.several else self.word
        return " ".join(filter(None, ("python -m", self.name, words, "[setting=value ...]")))


@dataclass(frozen=True)
class CommandLine:
    """The parsed words of a command line.

    Attributes:
        text: the whole line, as typed, for a shell.
        words: the positional words.
        settings: `key=value` words, in order; `--config-dir` is one of them.
        flags: those given, by their long names, with their values.
    """

    text: str
    words: list[str]
    settings: list[str]
    flags: Mapping[str, str]

    @property
    def shows_settings(self) -> bool:
        """Whether `--cfg job` asks only to print the settings."""
        return "--cfg" in self.flags

    @property
    def asks(self) -> bool:
        """Whether the command line asks for a text about the command, and for nothing else."""
        return any(flag in self.flags for flag in ABOUT)

    @property
    def word(self) -> str:
        """The first positional word; empty if there is none."""
        return self.words[0] if self.words else ""


@safe_streams()
def answer(
    command: Command,
    arguments: Sequence[str],
    act: Callable[[CommandLine], int],
    refuse: Callable[[ConfigError], int | None] | None = None,
) -> int:
    """Execute a command line.

    Args:
        act: runs the command and returns its exit code. refuse: is told of a wrong setting first;
        it returns the exit code, or None for one line on stderr and exit code 2.

    Returns:
        The exit code: 0 after help and the like, 1 for work that failed, an error in the user's own
        code or output that cannot be written, 2 for a wrong setting, 130 after Ctrl-C, 141 if
        nobody reads the output any more.
    """
    atexit.register(gc.freeze)  # a search for garbage at the end takes 0.4 s once torch is loaded
    try:
        if signal.getsignal(signal.SIGINT) == lab.end_at_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        line = read(command, arguments)
        if line.asks:
            print(_about(command, line))
        # A command with a word reads what others may have written; the others run the user's own.
        with visible_output() if command.word else nullcontext():
            code = 0 if line.asks else act(line)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has enough of it, as `head` has
        drop_output()
        return EXIT_UNREAD
    except (Failed, OutputLost) as error:
        if isinstance(error, OutputLost):
            drop_output()
        report_error(command.name, error)
        return 1
    except ConfigError as error:
        if refuse and (code := refuse(error)) is not None:
            return code
        report_error(command.name, error)
        return 2
    except Exception as error:
        if lacking := _lacking(error):
            report_error(command.name, ConfigError(lacking))
            return 2
        # A file that cannot be written or read, or a lack of memory, is no bug of the lab's.
        is_known = lacks_memory(error) or (isinstance(error, OSError) and error.filename)
        if not (is_known or user_traceback(error)):
            raise
        report_error(command.name, error)
        return 1
    except KeyboardInterrupt:
        if command.stopped:
            print(f"\n{command.stopped}", file=sys.stderr)
        return 130


def _lacking(error: Exception) -> str:
    """Return one line if an installed library is missing or broken; empty if it is not."""
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    if name in OF_REPORTS:
        return f"{name} is not installed: pip install 'scaling-lab[report]'"
    if sys.modules.get("torch"):
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [name or "", *(str(frame.f_globals.get("__name__")) for frame, _ in frames)]
    # Python forgets a module whose import fails.
    fails = "torch" in {module.partition(".")[0] for module in modules}
    return f"torch cannot be imported: {one_line(error)}" if fails else ""


def answers(
    command: Command, refuse: Callable[[ConfigError], int | None] | None = None
) -> Callable[[Callable[[CommandLine], int]], Callable[[Sequence[str]], int]]:
    """Make the `main` of a command, which takes words, of what it does with them; see `answer`."""
    return lambda act: update_wrapper(partial(answer, command, act=act, refuse=refuse), act)


def _about(command: Command, line: CommandLine) -> str:
    if "--help" in line.flags:
        return help_text(command, line.settings)
    if "--version" in line.flags:
        return f"scaling-lab {lab.__version__}"
    from lab.settings.help import script

    return script(line.flags["--shell-completion"])


def help_text(command: Command, arguments: Sequence[str]) -> str:
    """Return the text of `--help`; `arguments` select the choices whose settings are listed."""
    lines = [f"usage: {command.usage}", "", command.purpose]
    if command.runs:
        from lab.settings.help import of_run  # commands without a run's settings need none of it

        lines += of_run(command, arguments)
    else:
        lines += columns(command.fields.values())
    return "\n".join([*lines, "", "examples:", *(f"  {each}" for each in command.examples)])


def read(command: Command, arguments: Sequence[str]) -> CommandLine:
    """Sort the words of a command line.

    Raises:
        ConfigError: a flag that the command does not accept, or a wrong number of words.
    """
    words, settings, flags = list[str](), list[str](), dict[str, str]()
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("-"):
            flag, value = _flag(command, argument, rest)
            flags[flag] = value
            settings += [value] if flag == "--config-dir" else []
        elif command.word and not SETTING.match(argument):
            words.append(argument)
        else:
            settings.append(argument)
    text = shlex.join(["python", "-m", command.name, *arguments])
    line = CommandLine(text, words, settings, flags)
    if line.asks:
        return line
    if not (len(words) == bool(command.word) or (command.several and words)):
        asked = f"{' '.join(words)}: expected" if words else "needs"
        number = "at least one" if command.several else "one"
        raise ConfigError(f"{asked} {number} {command.word}; --help has examples")
    if lonely := [flag for flag in OF_CFG if flag in flags and "--cfg" not in flags]:
        raise ConfigError(f"{lonely[0]}: needs --cfg job")
    if redacted_words(settings) != settings:
        from lab.settings.overrides import handed_over

        line = dataclasses.replace(line, settings=handed_over(settings))
    if command.runs:
        from lab.settings.config import check_words

        check_words(line.settings, command.fields)
    return line


def show(configs: Iterable[DictConfig], flags: Mapping[str, str]) -> int:
    """Print settings as YAML documents, for `--cfg job`, and return exit code 0.

    Args: flags: of the command line, of which `--resolve` and `--package` say what is printed.

    Raises:
        ConfigError: the package is no part of the settings.
    """
    from omegaconf import OmegaConf

    package, resolve, texts = flags.get("--package"), "--resolve" in flags, list[str]()
    for config in configs:
        part = OmegaConf.select(config, package) if package else config
        if not OmegaConf.is_config(part):
            raise ConfigError(f"--package {package}: must be a group of settings, such as optim")
        if resolve:
            OmegaConf.resolve(config)
        header = f"# @package {package}\n" if package else ""
        texts.append(header + OmegaConf.to_yaml(part))
    print("---\n".join(texts), end="")
    return 0


def report_error(command: str, error: Exception) -> None:
    """Print an error as one line on stderr; before it, the traceback of the user's own code."""
    found, line = user_traceback(error), str(error)
    if lacks_memory(error):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        line = f"{rank}{type(error).__name__}: {one_line(error)}"
    elif found:
        print(without_secrets(found.traceback), file=sys.stderr)
        if found.error is error:
            line = f"{type(error).__name__}: {one_line(error)} ({found.place})"
    if len(line) > LONGEST_ERROR:  # a file's value is in it, and after it the reason
        line = f"{line[: LONGEST_ERROR // 2]}…{line[-LONGEST_ERROR // 2 :]}"
    say_error(f"{command}: error: {line}")


def say_error(line: str) -> None:
    """Print the one line of an error, and hand it to torchrun, whose own report ends with it."""
    line = escape_controls(without_secrets(line)).replace("\n", "\\n")
    print(line, file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": said}), encoding="utf-8")


def _flag(command: Command, argument: str, rest: Iterator[str]) -> tuple[str, str]:
    """Return a flag's long name and its value."""
    name, _, value = argument.partition("=")
    flag = SHORT.get(name, name)
    known = {words[0]: words[1:] for words in map(str.split, command.flag_names)}
    if flag in known and not known[flag]:
        return flag, ""
    value = value or next(rest, "")
    if flag in known:
        return flag, _value(name, flag, value)
    if "=" not in argument and ("=" in value or value.startswith("-")):  # the next word
        value = ""
    if (key := name.lstrip("-").replace("-", "_")) in command.fields:
        raise ConfigError(f"{f'{name} {value}'.rstrip()}: use {key}={value or '...'}")
    if command.runs and (setting := _as_setting(name, value)):
        raise ConfigError(f"{name}: {setting}")
    flags = ", ".join(command.flag_names)
    raise ConfigError(f"{name}: no such flag; the flags are {flags}; write settings as key=value")


def _value(name: str, flag: str, value: str) -> str:
    """Return the value of a flag: of --config-dir the setting that does the same."""
    if flag == "--cfg" and value != "job":
        raise ConfigError(f"{name} {value}: use --cfg job")
    if flag != "--config-dir":
        return value
    if not is_folder(value):
        raise ConfigError(f"{name} {value}: there is no such folder")
    from lab.settings.overrides import quoted

    return f"config_dir={quoted(str(Path(value).absolute()))}"


def _as_setting(name: str, value: str) -> str | None:
    """Return how to write an option of other programs, such as --lr 0.1; None: it is unknown."""
    from lab.settings.config import FIELDS  # composing takes time to load, and only errors need it

    if name in OF_HYDRA:
        return OF_HYDRA[name].format(value or "NAME")
    key = name.lstrip("-").replace("-", "_")
    if key in FIELDS or key.partition(".")[0] in FIELDS:
        return f"write {key}={value or '...'}"
    return hint(key, value)
