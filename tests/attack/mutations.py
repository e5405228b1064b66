"""Ways to damage a file: bytes of any format, and values of JSON and YAML.

Files that mean harm are in strangers.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

LONG = 10_000
ODD: tuple[Any, ...] = (
    *(None, True, [], {}, "", [None], {"": None}),
    *(-1, 0, 2**70, -0.5, 1e308, float("nan"), float("inf")),
    *("x" * LONG, "\u202e\x1b[31m\n</script>", "../../etc/passwd", "=1+1", "__import__('os')"),
)
Mutation = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, chance: random.Random) -> bytes:
    """Change one bit."""
    at = chance.randrange(max(1, len(content)))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def cut(content: bytes, chance: random.Random) -> bytes:
    """Leave the beginning alone."""
    return content[: chance.randrange(len(content))]


def drop(content: bytes, chance: random.Random) -> bytes:
    """Leave a piece out."""
    at, length = chance.randrange(len(content)), chance.choice((1, 4, 64, 1024))
    return content[:at] + content[at + length :]


def repeat(content: bytes, chance: random.Random) -> bytes:
    """Write a piece twice."""
    at, length = chance.randrange(len(content)), chance.choice((1, 4, 64, 1024))
    return content[: at + length] + content[at:]


def scatter(content: bytes, chance: random.Random) -> bytes:
    """Put noise in the middle."""
    at = chance.randrange(len(content))
    return content[:at] + chance.randbytes(chance.choice((1, 16, 512))) + content[at:]


def zero(content: bytes, chance: random.Random) -> bytes:
    """Write zeros over a block, as a file system does after a crash."""
    at = chance.randrange(len(content))
    return content[:at] + bytes(min(4096, len(content) - at)) + content[at + 4096 :]


def empty(content: bytes, chance: random.Random) -> bytes:
    """Leave nothing."""
    return b""


def odd_value(content: bytes, chance: random.Random) -> bytes:
    """Replace a value of JSON by one of another type or size."""
    document = json.loads(content)
    place, key = chance.choice(_places(document))
    place[key] = chance.choice(ODD)
    return json.dumps(document).encode()


def no_key(content: bytes, chance: random.Random) -> bytes:
    """Leave a key of JSON out."""
    document = json.loads(content)
    place, key = chance.choice(_places(document))
    del place[key]
    return json.dumps(document).encode()


def odd_line(content: bytes, chance: random.Random) -> bytes:
    """Replace the value of a line of YAML."""
    lines = content.decode().splitlines()
    numbers = [n for n, line in enumerate(lines) if ": " in line or line.endswith(":")]
    number = chance.choice(numbers)
    value = json.dumps(chance.choice(ODD))
    lines[number] = f"{lines[number].partition(':')[0]}: {value}"
    return "\n".join(lines).encode()


def no_line(content: bytes, chance: random.Random) -> bytes:
    """Leave a line out."""
    lines = content.decode().splitlines()
    del lines[chance.randrange(len(lines))]
    return "\n".join(lines).encode()


BYTES: tuple[Mutation, ...] = (flip, cut, drop, repeat, scatter, zero, empty)
JSON: tuple[Mutation, ...] = (*BYTES, odd_value, odd_value, odd_value, odd_value, no_key)
YAML: tuple[Mutation, ...] = (*BYTES, odd_line, odd_line, odd_line, no_line)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """List every value in a document, by its container and key."""
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    found = [(document, key) for key in keys]
    for key in keys:
        if isinstance(document[key], dict | list) and document[key]:
            found += _places(document[key])
    return found
