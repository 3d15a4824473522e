"""Status: read from directories alone, by whoever can see them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from qkexp import cli
from qkexp.record.files import write_json
from qkexp.record.lock import started
from qkexp.sweep.status import State, duration, pace, state_of, step_seconds, sweep_states, table

HERE = {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid()), "token": "t"}


def make(directory: Path, outcome: dict[str, Any] | None = None, lock: dict[str, Any] | None = None) -> None:
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("{}")
    if outcome:
        write_json(directory / "outcome.json", outcome)
    if lock:
        write_json(directory / "lock", lock)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    make(tmp_path / "a", {"status": "completed", "step": 100, "steps": 100, "wall_seconds": 10.0})
    make(tmp_path / "b", {"status": "failed", "step": 3, "steps": 100, "reason": "KeyError: '[/x]'\nsecond line"})
    make(tmp_path / "c", lock={**HERE, "heartbeat": time.time(), "step": 40, "steps": 100, "step_seconds": 0.5})
    make(tmp_path / "d")
    far = {"host": "node7", "pid": 1, "heartbeat": time.time(), "step": 90, "steps": 100, "step_seconds": 1.0}
    make(tmp_path / "e", lock=far)
    names = "abcdef"
    write_json(tmp_path / "plan.json", {"runs": [{"name": n, "config": {"train": {"steps": 100}}} for n in names]})
    return tmp_path


def test_every_state_with_step_time_left_reason_and_host(sweep: Path) -> None:
    states = {s.name: s for s in sweep_states(sweep)}
    assert {n: s.status for n, s in states.items()} == {
        "a": "completed", "b": "failed", "c": "running", "d": "interrupted", "e": "running", "f": "missing"
    }  # fmt: skip
    assert states["b"].reason == "KeyError: '[/x]' second line", "one line"
    assert (states["c"].step, states["c"].left) == (40, 30.0)
    assert (states["e"].where, states["e"].left) == ("node7", 10.0)


def test_pace_is_that_of_the_living_runs_and_the_time_left_that_of_all_steps(sweep: Path) -> None:
    states = sweep_states(sweep)
    # 2 + 1 steps a second; 60 + 10 of the running, 100 of the missing; the failed and interrupted are not at work
    assert pace(states) == "3 steps/s in 2 runs; about 57 s left"
    assert pace([s for s in states if s.status != "running"]) == ""
    assert step_seconds(states) == 0.1


def test_the_time_left_is_at_least_the_longest_runs() -> None:
    quick = State("a", "running", 0, 100, step_seconds=0.01, left=1.0)
    slow = State("b", "running", 0, 100, step_seconds=1.0, left=100.0)
    assert "about 2 min left" in pace([quick, slow])


def test_json_has_one_object_a_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(sweep), "--json"]) == 0
    read = {s["name"]: s for s in json.loads(capsys.readouterr().out)}
    assert read["c"]["left"] == 30.0
    assert read["f"]["status"] == "missing"


def test_table_shows_reasons_as_they_are(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(sweep)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "[/x]" in printed
    assert "1 completed, 1 failed, 1 interrupted, 2 running, 1 missing" in printed
    assert "3 steps/s" in printed
    assert table(sweep_states(sweep), "t").row_count == 6


def test_watch_ends_when_every_run_has_ended(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = []

    def end(_: float) -> None:
        looks.append(1)
        for name in "cdef":
            (sweep / name).mkdir(exist_ok=True)
            write_json(sweep / name / "outcome.json", {"status": "completed", "step": 100, "steps": 100})

    monkeypatch.setattr("time.sleep", end)
    assert cli.main(["status", str(sweep), "--watch", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.strip().splitlines())
    assert len(looks) == 1
    assert [s["status"] for s in first].count("running") == 2
    assert [s["status"] for s in second].count("completed") == 5


def test_a_torn_plan_or_outcome_hides_no_run(sweep: Path) -> None:
    (sweep / "plan.json").write_text('{"runs": [')
    (sweep / "a" / "outcome.json").write_text('{"status"')
    states = {s.name: s.status for s in sweep_states(sweep)}
    assert states == {"a": "interrupted", "b": "failed", "c": "running", "d": "interrupted", "e": "running"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (9000, "2.5 h")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_that_never_began_is_missing(tmp_path: Path) -> None:
    assert state_of(tmp_path / "x", 7) == State("x", "missing", 0, 7)
