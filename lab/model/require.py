"""Refuse arguments of models, each in one line that names the key, its value and the allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def require_size(model: str, input_shape: Sequence[int], smallest: int) -> None:
    """Refuse inputs that are not images, or that pooling would shrink to nothing.

    Raises:
        ValueError: not three dimensions, or height or width is below `smallest` pixels.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"model={model}: inputs of shape {list(input_shape)} are not images; it needs "
            "[channels, height, width]"
        )
    _, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"model={model}: images of {height}x{width} px are too small, it needs at least "
            f"{smallest} px; set data.size={smallest} or more (data.shape for data=synthetic)"
        )


def require_width(key: str, value: object) -> None:
    """Refuse a value that cannot be the width of a layer.

    Raises:
        ValueError: not an integer of at least 1.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value}: must be an integer of at least 1")


def require_dropout(dropout: object, key: str = "model.dropout") -> None:
    """Refuse a value that is not a dropout probability.

    Raises:
        ValueError: not a number in [0, 1).
    """
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"{key}={dropout}: must be a number from 0 to below 1")


def require_widths(key: str, widths: object) -> None:
    """Refuse a value that is not a list of widths of layers.

    Raises:
        ValueError: not a list of integers of at least 1.
    """
    listed = list(widths) if isinstance(widths, Sequence) else [None]
    if not all(isinstance(width, int) and width >= 1 for width in listed):
        raise ValueError(f"{key}={widths}: must be a list of integers of at least 1")


def require_choice(key: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a value that is none of `allowed`.

    Raises:
        ValueError: the message lists them.
    """
    if value not in (choices := tuple(allowed)):
        raise ValueError(f"{key}={value}: allowed are {', '.join(choices)}")


def require_tokens(model: str, vocabulary: int | None) -> int:
    """Return the number of token ids, and refuse data that has none.

    Raises:
        ValueError: `vocabulary` is None, as for images.
    """
    if vocabulary is None:
        raise ValueError(f"model={model}: learns sequences of tokens; this data has no vocabulary")
    return vocabulary
