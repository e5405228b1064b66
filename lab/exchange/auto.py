"""Choose among exchanges, for each bucket, by what they would cost and by what steps then take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.distributed.comm import Collective, Comm, SilentComm
from lab.exchange.base import Exchange, Shapes
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.exchange.hierarchical import Hierarchical
from lab.exchange.schedule import Composite, Schedule
from lab.measure.clock import Mark, mark, seconds
from lab.settings import checks

Key = tuple[str, ...]  # the parameters of a bucket
Configuration = dict[Key, str]  # the exchange of each bucket
BY_BUCKET = "by bucket"  # the configuration in which buckets may have different exchanges
SLACK = 1.25  # by which a prediction may err
FIRST = 2  # timed steps of a visit in the first round: one of them may be a stall
COLD = 2  # steps that do not count in a visit of the first round: memory is allocated
NEAR = 0.1  # of the fastest: who is within may still win
NUM_FASTEST = 5, 3  # that go on after the first round, and after later ones
ENOUGH_S = 0.05  # a transfer of so long tells the rate of a link
LEAST_VALUES, MOST_VALUES = 2**14, 2**20  # float32 values of the transfers that are timed
TINY_TIMES = 5


class Auto(Composite):
    """The exchange of several that makes steps shortest here, by buckets if that is faster still.

    A bucket that is new is exchanged silently by each candidate in turn. Its own work, its messages
    and the rate of the links, which a few transfers tell, predict a cost. Then whole steps are
    timed: of each candidate in all buckets, and of the cheapest one for each bucket. A step shows
    what no bucket does by itself: work that delays backward, and transfers that backward hides. The
    slowest rank's median counts; a Tuner says which steps to time and what wins.

    Trials end after half of a run, or at once when a checkpoint has the choice. A bucket that did
    not take part in them has the first one's exchange. Choices depend on timing, so two runs may
    differ.

    Args:
        candidates: exchanges by name.
        among: names of those to choose among; the first is preferred where others are no faster.
        rounds, tolerance: see Tuner.

    Raises:
        ValueError: an argument out of range, or an exchange that cannot be used in this role.
    """

    def __init__(
        self,
        candidates: Mapping[str, Exchange],
        among: Sequence[str],
        rounds: int,
        tolerance: float,
    ) -> None:
        _check(candidates, among)
        super().__init__({name: candidates[name] for name in among}, "exchange.candidates.")
        self.exact = False
        self.rounds = checks.integer("exchange.rounds", rounds, 1)
        self.tolerance = checks.number("exchange.tolerance", tolerance, at_least=0, below=1)
        self.chosen: dict[str, str] = {}  # names, by the bucket's first parameter
        self.tried: dict[str, float] = {}  # seconds of a step in each configuration
        self._chosen_at: int | None = None
        self._fresh = deepcopy(self.parts)  # whose costs are probed
        self._costs: dict[Key, dict[str, ExchangeCost]] = {}  # by candidate
        self._link: HockneyLink | None = None
        self._trial: _Trial | None = None
        self._seen: list[Key] = []  # buckets since the last turn began
        self._is_new, self._first_step, self._step = False, 0, -1

    def add_cost(self, costs: Costs) -> bool:
        """Add the stages of whatever is fastest for this bucket by itself."""
        before, tried = costs.stages, list[tuple[float, list[Any]]]()
        for exchange in self.parts.values():
            costs.stages = []
            tried.append((costs.add(exchange), costs.stages))
        costs.stages = [*before, *min(tried, key=lambda each: each[0])[1]]
        return True

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Count a copy of the largest bucket as well, which the cost probe needs."""
        needs = super().memory_bytes(sizes)
        copied = 0 if sizes.chosen else 4 * sizes.largest
        return needs._replace(scratch=needs.scratch + copied)

    @property
    def settled_at(self) -> int | None:
        return self._chosen_at

    def choose(self, bucket: GradBucket, comm: Comm) -> str:
        if not self.chosen:
            return self._try(bucket, comm)
        return self.chosen.get(next(iter(bucket.shapes)), next(iter(self.chosen.values())))

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        """Average a bucket while others may be at other stages.

        A connection may serve the first stage of one exchange and the second of another, so those
        that run in the same step have their own connections. While buckets are new, none overlap.
        """
        name = self.choose(bucket, comm)
        exchange = self.switch(name, bucket, comm)
        now = {*(self._trial.configuration if self._trial else self.chosen).values()}
        if not now:
            exchange.average(bucket, comm)
            return
        yield from exchange.stages(bucket, comm.dup(name) if len(now) > 1 else comm)

    def _try(self, bucket: GradBucket, comm: Comm) -> str:
        """Return the exchange that is tried. A turn ends when the first bucket comes again."""
        key = tuple(bucket.shapes)
        if self._link is None:
            self._link, self._first_step = probe_link(comm, bucket.flat.device), bucket.step
        if key in self._seen and bucket.step != self._step:
            self._end_turn(bucket, comm)
            if self.chosen:
                return self.choose(bucket, comm)
        self._seen.append(key)
        self._step = bucket.step
        if self._trial:
            now = self._trial.configuration
            return now.get(key, next(iter(now.values())))
        if key not in self._costs:
            self._is_new = True
            found = probe_costs([*self._fresh.values()], bucket, self._link, comm)
            self._costs[key] = dict(zip(self._fresh, found, strict=True))
        return self._cheapest(key)

    def _end_turn(self, bucket: GradBucket, comm: Comm) -> None:
        if self._trial:
            self._trial.end_turn(comm, bucket.flat.device)
        elif not self._is_new:
            self._trial = self._planned(self._seen)
        self._seen, self._is_new = [], False
        if self._trial is None:
            return
        tuner = self._trial.tuner
        if self.total_steps and bucket.step >= (self._first_step + self.total_steps) / 2:
            tuner.stop()
        if tuner.winner is None:
            self._trial.begin = mark(bucket.flat.device)
            return
        names = [*self._trial.configurations]
        winner = self._trial.configurations[names[tuner.winner]]
        self.chosen = {key[0]: name for key, name in winner.items()}
        self.tried = {names[at]: median_s for at, median_s in tuner.medians().items()}
        self._chosen_at, self._trial = bucket.step, None

    def _planned(self, keys: Sequence[Key]) -> _Trial:
        """Return a trial of all configurations of some buckets."""
        configurations = {name: dict.fromkeys(keys, name) for name in self.parts}
        by_bucket = {key: self._cheapest(key) for key in keys}
        if len({*by_bucket.values()}) > 1:
            configurations[BY_BUCKET] = by_bucket
        predicted, least = list[float](), list[float]()
        for each in configurations.values():
            costs = [self._costs[key][name] for key, name in each.items()]
            works_s, wires_s = (sum(seconds) for seconds in zip(*costs, strict=True))
            predicted.append(works_s + wires_s)
            least.append(max(works_s, wires_s))  # if all of one's work hides others' messages
        return _Trial(configurations, Tuner(predicted, least, self.rounds, self.tolerance))

    def _cheapest(self, key: Key) -> str:
        alone = {at: sum(cost) for at, cost in enumerate(self._costs[key].values())}
        return [*self.parts][preferred(alone, self.tolerance)]

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        buckets = (bucket for bucket in self._costs if bucket[0] in self.chosen)
        by_parameter = {name: self.chosen[bucket[0]] for bucket in buckets for name in bucket}
        chosen = {*self.chosen.values()}
        for name, exchange in self.parts.items():
            if name in chosen:  # buckets are unknown to a run that resumed with the choice
                every = len(chosen) == 1
                taken = {n: s for n, s in shapes.items() if every or by_parameter.get(n) == name}
                yield from exchange.left_exact(taken, f"{key}{self._keys[name]}")

    def choices(self) -> list[dict[str, Any]]:
        """Return the chosen exchange of each bucket, and what was predicted and timed."""
        predicted = {
            key[0]: {name: sum(cost) for name, cost in each.items()}
            for key, each in self._costs.items()
        }
        buckets = [
            {"bucket": bucket, "chosen": name, "predicted_s": predicted.get(bucket)}
            for bucket, name in self.chosen.items()
        ]
        return [*buckets, {"step_s": self.tried, "chosen_at": self._chosen_at}] if buckets else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all candidates, and the choice."""
        place = {name: torch.tensor(at) for at, name in enumerate(self.parts)}
        chosen = {bucket: place[name] for bucket, name in self.chosen.items()}
        tried = {name: torch.tensor(s, dtype=torch.float64) for name, s in self.tried.items()}
        return {**super().state_dict(), "chosen": chosen, "tried": tried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the choice, if there is one; if it is undone, all is tried anew."""
        super().load_state_dict(state)
        names = [*self.parts]
        chosen = {bucket: names[int(at)] for bucket, at in state["chosen"].items()}
        if chosen != self.chosen:
            self._trial, self._costs, self._seen = None, {}, []
            self._chosen_at = 0 if chosen else None
        self.chosen = chosen
        self.tried = {name: float(s) for name, s in state["tried"].items()}

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Redistribute the candidates' states; other numbers of ranks may need other choices."""
        return {**super().redistribute(states, rank, size), "chosen": {}, "tried": {}}


