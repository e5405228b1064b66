"""Commands as users type them: in this process, or in others that have already imported torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tests.support import HANG_S
from tests.support.ranks import FORKS


@dataclass
class Finished:
    """The result of a finished command."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """Return the error lines that the lab, and not torchrun, has written."""
        lines = [line for line in self.err.splitlines() if "  traceback : " not in line]
        return [line[line.index("lab.") :] for line in lines if ": error: " in line]


def said(main: Callable[[list[str]], int], *words: str, code: int = 0) -> str:
    """Return what a command prints in this process, where it must end with `code`."""
    with redirect_stdout(StringIO()) as out:
        assert main([*words]) == code
    return out.getvalue()


def refusal(main: Callable[[list[str]], int], *words: str) -> str:
    """Return the one line with which a command refuses its words, without the command's name."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main([*words]) == 2
    *bars, line = err.getvalue().splitlines()
    assert all("%|" in bar or not bar for bar in bars), bars  # shown after a second of work
    name, _, message = line.partition(": error: ")
    assert (name, out.getvalue()) == (main.__module__.removesuffix(".__main__"), "")
    return message


def begun(
    environment: dict[str, str], folder: Path, *words: str, stderr: int = subprocess.STDOUT
) -> subprocess.Popen[str]:
    """Start `python -m WORDS` in a folder; what it prints can be read."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def run_module(
    module: str,
    arguments: tuple[str, ...],
    directory: Path,
    environment: dict[str, str],
    timeout_s: float = HANG_S,
) -> Finished:
    """Run `python -m MODULE ARGUMENTS` in `directory`.

    The process is a fork of one that has imported torch (tests/support/preload.py), which saves
    two seconds each time. Commands that it starts itself are forks too, where `environment` is that
    of tests/support/rank_server.py.
    """
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        arguments_of = (module, arguments, str(directory), environment, (str(out), str(err)))
        process = FORKS.Process(target=_be_command, args=arguments_of)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{module} {arguments} still runs after {timeout_s:g} s")
        return Finished(process.exitcode, out.read_text(), err.read_text())


def _be_command(
    module: str,
    arguments: tuple[str, ...],
    directory: str,
    environment: dict[str, str],
    outputs: tuple[str, str],
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    run_as_main([module, *arguments], directory, environment)


def divert(log: Path) -> None:
    """Send what other processes print to a file, and what this one prints to the terminal alone."""
    screen: Any = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr = screen
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def run_as_main(line: list[str], directory: str, environment: dict[str, str]) -> None:
    """Be `python -m MODULE ARGUMENTS` from here on, in `directory` and `environment`."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which torch reads when imported
    # What the lab starts with this interpreter, as a sweep its launchers, is forked too.
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)
    sys.argv = line
    runpy.run_module(line[0], run_name="__main__", alter_sys=True)
