"""The best constant choice: the one strategy that is best to take everywhere, known in hindsight.

It is what choices are held to: those that do not beat it could have been spared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from lab.simulate.score import skill

CLOSE = 0.05  # a choice with less regret is as good as the best


@dataclass(frozen=True)
class Constant:
    """One strategy in every scenario, beside choices that were made for each.

    Attributes:
        name: of the strategy whose regret is the least on average, of those in every scenario.
        regrets: its own, by scenario. taken: those of the choices.
        num_close: how many strategies have less regret than CLOSE in every scenario. num_shared:
            how many there are in every scenario.
    """

    name: str
    regrets: tuple[float, ...]
    taken: tuple[float, ...]
    num_close: int
    num_shared: int

    @property
    def skill(self) -> float:
        """The skill of the choices' mean regret over the constant's; NaN if that has none."""
        return skill(mean(self.taken), mean(self.regrets))

    @property
    def text(self) -> str:
        """The constant choice, its regret, and how many would have done."""
        close = f"{self.num_close} {'is' if self.num_close == 1 else 'are'} within"
        everywhere = f"all {len(self.regrets)} scenarios"
        return (
            f"the best constant choice is `{self.name}`. Its regret is {_percents(self.regrets)}. "
            f"Of the {self.num_shared} strategies that appear in {everywhere}, {close} "
            f"{100 * CLOSE:g} % of the best strategy in every scenario."
        )


def constant_of(taken: Iterable[float], regrets: Sequence[Mapping[str, float]]) -> Constant | None:
    """Find the best constant choice; None if no strategy is in every scenario.

    Args:
        taken: regret of what was chosen, by scenario.
        regrets: of each strategy, by scenario.
    """
    shared = [name for name in regrets[0] if all(name in each for each in regrets)]
    if not shared:
        return None
    constant = {name: tuple(each[name] for each in regrets) for name in shared}
    name = min(shared, key=lambda each: mean(constant[each]))
    num_close = sum(max(each) <= CLOSE for each in constant.values())
    return Constant(name, constant[name], tuple(taken), num_close, len(shared))


def verdict(who: str, found: Constant | None) -> str:
    """Say whether choices, which `who` names, beat the best constant choice."""
    if found is None:
        none = "because no strategy appears in every scenario"
        return f"{who} cannot be compared with a constant choice, {none}."
    own, constant = mean(found.taken), mean(found.regrets)
    equal = own == constant
    word = "does as well as" if equal else "beats" if own < constant else "does not beat"
    skill = "" if math.isnan(found.skill) else f" (skill {found.skill:.2f})"
    regret = "its regret is also" if equal else f"the regret of {who[0].lower()}{who[1:]} is"
    return (
        f"In hindsight, {found.text} {who} {word} the constant choice{skill}: {regret} "
        f"{_percents(found.taken)}."
    )


def _percents(regrets: Sequence[float]) -> str:
    return f"{100 * mean(regrets):.1f} % on average and {100 * max(regrets):.1f} % at most"
