"""1-bit LAMB: 1-bit Adam whose directions are scaled layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lab.distributed.collective import Collective
from lab.distributed.comm import Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs
from lab.exchange.onebit_adam import OneBitAdam
from lab.exchange.trust_ratio import TrustRatios


class OneBitLamb(OneBitAdam):
    """1-bit LAMB (Li et al. 2021, algorithm 1): 1-bit Adam with trust ratios, see TrustRatios.

    Signs are of gradients: those of momentum would make directions longer and longer. Ratios
    multiply what has been delivered, so nothing more is sent: each rank finds them from weights and
    directions, which all ranks share. A parameter is a layer.

    Args:
        ratio_range, ratio_decay, factor_range, factor_change: see TrustRatios.
        adam: see OneBitAdam.

    Raises:
        ValueError: an argument out of range.
    """

    needs_like_gpus = True  # each rank takes norms

    def __init__(
        self,
        ratio_range: Sequence[float] = (0.01, 10.0),
        ratio_decay: float = 0.9,
        factor_range: Sequence[float] = (0.5, 4.0),
        factor_change: float = 0.1,
        **adam: Any,
    ) -> None:
        super().__init__(**adam, signs_of="gradient")
        self.trust = TrustRatios(ratio_range, ratio_decay, factor_range, factor_change)

    def look_at(self, model: nn.Module) -> None:
        self.trust.look_at(model)

    def add_cost(self, costs: Costs) -> bool:
        """Count 1-bit Adam's passes, norms of directions and weights, and a product."""
        return self.signed.add_cost(costs, before=16, of_shard=12, after=12 + 8 + 8 + 8)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        yield from super().stages(bucket, comm)
        directions = {name: bucket.flat[start:stop] for name, start, stop in bucket.spans()}
        self.trust.scale(directions, self.updates - self.frozen_at if self.frozen_at else 0)

    def choices(self) -> list[dict[str, Any]]:
        """Return OneBitAdam's choice, and the least and largest ratio and factor."""
        (choice,) = super().choices()
        for kind in ("trust", "factor"):
            values = [float(value) for value in self.trust.kept[kind].values()]
            choice[kind] = [min(values), max(values)] if values else None
        return [choice]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.trust.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.trust.load_state_dict(state)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Keep the ratios, which all ranks share; see OneBitAdam for the rest."""
        kept = {kind: dict(states[0][kind]) for kind in self.trust.kept}
        return super().redistribute(states, rank, size) | kept
