"""Read and write files: one line says what is wrong with a file, and none is left half written.

Anyone may have written the JSON and YAML that is read. Nothing in a file runs, and none takes the
machine down: what is no regular file, too large or nested too deeply, numbers that no machine
holds, and anchors that stand for too much, are refused.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import math
import os
import re
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lab.settings.errors import ConfigError, one_line

if TYPE_CHECKING:
    from yaml import Node

LARGEST_BYTES = 256 * 2**20
LARGEST_TRACE_BYTES = 2**29
GZIP = b"\x1f\x8b"
# By the ending of a trace that is no JSON, how to get one with the same events.
OTHER_TRACES = {
    ".pb": "use the .trace.json.gz that XLA writes next to it",
    ".pftrace": "record with rocprofv3 --sys-trace --output-format json",
    ".db": "record with rocprofv3 --sys-trace --output-format json",
    ".nsys-rep": "record with torch.profiler and export_chrome_trace",
}
LARGEST_YAML_BYTES = 8 * 2**20  # PyYAML takes seconds for a MiB
LARGEST_YAML = 100_000  # values, as many as anchors make of them
# 1:30 is 90 in YAML 1.1, and 0777 is 511.
SURPRISE = re.compile(r":[ \t]+([-+]?(?:0\d+|\d+(?::[0-5]?\d)+))[ \t]*(?:#.*)?$", re.MULTILINE)
LARGEST_WHOLE = 2**63  # what tables hold is smaller


class DamagedFile(ValueError):
    """A file holds something else than it should; one line that names it."""


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """Read a regular file whole. A pipe would never end, and a file with holes fills the memory.

    Raises:
        DamagedFile: it is no regular file, or is larger than `largest` bytes.
        OSError: it cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(21, "Is a directory", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile(f"{path}: not a regular file")
        content = file.read(largest + 1) if found.st_size <= largest else b""
        if max(found.st_size, len(content)) > largest:
            raise DamagedFile(f"{path}: has {found.st_size:,} bytes; the limit is {largest:,}")
        return content


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        DamagedFile: it holds something else, or see `read_bytes`.
        OSError: it cannot be read.
    """
    try:
        return json.loads(read_bytes(path).decode(), parse_int=_whole)
    except DamagedFile:
        raise
    except RecursionError:
        raise DamagedFile(f"{path}: not JSON: nested too deeply") from None
    except ValueError as error:
        raise DamagedFile(f"{path}: not JSON: {error}") from None


def read_trace(key: str, path: Path) -> Any:
    """Read a trace: JSON or gzipped JSON, whose fractions are Decimals.

    Floats of microseconds since 1970 have steps of a quarter of one.

    Args:
        key: the setting that names it.

    Raises:
        ConfigError: it cannot be read, or is no JSON.
    """
    where = f"{key}={path}"
    try:
        content = read_bytes(path, LARGEST_TRACE_BYTES)
        if content.startswith(GZIP):
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(LARGEST_TRACE_BYTES + 1)
            if len(content) > LARGEST_TRACE_BYTES:  # a few bytes that stand for gigabytes
                raise ValueError(f"it unzips to more than {LARGEST_TRACE_BYTES / 2**20:.0f} MiB")
        return json.loads(content, parse_float=Decimal)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError) as error:  # cut short, damaged, or not JSON
        remedy = OTHER_TRACES.get(path.suffix)
        reason = f"this format is not supported; {remedy}" if remedy else error
        raise ConfigError(f"{where}: not a trace: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not a trace: nested too deeply") from None


def events_of(key: str, path: Path, trace: Any) -> list[dict[str, Any]]:
    """Return the events of a trace of Chrome's format. ConfigError: it has none."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ConfigError(f"{key}={path}: not a trace: it has no list of traceEvents")
    return events


def number(value: object) -> float | None:
    """Return an event's time, size or count; None: it is not a number from 0 to 2^63."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return found if 0 <= found < LARGEST_WHOLE else None


def read_yaml(path: Path) -> Any:
    """Read a file of YAML; interpolations stay as they are written.

    Raises:
        DamagedFile, OSError: as read_json.
    """
    import yaml  # imported here, as help reads no YAML, and OmegaConf takes a tenth of a second
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    content = read_bytes(path, LARGEST_YAML_BYTES)
    try:
        text = content.decode()
        if "&" in text and _size(yaml.compose(text, yaml.SafeLoader), {}) > LARGEST_YAML:
            raise ValueError(f"its anchors expand to more than {LARGEST_YAML} values")
        for found in SURPRISE.finditer(text):
            if isinstance(value := yaml.safe_load(found[1]), int):
                raise ValueError(f"{found[1]} would be read as {value}; write a plain number")
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        for _, value in nested(content):
            if isinstance(value, int):
                _whole(str(int(value)))  # True is an int too
        return content
    except RecursionError:
        raise DamagedFile(f"{path}: not YAML: nested too deeply") from None
    # OSError: OmegaConf's word on numbers that stand alone.
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}: {why}" if mark and why else one_line(error)
        raise DamagedFile(f"{path}: not YAML: {where}") from None


def escaped(value: Any) -> Any:
    """Escape what OmegaConf would take for an interpolation: in data it is text."""

    def escape(_: str, each: Any) -> Any:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", each) if isinstance(each, str) else each

    return mapped(value, escape)


def nested(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value of JSON or YAML and all values in it, each with its key; "" in a list."""
    yield key, value
    if isinstance(value, dict):
        for name, each in value.items():
            yield from nested(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from nested(each)


def mapped(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Change each value, at any depth, that holds no others, by its key; "" in a list."""
    if isinstance(value, Mapping):
        return {name: mapped(each, change, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(each, change) for each in value]
    return change(key, value)


def _whole(digits: str) -> int:
    length = len(digits.lstrip("-"))
    if length > len(str(LARGEST_WHOLE)) or abs(int(digits)) > LARGEST_WHOLE:
        raise ValueError(f"{digits[:20]}…: a whole number of {length} digits is too large")
    return int(digits)


def _size(node: Node | None, known: dict[int, float]) -> float:
    """Count the values that a node stands for, each alias as all of its anchor."""
    from yaml import CollectionNode, MappingNode

    if not isinstance(node, CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # if it holds itself
        parts = node.value
        if isinstance(node, MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    """Write `value` as readable JSON. A non-finite number becomes null: JSON has none."""
    write_text(path, json.dumps(mapped(value, _finite), indent=2, allow_nan=False) + "\n")


def _finite(_: str, value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_lock(path: Path) -> IO[str]:
    """Open a file to lock, which changes nothing in it; a pipe there would not hold it up.

    Raises:
        OSError: it is a link, perhaps to what its owner keeps, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w")


def lock(file: IO[str], wait_s: float) -> bool:
    """Lock an open file; return whether no other process has held its lock for `wait_s` seconds.

    Where the file system has no locks, nothing is locked, and the answer is true.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
            continue
        except OSError:  # no locks here
            pass
        return True


def from_here(path: Path) -> Path:
    """Return a path as a user would type it: from the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, all of it or nothing; OSError: the directory cannot be written."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, sync the result to disk, then rename it.

    What earlier writers of the same file left as they were killed is removed.

    Raises:
        OSError: the file cannot be written; it has the file's name, which Python's may not have.
    """
    host = socket.gethostname().replace(".", "-")  # several may share the directory
    prefix = f".{path.name}.{host}-"
    for left in _of_killed(path.parent, prefix):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f"{prefix}{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise (OSError(error.errno, error.strerror, str(path)) if error.errno else error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _of_killed(folder: Path, prefix: str) -> Iterator[Path]:
    """Find temporary files of this host's processes that are no more."""
    for path in folder.iterdir():
        pid = path.name.removeprefix(prefix)
        if pid != path.name and pid.isdecimal() and not _is_alive(int(pid)):
            yield path


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True
