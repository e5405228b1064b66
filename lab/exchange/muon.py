"""Muon: orthogonalised momentum, each matrix by one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange import owner_message, owners
from lab.exchange.base import Staged
from lab.exchange.bucket import GradBucket
from lab.exchange.compressible import Matrix
from lab.exchange.direction import (
    Adam,
    Direction,
    is_finite,
    require_integer,
    tables_of,
    zeros,
)
from lab.exchange.newton_schulz import orthogonalised, rms_factor
from lab.exchange.owners import Place, newton_schulz_operations

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(Staged, Direction):
    """Muon (Jordan et al. 2024) for hidden matrices, Adam for all else, with the work shared.

    1. The parts of all gradients go to their owners, all to all, which sum them in rank order. A
       matrix has one owner; vectors, embeddings and layers of an embedding's shape are owned in
       equal parts.
    2. An owner updates its moments. Of a matrix's momentum, with Nesterov's look ahead, it takes
       the nearest orthogonal matrix; elsewhere Adam's direction. All ranks gather the directions.

    So all ranks have the same bits, no rank repeats another's products, moments take 4/N bytes for
    a value of a matrix and 8/N elsewhere, and a balanced bucket sends a ring's 8n(N-1)/N bytes.
    Lines of a message are as long as the fullest: of a bucket with one matrix, N times that. One
    bucket for all parameters is best.

    Args:
        momentum: decay rate. nesterov: look ahead. steps: of Newton–Schulz.
        dtype: of its products, bfloat16 or float32.
        betas, eps: of Adam.

    Raises:
        ValueError: an argument out of range.
    """

    kinds = ("momentum", "variance")

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        dtype: str = "bfloat16",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"exchange.momentum={momentum}: must be at least 0 and below 1")
        if not isinstance(nesterov, bool):
            raise ValueError(f"exchange.nesterov={nesterov}: must be true or false")
        if dtype not in DTYPES:
            raise ValueError(f"exchange.dtype={dtype}: allowed are {', '.join(DTYPES)}")
        require_integer("steps", steps, 1)
        self.momentum, self.nesterov, self.steps = momentum, nesterov, steps
        self.dtype, self.adam = DTYPES[dtype], Adam(tuple(betas), eps)
        self._shapes: dict[str, torch.Size] = {}  # of the whole model
        self._matrices: dict[str, Matrix] = {}
        self._owner: dict[str, int] = {}

    def look_at(self, model: nn.Module) -> None:
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        self._plan(shapes, tables_of(model))

    def _plan(self, shapes: dict[str, torch.Size], tables: Sequence[str]) -> None:
        self._shapes, self._matrices = shapes, owners.hidden_matrices(shapes, tables)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        self.begin(bucket, comm)
        places, width = owners.lines(bucket.shapes, self._owners(bucket, comm.size), comm.size)
        buffers, like = bucket.buffers, bucket.flat
        message = buffers["message"].take(like, comm.size, width)
        received = buffers["received"].take(like, comm.size, width)
        spans = {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
        for place in places:
            owner_message.pack(spans[place.name], place, message)
        yield comm.iall_to_all(received, message)
        own = received[0]
        for line in received[1:]:
            own += line
        for place in places:
            if place.owner in (None, comm.rank):
                self._direct(place, own[place.start : place.start + place.length])
        yield comm.iall_gather(message, own)
        for place in places:
            owner_message.unpack(message, place, spans[place.name])
        bucket.finite = is_finite(bucket.flat)

    def _owners(self, bucket: GradBucket, size: int) -> dict[str, int]:
        """Return the owner of each matrix of the model; of the bucket, if there is no model."""
        if not self._shapes:
            self._plan(bucket.shapes, ())
        if not self._owner:
            self._owner = owners.balanced(self._costs(), size)
        return self._owner

    def _costs(self) -> dict[str, int]:
        return {
            name: newton_schulz_operations(*m, self.steps) for name, m in self._matrices.items()
        }

    def _direct(self, place: Place, gradient: Tensor) -> None:
        """Turn a gradient that this rank owns into the direction."""
        momentum = zeros(self.moments["momentum"], place.name, gradient)
        if place.owner is None:
            variance = zeros(self.moments["variance"], place.name, gradient)
            self.adam.add(gradient, momentum, variance)
            self.adam.direction(momentum, variance, self.updates, out=gradient)
            return
        rows, columns = self._matrices[place.name]
        momentum.lerp_(gradient, 1 - self.momentum)
        ahead = gradient.lerp_(momentum, self.momentum) if self.nesterov else momentum
        update = orthogonalised(ahead.view(rows, columns), self.steps, self.dtype)
        gradient.view(rows, columns).copy_(update).mul_(rms_factor(rows, columns))

    def choices(self) -> list[dict[str, Any]]:
        """Return each rank's operations of Newton–Schulz in a step."""
        work = [0] * (max(self._owner.values(), default=0) + 1)
        for name, cost in self._costs().items():
            work[self._owner[name]] += cost
        return [{"newton_schulz_operations": work}]

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Give each matrix's momentum to its new owner, and cut Adam's moments anew."""
        owner = owners.balanced(self._costs(), size)
        new = super().redistribute(states, rank, size)
        for kind in self.kinds:
            new[kind] = {}
            for name in dict.fromkeys(name for state in states for name in state[kind]):
                whole = torch.cat([s[kind][name] for s in states if name in s[kind]])
                if name not in owner:
                    values = whole[: self._shapes[name].numel()]
                    new[kind][name] = owner_message.part_of(values, rank, size)
                elif owner[name] == rank:
                    new[kind][name] = whole
        return new
