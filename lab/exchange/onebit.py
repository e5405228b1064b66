"""1-bit SGD: two quantised stages, with error feedback at both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.codec.onebit import codec as onebit
from lab.codec.onebit.message import Matrix, Message, line_bytes
from lab.distributed.collective import Collective, Done
from lab.distributed.comm import Comm
from lab.exchange.base import Kept, Ranks, Relayed, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import quantised
from lab.exchange.error_feedback import ErrorFeedback, record_stream
from lab.exchange.two_stage import TwoStageSum
from lab.exchange.uncompressed import gaps, put_back

GRANULARITIES = ("column", "block")
FLOAT_BYTES = 4
SHARD_RESIDUAL = "stripe_residual"  # key in checkpoints; old ones must stay readable


class OneBit(Relayed, ErrorFeedback):
    """Two-stage 1-bit SGD with error feedback (Seide et al. 2014, section 3; CNTK's 1BitSGD).

    1. Reduce-scatter: each rank adds its residual to its gradient, quantises all rows, and keeps
       the quantisation error as its new residual. Row shard r of every rank goes to rank r.
    2. Rank r decodes the shards (its own too, as CNTK does), sums them in rank order, adds the
       shard residual, quantises the sum and keeps that error as the new shard residual. All-gather:
       the bits go to all ranks, and every rank decodes all shards and divides by N.

    So delivered sums + residuals = true sums at any time, and a rank sends n/4*(N-1)/N bytes, plus
    8 bytes of scales for each row. A non-finite gradient makes scales non-finite; they travel to
    all ranks, which mark the bucket. Besides the residuals (n values, and n/N for the shard) a rank
    needs memory for four messages of n/8 bytes or less: sums are taken in the bucket itself.

    Args:
        threshold: "zero" or "mean", see lab.codec.onebit.codec.
        granularity: the values that share two scales. "column": all weights into one output unit, a
            row of the [out, in*height*width] view, CNTK's column. "block": `block_size` values.
        block_size: values per block; the remainder of a tensor travels exactly.
        min_columns: with "column", tensors with shorter columns (biases, small kernels) travel
            exactly: their scales would outweigh the savings of bits.
        warmup_steps: steps in full precision before quantisation starts.
        error_feedback: False drops both quantisation errors, to show what that costs.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        threshold: str = "zero",
        granularity: str = "column",
        block_size: int = 1024,
        min_columns: int = 64,
        warmup_steps: int = 0,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(error_feedback)
        if threshold not in onebit.THRESHOLDS:
            allowed = ", ".join(onebit.THRESHOLDS)
            raise ValueError(f"exchange.threshold={threshold}: allowed are {allowed}")
        if granularity not in GRANULARITIES:
            allowed = ", ".join(GRANULARITIES)
            raise ValueError(f"exchange.granularity={granularity}: allowed are {allowed}")
        for key, value, least in (
            ("block_size", block_size, 8),
            ("min_columns", min_columns, 1),
            ("warmup_steps", warmup_steps, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"exchange.{key}={value}: must be an integer of at least {least}")
        self.threshold = threshold
        self.granularity = granularity
        self.block_size = block_size
        self.min_columns = min_columns
        self.warmup_steps = warmup_steps
        # Residuals are [rows, columns] by parameter.
        self.shard_residual: dict[str, Tensor] = {}  # [rows of this rank's shard, columns]

    def message_bytes(self, bucket: GradBucket, size: int) -> int:
        matrices = self._quantised(bucket)
        quantised = sum(matrix.rows * matrix.columns for matrix in matrices)
        return size * line_bytes(matrices, size) + FLOAT_BYTES * (len(bucket.flat) - quantised)

    def sum(self, bucket: GradBucket, comm: Comm, message: Tensor) -> Iterator[Collective]:
        matrices = self._quantised(bucket)
        encoded, sums = _parts(message, matrices, comm.size)
        exact: Collective = Done()
        if len(sums):
            exact = comm.iall_reduce(torch.cat(_exact(bucket, matrices), out=sums))
        if matrices:
            values = {matrix.name: matrix.view(bucket.flat) for matrix in matrices}
            shards = {m.name: values[m.name][m.shard(comm.rank, comm.size)] for m in matrices}
            yield from TwoStageSum(
                matrices, comm, bucket.flat, bucket.buffers, self.threshold
            ).stages(
                [*values.values()],
                self._kept(self.residual, values),
                self._kept(self.shard_residual, shards),
                Message(matrices, comm.size, encoded),
            )
        else:
            yield from (Done(), Done())  # as many stages as for buckets with matrices
        yield exact

    def decode(self, message: Tensor, bucket: GradBucket, size: int, divisor: int) -> None:
        matrices = self._quantised(bucket)
        encoded, means = _parts(message, matrices, size)
        put_back(_exact(bucket, matrices), means.div_(divisor))
        bucket.finite = means.isfinite().all()
        if matrices:
            sums = Message(matrices, size, encoded)
            bucket.finite &= sums.deliver([m.view(bucket.flat) for m in matrices], divisor)

    def _quantised(self, bucket: GradBucket) -> list[Matrix]:
        return self.matrices(bucket) if bucket.step >= self.warmup_steps else []

    def matrices(self, bucket: GradBucket) -> list[Matrix]:
        """Return the parts of `bucket` that are quantised; the rest travels exactly."""
        found = (self._matrix(n, start, bucket.shapes[n]) for n, start, _ in bucket.spans())
        return [matrix for matrix in found if matrix]

    def _matrix(self, name: str, start: int, shape: Sequence[int]) -> Matrix | None:
        rows = quantised(shape, self.granularity, self.block_size, self.min_columns)
        return Matrix(name, start, *rows) if rows else None

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            which = f"all of a run of {self.total_steps} steps, with {key}.warmup_steps="
            yield sum(map(math.prod, shapes.values())), f"{which}{self.warmup_steps}"
            return
        which = f"vectors, and rows shorter than {key}.min_columns={self.min_columns}"
        if self.granularity == "block":
            which = f"what fills no block of {key}.block_size={self.block_size}"
        taken = (self._matrix(name, 0, shape) for name, shape in shapes.items())
        quantised = sum(matrix.rows * matrix.columns for matrix in taken if matrix)
        yield sum(map(math.prod, shapes.values())) - quantised, which

    def _kept(self, residuals: dict[str, Tensor], like: dict[str, Tensor]) -> list[Tensor | None]:
        """Return residuals of the matrices in `like`, zeros at first; None without feedback."""
        if not self.error_feedback:
            return [None] * len(like)
        for name, values in like.items():
            if name not in residuals:
                residuals[name] = torch.zeros_like(values)
        return [residuals[name] for name in like]

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        for matrix in self.matrices(bucket):
            if matrix.name in self.residual:
                rows = matrix.view(bucket.flat)
                rows += record_stream(self.residual[matrix.name])
                shard = rows[matrix.shard(comm.rank, comm.size)]
                shard += record_stream(self.shard_residual[matrix.name])

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        super().flush_residual(bucket, comm)
        for name in bucket.shapes:
            self.shard_residual.pop(name, None)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        yield from super().kept(shapes, comm)
        for name, values in self.shard_residual.items():
            if matrix := self._matrix(name, 0, shapes[name]):
                first_row = matrix.shard(comm.rank, comm.size).start
                yield name, first_row * matrix.columns, values.view(-1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {SHARD_RESIDUAL: dict(self.shard_residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shard_residual = {n: value.clone() for n, value in state[SHARD_RESIDUAL].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Share residuals as ErrorFeedback does; shard residuals go to their rows' new ranks."""
        shard_residual = {}
        for name in states[0][SHARD_RESIDUAL]:
            rows = torch.cat([state[SHARD_RESIDUAL][name] for state in states])
            new = Matrix(name, 0, *rows.shape)
            shard_residual[name] = rows[new.shard(rank, size)].clone()
        return super().redistribute(states, rank, size) | {SHARD_RESIDUAL: shard_residual}


def _parts(message: Tensor, matrices: Sequence[Matrix], size: int) -> tuple[Tensor, Tensor]:
    """Return a message's matrices, uint8 [size, line_bytes], and exact values, float32 [n]."""
    width = line_bytes(matrices, size)
    encoded, exact = message[: size * width], message[size * width :]
    return encoded.view(size, width), exact.view(torch.float32)


def _exact(bucket: GradBucket, matrices: Sequence[Matrix]) -> list[Tensor]:
    """Return the parts of `bucket` that are not quantised, sharing its memory."""
    quantised = [slice(matrix.start, matrix.stop) for matrix in matrices]
    return [bucket.flat[part] for part in gaps(quantised, len(bucket.flat))]
