"""The machine of a checklist, and the path of its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.settings.config import ConfigError

ASK = ("-m", "lab.checklist.hardware")


@dataclass(frozen=True)
class Machine:
    """The machine that a checklist is made for.

    Attributes:
        gpus: the name of each GPU.
        folder: folder for the commands' files.
        memory_gb_per_s: peak rate of the first GPU's memory; None: unknown.
    """

    gpus: tuple[str, ...]
    folder: Path
    memory_gb_per_s: float | None = None

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    def has(self, *kinds: str) -> bool:
        """Tell whether the first GPU is of one of these kinds."""
        return any(kind in self.gpus[0] for kind in kinds)


def query() -> dict[str, Any]:
    """Run lab.checklist.hardware and return its result.

    Raises:
        ConfigError: the query fails, or torch can use no GPU here.
    """
    done = subprocess.run([sys.executable, *ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"lab.checklist.hardware failed: {said[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["usable"]:
        raise ConfigError(
            f"no GPU that {found['torch']} can use; nvidia-smi lists {found['num_listed']}"
        )
    return found


def machine_of(found: dict[str, Any], page: str | None) -> tuple[Machine, Path]:
    """Return the machine and the path of its page, by default docs/results/gpu-NAME.md."""
    gpus = tuple(found["environment"]["gpus"])
    path = Path(page or f"docs/results/gpu-{_name(gpus)}.md")
    return Machine(gpus, path.with_suffix(""), found["memory_gb_per_s"]), path


def _name(gpus: tuple[str, ...]) -> str:
    """Name the GPUs: `h200`, or `8-h200` for eight."""
    words = re.sub(r"nvidia|geforce|tesla", "", gpus[0].lower())
    number = f"{len(gpus)}-" if len(gpus) > 1 else ""
    return number + re.sub(r"[^a-z0-9]+", "-", words).strip("-")
