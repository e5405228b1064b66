"""Two levels: one exchange inside each node, another between nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm
from lab.distributed.launcher import each_alone
from lab.distributed.worker import record_stream
from lab.exchange.base import Exchange, Kept, Ranks, Relayed, Shapes, Staged, require_mean
from lab.exchange.bucket import ALIGNED, GradBucket
from lab.exchange.coded import TwoStage
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.rails import (
    Blocks,
    Levels,
    is_split,
    num_rails,
    part_shape,
    part_shapes,
    place_of,
    shares,
)

OWN = ("carried", "shapes", "nodes")  # keys of its own beside those of `inter` in checkpoints


class Hierarchical(Staged):
    """Any exchange between nodes, of a part of the gradient for each local rank.

    1. Reduce-scatter inside the node: local rank l has the node's sum of part l.
    2. `inter` averages part l among the l-th ranks of all nodes, on rail l (lab.exchange.rails).
    3. All-gather inside the node.

    Horovod's hierarchical all-reduce, and NCCL's name for rails; BytePS too compresses between
    nodes alone. With L ranks on each of M nodes a rank sends 4n(L-1)/L bytes at stages 1 and 3, and
    what `inter` sends for n/L values among M ranks. Parts are whole rows, so that `inter` may treat
    rows and matrices as it would those of the whole parameter.

    Nodes may differ in size. There are as many rails as the smallest has ranks; in a node with more
    ranks the blocks of stages 1 and 3 are as many times more bytes than needed. `inter` averages
    the sums of nodes, and its mean is then multiplied by M/N, so each rank weighs the same and
    residuals are in the units of gradients: N times delivered + residuals = true sums. On one node
    there is no `inter`; nodes of one rank each have nothing else.

    Args:
        inter: the exchange between nodes.

    Raises:
        ValueError: an exchange that cannot be used in this role.
    """

    def __init__(self, inter: Exchange) -> None:
        name = type(inter).__name__
        require_mean("exchange.inter", inter)
        if isinstance(inter, Hierarchical):
            raise ValueError(f"exchange.inter={name}: has two levels itself; allowed is one")
        self.inter = inter
        self.exact, self.takes_divided = inter.exact, inter.takes_divided
        self.dtypes, self.staged = inter.dtypes, inter.staged
        self.needs_send_recv = inter.needs_send_recv
        self.needs_like_gpus = inter.needs_like_gpus
        # Residuals of other nodes, [values of this rank's part] by parameter, for the next step.
        self.carried: dict[str, Tensor] = {}
        self._has_state = bool(inter.state_dict())
        self._shapes: dict[str, Tensor] = {}  # of all parameters seen
        self._levels: Levels | None = None

    def add_cost(self, costs: Costs) -> bool:
        """Add the stages of a bucket; the largest part stands for all."""
        network, inter = costs.network, self.inter
        if network.local == 1 and network.size > 1:
            costs.add(inter)
            return True
        rails = _smallest_node(network.size, network.local)
        parts = [[part_shape(s, rail, rails) for s in costs.shapes] for rail in range(rails)]
        part = max(parts, key=lambda shapes: sum(map(math.prod, shapes)))
        copied = 2 * costs.num_bytes * (len(costs.shapes) > 1)  # into blocks, and back
        node, block_bytes = network.inside(), 4 * sum(map(math.prod, part))
        costs.codec(copied, calls=bool(copied))
        costs.wire(node.reduce_scatter(block_bytes), inside=True)
        rail = network.rail(rails)
        if isinstance(inter, Relayed) and network.num_nodes > 1:
            costs.add(inter, part, rail, "sum")
            message_bytes = costs.message_bytes(inter, part, network.num_nodes)
            costs.wire(node.all_gather(message_bytes), inside=True)
            for received in parts:
                costs.add(inter, received, rail, "decode")
        else:
            if network.num_nodes > 1:
                costs.add(inter, part, rail)
            costs.wire(node.all_gather(block_bytes), inside=True)
        costs.codec(copied, calls=bool(copied))
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count blocks of gathered buckets, arriving ones, and what `inter` needs for its part.

        NCCL needs no memory for what arrives.
        """
        if sizes.local == 1 and sizes.N > 1:
            return self.inter.memory_bytes(sizes)
        wider = sizes.local / _smallest_node(sizes.N, sizes.local)
        arriving = 0 if sizes.backend == "nccl" or sizes.N == 1 else sizes.n
        own = 4 * wider * (sizes.gathered + arriving)
        if sizes.local >= sizes.N:
            return Needs(own)
        part = _of_part(sizes)
        inter, others = self.inter.memory_bytes(part), 0.0
        if isinstance(self.inter, TwoStage):  # messages of the other rails, besides this one's
            others = self.inter.codec.bytes_per_value() * part.n * (sizes.local - 1)
        return Needs(own + inter.kept + others, inter.scratch)

    def asynchronous(self, comm: Comm) -> bool:
        return comm.asynchronous and self.inter.asynchronous(comm)

    def check_reach(self, comm: Comm) -> None:
        """Make groups of the ranks of each node and of each rail, too.

        Raises:
            ValueError: there are two levels, and `comm` cannot be split; or as for any exchange.
        """
        super().check_reach(comm)
        if is_split(comm.nodes) and comm.no_split:
            raise ValueError(f"exchange=Hierarchical: makes groups of ranks; {comm.no_split}")
        self._levels = Levels.of(comm)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        levels = self._levels = self._levels or Levels.of(comm)
        for name in bucket.shapes.keys() - self._shapes.keys() if self._has_state else ():
            self._shapes[name] = torch.tensor(bucket.shapes[name], dtype=torch.int64)
        if levels.inside is None:
            yield from self._between_nodes(bucket, comm)
            return
        blocks = Blocks(bucket, levels.inside.size, num_rails(levels.nodes))
        blocks.fill()
        own = blocks.memory[levels.inside.rank]
        yield levels.inside.ireduce_scatter(own, blocks.memory, blocks.arriving(levels.inside))
        if isinstance(self.inter, Relayed) and len(levels.nodes) > 1:
            yield from self._relayed(self.inter, blocks.parts, levels, levels.inside)
            finite = [part.finite for part in blocks.parts if part.finite is not None]
            bucket.finite = torch.stack(finite).all()
        else:
            yield from self._gathered(blocks, levels, levels.inside)
        blocks.empty()
        if not self.exact and bucket.finite is None:
            bucket.finite = bucket.flat.isfinite().all()

    def _gathered(self, blocks: Blocks, levels: Levels, inside: Comm) -> Iterator[Collective]:
        """Replace all parts by their means over the nodes, which are sent inside them."""
        own = blocks.memory[inside.rank]
        if (rail := levels.place.rail) is not None:
            part = blocks.parts[rail]
            yield from self._between_nodes(part, levels.across)
            if not part.divided:
                part.flat.mul_(len(levels.nodes) / levels.num_ranks)
            if part.finite is not None:  # a sparse one may not deliver the value itself
                part.flat[:1].masked_fill_(~part.finite, torch.nan)
        yield inside.iall_gather(blocks.memory, own)

    def _relayed(
        self, inter: Relayed, parts: Sequence[GradBucket], levels: Levels, inside: Comm
    ) -> Iterator[Collective]:
        """Do the same, but send messages inside the nodes, which every rank decodes for itself."""
        num_nodes = len(levels.nodes)
        sizes = [inter.message_bytes(part, num_nodes) for part in parts]
        byte = parts[0].flat.new_empty(0, dtype=torch.uint8)
        longest = -(-max(sizes) // ALIGNED) * ALIGNED
        messages = parts[0].plans.scratch("messages", byte, inside.size, longest)
        own = messages[inside.rank]
        if levels.across is not None:
            rail = inside.rank
            self._add_carried(parts[rail])
            yield from inter.sum(parts[rail], levels.across, own[: sizes[rail]])
        yield inside.iall_gather(messages, own)
        for part, message, num_bytes in zip(parts, messages, sizes, strict=False):
            inter.decode(message[:num_bytes], part, num_nodes, divisor=levels.num_ranks)

    def _between_nodes(self, part: GradBucket, across: Comm | None) -> Iterator[Collective]:
        """Replace this rail's part, a sum of this node, by its mean over the nodes."""
        self._add_carried(part)
        if across is not None:
            yield from self.inter.stages(part, across)

    def _add_carried(self, part: GradBucket) -> None:
        for name, start, stop in part.spans():
            if name in self.carried:
                part.flat[start:stop] += record_stream(self.carried.pop(name))

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        nodes = self._levels.nodes if self._levels else ()
        inter = f"{key}.inter"
        if len(nodes) == 1 and not self.exact:
            which = f"there is one node, and {inter}={type(self.inter).__name__} is between nodes"
            yield sum(map(math.prod, shapes.values())), which
            return
        rails = num_rails(nodes) if nodes else 1
        found: Counter[str] = Counter()
        for rail in range(rails):
            for number, which in self.inter.left_exact(part_shapes(shapes, rail, rails), inter):
                found[which] += number
        yield from ((number, which) for which, number in found.items())

    def made_of(self) -> Iterable[Exchange]:
        return (self.inter,)

    @property
    def settled_at(self) -> int | None:
        return self.inter.settled_at

    def choices(self) -> list[dict[str, Any]]:
        return self.inter.choices()

    def add_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        levels = self._levels
        if levels is None or levels.place.rail is None:
            return
        where = levels.place.rail, num_rails(levels.nodes)
        part = _zeros(part_shapes(bucket.shapes, *where), bucket.flat)
        self.inter.add_residual(part, levels.place)
        own = shares(bucket.flat, bucket.shapes, *where)
        for (name, start, stop), values in zip(part.spans(), own, strict=True):
            values += part.flat[start:stop]
            if name in self.carried:
                values += record_stream(self.carried[name])

    def flush_residual(self, bucket: GradBucket, comm: Ranks) -> None:
        self.add_residual(bucket, comm)
        if self._levels and self._levels.place.rail is not None:
            where = self._levels.place.rail, num_rails(self._levels.nodes)
            part = _zeros(part_shapes(bucket.shapes, *where), bucket.flat)
            self.inter.flush_residual(part, self._levels.place)
        for name in bucket.shapes:
            self.carried.pop(name, None)

    def kept(self, shapes: Shapes, comm: Comm) -> Iterator[Kept]:
        of_inter = (values for kind in self.inter.state_dict().values() for values in kind.values())
        like = next(chain(self.carried.values(), of_inter), None)
        if like is not None:
            whole = _zeros(shapes, like.new_empty(0, dtype=torch.float32))
            self.add_residual(whole, comm)
            yield from ((name, 0, whole.flat[start:stop]) for name, start, stop in whole.spans())

    def error_bound(self, largest: float, size: int) -> float:
        return self.inter.error_bound(largest, size)

    def state_dict(self) -> dict[str, Any]:
        inter = self.inter.state_dict()
        if not inter:
            return {}
        nodes = self._levels.nodes if self._levels else ()
        return {
            **inter,
            "carried": dict(self.carried),
            "shapes": dict(self._shapes),
            "nodes": {str(at): torch.tensor(ranks) for at, ranks in enumerate(nodes)},
        }

    def continues(self, state: Mapping[str, Any]) -> bool:
        nodes = self._levels.nodes if self._levels else ()
        return not state or _nodes(state) == [list(ranks) for ranks in nodes]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of the same rank.

        Raises:
            ValueError: the ranks were on other nodes.
        """
        if not self.continues(state):
            raise ValueError(
                f"state_dict: its ranks were on nodes {_nodes(state)}; use the same, or "
                "redistribute"
            )
        if state:
            self._take(state)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Sum all residuals, and give each rank an equal share of its part, for its next step.

        So sums stay whatever exchange `inter` is; what else it keeps begins anew.
        """
        if not states[0]:
            return {}
        shapes = {n: torch.Size(shape.tolist()) for n, shape in states[0]["shapes"].items()}
        total = _zeros(shapes, torch.empty(0, dtype=torch.float64))
        for each, state in enumerate(states):
            one = Hierarchical(deepcopy(self.inter))
            nodes = _nodes(state)
            one._levels = Levels(nodes, place_of(each, nodes), None, None)
            one._take(state)
            one.flush_residual(total, one._levels.place)
        nodes = self._levels.nodes if self._levels else each_alone(size)
        place, carried = place_of(rank, nodes), dict[str, Tensor]()
        if place.rail is not None:
            own = shares(total.flat, shapes, place.rail, num_rails(nodes))
            carried = {n: (v / place.size).float() for n, v in zip(shapes, own, strict=True)}
        return self.state_dict() | {"carried": carried, "shapes": states[0]["shapes"]}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.inter.load_state_dict({key: v for key, v in state.items() if key not in OWN})
        self.carried = {name: value.clone() for name, value in state["carried"].items()}
        self._shapes = {name: shape.cpu() for name, shape in state["shapes"].items()}


def _smallest_node(size: int, local: int) -> int:
    """Return the ranks of the smallest node, where all but the last have `local`."""
    return size - local * (-(-size // local) - 1)


def _of_part(sizes: Sizes) -> Sizes:
    """Return the sizes of one rail: those of the exchange between nodes."""
    rails = _smallest_node(sizes.N, sizes.local)
    return replace(
        sizes,
        n=sizes.n // rails,
        gathered=sizes.gathered // rails,
        largest=sizes.largest // rails,
        rank=sizes.rank // sizes.local,
        N=-(-sizes.N // sizes.local),
        local=1,
    )


def _nodes(state: Mapping[str, Any]) -> list[list[int]]:
    return [ranks.tolist() for ranks in state["nodes"].values()]


def _zeros(shapes: Shapes, like: Tensor) -> GradBucket:
    num_values = sum(shape.numel() for shape in shapes.values())
    return GradBucket(dict(shapes), like.new_zeros(num_values))
