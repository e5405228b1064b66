"""How far a sweep is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a sweep is whose page is shown while it runs.

    Attributes:
        num_ended: cells that need not run any more.
        num_drawn: those that the newest page shows.
        eta: the time that the rest will take; empty: unknown.
    """

    num_ended: int
    num_cells: int
    num_drawn: int
    eta: str
    stopping: bool

    def as_json(self) -> dict[str, Any]:
        """Return what the page asks for again and again."""
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        left = f", about {self.eta} left" if self.eta and self.num_ended < self.num_cells else ""
        state = "; stopping" if self.stopping else ""
        return f"{self.num_ended} of {self.num_cells} cells have ended{left}{state}"
