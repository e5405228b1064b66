"""The lab in a program of one's own; `python -m lab` lists its commands.

Nothing is imported before it is used, so that commands answer their help at once.
"""

from __future__ import annotations

import sys

# `python -m lab.plot` puts the current folder first on Python's path: a numpy.py in it, perhaps a
# stranger's, would run in place of the library. Programs of one's own keep their path.
_words = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if sys.argv[:1] == ["-m"] else []
_is_module = bool(_words) and _words[0].partition(".")[0] == "lab"
if _is_module and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

import os  # noqa: E402
import signal  # noqa: E402


def end_at_interrupt(*_: object) -> None:
    """Answer Ctrl-C while the modules of a command load; from then on, `answer` does."""
    if "RANK" not in os.environ:  # each rank would print it
        os.write(2, b"\nstopped\n")
    os._exit(130)


_is_command = _is_module or "".join(sys.argv[:1]).rpartition("/")[2] == "lab"
if _is_command and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_interrupt)

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from lab.analysis.results import load as load
    from lab.certificate.examination import CertificateError as CertificateError
    from lab.loop.attach import attach as attach
    from lab.loop.attach import ddp_comm_hook as ddp_comm_hook
    from lab.loop.attach import fsdp_reduce_scatter as fsdp_reduce_scatter
    from lab.loop.attach import grad_sync as grad_sync
    from lab.loop.configured import run as run
    from lab.loop.run import Run as Run
    from lab.settings.errors import ConfigError as ConfigError

    __version__: str

_HOME = {
    "attach": "lab.loop.attach",
    "ddp_comm_hook": "lab.loop.attach",
    "fsdp_reduce_scatter": "lab.loop.attach",
    "grad_sync": "lab.loop.attach",
    "Run": "lab.loop.run",
    "run": "lab.loop.configured",
    "load": "lab.analysis.results",
    "CertificateError": "lab.certificate.examination",
    "ConfigError": "lab.settings.errors",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """Return the version that pyproject.toml holds: in a checkout itself, else in the wheel's."""
    import tomllib
    from importlib import metadata
    from pathlib import Path

    checkout = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if checkout.is_file():
        return tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["version"]
    return metadata.version("scaling-lab")
