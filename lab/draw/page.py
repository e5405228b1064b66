"""The page that figures are made for: a screen, or a column of a paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PANEL_IN = 1.5  # least width of a panel in a paper, with its labels
LETTER_IN = 0.055  # width of a letter of 7 pt
PAPER: dict[Any, Any] = {  # figures in papers are not scaled: 7 pt is legible there
    **{"font.size": 7, "axes.titlesize": 7, "axes.linewidth": 0.6},
    **{"xtick.major.size": 2.5, "ytick.major.size": 2.5, "lines.markersize": 4},
}


@dataclass(frozen=True)
class Page:
    """The size of figures, and what is around their axes.

    Attributes:
        width_in: exact width in inches, with the legend below the axes; None: as wide as the
            contents need, with the legend on the right.
        title: whether figures have a title and a footer; without, both belong in a caption.
    """

    width_in: float | None = None
    title: bool = True

    @property
    def style(self) -> dict[Any, Any]:
        """matplotlib's settings besides those of all figures."""
        return {} if self.width_in is None else PAPER

    def num_columns(self, most: int) -> int:
        """Return how many panels fit side by side, `most` on a screen."""
        return most if self.width_in is None else max(1, min(most, int(self.width_in / PANEL_IN)))


SCREEN = Page()
