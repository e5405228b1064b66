"""Groups of ranks among which FSDP2's units are gathered and scattered, as lab.sync.fsdp."""

from __future__ import annotations

from dataclasses import dataclass

from lab.simulate.network import Network
from lab.simulate.strategy import Strategy
from lab.sync.pattern import Pattern


@dataclass(frozen=True)
class Groups:
    """Networks of the groups of a strategy whose units are gathered.

    Attributes:
        world: all ranks.
        sharing: ranks that share a copy of the weights.
        second: those that keep gathered weights sharded for backward; None: all of `sharing` do.
        copies: ranks that hold the same part of each copy; None: there is one copy.
        levels: gradients are summed inside nodes before they cross.
    """

    world: Network
    sharing: Network
    second: Network | None
    copies: Network | None
    levels: bool

    @classmethod
    def of(cls, strategy: Strategy, network: Network) -> Groups:
        """Divide the ranks of `network`.

        Raises:
            ValueError: they cannot be divided as the strategy says.
        """
        sharers = ranks_of_a_copy(strategy.pattern, network)
        sharing = network.neighbours(sharers)
        copies = network.across(sharers) if sharers < network.size else None
        second, levels = _ranks_of_a_second_shard(strategy.sharding.reshard, network), False
        if strategy.sharding.reduce_scatter == "two_levels":
            key = "sync.reduce_scatter=two_levels"
            levels = 1 < _ranks_of_a_node(key, sharing) < sharers
        kept = network.neighbours(second) if second else None
        return cls(network, sharing, kept, copies, levels)

    def inside(self, group: Network) -> bool:
        """Return whether a group leaves the links between nodes alone, where there are some."""
        return group.size <= self.world.local < self.world.size


def ranks_of_a_copy(pattern: Pattern, network: Network) -> int:
    """Return the number of ranks that share a copy of the weights.

    Raises:
        ValueError: it does not divide all ranks.
    """
    setting = pattern.shard_size
    size = {None: network.size, "node": network.local}.get(setting, setting)
    return _divisor("shard_size", size, setting, network)


def _ranks_of_a_second_shard(setting: int | str | None, network: Network) -> int | None:
    """Return the number of ranks that keep a second shard; None: nothing does."""
    if setting is None:
        return None
    key = f"sync.reshard={setting}"
    size = _ranks_of_a_node(key, network) if setting == "node" else setting
    size = _divisor("reshard", size, setting, network)
    if size == network.size:
        return None
    if size == 1:
        raise ValueError(f"{key}: each rank would hold all weights; needs groups of 2 or more")
    return size


def _ranks_of_a_node(key: str, network: Network) -> int:
    if network.size % network.local:
        raise ValueError(
            f"{key}: {network.size} ranks, {network.local} on a node; each node needs as many"
        )
    return network.local


def _divisor(key: str, size: object, setting: object, network: Network) -> int:
    if not isinstance(size, int) or size < 1 or network.size % size:
        raise ValueError(
            f"sync.{key}={setting}: must be node, null, or a divisor of the {network.size} ranks"
        )
    return size
