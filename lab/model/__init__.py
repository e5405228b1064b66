"""The trained networks, profiles of their layers, and counts of their work.

Networks of images take `input_shape`, (C, H, W), and `output_size`, the width of the last layer;
language models take `vocabulary` and `context`. All refuse, by a ValueError of one line that names
the setting, arguments out of range, inputs of another shape, and images too small to be halved as
often as they do (conf/model says how small).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lab.settings import checks


def require_size(model: str, input_shape: Sequence[int], smallest: int) -> None:
    """Refuse inputs that are not images, or have a side below `smallest` pixels (ValueError)."""
    if len(input_shape) != 3:
        raise ValueError(
            f"model={model}: inputs of shape {list(input_shape)} are not images; the model needs "
            "[channels, height, width]"
        )
    _, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"model={model}: images of {height}x{width} px are too small; the model needs at least "
            f"{smallest} px; set data.size={smallest} or more (data.shape for data=synthetic)"
        )


def require_dropout(dropout: object, key: str = "model.dropout") -> None:
    """Refuse a value that is not a dropout probability. ValueError: not a number in [0, 1)."""
    checks.number(key, dropout, at_least=0, below=1)


def require_widths(key: str, widths: object) -> None:
    """Refuse a value that is not a list of widths of layers.

    Raises:
        ValueError: not a list of integers, each at least 1.
    """
    is_list = isinstance(widths, Sequence) and not isinstance(widths, str)
    listed = list(cast(Sequence[object], widths)) if is_list else [None]
    if not all(checks.is_whole(width) and width >= 1 for width in listed):
        raise ValueError(f"{key}={widths}: must be a list of integers, each at least 1")


def require_tokens(model: str, vocabulary: int | None) -> int:
    """Return the number of token ids, and refuse data that has none.

    Raises:
        ValueError: `vocabulary` is None, as for images.
    """
    if vocabulary is None:
        raise ValueError(
            f"model={model}: learns sequences of tokens, but this data has no vocabulary"
        )
    return vocabulary
