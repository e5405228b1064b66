"""Which parameters backward has reached on any rank, so that all others keep no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.distributed.worker import Worker
from lab.exchange.base import Exchange


class Reached:
    """Tells the gradients that some rank made from zeros that stand for none.

    An exchange takes zeros for a parameter that backward did not reach. If other ranks have a
    gradient, the mean is right. If none has, an optimizer would take the zeros for a gradient:
    weight decay and momentum would move a parameter that one process leaves alone. So ranks add up
    flags, as DistributedDataParallel does with find_unused_parameters=True: one small all-reduce in
    each step, which no host waits for unless its rank lacks a gradient. Where nobody has one, it
    stays None, and what the exchange keeps of this parameter is put back as it was.

    Its bytes are not counted, as those of other control messages are not.

    Args:
        names: of all parameters that are exchanged, alike on all ranks.
        exchange: of the sync that calls this object.
        device: of the gradients.
    """

    def __init__(self, names: Iterable[str], exchange: Exchange, device: torch.device) -> None:
        self._index = {name: place for place, name in enumerate(names)}
        self._exchange = exchange
        self._all = torch.ones(len(self._index), device=device)
        self._lacking: dict[str, None] = {}
        self._kept: dict[str, dict[str, Tensor]] = {}  # by kind and lacking parameter
        self._counts: Tensor | None = None

    def lacks(self, names: Sequence[str]) -> None:
        """Note parameters without a gradient on this rank, before their exchange begins."""
        self._lacking.update(dict.fromkeys(names))
        for kind, tensors in self._exchange.state_dict().items():
            kept = self._kept.setdefault(kind, {})
            kept.update({name: tensors[name].clone() for name in names if name in tensors})

    def is_lacking(self, names: Iterable[str]) -> bool:
        """Return whether this rank lacks the gradient of one of `names` in this step."""
        return bool(self._lacking) and not self._lacking.keys().isdisjoint(names)

    def begin(self, comm: Comm, worker: Worker) -> None:
        """Begin to add up the flags of this step, after its last exchange has begun."""
        counts = self._counts = self._all.clone()
        if self._lacking:
            counts[[self._index[name] for name in self._lacking]] = 0

        def add() -> Iterator[Collective]:
            with comm.traffic.uncounted():
                collective = comm.iall_reduce(counts)
            yield collective

        worker.submit("flags of gradients", add)

    def nowhere(self) -> list[str]:
        """Return the parameters that no rank has reached, once all exchanges have ended."""
        lacking, self._lacking = self._lacking, {}
        kept, self._kept = self._kept, {}
        if not lacking:
            return []
        assert self._counts is not None  # `begin` came first
        counts = cast(list[float], self._counts.tolist())  # pyright: ignore[reportUnknownMemberType]
        nowhere = [name for name in lacking if not counts[self._index[name]]]
        if nowhere:
            self._put_back(
                {k: {n: v for n, v in t.items() if n in nowhere} for k, t in kept.items()}
            )
        return nowhere

    def _put_back(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace what the exchange keeps of some parameters by what it kept before the step."""
        state: dict[str, Any] = self._exchange.state_dict()
        pairs = [
            (state.get(kind, {}).get(name), value)
            for kind, tensors in kept.items()
            for name, value in tensors.items()
        ]
        if all(now is not None and now.shape == value.shape for now, value in pairs):
            for now, value in pairs:
                now.copy_(value)
            return
        self._exchange.load_state_dict(
            {kind: {**tensors, **kept.get(kind, {})} for kind, tensors in state.items()}
        )
