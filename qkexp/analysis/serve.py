"""The report of a sweep on loopback, made anew while runs go on."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from qkexp.analysis.report import Reader, page
from qkexp.config import UserError

ADDRESS = "127.0.0.1"
REST = 5.0  # times as long as the last payload took: reading must not take the processor from training


class Live:
    """The newest payload of a sweep, shared by all readers; a change is read when it is asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._reader = Reader(directory)
        self._lock = threading.Lock()
        self._ready = 0.0
        self._payload = self._read()

    def current(self) -> tuple[str, bytes]:
        """Version and payload."""
        with self._lock:
            if time.monotonic() >= self._ready and self._reader.version() != self._version:
                try:
                    self._payload = self._read()
                except (UserError, OSError):  # runs are being taken away or replaced: the last look holds
                    self._ready = time.monotonic() + 1.0
            return self._version, self._payload

    def _read(self) -> bytes:
        start, version = time.monotonic(), self._reader.version()
        payload = self._reader.payload(version)
        self._version, self._ready = version, time.monotonic() + REST * (time.monotonic() - start)
        return payload


class Server(ThreadingHTTPServer):
    """Answers ``/``, ``/version`` and ``/data``; there is no way from an address to a file.

    Raises:
        UserError: no runs in the directory, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0):
        self.live = Live(directory)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port={port}: {error}; accepted: a free port of {ADDRESS}, or 0 for any") from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host") not in hosts:  # a page elsewhere whose name was made to point here
            self._answer(403, "text/plain", b"only for this machine\n")
            return
        live = self.server.live
        if self.path == "/":
            text = page(live.directory.resolve().name, live.current()[1], live=True)
            self._answer(200, "text/html; charset=utf-8", text.encode())
        elif self.path == "/version":
            self._answer(200, "application/json", json.dumps({"version": live.current()[0]}).encode())
        elif self.path == "/data":
            self._answer(200, "application/octet-stream", live.current()[1])
        else:
            self._answer(404, "text/plain", b"not here\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the reader has gone
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal is the user's."""
