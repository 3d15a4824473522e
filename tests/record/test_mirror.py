"""The W&B mirror: every row once, one W&B run an attempt, and nothing of it in the training process."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qkexp import load_run
from qkexp.compose import compose_sweep
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record import mirror_run
from qkexp.record.load import read_json
from qkexp.record.mirror import Mirror, main, poll, resolve_mode, start
from qkexp.record.mirror_run import Copy, new_rows
from qkexp.record.run import RunWriter

COMPLETED = {"status": "completed", "reason": "final loss 0.5", "step": 6, "steps": 6,
             "final": {"loss": 0.5, "val_loss": None}, "best": {"val_loss": 0.4}}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must neither find the user's login nor reach a server."""
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    yield
    import wandb

    wandb.teardown()


def writer(directory: Path, *overrides: str) -> RunWriter:
    directory.parent.mkdir(exist_ok=True)
    return RunWriter(directory, compose_sweep(overrides, single=True).runs[0][1], {})


def frame(step: int) -> Frame:
    """Two layers of two heads; every number of it is different, but for what is 0 or fixed in a real run."""
    values = torch.arange(len(NAMES) * 4, dtype=torch.float32).reshape(len(NAMES), 2, 2) + 1000 * step + 0.5
    for name in ("masked_rows", "nonfinite"):
        values[NAMES.index(name)] = 0.0
    values[NAMES.index("score_scale")] = 0.25
    return Frame(step, "train", ("blocks.0.attn", "blocks.1.attn"), (Group((0, 1), values),))


def fill(record: RunWriter, steps: range, probe: bool = True, seconds: float | None = None) -> None:
    for step in steps:
        took = time.perf_counter() if seconds is None else seconds  # never the same twice, as in a real run
        record.row({"step": step, "loss": 1 / (step + 1), "lr": 0.1, "step_seconds": took})
        if probe:
            record.frame(frame(step))


def finished(directory: Path, *overrides: str, **outcome: Any) -> Path:
    record = writer(directory, *overrides)
    fill(record, range(6))
    record.finish(COMPLETED | outcome)
    return directory


def copy(directory: Path) -> Copy:
    return Copy(directory, "project", "offline", "group")


def identifier(directory: Path) -> str:
    return json.loads((directory / "mirror.json").read_text())["id"]


