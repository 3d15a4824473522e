"""The mirror against the real client and a real server on the loopback, and against servers that misbehave.

Whatever the server does, training ends as if there were none, the run directories are complete, and once the server
is well ``qkexp sync`` makes W&B equal to them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mirrored import finished
from servers import KEY, Server, binary, gate, reply

from qkexp import load_run, load_sweep
from qkexp.record.load import Run
from qkexp.record.mirror.facts import FINISHED

SMALL = ["model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16", "optim.warmup=5"]
EXIT_SECONDS = 5.0  # from the end of the last run to the end of the process
ENOUGH = 300.0  # seconds until a process counts as stuck: a crowded machine is slow


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None]) -> Iterator[Server]:
    need(binary(), "openwandb, a W&B server for tests")
    found = Server(tmp_path_factory.mktemp("server"))
    yield found
    found.kill()


@pytest.fixture
def server(one_server: Server) -> Server:
    """Running, whatever the test before did to it."""
    if one_server.process is None:
        one_server.start()
    return one_server


@dataclass
class Done:
    """A command that has ended, and when."""

    returncode: int
    stdout: str
    stderr: str
    ended: float


def finish(process: subprocess.Popen[str]) -> Done:
    code = process.wait(ENOUGH)
    ended = time.time()  # before its pipes are read, which its children may hold open for a while
    out, err = process.communicate(timeout=ENOUGH)
    return Done(code, out, err, ended)


class Home:
    """A user with a login, and a folder of runs."""

    def __init__(self, folder: Path):
        self.folder, self.env = folder, {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        self.env |= {"HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_CONFIG_DIR": str(folder)}
        self.env |= {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": KEY, "WANDB_CACHE_DIR": str(folder / "cache")}
        self.begun: list[subprocess.Popen[str]] = []

    def start(self, url: str, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "qkexp", *args]
        given = self.env | {"WANDB_BASE_URL": url} | env
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=given, process_group=0, stdout=pipe, stderr=pipe, text=True)
        self.begun.append(process)
        return process

    def end(self) -> None:
        """Whatever a test that failed has left."""
        for process in self.begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        self.quiet(kill=True)

    def run(self, url: str, *args: str, **env: str) -> Done:
        return finish(self.start(url, *args, **env))

    def sweep(self, url: str, *args: str, steps: int = 24, **env: str) -> Done:
        """A sweep of two runs; asserts that its process ended soon after them."""
        done = self.run(url, *self.command(steps), *args, **env)
        self.ended_in_time(done)
        return done

    def command(self, steps: int) -> list[str]:
        out = f"output_dir={self.folder / 'outputs'}"
        return ["sweep", "attention=none,rmsnorm", *SMALL, f"train.steps={steps}", out, "sweep_name=s"]

    def made(self) -> list[Path]:
        """Two finished runs of a sweep that nobody trained: for what only copying is about."""
        names = ("none", "rmsnorm")
        runs = [finished(self.directory / name, f"attention={name}", "model.depth=2") for name in names]
        (self.directory / "plan.json").write_text(json.dumps({"runs": [{"name": name} for name in names]}))
        return runs

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / "s"

    def ended_in_time(self, done: Done) -> None:
        last = max(path.stat().st_mtime for path in self.directory.glob("*/outcome.json"))
        crowded = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # Python's own end takes CPU time
        assert done.ended - last < EXIT_SECONDS * crowded, "the process waited for W&B"

    def mirrors(self) -> list[int]:
        """Processes that copy this user's runs, and those that they started."""
        found: dict[int, int] = {}
        mine: set[int] = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if "qkexp.record.mirror" in command and str(self.folder) in command:
                mine.add(int(path.name))
        return sorted(mine | {pid for pid, parent in found.items() if parent in mine})

    def quiet(self, kill: bool = False) -> None:
        """Wait until nothing copies any more; ``kill`` what does, which must end all that it started."""
        left = self.mirrors()
        if kill and left:
            os.kill(left[0], signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in left), "the mirror outlives its time")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], why: str) -> None:
    end = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < end, why
        time.sleep(0.1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    found = Home(tmp_path)
    yield found
    found.end()


# ---------------------------------------------------------------- what must be equal


def kept(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "mirror.json").read_text())


