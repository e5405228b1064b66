"""The order in which parts of gradients leave, so that those needed first arrive first.

P3 (Jayarajan et al., MLSys 2019, section 4) and ByteScheduler (Peng et al., SOSP 2019, section 4)
decide while they run: whenever the link is free, the most urgent gradient that is ready leaves. A
collective needs all ranks to make the same choice, so here one rank's times decide in advance.

Nothing here imports torch: the simulator plans as the trainer does.
"""

from __future__ import annotations

from collections.abc import Sequence


def send_order(
    ready_s: Sequence[float], send_s: Sequence[float], needed: Sequence[int]
) -> list[int]:
    """Return the places of all parts in the order in which they begin to travel, one at a time.

    Args:
        ready_s: when each part's gradient is there, in seconds from any moment.
        send_s: seconds that it travels.
        needed: its rank in the order in which the next forward needs them; equal ones leave in
            the order given.
    """
    waiting = sorted(range(len(ready_s)), key=lambda part: (needed[part], part))
    order: list[int] = []
    now_s = min(ready_s, default=0.0)
    while waiting:
        part = next((p for p in waiting if ready_s[p] <= now_s), None)
        if part is None:
            now_s = min(ready_s[p] for p in waiting)
            continue
        waiting.remove(part)
        order.append(part)
        now_s += send_s[part]
    return order
