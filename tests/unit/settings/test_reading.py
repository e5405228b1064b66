"""Files of strangers: one line says what is wrong, nothing runs, and memory stays bounded."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lab.settings.storage import DamagedFile, read_json, read_yaml
from lab.settings.streams import escape_controls

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "\n".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ("\ud800", "codec can't decode"),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DamagedFile, match=f"^{re.escape(str(path))}: not JSON: .*{why}"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: [1\n", "line 3: expected ',' or ']'"),
        ("[" * 100_000, "nested too deeply"),
        (BOMB, "anchors expand to more than 100000 values"),
        ("a: &a [*a]", "anchors expand to more than"),
        ("!!python/object/apply:os.mkdir [ran]", "could not determine a constructor"),
        ("a: !!python/object/apply:os.mkdir [ran]", "could not determine a constructor"),
        ("3", "Invalid loaded object type"),
        ("link: 1:30", "1:30 would be read as 90; write a plain number"),
        ("a:\n  mode: 0777  # rwx", "0777 would be read as 511; write a plain number"),
    ],
)
def test_yaml_that_cannot_be_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(DamagedFile, match=f"^{re.escape(str(path))}: not YAML: .*{why}"):
        read_yaml(path)


def test_anchors_and_interpolations_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {b: 1e-3}\nc: *a\nd: ${oc.env:HOME}\n")
    assert read_yaml(path) == {"a": {"b": 0.001}, "c": {"b": 0.001}, "d": "${oc.env:HOME}"}


def test_controls_are_shown_instead_of_obeyed() -> None:
    assert escape_controls("a\ud800") == "a\\ud800"
    assert escape_controls("a\x1b[31mb\u202ec\x07\td\n") == "a\\x1b[31mb\\u202ec\\x07\td\n"


@pytest.mark.parametrize("digits", [20, 401, 5000])
def test_a_number_that_no_table_holds_is_damage(tmp_path: Path, digits: int) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {"9" * digits}}}')
    with pytest.raises(DamagedFile, match=f"a whole number of {digits} digits"):
        read_json(path)
    path.write_text(f'{{"a": {2**63 - 1}, "b": {-(2**63)}}}')
    assert read_json(path) == {"a": 2**63 - 1, "b": -(2**63)}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    os.mkfifo(path)
    for read in (read_json, read_yaml):
        with pytest.raises(DamagedFile, match=f"^{re.escape(str(path))}: not a regular file"):
            read(path)


def test_a_file_with_a_hole_of_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.touch()
    os.truncate(path, 20 * 2**30)
    for read in (read_json, read_yaml):
        with pytest.raises(DamagedFile, match="has 21,474,836,480 bytes; the limit is "):
            read(path)


def test_a_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)