class _Trial:
    """Configurations that take turns, and the times of their steps."""

    def __init__(self, configurations: Mapping[str, Configuration], tuner: Tuner) -> None:
        self.configurations, self.tuner = dict(configurations), tuner
        self.begin: Mark = 0.0  # of this turn
        self._spans: list[tuple[Mark, Mark]] = []  # of this visit

    @property
    def configuration(self) -> Configuration:
        """The one to use now."""
        return [*self.configurations.values()][self.tuner.current]

    def end_turn(self, comm: Comm, device: torch.device) -> None:
        """Note a turn; tell the tuner if it was a visit's last. All ranks call this."""
        self._spans.append((self.begin, mark(device)))
        untimed = self.tuner.num_untimed
        if len(self._spans) < untimed + self.tuner.num_timed:
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once a visit
        own = [seconds(*span) for span in self._spans[untimed:]]
        self.tuner.end_visit(of_all(own, comm, device).amax(dim=0).tolist())
        self._spans.clear()


def _check(candidates: Mapping[str, Exchange], among: object) -> None:
    names = among if isinstance(among, Sequence) and not isinstance(among, str) else ()
    if not names or len({*names}) < len(names) or not set(names) <= candidates.keys():
        allowed = ", ".join(candidates)
        raise ValueError(
            f"exchange.among={among}: must be a list of different names from {allowed}"
        )
    for name in names:
        if isinstance(candidates[name], Auto | Schedule | Hierarchical):
            kind = type(candidates[name]).__name__
            raise ValueError(
                f"exchange.candidates.{name}={kind} is made of other exchanges, but a candidate "
                "must be a single one; to choose the exchange between nodes, use "
                "exchange=hierarchical exchange@exchange.inter=auto"
            )


