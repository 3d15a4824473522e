"""The command line: exit codes, messages, and that nothing is left behind by wrong input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qkexp import cli

WRONG = [
    ["attention=softcap", "attention.softcap=0"],
    ["attention=nosuch"],
    ["optim.lr=abc"],
    ["optim.lr=nan"],
    ["model.depth=-1"],
    ["train.steps=0"],
    ["nosuchkey=1"],
    ["+typo=1"],
    ["model.name=vit_base_patch16_rope_224"],
    ["model=vit_tiny", "model.patch=2", "model.heads=5"],
    ["hydra.launcher.workers=0"],
    ["hydra.launcher.nosuch=1"],
]


@pytest.mark.parametrize("overrides", WRONG, ids=lambda o: o[-1])
def test_wrong_input_exits_2_with_one_message_and_leaves_nothing(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *overrides]) == 2
    message = capsys.readouterr().err
    assert overrides[-1].lstrip("+").split("=")[0].split(".")[-1] in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_is_one_line_on_stderr_of_a_real_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qkexp", "train", "optim.lr=nan"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "qkexp train: optim.lr: nan is not accepted; accepted: a finite number > 0\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_every_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    assert f"example: qkexp {verb}" in capsys.readouterr().out


def test_unknown_verb_and_unknown_flag_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "train" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--nosuch"])
    assert stop.value.code == 2


def test_missing_directory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "verify", "figures", "sync"):
        assert cli.main([verb, "no/such/place"]) == 2
        assert "no/such/place" in capsys.readouterr().err


def test_plan_prints_every_run_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "--plan", f"output_dir={tmp_path}", "attention=none,l2", "seed=0,1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("missing") >= 4
    assert list(tmp_path.iterdir()) == []


def test_quick_reproduction_has_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--quick", "--plan", f"output_dir={tmp_path}"]) == 0
    assert "10 to train" in capsys.readouterr().out
    assert cli.main(["reproduce", "lr_grid", "--plan", f"output_dir={tmp_path}"]) == 0
    assert "60 to train" in capsys.readouterr().out


def test_train_with_multirun_flag_is_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-m", "--plan", f"output_dir={tmp_path}", "seed=0,1,2"]) == 0
    assert "3 to train" in capsys.readouterr().out
