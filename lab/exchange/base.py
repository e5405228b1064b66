"""Exchange: what moves between the ranks, and along which path."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lab.distributed.comm import Collective, Comm
from lab.exchange.bucket import GradBucket
from lab.exchange.cost import Costs, Needs, Sizes
from lab.settings.own_code import is_labs

Shapes = Mapping[str, torch.Size]
ResidualPart = tuple[str, int, Tensor]  # a parameter, the place of the first value, and values [n]
COMPRESSED = frozenset({torch.float32})  # dtypes that codecs read
ADDED = COMPRESSED | {torch.float64, torch.bfloat16, torch.float16}  # those that libraries add


class RankOfSize(Protocol):
    """A rank among `size`, as a Comm is one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Exchange(ABC):
    """An algorithm that averages gradients over the ranks. One object serves all buckets of a rank.

    `average` is plain synchronous code, or made of `stages` (see Staged). It may run inside
    backward, on a side stream or on a worker thread, and must not depend on which. A non-finite
    gradient must become non-finite on every rank; the trainer then restores this object's state.
    Constructors raise ValueError for an argument out of range, by the name of its setting.

    Attributes:
        dtypes: that a bucket may have. Gradients of bfloat16 and float16 come as float32 where they
            are not among these (see lab.exchange.gate.carrier).
        steady_from: the first step from which on all launch the same work on the same memory, of
            which a CUDA graph may repeat one (lab.training.graph); None: none is.
        total_steps: of the run; the trainer sets it. None: unknown, in a loop of the user's own.
    """

    dtypes = COMPRESSED
    exact = True  # delivers the mean up to rounding; tests check it
    delivers = "mean"  # or "direction": see lab.exchange.direction
    keeps_replicas_equal = True
    needs_send_recv = False  # not every Comm has them
    needs_like_gpus = False  # all ranks must compute or draw the same bits
    accepts_prescaled = False  # accepts gradients of a loss divided by N: saves a pass
    keeps_residuals = False  # what codecs leave out of gradients is kept for later steps
    staged = False  # over Gloo it takes turns with backward on one thread; others have their own
    steady_from: int | None = None
    total_steps: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have a user's own `average` or `stages` take gradients as they are, unless it asks.

        It leaves their mean, as documented, where the class that it extends may only add.
        """
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if not cls.__module__.startswith("lab.") and not {"average", "stages"}.isdisjoint(own):
            cls.accepts_prescaled = own.get("accepts_prescaled", False)

    @abstractmethod
    def average(self, bucket: GradBucket, comm: Comm) -> None:
        """Replace `bucket.flat` by what this exchange delivers: its mean over the ranks of `comm`.

        All ranks call this.
        """

    def asynchronous(self, comm: Comm) -> bool:
        """Return whether `stages` leaves all waiting to its caller."""
        return self.staged and comm.asynchronous

    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]:
        """Do the same as `average`, but yield each collective begun; resume once it is done."""
        self.average(bucket, comm)
        yield from ()

    def children(self) -> Iterable[Exchange]:
        """Return the exchanges that this one is made of."""
        return ()

    def validate(self, comm: Comm) -> None:
        """Refuse a comm that cannot carry this exchange.

        Raises:
            ValueError: it sends from rank to rank, and `comm` does not.
        """
        if self.needs_send_recv and comm.no_send_recv:
            name = type(self).__name__
            raise ValueError(f"exchange={name}: sends from rank to rank, but {comm.no_send_recv}")

    def setup(self, model: nn.Module) -> None:
        """Find in `model` what gradients alone do not show, once, before the first step."""
        for child in self.children():
            child.setup(model)

    def moves_as(self, shapes: Shapes) -> list[tuple[int, ...]]:
        """Return for a bucket's parameters the shapes whose cost tells the bytes."""
        return [tuple(shape) for shape in shapes.values()]

    def add_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        """Add this rank's residuals to `bucket.flat`."""
        for child in self.children():
            child.add_residual(bucket, comm)

    def flush_residual(self, bucket: GradBucket, comm: RankOfSize) -> None:
        """Add this rank's residuals to `bucket.flat`, and forget them."""
        for child in self.children():
            child.flush_residual(bucket, comm)

    def residuals(self, shapes: Shapes, comm: Comm) -> Iterator[ResidualPart]:
        """Yield the compression errors that this rank keeps for later steps; most keep none.

        With these, lab.certificate checks any lossy exchange: summed over the ranks, N * delivered
        means + residuals = true sums at any time.

        Args:
            shapes: of the parameters that are exchanged, by name.
        """
        for child in self.children():
            yield from child.residuals(shapes, comm)

    def add_cost(self, costs: Costs) -> bool:
        """Add the stages of a bucket to `costs`; False: they are recorded from `average`.

        A formula serves where recording would take long, or shows less than one rank's view.
        """
        return False

    def memory_bytes(self, sizes: Sizes) -> Needs:
        """Return the memory that a rank needs, in theory."""
        return Needs(kept=math.nan)

    def error_bound(self, largest: float, size: int) -> float:
        """Bound the distance of a delivered value from the mean, besides rounding and `residuals`.

        Args:
            largest: magnitude that no gradient of any rank exceeds.
            size: number of ranks.
        """
        bounds = [child.error_bound(largest, size) for child in self.children()]
        return max(bounds, default=0.0 if self.exact else math.inf)

    def left_exact(self, shapes: Shapes, key: str = "exchange") -> Iterator[tuple[int, str]]:
        """Yield how many values its codec sends as they are, and which; none if it has no codec.

        Args:
            shapes: of the parameters that are exchanged, by name.
            key: of this exchange among the settings.
        """
        yield from ()

    @property
    def settled_at(self) -> int | None:
        """The first step after any trials, in which choices are made; None: they go on."""
        settled = [child.settled_at for child in self.children()]
        return None if None in settled else max(filter(None, settled), default=0)

    def choices(self) -> list[dict[str, Any]]:
        """Return the choices that this exchange made by itself, for the record."""
        return [choice for child in self.children() for choice in child.choices()]

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that this rank keeps between steps, by parameter name."""
        return {}

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of `state_dict` that later steps do not change, to undo a step."""
        state = self.state_dict()
        return {key: {n: v.clone() for n, v in tensors.items()} for key, tensors in state.items()}

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether `load_state_dict` can take `state` of the same rank of as many ranks.

        All ranks answer alike.
        """
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict` on the same rank of the same number of ranks."""

    def resume(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a result of `state_dict`, wherever its tensors lie.

        Raises:
            ValueError: it is of another exchange.
        """
        if set(state) != (own := set(self.state_dict())):
            found, needed = (", ".join(sorted(keys)) or "nothing" for keys in (state, own))
            raise ValueError(f"state_dict: contains {found}; {type(self).__name__} needs {needed}")
        moved = {key: {n: v.to(device) for n, v in values.items()} for key, values in state.items()}
        self.load_state_dict(moved)

    def redistribute(self, states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Return this rank's state among `size` ranks, made from another number of states.

        Raises:
            ValueError: this exchange does not say how.
        """
        raise ValueError(
            f"exchange={type(self).__name__}: its state of {len(states)} ranks cannot be divided "
            f"among {size}, because it has no redistribute; resume on {len(states)} ranks"
        )


def runs_as_the_labs(exchange: Exchange) -> bool:
    """Return whether the lab wrote what `exchange` does with a bucket, and no user's subclass.

    Only then do the lab's formulas and shortcuts for its class hold.
    """
    return is_labs(type(exchange), "average", "stages")


def kept_state(exchange: Exchange) -> dict[str, dict[str, Tensor]]:
    """Return the state of `exchange`, to be saved.

    Raises:
        ValueError: it has another form, which could not be loaded.
    """
    state = exchange.state_dict()
    kinds: list[Any] = [*state.values()] if isinstance(cast(object, state), dict) else [state]
    for kind in kinds:
        if not isinstance(kind, dict) or not all(isinstance(v, Tensor) for v in kind.values()):
            raise ValueError(
                f"exchange={type(exchange).__name__}: state_dict must return tensors by kind and "
                "by parameter name, such as {'residual': {'0.weight': tensor}}"
            )
    return state


def iter_nested(exchange: Exchange) -> Iterator[Exchange]:
    """Yield `exchange`, and all that it is made of."""
    yield exchange
    for child in exchange.children():
        yield from iter_nested(child)


def require_mean(key: str, exchange: Exchange) -> None:
    """Refuse an exchange that does not leave a mean, where `key` needs one that does.

    Raises:
        ValueError: it leaves a direction, or does not keep replicas equal.
    """
    name = type(exchange).__name__
    if not exchange.keeps_replicas_equal:
        raise ValueError(
            f"{key}={name} does not keep replicas equal; choose one that averages gradients"
        )
    if exchange.delivers != "mean":
        raise ValueError(
            f"{key}={name} produces a {exchange.delivers}; choose one that averages gradients"
        )


def require_part(key: str, exchange: Exchange) -> None:
    """Refuse an exchange of which another cannot be made: it must leave a mean, and residuals it
    keeps must be known, which the other one carries over, sums and divides anew.

    Raises:
        ValueError: it leaves no mean, or its class does not define what residuals need.
    """
    require_mean(key, exchange)
    require_known_residuals(key, exchange)


def require_known_residuals(key: str, exchange: Exchange) -> None:
    """Refuse an exchange that keeps residuals which others do not learn of.

    Raises:
        ValueError: names what its class must define.
    """
    kind = type(exchange)
    keeps_state = not exchange.exact and kind.state_dict is not Exchange.state_dict
    if not (keeps_state or exchange.keeps_residuals or kind.residuals is not Exchange.residuals):
        return
    needed = ("state_dict", "load_state_dict", "add_residual", "flush_residual")
    lacking = [name for name in needed if getattr(kind, name) is getattr(Exchange, name)]
    if lacking and not any(True for _ in exchange.children()):
        raise ValueError(
            f"{key}={kind.__name__}: keeps residuals of its own, so its class must also define "
            f"{', '.join(lacking)} (see docs/how-to/own_exchange.md), or extend "
            "lab.exchange.compressed.Lossy, which defines them"
        )


class Staged(Exchange):
    """An exchange written as stages, so that other buckets may proceed while one waits.

    Ranks may be at different stages of different buckets: each stage must begin its collectives
    over other connections than the stages before (see Comm), or be the last that begins any.
    All buckets have as many stages, or one could overtake another in what two levels do afterwards.
    """

    staged = True

    _inherited: Callable[..., Iterator[Collective]] | None = None  # stages, hidden by an `average`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take a subclass's own `average` in place of the stages that it inherits.

        A user's own stages run on a thread of their own, unless their class says `staged = True`:
        then each uses other connections than the stages before.
        """
        super().__init_subclass__(**kwargs)
        if "stages" in vars(cls):
            cls._inherited = None
            cls.staged = vars(cls).get("staged", cls.__module__.startswith("lab."))
        elif "average" in vars(cls):
            cls._inherited, cls.stages = cls._inherited or cls.stages, Exchange.stages
            cls.staged = False

    def average(self, bucket: GradBucket, comm: Comm) -> None:
        stages = type(self)._inherited or type(self).stages
        begun: Any = stages(self, bucket, comm) or [None]  # a user's may return nothing
        for collective in begun:
            if not hasattr(collective, "wait"):
                found = type(collective).__name__
                raise TypeError(
                    f"exchange={type(self).__name__}: stages yields {found}; it must yield each "
                    "collective that it begins, as comm.iall_gather returns it"
                )
            collective.wait()

    @abstractmethod
    def stages(self, bucket: GradBucket, comm: Comm) -> Iterator[Collective]: ...