def records(data: bytes) -> Iterator[Any]:
    """Records of a ``.wandb`` file: a LevelDB log of protobuf messages, after seven bytes of header."""
    from wandb.proto import wandb_internal_pb2 as pb

    assert data[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a record's header does not cross the blocks
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or last
            record = pb.Record()
            record.ParseFromString(message)
            message = b""
            yield record


class Sent:
    """What an offline ``.wandb`` file holds."""

    def __init__(self, directory: Path, run_id: str | None = None):
        (path,) = directory.glob(f"wandb/*/run-{run_id or identifier(directory)}.wandb")
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        for record in records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                step = record.history.step.num
                self.rows.append((step, {k: v for k, v in row.items() if not k.startswith("_")}))
            elif kind == "summary":
                for item in record.summary.update:
                    self.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            elif kind == "run":
                self.run = record.run
                self.config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


# ---------------------------------------------------------------- what is sent


def test_every_row_arrives_with_the_values_of_the_tables(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    sent, run = Sent(directory), load_run(directory)
    assert sent.steps == run.scalars.step.tolist() == list(range(6))
    for step, row in sent.rows:
        stored = run.scalars.loc[step].dropna().drop("step").to_dict()
        assert {k: v for k, v in row.items() if not k.startswith("attn/")} == stored
        heads = run.attention[(run.attention.step == step) & (run.attention.layer == 1)].set_index("head")
        assert row["attn/L01/entropy_mean"] == heads.entropy_mean.mean(), "a mean over heads"
        assert row["attn/L01/max_abs_logit"] == heads.max_abs_logit.max(), "a maximum over heads"
        assert row["attn/L01/max_pair_cos"] == heads.max_pair_cos[heads.max_abs_logit.idxmax()], "that head's"


def test_only_keys_without_news_are_left_out(tmp_path: Path) -> None:
    silent = {"masked_rows", "nonfinite", "max_logit_capped"}
    plain = new_rows(load_run(finished(tmp_path / "run")), 0, ended=True)
    keys = [{k.removeprefix("attn/L01/") for k in row if k.startswith("attn/L01/")} for _, row in plain]
    assert keys[0] == set(NAMES) - silent, "a fixed scale is sent once"
    assert keys[5] == set(NAMES) - silent - {"score_scale"}
    capped = finished(tmp_path / "capped", "attention=l2", "attention.softcap=50")
    last = new_rows(load_run(capped), 0, ended=True)[5][1]
    assert {"attn/L00/max_logit_capped", "attn/L00/score_scale"} <= set(last), "a cap and a learned scale are news"


def test_values_that_are_not_finite_are_counted_instead_of_sent(tmp_path: Path) -> None:
    record = writer(tmp_path / "run", "probe.every=0")
    fill(record, range(2), probe=False)
    record.row({"step": 2, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    record.finish(COMPLETED | {"status": "diverged"})
    copy(tmp_path / "run").advance(final=True)
    assert Sent(tmp_path / "run").rows[2] == (2, {"lr": 0.1, "nonfinite": 2})
    assert "nonfinite" not in Sent(tmp_path / "run").rows[1][1]


def test_each_run_has_its_own_id_config_tags_and_group(tmp_path: Path) -> None:
    directories = [finished(tmp_path / f"run{seed}", f"seed={seed}", "attention=rmsnorm") for seed in (1, 2)]
    copies = [copy(d) for d in directories]
    assert poll(copies, final=True)
    first, second = (Sent(d) for d in directories)
    assert first.run.run_id != second.run.run_id
    assert [first.config["seed"], second.config["seed"]] == [1, 2]
    assert first.config["attention"] == load_run(directories[0]).config["attention"], "nested, as in config.yaml"
    assert [first.run.display_name, first.run.run_group, first.run.job_type] == ["run1", "group", "train"]
    assert set(first.run.tags) == {"rmsnorm", "digits", "bf16", load_run(directories[0]).typed.model.name}
    assert len(first.rows) == len(second.rows) == 6


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("diverged", 0), ("failed", 1), ("interrupted", 255)])
def test_only_a_run_that_finished_has_figures_to_sort_by(tmp_path: Path, status: str, code: int) -> None:
    directory = finished(tmp_path / "run", status=status)
    copy(directory).advance(final=True)
    sent = Sent(directory)
    figures = {k: v for k, v in sent.summary.items() if k.partition("/")[0] in ("final", "best", "loss")}
    assert figures == ({"final/loss": 0.5, "best/val_loss": 0.4} if code == 0 else {}), "and never a live loss"
    assert sent.summary["status"] == status
    assert sent.exit_code == code


# ---------------------------------------------------------------- while runs go on


def test_a_growing_run_is_sent_step_by_step_each_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    mirrored = copy(directory)
    mirrored.advance(final=False)  # there is no such directory yet
    record = writer(directory)
    mirrored.advance(final=False)  # nor a row
    for steps in (range(3), range(3, 4), range(4, 9)):
        fill(record, steps)
        record.flush()
        mirrored.advance(final=False)
        assert mirrored.record is not None
        assert mirrored.record.next_step == steps.stop, "sent at once, not at the end"
        mirrored.advance(final=False)
    fill(record, range(9, 12))
    record.finish(COMPLETED)  # merges the parts
    mirrored.advance(final=False)
    sent = Sent(directory)
    assert sent.steps == list(range(12))
    assert sent.exit_code == 0, "ended with the run, without waiting for the sweep"


def test_a_probed_step_waits_for_its_attention_rows(tmp_path: Path) -> None:
    record = writer(tmp_path / "run", "probe.every=2")
    fill(record, range(2))
    record.flush()
    fill(record, range(2, 5), probe=False)
    record.flush()
    run = load_run(tmp_path / "run")
    assert [step for step, _ in new_rows(run, 0, ended=False)] == [0, 1], "2 is probed, 3 must not overtake it"
    assert [step for step, _ in new_rows(run, 0, ended=True)] == [0, 1, 2, 3, 4], "nothing more will come"


def test_parts_that_are_merged_away_while_they_are_read_cost_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(4))
    record.flush()
    mirrored, read = copy(tmp_path / "run"), mirror_run.pq.ParquetFile

    def vanishing(path: Path) -> Any:
        if path.name.startswith("attention"):
            monkeypatch.setattr(mirror_run.pq, "ParquetFile", read)
            record.finish(COMPLETED)
        return read(path)

    monkeypatch.setattr(mirror_run.pq, "ParquetFile", vanishing)
    mirrored.advance(final=False)
    assert (tmp_path / "run" / "outcome.json").exists(), "the race took place"
    mirrored.advance(final=False)
    assert Sent(tmp_path / "run").steps == [0, 1, 2, 3]


def test_long_tables_are_sent_whole_though_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_run, "CHUNK", 3)
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    assert Sent(directory).steps == list(range(6))


