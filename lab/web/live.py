"""A sweep's page while it runs, on this machine alone: progress, finished cells, and a stop."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lab.study.grid import Study
from lab.web.progress import Progress

ADDRESS = "127.0.0.1"


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

    def progress(self) -> Progress:
        """Tell how far the sweep is."""
        run, left = self._num_ended - self._first, self._num_cells - self._num_ended
        spent_s = time.monotonic() - self._began
        eta = str(timedelta(seconds=round(spent_s / run * left))) if run else ""
        return Progress(self._num_ended, self._num_cells, self._num_drawn, eta, self._stopping)

    def _draw(self) -> None:
        # Imported here: most sweeps need no pandas and no matplotlib.
        from lab.web.command import parts_of
        from lab.web.page import Parts, render

        shown = replace(self.progress(), num_drawn=self._num_ended)
        try:
            parts = parts_of([self._root], f"python -m lab.report {self._root.name}")
        except ValueError:  # no cell has a record yet
            parts = Parts(self._root.name, "", [], [], None)
        page = render(parts, shown)
        with self._lock:
            self._num_drawn, self._page = self._num_ended, page.encode()


@contextmanager
def served(study: Study, root: Path) -> Iterator[Callable[[bool], None]]:
    """Serve the page of a sweep while the context lasts; yield what counts cells that end."""
    live = LivePage(root, len(study.cells))
    token = secrets.token_urlsafe(24)
    server = ThreadingHTTPServer((ADDRESS, 0), _handler(live, token))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="live page", daemon=True)
    thread.start()
    print(f"live: http://{ADDRESS}:{server.server_port}/{token}/", flush=True)
    try:
        yield live.cell_ended
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
            if self._asked() != "stop":
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

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(HTTPStatus.OK)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep requests out of the sweep's output."""

    return Handler
