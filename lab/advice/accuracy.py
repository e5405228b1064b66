"""Known accuracies of training with strategies that do not deliver the exact mean."""

from __future__ import annotations

from dataclasses import dataclass

CODECS = "docs/strategies.md, Other codecs"
ROUNDS = "docs/strategies.md, Exchanging every H steps"
FEEDBACK = "docs/results/README.md, Error feedback"


@dataclass(frozen=True)
class Trial:
    """Test accuracy on digits, on two ranks and with default settings.

    Attributes:
        percent: mean over the seeds. reference: that of allreduce. source: where it is recorded.
    """

    model: str
    num_seeds: int
    percent: float
    reference: float
    source: str

    def __str__(self) -> str:
        seeds = f"{self.num_seeds} seeds" if self.num_seeds > 1 else "1 seed"
        return f"{self.model} {self.percent} (allreduce {self.reference}, {seeds})"


def _codec(mlp: float, lenet: float) -> tuple[Trial, ...]:
    return Trial("MLP", 3, mlp, 96.39, CODECS), Trial("LeNet", 1, lenet, 97.22, CODECS)


# By strategy; a strategy that is not here has no recorded trial.
TRIALS: dict[str, tuple[Trial, ...]] = {
    "fp16": (Trial("LeNet", 1, 97.22, 97.22, CODECS),),
    "int8": _codec(96.39, 97.22),
    "onebit": (Trial("MLP", 5, 96.56, 96.5, FEEDBACK),),
    "signsgd_ef": _codec(96.85, 96.39),
    "topk": _codec(95.74, 97.22),
    "randomk": _codec(95.0, 96.94),
    "powersgd": _codec(96.3, 97.22),
    "local_sgd": (Trial("LeNet", 1, 97.2, 97.2, ROUNDS), Trial("MLP", 1, 96.4, 96.7, ROUNDS)),
    "diloco": (Trial("LeNet", 1, 97.5, 97.2, ROUNDS), Trial("MLP", 1, 96.7, 96.7, ROUNDS)),
}


def known_of(strategy: str) -> str:
    """Write what is known of a lossy strategy's accuracy, with its sources."""
    trials = TRIALS.get(strategy, ())
    if not trials:
        return "not recorded: train it beside allreduce"
    sources = "; ".join(dict.fromkeys(trial.source for trial in trials))
    return f"{', '.join(map(str, trials))}: {sources}"
