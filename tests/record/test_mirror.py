"""What the mirror sends of a run and of a sweep: every row once, and what stands beside the rows."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib import colormaps
from mirrored import COMPLETED, Sent, copy, fill, finished, identifier, swept, writer

from qkexp import load_run
from qkexp.probe.metrics import NAMES
from qkexp.record.mirror import facts, maps
from qkexp.record.mirror.process import poll
from qkexp.record.mirror.rows import budget, new_rows
from qkexp.record.mirror.sweep import RUN_COLUMNS, SweepCopy
from qkexp.train.events import Event


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
