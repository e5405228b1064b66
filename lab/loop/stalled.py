"""An exchange that other ranks have left: which ones, and after how many steps."""

from __future__ import annotations

from lab.distributed.world import World
from lab.loop.check import Checked
from lab.sync.gradsync import GradSync
from lab.training.run import LOST_PEER, TIMEOUT

GRACE_S = 5.0  # for the others that wait to notice it too


def refuse_stalled(error: RuntimeError, sync: Checked, world: World) -> None:
    """Name the ranks that others wait for, if `error` is of a wait in Gloo.

    Ranks that wait in the same step meet in the store. As each step needs all ranks, those that do
    not come have taken as many steps as this one.

    Raises:
        RuntimeError: says who has stopped, and after how many steps.
    """
    text = str(error).lower()
    is_late = any(word in text for word in TIMEOUT)
    if "gloo" not in text or not (is_late or any(word in text for word in LOST_PEER)):
        return
    try:
        absent = world.meet(f"stalled/{sync.step}", {}, GRACE_S)
    except RuntimeError:  # the store has ended with its rank
        absent = "another rank"
    if not absent:
        return
    limit = sync.settings["exchange_timeout_s"]
    why = (
        f"is only slow, raise exchange_timeout_s={limit:g}" if is_late else "failed, see its error"
    )
    cure = "call finish() without backward" if isinstance(sync, GradSync) else "use ddp.join()"
    raise RuntimeError(
        f"{absent} stopped after {sync.step} steps, but rank {world.rank} goes on; all ranks must "
        "take equally many: give each as many batches (drop_last=True), or where they have run out "
        f"{cure}; if {absent} {why}"
    ) from None
