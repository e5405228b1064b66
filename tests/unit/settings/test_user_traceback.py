"""Whose code has failed: the user's own, the lab's, or a library's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lab.exchange.compressed import OneBit
from lab.settings import command as commands
from lab.settings.config import build, load
from lab.settings.errors import ConfigError
from lab.settings.names import resolved
from lab.settings.own_code import UserTraceback, user_traceback

BUGS = "tests.support.bugs"


class Odd(dict[str, Any]):
    """A mapping that fails where the lab reads it."""

    def items(self) -> Any:
        """Fail."""
        raise KeyError("odd")


def raised(call: Callable[[], Any]) -> tuple[BaseException, UserTraceback | None]:
    """Return the error as lab code would catch it, which this test's own frames do not enclose."""
    try:
        call()
    except Exception as error:
        assert error.__traceback__ is not None
        return error, user_traceback(error.with_traceback(error.__traceback__.tb_next))
    raise AssertionError("nothing was raised")


def test_a_users_frame_within_the_labs_is_to_blame() -> None:
    error, found = raised(lambda: resolved(Odd()))
    assert found and found.error is error
    assert found.place.startswith("test_user_traceback.py:") and found.place.endswith(" in items")
    assert 'raise KeyError("odd")' in found.traceback and "names.py" in found.traceback


def test_a_library_that_the_user_calls_is_the_users() -> None:
    _, found = raised(lambda: torch.ones(2).view(3))
    assert found and found.place.endswith("in <lambda>")


def test_what_the_lab_refuses_is_not_the_users() -> None:
    node = load(["strategy=onebit", "exchange.threshold=half"]).exchange
    own = {str(key): value for key, value in node.items() if key != "_target_"}
    error, found = raised(lambda: OneBit(**own))
    assert isinstance(error, ValueError) and found is None


def test_the_cause_is_found_behind_other_errors() -> None:
    def wrapped() -> None:
        try:
            resolved(Odd())
        except KeyError as error:
            raise ConfigError("data=odd: cannot be read") from error

    error, found = raised(wrapped)
    assert found and found.error is error.__cause__


def test_a_wrong_setting_is_a_message_and_nobodys_bug() -> None:
    def refuse() -> None:
        raise ConfigError("width=3: must be even")

    assert raised(refuse)[1] is None


def module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of the user's, and return its name."""
    name = "blamed_module"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("import no_such_package\n", ModuleNotFoundError, "blamed_module.py:1 in <module>"),
        ("x = 1\ny = x / 0\n", ZeroDivisionError, "blamed_module.py:2 in <module>"),
        ("def f(:\n", SyntaxError, "blamed_module.py:1"),
    ],
)
def test_an_error_at_import_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception], place: str
) -> None:
    path = f"{module(tmp_path, text, monkeypatch)}.Net"
    error, found = raised(lambda: build(OmegaConf.create({"_target_": path})))
    assert found and isinstance(found.error, kind)
    assert not isinstance(error, ConfigError) or f"{place}: {kind.__name__}: " in str(error)
    assert found.place == place and str(tmp_path / "blamed_module.py") in found.traceback


def test_an_error_in_a_users_constructor_is_raised_as_it_is() -> None:
    shapes = {"input_shape": [4], "output_size": 2}
    node = OmegaConf.create({"_target_": f"{BUGS}.InConstructor", **shapes})
    error, found = raised(partial(build, node))
    assert type(error) is TypeError and error.__context__ is None
    assert found and found.place.endswith(" in __init__") and "hydra" not in found.traceback


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": f"{BUGS}.Net", "width": 3},
            "settings.width: no such argument; allowed: none",
        ),
        ({"_target_": f"{BUGS}.Net"}, "missing 2 required keyword-only arguments"),
        ({"_target_": "nowhere.Net"}, "_target_=nowhere.Net: no module nowhere in"),
    ],
)
def test_arguments_that_a_signature_lacks_are_wrong_settings(
    node: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(OmegaConf.create(node))


def test_a_command_prints_the_users_frames_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = commands.Command("lab.odd", "Fail.", ())

    def act(_line: commands.CommandLine) -> int:
        resolved(Odd())
        return 0

    assert commands.answer(command, [], act) == 1
    out = capsys.readouterr().err
    assert out.startswith("Traceback (most recent call last):\n") and 'KeyError("odd")' in out
    assert out.splitlines()[-1].startswith(
        "lab.odd: error: KeyError: 'odd' (test_user_traceback.py:"
    )
