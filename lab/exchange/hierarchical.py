"""Two levels: one exchange inside each node, another between nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lab.codec.base import Codec
from lab.distributed.comm import Collective, Comm
from lab.distributed.launcher import Nodes, each_alone
from lab.distributed.worker import record_stream
from lab.exchange.base import (
    Exchange,
    RankOfSize,
    ResidualPart,
    Shapes,
    Staged,
    require_part,
    runs_as_the_labs,
)
from lab.exchange.bucket import ALIGNED, GradBucket, Plans
from lab.exchange.compressed import TwoStage
from lab.exchange.cost import Costs, Needs, Shape, Sizes

OWN = ("carried", "shapes", "nodes")  # keys of its own beside those of `inter` in checkpoints


class Hierarchical(Staged):
    """Any exchange between nodes, of a part of the gradient for each local rank.

    1. Reduce-scatter inside the node: local rank l has the node's sum of part l.
    2. `inter` averages part l among the l-th ranks of all nodes, on rail l.
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
        require_part("exchange.inter", inter)
        if isinstance(inter, Hierarchical):
            raise ValueError(
                f"exchange.inter={name} already has two levels; choose an exchange with one level"
            )
        self.inter = inter
        self.exact, self.accepts_prescaled = inter.exact, inter.accepts_prescaled
        self.dtypes, self.staged = inter.dtypes, inter.staged
        self.steady_from = inter.steady_from
        self.needs_send_recv = inter.needs_send_recv
        self.needs_like_gpus = inter.needs_like_gpus
        # Residuals of other nodes, [values of this rank's part] by parameter, for the next step.
        self.carried: dict[str, Tensor] = {}
        self._has_state = bool(inter.state_dict())
        self._shapes: dict[str, Tensor] = {}  # of all parameters seen
        self._levels: CommLevels | None = None

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
        node, block_bytes = network.intra_node(), 4 * sum(map(math.prod, part))
        costs.codec(copied, calls=bool(copied))
        costs.wire(node.reduce_scatter(block_bytes), inside=True)
        rail = network.rail(rails)
        if is_relayed(inter) and network.num_nodes > 1:
            costs.add(inter, part, rail, "sum")
            message_bytes = _message_bytes(inter.codec, tuple(part), network.num_nodes)
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
        if is_relayed(self.inter):  # messages of the other rails, besides this one's
            others = self.inter.codec.bytes_per_value() * part.n * (sizes.local - 1)
        return Needs(own + inter.kept + others, inter.scratch)

    def validate(self, comm: Comm) -> None:
        """Make groups of the ranks of each node and of each rail, too.

        Raises:
            ValueError: there are two levels, and `comm` cannot be split; or as for any exchange.
        """
        super().validate(comm)
        if is_split(comm.nodes) and comm.no_split:
            raise ValueError(f"exchange=Hierarchical: makes groups of ranks, but {comm.no_split}")
        self._levels = CommLevels.of(comm)

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        levels = self._levels = self._levels or CommLevels.of(comm)
        for name in bucket.shapes.keys() - self._shapes.keys() if self._has_state else ():
            self._shapes[name] = torch.tensor(bucket.shapes[name], dtype=torch.int64)
        if levels.intra_node is None:
            yield from self._between_nodes(bucket, levels)
            return
        blocks = RailBlocks(bucket, levels.intra_node.size, levels.rails)
        blocks.fill()
        own = blocks.memory[levels.intra_node.rank]
        arriving = blocks.arriving(levels.intra_node)
        yield levels.intra_node.ireduce_scatter(own, blocks.memory, arriving)
        if is_relayed(self.inter) and len(levels.nodes) > 1:
            yield from self._relayed(self.inter, blocks.parts, levels, levels.intra_node)
            finite = [part.finite for part in blocks.parts if part.finite is not None]
            bucket.finite = torch.stack(finite).all()
        else:
            if levels.rail is not None:
                yield from self._mean_of_part(blocks.parts[levels.rail], levels)
            yield levels.intra_node.iall_gather(blocks.memory, own)
        blocks.empty()
        if not self.exact and bucket.finite is None:
            bucket.finite = bucket.flat.isfinite().all()

    def _mean_of_part(self, part: GradBucket, levels: CommLevels) -> Iterator[Collective]:
        """Replace this rail's part by its mean over the ranks, to be sent inside the nodes."""
        yield from self._between_nodes(part, levels)
        if not part.divided:
            part.flat.mul_(len(levels.nodes) / sum(map(len, levels.nodes)))
        if part.finite is not None:  # a sparse one may not deliver the value itself
            part.flat[:1].masked_fill_(~part.finite, torch.nan)

    def _relayed(
        self, inter: TwoStage, parts: Sequence[GradBucket], levels: CommLevels, intra_node: Comm
    ) -> Iterator[Collective]:
        """Do the same, but send messages inside the nodes, which every rank decodes for itself."""
        num_nodes = len(levels.nodes)
        sizes = [inter.layout(part, num_nodes).num_bytes for part in parts]
        byte = parts[0].flat.new_empty(0, dtype=torch.uint8)
        longest = -(-max(sizes) // ALIGNED) * ALIGNED
        messages = parts[0].plans.scratch("messages", byte, intra_node.size, longest)
        own = messages[intra_node.rank]
        if levels.inter_node is not None:
            rail = intra_node.rank
            self._add_carried(parts[rail])
            yield from inter.sum(parts[rail], levels.inter_node, own[: sizes[rail]])
        yield intra_node.iall_gather(messages, own)
        divisor = sum(map(len, levels.nodes))
        for part, message, num_bytes in zip(parts, messages, sizes, strict=False):
            inter.decode(message[:num_bytes], part, num_nodes, divisor=divisor)

    def _between_nodes(self, part: GradBucket, levels: CommLevels) -> Iterator[Collective]:
        """Replace this rail's part, a sum of this node, by its mean over the nodes."""
        self._add_carried(part)
        if levels.inter_node is not None:
            yield from self.inter.stages(part, levels.inter_node)

    def _add_carried(self, part: GradBucket) -> None:
        for name, start, stop in part.spans():
            if name in self.carried:
                part.flat[start:stop] += record_stream(self.carried.pop(name))

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        levels, inter = self._levels, f"{key}.inter"
        if levels and len(levels.nodes) == 1 and not self.exact:
            name = type(self.inter).__name__
            which = f"there is only one node, but {inter}={name} runs between nodes"
            yield sum(map(math.prod, shapes.values())), which
            return
        rails = levels.rails if levels else 1
        found: Counter[str] = Counter()
        for rail in range(rails):
            for number, which in self.inter.left_exact(part_shapes(shapes, rail, rails), inter):
                found[which] += number
        yield from ((number, which) for which, number in found.items())

    def children(self) -> Iterable[Exchange]:
        return (self.inter,)

    def add_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        levels = self._levels
        if levels is None or levels.rail is None:
            return
        part = _zeros(part_shapes(bucket.shapes, levels.rail, levels.rails), bucket.flat)
        self.inter.add_residual(part, levels)
        own = shares(bucket.flat, bucket.shapes, levels.rail, levels.rails)
        for (name, start, stop), values in zip(part.spans(), own, strict=True):
            values += part.flat[start:stop]
            if name in self.carried:
                values += record_stream(self.carried[name])

    def flush_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        self.add_residual(bucket, comm)
        levels = self._levels
        if levels and levels.rail is not None:
            part = _zeros(part_shapes(bucket.shapes, levels.rail, levels.rails), bucket.flat)
            self.inter.flush_residual(part, levels)
        for name in bucket.shapes:
            self.carried.pop(name, None)

    def residuals(self, shapes: Shapes, comm: Comm) -> Iterator[ResidualPart]:
        of_inter = (values for kind in self.inter.state_dict().values() for values in kind.values())
        like = next(chain(self.carried.values(), of_inter), None)
        if like is not None:
            whole = _zeros(shapes, like.new_empty(0, dtype=torch.float32))
            self.add_residual(whole, comm)
            yield from ((name, 0, whole.flat[start:stop]) for name, start, stop in whole.spans())

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
                f"state_dict: its ranks were on nodes {_nodes(state)}; use the same nodes, "
                "or call redistribute"
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
            one._levels = CommLevels.at(each, nodes)
            one._take(state)
            one.flush_residual(total, one._levels)
        nodes = self._levels.nodes if self._levels else each_alone(size)
        levels, carried = CommLevels.at(rank, nodes), dict[str, Tensor]()
        if levels.rail is not None:
            own = shares(total.flat, shapes, levels.rail, levels.rails)
            carried = {n: (v / levels.size).float() for n, v in zip(shapes, own, strict=True)}
        return self.state_dict() | {"carried": carried, "shapes": states[0]["shapes"]}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.inter.load_state_dict({key: v for key, v in state.items() if key not in OWN})
        self.carried = {name: value.clone() for name, value in state["carried"].items()}
        self._shapes = {name: shape.cpu() for name, shape in state["shapes"].items()}


def is_relayed(inter: Exchange) -> TypeGuard[TwoStage]:
    """Return whether messages of `inter` may travel inside the nodes, too."""
    return isinstance(inter, TwoStage) and runs_as_the_labs(inter)


def _smallest_node(size: int, local: int) -> int:
    """Return the ranks of the smallest node, where all but the last have `local`."""
    return size - local * (-(-size // local) - 1)


@lru_cache(maxsize=10_000)
def _message_bytes(codec: Codec, shapes: tuple[Shape, ...], size: int) -> int:
    named = {str(number): shape for number, shape in enumerate(shapes)}
    return codec.layout(named, sum(map(math.prod, shapes)), size).num_bytes


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


@dataclass(frozen=True)
class CommLevels:
    """The two levels of a comm, as one of its ranks sees them; of its rail it is a `Ranks`.

    Attributes:
        nodes: the comm's.
        rail: which rail this rank is on; None: its node has more ranks than the smallest, and this
            is one of them.
        rank: number among the ranks of the rail. size: how many these are, one on each node.
        intra_node: the ranks of this node; None: every node has a single one.
        inter_node: the ranks of this rail; None: there is one node, or this rank is on no rail.
    """

    nodes: Nodes
    rail: int | None
    rank: int
    size: int
    intra_node: Comm | None = None
    inter_node: Comm | None = None

    @property
    def rails(self) -> int:
        """How many rails there are: as many as the smallest node has ranks."""
        return min(map(len, self.nodes))

    @classmethod
    def at(cls, rank: int, nodes: Nodes) -> CommLevels:
        """Return the levels as `rank` sees them, without their comms."""
        local = next(list(node).index(rank) for node in nodes if rank in node)
        if local >= min(map(len, nodes)):
            return cls(nodes, None, 0, len(nodes))
        return cls(nodes, local, sorted(node[local] for node in nodes).index(rank), len(nodes))

    @classmethod
    def of(cls, comm: Comm) -> CommLevels:
        """Split `comm`, unless it has one level alone. A collective call."""
        own = cls.at(comm.rank, comm.nodes)
        if not is_split(own.nodes):
            alone = len(own.nodes) == 1
            return replace(own, **{"intra_node" if alone else "inter_node": comm})
        inside = comm.split(next(at for at, node in enumerate(own.nodes) if comm.rank in node))
        across = comm.split(own.rails if own.rail is None else own.rail)
        return replace(own, intra_node=inside, inter_node=None if own.rail is None else across)


def is_split(nodes: Nodes) -> bool:
    """Return whether there are two levels: several nodes, one with several ranks."""
    return len(nodes) > 1 and max(map(len, nodes)) > 1


def part_shapes(shapes: Shapes, rail: int, rails: int) -> dict[str, torch.Size]:
    """Return the shape of each parameter's share, which may have no rows."""
    return {name: torch.Size(part_shape(shape, rail, rails)) for name, shape in shapes.items()}


def shares(flat: Tensor, shapes: Shapes, rail: int, rails: int) -> Iterator[Tensor]:
    """Yield each parameter's share in `flat`, which holds all parameters: views [values]."""
    start = 0
    for shape in shapes.values():
        rows, width = rows_of(shape)
        part = share(rows, rail, rails)
        yield flat[start + part.start * width : start + part.stop * width]
        start += rows * width


class RailBlocks:
    """A bucket as one block for each rank of a node: block l is the part of rail l.

    Blocks are as long as the longest part. Ranks beyond the rails get one that nobody uses, so that
    the library's collectives serve uneven nodes too. A single parameter whose rows the rails share
    evenly needs no copy.

    Args:
        local: ranks on this node.
        rails: how many of them are on a rail.

    Attributes:
        memory: float32 [local, values of the longest part].
        parts: for each rail the bucket of its part, in this memory.
    """

    def __init__(self, bucket: GradBucket, local: int, rails: int) -> None:
        self._flat, self._plans = bucket.flat, bucket.plans
        parts = [list(shares(bucket.flat, bucket.shapes, rail, rails)) for rail in range(rails)]
        longest = max(sum(map(len, part)) for part in parts)
        is_even = local == rails and local * longest == len(bucket.flat)
        self._in_place = is_even and len(bucket.shapes) == 1
        if self._in_place:
            self.memory = bucket.flat.view(local, longest)
        else:
            self.memory = bucket.plans.scratch("blocks", bucket.flat, local, longest)
        self.parts = [self._part(bucket, rail, rails) for rail in range(rails)]
        self._values = [values for part in parts for values in part]
        self._places = [
            place
            for part, block in zip(parts, self.memory, strict=False)
            for place in block[: sum(map(len, part))].split([len(values) for values in part])
        ]

    def _part(self, bucket: GradBucket, rail: int, rails: int) -> GradBucket:
        shapes = part_shapes(bucket.shapes, rail, rails)
        flat = self.memory[rail, : sum(shape.numel() for shape in shapes.values())]
        plans = bucket.plans.setdefault(("rail", rail, rails), Plans())
        return GradBucket(shapes, flat, bucket.step, bucket.divided, plans=plans)

    def arriving(self, inside: Comm) -> Tensor | None:
        """Return memory like the blocks for a reduce-scatter; None where it needs none: NCCL."""
        if inside.backend == "nccl":
            return None
        return self._plans.scratch("arriving", self._flat, *self.memory.shape)

    def fill(self) -> None:
        """Copy the bucket into the blocks."""
        if not self._in_place:
            torch._foreach_copy_(self._places, self._values)

    def empty(self) -> None:
        """Copy the blocks back into the bucket."""
        if not self._in_place:
            torch._foreach_copy_(self._values, self._places)


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's rows, and the values in each. A scalar is one row, a value a column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def share(rows: int, rail: int, rails: int) -> slice:
    """Return those of `rows` rows that a rail carries, maybe none."""
    return slice(rail * rows // rails, (rail + 1) * rows // rails)


def part_shape(shape: Sequence[int], rail: int, rails: int) -> tuple[int, ...]:
    """Return the shape of the rows that a rail carries."""
    rows = share(rows_of(shape)[0], rail, rails)
    return (rows.stop - rows.start, *shape[1:])
