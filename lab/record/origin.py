"""Where the steps of a run come from, if others made some of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SHORT = 10  # digits of a commit in words


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that were made alike.

    Attributes:
        first_step, end_step: number of the first one, and of the one after the last.
        cell: "study/cell", the run that made them.
        world_size: number of ranks.
        batch_size: global, in samples.
        commit: of the lab, and whether its files were changed; null: not known.
        settings: by dotted key, those that were others than the record's own; null: there was none.
    """

    first_step: int
    end_step: int
    cell: str
    world_size: int
    batch_size: int
    commit: str | None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def steps(self) -> str:
        """The numbers of its steps: "0-9"."""
        return f"{self.first_step}-{self.end_step - 1}"

    @property
    def made_by(self) -> str:
        """The run, ranks, batch, commit, and other settings, in words."""
        others = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        commit, _, changed = (self.commit or "unknown").partition(" ")
        return (
            f"{self.cell} on {self.world_size} rank{'s' if self.world_size > 1 else ''}, "
            f"batch_size={self.batch_size}, commit {commit[:SHORT]}"
            + (f" {changed}" if changed else "")
            + (f"; {others}" if others else "")
        )


def joined(earlier: list[dict[str, Any]], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Add steps to those made before, in one stretch with the last ones if these were made alike.

    Args:
        earlier, now: values of a Stretch, with all settings.
    """
    own = {key: value for key, value in now.items() if key != "first_step"}
    last = earlier[-1] if earlier else {}
    if {**last, "end_step": now["end_step"]} == {**own, "first_step": last.get("first_step")}:
        return [*earlier[:-1], {**now, "first_step": last["first_step"]}]
    return [*earlier, now] if now["end_step"] > now["first_step"] else [*earlier]


def stretches(made: list[dict[str, Any]]) -> list[Stretch]:
    """Return what a record holds of the steps made: none if all were made alike."""
    if len(made) < 2:
        return []
    own = made[-1]["settings"]
    return [replace(Stretch(**one), settings=_unlike(one["settings"], own)) for one in made]


def _unlike(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    keys = dict.fromkeys([*then, *now])
    return {key: then.get(key) for key in keys if then.get(key) != now.get(key)}
