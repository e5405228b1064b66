"""Save figures: the one place that calls matplotlib's savefig."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lab.draw.style import RC

DPI = 150
# Without a date in it, a file depends on its data alone.
METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save(draw: Callable[[], Figure], *paths: Path) -> None:
    """Call `draw` in the lab's style, and write the figure to each of `paths`.

    Args:
        draw: is called here because matplotlib takes some of the style when artists are made, and
            some when they are rendered.
        paths: their suffixes say in which format.

    Raises:
        OSError: a file cannot be written.
    """
    with matplotlib.rc_context(RC):
        figure = draw()
        for path in paths:
            figure.savefig(path, dpi=DPI, bbox_inches="tight", metadata=METADATA.get(path.suffix))
