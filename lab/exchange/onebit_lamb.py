"""1-bit LAMB: 1-bit Adam whose directions are scaled layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs
from lab.exchange.direction import Moments, copies
from lab.exchange.layout import named
from lab.exchange.onebit_adam import OneBitAdam
from lab.settings import checks

KINDS = ("trust", "power", "power_at_first", "factor")
MEMORY = 20  # steps over which the power of delivered directions is averaged


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


class TrustRatios:
    """Multiplies each parameter's direction by norm of weights / norm of direction.

    This is LAMB (You et al. 2020, algorithm 2) with a decay that is decoupled and not scaled. Once
    the variance is frozen the ratio is too: signs would make it jump (Li et al. 2021, section 4).
    It is then the mean of earlier ratios times a factor that makes up for gradients that have grown
    or shrunk since, as a fresh variance would: root of (power of the first directions after
    freezing / power of the last ones), with power the mean square over about MEMORY steps.

    Li et al. recover gradients from successive momenta, keep a fresh variance of each value, and
    take a parameter's largest ratio of both roots. A power is the mean over the parameter's values,
    and needs two numbers of state.

    Args:
        ratios: least and largest ratio.
        decay: of the mean of ratios.
        factors: least and largest factor.
        change: a factor changes by at most this share in a step.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self, ratios: Sequence[float], decay: float, factors: Sequence[float], change: float
    ) -> None:
        for key, (least, most) in {"ratio_range": ratios, "factor_range": factors}.items():
            if not 0 < least <= 1 <= most:
                raise ValueError(
                    f"exchange.{key}={[least, most]}: must be two numbers above 0, the first at "
                    "most 1 and the second at least 1"
                )
        for key, value in {"ratio_decay": decay, "factor_change": change}.items():
            checks.number(f"exchange.{key}", value, at_least=0, below=1)
        self.ratios, self.factors = tuple(ratios), tuple(factors)
        self.decay, self.change = decay, change
        self.kept: dict[str, Moments] = {kind: {} for kind in KINDS}  # float32 [] by parameter
        self.weights: dict[str, Tensor] = {}

    def look_at(self, model: nn.Module) -> None:
        self.weights = {name: p.detach() for name, p in named(model).items()}

    def scale(self, directions: Mapping[str, Tensor], num_frozen: int) -> None:
        """Multiply directions by their ratios, in place. Weights that nobody showed count as zero.

        Args:
            num_frozen: steps since the variance was frozen, this one included; 0: it is not.
        """
        names, values = list(directions), list(directions.values())
        norms = torch.stack(torch._foreach_norm(values))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        if num_frozen:
            ratios = self._frozen(names, norms, num_frozen)
        else:
            ratios = self._ratios(names, norms)
            self._put(
                "trust", names, self._get("trust", names, ratios).lerp(ratios, 1 - self.decay)
            )
        torch._foreach_mul_(values, list(ratios.unbind()))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def _ratios(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return LAMB's ratios, 1 where one of both norms is zero."""
        weights = [self.weights.get(name, norms.new_zeros(1)) for name in names]
        of_weights = torch.stack(torch._foreach_norm(weights))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        both = (of_weights > 0) & (norms > 0)
        return torch.where(both, of_weights / norms, 1.0).clamp(*self.ratios)

    def _frozen(self, names: Sequence[str], norms: Tensor, num_frozen: int) -> Tensor:
        """Return the mean ratios, each times its factor."""
        squares = norms.square()
        power = self._get("power", names, squares)
        power = power.lerp(squares, max(1 / num_frozen, 1 / MEMORY))
        self._put("power", names, power)
        if num_frozen <= MEMORY:
            factor = torch.ones_like(power)
            self._put("power_at_first", names, power)
        else:
            first, last = (self._get(kind, names, norms) for kind in ("power_at_first", "factor"))
            factor = torch.where(power > 0, (first / power).sqrt(), 1.0).clamp(*self.factors)
            factor = factor.clamp(last * (1 - self.change), last * (1 + self.change))
        self._put("factor", names, factor)
        return self._get("trust", names, factor) * factor

    def _get(self, kind: str, names: Sequence[str], otherwise: Tensor) -> Tensor:
        """Return what is kept of parameters, float32 [parameters]; `otherwise` at first."""
        kept = self.kept[kind]
        if kept.keys().isdisjoint(names):
            return otherwise
        return torch.stack([kept.get(n, o) for n, o in zip(names, otherwise.unbind(), strict=True)])

    def _put(self, kind: str, names: Iterable[str], values: Tensor) -> None:
        self.kept[kind].update(zip(names, values.unbind(), strict=True))

    def state_dict(self) -> dict[str, Moments]:
        return {kind: dict(kept) for kind, kept in self.kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = {kind: copies(state[kind]) for kind in KINDS}
