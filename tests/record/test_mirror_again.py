"""One W&B run for one run directory, whatever happened to the run: each step once, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mirrored import COMPLETED, Sent, copy, fill, finished, identifier, writer

from qkexp import load_run
from qkexp.record.files import read_json
from qkexp.record.mirror import rows as mirror_rows
from qkexp.record.mirror import run as mirror_run
from qkexp.record.mirror.rows import new_rows


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
