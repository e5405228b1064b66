"""Views of benchmarks that are not one file yet; lab.benchmarks.present asks for them here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

VIEWS = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}


def view_of(bench: str) -> ModuleType | None:
    """Return the view of a benchmark, if it has one."""
    return importlib.import_module(f"lab.benchmarks.views.{bench}") if bench in VIEWS else None


@dataclass(frozen=True)
class Figure:
    """A view's figure, which is written as a chart is."""

    view: Any
    result: dict[str, Any]

    def write(self, stem: Path, formats: Sequence[str]) -> list[Path]:
        """Draw the figure to files."""
        from lab.draw.save import save  # imports matplotlib

        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
        save(lambda: self.view.figure(self.result), *paths)
        return paths


def table(result: dict[str, Any]) -> str:
    """Align a result in columns; see lab.benchmarks.present."""
    from lab.benchmarks.present import text_of

    return text_of(result)
