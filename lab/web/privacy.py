"""Keep from strangers what is not theirs: paths of a machine, a user's name, secrets."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lab.settings.files import conf_dir
from lab.settings.secrets import HIDDEN, is_secret, without_secrets
from lab.settings.streams import CONTROL

PATH = re.compile(r"(?<![\w./:<])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+,=-]+){2,}[/\\]?")
COMMON = {"root", "user", "admin", "ubuntu"}  # no one's name
WORDS = {"cell", "data", "lab", "loss", "rank", "step", "study", "test", "train", "training"}


def clean(value: Any, name: str = "") -> Any:
    """Return a value of JSON without what a stranger should not read, in keys and texts too.

    Characters that control a terminal, or the direction of text, are replaced as well: they would
    let a name show as another.

    Args:
        name: the key of the value; a secret's value is hidden whatever it is.
    """
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean(each, str(key)) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [clean(each, name) for each in value]
    return value


def clean_text(text: str) -> str:
    """Return a text without paths but their last part, secrets, the user's name and controls."""
    text = without_secrets(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    text = PATH.sub(_last_part, text)
    user = _user()
    return re.sub(rf"\b{re.escape(user)}\b", HIDDEN, text) if user else text


def _last_part(path: re.Match[str]) -> str:
    parts = re.split(r"[/\\]", path.group().rstrip("/\\"))
    return f"{HIDDEN}/{parts[-1]}"


@cache
def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    # A page that hides its own words, such as a strategy's name, could not be read.
    words = COMMON | WORDS | {path.stem for path in conf_dir().rglob("*.yaml")}
    return "" if name in words or len(name) < 3 else name
