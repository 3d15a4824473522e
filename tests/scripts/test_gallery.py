"""The gallery: a row an experiment, from what its file says and what its sweep measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qkexp.analysis.figures import FIGURES
from qkexp.compose import options

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gallery")


def test_every_experiment_has_a_header_figures_and_a_row(gallery: Any) -> None:
    found = gallery.experiments()
    assert {e.name for e in found} == set(options("experiment"))
    rows = gallery.page({})
    for e in found:
        assert all(e.header[key] for key in gallery.REQUIRED), e.name
        assert set(e.figures) <= set(FIGURES), e.name
        assert e.header["command"].startswith("qkexp "), e.name
        assert f"## {e.name}\n" in rows


def test_page_is_that_of_the_experiments(gallery: Any) -> None:
    facts = json.loads(gallery.FACTS.read_text())
    assert gallery.PAGE.read_text() == gallery.page(facts), "run make gallery"
    missing = [
        e.name
        for e in gallery.experiments()
        if e.name in facts
        for f in e.figures
        if not gallery.picture(e, f).is_file()
    ]
    assert not missing, "measured, but without its picture"


def test_header_lines_go_on_and_what_is_missing_is_named(gallery: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    head = "# @package _global_\n# A title of\n# two lines.\n#\n#   command    qkexp reproduce x    (--quick)\n"
    rest = "#   hardware   one core\n#   time       1 s\n#   expect     this\n#              and that\n#\n# A remark.\n"
    path.write_text(head + rest)
    e = gallery.Experiment.of(path)
    assert (e.title, e.header["expect"]) == ("A title of two lines.", "this and that")
    path.write_text(head + rest.replace("#   time       1 s\n", ""))
    with pytest.raises(ValueError, match=r"x\.yaml: the header has no time"):
        gallery.Experiment.of(path)


def sweep(directory: Path, *, trained: list[str], finished: bool = True) -> Path:
    names = ["a", "b", "c"]
    (directory / "figures").mkdir(parents=True)
    Image.new("RGB", (8, 8), "white").save(directory / "figures" / "pic.png")
    runs = [{"name": n, "config": {"seed": 7 + i}} for i, n in enumerate(names)]
    (directory / "plan.json").write_text(json.dumps({"runs": runs, "written": "2026-01-02T03:04:05+0000"}))
    (directory / "timing.json").write_text(json.dumps({"wall_seconds": 61.4, "workers": 2, "trained": trained}))
    claims = [{"verdict": "pass"}, {"verdict": "pass"}, {"verdict": "not shown at this size"}]
    (directory / "claims.json").write_text(json.dumps({"claims": claims}))
    for name, status in zip(names, ("completed", "diverged", "completed" if finished else "interrupted"), strict=True):
        (directory / name).mkdir()
        (directory / name / "outcome.json").write_text(json.dumps({"status": status, "wall_seconds": 20.0}))
    return directory


def test_measured_time_is_that_of_a_launch_which_trained_every_run(gallery: Any, tmp_path: Path) -> None:
    whole = gallery.measured(sweep(tmp_path / "whole", trained=["a", "b", "c"]), ("pic",))
    assert (whole["seconds"], whole["workers"], whole["seeds"]) == (61, 2, [7, 8, 9])
    assert whole["claims"] == {"pass": 2, "not shown at this size": 1}
    assert whole["statuses"] == {"completed": 2, "diverged": 1}
    parts = gallery.measured(sweep(tmp_path / "parts", trained=["b"]), ("pic",))
    assert (parts["seconds"], parts["run_seconds"]) == (None, 60)
    assert gallery.measured(sweep(tmp_path / "alive", trained=["a"], finished=False), ("pic",)) is None
    assert gallery.measured(sweep(tmp_path / "undrawn", trained=["a"]), ("other",)) is None
    assert gallery.measured(tmp_path / "nowhere", ("pic",)) is None
