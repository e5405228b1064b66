"""A sweep's page while it runs, on this machine alone: progress, finished cells, and a stop."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.settings.errors import one_line
from lab.study.grid import Study

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 16  # at a time; others are closed, so that none can take all descriptors
LIMIT_S = 10.0  # for a request to arrive
SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is whose page is shown while it runs.

    Attributes:
        num_ended: cells that need not run any more.
        num_drawn: those that the newest page shows.
        eta: the time that the rest will take; empty: unknown.
    """

    num_ended: int
    num_cells: int
    num_drawn: int
    eta: str
    stopping: bool

    def as_json(self) -> dict[str, Any]:
        """Return what the page asks for again and again."""
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        left = f", about {self.eta} left" if self.eta and self.num_ended < self.num_cells else ""
        state = "; stopping" if self.stopping else ""
        return f"{self.num_ended} of {self.num_cells} cells have ended{left}{state}"


class LivePage:
    """The page of a sweep: drawn anew when cells have ended, before the next ones start.

    So drawing takes no time from a cell that is measured; while cells run, only the page's small
    questions about progress are answered.
    """

    def __init__(self, root: Path, num_cells: int) -> None:
        self._root, self._num_cells = root, num_cells
        self._began, self._first = time.monotonic(), 0
        self._lock = threading.Lock()
        self._num_ended, self._num_drawn, self._page = 0, 0, b""
        self._stopping = False
        self._draw()

    def cell_ended(self, was_run: bool) -> None:
        """Count a cell; draw the page if it was run now."""
        self._num_ended += 1
        self._first += not was_run
        if was_run or self._num_ended == self._num_cells:
            self._draw()

    def stop(self) -> None:
        """End the sweep as Ctrl-C does: its ranks write checkpoints and records first."""
        self._stopping = True
        os.kill(os.getpid(), signal.SIGINT)

    def page(self) -> bytes:
        with self._lock:
            return self._page

    def progress(self) -> SweepProgress:
        """Tell how far the sweep is."""
        run, left = self._num_ended - self._first, self._num_cells - self._num_ended
        spent_s = time.monotonic() - self._began
        eta = str(timedelta(seconds=round(spent_s / run * left))) if run else ""
        return SweepProgress(self._num_ended, self._num_cells, self._num_drawn, eta, self._stopping)

    def _draw(self) -> None:
        # Imported here: most sweeps need no pandas and no Altair.
        from lab.web.page import Parts, parts_of, render

        shown = replace(self.progress(), num_drawn=self._num_ended)
        try:
            try:
                parts = parts_of([self._root], f"python -m lab.report {self._root.name}")
            except ValueError:  # no cell has a record yet
                parts = Parts(self._root.name, "", [], [], None)
            page = render(parts, shown).encode()
        except Exception as error:  # a page is no reason to end a measurement
            why = f"{type(error).__name__}: {one_line(error)}"
            print(f"live: the page cannot be updated: {why}", file=sys.stderr)
            return
        with self._lock:
            self._num_drawn, self._page = self._num_ended, page


@contextmanager
def served(study: Study, root: Path) -> Iterator[Callable[[bool], None]]:
    """Serve the page of a sweep while the context lasts; yield what counts cells that end."""
    live = LivePage(root, len(study.cells))
    token = secrets.token_urlsafe(24)
    server = _Server((ADDRESS, 0), _handler(live, token))
    thread = threading.Thread(target=server.serve_forever, name="live page", daemon=True)
    thread.start()
    print(f"live: http://{ADDRESS}:{server.server_port}/{token}/", flush=True)
    try:
        yield live.cell_ended
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """A server that answers a few connections at a time, each within a limit."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A socket's own limit begins anew with each byte, so that a request could last for ever.
        end = threading.Timer(LIMIT_S, _cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away: the output is the sweep's."""


def _cut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _handler(live: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    """Make the handler of requests, which answers those alone whose path begins with the token."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "lab", ""

        def do_GET(self) -> None:
            match self._asked():
                case "":
                    self._answer(live.page(), "text/html; charset=utf-8")
                case "progress":
                    self._answer(json.dumps(live.progress().as_json()).encode(), "application/json")
                case _:
                    self.send_error(HTTPStatus.NOT_FOUND)

        def do_POST(self) -> None:
            if self._asked() != "stop" or not self._is_from_here():
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", f"/{token}/")
            self.end_headers()
            live.stop()

        def _asked(self) -> str | None:
            """Return the part of the path after the token; None: the token is wrong.

            A name other than this machine's own means that some site's name was made to lead
            here (DNS rebinding).
            """
            host = self.headers.get("Host", "").partition(":")[0]
            given, _, rest = self.path.lstrip("/").partition("/")
            known = secrets.compare_digest(given.encode(), token.encode())
            return rest if known and host in (ADDRESS, "localhost") else None

        def _is_from_here(self) -> bool:
            """Return whether no other site's page sends this."""
            origin = self.headers.get("Origin")
            return origin is None or origin == f"http://{self.headers.get('Host')}"

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def end_headers(self) -> None:
            for name, value in SAFE_HEADERS.items():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep requests out of the sweep's output."""

    return Handler
