"""Run directories: readable while they grow, whole at the end, honest about what is absent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qkexp import load_run, load_sweep
from qkexp.analysis.measures import series
from qkexp.compose import compose_sweep
from qkexp.config import UserError
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES, names
from qkexp.record.run import SCALARS, RunWriter, intact, write_table
from qkexp.train.events import Event


def writer(directory: Path, *overrides: str) -> RunWriter:
    return RunWriter(directory, compose_sweep(overrides, single=True).runs[0][1], {"host": "here"})


def frame(step: int, value: float = 1.0, heads: int = 4) -> Frame:
    names = ("blocks.0.attn", "blocks.1.attn")
    return Frame(step, "train", names, (Group((0, 1), torch.full((len(NAMES), 2, heads), value)),))


def fill(record: RunWriter, steps: range) -> None:
    for step in steps:
        record.row({"step": step, "loss": float(step), "lr": 0.1})
        record.frame(frame(step, float(step)))


OUTCOME = {"status": "completed", "reason": "", "step": 6, "steps": 6, "constant_loss": 2.3,
           "final": {"loss": 0.5, "val_loss": 0.6, "val_accuracy": 0.9}, "best": {}}  # fmt: skip


def test_tables_can_be_read_while_the_run_is_alive(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(3))
    record.flush()
    fill(record, range(3, 6))
    run = load_run(tmp_path / "run")
    assert run.scalars.step.tolist() == [0, 1, 2], "what was flushed, and nothing twice"
    assert run.outcome is None
    assert run.status == "unfinished"
    record.flush()
    assert load_run(tmp_path / "run").scalars.step.tolist() == list(range(6))
    assert len(load_run(tmp_path / "run").attention) == 6 * 2 * 4


def test_finished_tables_equal_the_parts_they_were_made_of(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(4))
    record.flush()
    fill(record, range(4, 6))
    record.flush()
    before = load_run(tmp_path / "run")
    scalars, attention = before.scalars, before.attention
    record.finish(dict(OUTCOME))
    after = load_run(tmp_path / "run")
    pd.testing.assert_frame_equal(after.scalars, scalars)
    pd.testing.assert_frame_equal(after.attention, attention, check_categorical=False)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "attention.parquet", "config.yaml", "events.jsonl", "outcome.json", "provenance.json", "scalars.parquet",
    ]  # fmt: skip


def test_torn_part_costs_its_own_rows_only(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(3))
    record.flush()
    fill(record, range(3, 6))
    record.flush()
    torn = tmp_path / "run" / "parts" / "scalars-00000003.parquet"
    torn.write_bytes(torn.read_bytes()[:100])
    assert load_run(tmp_path / "run").scalars.step.tolist() == [0, 1, 2]


def test_columns_and_types_are_the_contract(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(2))
    record.finish(dict(OUTCOME))
    scalars = pq.read_schema(tmp_path / "run" / "scalars.parquet")
    attention = pq.read_schema(tmp_path / "run" / "attention.parquet")
    assert scalars.equals(SCALARS)
    assert str(scalars.field("step").type) == "int32"
    assert attention.names == ["step", "phase", "layer", "module", "head", *NAMES]
    assert {str(attention.field(n).type) for n in NAMES} == {"float"}


def test_value_that_was_not_measured_is_absent_and_not_zero(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    record.row({"step": 0, "loss": 1.0})
    record.frame(frame(0, math.nan))
    record.finish(dict(OUTCOME))
    assert pq.read_table(tmp_path / "run" / "scalars.parquet")["val_loss"].null_count == 1
    assert pq.read_table(tmp_path / "run" / "attention.parquet")["entropy_mean"].null_count == 8
    assert load_run(tmp_path / "run").scalars.val_loss.isna().all()


def test_layers_reduce_heads_as_metrics_declare(tmp_path: Path) -> None:
    values = torch.zeros(len(NAMES), 2, 4)
    values[NAMES.index("max_abs_logit")] = torch.tensor([[1.0, 9.0, 3.0, 4.0], [2.0, 2.0, 2.0, 8.0]])
    values[NAMES.index("entropy_mean")] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 2.0]])
    values[NAMES.index("max_pair_cos")] = torch.tensor([[0.1, -0.9, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    record = writer(tmp_path / "run")
    record.frame(Frame(0, "train", ("a", "b"), (Group((0, 1), values),)))
    record.flush()
    layers = load_run(tmp_path / "run").layers
    np.testing.assert_allclose(layers["max_abs_logit"], [[9.0, 8.0]])
    np.testing.assert_allclose(layers["entropy_mean"], [[2.5, 0.5]])
    np.testing.assert_allclose(
        layers["max_pair_cos"], [[-0.9, 0.4]], rtol=1e-6, err_msg="of the head with the largest |z|"
    )


def test_layers_with_different_numbers_of_heads_are_read(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    groups = (Group((0,), torch.full((len(NAMES), 1, 4), 1.0)), Group((1,), torch.full((len(NAMES), 1, 8), 2.0)))
    record.frame(Frame(0, "train", ("a", "b"), groups))
    record.flush()
    np.testing.assert_allclose(load_run(tmp_path / "run").layers["entropy_mean"], [[1.0, 2.0]])


def test_a_group_and_a_subsample_are_columns_where_they_were_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    metrics = names(("sink",))
    for step, part in ((0, False), (1, True)):
        values = torch.full((len(metrics), 1, 2), float(step))
        record.frame(Frame(step, "train", ("a",), (Group((0,), values),), metrics, subsampled=part))
        record.flush()
    record.finish(dict(OUTCOME))
    run = load_run(tmp_path / "run")
    assert list(run.attention.columns)[5:] == [*NAMES, "sink_mean", "subsampled"]
    assert run.attention["subsampled"].eq(True).tolist() == [False, False, True, True]
    assert run.layers["sink_mean"].tolist() == [[0.0], [1.0]]
    assert "entropy_bound_mean" not in run.layers.values
    with pytest.raises(UserError, match=r"entropy_bound_mean.*probe\.groups"):
        series(run, "entropy_bound_mean")


def test_a_layers_own_metric_is_a_row_at_head_minus_one_and_spoils_none_of_its_heads(tmp_path: Path) -> None:
    metrics = names(("activations",))
    values = torch.full((len(metrics), 2, 1 + 3), math.nan)
    values[: len(NAMES), :, 1:] = torch.tensor([1.0, 2.0, 6.0])
    values[metrics.index("block_out_rms"), :, 0] = torch.tensor([7.0, 8.0])
    record = writer(tmp_path / "run")
    for step in range(2):
        record.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values),), metrics))
    record.flush()
    run = load_run(tmp_path / "run")
    assert run.attention["head"].tolist() == [-1, 0, 1, 2] * 4
    assert run.layers["block_out_rms"].tolist() == [[7.0, 8.0]] * 2
    assert run.layers["entropy_mean"].tolist() == [[3.0, 3.0]] * 2
    assert run.layers["max_abs_logit"].tolist() == [[6.0, 6.0]] * 2
    assert np.isnan(run.layers["block_in_max"]).all()


def test_second_attempt_replaces_what_the_first_recorded(tmp_path: Path) -> None:
    first = writer(tmp_path / "run")
    fill(first, range(6))
    first.event(Event(3, "nonfinite"))
    first.flush()
    second = writer(tmp_path / "run")
    fill(second, range(2))
    second.flush()
    run = load_run(tmp_path / "run")
    assert run.scalars.step.tolist() == [0, 1]
    assert run.events.empty


def test_events_are_lines_that_can_be_read_back(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    record.event(Event(7, "logit_runaway", 2, value=300.0, threshold=120.0))
    (row,) = load_run(tmp_path / "run").events.to_dict("records")
    assert row == {"step": 7, "kind": "logit_runaway", "layer": 2, "head": -1, "value": 300.0, "threshold": 120.0}


def test_outcome_is_json_without_nan_and_comes_last(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    with pytest.raises(ValueError, match="JSON"):
        record.finish({**OUTCOME, "final": {"loss": math.nan}})
    assert not (tmp_path / "run" / "outcome.json").exists()
    record.finish(dict(OUTCOME))
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["wall_seconds"] >= 0


def test_sweep_table_has_dotted_keys_and_infinite_loss_where_a_run_ended_early(tmp_path: Path) -> None:
    for seed, val in ((0, 0.6), (1, None)):
        record = writer(tmp_path / f"run{seed}", f"seed={seed}", "attention=l2", "optim.lr=3e-2")
        fill(record, range(2))
        record.finish({**OUTCOME, "final": {"loss": 1.0, "val_loss": val, "val_accuracy": None}})
    runs = load_sweep(tmp_path).runs.set_index("name")
    assert runs["optim.lr"].tolist() == [0.03, 0.03]
    assert runs.variant.tolist() == ["l2", "l2"]
    assert runs.final_val_loss.tolist() == [0.6, math.inf]
    assert load_sweep(tmp_path)["run1"].seed == 1


def test_directory_without_a_run_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        load_run(tmp_path)
    with pytest.raises(UserError, match="no runs here"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    ("table", "part", "left"), [("scalars", 1, 3), ("attention", 1, 3), ("attention", 0, 0), ("scalars", 0, 0)]
)
def test_a_damaged_part_says_from_where_on_to_train_again(tmp_path: Path, table: str, part: int, left: int) -> None:
    """A run resumes from a checkpoint at or before that step, so the rows of the part come back."""
    record = writer(tmp_path / "run")
    for steps in (range(3), range(3, 6)):
        fill(record, steps)
        record.flush()
    assert intact(tmp_path / "run") == 6
    damaged = sorted((tmp_path / "run" / "parts").glob(f"{table}-*"))[part]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert intact(tmp_path / "run") == left
    assert not damaged.exists(), "nobody trips over it again"


def test_whole_tables_count_and_not_the_parts_that_a_kill_left_beside_them(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    fill(record, range(6))
    record.finish(dict(OUTCOME))
    (tmp_path / "run" / "parts").mkdir()
    (tmp_path / "run" / "parts" / "scalars-00000000.parquet").write_text("torn")
    assert intact(tmp_path / "run") == 6
    (tmp_path / "run" / "attention.parquet").write_text("torn")
    assert intact(tmp_path / "run") == 0


def test_numbers_are_stored_plain_and_what_repeats_as_a_dictionary(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    table = pa.table({"value": values, "layer": np.arange(5000) % 4, "module": pa.array(["a", "b"] * 2500)})
    write_table(tmp_path / "t.parquet", table)
    group = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0)
    encoded = {group.column(i).path_in_schema: "RLE_DICTIONARY" in group.column(i).encodings for i in range(3)}
    assert encoded == {"value": False, "layer": True, "module": True}
    assert pq.read_table(tmp_path / "t.parquet").equals(table)
