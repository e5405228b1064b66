"""Residuals in a loop of the user's own: whose a state is, and how spoiled ones are undone."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.distributed.worker import HostCopy
from lab.exchange.base import Exchange
from lab.exchange.layout import is_rows_first, named, order_of
from lab.settings.names import by_class
from lab.sync.base import AFTER_UPDATES, BEFORE_UPDATES

KEY = "of"  # of a state, for whose it is


class Owner:
    """Marks the states of one rank's exchange in a user's own loop, and knows others.

    Args: settings: that made the exchange; {}: its class's path stands for it.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        settings: Mapping[str, Any],
        rank: int,
        size: int,
    ) -> None:
        kind = type(exchange)
        self.exchange = settings or {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        self.rank, self.size = rank, size
        self.shapes = {name: list(p.shape) for name, p in named(model).items()}
        # Of values that travel in another than the logical order.
        self.orders = {
            name: order_of(p.stride(), p.shape)
            for name, p in named(model).items()
            if is_rows_first(p) and not p.is_contiguous()
        }

    def mark(self) -> dict[str, Any]:
        """Return what a state holds under KEY: numbers, texts, lists and dicts."""
        return {
            "rank": self.rank,
            "size": self.size,
            "exchange": json.dumps(self.exchange, sort_keys=True),
            "parameters": self.shapes,
            "orders": self.orders,
        }

    def check(self, mark: Mapping[str, Any] | None, kept: Mapping[str, Any]) -> None:
        """Refuse a state that another rank, exchange or model has left.

        Where the exchange kept no tensor, it is everybody's, whatever the number of ranks.

        Args:
            mark: what the state holds under KEY; None: it has no such key.
            kept: the exchange's state.

        Raises:
            ValueError: it is not this owner's.
        """
        if mark is None and _holds_tensor(kept):
            raise ValueError(
                "state_dict: contains residuals but does not name their rank, because an earlier "
                "version wrote it; if the residuals are this rank's, set state['of'] to "
                "its state_dict()['of']"
            )
        if mark is None:
            return
        shapes: Mapping[str, list[int]] = mark["parameters"]
        for name in {**self.shapes, **shapes}:
            then, now = (found.get(name, "missing") for found in (shapes, self.shapes))
            if then != now:
                raise ValueError(
                    f"state_dict: belongs to another model: {name} is {then} there and {now} here"
                )
        if not _holds_tensor(kept):
            return
        if (mark["rank"], mark["size"]) != (self.rank, self.size):
            raise ValueError(
                f"state_dict: belongs to rank {mark['rank']} of {mark['size']}, but this is rank "
                f"{self.rank} of {self.size}; each rank has its own residuals, so save and load "
                "one file per rank, on the same number of ranks (Accelerate's "
                "register_for_checkpointing saves only the file of rank 0)"
            )
        orders: Mapping[str, list[int]] = mark.get("orders", self.orders)  # earlier ones had none
        for name in {**self.orders, **orders}:
            if self.orders.get(name) != orders.get(name):
                raise ValueError(
                    f"state_dict: {name} was in another memory order (such as torch.channels_last) "
                    "when it was saved; convert the model in the same way before you load it"
                )
        if by_class(json.loads(mark["exchange"])) != by_class(self.exchange):
            raise ValueError(
                f"state_dict: contains residuals of exchange={mark['exchange']}, but this is "
                f"exchange={json.dumps(self.exchange, sort_keys=True)}; use the same exchange"
            )


def require_state(state: object, *keys: str) -> None:
    """Refuse what `state_dict` cannot have returned: no mapping, or one without `keys`."""
    if not isinstance(state, Mapping):
        found = f"has type {type(state).__name__}"
    elif other := _writer(cast(Mapping[str, Any], state), keys):
        raise ValueError(f"state_dict: {other} saved it; load it into what {other} returns")
    elif missing := {*keys} - {*cast(Mapping[str, object], state)}:
        found = f"is a mapping without {', '.join(sorted(missing))}"
    else:
        return
    raise ValueError(f"state_dict: must be what state_dict() returned, but {found}")


def _writer(state: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the function whose result wrote a state, if it is another than the one with `keys`."""
    if not isinstance(state.get(KEY), Mapping):
        return ""
    if "step" not in state:
        writer, own = "lab.fsdp_reduce_scatter", ()
    elif "exchange" in state:
        writer, own = "lab.attach", ("step", "exchange")
    else:
        writer, own = "lab.grad_sync", ("step",)
    return writer if own != keys else ""


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, cast(Mapping[str, object], value).values()))
    return isinstance(value, Tensor)


def _holds_values(state: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Return whether an exchange's state has numbers that gradients have left, other than 0."""
    tensors = itertools.chain.from_iterable(kept.values() for kept in state.values())
    return any(t.is_floating_point() and bool(t.any()) for t in tensors)


@runtime_checkable
class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is used."""

    def is_enabled(self) -> bool: ...
    def get_scale(self) -> float: ...


class Discards:
    """Finds gradients that were exchanged, and then cleared before an update used them.

    What an exchange keeps of them joins later gradients. In a GAN these have another loss: backward
    of the generator's also gives gradients to the discriminator, which the next step clears. That
    is refused. A step that a loop has skipped by itself is worth a warning. Sharpness-aware
    minimization (SAM) uses the first of two gradients for an ascent of its own, by no optimizer's
    step; that is refused once it happens in two updates in a row.

    A parameter with few values stands for all, so that this costs little. No host waits for it as
    long as an optimizer uses the gradients.
    """

    def __init__(self, exchange: Exchange, parameters: Iterable[nn.Parameter]) -> None:
        self._exchange = exchange
        known = [*parameters]
        self._ids = {*map(id, known)}
        last = [p for p in known if p.numel()][-4:]  # surely get gradients, of the output
        self._parameter = min(last, key=Tensor.numel)
        self._exchanged: tuple[Tensor, Tensor, int] | None = None  # gradient, weight, its version
        self._other_has_stepped = False  # since then
        self._exchanges_in_update = False  # a closure does, as of LBFGS, which uses all gradients
        self._has_ascended = False  # the weights had changed otherwise since the exchange before
        self._num_ascents = 0  # updates in a row of which this was true
        BEFORE_UPDATES.add(self.note_begin)
        AFTER_UPDATES.add(self.note_update)

    def note_begin(self, *_: object) -> None:
        """Note that an optimizer's step begins."""
        self._exchanges_in_update = False

    def note_update(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer has used the gradients, some of them, or those of other models.

        Raises: RuntimeError: each update follows two exchanges, and the exchange keeps something.
        """
        if self._exchanged is None:
            return
        updated = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self._ids.isdisjoint(updated):
            self._other_has_stepped = True
            return
        self._exchanged = None
        has_ascended = self._has_ascended and not self._exchanges_in_update
        self._has_ascended = False
        self._num_ascents = self._num_ascents + 1 if has_ascended else 0
        if self._num_ascents > 1 and _holds_values(self._exchange.state_dict()):
            raise RuntimeError(
                f"exchange={type(self._exchange).__name__}: each update follows two exchanges, "
                "and the weights changed between them, as in sharpness-aware minimization (SAM); "
                "this mixes the residuals of both gradients; put the first backward into "
                "no_sync() or sync.accumulate(), so that each rank moves its weights by its own "
                "gradient, or use an exchange without residuals, such as bf16"
            )

    def begin_step(self) -> None:
        """Look, before an exchange begins, whether gradients of the last one were discarded.

        Raises: RuntimeError: they were, and the exchange keeps something of them.
        """
        last, self._exchanged = self._exchanged, None
        self._exchanges_in_update = True
        if last is None:
            return
        gradient, weight, version = last
        has_version = self._parameter._version == version
        if has_version and self._parameter.grad is gradient:
            return
        self._has_ascended = not (has_version and torch.equal(weight, self._parameter))
        if self._has_ascended or not bool(gradient.isfinite().all() & gradient.any()):
            return
        if not _holds_values(self._exchange.state_dict()):
            return
        text = (
            f"exchange={type(self._exchange).__name__}: the last gradients were exchanged, but "
            "cleared before an optimizer used them; their residuals are added to later gradients; "
            "put a backward pass whose gradients are not used (such as a trial, or a GAN "
            "generator's) into no_sync() or sync.accumulate(), or freeze the model "
            "during this pass with requires_grad_(False)"
        )
        if self._other_has_stepped:
            raise RuntimeError(text)
        warnings.warn_explicit(text, UserWarning, __name__, 0)  # shows no line of source

    def end_step(self) -> None:
        parameter, gradient = self._parameter, self._parameter.grad
        self._other_has_stepped = False
        if gradient is not None:
            self._exchanged = gradient, parameter.detach().clone(), parameter._version


class NonfiniteGuard:
    """Protection of an exchange's residuals from gradients that are not finite, or not used.

    With an enabled scaler gradients that are not finite are expected: the residuals are put back to
    what they were before the step, which the scaler will skip on every rank, and the host waits to
    know. Without one they are an error, found one step late, so that no host waits.

    Args:
        parameters: those that are exchanged.
    """

    def __init__(
        self, exchange: Exchange, scaler: Scaler | None, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._discards = None if exchange.exact else Discards(exchange, parameters)
        if not isinstance(cast(object, scaler), Scaler | None):
            raise ValueError(f"scaler={scaler!r}: must be a torch.amp.GradScaler, or None")
        self._exchange = exchange
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._before: dict[str, Any] = {}
        self._last: HostCopy | None = None

    def begin_step(self) -> float:
        """Return the loss scale of the step that begins: residuals are kept without it.

        Raises:
            FloatingPointError: the last step was not finite, and nothing has put residuals back.
            RuntimeError: see Discards.
        """
        if self._discards:
            self._discards.begin_step()
        last, self._last = self._last, None
        if last is not None and not bool(last.read()):
            name = type(self._exchange).__name__
            raise FloatingPointError(
                f"exchange={name}: gradients of the last step were not finite and have corrupted "
                "its residuals; with a GradScaler, pass scaler=...; without one, try a smaller "
                "learning rate"
            )
        if self._scaler is None or self._exchange.exact:
            return 1.0
        self._before = self._exchange.snapshot()
        return self._scaler.get_scale()

    def end_step(self, gradients: list[Tensor], finite: Tensor | None) -> None:
        """Look at the exchanged `gradients`; where a step must be undone, all become NaN.

        Args:
            finite: bool [], the exchange's finding; None: it did not check.
        """
        if not self._exchange.state_dict():
            return
        if self._discards:
            self._discards.end_step()
        if self._scaler is None:
            self._last = None if finite is None else HostCopy(finite)
            return
        norms: list[Tensor] = list(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        found = torch.stack(norms).isfinite().all()
        if not bool(found if finite is None else found & finite):
            self._exchange.load_state_dict(self._before)
            torch._foreach_mul_(gradients, torch.nan)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
