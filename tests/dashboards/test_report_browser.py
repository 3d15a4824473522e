"""The report in a browser: it draws, is used by mouse and keyboard, fits its window, and asks nobody for anything."""

from __future__ import annotations

import csv
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium
from made_runs import make_plan, make_run

from qkexp.analysis import serve
from qkexp.analysis.report import write_report
from qkexp.analysis.report.run import LAYERED
from qkexp.analysis.serve import Server
from qkexp.record.run import write_json
from qkexp.train.events import Event

BAD = "</script><img src=x onerror=\"document.title='broken in'\">"
STEPS = 400
KINDS = tuple(f"kind_{i}" for i in range(12))
FAULTS, CONTRAST, TRACES, NAME = (
    Path(__file__).with_name(f"{name}.js").read_text() for name in ("faults", "contrast", "traces", "name")
)
NO_FAULTS = {"outside": [], "covered": [], "cut": [], "loose": [], "wide": False}
CHARTS = 9  # loss against rate, and eight panels; maps come on top


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def cubes(seed: int, rows: int = STEPS, collapse: bool = False) -> dict[str, np.ndarray]:
    """Attention metrics (rows, 3 layers, 2 heads): those of head 1 are a tenth larger, and grow with the layer."""
    step = np.arange(rows)[:, None, None]
    place = (1 + np.arange(3))[None, :, None] * (1 + 0.1 * np.arange(2))[None, None, :]
    out = dict.fromkeys(LAYERED, (2 + seed + step / 100) * place)
    out["max_abs_logit"] = np.exp(step / (40 if collapse else 400)) * place
    out["max_abs_logit"][min(250, rows - 1), 1, 1] = 5e4  # one step, one head
    for name in ("entropy_frac", "attn_max_mean"):
        out[name] = 0.9 / (place * (1 + step / (20 if collapse else 2000)))
    return out


def made_sweep(folder: Path) -> None:
    events = (Event(120, "logit_runaway", 0, 1, 300.0, 90.0), Event(200, "layer_collapse", 0, -1, 0.0, 0.05))
    for variant in ("none", "layernorm", "rmsnorm_softcap"):
        for lr in (1e-2, 1e-1):
            for seed in range(3):
                if (variant, lr, seed) in (("none", 1e-1, 1), ("none", 1e-1, 2), ("layernorm", 1e-1, 2)):
                    continue
                hot = variant == "none" and lr == 1e-1
                make_run(
                    folder, variant, lr=lr, seed=seed, steps=STEPS, attention=cubes(seed, collapse=hot),
                    scalars={"loss": np.linspace(2.3, 0.2 + 0.1 * seed, STEPS)}, events=events if hot else (),
                    val_loss=0.3 + 0.1 * seed + (1.5 if hot else 0.0), ended="diverged" if hot else "completed",
                    provenance={"host": f"node{seed}", "code": {"commit": "c0ffee"}},
                )  # fmt: skip
    short = {"loss": np.linspace(2.3, 90.0, 150)}
    hot = {"lr": 1e-1, "steps": STEPS, "attention": cubes(1, 150, collapse=True), "scalars": short, "val_loss": None}
    make_run(folder, "none", seed=1, ended="diverged", reason="nonfinite: loss", **hot)  # type: ignore[arg-type]
    make_run(folder, "none", seed=2, ended="failed", reason=BAD, **hot)  # type: ignore[arg-type]
    kinds = tuple(Event(10 * i, kind) for i, kind in enumerate(KINDS))
    make_run(folder, "layernorm", lr=1e-1, seed=2, steps=STEPS, ended=None, scalars=short, events=kinds)
    make_plan(folder, missing=("rmsnorm-never-begun",), steps=STEPS)
    rows = [
        ("it falls", 0.5, "< 1", "pass"),
        (BAD, "inf", "< 1", "fail"),
        ("in all", 2.0, "> 3", "not shown at this size"),
    ]
    named = [dict(zip(("claim", "value", "bound", "verdict"), row, strict=True), count=3, detail="") for row in rows]
    (folder / "expect.yaml").write_text("claims: []\n")
    write_json(folder / "claims.json", {"claims": named})
    onset = {"what": "max |logit| grows", "early": 60, "late": 140, "layer": 0, "head": 1}
    (hot_run,) = folder.glob("none-lr1e-01-seed0-*")
    found = {"verdict": "attention", "rule": "r", "evidence": ["max |logit| grew"], "onsets": {"logit": onset}}
    write_json(folder / "diagnosis.json", {"runs": [{"run": hot_run.name, **found}]})


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    folder = tmp_path_factory.mktemp("report") / "swept"
    made_sweep(folder)
    write_report(folder)
    return folder


