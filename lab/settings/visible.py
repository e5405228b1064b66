"""Names of others on a terminal: what would control it, or turn text around, is shown instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any

# Halves of surrogate pairs too, which JSON may hold and no file can.
CONTROL = re.compile(
    r"[\ud800-\udfff\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    """Write characters that control a terminal, or the direction of text, as escapes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class VisibleOutput:
    """A stream of text that shows controls instead of passing them on."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def visible_output() -> Iterator[None]:
    """Show controls on standard output while the context lasts."""
    with redirect_stdout(VisibleOutput(sys.stdout)):  # pyright: ignore[reportArgumentType]
        yield