@pytest.mark.parametrize("alive", [True, False], ids=["while mirrored", "between two mirrors"])
def test_a_run_trained_again_is_a_new_wandb_run(tmp_path: Path, alive: bool) -> None:
    directory = tmp_path / "run"
    record, mirrored = writer(directory), copy(directory)
    seconds = 1.0 if alive else None  # who looks on can tell equal attempts apart
    fill(record, range(4), seconds=seconds)
    record.flush() if alive else record.finish(COMPLETED | {"status": "failed"})
    mirrored.advance(final=not alive)
    old = identifier(directory)
    record = writer(directory)  # clears the directory
    (mirrored if alive else copy(directory)).advance(final=False)
    fill(record, range(5), seconds=seconds)
    record.finish(COMPLETED)
    (mirrored if alive else copy(directory)).advance(final=True)
    assert identifier(directory) != old
    assert Sent(directory, old).steps == [0, 1, 2, 3], "the first attempt is kept as it was"
    assert Sent(directory, old).exit_code in (1, 255)
    assert Sent(directory).steps == [0, 1, 2, 3, 4]
    assert Sent(directory).config["attempt"] == 1


def test_a_run_without_an_outcome_goes_on_later_under_its_id(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    record = writer(directory)
    fill(record, range(3))
    record.flush()
    copy(directory).advance(final=True)
    run_id = identifier(directory)
    assert (Sent(directory).steps, Sent(directory).exit_code) == ([0, 1, 2], 255)
    figures = {k: v for k, v in Sent(directory).summary.items() if not k.startswith("_")}
    assert figures == {"status": "unfinished", "diverged": False}
    fill(record, range(3, 5))
    record.finish(COMPLETED)
    copy(directory).advance(final=True)
    assert identifier(directory) == run_id
    assert (Sent(directory).steps, Sent(directory).exit_code) == ([0, 1, 2, 3, 4], 0)


def test_a_copied_run_is_not_sent_again(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    before = (directory / "mirror.json").read_text()
    copy(directory).advance(final=True)
    assert (directory / "mirror.json").read_text() == before
    assert len(list(directory.glob("wandb/*/*.wandb"))) == 1


def test_two_mirrors_of_one_run_make_one_wandb_run(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(3))
    record.flush()
    first, second = copy(tmp_path / "run"), copy(tmp_path / "run")
    first.advance(final=False)
    second.advance(final=True)
    record.finish(COMPLETED)
    first.advance(final=True)
    second.advance(final=True)
    assert len(list(tmp_path.glob("run/wandb/*/*.wandb"))) == 1
    assert Sent(tmp_path / "run").exit_code == 0


# ---------------------------------------------------------------- the process


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
        "import sys; from pathlib import Path; from qkexp.record.mirror import start\n"
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
        "import os; from pathlib import Path; from qkexp.record.mirror_run import Copy\n"
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


def test_close_leaves_nothing_running(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
    warning = Mirror(process, tmp_path, ()).close(0.2)
    assert warning is not None
    assert "not done after" in warning
    assert process.poll() is not None


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, env: dict[str, str], netrc: bool, expected: str | None
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "home" / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    assert resolve_mode(mode) == expected


def test_online_without_a_login_says_how_to_log_in(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="wandb login"):
        resolve_mode("online")


def test_help_tells_what_the_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "ends when its standard input ends" in capsys.readouterr().out