class Page:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1400, scheme: str = "light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.said.append(f"error: {e}"))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)

    def names(self) -> list[str]:
        return self.page.locator("#runs tbody td:first-child").all_inner_texts()

    def column(self, title: str) -> list[str]:
        titles = [re.sub(r" [▲▼]$", "", t) for t in self.page.locator("#runs thead th").all_inner_texts()]
        return self.page.locator(f"#runs tbody td:nth-child({titles.index(title) + 1})").all_inner_texts()

    def chart(self, title: str) -> Any:
        return self.page.locator(
            "figure.chart", has=self.page.locator("h3", has_text=re.compile(f"^{re.escape(title)}"))
        )

    def traces(self, title: str) -> list[dict[str, Any]]:
        """Of a chart: what Plotly was given, run names by line."""
        return self.chart(title).locator(".plot").evaluate(TRACES)

    def curve(self, title: str, name: str) -> dict[str, Any]:
        (found,) = [t for t in self.traces(title) if t["name"].startswith(name)]
        return found

    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.textContent")

    def choose(self, label: str, text: str) -> None:
        self.page.get_by_label(label, exact=True).first.select_option(label=text)


@pytest.fixture
def open_page(browser: Any, sweep: Path) -> Iterator[Callable[..., Page]]:
    opened: list[Page] = []

    def open_it(fragment: str = "", **how: Any) -> Page:
        opened.append(Page(browser, f"file://{sweep}/report.html{fragment}", **how))
        return opened[-1]

    yield open_it
    for each in opened:
        each.context.close()


def run_name(sweep: Path, start: str) -> str:
    (found,) = sweep.glob(f"{start}-*")
    return found.name


# ---------------------------------------------------------------- quiet, and drawn


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_silent_and_asks_nobody(open_page: Callable[..., Page], sweep: Path, scheme: str) -> None:
    page = open_page(scheme=scheme)
    page.page.get_by_role("link", name=run_name(sweep, "none-lr1e-01-seed0")).click()
    page.page.wait_for_selector("text=what happened when")
    page.page.go_back()
    assert page.said == []
    assert [url.split("#")[0] for url in page.asked] == [f"file://{sweep}/report.html"]
    assert page.page.title() == "swept · qkexp"


