"""Composed settings that all tests share: Hydra takes a tenth of a second for each of thousands."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.settings import composition
from lab.settings.files import conf_dir

FOLDER = Path(__file__).resolve().parents[2] / ".pytest_cache/compositions"


def share() -> None:
    """Keep what is composed of the lab's own choices in FOLDER, for other processes and runs.

    Another version of the choices, of the code that composes them or of Hydra has none of it.
    """
    compose, conf = composition._composed.__wrapped__, conf_dir()
    kept = FOLDER / _version(conf)
    for other in set(FOLDER.glob("*")) - {kept}:
        shutil.rmtree(other, ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)

    @functools.lru_cache(maxsize=128)
    def shared(lines: tuple[str, ...], config_dir: str | None, files: Any, changed: Any) -> Any:
        lasting = "/" not in "".join(lines)  # no folder that the next run has under another name
        if config_dir or files or not lasting or composition.conf_dir() != conf:
            return compose(lines, config_dir, files, changed)
        path = kept / hashlib.sha256(repr(lines).encode()).hexdigest()
        with suppress(FileNotFoundError):
            return pickle.loads(path.read_bytes())
        made = compose(lines, config_dir, files, changed)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(made))
        own.replace(path)
        return made

    composition._composed = shared


def _version(conf: Path) -> str:
    digest = hashlib.sha256("".join(map(version, ("hydra-core", "omegaconf"))).encode())
    for path in sorted([*conf.rglob("*.yaml"), *Path(composition.__file__).parent.glob("*.py")]):
        digest.update(path.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
