"""One exchange after another over a run: exactly first, compressed later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.distributed.comm import Comm
from lab.exchange.base import Exchange
from lab.exchange.bucket import GradBucket
from lab.exchange.composite import Composite
from lab.exchange.cost import Costs


class Schedule(Composite):
    """Two or three exchanges, each for a part of the run.

    At a switch nothing is lost: the residuals that the last exchange has kept join the gradients of
    the next step, so delivered + residuals = true gradients at any time.

    Args:
        first, second, third: the exchanges in their order; `third` may be None.
        until: where all but the last end: shares of the run between 0 and 1, or numbers of steps.
            A share of a run that is resumed with another length is one of the new length.

    Raises:
        ValueError: `until` does not fit the exchanges, or one of these does not average.
    """

    def __init__(
        self,
        first: Exchange,
        second: Exchange,
        third: Exchange | None,
        until: Sequence[float],
    ) -> None:
        named = {"first": first, "second": second, "third": third}
        phases = {name: exchange for name, exchange in named.items() if exchange is not None}
        super().__init__(phases, "exchange.")
        check_until(until, len(phases))
        self.until = list(until)

    def add_cost(self, costs: Costs) -> bool:
        """Add each phase's stages for its share of the run."""
        if not all(0 < end < 1 for end in self.until):
            raise ValueError(
                f"exchange.until={self.until}: a prediction needs the run's length: set steps, or "
                "shares of the run"
            )
        spans = zip([0, *self.until], [*self.until, 1], strict=True)
        for exchange, (start, end) in zip(self.parts.values(), spans, strict=True):
            costs.add(exchange, share=end - start)
        return True

    def choose(self, bucket: GradBucket, comm: Comm) -> str:
        """Return the phase of the bucket's step."""
        return list(self.parts)[sum(end <= bucket.step for end in self._ends())]

    def _ends(self) -> list[int]:
        """Return the step that follows each phase but the last.

        Raises:
            ValueError: `until` has shares of a run of unknown length.
        """
        if all(isinstance(end, int) for end in self.until):
            return [int(end) for end in self.until]
        if self.total_steps is None:
            raise ValueError(
                f"exchange.until={self.until}: a loop of your own has no length; must be steps"
            )
        return [round(end * self.total_steps) for end in self.until]

    def choices(self) -> list[dict[str, Any]]:
        """Return for each phase its exchange and steps, and then what the exchanges chose."""
        ends = self._ends()
        spans = zip([0, *ends], [*ends, None], strict=True)
        phases = [
            {"chosen": type(exchange).__name__, "first_step": start, "end_step": end}
            for exchange, (start, end) in zip(self.parts.values(), spans, strict=True)
        ]
        return phases + [choice for e in self.parts.values() for choice in e.choices()]


def check_until(until: Any, num_phases: int) -> None:
    """Refuse ends of phases that are not one fewer than the phases, in order, and of one kind.

    Raises:
        ValueError: they are not.
    """
    ends = list(until) if isinstance(until, Sequence) and not isinstance(until, str) else []
    steps = all(type(end) is int and end >= 1 for end in ends)
    shares = all(type(end) is float and 0 < end < 1 for end in ends)
    ordered = (steps or shares) and sorted(set(ends)) == ends
    if len(ends) != num_phases - 1 or not ordered:
        raise ValueError(
            f"exchange.until={until}: must be {num_phases - 1} rising numbers, for {num_phases} "
            "exchanges: shares of the run between 0 and 1, or whole steps of at least 1"
        )
