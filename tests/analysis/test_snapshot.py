"""`qkexp probe`: one frame of a model by name, or of a checkpoint, and what it says of its weights and images."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image

from qkexp import AttentionProbe, build_vit, cli, load_run
from qkexp.train import checkpoint
from qkexp.train.data import load

TINY = "vit_tiny_patch16_224"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    keys = ["attention=rmsnorm", "train.steps=4", "train.batch_size=32", "optim.lr=3e-2", "tracker=none"]
    assert cli.main(["train", *keys, f"output_dir={folder}", "train.checkpoint_every=2"]) == 0
    return next(p.parent for p in folder.rglob("outcome.json"))


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(Path("outputs/probe") / name / "frame.csv")


def test_a_timm_model_by_name_is_probed_with_random_weights_on_noise_and_says_so(here, capsys):
    assert cli.main(["probe", TINY, "--batch", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "random weights; 2 images of noise" in said
    assert "12 found, 12 attached, 12 fired, 12 self-checked" in said
    rows = table(TINY)
    assert len(rows) == 12 * 3
    assert rows["entropy_frac"].between(0.99, 1.0).all()  # timm's initial weights: nearly uniform
    assert {p.suffix for p in (here / "outputs/probe" / TINY).iterdir()} == {".csv", ".png", ".pdf"}


def test_layers_of_unlike_widths_have_a_row_for_each_head_that_there_is(here):
    assert cli.main(["probe", "swin_tiny_patch4_window7_224", "--batch", "1"]) == 0
    heads = table("swin_tiny_patch4_window7_224").groupby("layer")["head"].count()
    assert heads.tolist() == [3] * 2 + [6] * 2 + [12] * 6 + [24] * 2


def test_a_run_is_probed_at_its_last_checkpoint_on_its_validation_images(run, here, capsys):
    assert cli.main(["probe", str(run), "--batch", "16"]) == 0
    assert "checkpoint after 4 steps; the first 16 images of the validation split" in " ".join(
        capsys.readouterr().out.split()
    )
    cfg = load_run(run).typed
    vit = build_vit(cfg, image_size=8, channels=1, classes=10)
    vit.load_state_dict(checkpoint.load(run / "checkpoints" / checkpoint.name(4))["model"])
    probe = AttentionProbe(vit.eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), probe.step(0):
        vit(load(cfg.data).val.plain(np.arange(16)))
    expected = probe.frame.to_pandas()
    found = table(run.name)
    for metric in ("entropy_mean", "max_abs_logit", "q_norm_max"):
        np.testing.assert_allclose(found[metric], expected[metric], rtol=1e-5)


def test_what_a_layer_has_as_a_whole_stands_in_the_file_and_not_in_the_map(run, here, capsys):
    assert cli.main(["probe", str(run), "--groups", "activations", "gains", "--batch", "4"]) == 0
    rows = table(run.name)
    assert rows["head"].tolist() == 4 * [-1, 0, 1, 2, 3]
    assert rows["block_out_rms"].notna().tolist() == 4 * [True, False, False, False, False]
    assert rows["q_gain_max"].notna().sum() == 16
    assert "0 blocks.0.attn     4" in capsys.readouterr().out


def test_an_earlier_checkpoint_is_another_frame(run, here):
    assert cli.main(["probe", str(run), "--output", "last"]) == 0
    assert cli.main(["probe", str(run / "checkpoints" / checkpoint.name(2)), "--output", "earlier"]) == 0
    last, earlier = (pd.read_csv(here / name / run.name / "frame.csv") for name in ("last", "earlier"))
    assert not np.allclose(last["q_norm_mean"], earlier["q_norm_mean"], rtol=1e-3)


def test_images_of_a_folder_are_scaled_as_the_model_takes_them(run, here):
    """Grey 128 is 0.0039 for a run of ours; a flat image gives every patch the same token but for its position."""
    folder = here / "images" / "class"
    folder.mkdir(parents=True)
    for name, level in (("a.png", 128), ("b.JPG", 255)):
        Image.new("RGB", (40, 24), (level,) * 3).save(folder / name)
    assert cli.main(["probe", str(run), "--images", "images"]) == 0
    cfg = load_run(run).typed
    vit = build_vit(cfg, image_size=8, channels=1, classes=10)
    vit.load_state_dict(checkpoint.load(run / "checkpoints" / checkpoint.name(4))["model"])
    levels = torch.tensor([128.0, 255.0]) / 127.5 - 1.0
    probe = AttentionProbe(vit.eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), probe.step(0):
        vit(levels.view(2, 1, 1, 1).expand(2, 1, 8, 8))
    np.testing.assert_allclose(table(run.name)["q_norm_mean"], probe.frame.to_pandas()["q_norm_mean"], rtol=1e-5)


def test_weights_that_cannot_be_had_are_random_and_that_is_said(here, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(here))
    assert cli.main(["probe", TINY, "--weights", "pretrained", "--batch", "1"]) == 0
    assert "random weights, because the pretrained ones cannot be had" in " ".join(capsys.readouterr().out.split())


def test_weights_of_a_file_are_those_that_are_probed(here):
    model = timm.create_model(TINY)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 30.0
    torch.save(model.state_dict(), "sharp.pth")
    assert cli.main(["probe", TINY, "--weights", "sharp.pth", "--batch", "1"]) == 0
    assert table(TINY)["entropy_frac"].max() < 0.9


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["vit_tinny"], "timm model"),
        (["resnet18"], "attention"),
        ([TINY, "--images", "nowhere"], "--images=nowhere"),
        ([TINY, "--weights", "empty.pth"], "--weights=empty.pth"),
        ([TINY, "--batch", "0"], "--batch=0"),
        (["empty"], "config.yaml"),
    ],
    ids=lambda a: a[-1] if isinstance(a, list) else "",
)
def test_what_cannot_be_probed_exits_2_and_says_why(arguments, names, here, capsys):
    (here / "empty").mkdir()
    (here / "empty.pth").write_bytes(b"")
    assert cli.main(["probe", *arguments]) == 2
    message = capsys.readouterr().err
    assert names in message
    assert "Traceback" not in message
    assert not (here / "outputs").exists()
