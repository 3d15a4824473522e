"""A W&B server that takes everything and keeps nothing: what is left is what the mirror itself costs."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

PROJECT = {"id": "1", "name": "bench", "entity": {"id": "1", "name": "bench"}}


class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status = 200  # of every answer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply({"data": self.answer(json.loads(body))} if self.path.endswith("/graphql") else {})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply({})

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        query, given = asked["query"], asked.get("variables") or {}
        if "RunResumeStatus" in query:
            return {"model": {**PROJECT, "bucket": None}}
        if "CreateRunFiles" in query:
            address = f"http://{self.headers['Host']}/put/"
            files = [{"name": name, "uploadUrl": address + name} for name in given.get("files", ())]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if "CreateArtifact" in query:  # "it is here already": nothing is uploaded
            done = {
                "id": "1",
                "digest": "",
                "state": "COMMITTED",
                "artifactSequence": {"id": "1", "latestArtifact": None},
            }
            return {"createArtifact": {"artifact": done}}
        if "viewer" in query.lower():
            return {
                "viewer": {"id": "1", "entity": "bench", "username": "bench", "flags": "{}", "teams": {"edges": []}}
            }
        if "UpsertBucket" not in query:
            return {"project": None, "serverInfo": {"features": []}}  # no such artifact yet, and nothing special
        bucket = {"id": "1", "name": given.get("name"), "project": PROJECT, "historyLineCount": 0}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True
    released: threading.Event

    def handle_error(self, *_: Any) -> None:
        """Clients go without closing their connections."""


class Refusing(Sink):
    """Answers that its user is nobody: a wrong key."""

    status = 401


class Busy(Sink):
    status = 429


class Failing(Sink):
    status = 500


class Silent(Sink):
    """Accepts, and never answers."""

    def reply(self, content: dict[str, Any]) -> None:
        assert isinstance(self.server, Quiet)
        self.server.released.wait()


@contextlib.contextmanager
def sink(kind: type[Sink] = Sink) -> Iterator[str]:
    """The address of such a server on the loopback."""
    server = Quiet(("127.0.0.1", 0), kind)
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address at which nothing listens: a server that is gone."""
    with sink() as url:
        pass
    yield url
