"""A user's own code: as a choice, `model=mynets.SmallResNet`, and to blame in a traceback.

Choices are found, checked and fingerprinted. Of a traceback the user's own part is shown, and not
the lab's.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lab.settings.errors import ConfigError, one_line
from lab.settings.files import conf_dir, standing_here
from lab.settings.storage import nested

if TYPE_CHECKING:
    from omegaconf import DictConfig


PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
TARGET = re.compile(r"^_target_: *(\S+)", re.MULTILINE)
# Where the lab's own choices of a group are. A file of settings may name these, and none of the
# lab's functions besides, some of which run commands.
OWN = {
    "exchange": "lab.exchange.",
    "sync": "lab.sync.",
    "transform": "lab.transform.",
    "task": "lab.task.",
    "model": "lab.model.",
    "data": "lab.data.",
    "optim": "lab.training.optim.",
    "comm": "lab.distributed.",
    "recorder": "lab.record.",
    "cluster": "lab.cluster.settings.emulated",
    "straggler": "lab.cluster.settings.planted",
}
# Groups whose choice may be the path of a callable, and the arguments that it may ask for.
OFFERED: dict[str, tuple[str, ...]] = {
    "model": ("input_shape", "image_shape", "output_size", "num_classes", "vocabulary", "context"),
    "data": ("seed", "device"),
    "optim": ("params", "batch_size"),
    "sync": ("parts",),
    **dict.fromkeys(("exchange", "transform", "task", "comm", "recorder"), ()),
}
# Base classes, by what a user's own extends to play this part in an exchange.
PART_OF = {
    "lab.codec.base.Codec": "codec",
    "lab.exchange.memory.Memory": "memory",
    "lab.exchange.base.Exchange": "exchange",
}
HASH_LENGTH = 8  # hexadecimal digits
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
KNOWN = ("lab.", "torch.optim.")  # paths that need no word before they are imported
LAB = Path(__file__).resolve().parents[1]
STANDARD_LIBRARY = [Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")]
PACKAGES = {"site-packages", "dist-packages"}

_as_imported = dict[Path, str]()  # hashes; a slow import leaves time to edit its file


def names_code(choice: str) -> bool:
    """Return whether a choice is the path of a callable, as `mynets.Net` or `mynets:Net`."""
    return bool(PATH.fullmatch(choice)) and not choice.endswith((".yaml", ".yml"))


def callable_at(path: str, setting: str) -> Callable[..., Any]:
    """Import the callable at a dotted path.

    Args:
        setting: names it in errors, as "model=mynets.SmallResNet".

    Raises:
        ConfigError: there is no such module or name in it, or it fails to import; the message then
            has the file and line.
    """
    module, rest = _module_of(path, setting)
    found: Any = module
    for name in rest:
        if not hasattr(found, name):
            raise ConfigError(f"{setting}: {_missing(found, name)}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(
            f"{setting} has type {type(found).__name__}; it must be a class or function"
        )
    return found


def check_choices(config: DictConfig, arguments: Sequence[str]) -> dict[str, str]:
    """Check the choices of groups that are not the lab's own; return the hashes of their files.

    Args:
        config: composed settings.
        arguments: the command line; code that only files name is told before it is imported.

    Raises:
        ConfigError: a choice is not found, cannot be imported, or lacks an argument or takes
            another; or code of the lab's that is no choice of its group.
    """
    from omegaconf import OmegaConf

    hashes = dict[str, str]()
    for group in OWN:
        for path in targets(OmegaConf.to_container(config[group], resolve=True)):
            _check_target(group, path)
            if not path.startswith(KNOWN) and not any(path in word for word in arguments):
                _tell(group, path)
    for group, names in OFFERED.items():
        whole = OmegaConf.to_container(config[group], resolve=True)
        for key, part in nested(whole, group):
            path = str(part.get("_target_", "")) if isinstance(part, dict) else ""
            # What the lab chooses is not imported: torch takes two seconds.
            if path and not path.startswith("lab.") and path not in _chosen(group):
                offered = names if part is whole else ()
                if group == "exchange":
                    place = _checked_place(path, part, key)
                    if part is whole and place == "path":  # codec=, memory= are beside it
                        key, offered = place, (*offered, "codec", "memory")
                hashes |= _check_code(path, part, key or group, offered)
    return hashes


def _check_code(
    path: str, settings: Mapping[Any, Any], key: str, offered: tuple[str, ...]
) -> dict[str, str]:
    """Check a callable of the user's and the settings given to it; return its files' hashes."""
    function = callable_at(path, f"{key}={path}")
    if key != "optim" and "_partial_" not in settings:  # optim's are also the schedule's
        own = [str(name) for name in settings if not str(name).startswith("_")]
        passed = (*offered, *values_of(function, key))
        check_arguments(function, own, passed, key)
    return source_hashes(function)


def _checked_place(path: str, settings: Mapping[Any, Any], key: str) -> str:
    """Return the group that the user chose `path` for: codec, memory, path or exchange.

    Refuses one of these in the place of another. ConfigError: names its place.

    A path is an exchange whose constructor takes a codec.
    """
    place = key if key in ("codec", "memory") else "path" if "codec" in settings else "exchange"
    kind = callable_at(path, f"{place}={path}")
    bases = kind.__mro__ if inspect.isclass(kind) else ()
    parts = (PART_OF.get(f"{each.__module__}.{each.__qualname__}") for each in bases)
    if (part := next(filter(None, parts), place)) == "exchange":
        takes = _parameters(kind) or {}
        codec, takes_any = takes.get("codec"), any(p.kind is p.VAR_KEYWORD for p in takes.values())
        needs_codec = codec is not None and codec.default is Parameter.empty
        can_be_path = codec is not None or takes_any
        part = "path" if needs_codec or (place == "path" and can_be_path) else "exchange"
    if part != place:
        article = "an" if part == "exchange" else "a"
        raise ConfigError(f"{place}={path}: is {article} {part}; use {part}={path}")
    return place


def is_labs(kind: type, *names: str) -> bool:
    """Return whether the lab itself defines these functions of a class, no user's subclass."""
    return all(getattr(kind, name).__module__.startswith("lab.") for name in names)


