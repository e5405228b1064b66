"""Which parameters backward has reached on any rank, so that all others keep no gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.distributed.worker import Worker, record_stream
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
        for kind, tensors in self._exchange.state_dict().items() if names else ():
            found = {name: tensors[name].clone() for name in names if name in tensors}
            self._kept.setdefault(kind, {}).update(found)

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
                collective = comm.iall_reduce(record_stream(counts))
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
            self._put_back(nowhere, kept)
        return nowhere

    def _put_back(self, names: Sequence[str], kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace what the exchange keeps of some parameters by what it kept before the step."""
        state: dict[str, dict[str, Tensor]] = self._exchange.state_dict()
        pairs: list[tuple[Tensor, Tensor]] = []
        is_new = False
        for kind, name in itertools.product(state, names):
            before, now = kept.get(kind, {}).get(name), state[kind].get(name)
            if before is not None and now is not None and before.shape == now.shape:
                pairs.append((now, before))
            else:
                is_new |= before is not None or (now is not None and _says_something(now))
        if not is_new:
            for now, before in pairs:
                now.copy_(before)
            return
        others = {k: {n: t for n, t in each.items() if n not in names} for k, each in state.items()}
        for kind, each in others.items():
            each.update({n: t for n, t in kept.get(kind, {}).items() if n in names})
        self._exchange.load_state_dict(others)


def _says_something(kept: Tensor) -> bool:
    """Return whether a tensor that a step has added is more than zeros, or a shape."""
    return kept.dtype != torch.int64 and bool(kept.any())
