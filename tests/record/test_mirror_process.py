"""The mirror's process and qkexp sync: a failure costs a message, and nothing of it is in the training process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mirrored import COMPLETED, Sent, fill, finished, identifier, swept, writer

from qkexp import cli
from qkexp.record.files import read_json
from qkexp.record.mirror.login import resolve_mode
from qkexp.record.mirror.process import Mirror, main, poll, start
from qkexp.record.mirror.run import Copy


def test_sync_tells_what_it_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = swept(tmp_path)

    def told(*more: str) -> str:
        assert cli.main(["sync", str(directory), "--mode", "offline", *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "2 runs, offline: 2 new; 12 rows" in told()
    old = identifier(directory / "run1")
    assert "2 runs, offline: 2 already there; 0 rows" in told()
    assert "2 runs, offline: 2 new; 12 rows" in told("--again")
    assert identifier(directory / "run1") != old


def test_sync_without_a_login_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sync", str(swept(tmp_path)), "--mode", "online"]) == 2
    assert "wandb login" in capsys.readouterr().err


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_mirror_without_a_parent_copies_the_rest_and_ends(tmp_path: Path) -> None:
    """Also: the parent, which trains, never imports wandb."""
    directory = finished(tmp_path / "sweep" / "run")
    code = (
        "import sys; from pathlib import Path; from qkexp.record.mirror.process import start\n"
        f"mirror = start(Path({str(tmp_path / 'sweep')!r}), ['run', 'never-began'], 'project', 'auto', 'group')\n"
        "print(mirror.process.pid, 'wandb' in sys.modules, flush=True)\n"
        "import os; os._exit(0)"
    )
    pid, imported = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, check=True).stdout.split()
    assert imported == "False"
    wait_for(lambda: ended(int(pid)))
    assert Sent(directory).steps == list(range(6))
    assert Sent(directory).exit_code == 0
    assert json.loads((directory / "mirror.json").read_text())["mode"] == "offline", "auto, without a login"


def test_a_mirror_that_was_killed_is_made_good_under_the_same_id(tmp_path: Path) -> None:
    sweep, directory = tmp_path / "sweep", tmp_path / "sweep" / "run"
    record = writer(directory)
    fill(record, range(3))
    record.flush()
    (sweep / "broken").mkdir()
    (sweep / "broken" / "config.yaml").write_text("no: such key")
    (sweep / "broken" / "outcome.json").write_text('{"status": "failed"}')
    code = (
        "import os; from pathlib import Path; from qkexp.record.mirror.run import Copy\n"
        f"Copy(Path({str(directory)!r}), 'project', 'offline', 'group').advance(final=False)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert read_json(directory / "mirror.json")["next_step"] == 3
    run_id = identifier(directory)
    mirror = start(sweep, ["broken", "run"], "project", "offline", "group")
    mirror.process.kill()
    warning = mirror.close(10.0)
    assert warning is not None
    assert "2 of 2 runs not copied" in warning
    fill(record, range(3, 6))
    record.finish(COMPLETED)

    mirror = start(sweep, ["broken", "run"], "project", "offline", "group")
    warning = mirror.close(60.0)
    assert warning is not None, "a failure is never silent"
    assert "1 of 2 runs not copied" in warning
    assert f"qkexp sync {sweep}" in warning
    assert "broken is not copied" in (sweep / "mirror.log").read_text()
    assert identifier(directory) == run_id
    assert Sent(directory).steps == list(range(6)), "whole, and in one file"


@pytest.mark.parametrize("modes", [[], ["online"], ["online", "offline"], ["offline"]])
def test_nobody_waits_longer_than_asked_and_the_mirror_ends_by_itself(tmp_path: Path, modes: list[str]) -> None:
    """A mirror whose server never answers: its parent goes on, and it does not outlive its own time.

    Where all runs are offline nobody watches them, and nothing is said.
    """
    for number, mode in enumerate(modes):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").touch()
        (tmp_path / str(number) / "mirror.json").write_text(json.dumps({"id": "a", "mode": mode, "status": None}))
    code = (
        "import threading, time; from pathlib import Path; from qkexp.record.mirror import process\n"
        "process.LAST_SECONDS = 1.0\n"
        "class Hanging:\n"
        "    directory, mode, error, retry_at, done, rows = Path('run'), 'online', None, 0.0, '', 0\n"
        "    def advance(self, final): time.sleep(60)\n"
        "ended = threading.Event()\n"
        "threading.Thread(target=process._await_end, args=(ended,), daemon=True).start()\n"
        "process.serve([Hanging()], ended)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    began = time.monotonic()
    warning = Mirror(process, tmp_path, tuple(map(str, range(len(modes))))).close(0.2)
    assert time.monotonic() - began < 2.0
    if modes == ["offline"]:
        assert warning is None
    else:
        assert warning is not None
        assert "in the background" in warning
        assert f"qkexp sync {tmp_path}" in warning
    assert process.wait(30) == 1


class Stub(Copy):
    """A copy that raises what it is told to, and counts."""

    def __init__(self, directory: Path, raises: Exception | None = None, mode: Any = "online"):
        super().__init__(directory, "p", mode, "g")
        self.raises, self.calls = raises, 0

    def advance(self, final: bool) -> None:
        self.calls += 1
        if self.raises:
            raise self.raises


def test_a_failing_run_stops_no_other_and_is_tried_again_at_the_end(tmp_path: Path) -> None:
    bad, good = Stub(tmp_path / "bad", ValueError("torn")), Stub(tmp_path / "good")
    assert poll([bad, good], final=False)
    assert poll([bad, good], final=False)
    assert (bad.calls, good.calls) == (1, 2), "not at every poll"
    assert bad.error == "ValueError: torn"
    bad.raises = None
    assert poll([bad, good], final=True)
    assert bad.error is None


def test_an_offline_run_is_copied_once_it_has_ended_and_not_before(tmp_path: Path) -> None:
    run = Stub(tmp_path, mode="offline")
    poll([run], final=False)
    (tmp_path / "outcome.json").write_text("{}")
    (tmp_path / "lock").write_text("{}")  # an earlier attempt's outcome
    poll([run], final=False)
    assert run.calls == 0
    (tmp_path / "lock").unlink()
    poll([run], final=False)
    assert run.calls == 1


def test_a_dead_server_is_asked_once_a_poll_not_once_a_run(tmp_path: Path) -> None:
    import wandb

    runs = [Stub(tmp_path / str(i), wandb.errors.CommError("refused")) for i in range(3)]
    assert not poll(runs, final=True)
    assert [run.calls for run in runs] == [1, 0, 0]


@pytest.mark.parametrize(
    ("mode", "env", "netrc", "expected"),
    [
        ("auto", {}, False, "offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, False, "online"),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_MODE": "offline"}, True, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, True, None),
        ("offline", {"WANDB_MODE": "online"}, True, "offline"),
        ("online", {"WANDB_MODE": "offline"}, True, "online"),
    ],
)
def test_auto_is_online_only_with_a_login_and_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, mode: str, env: dict[str, str], netrc: bool, expected: str | None
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if netrc:
        Path(os.environ["NETRC"]).write_text("machine api.wandb.ai login user password " + "k" * 40)
    assert resolve_mode(mode) == expected


def test_online_without_a_login_says_how_to_log_in(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="wandb login"):
        resolve_mode("online")


def test_help_tells_what_the_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "ends when its standard input ends" in capsys.readouterr().out
