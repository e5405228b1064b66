"""Blame: find the user's own code in a traceback, to show it and not the lab's."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lab.settings.errors import ConfigError, one_line

LAB = Path(__file__).resolve().parents[1]
STANDARD_LIBRARY = [Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")]
PACKAGES = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Blame:
    """An error that the user's code raised, or a library that this code called.

    Attributes:
        error: the error itself, which may be the cause of the one that was caught.
        place: file, line and function of the user's innermost frame: "nets.py:12 in forward".
        traceback: Python's text, from the user's outermost frame on.
    """

    error: BaseException
    place: str
    traceback: str


def blame(error: BaseException) -> Blame | None:
    """Return what the user's code has to do with an error; None if nothing.

    The user's code is all that belongs neither to the lab nor to Python nor to an installed
    package. It is to blame if one of its frames lies within the innermost frame of the lab: a
    loss of the user's that fails is the user's bug, a wrong argument that the lab refuses is not.
    """
    for each in _with_causes(error):
        if isinstance(each, ConfigError):  # a message, made to be shown alone
            continue
        place = _place(each)
        if place:
            return Blame(each, place, _text(each))
    return None


def reason_of(error: Exception, target: object) -> Exception:
    """Return the error to raise when `target` could not be constructed.

    That is the user's own error; or a ConfigError if an argument was refused or nothing is found
    under that name; or else the error that the constructor raised.
    """
    found = blame(error)
    cause = error if isinstance(error, ValueError | TypeError) else error.__cause__
    if found and isinstance(found.error, Exception):
        return found.error
    if isinstance(cause, ValueError | TypeError):
        return ConfigError(one_line(cause))
    if isinstance(cause, Exception) and not isinstance(cause, ImportError | AttributeError):
        return cause
    *_, first = _with_causes(error)
    return ConfigError(f"_target_={target}: {one_line(first)}")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused it, and so on, as Python prints them."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _place(error: BaseException) -> str | None:
    """Name the user's innermost frame within the lab's innermost one; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{Path(error.filename).name}:{error.lineno}"
    inside = list[traceback.FrameSummary]()
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve().is_relative_to(LAB):
            inside.clear()
        elif is_users(frame.filename):
            inside.append(frame)
    if not inside:
        return None
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno} in {inside[-1].name}"


def _text(error: BaseException) -> str:
    """Return Python's traceback, without the frames outside of the user's first one."""
    first: TracebackType | None = error.__traceback__
    while first and not is_users(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return "".join(traceback.TracebackException(type(error), error, first).format()).rstrip()


def is_users(filename: str) -> bool:
    """Return whether a file is neither the lab's, nor Python's, nor an installed package's."""
    path = Path(filename)
    # Code that was made while running, Python's importer, and Cython of a package.
    if filename.startswith("<") or path.suffix in (".pyx", ".pxi"):
        return False
    others = any(path.resolve().is_relative_to(folder) for folder in (LAB, *STANDARD_LIBRARY))
    return not others and not PACKAGES & {*path.parts}
