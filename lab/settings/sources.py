"""The files that a user's code is made of, hashed: a record tells which text of it ran."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.settings.blame import is_users

HASH_LENGTH = 8  # hexadecimal digits

_as_imported = dict[Path, str]()  # hashes; a slow import leaves time to edit its file


def note_sources(module: str) -> None:
    """Hash the user's files of a module that is about to be imported, as they are now."""
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    if spec and spec.has_location and spec.origin and is_users(spec.origin):
        path = Path(spec.origin).resolve()
        if path.suffix == ".py":
            with suppress(SyntaxError, ValueError, OSError):  # the import will say it better
                files = _closure(path, _root_of(path, module), set())
                _as_imported.update({each: _hash_of(each) for each in files})


def source_hashes(function: Callable[..., Any]) -> dict[str, str]:
    """Hash the user's files that a callable's module is made of: its own, and those it imports.

    Returns:
        A hash by file name, relative to the folder that the module was found in; {} for installed
        packages, whose versions tell them apart.
    """
    path = _file_of(function)
    if path is None or not is_users(str(path)):
        return {}
    root = _root_of(path, function.__module__)
    return {
        str(each.relative_to(root)).replace(".", "_"): _as_imported.get(each) or _hash_of(each)
        for each in sorted(_closure(path, root, set()))
    }


def fingerprint(hashes: Mapping[str, str]) -> str:
    """Return one hash for all files; empty if there are none."""
    return _hash(repr(sorted(hashes.items())).encode()) if hashes else ""


def _file_of(function: Callable[..., Any]) -> Path | None:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _root_of(path: Path, module: str) -> Path:
    return path.parents[module.count(".") + (path.stem == "__init__")]


def _closure(path: Path, root: Path, seen: set[Path]) -> set[Path]:
    """Add `path` and the files under `root` that it imports, and so on, to `seen`."""
    if path not in seen:
        seen.add(path)
        for name in _imported(path, root):
            for file in (root / f"{name}.py", root / name / "__init__.py"):
                if file.is_file():
                    _closure(file, root, seen)
    return seen


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the modules that a file names in imports, as paths relative to `root`."""
    package = list(path.parent.relative_to(root).parts)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            yield "/".join(parts)
            yield from ("/".join([*parts, alias.name]) for alias in node.names)


def _hash_of(path: Path) -> str:
    return _hash(path.read_bytes())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HASH_LENGTH]
