"""Keep of settings, command lines, variables and texts everything but secrets.

Records, names of directories, logs, pages and trackers are shown and sent to others. Whatever goes
there passes through `redacted` or `without_secrets`. Every pattern takes time linear in the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "…"
LEAST = 8  # letters of a secret variable's value that is hidden wherever it stands
# Parts of a name that make it a secret's: `api_token`, `HOROVOD_AUTH`, `accessToken`, but not
# `num_tokens`. PASS and SIG are words of their own only in variables and queries.
PARTS = frozenset(
    (
        *("apikey", "auth", "authorization", "bearer", "cookie", "cookies", "jwt", "sig", "token"),
        *("credential", "credentials", "secret", "secrets"),
        *("passphrase", "passwd", "password", "passwords", "pwd"),
    )
)
ENDINGS = ("apikey", "password", "passwd", "secret", "token")
PAIRS = frozenset({("access", "key"), ("api", "key"), ("private", "key"), ("amz", "signature")})
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# A password that is not encoded, as it should be, may hold slashes.
USER_OF_URL = re.compile(r"(?<!\w)(\w+://)(?:[^/\s@]+|[^/\s@:]{0,100}:[^\s@]{1,200})@")
SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=\S*[\d=])[\w.~+/=-]{6,}")
# A name, and what stands between it and its value: key=value, "key": value, --key value.
NAME = re.compile(r"(?<![\w.-])(?:([\w.-]+)['\"]?\s*[=:]\s*|(--?[A-Za-z][\w-]*)\s+)")
VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|(?:(?i:bearer|basic|digest|token)\s+)?[^\s,;'\"&]+")
SHAPES = re.compile(
    r"\b(?:gh[pousr]_\w{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w.-]+)"
)
HANDED = re.compile(r"'\$\{(?:oc\.decode:\$\{)?oc\.env:(LAB_\w+)\}{1,2}'")
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether the value of a setting, a variable or a parameter of this name is a secret."""
    last = name.rpartition(".")[2]
    parts = [part.lower() for part in PART.findall(last)]
    return (
        not PARTS.isdisjoint(parts)
        or any(part.endswith(ENDINGS) for part in parts)
        or not PAIRS.isdisjoint(zip(parts, parts[1:], strict=False))
        or (last.isupper() and "pass" in parts)
    )


def without_secrets(text: str) -> str:
    """Return a text without passwords of URLs, values of secret names, and known tokens.

    Values of variables that are secrets by their name are hidden wherever they stand.
    """
    for value in _of_environment(len(os.environ)):
        text = text.replace(value, HIDDEN)
    text = PRIVATE_KEY.sub(HIDDEN, text)
    text = USER_OF_URL.sub(rf"\1{HIDDEN}@", text)
    text = SCHEME.sub(rf"\1\2{HIDDEN}", text)
    return SHAPES.sub(HIDDEN, _without_values(text))


def redacted(value: Any, name: str = "") -> Any:
    """Return what may be kept of a value, nested as JSON or YAML is, that is known by `name`."""
    if isinstance(value, Mapping):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if name and is_secret(name) and value not in (None, "") and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [redacted(each, name) for each in value]
    return value


def redacted_words(arguments: Sequence[str]) -> list[str]:
    """Return what may be kept of a command line of `key=value` words.

    Values that were handed over (lab.settings.overrides) are shown as they were given.
    """
    given = (HANDED.sub(lambda found: os.environ.get(found[1], HIDDEN), w) for w in arguments)
    return [
        f"{key}={redacted(value, key.lstrip('+~'))}" if equals else without_secrets(key)
        for key, equals, value in (word.partition("=") for word in given)
    ]


@lru_cache(maxsize=1)
def _of_environment(_num_variables: int) -> list[str]:
    """Return values of secret variables.

    They are kept until the number of variables changes: to read all takes longer than all patterns.
    """
    values = {value for name, value in os.environ.items() if is_secret(name)}
    # A word or a number, as of TOKEN_TYPE, would be missed in texts that mean no secret.
    known = (v for v in values if len(v) >= LEAST and not v.isdecimal() and not v.isalpha())
    return sorted(known, key=len, reverse=True)  # one may hold another


def _without_values(text: str) -> str:
    """Hide what follows secret names. A value may hold names itself, as the query of a URL does."""
    shown, at = list[str](), 0
    while found := NAME.search(text, at):
        shown.append(text[at : found.end()])
        at = found.end()
        value = VALUE.match(text, at) if is_secret(found[1] or found[2]) else None
        if value and not value[0].startswith(HIDDEN):
            shown.append(HIDDEN)
            at = value.end()
    return "".join([*shown, text[at:]])
