"""Keep what libraries print from C."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO


@contextmanager
def printed(descriptor: int) -> Iterator[StringIO]:
    """Send what the process prints meanwhile to a buffer, which is filled when the context ends.

    Args:
        descriptor: 1, standard output, or 2, the error output.
    """
    text = StringIO()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield text
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            text.write(file.read())
