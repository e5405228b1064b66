"""Exchanges that are made of others: which, and for which share of a run."""

from __future__ import annotations

from lab.simulate.load import Settings, class_of

PHASES = ("first", "second", "third")
BY_ITSELF = ("Auto", "Schedule")  # decide by the clock, or by the step, which of others to take


def ways_of(exchange: Settings) -> dict[str, Settings]:
    """Return the exchanges that one is made of, by name; none if it is made of no others."""
    if class_of(exchange) == "Auto":
        return {name: exchange["candidates"][name] for name in exchange["among"]}
    if class_of(exchange) == "Schedule":
        return {name: exchange[name] for name in PHASES if exchange[name]}
    return {}


def phases_of(exchange: Settings) -> list[tuple[float, Settings]]:
    """List the exchanges of a run, each with its share of the steps.

    Raises:
        ValueError: `exchange` is a schedule in steps of a run of unknown length.
    """
    if class_of(exchange) != "Schedule":
        return [(1.0, exchange)]
    until = exchange["until"]
    if not all(0 < end < 1 for end in until):
        raise ValueError(
            f"exchange.until={list(until)}: a prediction needs the run's length: set steps, or "
            "shares of the run"
        )
    starts, ends = [0, *until], [*until, 1]
    shares = [end - start for start, end in zip(starts, ends, strict=True)]
    return list(zip(shares, ways_of(exchange).values(), strict=True))


def longest_phase(exchange: Settings) -> Settings:
    """Return the exchange of most steps, of which a record's median step is; see `phases_of`."""
    return max(phases_of(exchange), key=lambda phase: phase[0])[1]


def in_shares(exchange: Settings, num_steps: int | None) -> Settings:
    """Return an exchange whose phases, if it has some in steps, are shares of `num_steps`."""
    if class_of(exchange) != "Schedule" or num_steps is None:
        return exchange
    ends = [end if end < 1 else end / num_steps for end in exchange["until"]]
    lasting = ways_of(exchange)
    # Phases that would begin after the run's last step are left out.
    kept = 1 + sum(end < 1 for end in ends)
    unused = dict.fromkeys(list(lasting)[kept:])
    return {**exchange, **unused, "until": ends[: kept - 1]}
