"""Lists of values on a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.settings.errors import ConfigError
from lab.settings.overrides import config_dir_of, listed, parse_overrides


def expanded(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Expand lists: for each key, its settings as a command line would take them.

    Raises:
        ConfigError: a value is listed twice, or a list is not written a,b,c.
    """
    lists, config_dir = dict[str, list[str]](), config_dir_of(arguments)
    for override in parse_overrides(arguments):
        if override.is_sweep_override() and not override.is_choice_sweep():
            raise ConfigError(f"{override.input_line}: write the values as a list, a,b,c")
        settings = [str(override.input_line)]
        if override.is_choice_sweep():
            key = override.get_key_element()
            settings = [f"{key}={value}" for value in listed(override, config_dir)]
        if len(set(settings)) < len(settings):
            raise ConfigError(f"{override.input_line}: a value is listed twice")
        lists[override.key_or_group] = settings
    return lists


def one_value(key: str, texts: Mapping[str, str]) -> str:
    """Return the value of a key that takes no list. ConfigError: it has several."""
    values = expanded([f"{key}={texts[key]}"])[key]
    if len(values) > 1:
        raise ConfigError(f"{key}={texts[key]}: takes one value")
    return values[0].partition("=")[2]
