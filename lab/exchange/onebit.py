"""1-bit SGD: two quantised stages, with error feedback at both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.codec.onebit import codec as onebit
from lab.distributed.comm import Collective, Comm
from lab.exchange.base import Staged
from lab.exchange.bucket import Bucket
from lab.exchange.error_feedback import ErrorFeedback, last_use
from lab.exchange.stripes import Matrix, Message
from lab.exchange.uncompressed import ExactMeans, gaps

GRANULARITIES = ("column", "block")


class OneBit(Staged, ErrorFeedback):
    """Two-stage 1-bit SGD with error feedback (Seide et al. 2014, section 3; CNTK's 1BitSGD).

    1. Each rank adds its residual to its gradient, quantises all rows, and keeps what the
       quantisation lost as its new residual. Row stripe r of every rank goes to rank r.
    2. Rank r decodes the stripes (its own too, as CNTK does) and sums them in rank order, adds the
       stripe residual, quantises the sum, keeps that loss as the new stripe residual, and sends the
       bits to all. Every rank decodes all stripes and divides by N.

    So delivered sums + residuals = true sums at any time, and a rank sends n/4*(N-1)/N bytes, plus
    8 bytes of scales for each row. A non-finite gradient makes scales non-finite; they travel to
    all ranks, which mark the bucket. Beside the residuals (n values, and n/N for the stripe) a rank
    needs memory for four messages of n/8 bytes or less: sums are taken in the bucket itself.

    Args:
        threshold: "zero" or "mean", see lab.codec.onebit.codec.
        granularity: what shares two scales. "column": all weights into one output unit, a row of
            the [out, in*height*width] view, CNTK's column. "block": `block_size` values.
        block_size: values per block; what remains of a tensor after whole blocks travels exactly.
        min_columns: with "column", tensors with shorter columns (biases, small kernels) travel
            exactly: scales would outweigh what bits save.
        warmup_steps: steps in full precision before quantisation starts.
        error_feedback: False forgets both losses, to show what that costs.

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
        self.stripe_residual: dict[str, Tensor] = {}  # [rows of this rank's stripe, columns]

    def stages(self, bucket: Bucket, comm: Comm) -> Iterator[Collective]:
        matrices = self.matrices(bucket) if bucket.step >= self.warmup_steps else []
        quantised = [slice(matrix.start, matrix.stop) for matrix in matrices]
        exact = ExactMeans(bucket, gaps(quantised, len(bucket.flat)), comm)
        if not matrices:
            yield exact.collective
            bucket.finite = exact.put_back().isfinite().all()
            return

        def message(role: str, lines: int) -> Message:
            like = bucket.flat.new_empty(0, dtype=torch.uint8)
            return Message(matrices, comm.size, lines, like, bucket.buffers[role])

        outgoing, received = message("outgoing", comm.size), message("received", comm.size)
        self._encode_gradients(matrices, bucket.flat, outgoing)
        arriving = comm.iall_to_all(received.bytes, outgoing.bytes)
        yield exact.collective
        finite = exact.put_back().isfinite().all()
        yield arriving
        reply, answer = message("reply", 1), message("answer", comm.size)
        self._encode_sums(matrices, bucket.flat, received, reply, comm)
        yield comm.iall_gather(answer.bytes, reply.bytes)
        bucket.finite = finite & answer.scales().isfinite().all()
        answer.scales().div_(comm.size)
        _decode(matrices, answer, bucket.flat)

    def matrices(self, bucket: Bucket) -> list[Matrix]:
        """The parts of `bucket` that are quantised; the rest travels exactly."""
        found = []
        for name, start, stop in bucket.spans():
            shape = bucket.shapes[name]
            if self.granularity == "block":
                columns, rows = self.block_size, (stop - start) // self.block_size
            else:
                rows = shape[0] if len(shape) > 1 else 0
                columns = (stop - start) // rows if rows else 0
                rows = rows if columns >= self.min_columns else 0
            if rows:
                found.append(Matrix(name, start, rows, columns))
        return found

    def _encode_gradients(self, matrices: list[Matrix], flat: Tensor, outgoing: Message) -> None:
        for index, matrix in enumerate(matrices):
            values = matrix.of(flat)
            residual = self._kept(self.residual, matrix.name, values)
            onebit.encode(values, residual, self.threshold, *outgoing.of(index))

    def _encode_sums(
        self, matrices: list[Matrix], flat: Tensor, received: Message, reply: Message, comm: Comm
    ) -> None:
        for index, matrix in enumerate(matrices):
            # The gradient has been encoded: its place is free for the sum.
            total = matrix.of(flat)[matrix.stripe(comm.rank, comm.size)]
            scales, bits = reply.of(index, len(total))
            onebit.reduce(
                *received.of(index, len(total)),
                total,
                self._kept(self.stripe_residual, matrix.name, total),
                self.threshold,
                scales[0],
                bits[0],
            )

    def _kept(self, residuals: dict[str, Tensor], name: str, like: Tensor) -> Tensor | None:
        if not self.error_feedback:
            return None
        if name not in residuals:
            residuals[name] = torch.zeros_like(like)
        return residuals[name]

    def pay_back(self, bucket: Bucket, comm: Comm) -> None:
        for matrix in self.matrices(bucket):
            if matrix.name in self.residual:
                rows = matrix.of(bucket.flat)
                rows += last_use(self.residual.pop(matrix.name))
                stripe = rows[matrix.stripe(comm.rank, comm.size)]
                stripe += last_use(self.stripe_residual.pop(matrix.name))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stripe_residual": dict(self.stripe_residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stripe_residual = {n: value.clone() for n, value in state["stripe_residual"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Residuals as in ErrorFeedback; of the stripes' each rank takes its new rows."""
        stripe_residual = {}
        for name in states[0]["stripe_residual"]:
            rows = torch.cat([state["stripe_residual"][name] for state in states])
            new = Matrix(name, 0, *rows.shape)
            stripe_residual[name] = rows[new.stripe(rank, size)].clone()
        return super().redistribute(states, rank, size) | {"stripe_residual": stripe_residual}


def _decode(matrices: list[Matrix], answer: Message, flat: Tensor) -> None:
    for index, matrix in enumerate(matrices):
        onebit.decode(*answer.of(index), matrix.of(flat))