def targets(value: Any) -> Iterator[str]:
    """Yield all paths that instantiating a group's settings would import, at any depth."""
    return (str(each) for key, each in nested(value) if key == "_target_")


@cache
def _chosen(group: str) -> frozenset[str]:
    """Return the callables that the lab's own choices of a group name."""
    files = (conf_dir() / group).glob("*.yaml")
    return frozenset(
        found for file in files for found in TARGET.findall(file.read_text(encoding="utf-8"))
    )


def _check_target(group: str, path: str) -> None:
    """Refuse what no choice of a group is: the lab's other functions, or code where none may be."""
    is_labs = path.startswith("lab.")
    if group == "exchange" and path in _chosen("codec"):
        return
    if (is_labs and (not path.startswith(OWN[group]) or "._" in path)) or not (
        is_labs or group in OFFERED
    ):
        raise ConfigError(
            f"{group}._target_={path}: not allowed for {group}; use a path in {OWN[group]}…"
        )


@cache
def _tell(group: str, path: str) -> None:
    """Say what is imported from where, as a file asks for it that may be a stranger's."""
    if os.environ.get("RANK", "0") == "0":
        with standing_here():
            found = importlib.util.find_spec(path.partition(".")[0])
        where = (found and found.origin) or "nowhere"
        print(f"lab: a file sets {group}, which imports {path} from {where}", file=sys.stderr)


