"""The report's data are the recorded numbers, no extreme is lost, and the page asks nobody for anything."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_plan, make_run

from qkexp.analysis.figures.style import look
from qkexp.analysis.report import Reader, data, page, write_report
from qkexp.analysis.report.diagnosis import OLD, read
from qkexp.analysis.report.run import LAYERED, MOST_EVENTS, SCALARS
from qkexp.analysis.report.series import MOST, Stretches, encode, fitting
from qkexp.config import UserError
from qkexp.record.run import write_json
from qkexp.train.events import Event
from qkexp.train.outcome import smooth


def decoded(codes: np.ndarray) -> np.ndarray:
    """What the page makes of codes."""
    values = 2.0 ** ((codes.astype(float) - 32768) / 512)
    values[codes == 0], values[codes == 1], values[codes == 65535] = np.nan, 0.0, np.inf
    return values


class Payload:
    """Reads a payload as its layout is documented."""

    def __init__(self, payload: bytes):
        raw = gzip.decompress(payload)
        (length,) = struct.unpack("<I", raw[:4])
        self.header = json.loads(raw[4 : 4 + length], parse_constant=lambda name: pytest.fail(f"JSON holds {name}"))
        self.raw = raw[4 + length :]
        assert length % 4 == 0

    def run(self, start: str) -> dict[str, Any]:
        (found,) = [run for run in self.header["runs"] if run["name"].startswith(start)]
        return found

    def scalar(self, run: dict[str, Any], name: str) -> np.ndarray:
        count = len(run["curves"]["spans"]["first"])
        values = np.frombuffer(self.raw, "<f4", len(SCALARS) * count * 2, run["at"]["scalars"])
        return values.reshape(len(SCALARS), count, 2)[SCALARS.index(name)]

    def attention(self, run: dict[str, Any], metric: str, kind: str) -> np.ndarray:
        """(layer, [head,] stretch, 2)"""
        about = run["attention"]
        heads = [about["heads"]] if kind == "each" else []
        shape = (len(LAYERED), len(about["layers"]), *heads, len(about[f"{kind}_spans"]["first"]), 2)
        codes = np.frombuffer(self.raw, "<u2", int(np.prod(shape)), run["at"][kind]).reshape(shape)
        return decoded(codes[LAYERED.index(metric)])


def payload_of(directory: Path) -> Payload:
    return Payload(Reader(directory).payload())


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 3, shape))


# ---------------------------------------------------------------- series


@pytest.mark.parametrize(("rows", "most"), [(1, 200), (7, 200), (200, 200), (201, 200), (1000, 200), (1000, 7)])
def test_every_row_is_in_one_stretch_and_its_extremes_are_kept(rows: int, most: int) -> None:
    values = noise(rows, 3)
    values[rows // 2 : rows // 2 + 2, 1] = np.nan
    stretches = Stretches.of(rows, most)
    spans = stretches.spans(np.arange(rows) * 5)
    assert len(spans["first"]) == min(rows, most)
    covered = [row for a, b in zip(spans["first"], spans["last"], strict=True) for row in range(a // 5, b // 5 + 1)]
    assert covered == list(range(rows))
    found = stretches.extremes(values)
    for place, (a, b) in enumerate(zip(spans["first"], spans["last"], strict=True)):
        part = values[a // 5 : b // 5 + 1, 0]
        assert found[0, place].tolist() == [part.min(), part.max()]
    assert np.nanmax(found[1], initial=0) == np.nanmax(values[:, 1], initial=0)


def test_a_stretch_of_absent_values_is_absent_and_one_value_among_them_is_kept() -> None:
    values = np.full((10, 1), np.nan)
    values[7] = 3.0
    found = Stretches.of(10, 2).extremes(values)[0]
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [3.0, 3.0]


def test_codes_keep_numbers_within_a_thousandth_and_tell_absent_from_zero() -> None:
    values = np.concatenate([10.0 ** np.linspace(-18, 18, 20_001), 2.0 ** np.arange(-60, 61)])
    assert np.abs(decoded(encode(values)) / values - 1).max() < 0.0007
    assert (decoded(encode(2.0 ** np.arange(-60, 61))) == 2.0 ** np.arange(-60, 61)).all()
    special = decoded(encode(np.array([np.nan, 0.0, np.inf, 1e30, 1e-30])))
    assert np.isnan(special[0])
    assert special[1:].tolist() == [0.0, np.inf, np.inf, 0.0]


def test_order_of_numbers_survives_the_codes() -> None:
    values = np.sort(noise(1000))
    assert (np.diff(encode(values).astype(int)) >= 0).all()


def test_stretches_fit_their_bytes_or_are_left_out() -> None:
    for series in (12, 144 * 5, 10_000):
        count = fitting(1000, series, 30_000)
        assert count * series * 4 <= 30_000
        assert count == 0 or count >= 6
    assert fitting(1000, 10_000, 30_000) == 0
    assert fitting(1000, 4, 10**9) == MOST
    assert fitting(3, 100, 4 * 100 * 3) == 3  # a run of three rows needs no more


# ---------------------------------------------------------------- a sweep's payload


def test_payload_holds_extremes_of_every_layer_and_head(tmp_path: Path) -> None:
    cubes = {name: noise(1000, 3, 2, seed=i) for i, name in enumerate(LAYERED)}
    loss = 1 + noise(1000, seed=9)
    loss[501] = 1e4  # a spike of one step
    make_run(tmp_path, steps=1000, attention=cubes, scalars={"loss": loss})
    found = payload_of(tmp_path)
    run = found.run("none")
    each = found.attention(run, "max_abs_logit", "each")
    layers = found.attention(run, "max_abs_logit", "layers")
    for stretch in (0, 77, 199):
        rows = slice(5 * stretch, 5 * stretch + 5)
        part = cubes["max_abs_logit"][rows].astype(np.float32)
        assert each[2, 1, stretch] == pytest.approx([part[:, 2, 1].min(), part[:, 2, 1].max()], rel=7e-4)
        largest = part.max(axis=2)  # of the heads
        assert layers[1, stretch] == pytest.approx([largest[:, 1].min(), largest[:, 1].max()], rel=7e-4)
        mean = cubes["entropy_frac"][rows].astype(np.float32).mean(axis=2)
        entropy = found.attention(run, "entropy_frac", "layers")[1, stretch]
        assert entropy == pytest.approx([mean[:, 1].min(), mean[:, 1].max()], rel=7e-4)
    raw = found.scalar(run, "loss")
    assert raw[100].tolist() == [np.float32(loss[500:505].min()), 1e4]
    assert found.scalar(run, "loss_mean")[100, 1] == np.float32(smooth(loss)[500:505].max())
    assert run["curves"]["spans"]["first"][:3] == [0, 5, 10]


def test_steps_that_are_few_are_all_there_and_probed_ones_keep_their_numbers(tmp_path: Path) -> None:
    cubes = {name: noise(10, 3, 2) for name in LAYERED}
    make_run(tmp_path, steps=50, attention=cubes, every=5)
    found = payload_of(tmp_path)
    run = found.run("none")
    spans = run["attention"]["each_spans"]
    assert spans["first"] == spans["last"] == list(range(0, 50, 5))
    values = found.attention(run, "attn_max_mean", "each")[1, 0]
    assert values[:, 0] == pytest.approx(cubes["attn_max_mean"][:, 1, 0], rel=7e-4)
    assert (values[:, 0] == values[:, 1]).all()


def test_what_was_not_measured_is_absent(tmp_path: Path) -> None:
    some = {"max_abs_logit": noise(30, 3, 2)}
    make_run(tmp_path, "none", attention=some)
    make_run(tmp_path, "layernorm")  # not probed
    make_run(tmp_path, "none", seed=1, ended=None, attention=some)
    make_run(tmp_path, "none", seed=2, ended="diverged", val_loss=None, scalars={"loss": np.ones(12)})
    make_plan(tmp_path, missing=("l2-never",))
    found = payload_of(tmp_path)
    probed = found.run("none-lr1e-02-seed0")
    assert np.isnan(found.attention(probed, "entropy_frac", "layers")).all()
    assert probed["lowest_entropy"] is None
    assert probed["max_abs_logit"] == pytest.approx(some["max_abs_logit"].max(), rel=1e-6)
    unprobed = found.run("layernorm")
    assert unprobed["attention"] is None
    assert unprobed["max_abs_logit"] is None
    assert unprobed["collapsed_layers"] is None
    alive = found.run("none-lr1e-02-seed1")
    assert alive["status"] == "interrupted"  # no outcome, and nobody holds its lock
    assert (alive["val_loss"], alive["final_loss"]) == (None, None)
    assert (len(alive["curves"]["spans"]["first"]), alive["step"]) == (30, 30)
    early = found.run("none-lr1e-02-seed2")
    assert (early["status"], early["val_loss"], early["step"], early["steps"]) == ("diverged", None, 12, 30)
    (missing,) = found.header["missing"]
    assert (missing["name"], missing["status"]) == ("l2-never", "missing")


def test_layers_with_fewer_heads_leave_cells_absent_and_a_nonfinite_loss_is_no_number(tmp_path: Path) -> None:
    cube = noise(30, 3, 2)
    cube[:, 1, 1] = np.nan
    loss = np.ones(30)
    loss[29] = np.inf
    make_run(tmp_path, attention={"max_abs_logit": cube}, scalars={"loss": loss}, ended="diverged", val_loss=None)
    found = payload_of(tmp_path)
    run = found.run("none")
    assert np.isnan(found.attention(run, "max_abs_logit", "each")[1, 1]).all()
    assert found.attention(run, "max_abs_logit", "layers")[1, :, 0] == pytest.approx(cube[:, 1, 0], rel=7e-4)
    assert run["final_loss"] is None
    assert found.scalar(run, "loss")[29].tolist() == [np.inf, np.inf]


def test_configurations_and_provenance_are_whole_and_shared_parts_stand_once(tmp_path: Path) -> None:
    make_run(tmp_path, lr=1e-2, provenance={"host": "a", "versions": {"torch": "2"}, "names": ["w"]})
    make_run(tmp_path, lr=3e-2, provenance={"host": "b", "versions": {"torch": "2"}}, keys={"optim": {"eps": 1e-6}})
    header = payload_of(tmp_path).header
    slow, fast = header["runs"]
    assert {k: slow["config"][k] for k in ("optim.lr", "optim.eps")} == {"optim.lr": 0.01, "optim.eps": 1e-8}
    assert fast["config"]["optim.eps"] == 1e-6
    assert header["common"]["config"]["model.width"] == 64
    assert not set(header["common"]["config"]) & set(slow["config"])
    assert (slow["provenance"], fast["provenance"]) == ({"host": "a"}, {"host": "b"})
    assert header["common"]["provenance"] == {"versions.torch": "2"}
    assert [axis["key"] for axis in header["axes"]] == ["optim.lr", "optim.eps"]


def test_variants_have_the_colours_of_the_figures_and_their_order(tmp_path: Path) -> None:
    for variant in ("rmsnorm_softcap", "layernorm", "none"):
        make_run(tmp_path, variant)
    shown = payload_of(tmp_path).header["variants"]
    assert [v["name"] for v in shown] == ["none", "layernorm", "rmsnorm_softcap"]
    assert [(v["label"], v["colour"]) for v in shown] == [
        (look(v["name"]).label, look(v["name"]).colour) for v in shown
    ]


def test_events_are_cut_but_counted(tmp_path: Path) -> None:
    many = tuple(Event(step, "grad_spike", value=float("inf"), threshold=1.0) for step in range(MOST_EVENTS + 50))
    make_run(tmp_path, events=many)
    run = payload_of(tmp_path).run("none")
    assert (len(run["events"]), run["events_in_all"]) == (MOST_EVENTS, MOST_EVENTS + 50)
    assert run["events"][0] == [0, "grad_spike", -1, -1, "inf", 1.0]


def test_a_hundred_large_runs_keep_within_the_bytes_that_leave_ten_megabytes() -> None:
    """Curves are what grows: of 100 runs of 12 layers and 12 heads, whose noise no compression makes small."""
    layers = fitting(1000, 12 * len(LAYERED), data.LAYER_BYTES // 100) * 12 * len(LAYERED) * 4
    heads = fitting(1000, 144 * len(LAYERED), data.HEAD_BYTES // 100) * 144 * len(LAYERED) * 4
    scalars = MOST * len(SCALARS) * 8
    assert layers > 0
    assert heads > 0
    plotly = len(page("x", b"")) * 1.0
    assert plotly + 100 * (layers + heads + scalars) * 4 / 3 < 10e6


# ---------------------------------------------------------------- claims and diagnoses


def test_claims_are_told_as_checked_and_as_old_where_a_run_ended_since(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert payload_of(tmp_path).header["claims"] == {"declared": False, "rows": None, "stale": False, "open": 0}
    (tmp_path / "expect.yaml").write_text("claims: []")
    row = {"claim": "c", "value": "inf", "bound": "< 1", "verdict": "fail", "count": 1, "detail": ""}
    write_json(tmp_path / "claims.json", {"claims": [row]})
    for path in (tmp_path / "expect.yaml", run / "outcome.json"):
        os.utime(path, (1e9, 1e9))
    make_run(tmp_path, seed=1, ended=None)
    assert payload_of(tmp_path).header["claims"] == {"declared": True, "rows": [row], "stale": False, "open": 1}
    os.utime(run / "outcome.json")
    os.utime(tmp_path / "claims.json", (1.1e9, 1.1e9))
    assert payload_of(tmp_path).header["claims"]["stale"]


def test_the_later_diagnosis_of_a_run_counts_and_one_older_than_its_end_says_so(tmp_path: Path) -> None:
    first, second = make_run(tmp_path), make_run(tmp_path, seed=1)
    onset = {"what": "max |logit| grows", "early": 12, "late": 15, "layer": 0, "head": 1, "thresholds": [4, 10, 30]}
    known = {"verdict": "attention", "evidence": ["e"], "compared": [{"text": "c"}], "onsets": {"logit": onset}}
    write_json(first / "diagnosis.json", {"runs": [{"run": first.name, **known}]})
    both = [{"run": run.name, "verdict": "healthy"} for run in (first, second)]
    write_json(tmp_path / "diagnosis.json", {"runs": [*both, "?"]})
    os.utime(tmp_path / "diagnosis.json", (1e9, 1e9))
    found = payload_of(tmp_path)
    kept = {k: onset[k] for k in ("what", "early", "late", "layer", "head")}
    expected = {"verdict": "attention", "rule": None, "evidence": ["e", "c"], "notes": [], "onsets": [kept]}
    assert found.run(first.name)["diagnosis"] == expected
    assert found.run(second.name)["diagnosis"]["verdict"] == "healthy"
    assert found.run(second.name)["diagnosis"]["notes"] == [OLD]
    os.utime(tmp_path / "diagnosis.json")
    os.utime(first / "diagnosis.json", (1e9, 1e9))
    assert payload_of(tmp_path).run(first.name)["diagnosis"]["verdict"] == "healthy"


@pytest.mark.parametrize("strange", [None, [], {}, {"verdict": 3}, {"onsets": {}}])
def test_a_diagnosis_of_another_form_is_left_out(strange: Any) -> None:
    assert read(strange) is None


@pytest.mark.parametrize("onsets", [None, 3, ["x"], {"a": 3}, {"a": {"early": float("nan"), "late": "?"}}])
def test_onsets_of_another_form_cost_nothing_else(onsets: Any) -> None:
    found = read({"verdict": "healthy", "evidence": "?", "onsets": onsets})
    assert found is not None
    assert found["evidence"] == []
    assert all(o["early"] is None and o["late"] is None for o in found["onsets"])


# ---------------------------------------------------------------- reading again


def test_only_runs_that_changed_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    make_run(tmp_path, seed=1, ended=None)
    reader, described = Reader(tmp_path), []
    original = data.describe
    monkeypatch.setattr(data, "describe", lambda run, *a: described.append(run.seed) or original(run, *a))
    first = reader.payload()
    assert sorted(described) == [0, 1]
    described.clear()
    assert reader.payload() == first
    assert described == []
    make_run(tmp_path, seed=1)  # it ended
    again = Payload(reader.payload())
    assert described == [1]
    assert {run["status"] for run in again.header["runs"]} == {"completed"}


def test_version_changes_with_rows_and_not_with_a_heartbeat(tmp_path: Path) -> None:
    run = make_run(tmp_path, ended=None)
    reader = Reader(tmp_path)
    before = reader.version()
    (run / "lock").write_text("{}")
    assert reader.version() == before
    (run / "parts" / "scalars-00000030.parquet").write_bytes(b"torn")
    assert reader.version() != before


def test_a_plan_without_runs_is_an_empty_report_and_a_folder_without_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs here"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    make_plan(tmp_path, missing=("none-a", "none-b"))
    header = payload_of(tmp_path).header
    assert (header["runs"], len(header["missing"]), header["summary"]) == ([], 2, "2 missing")
    make_run(tmp_path)  # of another plan
    assert payload_of(tmp_path).header["runs"] == []


# ---------------------------------------------------------------- the page


def test_page_fetches_nothing_and_holds_the_payload(tmp_path: Path) -> None:
    make_run(tmp_path, attention={"max_abs_logit": noise(30, 3, 2)})
    text = write_report(tmp_path).read_text()
    embedded = re.search(r'id="payload">([^<]*)<', text)
    assert embedded is not None
    assert Payload(base64.b64decode(embedded.group(1))).header["runs"][0]["variant"] == "none"
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a language, not a place
    assert "connect-src 'none'" in text
    assert not re.search(r"<(script|img|link|iframe)[^>]*\ssrc=", text)
    assert "connect-src 'self'" in page("x", b"", live=True)


def test_markup_in_names_and_reasons_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "a<img src=x onerror=alert(1)>"
    bad = "</script><script>alert(2)</script>"
    make_run(folder, ended="failed", val_loss=None, reason=bad, provenance={"command": bad})
    text = write_report(folder).read_text()
    assert "<img src=x" not in text
    assert bad not in text
    assert text.count("<script") == 3
    assert payload_of(folder).run("none")["reason"] == bad