class Tuner:
    """Rounds in which configurations take turns, until one is chosen.

    A visit of round r is a step that does not count, as it begins with what the last configuration
    left (two in round 1, where it is cold), and r + 1 steps that do. Round 1 has all, by their
    predictions, but those whose exchange would outlast a whole step of the fastest so far, whatever
    overlaps. Later ones have the fastest, and the first of those near it, in the opposite order
    than the round before.

    It knows no clock and no ranks: whoever runs the steps tells the same seconds on all ranks.

    Args:
        predicted: seconds of each configuration's exchange without any overlap. Configurations come
            in order of preference.
        least: seconds of it if all overlaps that can.
        rounds: how many, at most.
        tolerance: share of a step by which a preferred one may be slower.

    Attributes:
        current: place of the configuration that runs.
        num_untimed, num_timed: its first steps in this visit, and then those that count.
        winner: place of the chosen one; None: not known yet.
    """

    def __init__(
        self, predicted: Sequence[float], least: Sequence[float], rounds: int, tolerance: float
    ) -> None:
        self._predicted, self._least = list(predicted), list(least)
        self._rounds, self._tolerance = rounds, tolerance
        self._seconds: list[list[float]] = [[] for _ in predicted]
        self._left = set(range(len(predicted)))  # those of this round
        self._waiting = sorted(self._left, key=self._predicted.__getitem__)
        self.current = self._waiting.pop(0)
        self.num_untimed, self.num_timed = COLD, FIRST
        self.winner: int | None = None

    def end_visit(self, seconds: Sequence[float]) -> None:
        """Take the times of the visit's steps that count, and go on to the next visit."""
        self._seconds[self.current] += seconds
        if self.num_timed == FIRST:
            limit = SLACK * min(self.medians().values())
            self._waiting = [each for each in self._waiting if self._least[each] <= limit]
        if not self._waiting:
            self._begin_round()
        if self._waiting:
            self.current = self._waiting.pop(0)

    def stop(self) -> None:
        """Choose by what is known: whole steps, or predictions if there are none."""
        known = self._of_round() or dict(enumerate(self._predicted))
        self.winner = preferred(known, self._tolerance)

    def medians(self) -> dict[int, float]:
        """Return the (low) median seconds of a step, by place, of those that had one."""
        return {at: median_low(times) for at, times in enumerate(self._seconds) if times}

    def _of_round(self) -> dict[int, float]:
        return {at: time for at, time in self.medians().items() if at in self._left}

    def _begin_round(self) -> None:
        known = self._of_round()
        near = {at: time for at, time in known.items() if time <= (1 + NEAR) * min(known.values())}
        num_fastest = NUM_FASTEST[self.num_timed > FIRST]
        self._left = {min(near), *sorted(near, key=near.__getitem__)[:num_fastest]}
        if self.num_timed + 1 == FIRST + self._rounds or len(self._left) == 1:
            self.stop()
            return
        self.num_untimed, self.num_timed = 1, self.num_timed + 1
        backwards = (self.num_timed - FIRST) % 2 == 1
        self._waiting = sorted(self._left, key=self._predicted.__getitem__, reverse=backwards)