def layer_values(run: Run, metric: str, how: str) -> dict[str, dict[int, float]]:
    """``attn/L00/<metric>`` -> step -> value, computed from the table of heads."""
    table = run.attention.groupby(["layer", "step"])[metric].agg(how)
    return {f"attn/L{layer:02d}/{metric}": table[layer].to_dict() for layer in table.index.levels[0]}


def same(server: Server, directory: Path) -> None:
    """The server has one run for each run directory, with its rows, last values and figures."""
    sweep = load_sweep(directory)
    on_server = server.runs()
    for run in sweep.all.values():
        ids = [i for i, r in on_server.items() if r["name"] == run.name and i in json.dumps(kept(run.directory))]
        assert ids == [kept(run.directory)["id"]], "one W&B run for one run directory"
        history, scalars = server.history(ids[0]), run.scalars.set_index("step")
        assert sorted(history) == scalars.index.tolist(), run.name
        for step, row in scalars.iterrows():
            stored = {k: v for k, v in row.items() if pd.notna(v)}
            assert {k: v for k, v in history[step].items() if not k.startswith("attn/")} == stored, (run.name, step)
        for metric, how in (("max_abs_logit", "max"), ("entropy_mean", "mean"), ("q_norm_max", "max")):
            for key, values in layer_values(run, metric, how).items():
                got = {step: row[key] for step, row in history.items() if key in row}
                assert got == pytest.approx(values, rel=1e-6), (run.name, key)
        assert run.outcome is not None
        summary = on_server[ids[0]]["summary"]
        assert summary["status"] == run.outcome["status"] in FINISHED
        assert summary["step"] == run.outcome["step"]
        assert summary["final/loss"] == run.outcome["final"]["loss"]
        assert on_server[ids[0]]["state"] == "finished"


def complete(directory: Path, steps: int = 24) -> None:
    """The run directories have everything, whatever the server did."""
    runs = load_sweep(directory).all.values()
    assert len(runs) == 2
    for run in runs:
        assert run.status in FINISHED  # so short a run may end at chance
        assert run.scalars.step.tolist() == list(range(steps))
        assert set(run.attention.step) == set(range(0, steps, run.config["probe"]["every"]))


def warned(err: str, directory: Path) -> None:
    """One line, and it says what to do."""
    lines = [line for line in err.splitlines() if "W&B" in line or "wandb" in line]
    assert len(lines) == 1, err
    assert f"qkexp sync {directory}" in lines[0]
    assert "Traceback" not in err


