"""The served report answers three addresses on loopback, and follows runs as they end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from made_runs import make_run
from test_report import Payload

from qkexp.analysis import serve
from qkexp.analysis.serve import Live, Server
from qkexp.config import UserError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(serve, "REST", 0.0)
    make_run(tmp_path / "sweep")
    (tmp_path / "sweep" / "secret.txt").write_text("secret")
    with Server(tmp_path / "sweep") as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_page_version_and_data_belong_together(server: Server) -> None:
    status, text = get(server, "/")
    assert (status, b'data-live="true"' in text) == (200, True)
    version = json.loads(get(server, "/version")[1])["version"]
    header = Payload(get(server, "/data")[1]).header
    assert header["version"] == version
    assert [run["seed"] for run in header["runs"]] == [0]


def test_a_run_that_ends_is_news(server: Server, tmp_path: Path) -> None:
    before = get(server, "/version")[1]
    assert get(server, "/version")[1] == before
    make_run(tmp_path / "sweep", seed=1)
    assert get(server, "/version")[1] != before
    assert [run["seed"] for run in Payload(get(server, "/data")[1]).header["runs"]] == [0, 1]


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/../secret.txt", "//etc/passwd", "/%2e%2e/secret.txt", "/data/", "/version?x", "/report.html"],
)
def test_no_address_leads_to_a_file(server: Server, path: str) -> None:
    assert get(server, path) == (404, b"not here\n")


def test_only_this_machine_is_answered(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/data", host="evil.example")[0] == 403
    assert get(server, "/version", host=f"localhost:{server.server_port}")[0] == 200


def test_many_readers_at_once_get_the_same_and_it_is_made_once(server: Server, tmp_path: Path) -> None:
    made: list[str] = []
    original = server.live._read
    server.live._read = lambda: made.append("x") or original()  # type: ignore[method-assign, func-returns-value]
    make_run(tmp_path / "sweep", seed=1)
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(get(server, "/data")[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert len(made) == 1


def test_runs_that_are_taken_away_leave_the_last_look(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    live = Live(tmp_path)
    live._ready = 0.0
    before = live.current()
    (run / "config.yaml").unlink()
    assert live.current() == before


def test_a_taken_port_is_the_users_to_change(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--port=\d+: .*accepted"):
        Server(tmp_path / "sweep", server.server_port)
    with pytest.raises(UserError, match="--port=70000"):
        Server(tmp_path / "sweep", 70_000)


def test_ctrl_c_ends_it_with_0(tmp_path: Path) -> None:
    make_run(tmp_path)
    command = [sys.executable, "-m", "qkexp", "serve", str(tmp_path)]
    # a shell's background job, as tests may be, ignores Ctrl-C and hands that down
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert errors == ""
