"""Comparisons tell what differs, and compare outcomes at a step that all runs reached."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run

from qkexp import cli
from qkexp.analysis.compare import compare, differing
from qkexp.config import UserError
from qkexp.record.load import Run, load_run
from qkexp.train.events import Event


def falling(steps: int, start: float) -> np.ndarray:
    return start - 0.01 * np.arange(steps)


def unequal(folder: Path) -> list[Run]:
    """40, 100 and 100 steps; the shortest has the lowest loss at its end, and the highest at that step."""
    losses = (falling(40, 1.5), falling(100, 1.2), falling(100, 1.3))
    cube = np.exp(np.arange(100.0) / 20)[:, None, None] * np.ones((1, 3, 2))
    runs = []
    for seed, loss in enumerate(losses):
        val = np.full(100, np.nan)
        val[[39, 99]] = 0.7, 0.2
        runs.append(
            make_run(
                folder,
                seed=seed,
                steps=100,
                scalars={"loss": loss, "val_loss": val[: len(loss)]},
                attention={"max_abs_logit": cube[: len(loss)], "entropy_frac": 1 / cube[: len(loss)]},
                ended="diverged" if seed == 0 else "completed",
                val_loss=None if seed == 0 else 0.2,
                events=tuple(Event(step, "grad_spike", -1, -1, 2.0, 1.0) for step in (10, 60) if step < len(loss)),
            )
        )
    return [load_run(directory) for directory in runs]


def test_runs_of_different_length_are_compared_at_the_last_step_that_all_have(tmp_path: Path) -> None:
    found = compare(unequal(tmp_path))
    assert (found.step, found.equal_length) == (39, False)
    expected = [loss[20:40].mean() for loss in (falling(40, 1.5), falling(100, 1.2), falling(100, 1.3))]
    assert found.at_step["training loss (20-step mean)"] == pytest.approx(expected)
    assert found.at_step["lowest training loss until then"] == pytest.approx(expected)
    assert found.at_step["validation loss"] == [0.7, 0.7, 0.7]  # not the later, lower ones
    assert found.at_step["largest |logit| until then"] == pytest.approx([np.exp(39 / 20)] * 3, rel=1e-6)
    assert found.at_step["smallest layer entropy until then, H / ln n"] == pytest.approx(
        [np.exp(-39 / 20)] * 3, rel=1e-6
    )
    assert found.events == {"grad_spike": ["1 ×, first at step 10"] * 3}
    assert found.outcomes["steps done / planned"] == ["40 / 100", "100 / 100", "100 / 100"]
    assert found.outcomes["final training loss"] == pytest.approx([loss[-20:].mean() for loss in
        (falling(40, 1.5), falling(100, 1.2), falling(100, 1.3))])  # fmt: skip
    assert found.outcomes["status"] == ["diverged", "completed", "completed"]
    assert found.outcomes["final validation loss"] == [None, 0.2, 0.2]


def test_keys_of_the_identity_stand_apart_from_others_and_equal_ones_are_left_out(tmp_path: Path) -> None:
    a = make_run(tmp_path, "none", provenance={"host": "a", "code": {"commit": "1"}, "versions": {"torch": "2"}})
    b = make_run(
        tmp_path,
        "layernorm",
        provenance={"host": "a", "code": {"commit": "2"}, "versions": {"torch": "2"}},
        keys={"probe": {"every": 7}},
    )
    found = compare([load_run(a), load_run(b)])
    assert found.identity == {
        "attention.norm": ["none", "rms"],
        "attention.center": [False, True],
        "attention.gain": ["none", "shared"],
    }
    assert found.other == {"probe.every": [1, 7]}
    assert found.provenance == {"code.commit": ["1", "2"]}


def test_a_key_that_one_has_and_another_has_not_differs() -> None:
    assert differing([{"a": 1, "b": None}, {"a": 1, "c": 2}]) == {"c": [None, 2]}
    assert differing([{"a": [1]}, {"a": [1]}]) == {}


def test_runs_without_rows_are_compared_in_all_else(tmp_path: Path) -> None:
    runs = [make_run(tmp_path), make_run(tmp_path, seed=1, scalars={"loss": np.ones(0)}, ended=None)]
    found = compare([load_run(directory) for directory in runs])
    assert (found.step, found.at_step) == (None, {})
    assert found.outcomes["steps done / planned"] == ["30 / 30", "0 / 30"]
    assert found.identity["seed"] == [0, 1]


def test_an_unprobed_run_has_no_figures_of_attention(tmp_path: Path) -> None:
    runs = [make_run(tmp_path), make_run(tmp_path, seed=1, attention={"max_abs_logit": np.ones((30, 3, 2))})]
    found = compare([load_run(directory) for directory in runs])
    assert found.at_step["largest |logit| until then"] == [None, 1.0]
    assert found.at_step["smallest layer entropy until then, H / ln n"] == [None, None]


def test_one_run_and_one_twice_are_refused(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    with pytest.raises(UserError, match="two run directories"):
        compare([run])
    with pytest.raises(UserError, match="named twice"):
        compare([run, Run(tmp_path / "." / run.name)])


def test_verb_says_that_lengths_differ_and_where_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = unequal(tmp_path)
    assert cli.main(["compare", *(str(run.directory) for run in runs)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "at step 39 (the last that all runs have: they differ in length)" in text
    assert "until step 39" in text
    for run in runs:
        assert run.name in text.replace(" ", "")


def test_verb_shows_rates_with_every_digit_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = [make_run(tmp_path, lr=0.012345671), make_run(tmp_path, lr=0.012345672)]
    assert cli.main(["compare", *map(str, runs)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "optim.lr" in line)
    assert re.findall(r"0\.0123456\d+", row) == ["0.012345671", "0.012345672"]


def test_verb_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = make_run(tmp_path)
    assert cli.main(["compare", str(run), str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
