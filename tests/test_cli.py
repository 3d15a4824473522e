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
    ["seed=18446744073709551616"],
    ["optim.lr=${oc.env:NO_SUCH_VARIABLE}"],
    ["model=null"],
    ["model.mlp_ratio=1e30"],
    ["model.mlp_ratio=1e-3"],
    ["model.depth=1000000"],
    ["model.layer_scale=1e39"],
    ["model.patch=8", "model.pool=avg", "attention=l2", "attention.scale_init=null"],
    ["optim=adam", "optim.decay=coupled"],
    ["train.steps=2", "train.steps=abc"],
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


def test_of_a_key_given_twice_the_value_that_counts_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "train.steps=2", "train.steps=abc"]) == 2
    assert "train.steps: 'abc' is not accepted" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["output_dir", "data.root"])
def test_a_folder_that_cannot_be_made_exits_2_and_names_it(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert cli.main(["train", f"{key}=file/folder", "train.steps=1", "tracker=none"]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "file") in message
    assert "Traceback" not in message
    assert [p.name for p in tmp_path.iterdir()] in (["file"], ["file", "outputs"], ["outputs", "file"])


def test_a_home_folder_is_where_the_user_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qkexp.compose import compose_sweep

    monkeypatch.setenv("HOME", str(tmp_path))
    sweep = compose_sweep(["output_dir='~/out'", "data.root='~/data'"], single=True)
    assert sweep.output_dir == tmp_path / "out"
    assert sweep.runs[0][1].data.root == str(tmp_path / "data")


def test_data_prepare_takes_no_second_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "prepare", "fashion_mnist", "data=digits"]) == 2
    assert "data=digits" in capsys.readouterr().err


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