def values_of(function: Callable[..., Any], group: str) -> tuple[str, ...]:
    """Return the parameters that get values of a run: of a loss function (group "task") its outputs
    and targets, of a function that is a transform the model. Classes and others have none.
    """
    number = {"task": 2, "transform": 1}.get(group, 0)
    if inspect.isclass(function) or not number:
        return ()
    needed = [
        name
        for name, parameter in (_parameters(function) or {}).items()
        if parameter.default is Parameter.empty and parameter.kind in POSITIONAL
    ]
    return tuple(needed[:number]) if len(needed) >= number else ()


def check_arguments(
    function: Callable[..., Any], arguments: Iterable[str], offered: Iterable[str], group: str
) -> None:
    """Refuse settings that a callable does not take, or lacks.

    Args:
        arguments: names set by the user. offered: names that the lab passes if asked for.

    Raises:
        ConfigError: names those that it takes.
    """
    parameters = _parameters(function)
    if parameters is None:
        return
    own = {k: p for k, p in parameters.items() if k not in offered and p.kind in NAMED}
    check_names(function, arguments, group, own)
    for name, parameter in own.items():
        if parameter.default is Parameter.empty and name not in arguments:
            raise ConfigError(f"{group}.{name} has no default; give it a value")


def check_names(
    function: Callable[..., Any],
    arguments: Iterable[str],
    group: str,
    allowed: Iterable[str] | None = None,
) -> None:
    """Refuse settings that a callable does not take. ConfigError: names those that it takes.

    Args: allowed: those that it takes; None: the others of `arguments`.
    """
    parameters = _parameters(function)
    if parameters is None or Parameter.VAR_KEYWORD in (each.kind for each in parameters.values()):
        return
    names = (name for name in arguments if name in parameters) if allowed is None else allowed
    takes = ", ".join(f"{group}.{name}" for name in names) or "none"
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"{group}.{name}: no such argument; allowed: {takes}")


