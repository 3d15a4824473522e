"""The scripts run end to end; what they measure is not judged here."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
VARIANTS = {p.stem for p in (SCRIPTS.parent / "configs" / "attention").glob("*.yaml")}


def run(script: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, from another folder."""
    return subprocess.run([sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True, cwd=cwd)


def written(path: Path) -> dict[str, Any]:
    """A JSON file, which must not hold NaN or infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path.name} holds {name}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_bench_writes_every_figure(tmp_path: Path) -> None:
    done = run("bench.py", "step", "probe", "--quick", "--sizes", "micro", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = written(tmp_path / "b.json")
    assert {"cores", "torch", "timm", "device", "quick", "figures"} <= set(content)
    figures = content["figures"]
    assert [f["section"] for f in figures] == ["step", "probe"]
    for figure in figures:
        assert {"name", "value", "unit", "target", "met", "detail"} <= set(figure)
        assert math.isfinite(figure["value"])
        assert figure["value"] > 0
        assert figure["met"] in (True, False)
    assert "target" in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"b.json"}


def test_bench_of_the_report_measures_a_stored_sweep(tmp_path: Path) -> None:
    done = run("bench.py", "report", "--quick", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = written(tmp_path / "b.json")["figures"]
    assert [f["unit"] for f in figures] == ["s", "GB", "MB"]
    assert all(f["value"] > 0 for f in figures)
    assert figures[0]["detail"]["runs"] == 10


def test_bench_of_training_tells_shares_of_a_step_that_add_up(tmp_path: Path) -> None:
    done = run("bench.py", "train", "--quick", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = {f["name"]: f["value"] for f in written(tmp_path / "b.json")["figures"]}
    for placement in ("post", "res_post", "none", "parallel"):
        assert figures[f"micro block_norm={placement} / plain"] > 0
    parts = [f"micro {part} / step" for part in ("forward", "loss", "backward", "optimiser")]
    assert all(0 < figures[part] < 1 for part in parts)
    assert figures["micro backward / step"] > figures["micro optimiser / step"]
    outside = figures["micro step outside forward, backward, optimiser and probe / step"]
    assert 0 < outside < 0.5
    assert figures["micro accumulate=4 / 4 plain steps"] == pytest.approx(1.0, abs=0.6)


def test_bench_of_the_mirror_copies_to_a_server_of_its_own(tmp_path: Path) -> None:
    done = run("bench.py", "mirror", "--quick", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = {f["name"]: f for f in written(tmp_path / "b.json")["figures"]}
    assert figures["micro step with W&B online / without"]["value"] > 0
    assert figures["end of a sweep, online"]["value"] > 0
    assert figures["end of a sweep, online"]["target"] == 5.0, "seconds"


def test_bench_of_variants_compares_each_preset_with_none(tmp_path: Path) -> None:
    done = run("bench.py", "variants", "--quick", "--sizes", "micro", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = {f["name"]: f["value"] for f in written(tmp_path / "b.json")["figures"]}
    assert len(figures) == 6
    for preset in ("chameleon", "command_r_plus"):
        assert figures[f"micro {preset}: step"] > 0
        assert 0 < figures[f"micro {preset}: further FLOPs"] < 0.1
        assert 1 < figures[f"micro {preset}: kept for backward"] < 2


def test_bench_counts_products_exactly_and_every_other_operation_by_element(bench: Any) -> None:
    variants = importlib.import_module("benchmarks.variants")
    x, w = torch.ones(5, 7, requires_grad=True), torch.ones(7, 3, requires_grad=True)
    back = torch.ones(5, 3)
    with variants.Operations() as counted:
        y = (x.t().t() @ w).tanh()
    assert counted.flops == 2 * 5 * 7 * 3 + 5 * 3
    with counted:
        y.backward(back)
    assert counted.flops == 3 * 2 * 5 * 7 * 3 + 5 * 3 + 5 * 3


def test_bench_names_presets_that_set_the_same_as_one(bench: Any) -> None:
    variants = importlib.import_module("benchmarks.variants")
    labels = list(variants.presets(variants.SIZES["micro"], "cpu"))
    assert "qwen3 = rmsnorm = sd3 = vit22b_rms" in labels
    assert {name for label in labels for name in label.split(" = ")} == VARIANTS - {"none"}


def store_run(directory: Path, own: float, wall: float) -> None:
    """A finished run of two steps that took ``own`` seconds in them and ``wall`` in all."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("seed: 0\n")
    rows = {"step": [0, 1], "step_seconds": [own / 4, own / 4], "probe_seconds": [own / 4, 0.0]}
    pd.DataFrame({**rows, "eval_seconds": [None, own / 4]}).to_parquet(directory / "scalars.parquet")
    (directory / "outcome.json").write_text(json.dumps({"status": "completed", "wall_seconds": wall}))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench")


def test_bench_compares_a_sweep_with_its_ideal(tmp_path: Path, bench: Any) -> None:
    store_run(tmp_path / "a", own=8.0, wall=8.25)
    store_run(tmp_path / "b", own=4.0, wall=4.25)
    timing = {"wall_seconds": 9.0, "workers": 2, "trained": ["a", "b"]}
    (tmp_path / "timing.json").write_text(json.dumps(timing))
    values = {f.name: f.value for f in bench.sweep_figures(tmp_path)}
    assert values == {"a run beyond its steps": 0.25, "wall time / ideal": 1.5}


@pytest.mark.parametrize("timing", [None, {"wall_seconds": 9.0, "workers": 2, "trained": ["a"]}])
def test_bench_measures_no_wall_time_of_a_sweep_trained_in_parts(tmp_path: Path, bench: Any, timing: Any) -> None:
    store_run(tmp_path / "a", own=8.0, wall=8.25)
    store_run(tmp_path / "b", own=4.0, wall=4.25)
    if timing is not None:
        (tmp_path / "timing.json").write_text(json.dumps(timing))
    assert [f.name for f in bench.sweep_figures(tmp_path)] == ["a run beyond its steps"]


def test_bench_refuses_an_unknown_section(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "stpe"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "accepted: step, probe, rate, train, variants, sweep" in capsys.readouterr().err


def test_gpu_check_covers_every_variant(tmp_path: Path) -> None:
    done = run("gpu_check.py", "--tiny", "--json", "g.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path / "g.json")
    assert content["ok"] is True
    assert len(VARIANTS) == 21
    for precision in ("fp32", "bf16"):
        checked = {c["variant"] for c in content["checks"] if c["precision"] == precision}
        assert checked >= VARIANTS
    assert all(c["ok"] for c in content["checks"])
    assert {f["section"] for f in content["figures"]} == {"step", "probe"}


def test_the_tables_of_docs_training_are_what_this_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables = importlib.import_module("training_tables")
    text = tables.DOCUMENT.read_text()
    assert tables.regenerated(text) == text, "run python scripts/training_tables.py"
    assert "| largest rate (asked for: 0.003) |" in text
    peaks = [line.split("|")[2].strip() for line in tables.schedule_table().splitlines()[2:]]
    assert set(peaks) == {"0.003"}
    assert len(peaks) == 5


def test_the_tables_of_docs_systems_are_what_the_presets_set() -> None:
    systems = importlib.import_module("systems")
    generated = importlib.import_module("generated")
    text = systems.DOCUMENT.read_text()
    assert generated.regenerated(text, systems.TABLES) == text, "run python scripts/systems.py"
    assert set(systems.SYSTEMS) == set(systems.REFERENCES)
    proof = text.partition("<!-- generated: proof -->")[2].partition("<!-- end -->")[0]
    differences = {row[1].strip(" `"): row[4:6] for row in (line.split("|") for line in proof.splitlines()[3:] if line)}
    assert set(differences) == set(systems.SYSTEMS)
    assert max(float(cell) for row in differences.values() for cell in row) <= 1e-5


@pytest.mark.parametrize(("bound", "keys", "floor"), [(4.0, 17, 0.048), (11.31, 257, 9e-7), (0.0, 17, math.log(17))])
def test_the_floor_of_entropy_is_attained_by_one_score_above_all_others(bound: float, keys: int, floor: float) -> None:
    systems = importlib.import_module("systems")
    assert systems.entropy_floor(bound, keys) == pytest.approx(floor, rel=0.05)
    scores = torch.full((keys,), -bound, dtype=torch.float64)
    scores[3] = bound
    p = scores.softmax(0)
    assert -(p * p.log()).sum().item() == pytest.approx(systems.entropy_floor(bound, keys), rel=1e-6)
    random = bound * (2 * torch.rand(1000, keys, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 1)
    p = torch.cat((random, bound * random.sign())).softmax(-1)
    assert (-(p * p.log()).sum(-1)).min() >= systems.entropy_floor(bound, keys) - 1e-12
