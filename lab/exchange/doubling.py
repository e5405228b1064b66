"""Steps at intervals that double."""

from __future__ import annotations

from lab.exchange.direction import require_integer


class Doubling:
    """The steps in which 0/1 Adam updates its variance (Lu et al. 2022, section 6.1).

    `each` of them follow each other at once, `each` at every second step, `each` at every fourth,
    and so on up to every `longest`-th; then there are none any more. Steps count from 1.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, each: int, longest: int) -> None:
        require_integer("updates_per_interval", each, 1)
        require_integer("longest_interval", longest, 1)
        if longest & (longest - 1):
            raise ValueError(f"exchange.longest_interval={longest}: must be a power of two")
        self.each = each
        self.last = each * (2 * longest - 1)  # the last step that is due

    def interval(self, step: int) -> int:
        """Return the interval at which steps are due at `step`."""
        return 1 << (((min(step, self.last) - 1) // self.each + 1).bit_length() - 1)

    def is_due(self, step: int) -> bool:
        return step <= self.last and self._place(step) % self.interval(step) == 0

    def is_first(self, step: int) -> bool:
        """Return whether an interval of more than one step begins with `step`, or none is due."""
        begins = self._place(step) == 1 and self.interval(step) > 1
        return step == self.last + 1 or (step <= self.last and begins)

    def num_due(self, step: int) -> int:
        """Count the steps up to `step` that are due."""
        step = min(step, self.last)
        interval = self.interval(step)
        doublings = interval.bit_length() - 1
        return self.each * doublings + self._place(step) // interval

    def _place(self, step: int) -> int:
        """Return which step of its interval's steps `step` is, from 1."""
        return step - self.each * (self.interval(step) - 1)
