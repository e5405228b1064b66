"""The page of a sweep: nothing that its visitors do ends the sweep, and others cannot stop it."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from lab.web import live, page
from tests.conftest import wait_for


@pytest.fixture
def address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    study: Any = SimpleNamespace(cells=[1, 2])
    with live.served(study, tmp_path) as ended:
        found = re.search(r"live: (\S+)", capsys.readouterr().out)
        assert found
        yield SimpleNamespace(url=urlsplit(found[1]), ended=ended)


def ask(url: Any, method: str, path: str, **headers: str) -> int:
    connection = HTTPConnection(url.hostname, url.port, timeout=60)
    connection.request(method, url.path + path, headers=headers)
    return connection.getresponse().status


@pytest.mark.slow
def test_half_sent_requests_are_bounded_and_end(
    address: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIMIT_S", 0.5)
    opened = []
    for _ in range(300):
        opened.append(socket.create_connection((address.url.hostname, address.url.port)))
        opened[-1].sendall(b"GET / HT")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if ask(address.url, "GET", "progress") == 200:
                break
        except OSError:  # no place yet
            time.sleep(0.1)
    else:
        raise AssertionError("the page answers no more")
    for each in opened:
        each.close()


def test_the_sweep_goes_on_if_its_page_cannot_be_drawn(
    address: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(page, "render", fail)
    address.ended(True)
    assert "live: the page cannot be updated: OSError: [Errno 24]" in capsys.readouterr().err
    assert ask(address.url, "GET", "") == 200


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 404), ("null", 404), ("own", 303), (None, 303)]
)
def test_only_the_pages_own_button_stops_the_sweep(
    address: Any, monkeypatch: pytest.MonkeyPatch, origin: str | None, status: int
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(live.LivePage, "stop", lambda self: stopped.append(True))
    own = f"http://{address.url.hostname}:{address.url.port}"
    headers = {} if origin is None else {"Origin": own if origin == "own" else origin}
    assert ask(address.url, "POST", "stop", **headers) == status
    if status == 303:
        wait_for(lambda: stopped)  # the answer comes first
    assert bool(stopped) == (status == 303)


def test_progress_is_told(address: Any) -> None:
    connection = HTTPConnection(address.url.hostname, address.url.port, timeout=60)
    connection.request("GET", f"{address.url.path}progress")
    assert json.loads(connection.getresponse().read())["num_cells"] == 2