def synced(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\s+", " ", done.stdout)


# ---------------------------------------------------------------- a server that is well


def test_a_sweep_online(server: Server, home: Home) -> None:
    done = home.sweep(server.url)
    assert done.returncode == 0, done.stderr
    home.quiet()  # what was not done when the sweep ended is done soon after
    complete(home.directory)
    same(server, home.directory)
    runs = server.runs()
    for run in load_sweep(home.directory).all.values():
        held = runs[kept(run.directory)["id"]]
        assert set(held["tags"]) == {run.variant, "digits", "bf16", run.typed.model.name}
        assert "sweep attention=none,rmsnorm" in held["notes"]
        assert held["config"]["variant"]["value"] == run.variant
        assert sum("heads/entropy_frac" in name for name in server.files(kept(run.directory)["id"])) == 5
        assert f"run-{run.name}" in server.artifacts(kept(run.directory)["id"])
    total = runs[kept(home.directory)["id"]]
    assert sum(total["summary"].get(f"runs/{status}", 0) for status in FINISHED) == 2
    lines = {name: server.lines(kept(r.directory)["id"]) for name, r in load_sweep(home.directory).all.items()}
    text = synced(home.run(server.url, "sync", str(home.directory)))
    assert "2 already there; 0 rows" in text
    assert lines == {n: server.lines(kept(r.directory)["id"]) for n, r in load_sweep(home.directory).all.items()}


def test_a_sweep_offline_and_then_synced_twice(server: Server, home: Home) -> None:
    done = home.sweep(server.url, "tracker.mode=offline")
    assert done.returncode == 0, done.stderr
    home.quiet()
    names = {run.name for run in load_sweep(home.directory).all.values()}
    assert not {r["name"] for i, r in server.runs().items() if i in (kept(home.directory / n)["id"] for n in names)}
    first = synced(home.run(server.url, "sync", str(home.directory)))
    assert "2 runs, online: 2 " in first
    assert "48 rows" in first
    same(server, home.directory)
    assert all(server.lines(kept(home.directory / name)["id"]) == 24 for name in names), "each row once"
    second = synced(home.run(server.url, "sync", str(home.directory)))
    assert "2 already there; 0 rows" in second
    same(server, home.directory)
    assert all(server.lines(kept(home.directory / name)["id"]) == 24 for name in names)


def test_what_is_found_later_is_added_and_nothing_sent_twice(server: Server, home: Home) -> None:
    first, _ = home.made()
    synced(home.run(server.url, "sync", str(home.directory)))
    (first / "diagnosis.json").write_text('{"verdict": "healthy"}')
    (home.directory / "claims.json").write_text('{"claims": [{"claim": "c", "value": 1.0, "verdict": "pass"}]}')
    text = synced(home.run(server.url, "sync", str(home.directory)))
    assert "2 gone on; 0 rows" in text
    same(server, home.directory)
    summary = server.runs()[kept(first)["id"]]["summary"]
    assert (summary["verdict"], summary["claims"], summary["claims_failed"]) == ("healthy", "1 pass", 0)
    assert server.lines(kept(first)["id"]) == 6
    assert server.runs()[kept(home.directory)["id"]]["summary"]["claims/pass"] == 1


def test_a_server_that_is_killed_and_comes_back(server: Server, home: Home) -> None:
    steps = 2000
    process = home.start(server.url, *home.command(steps))

    def some_rows() -> bool:
        ids = [json.loads(p.read_text())["id"] for p in home.directory.glob("*-seed*/mirror.json")]
        return any(server.lines(i) for i in ids)

    wait_for(lambda: list(home.directory.glob("*-seed*/parts/*")), "no run has written a row")
    os.killpg(process.pid, signal.SIGSTOP)  # runs wait here for the mirror, which is slow beside them
    wait_for(some_rows, "no row arrived")
    assert not list(home.directory.glob("*/outcome.json")), "the server is to be killed while runs train"
    server.kill()
    os.killpg(process.pid, signal.SIGCONT)
    time.sleep(3.0)
    server.start()
    done = finish(process)
    home.ended_in_time(done)
    assert done.returncode == 0, done.stderr
    complete(home.directory, steps)
    home.quiet()
    synced(home.run(server.url, "sync", str(home.directory)))
    same(server, home.directory)


# ---------------------------------------------------------------- servers that are not well


def everything(status: int) -> Callable[[Any], bool]:
    return lambda request: reply(request, status, b'{"errors": [{"message": "no"}]}')


def rows_only(status: int) -> Callable[[Any], bool]:
    return lambda r: "file_stream" in r.path and reply(r, status, b'{"error": "storage quota exceeded"}')


def wrong_key(request: Any) -> bool:
    said = base64.b64decode(request.headers.get("Authorization", " ").partition(" ")[2]).decode()
    return KEY not in said and reply(request, 401, b'{"errors": [{"message": "user is not logged in"}]}')


RELEASE = threading.Event()


def never(_: Any) -> bool:
    RELEASE.wait(ENOUGH)
    return True


FAULTS: dict[str, tuple[Callable[[Any], bool], dict[str, str]]] = {
    "wrong key": (wrong_key, {"WANDB_API_KEY": "x" * 40}),
    "too many requests": (everything(429), {}),
    "server error": (everything(500), {}),
    "rows: too many requests": (rows_only(429), {}),
    "rows: server error": (rows_only(500), {}),
    "rows: quota hit": (rows_only(403), {}),
    "accepts and never answers": (never, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_costs_a_warning_and_nothing_else(server: Server, home: Home, fault: str) -> None:
    answer, env = FAULTS[fault]
    RELEASE.clear()
    with gate(server, answer) as found:
        done = home.sweep(found.url, **env)
        RELEASE.set()
        assert done.returncode == 0, done.stderr
        assert found.seen, "the server was asked"
        warned(done.stderr, home.directory)
        complete(home.directory)
        home.quiet(kill=True)
        statuses = [kept(p)["status"] for p in home.directory.glob("*-seed*") if (p / "mirror.json").exists()]
        assert not set(statuses) & set(FINISHED), "what the server did not take is not taken for copied"
        found.answer = lambda _: False
        synced(home.run(found.url, "sync", str(home.directory)))
        same(server, home.directory)


def test_sync_tells_that_a_quota_is_hit(server: Server, home: Home) -> None:
    """wandb itself ends such a run without an error."""
    home.made()
    with gate(server, rows_only(403)) as found:
        done = home.run(found.url, "sync", str(home.directory))
    assert done.returncode == 1
    assert "storage quota exceeded" in done.stderr
    assert "2 failed" in done.stdout
    assert [kept(p)["status"] for p in home.directory.glob("*/") if (p / "mirror.json").exists()] == [None, None]


def test_a_run_that_was_deleted_on_the_server_gets_a_new_id(server: Server, home: Home) -> None:
    first, _ = home.made()
    synced(home.run(server.url, "sync", str(home.directory), "--mode", "offline"))
    old = kept(first)["id"]
    text = f'{{"errors": [{{"message": "run p/{old} was previously created and deleted; try a new run name"}}]}}'

    def deleted(request: Any) -> bool:
        asked = b"UpsertBucket" in request.body and old.encode() in request.body
        return asked and reply(request, 409, text.encode())

    with gate(server, deleted) as found:
        synced(home.run(found.url, "sync", str(home.directory)))
    assert kept(first)["id"] != old
    same(server, home.directory)


def test_a_server_at_another_address_that_is_not_there_changes_nothing(server: Server, home: Home) -> None:
    first, _ = home.made()
    synced(home.run(server.url, "sync", str(home.directory)))
    before = kept(first)
    done = home.run("http://127.0.0.1:9", "sync", str(home.directory))
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert kept(first) == before, "it still belongs to the same W&B run"
    assert "2 already there; 0 rows" in synced(home.run(server.url, "sync", str(home.directory)))


def test_the_server_knows_no_saved_views_and_that_is_said(server: Server, home: Home) -> None:
    pytest.importorskip("wandb_workspaces")
    done = home.run(server.url, "dashboard", "--entity", "default", "--project", "qkexp")
    assert done.returncode == 1
    assert "--print" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_resumed_from_its_checkpoint_goes_on_in_its_wandb_run(server: Server, home: Home) -> None:
    """Killed in the middle, then the same command: one W&B run, each step once."""
    out = [f"output_dir={home.folder / 'outputs'}", "sweep_name=s", "train.steps=500", "train.checkpoint_every=50"]
    command = ["train", *SMALL, *out]
    process = home.start(server.url, *command)
    wait_for(lambda: list(home.directory.glob("*/checkpoints/*")), "no checkpoint")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    home.quiet(kill=True)
    done = home.run(server.url, *command)
    assert done.returncode == 0, done.stderr
    home.quiet()
    (directory,) = home.directory.glob("*-seed*")
    synced(home.run(server.url, "sync", str(home.directory)))
    run, found = load_run(directory), kept(directory)
    assert found["attempt"] == 0
    history = server.history(found["id"])
    assert sorted(history) == run.scalars.step.tolist() == list(range(500))
    assert {step: row["loss"] for step, row in history.items()} == run.scalars.set_index("step").loss.to_dict()