def test_every_chart_is_drawn(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page()
    figures = page.page.locator("figure.chart")
    maps = 2 * 3  # two for each variant
    assert figures.count() == CHARTS + maps
    for i in range(figures.count()):
        figure = figures.nth(i)
        assert figure.locator(".plot .main-svg").count() > 0
        assert figure.locator(".scatterlayer path.js-line, .scatterlayer .point, .heatmaplayer image").count() > 0, i
        label = figure.locator(".plot").get_attribute("aria-label")
        assert re.search(r"\d", label), label
    page.page.goto(f"file://{sweep}/report.html#run={run_name(sweep, 'none-lr1e-01-seed0')}")
    page.page.wait_for_selector("text=what happened when")
    assert page.page.locator("figure.chart:visible").count() == 1 + 8 + 2
    assert page.page.locator("figure.chart.empty:visible").count() == 0


def test_curves_are_the_recorded_numbers_with_their_extremes(open_page: Callable[..., Page]) -> None:
    page = open_page()
    for layer in range(3):
        page.choose("layer", f"{layer}{['', '', ' (last)'][layer]}" if layer else "0 (first)")
        for head, text in enumerate(("head 0", "head 1")):
            page.choose("head", text)
            drawn = page.curve(f"max |logit|, layer {layer}, head {head}", "rmsnorm_softcap-lr1e-01-seed0")
            expected = cubes(0)["max_abs_logit"][:, layer, head]
            assert max(drawn["y"]) == pytest.approx(expected.max(), rel=1e-3)
            assert min(drawn["y"]) == pytest.approx(expected.min(), rel=1e-3)
            assert drawn["y"][-1] == pytest.approx(expected[-1], rel=1e-3)
            assert 0 <= drawn["x"][0] < 1
            assert drawn["x"][-1] == pytest.approx(STEPS - 1, abs=1)
    page.choose("head", "the layer's value")
    page.choose("layer", "1")
    peak = page.curve("max |logit|, layer 1", "rmsnorm_softcap-lr1e-01-seed0")
    assert max(peak["y"]) == pytest.approx(5e4, rel=1e-3)  # of one head at one step of 400
    assert peak["x"][peak["y"].index(max(peak["y"]))] == pytest.approx(250, abs=1)
    entropy = page.curve("attention entropy, layer 1", "none-lr1e-01-seed0")
    expected = cubes(0, collapse=True)["entropy_frac"][:, 1].mean(axis=1)
    assert [entropy["y"][0], entropy["y"][-1]] == pytest.approx([expected[0], expected[-1]], rel=1e-3)


def test_maps_have_a_row_a_layer_and_the_extreme_of_each_stretch(open_page: Callable[..., Page]) -> None:
    page = open_page()
    z = page.chart("no norm: entropy").locator(".plot").evaluate("e => e.data[0].z")
    expected = cubes(0, collapse=True)["entropy_frac"].mean(axis=2)
    assert np.array(z).shape[0] == 3
    assert np.array(z)[:, -1] == pytest.approx(expected[-1], rel=1e-3)
    z = page.chart("RMSNorm + soft-cap 50: max |logit|").locator(".plot").evaluate("e => e.data[0].z")
    assert np.nanmax(np.array(z)[1]) == pytest.approx(np.log10(5e4), rel=1e-3)


def test_how_runs_ended_is_shown(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page()
    marks = [t["symbol"] for t in page.traces("training loss") if t["mode"] == "markers"]
    assert sorted(marks) == ["circle-open", "circle-open", "x-thin-open"]  # failed, interrupted; not finite
    rate = page.traces("final validation loss")
    symbols = [s for t in rate if t["mode"] == "markers" for s in t["symbol"]]
    assert symbols.count("x-thin-open") == 1
    assert symbols.count("cross-thin-open") == 1
    assert symbols.count("triangle-down-open") == 1
    statuses = dict(zip(page.names(), page.column("status"), strict=True))
    assert statuses["rmsnorm-never-begun"] == "missing"
    assert statuses[run_name(sweep, "layernorm-lr1e-01-seed2")] == "interrupted"
    val = dict(zip(page.names(), page.column("val. loss"), strict=True))
    assert val[run_name(sweep, "layernorm-lr1e-01-seed2")] == "–"


def test_claims_stand_on_top_with_their_verdicts(open_page: Callable[..., Page]) -> None:
    page = open_page()
    first = page.page.locator("section").first
    assert "1 of 3 claims hold, 1 do not; 1 could not be judged" in first.inner_text()
    rows = [r.split("\t")[:4] for r in first.locator("tbody tr").all_inner_texts()]
    assert rows[1] == [BAD, "inf", "< 1", "fail"]


def test_markup_is_shown_and_not_run(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page()
    assert BAD in page.column("reason")
    page.page.goto(f"file://{sweep}/report.html#run={run_name(sweep, 'none-lr1e-01-seed2')}")
    page.page.wait_for_selector("text=what happened when")
    assert BAD in page.page.locator("dl").inner_text()
    page.page.goto(f"file://{sweep}/report.html#run=%3Cimg%20src=x%20onerror=alert(1)%3E")
    page.page.wait_for_selector("text=no such run")
    assert page.page.locator("img").count() == 0
    assert page.page.title() == "swept · qkexp"
    assert page.said == []


# ---------------------------------------------------------------- choices


def test_variants_rates_and_seeds_choose_the_lines(open_page: Callable[..., Page]) -> None:
    page = open_page()

    def lines() -> set[str]:
        return {re.sub(r"-[0-9a-f]{6}$", "", t["name"]) for t in page.traces("gradient norm") if t["mode"] != "markers"}

    assert len(lines()) == 9
    assert all("-lr1e-01-" in name for name in lines())  # the highest rate is what is seen first
    page.page.get_by_label("LayerNorm", exact=True).click()
    assert len(lines()) == 6
    page.choose("seed", "1")
    assert lines() == {"none-lr1e-01-seed1", "rmsnorm_softcap-lr1e-01-seed1"}
    page.choose("optim.lr", "0.01")
    assert lines() == {"none-lr1e-02-seed1", "rmsnorm_softcap-lr1e-02-seed1"}
    assert not any(t == "LayerNorm" for t in page.page.locator("figure.chart h3").all_inner_texts())


def test_choices_work_by_keyboard(open_page: Callable[..., Page]) -> None:
    page = open_page()
    before = len(page.traces("gradient norm"))
    page.page.get_by_label("no norm", exact=True).focus()
    page.page.keyboard.press("Space")
    assert len(page.traces("gradient norm")) < before
    page.page.get_by_label("layer", exact=True).first.focus()
    page.page.keyboard.press("ArrowDown")
    assert page.chart("attn max, layer 1").count() == 1
    page.page.keyboard.press("Tab")
    page.page.keyboard.press("ArrowDown")
    assert page.chart("attn max, layer 1, head 0").count() == 1
    outline = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_tab_goes_through_the_page_in_order(open_page: Callable[..., Page]) -> None:
    page = open_page()
    seen = []
    for _ in range(14):
        page.page.keyboard.press("Tab")
        seen.append(page.page.evaluate(NAME))
    assert seen[:3] == ["Skip to content", "theme", "Claims"]
    wanted = ["no norm", "LayerNorm", "RMSNorm + soft-cap 50", "optim.lr", "seed", "layer", "head", "loss and gradient"]
    assert [s for s in seen if s in wanted] == wanted
    assert seen[11:13] == ["Numbers of final validation loss against the learning rate",
                           "CSV of final validation loss against the learning rate"]  # fmt: skip


# ---------------------------------------------------------------- runs


def test_sorting_puts_absent_values_last_both_ways(open_page: Callable[..., Page]) -> None:
    page = open_page()
    header = page.page.locator("#runs thead th", has_text="val. loss")
    header.get_by_role("button").click()
    up = page.column("val. loss")
    assert header.get_attribute("aria-sort") == "ascending"
    header.get_by_role("button").focus()
    page.page.keyboard.press("Enter")
    down = page.column("val. loss")
    assert header.get_attribute("aria-sort") == "descending"
    assert page.focused().startswith("val. loss")  # the keyboard stays where it was
    for shown, order in ((up, sorted), (down, lambda v: sorted(v, reverse=True))):
        numbers = [float(v) for v in shown if v != "–"]
        assert numbers == order(numbers)
        assert shown[len(numbers) :] == ["–"] * 4
    assert (up[0], down[0]) == ("0.3", "1.8")


def test_words_and_status_filter(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page()
    assert page.page.locator("p[role=status]").last.inner_text() == "19 of 19 runs"
    page.page.get_by_label("filter by words").fill("NONE seed1")
    assert page.names() == [run_name(sweep, "none-lr1e-01-seed1"), run_name(sweep, "none-lr1e-02-seed1")]
    page.choose("status", "diverged")
    assert page.names() == [run_name(sweep, "none-lr1e-01-seed1")]
    assert page.page.locator("p[role=status]").last.inner_text() == "1 of 19 runs"
    page.page.get_by_label("filter by words").fill("no such thing")
    assert page.names() == []


def test_a_run_is_opened_and_left_by_keyboard(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page()
    page.page.get_by_label("filter by words").fill("none-lr1e-01")
    first, second = run_name(sweep, "none-lr1e-01-seed0"), run_name(sweep, "none-lr1e-01-seed1")
    page.page.get_by_role("link", name=first).focus()
    page.page.keyboard.press("ArrowDown")
    assert page.focused() == second
    page.page.keyboard.press("ArrowUp")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("text=what happened when")
    assert page.focused() == first  # the heading
    text = page.page.locator("main").inner_text()
    for part in ("diverged", "attention", "max |logit| grew", "0.1, 0", "400 of 400"):
        assert part in text
    page.page.keyboard.press("Tab")  # from the heading onwards
    page.page.keyboard.press("Shift+Tab")
    page.page.get_by_role("link", name="all runs").focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#runs")
    assert page.page.get_by_label("filter by words").input_value() == "none-lr1e-01"


def test_timeline_shows_onsets_and_events(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page(f"#run={run_name(sweep, 'none-lr1e-01-seed0')}")
    chart = page.chart("what happened when")
    assert chart.locator(".plot").get_attribute("aria-label") == (
        "what happened when: max |logit| grows: steps 60 to 140, layer 0, head 1; "
        "logit_runaway: 1, first step 120, layer 0, head 1: 300 (threshold 90); "
        "layer_collapse: 1, first step 200, layer 0: 0 (threshold 0.05)"
    )
    rows = chart.locator(".plot").evaluate("e => e.data.map(t => [t.x, t.y[0]])")
    assert rows == [[[60, 140], "max |logit| grows"], [[120], "event: logit_runaway"], [[200], "event: layer_collapse"]]
    page.page.goto(f"file://{sweep}/report.html#run={run_name(sweep, 'layernorm-lr1e-02-seed0')}")
    page.page.wait_for_selector("text=No event.")
    assert page.page.evaluate(FAULTS) == NO_FAULTS  # the timeline is of another height now


def test_what_differs_from_another_run(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page(f"#run={run_name(sweep, 'none-lr1e-01-seed0')}")
    other = run_name(sweep, "layernorm-lr1e-02-seed1")
    page.choose("other run", other)
    tables = page.page.locator("section[aria-label='Compared with another run'] table").all_inner_texts()
    keys = [row.split("\t") for row in tables[0].splitlines()[1:]]
    assert keys == [
        ["seed", "0", "1"], ["model.seed", "0", "1"], ["attention.norm", "none", "rms"],
        ["attention.center", "false", "true"], ["attention.gain", "none", "shared"], ["data.seed", "0", "1"],
        ["optim.lr", "0.1", "0.01"],
    ]  # fmt: skip
    assert [row.split("\t") for row in tables[1].splitlines()[1:]] == [["host", "node0", "node1"]]
    assert len([t for t in page.traces("training loss") if t["mode"] != "markers"]) == 2
    page.choose("other run", run_name(sweep, "none-lr1e-01-seed1"))
    assert "They differ in length" in page.page.locator("main").inner_text()


def test_every_row_of_the_timeline_has_its_name(open_page: Callable[..., Page], sweep: Path) -> None:
    page = open_page(f"#run={run_name(sweep, 'layernorm-lr1e-01-seed2')}")
    names = page.chart("what happened when").locator(".ytick text").all_text_contents()
    assert sorted(names) == sorted(f"event: {kind}" for kind in KINDS)


# ---------------------------------------------------------------- numbers


def test_every_chart_has_its_numbers_and_its_file(open_page: Callable[..., Page], tmp_path: Path, sweep: Path) -> None:
    page = open_page()
    chart = page.chart("max |logit|, layer 0")
    chart.locator("summary").focus()
    page.page.keyboard.press("Enter")
    table = chart.locator("table")
    table.wait_for()
    assert table.locator("tbody tr").count() == 200
    assert "The first 200 of" in chart.inner_text()
    with page.page.expect_download() as waiting:
        chart.get_by_role("button", name="CSV").click()
    waiting.value.save_as(tmp_path / "chart.csv")
    assert waiting.value.suggested_filename == "max_abs_logit.csv"
    rows = list(csv.DictReader((tmp_path / "chart.csv").open()))
    assert set(rows[0]) == {
        "run", "variant", "lr", "seed", "layer", "head", "first_step", "last_step", "smallest", "largest",
    }  # fmt: skip
    name = run_name(sweep, "rmsnorm_softcap-lr1e-01-seed0")
    own = [row for row in rows if row["run"] == name]
    expected = cubes(0)["max_abs_logit"][:, 0].max(axis=1)
    assert (own[0]["first_step"], own[-1]["last_step"]) == ("0", str(STEPS - 1))
    for row in own[:: len(own) // 7]:
        part = expected[int(row["first_step"]) : int(row["last_step"]) + 1]
        assert [float(row["smallest"]), float(row["largest"])] == pytest.approx([part.min(), part.max()], rel=1e-3)
    assert page.page.locator("figure.chart button", has_text="CSV").count() == page.page.locator("figure.chart").count()


def test_the_table_of_runs_is_a_file_too(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    page.page.get_by_label("filter by words").fill("failed")
    with page.page.expect_download() as waiting:
        page.page.get_by_role("button", name="CSV of runs").click()
    waiting.value.save_as(tmp_path / "runs.csv")
    (row,) = csv.DictReader((tmp_path / "runs.csv").open())
    assert (row["status"], row["reason"], row["val. loss"], row["seed"]) == ("failed", BAD, "", "2")


# ---------------------------------------------------------------- looks


@pytest.mark.parametrize("start", ["", "none-lr1e-01-seed0", "none-lr1e-01-seed2"])
def test_nothing_overlaps_and_nothing_is_cut(open_page: Callable[..., Page], sweep: Path, start: str) -> None:
    page = open_page(f"#run={run_name(sweep, start)}" if start else "")
    if start:
        page.choose("other run", run_name(sweep, "layernorm-lr1e-02-seed1"))
    page.chart("max |logit|").first.locator("summary").click()
    for width in (1400, 800, 400):
        page.page.set_viewport_size({"width": width, "height": 900})
        for _ in range(20):  # charts follow the window a moment later
            page.page.wait_for_timeout(250)
            if (faults := page.page.evaluate(FAULTS)) == NO_FAULTS:
                break
        assert faults == NO_FAULTS, width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(open_page: Callable[..., Page], sweep: Path, scheme: str) -> None:
    page = open_page(scheme=scheme)
    paper = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    assert page.page.evaluate(CONTRAST) == []
    page.page.goto(f"file://{sweep}/report.html#run={run_name(sweep, 'none-lr1e-01-seed0')}")
    page.page.wait_for_selector("text=what happened when")
    assert page.page.evaluate(CONTRAST) == []


def test_the_switch_overrules_the_system_and_charts_follow(open_page: Callable[..., Page]) -> None:
    page = open_page(scheme="light")
    page.choose("theme", "dark")
    assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    fill = "document.querySelector('.plot .main-svg').style.background"
    assert page.page.evaluate(fill) == "rgb(20, 23, 28)"
    black = page.page.locator(".plot").nth(1).evaluate("e => e.data.map(t => t.line && t.line.color)")
    assert "#000000" not in black  # RMSNorm with a cap: black on white, and lighter here
    page.choose("theme", "light")
    assert page.page.evaluate(fill) == "rgb(255, 255, 255)"
    assert "#000000" in page.page.locator(".plot").nth(1).evaluate("e => e.data.map(t => t.line && t.line.color)")


# ---------------------------------------------------------------- served


def test_served_page_follows_the_sweep_and_keeps_what_was_chosen(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "REST", 0.0)
    folder = tmp_path / "live"
    folder.mkdir()
    make_plan(folder, missing=("none-a",))
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            page = Page(browser, server.url)
            assert page.column("status") == ["missing"]
            (folder / "plan.json").unlink()
            for seed in (0, 1):
                make_run(folder, seed=seed, attention=cubes(seed, 30), ended=None)
            page.page.get_by_text("2 of 2 runs").wait_for(timeout=20_000)
            page.choose("layer", "1")
            page.choose("head", "head 1")
            page.choose("seed", "1")
            page.page.get_by_label("filter by words").fill("seed1")
            page.page.get_by_label("head", exact=True).first.focus()
            make_run(folder, seed=1, attention=cubes(1, 30))  # it ends
            make_run(folder, seed=2, attention=cubes(2, 30))
            page.page.get_by_text("1 of 3 runs").wait_for(timeout=20_000)
            assert page.column("status") == ["completed"]
            assert page.page.get_by_label("head", exact=True).first.evaluate("e => e === document.activeElement")
            assert len(page.traces("max |logit|, layer 1, head 1")) == 1
            assert page.said == []
            assert {re.sub(r"^" + server.url, "/", url) for url in page.asked} <= {"/", "/version", "/data"}
            page.context.close()
        finally:
            server.shutdown()
            thread.join()


def test_a_missing_browser_is_named_and_fails_only_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for required, outcome in ((False, pytest.skip.Exception), (True, pytest.fail.Exception)):
        monkeypatch.setattr("browser.REQUIRED", required)
        with pytest.raises(outcome, match=r"Chromium|playwright"), chromium():
            pass
