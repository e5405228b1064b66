"""Files of strangers: twenty tricks and more for each kind that is data, by any format.

A trick is tried in place of a file that is read as a user's command reads it. None may run code,
read a variable or another file, or hold the command up.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import socket
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from tests.attack import acts
from tests.attack.files import make_files
from tests.attack.mutations import LONG
from tests.attack.outcome import Attempt
from tests.attack.readers import READERS, judged, run

OF_VARIABLE, OF_FILE = SECRETS = ("of-a-variable-91c4", "of-a-file-7f3e")
SECRET_FILE = "other.txt"  # beside what is read
HUGE_BYTES, DEPTH = 20 * 2**30, 10_000
Text = Callable[[Any], bytes]  # makes a file's content of the document in it
Place = Callable[[Path], object]  # puts something else where a file was


class Malice:
    """Unpickled, it makes the folder `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def everywhere(change: Callable[[Any], Any], document: Any) -> Any:
    """Replace each value of a document that is no list or mapping."""
    if isinstance(document, dict):
        return {key: everywhere(change, value) for key, value in document.items()}
    if isinstance(document, list):
        return [everywhere(change, value) for value in document]
    return change(document)


def in_mappings(extra: dict[str, Any], document: Any) -> Any:
    """Add keys to each mapping of a document."""
    if isinstance(document, dict):
        return {**{key: in_mappings(extra, value) for key, value in document.items()}, **extra}
    if isinstance(document, list):
        return [in_mappings(extra, value) for value in document]
    return document


def _texts(text: str) -> Text:
    def replaced(value: Any) -> Any:
        return text if isinstance(value, str) else value

    return lambda document: json.dumps(everywhere(replaced, document)).encode()


def _numbers(literal: str) -> Text:
    def replaced(value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "NUMBER" if is_number else value

    def content(document: Any) -> bytes:
        return json.dumps(everywhere(replaced, document)).replace('"NUMBER"', literal).encode()

    return content


def _keys(**extra: Any) -> Text:
    return lambda document: json.dumps(in_mappings(extra, document)).encode()


def _twice(document: Any) -> bytes:
    """Write each key of the first mapping twice."""
    text = json.dumps(document)
    return b"{" + text[1:-1].encode() + b"," + text[1:].encode() if text[0] == "{" else b"{}"


# JSON is YAML too: a file of YAML gets the same tricks, and those of YAML alone.
TEXTS: dict[str, Text] = {
    "a variable": _texts("${oc.env:SECRET_OF_USER}"),
    "a variable, decoded": _texts("${oc.decode:${oc.env:SECRET_OF_USER}}"),
    "a variable of the shell": _texts("$SECRET_OF_USER ${SECRET_OF_USER} `mkdir ran` $(mkdir ran)"),
    "a name of another file": _texts(SECRET_FILE),
    "an address of another file": _texts(f"file://{SECRET_FILE}"),
    "a path upwards": _texts("../../../../../../../../etc/passwd"),
    "the environment as a file": _texts("/proc/self/environ"),
    "code by its path": _texts("os.mkdir"),
    "code in settings": _texts("model=os.mkdir model._target_=os.mkdir +model.path=ran"),
    "code to evaluate": _texts("__import__('os').mkdir('ran')"),
    "a target everywhere": _keys(_target_="os.mkdir", path="ran"),
    "a target with arguments": _keys(_target_="os.mkdir", _args_=["ran"], _recursive_=True),
    "a target of the lab's": _keys(_target_="lab.train.main", _args_=[["model=os.mkdir"]]),
    "a part of a target": _keys(_target_="os.mkdir", _partial_=True, _convert_="all"),
    "other choices": _keys(defaults=[{"model": "os.mkdir"}, "_self_"]),
    "settings of Hydra": _keys(hydra={"run": {"dir": "ran"}, "searchpath": ["file://mine"]}),
    "keys of objects": _keys(**{"__class__": "os", "__init__": {"__globals__": 1}, "__dict__": {}}),
    "signs for terminals and pages": _texts("\x1b]0;x\x07\u202e<script>ran()</script>=1+1|`x`"),
    "long texts": _texts("x" * LONG),
    "no numbers": _numbers("NaN"),
    "infinite numbers": _numbers("1e999"),
    "numbers of 401 digits": _numbers("9" * 401),
    "negative numbers": _numbers("-1"),
    "numbers as texts": _numbers('"1"'),
    "values of null": lambda document: json.dumps(everywhere(lambda _: None, document)).encode(),
    "keys twice": _twice,
    "lists, deeper than a parser goes": lambda _: b"[" * DEPTH + b"]" * DEPTH,
    "a million keys": lambda _: json.dumps({str(key): key for key in range(10**6)}).encode(),
    "a list around it": lambda document: json.dumps([document]).encode(),
    "UTF-16": lambda document: json.dumps(document).encode("utf-16"),
    "bytes that are no text": lambda document: b"\xff\xfe\x80" + json.dumps(document).encode(),
    "a pickle": lambda _: pickle.dumps(Malice()),
    "an archive": lambda document: gzip.compress(json.dumps(document).encode()),
}
YAMLS: dict[str, Text] = {
    "a tag that calls": lambda document: _tagged("!!python/object/apply:os.mkdir [ran]", document),
    "a tag of a module": lambda document: _tagged("!!python/name:os.mkdir", document),
    "a tag of its own": lambda document: _tagged("!include other.txt", document),
    "a package": lambda document: b"# @package _global_\n" + yaml.safe_dump(document).encode(),
    "anchors upon anchors": lambda _: _anchors(),
    "an anchor in itself": lambda _: b"a: &a [*a]\n<<: *a\n",
    "two documents": lambda document: yaml.safe_dump_all([document, document]).encode(),
}


def _tagged(tag: str, document: Any) -> bytes:
    text = yaml.safe_dump(document)
    return f"first: {tag}\n{text}".encode() if isinstance(document, dict) else f"- {tag}\n".encode()


def _anchors() -> bytes:
    first = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    levels = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    return (first + "".join(levels)).encode()


def _zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _array(header: str, values: bytes = b"") -> bytes:
    """Write an array whose header is any text."""
    padded = header.ljust(118)[:-1] + "\n" if len(header) < 118 else header + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + values


def _saved(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _table(columns: dict[str, Any], **metadata: str) -> bytes:
    table = pa.table(columns).replace_schema_metadata(metadata)
    return _saved(lambda file: pq.write_table(table, file))


LARGE_ARRAY = "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,), }"
CALLING_ARRAY = "__import__('os').mkdir('ran')"
OBJECTS = np.array([Malice()], dtype=object)
BINARIES: dict[str, Callable[[], bytes]] = {
    "a pickle": lambda: pickle.dumps(Malice()),
    "a pickle of torch": lambda: _saved(lambda file: torch.save(Malice(), file)),
    "a pickle among tensors": lambda: _saved(
        lambda file: torch.save({"model": {"weight": Malice()}, "progress": {"step": 3}}, file)
    ),
    "an old pickle of torch": lambda: _saved(
        lambda file: torch.save(Malice(), file, _use_new_zipfile_serialization=False)
    ),
    "arrays of objects": lambda: _saved(
        lambda file: np.savez(file, inputs=OBJECTS, targets=OBJECTS, allow_pickle=True)
    ),
    "one array of objects": lambda: _saved(lambda file: np.save(file, OBJECTS, allow_pickle=True)),
    "a header that calls": lambda: _zipped(
        **{"inputs.npy": _array(CALLING_ARRAY), "targets.npy": _array(CALLING_ARRAY)}
    ),
    "a header of 400 GB": lambda: _zipped(
        **{"inputs.npy": _array(LARGE_ARRAY), "targets.npy": _array(LARGE_ARRAY)}
    ),
    "arrays that unpack to 256 MiB": lambda: _saved(
        lambda file: np.savez_compressed(file, inputs=np.zeros((2**26, 1), np.float32))
    ),
    "names that lead upwards": lambda: _zipped(**{"../../../ran": b"x", "inputs.npy": b"x"}),
    "an archive of nothing": lambda: _zipped(),
    "an archive of one file": lambda: _zipped(**{"data.pkl": pickle.dumps(Malice())}),
    "gzip that unpacks to 4 GiB": lambda: gzip.compress(bytes(2**26)) * 64,
    "gzip within gzip": lambda: gzip.compress(gzip.compress(gzip.compress(b"{}"))),
    "gzip of a pickle": lambda: gzip.compress(pickle.dumps(Malice())),
    "a table of a constant": lambda: _table(
        {"step": pa.DictionaryArray.from_arrays(np.zeros(2**22, np.int8), ["x"])}
    ),
    "a table whose texts lead elsewhere": lambda: _table(
        {"step": [SECRET_FILE], "targets": ["${oc.env:SECRET_OF_USER}"], "a": ["/etc/passwd"]}
    ),
    "a table with words for pandas": lambda: _table({"targets": [1.0]}, pandas=CALLING_ARRAY),
    "a table of texts": lambda: _table({"targets": ["x" * LONG], "a": ["=1+1"]}),
    "a table of lists": lambda: _table({"targets": [[[1.0]]], "a": [[]]}),
    "a table without rows": lambda: _table({"targets": pa.array([], pa.float32())}),
    "marks of a table alone": lambda: b"PAR1" + b"\xff" * 8 + b"PAR1",
    "a table whose end says 4 GiB": lambda: b"PAR1" + b"\xff\xff\xff\xffPAR1",
    "a page": lambda: b"<!doctype html><script>ran()</script>",
    "a link of text": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


PLACES: dict[str, Place] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "20 GB of holes": _holes,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to another kind of file": lambda path: path.symlink_to("/etc/passwd"),
}


def tricks(name: str) -> dict[str, Place]:
    """Return what a stranger may put where a reader's file is, by what it is."""
    file, contents = Path(READERS[name].file), BINARIES
    if file.suffix in (".json", ".yaml") or file.name == "DONE":
        document = yaml.safe_load(file.read_bytes())
        texts = TEXTS | (YAMLS if file.suffix == ".yaml" else {})
        contents = {what: partial(text, document) for what, text in texts.items()}
    written = {
        what: lambda path, content=content: path.write_bytes(content())
        for what, content in contents.items()
    }
    return PLACES | written


def attack(name: str, every: int = 1) -> Iterator[Attempt]:
    """Put each trick where a reader's file is; yield what came of it.

    The current folder must be empty.

    Args:
        every: take the first of so many tricks, counted from another one for each reader.
    """
    reader = READERS[name]
    make_files(Path())
    Path(SECRET_FILE).write_text(OF_FILE)
    os.environ["SECRET_OF_USER"] = OF_VARIABLE
    path = Path(reader.file)
    whole = path.read_bytes()
    _, code = run(reader)
    assert code == 0
    for what, put in list(tricks(name).items())[len(name) % every :: every]:
        path.unlink()
        put(path)
        content = b"" if what in PLACES else path.read_bytes()
        acts.seal(path)
        yield judged(f"strangers: {name}", what, reader, content, SECRETS)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
        acts.seal(path)
