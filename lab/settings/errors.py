"""ConfigError: an error that the user can correct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A setting is wrong. The one-line message names the key, the value and what is allowed."""


class SharedError(ConfigError):
    """A wrong setting that all ranks know, as they have compared theirs: one of a host says it."""


class Failed(RuntimeError):
    """A command could not do its work, though its settings are right. The message is one line."""


class OutputLost(OSError):
    """Standard output cannot be written, as its disk is full."""


@contextmanager
def as_config_error(prefix: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Turn a ValueError, or an error of further kinds, of code that knows no settings into one."""
    try:
        yield
    except (ConfigError, BrokenPipeError, OutputLost):
        raise
    except (ValueError, *kinds) as error:
        raise ConfigError(f"{prefix}{error}") from None


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory could not be allocated, on a CPU or a GPU; torch is not imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    texts = [each for each in error.args if isinstance(each, str)]
    lacks = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(each in t for t in texts for each in lacks)


def one_line(error: object) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
