"""Buckets of a run, its sync's choices, and the settings that changed nothing, for its record."""

from __future__ import annotations

from lab.exchange.compressed import left_exact
from lab.exchange.layout import trainable
from lab.record.schema import Bucket, Record
from lab.sync.base import Sync
from lab.sync.gradsync import GradSync
from lab.sync.pattern import idle
from lab.training.loop import Loop


def note_plan(trainer: Loop, record: Record) -> None:
    """Note buckets, the sync's choices and what did nothing, of a run whose steps are counted."""
    record.idle = _left_exact(trainer)
    # A loop of the user's own has its own accumulation, and DDP its own buckets.
    if not isinstance(trainer.sync, Sync) or not hasattr(trainer.config, "accumulate"):
        return
    record.buckets = _buckets(trainer)
    record.choices = [*record.choices, *trainer.sync.choices()]
    record.idle += trainer.sync.idle() + idle(
        trainer.sync.pattern,
        strategy=record.strategy,
        world_size=record.world_size,
        num_steps=record.num_steps,
        bucket_mb=trainer.config.bucket_mb,
        accumulate=trainer.config.accumulate,
        bucket_bytes=[bucket.bytes for bucket in record.buckets or ()],
    )


def _left_exact(trainer: Loop) -> list[str]:
    sync = trainer.sync
    by_library = isinstance(sync, Sync) and not sync.pattern.takes_any_exchange
    if trainer.world.size == 1 or by_library:
        return []
    shapes = {name: p.shape for name, p in trainable(trainer.model).items()}
    return left_exact(sync.exchange, shapes)


def _buckets(trainer: Loop) -> list[Bucket] | None:
    if not isinstance(trainer.sync, GradSync):
        return None
    return [Bucket(bucket.nbytes, " ".join(bucket.shapes)) for bucket in trainer.sync.buckets]
