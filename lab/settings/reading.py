"""Read JSON and YAML that anyone may have written: one line says what is wrong with a file.

Nothing in a file runs, and none takes the machine down: what is nested too deeply, and anchors that
stand for too much, are refused.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.settings.errors import one_line

LARGEST_YAML = 100_000  # values, as many as anchors make of them


class DamagedFile(ValueError):
    """A file holds something else than it should; one line that names it."""


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        DamagedFile: it holds something else.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DamagedFile(f"{path}: not JSON: nested too deeply") from None
    except ValueError as error:
        raise DamagedFile(f"{path}: not JSON: {error}") from None


def read_yaml(path: Path) -> Any:
    """Read a file of YAML; interpolations stay as they are written.

    Raises:
        DamagedFile, OSError: as read_json.
    """
    content = path.read_bytes()
    try:
        text = content.decode()
        if "&" in text and _size(yaml.compose(text, yaml.SafeLoader), {}) > LARGEST_YAML:
            raise ValueError(f"anchors make more than {LARGEST_YAML} values")
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except RecursionError:
        raise DamagedFile(f"{path}: not YAML: nested too deeply") from None
    # OSError: OmegaConf's word on numbers that stand alone.
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, OSError) as error:
        raise DamagedFile(f"{path}: not YAML: {one_line(error)}") from None


def _size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Count the values that a node stands for, each alias as all of its anchor."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # if it holds itself
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]
