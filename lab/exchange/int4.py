"""Four bits per value, in two stages, with error feedback for both."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.codec import int4
from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.error_feedback import ErrorFeedback


class Int4(ErrorFeedback, Staged):
    """Two-stage averaging as Int8's, in half the bits, with error feedback (Seide et al. 2014).

    Sixteen levels are few, so the rounding errors of both stages are carried over. Rank r, which
    sums the r-th part of the blocks, adds what the second stage leaves out of that part to its own
    residual: delivered sums + residuals = true sums, and residuals do not depend on the buckets.

    A rank sends (N-1)/N bytes per value, plus 8 per block at each stage. A block that is non-finite
    on one rank becomes non-finite on all.

    Args:
        block_size: values that share a smallest and a largest one; they may belong to several
            parameters.
        error_feedback: False drops the rounding errors, to show what that costs.

    Raises:
        ValueError: `block_size` is not a positive multiple of 8, or `error_feedback` is not a bool.
    """

    def __init__(self, block_size: int = 128, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        if not isinstance(block_size, int) or block_size < 8 or block_size % 8:
            raise ValueError(f"exchange.block_size={block_size}: must be a multiple of 8 above 0")
        self.block_size = block_size

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        flat, size = bucket.flat, comm.size
        if not len(flat):
            return
        num_blocks = -(-len(flat) // self.block_size)
        part_blocks = -(-num_blocks // size)
        shape = (size, part_blocks, int4.HEADER_BYTES + self.block_size // 2)
        # Zeros, because the last parts may end in unused records.
        outgoing = torch.zeros(shape, dtype=torch.uint8, device=flat.device)
        if self.error_feedback:
            self.add_residual(bucket, comm)
        self._encode(flat, outgoing.flatten(0, 1))
        if self.error_feedback:
            self._keep(bucket)
        received = torch.empty_like(outgoing)
        yield comm.iall_to_all(received, outgoing)

        # The gradient has been encoded: its memory is free for this rank's part of the sum.
        start = min(comm.rank * part_blocks * self.block_size, len(flat))
        total = flat[start : start + part_blocks * self.block_size]
        int4.decode(received[0], total)
        other = torch.empty_like(total)
        for part in received[1:]:
            int4.decode(part, other)
            total += other
        reply = torch.zeros_like(outgoing[0])
        self._encode(total, reply)
        if self.error_feedback:
            self._add_to_kept(bucket, start, total)
        yield comm.iall_gather(received, reply)
        int4.decode(received.flatten(0, 1), flat)
        flat.div_(size)

    def _encode(self, values: Tensor, records: Tensor) -> None:
        """Encode `values`; with error feedback they become what the records leave out."""
        int4.encode(values, records)
        if self.error_feedback:
            sent = torch.empty_like(values)
            int4.decode(records, sent)
            values -= sent

    def _keep(self, bucket: GradBucket) -> None:
        """Take the bucket's values as the new residual."""
        for name, start, stop in bucket.spans():
            if name in self.residual:
                self.residual[name].copy_(bucket.flat[start:stop])
            else:
                self.residual[name] = bucket.flat[start:stop].clone()

    def _add_to_kept(self, bucket: GradBucket, offset: int, values: Tensor) -> None:
        """Add `values`, which lie in the bucket from `offset` on, to the residual."""
        end = offset + len(values)
        for name, start, stop in bucket.spans():
            first, last = max(start, offset), min(stop, end)
            if first < last:
                self.residual[name][first - start : last - start] += values[
                    first - offset : last - offset
                ]
