"""Run a model under a loop, an exchange and an entrance, and judge what came of it."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import json
import math
import pickle
import random
import re
import threading
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lab
from lab.certificate.examination import CertificateError
from lab.distributed import comm as comm_module
from lab.distributed.comm import Comm, Traffic
from lab.distributed.launcher import Nodes, RankInfo
from lab.distributed.replicas import broadcast_state
from lab.distributed.worker import make_worker
from lab.distributed.world import World
from lab.exchange.base import Exchange
from lab.exchange.gate import admit
from lab.exchange.layout import COMPILED, travel_shape, travelling
from lab.loop import attach, setup
from lab.loop import check as loop_check
from lab.settings.config import build, load
from lab.settings.files import choices_of
from lab.sync.base import Sync, SyncParts
from tests.support.ranks import Crew
from tests.zoo import fuzz
from tests.zoo.loops import LOOPS, DoesNotApply, Handle, Loop, Named, Run
from tests.zoo.models import MODELS, Model
from tests.zoo.reference import Result, Truth, mean, truth

RIGHT, REFUSED, SKIPPED = "right", "refused", "does not apply"
BAD = ("wrong", "crashed", "misleading")
LIMIT_S = 60.0  # a case that takes longer hangs; beside busy processes some take many seconds
EXCHANGES = [name for name in choices_of("exchange") if name != "none"]
# Threads by lab.grad_sync, processes over Gloo by it and by lab.attach, and threads by lab.train's
# syncs, where the exchange is the name of a strategy.
ENTRANCES = ("grad_sync", "gloo", "attach", "sync")
PROCESSES = ("gloo", "attach")
# Strategies whose weights are right after each step, or a step late; more settings.
SYNCS: dict[str, tuple[str, ...]] = {
    "overlap": (),
    "layerwise": (),
    "tree_overlap": (),
    "zero1": (),
    "caffe": (),
    "torch7": (),
    "tensorflow": (),
    "local_sgd": ("sync.every=1",),
    "priority": ("sync.trials=0", "sync.chunk_mb=0.01"),
    "cntk": ("exchange=allreduce",),
    "late": ("strategy=cntk", "exchange=allreduce", "sync.double_buffer=true"),
}
# More settings, in some of the cases: small parameters are then compressed too.
SMALL: dict[str, dict[str, Any]] = {
    "onebit": {"exchange.min_columns": 8},
    "int8": {"exchange.block_size": 64},
    "int4": {"exchange.block_size": 16},
    "signsgd_ef": {"exchange.min_values": 16},
    "topk": {"exchange.ratio": 0.1},
    "powersgd": {"exchange.rank": 1},
}
BUCKETS_MB = (25, 0.01, 0, None, 0.001)


class Snapshots(dict[int, Any]):
    """Hooks of all optimizers, which threads add and remove while others call them."""

    def values(self) -> Any:
        return list(super().values())


_module: Any = importlib.import_module("torch.optim.optimizer")
for _name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
    setattr(_module, _name, Snapshots(getattr(_module, _name)))
TRANSPORT = threading.local()  # the comm that the next lab.grad_sync of this thread is to use
KEYED = re.compile(r"^[\w.]+(=\S*)?:? ")  # a message that begins with what it is about


@dataclass(frozen=True)
class Case:
    """A cell of the product.

    Attributes:
        plain: DDP alone, without the lab, to see what it does itself.
    """

    model: str
    loop: str
    exchange: str
    entrance: str
    plain: bool = False

    def __str__(self) -> str:
        words = f"model={self.model} loop={self.loop} exchange={self.exchange}"
        return f"{words} entrance={self.entrance}"

    @property
    def number(self) -> int:
        """A number by which cases differ in what is not in their names."""
        return zlib.crc32(str(self).encode())

    @property
    def size(self) -> int:
        """The number of ranks."""
        if self.entrance in PROCESSES:
            return 2
        return 4 if self.exchange.startswith("hierarchical") else (2, 2, 3, 4)[self.number % 4]

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings besides the exchange."""
        small = SMALL.get(self.exchange, {}) if self.number // 3 % 2 else {}
        if self.exchange == "schedule":
            small = {"exchange.until": [1, 2] if self.number // 5 % 2 else [2, 4]}
        if self.entrance == "attach":
            return small
        bucket_mb = BUCKETS_MB[self.number // 7 % len(BUCKETS_MB)]
        return {"overlap": bool(self.number // 2 % 2), "bucket_mb": bucket_mb, **small}


@dataclass(frozen=True)
class Outcome:
    """What became of a case: RIGHT, REFUSED, SKIPPED or one of BAD; and why."""

    kind: str
    said: str = ""


@dataclass(frozen=True)
class Failure:
    """An error of a rank.

    Attributes:
        kind: its class.
        is_value: it is a ValueError, as ConfigError is.
        of_lab: the lab raised it.
        after: exchanges before it; None: it came before the loop had a handle.
        trace: the end of its traceback.
    """

    kind: str
    text: str
    is_value: bool
    of_lab: bool
    after: int | None
    trace: str

    @classmethod
    def of(cls, error: BaseException, run: Run) -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        of_lab = bool(frames) and "/lab/" in frames[-1].filename
        after = sum(len(handle.delivered) for handle in run.handles) if run.handles else None
        where = " < ".join(f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames[:-5:-1])
        is_value = isinstance(error, ValueError)
        return cls(type(error).__name__, str(error), is_value, of_lab, after, where)

    def __str__(self) -> str:
        when = "at set-up" if self.after is None else f"after {self.after} exchanges"
        return f"{self.kind} {when}: {self.text[:300]} [{self.trace}]"


class ThreadWorld(World):
    """A World whose ranks are threads."""

    def gather(self, values: Tensor) -> Tensor:
        out = values.new_empty(self.size, *values.shape)
        self.control.all_gather(out, values.contiguous())  # type: ignore[attr-defined]
        return out

    def meet(self, event: str, facts: Mapping[str, str], limit_s: float) -> str:
        self.require_equal(facts)
        return ""


def _world_of(group: Any, device: torch.device, timeout_s: float = 300.0) -> World:
    """Stand in for lab.loop.setup.world_of, among threads."""
    comm: Comm | None = getattr(TRANSPORT, "comm", None)
    if comm is None:
        return setup.world_of(group, device, timeout_s)
    own, control = comm.split(0), comm.split(0)
    own.traffic = Traffic()  # two syncs of a rank count by themselves, as in lab.loop.setup
    place = RankInfo("python", comm.rank, comm.size, comm.rank, comm.size, dist.HashStore())
    store = dist.PrefixStore("lab", place.store)
    more: Any = {"comm": own, "control": control}
    return ThreadWorld(place, device, store, **more)


@cache
def _composed(strategy: str, overrides: str, own: tuple[str, ...]) -> Any:
    return setup.compose(strategy, json.loads(overrides), own)


def _compose(strategy: str, overrides: Any, own: tuple[str, ...] = ()) -> Any:
    """Stand in for lab.loop.setup.compose: threads cannot compose, and once is enough."""
    try:
        text = json.dumps(dict(overrides))
    except TypeError:  # wrong values, of other tests in this process
        return setup.compose(strategy, overrides, own)
    return copy.deepcopy(_composed(strategy, text, own))


_attach: Any = attach
_attach.compose, _attach.world_of = _compose, _world_of
# Optimizers of all threads are seen by each other's checks, as if they were of copies.
loop_check.trains_copy = lambda sync, optimizer: False


class LabHandle(Handle):
    """A handle of lab.grad_sync."""

    def __init__(self, net: nn.Module, scaler: Any, case: Case) -> None:
        super().__init__(net, scaler)
        self.sync = lab.grad_sync(net, case.exchange, scaler=scaler, **case.overrides)
        self.sync.__enter__()
        self.accumulate = self.sync.accumulate

    def exchange(self) -> None:
        self.sync.finish()

    def state_dict(self) -> Any:
        return self.sync.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.sync.load_state_dict(state)

    def close(self) -> None:
        self.sync.__exit__()

    @property
    def parts(self) -> tuple[Exchange, Comm]:
        return self.sync.exchange, self.sync.comm


class DDPHandle(Handle):
    """A handle of DistributedDataParallel, with lab.attach unless `case.plain`."""

    def __init__(self, net: nn.Module, scaler: Any, case: Case, facts: dict[str, Any]) -> None:
        super().__init__(net, scaler)
        module = DistributedDataParallel(net, **facts)
        self.module, self.accumulate = module, module.no_sync
        self.state = None
        if not case.plain:
            self.state = lab.attach(module, case.exchange, scaler=scaler, **case.overrides)

    def state_dict(self) -> Any:
        return self.state.state_dict() if self.state else {}

    def load_state_dict(self, state: Any) -> None:
        if self.state:
            self.state.load_state_dict(state)

    def close(self) -> None:
        if self.state:
            self.state.close()

    @property
    def parts(self) -> tuple[Exchange, Comm]:
        assert self.state
        return self.state.exchange, self.state.comm


class SyncHandle(Handle):
    """A handle of one of lab.train's syncs."""

    def __init__(self, net: nn.Module, case: Case, comm: Comm) -> None:
        super().__init__(net, None)
        config = copy.deepcopy(_strategy(case.exchange))
        exchange: Exchange = build(config.exchange)
        admit(net, exchange)
        broadcast_state(net, _world_of(None, torch.device("cpu")))
        asynchronous = exchange.asynchronous(comm)
        worker = make_worker(config.overlap, torch.device("cpu"), comm.backend, asynchronous)
        bucket_mb = config.bucket_mb and BUCKETS_MB[case.number % len(BUCKETS_MB)]
        parts = SyncParts(net, net, exchange, comm, worker, config.overlap, bucket_mb)
        self.sync: Sync = build(config.sync, parts)
        self.sync.__enter__()
        self.micro_batch, self.optimized = self.sync.micro_batch, self.sync.optimized
        self._worker, self._is_open = worker, True

    @property
    def factor(self) -> float:
        return self.sync.loss_factor

    def finish(self) -> None:
        self.sync.finish()

    def update(self, optimizer: torch.optim.Optimizer, last: bool) -> None:
        self.sync.update(optimizer)
        self.sync.after_update(last)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.sync.settle()
            self.sync.__exit__()
            self._worker.close()


class Tested(Run):
    """A rank of the entrance under test."""

    def __init__(self, case: Case, rank: int, right: Truth | None, comm: Comm | None) -> None:
        super().__init__(model_of(case.model), rank, case.size)
        self.case, self.comm = case, comm
        self.right = None if is_exact(case) else right

    def enter(self, net: nn.Module, scaler: Any, place: int) -> Handle:
        TRANSPORT.comm = self.comm
        if self.case.entrance == "sync":
            assert self.comm
            return SyncHandle(net, self.case, self.comm)
        handle: Handle
        if self.case.entrance == "attach":
            handle = DDPHandle(net, scaler, self.case, self.model.ddp)
        else:
            handle = LabHandle(net, scaler, self.case)
        if self.right:
            handle.follow = self.right.ranks[self.rank].delivered[place]
        return handle


def model_of(name: str) -> Model:
    """Return a model of the zoo by name, or a random one: fuzz:NUMBER."""
    kind, _, number = name.partition(":")
    return fuzz.model_of(int(number)) if kind == "fuzz" else MODELS[name]


def is_exact(case: Case) -> bool:
    """Return whether all ranks must end with the reference's weights."""
    return case.plain or case.entrance == "sync" or _exchange(case.exchange).exact


@cache
def _strategy(name: str) -> Any:
    return load([*([f"strategy={name}"] if name != "late" else []), *SYNCS[name]])


@cache
def _exchange(name: str) -> Exchange:
    return build(_compose(name, {}).exchange)


def run_rank(case: Case, rank: int, right: Truth | None, comm: Comm | None) -> Result:
    """Run a loop to its end, or to an error."""
    result, run = Result(), Tested(case, rank, right, comm)
    try:
        LOOPS[case.loop].train(run)
        result.take(run)
        if right and not case.plain and case.entrance != "sync":
            _take_residuals(result, run, right)
        for handle in run.handles:
            handle.close()
    except BaseException as error:
        result.error = Failure.of(error, run)
        if isinstance(comm, comm_module.ThreadComm):
            _abort(comm.meeting)
    return result


def _abort(meeting: Any) -> None:
    """End all waits of other ranks."""
    meeting.barrier.abort()
    for part in list(meeting.parts.values()):
        _abort(part)


def _take_residuals(result: Result, run: Tested, right: Truth) -> None:
    for place, handle in enumerate(run.handles):
        assert isinstance(handle, LabHandle | DDPHandle)
        exchange, comm = handle.parts
        named = handle.net.named_parameters()
        shapes = {n.replace(COMPILED, ""): travel_shape(p) for n, p in named}
        result.kept.append([(n, at, v.clone()) for n, at, v in exchange.residuals(shapes, comm)])
        steps = right.ranks[0].own[place]
        given = [g for step in steps for one in step for g in one.values() if g is not None]
        sizes = [float(g.abs().max()) for g in given if g.numel()]
        largest = max(filter(math.isfinite, sizes), default=0.0)
        result.bounds.append(exchange.error_bound(largest, run.size))


def run_threads(case: Case) -> Outcome:
    """Run a case among threads of this process, and judge it."""
    if isinstance(right := _truth_of(case), Outcome):
        return right
    comm_module.TIMEOUT_S = LIMIT_S / 2
    if case.entrance == "sync":  # Hydra composes in one thread alone
        _strategy(case.exchange)
    else:
        _exchange(case.exchange)
        _compose(case.exchange, case.overrides, ("overlap", "bucket_mb"))
    nodes: Nodes | None = [[0, 1], [2, 3]] if case.size == 4 and case.number // 4 % 2 else None

    def rank_main(comm: Comm) -> Result:
        return run_rank(case, comm.rank, right, comm)

    return judged(case, comm_module.run_ranks(case.size, rank_main, nodes))


def run_process(case: Case) -> bytes | Outcome:
    """Run one rank of a case in this process, one of several that meet over Gloo.

    Returns:
        its Result, packed: torch would share each tensor by an open file.
    """
    if isinstance(right := _truth_of(case), Outcome):
        return right
    dist.init_process_group("gloo", timeout=torch.distributed.default_pg_timeout / 60)
    try:
        return pickle.dumps(run_rank(case, dist.get_rank(), right, None))
    finally:
        gc.collect()  # DDP must go before its process group: the last to go waits, with the GIL
        dist.destroy_process_group()


# Models that differ from others in many ways at once, for all loops under all exchanges.
HARD = (
    *("experts", "mixed_bits", "columns", "recomputed_twice"),
    *("unusedhead", "spectral", "tinyones"),
)


def cases_of(
    models: Iterable[str], loops: Iterable[str], exchanges: Iterable[str], entrances: Iterable[str]
) -> Iterator[Case]:
    """Yield all combinations that make sense."""
    exchanges = list(exchanges)
    for model, loop, entrance in itertools.product(models, loops, entrances):
        facts = LOOPS[loop]
        if facts.of_trainer != (entrance == "sync") or (entrance == "attach" and not facts.ddp):
            continue
        for exchange in exchanges:
            if exchange == "local_sgd" and model_of(model).uneven:
                continue
            late = (loop == "trained_late") == (exchange == "late")
            if (exchange in SYNCS and late) if entrance == "sync" else exchange in EXCHANGES:
                yield Case(model, loop, exchange, entrance)


def whole_product(chosen: Mapping[str, Iterable[str]]) -> list[Case]:
    """Return the cases of the product, ordered by what is right, which they share.

    Args:
        chosen: names of models, loops, exchanges or entrances; without any, see __main__.
    """
    exchanges = [*EXCHANGES, *(name for name in SYNCS if name not in EXCHANGES)]
    everything: dict[str, Iterable[str]] = {
        "model": MODELS,
        "loop": LOOPS,
        "exchange": exchanges,
        "entrance": ENTRANCES,
    }
    if chosen:
        return sorted(cases_of(*{**everything, **chosen}.values()), key=_together)
    all_cases = cases_of(MODELS, LOOPS, exchanges, ENTRANCES)
    return sorted((case for case in all_cases if case.number % _rarity(case) == 0), key=_together)


def _rarity(case: Case) -> int:
    """Return of how many such cases one is in the whole product: of 1, all are."""
    in_threads = case.entrance not in PROCESSES
    if case.loop in ("plain", "trained", "trained_late"):
        return 1 if in_threads else 5
    if case.model in HARD:
        return 4 if in_threads else 20
    return 24 if in_threads and not MODELS[case.model].slow else 120


def random_cases(num: int, seed: int) -> list[Case]:
    """Return cases of random models, numbered from `seed` on, each with a loop of its own."""
    cases = []
    for number in range(seed, seed + num):
        chance = random.Random(f"case {number}")
        entrance = chance.choice(("grad_sync", "grad_sync", *ENTRANCES))
        loops = [name for name, loop in LOOPS.items() if loop.of_trainer == (entrance == "sync")]
        if entrance == "attach":
            loops = [name for name in loops if LOOPS[name].ddp]
        if entrance == "gloo":  # a rank may refuse its own backward alone, and others then wait
            loops.remove("one_more_backward")
        loop = chance.choice([*loops, *["plain"] * (0 if entrance == "sync" else len(loops))])
        found = list(cases_of([f"fuzz:{number}"], [loop], [*EXCHANGES, *SYNCS], [entrance]))
        cases.append(chance.choice(found))
    return cases


def _together(case: Case) -> tuple[str, str, int, str]:
    return case.model, case.loop, case.size, str(case)


class Driver:
    """Processes that run one case after another; one that crashes or hangs is replaced."""

    def __init__(self) -> None:
        self._crew = Crew()

    def outcome(self, case: Case) -> Outcome:
        """Run a case, and judge it. What DDP alone cannot do either is no fault of the lab's."""
        found = self._outcome(case)
        if found.kind in BAD and case.entrance == "attach":
            plain = self._outcome(replace(case, plain=True))
            if plain.kind in BAD:
                return Outcome(SKIPPED, f"DDP alone: {plain.said}")
        if found.kind == "crashed" and (again := self._outcome(case)).kind != "crashed":
            lonely = f"not when alone, but after other cases: {found.said}"
            found = again if again.kind in BAD else Outcome("crashed", lonely)
        return found

    def close(self) -> None:
        """End the processes."""
        self._crew.dismiss()

    def _renew(self) -> None:
        self.close()
        self._crew = Crew()

    def _outcome(self, case: Case) -> Outcome:
        try:
            if case.entrance not in PROCESSES:
                return self._crew.call(1, run_threads, case, timeout_s=2 * LIMIT_S)[0]
            packed = self._crew.call(case.size, run_process, case, timeout_s=LIMIT_S)
            first = packed[0]
            if isinstance(first, Outcome):
                return first
            if any(result.error and result.error.after is not None for result in unpacked(packed)):
                self._renew()  # torch may hang where it frees a DDP after an error in backward
            return self._crew.call(1, judged_packed, case, packed, timeout_s=LIMIT_S)[0]
        except AssertionError as error:  # of the crew: a process has ended, or does not answer
            return Outcome("crashed", str(error).strip().splitlines()[-1])


def _truth_of(case: Case) -> Truth | Outcome | None:
    """Return what is right; None: to refuse; an Outcome: nothing is, as the loop does not apply."""
    model = model_of(case.model)
    try:
        return truth(model, LOOPS[case.loop], case.size)
    except DoesNotApply as error:
        return Outcome(SKIPPED, str(error))
    except Exception as error:  # torch cannot do it in one process
        if "always" in model.refused:
            return None
        return Outcome(SKIPPED, f"{type(error).__name__}: {str(error)[:200]}")


def judged(case: Case, results: list[Result]) -> Outcome:
    """Judge the results of all ranks."""
    right = _truth_of(case)
    errors = [result.error for result in results if result.error]
    if errors:
        return _judge_errors(case, errors)
    if right is None:
        return Outcome("wrong", "not refused")
    assert isinstance(right, Truth)
    faults = _faults(case, right, results)
    return Outcome("wrong", found) if (found := next(faults, "")) else Outcome(RIGHT)


def unpacked(packed: Iterable[bytes]) -> list[Result]:
    """Return the results that `run_process` packed."""
    return [pickle.loads(each) for each in packed]


def judged_packed(case: Case, packed: Iterable[bytes]) -> Outcome:
    """Judge the results that `run_process` packed."""
    return judged(case, unpacked(packed))


def _judge_errors(case: Case, errors: list[Failure]) -> Outcome:
    waited = ("BrokenBarrierError", "Empty")
    first = next((e for e in errors if e.kind not in waited), errors[0])
    if first.kind in waited:
        return Outcome("crashed", f"hangs: {first}")
    if first.kind == DoesNotApply.__name__:
        return Outcome(SKIPPED, first.text)
    loop, model = LOOPS[case.loop], model_of(case.model)
    if problem := _no_refusal(first, loop):
        kind = "misleading" if first.of_lab or first.is_value else "crashed"
        return Outcome(kind, f"{problem}: {first}")
    if not _may_refuse(case, f"{model.refused} {loop.refused}".split()):
        return Outcome("misleading", f"refused, though it could be right: {first}")
    return Outcome(REFUSED, first.text)


def _no_refusal(error: Failure, loop: Loop) -> str:
    """Return why an error is no proper refusal; empty if it is one."""
    if error.kind == CertificateError.__name__:
        return "a false accusation"
    if not (error.is_value or (error.kind == "RuntimeError" and error.of_lab)):
        return "an error that is no refusal"
    if "\n" in error.text.strip():
        return "a refusal of several lines"
    if not KEYED.match(error.text):
        return "a refusal that does not begin with what it is about"
    if error.after is not None and error.after > loop.unusual_at:
        return "a late refusal"
    return ""


def _may_refuse(case: Case, allowed: list[str]) -> bool:
    exchange = None if case.entrance == "sync" else _exchange(case.exchange)
    facts = {
        "always": True,
        "compressed": exchange is not None and torch.float64 not in exchange.dtypes,
        "direction": exchange is not None and exchange.delivers == "direction",
        "sync": case.entrance == "sync",
        "attach": case.entrance == "attach",
        "moved": case.exchange in ("zero1", "caffe", "tensorflow", "torch7"),
        "few": case.exchange == "zero1",
        "waits": case.exchange == "priority",
        "overlap": bool(case.overrides.get("overlap", True)),
    }
    return any(facts[word] for word in allowed)


def _faults(case: Case, right: Truth, results: list[Result]) -> Iterator[str]:
    """Yield what is wrong in the results of ranks that all came to the end."""
    if case.entrance != "sync":
        yield from _none_faults(right.ranks[0], results)
    yield from _replica_faults(results)
    if is_exact(case):
        yield from _weight_faults(case, right, results)
    elif LOOPS[case.loop].sums and _exchange(case.exchange).delivers == "mean":
        yield from _sum_faults(right.ranks[0], results)
    yield from _entry_faults(case, right, results)


def _none_faults(right: Result, results: list[Result]) -> Iterator[str]:
    for rank, result in enumerate(results):
        for found, due in zip(result.delivered, right.delivered, strict=True):
            if len(found) != len(due):
                yield f"{len(found)} exchanges, not {len(due)}"
            for step, (one, other) in enumerate(zip(found, due, strict=False)):
                for name, gradient in one.items():
                    expected = other.get(name)
                    if (gradient is None) != (expected is None):
                        has = "none, not one" if gradient is None else "a gradient, not none"
                        yield f"{name} has {has}, after exchange {step} on rank {rank}"
                if _is_finite(one) != _is_finite(other):
                    yield f"finite: {_is_finite(one)}, after exchange {step} on rank {rank}"


def _replica_faults(results: list[Result]) -> Iterator[str]:
    for rank, result in enumerate(results):
        for place, delivered in enumerate(result.delivered):
            for step, found in enumerate(delivered):
                for name, gradient in found.items():
                    one = results[0].delivered[place][step][name]
                    if not _same(one, gradient):
                        where = f"ranks 0 and {rank} after exchange {step}"
                        yield f"{name}'s gradients differ on {where}"
            for name, weight in result.weights[place].items():
                if not _same(results[0].weights[place][name], weight):
                    yield f"{name} differs on ranks 0 and {rank} at the end"


def _weight_faults(case: Case, right: Truth, results: list[Result]) -> Iterator[str]:
    triples = zip(
        _finals(results[0]), _finals(right.ranks[0]), _finals(right.rounded[0]), strict=True
    )
    for (name, found), (_, due), (_, rounded) in triples:
        noise, low = _norm(rounded, due), max(map(_eps, results[0].weights[0].values()))
        most = (0.1 if low else 1e-3) * _norm(due)  # low precision is told from noise alone
        allowed = min(10 * noise, most) + (3e-6 + 4 * _eps(found) + low / 10) * _norm(due)
        if not (off := _norm(found, due)) <= allowed:
            times = off / max(allowed, 1e-30)
            yield f"{name} is {off / max(_norm(due), 1e-30):.1e} off, {times:.0f} x what may be"


def _finals(result: Result) -> Iterator[tuple[str, Tensor]]:
    for weights in result.weights:
        yield from weights.items()
    yield from result.extras.items()


def _sum_faults(right: Result, results: list[Result]) -> Iterator[str]:
    """Compare N * delivered + kept with the sum of true gradients, by parameter."""
    size = len(results)
    for place, weights in enumerate(results[0].weights):
        kept: dict[str, Tensor] = {
            n: torch.zeros(math.prod(travel_shape(w)), dtype=torch.float64)
            for n, w in weights.items()
        }
        for result in results:
            for known, at, values in result.kept[place]:
                name = next(n for n in kept if n.replace(COMPILED, "") == known)
                kept[name][at : at + len(values)] += values
        steps = list(zip(results[0].delivered[place], right.own[place], strict=True))
        given = (g for _, own in steps for one in own for g in one.values() if g is not None)
        largest = sum(filter(math.isfinite, map(_norm, given)))  # bounds what rounding does
        low = max(map(_eps, weights.values()))
        for name, weight in weights.items():
            total, sent, magnitude, num = torch.zeros_like(kept[name]), kept[name], 0.0, 0
            for found, own in steps:
                given = [each for one in own if (each := one[name]) is not None]
                gradient = found[name]
                if not given or gradient is None or not _is_finite(found):
                    continue  # a step that a scaler skips leaves no trace
                num += 1
                total += travelling(mean(given, 1), weight)
                sent = sent + size * travelling(gradient.to(_wide(gradient)), weight)
                magnitude += sum(_norm(g) for g in given) + size * _norm(gradient)
            bound = num * size * results[0].bounds[place] * math.sqrt(len(total))
            allowed = (3e-5 + 2 * _eps(weight) + low / 10) * magnitude + 1e-6 * largest + bound
            off = _norm(total - sent)
            if not off <= allowed:
                share = off / max(magnitude, 1e-30)
                yield f"{name}: delivered + kept is {share:.1e} off the true sum"


def _entry_faults(case: Case, right: Truth, results: list[Result]) -> Iterator[str]:
    """Compare buffers; DDP leaves rank 0's alone."""
    ranks = [0] if case.entrance == "attach" else range(len(results))
    for rank in ranks:
        here = results[rank]
        for found, due, weights in zip(
            here.buffers, right.ranks[rank].buffers, here.weights, strict=True
        ):
            for name, buffer in found.items():
                share = 1e-5 + max(map(_eps, weights.values()), default=0.0)
                if not _norm(buffer, due[name]) <= share * _norm(due[name]) + 1e-6:
                    yield f"buffer {name} on rank {rank} is another than in one process"


def _is_finite(named: Named) -> bool:
    return all(bool(g.isfinite().all()) for g in named.values() if g is not None)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _norm(tensor: Tensor, less: Tensor | None = None) -> float:
    wide = tensor.to(_wide(tensor))
    return float(torch.linalg.vector_norm(wide if less is None else wide - less.to(wide.dtype)))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _eps(tensor: Tensor) -> float:
    """Return the rounding of a low dtype; 0 for float32 and wider, which have other limits."""
    return torch.finfo(tensor.dtype).eps if tensor.dtype in (torch.bfloat16, torch.float16) else 0.0