def preferred(seconds: Mapping[int, float], tolerance: float) -> int:
    """Return the first key whose seconds are hardly more than the fewest."""
    limit = (1 + tolerance) * min(seconds.values())
    return next(at for at in sorted(seconds) if seconds[at] <= limit)


class HockneyLink(NamedTuple):
    """The links between ranks as Hockney's model sees them (Parallel Computing 20, 1994).

    Attributes:
        message_s: seconds of a message.
        byte_s: seconds of a byte that the busiest node sends to others.
    """

    message_s: float
    byte_s: float


class ExchangeCost(NamedTuple):
    """Seconds of a bucket's exchange: a rank's own work, and messages on their way."""

    work_s: float
    wire_s: float


def of_all(numbers: Sequence[float], comm: Comm, device: torch.device) -> Tensor:
    """Return every rank's `numbers`, float64 [ranks, numbers], on the host.

    It is a sum, not an all-gather, which an exchange under way might use for its second stage.
    """
    table = torch.zeros(comm.size, len(numbers), dtype=torch.float64)
    table[comm.rank] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to(device)
    comm.all_reduce(table)
    return table.cpu()


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of `work`; on a GPU the host waits for them."""
    begin = mark(device)
    work()
    end = mark(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return seconds(begin, end)


def probe_link(comm: Comm, device: torch.device) -> HockneyLink:
    """Time a few all-reduces, of a value and of more until one takes long; all ranks call this."""
    if comm.size == 1:
        return HockneyLink(0.0, 0.0)
    tiny, sent = torch.zeros(1, device=device), comm.traffic.num_messages
    comm.all_reduce(tiny)  # connects
    num_messages = comm.traffic.num_messages - sent
    times = [timed(partial(comm.all_reduce, tiny), device) for _ in range(TINY_TIMES)]
    tiny_s = float(of_all([median(times)], comm, device).max())
    num_values = LEAST_VALUES
    while True:
        large, before = torch.zeros(num_values, device=device), _sent(comm)
        own_s = timed(partial(comm.all_reduce, large), device)
        rows = of_all([own_s, _sent(comm) - before], comm, device)
        large_s = float(rows[:, 0].max())
        if large_s >= ENOUGH_S or num_values >= MOST_VALUES:
            break
        num_values *= 4
    byte_s = max(0.0, large_s - tiny_s) / _of_busiest_node(rows[:, 1], comm)
    return HockneyLink(tiny_s / num_messages, byte_s)


def probe_cost(exchange: Exchange, bucket: GradBucket, comm: Comm) -> tuple[float, int, int]:
    """Average a copy of `bucket` among ranks that seem to have the same one; nothing is sent.

    Args:
        exchange: without state; it is left so.

    Returns:
        Seconds of this rank's work, messages, and bytes as `probe_costs` wants them.
    """
    silent, one = SilentComm(comm), deepcopy(exchange)
    own, own_s = GradBucket(bucket.shapes, bucket.flat.clone(), bucket.step), 0.0
    for _ in range(2):  # the first allocates memory
        silent.traffic = type(silent.traffic)()
        own.flat.copy_(bucket.flat)
        own_s = timed(partial(one.average, own, silent), bucket.flat.device)
    return own_s, silent.traffic.num_messages, _sent(silent)


def probe_costs(
    exchanges: Sequence[Exchange], bucket: GradBucket, link: HockneyLink, comm: Comm
) -> list[ExchangeCost]:
    """Predict the cost of each exchange for `bucket`, the same on all ranks, which call this.

    Work is the slowest rank's, bytes are those of the node that sends most.
    """
    own = [number for each in exchanges for number in probe_cost(each, bucket, comm)]
    rows = of_all(own, comm, bucket.flat.device).view(comm.size, len(exchanges), 3)
    found = list[ExchangeCost]()
    for work_s, num_messages, num_bytes in rows.permute(1, 2, 0):
        wire_s = link.message_s * float(num_messages.max())
        wire_s += link.byte_s * _of_busiest_node(num_bytes, comm)
        found.append(ExchangeCost(float(work_s.max()), wire_s))
    return found


def _sent(comm: Comm) -> int:
    """Return the bytes that a rank has sent to other nodes, or to other ranks on the only node."""
    traffic = comm.traffic
    return traffic.across_bytes if len(comm.nodes) > 1 else traffic.payload_bytes


def _of_busiest_node(by_rank: Tensor, comm: Comm) -> float:
    return max(float(by_rank[list(node)].sum()) for node in comm.nodes)