def asked_for(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `offered` arguments that a callable names in its signature."""
    parameters = _parameters(function) or {}
    return {name: value for name, value in offered.items() if name in parameters}


def _module_of(path: str, setting: str) -> tuple[Any, list[str]]:
    """Import the longest part of a path that is a module; return it and the names left."""
    parts = path.replace(":", ".").split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            # What the lab itself names is never the user's, such as a folder called torch.
            with nullcontext() if path.startswith(KNOWN) else standing_here():
                note_sources(name)
                return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if not (error.name and (name == error.name or name.startswith(f"{error.name}."))):
                raise _import_failed(error, setting) from error
        except (Exception, SystemExit) as error:
            raise _import_failed(error, setting) from error
    raise ConfigError(
        f"{setting}: no module {parts[0]} in {Path.cwd()}, in config_dir or among installed "
        "packages"
    )


def _import_failed(error: BaseException, setting: str) -> ConfigError:
    found = user_traceback(error)
    place = f"{found.place}: " if found else ""
    cause = f"{type(error).__name__}: {one_line(error)}"
    return ConfigError(f"{setting}: cannot be imported: {place}{cause}")


def _missing(owner: Any, name: str) -> str:
    names = [each for each in vars(owner) if not each.startswith("_")]
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    hint = f"; did you mean {by_lower[close[0]]}?" if close else ""
    return f"{getattr(owner, '__name__', owner)} has no {name}{hint}"


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # some functions written in C have none
        return None


def note_sources(module: str) -> None:
    """Hash the user's files of a module that is about to be imported, as they are now."""
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    if spec and spec.has_location and spec.origin and is_users(spec.origin):
        path = Path(spec.origin).resolve()
        if path.suffix == ".py":
            with suppress(SyntaxError, ValueError, OSError):  # the import will say it better
                files = _closure(path, _root_of(path, module), set())
                _as_imported.update({each: _hash(each.read_bytes()) for each in files})


def source_hashes(function: Callable[..., Any]) -> dict[str, str]:
    """Hash the user's files that a callable's module is made of: its own, and those it imports.

    Returns:
        A hash by file name, relative to the folder that the module was found in; {} for installed
        packages, whose versions tell them apart.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not file or not is_users(str(path := Path(file).resolve())):
        return {}
    root = _root_of(path, function.__module__)
    return {
        str(each.relative_to(root)).replace(".", "_"): (
            _as_imported.get(each) or _hash(each.read_bytes())
        )
        for each in sorted(_closure(path, root, set()))
    }


def fingerprint(hashes: Mapping[str, str]) -> str:
    """Return one hash for all files; empty if there are none."""
    return _hash(repr(sorted(hashes.items())).encode()) if hashes else ""


def _root_of(path: Path, module: str) -> Path:
    return path.parents[module.count(".") + (path.stem == "__init__")]


def _closure(path: Path, root: Path, seen: set[Path]) -> set[Path]:
    """Add `path` and the files under `root` that it imports, and so on, to `seen`."""
    if path not in seen:
        seen.add(path)
        for name in _imported(path, root):
            for file in (root / f"{name}.py", root / name / "__init__.py"):
                if file.is_file() and is_users(str(file)):  # the lab's own have a git commit
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


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:HASH_LENGTH]


@dataclass(frozen=True)
class UserTraceback:
    """An error that the user's code raised, or a library that this code called.

    Attributes:
        error: the error itself, which may be the cause of the one that was caught.
        place: file, line and function of the user's innermost frame: "nets.py:12 in forward".
        traceback: Python's text, from the user's outermost frame on.
    """

    error: BaseException
    place: str
    traceback: str


def user_traceback(error: BaseException) -> UserTraceback | None:
    """Return what the user's code has to do with an error; None if nothing.

    The user's code is all that belongs neither to the lab nor to Python nor to an installed
    package. It is to blame if one of its frames lies within the innermost frame of the lab: a
    loss of the user's that fails is the user's bug, a wrong argument that the lab refuses is not.
    """
    for each in _with_causes(error):
        if isinstance(each, ConfigError):  # a message, made to be shown alone
            continue
        if place := _place(each):
            return UserTraceback(each, place, _text(each))
    return None


def reason_of(error: Exception, target: object) -> Exception:
    """Return the error to raise when `target` could not be constructed.

    That is the user's own error; or a ConfigError if an argument was refused or nothing is found
    under that name; or else the error that the constructor raised.
    """
    found = user_traceback(error)
    cause = error if isinstance(error, ValueError | TypeError) else error.__cause__
    if found and isinstance(found.error, Exception):
        return found.error
    if isinstance(cause, ValueError | TypeError):
        return ConfigError(one_line(cause))
    if isinstance(cause, Exception) and not isinstance(cause, ImportError | AttributeError):
        return cause
    *_, first = _with_causes(error)
    return ConfigError(f"_target_={target}: {one_line(first)}")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused it, and so on, as Python prints them."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _place(error: BaseException) -> str | None:
    """Name the user's innermost frame within the lab's innermost one; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{Path(error.filename).name}:{error.lineno}"
    inside = list[traceback.FrameSummary]()
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve().is_relative_to(LAB):
            inside.clear()
        elif is_users(frame.filename):
            inside.append(frame)
    if not inside:
        return None
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno} in {inside[-1].name}"


def _text(error: BaseException) -> str:
    """Return Python's traceback, without the frames outside of the user's first one."""
    first: TracebackType | None = error.__traceback__
    while first and not is_users(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return "".join(traceback.TracebackException(type(error), error, first).format()).rstrip()


def is_users(filename: str) -> bool:
    """Return whether a file is neither the lab's, nor Python's, nor an installed package's."""
    path = Path(filename)
    # Code that was made while running, Python's importer, and Cython of a package.
    if filename.startswith("<") or path.suffix in (".pyx", ".pxi"):
        return False
    others = any(path.resolve().is_relative_to(folder) for folder in (LAB, *STANDARD_LIBRARY))
    return not others and not PACKAGES & {*path.parts}
