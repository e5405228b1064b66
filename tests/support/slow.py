"""Cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(cases: Iterable[Any], every: int = 0, also: Iterable[Any] = ()) -> list[Any]:
    """Mark cases slow, which another one of the same kind stands for.

    Args:
        cases: of pytest.mark.parametrize.
        every: the first of so many is not slow; 0: none but `also`.
        also: others that are not.
    """
    kept = list(also)
    return [
        case if case in kept or (every and place % every == 0) else _slow(case)
        for place, case in enumerate(cases)
    ]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.slow), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
