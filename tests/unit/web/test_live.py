"""The page of a sweep: nothing that its visitors do ends the sweep, and others cannot stop it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse
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


def answer(url: Any, method: str, path: str, **headers: str) -> HTTPResponse:
    connection = HTTPConnection(url.hostname, url.port, timeout=60)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def ask(url: Any, method: str, path: str, **headers: str) -> int:
    return answer(url, method, url.path + path, **headers).status


def test_only_its_own_address_is_answered_and_no_site_may_frame_it(address: Any) -> None:
    url = address.url
    word = url.path.strip("/")
    assert len(word) >= 20
    others = ("/", "/favicon.ico", f"/{word[:-1]}/", f"/{word.swapcase()}/", f"/?{word}", "/guess/")
    others += (f"/{word}/../../etc/passwd", f"/{word}/..%2f..%2fetc/passwd", f"/{word}/record.json")
    for path in (url.path, *others):
        found = answer(url, "GET", path)
        assert found.status == (200 if path == url.path else 404), path
        assert {name: found.headers[name] for name in live.SAFE_HEADERS} == live.SAFE_HEADERS
        assert "Python" not in (found.headers["Server"] or "")
    hosts = ("evil.example", f"evil.example:{url.port}", f"127.0.0.1.evil:{url.port}", "[::1]", "")
    assert {ask(url, "GET", "", Host=host) for host in hosts} == {404}
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(url, method, "stop") in (404, 501), method
    for host in ("127.0.0.2", "::1"):
        with pytest.raises(OSError):
            socket.create_connection((host, url.port), timeout=60)


def test_visitors_that_leave_before_the_answer_are_not_mentioned(
    address: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = f"GET {address.url.path} HTTP/1.0\r\nHost: {address.url.netloc}\r\n\r\n".encode()
    for _ in range(20):
        with (
            suppress(OSError),
            socket.create_connection((address.url.hostname, address.url.port), 60) as visitor,
        ):
            visitor.sendall(asks)
    wait_for(lambda: answers(address.url))
    assert capsys.readouterr().err == ""


def answers(url: Any) -> bool:
    """Return whether the page is there; other visitors may have all places."""
    try:
        return ask(url, "GET", "progress") == 200
    except OSError:
        return False


@pytest.mark.slow
def test_half_sent_requests_are_bounded_and_end(
    address: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIMIT_S", 0.5)
    opened = []
    for _ in range(300):
        opened.append(socket.create_connection((address.url.hostname, address.url.port)))
        opened[-1].sendall(b"GET / HT")
    wait_for(lambda: answers(address.url))
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
    told = answer(address.url, "GET", f"{address.url.path}progress").read()
    assert json.loads(told)["num_cells"] == 2
