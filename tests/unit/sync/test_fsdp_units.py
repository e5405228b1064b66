"""FSDP's own objects, which torch has kept under two names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lab.sync.fsdp_units import groups_of


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"_fsdp_param_group": "g"}, ["g"]),  # until torch 2.11
        ({"_fsdp_param_group": None}, []),
        ({"_fsdp_param_groups": ["g", "h"]}, ["g", "h"]),
    ],
)
def test_groups_of_a_unit(state: dict[str, Any], expected: list[str]) -> None:
    unit: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))
    assert groups_of(unit) == expected
