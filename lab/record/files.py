"""JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from lab.settings.whole import write_atomically


def write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    """Write `value` as readable JSON. A non-finite number becomes null: JSON has none."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
