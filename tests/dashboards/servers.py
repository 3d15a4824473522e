"""A real W&B server on the loopback (openwandb), and a gate in front of one that misbehaves as it is told to."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEY = "local" + 35 * "0"
START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def binary() -> str | None:
    """The server's command, beside the interpreter or on the path; None where it is not installed."""
    return shutil.which("openwandb", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


class Server:
    """openwandb on a free port of the loopback. ``stop`` and ``start`` again keep its data and its address."""

    def __init__(self, directory: Path):
        self.directory, self.port = directory, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, base_url: str | None = None) -> None:
        """Returns once it answers. ``base_url``: where clients are told to send files; its own by default."""
        self.directory.mkdir(exist_ok=True)
        address = ["--host", "127.0.0.1", "-p", str(self.port)]
        command = [binary() or "openwandb", "serve", *address, "--log-level", "warning"]
        command += ["--data-dir", str(self.directory), "--base-url", base_url or self.url]
        with (self.directory / "server.log").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None, (self.directory / "server.log").read_text()
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as found:
                found.request("GET", "/healthz")
                found.getresponse().read()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    # ---------------------------------------------------------------- what it holds

    def runs(self) -> dict[str, dict[str, Any]]:
        """run id -> name, state, config, summary and tags, of the runs on the server."""
        rows = self._ask("SELECT * FROM runs")
        return {
            row["run_id"]: {
                "name": row["display_name"],
                "state": row["state"],
                "config": json.loads(row["config_json"]),
                "summary": json.loads(row["summary_json"]),
                "tags": json.loads(row["tags_json"]),
                "notes": row["notes"],
            }
            for row in rows
        }

    def history(self, run_id: str) -> dict[int, dict[str, Any]]:
        """step -> numbers of the run's history.

        The server appends what it is sent and does not look at offsets, as W&B does: after a connection broke, a
        client may send lines again. They must be the same then, but for the times of steps that were trained again.
        """
        found: dict[int, dict[str, Any]] = {}
        for row in self._ask("SELECT step, key, value FROM metrics WHERE run_id = ?", run_id):
            before = found.setdefault(row["step"], {}).setdefault(row["key"], row["value"])
            again = before == row["value"] or row["key"].endswith("_seconds")
            assert again, f"step {row['step']}: {row['key']} was {before}, then {row['value']}"
        return found

    def lines(self, run_id: str) -> int:
        """Values of the loss that the server was sent, repetitions included."""
        return self._ask("SELECT count(*) AS n FROM metrics WHERE run_id = ? AND key = 'loss'", run_id)[0]["n"]

    def files(self, run_id: str) -> list[str]:
        return [row["name"] for row in self._ask("SELECT name FROM files WHERE run_id = ?", run_id)]

    def artifacts(self, run_id: str) -> list[str]:
        return [row["name"] for row in self._ask("SELECT name FROM artifacts WHERE run_id = ?", run_id)]

    def _ask(self, query: str, *values: str) -> list[sqlite3.Row]:
        with contextlib.closing(sqlite3.connect(f"file:{self.directory / 'openwandb.db'}?mode=ro", uri=True)) as found:
            found.row_factory = sqlite3.Row
            return found.execute(query, values).fetchall()


Answer = Callable[[http.server.BaseHTTPRequestHandler], bool]


class Gate:
    """Passes requests on to a server, unless ``answer`` has dealt with them; counts them by status."""

    def __init__(self, target: Server, answer: Answer = lambda _: False):
        self.answer, self.target, self.seen = answer, target, []  # type: ignore[var-annotated]
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                gate.seen.append(f"{self.command} {self.path}")
                if gate.answer(self):
                    return
                try:
                    status, headers, body = gate.forward(self)
                except OSError:
                    status, headers, body = 502, [], b""
                reply(self, status, body, headers)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def forward(self, request: Any) -> tuple[int, list[tuple[str, str]], bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=30)) as found:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "connection")}
            found.request(request.command, request.path, request.body, headers)
            got = found.getresponse()
            kept = [(k, v) for k, v in got.getheaders() if k.lower() in ("content-type", "location")]
            return got.status, kept, got.read()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def reply(request: Any, status: int, body: bytes = b"", headers: list[tuple[str, str]] | None = None) -> bool:
    """Answer a request; always True, for use in an ``Answer``."""
    with contextlib.suppress(OSError):  # the client may have given up
        request.send_response(status)
        for name, value in headers or [("Content-Type", "application/json")]:
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
    return True


@contextlib.contextmanager
def gate(target: Server, answer: Answer = lambda _: False) -> Iterator[Gate]:
    found = Gate(target, answer)
    try:
        yield found
    finally:
        found.close()
