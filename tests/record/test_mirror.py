"""The W&B mirror: every row once, one W&B run for a run directory, and nothing of it in the training process."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from matplotlib import colormaps

from qkexp import cli, load_run
from qkexp.compose import compose_sweep
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.files import read_json
from qkexp.record.mirror import facts, maps
from qkexp.record.mirror import rows as mirror_rows
from qkexp.record.mirror import run as mirror_run
from qkexp.record.mirror.login import resolve_mode
from qkexp.record.mirror.process import Mirror, main, poll, start
from qkexp.record.mirror.rows import budget, new_rows
from qkexp.record.mirror.run import Copy
from qkexp.record.mirror.sweep import RUN_COLUMNS, SweepCopy
from qkexp.record.run import RunWriter
from qkexp.train.events import Event

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


def writer(directory: Path, *overrides: str, keep: int = 0) -> RunWriter:
    directory.parent.mkdir(exist_ok=True)
    return RunWriter(directory, compose_sweep(overrides, single=True).runs[0][1], {}, keep)


def frame(step: int) -> Frame:
    """Two layers of two heads; every number of it is different, but for what is 0 or fixed in a real run."""
    values = torch.arange(len(NAMES) * 4, dtype=torch.float32).reshape(len(NAMES), 2, 2) + 1000 * step + 0.5
    for name in ("masked_rows", "nonfinite"):
        values[NAMES.index(name)] = 0.0
    values[NAMES.index("score_scale")] = 0.25
    return Frame(step, "train", ("blocks.0.attn", "blocks.1.attn"), (Group((0, 1), values),))


def fill(record: RunWriter, steps: range, probe: bool = True, shift: float = 0.0) -> None:
    for step in steps:
        took = time.perf_counter()  # never the same twice, as in a real run
        record.row({"step": step, "loss": 1 / (step + 1) + shift, "lr": 0.1, "step_seconds": took})
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
        self.media: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.artifacts: dict[str, list[str]] = {}
        for record in records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row: dict[str, Any] = {}
                for item in record.history.item:
                    first, *rest = list(item.nested_key) or [item.key]
                    value = json.loads(item.value_json)
                    row[first] = value if not rest else row.get(first, {}) | {".".join(rest): value}
                step = record.history.step.num
                kept = {k: v for k, v in row.items() if not k.startswith("_")}
                self.media.append((step, {k: v for k, v in kept.items() if isinstance(v, dict)}))
                self.rows.append((step, {k: v for k, v in kept.items() if not isinstance(v, dict)}))
            elif kind == "summary":
                for item in record.summary.update:
                    self.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
                for item in record.summary.remove:
                    self.summary.pop(item.key or ".".join(item.nested_key), None)
            elif kind == "run":
                self.run = record.run
                self.config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                artifact = record.request.log_artifact.artifact
                self.artifacts[artifact.type] = [entry.path for entry in artifact.manifest.contents]
            elif kind == "artifact":
                self.artifacts[record.artifact.type] = [entry.path for entry in record.artifact.manifest.contents]
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def table(self, directory: Path, key: str) -> list[list[Any]]:
        """The rows of a table that a row holds."""
        (found,) = [media[key] for _, media in self.media if key in media]
        (path,) = directory.glob(f"wandb/*/files/{found['path']}")
        return json.loads(path.read_text())["data"]


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
        every = run.attention[run.attention.step == step]
        assert row["attn/worst/max_abs_logit"] == every.max_abs_logit.max(), "of all layers"
        assert row["attn/worst/entropy_frac"] == every.groupby("layer").entropy_frac.mean().min()


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
    record.row({"step": 3, "loss": math.nan, "lr": 0.1})
    record.event(Event(2, "nonfinite", value=math.nan))
    record.event(Event(3, "logit_runaway", layer=1, head=0, value=900.0, threshold=300.0))
    record.finish(COMPLETED | {"status": "diverged"})
    copy(tmp_path / "run").advance(final=True)
    sent = Sent(tmp_path / "run")
    assert sent.rows[2] == (2, {"lr": 0.1, "nonfinite": 2})
    assert "nonfinite" not in sent.rows[1][1]
    assert [sent.summary[k] for k in ("nonfinite_total", "nonfinite_step", "last_finite_loss")] == [3, 2, 0.5]
    table = sent.table(tmp_path / "run", "events")
    assert table == [
        [2, "nonfinite", "value = nan", None, None, None, None],
        [3, "logit_runaway", "", 1, 0, 900.0, 300.0],
        [2, "nonfinite", "loss = nan, 2 times", None, None, None, None],
        [2, "nonfinite", "grad_norm = inf, 1 times", None, None, None, None],
    ]


def test_a_run_without_anything_odd_has_no_event_table(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    sent = Sent(directory)
    assert sent.summary["nonfinite_total"] == 0, "measured, and none"
    assert not any("events" in media for _, media in sent.media)


def test_values_that_were_not_measured_are_not_counted_as_not_finite() -> None:
    table = pa.table({"step": [0, 1, 2], "loss": [1.0, None, math.inf], "val_loss": pa.array([None, None, 2.0])})
    figures, rows = facts.nonfinite(table)
    assert figures == {"nonfinite_total": 1, "nonfinite_step": 2, "last_finite_loss": 1.0}
    assert [row[:3] for row in rows] == [[2, "nonfinite", "loss = inf, 1 times"]]


@pytest.mark.parametrize("keys", [["model.depth=2"], ["model.depth=2", "probe.groups=[sink,bound]"], ["probe.every=0"]])
def test_no_row_has_more_keys_than_were_announced(tmp_path: Path, keys: list[str]) -> None:
    directory = finished(tmp_path / "run", *keys)
    run = load_run(directory)
    most = int(re.fullmatch(r"at most (\d+) keys a step", budget(run.typed)).group(1))  # type: ignore[union-attr]
    sent = max(len(row) for _, row in new_rows(run, 0, ended=True))
    assert sent <= most if "probe.every=0" not in keys else most < 30
    assert most < 100, "heads are no keys"


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
    assert sent.summary["diverged"] == (status == "diverged")
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
    mirrored, read = copy(tmp_path / "run"), mirror_rows.pq.ParquetFile

    def vanishing(path: Path) -> Any:
        if path.name.startswith("attention"):
            monkeypatch.setattr(mirror_rows.pq, "ParquetFile", read)
            record.finish(COMPLETED)
        return read(path)

    monkeypatch.setattr(mirror_rows.pq, "ParquetFile", vanishing)
    mirrored.advance(final=False)
    assert (tmp_path / "run" / "outcome.json").exists(), "the race took place"
    mirrored.advance(final=False)
    assert Sent(tmp_path / "run").steps == [0, 1, 2, 3]


def test_long_tables_are_sent_whole_though_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_rows, "CHUNK", 3)
    monkeypatch.setattr(mirror_run, "CHUNK", 3)
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    assert Sent(directory).steps == list(range(6))


@pytest.mark.parametrize("alive", [True, False], ids=["while mirrored", "between two mirrors"])
@pytest.mark.parametrize("same", [True, False], ids=["with the same numbers", "with others"])
def test_a_run_trained_again_keeps_its_wandb_run_if_it_computed_the_same(
    tmp_path: Path, alive: bool, same: bool
) -> None:
    directory = tmp_path / "run"
    record, mirrored = writer(directory), copy(directory)
    fill(record, range(4))
    record.flush() if alive else record.finish(COMPLETED | {"status": "failed"})
    mirrored.advance(final=not alive)
    old = identifier(directory)
    record = writer(directory)  # clears the directory
    (mirrored if alive else copy(directory)).advance(final=False)
    fill(record, range(2), shift=0.0 if same else 0.1)
    record.flush()
    (mirrored if alive else copy(directory)).advance(final=False)
    assert identifier(directory) == old, "not yet where W&B stands: nothing can be said"
    fill(record, range(2, 6), shift=0.0 if same else 0.1)
    record.finish(COMPLETED)
    (mirrored if alive else copy(directory)).advance(final=True)
    assert (identifier(directory) == old) == same
    sent = Sent(directory)
    assert sent.steps == list(range(6)), "monotone, each step once"
    losses = [row["loss"] for _, row in sent.rows]
    assert losses == load_run(directory).scalars.loss.tolist()
    assert sent.config["attempt"] == (0 if same else 1)
    assert len(list(directory.glob("wandb/*/*.wandb"))) == 1, "one W&B run for one run directory"


def test_another_configuration_of_the_same_run_is_another_wandb_run(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run", "probe.every=2")
    copy(directory).advance(final=True)
    old = identifier(directory)
    finished(directory, "probe.every=1")  # trained again to measure more: the rows that W&B has lack it
    copy(directory).advance(final=True)
    assert identifier(directory) != old
    assert all("attn/L00/entropy_mean" in row for _, row in Sent(directory).rows)


def test_a_run_cut_back_to_its_checkpoint_sends_no_step_twice(tmp_path: Path) -> None:
    """Killed at step 6 after a checkpoint at 4: steps 4 and 5 are computed again, and are on W&B already."""
    directory = tmp_path / "run"
    record, mirrored = writer(directory), copy(directory)
    fill(record, range(6))
    record.flush()
    mirrored.advance(final=False)
    record = writer(directory, keep=4)
    fill(record, range(4, 5))
    record.flush()
    mirrored.advance(final=False)
    fill(record, range(5, 9))
    record.finish(COMPLETED)
    mirrored.advance(final=True)
    assert Sent(directory).steps == list(range(9))
    assert Sent(directory).config["attempt"] == 0


def test_a_run_that_failed_earlier_than_before_keeps_its_wandb_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for steps, status in ((5, "failed"), (3, "interrupted"), (7, "completed")):
        record = writer(directory)
        fill(record, range(steps))
        record.finish(COMPLETED | {"status": status})
        copy(directory).advance(final=True)
    assert read_json(directory / "mirror.json")["attempt"] == 0
    assert Sent(directory).steps == list(range(7))
    assert Sent(directory).summary["status"] == "completed"


@pytest.mark.parametrize("place", ["run", "sweep"])
def test_what_was_found_later_reaches_the_summary(tmp_path: Path, place: str) -> None:
    directory = finished(tmp_path / "sweep" / "run")
    if place == "run":
        (directory / "diagnosis.json").write_text('{"verdict": "attention"}')
    else:
        entries = [{"run": "other", "verdict": "healthy"}, {"run": "run", "verdict": "attention"}]
        (tmp_path / "sweep" / "diagnosis.json").write_text(json.dumps({"runs": entries}))
    claims = [
        {"verdict": "pass"},
        {"verdict": "fail", "detail": "1 of 3 do not: run"},
        {"verdict": "fail", "detail": "x"},
    ]
    (tmp_path / "sweep" / "claims.json").write_text(json.dumps({"claims": claims}))
    copy(directory).advance(final=True)
    sent = Sent(directory)
    assert sent.summary["verdict"] == "attention"
    assert sent.summary["claims"] == "1 pass, 2 fail"
    assert sent.summary["claims_failed"] == 1, "only those that name this run"


def test_maps_of_heads_are_sent_of_a_few_steps_and_of_the_last(tmp_path: Path) -> None:
    record = writer(tmp_path / "run", "train.steps=9", "probe.every=2")
    for step in range(7):  # it ends before its ninth step
        fill(record, range(step, step + 1), probe=step % 2 == 0)
    record.finish(COMPLETED | {"status": "failed"})
    copy(tmp_path / "run").advance(final=True)
    sent = Sent(tmp_path / "run")
    pictured = {step: set(media) for step, media in sent.media if media}
    both = {"heads/entropy_frac", "heads/max_abs_logit"}
    assert pictured == dict.fromkeys((0, 2, 4, 6), both)
    assert sent.steps == list(range(7)), "they make no rows of their own"


def test_a_map_shows_layers_downwards_and_heads_across_on_a_fixed_scale() -> None:
    values = np.array([[1.0, 1e3, np.nan], [1e6, 1e9, 1e-3]])
    image = np.asarray(maps.picture(values, "max_abs_logit"))
    assert image.shape == (2 * maps.CELL, 3 * maps.CELL, 3)
    cells = image[:: maps.CELL, :: maps.CELL]
    dark, middle, light = (np.array(colormaps["magma"](x)[:3]) * 255 for x in (0.0, 0.5, 1.0))
    assert cells[0, 0] == pytest.approx(dark, abs=4)
    assert cells[0, 1] == pytest.approx(middle, abs=8)
    assert tuple(cells[0, 2]) == maps.ABSENT, "no value has no colour of the scale"
    assert cells[1, 0] == pytest.approx(light, abs=4)
    assert cells[1, 1] == pytest.approx(light, abs=4), "beyond the scale: its end"
    assert cells[1, 2] == pytest.approx(dark, abs=4)
    fraction = np.asarray(maps.picture(np.array([[0.0, 1.0]]), "entropy_frac"))
    ends = [np.array(colormaps["viridis"](x)[:3]) * 255 for x in (0.0, 1.0)]
    assert fraction[0, 0] == pytest.approx(ends[0], abs=4)
    assert fraction[0, -1] == pytest.approx(ends[1], abs=4)


def test_the_tables_themselves_go_along_as_an_artifact(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run")
    copy(directory).advance(final=True)
    (held,) = [paths for kind, paths in Sent(directory).artifacts.items() if kind == "qkexp-run"]
    assert {"scalars.parquet", "attention.parquet", "events.jsonl", "config.yaml", "outcome.json"} <= set(held)


def test_notes_tell_by_which_command_a_run_was_made(tmp_path: Path) -> None:
    directory = finished(tmp_path / "run")
    made = {"command": "qkexp train seed=1", "code": {"commit": "abc", "dirty": True}, "host": "node3"}
    (directory / "provenance.json").write_text(json.dumps(made))
    copy(directory).advance(final=True)
    notes = Sent(directory).run.notes
    assert "`qkexp train seed=1`" in notes
    assert "abc with changes" in notes
    assert "node3" in notes


def test_a_run_without_an_outcome_goes_on_later_under_its_id(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    record = writer(directory)
    fill(record, range(3))
    record.flush()
    copy(directory).advance(final=True)
    run_id = identifier(directory)
    assert (Sent(directory).steps, Sent(directory).exit_code) == ([0, 1, 2], 255)
    figures = {k: v for k, v in Sent(directory).summary.items() if not k.startswith("_")}
    assert figures == {"status": "unfinished", "diverged": False, "nonfinite_total": 0}
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


# ---------------------------------------------------------------- a sweep as a whole


def swept(tmp_path: Path) -> Path:
    """A sweep of two runs, one of which diverged, with a claim and a figure."""
    directory = tmp_path / "sweep"
    for seed, outcome in ((1, {}), (2, {"status": "diverged", "final": {"loss": None}})):
        finished(directory / f"run{seed}", f"seed={seed}", **outcome)
    runs = [{"name": f"run{seed}"} for seed in (1, 2)]
    (directory / "plan.json").write_text(json.dumps({"runs": runs}))
    claims = [{"claim": "falls", "value": "inf", "bound": "< 1", "verdict": "fail", "detail": "run2"},
              {"claim": "holds", "value": 0.5, "bound": "< 1", "verdict": "pass"}]  # fmt: skip
    (directory / "claims.json").write_text(json.dumps({"claims": claims}))
    (directory / "figures").mkdir()
    maps.picture(np.zeros((1, 1)), "entropy_frac").save(directory / "figures" / "curves.png")
    return directory


def test_a_sweep_has_a_wandb_run_of_its_own_with_runs_claims_and_figures(tmp_path: Path) -> None:
    directory = swept(tmp_path)
    SweepCopy(directory, "project", "offline", "group").advance(final=True)
    sent = Sent(directory)
    assert [sent.run.job_type, sent.run.run_group, sent.run.display_name] == ["sweep", "group", "sweep (sweep)"]
    assert {key for _, media in sent.media for key in media} == {"runs", "claims", "figures/curves"}
    runs = [dict(zip(RUN_COLUMNS, row, strict=True)) for row in sent.table(directory, "runs")]
    assert [(r["name"], r["seed"], r["status"]) for r in runs] == [("run1", 1, "completed"), ("run2", 2, "diverged")]
    assert [r["final_loss"] for r in runs] == [0.5, None]
    assert [r["final_val_loss"] for r in runs] == [None, None], "infinity is no number of a table"
    assert [row[1] for row in sent.table(directory, "claims")] == ["inf", "0.5"]
    assert sent.summary["claims"] == "1 fail, 1 pass"
    assert (sent.summary["claims/pass"], sent.summary["claims/fail"]) == (1, 1)
    assert (sent.summary["runs/completed"], sent.summary["runs/diverged"]) == (1, 1)
    assert {"plan.json", "claims.json", "figures/curves.png"} == set(sent.artifacts["qkexp-sweep"])


def test_a_sweep_is_sent_again_only_when_something_of_it_changed(tmp_path: Path) -> None:
    directory = swept(tmp_path)
    first, second, third = (SweepCopy(directory, "project", "offline", "group") for _ in range(3))
    first.advance(final=False)
    assert not (directory / "mirror.json").exists(), "not while it trains"
    first.advance(final=True)
    old = identifier(directory)
    second.advance(final=True)
    assert (first.done, second.done) == ("new", "already there")
    (directory / "claims.json").write_text('{"claims": [{"claim": "holds", "verdict": "pass"}]}')
    third.advance(final=True)
    assert (third.done, identifier(directory)) == ("gone on", old)
    assert Sent(directory).summary["claims"] == "1 pass"


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


def test_nobody_waits_longer_than_asked_and_the_mirror_ends_by_itself(tmp_path: Path) -> None:
    """A mirror whose server never answers: its parent goes on, and it does not outlive its own time."""
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
    warning = Mirror(process, tmp_path, ()).close(0.2)
    assert time.monotonic() - began < 2.0
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
