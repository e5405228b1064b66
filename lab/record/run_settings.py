"""The settings of a run, as its directory holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.settings.reading import DamagedFile, read_yaml

SETTINGS = "config.yaml"


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the composed settings of the run in a folder.

    They may be a stranger's: nothing that they name is ever called.

    Raises:
        DamagedFile: the file holds no settings.
        OSError: it cannot be read.
    """
    path = folder / SETTINGS
    content: dict[object, Any] = read_yaml(path)
    if not isinstance(content, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DamagedFile(f"{path}: must hold keys and values")
    return {str(key): value for key, value in content.items()}
